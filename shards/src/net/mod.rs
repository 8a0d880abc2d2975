//! The seam to the runtime: listener, stream with its TLS, timers, runtime build. It is the only place (with `raw`, its unsafe
//! part) that names monoio, so that the runtime can be swapped; it never knows what HTTP is.

pub(crate) mod listener;
pub(crate) mod runtime;
mod secure;
pub(crate) mod stream;

pub(crate) use listener::Listener;
pub(crate) use monoio::buf::{IoBuf, IoBufMut};
pub(crate) use stream::{Peeked, Stream, WeakStream};

use std::future::Future;
use std::time::Duration;

pub(crate) fn spawn(future: impl Future<Output = ()> + 'static) {
    // The handle is dropped before the task first runs: no foreign waker can exist yet (see house rule 5).
    drop(monoio::spawn(future));
}

pub(crate) async fn sleep(duration: Duration) {
    monoio::time::sleep(duration).await;
}

pub(crate) async fn timeout<F: Future>(duration: Duration, future: F) -> Option<F::Output> {
    monoio::time::timeout(duration, future).await.ok()
}
