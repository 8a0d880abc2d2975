//! The index against a naive model: one plain set per slot, replayed from the engine's point of view.
//! `INFERA_MODEL_SEEDS=N` runs so many seeds of the first.

use std::collections::{BTreeMap, BTreeSet};

use super::mirror::chained;
use super::*;
use crate::events::{CopyKey, EngineHash, Event, Medium, Stored};
use crate::fleet::Slot;
use crate::hash::{BlockHash, prompt_blocks};
use crate::limits::RUN_BLOCKS_MAX;

const BLOCK_SIZE: usize = 2;
const DEVICE: CopyKey = CopyKey { medium: Medium::DEVICE, group: CopyKey::NO_GROUP };

/// A worker as the engine sees it: which chains it has announced, how often, under its own names.
struct Engine {
    slot: u16,
    salt: u64,
    mirror: Mirror,
    copies: BTreeMap<BlockHash, u32>,
}

impl Engine {
    fn new(slot: u16, salt: u64) -> Self {
        Self { slot, salt, mirror: Mirror::new(slot), copies: BTreeMap::new() }
    }

    fn name(&self, block: BlockHash) -> EngineHash {
        EngineHash(block.0.rotate_left(17) ^ self.salt)
    }

    fn store(&mut self, tree: &mut Tree, prompt: &[u32], from: usize, to: usize) -> Applied {
        let blocks = prompt_blocks(prompt, BLOCK_SIZE);
        let hashes: Vec<EngineHash> = blocks[from..to].iter().map(|block| self.name(*block)).collect();
        let parent = from.checked_sub(1).map(|at| self.name(blocks[at]));
        let stored = Stored {
            hashes: &hashes,
            parent,
            tokens: &prompt[from * BLOCK_SIZE..to * BLOCK_SIZE],
            block_size: BLOCK_SIZE,
            copy: DEVICE,
            identities: &[],
            may_report_hits: false,
        };
        for block in &blocks[from..to] {
            *self.copies.entry(*block).or_insert(0) += 1;
        }
        self.mirror.apply(tree, &Event::Stored(stored))
    }

    fn remove(&mut self, tree: &mut Tree, blocks: &[BlockHash]) {
        let hashes: Vec<EngineHash> = blocks.iter().map(|block| self.name(*block)).collect();
        for block in blocks {
            if let Some(count) = self.copies.get_mut(block) {
                *count -= 1;
                if *count == 0 {
                    self.copies.remove(block);
                }
            }
        }
        self.mirror.apply(tree, &Event::Removed { hashes: &hashes, copy: DEVICE });
    }

    fn clear(&mut self, tree: &mut Tree) {
        self.copies.clear();
        self.mirror.apply(tree, &Event::Cleared);
    }

    fn depth(&self, blocks: &[BlockHash]) -> u32 {
        blocks.iter().take_while(|block| self.copies.contains_key(block)).count() as u32
    }
}

/// Prompts that share prefixes and branch at random points.
fn prompts(random: &mut fastrand::Rng, count: usize, blocks_max: usize) -> Vec<Vec<u32>> {
    let mut prompts: Vec<Vec<u32>> = Vec::new();
    for number in 0..count {
        let mut prompt = match random.usize(0..=prompts.len()) {
            at if at < prompts.len() => {
                let keep = random.usize(0..=prompts[at].len() / BLOCK_SIZE) * BLOCK_SIZE;
                prompts[at][..keep].to_vec()
            }
            _ => Vec::new(),
        };
        let more = random.usize(1..=blocks_max) * BLOCK_SIZE;
        prompt.extend((0..more).map(|at| (number * 100_000 + at) as u32));
        prompts.push(prompt);
    }
    prompts
}

fn check(tree: &mut Tree, engines: &[Engine], prompts: &[Vec<u32>], hits: &mut Hits, what: &str) {
    tree.check();
    let snapshot = tree.publish();
    let expected: BTreeSet<(BlockHash, u16)> =
        engines.iter().flat_map(|engine| engine.copies.keys().map(|block| (*block, engine.slot))).collect();
    assert_eq!(tree.published_memberships(), expected, "{what}");
    for prompt in prompts {
        let blocks = prompt_blocks(prompt, BLOCK_SIZE);
        snapshot.query(&blocks, hits);
        for engine in engines {
            assert_eq!(hits.depth(Slot(u32::from(engine.slot))), engine.depth(&blocks), "{what}, slot {}", engine.slot);
        }
    }
    for engine in engines {
        assert_eq!(tree.held_count(engine.slot) as usize, engine.copies.len(), "{what}");
        assert_eq!(engine.mirror.plain_blocks(tree), engine.copies.keys().copied().collect::<Vec<_>>(), "{what}");
    }
}

/// Stores, repeated stores, removals in any order, clears, joins and leaves; parents are always known to the router here.
fn run(seed: u64, steps: usize, blocks_max: usize) {
    let mut random = fastrand::Rng::with_seed(seed);
    let prompts = prompts(&mut random, 12, blocks_max);
    let mut tree = Tree::default();
    let mut hits = Hits::new();
    let slots = [0u16, 1, 2, 5, 63, 64, 130, 131, 200];
    let mut engines: Vec<Engine> = slots.iter().map(|slot| Engine::new(*slot, random.u64(..))).collect();
    for step in 0..steps {
        let at = random.usize(0..engines.len());
        let engine = &mut engines[at];
        let prompt = &prompts[random.usize(0..prompts.len())];
        let blocks = prompt_blocks(prompt, BLOCK_SIZE);
        match random.u32(0..100) {
            0..50 => {
                // From the root, or after a block that the engine has.
                let known = blocks.iter().take_while(|block| engine.copies.contains_key(block)).count();
                let from = random.usize(0..=known.min(blocks.len() - 1));
                let to = random.usize(from + 1..=blocks.len());
                engine.store(&mut tree, prompt, from, to);
            }
            50..95 => {
                let mut held: Vec<BlockHash> =
                    blocks.iter().copied().filter(|block| engine.copies.contains_key(block)).collect();
                match random.u32(0..3) {
                    0 => held.reverse(),
                    1 => random.shuffle(&mut held),
                    _ => {}
                }
                held.truncate(random.usize(0..=held.len()));
                engine.remove(&mut tree, &held);
            }
            95..97 => engine.clear(&mut tree),
            _ => {
                // Leaves, and another registration takes the slot.
                engine.clear(&mut tree);
                let slot = engine.slot;
                *engine = Engine::new(slot, random.u64(..));
            }
        }
        if step % 7 == 0 || step + 1 == steps {
            check(&mut tree, &engines, &prompts, &mut hits, &format!("seed {seed} step {step}"));
        }
    }
    for engine in &mut engines {
        engine.clear(&mut tree);
    }
    tree.publish();
    assert_eq!((tree.block_count(), tree.run_count(), tree.page_count()), (0, 0, 1), "seed {seed}");
}

#[test]
fn agrees_with_plain_sets() {
    // Miri takes about a thousand times as long.
    let (seeds, steps) = if cfg!(miri) { (1, 30) } else { (60, 150) };
    let seeds = std::env::var("INFERA_MODEL_SEEDS").map_or(seeds, |count| count.parse().expect("a number"));
    for seed in 0..seeds {
        run(seed, steps, 20);
    }
}

#[test]
fn agrees_with_plain_sets_beyond_the_longest_run() {
    for seed in 1000..1004 {
        run(seed, 60, RUN_BLOCKS_MAX);
    }
}

/// Events of one engine in an order that makes orphans: at rest, everything stored and not removed is visible.
#[test]
fn orphans_join_whatever_the_order_of_arrival() {
    for seed in 0..200 {
        let mut random = fastrand::Rng::with_seed(seed);
        let prompts = prompts(&mut random, 6, 12);
        let mut tree = Tree::default();
        let mut engines = vec![Engine::new(3, random.u64(..)), Engine::new(4, random.u64(..))];
        let mut pieces = Vec::new();
        for (at, prompt) in prompts.iter().enumerate() {
            let length = prompt.len() / BLOCK_SIZE;
            let mut from = 0;
            while from < length {
                let to = random.usize(from + 1..=length);
                pieces.push((at, from, to));
                from = to;
            }
        }
        random.shuffle(&mut pieces);
        for (at, from, to) in pieces {
            engines[0].store(&mut tree, &prompts[at], from, to);
            let blocks = prompt_blocks(&prompts[at], BLOCK_SIZE);
            // Never the last of an event: a detached block that is removed before any child is known is forgotten.
            if random.u8(0..4) == 0 && to - from > 1 {
                let block = blocks[random.usize(from..to - 1)];
                engines[0].remove(&mut tree, &[block]);
            }
        }
        check(&mut tree, &engines, &prompts, &mut Hits::new(), &format!("seed {seed}"));
        assert_eq!(engines[0].mirror.orphan_count(), 0, "seed {seed}");
        engines.iter_mut().for_each(|engine| engine.clear(&mut tree));
        assert_eq!(tree.block_count(), 0);
    }
}

fn depths(tree: &mut Tree, prompt: &[u32]) -> Vec<(u32, u32)> {
    let mut hits = Hits::new();
    tree.publish().query(&prompt_blocks(prompt, BLOCK_SIZE), &mut hits);
    hits.iter().map(|(slot, depth)| (slot.0, depth)).collect()
}

/// The router restarts while a worker keeps its cache: the first it hears of are children of blocks it never saw.
#[test]
fn b09_a_lost_index_heals_when_the_head_is_stored_again() {
    let prompt: Vec<u32> = (1..=8).collect();
    let blocks = prompt_blocks(&prompt, BLOCK_SIZE);
    let mut tree = Tree::default();
    let mut engine = Engine::new(1, 99);
    assert_eq!(engine.store(&mut tree, &prompt, 2, 3).orphaned, 1);
    assert_eq!(engine.store(&mut tree, &prompt, 3, 4).orphaned, 1);
    assert_eq!(depths(&mut tree, &prompt), []);
    assert_eq!(depths(&mut tree, &prompt[4..]), [], "an orphan is never a root");
    engine.remove(&mut tree, &blocks[2..3]);
    engine.store(&mut tree, &prompt, 0, 1);
    assert_eq!(depths(&mut tree, &prompt), [(1, 1)]);
    assert_eq!(engine.store(&mut tree, &prompt, 1, 2).joined, 2);
    assert_eq!(depths(&mut tree, &prompt), [(1, 2)], "the third block was removed: a hole ends the prefix");
    engine.store(&mut tree, &prompt, 2, 3);
    assert_eq!(depths(&mut tree, &prompt), [(1, 4)]);
    assert_eq!(engine.mirror.orphan_count(), 0);
}

/// Equal tokens under other engine hashes are one block; equal engine hashes on two workers are unrelated.
#[test]
fn b21_engine_hashes_are_names_of_one_worker() {
    let prompt: Vec<u32> = (1..=4).collect();
    let blocks = prompt_blocks(&prompt, BLOCK_SIZE);
    let mut tree = Tree::default();
    let (mut first, mut second) = (Engine::new(1, 7), Engine::new(2, 8));
    first.store(&mut tree, &prompt, 0, 2);
    second.store(&mut tree, &prompt, 0, 2);
    assert_eq!(depths(&mut tree, &prompt), [(1, 2), (2, 2)]);
    let name_of_first = first.name(blocks[0]);
    second.mirror.apply(&mut tree, &Event::Removed { hashes: &[name_of_first], copy: DEVICE });
    assert_eq!(depths(&mut tree, &prompt), [(1, 2), (2, 2)]);
    first.clear(&mut tree);
    assert_eq!(depths(&mut tree, &prompt), [(2, 2)]);
}

#[test]
fn one_content_under_two_names_goes_with_the_last() {
    let tokens = [1, 2];
    let mut tree = Tree::default();
    let mut mirror = Mirror::new(1);
    for name in [5, 6] {
        let hashes = [EngineHash(name)];
        let stored = Stored {
            hashes: &hashes,
            parent: None,
            tokens: &tokens,
            block_size: 2,
            copy: DEVICE,
            identities: &[],
            may_report_hits: false,
        };
        mirror.apply(&mut tree, &Event::Stored(stored));
    }
    for (name, left) in [(5, 1), (5, 1), (6, 0)] {
        mirror.apply(&mut tree, &Event::Removed { hashes: &[EngineHash(name)], copy: DEVICE });
        assert_eq!(tree.held_count(1), left, "after removing {name}");
    }
}

/// An engine may give a name to other content later; the old content is no longer there under that name.
#[test]
fn a_name_that_moves_takes_its_block_along() {
    let mut tree = Tree::default();
    let mut mirror = Mirror::new(1);
    let mut store = |tree: &mut Tree, name: u64, tokens: [u32; 2]| {
        let hashes = [EngineHash(name)];
        let stored = Stored {
            hashes: &hashes,
            parent: None,
            tokens: &tokens,
            block_size: 2,
            copy: DEVICE,
            identities: &[],
            may_report_hits: false,
        };
        mirror.apply(tree, &Event::Stored(stored));
        mirror.plain_blocks(tree)
    };
    store(&mut tree, 5, [1, 2]);
    assert_eq!(store(&mut tree, 5, [3, 4]), prompt_blocks(&[3, 4], 2));
    assert_eq!((depths(&mut tree, &[1, 2]), depths(&mut tree, &[3, 4])), (vec![], vec![(1, 1)]));
    store(&mut tree, 6, [3, 4]);
    store(&mut tree, 5, [1, 2]);
    assert_eq!((depths(&mut tree, &[1, 2]), depths(&mut tree, &[3, 4])), (vec![(1, 1)], vec![(1, 1)]));
    tree.check();
}

#[test]
fn media_and_groups_are_counted_apart() {
    let tokens = [1, 2];
    let mut tree = Tree::default();
    let mut mirror = Mirror::new(1);
    let hashes = [EngineHash(5)];
    let host = CopyKey { medium: Medium::HOST, group: CopyKey::NO_GROUP };
    let group = CopyKey { medium: Medium::DEVICE, group: 1 };
    for copy in [DEVICE, host, DEVICE, group] {
        let stored = Stored {
            hashes: &hashes,
            parent: None,
            tokens: &tokens,
            block_size: 2,
            copy,
            identities: &[],
            may_report_hits: false,
        };
        mirror.apply(&mut tree, &Event::Stored(stored));
    }
    for (copy, left) in [(DEVICE, 1), (host, 1), (host, 1), (DEVICE, 1), (DEVICE, 1), (group, 0)] {
        mirror.apply(&mut tree, &Event::Removed { hashes: &hashes, copy });
        assert_eq!(tree.held_count(1), left, "after {copy:?}");
    }
}

#[test]
fn b19_blocks_with_an_identity_and_their_children_never_give_plain_credit() {
    let prompt: Vec<u32> = (1..=6).collect();
    let mut tree = Tree::default();
    let mut mirror = Mirror::new(1);
    let hashes = [EngineHash(1), EngineHash(2), EngineHash(3)];
    let stored = Stored {
        hashes: &hashes,
        parent: None,
        tokens: &prompt,
        block_size: 2,
        copy: DEVICE,
        identities: &[0, 77, 0],
        may_report_hits: false,
    };
    mirror.apply(&mut tree, &Event::Stored(stored));
    assert_eq!(depths(&mut tree, &prompt), [(1, 1)]);
    assert_eq!((tree.held_count(1), mirror.plain_blocks(&tree).len()), (3, 1));
    let first = prompt_blocks(&prompt, 2)[0];
    let second = chained(first, 77, &prompt[2..4]);
    let mut hits = Hits::new();
    tree.publish().query(&[first, second, chained(second, 0, &prompt[4..])], &mut hits);
    assert_eq!(hits.depth(Slot(1)), 3);
}

/// Unique suffixes come and go under one system prompt, removed in order, in reverse, and shuffled: nodes and pages return.
#[test]
fn b55_churn_returns_to_where_it_was() {
    let mut random = fastrand::Rng::with_seed(5);
    let system: Vec<u32> = (1..=20).collect();
    let mut tree = Tree::default();
    let mut engines = [Engine::new(1, 7), Engine::new(2, 8)];
    engines.iter_mut().for_each(|engine| {
        engine.store(&mut tree, &system, 0, 10);
    });
    tree.publish();
    let before = (tree.block_count(), tree.run_count(), tree.page_count());
    for round in 0..2_000u32 {
        let mut prompt = system.clone();
        prompt.extend((0..200).map(|at| 1_000_000 + round * 200 + at));
        let mut suffix = prompt_blocks(&prompt, BLOCK_SIZE)[10..].to_vec();
        let engine = &mut engines[(round % 2) as usize];
        engine.store(&mut tree, &prompt, 10, 110);
        match round % 3 {
            0 => suffix.reverse(),
            1 => random.shuffle(&mut suffix),
            _ => {}
        }
        engine.remove(&mut tree, &suffix);
        if round % 50 == 0 {
            tree.publish();
        }
    }
    tree.publish();
    tree.check();
    assert_eq!((tree.block_count(), tree.run_count(), tree.page_count()), before);
}

/// Two workers share a prompt and lose it block by block in random order: no fragments are left behind.
#[test]
fn split_runs_are_joined_again() {
    for seed in 0..50 {
        let mut random = fastrand::Rng::with_seed(seed);
        let prompt: Vec<u32> = (1..=200).collect();
        let mut tree = Tree::default();
        let (mut first, mut second) = (Engine::new(1, 7), Engine::new(2, 8));
        first.store(&mut tree, &prompt, 0, 100);
        second.store(&mut tree, &prompt, 0, 100);
        assert_eq!(tree.run_count(), 1);
        let mut blocks = prompt_blocks(&prompt, BLOCK_SIZE);
        random.shuffle(&mut blocks);
        for block in blocks {
            second.remove(&mut tree, &[block]);
        }
        tree.check();
        assert_eq!((tree.run_count(), tree.span_count()), (1, 1), "seed {seed}");
    }
}

fn stored<'a>(hashes: &'a [EngineHash], parent: Option<u64>, tokens: &'a [u32], copy: CopyKey) -> Stored<'a> {
    let parent = parent.map(EngineHash);
    Stored { hashes, parent, tokens, block_size: 2, copy, identities: &[], may_report_hits: true }
}

/// vLLM's full report mode: hits are stored again, from the root on and in a later message, and there is no new copy of them.
/// Two requests that compute one prompt in the same step do make two copies, and both stores are in one message.
#[test]
fn reports_of_hits_are_no_copies_and_copies_of_one_step_are() {
    let prompt: Vec<u32> = (1..=8).collect();
    let names: Vec<EngineHash> = (11..15).map(EngineHash).collect();
    let mut tree = Tree::default();
    let mut mirror = Mirror::new(1);
    let mut message = |tree: &mut Tree, events: &[Event<'_>]| {
        mirror.begin_batch();
        events.iter().for_each(|event| {
            mirror.apply(tree, event);
        });
        tree.held_count(1)
    };
    let head = Event::Stored(stored(&names[..2], None, &prompt[..4], DEVICE));
    let next = Event::Stored(stored(&names[2..3], Some(12), &prompt[4..6], DEVICE));
    let remove = Event::Removed { hashes: &names[..2], copy: DEVICE };
    assert_eq!(message(&mut tree, &[head]), 2);
    assert_eq!(message(&mut tree, &[head, next]), 3, "a report, and what the request computed itself");
    assert_eq!(message(&mut tree, &[remove]), 1, "the report left no copy behind");
    assert_eq!(message(&mut tree, &[head, head]), 3, "two copies of one step");
    assert_eq!(message(&mut tree, &[head]), 3);
    assert_eq!(message(&mut tree, &[remove]), 3, "one of two copies is left");
    assert_eq!(message(&mut tree, &[remove]), 1);
    // The last block of a prompt that is cached as a whole is computed again, after its parent: a copy.
    assert_eq!(message(&mut tree, &[head]), 3);
    let again = Event::Stored(stored(&names[1..2], Some(11), &prompt[2..4], DEVICE));
    assert_eq!(message(&mut tree, &[again]), 3);
    let last = Event::Removed { hashes: &names[1..2], copy: DEVICE };
    assert_eq!(message(&mut tree, &[last]), 3);
    assert_eq!(message(&mut tree, &[last]), 2);
    // Partly known, so at least some of it was computed: copies.
    assert_eq!(message(&mut tree, &[head]), 3);
    assert_eq!(message(&mut tree, &[Event::Removed { hashes: &names[..1], copy: DEVICE }]), 3);
}

/// Copies in host memory extend the device prefix, and are no part of it; random events against plain sets by memory.
#[test]
fn device_and_any_memory_are_told_apart() {
    const HOST: CopyKey = CopyKey { medium: Medium::HOST, group: CopyKey::NO_GROUP };
    for seed in 0..60 {
        let mut random = fastrand::Rng::with_seed(seed);
        let prompt: Vec<u32> = (1..=40).collect();
        let blocks = prompt_blocks(&prompt, BLOCK_SIZE);
        let mut tree = Tree::default();
        let mut mirrors = [Mirror::new(1), Mirror::new(70)];
        let mut held = vec![BTreeMap::<(usize, bool), u32>::new(); mirrors.len()];
        let mut hits = Hits::new();
        for step in 0..150 {
            let at = random.usize(0..mirrors.len());
            let is_host = random.bool();
            let copy = if is_host { HOST } else { DEVICE };
            let any = |held: &BTreeMap<(usize, bool), u32>, block: usize| {
                held.contains_key(&(block, false)) || held.contains_key(&(block, true))
            };
            let known = (0..blocks.len()).take_while(|block| any(&held[at], *block)).count();
            let names = |range: std::ops::Range<usize>| range.map(|at| EngineHash(100 + at as u64)).collect::<Vec<_>>();
            if random.u8(0..10) < if step / 50 % 2 == 0 { 7 } else { 4 } {
                let from = random.usize(0..=known.min(blocks.len() - 1));
                let to = random.usize(from + 1..=blocks.len());
                let parent = from.checked_sub(1).map(|before| 100 + before as u64);
                let hashes = names(from..to);
                let mut event = stored(&hashes, parent, &prompt[from * 2..to * 2], copy);
                event.may_report_hits = false;
                mirrors[at].apply(&mut tree, &Event::Stored(event));
                (from..to).for_each(|block| *held[at].entry((block, is_host)).or_insert(0) += 1);
            } else {
                let from = random.usize(0..blocks.len());
                let to = random.usize(from + 1..=blocks.len());
                mirrors[at].apply(&mut tree, &Event::Removed { hashes: &names(from..to), copy });
                for block in from..to {
                    if let Some(count) = held[at].get_mut(&(block, is_host)) {
                        *count -= 1;
                        if *count == 0 {
                            held[at].remove(&(block, is_host));
                        }
                    }
                }
            }
            tree.check();
            let snapshot = tree.publish();
            for (at, slot) in [(0, Slot(1)), (1, Slot(70))] {
                let device = (0..blocks.len()).take_while(|block| held[at].contains_key(&(*block, false))).count();
                let longest = (0..blocks.len()).take_while(|block| any(&held[at], *block)).count();
                let differs = snapshot.query(&blocks, &mut hits);
                assert_eq!(hits.depth(slot) as usize, device, "seed {seed} step {step}");
                assert!(differs || longest == device, "seed {seed} step {step}");
                snapshot.query_any(&blocks, &mut hits);
                assert_eq!(hits.depth(slot) as usize, longest, "seed {seed} step {step}");
            }
        }
    }
}

/// Readers query while the writer prolongs, cuts and prolongs again, with other blocks: the hashes behind a published node
/// are shared with the writer, so a reader must never see one that is not of its own snapshot.
#[test]
fn readers_see_whole_snapshots_while_the_writer_goes_on() {
    use std::sync::atomic::{AtomicBool, Ordering};
    const BLOCKS: usize = 120;
    let branches: Vec<Vec<u32>> = (0..3)
        .map(|branch| {
            (0..BLOCKS * BLOCK_SIZE).map(|at| if at < 20 { at as u32 } else { (branch * 1_000 + at) as u32 }).collect()
        })
        .collect();
    let chains: Vec<Vec<BlockHash>> = branches.iter().map(|branch| prompt_blocks(branch, BLOCK_SIZE)).collect();
    // A published state: the snapshot, and the depth of each branch in it.
    type State = (Snapshot, [u32; 3]);
    let cell = arc_swap::ArcSwap::from_pointee(State::default());
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let mut hits = Hits::new();
                while !stop.load(Ordering::Relaxed) {
                    let state = cell.load();
                    for (chain, depth) in chains.iter().zip(state.1) {
                        state.0.query(chain, &mut hits);
                        assert_eq!(hits.depth(Slot(1)), depth);
                    }
                }
            });
        }
        let mut random = fastrand::Rng::with_seed(3);
        let mut tree = Tree::default();
        let mut engine = Engine::new(1, 77);
        for _ in 0..if cfg!(miri) { 80 } else { 4_000 } {
            let branch = random.usize(0..3);
            let known = engine.depth(&chains[branch]) as usize;
            if random.bool() && known < BLOCKS {
                let to = (known + random.usize(1..20)).min(BLOCKS);
                engine.store(&mut tree, &branches[branch], known, to);
            } else {
                let keep = random.usize(0..=known);
                let gone: Vec<BlockHash> = chains[branch][keep..known].iter().rev().copied().collect();
                engine.remove(&mut tree, &gone);
            }
            let depths = [0, 1, 2].map(|branch| engine.depth(&chains[branch]));
            cell.store(std::sync::Arc::new((tree.publish(), depths)));
        }
        stop.store(true, Ordering::Relaxed);
    });
}

/// A removal in one KV-cache group touches no other group: sliding-window groups evict on their own, and their blocks were
/// never stored here.
#[test]
fn removals_of_another_group_touch_nothing() {
    let prompt: Vec<u32> = (1..=8).collect();
    let names: Vec<EngineHash> = (11..15).map(EngineHash).collect();
    let group = |group: u16| CopyKey { medium: Medium::DEVICE, group };
    let (mut tree, mut mirror) = (Tree::default(), Mirror::new(1));
    mirror.apply(&mut tree, &Event::Stored(stored(&names, None, &prompt, group(0))));
    let applied = mirror.apply(&mut tree, &Event::Removed { hashes: &names, copy: group(1) });
    assert_eq!((applied.blocks_removed, depths(&mut tree, &prompt)), (0, vec![(1, 4)]));
    let applied = mirror.apply(&mut tree, &Event::Removed { hashes: &names[1..2], copy: group(0) });
    assert_eq!((applied.blocks_removed, depths(&mut tree, &prompt)), (1, vec![(1, 1)]));
}

/// The pool of orphans is bounded: the oldest go, are counted, and do not join any more; the newest do.
#[test]
fn the_oldest_orphans_make_room() {
    use crate::limits::ORPHAN_BLOCKS_MAX;
    let (mut tree, mut mirror) = (Tree::default(), Mirror::new(1));
    let count = ORPHAN_BLOCKS_MAX as u64 + 10;
    let mut dropped = 0;
    for number in 0..count {
        let tokens = [number as u32, 1];
        let name = [EngineHash(100 + number)];
        let event = Event::Stored(stored_at(&name, Some(7), &tokens));
        dropped += mirror.apply(&mut tree, &event).orphans_dropped;
    }
    assert_eq!((dropped, mirror.orphan_count()), (10, ORPHAN_BLOCKS_MAX));
    let applied = mirror.apply(&mut tree, &Event::Stored(stored_at(&[EngineHash(7)], None, &[1, 2])));
    assert_eq!((applied.joined, mirror.orphan_count()), (ORPHAN_BLOCKS_MAX as u64, 0));
    let depth_of = |tree: &mut Tree, number: u32| depths(tree, &[1, 2, number, 1]);
    assert_eq!((depth_of(&mut tree, 9), depth_of(&mut tree, 10)), (vec![(1, 1)], vec![(1, 2)]));
}

fn stored_at<'a>(hashes: &'a [EngineHash], parent: Option<u64>, tokens: &'a [u32]) -> Stored<'a> {
    Stored { may_report_hits: false, ..stored(hashes, parent, tokens, DEVICE) }
}
