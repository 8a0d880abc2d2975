//! Owns one rank's continuous batching: waiting queue, running batch, chunked prefill, preemption, and the duration
//! of each step. Never does IO and never reads a clock: the caller waits out [`Step::duration`] between
//! [`Scheduler::begin_step`] and [`Scheduler::finish_step`].
//!
//! A step takes, times a seeded jitter drawn uniformly from `1 - jitter ..= 1 + jitter`:
//!
//! ```text
//! step_base + prefill_per_token * prompt tokens computed in this step
//!           + decode_per_sequence * sequences that decode in this step
//!           + decode_per_kilotoken * their context tokens / 1000
//!           + load_per_token * tokens whose KV comes from host memory in this step
//! ```
//!
//! Order within a step, as in vLLM's V1 scheduler: running sequences first in order of admission (one token each when
//! decoding, the rest of the prompt when still in prefill), then waiting ones first come first served, all within
//! `tokens_per_step_max`. A prompt's resident prefix blocks cost nothing, but its last token is always computed.
//!
//! When a block becomes a prefix hit differs between engines, and goes with whether their pool keeps copies: vLLM names a
//! block when the step that fills it is scheduled, so that a later request of the same step hits it; SGLang's tree learns a
//! prompt's blocks when their step has ended, and an answer's when the request has.
//!
//! What a sequence says is behind [`Content`]: an engine on the wire has token ids and SHA-256 names ([`Spelled`]), a
//! simulation has names alone ([`crate::sim`]). The rules are the same code for both.

mod caching;

use std::collections::{HashSet, VecDeque};
use std::time::Duration;

use rand::Rng;
use rand::rngs::SmallRng;

use super::content::{Content, Spelled};
use super::hash::{self, Digest};
use super::host::HostPool;
use super::pool::{BlockId, BlockPool};
pub use super::speed::Speed;
use crate::seed;

/// Where a copy of a block lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    Device,
    Host,
}

/// What happened to cached contents, in order, to be told to subscribers.
#[derive(Clone, Debug, PartialEq)]
pub enum CacheEvent<N = Digest> {
    /// Consecutive blocks became resident. `parent` precedes the first; `tokens` holds all blocks' tokens.
    Stored { memory: Memory, digests: Vec<N>, parent: Option<N>, tokens: Vec<u32>, salt: Option<String> },
    /// One copy of each content was dropped.
    Removed { memory: Memory, digests: Vec<N> },
    /// All memories are empty.
    Cleared,
}

/// One prompt to continue by its answer.
#[derive(Debug)]
pub struct NewSequence<C = Spelled> {
    pub id: u64,
    pub content: C,
}

/// One generated token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    pub id: u64,
    /// Position in the answer, from 0.
    pub position: usize,
    pub last: bool,
    pub hits: PrefixHits,
}

/// Prompt tokens that need not be computed, as found when a sequence was first admitted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixHits {
    /// On the device or on the host.
    pub cached_tokens: usize,
    /// Those of them that the host alone had.
    pub loaded_tokens: usize,
}

/// A step under way.
#[derive(Debug)]
pub struct Step {
    pub duration: Duration,
}

#[derive(Debug)]
struct Sequence<C: Content> {
    id: u64,
    content: C,
    /// Tokens of the prompt and of what was generated so far.
    length: usize,
    digests: Vec<C::Name>,
    blocks: Vec<BlockId>,
    /// Tokens whose KV exists.
    computed: usize,
    /// Full blocks that have been named or shared.
    named: usize,
    /// Blocks that the host has been offered.
    offered: usize,
    /// Set at the first admission; a preempted sequence keeps its first figures.
    hits: Option<PrefixHits>,
    /// Tokens computed by the step under way.
    scheduled: usize,
    /// Tokens loaded from the host by the step under way.
    loading: usize,
    /// The prompt's KV came by transfer: it takes blocks, but no computation.
    received: bool,
}

/// Counters since the start.
#[derive(Clone, Copy, Debug, Default)]
pub struct Totals {
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    /// Of the cached tokens, those that came from the host.
    pub loaded_tokens: u64,
    pub generated_tokens: u64,
    pub finished: u64,
    pub aborted: u64,
    pub preempted: u64,
}

/// The scheduler of one rank.
#[derive(Debug)]
pub struct Scheduler<C: Content = Spelled> {
    speed: Speed,
    block_size: usize,
    /// Whether computed blocks get names, which is what lets later sequences share them.
    names_blocks: bool,
    root: Digest,
    pool: BlockPool<C::Name>,
    host: Option<HostPool<C::Name>>,
    waiting: VecDeque<Sequence<C>>,
    running: Vec<Sequence<C>>,
    in_step: bool,
    aborted: HashSet<u64>,
    events: Vec<CacheEvent<C::Name>>,
    draw: SmallRng,
    totals: Totals,
}

impl<C: Content> Scheduler<C> {
    pub fn new(speed: Speed, block_size: usize, pool: BlockPool<C::Name>, seed: u64) -> Self {
        assert!(block_size > 0 && speed.tokens_per_step_max > 0 && speed.sequences_max > 0, "sizes are positive");
        Scheduler {
            speed,
            block_size,
            names_blocks: true,
            root: hash::root_digest(seed),
            pool,
            host: None,
            waiting: VecDeque::new(),
            running: Vec::new(),
            in_step: false,
            aborted: HashSet::new(),
            events: Vec::new(),
            draw: seed::generator(seed, "step jitter"),
            totals: Totals::default(),
        }
    }

    /// The same without a prefix cache: every sequence has blocks of its own, and nothing is ever stored or evicted.
    pub fn without_prefix_cache(mut self) -> Self {
        self.names_blocks = false;
        self
    }

    /// The same with host memory behind the device's; without a prefix cache it has no use.
    pub fn with_host(mut self, host: HostPool<C::Name>) -> Self {
        self.host = Some(host);
        self
    }

    pub fn pool(&self) -> &BlockPool<C::Name> {
        &self.pool
    }

    pub fn host(&self) -> Option<&HostPool<C::Name>> {
        self.host.as_ref()
    }

    /// Blocks of `digests` that need not be computed now: those on the device, and those that follow on the host.
    pub fn prefix_length(&self, digests: &[C::Name]) -> usize {
        let device = self.pool.prefix_length(digests);
        device + self.host.as_ref().map_or(0, |host| host.prefix_length(&digests[device..]))
    }

    pub fn totals(&self) -> Totals {
        self.totals
    }

    pub fn sequences_running(&self) -> usize {
        self.running.len()
    }

    pub fn sequences_waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Longest prompt plus answer that can ever run.
    pub fn tokens_max(&self) -> usize {
        self.pool.blocks_total() * self.block_size
    }

    /// Events since the last call, in order.
    pub fn drain_events(&mut self) -> Vec<CacheEvent<C::Name>> {
        std::mem::take(&mut self.events)
    }

    /// Queues a sequence. The caller has checked that prompt and answer fit into [`Scheduler::tokens_max`].
    pub fn submit(&mut self, new: NewSequence<C>) {
        self.queue(new, false);
    }

    /// The same for a sequence whose prompt's KV came from another engine: it takes blocks, but no computation.
    pub fn submit_received(&mut self, new: NewSequence<C>) {
        self.queue(new, true);
    }

    fn queue(&mut self, NewSequence { id, content }: NewSequence<C>, received: bool) {
        let length = content.prompt_tokens();
        assert!(length > 0 && content.answer_tokens() > 0, "a sequence has a prompt and an answer");
        assert!(length + content.answer_tokens() <= self.tokens_max(), "a sequence fits into the pool");
        let mut digests = Vec::with_capacity(length / self.block_size);
        if self.names_blocks {
            content.extend_names(&mut digests, &self.root, length, self.block_size);
        }
        self.waiting.push_back(Sequence {
            id,
            content,
            length,
            digests,
            blocks: Vec::new(),
            computed: 0,
            named: 0,
            offered: 0,
            hits: None,
            scheduled: 0,
            loading: 0,
            received,
        });
    }

    /// Drops a sequence: at once, or when the step under way ends. Unknown ids are ignored.
    pub fn abort(&mut self, id: u64) {
        if self.in_step {
            self.aborted.insert(id);
        } else {
            self.drop_sequences(&HashSet::from([id]));
        }
    }

    /// Empties the prefix cache; false while sequences hold blocks.
    pub fn clear(&mut self) -> bool {
        let cleared = self.pool.clear();
        if cleared {
            self.host.iter_mut().for_each(HostPool::clear);
            self.events.push(CacheEvent::Cleared);
        }
        cleared
    }

    /// Chooses what the next step computes, or `None` if there is nothing to do. Evictions become events here.
    pub fn begin_step(&mut self) -> Option<Step> {
        assert!(!self.in_step, "steps do not overlap");
        let mut budget = self.speed.tokens_per_step_max;
        let preempted = self.schedule_running(&mut budget);
        if !preempted {
            self.admit_waiting(&mut budget);
        }
        if self.running.iter().all(|sequence| sequence.scheduled == 0) {
            assert!(self.running.is_empty() && self.waiting.is_empty(), "a lone sequence always fits into the pool");
            return None;
        }
        self.in_step = true;
        Some(Step { duration: self.duration() })
    }

    /// Applies the step: contents become resident (events), every sequence whose prompt is complete yields a token.
    pub fn finish_step(&mut self) -> Vec<Output> {
        assert!(self.in_step, "a step is under way");
        self.in_step = false;
        let aborted = std::mem::take(&mut self.aborted);
        let mut outputs = Vec::new();
        for index in 0..self.running.len() {
            if self.running[index].scheduled > 0 {
                self.complete(index);
                if !aborted.contains(&self.running[index].id) {
                    outputs.extend(self.sample(index));
                }
            }
        }
        if !aborted.is_empty() {
            self.drop_sequences(&aborted);
        }
        let ended: Vec<u64> = outputs.iter().filter(|output| output.last).map(|output| output.id).collect();
        for id in ended {
            let index = self.running.iter().position(|sequence| sequence.id == id);
            self.retire(index.expect("an output comes from a running sequence"));
            self.totals.finished += 1;
        }
        outputs
    }

    /// Gives each running sequence its tokens. When blocks run out the last admitted one is pushed back to the front
    /// of the queue and will recompute (vLLM's recompute preemption). Returns whether that happened.
    fn schedule_running(&mut self, budget: &mut usize) -> bool {
        self.running.iter_mut().for_each(|sequence| sequence.scheduled = 0);
        let mut preempted = false;
        let mut index = 0;
        while index < self.running.len() && *budget > 0 {
            let sequence = &self.running[index];
            let count = (sequence.length - sequence.computed).min(*budget);
            let need = (sequence.computed + count).div_ceil(self.block_size) - sequence.blocks.len();
            match self.take(need) {
                Some(blocks) => {
                    let sequence = &mut self.running[index];
                    sequence.blocks.extend(blocks);
                    sequence.scheduled = count;
                    *budget -= count;
                    self.name_ahead(index);
                    index += 1;
                }
                None => {
                    preempted = true;
                    self.preempt_last(budget);
                }
            }
        }
        preempted
    }

    fn preempt_last(&mut self, budget: &mut usize) {
        let mut sequence = self.running.pop().expect("only called while a sequence is running");
        self.pool.release(&sequence.blocks);
        *budget += sequence.scheduled;
        sequence.blocks.clear();
        (sequence.computed, sequence.named, sequence.offered, sequence.scheduled) = (0, 0, 0, 0);
        // What was received is lost with the blocks.
        sequence.received = false;
        self.totals.preempted += 1;
        self.waiting.push_front(sequence);
    }

    /// A sequence is admitted when all that it has to compute fits into the pool, also where the step computes a part of
    /// it only (vLLM's reservation of the whole input, the default; SGLang reserves some of the answer too).
    fn admit_waiting(&mut self, budget: &mut usize) {
        while *budget > 0 && self.running.len() < self.speed.sequences_max {
            let Some(sequence) = self.waiting.front() else { return };
            let reusable = &sequence.digests[..((sequence.length - 1) / self.block_size).min(sequence.digests.len())];
            let hits = self.pool.prefix(reusable);
            let loaded = self.host.as_ref().map_or(0, |host| host.prefix_length(&reusable[hits.len()..]));
            let computed = (hits.len() + loaded) * self.block_size;
            let rest = sequence.length - computed;
            let (count, cost) = if sequence.received { (rest, 1) } else { (rest.min(*budget), rest.min(*budget)) };
            let whole = sequence.length.div_ceil(self.block_size) - hits.len();
            if whole + self.pool.unheld(&hits) > self.pool.blocks_free() {
                return;
            }
            self.host.iter_mut().for_each(|host| host.touch(reusable));
            self.pool.hold(&hits);
            let need = (computed + count).div_ceil(self.block_size) - hits.len();
            let fresh = self.take(need).expect("checked against the free count just above");
            let mut sequence = self.waiting.pop_front().expect("looked at just above");
            sequence.loading = loaded * self.block_size;
            if sequence.hits.is_none() {
                sequence.hits = Some(PrefixHits { cached_tokens: computed, loaded_tokens: sequence.loading });
                self.totals.prompt_tokens += sequence.content.prompt_tokens() as u64;
                self.totals.cached_tokens += computed as u64;
                self.totals.loaded_tokens += sequence.loading as u64;
            }
            (sequence.computed, sequence.named, sequence.scheduled) = (computed, hits.len(), count);
            sequence.blocks = hits;
            sequence.blocks.extend(fresh);
            *budget -= cost;
            self.running.push(sequence);
            self.name_ahead(self.running.len() - 1);
        }
    }

    fn take(&mut self, count: usize) -> Option<Vec<BlockId>> {
        let mut evicted = Vec::new();
        let taken = self.pool.take(count, &mut evicted);
        let removed = |digest| CacheEvent::Removed { memory: Memory::Device, digests: vec![digest] };
        self.events.extend(evicted.into_iter().map(removed));
        taken
    }

    fn duration(&mut self) -> Duration {
        let (mut prefill, mut decoding, mut context, mut loading) = (0u32, 0u32, 0usize, 0u32);
        for sequence in self.running.iter().filter(|sequence| sequence.scheduled > 0) {
            loading += sequence.loading as u32;
            if sequence.computed + 1 >= sequence.length && sequence.length > sequence.content.prompt_tokens() {
                decoding += 1;
                context += sequence.length;
            } else {
                prefill += if sequence.received { 1 } else { sequence.scheduled as u32 };
            }
        }
        let speed = &self.speed;
        let plain = speed.step_base
            + speed.prefill_per_token * prefill
            + speed.decode_per_sequence * decoding
            + speed.decode_per_kilotoken.mul_f64(context as f64 / 1000.0)
            + speed.load_per_token * loading;
        let jitter = speed.jitter.clamp(0.0, 1.0);
        plain.mul_f64(1.0 + self.draw.random_range(-jitter..=jitter))
    }

    /// The sequence's part of the step is done.
    fn complete(&mut self, index: usize) {
        let sequence = &mut self.running[index];
        sequence.computed += sequence.scheduled;
        (sequence.scheduled, sequence.loading) = (0, 0);
        let tokens = match self.pool.keeps_copies() {
            true => sequence.computed,
            false => sequence.computed.min(sequence.content.prompt_tokens()),
        };
        self.name_full(index, tokens);
        self.offer_to_host(index);
    }

    /// The next answer token, if all tokens so far are computed.
    fn sample(&mut self, index: usize) -> Option<Output> {
        let sequence = &mut self.running[index];
        if sequence.computed < sequence.length {
            return None;
        }
        let position = sequence.length - sequence.content.prompt_tokens();
        sequence.length += 1;
        self.totals.generated_tokens += 1;
        Some(Output {
            id: sequence.id,
            position,
            last: position + 1 == sequence.content.answer_tokens(),
            hits: sequence.hits.unwrap_or_default(),
        })
    }

    fn drop_sequences(&mut self, ids: &HashSet<u64>) {
        let waiting = self.waiting.len();
        self.waiting.retain(|sequence| !ids.contains(&sequence.id));
        self.totals.aborted += (waiting - self.waiting.len()) as u64;
        let mut index = 0;
        while index < self.running.len() {
            if ids.contains(&self.running[index].id) {
                self.retire(index);
                self.totals.aborted += 1;
            } else {
                index += 1;
            }
        }
    }
}

#[cfg(test)]
#[path = "scheduler_tests.rs"]
mod tests;
