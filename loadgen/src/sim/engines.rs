//! Owns the engines of a simulated fleet as they are at a moment, and which of them do what. Never moves time.

use std::ops::Range;
use std::time::Duration;

use super::content::Named;
use crate::engine::host::HostPool;
use crate::engine::pool::BlockPool;
use crate::engine::scheduler::{Scheduler, Speed, Totals};

/// Engines that all serve the same model.
#[derive(Clone, Debug)]
pub struct Fleet {
    /// One entry for each engine.
    pub speeds: Vec<Speed>,
    /// Blocks of KV per engine.
    pub blocks_per_engine: usize,
    /// Blocks of host memory per engine; 0 for none.
    pub host_blocks_per_engine: usize,
    /// Prefill and decode apart; every engine does both if absent.
    pub pairs: Option<Pairs>,
    /// From the step's end to the moment when the router's view has its events.
    pub event_lag: Duration,
    /// Seeds the jitter of steps.
    pub seed: u64,
}

/// How a fleet of prefill and decode engines works: prefill first, then its KV goes to decode. Prefill's blocks are free to
/// be reused as soon as it has answered.
#[derive(Clone, Debug)]
pub struct Pairs {
    /// So many engines, the first ones, do prefill; the others decode.
    pub prefill: usize,
    /// Of KV that decode does not have yet.
    pub transfer_per_token: Duration,
}

/// What a request needs an engine for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// All of it.
    Whole,
    Prefill,
    Decode,
}

/// The engines as they are.
pub struct Engines {
    pub(super) schedulers: Vec<Scheduler<Named>>,
    pub(super) busy: Vec<bool>,
    prefill: Option<usize>,
    block_size: usize,
}

impl Engines {
    /// Idle and empty ones.
    pub(super) fn new(fleet: &Fleet, block_size: usize) -> Engines {
        let scheduler = |(number, speed): (usize, &Speed)| {
            let pool = BlockPool::new(fleet.blocks_per_engine, true);
            let seed = fleet.seed.wrapping_mul(1021).wrapping_add(number as u64);
            let scheduler = Scheduler::new(speed.clone(), block_size, pool, seed);
            match fleet.host_blocks_per_engine {
                0 => scheduler,
                blocks => scheduler.with_host(HostPool::new(blocks)),
            }
        };
        let schedulers: Vec<_> = fleet.speeds.iter().enumerate().map(scheduler).collect();
        let prefill = fleet.pairs.as_ref().map(|pairs| pairs.prefill);
        assert!(!schedulers.is_empty(), "a fleet has engines");
        assert!(prefill.is_none_or(|count| count > 0 && count < schedulers.len()), "a pair has both halves");
        Engines { busy: vec![false; schedulers.len()], schedulers, prefill, block_size }
    }

    pub fn count(&self) -> usize {
        self.schedulers.len()
    }

    /// Tokens per block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// The engines that do this part.
    pub fn of(&self, part: Part) -> Range<usize> {
        match (part, self.prefill) {
            (Part::Whole, _) | (_, None) => 0..self.count(),
            (Part::Prefill, Some(prefill)) => 0..prefill,
            (Part::Decode, Some(prefill)) => prefill..self.count(),
        }
    }

    /// Blocks of a prompt that an engine would not compute if it began now, wherever it has them.
    pub fn cached_blocks(&self, engine: usize, content: &Named) -> usize {
        self.schedulers[engine].prefix_length(content.reusable_names(self.block_size))
    }

    /// Requests that run or wait.
    pub fn requests(&self, engine: usize) -> usize {
        self.schedulers[engine].sequences_running() + self.schedulers[engine].sequences_waiting()
    }

    pub fn totals(&self, engine: usize) -> Totals {
        self.schedulers[engine].totals()
    }
}
