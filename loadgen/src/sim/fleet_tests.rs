//! Runs by hand-made routers: what arrives when, that equal inputs give equal runs, and that events tell the truth.

use std::collections::{HashMap, HashSet};

use super::*;
use crate::sim::{Shape, Slo, generate, infinite_cache, outcome};

/// Request by request in turn; keeps what events told.
#[derive(Default)]
struct InTurn {
    next: usize,
    copies: Vec<HashMap<u64, u32>>,
    first_tokens: Vec<u64>,
    open: HashSet<usize>,
}

impl Router for InTurn {
    fn pick(&mut self, _: u64, number: usize, _: &Request, engines: &Engines) -> usize {
        self.next += 1;
        assert!(self.open.insert(number), "a request is sent once");
        (self.next - 1) % engines.count()
    }

    fn cache_changed(&mut self, engine: usize, events: &[CacheEvent<u64>]) {
        self.copies.resize(self.copies.len().max(engine + 1), HashMap::new());
        let copies = &mut self.copies[engine];
        for event in events {
            match event {
                CacheEvent::Stored { digests, tokens, .. } => {
                    assert_eq!(tokens.len(), digests.len() * Named::SPELLED_TOKENS);
                    digests.iter().for_each(|name| *copies.entry(*name).or_default() += 1);
                }
                CacheEvent::Removed(names) => {
                    for name in names {
                        let count = copies.get_mut(name).expect("only what was stored is removed");
                        *count -= 1;
                        if *count == 0 {
                            copies.remove(name);
                        }
                    }
                }
                CacheEvent::Cleared => copies.clear(),
            }
        }
    }

    fn first_token(&mut self, now_ns: u64, _: usize) {
        self.first_tokens.push(now_ns);
    }

    fn ended(&mut self, _: u64, number: usize) {
        assert!(self.open.remove(&number), "a request ends once");
    }
}

fn fleet(engines: usize, blocks: usize) -> Fleet {
    Fleet {
        speeds: vec![Speed::default(); engines],
        blocks_per_engine: blocks,
        event_lag: Duration::from_millis(2),
        seed: 5,
    }
}

#[test]
fn equal_inputs_give_equal_runs_and_every_request_ends() {
    let workload = generate(Shape::Agents, 300, 1.0, 64, 7);
    let once = || {
        let mut router = InTurn::default();
        let served = run(&fleet(3, 4000), &workload, &mut router);
        assert!(router.open.is_empty());
        assert!(router.first_tokens.is_sorted(), "time goes forward");
        served
    };
    let served = once();
    assert_eq!(served, once());
    for (request, it) in workload.requests.iter().zip(&served) {
        assert!(it.sent_ns < it.first_token_ns && it.first_token_ns <= it.ended_ns);
        if let Start::After { request, pause_ns } = request.start {
            assert_eq!(it.sent_ns, served[request].ended_ns + pause_ns);
        }
    }
    let limits = Slo { ttft_s: f64::INFINITY, itl_s: f64::INFINITY };
    let outcome = outcome(&workload, &served, 3, limits);
    assert_eq!((outcome.requests, outcome.goodput), (workload.requests.len(), 1.0));
    assert!(outcome.hit_rate > 0.0 && outcome.hit_rate < infinite_cache(&workload, &served));
}

#[test]
fn events_tell_what_the_engines_hold_at_rest_although_they_evict() {
    let workload = generate(Shape::Chat, 200, 2.0, 64, 3);
    let mut router = InTurn::default();
    // Ends with a rest in which all events arrive: the last event of a run is the last batch.
    let fleet = fleet(2, 300);
    let served = run(&fleet, &workload, &mut router);
    let evicted = router.copies.iter().all(|copies| copies.len() <= 300);
    assert!(evicted && router.copies.len() == 2);
    let stored: usize = router.copies.iter().map(HashMap::len).sum();
    assert!(stored > 400, "full pools stay full: {stored}");
    assert!(served.iter().any(|it| it.cached_tokens > 0));
}

#[test]
fn a_lone_request_takes_the_time_of_the_formula() {
    let speed = Speed { jitter: 0.0, ..Speed::default() };
    let request = Request { start: Start::At(1_000), session: 0, content: Named::new(vec![1, 2, 3], 200, 2) };
    let workload = Workload { name: "one".into(), block_size: 64, requests: vec![request] };
    let fleet = Fleet { speeds: vec![speed.clone()], ..fleet(1, 10) };
    let served = run(&fleet, &workload, &mut InTurn::default());
    let prefill = speed.step_base + speed.prefill_per_token * 200;
    let decode = speed.step_base + speed.decode_per_sequence + speed.decode_per_kilotoken.mul_f64(0.201);
    assert_eq!(served[0].first_token_ns, 1_000 + prefill.as_nanos() as u64);
    assert_eq!(served[0].ended_ns, served[0].first_token_ns + decode.as_nanos() as u64);
}
