//! Picking a target: candidates in, one choice out. Pure and deterministic for the same inputs; the clock
//! and the load are arguments. Never does IO and never books: the caller books what is picked here.

pub mod affinity;
mod candidates;
mod facts;
mod hints;
mod images;
mod kv_aware;
mod load_term;
mod recent;
mod round_robin;

pub use candidates::{Topology, TopologyError, by_load, topology, untried};
pub use facts::{BodyFacts, FactsScan};
pub use hints::Retention;
pub use images::{IMAGE_BLOCKS, ImageKey, ImageLru, ImageTable};
pub use kv_aware::{Candidate, Choice, Terms, cost, pick, pick_noted};
pub use load_term::{LoadTerm, LoadWeights};
pub use recent::{PickCounter, RecentLoad, charge, recent_blocks};
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

#[cfg(test)]
mod field_reports;
