//! The circuit breaker: which workers may be asked, and who tries one that has failed. The state is one word per worker
//! (`fleet::WorkerHealth`), changed by compare-and-swap only, so no shard waits for another; a worker that is well costs
//! a request one load of a line that nobody writes. Times are monotonic milliseconds, given by the caller.
//!
//! A run of faults opens a worker: it gets no requests for a while. After that one request at a time is a probe: its
//! success closes the worker, its fault opens it for twice as long. Rules of the system that this one replaces, but for
//! three: a probe is claimed by the request that is really sent and not by every candidate that was looked at; a fault
//! of a request that was sent before the worker opened does not extend its rest; a worker that asks for time
//! (`Retry-After`) rests without being called faulty.

use std::sync::Arc;
use std::time::Duration;

use crate::fleet::{HealthState, HealthWord, WorkerHealth};

/// `--breaker-…`; a request keeps those with which its worker was picked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BreakerSettings {
    /// Consecutive faults that open a worker; 0 switches the breaker off.
    pub failure_threshold: u32,
    pub cooldown: Duration,
    /// Longest cool-down, however often a probe has failed.
    pub cooldown_max: Duration,
}

/// A probe that was never settled (its shard died) keeps its place for this long.
const PROBE_MS: u64 = 60_000;

/// Doublings of the cool-down that are counted; far beyond any cap.
const LEVEL_MAX: u32 = 40;

/// Whether a worker may be asked now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    Free,
    /// Only by a request that claims the probe.
    Probe,
    Excluded,
}

/// What a change of state means to an operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    Opened { for_ms: u64 },
    Closed,
}

/// Whether a worker in this state may be asked at `now_ms`.
pub fn admission_of(word: HealthWord, now_ms: u64) -> Admission {
    match word.state {
        HealthState::Well => Admission::Free,
        _ if now_ms < word.until_ms => Admission::Excluded,
        HealthState::Resting => Admission::Free,
        HealthState::Open | HealthState::Probing => Admission::Probe,
    }
}

/// How little is to be hoped of a worker that may not be asked; where all are like that, the least is asked.
pub fn trouble_of(word: HealthWord) -> u32 {
    if word.state.is_open() { 1 + word.level + word.faults } else { 0 }
}

impl BreakerSettings {
    /// The same for a worker; a rest that is over ends here, and so does what is left of a breaker that was switched off.
    pub fn admission(&self, health: &WorkerHealth, now_ms: u64) -> Admission {
        let word = health.read();
        if self.failure_threshold == 0 && word.state.is_open() {
            health.update(|word| word.state.is_open().then(HealthWord::default));
            return Admission::Free;
        }
        let admission = admission_of(word, now_ms);
        if word.state == HealthState::Resting && admission == Admission::Free {
            health.update(|word| (word.state == HealthState::Resting && word.until_ms <= now_ms).then(|| well(word)));
        }
        admission
    }

    /// Takes the one place of a probe. Nothing when another request was faster.
    pub fn claim(&self, health: &Arc<WorkerHealth>, now_ms: u64) -> Option<Probe> {
        let is_due = |word: HealthWord| word.state.is_open() && word.until_ms <= now_ms;
        let claimed =
            |word: HealthWord| HealthWord { state: HealthState::Probing, until_ms: now_ms + PROBE_MS, ..word };
        let (_, after) = health.update(|word| is_due(word).then(|| claimed(word)))?;
        Some(Probe { health: health.clone(), word: after })
    }

    /// The worker has served a request to its end. `probe` is the request's own, if it was one.
    pub fn succeeded(&self, health: &WorkerHealth, probe: Option<Probe>) -> Option<Change> {
        if let Some(probe) = probe {
            return probe.settle(|_| HealthWord::default()).then_some(Change::Closed);
        }
        // Written only by the first success after a fault: a worker that is well keeps its line shared.
        let word = health.read();
        if word.faults > 0 && matches!(word.state, HealthState::Well | HealthState::Resting) {
            let is_run = |word: &HealthWord| matches!(word.state, HealthState::Well | HealthState::Resting);
            health.update(|word| is_run(&word).then_some(HealthWord { faults: 0, ..word }));
        }
        None
    }

    /// The same for a request that went to it for want of better ones. It was sent while the worker was open, so unlike one
    /// from before that it shows that the worker is well again.
    pub fn succeeded_in_need(&self, health: &WorkerHealth) -> Option<Change> {
        health.update(|word| word.state.is_open().then(HealthWord::default)).map(|_| Change::Closed)
    }

    /// A request goes to the worker for want of better ones. Until one of them succeeds each weighs as a fault, so that the
    /// next goes elsewhere: whoever fails at once is never busy, and would get them all.
    pub fn asked_in_need(&self, health: &WorkerHealth) {
        health.update(|word| word.state.is_open().then_some(HealthWord { faults: word.faults + 1, ..word }));
    }

    /// The worker has failed a request: no connection, no answer, a broken one, or a 5xx.
    pub fn faulted(&self, health: &WorkerHealth, probe: Option<Probe>, now_ms: u64) -> Option<Change> {
        if self.failure_threshold == 0 {
            return None;
        }
        if let Some(probe) = probe {
            let level = (probe.word.level + 1).min(LEVEL_MAX);
            let for_ms = self.cooldown_ms(level);
            let opened = |word: HealthWord| HealthWord { level, ..open(word, now_ms + for_ms) };
            return probe.settle(opened).then(|| health.tripped()).map(|()| Change::Opened { for_ms });
        }
        let for_ms = self.cooldown_ms(0);
        let (_, after) = health.update(|word| match word.state {
            HealthState::Open | HealthState::Probing => None,
            _ if word.faults + 1 >= self.failure_threshold => Some(open(word, now_ms + for_ms)),
            _ => Some(HealthWord { faults: word.faults + 1, ..word }),
        })?;
        (after.state == HealthState::Open).then(|| health.tripped()).map(|()| Change::Opened { for_ms })
    }

    /// The worker has asked for time. It is alive, so this is no fault; it gets no requests for as long as it asked, but
    /// not longer than the longest cool-down.
    pub fn overloaded(&self, health: &WorkerHealth, retry_after: Duration, now_ms: u64) {
        let until_ms = now_ms + retry_after.min(self.cooldown_max).as_millis() as u64;
        health.update(|word| match word.state {
            HealthState::Well | HealthState::Resting if word.until_ms < until_ms => {
                Some(HealthWord { state: HealthState::Resting, until_ms, ..word })
            }
            // A probe that was told to wait puts the next one off.
            HealthState::Open if word.until_ms < until_ms => Some(HealthWord { until_ms, ..word }),
            _ => None,
        });
    }

    fn cooldown_ms(&self, level: u32) -> u64 {
        let doubled = self.cooldown.as_millis().saturating_mul(1 << level.min(LEVEL_MAX));
        u64::try_from(doubled.min(self.cooldown_max.as_millis())).unwrap_or(u64::MAX)
    }
}

fn well(word: HealthWord) -> HealthWord {
    HealthWord { state: HealthState::Well, until_ms: 0, ..word }
}

fn open(word: HealthWord, until_ms: u64) -> HealthWord {
    HealthWord { state: HealthState::Open, until_ms, faults: 0, ..word }
}

/// The one request that tries an open worker. Dropped without a verdict (its client left, its worker said 4xx) it frees
/// the place for the next request and says nothing about the worker.
#[derive(Debug)]
pub struct Probe {
    health: Arc<WorkerHealth>,
    /// As the claim left it: a place that expired and was claimed again is not ours to settle.
    word: HealthWord,
}

impl Probe {
    /// Whether its place is still its own. Requests that were sent in need meanwhile change nothing of that.
    fn is_in(&self, word: HealthWord) -> bool {
        word == HealthWord { faults: word.faults, ..self.word }
    }

    /// Whether the verdict counted.
    fn settle(self, verdict: impl Fn(HealthWord) -> HealthWord) -> bool {
        self.health.update(|word| self.is_in(word).then(|| verdict(word))).is_some()
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        self.health
            .update(|word| self.is_in(word).then_some(HealthWord { state: HealthState::Open, until_ms: 0, ..word }));
    }
}

#[cfg(test)]
mod tests;
