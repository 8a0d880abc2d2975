//! What the end-to-end tests share: the real binary as a child process, scripted workers, a raw HTTP client,
//! and waiting for conditions. Nothing here sleeps to synchronise; every wait has a deadline.

pub mod client;
pub mod router;
pub mod worker;

use std::time::{Duration, Instant};

/// How long a condition may take before the test fails. Generous, because CI has two busy cores.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Polls until `condition` gives a value.
pub fn eventually<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(Instant::now() < deadline, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The same for a plain yes or no.
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    eventually(what, || condition().then_some(()));
}
