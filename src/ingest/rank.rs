//! One rank's side of the ingest core: its subscription, its sequence state, its mirror and its counters. Applies batches;
//! decides nothing about publishing.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::socket::{self, Subscription};
use crate::events::decode::Decoder;
use crate::events::sequence::Sequence;
use crate::events::{Event, Stored};
use crate::index::{Applied, Mirror, RankStatus, Tree};
use crate::load::Ledger;
use crate::parity::{self, Watches};

/// Who looks at what one batch of a slot has stored, if anybody does.
pub(super) struct Watching<'a> {
    pub slot: usize,
    pub is_open: bool,
    pub watches: &'a mut Watches,
    pub ledger: &'a Ledger,
}

impl Watching<'_> {
    fn show(&mut self, mirror: &Mirror, event: &Event<'_>, applied: &Applied) {
        if let (Event::Stored(stored), Some((parent, chain))) = (event, mirror.stored_chain()) {
            let Stored { tokens, block_size, .. } = *stored;
            self.watches.on_store(self.slot, &parity::Stored { parent, chain, tokens, block_size }, self.ledger);
        }
        if applied.orphaned > 0 || applied.orphans_dropped > 0 {
            self.watches.on_unplaced(self.slot);
        }
    }
}

pub(super) struct RankState {
    pub status: Arc<RankStatus>,
    pub sequence: Sequence,
    /// Absent where the worker names no publisher, or one that cannot be subscribed to.
    pub subscription: Option<Subscription>,
    /// Where lost batches may be asked for.
    replay_endpoint: Option<String>,
    /// The socket of a replay that runs.
    pub replay: Option<zmq::Socket>,
    /// Number of ranks of the worker; above 1 a batch may name another rank than the socket's.
    pub rank_count: u32,
    registered_block_size: Option<u32>,
    is_mismatch_logged: bool,
    /// Slots of sibling ranks whose publishers have spoken for this rank.
    fed_by: Vec<usize>,
    mirror: Mirror,
}

impl RankState {
    pub fn new(
        status: RankStatus,
        subscription: Option<Subscription>,
        rank_count: u32,
        registered_block_size: Option<u32>,
    ) -> Self {
        let mirror = Mirror::new(status.slot.0 as u16);
        Self {
            status: Arc::new(status),
            sequence: Sequence::new(false),
            subscription,
            replay_endpoint: None,
            replay: None,
            rank_count,
            registered_block_size: registered_block_size.filter(|size| *size > 0),
            is_mismatch_logged: false,
            fed_by: Vec::new(),
            mirror,
        }
    }

    /// The record changed in place: what was not known of the block size may be known now.
    pub fn set_registered_block_size(&mut self, size: Option<u32>) {
        self.registered_block_size = size.filter(|size| *size > 0);
    }

    /// Tells where lost batches may be asked for, if anywhere. True if that is known now and was not before.
    pub fn set_replay_endpoint(&mut self, endpoint: Option<String>) -> bool {
        self.sequence.set_can_replay(endpoint.is_some());
        let is_news = self.replay_endpoint.is_none() && endpoint.is_some();
        self.replay_endpoint = endpoint;
        is_news
    }

    /// Asks the publisher's replay socket for everything from `start` on.
    pub fn ask_replay(&mut self, start: u64) -> Result<(), zmq::Error> {
        let (Some(endpoint), Some(subscription)) = (&self.replay_endpoint, &self.subscription) else {
            return Err(zmq::Error::ENOTCONN);
        };
        self.replay = Some(socket::ask_replay(&subscription.context, endpoint, start)?);
        tracing::info!(worker_id = %self.status.worker_id, rank = self.status.rank, start, "lost KV-event batches are asked for");
        Ok(())
    }

    pub fn is_fed_by(&self, slot: usize) -> bool {
        self.fed_by.contains(&slot)
    }

    pub fn set_fed_by(&mut self, slot: usize) {
        if !self.is_fed_by(slot) {
            self.fed_by.push(slot);
        }
    }

    /// Block size for the router's own hashing where the worker registered none.
    pub fn learned_block_size(&self) -> Option<u32> {
        u32::try_from(self.status.block_size_seen.get()).ok().filter(|size| *size > 0)
    }

    /// Applies one batch and counts what became of it.
    pub fn apply(&mut self, decoder: &mut Decoder, tree: &mut Tree, payload: &[u8], watching: &mut Watching<'_>) {
        let mut total = Applied::default();
        let mut block_size = 0;
        let mut mismatches = 0;
        // Since the view last began anew, which may be in the middle of this batch.
        let (mut anchored, mut orphaned) = (self.status.anchored_blocks.get(), 0);
        let (mirror, registered) = (&mut self.mirror, self.registered_block_size);
        mirror.begin_batch();
        let summary = decoder.decode_into(payload, mirror, Mirror::announce, |mirror, event| {
            if let Event::Stored(stored) = &event {
                block_size = stored.block_size as u64;
                mismatches += u64::from(registered.is_some_and(|registered| u64::from(registered) != block_size));
            }
            let applied = mirror.apply(tree, &event);
            if watching.is_open {
                watching.show(mirror, &event, &applied);
            }
            if matches!(event, Event::Cleared) {
                (anchored, orphaned) = (0, 0);
            }
            anchored += applied.blocks_stored + applied.joined;
            orphaned += applied.orphaned;
            total.blocks_stored += applied.blocks_stored;
            total.blocks_removed += applied.blocks_removed;
            total.orphaned += applied.orphaned;
            total.joined += applied.joined;
            total.orphans_dropped += applied.orphans_dropped;
        });
        let status = &self.status;
        status.batches.add(1);
        status.anchored_blocks.set(anchored);
        status.unanchored_batches.add(u64::from(orphaned > 0 && anchored == 0));
        status.events.add(u64::from(summary.applied));
        status.blocks_stored.add(total.blocks_stored);
        status.blocks_removed.add(total.blocks_removed);
        status.orphans.add(total.orphaned);
        status.orphans_joined.add(total.joined);
        status.orphans_dropped.add(total.orphans_dropped);
        status.block_size_mismatches.add(mismatches);
        status.messages_broken.add(u64::from(summary.error.is_some()));
        for (count, more) in status.skipped.iter().zip(summary.skipped) {
            count.add(u64::from(more));
        }
        if block_size > 0 {
            status.block_size_seen.set(block_size);
        }
        self.show(tree);
        if mismatches > 0 && !self.is_mismatch_logged {
            self.is_mismatch_logged = true;
            tracing::error!(
                worker_id = %self.status.worker_id, registered = ?registered, seen = block_size,
                "the worker's KV events have another block size than its registration: its cache cannot be matched"
            );
        }
    }

    /// Forgets the whole view of this rank.
    pub fn reset(&mut self, tree: &mut Tree, lost: u64) {
        self.mirror.clear(tree);
        self.status.anchored_blocks.set(0);
        self.status.resets.add(1);
        self.status.batches_lost.add(lost);
        self.show(tree);
        // At the first, second, fourth… time: a publisher that loses batches all the time must not fill the log.
        let resets = self.status.resets.get();
        if resets.is_power_of_two() {
            let reason = if lost > 0 { "batches were lost" } else { "its publisher began anew" };
            tracing::warn!(
                worker_id = %self.status.worker_id, rank = self.status.rank, lost, resets,
                "the rank's view is forgotten: {reason}"
            );
        }
    }

    /// Leaves no trace in the tree; the slot may be given to another afterwards.
    pub fn leave(mut self, tree: &mut Tree) {
        self.status.connected.store(false, Ordering::Relaxed);
        self.mirror.clear(tree);
        debug_assert_eq!(tree.held_count(self.status.slot.0 as u16), 0);
    }

    fn show(&self, tree: &Tree) {
        self.status.visible_blocks.set(u64::from(tree.held_count(self.status.slot.0 as u16)));
        self.status.orphans_waiting.set(self.mirror.orphan_count() as u64);
        self.status.next_sequence.set(self.sequence.last().map_or(0, |last| last.wrapping_add(1)));
    }
}
