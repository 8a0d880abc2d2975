//! etcd as a source: list, then watch from the next revision; any end of the watch (clean, error, compaction,
//! cancelled, silent server) goes back to the list after a capped, jittered pause. The last set stays in force
//! all the while.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use etcd_client::{Client, ConnectOptions, EventType, GetOptions, KeyValue, TlsOptions, WatchOptions, WatchResponse};
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::registry::Message;
use super::source::{Registration, Set};
use super::status::{Shared, SourceKind};
use super::{EtcdConfig, Timing};
use crate::limits;
use crate::worker::WorkerRecord;

/// After an outage the registry revokes leases it could not see being renewed; departures within this time are
/// put down to that.
const SUSPECT_AFTER_OUTAGE: Duration = Duration::from_secs(15);

/// Why a session with one endpoint ended. All of them are followed by another session.
#[derive(Debug)]
enum End {
    Failed(String),
    /// The registry loop is gone; the thread is stopping.
    Stopped,
}

impl From<etcd_client::Error> for End {
    fn from(error: etcd_client::Error) -> Self {
        End::Failed(error.to_string())
    }
}

/// The source's memory across sessions.
pub(super) struct EtcdSource {
    config: EtcdConfig,
    timing: Timing,
    queue: mpsc::Sender<Message>,
    shared: Arc<Shared>,
    /// By key below the prefix.
    workers: BTreeMap<String, Arc<Registration>>,
    /// Cluster and revision of the newest thing seen.
    position: Option<(u64, i64)>,
    last_contact: Option<Instant>,
    suspect_until: Option<Instant>,
}

impl EtcdSource {
    pub fn new(config: EtcdConfig, timing: Timing, queue: mpsc::Sender<Message>, shared: Arc<Shared>) -> Self {
        EtcdSource {
            config,
            timing,
            queue,
            shared,
            workers: BTreeMap::new(),
            position: None,
            last_contact: None,
            suspect_until: None,
        }
    }

    /// Runs until the registry loop is gone.
    pub async fn run(mut self) {
        let (first, longest) = self.timing.etcd_backoff;
        let mut pause = first;
        let mut last_problem = String::new();
        for turn in 0.. {
            let endpoint = self.config.endpoints[turn % self.config.endpoints.len()].clone();
            let began = Instant::now();
            let problem = match self.session(&endpoint, &mut last_problem).await {
                End::Stopped => return,
                End::Failed(problem) => format!("{endpoint}: {problem}"),
            };
            self.shared.trouble(SourceKind::Etcd, problem.clone());
            if problem != last_problem {
                tracing::warn!("etcd {problem}; the last known workers stay in force");
                last_problem = problem;
            }
            // Only a session that lasted proves the endpoint well: one that lists and then loses its watch at
            // once, for ever, must not be retried in a tight loop.
            if began.elapsed() > longest * 2 {
                pause = first;
            }
            tokio::time::sleep(pause.mul_f64(0.5 + fastrand::f64())).await;
            pause = (pause * 2).min(longest);
        }
    }

    async fn session(&mut self, endpoint: &str, last_problem: &mut String) -> End {
        match self.list_and_watch(endpoint, last_problem).await {
            Ok(never) => match never {},
            Err(end) => end,
        }
    }

    async fn list_and_watch(&mut self, endpoint: &str, last_problem: &mut String) -> Result<Never, End> {
        let limit = self.timing.etcd_timeout;
        // A member cut off from its quorum would go on serving an empty watch; asking for a leader ends it.
        let mut options = ConnectOptions::new().with_connect_timeout(limit).with_require_leader(true);
        if endpoint.starts_with("https:") {
            options = options.with_tls(TlsOptions::new().trust_anchors(self.config.roots.iter().cloned()));
        }
        let client = in_time(limit, "connect", Client::connect([endpoint], Some(options))).await?;
        let mut kv = client.kv_client().max_decoding_message_size(limits::ETCD_MESSAGE_BYTES_MAX);
        let prefix = self.config.prefix.clone();
        let listed = in_time(limit, "list", kv.get(prefix, Some(GetOptions::new().with_prefix()))).await?;
        let Some(header) = listed.header() else { return Err(End::Failed("list: no header".to_owned())) };
        let (cluster, revision) = (header.cluster_id(), header.revision());
        self.note_contact();
        self.take_list(cluster, revision, listed.kvs());
        self.publish().await?;
        tracing::info!(endpoint, revision, workers = self.workers.len(), "etcd listed");
        last_problem.clear();
        self.watch(&client, revision + 1).await
    }

    /// Follows the prefix from `first_revision` until the watch is lost in any way.
    async fn watch(&mut self, client: &Client, first_revision: i64) -> Result<Never, End> {
        let limit = self.timing.etcd_timeout;
        let mut watcher = client.watch_client().max_decoding_message_size(limits::ETCD_MESSAGE_BYTES_MAX);
        let options = WatchOptions::new()
            .with_prefix()
            .with_start_revision(first_revision)
            .with_progress_notify()
            .with_fragment();
        let stream = in_time(limit, "watch", watcher.watch(self.config.prefix.clone(), Some(options))).await?;
        // Both halves are held to the end: dropping the request half makes the server end the stream.
        let (mut requests, mut responses) = stream.split();
        let mut progress = tokio::time::interval(self.timing.etcd_progress_every);
        progress.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        // Silence is counted in questions, not in time: a thread that was busy or stopped for long has asked nothing
        // meanwhile, and must not take that for the server's silence.
        let mut unanswered = 0;
        loop {
            tokio::select! {
                biased;
                message = responses.message() => {
                    let Some(message) = message? else { return Err(End::Failed("the watch ended".to_owned())) };
                    unanswered = 0;
                    if message.canceled() {
                        return Err(End::Failed(cancelled(&message)));
                    }
                    self.note_contact();
                    if self.take_events(&message) {
                        self.publish().await?;
                    }
                }
                _ = progress.tick() => {
                    let silence = self.timing.etcd_progress_every * unanswered;
                    if silence >= self.timing.etcd_silence_max {
                        return Err(End::Failed(format!("no sign of life for {} s", silence.as_secs_f32())));
                    }
                    unanswered += 1;
                    in_time(limit, "progress request", requests.request_progress()).await?;
                }
            }
        }
    }

    /// The server answered. A longer gap before that means that it could not see leases being renewed either.
    fn note_contact(&mut self) {
        let now = Instant::now();
        let gap_normal = self.timing.etcd_progress_every * 2;
        if self.last_contact.is_some_and(|contact| now - contact > gap_normal) {
            self.suspect_until = Some(now + SUSPECT_AFTER_OUTAGE);
        }
        self.last_contact = Some(now);
        self.shared.contact(SourceKind::Etcd, now);
    }

    fn take_list(&mut self, cluster: u64, revision: i64, listed: &[KeyValue]) {
        if let Some((known_cluster, known_revision)) = self.position
            && (cluster != known_cluster || revision < known_revision)
        {
            // Data lost or another cluster: its silence about a worker says nothing, so missing workers get the
            // grace time to register again.
            tracing::warn!(revision, known_revision, "etcd started over; known workers are kept while they answer");
            self.suspect_until = Some(Instant::now() + SUSPECT_AFTER_OUTAGE);
        }
        self.position = Some((cluster, revision));
        let mut known = std::mem::take(&mut self.workers);
        for entry in listed {
            let Some(name) = self.name(entry.key()) else { continue };
            // A key whose new value is bad keeps the record it had.
            if let Some(old) = known.remove(&name) {
                self.workers.insert(name.clone(), old);
            }
            self.put(name, entry);
        }
    }

    /// Returns whether anything changed.
    fn take_events(&mut self, message: &WatchResponse) -> bool {
        if let (Some(header), Some((cluster, revision))) = (message.header(), self.position) {
            self.position = Some((cluster, revision.max(header.revision())));
        }
        let mut changed = false;
        for event in message.events() {
            let Some(entry) = event.kv() else { continue };
            let Some(name) = self.name(entry.key()) else { continue };
            changed |= match event.event_type() {
                EventType::Put => self.put(name, entry),
                EventType::Delete => self.workers.remove(&name).is_some(),
            };
        }
        changed
    }

    fn name(&self, key: &[u8]) -> Option<String> {
        let name = key.strip_prefix(self.config.prefix.as_bytes())?;
        Some(String::from_utf8_lossy(name).into_owned())
    }

    fn put(&mut self, name: String, entry: &KeyValue) -> bool {
        let known = self.workers.get(&name);
        if known.is_none() && self.workers.len() >= limits::WORKERS_MAX {
            self.shared.skipped(1);
            tracing::warn!(key = name, "registration skipped: more than {} workers", limits::WORKERS_MAX);
            return false;
        }
        match WorkerRecord::parse(entry.value()) {
            Ok(parsed) => {
                let freshness = entry.mod_revision();
                // Not by the revision alone: in another cluster, or one that lost its data, it counts something else.
                if known.is_some_and(|known| known.freshness == freshness && known.record == parsed.record) {
                    return false;
                }
                for note in parsed.notes {
                    tracing::warn!(key = name, "registration: {note}");
                }
                let registration = Registration { source: SourceKind::Etcd, record: parsed.record, freshness };
                self.workers.insert(name, Arc::new(registration));
                true
            }
            Err(error) => {
                self.shared.skipped(1);
                tracing::warn!(key = name, "registration skipped: {error}");
                false
            }
        }
    }

    async fn publish(&self) -> Result<(), End> {
        let set = Set {
            registrations: self.workers.values().cloned().collect(),
            departures_suspect: self.suspect_until.is_some_and(|until| Instant::now() < until),
        };
        self.queue.send(Message::Source(SourceKind::Etcd, set)).await.map_err(|_| End::Stopped)
    }
}

/// A session has no good end.
#[derive(Debug)]
enum Never {}

fn cancelled(message: &WatchResponse) -> String {
    match message.compact_revision() {
        0 => format!("the watch was cancelled: {}", message.cancel_reason()),
        revision => format!("the watch fell behind compaction at revision {revision}"),
    }
}

async fn in_time<T>(
    limit: Duration,
    what: &str,
    step: impl Future<Output = Result<T, etcd_client::Error>>,
) -> Result<T, End> {
    match timeout(limit, step).await {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(End::Failed(format!("{what}: {error}"))),
        Err(_) => Err(End::Failed(format!("{what}: no answer within {} s", limit.as_secs_f32()))),
    }
}

#[cfg(test)]
mod tests;
