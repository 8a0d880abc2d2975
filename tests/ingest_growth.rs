//! Publishers that restart and workers that come and go leave no descriptor, thread, block or run behind. Alone in its
//! process, because it counts the process's own descriptors and threads.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod kv_publisher;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use infera_router::ingest::{Ingest, IngestConfig, IngestHandle};
use infera_router::metrics::DepartedSeries;
use infera_router::proxy::{RequestMetrics, TargetHandles};
use kv_publisher::*;
use prometheus::{Encoder, TextEncoder};

fn entries(directory: &str) -> usize {
    std::fs::read_dir(directory).unwrap().count()
}

fn usage() -> (usize, usize) {
    (entries("/proc/self/fd"), entries("/proc/self/task"))
}

#[test]
fn b18_b55_restarts_and_leaves_leave_nothing_behind() {
    let context = zmq::Context::new();
    let ingest = Ingest::start(IngestConfig::default()).unwrap();
    let mut publisher = Publisher::new(&context);
    let endpoint = publisher.endpoint.clone();
    let prompt: Vec<u32> = (1..=40).collect();
    let mut before = None;
    for round in 0..10 {
        ingest.fleet_updates.send(vec![worker("a:1", Some(&endpoint))]);
        publisher = publisher.subscribed();
        publisher.send(&[Event::Store { tokens: &prompt, from: 0 }]);
        wait_depth(&ingest, "a:1", &prompt, 10);
        // The publisher restarts under the same registration.
        drop(publisher);
        publisher = Publisher::rebind(&context, &endpoint).subscribed();
        publisher.send(&[Event::Store { tokens: &prompt[..8], from: 0 }]);
        wait_until("the new life", || depth(&ingest, "a:1", &prompt) == Some(2));
        if let Some(before) = before {
            wait_until(&format!("{before:?} descriptors and threads in round {round}"), || usage() <= before);
        } else {
            before = Some(usage());
        }
        ingest.fleet_updates.send(Vec::new());
        publisher.wait_subscription(0);
        wait_until("an empty index", || ingest.stats.index_blocks.get() == 0 && ingest.stats.index_runs.get() == 0);
    }
    // The same id leaves and comes back under a storm of events.
    let stop = AtomicBool::new(false);
    let storm = std::thread::scope(|scope| {
        let flag = &stop;
        let storm = scope.spawn(move || {
            let mut at = 0u32;
            while !flag.load(Ordering::Relaxed) {
                let tokens: Vec<u32> = (at..at + 40).collect();
                publisher.send(&[Event::Store { tokens: &tokens, from: 0 }]);
                at = at.wrapping_add(1) % 1000;
            }
            publisher
        });
        for _ in 0..300 {
            ingest.fleet_updates.send(vec![worker("a:1", Some(&endpoint))]);
            wait_until("there", || depth(&ingest, "a:1", &prompt).is_some());
            ingest.fleet_updates.send(Vec::new());
            wait_until("gone", || depth(&ingest, "a:1", &prompt).is_none());
        }
        stop.store(true, Ordering::Relaxed);
        storm.join().unwrap()
    });
    assert_eq!(ingest.view.load().ranks.len(), 0);
    assert_eq!((ingest.stats.index_blocks.get(), ingest.stats.index_runs.get()), (0, 0));
    drop(storm);
    joins_and_leaves(&ingest, &context, 10_000);
    assert!(ingest.stop());
}

fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * rustix::param::page_size()
}

/// Workers join, are told of blocks, and leave, a hundred at a time and each under a name of its own: memory, descriptors and
/// threads are where they were after the first fifth; of memory, half a kilobyte per worker would show.
fn joins_and_leaves(ingest: &IngestHandle, context: &zmq::Context, workers: usize) {
    const AT_ONCE: usize = 100;
    let mut publisher = Publisher::new(context);
    let prompt: Vec<u32> = (1..=256).collect();
    let mut before = None;
    let mut counted = Counted::new();
    for round in 0..workers / AT_ONCE {
        let ids: Vec<String> = (0..AT_ONCE).map(|at| format!("w{}:1", round * AT_ONCE + at)).collect();
        ingest.fleet_updates.send(ids.iter().map(|id| worker(id, Some(&publisher.endpoint))).collect());
        publisher.wait_subscription(1);
        wait_until("all connected", || {
            let view = ingest.view.load();
            view.ranks.len() == ids.len() && view.ranks.iter().flatten().all(|rank| rank.is_connected())
        });
        // A subscription may arrive a little after its handshake, so it is said again; not so often that it piles up.
        let mut tries = 0;
        wait_until("all have heard", || {
            if tries % 200 == 0 {
                publisher.send(&[Event::Clear, Event::Store { tokens: &prompt, from: 0 }]);
            }
            tries += 1;
            ids.iter().all(|id| depth(ingest, id, &prompt) == Some(64))
        });
        counted.requests(ingest);
        ingest.fleet_updates.send(Vec::new());
        publisher.wait_subscription(0);
        wait_until("an empty index", || {
            ingest.stats.index_blocks.get() == 0
                && ingest.view.load().ranks.is_empty()
                && ingest.stats.views_retired.get() == 0
        });
        if round * AT_ONCE == workers / 5 {
            before = Some((usage(), resident_bytes()));
        }
    }
    assert_eq!(counted.picks, workers as u64);
    let (used, resident) = before.unwrap();
    wait_until(&format!("{used:?} descriptors and threads"), || usage() <= used);
    println!("resident: {resident} bytes after a fifth of {workers} workers, {} at the end", resident_bytes());
    assert!(resident_bytes() <= resident + (4 << 20), "{resident} bytes became {}", resident_bytes());
}

/// What the request path counts of targets, on two shards.
struct Counted {
    metrics: RequestMetrics,
    shards: [TargetHandles; 2],
    departed: DepartedSeries,
    now: Instant,
    picks: u64,
}

impl Counted {
    fn new() -> Self {
        let metrics = RequestMetrics::new(2).unwrap();
        Self { metrics, shards: Default::default(), departed: DepartedSeries::default(), now: Instant::now(), picks: 0 }
    }

    /// A request of each target; three minutes pass. Those that left five minutes ago are gone from page and tables.
    fn requests(&mut self, ingest: &IngestHandle) {
        let view = ingest.view.load();
        let families = &self.metrics.targets;
        for (place, target) in view.fleet.targets.iter().enumerate() {
            let handles = self.shards[place % 2].of(families, target);
            handles.picks.inc();
            assert_eq!(handles.picks.get(), 1, "a new worker begins at nothing");
            self.picks += 1;
        }
        self.departed.look(self.now, &view.fleet, families);
        self.now += Duration::from_secs(180);
        let mut page = Vec::new();
        TextEncoder::new().encode(&self.metrics.registry().gather(), &mut page).unwrap();
        // At most those of three rounds: here, missed for the first time, and not missed for long enough.
        let lines =
            String::from_utf8(page).unwrap().lines().filter(|line| line.starts_with("infera_router_picks")).count();
        assert!(lines <= 3 * view.fleet.targets.len(), "{lines} series of {} workers", view.fleet.targets.len());
        assert!(self.shards.iter().all(|shard| shard.len() <= 3 * view.fleet.targets.len()));
    }
}
