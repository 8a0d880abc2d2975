//! Decides when the ingest core gives memory back: once, when it has fallen quiet after a worker left. It owns no memory.
//!
//! The allocator returns free pages by itself, but only while this thread uses it, and what a worker leaves behind is the
//! largest thing that this thread ever frees. While events or bookings come nothing is done: it takes up to some milliseconds.

use std::time::{Duration, Instant};

/// Nothing has come for so long.
const QUIET: Duration = Duration::from_secs(1);

#[derive(Default)]
pub(super) struct Release {
    /// When something came last; absent when nothing is to be given back.
    quiet_since: Option<Instant>,
}

impl Release {
    /// A worker has left: there is memory to give back.
    pub fn on_departure(&mut self, now: Instant) {
        self.quiet_since = Some(now);
    }

    /// Called with each turn of the loop; `is_busy` says whether anything came in it. `Ok` is to release now, once; `Err` says
    /// how long to sleep until that may be due, in ms (-1: nothing to do).
    pub fn turn(&mut self, is_busy: bool, now: Instant) -> Result<(), i64> {
        let since = self.quiet_since.as_mut().ok_or(-1i64)?;
        if is_busy {
            *since = now;
        }
        let quiet = now.saturating_duration_since(*since);
        if quiet < QUIET {
            // Rounded up: a shorter sleep than the poll can measure would be a busy loop.
            return Err((QUIET - quiet).as_millis() as i64 + 1);
        }
        self.quiet_since = None;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_released_once_per_departure_and_only_when_it_is_quiet() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let mut release = Release::default();
        assert_eq!(release.turn(false, at(5_000)), Err(-1), "nobody ever left");
        release.on_departure(at(6_000));
        assert_eq!(release.turn(true, at(6_000)), Err(1_001));
        assert_eq!(release.turn(true, at(6_900)), Err(1_001), "events still come");
        assert_eq!(release.turn(false, at(7_400)), Err(501));
        assert_eq!(release.turn(false, at(7_900)), Ok(()));
        assert_eq!(release.turn(false, at(9_000)), Err(-1), "once");
    }
}
