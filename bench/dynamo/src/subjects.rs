//! The three indexes behind one trait: payload in, depth out. Never measures anything.

use anyhow::{Context, Result, ensure};
use dynamo_kv_router::RadixTree;
use dynamo_kv_router::indexer::SyncIndexer;
use dynamo_kv_router::nested_map::{LevelIndex, PositionalIndexer, SearchMode};
use dynamo_kv_router::protocols::{
    BlockHashOptions, LocalBlockHash, OverlapScores, RouterEvent, WorkerWithDpRank, compute_block_hash_for_seq,
};
use dynamo_kv_router::zmq_wire::{ZmqEventNormalizer, decode_event_batch};
use infera_router::events::decode::Decoder;
use infera_router::fleet::Slot;
use infera_router::hash::{BlockHash, prompt_blocks};
use infera_router::index::{Hits, Mirror, Snapshot, Tree};
use rustc_hash::FxHashMap;

use crate::kv_workload::{BLOCK_TOKENS, WORKERS};

pub const NAMES: [&str; 3] = ["infera-router", "RadixTree", "Positional"];

/// Messages between two publications: 500 blocks, which is a millisecond at 500,000 blocks/s.
const PUBLISH_MESSAGES: usize = 31;
/// As the crate's own documentation has it.
const JUMP_BLOCKS: usize = 32;

pub trait Subject {
    /// Decodes and applies one message.
    fn apply(&mut self, worker: usize, payload: &[u8]) -> Result<()>;
    /// Hashes a prompt for the queries that follow; what was applied is visible to them.
    fn prepare(&mut self, tokens: &[u32]);
    fn query(&mut self);
    /// Blocks of the last query's prompt that the worker is said to hold.
    fn depth(&self, worker: usize) -> u32;
    fn leave(&mut self, worker: usize);
}

pub fn subject(name: &str) -> Box<dyn Subject> {
    match name {
        "RadixTree" => Box::new(Radix { tree: RadixTree::new(), wire: Wire::new(), query: Query::default() }),
        "Positional" => Box::new(Positional {
            index: PositionalIndexer::new_with_mode(JUMP_BLOCKS, SearchMode::Strided),
            blocks: FxHashMap::default(),
            wire: Wire::new(),
            query: Query::default(),
        }),
        _ => Box::new(Own::new()),
    }
}

struct Own {
    tree: Tree,
    mirrors: Vec<Mirror>,
    decoder: Decoder,
    snapshot: Snapshot,
    messages: usize,
    prompt: Vec<BlockHash>,
    hits: Hits,
}

impl Own {
    fn new() -> Self {
        Self {
            tree: Tree::default(),
            mirrors: (0..WORKERS).map(|worker| Mirror::new(worker as u16)).collect(),
            decoder: Decoder::default(),
            snapshot: Snapshot::default(),
            messages: 0,
            prompt: Vec::new(),
            hits: Hits::new(),
        }
    }
}

impl Subject for Own {
    fn apply(&mut self, worker: usize, payload: &[u8]) -> Result<()> {
        let (mirror, tree) = (&mut self.mirrors[worker], &mut self.tree);
        mirror.begin_batch();
        let summary = self.decoder.decode_into(payload, mirror, Mirror::announce, |mirror, event| {
            mirror.apply(tree, &event);
        });
        ensure!(summary.applied == 1, "a message was not applied");
        self.messages += 1;
        if self.messages.is_multiple_of(PUBLISH_MESSAGES) {
            self.snapshot = self.tree.publish();
        }
        Ok(())
    }

    fn prepare(&mut self, tokens: &[u32]) {
        self.snapshot = self.tree.publish();
        self.prompt = prompt_blocks(tokens, BLOCK_TOKENS);
    }

    fn query(&mut self) {
        self.snapshot.query(&self.prompt, &mut self.hits);
    }

    fn depth(&self, worker: usize) -> u32 {
        self.hits.depth(Slot(worker as u32))
    }

    fn leave(&mut self, worker: usize) {
        self.mirrors[worker].clear(&mut self.tree);
        self.snapshot = self.tree.publish();
    }
}

/// The other crate's way from a payload to an event.
struct Wire {
    normalizer: ZmqEventNormalizer,
    events: u64,
}

impl Wire {
    fn new() -> Self {
        Self { normalizer: ZmqEventNormalizer::new(BLOCK_TOKENS as u32), events: 0 }
    }

    fn decode(&mut self, worker: usize, payload: &[u8]) -> Result<RouterEvent> {
        let batch = decode_event_batch(payload)?;
        let raw = batch.events.into_iter().next().context("an empty batch")?;
        self.events += 1;
        let event = self.normalizer.normalize(raw, self.events, worker_of(worker)).context("filtered")?;
        event.into_router_event().context("not a worker's event")
    }
}

fn worker_of(worker: usize) -> WorkerWithDpRank {
    WorkerWithDpRank::new(worker as u64, 0)
}

/// A prompt's hashes, and a copy for an interface that takes them away.
#[derive(Default)]
struct Query {
    prompt: Vec<LocalBlockHash>,
    copies: Vec<Vec<LocalBlockHash>>,
    scores: Option<OverlapScores>,
}

impl Query {
    /// Copies that are made before they are timed.
    const COPIES: usize = 64;

    fn prepare(&mut self, tokens: &[u32]) {
        self.prompt = compute_block_hash_for_seq(tokens, BLOCK_TOKENS as u32, BlockHashOptions::default());
        self.copies = vec![self.prompt.clone(); Self::COPIES];
    }

    fn depth(&self, worker: usize) -> u32 {
        self.scores.as_ref().and_then(|scores| scores.scores.get(&worker_of(worker)).copied()).unwrap_or(0)
    }
}

struct Radix {
    tree: RadixTree,
    wire: Wire,
    query: Query,
}

impl Subject for Radix {
    fn apply(&mut self, worker: usize, payload: &[u8]) -> Result<()> {
        let event = self.wire.decode(worker, payload)?;
        Ok(self.tree.apply_event(event)?)
    }

    fn prepare(&mut self, tokens: &[u32]) {
        self.query.prepare(tokens);
    }

    fn query(&mut self) {
        let prompt = self.query.copies.pop().unwrap_or_else(|| self.query.prompt.clone());
        self.query.scores = Some(self.tree.find_matches(prompt, false));
    }

    fn depth(&self, worker: usize) -> u32 {
        self.query.depth(worker)
    }

    fn leave(&mut self, worker: usize) {
        self.tree.remove_worker(worker as u64);
    }
}

struct Positional {
    index: PositionalIndexer,
    blocks: FxHashMap<WorkerWithDpRank, LevelIndex>,
    wire: Wire,
    query: Query,
}

impl Subject for Positional {
    fn apply(&mut self, worker: usize, payload: &[u8]) -> Result<()> {
        let event = self.wire.decode(worker, payload)?;
        Ok(self.index.apply_event(&mut self.blocks, event, None)?)
    }

    fn prepare(&mut self, tokens: &[u32]) {
        self.query.prepare(tokens);
    }

    fn query(&mut self) {
        self.query.scores = Some(SyncIndexer::find_matches(&self.index, &self.query.prompt, false));
    }

    fn depth(&self, worker: usize) -> u32 {
        self.query.depth(worker)
    }

    fn leave(&mut self, worker: usize) {
        use dynamo_kv_router::protocols::{KvCacheEvent, KvCacheEventData};
        let event = KvCacheEvent { event_id: 0, data: KvCacheEventData::Cleared, dp_rank: 0 };
        let _ = self.index.apply_event(&mut self.blocks, RouterEvent::new(worker as u64, event), None);
    }
}
