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
//! ```
//!
//! Order within a step, as in vLLM's V1 scheduler: running sequences first in order of admission (one token each when
//! decoding, the rest of the prompt when still in prefill), then waiting ones first come first served, all within
//! `tokens_per_step_max`. A prompt's resident prefix blocks cost nothing, but its last token is always computed.
//!
//! What a sequence says is behind [`Content`]: an engine on the wire has token ids and SHA-256 names ([`Spelled`]), a
//! simulation has names alone ([`crate::sim`]). The rules are the same code for both.

use std::collections::{HashSet, VecDeque};
use std::time::Duration;

use rand::Rng;
use rand::rngs::SmallRng;

use super::content::{Content, Spelled};
use super::hash::{self, Digest};
use super::pool::{BlockId, BlockPool};
use crate::seed;

/// Speeds and limits of one rank. All durations are those of the formula in the module's documentation.
#[derive(Clone, Debug)]
pub struct Speed {
    pub step_base: Duration,
    pub prefill_per_token: Duration,
    pub decode_per_sequence: Duration,
    pub decode_per_kilotoken: Duration,
    /// Half width of the jitter as a share of the step, 0 to 1.
    pub jitter: f64,
    pub tokens_per_step_max: usize,
    pub sequences_max: usize,
}

impl Default for Speed {
    /// About an 8B model on one mid-range GPU: 10,000 prompt tokens a second, 8 ms per decode step.
    fn default() -> Speed {
        Speed {
            step_base: Duration::from_millis(6),
            prefill_per_token: Duration::from_micros(100),
            decode_per_sequence: Duration::from_micros(150),
            decode_per_kilotoken: Duration::from_micros(40),
            jitter: 0.05,
            tokens_per_step_max: 2048,
            sequences_max: 256,
        }
    }
}

/// What happened to cached contents, in order, to be told to subscribers.
#[derive(Clone, Debug, PartialEq)]
pub enum CacheEvent<N = Digest> {
    /// Consecutive blocks became resident. `parent` precedes the first; `tokens` holds all blocks' tokens.
    Stored {
        digests: Vec<N>,
        parent: Option<N>,
        tokens: Vec<u32>,
        salt: Option<String>,
    },
    /// One copy of each content was dropped.
    Removed(Vec<N>),
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
    /// Prompt tokens found resident when the sequence was first admitted.
    pub cached_tokens: usize,
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
    /// Set at the first admission; a preempted sequence keeps its first figure.
    cached_tokens: Option<usize>,
    /// Tokens computed by the step under way.
    scheduled: usize,
    /// The prompt's KV came by transfer: it takes blocks, but no computation.
    received: bool,
}

/// Counters since the start.
#[derive(Clone, Copy, Debug, Default)]
pub struct Totals {
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
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

    pub fn pool(&self) -> &BlockPool<C::Name> {
        &self.pool
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
            cached_tokens: None,
            scheduled: 0,
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
                self.store(index);
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
            let sequence = self.running.remove(index.expect("an output comes from a running sequence"));
            self.pool.release(&sequence.blocks);
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
        (sequence.computed, sequence.named, sequence.scheduled) = (0, 0, 0);
        // What was received is lost with the blocks.
        sequence.received = false;
        self.totals.preempted += 1;
        self.waiting.push_front(sequence);
    }

    fn admit_waiting(&mut self, budget: &mut usize) {
        while *budget > 0 && self.running.len() < self.speed.sequences_max {
            let Some(sequence) = self.waiting.front() else { return };
            let reusable = (sequence.length - 1) / self.block_size;
            let hits = self.pool.prefix(&sequence.digests[..reusable.min(sequence.digests.len())]);
            let computed = hits.len() * self.block_size;
            let rest = sequence.length - computed;
            let (count, cost) = if sequence.received { (rest, 1) } else { (rest.min(*budget), rest.min(*budget)) };
            let need = (computed + count).div_ceil(self.block_size) - hits.len();
            if need + self.pool.unheld(&hits) > self.pool.blocks_free() {
                return;
            }
            self.pool.hold(&hits);
            let fresh = self.take(need).expect("checked against the free count just above");
            let mut sequence = self.waiting.pop_front().expect("looked at just above");
            if sequence.cached_tokens.is_none() {
                sequence.cached_tokens = Some(computed);
                self.totals.prompt_tokens += sequence.content.prompt_tokens() as u64;
                self.totals.cached_tokens += computed as u64;
            }
            (sequence.computed, sequence.named, sequence.scheduled) = (computed, hits.len(), count);
            sequence.blocks = hits;
            sequence.blocks.extend(fresh);
            *budget -= cost;
            self.running.push(sequence);
        }
    }

    fn take(&mut self, count: usize) -> Option<Vec<BlockId>> {
        let mut evicted = Vec::new();
        let taken = self.pool.take(count, &mut evicted);
        self.events.extend(evicted.into_iter().map(|digest| CacheEvent::Removed(vec![digest])));
        taken
    }

    fn duration(&mut self) -> Duration {
        let (mut prefill, mut decoding, mut context) = (0u32, 0u32, 0usize);
        for sequence in self.running.iter().filter(|sequence| sequence.scheduled > 0) {
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
            + speed.decode_per_kilotoken.mul_f64(context as f64 / 1000.0);
        let jitter = speed.jitter.clamp(0.0, 1.0);
        plain.mul_f64(1.0 + self.draw.random_range(-jitter..=jitter))
    }

    /// Names the blocks that the step filled.
    fn store(&mut self, index: usize) {
        let sequence = &mut self.running[index];
        sequence.computed += sequence.scheduled;
        sequence.scheduled = 0;
        if !self.names_blocks {
            return;
        }
        sequence.content.extend_names(&mut sequence.digests, &self.root, sequence.length, self.block_size);
        let full = sequence.computed / self.block_size;
        let mut run: Option<usize> = None;
        for position in sequence.named..full {
            if self.pool.name(sequence.blocks[position], sequence.digests[position]) {
                run.get_or_insert(position);
                continue;
            }
            // Somebody else stored it meanwhile: share that copy and give ours back, as SGLang's tree does.
            let shared = self.pool.prefix(&sequence.digests[position..=position]);
            self.pool.hold(&shared);
            self.pool.release(&sequence.blocks[position..=position]);
            sequence.blocks[position] = shared[0];
            if let Some(start) = run.take() {
                self.events.push(stored(sequence, start, position, self.block_size));
            }
        }
        if let Some(start) = run {
            self.events.push(stored(sequence, start, full, self.block_size));
        }
        sequence.named = sequence.named.max(full);
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
            cached_tokens: sequence.cached_tokens.unwrap_or(0),
        })
    }

    fn drop_sequences(&mut self, ids: &HashSet<u64>) {
        let waiting = self.waiting.len();
        self.waiting.retain(|sequence| !ids.contains(&sequence.id));
        self.totals.aborted += (waiting - self.waiting.len()) as u64;
        let (dropped, kept) =
            std::mem::take(&mut self.running).into_iter().partition::<Vec<_>, _>(|it| ids.contains(&it.id));
        self.running = kept;
        for sequence in dropped {
            self.pool.release(&sequence.blocks);
            self.totals.aborted += 1;
        }
    }
}

fn stored<C: Content>(sequence: &Sequence<C>, start: usize, end: usize, block_size: usize) -> CacheEvent<C::Name> {
    CacheEvent::Stored {
        digests: sequence.digests[start..end].to_vec(),
        parent: start.checked_sub(1).map(|parent| sequence.digests[parent]),
        tokens: sequence.content.block_tokens(start..end, block_size),
        salt: sequence.content.salt().map(str::to_owned),
    }
}

#[cfg(test)]
#[path = "scheduler_tests.rs"]
mod tests;
