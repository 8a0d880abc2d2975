//! Requests that a prefill and a decode worker share: every way in which a leg can end, over scripted workers and over
//! simulated engines that depend on each other.

mod concurrent;
mod engines;
mod legs;
mod ranks;
mod serial;
mod topology;
mod verdict;

use std::io::Write;
use std::net::SocketAddr;
use std::time::Duration;

use serde_json::{Value, json};

use crate::support::client::{self, Answer};
use crate::support::router::{Router, Start, router};
use crate::support::wait_until;
use crate::support::worker::{Conversation, Seen, Then, Worker, worker};

/// How soon the other leg of a failed pair must be gone.
const SOON: Duration = Duration::from_secs(2);

/// One registration record of model `m`.
fn record(address: SocketAddr, role: &str, protocol: &str, more: Value) -> Value {
    let params = json!({"bootstrap_addr": address.to_string(), "engine_id": "eng", "host": address.ip().to_string(),
        "http_port": address.port(), "handshake_port": 6301, "tp_size": 1, "dp_size": 1,
        "kv_connector_extra_config": {"handshake_port": address.port(), "notify_port": 61005, "tp_size": 1}});
    let mut record = json!({"worker_id": address.to_string(), "url": format!("http://{address}"), "model_name": "m",
        "disagg_mode": role, "disagg_meta": {"protocol": protocol, "params": params}, "kv_block_size": 16});
    record.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    record
}

/// A round-robin router over these records.
fn start(records: &[Value], configure: impl FnOnce(Start) -> Start) -> Router {
    launch(records, configure(router().round_robin()))
}

fn launch(records: &[Value], start: Start) -> Router {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(json!(records).to_string().as_bytes()).unwrap();
    let path = file.path().to_str().unwrap().to_owned();
    let router = start.args(&["--workers-file", &path]).ready();
    wait_until("all workers are known", || router.json("/health")["active_workers"] == records.len());
    // Read at start; it may go now, but for a test that keeps the fleet this is simplest.
    std::mem::forget(file);
    router
}

fn pair_of(protocol: &str, prefill: &[SocketAddr], decode: &[SocketAddr]) -> Vec<Value> {
    let prefill = prefill.iter().map(|address| record(*address, "prefill", protocol, json!({})));
    let decode = decode.iter().map(|address| record(*address, "decode", protocol, json!({})));
    prefill.chain(decode).collect()
}

pub fn sglang(prefill: &[SocketAddr], decode: &[SocketAddr]) -> Router {
    start(&pair_of("sglang-bootstrap", prefill, decode), |start| start)
}

/// A worker that takes abort calls besides what `script` does with inference requests.
pub fn leg(script: impl Fn(&Seen, &mut Conversation<'_>) -> Then + Send + Sync + 'static) -> Worker {
    worker(move |seen, conversation| match seen.target.as_str() {
        "/abort_request" => conversation.json(200, "{}"),
        _ => script(seen, conversation),
    })
}

/// An address that refuses connections, and is nobody else's while this lives.
struct Refusing {
    address: SocketAddr,
    _bound: rustix::fd::OwnedFd,
}

fn refusing() -> Refusing {
    use rustix::net::{AddressFamily, SocketType, bind, getsockname, socket};
    let bound = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    bind(&bound, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let address = SocketAddr::try_from(getsockname(&bound).unwrap()).unwrap();
    Refusing { address, _bound: bound }
}

pub fn done() -> Worker {
    leg(|_, conversation| conversation.json(200, r#"{"from":"prefill"}"#))
}

/// Streams two events and the terminator, or one JSON answer, as asked.
fn decoding() -> Worker {
    leg(answer_as_asked)
}

fn answer_as_asked(seen: &Seen, conversation: &mut Conversation<'_>) -> Then {
    if body_of(seen)["stream"] != true {
        return conversation.json(200, r#"{"from":"decode","usage":{"prompt_tokens":3,"completion_tokens":2}}"#);
    }
    conversation.sse_head();
    conversation.chunk("data: {\"t\":\"A\"}\n\n");
    conversation.chunk("data: {\"t\":\"B\"}\n\ndata: [DONE]\n\n");
    conversation.last_chunk()
}

pub fn held() -> Worker {
    leg(|_, conversation| conversation.wait_for_close())
}

fn body_of(seen: &Seen) -> Value {
    serde_json::from_slice(&seen.body).unwrap_or_else(|error| panic!("{error}: {:?}", seen.body))
}

/// Bodies of the inference requests.
pub fn bodies(worker: &Worker) -> Vec<Value> {
    worker.seen().iter().filter(|seen| seen.target != "/abort_request").map(body_of).collect()
}

/// Waits for inference requests at a worker: the client has its answer from decode, which may be sooner than prefill
/// has its request.
pub fn wait_for_bodies(worker: &Worker, count: usize) -> Vec<Value> {
    wait_until(&format!("{count} requests at a worker"), || bodies(worker).len() >= count);
    assert_eq!(bodies(worker).len(), count);
    bodies(worker)
}

/// Request ids of the abort calls, sorted.
fn aborts(worker: &Worker) -> Vec<String> {
    let calls = worker.seen().into_iter().filter(|seen| seen.target == "/abort_request");
    let mut rids: Vec<String> = calls.map(|seen| body_of(&seen)["rid"].as_str().unwrap_or("none").to_owned()).collect();
    rids.sort();
    rids
}

/// Nothing is booked, and no KV was given up.
pub fn at_rest(router: &Router) {
    router.wait_for_rest();
    assert_eq!(router.metric("infera_router_pd_stranded_transfers_total"), Some(0.0));
}

fn ask(router: &Router, stream: bool) -> Answer {
    router.post("/v1/chat/completions", &format!(r#"{{"model":"m","messages":[],"stream":{stream}}}"#))
}

fn wait_for_aborts(worker: &Worker, rids: &[String]) {
    wait_until(&format!("abort calls {rids:?}"), || aborts(worker) == rids);
}

/// Sends, and leaves once `until` holds.
fn leave_when(router: &Router, body: &str, until: impl FnMut() -> bool) {
    let mut connection = client::Connection::open(router.address);
    connection.send(&client::request("POST", "/v1/completions", "", body.as_bytes()));
    wait_until("the moment to leave", until);
}
