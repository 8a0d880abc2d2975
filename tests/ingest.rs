//! The ingest core against real sockets: publishers that come late, restart, skip and vanish; workers that leave with
//! events in flight; and the load ledger's exactness.
#![allow(clippy::unwrap_used)]

mod kv_publisher;

use std::sync::Arc;
use std::time::{Duration, Instant};

use infera_router::hash::prompt_blocks;
use infera_router::ingest::{Ingest, IngestConfig, IngestHandle};
use infera_router::load::{Booking, TargetId, TargetLoad};
use kv_publisher::*;

fn start() -> IngestHandle {
    Ingest::start(IngestConfig::default()).unwrap()
}

fn tokens(from: u32, blocks: u32) -> Vec<u32> {
    (from..from + blocks * BLOCK_SIZE as u32).collect()
}

#[test]
fn b18_events_become_depth_and_a_worker_that_leaves_takes_them_along() {
    let context = zmq::Context::new();
    let (mut first, mut second) = (Publisher::new(&context), Publisher::new(&context));
    let ingest = start();
    let workers =
        vec![worker("a:1", Some(&first.endpoint)), worker("b:1", Some(&second.endpoint)), worker("c:1", None)];
    ingest.fleet_updates.send(workers.clone());
    (first, second) = (first.subscribed(), second.subscribed());
    let prompt = tokens(1, 8);
    first.send(&[Event::Store { tokens: &prompt, from: 0 }]);
    second.send(&[Event::Store { tokens: &prompt[..20], from: 0 }]);
    wait_depth(&ingest, "a:1", &prompt, 8);
    wait_depth(&ingest, "b:1", &prompt, 5);
    assert_eq!(depth(&ingest, "c:1", &prompt), Some(0), "no events, no cache, but routable");
    wait_until("connected", || status(&ingest, "a:1", 0, |status| status.is_connected()));
    let view = ingest.view.load_full();
    let target = view.fleet.targets.iter().find(|target| &*target.route_key == "a:1").unwrap();
    assert_eq!(view.block_count(target), 8);
    let blocks = prompt_blocks(&prompt, BLOCK_SIZE);
    first.send(&[Event::Remove(&blocks[6..]), Event::Clear, Event::Store { tokens: &prompt[..8], from: 0 }]);
    wait_depth(&ingest, "a:1", &prompt, 2);
    // The old view is as it was: immutable.
    let mut hits = infera_router::index::Hits::new();
    view.index.query(&blocks, &mut hits);
    assert_eq!(hits.depth(target.slot), 8);

    // Events on their way while their worker leaves: whatever of them arrives, nothing of them stays.
    for at in 0..200 {
        first.send(&[Event::Store { tokens: &tokens(10_000 + at * 100, 4), from: 0 }]);
    }
    ingest.fleet_updates.send(workers[1..].to_vec());
    wait_until("a gone", || depth(&ingest, "a:1", &prompt).is_none());
    // Before the next life subscribes: the socket tells only of the first subscriber and of the last that leaves.
    first.wait_subscription(0);
    first.send(&[Event::Store { tokens: &tokens(90_000, 4), from: 0 }]);
    wait_until("only b's blocks", || ingest.stats.index_blocks.get() == 5);
    assert_eq!(ingest.view.load().models_and_targets(), (1, 2));

    // The id comes back with an empty cache: no credit from its former life.
    ingest.fleet_updates.send(workers);
    first = first.subscribed();
    wait_depth(&ingest, "a:1", &prompt, 0);
    first.send(&[Event::Store { tokens: &prompt, from: 0 }]);
    wait_depth(&ingest, "a:1", &prompt, 8);
    assert!(ingest.stop());
}

trait Counts {
    fn models_and_targets(&self) -> (usize, usize);
}

impl Counts for infera_router::index::View {
    fn models_and_targets(&self) -> (usize, usize) {
        (self.fleet.models.len(), self.fleet.targets.len())
    }
}

#[test]
fn b17_a_late_publisher_is_found_and_a_restarted_one_starts_from_nothing() {
    let context = zmq::Context::new();
    let endpoint = Publisher::new(&context).endpoint.clone();
    let ingest = start();
    ingest.fleet_updates.send(vec![worker("a:1", Some(&endpoint))]);
    wait_until("the worker", || !ingest.view.load().fleet.targets.is_empty());
    let (old, new) = (tokens(1, 6), tokens(1000, 3));
    let mut publisher = Publisher::rebind(&context, &endpoint).subscribed();
    for _ in 0..3 {
        publisher.send(&[Event::Clear]);
    }
    publisher.send(&[Event::Store { tokens: &old, from: 0 }]);
    wait_depth(&ingest, "a:1", &old, 6);
    drop(publisher);
    wait_until("noticed", || !status(&ingest, "a:1", 0, |status| status.is_connected()));
    let mut publisher = Publisher::rebind(&context, &endpoint).subscribed();
    publisher.send(&[Event::Store { tokens: &new, from: 0 }]);
    wait_depth(&ingest, "a:1", &new, 3);
    assert_eq!(depth(&ingest, "a:1", &old), Some(0), "blocks of the former life are gone");
    assert_eq!(status(&ingest, "a:1", 0, |status| (status.resets.get(), status.batches_lost.get())), (1, 0));
}

/// The publisher gives its batches no numbers, as some do. Restarted with an empty cache, or away while blocks were removed, it
/// has nothing to tell that by but its connection.
#[test]
fn b17_a_publisher_without_numbers_starts_from_nothing_with_each_connection() {
    let context = zmq::Context::new();
    let mut publisher = Publisher::new(&context);
    let endpoint = publisher.endpoint.clone();
    let ingest = start();
    ingest.fleet_updates.send(vec![worker("a:1", Some(&endpoint))]);
    publisher = publisher.subscribed();
    let (old, new) = (tokens(1, 6), tokens(1000, 3));
    let store = |tokens: &[u32]| batch(&[Event::Store { tokens, from: 0 }], None);
    publisher.send_frames(&[b"t", &store(&old)]);
    wait_depth(&ingest, "a:1", &old, 6);
    drop(publisher);
    wait_until("noticed", || !status(&ingest, "a:1", 0, |status| status.is_connected()));
    let publisher = Publisher::rebind(&context, &endpoint).subscribed();
    wait_until("back", || status(&ingest, "a:1", 0, |status| status.is_connected()));
    wait_depth(&ingest, "a:1", &old, 0);
    publisher.send_frames(&[b"t", &store(&new)]);
    wait_depth(&ingest, "a:1", &new, 3);
    assert_eq!(status(&ingest, "a:1", 0, |status| status.resets.get()), 1);
}

#[test]
fn b10_a_gap_resets_and_broken_messages_do_not() {
    let context = zmq::Context::new();
    let mut publisher = Publisher::new(&context);
    let ingest = start();
    ingest.fleet_updates.send(vec![worker("a:1", Some(&publisher.endpoint))]);
    publisher = publisher.subscribed();
    let (old, new, third) = (tokens(1, 6), tokens(1000, 3), tokens(2000, 2));
    publisher.sequence = 40;
    publisher.send(&[Event::Store { tokens: &old, from: 0 }]);
    wait_depth(&ingest, "a:1", &old, 6);
    // Every one of these is counted and skipped; the view stays.
    publisher.send_frames(&[b"only one frame"]);
    publisher.send_frames(&[b"t", b"four", b"payload"]);
    publisher.send_frames(&[b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"8", b"9", b"10"]);
    publisher.send_as(40, &batch(&[Event::Store { tokens: &old, from: 0 }], None));
    publisher.send_as(41, b"\xc1");
    publisher.sequence = 42;
    wait_until("counted", || status(&ingest, "a:1", 0, |status| status.messages_broken.get()) == 4);
    assert_eq!(status(&ingest, "a:1", 0, |status| status.batches_repeated.get()), 1);
    assert_eq!(depth(&ingest, "a:1", &old), Some(6));
    // 42 and 43 are lost.
    publisher.sequence = 44;
    publisher.send(&[Event::Store { tokens: &new, from: 0 }]);
    wait_depth(&ingest, "a:1", &new, 3);
    assert_eq!(depth(&ingest, "a:1", &old), Some(0), "never half-trusted");
    let counts = |status: &infera_router::index::RankStatus| {
        (status.resets.get(), status.batches_lost.get(), status.next_sequence.get())
    };
    assert_eq!(status(&ingest, "a:1", 0, counts), (1, 2, 45));
    // Two frames: no sequence, applied as they come.
    publisher.send_frames(&[b"t", &batch(&[Event::Store { tokens: &third, from: 0 }], None)]);
    wait_depth(&ingest, "a:1", &third, 2);
}

#[test]
fn ranks_publish_on_consecutive_ports_and_a_batch_may_name_another_rank() {
    let context = zmq::Context::new();
    let (first, mut second) = loop {
        let first = Publisher::new(&context);
        let (host, port) = first.endpoint.rsplit_once(':').unwrap();
        let next = format!("{host}:{}", port.parse::<u32>().unwrap() + 1);
        if let Some(second) = Publisher::bind(&context, &next) {
            break (first, second);
        }
    };
    let ingest = start();
    let mut ranked = worker("a:1", Some(&first.endpoint));
    ranked.record.dp_size = Some(2);
    ingest.fleet_updates.send(vec![ranked]);
    let first = first.subscribed();
    second = second.subscribed();
    let (one, two) = (tokens(1, 4), tokens(500, 4));
    second.send(&[Event::Store { tokens: &one, from: 0 }]);
    wait_depth(&ingest, "a:1#dp1", &one, 4);
    assert_eq!(depth(&ingest, "a:1#dp0", &one), Some(0));
    first.send_as(0, &batch(&[Event::Store { tokens: &two, from: 0 }], Some(1)));
    wait_depth(&ingest, "a:1#dp1", &two, 4);
    assert_eq!(depth(&ingest, "a:1#dp0", &two), Some(0));
    // A gap of rank 0's publisher casts doubt on all it has said, also about rank 1.
    first.send_as(5, &batch(&[Event::Store { tokens: &two, from: 0 }], Some(0)));
    wait_depth(&ingest, "a:1#dp0", &two, 4);
    wait_depth(&ingest, "a:1#dp1", &two, 0);
}

#[test]
fn b13_an_unregistered_block_size_is_learned_and_a_wrong_one_is_counted() {
    let context = zmq::Context::new();
    let mut publisher = Publisher::bind(&context, "tcp://[::1]:*").expect("IPv6 loopback");
    let ingest = start();
    let mut unsized_worker = worker("a:1", Some(&publisher.endpoint));
    unsized_worker.record.kv_block_size = None;
    ingest.fleet_updates.send(vec![unsized_worker.clone()]);
    publisher = publisher.subscribed();
    let prompt = tokens(1, 4);
    wait_until("the worker", || !ingest.view.load().fleet.targets.is_empty());
    assert_eq!(ingest.view.load().fleet.targets[0].block_size, None);
    publisher.send(&[Event::Store { tokens: &prompt, from: 0 }]);
    wait_until("learned", || ingest.view.load().fleet.targets[0].block_size == Some(BLOCK_SIZE as u32));
    let before = ingest.view.load().fleet.targets[0].id;
    // Now the engine was asked, and says otherwise. Same registration, so the view stays.
    unsized_worker.record.kv_block_size = Some(64);
    ingest.fleet_updates.send(vec![unsized_worker]);
    wait_until("registered", || ingest.view.load().fleet.targets[0].block_size == Some(64));
    assert_eq!(ingest.view.load().fleet.targets[0].id, before);
    publisher.send(&[Event::Store { tokens: &tokens(500, 2), from: 0 }]);
    wait_until("counted", || status(&ingest, "a:1", 0, |status| status.block_size_mismatches.get()) == 1);
    wait_depth(&ingest, "a:1", &prompt, 4);
}

/// Five batches, one block each; `lost` are not sent live.
fn send_with_losses(publisher: &Publisher, prompt: &[u32], from: u64, lost: &[u64]) -> Vec<(u64, Vec<u8>)> {
    let mut all = Vec::new();
    for at in 0..5 {
        let event = Event::Store { tokens: &prompt[..(at + 1) * BLOCK_SIZE], from: at };
        all.push((at as u64, batch(&[event], None)));
    }
    for (sequence, payload) in all.iter().filter(|(sequence, _)| *sequence >= from && !lost.contains(sequence)) {
        publisher.send_as(*sequence, payload);
    }
    all
}

#[test]
fn b10_lost_batches_are_replayed_and_nothing_is_forgotten() {
    for with_topic in [false, true] {
        let context = zmq::Context::new();
        let prompt = tokens(1, 5);
        let mut publisher = Publisher::new(&context);
        let buffer = Buffer::default();
        let server = ReplayServer::start_on(&context, buffer.clone(), with_topic);
        let ingest = start();
        let mut worker = worker("a:1", Some(&publisher.endpoint));
        worker.record.kv_replay_endpoint = Some(server.endpoint.clone());
        ingest.fleet_updates.send(vec![worker]);
        publisher = publisher.subscribed();
        server.wait_answered(1);
        *buffer.lock().unwrap() = send_with_losses(&publisher, &prompt, 5, &[]);
        send_with_losses(&publisher, &prompt, 0, &[1, 2]);
        wait_depth(&ingest, "a:1", &prompt, 5);
        let counts = |status: &infera_router::index::RankStatus| {
            (status.resets.get(), status.batches_lost.get(), status.batches_replayed.get(), status.batches.get())
        };
        assert_eq!(status(&ingest, "a:1", 0, counts), (0, 0, 2, 5), "each batch once");
        assert!(ingest.stop());
        assert_eq!(server.stop(), [0, 1], "what was said before, then exactly the gap");
    }
}

/// The router comes when the engine has said three batches: they are asked for at once, whether or not more is said.
#[test]
fn b09_a_late_router_recovers_by_replay() {
    let context = zmq::Context::new();
    let prompt = tokens(1, 5);
    let mut publisher = Publisher::new(&context);
    let mut said = send_with_losses(&publisher, &prompt, 5, &[]);
    said.truncate(3);
    let server = ReplayServer::start(&context, said, true);
    let ingest = start();
    // Address and replay socket become known one after the other, without a new registration.
    let mut worker = worker("a:1", None);
    ingest.fleet_updates.send(vec![worker.clone()]);
    wait_until("the worker", || !ingest.view.load().fleet.targets.is_empty());
    let target = ingest.view.load().fleet.targets[0].id;
    worker.record.kv_events_endpoint = Some(publisher.endpoint.clone());
    ingest.fleet_updates.send(vec![worker.clone()]);
    publisher = publisher.subscribed();
    wait_until("connected", || status(&ingest, "a:1", 0, |status| status.is_connected()));
    worker.record.kv_replay_endpoint = Some(server.endpoint.clone());
    ingest.fleet_updates.send(vec![worker]);
    wait_depth(&ingest, "a:1", &prompt, 3);
    send_with_losses(&publisher, &prompt, 3, &[]);
    wait_depth(&ingest, "a:1", &prompt, 5);
    assert_eq!(ingest.view.load().fleet.targets[0].id, target);
    assert_eq!(status(&ingest, "a:1", 0, |status| status.batches_replayed.get()), 3);
    drop(ingest);
    assert_eq!(server.stop(), [0]);
}

/// The engine's buffer begins after the gap, or nobody answers: the rank starts again from what it still gets.
#[test]
fn a_replay_that_cannot_help_resets() {
    let context = zmq::Context::new();
    let prompt = tokens(1, 5);
    for answers in [true, false] {
        let mut publisher = Publisher::new(&context);
        let buffer = Buffer::default();
        let server = answers.then(|| ReplayServer::start_on(&context, buffer.clone(), true));
        let ingest = start();
        let mut worker = worker("a:1", Some(&publisher.endpoint));
        // Port 9 (discard) of the loopback: nobody listens there.
        worker.record.kv_replay_endpoint =
            Some(server.as_ref().map_or("tcp://127.0.0.1:9".to_owned(), |server| server.endpoint.clone()));
        ingest.fleet_updates.send(vec![worker]);
        publisher = publisher.subscribed();
        server.iter().for_each(|server| server.wait_answered(1));
        *buffer.lock().unwrap() = send_with_losses(&publisher, &prompt, 5, &[]).split_off(3);
        send_with_losses(&publisher, &prompt, 0, &[1, 2, 3]);
        wait_until("the reset", || status(&ingest, "a:1", 0, |status| status.resets.get()) == 1);
        wait_until("what is left waits for its parents", || {
            status(&ingest, "a:1", 0, |status| (status.visible_blocks.get(), status.orphans_waiting.get()))
                == (0, if answers { 2 } else { 1 })
        });
        assert_eq!(status(&ingest, "a:1", 0, |status| status.batches_lost.get()), if answers { 2 } else { 3 });
        assert!(ingest.stop());
        server.map(ReplayServer::stop);
    }
}

/// `inspect events --connect`: one line for each live frame, until nobody reads them any more.
#[test]
fn inspection_listens_to_a_live_publisher() {
    struct Lines(std::sync::mpsc::Sender<String>);
    impl std::io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            let text = String::from_utf8_lossy(bytes).into_owned();
            self.0.send(text).map_err(|_| std::io::ErrorKind::BrokenPipe)?;
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let context = zmq::Context::new();
    let mut publisher = Publisher::new(&context);
    let (sender, receiver) = std::sync::mpsc::channel();
    let endpoint = publisher.endpoint.clone();
    let listener = std::thread::spawn(move || infera_router::inspect::events::listen(&endpoint, true, Lines(sender)));
    publisher = publisher.subscribed();
    let prompt = tokens(1, 3);
    publisher.send(&[Event::Store { tokens: &prompt, from: 0 }]);
    let mut text = String::new();
    while !text.ends_with('\n') {
        text.push_str(&receiver.recv_timeout(Duration::from_secs(20)).unwrap());
    }
    let line: serde_json::Value = serde_json::from_str(&text).unwrap();
    let mut hashes: Vec<String> =
        prompt_blocks(&prompt, BLOCK_SIZE).iter().map(|block| format!("{:016x}", block.0)).collect();
    hashes.sort();
    let expected = serde_json::json!({"seq": 0, "applied": 1, "skipped": 0, "visible_blocks": 3,
        "visible_plain_blocks": 3, "hashes": hashes});
    assert_eq!(line, expected);
    drop(receiver);
    publisher.send(&[Event::Clear]);
    assert!(listener.join().unwrap().is_err(), "ends when its output is closed");
}

/// More subscriptions than one ZMQ context has sockets for.
#[test]
fn hundreds_of_ranks_are_followed() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
    let context = zmq::Context::new();
    let mut publisher = Publisher::new(&context);
    let ingest = start();
    let ids: Vec<String> = (0..420).map(|number| format!("w{number:03}:1")).collect();
    ingest.fleet_updates.send(ids.iter().map(|id| worker(id, Some(&publisher.endpoint))).collect());
    publisher.wait_subscription(1);
    let prompt = tokens(1, 3);
    wait_until("all connected", || {
        let view = ingest.view.load();
        view.ranks.len() == ids.len() && view.ranks.iter().flatten().all(|rank| rank.is_connected())
    });
    // A subscription may arrive a little after its handshake: say it until everybody has heard it.
    wait_until("all have heard", || {
        publisher.send(&[Event::Clear, Event::Store { tokens: &prompt, from: 0 }]);
        ids.iter().all(|id| depth(&ingest, id, &prompt) == Some(3))
    });
    assert_eq!(ingest.stats.index_runs.get(), 1, "one run, held by all");
    ingest.fleet_updates.send(Vec::new());
    wait_until("all gone", || ingest.view.load().ranks.is_empty() && ingest.stats.index_blocks.get() == 0);
}

/// Many threads book and release at random; at every moment the load is at least what is booked, and at rest it is 0.
#[test]
fn the_ledger_is_exact_at_rest_and_counts_shared_blocks_once() {
    let ingest = start();
    let loads: Vec<Arc<TargetLoad>> = (0..3).map(|_| Arc::default()).collect();
    let shared = prompt_blocks(&tokens(1, 10), BLOCK_SIZE);
    let held = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4u64)
            .map(|seed| {
                let (ledger, loads, shared) = (ingest.ledger.clone(), loads.clone(), shared.clone());
                scope.spawn(move || {
                    let mut random = fastrand::Rng::with_seed(seed);
                    let mut held = Vec::new();
                    for round in 0..3_000 {
                        let at = random.usize(0..loads.len());
                        let blocks = match random.u8(0..4) {
                            0 => Vec::new(),
                            _ => shared[..random.usize(1..=shared.len())].to_vec(),
                        };
                        held.push(Booking::new(TargetId(at as u64), &loads[at], blocks.into(), &ledger, round));
                        if held.len() > 20 {
                            held.swap_remove(random.usize(0..held.len()));
                        }
                    }
                    held
                })
            })
            .collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    let requests: u64 = loads.iter().map(|load| load.requests()).sum();
    assert_eq!(requests as usize, held.len());
    let one = Booking::new(TargetId(9), &loads[0], Arc::new([]), &ingest.ledger, 0);
    drop(one);
    drop(held);
    wait_until("no load", || loads.iter().all(|load| load.active_blocks() == 0 && load.requests() == 0));
    let pair = [0, 1].map(|_| Booking::new(TargetId(0), &loads[0], shared.clone().into(), &ingest.ledger, 0));
    wait_until("ten distinct blocks", || loads[0].active_blocks() == 10);
    drop(pair);
    wait_until("no load", || loads[0].active_blocks() == 0);
}

/// The core sleeps between the rounds: a ring that got lost would leave the booking unread until the deadline.
#[test]
fn no_wake_up_is_ever_lost() {
    let ingest = start();
    let load: Arc<TargetLoad> = Arc::default();
    let blocks: Arc<[_]> = prompt_blocks(&tokens(1, 3), BLOCK_SIZE).into();
    let mut random = fastrand::Rng::with_seed(3);
    let deadline = Instant::now() + Duration::from_secs(60);
    for round in 1..=5_000u64 {
        let booking = Booking::new(TargetId(1), &load, blocks.clone(), &ingest.ledger, round);
        (0..random.u32(0..200)).for_each(|_| std::hint::spin_loop());
        drop(booking);
        while ingest.stats.ledger_messages.get() < 2 * round {
            assert!(Instant::now() < deadline, "round {round}: the core sleeps over a message");
            std::hint::spin_loop();
            std::thread::yield_now();
        }
    }
    assert_eq!(load.active_blocks(), 0);
}

#[test]
fn an_idle_core_does_not_turn() {
    let context = zmq::Context::new();
    let mut publisher = Publisher::new(&context);
    let ingest = start();
    ingest.fleet_updates.send(vec![worker("a:1", Some(&publisher.endpoint))]);
    publisher = publisher.subscribed();
    publisher.send(&[Event::Store { tokens: &tokens(1, 2), from: 0 }]);
    wait_depth(&ingest, "a:1", &tokens(1, 2), 2);
    wait_until("connected", || status(&ingest, "a:1", 0, |status| status.is_connected()));
    // Not a wait for something to happen: the span over which nothing may.
    let before = ingest.stats.turns.get();
    std::thread::sleep(Duration::from_millis(300));
    assert!(ingest.stats.turns.get() - before <= 2, "turns without a reason");
}

/// A clear of one rank, in one message with the store that follows it, leaves the other ranks of the worker alone.
#[test]
fn b12_a_clear_is_of_one_rank() {
    let context = zmq::Context::new();
    let (mut first, mut second) = loop {
        let first = Publisher::new(&context);
        let (host, port) = first.endpoint.rsplit_once(':').unwrap();
        let next = format!("{host}:{}", port.parse::<u32>().unwrap() + 1);
        if let Some(second) = Publisher::bind(&context, &next) {
            break (first, second);
        }
    };
    let ingest = start();
    let mut ranked = worker("a:1", Some(&first.endpoint));
    ranked.record.dp_size = Some(2);
    ingest.fleet_updates.send(vec![ranked]);
    (first, second) = (first.subscribed(), second.subscribed());
    let (prompt, other) = (tokens(1, 4), tokens(900, 2));
    for publisher in [&mut first, &mut second] {
        publisher.send(&[Event::Store { tokens: &prompt, from: 0 }]);
    }
    wait_depth(&ingest, "a:1#dp0", &prompt, 4);
    wait_depth(&ingest, "a:1#dp1", &prompt, 4);
    first.send(&[Event::Clear, Event::Store { tokens: &other, from: 0 }]);
    wait_depth(&ingest, "a:1#dp0", &other, 2);
    assert_eq!((depth(&ingest, "a:1#dp0", &prompt), depth(&ingest, "a:1#dp1", &prompt)), (Some(0), Some(4)));
    // What waits for its parent goes as well.
    second.send(&[Event::Store { tokens: &tokens(2_000, 4), from: 2 }]);
    wait_until("orphans", || status(&ingest, "a:1", 1, |status| status.orphans_waiting.get()) == 2);
    second.send(&[Event::Clear]);
    wait_until("none", || status(&ingest, "a:1", 1, |status| status.orphans_waiting.get()) == 0);
}

/// A relay between publisher and router that can fall silent as a host does that has lost its power: both connections stay
/// open, and nothing passes.
struct Relay {
    endpoint: String,
    is_silent: Arc<std::sync::atomic::AtomicBool>,
}

impl Relay {
    fn to(publisher: &Publisher) -> Self {
        use std::net::{TcpListener, TcpStream};
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("tcp://{}", listener.local_addr().unwrap());
        let target = publisher.endpoint.strip_prefix("tcp://").unwrap().to_owned();
        let is_silent = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let silence = is_silent.clone();
        std::thread::spawn(move || {
            for router in listener.incoming().map_while(Result::ok) {
                // A connection that is made while the host is dead gets no answer either.
                let Ok(engine) = TcpStream::connect(&target) else { continue };
                for (from, to) in [(&router, &engine), (&engine, &router)] {
                    let (from, to, silence) = (from.try_clone().unwrap(), to.try_clone().unwrap(), silence.clone());
                    std::thread::spawn(move || pass_on(from, to, &silence));
                }
            }
        });
        Self { endpoint, is_silent }
    }
}

fn pass_on(mut from: std::net::TcpStream, mut to: std::net::TcpStream, silence: &std::sync::atomic::AtomicBool) {
    use std::io::{Read, Write};
    let mut bytes = [0; 4096];
    while let Ok(length @ 1..) = from.read(&mut bytes) {
        if !silence.load(std::sync::atomic::Ordering::Relaxed) && to.write_all(&bytes[..length]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(std::net::Shutdown::Both);
}

/// The host of a publisher dies without a word: noticed by the heartbeat. No credit meanwhile, and the worker stays a target.
/// When it is back, what the view missed is asked for.
#[test]
fn b17_a_publisher_whose_host_died_is_noticed() {
    use infera_router::index::Hits;
    let context = zmq::Context::new();
    let prompt = tokens(1, 5);
    let mut publisher = Publisher::new(&context);
    let buffer = Buffer::default();
    let server = ReplayServer::start_on(&context, buffer.clone(), true);
    let relay = Relay::to(&publisher);
    let ingest = start();
    let mut record = worker("a:1", Some(&relay.endpoint));
    record.record.kv_replay_endpoint = Some(server.endpoint.clone());
    ingest.fleet_updates.send(vec![record]);
    publisher = publisher.subscribed();
    let credit = || {
        let view = ingest.view.load_full();
        let mut hits = Hits::new();
        view.index.query(&prompt_blocks(&prompt, BLOCK_SIZE), &mut hits);
        let target = &view.fleet.targets[0];
        view.credit(target.slot, &hits, &hits, 0.0)
    };
    server.wait_answered(1);
    send_with_losses(&publisher, &prompt, 0, &[2, 3, 4]);
    wait_until("credit", || credit() == 2);
    relay.is_silent.store(true, std::sync::atomic::Ordering::Relaxed);
    wait_until("noticed", || !status(&ingest, "a:1", 0, |status| status.is_connected()));
    assert_eq!((credit(), depth(&ingest, "a:1", &prompt)), (0, Some(2)), "no credit, still a target, not forgotten");
    // Said into the void.
    let mut said = send_with_losses(&publisher, &prompt, 2, &[4]);
    said.truncate(4);
    *buffer.lock().unwrap() = said;
    relay.is_silent.store(false, std::sync::atomic::Ordering::Relaxed);
    wait_until("connected again", || status(&ingest, "a:1", 0, |status| status.is_connected()));
    publisher = publisher.subscribed();
    wait_until("what was missed", || credit() == 4);
    send_with_losses(&publisher, &prompt, 4, &[]);
    wait_until("all of it", || credit() == 5);
    drop(ingest);
    assert_eq!(server.stop(), [0, 1], "the last batch heard is the proof that it is the same publisher");
}

/// The engine restarts while the router is away, and is past the former one's number by the time of the reconnection: what
/// is missed is not filled into the old view.
#[test]
fn b10_a_new_life_past_the_former_ones_number_is_told_apart() {
    let context = zmq::Context::new();
    let (old, new) = (tokens(1, 5), tokens(1_000, 5));
    let mut publisher = Publisher::new(&context);
    let buffer = Buffer::default();
    let server = ReplayServer::start_on(&context, buffer.clone(), true);
    let ingest = start();
    let mut record = worker("a:1", Some(&publisher.endpoint));
    record.record.kv_replay_endpoint = Some(server.endpoint.clone());
    ingest.fleet_updates.send(vec![record]);
    publisher = publisher.subscribed();
    server.wait_answered(1);
    send_with_losses(&publisher, &old, 0, &[2, 3, 4]);
    wait_depth(&ingest, "a:1", &old, 2);
    let endpoint = publisher.endpoint.clone();
    drop(publisher);
    wait_until("noticed", || !status(&ingest, "a:1", 0, |status| status.is_connected()));
    publisher = Publisher::rebind(&context, &endpoint);
    let mut said = send_with_losses(&publisher, &new, 5, &[]);
    said.truncate(4);
    *buffer.lock().unwrap() = said;
    publisher = publisher.subscribed();
    wait_depth(&ingest, "a:1", &new, 4);
    assert_eq!(depth(&ingest, "a:1", &old), Some(0));
    send_with_losses(&publisher, &new, 4, &[]);
    wait_depth(&ingest, "a:1", &new, 5);
    drop(ingest);
    assert_eq!(server.stop(), [0, 1, 0]);
}
