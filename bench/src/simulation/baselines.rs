//! What kv-aware is compared with: the router's round robin, its session table, and who knows the caches and nothing else.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use infera_router::fleet::RecordId;
use infera_router::limits::SESSIONS_MAX;
use infera_router::route::RoundRobin;
use infera_router::route::affinity::{Lease, SessionKey, SessionTable};
use infera_router::worker::{Name, Role};
use loadgen::engine::scheduler::CacheEvent;
use loadgen::sim::{Engines, Part, Request, Router};

/// The pool that a part is picked from.
pub(super) fn role(part: Part) -> Role {
    match part {
        Part::Whole => Role::Mixed,
        Part::Prefill => Role::Prefill,
        Part::Decode => Role::Decode,
    }
}

/// `--router-policy round-robin`.
pub struct InTurn {
    rotation: RoundRobin,
    model: Name,
    candidates: Vec<u32>,
}

impl InTurn {
    pub fn new(first: usize) -> Self {
        Self { rotation: RoundRobin::new(first), model: "m".into(), candidates: Vec::new() }
    }
}

impl Router for InTurn {
    fn pick(&mut self, _: u64, _: usize, _: &Request, part: Part, engines: &Engines) -> usize {
        self.candidates.clear();
        self.candidates.extend(engines.of(part).map(|engine| engine as u32));
        let picked = self.rotation.pick(&self.model, role(part), &self.candidates, |_| true);
        picked.expect("a fleet has engines") as usize
    }

    fn cache_changed(&mut self, _: usize, _: &[CacheEvent<u64>]) {}
    fn prefilled(&mut self, _: u64, _: usize) {}
    fn ended(&mut self, _: u64, _: usize) {}
}

/// The router's session table (one hour); first turns go where the fewest requests are in flight.
pub struct Sessions {
    table: Arc<SessionTable>,
    clock_s: Arc<AtomicU32>,
    requests: Vec<usize>,
    held: HashMap<usize, Vec<(usize, Option<Lease>)>>,
}

impl Sessions {
    pub fn new(engines: usize) -> Self {
        let clock_s = Arc::new(AtomicU32::new(1));
        let clock = clock_s.clone();
        let table = SessionTable::new(SESSIONS_MAX, 3600, Arc::new(move || clock.load(Ordering::Relaxed)));
        Self { table: Arc::new(table), clock_s, requests: vec![0; engines], held: HashMap::new() }
    }
}

impl Router for Sessions {
    fn pick(&mut self, now_ns: u64, number: usize, request: &Request, part: Part, engines: &Engines) -> usize {
        self.clock_s.store((now_ns / 1_000_000_000) as u32 + 1, Ordering::Relaxed);
        let key = SessionKey::new(1, "m", role(part), &request.session.to_le_bytes());
        let lease = self.table.follow(key, |_| true).or_else(|| {
            let freest = engines.of(part).min_by_key(|engine| self.requests[*engine]);
            self.table.claim(key, RecordId(freest.unwrap_or(0) as u64), |_| true)
        });
        let pool = engines.of(part);
        let anyone = pool.start + number % pool.len();
        let engine = lease.as_ref().map_or(anyone, |lease| lease.target().0 as usize);
        self.requests[engine] += 1;
        self.held.entry(number).or_default().push((engine, lease));
        engine
    }

    fn cache_changed(&mut self, _: usize, _: &[CacheEvent<u64>]) {}
    fn prefilled(&mut self, _: u64, _: usize) {}

    fn ended(&mut self, _: u64, number: usize) {
        for (engine, lease) in self.held.remove(&number).unwrap_or_default() {
            self.requests[engine] -= 1;
            if let Some(lease) = lease {
                lease.served();
            }
        }
    }
}

/// Full knowledge of the caches, and no cost for load but between equals.
#[derive(Default)]
pub struct MostCached {
    picks: u64,
    picked_at: Vec<u64>,
}

impl Router for MostCached {
    fn pick(&mut self, _: u64, _: usize, request: &Request, part: Part, engines: &Engines) -> usize {
        self.picked_at.resize(engines.count(), 0);
        let rank = |engine: &usize| {
            let missing = usize::MAX - engines.cached_blocks(*engine, &request.content);
            (missing, engines.requests(*engine), self.picked_at[*engine])
        };
        let engine = engines.of(part).min_by_key(rank).expect("a fleet has engines");
        self.picks += 1;
        self.picked_at[engine] = self.picks;
        engine
    }

    fn cache_changed(&mut self, _: usize, _: &[CacheEvent<u64>]) {}
    fn prefilled(&mut self, _: u64, _: usize) {}
    fn ended(&mut self, _: u64, _: usize) {}
}
