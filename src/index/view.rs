//! What the ingest core publishes: the fleet and the index that belongs to it, in one cell, and each rank's counters.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use arc_swap::ArcSwap;

use super::snapshot::{Hits, Snapshot};
use crate::events::SkipReason;
use crate::fleet::{Fleet, Slot, Target};
use crate::worker::{Generation, Name};

/// One consistent state of fleet and index: a slot that one of them knows exists in the other.
#[derive(Debug, Default)]
pub struct View {
    pub fleet: Arc<Fleet>,
    pub index: Snapshot,
    /// Grows by one with every publication.
    pub version: u64,
    /// Every rank of every known worker, by slot; also of workers that are not routable.
    pub ranks: Arc<[Option<Arc<RankStatus>>]>,
}

/// The cell that shards read; written by the ingest core only.
pub type SharedView = Arc<ArcSwap<View>>;

impl View {
    pub fn rank(&self, slot: Slot) -> Option<&RankStatus> {
        self.ranks.get(slot.0 as usize)?.as_deref()
    }

    /// Blocks of cache credit that a slot has: its device prefix, and `host_weight` for each block by which the prefix in
    /// any memory is longer, rounded down. A slot whose publisher is not there has none: what it has evicted meanwhile
    /// is not known. It stays routable, and has its credit again when the publisher is back and the gap is filled.
    pub fn credit(&self, slot: Slot, device: &Hits, any: &Hits, host_weight: f64) -> u32 {
        if self.rank(slot).is_some_and(|rank| !rank.is_connected()) {
            return 0;
        }
        let depth = device.depth(slot);
        if host_weight <= 0.0 {
            return depth;
        }
        let extension = any.depth(slot).saturating_sub(depth);
        depth + (f64::from(extension) * host_weight) as u32
    }

    /// Distinct blocks visible on the target.
    pub fn block_count(&self, target: &Target) -> u64 {
        self.rank(target.slot).map_or(0, |rank| rank.visible_blocks.get())
    }

    /// Ranks of one worker, in rank order; empty for a worker nobody knows.
    pub fn ranks_of<'a>(&'a self, worker_id: &str) -> Vec<&'a RankStatus> {
        let mut ranks: Vec<&RankStatus> =
            self.ranks.iter().flatten().map(|rank| &**rank).filter(|rank| &*rank.worker_id == worker_id).collect();
        ranks.sort_by_key(|rank| rank.rank);
        ranks
    }
}

/// A number that one thread writes and any thread reads.
#[derive(Debug, Default)]
pub struct Number(AtomicU64);

impl Number {
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    pub fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    /// For the writer only: a plain load and store, which is enough for one writer.
    pub fn add(&self, more: u64) {
        self.set(self.get().wrapping_add(more));
    }
}

/// Health and counters of one (worker registration, rank). Written by the ingest core, read by `/metrics`.
#[derive(Debug)]
pub struct RankStatus {
    pub worker_id: Name,
    pub generation: Generation,
    /// Index of the rank: 0 for a worker without ranks.
    pub rank: u32,
    pub slot: Slot,
    /// Address of the rank's publisher; absent where the worker names none.
    pub endpoint: Option<String>,
    /// Whether the publisher has answered the handshake and not gone since.
    pub connected: AtomicBool,
    /// Last sequence number, plus one; 0 before the first.
    pub next_sequence: Number,
    pub batches: Number,
    pub events: Number,
    pub blocks_stored: Number,
    pub blocks_removed: Number,
    /// Distinct blocks visible now.
    pub visible_blocks: Number,
    /// Batches that were lost for good.
    pub batches_lost: Number,
    /// Batches that came from the publisher's replay socket.
    pub batches_replayed: Number,
    /// Batches dropped as repeats.
    pub batches_repeated: Number,
    /// Messages that could not be read, in part or as a whole.
    pub messages_broken: Number,
    /// Times the whole view was forgotten: a gap, or a publisher that began anew.
    pub resets: Number,
    /// Blocks put aside for want of their parent, ever; and how many wait now.
    pub orphans: Number,
    pub orphans_waiting: Number,
    pub orphans_joined: Number,
    pub orphans_dropped: Number,
    pub skipped: [Number; SkipReason::COUNT],
    /// Blocks that reached a first block, since the view last began anew; and batches that had orphans while there was none.
    pub anchored_blocks: Number,
    pub unanchored_batches: Number,
    /// Events whose block size differs from the registered one.
    pub block_size_mismatches: Number,
    /// Tokens per block as last seen in an event; 0 before.
    pub block_size_seen: Number,
    /// When the last message came, nanoseconds on the ingest clock; 0 before the first.
    pub last_message_ns: Number,
}

impl RankStatus {
    pub fn new(worker_id: Name, generation: Generation, rank: u32, slot: Slot, endpoint: Option<String>) -> Self {
        Self {
            worker_id,
            generation,
            rank,
            slot,
            endpoint,
            connected: AtomicBool::new(false),
            next_sequence: Number::default(),
            batches: Number::default(),
            events: Number::default(),
            blocks_stored: Number::default(),
            blocks_removed: Number::default(),
            visible_blocks: Number::default(),
            batches_lost: Number::default(),
            batches_replayed: Number::default(),
            batches_repeated: Number::default(),
            messages_broken: Number::default(),
            resets: Number::default(),
            orphans: Number::default(),
            orphans_waiting: Number::default(),
            orphans_joined: Number::default(),
            orphans_dropped: Number::default(),
            skipped: Default::default(),
            anchored_blocks: Number::default(),
            unanchored_batches: Number::default(),
            block_size_mismatches: Number::default(),
            block_size_seen: Number::default(),
            last_message_ns: Number::default(),
        }
    }

    pub fn is_connected(&self) -> bool {
        self.connected.load(Ordering::Relaxed)
    }

    /// Whether the rank has published blocks, none of which reaches a first block: its cache cannot be seen.
    pub fn is_unanchored(&self) -> bool {
        self.unanchored_batches.get() > 0 && self.anchored_blocks.get() == 0 && self.orphans_waiting.get() > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::{CopyKey, EngineHash, Event, Medium, Stored};
    use crate::hash::prompt_blocks;
    use crate::index::{Mirror, Tree};

    fn view(connected: bool) -> (View, Hits, Hits) {
        let tokens: Vec<u32> = (1..=12).collect();
        let (mut tree, mut mirror) = (Tree::default(), Mirror::new(0));
        let names: Vec<EngineHash> = (0..6).map(EngineHash).collect();
        for (range, medium) in [(0..2, Medium::DEVICE), (2..5, Medium::HOST)] {
            let stored = Stored {
                hashes: &names[range.clone()],
                parent: range.start.checked_sub(1).map(|at| names[at]),
                tokens: &tokens[range.start * 2..range.end * 2],
                block_size: 2,
                copy: CopyKey { medium, group: CopyKey::NO_GROUP },
                identities: &[],
                may_report_hits: false,
            };
            mirror.apply(&mut tree, &Event::Stored(stored));
        }
        let status = RankStatus::new("w".into(), Generation(1), 0, Slot(0), None);
        status.connected.store(connected, Ordering::Relaxed);
        let view = View { index: tree.publish(), ranks: [Some(Arc::new(status))].into(), ..View::default() };
        let (mut device, mut any) = (Hits::new(), Hits::new());
        view.index.query(&prompt_blocks(&tokens, 2), &mut device);
        view.index.query_any(&prompt_blocks(&tokens, 2), &mut any);
        (view, device, any)
    }

    #[test]
    fn host_blocks_count_by_their_weight_and_nothing_counts_while_the_publisher_is_away() {
        for (connected, weight, expected) in
            [(true, 0.0, 2), (true, 0.5, 3), (true, 1.0, 5), (false, 0.0, 0), (false, 1.0, 0)]
        {
            let (view, device, any) = view(connected);
            assert_eq!(view.credit(Slot(0), &device, &any, weight), expected, "{connected} {weight}");
        }
    }
}
