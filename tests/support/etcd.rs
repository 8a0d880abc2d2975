//! A real etcd for tests: Debian's `etcd-server` on free ports with a data directory of its own, stopped by pid when
//! dropped. Freezing and killing are real signals.

use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use etcd_client::{Client, CompactionOptions, PutOptions};
use rustix::process::{Pid, Signal, kill_process};
use tokio::runtime::Runtime;

const PROGRAM: &str = "/usr/bin/etcd";
const PATIENCE: Duration = Duration::from_secs(30);

/// One member: its addresses stay the same over restarts.
pub struct Etcd {
    name: String,
    client: SocketAddr,
    peer: SocketAddr,
    cluster: String,
    data: tempfile::TempDir,
    child: Option<Child>,
    runtime: Runtime,
}

/// So many addresses, no two of them the same.
fn free_addresses(count: usize) -> Vec<SocketAddr> {
    let listeners: Vec<_> = (0..count).map(|_| TcpListener::bind("127.0.0.1:0").expect("a free port")).collect();
    listeners.iter().map(|listener| listener.local_addr().expect("an address")).collect()
}

#[allow(dead_code)] // Each test binary uses its own part of this.
impl Etcd {
    /// A member that is not running yet.
    pub fn reserve() -> Self {
        Self::reserve_cluster(1).remove(0)
    }

    /// Members of one cluster, none of them running yet.
    pub fn reserve_cluster(members: usize) -> Vec<Self> {
        assert!(Path::new(PROGRAM).exists(), "{PROGRAM} is missing; install the package etcd-server");
        let addresses = free_addresses(2 * members);
        let pairs = addresses.chunks_exact(2).enumerate();
        let places: Vec<_> = pairs.map(|(index, pair)| (format!("m{index}"), pair[0], pair[1])).collect();
        let cluster: Vec<_> = places.iter().map(|(name, _, peer)| format!("{name}=http://{peer}")).collect();
        let cluster = cluster.join(",");
        places
            .into_iter()
            .map(|(name, client, peer)| Etcd {
                name,
                client,
                peer,
                cluster: cluster.clone(),
                data: tempfile::tempdir().expect("a temporary directory"),
                child: None,
                runtime: tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime"),
            })
            .collect()
    }

    /// A running member. Ports are reserved by binding and releasing them, so another process may take one in
    /// between; then others are tried.
    pub fn start() -> Self {
        for _ in 0..5 {
            let mut etcd = Self::reserve();
            if etcd.launch() {
                return etcd;
            }
        }
        panic!("etcd does not start on any of five pairs of free ports");
    }

    /// Starts the process again on the same ports with the data it has; waits until it answers.
    pub fn run(&mut self) {
        assert!(self.launch(), "etcd does not start on {}", self.client);
    }

    /// Starts the process without waiting.
    pub fn spawn(&mut self) {
        assert!(self.child.is_none(), "already running");
        let (client, peer) = (format!("http://{}", self.client), format!("http://{}", self.peer));
        let child = Command::new(PROGRAM)
            .args(["--name", &self.name, "--data-dir"])
            .arg(self.data.path().join("data"))
            .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &self.cluster, "--unsafe-no-fsync"])
            // Whoever runs the tests may have an etcd of their own configured.
            .env_clear()
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("etcd can be executed");
        self.child = Some(child);
    }

    fn launch(&mut self) -> bool {
        self.spawn();
        self.wait_ready()
    }

    /// Waits until the member answers; false when the process ended instead.
    pub fn wait_ready(&mut self) -> bool {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let child = self.child.as_mut().expect("running");
            if let Ok(Some(_)) = child.try_wait() {
                self.child = None;
                return false;
            }
            let endpoint = self.endpoint();
            let answered = self.runtime.block_on(async {
                let status = async { Client::connect([endpoint], None).await?.status().await };
                matches!(tokio::time::timeout(Duration::from_secs(1), status).await, Ok(Ok(status)) if status.leader() != 0)
            });
            if answered {
                return true;
            }
            assert!(Instant::now() < deadline, "etcd does not answer on {}", self.client);
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub fn address(&self) -> SocketAddr {
        self.client
    }

    pub fn endpoint(&self) -> String {
        format!("http://{}", self.client)
    }

    fn signal(&self, signal: Signal) {
        let child = self.child.as_ref().expect("running");
        kill_process(Pid::from_child(child), signal).expect("the process is ours");
    }

    /// SIGKILL: no goodbye to any client.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            // Kills and reaps our own child by its handle; both fail only when it is gone already.
            drop(child.kill());
            drop(child.wait());
        }
    }

    /// The process keeps its sockets and does nothing.
    pub fn freeze(&self) {
        self.signal(Signal::STOP);
    }

    pub fn thaw(&self) {
        self.signal(Signal::CONT);
    }

    /// Throws the data away; the next start is a fresh cluster.
    pub fn wipe(&mut self) {
        assert!(self.child.is_none(), "wiped while running");
        std::fs::remove_dir_all(self.data.path().join("data")).expect("the data directory is ours");
    }

    /// Repeats a step until it succeeds: a cluster that has just lost its leader refuses for a while. Steps must not
    /// mind being done twice.
    fn call<T>(&self, step: impl AsyncFn(Client) -> Result<T, etcd_client::Error>) -> T {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let outcome = self.runtime.block_on(async {
                let call = async { step(Client::connect([self.endpoint()], None).await?).await };
                tokio::time::timeout(Duration::from_secs(5), call).await
            });
            match outcome {
                Ok(Ok(value)) => return value,
                _ if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(20)),
                Ok(Err(error)) => panic!("etcd refuses: {error}"),
                Err(_) => panic!("etcd does not answer"),
            }
        }
    }

    pub fn put(&self, key: &str, value: &str) {
        self.call(async |mut client| client.put(key, value, None).await);
    }

    pub fn delete(&self, key: &str) {
        self.call(async |mut client| client.delete(key, None).await);
    }

    /// Grants a lease of `ttl` seconds that nobody keeps alive.
    pub fn lease(&self, ttl: i64) -> i64 {
        self.call(async |mut client| client.lease_grant(ttl, None).await).id()
    }

    pub fn put_leased(&self, key: &str, value: &str, lease: i64) {
        self.call(async |mut client| client.put(key, value, Some(PutOptions::new().with_lease(lease))).await);
    }

    /// Compacts away everything up to now.
    pub fn compact(&self) {
        self.call(async |mut client| {
            let revision = client.get("x", None).await?.header().map_or(0, etcd_client::ResponseHeader::revision);
            client.compact(revision, Some(CompactionOptions::new().with_physical())).await
        });
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.kill();
    }
}
