//! `--router-policy kv-aware` as a router of the simulation: the router's own index fed by the engines' events, its bookings,
//! its ledger and its cost. Owns the order of the calls, which is that of `src/proxy/pick.rs`; the rules are all the
//! router's.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, PoisonError};

use infera_router::events::{CopyKey, EngineHash, Event, Medium, Stored};
use infera_router::fleet::{Slot, TargetId, TargetLoad};
use infera_router::hash::{BlockHash, prompt_blocks};
use infera_router::index::{Hits, Mirror, Snapshot, Tree};
use infera_router::load::{Booking, Ledger, LedgerMessage, LedgerSink};
use infera_router::route::{self, Candidate, LoadTerm, LoadWeights, PickCounter, RecentLoad};
use loadgen::engine::scheduler::CacheEvent;
use loadgen::sim::{Engines, Named, Request, Router};

/// Where the hits come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Knowledge {
    /// The router's index, which the engines' events reach late.
    Events,
    /// The same, and blocks of prompts in flight count as cached on their engine, although it has not computed them yet.
    Promised,
    /// The engines' caches as they are at the moment of the pick.
    Truth,
}

/// Options of kv-aware. The router has two settings of the load's weights (`--kv-load`); others are for those who look for
/// better ones.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    pub overlap_weight: f64,
    pub load: LoadWeights,
    pub recent_load: RecentLoad,
    pub knowledge: Knowledge,
}

impl Options {
    /// As the router has them with this `--kv-load` and nothing else on its command line.
    pub fn with(term: LoadTerm) -> Self {
        Self {
            overlap_weight: term.overlap_weight(),
            load: term.weights(),
            recent_load: RecentLoad::default(),
            knowledge: Knowledge::Events,
        }
    }
}

/// Keeps the bookings' messages until the ledger reads them, which is before the next pick.
#[derive(Default)]
struct Inbox(Mutex<Vec<LedgerMessage>>);

impl LedgerSink for Inbox {
    fn send(&self, message: LedgerMessage) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(message);
    }
}

struct InFlight {
    booking: Booking,
    engine: usize,
    blocks: Arc<[BlockHash]>,
}

/// Blocks of the prompts in flight on one engine, and how many prompts have them.
#[derive(Clone, Default)]
struct Promised(HashMap<BlockHash, u32>);

impl Promised {
    fn add(&mut self, blocks: &[BlockHash]) {
        blocks.iter().for_each(|block| *self.0.entry(*block).or_default() += 1);
    }

    fn remove(&mut self, blocks: &[BlockHash]) {
        for block in blocks {
            if let Entry::Occupied(mut entry) = self.0.entry(*block) {
                *entry.get_mut() -= 1;
                if *entry.get() == 0 {
                    entry.remove();
                }
            }
        }
    }

    /// `depth`, and the promised blocks that follow on it.
    fn extended(&self, blocks: &[BlockHash], depth: u32) -> u32 {
        depth + blocks[depth as usize..].iter().take_while(|block| self.0.contains_key(*block)).count() as u32
    }
}

pub struct KvAware {
    options: Options,
    block_size: usize,
    tree: Tree,
    mirrors: Vec<Mirror>,
    snapshot: Snapshot,
    hits: Hits,
    loads: Vec<Arc<TargetLoad>>,
    picks: PickCounter,
    ledger: Ledger,
    inbox: Arc<Inbox>,
    sink: Arc<dyn LedgerSink>,
    in_flight: HashMap<usize, InFlight>,
    candidates: Vec<Candidate>,
    /// By engine; only kept where promises count.
    promised: Vec<Promised>,
}

impl KvAware {
    pub fn new(options: Options, block_size: usize, engines: usize) -> Self {
        let inbox = Arc::new(Inbox::default());
        Self {
            options,
            block_size,
            tree: Tree::default(),
            mirrors: (0..engines).map(|slot| Mirror::new(slot as u16)).collect(),
            snapshot: Snapshot::default(),
            hits: Hits::new(),
            loads: (0..engines).map(|_| Arc::default()).collect(),
            picks: PickCounter::default(),
            ledger: Ledger::default(),
            sink: inbox.clone(),
            inbox,
            in_flight: HashMap::new(),
            candidates: Vec::new(),
            promised: vec![Promised::default(); engines],
        }
    }

    fn settle(&mut self) {
        let messages = std::mem::take(&mut *self.inbox.0.lock().unwrap_or_else(PoisonError::into_inner));
        messages.into_iter().for_each(|message| self.ledger.apply(message));
        if self.tree.is_changed() {
            self.snapshot = self.tree.publish();
        }
    }

    /// One candidate per engine. `reusable`: how many of the blocks a cache can save.
    fn fill(&mut self, blocks: &[BlockHash], reusable: usize, request: &Request, engines: &Engines) {
        if self.options.knowledge != Knowledge::Truth {
            self.snapshot.query(&blocks[..reusable], &mut self.hits);
        }
        let is_idle = self.loads.iter().all(|load| load.requests() == 0);
        let recent_weight = self.options.recent_load.weight(is_idle, self.options.overlap_weight);
        let pick_number = self.picks.current();
        self.candidates.clear();
        for (engine, load) in self.loads.iter().enumerate() {
            let announced = self.hits.depth(Slot(engine as u32));
            let cache_hits = match self.options.knowledge {
                Knowledge::Events => announced,
                Knowledge::Promised => self.promised[engine].extended(&blocks[..reusable], announced),
                Knowledge::Truth => engines.cached_blocks(engine, &request.content) as u32,
            };
            self.candidates.push(Candidate {
                target: engine as u32,
                request_blocks: blocks.len() as u32,
                cache_hits,
                active_blocks: load.active_blocks(),
                load_blocks: self.options.load.blocks(load, self.block_size as u32)
                    + recent_weight * route::recent_blocks(load, pick_number),
                picked_at_ns: load.picked_at_ns(),
                block_tokens: self.block_size as u32,
            });
        }
    }

    fn blocks(&self, names: &[u64]) -> Vec<BlockHash> {
        let tokens: Vec<u32> = Named::spell(names).collect();
        prompt_blocks(&tokens, Named::SPELLED_TOKENS)
    }
}

impl Router for KvAware {
    fn pick(&mut self, now_ns: u64, number: usize, request: &Request, engines: &Engines) -> usize {
        self.settle();
        let blocks = self.blocks(request.content.prompt_names(self.block_size));
        let reusable = request.content.reusable_names(self.block_size).len();
        self.fill(&blocks, reusable, request, engines);
        let choice = route::pick(self.options.overlap_weight, &self.candidates).expect("a fleet has engines");
        let engine = choice.target as usize;
        let load = &self.loads[engine];
        if self.options.recent_load != RecentLoad::Off {
            route::charge(load, &self.picks, choice.request_blocks, choice.cache_hits);
        }
        let queued = u64::from(choice.request_blocks - choice.cache_hits);
        let blocks: Arc<[BlockHash]> = blocks.into();
        if self.options.knowledge == Knowledge::Promised {
            self.promised[engine].add(&blocks);
        }
        let booking = Booking::new(TargetId(engine as u64), load, blocks.clone(), &self.sink, now_ns).queueing(queued);
        self.in_flight.insert(number, InFlight { booking, engine, blocks });
        engine
    }

    fn cache_changed(&mut self, engine: usize, events: &[CacheEvent<u64>]) {
        let copy = CopyKey { medium: Medium::DEVICE, group: CopyKey::NO_GROUP };
        let named = |names: &[u64]| -> Vec<EngineHash> { names.iter().copied().map(EngineHash).collect() };
        let mirror = &mut self.mirrors[engine];
        mirror.begin_batch();
        for event in events {
            match event {
                CacheEvent::Stored { digests, parent, tokens, .. } => {
                    let stored = Stored {
                        hashes: &named(digests),
                        parent: parent.map(EngineHash),
                        tokens,
                        block_size: Named::SPELLED_TOKENS,
                        copy,
                        identities: &[],
                        may_report_hits: false,
                    };
                    mirror.apply(&mut self.tree, &Event::Stored(stored));
                }
                CacheEvent::Removed(names) => {
                    mirror.apply(&mut self.tree, &Event::Removed { hashes: &named(names), copy });
                }
                CacheEvent::Cleared => {
                    mirror.apply(&mut self.tree, &Event::Cleared);
                }
            }
        }
    }

    fn first_token(&mut self, _: u64, number: usize) {
        if let Some(held) = self.in_flight.get(&number) {
            drop(held.booking.take_queued());
        }
    }

    fn ended(&mut self, _: u64, number: usize) {
        let Some(held) = self.in_flight.remove(&number) else { return };
        if self.options.knowledge == Knowledge::Promised {
            self.promised[held.engine].remove(&held.blocks);
        }
    }
}
