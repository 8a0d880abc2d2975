//! What of a target's load the cost counts (`--kv-load`). Pure arithmetic.

use crate::fleet::TargetLoad;
use crate::worker::Role;

/// `--kv-load`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LoadTerm {
    /// What the target has yet to compute for requests whose answers have not begun, half of the distinct blocks in
    /// flight, and something for each request. A prompt that is cached, or computed already, delays nobody's first token;
    /// what it still costs is decoding, and room.
    #[default]
    Queue,
    /// All distinct blocks in flight, from a request's pick to its end: the plain formula.
    Active,
}

/// What the load term is made of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoadWeights {
    /// Of a block that waits to be computed.
    pub queued: f64,
    /// Of a distinct block in flight.
    pub active: f64,
    /// Tokens that a request in flight weighs beyond its blocks: requests that share all of a short prompt would else
    /// gather on one target, each adding next to nothing.
    pub request_tokens: f64,
}

impl LoadWeights {
    /// The load of a target in its own blocks of `block_tokens` tokens.
    pub fn blocks(&self, load: &TargetLoad, block_tokens: u32) -> f64 {
        let request_blocks = self.request_tokens / f64::from(block_tokens.max(1));
        self.queued * load.queued_blocks() as f64
            + self.active * load.active_blocks() as f64
            + request_blocks * load.requests() as f64
    }
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

    /// Chosen on the conversation trace and on agent loops (`bench --bin quality`), with the overlap weight: a smaller
    /// weight of blocks in flight gathers agents on few targets.
    pub const fn weights(self) -> LoadWeights {
        match self {
            LoadTerm::Queue => LoadWeights { queued: 1.0, active: 0.5, request_tokens: 1024.0 },
            LoadTerm::Active => LoadWeights { queued: 0.0, active: 1.0, request_tokens: 0.0 },
        }
    }

    /// Weight of a missing block where the command line has none. Larger ones gain little in hits and cost time to first
    /// token; smaller ones lose more than a twentieth of the hits that full knowledge of the caches has.
    pub const fn overlap_weight(self) -> f64 {
        match self {
            LoadTerm::Queue => 12.0,
            LoadTerm::Active => 1.0,
        }
    }

    /// What a block in host memory is worth where one in device memory counts 1, unless the command line says otherwise.
    /// By `bench --bin simulate -- --host-tokens`; nothing in the plain formula.
    pub const fn host_tier_weight(self) -> f64 {
        match self {
            LoadTerm::Queue => 0.5,
            LoadTerm::Active => 0.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn blocks_that_wait_weigh_most_and_all_alike_in_the_plain_formula() {
        let load = TargetLoad::default();
        load.requests.store(2, Ordering::Relaxed);
        load.distinct_blocks.store(100, Ordering::Relaxed);
        load.queued_blocks.store(30, Ordering::Relaxed);
        assert_eq!(LoadTerm::Queue.weights().blocks(&load, 16), 30.0 + 50.0 + 128.0);
        assert_eq!(LoadTerm::Queue.weights().blocks(&load, 64), 30.0 + 50.0 + 32.0);
        assert_eq!(LoadTerm::Active.weights().blocks(&load, 16), 100.0);
        for role in [Role::Mixed, Role::Prefill] {
            assert_eq!(LoadTerm::Queue.of(role), LoadTerm::Queue);
        }
        assert_eq!(LoadTerm::Queue.of(Role::Decode), LoadTerm::Active);
        assert_eq!((LoadTerm::Active.overlap_weight(), LoadTerm::Active.host_tier_weight()), (1.0, 0.0));
    }
}
