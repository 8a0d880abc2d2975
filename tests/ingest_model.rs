//! The whole way from sockets to the published view against a naive model, for random publishers: batches get lost, come
//! twice or late, publishers begin anew, and a replay socket has all, some or none of what is missing. At rest the view
//! is the model's, exactly. The model is plain sets, told from the publisher's point of view. `INFERA_MODEL_SEEDS=N` runs
//! so many seeds of each kind instead of 40.
#![allow(clippy::unwrap_used)]

mod kv_publisher;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Arc, Mutex};

use infera_router::hash::{BlockHash, prompt_blocks};
use infera_router::ingest::{Ingest, IngestConfig, IngestHandle};
use kv_publisher::*;

const STEPS: usize = 60;

fn seeds() -> Range<u64> {
    0..std::env::var("INFERA_MODEL_SEEDS").map_or(40, |count| count.parse().expect("a number"))
}

/// What the replay socket can give.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Replay {
    None,
    /// The last batches only.
    Last(usize),
    All,
}

/// One change of the cache; blocks are named by prompt and place.
#[derive(Clone, Debug)]
enum Change {
    Store { prompt: usize, from: usize, to: usize },
    Remove(Vec<BlockHash>),
    Clear,
}

struct Prompts {
    tokens: Vec<Vec<u32>>,
    blocks: Vec<Vec<BlockHash>>,
}

impl Prompts {
    /// Eight prompts that branch off one another.
    fn new(random: &mut fastrand::Rng) -> Self {
        let mut tokens: Vec<Vec<u32>> = Vec::new();
        for number in 0..8u32 {
            let mut prompt = Vec::new();
            if let Some(other) = random.choice(&tokens) {
                prompt = other[..random.usize(0..=other.len() / BLOCK_SIZE) * BLOCK_SIZE].to_vec();
            }
            let more = random.u32(1..=8) * BLOCK_SIZE as u32;
            prompt.extend((0..more).map(|at| 10_000 * (number + 1) + at));
            tokens.push(prompt);
        }
        let blocks = tokens.iter().map(|prompt| prompt_blocks(prompt, BLOCK_SIZE)).collect();
        Self { tokens, blocks }
    }
}

/// A cache as plain counts. A block is seen if it has a copy and all before it have been named since the view began.
#[derive(Clone, Debug, Default)]
struct Cache {
    copies: BTreeMap<BlockHash, u32>,
    named: BTreeSet<BlockHash>,
}

impl Cache {
    fn apply(&mut self, prompts: &Prompts, change: &Change) {
        match change {
            Change::Store { prompt, from, to } => {
                for block in &prompts.blocks[*prompt][*from..*to] {
                    *self.copies.entry(*block).or_default() += 1;
                    self.named.insert(*block);
                }
            }
            Change::Remove(blocks) => {
                for block in blocks {
                    if let Some(count) = self.copies.get_mut(block) {
                        *count -= 1;
                        if *count == 0 {
                            self.copies.remove(block);
                        }
                    }
                }
            }
            Change::Clear => *self = Self::default(),
        }
    }

    fn depth(&self, blocks: &[BlockHash]) -> usize {
        blocks.iter().take_while(|block| self.copies.contains_key(block)).count()
    }

    /// Blocks that reach a first block over named ones.
    fn seen(&self, prompts: &Prompts) -> usize {
        let reached: BTreeSet<BlockHash> = prompts
            .blocks
            .iter()
            .flat_map(|blocks| blocks.iter().take_while(|block| self.named.contains(block)))
            .copied()
            .collect();
        reached.iter().filter(|block| self.copies.contains_key(block)).count()
    }
}

/// The publisher, and the model of a follower that hears only what arrives.
struct Scene<'a> {
    random: fastrand::Rng,
    prompts: Prompts,
    publisher: &'a Publisher,
    replay: Replay,
    buffer: Buffer,
    /// The publisher's own cache.
    truth: Cache,
    /// This life: every batch, and whether it was sent.
    said: Vec<(Vec<Change>, Vec<u8>, bool)>,
    /// First batch that the follower's view rests on, and whether it has heard anything of this life.
    view_from: usize,
    heard: Option<usize>,
    first_heard: usize,
    /// The follower is to be looked at before anything else happens.
    is_due: bool,
    clock: f64,
}

impl Scene<'_> {
    fn change(&mut self) -> Change {
        let prompt = self.random.usize(0..self.prompts.blocks.len());
        let blocks = &self.prompts.blocks[prompt];
        match self.random.u8(0..20) {
            0 => Change::Clear,
            1..8 => {
                let mut held: Vec<BlockHash> =
                    blocks.iter().filter(|block| self.truth.copies.contains_key(block)).copied().collect();
                // vLLM removes the leaf first, SGLang the root.
                match self.random.u8(0..3) {
                    0 => held.reverse(),
                    1 => self.random.shuffle(&mut held),
                    _ => {}
                }
                held.truncate(self.random.usize(0..=held.len()));
                Change::Remove(held)
            }
            _ => {
                let from = self.random.usize(0..=self.truth.depth(blocks).min(blocks.len() - 1));
                Change::Store { prompt, from, to: self.random.usize(from + 1..=blocks.len()) }
            }
        }
    }

    fn payload(&mut self, changes: &[Change]) -> Vec<u8> {
        let events: Vec<Event<'_>> = changes
            .iter()
            .map(|change| match change {
                Change::Store { prompt, from, to } => {
                    Event::Store { tokens: &self.prompts.tokens[*prompt][..to * BLOCK_SIZE], from: *from }
                }
                Change::Remove(blocks) => Event::Remove(blocks),
                Change::Clear => Event::Clear,
            })
            .collect();
        let mut payload = batch(&events, None);
        // Every batch of an engine has its own time; it is what tells a new life from a repeat.
        self.clock += 0.25;
        payload[2..10].copy_from_slice(&self.clock.to_be_bytes());
        payload
    }

    /// One batch of the publisher's; `is_sent` or lost.
    fn publish(&mut self, is_sent: bool) {
        let mut changes = Vec::new();
        for _ in 0..self.random.usize(1..4) {
            let change = self.change();
            self.truth.apply(&self.prompts, &change);
            changes.push(change);
        }
        let payload = self.payload(&changes);
        let number = self.said.len();
        {
            let mut buffer = self.buffer.lock().unwrap();
            buffer.push((number as u64, payload.clone()));
            if let Replay::Last(kept) = self.replay {
                let excess = buffer.len().saturating_sub(kept);
                buffer.drain(..excess);
            }
        }
        self.said.push((changes, payload, is_sent));
        if is_sent {
            self.hear(number);
        }
    }

    /// What arriving batches make of the follower's view.
    fn hear(&mut self, number: usize) {
        let next = self.heard.map_or(0, |heard| heard + 1);
        if next < number {
            match self.replay {
                Replay::None => self.view_from = number,
                // The buffer holds this batch as its last; nothing more is said before the answer is there.
                Replay::Last(kept) if (number + 1).saturating_sub(kept) > next => {
                    self.view_from = (number + 1).saturating_sub(kept).min(number);
                    self.is_due = true;
                }
                Replay::Last(_) => self.is_due = true,
                Replay::All => {}
            }
        }
        if self.heard.is_none() {
            self.first_heard = number;
        }
        self.heard = Some(number);
        let (_, payload, _) = &self.said[number];
        self.publisher.send_as(number as u64, payload);
    }

    fn begin_anew(&mut self) {
        self.buffer.lock().unwrap().clear();
        self.said.clear();
        self.truth = Cache::default();
        (self.view_from, self.heard) = (0, None);
    }

    /// The follower's view: batches from `view_from` on.
    fn expected(&self) -> Cache {
        let mut cache = Cache::default();
        for (changes, _, _) in &self.said[self.view_from..] {
            changes.iter().for_each(|change| cache.apply(&self.prompts, change));
        }
        cache
    }

    /// Waits until the view is the model's: the depth of every prompt, and the number of blocks.
    fn check(&self, ingest: &IngestHandle, what: &str) {
        let cache = self.expected();
        if self.replay == Replay::All {
            assert_eq!(cache.copies, self.truth.copies, "{what}: the model itself");
        }
        let seen = cache.seen(&self.prompts) as u64;
        let next = self.heard.map_or(0, |heard| heard as u64 + 1);
        wait_until(&format!("{what}: {seen} blocks"), || {
            let is_there = |(tokens, blocks): (&Vec<u32>, &Vec<BlockHash>)| {
                depth(ingest, "a:1", tokens) == Some(cache.depth(blocks) as u32)
            };
            let counts = status(ingest, "a:1", 0, |status| (status.visible_blocks.get(), status.next_sequence.get()));
            // What hangs on an orphan that was removed before it had a child counts as waiting; it lies behind a hole.
            let is_counted = if self.replay == Replay::All { counts.0 == seen } else { counts.0 <= seen };
            is_counted && counts.1 == next && self.prompts.tokens.iter().zip(&self.prompts.blocks).all(is_there)
        });
    }
}

fn run(seed: u64, replay: Replay) {
    let mut random = fastrand::Rng::with_seed(seed);
    let context = zmq::Context::new();
    let publisher = Publisher::new(&context);
    let buffer: Buffer = Arc::new(Mutex::new(Vec::new()));
    let server = (replay != Replay::None).then(|| ReplayServer::start_on(&context, buffer.clone(), random.bool()));
    let ingest = Ingest::start(IngestConfig::default()).unwrap();
    let mut record = worker("a:1", Some(&publisher.endpoint));
    record.record.kv_replay_endpoint = server.as_ref().map(|server| server.endpoint.clone());
    ingest.fleet_updates.send(vec![record]);
    let publisher = publisher.subscribed();
    server.iter().for_each(|server| server.wait_answered(1));
    let prompts = Prompts::new(&mut random);
    let (truth, said) = (Cache::default(), Vec::new());
    let mut scene = Scene {
        random,
        prompts,
        publisher: &publisher,
        replay,
        buffer,
        truth,
        said,
        view_from: 0,
        heard: None,
        first_heard: 0,
        is_due: false,
        clock: 0.0,
    };
    // A follower that comes late, half of the time.
    for _ in 0..scene.random.usize(0..8) {
        scene.publish(false);
    }
    for step in 0..STEPS {
        if std::mem::take(&mut scene.is_due) {
            scene.check(&ingest, &format!("seed {seed} {replay:?} before step {step}"));
        }
        match scene.random.u8(0..40) {
            0..24 => scene.publish(true),
            24..32 => scene.publish(false),
            32..36 => {
                // Again or late: of the last few since the follower has come.
                let past = scene.heard.map_or(0, |heard| heard + 1);
                let first = scene.first_heard.max(past.saturating_sub(20));
                if first < past {
                    let number = scene.random.usize(first..past);
                    scene.publisher.send_as(number as u64, &scene.said[number].1);
                }
            }
            36 => {
                // A follower that has heard nothing of the former life cannot tell it from the new one, and need not.
                if scene.heard.is_some() {
                    scene.publish(true);
                    scene.begin_anew();
                    scene.publish(true);
                }
            }
            _ => {
                if scene.heard.is_some() {
                    scene.publish(true);
                    scene.is_due = false;
                    scene.check(&ingest, &format!("seed {seed} {replay:?} step {step}"));
                }
            }
        }
    }
    if scene.is_due {
        scene.check(&ingest, &format!("seed {seed} {replay:?} before the end"));
    }
    scene.publish(true);
    scene.check(&ingest, &format!("seed {seed} {replay:?} at the end"));
    ingest.fleet_updates.send(Vec::new());
    wait_until("an empty index", || ingest.stats.index_blocks.get() == 0 && ingest.stats.index_runs.get() == 0);
    assert!(ingest.stop());
    server.map(ReplayServer::stop);
}

#[test]
fn without_replay_the_view_is_what_came_since_the_last_gap() {
    seeds().for_each(|seed| run(seed, Replay::None));
}

/// The engine keeps the last batches only: a gap that lies in them is filled, one that is longer costs what came before.
#[test]
fn with_a_short_replay_the_view_is_what_could_be_had() {
    seeds().for_each(|seed| run(20_000 + seed, Replay::Last(3)));
}

#[test]
fn with_replay_the_view_is_the_cache_whatever_was_lost() {
    seeds().for_each(|seed| run(10_000 + seed, Replay::All));
}
