//! The pool against a naive twin, the scheduler against its own event stream, and the timing formula.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use rand::Rng;
use rand::seq::IndexedRandom;

use super::*;
use crate::engine::hash::{block_digest, root_digest};

/// The same rules with plain lists: free blocks in a vector, residency by scanning.
struct NaivePool {
    holders: Vec<u32>,
    contents: Vec<Option<Digest>>,
    free: Vec<u32>,
}

impl NaivePool {
    fn new(count: usize) -> NaivePool {
        NaivePool { holders: vec![0; count], contents: vec![None; count], free: (0..count as u32).collect() }
    }

    fn resident(&self) -> BTreeSet<Digest> {
        self.contents.iter().flatten().copied().collect()
    }

    fn take(&mut self, count: usize) -> Option<(Vec<u32>, Vec<Digest>)> {
        if count > self.free.len() {
            return None;
        }
        let taken: Vec<u32> = self.free.drain(..count).collect();
        let evicted = taken.iter().filter_map(|block| self.contents[*block as usize].take()).collect();
        taken.iter().for_each(|block| self.holders[*block as usize] = 1);
        Some((taken, evicted))
    }

    fn hold(&mut self, blocks: &[u32]) {
        for block in blocks {
            self.holders[*block as usize] += 1;
            self.free.retain(|free| free != block);
        }
    }

    fn release(&mut self, blocks: &[u32]) {
        for block in blocks.iter().rev() {
            self.holders[*block as usize] -= 1;
            if self.holders[*block as usize] == 0 {
                self.free.push(*block);
            }
        }
    }
}

fn digest(number: u64) -> Digest {
    root_digest(number)
}

#[test]
fn pool_agrees_with_a_naive_twin() {
    for seed in 0..40 {
        for keeps_copies in [true, false] {
            check_pool(seed, keeps_copies);
        }
    }
}

fn check_pool(seed: u64, keeps_copies: bool) {
    let mut draw = seed::generator(seed, "pool test");
    let count = draw.random_range(1..24);
    let (mut pool, mut naive) = (BlockPool::new(count, keeps_copies), NaivePool::new(count));
    let mut held: Vec<Vec<u32>> = Vec::new();
    for step in 0..400 {
        let context = format!("seed {seed}, copies {keeps_copies}, step {step}");
        match draw.random_range(0..10) {
            0..=3 => {
                let want = draw.random_range(0..=4);
                let mut evicted = Vec::new();
                let taken = pool.take(want, &mut evicted);
                let expected = naive.take(want);
                assert_eq!(taken.clone().map(|blocks| (blocks, evicted)), expected, "{context}");
                held.extend(taken.filter(|blocks| !blocks.is_empty()));
            }
            4..=5 => {
                let nameless: Vec<u32> =
                    held.iter().flatten().copied().filter(|it| naive.contents[*it as usize].is_none()).collect();
                if let Some(block) = nameless.choose(&mut draw) {
                    let content = digest(draw.random_range(0..30));
                    let expected = keeps_copies || !naive.resident().contains(&content);
                    assert_eq!(pool.name(*block, content), expected, "{context}");
                    if expected {
                        naive.contents[*block as usize] = Some(content);
                    }
                }
            }
            6 => {
                let wanted: Vec<Digest> = (0..3).map(|_| digest(draw.random_range(0..30))).collect();
                let found = pool.prefix(&wanted);
                let expected = wanted.iter().take_while(|it| naive.resident().contains(*it)).count();
                assert_eq!(found.len(), expected, "{context}");
                for (block, content) in found.iter().zip(&wanted) {
                    assert_eq!(naive.contents[*block as usize], Some(*content), "{context}");
                }
                let distinct: BTreeSet<u32> = found.iter().copied().collect();
                if distinct.len() == found.len() && !found.is_empty() {
                    pool.hold(&found);
                    naive.hold(&found);
                    held.push(found);
                }
            }
            7 if held.is_empty() => {
                assert!(pool.clear(), "{context}");
                naive.contents.iter_mut().for_each(|content| *content = None);
            }
            _ if !held.is_empty() => {
                let blocks = held.swap_remove(draw.random_range(0..held.len()));
                pool.release(&blocks);
                naive.release(&blocks);
            }
            _ => {}
        }
        assert_eq!(pool.blocks_free(), naive.free.len(), "{context}");
        let resident: BTreeSet<Digest> = pool.resident_digests().copied().collect();
        assert_eq!(resident, naive.resident(), "{context}");
        if !held.is_empty() {
            assert!(!pool.clear() || pool.blocks_held() == 0, "{context}: cleared while blocks were held");
        }
    }
}

/// What a subscriber knows: copies per content. Checks on the way that each stored block is its parent's child.
#[derive(Default)]
struct Mirror {
    copies: HashMap<Digest, u32>,
    on_host: BTreeSet<Digest>,
}

impl Mirror {
    fn apply(&mut self, events: Vec<CacheEvent>, seed: u64, block_size: usize) {
        for event in events {
            match event {
                CacheEvent::Stored { memory, digests, parent, tokens, salt } => {
                    assert_eq!(tokens.len(), digests.len() * block_size);
                    let mut parent = parent;
                    for (digest, block) in digests.iter().zip(tokens.chunks(block_size)) {
                        let expected = block_digest(&root_digest(seed), parent.as_ref(), block, salt.as_deref());
                        assert_eq!(*digest, expected);
                        match memory {
                            Memory::Device => *self.copies.entry(*digest).or_default() += 1,
                            Memory::Host => assert!(self.on_host.insert(*digest), "the host has one copy"),
                        }
                        parent = Some(*digest);
                    }
                }
                CacheEvent::Removed { memory: Memory::Host, digests } => {
                    digests.iter().for_each(|it| assert!(self.on_host.remove(it), "only what was stored is removed"));
                }
                CacheEvent::Removed { memory: Memory::Device, digests } => {
                    for digest in digests {
                        let copies = self.copies.get_mut(&digest).expect("only what was stored is removed");
                        *copies -= 1;
                        if *copies == 0 {
                            self.copies.remove(&digest);
                        }
                    }
                }
                CacheEvent::Cleared => *self = Mirror::default(),
            }
        }
    }

    fn contents(&self) -> BTreeSet<Digest> {
        self.copies.keys().copied().collect()
    }
}

fn resident(scheduler: &Scheduler) -> BTreeSet<Digest> {
    scheduler.pool().resident_digests().copied().collect()
}

fn on_host(scheduler: &Scheduler) -> BTreeSet<Digest> {
    scheduler.host().into_iter().flat_map(HostPool::resident_digests).copied().collect()
}

fn steady() -> Speed {
    Speed { jitter: 0.0, ..Speed::default() }
}

fn answer_of(tokens: usize) -> Vec<u32> {
    (0..tokens as u32).map(|it| 9_000 + it).collect()
}

fn sequence(id: u64, prompt: Vec<u32>, answer: usize) -> NewSequence {
    NewSequence { id, content: Spelled::new(prompt, &answer_of(answer), None) }
}

/// Runs to the end; returns the outputs and the number of steps.
fn drain(scheduler: &mut Scheduler) -> (Vec<Output>, usize) {
    let (mut outputs, mut steps) = (Vec::new(), 0);
    while scheduler.begin_step().is_some() {
        outputs.extend(scheduler.finish_step());
        steps += 1;
    }
    (outputs, steps)
}

#[test]
fn events_rebuild_the_pool_under_random_work() {
    for seed in 0..25 {
        for keeps_copies in [true, false] {
            for host_blocks in [0, 60] {
                check_events(seed, keeps_copies, host_blocks);
            }
        }
    }
}

fn check_events(seed: u64, keeps_copies: bool, host_blocks: usize) {
    const BLOCK: usize = 4;
    let mut draw = seed::generator(seed, "scheduler test");
    let speed = Speed { tokens_per_step_max: draw.random_range(1..40), sequences_max: 6, ..steady() };
    let mut scheduler = Scheduler::new(speed, BLOCK, BlockPool::new(draw.random_range(20..40), keeps_copies), seed);
    if host_blocks > 0 {
        scheduler = scheduler.with_host(HostPool::new(host_blocks));
    }
    let (mut mirror, mut submitted, mut ended, mut alive) = (Mirror::default(), 0u64, 0u64, Vec::new());
    for round in 0..600 {
        let context = format!("seed {seed}, copies {keeps_copies}, host {host_blocks}, round {round}");
        if draw.random_bool(0.25) {
            let group = draw.random_range(0..3u32);
            let shared = draw.random_range(0..30);
            let own = draw.random_range(1..20);
            let prompt: Vec<u32> = (0..shared)
                .map(|it| group * 1000 + it)
                .chain((0..own).map(|_| draw.random_range(5000..5004)))
                .collect();
            let answer = answer_of(draw.random_range(1..25));
            let salt = draw.random_bool(0.1).then(|| "s".to_string());
            scheduler.submit(NewSequence { id: submitted, content: Spelled::new(prompt, &answer, salt) });
            alive.push(submitted);
            submitted += 1;
        }
        if draw.random_bool(0.03) {
            scheduler.clear();
        }
        if scheduler.begin_step().is_some() {
            if draw.random_bool(0.1)
                && let Some(id) = alive.choose(&mut draw).copied()
            {
                scheduler.abort(id);
                alive.retain(|it| *it != id);
                ended += 1;
            }
            for output in scheduler.finish_step().into_iter().filter(|output| output.last) {
                assert!(alive.contains(&output.id), "{context}: output after the end");
                alive.retain(|id| *id != output.id);
                ended += 1;
            }
        }
        mirror.apply(scheduler.drain_events(), seed, BLOCK);
        assert_eq!(mirror.contents(), resident(&scheduler), "{context}");
        assert_eq!(mirror.on_host, on_host(&scheduler), "{context}");
    }
    ended += drain(&mut scheduler).0.iter().filter(|output| output.last).count() as u64;
    mirror.apply(scheduler.drain_events(), seed, BLOCK);
    assert_eq!(mirror.contents(), resident(&scheduler), "seed {seed}");
    assert_eq!(ended, submitted, "seed {seed}: every sequence ends once");
    assert_eq!(scheduler.pool().blocks_held(), 0, "seed {seed}");
    assert_eq!(scheduler.sequences_running() + scheduler.sequences_waiting(), 0, "seed {seed}");
    assert_eq!(scheduler.totals().loaded_tokens > 0, host_blocks > 0, "seed {seed}: {:?}", scheduler.totals());
}

#[test]
fn a_repeated_prefix_is_not_computed_again() {
    let mut scheduler = Scheduler::new(steady(), 16, BlockPool::new(1000, true), 7);
    let prompt: Vec<u32> = (0..8000).collect();
    scheduler.submit(sequence(1, prompt.clone(), 2));
    let (outputs, steps) = drain(&mut scheduler);
    assert_eq!(outputs[0].hits.cached_tokens, 0);
    assert_eq!(steps, 5, "8,000 tokens take four chunks of 2,048, then one decode step");
    let resident_before = scheduler.pool().blocks_resident();
    scheduler.submit(sequence(2, prompt, 2));
    let (outputs, steps) = drain(&mut scheduler);
    // 8,000 = 500 full blocks, but the last token is always computed, so the last block is not reused.
    assert_eq!(outputs[0].hits.cached_tokens, 499 * 16);
    assert_eq!(steps, 2);
    assert_eq!(scheduler.pool().blocks_resident(), resident_before, "the second request adds no content");
}

#[test]
fn step_durations_follow_the_formula() {
    let speed = steady();
    let mut scheduler = Scheduler::new(speed.clone(), 16, BlockPool::new(1000, true), 7);
    scheduler.submit(sequence(1, (0..1000).collect(), 3));
    let prefill = scheduler.begin_step().unwrap().duration;
    assert_eq!(prefill, speed.step_base + speed.prefill_per_token * 1000);
    scheduler.finish_step();
    let decode = scheduler.begin_step().unwrap().duration;
    let expected = speed.step_base + speed.decode_per_sequence + speed.decode_per_kilotoken.mul_f64(1.001);
    assert_eq!(decode, expected);
    scheduler.finish_step();
    scheduler.submit(sequence(2, (5000..5100).collect(), 1));
    let mixed = scheduler.begin_step().unwrap().duration;
    let context = speed.decode_per_kilotoken.mul_f64(1.002);
    assert_eq!(mixed, speed.step_base + speed.decode_per_sequence + context + speed.prefill_per_token * 100);
}

#[test]
fn jitter_is_bounded_and_repeatable() {
    let durations = |seed| {
        let speed = Speed { jitter: 0.2, ..steady() };
        let mut scheduler = Scheduler::new(speed, 16, BlockPool::new(100, true), seed);
        scheduler.submit(sequence(1, (0..10).collect(), 50));
        let mut seen = Vec::new();
        while let Some(step) = scheduler.begin_step() {
            seen.push(step.duration);
            scheduler.finish_step();
        }
        seen
    };
    assert_eq!(durations(3), durations(3));
    assert_ne!(durations(3), durations(4));
    let plain = Duration::from_micros(6150);
    let (low, high) = (plain.mul_f64(0.79), plain.mul_f64(1.21));
    assert!(durations(3)[1..].iter().all(|it| *it > low && *it < high));
}

#[test]
fn aborted_sequences_give_back_their_blocks() {
    let mut scheduler = Scheduler::new(steady(), 16, BlockPool::new(100, true), 7);
    scheduler.submit(sequence(1, (0..100).collect(), 50));
    scheduler.submit(sequence(2, (200..300).collect(), 50));
    scheduler.begin_step().unwrap();
    scheduler.abort(1);
    assert!(scheduler.pool().blocks_held() > 7, "blocks stay until the step ends");
    let outputs = scheduler.finish_step();
    assert_eq!(outputs.iter().map(|output| output.id).collect::<Vec<_>>(), [2]);
    assert_eq!(scheduler.pool().blocks_held(), 7);
    scheduler.abort(2);
    assert_eq!(scheduler.pool().blocks_held(), 0);
    assert_eq!(scheduler.totals().aborted, 2);
    assert!(scheduler.begin_step().is_none());
}

#[test]
fn a_full_pool_preempts_and_still_finishes_everyone() {
    let mut scheduler = Scheduler::new(steady(), 4, BlockPool::new(12, true), 7);
    for id in 0..3 {
        let prompt = (0..8).map(|it| id as u32 * 100 + it).collect();
        scheduler.submit(sequence(id, prompt, 24));
    }
    let (outputs, _) = drain(&mut scheduler);
    assert!(scheduler.totals().preempted > 0);
    assert_eq!(scheduler.totals().finished, 3);
    for id in 0..3 {
        let positions: Vec<usize> = outputs.iter().filter(|it| it.id == id).map(|it| it.position).collect();
        assert_eq!(positions, (0..24).collect::<Vec<_>>(), "each token exactly once, in order");
    }
}

#[test]
fn leaves_are_evicted_before_their_parents() {
    let mut scheduler = Scheduler::new(steady(), 4, BlockPool::new(10, true), 7);
    scheduler.submit(sequence(1, (0..32).collect(), 1));
    drain(&mut scheduler);
    let Some(CacheEvent::Stored { digests, .. }) = scheduler.drain_events().pop() else { panic!("one store") };
    scheduler.submit(sequence(2, (100..116).collect(), 1));
    drain(&mut scheduler);
    let removed: Vec<Digest> = scheduler
        .drain_events()
        .into_iter()
        .filter_map(|event| if let CacheEvent::Removed { digests, .. } = event { Some(digests[0]) } else { None })
        .collect();
    assert_eq!(removed, [digests[7], digests[6]]);
}

fn hits(outputs: &[Output], id: u64) -> PrefixHits {
    outputs.iter().find(|output| output.id == id).expect("each sequence has a first token").hits
}

/// Two equal prompts that wait for one step: vLLM has named the first one's blocks when it comes to the second.
#[test]
fn a_step_shares_its_own_blocks_as_vllm_does_and_not_as_sglang_does() {
    for (keeps_copies, cached_tokens) in [(true, 48), (false, 0)] {
        let mut scheduler = Scheduler::new(steady(), 16, BlockPool::new(100, keeps_copies), 7);
        (1..=2).for_each(|id| scheduler.submit(sequence(id, (0..50).collect(), 1)));
        let (outputs, steps) = drain(&mut scheduler);
        assert_eq!((hits(&outputs, 2).cached_tokens, steps), (cached_tokens, 1), "copies {keeps_copies}");
        assert_eq!(scheduler.pool().blocks_resident(), 3);
    }
}

/// 16 tokens of prompt and 33 of answer, of which the last is never computed.
#[test]
fn an_answer_is_cached_as_it_grows_in_vllm_and_at_its_end_in_sglang() {
    for (keeps_copies, before, after) in [(true, 3, 3), (false, 1, 3)] {
        let mut scheduler = Scheduler::new(steady(), 16, BlockPool::new(100, keeps_copies), 7);
        scheduler.submit(sequence(1, (0..16).collect(), 33));
        for _ in 0..32 {
            scheduler.begin_step().unwrap();
            scheduler.finish_step();
        }
        scheduler.begin_step().unwrap();
        assert_eq!(scheduler.pool().blocks_resident(), before, "copies {keeps_copies}");
        scheduler.finish_step();
        assert_eq!((scheduler.pool().blocks_resident(), scheduler.sequences_running()), (after, 0));
    }
}

#[test]
fn nobody_is_admitted_before_the_whole_prompt_fits() {
    let speed = Speed { tokens_per_step_max: 16, ..steady() };
    let mut scheduler = Scheduler::new(speed, 4, BlockPool::new(12, true), 7);
    scheduler.submit(sequence(1, (0..20).collect(), 4));
    scheduler.submit(sequence(2, (100..132).collect(), 1));
    let (mut outputs, mut together) = (Vec::new(), 0);
    while scheduler.begin_step().is_some() {
        together = together.max(scheduler.sequences_running());
        outputs.extend(scheduler.finish_step());
    }
    // A chunk of four blocks would fit beside the first one's six; all eight do not.
    assert_eq!((together, scheduler.totals().finished, scheduler.totals().preempted), (1, 2, 0));
}

#[test]
fn what_only_the_host_has_is_loaded_in_the_time_that_loading_takes() {
    let speed = steady();
    let mut scheduler = Scheduler::new(speed.clone(), 16, BlockPool::new(20, true), 7).with_host(HostPool::new(100));
    scheduler.submit(sequence(1, (0..160).collect(), 1));
    drain(&mut scheduler);
    scheduler.submit(sequence(2, (1000..1240).collect(), 1));
    drain(&mut scheduler);
    assert_eq!((scheduler.pool().blocks_resident(), scheduler.host().unwrap().blocks_resident()), (20, 25));
    scheduler.drain_events();
    // Five of the ten blocks are left on the device, the host has all.
    scheduler.submit(sequence(3, (0..170).collect(), 1));
    let step = scheduler.begin_step().unwrap();
    assert_eq!(step.duration, speed.step_base + speed.prefill_per_token * 10 + speed.load_per_token * 80);
    let outputs = scheduler.finish_step();
    assert_eq!(hits(&outputs, 3), PrefixHits { cached_tokens: 160, loaded_tokens: 80 });
    let stored: Vec<(Memory, usize)> = scheduler
        .drain_events()
        .iter()
        .filter_map(|event| match event {
            CacheEvent::Stored { memory, digests, .. } => Some((*memory, digests.len())),
            _ => None,
        })
        .collect();
    assert_eq!(stored, [(Memory::Device, 5)], "loaded blocks are on the device again, and the host has them still");
}
