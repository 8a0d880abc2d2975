//! In-flight load per target: atomics that every shard reads, the guard that books and releases, and the
//! ledger that counts distinct blocks on the ingest core.
//!
//! A pick is charged at once, and visible to every shard at once: the shard adds the request's blocks to
//! `pending`, and the ingest core replaces them by the exact number of *distinct* in-flight blocks when it
//! reads the message a moment later. Never does IO.

mod distinct;

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use distinct::DistinctBlocks;

use crate::fleet::{Slot, Worker};
pub use crate::fleet::{TargetId, TargetLoad};
use crate::hash::BlockHash;
use crate::prompt::Endpoint;

/// What shards tell the ingest core.
#[derive(Debug)]
pub enum LedgerMessage {
    Started {
        target: TargetId,
        load: Arc<TargetLoad>,
        blocks: Arc<[BlockHash]>,
    },
    Finished {
        target: TargetId,
        /// The same allocation as at the start.
        blocks: Arc<[BlockHash]>,
        /// The worker has computed the whole prompt and answered it well.
        is_complete: bool,
    },
    /// The request that is about to be booked is to be watched: do the worker's events show these blocks?
    Expected(Box<Expectation>),
}

/// A request whose blocks the worker's own events are to show.
#[derive(Debug)]
pub struct Expectation {
    pub target: TargetId,
    pub slot: Slot,
    pub worker: Arc<Worker>,
    /// Tokens per block.
    pub block_size: u32,
    /// The allocation of the booking, which is known by it.
    pub blocks: Arc<[BlockHash]>,
    pub endpoint: Endpoint,
    /// What the blocks were made of.
    pub body: Bytes,
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
    is_complete: Cell<bool>,
    queued: Cell<Option<QueuedBlocks>>,
}

/// Blocks that a target has yet to compute for a request. Dropping it takes them off the target's queue, exactly once: with
/// the first byte of the answer, or with the booking on every exit before that.
#[derive(Debug)]
pub struct QueuedBlocks {
    load: Arc<TargetLoad>,
    blocks: u64,
}

impl QueuedBlocks {
    fn new(load: &Arc<TargetLoad>, blocks: u64) -> Self {
        load.queued_blocks.fetch_add(blocks, Ordering::Relaxed);
        Self { load: load.clone(), blocks }
    }
}

impl Drop for QueuedBlocks {
    fn drop(&mut self) {
        self.load.queued_blocks.fetch_sub(self.blocks, Ordering::Relaxed);
    }
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
        Self {
            target,
            load: load.clone(),
            blocks,
            ledger: ledger.clone(),
            is_complete: Cell::new(false),
            queued: Cell::new(None),
        }
    }

    /// The same, with blocks of the prompt that the target has yet to compute.
    pub fn queueing(self, blocks: u64) -> Self {
        self.queued.set((blocks > 0).then(|| QueuedBlocks::new(&self.load, blocks)));
        self
    }

    /// Hands over the end of the queueing to whoever sees the answer begin; nothing where that was done before.
    pub fn take_queued(&self) -> Option<QueuedBlocks> {
        self.queued.take()
    }

    /// The worker has computed the whole prompt and answered it well.
    pub fn note_complete(&self) {
        self.is_complete.set(true);
    }
}

impl Drop for Booking {
    fn drop(&mut self) {
        self.load.requests.fetch_sub(1, Ordering::Relaxed);
        if self.blocks.is_empty() {
            self.load.blockless_requests.fetch_sub(1, Ordering::Relaxed);
        } else {
            let blocks = std::mem::replace(&mut self.blocks, Arc::new([]));
            let is_complete = self.is_complete.get();
            self.ledger.send(LedgerMessage::Finished { target: self.target, blocks, is_complete });
        }
    }
}

/// The prompts in flight per target. Lives on the ingest core; one `apply` per message.
#[derive(Default)]
pub struct Ledger {
    targets: HashMap<TargetId, Entry>,
}

struct Entry {
    load: Arc<TargetLoad>,
    blocks: DistinctBlocks,
    requests: u64,
}

impl Ledger {
    pub fn apply(&mut self, message: LedgerMessage) {
        match message {
            LedgerMessage::Started { target, load, blocks } => self.started(target, load, &blocks),
            LedgerMessage::Finished { target, blocks, .. } => self.finished(target, &blocks),
            LedgerMessage::Expected(_) => {}
        }
    }

    /// Whether a request in flight on the target has this block in its prompt.
    pub fn is_booked(&self, target: TargetId, block: BlockHash) -> bool {
        self.targets.get(&target).is_some_and(|entry| entry.blocks.contains(block))
    }

    /// Targets that hold at least one request.
    pub fn targets_held(&self) -> usize {
        self.targets.len()
    }

    fn started(&mut self, target: TargetId, load: Arc<TargetLoad>, blocks: &Arc<[BlockHash]>) {
        let entry = self.targets.entry(target).or_insert_with(|| Entry {
            load,
            blocks: DistinctBlocks::default(),
            requests: 0,
        });
        entry.requests += 1;
        entry.blocks.add(blocks);
        // Exact before approximate: a reader between the two sees too much load for a moment, never too little.
        entry.load.distinct_blocks.store(entry.blocks.count() as u64, Ordering::Relaxed);
        entry.load.pending_blocks.fetch_sub(blocks.len() as u64, Ordering::Relaxed);
    }

    fn finished(&mut self, target: TargetId, blocks: &[BlockHash]) {
        let Some(entry) = self.targets.get_mut(&target) else {
            debug_assert!(false, "a booking finished that never started");
            return;
        };
        entry.blocks.remove(blocks);
        entry.requests -= 1;
        entry.load.distinct_blocks.store(entry.blocks.count() as u64, Ordering::Relaxed);
        if entry.requests == 0 {
            self.targets.remove(&target);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// Keeps messages until the test lets the ledger read them.
    #[derive(Default)]
    struct Held(Mutex<Vec<LedgerMessage>>);

    impl LedgerSink for Held {
        fn send(&self, message: LedgerMessage) {
            self.0.lock().expect("no panic while held").push(message);
        }
    }

    struct Bench {
        held: Arc<Held>,
        sink: Arc<dyn LedgerSink>,
        load: Arc<TargetLoad>,
        ledger: Ledger,
    }

    impl Bench {
        fn new() -> Self {
            let held = Arc::new(Held::default());
            Self { held: held.clone(), sink: held, load: Arc::default(), ledger: Ledger::default() }
        }

        fn book(&self, blocks: &[u64]) -> Booking {
            let blocks: Vec<BlockHash> = blocks.iter().map(|hash| BlockHash(*hash)).collect();
            Booking::new(TargetId(1), &self.load, blocks.into(), &self.sink, 7)
        }

        fn settle(&mut self) {
            for message in self.held.0.lock().expect("no panic while held").drain(..) {
                self.ledger.apply(message);
            }
        }
    }

    #[test]
    fn a_booking_is_visible_before_the_ledger_has_read_it_and_shared_prefixes_count_once() {
        let mut bench = Bench::new();
        let first = bench.book(&[1, 2, 3]);
        assert_eq!((bench.load.active_blocks(), bench.load.requests()), (3, 1));
        let second = bench.book(&[1, 2, 9]);
        assert_eq!(bench.load.active_blocks(), 6, "an upper bound until the ledger has counted");
        bench.settle();
        assert_eq!(bench.load.active_blocks(), 4);
        drop(first);
        bench.settle();
        assert_eq!((bench.load.active_blocks(), bench.load.requests()), (3, 1));
        drop(second);
        bench.settle();
        assert_eq!((bench.load.active_blocks(), bench.load.requests()), (0, 0));
        assert_eq!(bench.ledger.targets_held(), 0);
    }

    #[test]
    fn a_request_without_blocks_weighs_as_one_and_needs_no_ledger() {
        let bench = Bench::new();
        let booking = bench.book(&[]);
        assert_eq!((bench.load.active_blocks(), bench.load.requests(), bench.load.picked_at_ns()), (1, 1, 7));
        assert!(bench.held.0.lock().expect("no panic while held").is_empty());
        drop(booking);
        assert_eq!((bench.load.active_blocks(), bench.load.requests()), (0, 0));
    }

    #[test]
    fn a_prompt_waits_until_its_answer_begins_or_its_booking_ends() {
        let mut bench = Bench::new();
        let (seen, unseen) = (bench.book(&[1, 2, 3]).queueing(2), bench.book(&[4]).queueing(1));
        bench.settle();
        assert_eq!((bench.load.queued_blocks(), bench.load.active_blocks()), (3, 4));
        drop(seen.take_queued());
        assert!(seen.take_queued().is_none(), "taken off once");
        assert_eq!((bench.load.queued_blocks(), bench.load.active_blocks()), (1, 4));
        drop(unseen);
        drop(seen);
        bench.settle();
        assert_eq!((bench.load.queued_blocks(), bench.load.active_blocks()), (0, 0));
    }

    #[test]
    fn bookings_released_before_the_ledger_reads_anything_leave_nothing() {
        let mut bench = Bench::new();
        for round in 0..100 {
            drop(bench.book(&[round, round + 1]));
        }
        bench.settle();
        assert_eq!((bench.load.active_blocks(), bench.ledger.targets_held()), (0, 0));
    }
}
