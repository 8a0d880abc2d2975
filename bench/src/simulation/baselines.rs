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
use loadgen::sim::{Engines, Request, Router};

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
    fn pick(&mut self, _: u64, _: usize, _: &Request, engines: &Engines) -> usize {
        self.candidates.resize(engines.count(), 0);
        self.candidates.iter_mut().enumerate().for_each(|(at, index)| *index = at as u32);
        let picked = self.rotation.pick(&self.model, Role::Mixed, &self.candidates);
        picked.expect("a fleet has engines") as usize
    }

    fn cache_changed(&mut self, _: usize, _: &[CacheEvent<u64>]) {}
    fn first_token(&mut self, _: u64, _: usize) {}
    fn ended(&mut self, _: u64, _: usize) {}
}

/// The router's session table (one hour); first turns go where the fewest requests are in flight.
pub struct Sessions {
    table: Arc<SessionTable>,
    clock_s: Arc<AtomicU32>,
    requests: Vec<usize>,
    held: HashMap<usize, (usize, Option<Lease>)>,
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
    fn pick(&mut self, now_ns: u64, number: usize, request: &Request, _: &Engines) -> usize {
        self.clock_s.store((now_ns / 1_000_000_000) as u32 + 1, Ordering::Relaxed);
        let key = SessionKey::new(1, "m", Role::Mixed, &request.session.to_le_bytes());
        let lease = self.table.follow(key, |_| true).or_else(|| {
            let freest = (0..self.requests.len()).min_by_key(|engine| self.requests[*engine]);
            self.table.claim(key, RecordId(freest.unwrap_or(0) as u64), |_| true)
        });
        let engine = lease.as_ref().map_or(number % self.requests.len(), |lease| lease.target().0 as usize);
        self.requests[engine] += 1;
        self.held.insert(number, (engine, lease));
        engine
    }

    fn cache_changed(&mut self, _: usize, _: &[CacheEvent<u64>]) {}
    fn first_token(&mut self, _: u64, _: usize) {}

    fn ended(&mut self, _: u64, number: usize) {
        if let Some((engine, lease)) = self.held.remove(&number) {
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
    fn pick(&mut self, _: u64, _: usize, request: &Request, engines: &Engines) -> usize {
        self.picked_at.resize(engines.count(), 0);
        let rank = |engine: &usize| {
            let missing = usize::MAX - engines.cached_blocks(*engine, &request.content);
            (missing, engines.requests(*engine), self.picked_at[*engine])
        };
        let engine = (0..engines.count()).min_by_key(rank).expect("a fleet has engines");
        self.picks += 1;
        self.picked_at[engine] = self.picks;
        engine
    }

    fn cache_changed(&mut self, _: usize, _: &[CacheEvent<u64>]) {}
    fn first_token(&mut self, _: u64, _: usize) {}
    fn ended(&mut self, _: u64, _: usize) {}
}
