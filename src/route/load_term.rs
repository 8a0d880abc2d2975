//! What of a target's load the cost counts (`--kv-load`). Pure arithmetic.

use crate::fleet::TargetLoad;
use crate::worker::Role;

/// `--kv-load`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LoadTerm {
    /// What the target has yet to compute for requests whose answers have not begun, and half of the distinct blocks in
    /// flight. A prompt that is cached, or computed already, delays nobody's first token; what it still costs is decoding,
    /// and room.
    #[default]
    Queue,
    /// All distinct blocks in flight, from a request's pick to its end: the plain formula.
    Active,
}

impl LoadTerm {
    /// What the term is where a worker of this role is picked. KV comes to a decode worker by transfer: it has no queue of
    /// blocks to compute.
    pub const fn of(self, role: Role) -> LoadTerm {
        match role {
            Role::Decode => LoadTerm::Active,
            Role::Mixed | Role::Prefill => self,
        }
    }

    /// Weights of a queued block and of a distinct block in flight, and, with them, that of a missing block where the
    /// command line has none. Chosen on the conversation trace and on agent loops (`bench --bin quality`): larger overlap
    /// weights gain little in hits and cost time to first token, smaller ones lose more than a twentieth of the hits that
    /// full knowledge of the caches has; a smaller weight of blocks in flight gathers agents on few targets.
    const fn weights(self) -> (f64, f64, f64) {
        match self {
            LoadTerm::Queue => (1.0, 0.5, 12.0),
            LoadTerm::Active => (0.0, 1.0, 1.0),
        }
    }

    /// Default of the overlap weights that are used with this term.
    pub const fn overlap_weight(self) -> f64 {
        self.weights().2
    }

    /// Weights of a queued block and of a distinct block in flight.
    pub const fn block_weights(self) -> (f64, f64) {
        let (queued, active, _) = self.weights();
        (queued, active)
    }

    /// The load of a target in blocks.
    pub fn blocks(self, load: &TargetLoad) -> f64 {
        let (queued, active) = self.block_weights();
        queued * load.queued_blocks() as f64 + active * load.active_blocks() as f64
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn decoding_weighs_half_of_what_waits_and_as_much_in_the_plain_formula() {
        let load = TargetLoad::default();
        load.requests.store(2, Ordering::Relaxed);
        load.distinct_blocks.store(100, Ordering::Relaxed);
        load.queued_blocks.store(30, Ordering::Relaxed);
        assert_eq!((LoadTerm::Queue.blocks(&load), LoadTerm::Active.blocks(&load)), (80.0, 100.0));
        for role in [Role::Mixed, Role::Prefill] {
            assert_eq!(LoadTerm::Queue.of(role), LoadTerm::Queue);
        }
        assert_eq!(LoadTerm::Queue.of(Role::Decode), LoadTerm::Active);
        assert_eq!(LoadTerm::Active.overlap_weight(), 1.0);
    }
}
