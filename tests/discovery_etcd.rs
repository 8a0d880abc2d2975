//! Discovery against a real etcd: what it sees, and what it survives. Each failure test opens with what happens on
//! the other side.

#[path = "support/etcd.rs"]
mod etcd;
#[path = "support/wire.rs"]
mod wire;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use etcd::Etcd;
use infera_router::discovery::{Discovery, DiscoveryConfig, DiscoveryHandle, EtcdConfig, State, Status, Timing};
use infera_router::fleet::{DiscoveredWorker, WorkerState};
use wire::Wire;

const PREFIX: &str = "/infera/workers/";
const PATIENCE: Duration = Duration::from_secs(40);

/// The product's periods, shortened so that a frozen server is noticed within a test's patience.
fn quick() -> Timing {
    Timing {
        etcd_backoff: (Duration::from_millis(50), Duration::from_millis(500)),
        etcd_timeout: Duration::from_secs(2),
        etcd_progress_every: Duration::from_millis(250),
        etcd_silence_max: Duration::from_millis(2000),
        ..Timing::default()
    }
}

struct Running {
    handle: DiscoveryHandle,
    updates: Receiver<Vec<DiscoveredWorker>>,
    last: Option<Vec<DiscoveredWorker>>,
    /// Fewest workers in any set after the first full one.
    fewest: usize,
}

impl Running {
    fn start(endpoints: Vec<String>, timing: Timing) -> Self {
        Self::start_with(endpoints, timing, |_| {})
    }

    /// `on_update` runs on discovery's thread.
    fn start_with(
        endpoints: Vec<String>,
        timing: Timing,
        on_update: impl Fn(&[DiscoveredWorker]) + Send + 'static,
    ) -> Self {
        let (sender, updates) = channel();
        let etcd = Some(EtcdConfig { endpoints, prefix: PREFIX.to_owned(), roots: Vec::new() });
        let config = DiscoveryConfig { etcd, timing, ..DiscoveryConfig::default() };
        let publish = move |workers: Vec<DiscoveredWorker>| {
            on_update(&workers);
            drop(sender.send(workers));
        };
        let handle = Discovery::start(config, publish).expect("the thread starts");
        Running { handle, updates, last: None, fewest: usize::MAX }
    }

    fn workers(&self) -> &[DiscoveredWorker] {
        self.last.as_deref().unwrap_or(&[])
    }

    fn ids(&self) -> Vec<&str> {
        self.workers().iter().map(|worker| worker.record.worker_id.as_str()).collect()
    }

    fn take(&mut self, workers: Vec<DiscoveredWorker>) {
        assert_ne!(Some(&workers), self.last.as_ref(), "the same set was published twice");
        self.fewest = self.fewest.min(workers.len());
        self.last = Some(workers);
    }

    #[track_caller]
    fn wait(&mut self, what: &str, wanted: impl Fn(&[DiscoveredWorker]) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !self.last.as_deref().is_some_and(&wanted) {
            match self.updates.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(workers) => self.take(workers),
                Err(_) => panic!("waited for {what} in vain; last: {:?}; {:?}", self.ids(), self.handle.status()),
            }
        }
    }

    #[track_caller]
    fn wait_ids(&mut self, expected: &[&str]) {
        let ids = |workers: &[DiscoveredWorker]| -> Vec<String> {
            workers.iter().map(|worker| worker.record.worker_id.clone()).collect()
        };
        self.wait(&format!("{expected:?}"), |workers| ids(workers) == expected);
    }

    #[track_caller]
    fn wait_status(&self, what: &str, wanted: impl Fn(&Status) -> bool) -> Status {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let status = self.handle.status();
            if wanted(&status) {
                return status;
            }
            assert!(Instant::now() < deadline, "waited for {what} in vain; last: {status:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Everything published so far, without waiting.
    fn drain(&mut self) {
        while let Ok(workers) = self.updates.try_recv() {
            self.take(workers);
        }
    }
}

fn record(id: &str, address: SocketAddr) -> String {
    format!(
        r#"{{"worker_id":"{id}","url":"http://{address}","model_name":"m","engine":"sglang","kv_block_size":16,"kv_events_endpoint":"tcp://{address}"}}"#
    )
}

/// A record of a worker that nobody needs to reach.
fn absent(id: &str, port: u16) -> String {
    record(id, SocketAddr::from(([127, 0, 0, 1], port)))
}

fn key(id: &str) -> String {
    format!("{PREFIX}{id}")
}

/// Answers every request with an empty 200 until dropped.
struct Worker {
    address: SocketAddr,
    ends: Arc<AtomicBool>,
}

impl Worker {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let worker = Worker { address: listener.local_addr().expect("bound"), ends: Arc::new(AtomicBool::new(false)) };
        let ends = worker.ends.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if ends.load(Ordering::SeqCst) {
                    return;
                }
                let Ok(mut stream) = stream else { continue };
                drop(stream.read(&mut [0; 4096]));
                drop(stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"));
            }
        });
        worker
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::SeqCst);
        drop(TcpStream::connect(self.address));
    }
}

#[test]
fn list_then_watch() {
    let etcd = Etcd::start();
    etcd.put(&key("b"), &absent("b", 2));
    etcd.put(&key("a"), &absent("a", 1));
    etcd.put("/infera/workers-of-another-kind", "not below the prefix");
    let mut running = Running::start(vec![etcd.endpoint()], quick());
    running.wait_ids(&["a", "b"]);
    assert!(running.workers().iter().all(|worker| worker.state == WorkerState::Active));
    let status = running.wait_status("ok", |status| status.state == State::Ok);
    assert!(status.last_contact_age.is_some() && status.workers == 2, "{status:?}");

    etcd.put(&key("c"), &absent("c", 3));
    running.wait_ids(&["a", "b", "c"]);
    etcd.put(&key("b"), &absent("b", 2).replace(":16", ":64"));
    running.wait("the new block size", |workers| workers[1].record.kv_block_size == Some(64));
    // Moved between roles, then drained: in place, under the same id.
    etcd.put(&key("b"), &absent("b", 2).replace("\"engine\"", "\"disagg_mode\":\"decode\",\"engine\""));
    running.wait("the role", |workers| workers[1].record.disagg_mode.as_str() == "decode");
    etcd.put(&key("b"), &absent("b", 2).replace("\"engine\"", "\"status\":\"draining\",\"engine\""));
    running.wait("draining", |workers| workers[1].state == WorkerState::Inactive);
    etcd.delete(&key("a"));
    running.wait_ids(&["b", "c"]);

    // A quiet watch is not a silent one: contact stays young without any event. The same record again is no news.
    etcd.put(&key("c"), &absent("c", 3));
    let seen = Instant::now();
    running.wait_status("contact after the last event", |status| {
        seen.elapsed() > Duration::from_secs(1) && status.last_contact_age.is_some_and(|age| age < seen.elapsed() / 2)
    });
    running.drain();
    running.wait_ids(&["b", "c"]);
    running.handle.stop();
}

#[test]
fn b46_a_malformed_record_in_the_middle_costs_only_itself() {
    let etcd = Etcd::start();
    for index in 0..60 {
        let id = format!("w{index:02}");
        let value = match index {
            20 => "{\"worker_id\":".to_owned(),
            30 => absent(&id, 30).replace("\"sglang\"", "null"),
            40 => String::new(),
            _ => absent(&id, 1000 + index),
        };
        etcd.put(&key(&id), &value);
    }
    let mut running = Running::start(vec![etcd.endpoint()], quick());
    running.wait("57 workers", |workers| workers.len() == 57);
    assert_eq!(running.handle.status().records_skipped_total, 3);
    // A bad value over a good one keeps the good one; a good one over a bad one is taken.
    etcd.put(&key("w00"), "{}");
    etcd.put(&key("w20"), &absent("w20", 1020));
    running.wait("58 workers", |workers| workers.len() == 58);
    assert!(running.ids().contains(&"w00") && running.ids().contains(&"w20"));
    assert_eq!(running.handle.status().records_skipped_total, 4);
    running.handle.stop();
}

/// etcd comes up only after the router, which reports that it knows nothing, and keeps trying.
#[test]
fn b43_not_up_at_start() {
    let mut etcd = Etcd::reserve();
    let mut running = Running::start(vec![etcd.endpoint()], quick());
    let status = running.wait_status("a reason", |status| status.reason.contains("connect"));
    assert_eq!((status.state, status.last_contact_age), (State::Down, None));
    assert!(running.updates.try_recv().is_err(), "nothing is known, so nothing is published");
    etcd.run();
    // An empty registry that answers is knowledge.
    running.wait_ids(&[]);
    etcd.put(&key("a"), &absent("a", 1));
    running.wait_ids(&["a"]);
    running.handle.stop();
}

/// The server is killed, stays away, and comes back with its data. Nobody leaves meanwhile; what changes afterwards
/// is seen.
#[test]
fn b43_killed_and_restarted_with_its_data() {
    let mut etcd = Etcd::start();
    for id in ["a", "b", "c"] {
        etcd.put(&key(id), &absent(id, 1 + u16::from(id.as_bytes()[0])));
    }
    let mut running = Running::start(vec![etcd.endpoint()], quick());
    running.wait_ids(&["a", "b", "c"]);
    running.drain();
    etcd.kill();
    let status = running.wait_status("degraded", |status| status.state == State::Degraded);
    assert!(status.reason.starts_with("etcd: "), "{}", status.reason);
    let age = running.handle.status().last_contact_age;
    running.wait_status("a growing age", |status| status.last_contact_age > age);
    assert!(running.updates.try_recv().is_err(), "the last set stays in force");
    etcd.run();
    running.wait_status("ok", |status| status.state == State::Ok);
    etcd.put(&key("d"), &absent("d", 4));
    running.wait_ids(&["a", "b", "c", "d"]);
    assert!(running.fewest >= 3);
    running.handle.stop();
}

/// The server loses its data: the fresh cluster knows no worker and counts revisions from one. Workers that answer
/// are kept until they register again; the one that does not answer goes.
#[test]
fn b43_restarted_without_its_data() {
    let mut etcd = Etcd::start();
    let workers = [Worker::start(), Worker::start()];
    etcd.put(&key("a"), &record("a", workers[0].address));
    etcd.put(&key("b"), &record("b", workers[1].address));
    let dead = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a free port");
    etcd.put(&key("dead"), &record("dead", dead));
    let mut running = Running::start(vec![etcd.endpoint()], quick());
    running.wait_ids(&["a", "b", "dead"]);
    etcd.kill();
    etcd.wipe();
    etcd.run();
    running.wait_ids(&["a", "b"]);
    let status = running.wait_status("degraded", |status| status.state == State::Degraded);
    assert!(status.reason.contains("2 vanished workers"), "{status:?}");
    etcd.put(&key("a"), &record("a", workers[0].address));
    running.wait_status("one kept", |status| status.reason.contains("1 vanished workers"));
    etcd.put(&key("b"), &record("b", workers[1].address));
    running.wait_status("ok", |status| status.state == State::Ok);
    running.drain();
    assert_eq!(running.ids(), ["a", "b"]);
    assert!(running.fewest >= 2);
    running.handle.stop();
}

/// The server dies, and the next one is of another cluster. There the worker's key has the revision that it had in the
/// former one, and says something else.
#[test]
fn another_cluster_is_believed_whatever_its_revisions() {
    let (mut former, other) = (Etcd::start(), Etcd::start());
    former.put(&key("a"), &absent("a", 1));
    other.put(&key("a"), &absent("a", 2));
    let mut running = Running::start(vec![former.endpoint(), other.endpoint()], quick());
    let is_at =
        |url: &'static str| move |workers: &[DiscoveredWorker]| workers.len() == 1 && workers[0].record.url == url;
    running.wait("the former one's record", is_at("http://127.0.0.1:1"));
    former.kill();
    running.wait("the other one's record", is_at("http://127.0.0.1:2"));
    running.handle.stop();
}

/// The server loses its data, and nobody ever registers again: the grace time ends the keeping.
#[test]
fn kept_workers_leave_when_the_grace_time_is_over() {
    let mut etcd = Etcd::start();
    let worker = Worker::start();
    etcd.put(&key("a"), &record("a", worker.address));
    let timing = Timing { departure_grace: Duration::from_secs(2), ..quick() };
    let mut running = Running::start(vec![etcd.endpoint()], timing);
    running.wait_ids(&["a"]);
    etcd.kill();
    etcd.wipe();
    etcd.run();
    running.wait_status("kept", |status| status.reason.contains("1 vanished workers"));
    running.wait_ids(&[]);
    running.handle.stop();
}

/// The server is frozen: its kernel still acknowledges, so nothing but silence tells. Then it goes on.
#[test]
fn b43_frozen_and_thawed() {
    let etcd = Etcd::start();
    etcd.put(&key("a"), &absent("a", 1));
    let mut running = Running::start(vec![etcd.endpoint()], quick());
    running.wait_ids(&["a"]);
    // Only the watch brings this: without it, the freeze might hit the opening of the watch instead.
    etcd.put(&key("c"), &absent("c", 3));
    running.wait_ids(&["a", "c"]);
    etcd.freeze();
    let frozen = Instant::now();
    let status = running.wait_status("degraded", |status| status.state == State::Degraded);
    assert!(frozen.elapsed() < Duration::from_secs(10), "noticed after {:?}: {status:?}", frozen.elapsed());
    etcd.thaw();
    running.wait_status("ok", |status| status.state == State::Ok);
    etcd.put(&key("b"), &absent("b", 2));
    running.wait_ids(&["a", "b", "c"]);
    running.handle.stop();
}

/// Discovery's own thread stands still for longer than a server may be silent, as in a flood of registrations on a busy
/// host. It has asked nothing meanwhile, so nothing was left unanswered: the watch goes on.
#[test]
fn b43_our_own_standstill_is_not_the_servers_silence() {
    let etcd = Etcd::start();
    etcd.put(&key("a"), &absent("a", 1));
    let wire = Wire::to(etcd.address());
    let standstill = quick().etcd_silence_max + Duration::from_secs(1);
    let stand_still = move |workers: &[DiscoveredWorker]| {
        if workers.len() == 2 {
            std::thread::sleep(standstill);
        }
    };
    let mut running = Running::start_with(vec![wire.endpoint()], quick(), stand_still);
    running.wait_ids(&["a"]);
    let connections = wire.accepted();
    etcd.put(&key("b"), &absent("b", 2));
    running.wait_ids(&["a", "b"]);
    etcd.put(&key("c"), &absent("c", 3));
    running.wait_ids(&["a", "b", "c"]);
    assert_eq!(wire.accepted(), connections, "the watch was given up");
    running.handle.stop();
}

/// The line swallows everything without closing; keys change behind it, and their history is compacted away.
#[test]
fn b43_swallowed_packets_and_compaction_meanwhile() {
    let etcd = Etcd::start();
    for id in ["a", "b", "c", "d"] {
        etcd.put(&key(id), &absent(id, u16::from(id.as_bytes()[0])));
    }
    let wire = Wire::to(etcd.address());
    let mut running = Running::start(vec![wire.endpoint()], quick());
    running.wait_ids(&["a", "b", "c", "d"]);
    for cut in [Wire::swallow, Wire::cut] {
        cut(&wire);
        running.wait_status("degraded", |status| status.state == State::Degraded);
        for round in 0..20 {
            etcd.put(&key("a"), &absent("a", 500 + round));
        }
        etcd.put(&key("e"), &absent("e", 5));
        etcd.delete(&key("e"));
        etcd.put(&key("a"), &absent("a", 1));
        etcd.put(&key("f"), &absent("f", 6));
        etcd.compact();
        wire.restore();
        running.wait_ids(&["a", "b", "c", "d", "f"]);
        running.wait("the last value", |workers| workers[0].record.url == "http://127.0.0.1:1");
        etcd.delete(&key("f"));
        // Just after an outage a departure is suspect; `f` does not answer, so it goes nevertheless.
        running.wait_ids(&["a", "b", "c", "d"]);
    }
    running.handle.stop();
}

/// Every connection is closed as soon as it is made. The router tries again, but not in a loop that eats a core.
#[test]
fn b43_a_server_that_hangs_up_is_not_tried_in_a_tight_loop() {
    let nobody = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a free port");
    let wire = Wire::to(nobody);
    wire.cut();
    let running = Running::start(vec![wire.endpoint()], Timing::default());
    let deadline = Instant::now() + PATIENCE;
    let mut first = None;
    // Four attempts with pauses of about 0.25, 0.5 and 1 s between them.
    while wire.accepted() < 4 {
        assert!(Instant::now() < deadline, "{} attempts", wire.accepted());
        if wire.accepted() > 0 {
            first.get_or_insert_with(Instant::now);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    let elapsed = first.expect("attempts were made").elapsed();
    assert!(elapsed > Duration::from_millis(800), "four attempts within {elapsed:?}");
    running.handle.stop();
}

/// One worker's lease runs out while the others' are long: it leaves at once.
#[test]
fn lease_expiry_of_one_worker() {
    let etcd = Etcd::start();
    let short = etcd.lease(2);
    etcd.put_leased(&key("a"), &absent("a", 1), short);
    for id in ["b", "c"] {
        etcd.put_leased(&key(id), &absent(id, u16::from(id.as_bytes()[0])), etcd.lease(600));
    }
    let mut running = Running::start(vec![etcd.endpoint()], quick());
    running.wait_ids(&["a", "b", "c"]);
    running.wait_ids(&["b", "c"]);
    assert_eq!(running.handle.status().state, State::Ok);
    running.handle.stop();
}

/// The registry freezes for longer than the leases run; when it goes on, it revokes them all, although every worker
/// is well. The fleet stays whole until they have registered again.
#[test]
fn b46_mass_lease_expiry_keeps_workers_that_answer() {
    let etcd = Etcd::start();
    let workers: Vec<_> = (0..5).map(|_| Worker::start()).collect();
    let ids = ["w0", "w1", "w2", "w3", "w4"];
    for (id, worker) in ids.iter().zip(&workers) {
        etcd.put_leased(&key(id), &record(id, worker.address), etcd.lease(3));
    }
    let mut running = Running::start(vec![etcd.endpoint()], quick());
    running.wait_ids(&ids);
    etcd.freeze();
    running.wait_status("degraded", |status| status.state == State::Degraded);
    etcd.thaw();
    running.wait_status("all kept", |status| status.reason.contains("5 vanished workers"));
    for (id, worker) in ids.iter().zip(&workers) {
        etcd.put_leased(&key(id), &record(id, worker.address), etcd.lease(600));
    }
    running.wait_status("ok", |status| status.state == State::Ok);
    running.drain();
    assert_eq!(running.ids(), ids);
    assert_eq!(running.fewest, 5, "no set was ever smaller");
    running.handle.stop();
}

/// Three members; the one in use is killed. Another takes over and the watch goes on there.
#[test]
fn b43_one_of_three_endpoints_dies() {
    let mut members = Etcd::reserve_cluster(3);
    members.iter_mut().for_each(Etcd::spawn);
    assert!(members.iter_mut().all(Etcd::wait_ready));
    let dead = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a free port");
    members[1].put(&key("a"), &absent("a", 1));
    // The first endpoint of the list is dead from the start.
    let mut endpoints = vec![format!("http://{dead}")];
    endpoints.extend(members.iter().map(Etcd::endpoint));
    let mut running = Running::start(endpoints, quick());
    running.wait_ids(&["a"]);
    members[0].kill();
    assert!(members[1].wait_ready());
    members[1].put(&key("b"), &absent("b", 2));
    running.wait_ids(&["a", "b"]);
    running.wait_status("ok", |status| status.state == State::Ok);
    running.handle.stop();
}
