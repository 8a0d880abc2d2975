//! Faults that others have met, as tests of the whole choice.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::*;

fn candidate(target: u32, request_blocks: u32, cache_hits: u32, active_blocks: u64) -> Candidate {
    let block_tokens = 16;
    Candidate {
        target,
        request_blocks,
        cache_hits,
        active_blocks,
        load_blocks: active_blocks as f64,
        picked_at_ns: 0,
        block_tokens,
    }
}

/// A worker that is stuck on heavy unique prompts has a small tree. A policy that sends misses to the smallest tree
/// feeds it until it dies; one that drops locality at any imbalance loses the hit rate instead.
#[test]
fn b30_a_miss_goes_to_the_least_load_and_a_light_holder_keeps_its_prefix() {
    let mut active = [40 * 470u64, 0];
    for request in 0..100 {
        let blocks = 20 + request % 30;
        let choice = pick(1.0, &[candidate(0, blocks, 0, active[0]), candidate(1, blocks, 0, active[1])]).unwrap();
        assert_eq!(choice.target, 1, "request {request}");
        active[1] += u64::from(blocks);
    }
    let three = |first_load| {
        let candidates = [candidate(0, 100, 95, first_load), candidate(1, 100, 0, 9), candidate(2, 100, 0, 30)];
        pick(1.0, &candidates).unwrap().target
    };
    assert_eq!(three(10), 0);
    assert_eq!(three(200), 1);
}

/// Replays single-turn requests that overlap, over targets of which one has joined a moment ago and never said
/// anything of its load. Gives how many each target got.
fn shares(seed: u64, targets: usize, requests: u32, joined_at: u32) -> Vec<u32> {
    let mut random = SmallRng::seed_from_u64(seed);
    let (mut active, mut picked_at, mut counts) = (vec![0u64; targets], vec![0u64; targets], vec![0u32; targets]);
    let mut running: BinaryHeap<Reverse<(u32, usize, u32)>> = BinaryHeap::new();
    for now in 0..requests {
        while running.peek().is_some_and(|Reverse((end, ..))| *end <= now) {
            let Some(Reverse((_, target, blocks))) = running.pop() else { break };
            active[target] -= u64::from(blocks);
        }
        let known = if now < joined_at { targets - 1 } else { targets };
        let blocks = random.random_range(5..40);
        let candidates: Vec<Candidate> = (0..known)
            .map(|target| Candidate {
                picked_at_ns: picked_at[target],
                ..candidate(target as u32, blocks, 0, active[target])
            })
            .collect();
        let target = pick(1.0, &candidates).unwrap().target as usize;
        active[target] += u64::from(blocks);
        picked_at[target] = u64::from(now) + 1;
        counts[target] += u32::from(now >= joined_at);
        running.push(Reverse((now + random.random_range(10..60), target, blocks)));
    }
    counts
}

/// A worker known to discovery and not yet to the load tracker was taken for the busiest of all, or for a free one,
/// and starved or drowned. Load here is one quantity, what this router has booked, and a new target starts at none.
#[test]
fn b34_a_worker_without_history_gets_a_fair_share() {
    for seed in 0..16 {
        let counts = shares(seed, 5, 1_000, 500);
        let fair = counts.iter().sum::<u32>() / 5;
        for (target, count) in counts.iter().enumerate() {
            assert!((fair / 2..=fair * 2).contains(count), "seed {seed} target {target}: {counts:?}");
        }
    }
}
