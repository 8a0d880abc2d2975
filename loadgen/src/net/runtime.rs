//! Owns the construction of the thread's runtime: io_uring with cheap task running where the kernel has it, plain
//! io_uring otherwise, epoll where io_uring is forbidden. Never spawns threads.

use std::future::{Future, poll_fn};
use std::panic::AssertUnwindSafe;
use std::task::Poll;

use anyhow::{Context, Result};
use monoio::{FusionDriver, RuntimeBuilder};

/// Submission entries of one ring: more than the requests started within one scheduling round.
const RING_ENTRIES: u32 = 1024;

/// Runs a future to its end on a fresh runtime of this thread. The future must not leave operations in flight: the
/// runtime would keep their descriptors open.
pub fn block_on<F: Future>(future: F) -> Result<F::Output> {
    let mut flags = io_uring::IoUring::builder();
    flags.setup_coop_taskrun();
    let builder = || RuntimeBuilder::<FusionDriver>::new().with_entries(RING_ENTRIES);
    let mut runtime = builder()
        .uring_builder(flags)
        .enable_timer()
        .build()
        .or_else(|_| builder().enable_timer().build())
        .context("starting the IO runtime")?;
    Ok(runtime.block_on(future))
}

/// Runs a task's future so that a panic in it ends the task, not the thread with all its other tasks.
pub async fn contain_panic<F: Future<Output = ()>>(what: &'static str, future: F) {
    let mut future = Box::pin(future);
    let outcome =
        poll_fn(|context| match std::panic::catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(context))) {
            Ok(poll) => poll.map(Ok),
            Err(_) => Poll::Ready(Err(())),
        });
    if outcome.await.is_err() {
        tracing::error!(what, "task panicked");
    }
}
