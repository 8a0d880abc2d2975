//! Runs by hand-made routers: what arrives when, that equal inputs give equal runs, and that events tell the truth.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use super::super::content::Named;
use super::super::engines::Pairs;
use super::*;
use crate::engine::scheduler::{Memory, Speed};
use crate::sim::{Shape, Slo, generate, infinite_cache, outcome};

/// Request by request in turn; keeps what events told.
#[derive(Default)]
struct InTurn {
    next: usize,
    copies: Vec<HashMap<u64, u32>>,
    on_hosts: Vec<HashSet<u64>>,
    prefilled: Vec<u64>,
    open: HashSet<usize>,
}

impl Router for InTurn {
    fn pick(&mut self, _: u64, number: usize, _: &Request, part: Part, engines: &Engines) -> usize {
        self.next += 1;
        assert!(self.open.insert(number) || part == Part::Decode, "a request is sent once");
        let pool = engines.of(part);
        pool.start + (self.next - 1) % pool.len()
    }

    fn cache_changed(&mut self, engine: usize, events: &[CacheEvent<u64>]) {
        self.copies.resize(self.copies.len().max(engine + 1), HashMap::new());
        self.on_hosts.resize(self.copies.len(), HashSet::new());
        let (copies, on_host) = (&mut self.copies[engine], &mut self.on_hosts[engine]);
        for event in events {
            match event {
                CacheEvent::Stored { memory: Memory::Host, digests, .. } => {
                    digests.iter().for_each(|name| assert!(on_host.insert(*name), "the host has one copy"));
                }
                CacheEvent::Removed { memory: Memory::Host, digests } => {
                    digests.iter().for_each(|name| assert!(on_host.remove(name), "only what was stored is removed"));
                }
                CacheEvent::Stored { digests, tokens, .. } => {
                    assert_eq!(tokens.len(), digests.len() * Named::SPELLED_TOKENS);
                    digests.iter().for_each(|name| *copies.entry(*name).or_default() += 1);
                }
                CacheEvent::Removed { digests, .. } => {
                    for name in digests {
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

    fn prefilled(&mut self, now_ns: u64, _: usize) {
        self.prefilled.push(now_ns);
    }

    fn ended(&mut self, _: u64, number: usize) {
        assert!(self.open.remove(&number), "a request ends once");
    }
}

fn fleet(engines: usize, blocks: usize) -> Fleet {
    Fleet {
        speeds: vec![Speed::default(); engines],
        blocks_per_engine: blocks,
        host_blocks_per_engine: 0,
        pairs: None,
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
        assert!(router.prefilled.is_sorted() && router.prefilled.len() == workload.requests.len(), "time goes forward");
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
    let outcome = outcome(&workload, &served, &fleet(3, 4000), limits);
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
    assert!(served.iter().any(|it| it.hits.cached_tokens > 0));
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

/// Prefill, the way of its KV, and one decode step; the next turn's KV is on decode's device but for what is new.
#[test]
fn a_lone_pair_takes_the_time_of_both_halves_and_of_the_way_between() {
    let speed = Speed { jitter: 0.0, ..Speed::default() };
    let request = |start, names: &[u64], tokens| Request { start, session: 0, content: Named::new(names, tokens, 1) };
    let workload = Workload {
        name: "pair".into(),
        block_size: 64,
        requests: vec![
            request(Start::At(0), &[1, 2, 3], 200),
            request(Start::After { request: 0, pause_ns: 1_000_000_000 }, &[1, 2, 3, 4, 5], 330),
        ],
    };
    let transfer = Duration::from_micros(3);
    let pairs = Some(Pairs { prefill: 1, transfer_per_token: transfer });
    let fleet = Fleet { speeds: vec![speed.clone(); 2], pairs, ..fleet(2, 10) };
    let mut router = InTurn::default();
    let served = run(&fleet, &workload, &mut router);
    let prefill = |tokens| speed.step_base + speed.prefill_per_token * tokens;
    // Decode computes the prompt's last token again.
    let first = prefill(200) + transfer * 200 + prefill(1);
    assert_eq!(served[0].first_token_ns, first.as_nanos() as u64);
    assert_eq!((served[0].engine, served[0].decode_engine, served[1].hits.cached_tokens), (0, 1, 192));
    let second = prefill(330 - 192) + transfer * (330 - 192) + prefill(1);
    assert_eq!(served[1].first_token_ns - served[1].sent_ns, second.as_nanos() as u64);
    assert_eq!(router.prefilled[0], prefill(200).as_nanos() as u64);
    let outcome = outcome(&workload, &served, &fleet, Slo { ttft_s: 1.0, itl_s: 1.0 });
    assert_eq!((outcome.imbalance_requests, outcome.hit_rate), (1.0, 192.0 / 530.0));
}

/// What the device has evicted comes back from the host, in less time than computing it takes.
#[test]
fn the_host_keeps_what_the_device_evicts() {
    let workload = generate(Shape::Chat, 300, 2.0, 64, 3);
    let with_host = |host_blocks_per_engine| {
        let mut router = InTurn::default();
        let fleet = Fleet { host_blocks_per_engine, ..fleet(2, 300) };
        let served = run(&fleet, &workload, &mut router);
        let outcome = outcome(&workload, &served, &fleet, Slo { ttft_s: 1.0, itl_s: 1.0 });
        assert!(router.on_hosts.iter().all(|names| names.len() <= host_blocks_per_engine));
        outcome
    };
    let (without, with) = (with_host(0), with_host(3000));
    assert_eq!(without.host_hit_rate, 0.0);
    assert!(with.host_hit_rate > 0.1 && with.hit_rate > without.hit_rate + 0.1, "{with:?} {without:?}");
    assert!(with.ttft_mean_s < without.ttft_mean_s, "{with:?} {without:?}");
}
