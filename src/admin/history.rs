//! What the router has counted over the last minutes, sampled by the control thread, so that a dashboard that is opened now
//! shows how it came to this. Bounded; begins anew with the process.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::limits::HISTORY_SAMPLES;
use crate::proxy::Totals;

/// Between two samples.
const PERIOD: Duration = Duration::from_secs(5);

/// Totals at one moment.
struct Sample {
    at: Instant,
    totals: Totals,
    inflight: u64,
}

pub(super) struct History {
    samples: VecDeque<Sample>,
    next: Instant,
}

impl History {
    pub fn new(now: Instant) -> Self {
        Self { samples: VecDeque::with_capacity(HISTORY_SAMPLES), next: now }
    }

    /// How long until the next sample is due.
    pub fn wait(&self, now: Instant) -> Duration {
        self.next.saturating_duration_since(now)
    }

    /// Takes a sample if one is due, and tells so.
    pub fn look(&mut self, now: Instant, read: impl FnOnce() -> (Totals, u64)) -> bool {
        if now < self.next {
            return false;
        }
        if self.samples.len() == HISTORY_SAMPLES {
            self.samples.pop_front();
        }
        let (totals, inflight) = read();
        self.samples.push_back(Sample { at: now, totals, inflight });
        self.next = now + PERIOD;
        true
    }

    /// Totals, oldest first, with their age: rates are the differences.
    pub fn json(&self, now: Instant) -> Value {
        let samples = self.samples.iter().map(|Sample { at, totals, inflight }| {
            let Totals { requests, failed, blocks_hit, blocks } = totals;
            json!({"seconds_ago": now.duration_since(*at).as_secs_f64(), "requests": requests, "failed": failed,
                "blocks_hit": blocks_hit, "blocks": blocks, "inflight": inflight})
        });
        samples.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_taken_when_due_and_old_ones_go() {
        let start = Instant::now();
        let mut history = History::new(start);
        let mut reads = 0;
        for second in 0..(HISTORY_SAMPLES as u64 + 3) * 5 {
            let now = start + Duration::from_secs(second);
            history.look(now, || {
                reads += 1;
                (Totals { requests: reads, ..Totals::default() }, 0)
            });
            assert!(history.wait(now) <= PERIOD);
        }
        assert_eq!(reads, HISTORY_SAMPLES as u64 + 3);
        let json = history.json(start + Duration::from_secs(10_000));
        let samples = json.as_array().unwrap();
        assert_eq!(samples.len(), HISTORY_SAMPLES);
        assert_eq!((&samples[0]["requests"], &samples[HISTORY_SAMPLES - 1]["requests"]), (&json!(4), &json!(reads)));
    }
}
