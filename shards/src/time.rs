//! Timers for services, over the runtime's own. They never run early; they are rounded up to about a millisecond.

use std::future::Future;
use std::time::{Duration, Instant};

/// Waits for `duration`.
pub async fn sleep(duration: Duration) {
    crate::net::sleep(duration).await;
}

/// Waits until `deadline`; returns at once when it has passed.
pub async fn sleep_until(deadline: Instant) {
    let left = deadline.saturating_duration_since(Instant::now());
    if !left.is_zero() {
        crate::net::sleep(left).await;
    }
}

/// Runs `future` for at most `duration`; `None` when it was not done by then (it is dropped).
pub async fn timeout<F: Future>(duration: Duration, future: F) -> Option<F::Output> {
    crate::net::timeout(duration, future).await
}
