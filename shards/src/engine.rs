//! Starts, drains and stops the shards. It owns their threads, listeners and main tasks, and never touches a request.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use http::StatusCode;

use crate::clock::{self, Fired, Slot};
use crate::config::{EngineConfig, sweep_period};
use crate::connection::{self, Level};
use crate::mailbox::{self, Mailbox, Message};
use crate::net::runtime::{DriverReport, ShardRuntime};
use crate::net::{self, Listener, listener};
use crate::service::{Rejection, RejectionKind, Service, ShardContext};
use crate::shard::{self, Shard};
use crate::stats::{ShardCounters, ShardStats};
use crate::trim::Trim;
use crate::upstream::Upstream;

/// Pause after a failed accept, so that a process out of descriptors does not spin.
const ACCEPT_BACK_OFF: Duration = Duration::from_millis(50);
/// How long a draining listener takes over what is in its queue: longer than a handshake takes, shorter than the second
/// after which a dropped one is tried again.
const CLOSING_GRACE: Duration = Duration::from_millis(300);
/// Connections accepted in a row before others may run.
const ACCEPTS_PER_TURN: usize = 64;
/// A stopping shard waits this long for its tasks to end and their operations to be reaped.
const STOP_GRACE: Duration = Duration::from_secs(2);

/// Why the engine did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("cannot listen on {address}")]
    Listen { address: SocketAddr, source: io::Error },
    #[error("cannot start the runtime of shard {shard}")]
    Runtime { shard: usize, source: io::Error },
    /// io_uring is required and not to be had; the text names what to change.
    #[error("{0}")]
    IoUringRequired(String),
    #[error("the service of shard {0} could not be built")]
    Service(usize),
    #[error("an engine needs at least one shard")]
    NoShards,
}

/// Running shards. Dropping it stops them.
pub struct Engine {
    address: SocketAddr,
    driver: DriverReport,
    shards: Vec<Handle>,
    draining: AtomicBool,
}

struct Handle {
    mailbox: mailbox::Sender,
    counters: Arc<ShardCounters>,
    thread: Option<JoinHandle<()>>,
}

impl Engine {
    /// Binds, starts one thread per shard and returns once every shard listens.
    ///
    /// # Errors
    /// The first [`StartError`]; shards that had started are stopped again.
    pub fn start<S: Service>(
        config: EngineConfig,
        make_service: impl Fn(ShardContext) -> S + Send + Sync + 'static,
    ) -> Result<Engine, StartError> {
        if config.shards == 0 {
            return Err(StartError::NoShards);
        }
        let (sockets, address) = bind_all(&config)?;
        let make_service = Arc::new(make_service);
        let (started, reports) = mpsc::channel();
        let mut engine = Engine {
            address,
            driver: DriverReport { name: "", flags: Vec::new(), fallback_reason: None },
            shards: Vec::new(),
            draining: AtomicBool::new(false),
        };
        for (index, socket) in sockets.into_iter().enumerate() {
            let (sender, receiver) = async_channel::unbounded();
            let counters = Arc::new(ShardCounters::default());
            let seed = Seed {
                index,
                socket,
                config: config.clone(),
                counters: counters.clone(),
                mailbox: (sender.clone(), receiver),
            };
            let (make_service, started) = (make_service.clone(), started.clone());
            let thread = std::thread::Builder::new()
                .name(format!("shard-{index}"))
                .spawn(move || run_shard(seed, &*make_service, started))
                .map_err(|source| StartError::Runtime { shard: index, source })?;
            engine.shards.push(Handle { mailbox: sender, counters, thread: Some(thread) });
        }
        drop(started);
        for index in 0..config.shards {
            // A shard that dies without a report panicked in the service's constructor.
            engine.driver = reports.recv().map_err(|_| StartError::Service(index))??;
        }
        if let Some(reason) = &engine.driver.fallback_reason {
            tracing::warn!("{reason}");
        }
        tracing::info!(driver = engine.driver.name, flags = ?engine.driver.flags, shards = config.shards, %address, "engine started");
        Ok(engine)
    }

    /// Whether somebody listens on `address` already. An engine can listen beside another process's (SO_REUSEPORT), and
    /// gets its share of the new connections at once.
    pub fn is_served(address: SocketAddr) -> bool {
        listener::is_taken(address)
    }

    /// The address all shards listen on, with the port that was found.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// The driver in use; the same on every shard.
    pub fn driver(&self) -> &DriverReport {
        &self.driver
    }

    /// Counters of each shard, in order.
    pub fn stats(&self) -> Vec<ShardStats> {
        self.shards.iter().map(|shard| shard.counters.read()).collect()
    }

    /// Stops accepting, closes idle connections; running exchanges finish and their connections close after them.
    /// Returns at once; watch [`Engine::requests_active`] and [`Engine::connections_open`].
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
        for shard in &self.shards {
            let _ = shard.mailbox.try_send(Message::Drain);
        }
    }

    /// The first shard that serves nobody new any more though it was not told to drain: its thread has ended by itself, or
    /// the task that accepts has.
    pub fn ended_shard(&self) -> Option<usize> {
        let is_draining = self.draining.load(Ordering::Relaxed);
        let has_ended = |shard: &Handle| {
            shard.thread.as_ref().is_none_or(JoinHandle::is_finished)
                || (!is_draining && shard.counters.accepting.get() == 0)
        };
        self.shards.iter().position(has_ended)
    }

    /// Whether any shard still takes connections.
    pub fn is_accepting(&self) -> bool {
        self.shards.iter().any(|shard| shard.counters.accepting.get() > 0)
    }

    pub fn requests_active(&self) -> u64 {
        self.shards.iter().map(|shard| shard.counters.requests_active.get()).sum()
    }

    pub fn connections_open(&self) -> u64 {
        self.shards.iter().map(|shard| shard.counters.connections_open.get()).sum()
    }

    /// Ends all shards, dropping whatever still runs, and joins their threads.
    pub fn stop(self) {
        drop(self);
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        for shard in &self.shards {
            let _ = shard.mailbox.try_send(Message::Stop);
        }
        for shard in &mut self.shards {
            if let Some(thread) = shard.thread.take() {
                // A panic has been reported by the thread itself.
                let _ = thread.join();
            }
        }
    }
}

/// Binds every shard's socket before any shard runs, so that all share one port and an error comes early.
fn bind_all(config: &EngineConfig) -> Result<(Vec<OwnedFd>, SocketAddr), StartError> {
    let failed = |source| StartError::Listen { address: config.listen, source };
    let (first, address) = listener::bind(config.listen).map_err(failed)?;
    let mut sockets = vec![first];
    for _ in 1..config.shards {
        sockets.push(listener::bind(address).map_err(failed)?.0);
    }
    Ok((sockets, address))
}

/// What a shard's thread starts from.
struct Seed {
    index: usize,
    socket: OwnedFd,
    config: EngineConfig,
    counters: Arc<ShardCounters>,
    mailbox: (mailbox::Sender, mailbox::Receiver),
}

type Started = mpsc::Sender<Result<DriverReport, StartError>>;

fn run_shard<S: Service>(seed: Seed, make_service: &dyn Fn(ShardContext) -> S, started: Started) {
    let index = seed.index;
    pin_thread(&seed);
    let runtime_failed = |source| StartError::Runtime { shard: index, source };
    let (mut runtime, report) = match ShardRuntime::build(seed.config.driver) {
        Ok(built) => built,
        Err(error) => return drop(started.send(Err(runtime_failed(error)))),
    };
    if seed.config.require_io_uring && report.name != "io_uring" {
        let reason =
            report.fallback_reason.unwrap_or_else(|| String::from("epoll was asked for, io_uring is required"));
        return drop(started.send(Err(StartError::IoUringRequired(reason))));
    }
    runtime.block_on(async move {
        let listener = match Listener::adopt(seed.socket) {
            Ok(listener) => listener,
            Err(error) => return drop(started.send(Err(runtime_failed(error)))),
        };
        let (sender, receiver) = seed.mailbox;
        let upstream = Upstream::new(seed.config.upstream.clone(), seed.counters.clone());
        let mailbox = Mailbox::new(sender);
        let shard = Rc::new(Shard {
            limits: seed.config.limits.clone(),
            tls: seed.config.tls.clone(),
            counters: seed.counters,
            draining: std::cell::Cell::new(false),
        });
        shard::enter(&shard);
        let period = sweep_period(&seed.config.limits, &seed.config.upstream);
        clock::set_period(period);
        clock::set_heads_open_max(seed.config.limits.half_open_max);
        let context = ShardContext { shard: index, upstream: upstream.clone(), mailbox: mailbox.clone() };
        let service = Rc::new(make_service(context));
        let accepting = Accepting::new(&shard.counters);
        shard::spawn_watchful(accept(listener, shard.clone(), service, accepting));
        let _ = started.send(Ok(report));
        // A channel without senders tells `start` that a shard died without a report.
        drop(started);
        main_loop(&shard, &upstream, &mailbox, &receiver, period).await;
        end(&upstream).await;
    });
}

/// Failing to pin costs speed, not correctness: the CPU may be outside of this process's set.
fn pin_thread(seed: &Seed) {
    let Some(cpus) = seed.config.cpus.as_ref().filter(|cpus| !cpus.is_empty()) else { return };
    let cpu = cpus[seed.index % cpus.len()];
    let mut set = rustix::thread::CpuSet::new();
    let pinned = if cpu < rustix::thread::CpuSet::MAX_CPU {
        set.set(cpu);
        rustix::thread::sched_setaffinity(None, &set)
    } else {
        Err(rustix::io::Errno::INVAL)
    };
    if let Err(error) = pinned {
        tracing::warn!(shard = seed.index, cpu, %error, "cannot pin the shard's thread; it runs unpinned");
    }
}

/// The only task that other threads wake. It empties the mailbox in batches and sweeps the clock; nothing else here may
/// take long. Returns when the shard is to stop.
async fn main_loop(
    shard: &Rc<Shard>,
    upstream: &Upstream,
    mailbox: &Mailbox,
    receiver: &mailbox::Receiver,
    period: Duration,
) {
    let mut tick = pin!(net::sleep(period));
    let mut trim = Trim::default();
    loop {
        let mut next = pin!(receiver.recv());
        let first = std::future::poll_fn(|cx| {
            // Until a poll leaves the timer armed. On a loaded machine a short period can pass between making a timer
            // and its first poll; taken as armed then, it would never wake this task again and all timeouts would stop.
            while tick.as_mut().poll(cx).is_ready() {
                clock::sweep();
                shard.counters.sweeps.add(1);
                upstream.reap();
                trim.sweep(&shard.counters);
                tick.set(net::sleep(period));
            }
            next.as_mut().poll(cx)
        })
        .await;
        let mut message = first.ok();
        while let Some(received) = message {
            match received {
                Message::Completed(id, result) => mailbox.deliver(id, result),
                Message::Drain => {
                    shard.draining.set(true);
                    clock::drain();
                    upstream.clear();
                }
                Message::Stop => return,
            }
            message = receiver.try_recv().ok();
        }
    }
}

/// Ends every task and waits until the kernel has given their operations back: a runtime that is dropped with
/// operations in flight leaks its descriptors.
async fn end(upstream: &Upstream) {
    clock::stop();
    let deadline = Instant::now() + STOP_GRACE;
    while shard::tasks_alive() > 0 && Instant::now() < deadline {
        net::sleep(Duration::from_millis(1)).await;
    }
    upstream.clear();
    // Two rounds through the ring: one submits the cancellations, one reaps the closes that follow them.
    net::sleep(Duration::from_millis(2)).await;
    net::sleep(Duration::from_millis(2)).await;
}

/// Counts a shard that takes connections.
struct Accepting(Arc<ShardCounters>);

impl Accepting {
    fn new(counters: &Arc<ShardCounters>) -> Self {
        counters.accepting.add(1);
        Self(counters.clone())
    }
}

impl Drop for Accepting {
    fn drop(&mut self) {
        self.0.accepting.subtract(1);
    }
}

/// The one task that accepts. It waits by readiness, so that ending it loses no connection and no descriptor.
async fn accept<S: Service>(listener: Listener, shard: Rc<Shard>, service: Rc<S>, _accepting: Accepting) {
    let slot = Slot::new();
    slot.set_idle(true);
    let mut failing = false;
    let mut closes_at: Option<Instant> = None;
    loop {
        let limit = closes_at.map(|time| time.saturating_duration_since(Instant::now()));
        let waited = slot.within(limit, pin!(listener.readable())).await;
        for _ in 0..ACCEPTS_PER_TURN {
            match listener.try_accept() {
                Ok((stream, peer)) => {
                    failing = false;
                    admit(stream, peer, &shard, &service);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                // The connection was broken before we came to it.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    if !std::mem::replace(&mut failing, true) {
                        tracing::warn!(%error, "cannot accept connections; trying again");
                    }
                    net::sleep(ACCEPT_BACK_OFF).await;
                    break;
                }
            }
        }
        match waited {
            Ok(_) => {}
            // Closing the socket would reset whoever is in its queue or half through a handshake. So nobody new comes in
            // for a moment in which all of these are taken over; then there is nobody left to reset.
            Err(Fired::Drained) if listener.drop_new_handshakes().is_ok() => {
                slot.set_idle(false);
                closes_at = Some(Instant::now() + CLOSING_GRACE);
            }
            Err(Fired::Drained | Fired::Expired | Fired::Stopped) => return,
        }
    }
}

fn admit<S: Service>(stream: net::Stream, peer: SocketAddr, shard: &Rc<Shard>, service: &Rc<S>) {
    shard.counters.connections_accepted.add(1);
    if shard.counters.connections_open.get() < shard.limits.connections_max as u64 {
        let open = Level::open_connection(shard);
        let (own, service) = (shard.clone(), service.clone());
        match &shard.tls {
            None => shard::spawn_watchful(connection::serve(own, service, stream, peer, open)),
            Some(_) => shard::spawn_watchful(connection::serve_secure(own, service, stream, peer, open)),
        }
        return;
    }
    shard.counters.rejections.add(1);
    let rejection = Rejection {
        kind: RejectionKind::TooManyConnections,
        status: StatusCode::SERVICE_UNAVAILABLE,
        reason: "too many connections",
        peer,
    };
    // Best effort: whoever is over the cap gets what fits into an empty socket buffer. A handshake is what a connection
    // too many must not cost.
    if shard.tls.is_none() {
        let _ = stream.try_send(&connection::rejection_bytes(&**service, &rejection));
    }
    stream.shutdown_write();
}
