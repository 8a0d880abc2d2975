//! The critical section and its guard. Owns the mutex; never allocates, logs, hashes or calls the system
//! while it is held.
//!
//! The cells are reached through the candidates, which the caller prepares before; the mutex itself guards no
//! data of its own but the order of changes to cells. They are atomics only so that the metrics page can read
//! them without the lock.
//!
//! This file is also compiled by `tests/demand_model.rs`, with instrumented `super::sync`.

use super::sync::{Arc, Instant, LockTimes, Mutex, MutexGuard, Ordering, PoisonError, TargetDemand, TryLockError};

/// One decode target that may take the request.
#[derive(Clone, Copy)]
pub struct DecodeCandidate<'a> {
    pub demand: &'a Arc<TargetDemand>,
    /// Tokens that the request would add to this target, samples included; see [`super::request_tokens`].
    pub tokens: u64,
    /// Load by which the original policy breaks ties.
    pub load: f64,
}

/// What was decided; places are those of the candidates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Selection {
    /// The pick of the policy without demand.
    pub original: usize,
    /// The candidate with the lowest cost.
    pub suggested: usize,
    /// The one that was reserved on.
    pub picked: usize,
}

impl Selection {
    /// Whether the suggestion is what the original policy chose.
    pub fn agrees(&self) -> bool {
        self.suggested == self.original
    }
}

/// The process-wide demand.
pub struct Ledger {
    section: Mutex<()>,
    takes_suggestion: bool,
    request_weight: f64,
    times: LockTimes,
}

/// One request's tokens on one target, from its pick to the end of its response. Dropping it releases them,
/// exactly once, on every exit path.
#[must_use = "a reservation that is dropped at once reserves nothing"]
pub struct Reservation {
    ledger: Arc<Ledger>,
    demand: Arc<TargetDemand>,
    tokens: u64,
}

impl Ledger {
    pub fn new(takes_suggestion: bool, request_weight: f64, times: LockTimes) -> Self {
        Self { section: Mutex::new(()), takes_suggestion, request_weight, times }
    }

    /// See [`super::DecodeDemand::select`].
    pub fn select(
        self: &Arc<Self>,
        candidates: &[DecodeCandidate<'_>],
        original: usize,
        mut projected: Option<&mut Vec<u64>>,
    ) -> (Selection, Reservation) {
        assert!(original < candidates.len(), "the original pick is a candidate");
        if let Some(projected) = projected.as_deref_mut() {
            projected.clear();
            projected.reserve(candidates.len());
        }
        let section = self.enter();
        let selection = self.decided(candidates, original);
        let chosen = &candidates[selection.picked];
        if let Some(projected) = projected {
            projected.extend(candidates.iter().map(|candidate| candidate.demand.tokens() + candidate.tokens));
        }
        add(chosen.demand, chosen.tokens);
        self.leave(section);
        (selection, self.reservation(chosen))
    }

    /// Reserves without choosing.
    pub fn book(self: &Arc<Self>, candidate: &DecodeCandidate<'_>) -> Reservation {
        let section = self.enter();
        add(candidate.demand, candidate.tokens);
        self.leave(section);
        self.reservation(candidate)
    }

    fn reservation(self: &Arc<Self>, candidate: &DecodeCandidate<'_>) -> Reservation {
        Reservation { ledger: self.clone(), demand: candidate.demand.clone(), tokens: candidate.tokens }
    }

    /// What candidates are compared by, tokens.
    pub fn cost(&self, candidate: &DecodeCandidate<'_>) -> f64 {
        let tokens = candidate.demand.tokens() + candidate.tokens;
        // Token counts are exact in a double up to 2^53; beyond it only ties blur.
        tokens as f64 + self.request_weight * candidate.demand.requests() as f64
    }

    /// What [`Ledger::select`] would decide by the cells as they are: reserves nothing and waits for nobody. Panics
    /// without candidates.
    pub fn preview(&self, candidates: &[DecodeCandidate<'_>], original: usize) -> Selection {
        assert!(original < candidates.len(), "the original pick is a candidate");
        self.decided(candidates, original)
    }

    fn decided(&self, candidates: &[DecodeCandidate<'_>], original: usize) -> Selection {
        let suggested = self.lowest(candidates);
        Selection { original, suggested, picked: if self.takes_suggestion { suggested } else { original } }
    }

    /// Place of the candidate with the lowest cost; ties go to the lower load, then to the first.
    fn lowest(&self, candidates: &[DecodeCandidate<'_>]) -> usize {
        let mut best = (0, f64::INFINITY, f64::INFINITY);
        for (place, candidate) in candidates.iter().enumerate() {
            let cost = self.cost(candidate);
            if cost < best.1 || (cost == best.1 && candidate.load < best.2) {
                best = (place, cost, candidate.load);
            }
        }
        best.0
    }

    /// Waits for the section. The clock is read inside it only after a wait, never on the free path.
    fn enter(&self) -> Section<'_> {
        let arrived = Instant::now();
        match self.section.try_lock() {
            Ok(guard) => Section { guard, arrived, entered: arrived },
            Err(TryLockError::Poisoned(poisoned)) => {
                Section { guard: poisoned.into_inner(), arrived, entered: arrived }
            }
            Err(TryLockError::WouldBlock) => {
                // Nothing in the section can leave a cell half changed, so a poisoned lock is as good as any.
                let guard = self.section.lock().unwrap_or_else(PoisonError::into_inner);
                Section { guard, arrived, entered: Instant::now() }
            }
        }
    }

    fn leave(&self, section: Section<'_>) {
        let Section { guard, arrived, entered } = section;
        drop(guard);
        let left = Instant::now();
        self.times.observe(entered - arrived, left - entered);
    }

    fn release(&self, demand: &TargetDemand, tokens: u64) {
        let section = self.enter();
        subtract(demand, tokens);
        self.leave(section);
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.ledger.release(&self.demand, self.tokens);
    }
}

struct Section<'a> {
    guard: MutexGuard<'a, ()>,
    arrived: Instant,
    entered: Instant,
}

/// Plain loads and stores suffice: the section orders all writers.
fn add(demand: &TargetDemand, tokens: u64) {
    demand.tokens.store(demand.tokens() + tokens, Ordering::Relaxed);
    demand.requests.store(demand.requests() + 1, Ordering::Relaxed);
}

/// Saturates rather than panics: it runs in a drop. What was not added is never subtracted, since only a
/// reservation gets here; the assertion keeps that promise in tests.
fn subtract(demand: &TargetDemand, tokens: u64) {
    debug_assert!(demand.tokens() >= tokens && demand.requests() >= 1, "a release without its reservation");
    demand.tokens.store(demand.tokens().saturating_sub(tokens), Ordering::Relaxed);
    demand.requests.store(demand.requests().saturating_sub(1), Ordering::Relaxed);
}
