//! The whole thread against real files, real sockets and scripted engines.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::*;
use crate::fleet::{Parity, WorkerState};

const PATIENCE: Duration = Duration::from_secs(20);

/// Periods short enough for a test; none of them is what a test waits on.
fn quick() -> Timing {
    Timing {
        file_poll: Duration::from_millis(20),
        ask_backoff: (Duration::from_millis(10), Duration::from_millis(100)),
        ask_again_every: Duration::from_millis(200),
        ask_timeout: Duration::from_millis(500),
        ..Timing::default()
    }
}

struct Running {
    handle: DiscoveryHandle,
    updates: Receiver<Vec<DiscoveredWorker>>,
    last: Vec<DiscoveredWorker>,
}

impl Running {
    fn start(config: DiscoveryConfig) -> Self {
        let (sender, updates): (Sender<_>, _) = channel();
        let handle = Discovery::start(config, move |workers| drop(sender.send(workers))).expect("the thread starts");
        Running { handle, updates, last: Vec::new() }
    }

    /// Waits for a published set that satisfies `wanted`.
    #[track_caller]
    fn wait(&mut self, what: &str, wanted: impl Fn(&[DiscoveredWorker]) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !wanted(&self.last) {
            match self.updates.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(workers) => {
                    assert_ne!(workers, self.last, "the same set was published twice");
                    self.last = workers;
                }
                Err(_) => panic!("waited for {what} in vain; last: {:#?}; {:?}", self.last, self.handle.status()),
            }
        }
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
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn ids(&self) -> Vec<&str> {
        self.last.iter().map(|worker| worker.record.worker_id.as_str()).collect()
    }
}

fn pending_reason(worker: &DiscoveredWorker) -> &str {
    match &worker.state {
        WorkerState::Pending(reason) => reason,
        _ => "",
    }
}

/// What a scripted engine does with a request for a path.
#[derive(Clone)]
enum Script {
    Answer(u16, &'static str),
    /// Accepts and never answers.
    Hang,
}

/// An HTTP server whose answers can be changed while it runs; unknown paths get 404.
struct ScriptedEngine {
    address: SocketAddr,
    scripts: Arc<Mutex<HashMap<&'static str, Script>>>,
    asked: Arc<Mutex<Vec<String>>>,
}

impl ScriptedEngine {
    fn start(bind: &str, scripts: &[(&'static str, Script)]) -> Self {
        let listener = TcpListener::bind(bind).expect("a free port");
        let engine = ScriptedEngine {
            address: listener.local_addr().expect("bound"),
            scripts: Arc::new(Mutex::new(scripts.iter().cloned().collect())),
            asked: Arc::default(),
        };
        let (scripts, asked) = (engine.scripts.clone(), engine.asked.clone());
        std::thread::spawn(move || {
            let mut hanging = Vec::new();
            for stream in listener.incoming() {
                let Ok(stream) = stream else { continue };
                // The engine is going away.
                if Arc::strong_count(&scripts) == 1 {
                    return;
                }
                hanging.extend(serve(stream, &scripts, &asked));
            }
        });
        engine
    }

    fn set(&self, path: &'static str, script: Script) {
        self.scripts.lock().unwrap().insert(path, script);
    }

    fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    fn asked(&self, path: &str) -> usize {
        self.asked.lock().unwrap().iter().filter(|asked| *asked == path).count()
    }
}

impl Drop for ScriptedEngine {
    fn drop(&mut self) {
        self.scripts = Arc::default();
        drop(TcpStream::connect(self.address));
    }
}

/// Answers one request; a connection that is to hang is handed back so that it stays open.
fn serve(
    stream: TcpStream,
    scripts: &Mutex<HashMap<&'static str, Script>>,
    asked: &Mutex<Vec<String>>,
) -> Option<TcpStream> {
    let mut reader = BufReader::new(stream);
    let mut first = String::new();
    reader.read_line(&mut first).ok()?;
    let mut line = String::new();
    while reader.read_line(&mut line).ok()? > 2 {
        line.clear();
    }
    let path = first.split(' ').nth(1)?.to_owned();
    let script = scripts.lock().unwrap().get(path.as_str()).cloned().unwrap_or(Script::Answer(404, "{}"));
    asked.lock().unwrap().push(path);
    let mut stream = reader.into_inner();
    match script {
        Script::Hang => Some(stream),
        Script::Answer(status, body) => {
            let head = format!("HTTP/1.1 {status} X\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", body.len());
            drop(stream.write_all(format!("{head}{body}").as_bytes()));
            None
        }
    }
}

fn static_worker(url: &str) -> WorkerRecord {
    let authority = crate::worker::WorkerUrl::parse(url).expect("a good URL").authority;
    WorkerRecord::new(authority, url)
}

fn command_line(workers: Vec<WorkerRecord>) -> DiscoveryConfig {
    DiscoveryConfig { workers, timing: quick(), ..DiscoveryConfig::default() }
}

const MODELS_M: Script = Script::Answer(200, r#"{"data":[{"id":"m","owned_by":"vllm"}]}"#);

#[test]
fn a_worker_that_says_everything_is_not_asked() {
    let engine = ScriptedEngine::start("127.0.0.1:0", &[]);
    let mut record = static_worker(&engine.url());
    record.model_name = "m".to_owned();
    record.kv_block_size = Some(16);
    record.kv_events_endpoint = Some("tcp://127.0.0.1:1".to_owned());
    let mut running = Running::start(command_line(vec![record.clone()]));
    running.wait("the worker", |workers| workers.len() == 1);
    let expected =
        DiscoveredWorker { record, address: Some(engine.address), state: WorkerState::Active, probed: Parity::Unknown };
    assert_eq!(running.last, [expected]);
    let status = running.handle.status();
    assert_eq!((status.state, status.last_contact_age, status.workers), (State::Ok, None, 1));
    running.handle.stop();
    assert_eq!(engine.asked.lock().unwrap().len(), 0);
}

#[test]
fn b45_a_worker_is_asked_until_it_answers_and_holds_up_no_other() {
    // The slow one hangs, then says 503, then garbage, then an empty list, then its model. Beside it a port that
    // refuses and an engine that is ready.
    let slow = ScriptedEngine::start("127.0.0.1:0", &[("/v1/models", Script::Hang)]);
    let ready = ScriptedEngine::start("127.0.0.1:0", &[("/v1/models", MODELS_M)]);
    let refusing = {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        format!("http://{}", listener.local_addr().unwrap())
    };
    let workers = [slow.url(), refusing.clone(), ready.url()].iter().map(|url| static_worker(url)).collect();
    let mut running = Running::start(command_line(workers));
    let find = |workers: &[DiscoveredWorker], url: &str| {
        workers.iter().find(|worker| worker.record.url == url).expect("never missing").clone()
    };
    running.wait("three workers", |workers| workers.len() == 3);
    running.wait("the ready one", |workers| find(workers, &ready.url()).state == WorkerState::Active);
    assert_eq!(find(&running.last, &ready.url()).record.model_name, "m");
    running.wait("a reason for the refusing one", |workers| {
        pending_reason(&find(workers, &refusing))
            .starts_with("model not known yet: GET /v1/models: cannot connect: Connection refused")
    });
    for (script, reason) in [
        (None, "model not known yet: GET /v1/models: no answer in time"),
        (Some(Script::Answer(503, "loading")), "model not known yet: GET /v1/models: status 503"),
        (Some(Script::Answer(200, "<html>")), "model not known yet: GET /v1/models: not JSON"),
        (Some(Script::Answer(200, r#"{"data":[]}"#)), "model not known yet: GET /v1/models: no model in it yet"),
        (Some(Script::Answer(404, "")), "model not known yet: GET /v1/models: not offered"),
    ] {
        if let Some(script) = script {
            slow.set("/v1/models", script);
        }
        running.wait(reason, |workers| pending_reason(&find(workers, &slow.url())).starts_with(reason));
        assert_eq!(running.handle.status().workers_pending, 2);
    }
    slow.set("/v1/models", Script::Answer(200, r#"{"data":[{"id":"m-old","owned_by":"sglang"}]}"#));
    running.wait("the slow one", |workers| find(workers, &slow.url()).state == WorkerState::Active);
    assert_eq!(find(&running.last, &slow.url()).record.model_name, "m-old");
    // The engine is replaced in place: another model at the same address, found without any registration.
    slow.set("/v1/models", MODELS_M);
    running.wait("the new model", |workers| find(workers, &slow.url()).record.model_name == "m");
    // An engine that stops answering keeps what it said.
    slow.set("/v1/models", Script::Answer(503, ""));
    let before = slow.asked("/v1/models");
    let deadline = Instant::now() + PATIENCE;
    while slow.asked("/v1/models") < before + 2 {
        assert!(Instant::now() < deadline, "not asked again");
        std::thread::sleep(Duration::from_millis(2));
    }
    assert_eq!(running.updates.try_iter().count(), 0);
    running.handle.stop();
}

/// One that differs from the others of its model takes nobody's place, nor does it lose its own.
#[test]
fn b45_an_odd_one_out_hides_no_model() {
    let said = |length: &str| {
        let body = format!(r#"{{"data":[{{"id":"m","owned_by":"vllm","max_model_len":{length}}}]}}"#);
        ScriptedEngine::start("127.0.0.1:0", &[("/v1/models", Script::Answer(200, body.leak()))])
    };
    let engines = ["40960", "40960", "8192", "\"odd\""].map(said);
    let workers = engines.iter().map(|engine| static_worker(&engine.url())).collect();
    let mut running = Running::start(command_line(workers));
    running.wait("all four", |workers| {
        let serves = |worker: &DiscoveredWorker| worker.state == WorkerState::Active && worker.record.model_name == "m";
        workers.len() == 4 && workers.iter().all(serves)
    });
    running.handle.stop();
}

#[test]
fn engines_say_their_block_size_and_endpoints() {
    let vllm = ScriptedEngine::start(
        "[::1]:0",
        &[
            ("/v1/models", MODELS_M),
            (
                "/kv_event_sources",
                Script::Answer(200, r#"{"0":{"endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657"}}"#),
            ),
            ("/metrics", Script::Answer(200, "vllm:cache_config_info{block_size=\"32\"} 1\n")),
        ],
    );
    let sglang = ScriptedEngine::start(
        "127.0.0.1:0",
        &[
            ("/v1/models", Script::Answer(200, r#"{"data":[{"id":"g","owned_by":"sglang"}]}"#)),
            ("/get_server_info", Script::Answer(200, r#"{"page_size":64,"dp_size":4}"#)),
        ],
    );
    let mut running = Running::start(command_line(vec![static_worker(&vllm.url()), static_worker(&sglang.url())]));
    running.wait("both", |workers| {
        workers.len() == 2 && workers.iter().all(|worker| worker.record.kv_block_size.is_some())
    });
    let record = |url: &str| running.last.iter().find(|worker| worker.record.url == url).expect(url).record.clone();
    let port = |endpoint: &str| format!("tcp://[::1]:{endpoint}");
    let (v, s) = (record(&vllm.url()), record(&sglang.url()));
    assert_eq!((v.engine.as_str(), v.kv_block_size, v.dp_size), ("vllm", Some(32), None));
    assert_eq!(v.kv_events_endpoint, Some(port("5557")));
    assert_eq!(v.kv_replay_endpoint, Some(port("5657")));
    assert_eq!((s.engine.as_str(), s.kv_block_size, s.dp_size), ("sglang", Some(64), Some(4)));
    assert_eq!(s.kv_events_endpoint, None);
    assert_eq!(vllm.asked("/server_info"), 0, "a vLLM engine is not asked SGLang's questions");
    assert_eq!(sglang.asked("/metrics"), 0);
    running.handle.stop();
}

#[test]
fn names_are_resolved_here() {
    let mut named = WorkerRecord::new("named", "http://localhost:8123");
    let mut lost = WorkerRecord::new("lost", "http://no-such-host.invalid:8123");
    for record in [&mut named, &mut lost] {
        record.model_name = "m".to_owned();
        record.kv_block_size = Some(16);
        record.kv_events_endpoint = Some("tcp://127.0.0.1:1".to_owned());
    }
    let mut running = Running::start(command_line(vec![named, lost]));
    running.wait("the name", |workers| {
        workers.len() == 2 && workers[1].state == WorkerState::Active && pending_reason(&workers[0]).len() > 20
    });
    assert_eq!(running.ids(), ["lost", "named"]);
    let address = running.last[1].address.expect("resolved");
    assert!(address.ip().is_loopback() && address.port() == 8123, "{address}");
    assert_eq!(running.last[0].address, None);
    running.wait("a reason", |workers| {
        let reason = pending_reason(&workers[0]);
        reason.starts_with("no address: ") && reason != "no address: not resolved yet"
    });
    running.handle.stop();
}

#[test]
fn status_and_transport_decide_who_is_routable() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(&file, r#"[
        {"worker_id":"a","url":"http://127.0.0.1:1","model_name":"m","status":"draining","kv_block_size":16,"kv_events_endpoint":"tcp://h:1"},
        {"worker_id":"b","url":"http://127.0.0.1:2","model_name":"m","request_transport":"nats","kv_block_size":16,"kv_events_endpoint":"tcp://h:1"},
        {"worker_id":"c","url":"http://127.0.0.1:3","model_name":"m","kv_block_size":16,"kv_events_endpoint":"tcp://h:1"}]"#)
    .unwrap();
    let config = DiscoveryConfig { workers_file: Some(file.path().to_owned()), ..command_line(Vec::new()) };
    let mut running = Running::start(config);
    running.wait("three", |workers| workers.len() == 3);
    assert_eq!(running.last[0].state, WorkerState::Inactive);
    assert!(pending_reason(&running.last[1]).contains("request transport `nats`"), "{:?}", running.last[1]);
    assert_eq!(running.last[2].state, WorkerState::Active);
    running.handle.stop();
}

#[test]
fn the_workers_file_is_read_again_and_a_bad_one_keeps_the_old_set() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("workers.json");
    let record = |id: &str, port: u16| {
        format!(
            r#"{{"worker_id":"{id}","url":"http://127.0.0.1:{port}","model_name":"m","kv_block_size":16,"kv_events_endpoint":"tcp://127.0.0.1:1"}}"#
        )
    };
    let config = DiscoveryConfig { workers_file: Some(path.clone()), ..command_line(Vec::new()) };
    // Not there yet: down, nothing published.
    let mut running = Running::start(config);
    let status = running.wait_status("a reason", |status| status.reason.contains("No such file"));
    assert_eq!((status.state, status.last_contact_age), (State::Down, None));
    assert_eq!(running.updates.try_iter().count(), 0);

    std::fs::write(&path, format!("[{},{}]", record("b", 2), record("a", 1))).unwrap();
    running.wait("two", |workers| workers.len() == 2);
    assert_eq!(running.ids(), ["a", "b"]);
    running.wait_status("ok", |status| status.state == State::Ok && status.last_contact_age.is_some());

    // Half written, then gone: the old set stays, and the reason says where.
    std::fs::write(&path, format!("[{},\n{{\"worker_id\":", record("a", 1))).unwrap();
    let status = running.wait_status("degraded", |status| status.state == State::Degraded);
    assert!(status.reason.contains("line 2 column"), "{}", status.reason);
    std::fs::remove_file(&path).unwrap();
    running.wait_status("missing", |status| status.reason.contains("No such file"));
    assert_eq!(running.updates.try_iter().count(), 0);

    // One bad record of three, and one changed in place; written aside and renamed over.
    let aside = directory.path().join("aside");
    let changed = record("a", 1).replace(":16", ":32");
    std::fs::write(&aside, format!(r#"[{changed},{{"worker_id":"x","url":null}},{}]"#, record("c", 3))).unwrap();
    std::fs::rename(&aside, &path).unwrap();
    running.wait("the new set", |workers| workers.iter().any(|worker| worker.record.worker_id == "c"));
    assert_eq!(running.ids(), ["a", "c"]);
    assert_eq!(running.last[0].record.kv_block_size, Some(32));
    let status = running.wait_status("ok", |status| status.state == State::Ok);
    assert_eq!(status.records_skipped_total, 1);

    // An empty array is a statement, not an accident.
    std::fs::write(&path, "[]").unwrap();
    running.wait("none", <[_]>::is_empty);
    running.handle.stop();
}

/// A record that leaves nothing open is the last word: nobody would set right what its engine has said before.
#[test]
fn a_record_that_comes_to_say_everything_stands_as_it_would_after_a_restart() {
    let engine = ScriptedEngine::start(
        "127.0.0.1:0",
        &[
            ("/v1/models", Script::Answer(200, r#"{"data":[{"id":"g","owned_by":"sglang"}]}"#)),
            ("/server_info", Script::Answer(200, r#"{"page_size":64,"dp_size":4}"#)),
        ],
    );
    let mut running = Running::start(command_line(vec![static_worker(&engine.url())]));
    running.wait("the engine's answer", |workers| workers.iter().any(|worker| worker.record.dp_size == Some(4)));
    let mut whole = static_worker(&engine.url());
    (whole.model_name, whole.engine, whole.kv_block_size) = ("g".into(), "vllm".into(), Some(64));
    whole.kv_events_endpoint = Some("tcp://127.0.0.1:9".into());
    let workers = vec![whole.clone()];
    running.handle.control().replace(Replacement { workers, workers_file: None, authorization: None });
    running.wait("the whole record alone", |workers| workers.iter().all(|worker| worker.record == whole));
    running.handle.stop();
}

#[test]
fn command_line_and_file_add_up() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let mut record = WorkerRecord::new("w", "http://127.0.0.1:9");
    record.model_name = "from-command-line".to_owned();
    let other = r#"[{"worker_id":"w","url":"http://127.0.0.1:9","model_name":"from-file"},
        {"worker_id":"v","url":"http://127.0.0.1:8","model_name":"m"}]"#;
    std::fs::write(&file, other).unwrap();
    let config = DiscoveryConfig { workers_file: Some(file.path().to_owned()), ..command_line(vec![record]) };
    let mut running = Running::start(config);
    running.wait("both", |workers| workers.len() == 2);
    assert_eq!(running.last[1].record.model_name, "from-command-line");
    assert_eq!(running.ids(), ["v", "w"]);
    running.handle.stop();
}

#[test]
fn a_callback_that_panics_is_no_secret() {
    let mut record = WorkerRecord::new("w", "http://127.0.0.1:9");
    record.model_name = "m".to_owned();
    let handle = Discovery::start(command_line(vec![record]), |_| panic!("the callback's fault")).unwrap();
    let deadline = Instant::now() + PATIENCE;
    while handle.status().state != State::Down {
        assert!(Instant::now() < deadline, "{:?}", handle.status());
        std::thread::sleep(Duration::from_millis(2));
    }
    assert_eq!(handle.status().reason, "the discovery thread has ended");
    handle.stop();
}

#[test]
fn stopping_does_not_wait_for_anyone() {
    let engine = ScriptedEngine::start("127.0.0.1:0", &[("/v1/models", Script::Hang)]);
    let timing = Timing { ask_timeout: Duration::from_secs(600), ..quick() };
    let config = DiscoveryConfig {
        etcd: Some(EtcdConfig { endpoints: vec![engine.url()], prefix: "/p/".to_owned(), roots: Vec::new() }),
        timing: Timing { etcd_timeout: Duration::from_secs(600), ..timing },
        ..command_line(vec![static_worker(&engine.url()), WorkerRecord::new("n", "http://no-such-host.invalid:1")])
    };
    let mut running = Running::start(config);
    running.wait("both", |workers| workers.len() == 2);
    let deadline = Instant::now() + PATIENCE;
    while engine.asked("/v1/models") == 0 {
        assert!(Instant::now() < deadline, "not asked");
        std::thread::sleep(Duration::from_millis(2));
    }
    let began = Instant::now();
    running.handle.stop();
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    let end = loop {
        if let Err(end) = running.updates.recv_timeout(PATIENCE) {
            break end;
        }
    };
    assert_eq!(end, std::sync::mpsc::RecvTimeoutError::Disconnected, "the callback is gone with the thread");
}

/// A big fleet is one publication, and a quiet one costs nothing: the thread sleeps between looks at the file.
#[test]
fn a_thousand_workers() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let records: Vec<_> = (0..1000)
        .map(|index| {
            let mut record = WorkerRecord::new(format!("w{index:04}"), format!("http://127.0.0.1:{}", 1000 + index));
            record.model_name = "m".to_owned();
            (record.kv_block_size, record.kv_events_endpoint) = (Some(16), Some("tcp://127.0.0.1:1".to_owned()));
            record
        })
        .collect();
    std::fs::write(&file, serde_json::to_vec(&records).unwrap()).unwrap();
    let config = DiscoveryConfig { workers_file: Some(file.path().to_owned()), ..command_line(Vec::new()) };
    let mut running = Running::start(config);
    running.wait("all", |workers| workers.len() == 1000);
    assert!(running.last.iter().all(|worker| worker.state == WorkerState::Active));
    running.handle.stop();
    assert_eq!(running.updates.try_iter().count(), 0, "one publication");
}

/// One that never answers how it tokenizes holds up nobody, is served, and is asked again.
#[test]
fn workers_are_asked_how_they_render_and_wait_for_no_answer() {
    let directory = tempfile::tempdir().unwrap();
    loadgen::prompt::write_shipped_tokenizer(directory.path()).unwrap();
    let prompter = Prompter::load(directory.path(), crate::prompt::PrompterOptions::default()).unwrap();
    let silent = ScriptedEngine::start("127.0.0.1:0", &[("/tokenize", Script::Hang)]);
    let honest = loadgen::engine::Engine::start(loadgen::engine::EngineConfig::default()).unwrap();
    let mut first = static_worker(&silent.url());
    (first.model_name, first.engine) = ("demo".to_owned(), "vllm".to_owned());
    (first.kv_block_size, first.kv_events_endpoint) = (Some(16), Some("tcp://127.0.0.1:9".to_owned()));
    let second = WorkerRecord::from_value(honest.registration()).unwrap().record;
    let (sender, updates) = channel();
    let config = command_line(vec![first.clone(), second.clone()]);
    let handle =
        Discovery::start_with(config, Some(Arc::new(prompter)), move |workers| drop(sender.send(workers))).unwrap();
    let mut running = Running { handle, updates, last: Vec::new() };
    let probed = |workers: &[DiscoveredWorker], record: &WorkerRecord| {
        let found = workers.iter().find(|worker| worker.record.worker_id == record.worker_id);
        found.filter(|worker| worker.state == WorkerState::Active).map(|worker| worker.probed)
    };
    running.wait("the honest worker's verdict", |workers| probed(workers, &second) == Some(Parity::Confirmed));
    assert_eq!(probed(&running.last, &first), Some(Parity::Unknown));
    // A round ends with the first conversation that is not answered.
    running.wait_status("a second round", |_| silent.asked("/tokenize") > 1);
}
