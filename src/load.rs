//! In-flight load per target: atomics that every shard reads, the guard that books and releases, and the
//! ledger that counts distinct blocks on the ingest core.
//!
//! A pick is charged at once, and visible to every shard at once: the shard adds the request's blocks to
//! `pending`, and the ingest core replaces them by the exact number of *distinct* in-flight blocks when it
//! reads the message a moment later. Never does IO.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::hash::BlockHash;

/// Identity of a target over the life of the process; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TargetId(pub u64);

/// Load of one target. On its own pair of cache lines, so that neighbours do not fight.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct TargetLoad {
    /// Distinct blocks of in-flight prompts; written by the ingest core only.
    distinct_blocks: AtomicU64,
    /// Blocks booked by shards and not yet read by the ingest core.
    pending_blocks: AtomicU64,
    /// In-flight requests without blocks; each weighs as one block.
    blockless_requests: AtomicU64,
    /// All in-flight requests.
    requests: AtomicU64,
    /// When the target was last picked, nanoseconds on the caller's monotonic clock.
    picked_at_ns: AtomicU64,
}

impl TargetLoad {
    /// Blocks in flight, the load term of the cost: distinct ones, plus one per request that has none.
    pub fn active_blocks(&self) -> u64 {
        self.distinct_blocks.load(Ordering::Relaxed)
            + self.pending_blocks.load(Ordering::Relaxed)
            + self.blockless_requests.load(Ordering::Relaxed)
    }

    /// Requests in flight.
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    pub fn picked_at_ns(&self) -> u64 {
        self.picked_at_ns.load(Ordering::Relaxed)
    }
}

/// What shards tell the ingest core.
#[derive(Debug)]
pub enum LedgerMessage {
    Started { target: TargetId, load: Arc<TargetLoad>, blocks: Arc<[BlockHash]> },
    Finished { target: TargetId, blocks: Arc<[BlockHash]> },
}

/// Where a booking sends its messages: the ingest core's queue. A message is never lost, and `send` never
/// blocks; the queue is bounded by twice the requests in flight.
pub trait LedgerSink: Send + Sync {
    fn send(&self, message: LedgerMessage);
}

/// One request's charge on one target, from the pick to the end of its response. Dropping it releases the
/// charge, exactly once, on every exit path.
pub struct Booking {
    target: TargetId,
    load: Arc<TargetLoad>,
    blocks: Arc<[BlockHash]>,
    ledger: Arc<dyn LedgerSink>,
}

impl Booking {
    /// Charges `blocks` (the full blocks of the prompt; none is allowed) to the target.
    pub fn new(
        target: TargetId,
        load: &Arc<TargetLoad>,
        blocks: Arc<[BlockHash]>,
        ledger: &Arc<dyn LedgerSink>,
        now_ns: u64,
    ) -> Self {
        load.requests.fetch_add(1, Ordering::Relaxed);
        load.picked_at_ns.store(now_ns, Ordering::Relaxed);
        if blocks.is_empty() {
            load.blockless_requests.fetch_add(1, Ordering::Relaxed);
        } else {
            load.pending_blocks.fetch_add(blocks.len() as u64, Ordering::Relaxed);
            ledger.send(LedgerMessage::Started { target, load: load.clone(), blocks: blocks.clone() });
        }
        Self { target, load: load.clone(), blocks, ledger: ledger.clone() }
    }
}

impl Drop for Booking {
    fn drop(&mut self) {
        self.load.requests.fetch_sub(1, Ordering::Relaxed);
        if self.blocks.is_empty() {
            self.load.blockless_requests.fetch_sub(1, Ordering::Relaxed);
        } else {
            let blocks = std::mem::replace(&mut self.blocks, Arc::new([]));
            self.ledger.send(LedgerMessage::Finished { target: self.target, blocks });
        }
    }
}

/// Reference counts of in-flight blocks per target. Lives on the ingest core; one `apply` per message.
#[derive(Default)]
pub struct Ledger {
    targets: HashMap<TargetId, Entry>,
}

struct Entry {
    load: Arc<TargetLoad>,
    counts: HashMap<BlockHash, u32>,
    requests: u64,
}

impl Ledger {
    pub fn apply(&mut self, message: LedgerMessage) {
        match message {
            LedgerMessage::Started { target, load, blocks } => self.started(target, load, &blocks),
            LedgerMessage::Finished { target, blocks } => self.finished(target, &blocks),
        }
    }

    /// Targets that hold at least one request.
    pub fn targets_held(&self) -> usize {
        self.targets.len()
    }

    fn started(&mut self, target: TargetId, load: Arc<TargetLoad>, blocks: &[BlockHash]) {
        let entry = self.targets.entry(target).or_insert_with(|| Entry { load, counts: HashMap::new(), requests: 0 });
        entry.requests += 1;
        for block in blocks {
            *entry.counts.entry(*block).or_insert(0) += 1;
        }
        // Exact before approximate: a reader between the two sees too much load for a moment, never too little.
        entry.load.distinct_blocks.store(entry.counts.len() as u64, Ordering::Relaxed);
        entry.load.pending_blocks.fetch_sub(blocks.len() as u64, Ordering::Relaxed);
    }

    fn finished(&mut self, target: TargetId, blocks: &[BlockHash]) {
        let Some(entry) = self.targets.get_mut(&target) else {
            debug_assert!(false, "a booking finished that never started");
            return;
        };
        for block in blocks {
            if let Some(count) = entry.counts.get_mut(block) {
                *count -= 1;
                if *count == 0 {
                    entry.counts.remove(block);
                }
            }
        }
        entry.requests -= 1;
        entry.load.distinct_blocks.store(entry.counts.len() as u64, Ordering::Relaxed);
        if entry.requests == 0 {
            self.targets.remove(&target);
        }
    }
}
