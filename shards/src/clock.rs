//! Coarse time of one shard: a clock that one periodic sweep moves, the deadlines it enforces, and the text of
//! the `Date` header. It owns every timeout of the dataplane and never arms a timer per operation.
//!
//! A [`Slot`] belongs to one waiting place (a connection's task, its writes, an upstream connection). The sweep
//! walks all slots of the shard a few times a second; a passed deadline wakes the task, whose innermost wait
//! then sees it. The same walk carries drain and stop to every task.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant, SystemTime};

/// Where too many heads are unfinished, one that has been so for this long is given up.
const HEAD_HURRIED_MS: u64 = 2_000;

/// Why a wait ended before its future.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fired {
    Expired,
    /// The shard is draining and this slot said it was idle.
    Drained,
    /// The shard ends.
    Stopped,
}

struct Inner {
    /// Milliseconds of the shard's clock; 0 = none.
    deadline_ms: Cell<u64>,
    expired: Cell<bool>,
    idle: Cell<bool>,
    /// Since when this slot has waited for the rest of a request head; 0 = it does not.
    head_since_ms: Cell<u64>,
    /// Place in the shard's list.
    index: Cell<usize>,
    waker: RefCell<Option<Waker>>,
}

struct Clock {
    started: Instant,
    now_ms: Cell<u64>,
    period_ms: Cell<u64>,
    draining: Cell<bool>,
    stopping: Cell<bool>,
    /// Slots that wait for the rest of a head, and how many may do so at leisure.
    heads_open: Cell<usize>,
    heads_open_max: Cell<usize>,
    slots: RefCell<Vec<Rc<Inner>>>,
    /// Seconds since the epoch and the text for them.
    date: Cell<(u64, [u8; 29])>,
    date_checked_ms: Cell<u64>,
}

thread_local! {
    static CLOCK: Clock = Clock {
        started: Instant::now(),
        now_ms: Cell::new(1),
        period_ms: Cell::new(500),
        draining: Cell::new(false),
        stopping: Cell::new(false),
        heads_open: Cell::new(0),
        heads_open_max: Cell::new(usize::MAX),
        slots: RefCell::new(Vec::new()),
        date: Cell::new((0, [0; 29])),
        date_checked_ms: Cell::new(0),
    };
}

/// Sets how far the clock may be behind; called once when the shard starts.
pub(crate) fn set_period(period: Duration) {
    CLOCK.with(|clock| clock.period_ms.set(period.as_millis() as u64));
}

/// Sets how many request heads may be unfinished before those that are take too long; called once when the shard starts.
pub(crate) fn set_heads_open_max(most: usize) {
    CLOCK.with(|clock| clock.heads_open_max.set(most));
}

/// Milliseconds since the shard started, as of the last sweep; never 0.
pub(crate) fn now_ms() -> u64 {
    CLOCK.with(|clock| clock.now_ms.get())
}

/// Moves the clock and wakes whoever is late.
pub(crate) fn sweep() {
    CLOCK.with(|clock| {
        let now = clock.started.elapsed().as_millis() as u64 + 1;
        clock.now_ms.set(now);
        let mut too_many = clock.heads_open.get().saturating_sub(clock.heads_open_max.get());
        wake_where(clock, |slot| {
            let since = slot.head_since_ms.get();
            let hurried = too_many > 0 && since != 0 && now.saturating_sub(since) >= HEAD_HURRIED_MS;
            too_many -= usize::from(hurried);
            let late = hurried || (slot.deadline_ms.get() != 0 && slot.deadline_ms.get() <= now);
            if late {
                slot.deadline_ms.set(0);
                slot.expired.set(true);
            }
            late
        });
    });
}

/// From now on slots that are idle end with [`Fired::Drained`].
pub(crate) fn drain() {
    CLOCK.with(|clock| {
        clock.draining.set(true);
        wake_where(clock, |slot| slot.idle.get());
    });
}

/// From now on every wait ends with [`Fired::Stopped`].
pub(crate) fn stop() {
    CLOCK.with(|clock| {
        clock.stopping.set(true);
        wake_where(clock, |_| true);
    });
}

/// Wakers are called outside the borrow: what they wake may drop or create slots.
fn wake_where(clock: &Clock, mut chosen: impl FnMut(&Inner) -> bool) {
    let mut wakers = Vec::new();
    for slot in clock.slots.borrow().iter() {
        if chosen(slot) {
            wakers.extend(slot.waker.borrow().clone());
        }
    }
    for waker in wakers {
        waker.wake();
    }
}

/// One waiting place of a task.
pub(crate) struct Slot(Rc<Inner>);

impl Slot {
    pub(crate) fn new() -> Slot {
        CLOCK.with(|clock| {
            let mut slots = clock.slots.borrow_mut();
            let inner = Rc::new(Inner {
                deadline_ms: Cell::new(0),
                expired: Cell::new(false),
                idle: Cell::new(false),
                head_since_ms: Cell::new(0),
                index: Cell::new(slots.len()),
                waker: RefCell::new(None),
            });
            slots.push(inner.clone());
            Slot(inner)
        })
    }

    /// Sets the deadline. One period is added because the clock may be that far behind: never too early.
    pub(crate) fn arm(&self, after: Duration) {
        CLOCK.with(|clock| {
            let after_ms = u64::try_from(after.as_millis()).unwrap_or(u64::MAX);
            let deadline = clock.now_ms.get().saturating_add(clock.period_ms.get()).saturating_add(after_ms);
            self.0.deadline_ms.set(deadline);
        });
        self.0.expired.set(false);
    }

    pub(crate) fn disarm(&self) {
        self.0.deadline_ms.set(0);
        self.0.expired.set(false);
    }

    /// An idle slot may be drained.
    pub(crate) fn set_idle(&self, idle: bool) {
        self.0.idle.set(idle);
    }

    /// The slot waits for the rest of a request head, from now on if it did not before.
    pub(crate) fn head_is_open(&self) {
        if self.0.head_since_ms.get() == 0 {
            self.0.head_since_ms.set(now_ms());
            CLOCK.with(|clock| clock.heads_open.set(clock.heads_open.get() + 1));
        }
    }

    pub(crate) fn head_is_whole(&self) {
        if self.0.head_since_ms.replace(0) != 0 {
            CLOCK.with(|clock| clock.heads_open.set(clock.heads_open.get() - 1));
        }
    }

    pub(crate) fn poll_fired(&self, cx: &mut Context<'_>) -> Poll<Fired> {
        let (draining, stopping) = CLOCK.with(|clock| (clock.draining.get(), clock.stopping.get()));
        if stopping {
            return Poll::Ready(Fired::Stopped);
        }
        if self.0.expired.get() {
            return Poll::Ready(Fired::Expired);
        }
        if draining && self.0.idle.get() {
            return Poll::Ready(Fired::Drained);
        }
        let mut stored = self.0.waker.borrow_mut();
        if !stored.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
            *stored = Some(cx.waker().clone());
        }
        Poll::Pending
    }

    /// Runs `future` until it is done, or this slot fires. `None` = no deadline. It is taken pinned, because a future
    /// that is moved into another one is stored twice there.
    pub(crate) async fn within<F: Future>(
        &self,
        limit: Option<Duration>,
        mut future: Pin<&mut F>,
    ) -> Result<F::Output, Fired> {
        match limit {
            Some(limit) => self.arm(limit),
            None => self.disarm(),
        }
        let outcome = std::future::poll_fn(|cx| match future.as_mut().poll(cx) {
            Poll::Ready(output) => Poll::Ready(Ok(output)),
            Poll::Pending => self.poll_fired(cx).map(Err),
        })
        .await;
        self.disarm();
        outcome
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        // `try_with`: a slot may outlive the thread's clock when a shard is torn down.
        let _ = CLOCK.try_with(|clock| {
            clock.heads_open.set(clock.heads_open.get() - usize::from(self.0.head_since_ms.get() != 0));
            let mut slots = clock.slots.borrow_mut();
            let index = self.0.index.get();
            assert!(Rc::ptr_eq(&slots[index], &self.0), "a slot knows its place");
            slots.swap_remove(index);
            if let Some(moved) = slots.get(index) {
                moved.index.set(index);
            }
        });
    }
}

/// Appends the current date in the form of RFC 9110, at most one period old.
pub(crate) fn write_date(out: &mut Vec<u8>) {
    CLOCK.with(|clock| {
        let now_ms = clock.now_ms.get();
        if clock.date_checked_ms.get() != now_ms {
            clock.date_checked_ms.set(now_ms);
            let now = SystemTime::now();
            let seconds = now.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
            if clock.date.get().0 != seconds {
                let mut text = [b' '; 29];
                for (to, from) in text.iter_mut().zip(httpdate::fmt_http_date(now).bytes()) {
                    *to = from;
                }
                clock.date.set((seconds, text));
            }
        }
        out.extend_from_slice(&clock.date.get().1);
    });
}
