//! The built `infera-router` as a child process.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::client::{self, Answer};
use super::{PATIENCE, eventually, wait_until};

/// A running router; killed when dropped.
pub struct Router {
    child: Child,
    pub address: SocketAddr,
    log: Arc<Mutex<Vec<String>>>,
}

/// Builder of a router's command line.
pub struct Start {
    command: Command,
    host: &'static str,
    policy: &'static str,
    port: u16,
    shards: u32,
    patience: Duration,
}

/// A router on a free port of 127.0.0.1 with one shard; more by [`Start::arg`].
pub fn router() -> Start {
    start(Command::new(env!("CARGO_BIN_EXE_infera-router")))
}

/// The same on a machine that refuses io_uring, as container runtimes do: the call answers EPERM.
pub fn router_without_io_uring() -> Start {
    let mut command = Command::new("python3");
    command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/e2e/without_io_uring.py"));
    command.arg(env!("CARGO_BIN_EXE_infera-router"));
    start(command)
}

/// The same with so many descriptors.
pub fn router_with_descriptors(most: u32) -> Start {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("ulimit -n {most} && exec \"$0\" \"$@\""), env!("CARGO_BIN_EXE_infera-router")]);
    start(command)
}

fn start(mut command: Command) -> Start {
    command.env("RUST_LOG", "info").stdin(Stdio::null());
    Start { command, host: "127.0.0.1", policy: "kv-aware", port: 0, shards: 1, patience: PATIENCE }
}

impl Start {
    pub fn args(mut self, arguments: &[&str]) -> Self {
        self.command.args(arguments);
        self
    }

    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.command.env(name, value);
        self
    }

    pub fn without_env(mut self, name: &str) -> Self {
        self.command.env_remove(name);
        self
    }

    pub fn host(mut self, host: &'static str) -> Self {
        self.host = host;
        self
    }

    pub fn port(mut self, port: u16) -> Self {
        self.port = port;
        self
    }

    pub fn shards(mut self, shards: u32) -> Self {
        self.shards = shards;
        self
    }

    /// How long the start may take; a large tokenizer in a debug build takes its time.
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    fn command(mut self) -> Command {
        let (port, shards) = (self.port.to_string(), self.shards.to_string());
        self.command.args(["--host", self.host, "--port", &port, "--shards", &shards, "--router-policy", self.policy]);
        self.command
    }

    /// A static worker of model `m`.
    pub fn worker(self, address: SocketAddr) -> Self {
        self.args(&["--worker", &format!("http://{address},model=m,block-size=16")])
    }

    pub fn round_robin(self) -> Self {
        self.policy("round-robin")
    }

    /// `kv-aware` unless a test says otherwise.
    pub fn policy(mut self, policy: &'static str) -> Self {
        self.policy = policy;
        self
    }

    /// Runs to its end: for command lines that are refused.
    pub fn output(self) -> std::process::Output {
        self.command().output().expect("the router starts")
    }

    /// Starts and waits for the listening line.
    pub fn start(self) -> Router {
        let deadline = Instant::now() + self.patience;
        let mut child = self.command().stderr(Stdio::piped()).stdout(Stdio::null()).spawn().expect("the router starts");
        let log = Arc::new(Mutex::new(Vec::new()));
        let stderr = child.stderr.take().expect("stderr is piped");
        let lines = log.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                lines.lock().expect("log").push(line);
            }
        });
        let mut router = Router { child, address: ([0, 0, 0, 0], 0).into(), log };
        loop {
            if let Some(address) = router.log_lines().iter().find_map(|line| listening_address(line)) {
                router.address = address;
                return router;
            }
            if let Some(status) = router.child.try_wait().expect("wait") {
                panic!("the router ended with {status}:\n{}", router.log_lines().join("\n"));
            }
            assert!(Instant::now() < deadline, "no listening line:\n{}", router.log_lines().join("\n"));
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Starts and waits until `/ready` says yes.
    pub fn ready(self) -> Router {
        let router = self.start();
        wait_until("the router is ready", || router.get("/ready").status == 200);
        router
    }
}

fn listening_address(line: &str) -> Option<SocketAddr> {
    let rest = &line[line.find("listening")?..];
    let address = &rest[rest.find("address=")? + "address=".len()..];
    address.split_whitespace().next()?.parse().ok()
}

impl Router {
    pub fn get(&self, path: &str) -> Answer {
        client::get(self.address, path)
    }

    pub fn post(&self, path: &str, body: &str) -> Answer {
        client::post(self.address, path, body)
    }

    pub fn json(&self, path: &str) -> Value {
        let answer = self.get(path);
        assert_eq!(answer.status, 200, "{path}: {}", answer.text());
        answer.json()
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn log_lines(&self) -> Vec<String> {
        self.log.lock().expect("log").clone()
    }

    /// Waits for a log line that contains all of `parts`.
    pub fn logged(&self, parts: &[&str]) -> String {
        eventually(&format!("a log line with {parts:?}"), || {
            self.log_lines().into_iter().find(|line| parts.iter().all(|part| line.contains(part)))
        })
    }

    /// Value of one sample line, named with its labels as printed; absent series are `None`.
    pub fn metric(&self, sample: &str) -> Option<f64> {
        let page = self.get("/metrics").text();
        page.lines().find_map(|line| line.strip_prefix(sample)?.strip_prefix(' ')?.trim().parse().ok())
    }

    /// Sum over all series of a family.
    pub fn metric_sum(&self, family: &str) -> f64 {
        let page = self.get("/metrics").text();
        let labelled = format!("{family}{{");
        page.lines()
            .filter(|line| line.starts_with(&labelled) || line.starts_with(&format!("{family} ")))
            .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
            .sum()
    }

    /// What `/v1/workers` says of a worker's breaker.
    pub fn breaker_of(&self, worker: SocketAddr) -> String {
        let workers = self.json("/v1/workers");
        let url = format!("http://{worker}");
        let all = workers["workers"].as_array().expect("a list");
        let found = all.iter().find(|it| it["url"].as_str().is_some_and(|known| known.starts_with(&url)));
        found.unwrap_or_else(|| panic!("no {url} in {workers}"))["breaker"].as_str().expect("a state").to_owned()
    }

    /// Waits until nothing is booked on any target, and checks that no number is negative meanwhile.
    pub fn wait_for_rest(&self) {
        for family in [
            "infera_router_inflight_requests",
            "infera_router_active_blocks",
            "infera_router_queued_blocks",
            "infera_request_inflight",
        ] {
            wait_until(&format!("{family} is 0"), || {
                let sum = self.metric_sum(family);
                assert!(sum >= 0.0, "{family} = {sum}");
                sum == 0.0
            });
        }
    }

    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_raw(self.child.id() as i32).expect("a pid");
        rustix::process::kill_process(pid, signal).expect("the signal is sent");
    }

    /// Waits for the process to end by itself.
    pub fn wait(&mut self) -> ExitStatus {
        eventually("the router ends", || self.child.try_wait().expect("wait"))
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("--- log of the router ---\n{}", self.log_lines().join("\n"));
        }
    }
}
