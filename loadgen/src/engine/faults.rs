//! Owns the faults an engine can be told to show. Never injects one by itself.

use serde::{Deserialize, Serialize};

/// Faults in force. Counters count down as they are used up. Set at start, by [`super::EngineHandle::set_faults`] or
/// by `POST /admin/faults` with a JSON object of these members (absent ones go back to their defaults).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Faults {
    /// Share of inference requests answered with `fail_status`, 0 to 1, drawn from the engine's seed.
    pub fail_rate: f64,
    /// The next so many inference requests are answered with `fail_status`.
    pub fail_next: u32,
    /// 0 means 500.
    pub fail_status: u16,
    /// The next so many inference requests find their connection closed without an answer.
    pub close_next: u32,
    /// Connections are closed after this many answer tokens of a stream.
    pub close_after_tokens: Option<u32>,
    /// No step is started: nothing is computed, `/health` still answers.
    pub stall: bool,
    /// `/health` answers 503.
    pub unhealthy: bool,
    /// The next so many event batches are not sent, though replay has them.
    pub lose_event_batches: u32,
}
