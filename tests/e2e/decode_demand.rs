//! Decode picks by input demand, against scripted prefill and decode workers that answer when the test lets them.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};

use crate::support::client::{self, Connection};
use crate::support::router::{Router, router};
use crate::support::wait_until;
use crate::support::worker::{Worker, json_worker, worker};

const PATH: &str = "/v1/completions";

/// One prefill worker, some decode workers that hold their answers while the gate is shut, and a router.
struct Pair {
    prefill: Worker,
    decode: Vec<Worker>,
    open: Arc<AtomicBool>,
    router: Router,
    directory: tempfile::TempDir,
}

fn record(worker: &Worker, role: &str) -> Value {
    let params = if role == "prefill" { json!({"bootstrap_addr": "127.0.0.1:9"}) } else { json!({}) };
    json!({"worker_id": worker.address.to_string(), "url": format!("http://{}", worker.address), "model_name": "m",
        "engine": "sglang", "kv_block_size": 16, "disagg_mode": role,
        "disagg_meta": {"protocol": "sglang-bootstrap", "params": params}})
}

fn write_workers(path: &Path, records: &[Value]) {
    let next = path.with_extension("next");
    std::fs::write(&next, serde_json::to_vec(records).unwrap()).unwrap();
    std::fs::rename(next, path).unwrap();
}

impl Pair {
    fn start(decode: usize, arguments: &[&str]) -> Self {
        Self::start_with(decode, arguments, record)
    }

    fn start_with(decode: usize, arguments: &[&str], record: fn(&Worker, &str) -> Value) -> Self {
        let open = Arc::new(AtomicBool::new(false));
        let prefill = json_worker("{}");
        let decode: Vec<Worker> = (0..decode)
            .map(|_| {
                let open = open.clone();
                worker(move |_, conversation| {
                    wait_until("the test lets decode answer", || open.load(Ordering::SeqCst));
                    conversation.json(200, "{}")
                })
            })
            .collect();
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("workers.json");
        let mut records: Vec<Value> = decode.iter().map(|worker| record(worker, "decode")).collect();
        records.push(record(&prefill, "prefill"));
        write_workers(&path, &records);
        let router = router()
            .args(&["--workers-file", path.to_str().unwrap()])
            .args(arguments)
            .env("RUST_LOG", "info,infera_router::decode_demand=debug")
            .shards(2)
            .ready();
        let pair = Self { prefill, decode, open, router, directory };
        pair.wait_for_workers(pair.decode.len() + 1);
        pair
    }

    fn wait_for_workers(&self, count: usize) {
        wait_until("the workers file is taken over", || {
            self.router.metric("infera_router_active_workers") == Some(count as f64)
        });
    }

    fn set_decode(&self, decode: &[&Worker]) {
        let mut records: Vec<Value> = decode.iter().map(|worker| record(worker, "decode")).collect();
        records.push(record(&self.prefill, "prefill"));
        write_workers(&self.directory.path().join("workers.json"), &records);
        self.wait_for_workers(decode.len() + 1);
    }

    /// Sends a request, waits until a decode worker has it, and says which one.
    fn send(&self, headers: &str, body: &Value) -> (usize, Connection) {
        let before: Vec<usize> = self.decode.iter().map(Worker::requests).collect();
        let mut connection = Connection::open(self.router.address);
        connection.send(&client::request("POST", PATH, headers, body.to_string().as_bytes()));
        let mut index = None;
        wait_until("a decode worker has the request", || {
            index = (0..self.decode.len()).find(|index| self.decode[*index].requests() > before[*index]);
            index.is_some()
        });
        (index.unwrap_or_default(), connection)
    }

    fn gauge(&self, family: &str, decode: usize) -> Option<f64> {
        self.router.metric(&format!("{family}{{target=\"{}\"}}", self.decode[decode].address))
    }

    fn tokens(&self) -> Vec<Option<f64>> {
        (0..self.decode.len()).map(|index| self.gauge("infera_router_decode_demand_tokens", index)).collect()
    }

    fn requests(&self) -> Vec<Option<f64>> {
        (0..self.decode.len()).map(|index| self.gauge("infera_router_decode_demand_requests", index)).collect()
    }

    /// Lets decode answer, and waits until nothing is held anywhere.
    fn finish(&self, connections: Vec<Connection>) {
        self.open.store(true, Ordering::SeqCst);
        for mut connection in connections {
            assert_eq!(connection.answer("POST").status, 200);
        }
        self.wait_for_rest();
    }

    fn wait_for_rest(&self) {
        self.router.wait_for_rest();
        for family in ["infera_router_decode_demand_tokens", "infera_router_decode_demand_requests"] {
            wait_until(&format!("{family} is 0"), || {
                let sum = self.router.metric_sum(family);
                assert!(sum >= 0.0, "{family} = {sum}");
                sum == 0.0
            });
        }
    }

    fn decisions(&self, mode: &str, input: &str) -> f64 {
        ["true", "false"]
            .into_iter()
            .filter_map(|agrees| {
                self.router.metric(&format!(
                    "infera_router_decode_demand_decisions_total{{agrees=\"{agrees}\",input=\"{input}\",mode=\"{mode}\"}}"
                ))
            })
            .sum()
    }
}

/// A prompt of so many token ids: counted exactly, without a tokenizer. Different seeds share no prefix.
fn prompt(seed: usize, tokens: usize) -> Value {
    json!({"model": "m", "prompt": (0..tokens).map(|place| seed * 10_000 + place).collect::<Vec<_>>()})
}

fn with(mut body: Value, members: Value) -> Value {
    body.as_object_mut().unwrap().extend(members.as_object().unwrap().clone());
    body
}

#[test]
fn on_takes_the_target_with_the_least_input_in_flight() {
    let pair = Pair::start(2, &["--decode-input-demand", "on"]);
    let (first, a) = pair.send("", &prompt(1, 320));
    let (second, b) = pair.send("", &prompt(2, 32));
    let (third, c) = pair.send("", &with(prompt(3, 32), json!({"n": 2})));
    assert!(first != second && second == third, "{first} {second} {third}");
    assert_eq!((pair.tokens()[first], pair.tokens()[second]), (Some(320.0), Some(96.0)));
    assert_eq!((pair.requests()[first], pair.requests()[second]), (Some(1.0), Some(2.0)));
    let (fourth, d) = pair.send("", &with(prompt(4, 16), json!({"n": "many"})));
    assert_eq!((fourth, pair.tokens()[second]), (second, Some(112.0)), "an invalid n counts as one");
    assert_eq!(pair.decisions("on", "exact"), 4.0);
    // The target keeps its ordinary load beside.
    assert_eq!(pair.gauge("infera_router_inflight_requests", first), Some(1.0));
    wait_until("its blocks are counted", || pair.gauge("infera_router_active_blocks", first) == Some(20.0));
    pair.finish(vec![a, b, c, d]);
}

#[test]
fn shadow_books_and_suggests_but_leaves_the_pick_alone() {
    let pair = Pair::start(2, &["--decode-input-demand", "shadow", "--kv-overlap-weight", "0"]);
    let sent: Vec<_> = [320, 32, 32].into_iter().map(|tokens| pair.send("", &prompt(tokens, tokens))).collect();
    let sum: f64 = pair.tokens().into_iter().flatten().sum();
    assert_eq!((sum, pair.decisions("shadow", "exact"), pair.decisions("on", "exact")), (384.0, 3.0, 0.0));
    let line = pair.router.logged(&["decode input demand", "mode=\"shadow\""]);
    for part in ["projected_tokens=", "original=", "suggested=", "selected=", "candidates="] {
        assert!(line.contains(part), "{part} is not in {line}");
    }
    pair.finish(sent.into_iter().map(|(_, connection)| connection).collect());
}

#[test]
fn off_counts_nothing() {
    let pair = Pair::start(2, &[]);
    let (_, connection) = pair.send("", &prompt(1, 320));
    let page = pair.router.get("/metrics").text();
    assert!(!page.contains("decode_demand"), "{page}");
    pair.open.store(true, Ordering::SeqCst);
    drop(connection);
    pair.router.wait_for_rest();
    assert!(!pair.router.log_lines().iter().any(|line| line.contains("decode input demand")));
}

#[test]
fn what_cannot_be_tokenized_is_estimated_by_its_strings_and_nothing_of_it_is_logged() {
    let pair = Pair::start(2, &["--decode-input-demand", "on"]);
    let secret = "tell-nobody-".repeat(100);
    let body = json!({"model": "m", "prompt": secret});
    let (first, a) = pair.send("", &body);
    let expected = ((secret.len() + "m".len()) / 4) as f64;
    assert_eq!(pair.tokens()[first], Some(expected));
    let image = format!("data:image/png;base64,{}", "A".repeat(100_000));
    let (second, b) = pair.send("", &with(body, json!({"images": [image]})));
    assert_ne!(first, second);
    assert_eq!(pair.tokens()[second], Some(expected), "inline binary is left out");
    assert_eq!(pair.decisions("on", "estimated"), 2.0);
    pair.router.logged(&["decode input demand", "input=\"estimated\""]);
    assert!(!pair.router.log_lines().iter().any(|line| line.contains("tell-nobody")));
    pair.finish(vec![a, b]);
}

#[test]
fn the_request_weight_evens_request_counts() {
    let spread = |arguments: &[&str]| {
        let pair = Pair::start(2, arguments);
        let (long, first) = pair.send("", &prompt(1, 3200));
        let mut connections = vec![first];
        for number in 0..7 {
            connections.push(pair.send("", &prompt(2 + number, 16)).1);
        }
        let requests = pair.requests();
        pair.finish(connections);
        (requests[long].unwrap_or_default(), requests[1 - long].unwrap_or_default())
    };
    assert_eq!(spread(&["--decode-input-demand", "on"]), (1.0, 7.0));
    assert_eq!(spread(&["--decode-input-demand", "on", "--decode-request-weight", "1000000"]), (4.0, 4.0));
}

#[test]
fn b32_clients_that_leave_take_their_reservations_along() {
    let pair = Pair::start(3, &["--decode-input-demand", "on"]);
    let mut connections = Vec::new();
    for number in 0..90 {
        let mut connection = Connection::open(pair.router.address);
        connection.send(&client::request("POST", PATH, "", prompt(number, 64 + number).to_string().as_bytes()));
        match number % 3 {
            // Leaves at once, later, or at the end.
            0 => drop(connection),
            _ => connections.push(connection),
        }
        if connections.len() > 10 {
            drop(connections.remove(number % 7));
        }
    }
    drop(connections);
    pair.wait_for_rest();
    pair.open.store(true, Ordering::SeqCst);
    let (_, connection) = pair.send("", &prompt(100, 32));
    pair.finish(vec![connection]);
}

#[test]
fn a_live_reservation_outlives_its_worker_in_discovery() {
    let pair = Pair::start(2, &["--decode-input-demand", "on"]);
    let (held_by, long) = pair.send("", &prompt(1, 500));
    let other = 1 - held_by;
    pair.set_decode(&[&pair.decode[other]]);
    assert_eq!(pair.tokens()[held_by], None, "not a target any more");
    pair.set_decode(&[&pair.decode[0], &pair.decode[1]]);
    assert_eq!(pair.tokens()[held_by], Some(500.0), "back, and its stream still runs");
    let (next, short) = pair.send("", &prompt(2, 100));
    assert_eq!(next, other);
    // Leaves while both run, and is not there when they end.
    pair.set_decode(&[&pair.decode[other]]);
    pair.finish(vec![long, short]);
    pair.set_decode(&[&pair.decode[0], &pair.decode[1]]);
    assert_eq!(pair.tokens(), [Some(0.0), Some(0.0)]);
}

#[test]
fn a_bound_session_keeps_its_decode_target_and_is_booked() {
    let pair = Pair::start(2, &["--decode-input-demand", "on", "--session-affinity", "both"]);
    pair.open.store(true, Ordering::SeqCst);
    let session = "X-Dynamo-Session-ID: s\r\n";
    let (home, first) = pair.send(session, &prompt(1, 32));
    pair.finish(vec![first]);
    pair.open.store(false, Ordering::SeqCst);
    // Demand alone would go elsewhere from the second turn on.
    let turns: Vec<(usize, Connection)> = (0..3).map(|turn| pair.send(session, &prompt(2 + turn, 1000))).collect();
    assert!(turns.iter().all(|(target, _)| *target == home));
    assert_eq!((pair.tokens()[home], pair.requests()[home]), (Some(3000.0), Some(3.0)));
    assert_eq!(pair.decisions("on", "exact"), 1.0, "only the first turn was a decision");
    let (other, stranger) = pair.send("", &prompt(9, 10));
    assert_ne!(other, home);
    pair.finish(turns.into_iter().map(|(_, connection)| connection).chain([stranger]).collect());
}

#[test]
fn a_prefill_guard_that_is_released_early_leaves_the_decode_reservation() {
    let arguments = ["--decode-input-demand", "on", "--pd-prefill-guard-release", "completion"];
    let pair = Pair::start(1, &arguments);
    let (_, connection) = pair.send("", &prompt(1, 160));
    let prefill = format!("infera_router_inflight_requests{{target=\"{}\"}}", pair.prefill.address);
    wait_until("prefill's load is released", || pair.router.metric(&prefill).unwrap_or(0.0) == 0.0);
    assert_eq!((pair.tokens()[0], pair.requests()[0]), (Some(160.0), Some(1.0)));
    pair.finish(vec![connection]);
}

#[test]
fn affinity_of_prefill_alone_leaves_every_decode_pick_to_demand() {
    let pair = Pair::start(2, &["--decode-input-demand", "on", "--session-affinity", "prefill"]);
    let session = "X-Dynamo-Session-ID: s\r\n";
    let turns: Vec<(usize, Connection)> = (0..4).map(|turn| pair.send(session, &prompt(turn, 1000))).collect();
    let on_first = turns.iter().filter(|(target, _)| *target == 0).count();
    assert_eq!((on_first, pair.decisions("on", "exact")), (2, 4.0));
    pair.finish(turns.into_iter().map(|(_, connection)| connection).collect());
}

#[test]
fn a_decode_leg_that_fails_gives_its_reservation_up() {
    let prefill = json_worker("{}");
    let failing = [500, 400].map(|status| worker(move |_, conversation| conversation.json(status, "{}")));
    for decode in &failing {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("workers.json");
        write_workers(&path, &[record(decode, "decode"), record(&prefill, "prefill")]);
        let arguments = ["--workers-file", path.to_str().unwrap(), "--decode-input-demand", "on"];
        let router = router().args(&arguments).ready();
        wait_until("both are known", || router.metric("infera_router_active_workers") == Some(2.0));
        for number in 0..5 {
            assert!(router.post(PATH, &prompt(number, 100).to_string()).status >= 400);
        }
        router.wait_for_rest();
        assert_eq!(router.metric_sum("infera_router_decode_demand_requests"), 0.0);
        assert_eq!(router.metric_sum("infera_router_decode_demand_tokens"), 0.0);
        assert_eq!(router.metric_sum("infera_router_decode_demand_decisions_total"), 5.0);
    }
}

#[test]
fn mixed_picks_are_no_decisions_and_decode_needs_no_block_size() {
    let mixed = [json_worker("{}"), json_worker("{}")];
    let start = router().args(&["--decode-input-demand", "on"]);
    let router = mixed.iter().fold(start, |start, worker| start.worker(worker.address)).ready();
    for number in 0..6 {
        assert_eq!(router.post(PATH, &prompt(number, 100 * (1 + number % 2)).to_string()).status, 200);
    }
    assert!(mixed.iter().all(|worker| worker.requests() >= 2), "mixed picks go by load as ever");
    assert_eq!(router.metric_sum("infera_router_decode_demand_decisions_total"), 0.0);

    let without_block_size = |worker: &Worker, role: &str| {
        let mut record = record(worker, role);
        record.as_object_mut().unwrap().remove("kv_block_size");
        record
    };
    let pair = Pair::start_with(2, &["--decode-input-demand", "on"], without_block_size);
    let (first, long) = pair.send("", &prompt(1, 500));
    let (second, short) = pair.send("", &prompt(2, 50));
    assert_ne!(first, second);
    assert_eq!((pair.tokens()[first], pair.tokens()[second]), (Some(500.0), Some(50.0)));
    pair.finish(vec![long, short]);
}
