//! Recent load: a decayed sum of the blocks that a target had to compute for its last picks. It gives the cost
//! a memory, so that requests that never overlap still spread (`--kv-recent-load`). Pure arithmetic over one
//! atomic per target; the pick number is an argument.
//!
//! Without it every in-flight count is 0 when requests come one after another, and the target that once served
//! the shared prefix collects the whole fleet's traffic, and with it the whole fleet's cache.
//!
//! Decay is by picks, not by time: what must be balanced is the order of arrivals, and a fleet that idles over
//! night needs no fresh start. It is computed when read, so that a pick writes to one target and not to all.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::fleet::TargetLoad;

/// What one pick leaves of all older charges. Source: the reference's cost function.
const DECAY_PER_PICK: f32 = 0.97;

/// Below this a charge is forgotten. Source: as above.
const FORGOTTEN_BLOCKS: f32 = 0.001;

/// What a block missed lately weighs of a missing one with `--kv-recent-load idle`. A target that has just computed a whole prompt is left
/// again for another that would have to compute all of it only when the overlap is below about this share, so a
/// prefix is still found where it was computed; and on the trace it was measured with, no larger weight had a
/// higher hit rate (`bench --bin simulate -- --sequential`).
const IDLE_SHARE: f64 = 0.1;

/// `--kv-recent-load`: what part recent load has in the cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RecentLoad {
    Off,
    /// Only when nothing is in flight on any candidate, where in-flight load says nothing; under load the cost
    /// is the mission's formula and nothing else.
    #[default]
    Idle,
    /// Whole and always, as in the reference.
    On,
}

impl RecentLoad {
    /// Weight of a block that was missed lately, where a missing one weighs `overlap_weight`.
    pub const fn weight(self, is_idle: bool, overlap_weight: f64) -> f64 {
        match (self, is_idle) {
            (RecentLoad::Off, _) | (RecentLoad::Idle, false) => 0.0,
            (RecentLoad::Idle, true) => IDLE_SHARE * overlap_weight,
            (RecentLoad::On, _) => 1.0,
        }
    }
}

/// Numbers the picks of the process.
#[derive(Debug, Default)]
pub struct PickCounter(AtomicU64);

impl PickCounter {
    /// The number of the pick that is being made; they wrap after 2^32, which only blurs one decay.
    pub fn current(&self) -> u32 {
        self.0.load(Ordering::Relaxed) as u32
    }

    fn next(&self) -> u32 {
        self.0.fetch_add(1, Ordering::Relaxed) as u32
    }
}

/// Recent load of a target at a pick, blocks.
pub fn recent_blocks(load: &TargetLoad, pick: u32) -> f64 {
    let (blocks, charged_at) = unpack(load.recent.load(Ordering::Relaxed));
    f64::from(decayed(blocks, charged_at, pick))
}

/// Charges the picked target with the blocks it misses; a prompt without blocks weighs as one, a prompt that
/// is cached whole as nothing. Two shards that charge one target at once both count.
pub fn charge(load: &TargetLoad, picks: &PickCounter, request_blocks: u32, cache_hits: u32) {
    let pick = picks.next();
    let missed = if request_blocks == 0 { 1 } else { request_blocks.saturating_sub(cache_hits) };
    // Never fails: the closure always gives a value.
    let _ = load.recent.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |packed| {
        let (blocks, charged_at) = unpack(packed);
        Some(pack(decayed(blocks, charged_at, pick) + missed as f32, pick))
    });
}

fn decayed(blocks: f32, charged_at: u32, pick: u32) -> f32 {
    // A pick numbered before the charge is one that another shard is still making.
    let picks_since = pick.wrapping_sub(charged_at) as i32;
    if picks_since <= 0 {
        return blocks;
    }
    let rest = blocks * DECAY_PER_PICK.powi(picks_since);
    if rest < FORGOTTEN_BLOCKS { 0.0 } else { rest }
}

fn pack(blocks: f32, pick: u32) -> u64 {
    (u64::from(pick) << 32) | u64::from(blocks.to_bits())
}

fn unpack(packed: u64) -> (f32, u32) {
    (f32::from_bits(packed as u32), (packed >> 32) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn charges_decay_with_every_pick_whoever_is_picked() {
        let (picks, here, there) = (PickCounter::default(), TargetLoad::default(), TargetLoad::default());
        charge(&here, &picks, 10, 2);
        let after = |count: i32| 8.0 * f64::from(DECAY_PER_PICK).powi(count);
        assert!((recent_blocks(&here, picks.current()) - after(1)).abs() < 1e-3);
        for _ in 0..10 {
            charge(&there, &picks, 1, 0);
        }
        assert!((recent_blocks(&here, picks.current()) - after(11)).abs() < 1e-3);
        for _ in 0..1000 {
            charge(&there, &picks, 5, 5);
        }
        assert_eq!(recent_blocks(&here, picks.current()), 0.0);
        assert_eq!(recent_blocks(&there, picks.current()), 0.0);
    }

    #[test]
    fn a_prompt_without_blocks_weighs_as_one_and_a_cached_one_as_nothing() {
        let check = |request_blocks, cache_hits, expected: f64| {
            let (picks, load) = (PickCounter::default(), TargetLoad::default());
            charge(&load, &picks, request_blocks, cache_hits);
            assert_eq!(recent_blocks(&load, 0), expected);
        };
        check(0, 0, 1.0);
        check(10, 10, 0.0);
        check(10, 0, 10.0);
    }

    /// Two requests with one long prefix, one after the other on an idle fleet: the second must go where the first
    /// was, although that target has just computed a whole prompt.
    #[test]
    fn an_idle_fleet_still_finds_a_prefix_where_it_was_computed() {
        let (picks, load) = (PickCounter::default(), TargetLoad::default());
        charge(&load, &picks, 100, 0);
        let weighed =
            |mode: RecentLoad, is_idle, weight| mode.weight(is_idle, weight) * recent_blocks(&load, picks.current());
        let penalty = |mode, is_idle| weighed(mode, is_idle, 1.0);
        assert!(penalty(RecentLoad::Idle, true) < 10.0);
        assert!((weighed(RecentLoad::Idle, true, 12.0) - 12.0 * penalty(RecentLoad::Idle, true)).abs() < 1e-9);
        assert_eq!((penalty(RecentLoad::Idle, false), penalty(RecentLoad::Off, true)), (0.0, 0.0));
        assert!(penalty(RecentLoad::On, false) > 90.0);
    }

    #[test]
    fn numbers_that_wrap_do_not_revive_a_charge() {
        let (picks, load) = (PickCounter(AtomicU64::new(u64::from(u32::MAX))), TargetLoad::default());
        charge(&load, &picks, 8, 0);
        assert_eq!(picks.current(), 0);
        assert!((recent_blocks(&load, picks.current()) - 8.0 * 0.97).abs() < 1e-3);
    }
}
