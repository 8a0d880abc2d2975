//! The ingest core's loop: events, the load ledger, fleet changes and publication, all on one thread. Sleeps while nothing
//! happens; never waits for a shard, and frees what shards have let go.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::doorbell::Inbox;
use super::publication::Publication;
use super::rank::{RankState, Watching};
use super::registry::{Rank, Registry};
use super::release::Release;
use super::socket::{Contexts, Subscription, rank_endpoint, receive};
use super::{IngestConfig, IngestStats};
use crate::events::decode::{self, Decoder};
use crate::events::frame;
use crate::events::sequence::{Recovered, ReplayStep, Step};
use crate::fleet::{DiscoveredWorker, Fleet, Slot};
use crate::index::{Hits, RankStatus, SharedView, Tree, View};
use crate::limits::EVENT_MESSAGES_PER_TURN;
use crate::load::{Expectation, Ledger, LedgerMessage};
use crate::parity::{Admission, Watches};
use crate::worker::Name;

pub(super) struct Core {
    config: IngestConfig,
    inbox: Arc<Inbox>,
    stats: Arc<IngestStats>,
    /// What `publication` writes, for the core's own look at it.
    view: SharedView,
    publication: Publication<View>,
    contexts: Contexts,
    registry: Registry,
    ledger: Ledger,
    watches: Watches,
    hits: Hits,
    decoder: Decoder,
    tree: Tree,
    /// By slot.
    ranks: Vec<Option<RankState>>,
    fleet: Arc<Fleet>,
    statuses: Arc<[Option<Arc<RankStatus>>]>,
    /// The fleet, or a block size that it shows, has changed since the last publication.
    is_fleet_changed: bool,
    published_at: Option<Instant>,
    frames: Vec<zmq::Message>,
    /// Slots whose lost batches have been asked for.
    recovering: Vec<usize>,
    release: Release,
}

/// What a poll item stands for.
#[derive(Clone, Copy)]
enum Source {
    Events(usize),
    Monitor(usize),
    Replay(usize),
}

impl Core {
    pub fn new(mut config: IngestConfig, inbox: Arc<Inbox>, stats: Arc<IngestStats>, view: SharedView) -> Self {
        let watches = Watches::new(stats.parity.clone(), config.divergences.take());
        Self {
            config,
            inbox,
            stats,
            publication: Publication::new(view.clone()),
            view,
            contexts: Contexts::default(),
            registry: Registry::default(),
            ledger: Ledger::default(),
            watches,
            hits: Hits::new(),
            decoder: Decoder::default(),
            tree: Tree::default(),
            ranks: Vec::new(),
            fleet: Arc::default(),
            statuses: Arc::new([]),
            is_fleet_changed: false,
            published_at: None,
            frames: Vec::new(),
            recovering: Vec::new(),
            release: Release::default(),
        }
    }

    pub fn run(mut self) {
        let mut ready = Vec::new();
        while !self.inbox.stop.load(Ordering::Acquire) {
            self.stats.turns.add(1);
            let is_busy = !ready.is_empty() || !self.inbox.ledger.is_empty();
            self.drain_ledger();
            if let Some(workers) = self.inbox.fleet.pop() {
                self.update_fleet(workers);
            }
            for source in ready.drain(..) {
                match source {
                    Source::Events(slot) => self.drain_events(slot),
                    Source::Monitor(slot) => self.read_monitor(slot),
                    Source::Replay(slot) => self.drain_replay(slot),
                }
                // A storm of events must not keep a booking from the other shards.
                self.drain_ledger();
            }
            let replay_wait_ms = self.give_up_replays();
            let publish_wait_ms = self.publish_if_due();
            let parity_wait_ms = self.watches.turn(self.stats.now_ns());
            let release_wait_ms = self.release_if_quiet(is_busy);
            let waits_ms = [replay_wait_ms, publish_wait_ms, parity_wait_ms, release_wait_ms];
            let wait_ms = waits_ms.into_iter().filter(|wait| *wait >= 0).min();
            self.wait(wait_ms.unwrap_or(-1), &mut ready);
        }
        // A request that ends after this moment still finds the queue; nobody reads the counters any more.
        self.drain_ledger();
    }

    /// Sleeps until something happens, at most `wait_ms` (-1: for ever), and lists what is ready.
    fn wait(&mut self, wait_ms: i64, ready: &mut Vec<Source>) {
        let mut items = vec![zmq::PollItem::from_fd(self.inbox.bell.descriptor(), zmq::POLLIN)];
        let mut sources = Vec::new();
        for (slot, rank) in self.ranks.iter().enumerate() {
            let Some(rank) = rank else { continue };
            if let Some(replay) = &rank.replay {
                items.push(replay.as_poll_item(zmq::POLLIN));
                sources.push(Source::Replay(slot));
            }
            let Some(subscription) = &rank.subscription else { continue };
            // The monitor first: what it says of a broken connection is to be known before what came over the next one.
            items.push(subscription.monitor.as_poll_item(zmq::POLLIN));
            sources.push(Source::Monitor(slot));
            items.push(subscription.events.as_poll_item(zmq::POLLIN));
            sources.push(Source::Events(slot));
        }
        self.inbox.bell.fall_asleep();
        let wait_ms = if self.inbox.is_empty() { wait_ms } else { 0 };
        let polled = zmq::poll(&mut items, wait_ms);
        self.inbox.bell.wake();
        match polled {
            Ok(_) => ready.extend(
                items[1..].iter().zip(&sources).filter(|(item, _)| item.is_readable()).map(|(_, source)| *source),
            ),
            Err(zmq::Error::EINTR) => {}
            Err(error) => {
                tracing::error!(%error, "polling the KV-event sockets failed");
                // Whatever it is must not turn into a busy loop.
                std::thread::sleep(std::time::Duration::from_millis(100));
            }
        }
    }

    /// Gives memory back when it is time to; returns how long to sleep until it may be, in ms (-1: there is none to give).
    fn release_if_quiet(&mut self, is_busy: bool) -> i64 {
        match self.release.turn(is_busy, Instant::now()) {
            Err(wait_ms) => wait_ms,
            Ok(()) => {
                infera_shards::release_free_memory();
                -1
            }
        }
    }

    fn drain_ledger(&mut self) {
        while let Some(message) = self.inbox.ledger.pop() {
            let message = match message {
                LedgerMessage::Expected(expectation) => {
                    self.expect(expectation);
                    continue;
                }
                message => message,
            };
            if let LedgerMessage::Finished { target, blocks, is_complete } = &message {
                self.watches.on_end(*target, blocks, *is_complete, self.stats.now_ns());
            }
            self.ledger.apply(message);
            self.stats.ledger_messages.add(1);
        }
    }

    /// Watches a request, as far as its target does not hold its blocks already.
    fn expect(&mut self, expectation: Box<Expectation>) {
        // The view published last: what it lacks of the target's blocks is on its way and shows in the check itself.
        self.view.load().index.query_any(&expectation.blocks, &mut self.hits);
        let held = self.hits.depth(expectation.slot) as usize;
        self.watches.expect(expectation, held, self.stats.now_ns());
    }

    // Events -----------------------------------------------------------------------------------------------------

    fn drain_events(&mut self, slot: usize) {
        for _ in 0..EVENT_MESSAGES_PER_TURN {
            let mut frames = std::mem::take(&mut self.frames);
            let subscription =
                self.ranks.get(slot).and_then(Option::as_ref).and_then(|rank| rank.subscription.as_ref());
            let received = subscription.is_some_and(|subscription| receive(&subscription.events, &mut frames));
            if received {
                self.on_message(slot, &frames);
            }
            self.frames = frames;
            if !received {
                break;
            }
        }
        self.frames.clear();
    }

    fn on_message(&mut self, slot: usize, frames: &[zmq::Message]) {
        let now_ns = self.stats.now_ns();
        let Some(rank) = self.ranks.get_mut(slot).and_then(Option::as_mut) else { return };
        rank.status.last_message_ns.set(now_ns);
        let live = match frame::live(frames) {
            Ok(live) => live,
            Err(error) => {
                rank.status.messages_broken.add(1);
                tracing::debug!(worker_id = %rank.status.worker_id, %error, "a KV-event message is skipped");
                return;
            }
        };
        match rank.sequence.on_live(live.sequence, live.payload, now_ns) {
            Step::Apply => {}
            Step::ResetAndApply { lost } => self.reset(slot, lost),
            Step::Drop => {
                rank.status.batches_repeated.add(1);
                return;
            }
            Step::AskReplay { start, reset, .. } => {
                if reset {
                    self.reset(slot, 0);
                }
                self.ask_replay(slot, start);
                return;
            }
            Step::Held => return,
        }
        self.apply(slot, live.payload);
    }

    fn ask_replay(&mut self, slot: usize, start: u64) {
        let now_ns = self.stats.now_ns();
        let Some(rank) = self.ranks[slot].as_mut() else { return };
        match rank.ask_replay(start) {
            Ok(()) => self.recovering.push(slot),
            Err(error) => {
                tracing::warn!(worker_id = %rank.status.worker_id, %error, "cannot ask for lost KV-event batches");
                if let Some(recovered) = rank.sequence.on_replay_end(now_ns) {
                    self.end_replay(slot, recovered);
                }
            }
        }
    }

    fn drain_replay(&mut self, slot: usize) {
        for _ in 0..EVENT_MESSAGES_PER_TURN {
            let mut frames = std::mem::take(&mut self.frames);
            let socket = self.ranks.get(slot).and_then(Option::as_ref).and_then(|rank| rank.replay.as_ref());
            let received = socket.is_some_and(|socket| receive(socket, &mut frames));
            if received {
                self.on_replay_message(slot, &frames);
            }
            self.frames = frames;
            if !received {
                break;
            }
        }
        self.frames.clear();
    }

    fn on_replay_message(&mut self, slot: usize, frames: &[zmq::Message]) {
        let now_ns = self.stats.now_ns();
        let Some(rank) = self.ranks[slot].as_mut() else { return };
        match frame::replay(frames) {
            Err(_) => rank.status.messages_broken.add(1),
            Ok(frame::Replay::End) => {
                if let Some(recovered) = rank.sequence.on_replay_end(now_ns) {
                    self.end_replay(slot, recovered);
                }
            }
            Ok(frame::Replay::Batch { sequence, payload }) => {
                match rank.sequence.on_replay(sequence, payload, now_ns) {
                    ReplayStep::Ignore => {}
                    ReplayStep::BeginAnew => {
                        self.reset(slot, 0);
                        self.ask_replay(slot, 0);
                        return;
                    }
                    ReplayStep::ResetAndApply { lost } => {
                        self.reset(slot, lost);
                        self.apply_replayed(slot, payload);
                    }
                    ReplayStep::Apply => self.apply_replayed(slot, payload),
                }
                let finished = self.ranks[slot].as_mut().and_then(|rank| rank.sequence.finished(now_ns));
                if let Some(recovered) = finished {
                    self.end_replay(slot, recovered);
                }
            }
        }
    }

    fn apply_replayed(&mut self, slot: usize, payload: &[u8]) {
        if let Some(rank) = self.ranks[slot].as_ref() {
            rank.status.batches_replayed.add(1);
        }
        self.apply(slot, payload);
    }

    /// The replay is over, one way or the other: what was held back follows, up to the next gap, which is asked for anew.
    fn end_replay(&mut self, slot: usize, mut recovered: Recovered) {
        let now_ns = self.stats.now_ns();
        loop {
            if let Some(rank) = self.ranks[slot].as_mut() {
                rank.replay = None;
            }
            if recovered.lost > 0 || recovered.is_new_life {
                self.reset(slot, recovered.lost);
            }
            for batch in recovered.held {
                self.apply(slot, &batch.payload);
            }
            let Some((start, rank)) = recovered.ask.zip(self.ranks[slot].as_mut()) else { return };
            if rank.ask_replay(start).is_ok() {
                self.recovering.push(slot);
                return;
            }
            let Some(further) = rank.sequence.on_replay_end(now_ns) else { return };
            recovered = further;
        }
    }

    /// Ends replays that make no progress; returns how long to sleep until the next one is due, ms (-1: none runs).
    fn give_up_replays(&mut self) -> i64 {
        if self.recovering.is_empty() {
            return -1;
        }
        let now_ns = self.stats.now_ns();
        let mut next_ns = u64::MAX;
        for slot in std::mem::take(&mut self.recovering) {
            let Some(rank) = self.ranks.get_mut(slot).and_then(Option::as_mut) else { continue };
            if let Some(recovered) = rank.sequence.on_deadline(now_ns) {
                tracing::warn!(worker_id = %rank.status.worker_id, "the replay of lost KV-event batches was not answered");
                self.end_replay(slot, recovered);
            } else if let Some(deadline_ns) = rank.sequence.deadline_ns() {
                next_ns = next_ns.min(deadline_ns);
                self.recovering.push(slot);
            } else {
                // Ended by a reset: the publisher began anew, or a second gap came.
                rank.replay = None;
            }
        }
        self.recovering.dedup();
        if self.recovering.is_empty() { -1 } else { (next_ns.saturating_sub(now_ns) / 1_000_000 + 1) as i64 }
    }

    /// Forgets what a publisher has told. One that speaks for several ranks takes all of them along.
    fn reset(&mut self, slot: usize, lost: u64) {
        let Some(rank) = self.ranks[slot].as_mut() else { return };
        rank.reset(&mut self.tree, lost);
        self.watches.on_disturbance(slot);
        if rank.rank_count > 1 {
            let worker_id = rank.status.worker_id.clone();
            for sibling in self.slots_of(&worker_id) {
                if let Some(rank) = self.ranks[sibling].as_mut().filter(|rank| rank.is_fed_by(slot)) {
                    rank.reset(&mut self.tree, 0);
                    self.watches.on_disturbance(sibling);
                }
            }
        }
    }

    fn apply(&mut self, slot: usize, payload: &[u8]) {
        let slot = self.named_rank(slot, payload);
        let Some(rank) = self.ranks[slot].as_mut() else { return };
        let learned_before = rank.learned_block_size();
        let is_open = self.watches.is_watched(slot);
        let mut watching = Watching { slot, is_open, watches: &mut self.watches, ledger: &self.ledger };
        rank.apply(&mut self.decoder, &mut self.tree, payload, &mut watching);
        if rank.learned_block_size() != learned_before {
            self.is_fleet_changed = true;
        }
    }

    /// The slot that a batch belongs to: the socket's, unless the batch names another rank of the same worker.
    fn named_rank(&mut self, slot: usize, payload: &[u8]) -> usize {
        let Some(rank) = self.ranks[slot].as_ref().filter(|rank| rank.rank_count > 1) else { return slot };
        let named = match decode::rank(payload) {
            Ok(Some(named)) if named != rank.status.rank && named < rank.rank_count => named,
            _ => return slot,
        };
        let worker_id = rank.status.worker_id.clone();
        let Some(other) = self.slots_of(&worker_id).get(named as usize).copied() else { return slot };
        if let Some(rank) = self.ranks[other].as_mut() {
            rank.set_fed_by(slot);
        }
        other
    }

    /// Slots of a worker's ranks, in rank order.
    fn slots_of(&self, worker_id: &str) -> Vec<usize> {
        let ranks = self.registry.get(worker_id).map(|registration| registration.ranks.as_slice()).unwrap_or_default();
        ranks.iter().map(|rank| rank.slot.0 as usize).collect()
    }

    fn read_monitor(&mut self, slot: usize) {
        let Some(rank) = self.ranks.get_mut(slot).and_then(Option::as_mut) else { return };
        let Some(change) = rank.subscription.as_ref().and_then(Subscription::connection_change) else { return };
        if change.has_broken {
            rank.sequence.on_disconnect();
        }
        let connected = change.is_connected;
        if rank.status.connected.swap(connected, Ordering::Relaxed) != connected {
            tracing::info!(worker_id = %rank.status.worker_id, rank = rank.status.rank, connected, "KV-event publisher");
        }
        if connected {
            if rank.sequence.takes_all_back() {
                self.reset(slot, 0);
            }
            self.catch_up(slot);
        }
    }

    /// Asks for what a connected publisher has said before.
    fn catch_up(&mut self, slot: usize) {
        let now_ns = self.stats.now_ns();
        let Some(rank) = self.ranks[slot].as_mut().filter(|rank| rank.status.is_connected()) else { return };
        if let Some(start) = rank.sequence.on_connect(now_ns) {
            self.ask_replay(slot, start);
        }
    }

    // Fleet ------------------------------------------------------------------------------------------------------

    fn update_fleet(&mut self, workers: Vec<DiscoveredWorker>) {
        let changes = self.registry.update(workers);
        if !changes.left.is_empty() {
            self.release.on_departure(Instant::now());
        }
        for slot in changes.left {
            // Events still queued in the socket go with it, so nothing of a former registration comes later.
            if let Some(rank) = self.ranks.get_mut(slot.0 as usize).and_then(Option::take) {
                rank.leave(&mut self.tree);
            }
            self.watches.leave(slot.0 as usize);
            self.registry.release(slot);
        }
        self.contexts.prune();
        for id in &changes.joined {
            self.open_ranks(id);
        }
        self.ranks.truncate(self.registry.slot_bound());
        self.follow_records();
        self.statuses = (0..self.registry.slot_bound())
            .map(|slot| self.ranks.get(slot)?.as_ref().map(|rank| rank.status.clone()))
            .collect();
        self.is_fleet_changed = true;
        self.stats.fleet_updates.add(1);
    }

    /// Takes over what records have come to say without being a new registration: addresses and block sizes that were not
    /// known before.
    fn follow_records(&mut self) {
        let (mut late, mut askable) = (Vec::new(), Vec::new());
        for rank in self.ranks.iter_mut().flatten() {
            let Some(registration) = self.registry.get(&rank.status.worker_id) else { continue };
            let record = &registration.worker.record;
            if rank.status.endpoint.is_none() && record.kv_events_endpoint.is_some() && rank.status.rank == 0 {
                late.push(registration.worker.id.clone());
            }
            rank.set_registered_block_size(record.kv_block_size);
            let replay = record.kv_replay_endpoint.as_deref().filter(|endpoint| !endpoint.is_empty());
            if rank.set_replay_endpoint(replay.and_then(|base| rank_endpoint(base, rank.status.rank))) {
                askable.push(rank.status.slot.0 as usize);
            }
        }
        askable.into_iter().for_each(|slot| self.catch_up(slot));
        // Nothing was heard of these so far, so a fresh state loses nothing.
        for id in late {
            self.open_ranks(&id);
        }
    }

    fn open_ranks(&mut self, id: &Name) {
        let Some(registration) = self.registry.get(id) else { return };
        let worker = registration.worker.clone();
        let ranks = registration.ranks.clone();
        let worker_slots: Arc<[usize]> = ranks.iter().map(|rank| rank.slot.0 as usize).collect();
        for (number, Rank { slot, target, parity, .. }) in ranks.iter().enumerate() {
            let number = number as u32;
            let base = worker
                .record
                .kv_events_endpoint
                .as_deref()
                .filter(|endpoint| self.config.subscribe && !endpoint.is_empty());
            let endpoint = base.and_then(|base| rank_endpoint(base, number));
            if base.is_some() && endpoint.is_none() {
                tracing::error!(worker_id = %id, rank = number, endpoint = ?base, "the rank has no event address; it is routed without cache knowledge");
            }
            let subscription = endpoint.as_deref().and_then(|endpoint| self.subscribe(id, endpoint));
            let status = RankStatus::new(id.clone(), worker.generation, number, *slot, endpoint);
            let mut rank = RankState::new(status, subscription, ranks.len() as u32, worker.record.kv_block_size);
            let replay = worker.record.kv_replay_endpoint.as_deref().filter(|endpoint| !endpoint.is_empty());
            rank.set_replay_endpoint(replay.and_then(|base| rank_endpoint(base, number)));
            let at = slot.0 as usize;
            if self.ranks.len() <= at {
                self.ranks.resize_with(at + 1, || None);
            }
            self.watches.admit(Admission {
                slot: at,
                target: *target,
                worker_slots: worker_slots.clone(),
                status: rank.status.clone(),
                cell: parity.clone(),
            });
            self.ranks[at] = Some(rank);
        }
    }

    fn subscribe(&mut self, id: &Name, endpoint: &str) -> Option<Subscription> {
        match self.contexts.subscribe(endpoint) {
            Ok(subscription) => Some(subscription),
            Err(error) => {
                tracing::error!(worker_id = %id, endpoint, %error, "cannot subscribe to KV events; the worker is routed without cache knowledge");
                None
            }
        }
    }

    // Publication ------------------------------------------------------------------------------------------------

    /// Publishes at once when it has been quiet, else not before the interval is over. Returns how long to sleep, in ms.
    fn publish_if_due(&mut self) -> i64 {
        if !self.tree.is_changed() && !self.is_fleet_changed {
            return -1;
        }
        let interval = self.config.publish_interval;
        let due = self.published_at.map_or(interval, |at| at.elapsed());
        if due < interval {
            // Rounded up: a shorter sleep than the poll can measure would be a busy loop.
            return (interval - due).as_millis() as i64 + 1;
        }
        self.publish();
        -1
    }

    fn publish(&mut self) {
        if self.is_fleet_changed {
            let ranks = &self.ranks;
            let learned = |slot: Slot| ranks.get(slot.0 as usize)?.as_ref().and_then(RankState::learned_block_size);
            self.fleet = Arc::new(self.registry.fleet(learned));
            self.is_fleet_changed = false;
        }
        self.stats.publications.add(1);
        let view = View {
            fleet: self.fleet.clone(),
            index: self.tree.publish(),
            version: self.stats.publications.get(),
            ranks: self.statuses.clone(),
        };
        let retired = self.publication.publish(Arc::new(view));
        self.published_at = Some(Instant::now());
        self.stats.views_retired.set(retired as u64);
        self.stats.index_blocks.set(self.tree.block_count() as u64);
        self.stats.index_runs.set(self.tree.run_count() as u64);
    }
}
