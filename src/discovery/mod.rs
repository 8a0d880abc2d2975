//! Discovery: one control thread that knows which workers there are. It reads the sources (command line, workers
//! file, etcd), completes what a record leaves open by asking the engine, resolves names, and hands every changed
//! set to one callback. It never touches a request, and trouble with a source never empties the fleet.
//!
//! Policies:
//! - A source that is away or damaged keeps its last set in force, for as long as it takes; the state is `degraded`.
//! - A malformed record is skipped and counted. Over a good record of the same key it changes nothing.
//! - A single departure acts at once. Workers that vanish together, just after an outage of etcd, or from an etcd that
//!   started over (another cluster, or a lower revision) are kept while they answer `/health`, for `departure_grace` at
//!   most; registering again ends the keeping. See `departures`.
//! - A worker is pending, with the reason, until its model and address are known. Asking never ends: an engine that
//!   is replaced at the same address is found out by its answers.
//! - A worker named twice (by id, or by URL and rank) is one worker; see `source::merge`.

mod ask;
mod attendant;
mod departures;
mod etcd;
mod facts;
mod file;
mod own;
mod registry;
mod render_probe;
mod source;
mod status;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use infera_shards::ClientTls;
use rustls::pki_types::TrustAnchor;

use crate::fleet::DiscoveredWorker;
use crate::limits;
use crate::prompt::Prompter;
use crate::worker::WorkerRecord;

/// Where workers come from. Sources add up: a worker named by more than one of them is one worker.
#[derive(Clone, Debug, Default)]
pub struct DiscoveryConfig {
    /// Workers of the command line; members left open (model, block size, …) are asked for.
    pub workers: Vec<WorkerRecord>,
    /// JSON array of registration records, read again when its content changes.
    pub workers_file: Option<PathBuf>,
    pub etcd: Option<EtcdConfig>,
    /// Take each worker's own template arguments, and ask engines for them.
    pub template_arguments: bool,
    pub timing: Timing,
    /// Where this router listens itself: a worker there would be sent its own requests again and again. Port 0 says nothing.
    pub own_listeners: Vec<SocketAddr>,
    /// Sent to engines with every question, where they have a key.
    pub authorization: Option<http::HeaderValue>,
    /// How the certificates of `https` workers are judged when they are asked.
    pub tls: ClientTls,
}

/// The registry of the system this one replaces: one key per worker below a prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdConfig {
    /// `http[s]://host:port`, tried in turn.
    pub endpoints: Vec<String>,
    /// What the certificates of `https` endpoints must lead to.
    pub roots: Vec<TrustAnchor<'static>>,
    /// Ends in `/`.
    pub prefix: String,
}

/// Every period of the discovery thread. The defaults are the product's; tests shorten them.
#[derive(Clone, Debug, PartialEq)]
pub struct Timing {
    /// Between two looks at the workers file.
    pub file_poll: Duration,
    /// Between two resolutions of a worker's host name.
    pub resolve_every: Duration,
    /// First and longest pause between two questions to a worker that has not answered.
    pub ask_backoff: (Duration, Duration),
    /// Between two questions to a worker whose facts came from asking: it may be restarted with another model.
    pub ask_again_every: Duration,
    /// One question, connection included.
    pub ask_timeout: Duration,
    /// First and longest pause between two attempts to reach etcd.
    pub etcd_backoff: (Duration, Duration),
    /// Connecting to etcd, and one list.
    pub etcd_timeout: Duration,
    /// Between two progress requests on a quiet watch.
    pub etcd_progress_every: Duration,
    /// A watch that says nothing for this long, progress included, is given up.
    pub etcd_silence_max: Duration,
    /// How long workers that vanished together are kept while they still answer.
    pub departure_grace: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Timing {
            file_poll: Duration::from_secs(1),
            resolve_every: Duration::from_secs(30),
            ask_backoff: (Duration::from_millis(500), Duration::from_secs(10)),
            ask_again_every: Duration::from_secs(30),
            ask_timeout: Duration::from_secs(5),
            etcd_backoff: (Duration::from_millis(250), Duration::from_secs(5)),
            etcd_timeout: Duration::from_secs(5),
            etcd_progress_every: Duration::from_secs(2),
            etcd_silence_max: Duration::from_secs(8),
            departure_grace: Duration::from_secs(60),
        }
    }
}

/// Reads a workers file as the thread would, once: what it would leave out, or why nothing of the file can be used.
pub fn check_workers_file(path: &Path) -> Result<Vec<String>, String> {
    let workers = file::read(path)?;
    Ok(workers.problems.into_iter().chain(workers.notes).collect())
}

/// How far discovery can be trusted right now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Every source was heard of recently.
    Ok,
    /// A source is away or damaged, or vanished workers are being kept; the last set is served.
    Degraded,
    /// A source has never been read since the start, or the thread has ended.
    Down,
}

impl State {
    pub const fn as_str(self) -> &'static str {
        match self {
            State::Ok => "ok",
            State::Degraded => "degraded",
            State::Down => "down",
        }
    }
}

/// One moment of discovery, for `/metrics`, `/ready` and the log.
#[derive(Clone, Debug, PartialEq)]
pub struct Status {
    pub state: State,
    /// Why the state is not `ok`; empty otherwise.
    pub reason: String,
    /// Time since the slowest source was last heard of; absent when there is none to hear of (command line
    /// only) or none has answered so far.
    pub last_contact_age: Option<Duration>,
    /// Records skipped since the start: malformed, duplicate keys, out of range.
    pub records_skipped_total: u64,
    /// Workers in the last published set, and those of them that are pending.
    pub workers: usize,
    pub workers_pending: usize,
}

/// What may change while the thread runs.
#[derive(Clone, Debug)]
pub struct Replacement {
    pub workers: Vec<WorkerRecord>,
    pub workers_file: Option<PathBuf>,
    pub authorization: Option<http::HeaderValue>,
}

/// A handle for changes; outlives the thread without harm.
#[derive(Clone)]
pub struct DiscoveryControl(tokio::sync::mpsc::Sender<registry::Message>);

impl DiscoveryControl {
    /// Puts the new workers and key in force, and looks at the workers file at once, whatever its age.
    pub fn replace(&self, replacement: Replacement) {
        // Waits where the thread is behind; fails only once it has ended, which its status says.
        let _ = self.0.blocking_send(registry::Message::Replace(replacement));
    }
}

/// The running discovery thread. Dropping the handle stops it.
pub struct DiscoveryHandle {
    control: DiscoveryControl,
    shared: std::sync::Arc<status::Shared>,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

/// Namespace of [`Discovery::start`].
pub struct Discovery;

impl Discovery {
    /// Starts the thread. `on_update` is called on it with every set that differs from the one before, sorted by
    /// worker id, never with a set that trouble with a source made smaller; the first call comes as soon as
    /// something is known. Fails only when the thread or its runtime cannot be created.
    pub fn start(
        config: DiscoveryConfig,
        on_update: impl Fn(Vec<DiscoveredWorker>) + Send + 'static,
    ) -> std::io::Result<DiscoveryHandle> {
        Self::start_with(config, None, on_update)
    }

    /// The same, and each worker is asked whether it renders prompts as `prompter` does.
    pub fn start_with(
        config: DiscoveryConfig,
        prompter: Option<Arc<Prompter>>,
        on_update: impl Fn(Vec<DiscoveredWorker>) + Send + 'static,
    ) -> std::io::Result<DiscoveryHandle> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .thread_name("discovery-wait")
            .max_blocking_threads(limits::DISCOVERY_BLOCKING_THREADS)
            .build()?;
        let shared = std::sync::Arc::new(status::Shared::new(&config));
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let (queue, messages) = tokio::sync::mpsc::channel(limits::DISCOVERY_QUEUE_MESSAGES);
        let control = DiscoveryControl(queue.clone());
        let thread_shared = shared.clone();
        let thread = std::thread::Builder::new().name("discovery".to_owned()).spawn(move || {
            let _ended = Ended(thread_shared.clone());
            runtime.block_on(registry::run(config, thread_shared, prompter, on_update, (queue, messages), stopped));
            // A resolver call may hang for its own long timeout; it holds nothing that matters.
            runtime.shutdown_background();
        })?;
        Ok(DiscoveryHandle { control, shared, stop: Some(stop), thread: Some(thread) })
    }
}

/// Says so when the thread ends, by a panic too.
struct Ended(std::sync::Arc<status::Shared>);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.ended();
    }
}

impl DiscoveryHandle {
    pub fn status(&self) -> Status {
        self.shared.snapshot(std::time::Instant::now())
    }

    pub fn control(&self) -> DiscoveryControl {
        self.control.clone()
    }

    /// A cheap handle on the status for threads that outlive this value.
    pub fn status_reader(&self) -> impl Fn() -> Status + Clone + Send + Sync + 'static {
        let shared = self.shared.clone();
        move || shared.snapshot(std::time::Instant::now())
    }

    /// Ends the thread and waits for it; the callback is not called afterwards.
    pub fn stop(mut self) {
        self.shutdown();
    }

    fn shutdown(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the discovery thread panicked");
        }
    }
}

impl Drop for DiscoveryHandle {
    fn drop(&mut self) {
        self.shutdown();
    }
}

#[cfg(test)]
mod tests;
