//! The ingest core: one thread that owns every KV-event subscription, the load ledger and the fleet, and publishes the view
//! that shards read. Never touches a request.

mod core;
mod doorbell;
mod publication;
#[cfg(test)]
mod publication_tests;
mod rank;
mod registry;
mod release;
pub mod self_heal;
pub mod socket;

/// What the publication is built from; another one under the model of every interleaving.
mod sync {
    pub use std::sync::Arc;
    pub type Cell<V> = arc_swap::ArcSwap<V>;
}

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use crossbeam::channel::Sender;

use self::core::Core;
pub use self::doorbell::FleetUpdates;
use self::doorbell::Inbox;
use crate::index::view::Number;
use crate::index::{SharedView, View};
use crate::load::LedgerSink;
use crate::parity::{Divergence, ParityCounts};

#[derive(Clone, Debug)]
pub struct IngestConfig {
    /// CPU that the core is pinned to; `None` leaves it to the scheduler.
    pub cpu: Option<usize>,
    /// Whether to listen to KV events at all; a policy that does not look at the cache needs none.
    pub subscribe: bool,
    /// Who explains requests whose worker has shown other tokens than the router's; absent when nobody listens.
    pub divergences: Option<Sender<Divergence>>,
    /// Shortest time between two publications. After a quiet time a change is published at once.
    pub publish_interval: Duration,
}

impl Default for IngestConfig {
    fn default() -> Self {
        Self { cpu: None, subscribe: true, divergences: None, publish_interval: Duration::from_millis(1) }
    }
}

/// Counters of the core itself; those of each rank are in [`View::ranks`]. Written by the core only.
#[derive(Debug)]
pub struct IngestStats {
    started: Instant,
    /// Turns of the loop; stands still while nothing happens.
    pub turns: Number,
    pub publications: Number,
    pub ledger_messages: Number,
    pub fleet_updates: Number,
    /// Former views that a reader still holds.
    pub views_retired: Number,
    /// Distinct blocks in the index, and the runs they lie in.
    pub index_blocks: Number,
    pub index_runs: Number,
    pub parity: Arc<ParityCounts>,
}

impl IngestStats {
    fn new() -> Self {
        Self {
            started: Instant::now(),
            turns: Number::default(),
            publications: Number::default(),
            ledger_messages: Number::default(),
            fleet_updates: Number::default(),
            views_retired: Number::default(),
            index_blocks: Number::default(),
            index_runs: Number::default(),
            parity: Arc::default(),
        }
    }

    /// Nanoseconds on the ingest clock, which the ranks' `last_message_ns` is read from. Never 0.
    pub fn now_ns(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX).max(1)
    }
}

/// The running core. Dropping it stops the thread.
pub struct IngestHandle {
    pub view: SharedView,
    pub fleet_updates: FleetUpdates,
    pub ledger: Arc<dyn LedgerSink>,
    pub stats: Arc<IngestStats>,
    inbox: Arc<Inbox>,
    thread: Option<JoinHandle<()>>,
}

/// Starts and stops the core.
pub struct Ingest;

impl Ingest {
    pub fn start(config: IngestConfig) -> std::io::Result<IngestHandle> {
        let inbox = Arc::new(Inbox::new()?);
        let stats = Arc::new(IngestStats::new());
        let view: SharedView = Arc::new(ArcSwap::from_pointee(View::default()));
        let core = (inbox.clone(), stats.clone(), view.clone());
        let thread = std::thread::Builder::new().name("ingest".to_owned()).spawn(move || {
            if let Some(cpu) = config.cpu {
                pin(cpu);
            }
            let (inbox, stats, view) = core;
            Core::new(config, inbox, stats, view).run();
        })?;
        Ok(IngestHandle {
            view,
            fleet_updates: FleetUpdates(inbox.clone()),
            ledger: inbox.clone(),
            stats,
            inbox,
            thread: Some(thread),
        })
    }
}

/// Before any socket is opened: ZMQ's own threads inherit the CPU, and so stay away from the shards.
fn pin(cpu: usize) {
    let mut cpus = rustix::thread::CpuSet::new();
    if cpu < rustix::thread::CpuSet::MAX_CPU {
        cpus.set(cpu);
    }
    if let Err(error) = rustix::thread::sched_setaffinity(None, &cpus) {
        tracing::warn!(cpu, %error, "cannot pin the ingest core");
    }
}

impl IngestHandle {
    /// Stops the core and waits for it. False if the thread had panicked.
    pub fn stop(mut self) -> bool {
        self.join()
    }

    /// Whether the core still runs. Without it the fleet, the mirrors and the loads stand still for ever.
    pub fn is_running(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    fn join(&mut self) -> bool {
        self.inbox.stop.store(true, Ordering::Release);
        self.inbox.bell.ring();
        self.thread.take().is_none_or(|thread| thread.join().is_ok())
    }
}

impl Drop for IngestHandle {
    fn drop(&mut self) {
        self.join();
    }
}
