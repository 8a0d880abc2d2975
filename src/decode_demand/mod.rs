//! Decode input demand: which decode target has the least input in flight, and the reservation that keeps
//! count. The one place where shards share a lock. Never does IO, never reads a body inside the lock.
//!
//! Rules, from the mission text: a candidate costs its in-flight input tokens, plus this request's tokens
//! times its samples, plus `W` per request it holds; the lowest wins, ties go to the lower original load, then
//! to candidate order. Choice and reservation are one critical section: two picks at once must not both see
//! the target empty. A reservation is released once, by drop.

mod estimate;
mod ledger;
mod metrics;

use std::sync::Arc;

pub use estimate::{estimate_tokens, request_tokens};
use ledger::Ledger;
pub use ledger::{DecodeCandidate, Reservation, Selection};
pub use metrics::{DemandMetrics, LockTimes};

/// What the ledger is built from; the model test of the ledger swaps these for instrumented ones.
mod sync {
    pub(super) use std::sync::atomic::Ordering;
    pub(super) use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

    pub use super::metrics::LockTimes;
    pub use crate::fleet::TargetDemand;

    /// A monotonic clock that is read without a system call.
    pub(super) use std::time::Instant;
}

/// `--decode-input-demand`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// No token counting, no reservation.
    #[default]
    Off,
    /// The original pick stands; bookkeeping, suggestion and metrics.
    Shadow,
    /// The suggestion is taken.
    On,
}

impl Mode {
    pub const fn as_str(self) -> &'static str {
        match self {
            Mode::Off => "off",
            Mode::Shadow => "shadow",
            Mode::On => "on",
        }
    }
}

/// How the tokens of a request were counted. Estimates take part like exact counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    Exact,
    /// Multimodal, rendered differently by the worker, or not tokenized at all.
    Estimated,
}

impl Input {
    pub const fn as_str(self) -> &'static str {
        match self {
            Input::Exact => "exact",
            Input::Estimated => "estimated",
        }
    }
}

/// The demand of this router process. Exists only when the mode is not off.
pub struct DecodeDemand {
    mode: Mode,
    ledger: Arc<Ledger>,
    metrics: DemandMetrics,
}

impl DecodeDemand {
    /// Nothing for [`Mode::Off`]. `request_weight` is `W`, tokens per request held; finite and not negative.
    pub fn new(mode: Mode, request_weight: f64, metrics: DemandMetrics) -> Option<Self> {
        assert!(request_weight.is_finite() && request_weight >= 0.0, "the configuration checks W");
        let ledger = Ledger::new(mode == Mode::On, request_weight, metrics.lock_times());
        (mode != Mode::Off).then(|| Self { mode, ledger: Arc::new(ledger), metrics })
    }

    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Chooses among the candidates and reserves on the chosen one. `original` is the place in `candidates` of
    /// the pick that the policy made without demand. Panics without candidates.
    ///
    /// `projected`, where given, receives each candidate's in-flight tokens plus the request's own, as they
    /// were at the decision; it must have room for all of them already.
    pub fn select(
        &self,
        candidates: &[DecodeCandidate<'_>],
        original: usize,
        input: Input,
        projected: Option<&mut Vec<u64>>,
    ) -> (Selection, Reservation) {
        let (selection, reservation) = self.ledger.select(candidates, original, projected);
        self.metrics.decided(self.mode, input, selection.agrees());
        (selection, reservation)
    }

    /// What [`DecodeDemand::select`] would decide now; counts and reserves nothing.
    pub fn preview(&self, candidates: &[DecodeCandidate<'_>], original: usize) -> Selection {
        self.ledger.preview(candidates, original)
    }

    /// What candidates are compared by, tokens.
    pub fn cost(&self, candidate: &DecodeCandidate<'_>) -> f64 {
        self.ledger.cost(candidate)
    }

    /// Reserves on a target that something else has chosen (a bound session): booked, and no decision.
    pub fn book(&self, candidate: &DecodeCandidate<'_>) -> Reservation {
        self.ledger.book(candidate)
    }

    pub fn metrics(&self) -> &DemandMetrics {
        &self.metrics
    }
}

#[cfg(test)]
mod tests;
