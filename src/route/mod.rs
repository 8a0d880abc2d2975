//! Picking a target: candidates in, one choice out. Pure and deterministic for the same inputs; the clock
//! and the load are arguments. Never does IO and never books: the caller books what is picked here.

mod candidates;
mod kv_aware;
mod round_robin;

pub use candidates::{Topology, TopologyError, by_load, topology, untried};
pub use kv_aware::{Candidate, Choice, cost, pick};
pub use round_robin::RoundRobin;

/// `--router-policy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    RoundRobin,
    KvAware,
}

impl Policy {
    pub const fn as_str(self) -> &'static str {
        match self {
            Policy::RoundRobin => "round-robin",
            Policy::KvAware => "kv-aware",
        }
    }
}
