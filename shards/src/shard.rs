//! What the tasks of one shard share, and how they are started. It owns panic containment and the count of living
//! tasks that lets a shard end cleanly; it never crosses threads.

use std::any::Any;
use std::cell::Cell;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

use crate::clock::{Fired, Slot};
use crate::config::Limits;
use crate::stats::ShardCounters;
use crate::tls::ServerTls;

/// State of one shard, handed to its connections.
pub(crate) struct Shard {
    pub(crate) limits: Limits,
    pub(crate) tls: Option<ServerTls>,
    pub(crate) counters: Arc<ShardCounters>,
    pub(crate) draining: Cell<bool>,
    /// Bytes that have come of bodies which are still on their way.
    pub(crate) unfinished_body_bytes: Cell<usize>,
}

thread_local! {
    static TASKS_ALIVE: Cell<usize> = const { Cell::new(0) };
    static COUNTERS: Cell<Option<Arc<ShardCounters>>> = const { Cell::new(None) };
}

/// Binds this thread to its shard's counters.
pub(crate) fn enter(shard: &Rc<Shard>) {
    COUNTERS.set(Some(shard.counters.clone()));
}

/// Tasks that have not ended yet.
pub(crate) fn tasks_alive() -> usize {
    TASKS_ALIVE.get()
}

struct Alive;

impl Alive {
    fn new() -> Alive {
        TASKS_ALIVE.set(TASKS_ALIVE.get() + 1);
        Alive
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        TASKS_ALIVE.set(TASKS_ALIVE.get() - 1);
    }
}

/// Polls with a panic turned into a value. A panic in a task would otherwise end the shard's thread.
pub(crate) fn poll_caught<F: Future + ?Sized>(
    future: Pin<&mut F>,
    cx: &mut Context<'_>,
) -> Poll<Result<F::Output, Box<dyn Any + Send>>> {
    match std::panic::catch_unwind(AssertUnwindSafe(|| future.poll(cx))) {
        Ok(Poll::Ready(output)) => Poll::Ready(Ok(output)),
        Ok(Poll::Pending) => Poll::Pending,
        Err(panic) => Poll::Ready(Err(panic)),
    }
}

/// Logs a caught panic and counts it.
pub(crate) fn report_panic(panic: &(dyn Any + Send), what: &'static str) {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message");
    tracing::error!(what, panic = text, "a task panicked; the shard goes on");
    let counters = COUNTERS.take();
    if let Some(counters) = &counters {
        counters.panics.add(1);
    }
    COUNTERS.set(counters);
}

/// `Box::pin` of a future that is made in its place: one that is made first and boxed then is copied with all the room
/// that its later states need, often kilobytes of nothing.
#[inline(always)]
pub fn boxed<F: Future>(make: impl FnOnce() -> F) -> Pin<Box<F>> {
    let place = Box::new_uninit();
    Box::into_pin(Box::write(place, make()))
}

/// Runs a task on this shard: a panic ends only the task, and the shard's end drops it.
///
/// # Panics
/// When called outside of a shard's thread.
pub fn spawn_local(future: impl Future<Output = ()> + 'static) {
    spawn(future, Some(Slot::new()));
}

/// As [`spawn_local`], for a task that sees the shard's end by itself.
pub(crate) fn spawn_watchful(future: impl Future<Output = ()> + 'static) {
    spawn(future, None);
}

fn spawn(future: impl Future<Output = ()> + 'static, slot: Option<Slot>) {
    let alive = Alive::new();
    // Boxed here: moved into the block below and pinned there, it would be stored twice in every task.
    let mut future = Box::pin(future);
    crate::net::spawn(async move {
        let _alive = alive;
        let caught = std::future::poll_fn(|cx| match poll_caught(future.as_mut(), cx) {
            Poll::Ready(outcome) => Poll::Ready(outcome),
            Poll::Pending => match slot.as_ref().map(|slot| slot.poll_fired(cx)) {
                Some(Poll::Ready(Fired::Stopped)) => Poll::Ready(Ok(())),
                _ => Poll::Pending,
            },
        })
        .await;
        if let Err(panic) = caught {
            report_panic(&*panic, "task");
        }
    });
}
