//! `--router-policy kv-aware` as a router of the simulation: the router's own index fed by the engines' events, its bookings,
//! its ledger, its cost and its decode demand. Owns the order of the calls, which is that of `src/proxy/pick.rs`; the rules are
//! all the router's.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, PoisonError};

use infera_router::decode_demand::{self, DecodeCandidate, DecodeDemand, DemandMetrics, Input, Mode, Reservation};
use infera_router::events::{CopyKey, EngineHash, Event, Medium, Stored};
use infera_router::fleet::{Slot, TargetDemand, TargetId, TargetLoad};
use infera_router::hash::{BlockHash, prompt_blocks};
use infera_router::index::{Hits, Mirror, Tree, View};
use infera_router::load::{Booking, Ledger, LedgerMessage, LedgerSink};
use infera_router::route::{self, Candidate, LoadTerm, LoadWeights, PickCounter, RecentLoad};
use infera_router::worker::Role;
use loadgen::engine::content::Content;
use loadgen::engine::scheduler::{CacheEvent, Memory};
use loadgen::sim::{Engines, Named, Part, Request, Router};
use prometheus::Registry;

use super::baselines::role;

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
    /// Of a block that only host memory holds, where one on the device counts 1 (`--kv-host-tier-weight`).
    pub host_credit: f64,
    /// Decode demand and its weight of a request, tokens (`--decode-input-demand on`, `--decode-request-weight`).
    pub demand: Option<f64>,
    pub knowledge: Knowledge,
}

impl Options {
    /// As the router has them with this `--kv-load` and nothing else on its command line.
    pub fn with(term: LoadTerm) -> Self {
        Self {
            overlap_weight: term.overlap_weight(),
            load: term.weights(),
            recent_load: RecentLoad::default(),
            host_credit: term.host_tier_weight(),
            demand: None,
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

/// One picked engine of a request.
struct Held {
    booking: Booking,
    engine: usize,
    blocks: Arc<[BlockHash]>,
    _reservation: Option<Reservation>,
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
    /// Of a fleet without records: only the index is filled.
    view: View,
    hits: Hits,
    hits_anywhere: Hits,
    loads: Vec<Arc<TargetLoad>>,
    demand: Option<DecodeDemand>,
    demands: Vec<Arc<TargetDemand>>,
    picks: PickCounter,
    ledger: Ledger,
    inbox: Arc<Inbox>,
    sink: Arc<dyn LedgerSink>,
    in_flight: HashMap<usize, Vec<Held>>,
    candidates: Vec<Candidate>,
    /// By engine; only kept where promises count.
    promised: Vec<Promised>,
}

impl KvAware {
    pub fn new(options: Options, block_size: usize, engines: usize) -> Self {
        let inbox = Arc::new(Inbox::default());
        let demand = options.demand.and_then(|request_weight| {
            let metrics = DemandMetrics::new(&Registry::new()).expect("a new registry has no families");
            DecodeDemand::new(Mode::On, request_weight, metrics)
        });
        Self {
            options,
            block_size,
            tree: Tree::default(),
            mirrors: (0..engines).map(|slot| Mirror::new(slot as u16)).collect(),
            view: View::default(),
            hits: Hits::new(),
            hits_anywhere: Hits::new(),
            demand,
            demands: (0..engines).map(|_| Arc::default()).collect(),
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
            self.view.index = self.tree.publish();
        }
    }

    /// Weights of the load and of a missing block. KV comes to decode by transfer: such picks keep the plain formula.
    fn costing(&self, role: Role) -> (LoadWeights, f64) {
        match role {
            Role::Decode => (LoadTerm::Active.weights(), LoadTerm::Active.overlap_weight()),
            Role::Mixed | Role::Prefill => (self.options.load, self.options.overlap_weight),
        }
    }

    /// One candidate per engine of the pool. `reusable`: how many of the blocks a cache can save.
    fn fill(&mut self, blocks: &[BlockHash], reusable: usize, request: &Request, part: Part, engines: &Engines) {
        let (weights, overlap_weight) = self.costing(role(part));
        if self.options.knowledge != Knowledge::Truth {
            self.view.index.query(&blocks[..reusable], &mut self.hits);
            if self.options.host_credit > 0.0 {
                self.view.index.query_any(&blocks[..reusable], &mut self.hits_anywhere);
            }
        }
        let is_idle = self.loads[engines.of(part)].iter().all(|load| load.requests() == 0);
        let recent_weight = self.options.recent_load.weight(is_idle, overlap_weight);
        let pick_number = self.picks.current();
        self.candidates.clear();
        for engine in engines.of(part) {
            let load = &self.loads[engine];
            let announced = || {
                let slot = Slot(engine as u32);
                self.view.credit(slot, &self.hits, &self.hits_anywhere, self.options.host_credit)
            };
            let cache_hits = match self.options.knowledge {
                Knowledge::Events => announced(),
                Knowledge::Promised => self.promised[engine].extended(&blocks[..reusable], announced()),
                Knowledge::Truth => engines.cached_blocks(engine, &request.content) as u32,
            };
            self.candidates.push(Candidate {
                target: engine as u32,
                request_blocks: blocks.len() as u32,
                cache_hits,
                active_blocks: load.active_blocks(),
                load_blocks: weights.blocks(load, self.block_size as u32)
                    + recent_weight * route::recent_blocks(load, pick_number),
                picked_at_ns: load.picked_at_ns(),
                block_tokens: self.block_size as u32,
            });
        }
    }

    /// Decode demand's choice, where it is on: its place among the candidates, and what it has reserved there.
    fn demanded(&self, original: u32, request: &Request) -> Option<(u32, Reservation)> {
        let demand = self.demand.as_ref()?;
        let tokens = decode_demand::request_tokens(request.content.prompt_tokens() as u64, 1);
        let row = |candidate: &Candidate| DecodeCandidate {
            demand: &self.demands[candidate.target as usize],
            tokens,
            load: candidate.load_blocks,
        };
        let rows: Vec<_> = self.candidates.iter().map(row).collect();
        let original = self.candidates.iter().position(|candidate| candidate.target == original)?;
        let (selection, reservation) = demand.select(&rows, original, Input::Exact, None);
        Some((self.candidates[selection.picked].target, reservation))
    }

    fn blocks(&self, names: &[u64]) -> Vec<BlockHash> {
        let tokens: Vec<u32> = Named::spell(names).collect();
        prompt_blocks(&tokens, Named::SPELLED_TOKENS)
    }
}

impl Router for KvAware {
    fn pick(&mut self, now_ns: u64, number: usize, request: &Request, part: Part, engines: &Engines) -> usize {
        self.settle();
        let blocks = self.blocks(request.content.prompt_names(self.block_size));
        let reusable = request.content.reusable_names(self.block_size).len();
        self.fill(&blocks, reusable, request, part, engines);
        let (_, overlap_weight) = self.costing(role(part));
        let original = route::pick(overlap_weight, &self.candidates).expect("a fleet has engines").target;
        let demanded = if part == Part::Decode { self.demanded(original, request) } else { None };
        let (target, reservation) = demanded.map_or((original, None), |(target, held)| (target, Some(held)));
        let chosen = self.candidates.iter().find(|candidate| candidate.target == target);
        let chosen = *chosen.expect("chosen among the candidates");
        let engine = target as usize;
        let load = &self.loads[engine];
        if self.options.recent_load != RecentLoad::Off {
            route::charge(load, &self.picks, chosen.request_blocks, chosen.cache_hits);
        }
        let missing = u64::from(chosen.request_blocks - chosen.cache_hits);
        let queued = if part == Part::Decode { 0 } else { missing };
        let blocks: Arc<[BlockHash]> = blocks.into();
        if self.options.knowledge == Knowledge::Promised {
            self.promised[engine].add(&blocks);
        }
        let booking = Booking::new(TargetId(engine as u64), load, blocks.clone(), &self.sink, now_ns).queueing(queued);
        let held = Held { booking, engine, blocks, _reservation: reservation };
        self.in_flight.entry(number).or_default().push(held);
        engine
    }

    fn cache_changed(&mut self, engine: usize, events: &[CacheEvent<u64>]) {
        let copy = |memory| CopyKey {
            medium: if memory == Memory::Device { Medium::DEVICE } else { Medium::HOST },
            group: CopyKey::NO_GROUP,
        };
        let named = |names: &[u64]| -> Vec<EngineHash> { names.iter().copied().map(EngineHash).collect() };
        let mirror = &mut self.mirrors[engine];
        mirror.begin_batch();
        for event in events {
            match event {
                CacheEvent::Stored { memory, digests, parent, tokens, .. } => {
                    let stored = Stored {
                        hashes: &named(digests),
                        parent: parent.map(EngineHash),
                        tokens,
                        block_size: Named::SPELLED_TOKENS,
                        copy: copy(*memory),
                        identities: &[],
                        may_report_hits: false,
                    };
                    mirror.apply(&mut self.tree, &Event::Stored(stored));
                }
                CacheEvent::Removed { memory, digests } => {
                    mirror.apply(&mut self.tree, &Event::Removed { hashes: &named(digests), copy: copy(*memory) });
                }
                CacheEvent::Cleared => {
                    mirror.apply(&mut self.tree, &Event::Cleared);
                }
            }
        }
    }

    fn prefilled(&mut self, _: u64, number: usize) {
        self.in_flight.get(&number).into_iter().flatten().for_each(|held| drop(held.booking.take_queued()));
    }

    fn ended(&mut self, _: u64, number: usize) {
        for held in self.in_flight.remove(&number).unwrap_or_default() {
            if self.options.knowledge == Knowledge::Promised {
                self.promised[held.engine].remove(&held.blocks);
            }
        }
    }
}
