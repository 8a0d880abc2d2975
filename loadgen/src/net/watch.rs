//! Owns the ends that come from outside to what is under way: a deadline of each, or the end of everything. One look at
//! all of them now and then in place of a timer for each. Never knows what is under way.

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Poll, Waker};
use std::time::Instant;

/// Why something was ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Deadline,
    /// Everything ends.
    Stop,
}

/// Everything under way on this thread.
#[derive(Clone, Default)]
pub struct Watch(Rc<State>);

#[derive(Default)]
struct State {
    entries: RefCell<Vec<Option<Entry>>>,
    free: RefCell<Vec<usize>>,
    is_stopped: Cell<bool>,
}

struct Entry {
    deadline: Instant,
    waker: Option<Waker>,
    end: Option<End>,
}

impl Watch {
    /// Runs a future to its end, or until [`Watch::look`] finds its deadline passed, or until [`Watch::stop`].
    /// The future stays where it is: those of whole requests are too large to be moved.
    pub async fn run<F: Future>(&self, deadline: Instant, mut future: Pin<&mut F>) -> Result<F::Output, End> {
        if self.0.is_stopped.get() {
            return Err(End::Stop);
        }
        let place = Place::take(self.clone(), deadline);
        poll_fn(|context| {
            let mut entries = self.0.entries.borrow_mut();
            let entry = entries[place.index].as_mut().expect("a place is taken until it is dropped");
            if let Some(end) = entry.end {
                return Poll::Ready(Err(end));
            }
            if entry.waker.as_ref().is_none_or(|waker| !waker.will_wake(context.waker())) {
                entry.waker = Some(context.waker().clone());
            }
            drop(entries);
            future.as_mut().poll(context).map(Ok)
        })
        .await
    }

    /// Ends what is past its deadline.
    pub fn look(&self, now: Instant) {
        self.end(End::Deadline, |entry| entry.deadline <= now);
    }

    /// Ends everything, now and from now on.
    pub fn stop(&self) {
        self.0.is_stopped.set(true);
        self.end(End::Stop, |_| true);
    }

    fn end(&self, end: End, concerns: impl Fn(&Entry) -> bool) {
        for entry in self.0.entries.borrow_mut().iter_mut().flatten().filter(|entry| concerns(entry)) {
            entry.end.get_or_insert(end);
            // Waking only puts the task into the runtime's queue.
            if let Some(waker) = entry.waker.take() {
                waker.wake();
            }
        }
    }
}

/// A place among the entries, given back when dropped.
struct Place {
    watch: Watch,
    index: usize,
}

impl Place {
    fn take(watch: Watch, deadline: Instant) -> Place {
        let entry = Some(Entry { deadline, waker: None, end: None });
        let index = watch.0.free.borrow_mut().pop();
        let mut entries = watch.0.entries.borrow_mut();
        let index = index.unwrap_or_else(|| {
            entries.push(None);
            entries.len() - 1
        });
        entries[index] = entry;
        drop(entries);
        Place { watch, index }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.watch.0.entries.borrow_mut()[self.index] = None;
        self.watch.0.free.borrow_mut().push(self.index);
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::pin::pin;
    use std::time::Duration;

    use super::*;
    use crate::net::runtime::block_on;

    #[test]
    fn what_is_late_ends_and_the_rest_goes_on() {
        let now = Instant::now();
        let (soon, late) = (now + Duration::from_secs(1), now + Duration::from_secs(9));
        block_on(async move {
            let watch = Watch::default();
            assert_eq!(watch.run(soon, pin!(async { 7 })).await, Ok(7));
            let spawn = |deadline| {
                let watch = watch.clone();
                monoio::spawn(async move { watch.run(deadline, pin!(pending::<()>())).await })
            };
            let (first, second) = (spawn(soon), spawn(late));
            monoio::time::sleep(Duration::from_millis(1)).await;
            watch.look(soon);
            assert_eq!(first.await, Err(End::Deadline));
            watch.stop();
            assert_eq!(second.await, Err(End::Stop));
            assert_eq!(watch.run(late, pin!(async { 7 })).await, Err(End::Stop));
            assert!(watch.0.entries.borrow().iter().all(Option::is_none), "places are given back");
        })
        .unwrap();
    }
}
