//! Owns waiting between tasks of one thread: a latch that opens once for all, a queue with one reader, permits handed
//! out in order of asking. Never crosses threads.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

/// Opens once; everyone who waits, now or later, goes on.
#[derive(Clone, Default)]
pub struct Latch(Rc<LatchState>);

#[derive(Default)]
struct LatchState {
    open: Cell<bool>,
    next: Cell<u64>,
    waiting: RefCell<BTreeMap<u64, Waker>>,
}

impl Latch {
    pub fn open(&self) {
        self.0.open.set(true);
        let waiting = std::mem::take(&mut *self.0.waiting.borrow_mut());
        waiting.into_values().for_each(Waker::wake);
    }

    pub fn is_open(&self) -> bool {
        self.0.open.get()
    }

    pub fn wait(&self) -> LatchWait {
        let key = self.0.next.get();
        self.0.next.set(key + 1);
        LatchWait { latch: self.clone(), key }
    }
}

/// Resolves when the latch is open; forgets its place when dropped.
pub struct LatchWait {
    latch: Latch,
    key: u64,
}

impl Future for LatchWait {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if self.latch.is_open() {
            return Poll::Ready(());
        }
        self.latch.0.waiting.borrow_mut().insert(self.key, context.waker().clone());
        Poll::Pending
    }
}

impl Drop for LatchWait {
    fn drop(&mut self) {
        self.latch.0.waiting.borrow_mut().remove(&self.key);
    }
}

/// A queue within one thread, many writers, one reader. Its length is bounded by what its writers may send.
pub struct Queue<T>(Rc<QueueState<T>>);

struct QueueState<T> {
    items: RefCell<VecDeque<T>>,
    waker: Cell<Option<Waker>>,
}

impl<T> Clone for Queue<T> {
    fn clone(&self) -> Queue<T> {
        Queue(self.0.clone())
    }
}

impl<T> Default for Queue<T> {
    fn default() -> Queue<T> {
        Queue(Rc::new(QueueState { items: RefCell::default(), waker: Cell::new(None) }))
    }
}

impl<T> Queue<T> {
    pub fn push(&self, item: T) {
        self.0.items.borrow_mut().push_back(item);
        if let Some(waker) = self.0.waker.take() {
            waker.wake();
        }
    }

    pub fn try_next(&self) -> Option<T> {
        self.0.items.borrow_mut().pop_front()
    }

    /// Waits for an item; nothing is lost if the future is dropped.
    pub async fn next(&self) -> T {
        poll_fn(|context| match self.try_next() {
            Some(item) => Poll::Ready(item),
            None => {
                self.0.waker.set(Some(context.waker().clone()));
                Poll::Pending
            }
        })
        .await
    }
}

/// A number of permits; who asked first gets the next free one.
#[derive(Clone, Default)]
pub struct Permits(Rc<PermitsState>);

#[derive(Default)]
struct PermitsState {
    free: Cell<usize>,
    next: Cell<u64>,
    waiting: RefCell<BTreeMap<u64, Waker>>,
}

impl Permits {
    pub fn new(free: usize) -> Permits {
        let permits = Permits::default();
        permits.0.free.set(free);
        permits
    }

    pub fn release(&self) {
        self.0.free.set(self.0.free.get() + 1);
        self.wake_first();
    }

    /// Takes a permit if one is free and nobody waits for it.
    pub fn try_acquire(&self) -> bool {
        let free = self.0.free.get();
        let takes = free > 0 && self.0.waiting.borrow().is_empty();
        self.0.free.set(free - usize::from(takes));
        takes
    }

    pub fn acquire(&self) -> PermitWait {
        let key = self.0.next.get();
        self.0.next.set(key + 1);
        PermitWait { permits: self.clone(), key }
    }

    fn wake_first(&self) {
        if self.0.free.get() > 0
            && let Some(waker) = self.0.waiting.borrow().values().next()
        {
            waker.wake_by_ref();
        }
    }
}

/// Resolves with one permit taken; forgets its place when dropped.
pub struct PermitWait {
    permits: Permits,
    key: u64,
}

impl Future for PermitWait {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let state = &self.permits.0;
        let mut waiting = state.waiting.borrow_mut();
        let first = waiting.keys().next().is_none_or(|first| *first >= self.key);
        if first && state.free.get() > 0 {
            state.free.set(state.free.get() - 1);
            waiting.remove(&self.key);
            return Poll::Ready(());
        }
        waiting.insert(self.key, context.waker().clone());
        Poll::Pending
    }
}

impl Drop for PermitWait {
    fn drop(&mut self) {
        self.permits.0.waiting.borrow_mut().remove(&self.key);
        // Whoever is first now may have been passed over by the wake-up that came here.
        self.permits.wake_first();
    }
}
