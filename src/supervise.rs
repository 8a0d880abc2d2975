//! What watches the process from its main thread: signals, threads that must not end, and the service manager, which is
//! told how the process stands and, where it asks for that, that no shard hangs (systemd's `Type=notify` and
//! `WatchdogSec`; silent without them). Never touches a request.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::Context;
use infera_shards::Engine;
use sd_notify::NotifyState;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;
use tracing::{debug, info, warn};

use crate::config::Config;
use crate::logging::{self, Log};

/// Exit code when a thread has ended that must not (sysexits(3): internal software error).
const EXIT_LOST: i32 = 70;

/// Longest wait for workers beside another process: whoever starts this one has a reason.
const TAKE_OVER_PATIENCE: Duration = Duration::from_secs(30);

/// How long connections that have not sent anything hold up a drain.
const CONNECTION_GRACE: Duration = Duration::from_millis(1_500);

/// How often the threads are looked at.
const LOOK_PERIOD: Duration = Duration::from_millis(250);

pub struct Supervisor {
    /// SIGINT and SIGTERM.
    signals: Receiver<i32>,
    /// A SIGHUP that has not been answered; one that comes during the start waits for its end.
    hangup: Arc<AtomicBool>,
    /// Silence after which the service manager restarts the process.
    watchdog: Option<Duration>,
}

/// Why the process is to end.
#[derive(Debug, PartialEq, Eq)]
pub enum End {
    Signal(i32),
    /// A thread that everything depends on is gone, by its name.
    Lost(String),
}

impl Supervisor {
    /// Takes over the signals. To be called before any thread is started, so that none during the start is lost.
    pub fn start() -> anyhow::Result<Self> {
        let mut signals = Signals::new([SIGINT, SIGTERM]).context("cannot install signal handlers")?;
        let hangup = Arc::new(AtomicBool::new(false));
        signal_hook::flag::register(SIGHUP, hangup.clone()).context("cannot install signal handlers")?;
        // Whoever rotates the logs of a host must not end a router that is about to start, or has no access log.
        signal_hook::flag::register(SIGUSR1, Arc::default()).context("cannot install signal handlers")?;
        let (sender, receiver) = channel();
        let forward = move || signals.forever().take_while(|signal| sender.send(*signal).is_ok()).for_each(drop);
        std::thread::Builder::new().name("signals".to_owned()).spawn(forward).context("cannot start a thread")?;
        Ok(Self { signals: receiver, hangup, watchdog: sd_notify::watchdog_enabled() })
    }

    /// Where another process serves the address, waits until this one can serve too: from the moment it listens, it gets
    /// its share of the connections. False when a signal came meanwhile.
    pub fn may_listen(&self, address: SocketAddr, has_workers: impl Fn() -> bool) -> bool {
        if !Engine::is_served(address) {
            return true;
        }
        warn!(%address, "another process serves this address; sharing it from when workers are known");
        let deadline = Instant::now() + TAKE_OVER_PATIENCE;
        while !has_workers() && Instant::now() < deadline {
            if self.signals.recv_timeout(Duration::from_millis(10)).is_ok() {
                return false;
            }
        }
        true
    }

    /// The process serves.
    pub fn listening(&self, engine: &Engine, config: &Config) {
        let driver = engine.driver();
        info!(
            address = %engine.local_addr(),
            shards = config.shards,
            policy = config.policy.as_str(),
            driver = driver.name,
            flags = driver.flags.join("+"),
            "listening"
        );
        let status = format!("listening on {}, {} shards, {}", engine.local_addr(), config.shards, driver.name);
        tell(&[NotifyState::Ready, NotifyState::Status(&status)]);
    }

    /// The process has begun to end.
    pub fn stopping(&self) {
        tell(&[NotifyState::Stopping, NotifyState::Status("draining")]);
    }

    /// Waits for a signal, or for the loss of a shard of these engines, each with the name of its shards, or of what `others`
    /// finds missing. `reload` is called for each SIGHUP; several in a moment are one.
    pub fn watch(
        &self,
        engines: &[(&str, &Engine)],
        others: impl Fn() -> Option<&'static str>,
        mut reload: impl FnMut(),
    ) -> End {
        let mut watchdog = self.watchdog.map(|limit| Watchdog::new(limit, Instant::now()));
        loop {
            match self.signals.recv_timeout(LOOK_PERIOD) {
                Ok(signal) => return End::Signal(signal),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return End::Lost("signals".to_owned()),
            }
            if self.hangup.swap(false, Ordering::Relaxed) {
                reloading();
                reload();
                tell(&[NotifyState::Ready]);
            }
            let mut ended = engines.iter().filter_map(|(name, engine)| Some((name, engine.ended_shard()?)));
            if let Some((name, shard)) = ended.next() {
                return End::Lost(format!("{name}-{shard}"));
            }
            if let Some(name) = others() {
                return End::Lost(name.to_owned());
            }
            let sweeps = || engines.iter().flat_map(|(_, engine)| engine.stats()).map(|shard| shard.sweeps);
            if let Some(watchdog) = &mut watchdog
                && watchdog.is_due(Instant::now(), sweeps())
            {
                tell(&[NotifyState::Watchdog]);
            }
        }
    }

    /// Lets running requests finish, until none is left, `timeout` is over, or a further signal asks for haste.
    pub fn drain(&self, signal: i32, engine: &Engine, timeout: Duration) {
        info!(signal, drain_timeout_s = timeout.as_secs_f64(), "draining: no new connections, running requests finish");
        engine.drain();
        let start = Instant::now();
        // Connections without a request are idle ones, which close at once, and new ones, which have a moment.
        let is_done = || {
            let is_quiet = engine.connections_open() == 0 || start.elapsed() > CONNECTION_GRACE;
            engine.requests_active() == 0 && !engine.is_accepting() && is_quiet
        };
        while !is_done() && start.elapsed() < timeout {
            if self.signals.recv_timeout(Duration::from_millis(10)).is_ok() {
                break;
            }
        }
        if engine.requests_active() > 0 {
            warn!(requests = engine.requests_active(), "ending requests that did not finish in time");
        }
    }
}

/// Ends the process at once: half a router would refuse or hang part of the traffic for ever, and threads that hang
/// cannot be joined.
pub fn die_without(thread: &str, log: Log) -> ! {
    drop(log);
    logging::last_words(&anyhow::anyhow!("thread {thread} has ended by itself; the process ends with it"));
    std::process::exit(EXIT_LOST)
}

/// The service manager counts the reload as done at the next READY.
fn reloading() {
    match NotifyState::monotonic_usec_now() {
        Ok(now) => tell(&[NotifyState::Reloading, now]),
        Err(error) => warn!(%error, "no clock to tell the service manager of the reload"),
    }
}

fn tell(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        // Without a service manager there is no socket and no error.
        warn!(%error, "the service manager cannot be told");
    }
    debug!(?states, "told the service manager");
}

/// Says when the service manager is to hear that all shards go on. A shard that stands still silences it.
struct Watchdog {
    period: Duration,
    told: Instant,
    sweeps: Vec<u64>,
}

impl Watchdog {
    fn new(limit: Duration, now: Instant) -> Self {
        // Half of the limit, as systemd's own manual advises (sd_watchdog_enabled(3)).
        Self { period: limit / 2, told: now, sweeps: Vec::new() }
    }

    fn is_due(&mut self, now: Instant, sweeps: impl Iterator<Item = u64>) -> bool {
        if now.duration_since(self.told) < self.period {
            return false;
        }
        let sweeps: Vec<u64> = sweeps.collect();
        let goes_on = self.sweeps.len() != sweeps.len() || sweeps.iter().zip(&self.sweeps).all(|(new, old)| new != old);
        if !goes_on {
            warn!("a shard stands still; the service manager is not told that all is well");
            return false;
        }
        (self.told, self.sweeps) = (now, sweeps);
        true
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use infera_shards::{EngineConfig, Rejection, Request, Responder, Response, Service, ShardContext};

    use super::*;

    #[test]
    fn a_shard_that_stands_still_silences_the_watchdog() {
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let mut watchdog = Watchdog::new(Duration::from_secs(10), start);
        assert!(!watchdog.is_due(at(4), [1, 1].into_iter()));
        assert!(watchdog.is_due(at(5), [1, 1].into_iter()));
        assert!(!watchdog.is_due(at(9), [2, 2].into_iter()), "told a moment ago");
        assert!(watchdog.is_due(at(10), [2, 2].into_iter()));
        assert!(!watchdog.is_due(at(15), [3, 2].into_iter()), "the second one stands");
        assert!(watchdog.is_due(at(16), [4, 3].into_iter()), "and goes on");
    }

    /// Answers, and leaves a result behind whose end is a panic where nothing catches it: in the shard's main loop.
    struct Explosive(ShardContext);

    struct Bomb;

    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("on purpose");
        }
    }

    impl Service for Explosive {
        async fn call(&self, _: Request, _: &mut Responder) {
            let (completion, pending) = self.0.mailbox.ticket::<Bomb>();
            drop(pending);
            completion.complete(Bomb);
        }

        fn reject(&self, rejection: &Rejection) -> Response {
            Response { status: rejection.status, headers: Vec::new(), body: rejection.reason.into() }
        }
    }

    /// With `is_control` it is the engine beside that of the requests.
    fn die_of_a_lost_shard(is_control: bool) {
        let log = logging::start(crate::config::LogFormat::Text, "info".parse().unwrap());
        let supervisor = Supervisor::start().unwrap();
        let start = || Engine::start(EngineConfig::new("127.0.0.1:0".parse().unwrap()), Explosive).unwrap();
        let (engine, control) = (start(), start());
        let lost = if is_control { &control } else { &engine };
        let mut client = std::net::TcpStream::connect(lost.local_addr()).unwrap();
        client.write_all(b"GET / HTTP/1.1\r\nHost: t\r\n\r\n").unwrap();
        match supervisor.watch(&[("shard", &engine), ("control-shard", &control)], || None, || {}) {
            End::Lost(thread) => die_without(&thread, log),
            End::Signal(signal) => panic!("signal {signal}"),
        }
    }

    /// A process cannot see its own end, so this test runs itself again as a child that dies.
    #[test]
    fn a_shard_that_is_lost_ends_the_process_with_a_message() {
        const CHILD: &str = "INFERA_ROUTER_TEST_CHILD";
        if let Ok(lost) = std::env::var(CHILD) {
            return die_of_a_lost_shard(lost == "control-shard");
        }
        for lost in ["shard", "control-shard"] {
            let mut process = std::process::Command::new(std::env::current_exe().unwrap());
            let name = "supervise::tests::a_shard_that_is_lost_ends_the_process_with_a_message";
            let output = process.args(["--exact", name, "--nocapture"]).env(CHILD, lost).output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(EXIT_LOST), "{said}");
            assert!(said.contains(&format!("thread {lost}-0 has ended by itself; the process ends with it")), "{said}");
        }
    }
}
