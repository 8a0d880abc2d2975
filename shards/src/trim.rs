//! Decides when a shard gives memory back: once, when it has fallen quiet after something went on. It owns no memory and
//! never runs while requests begin or end.

use crate::stats::ShardCounters;
use crate::{buffers, clock, raw};

/// Quiet for so long, milliseconds.
const QUIET_MS: u64 = 1000;

/// Connections accepted and open, requests begun and running.
type Signature = [u64; 4];

#[derive(Default)]
pub(crate) struct Trim {
    seen: Signature,
    since_ms: u64,
    released: Signature,
}

impl Trim {
    /// Called with each sweep. Releasing takes up to some milliseconds after a large peak, when there is little to delay.
    pub(crate) fn sweep(&mut self, counters: &ShardCounters) {
        if self.is_due(signature(counters), clock::now_ms()) {
            buffers::clear();
            raw::release_free_memory();
        }
    }

    fn is_due(&mut self, now: Signature, now_ms: u64) -> bool {
        if now != self.seen {
            (self.seen, self.since_ms) = (now, now_ms);
            return false;
        }
        if now == self.released || now_ms - self.since_ms < QUIET_MS {
            return false;
        }
        self.released = now;
        true
    }
}

fn signature(counters: &ShardCounters) -> Signature {
    [
        counters.connections_accepted.get(),
        counters.connections_open.get(),
        counters.requests.get(),
        counters.requests_active.get(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_released_once_per_quiet_time_that_follows_activity() {
        let mut trim = Trim::default();
        assert!(!trim.is_due([0; 4], 5000), "nothing ever went on");
        assert!(!trim.is_due([1, 1, 1, 1], 6000));
        assert!(!trim.is_due([1, 1, 2, 1], 6900), "still going on");
        assert!(!trim.is_due([1, 1, 2, 1], 7800));
        assert!(trim.is_due([1, 1, 2, 1], 7900));
        assert!(!trim.is_due([1, 1, 2, 1], 99_000), "only once");
        assert!(!trim.is_due([1, 0, 2, 0], 100_000));
        assert!(trim.is_due([1, 0, 2, 0], 101_000));
    }
}
