//! The harness on real processes: honest proxies are measured, dishonest ones fail, nothing stays behind.

#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bench::answer::{self, Answer, JSON_BYTES};
use bench::backend::Backend;
use bench::harness::{Harness, Plan, scenarios};
use bench::load::{self, Load};
use bench::machine::{Cores, Interrupt, raise_descriptor_limit};
use bench::rivals::{Kind, Rival};
use bench::scenario;

const RUNTIMES: &str = env!("CARGO_BIN_EXE_runtimes");

fn candidate(name: &str) -> Rival {
    let line = format!("exec '{RUNTIMES}' serve {name} --listen {{listen}} --upstream {{upstream}}");
    Rival { name: name.to_owned(), kind: Kind::Command(line) }
}

fn load(target: SocketAddr, connections: usize, stream: bool, payload: Arc<[u8]>) -> Load {
    let request = answer::request("test", stream, 200).into();
    let (warm_up, window) = (Duration::from_millis(50), Duration::from_millis(200));
    Load { target, connections, request, payload, warm_up, window }
}

#[test]
fn loads_of_every_kind_run_through_honest_proxies() {
    raise_descriptor_limit().unwrap();
    let rivals = ["relay-epoll", "monoio-epoll"].map(candidate);
    let interrupt = Interrupt::default();
    let harness = Harness::new(&rivals, Cores::detect().unwrap(), &interrupt).unwrap();
    let kinds = ["json c=256", "body 400 kB c=8", "sse paced 200", "sse burst 32"];
    let kinds = kinds.map(|name| *scenario::ALL.iter().find(|scenario| scenario.name == name).unwrap());
    let plan = Plan {
        rounds: 1,
        window: Duration::from_millis(200),
        scenarios: kinds.to_vec(),
        idle_streams: 60,
        idle_proxies: vec!["monoio-epoll".to_owned()],
        low_load_requests: 5,
    };
    let results = harness.run(&plan, |_| {}).unwrap();
    assert_eq!(results.failures, Vec::<String>::new());
    assert_eq!(results.samples.len(), rivals.len() * kinds.len());
    assert!(results.samples.iter().all(|sample| sample.cpu_ns > 0 && sample.units > 0.0));
    let turns: Vec<&str> = results.latency.iter().map(|sample| sample.proxy.as_str()).collect();
    assert_eq!(turns, ["direct", "relay-epoll", "monoio-epoll"]);
    assert!(results.latency.iter().all(|sample| sample.p50_us > 0.0 && sample.p99_us >= sample.p50_us));
    assert_eq!(results.idle.len(), 1);
    assert!(results.idle[0].private_bytes_per_stream > 1024.0, "{:?}", results.idle);
}

#[test]
fn the_load_reaches_the_backend_and_counts_what_comes_back() {
    let backend = Backend::start(Cores::detect().unwrap().load, Answer::stream(None)).unwrap();
    let load = load(backend.address(), 4, true, Answer::stream(None).payload);
    let measured = load::run(&load, || Duration::ZERO, &Interrupt::default()).unwrap();
    assert!(measured.answers > 0 && backend.requests() >= measured.answers);
    assert_eq!(measured.latencies_ns.len() as u64, measured.answers);
    assert_eq!(measured.reconnects, 0);
}

#[test]
fn another_answer_than_the_expected_one_fails_the_measurement() {
    let backend = Backend::start(Cores::detect().unwrap().load, Answer::json(JSON_BYTES)).unwrap();
    let mut wrong = Answer::json(JSON_BYTES).payload.to_vec();
    wrong[150] ^= 1;
    let check = |payload: Arc<[u8]>, expected: &str| {
        let load = load(backend.address(), 2, false, payload);
        let error = load::run(&load, || Duration::ZERO, &Interrupt::default()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    check(wrong.into(), "differs");
    check(Answer::json(JSON_BYTES + 1).payload, "differs");
    let longer: Vec<u8> = [&Answer::json(JSON_BYTES).payload[..], b" "].concat();
    check(longer.into(), "ended after 193 of 194 bytes");
    check(Answer::json(JSON_BYTES).payload[..100].into(), "differs");
}

/// A proxy that never starts to listen, and one that ends at once, are errors with the proxy's own words.
#[test]
fn a_proxy_that_does_not_start_is_named() {
    let interrupt = Interrupt::default();
    let line = "echo sorry no {listen} {upstream}; exit 7";
    let rivals = [Rival { name: "broken".to_owned(), kind: Kind::Command(line.to_owned()) }];
    let harness = Harness::new(&rivals, Cores::detect().unwrap(), &interrupt).unwrap();
    let plan = Plan {
        rounds: 1,
        window: Duration::from_millis(100),
        scenarios: scenarios(&[]),
        idle_streams: 0,
        idle_proxies: Vec::new(),
        low_load_requests: 0,
    };
    let error = format!("{:#}", harness.run(&plan, |_| {}).err().unwrap());
    assert!(error.contains("broken") && error.contains("sorry no 127.0.0.1:"), "{error}");
}

/// Processes whose command line names `directory`, which holds every configuration and log of a run.
fn processes_naming(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    let lines = entries.filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok());
    let lines = lines.map(|line| String::from_utf8_lossy(&line).replace('\0', " "));
    lines.filter(|line| line.contains(directory.to_str().unwrap())).collect()
}

#[test]
fn an_interrupted_run_leaves_nothing_behind() {
    if bench::rivals::find_tool("nginx", "nginx-light").is_err() {
        eprintln!("NOT RUN: needs nginx (apt-get install nginx-light)");
        assert!(std::env::var_os("CI").is_none(), "CI must have nginx");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let mut run = Command::new(RUNTIMES)
        .args(["--rounds", "1000", "--seconds", "0.05", "--only", "json"])
        .env("TMPDIR", directory.path())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let first = BufReader::new(run.stderr.take().unwrap()).lines().next().unwrap().unwrap();
    assert!(first.contains("round 0"), "{first}");
    assert!(!processes_naming(directory.path()).is_empty());
    rustix::process::kill_process(rustix::process::Pid::from_child(&run), rustix::process::Signal::INT).unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    let status = loop {
        if let Some(status) = run.try_wait().unwrap() {
            break status;
        }
        assert!(Instant::now() < deadline, "still running after SIGINT");
        std::thread::sleep(Duration::from_millis(10));
    };
    assert_eq!(status.code(), Some(2));
    assert_eq!(processes_naming(directory.path()), Vec::<String>::new());
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
}
