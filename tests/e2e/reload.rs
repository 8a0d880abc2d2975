//! SIGHUP: what may change without a restart, and mistakes that change nothing.

use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;

use rustix::process::Signal;

use crate::support::client::{self, Connection, exchange};
use crate::support::router::{Router, router};
use crate::support::wait_until;
use crate::support::worker::{json_worker, worker};

const BODY: &[u8] = br#"{"model":"m","prompt":"x"}"#;

/// Files of one router, written as a test goes.
struct Files(tempfile::TempDir);

impl Files {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, text: &str) -> String {
        std::fs::write(self.path(name), text).unwrap();
        self.path(name).to_str().unwrap().to_owned()
    }
}

fn reloads(router: &Router, result: &str) -> f64 {
    router.metric(&format!("infera_router_config_reload_total{{result=\"{result}\"}}")).unwrap()
}

/// Sends the signal and waits for the answer.
fn reload(router: &Router, result: &str) {
    let before = reloads(router, result);
    router.signal(Signal::HUP);
    wait_until("the reload has been counted", || reloads(router, result) == before + 1.0);
}

fn status(router: &Router, headers: &str) -> u16 {
    exchange(router.address, "POST", "/v1/completions", headers, BODY).status
}

#[test]
fn workers_of_the_file_come_and_go_with_a_reload() {
    let (first, second) = (json_worker(r#"{"n":1}"#), json_worker(r#"{"n":2}"#));
    let files = Files::new();
    let config = |address| format!("worker = ['http://{address},model=m,block-size=16']\n");
    let path = files.write("router.toml", &config(first.address));
    let router = router().round_robin().args(&["--config", &path]).ready();
    let answer = || router.post("/v1/completions", r#"{"model":"m"}"#).text();
    assert_eq!(answer(), r#"{"n":1}"#);
    files.write("router.toml", &config(second.address));
    reload(&router, "ok");
    wait_until("the second worker serves alone", || answer() == r#"{"n":2}"#);
    // A workers file instead of the list: one more source goes, another comes.
    let records =
        format!(r#"[{{"worker_id":"a","url":"http://{}","model_name":"m","kv_block_size":16}}]"#, first.address);
    let workers = files.write("workers.json", &records);
    files.write("router.toml", &format!("workers-file = '{workers}'\n"));
    reload(&router, "ok");
    wait_until("the worker of the file serves", || answer() == r#"{"n":1}"#);
    files.write("router.toml", &config(second.address));
    reload(&router, "ok");
    wait_until("the file is left", || answer() == r#"{"n":2}"#);
}

#[test]
fn keys_caps_and_the_workers_key_follow_their_files() {
    let worker = worker(|_, conversation| conversation.json(200, "{}"));
    let files = Files::new();
    let (keys, worker_key) = (files.write("keys", "sk-old\n"), files.write("worker-key", "wk-old\n"));
    let options = format!("api-key-file = '{keys}'\nworker-api-key-file = '{worker_key}'\n");
    let path = files.write("router.toml", &options);
    let router = router().round_robin().worker(worker.address).args(&["--config", &path]).ready();
    let (old, new) = ("X-Api-Key: sk-old\r\n", "X-Api-Key: sk-new\r\n");
    assert_eq!((status(&router, old), status(&router, new)), (200, 401));
    // The configuration is as it was; what its files hold is not.
    files.write("keys", "sk-new\n");
    files.write("worker-key", "wk-new\n");
    reload(&router, "ok");
    assert_eq!((status(&router, old), status(&router, new)), (401, 200));
    let shown = |seen: usize| worker.seen()[seen].header("authorization").unwrap_or_default().to_owned();
    assert_eq!((shown(0), shown(1)), ("Bearer wk-old".to_owned(), "Bearer wk-new".to_owned()));
    // An empty key file would let everybody in: a mistake, and everything stays.
    files.write("keys", "# none\n");
    reload(&router, "error");
    assert_eq!((status(&router, ""), status(&router, new)), (401, 200));
    let log = router.log_lines().join("\n");
    assert!(["sk-old", "sk-new", "wk-old", "wk-new"].iter().all(|key| !log.contains(key)), "{log}");
}

#[test]
fn b60_a_reload_with_a_mistake_keeps_the_old_and_says_so() {
    let worker = json_worker("{}");
    let files = Files::new();
    let path = files.write("router.toml", "max-inflight = 1\n");
    let router = router().round_robin().worker(worker.address).args(&["--config", &path]).ready();
    let loaded = "infera_router_config_last_success_timestamp_seconds";
    let at_start = router.metric(loaded).unwrap();
    assert!(at_start > 1.6e9 && (reloads(&router, "ok"), reloads(&router, "error")) == (0.0, 0.0));
    files.write("router.toml", "max-inflight = 2\nbreaker-cooldwn-s = 1\nkv-overlap-weight = -1\n");
    reload(&router, "error");
    router.logged(&["stays as it was", "router.toml:2", "did you mean `breaker-cooldown-s`?"]);
    router.logged(&["stays as it was", "--kv-overlap-weight must be", "router.toml:3"]);
    assert_eq!((router.metric(loaded), reloads(&router, "ok")), (Some(at_start), 0.0));
    // A flag goes before the file, and an option of the start waits for one.
    files.write("router.toml", "port = 1\nprompt-cache-bytes = 1\nlog-format = 'json'\n");
    reload(&router, "ok");
    let line = router.logged(&["wait for a restart"]);
    assert!(line.contains("prompt-cache-bytes,log-format") && !line.contains("port,"), "{line}");
    assert!(router.metric(loaded).unwrap() > at_start);
    assert_eq!(status(&router, ""), 200);
}

#[test]
fn caps_and_timeouts_hold_from_the_next_request_on() {
    let worker = worker(|seen, conversation| {
        if seen.target.contains("completions") {
            // Silence after the head of a stream.
            conversation.sse_head();
            conversation.chunk("data: 1\n\n");
            return conversation.wait_for_close();
        }
        conversation.json(200, "{}")
    });
    let files = Files::new();
    let path = files.write("router.toml", "");
    let router = router().shards(2).round_robin().worker(worker.address).args(&["--config", &path]).ready();
    let open = || {
        let mut stream = Connection::open(router.address);
        stream.send(&client::request("POST", "/v1/completions", "", br#"{"model":"m","stream":true}"#));
        stream.head().unwrap();
        assert_eq!(stream.chunk().unwrap().unwrap(), b"data: 1\n\n");
        stream
    };
    let first = open();
    files.write("router.toml", "max-inflight = 1\nhttp-req-idle-timeout-s = 0.2\n");
    reload(&router, "ok");
    // Whichever shard takes it.
    for _ in 0..8 {
        assert_eq!(status(&router, ""), 429);
    }
    files.write("router.toml", "http-req-idle-timeout-s = 0.2\n");
    reload(&router, "ok");
    let mut second = open();
    let cut = second.chunk();
    assert!(!matches!(cut, Ok(Some(ref bytes)) if bytes.starts_with(b"data: 1")), "{cut:?}");
    drop(first);
}

#[test]
fn the_log_level_and_the_drain_timeout_follow_the_file() {
    let worker = worker(|_, conversation| {
        conversation.sse_head();
        conversation.chunk("data: 1\n\n");
        conversation.wait_for_close()
    });
    let files = Files::new();
    let path = files.write("router.toml", "log-level = 'info'\n");
    let started = router().round_robin().worker(worker.address).without_env("RUST_LOG");
    let mut router = started.args(&["--config", &path]).ready();
    files.write("router.toml", "log-level = 'info,infera_router::supervise=debug'\ndrain-timeout = 0.1\n");
    reload(&router, "ok");
    router.logged(&["DEBUG infera_router::supervise", "told the service manager"]);
    let mut stream = Connection::open(router.address);
    stream.send(&client::request("POST", "/v1/completions", "", br#"{"model":"m","stream":true}"#));
    stream.head().unwrap();
    // With the 30 s of the start this would outlast the test's patience.
    router.signal(Signal::TERM);
    assert_eq!(router.wait().code(), Some(0));
}

#[test]
fn the_service_manager_is_told_of_a_reload() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(crate::support::PATIENCE)).unwrap();
    let worker = json_worker("{}");
    let started = router().round_robin().worker(worker.address).env("NOTIFY_SOCKET", path.to_str().unwrap());
    let router = started.ready();
    let told = || {
        let mut buffer = [0; 256];
        let length = socket.recv(&mut buffer).expect("the router tells");
        String::from_utf8_lossy(&buffer[..length]).into_owned()
    };
    assert!(told().contains("READY=1"));
    router.signal(Signal::HUP);
    let reloading = told();
    assert!(reloading.contains("RELOADING=1") && reloading.contains("MONOTONIC_USEC="), "{reloading}");
    assert!(told().contains("READY=1"));
}
