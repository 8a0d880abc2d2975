//! Seeded chaos against the built binary: engines that die, reset, freeze, answer garbage, cut their streams and flap in
//! a real etcd; clients that leave, stall and dribble. Once over mixed engines, once over prefill/decode pairs whose legs
//! start together, once over pairs that hand over. What is asked of the router: every answer is right or an honest error,
//! nothing panics, and at rest nothing is left, neither bookings nor descriptors nor memory.
//!
//! `INFERA_CHAOS_SECONDS` sets how long the storm lasts (default 15), `INFERA_CHAOS_CLIENTS` how many clients there are
//! (default 24; some hundreds keep two cores busy), `INFERA_CHAOS_SEED` repeats one. Ten minutes of each
//! at full load:
//!
//! Memory is `VmRSS`, in a process without transparent huge pages: with them one page in use anywhere counts as 2 MiB, and
//! how many such regions are touched at rest is chance (6 to 14 MiB of 23 before any fault, nearly all of it zeros).
//!
//! ```text
//! INFERA_CHAOS_SECONDS=600 INFERA_CHAOS_CLIENTS=300 cargo test --test chaos -- --nocapture --test-threads=1
//! ```

#![allow(clippy::unwrap_used, clippy::print_stderr)]

mod clients;
mod engines;
#[path = "../support/etcd.rs"]
mod etcd;
#[allow(dead_code)]
#[path = "../e2e/support/mod.rs"]
mod support;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clients::Tally;
use engines::Engine;
use etcd::Etcd;
use support::router::{Router, router};
use support::wait_until;

const PREFIX: &str = "/infera/workers/";

/// A number from the environment.
fn setting(name: &str, default: impl FnOnce() -> u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name} is a whole number, not {text:?}")),
        Err(_) => default(),
    }
}

struct Usage {
    descriptors: usize,
    resident_bytes: u64,
}

fn usage(router: &Router) -> Usage {
    let status = std::fs::read_to_string(format!("/proc/{}/status", router.pid())).unwrap();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    let kib: u64 = resident.trim().split(' ').next().unwrap().parse().unwrap();
    let descriptors = std::fs::read_dir(format!("/proc/{}/fd", router.pid())).unwrap().count();
    Usage { descriptors, resident_bytes: kib << 10 }
}

/// What the engines are to each other.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Topology {
    Mixed,
    /// Every other one prefills, by this protocol.
    Pairs(&'static str),
}

impl Topology {
    /// Six of each role.
    fn engines(self) -> usize {
        if self == Topology::Mixed { 6 } else { 12 }
    }
}

struct Fleet {
    topology: Topology,
    etcd: Etcd,
    engines: Vec<Engine>,
}

impl Fleet {
    fn start(topology: Topology, seed: u64) -> Self {
        let engines = (0..topology.engines()).map(|number| Engine::start(seed.wrapping_add(number as u64))).collect();
        let fleet = Self { topology, etcd: Etcd::start(), engines };
        (0..fleet.engines.len()).for_each(|number| fleet.register(number));
        fleet
    }

    fn register(&self, number: usize) {
        let address = self.engines[number].address;
        let mut record = serde_json::json!({
            "worker_id": format!("engine-{number}"), "url": format!("http://{address}"), "model_name": "m",
            "disagg_mode": "mixed", "status": "active", "kv_block_size": 16
        });
        if let Topology::Pairs(protocol) = self.topology {
            record["disagg_mode"] = ["prefill", "decode"][number % 2].into();
            let params = serde_json::json!({"bootstrap_addr": address.to_string(), "engine_id": "e"});
            record["disagg_meta"] = serde_json::json!({"protocol": protocol, "params": params});
        }
        self.etcd.put(&format!("{PREFIX}engine-{number}"), &record.to_string());
    }

    /// One engine leaves, comes back, is written down wrongly, dies, or is back. At least half of them stay.
    fn flap(&self, random: &mut fastrand::Rng) {
        let number = random.usize(..self.engines.len() / 2);
        let key = format!("{PREFIX}engine-{number}");
        match random.u8(..8) {
            0 | 1 => self.etcd.delete(&key),
            2 | 3 => self.etcd.put(&key, "{\"worker_id\": 7, nonsense"),
            4 => self.engines[number].set_dead(true),
            5 => self.engines[number].set_dead(false),
            _ => self.register(number),
        }
    }
}

#[test]
fn storms_leave_nothing_behind() {
    weather(Topology::Mixed);
}

#[test]
fn storms_over_pairs_whose_legs_start_together_leave_nothing_behind() {
    weather(Topology::Pairs("sglang-bootstrap"));
}

#[test]
fn storms_over_pairs_that_hand_over_leave_nothing_behind() {
    weather(Topology::Pairs("vllm-nixl"));
}

fn weather(topology: Topology) {
    let seed = setting("INFERA_CHAOS_SEED", || fastrand::u64(..));
    let duration = Duration::from_secs(setting("INFERA_CHAOS_SECONDS", || 15));
    eprintln!("{topology:?}: INFERA_CHAOS_SEED={seed} INFERA_CHAOS_SECONDS={}", duration.as_secs());
    let fleet = Fleet::start(topology, seed);
    let endpoint = fleet.etcd.endpoint();
    let router = router()
        .args(&["--discovery-backend", "etcd", "--etcd-endpoint", &endpoint, "--breaker-cooldown-s", "0.2"])
        .args(&["--request-max-retries", "2", "--http-req-idle-timeout-s", "1", "--upstream-first-byte-timeout-s", "2"])
        .args(&["--retry-budget-percent", "100", "--session-affinity", "both", "--decode-input-demand", "on"])
        .env("MIMALLOC_ALLOW_THP", "0")
        .env("RUST_LOG", "error,infera_router=info,infera_router::proxy=error,infera_router::discovery=error")
        .start();
    wait_until("all engines are known", || all_are_known(&router, &fleet));

    // Some of every kind of request first, so that caches and buffers have their size.
    let calm = storm(&router, &fleet, seed, Duration::from_secs(3).min(duration), false);
    assert_eq!(calm.errors(), 0, "without faults every answer is right: {calm:?}");
    settle(&router, &fleet);
    let before = usage(&router);

    let tally = storm(&router, &fleet, seed, duration, true);
    eprintln!("{tally:#?}");
    // Half of the engines never die: what was not begun yet is nearly always served by another one.
    let before_an_answer: u64 = tally.causes.iter().filter(|(cause, _)| !cause.starts_with("200")).map(|it| it.1).sum();
    assert!(
        before_an_answer <= tally.right / 10,
        "seed {seed}: {before_an_answer} errors that a retry would have spared"
    );
    for family in [
        "infera_router_retries_total",
        "infera_router_retries_refused_total",
        "infera_router_worker_breaker_trips_total",
    ] {
        eprintln!("{family} {}", router.metric_sum(family));
    }
    settle(&router, &fleet);
    let allowed = before.resident_bytes + before.resident_bytes / 10;
    // A shard gives memory back after a second without a request.
    wait_until(&format!("memory goes back (seed {seed})"), || usage(&router).resident_bytes <= allowed);
    let after = usage(&router);
    eprintln!(
        "descriptors {} -> {}, resident {} -> {} KiB",
        before.descriptors,
        after.descriptors,
        before.resident_bytes >> 10,
        after.resident_bytes >> 10
    );
    assert!(tally.right > 100, "seed {seed}: hardly anything was served: {tally:?}");
    assert!(tally.errors() > 10, "seed {seed}: no storm at all: {tally:?}");
    assert!(after.descriptors <= before.descriptors + 4, "seed {seed}: descriptors leak");
    assert!(after.resident_bytes <= allowed, "seed {seed}: memory leaks");
    assert_eq!(router.metric_sum("infera_router_panics_total"), 0.0, "seed {seed}");
    let log = router.log_lines().join("\n");
    assert!(!log.contains("panicked"), "seed {seed}: {log}");
}

/// Clients against engines, with or without faults, while engines come and go in etcd.
fn storm(router: &Router, fleet: &Fleet, seed: u64, duration: Duration, faulty: bool) -> Tally {
    fleet.engines.iter().for_each(|engine| engine.set_faulty(faulty));
    let is_over = AtomicBool::new(false);
    let tally = std::thread::scope(|scope| {
        let (is_over, address) = (&is_over, router.address);
        let running: Vec<_> = (0..setting("INFERA_CHAOS_CLIENTS", || 24))
            .map(|number| {
                let random = fastrand::Rng::with_seed(seed ^ (number + 1) << 32);
                scope.spawn(move || clients::run(address, random, faulty, is_over))
            })
            .collect();
        let deadline = Instant::now() + duration;
        let mut random = fastrand::Rng::with_seed(seed);
        while Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(random.u64(20..200)));
            if faulty {
                fleet.flap(&mut random);
            }
        }
        is_over.store(true, Ordering::SeqCst);
        running.into_iter().map(|client| client.join().unwrap()).fold(Tally::default(), Tally::plus)
    });
    fleet.engines.iter().for_each(|engine| engine.set_faulty(false));
    fleet.engines.iter().for_each(|engine| engine.set_dead(false));
    (0..fleet.engines.len()).for_each(|number| fleet.register(number));
    tally
}

fn all_are_known(router: &Router, fleet: &Fleet) -> bool {
    router.metric_sum("infera_router_active_workers") == fleet.engines.len() as f64
}

/// Waits until nothing is in flight anywhere.
fn settle(router: &Router, fleet: &Fleet) {
    wait_until("all engines are back", || all_are_known(router, fleet));
    router.wait_for_rest();
    wait_until("no decode demand is held", || router.metric_sum("infera_router_decode_demand_requests") == 0.0);
    wait_until("clients are gone", || router.metric_sum("infera_router_connections_open") <= 1.0);
    // Kept connections are closed after four idle seconds, and memory is given back in a quiet second.
    wait_until("no engine is connected", || fleet.engines.iter().all(|engine| engine.connections() == 0));
}
