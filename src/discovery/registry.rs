//! The discovery thread's main loop: takes whole sets from the sources and reports from the attendants, keeps one
//! entry per worker, and publishes what has changed. Everything it owns is touched by this loop alone.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio::task::AbortHandle;

use super::ask::{self, Open};
use super::attendant::{self, Tools};
use super::departures::Departures;
use super::facts::Facts;
use super::own::is_own;
use super::source::{Registration, Set, merge};
use super::status::{Shared, SourceKind};
use super::{DiscoveryConfig, Replacement, etcd::EtcdSource, file};
use crate::fleet::{DiscoveredWorker, Parity, WorkerState};
use crate::limits;
use crate::prompt::Prompter;
use crate::worker::WorkerRecord;

/// Before a source that panicked is started again.
const RESTART_PAUSE: Duration = Duration::from_secs(1);

/// One stay of a worker in the set; a report carries it so that a former stay's is dropped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Visit {
    pub worker_id: Arc<str>,
    pub number: u64,
}

/// Everything that reaches the loop.
pub(super) enum Message {
    Source(SourceKind, Set),
    Address(Visit, Result<SocketAddr, String>),
    /// Facts, or what was learnt before a question failed.
    Answer(Visit, Result<Facts, (Facts, String)>),
    /// How the worker renders, and why that is thought.
    Parity(Visit, Parity, String),
    /// Whether a kept worker answered.
    Probe(String, bool),
    /// The configuration was read again.
    Replace(Replacement),
}

/// A worker of the merged set.
struct Entry {
    registration: Arc<Registration>,
    visit: Visit,
    attendant: AbortHandle,
    /// Its engine is asked, so that what is known of it is set right in time.
    is_asked: bool,
    facts: Facts,
    /// Why the last round of questions failed.
    unanswered: Option<String>,
    address: Result<SocketAddr, String>,
    parity: Parity,
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.attendant.abort();
    }
}

impl Entry {
    fn discovered(&self, config: &DiscoveryConfig) -> DiscoveredWorker {
        let mut record = self.facts.complete(&self.registration.record);
        if !config.template_arguments {
            record.default_chat_template_kwargs = None;
        }
        let state = match &self.address {
            Ok(address) if is_own(&config.own_listeners, *address) => {
                WorkerState::Pending(format!("{address} is this router's own listener"))
            }
            address => state(&record, address, self.unanswered.as_deref()),
        };
        DiscoveredWorker { record, address: self.address.as_ref().ok().copied(), state, probed: self.parity }
    }
}

/// Whether requests may go to the worker, and if not, what is missing.
fn state(record: &WorkerRecord, address: &Result<SocketAddr, String>, unanswered: Option<&str>) -> WorkerState {
    if !record.is_active() {
        return WorkerState::Inactive;
    }
    if record.request_transport != "http" {
        return WorkerState::Pending(format!(
            "registered for request transport `{}`; this router speaks http",
            record.request_transport
        ));
    }
    if let Err(problem) = address {
        return WorkerState::Pending(format!("no address: {problem}"));
    }
    if record.model_name.is_empty() {
        return WorkerState::Pending(format!("model not known yet: {}", unanswered.unwrap_or("not asked so far")));
    }
    WorkerState::Active
}

struct Registry {
    config: DiscoveryConfig,
    shared: Arc<Shared>,
    tools: Tools,
    sets: BTreeMap<SourceKind, Vec<Arc<Registration>>>,
    /// etcd's set goes through the departure rule; the other sources mean what they say.
    departures: Departures,
    probes: BTreeMap<String, AbortHandle>,
    entries: BTreeMap<String, Entry>,
    visits: u64,
    published: Option<Vec<DiscoveredWorker>>,
    /// The file that the file source looks at; every write makes it look at once.
    workers_file: watch::Sender<Option<PathBuf>>,
}

/// Runs until `stopped` resolves.
pub(super) async fn run(
    config: DiscoveryConfig,
    shared: Arc<Shared>,
    prompter: Option<Arc<Prompter>>,
    on_update: impl Fn(Vec<DiscoveredWorker>),
    (queue, mut messages): (mpsc::Sender<Message>, mpsc::Receiver<Message>),
    mut stopped: oneshot::Receiver<()>,
) {
    let client = match ask::client(config.timing.ask_timeout, config.authorization.as_ref(), &config.tls) {
        Ok(client) => Arc::new(ArcSwap::from_pointee(client)),
        Err(error) => {
            tracing::error!("no HTTP client for asking workers: {error}");
            return;
        }
    };
    let questions = Arc::new(Semaphore::new(limits::ENGINE_QUESTIONS_MAX));
    let (timing, template_arguments) = (config.timing.clone(), config.template_arguments);
    let tools = Tools { client, questions, timing, queue: queue.clone(), prompter, template_arguments };
    let workers_file = watch::Sender::new(config.workers_file.clone());
    start_sources(&config, &workers_file, &shared, &queue);
    let mut registry = Registry::new(config, shared, tools, workers_file);
    if !registry.config.workers.is_empty() {
        registry.take_command_line();
    }
    registry.publish(&on_update);
    loop {
        let deadline = registry.departures.next_deadline();
        let expiry = async {
            match deadline {
                Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            _ = &mut stopped => return,
            message = messages.recv() => {
                let Some(message) = message else { return };
                // Reports come in bursts; what is waiting already belongs to the same publication.
                let waiting = std::iter::from_fn(|| messages.try_recv().ok()).take(limits::DISCOVERY_QUEUE_MESSAGES);
                newest_sets(std::iter::once(message).chain(waiting)).into_iter().for_each(|message| registry.take(message));
            }
            () = expiry => registry.expire(),
        }
        registry.publish(&on_update);
    }
}

/// Without the sets that a later one of the same source replaces: each is whole, and taking one over costs as much as the
/// fleet is large, so that a flood of registrations would cost its square. A suspicion is kept.
fn newest_sets(burst: impl Iterator<Item = Message>) -> Vec<Message> {
    let mut kept: Vec<Message> = Vec::new();
    for mut message in burst {
        if let Message::Source(kind, set) = &mut message
            && let Some(place) =
                kept.iter().position(|known| matches!(known, Message::Source(known, _) if known == kind))
            && let Message::Source(_, replaced) = kept.remove(place)
        {
            set.departures_suspect |= replaced.departures_suspect;
        }
        kept.push(message);
    }
    kept
}

fn start_sources(
    config: &DiscoveryConfig,
    workers_file: &watch::Sender<Option<PathBuf>>,
    shared: &Arc<Shared>,
    queue: &mpsc::Sender<Message>,
) {
    let (poll, file_queue, file_shared) = (config.timing.file_poll, queue.clone(), shared.clone());
    let path = workers_file.subscribe();
    tokio::spawn(supervise(SourceKind::File, shared.clone(), move || {
        file::run(path.clone(), poll, file_queue.clone(), file_shared.clone())
    }));
    if let Some(etcd) = config.etcd.clone() {
        let (timing, queue, shared) = (config.timing.clone(), queue.clone(), shared.clone());
        tokio::spawn(supervise(SourceKind::Etcd, shared.clone(), move || {
            EtcdSource::new(etcd.clone(), timing.clone(), queue.clone(), shared.clone()).run()
        }));
    }
}

/// Keeps a source running. A task that panics ends without a sound, and a source that is gone looks like one that has
/// nothing to say; client libraries do panic on answers they do not expect.
async fn supervise<F>(kind: SourceKind, shared: Arc<Shared>, start: impl Fn() -> F)
where
    F: Future<Output = ()> + Send + 'static,
{
    while let Err(error) = tokio::spawn(start()).await {
        if error.is_cancelled() {
            return;
        }
        tracing::error!(source = ?kind, "discovery source failed: {error}; started again");
        shared.trouble(kind, format!("failed: {error}"));
        tokio::time::sleep(RESTART_PAUSE).await;
    }
}

fn tell_parity(worker_id: &str, parity: Parity, detail: &str) {
    match parity {
        Parity::Diverged => tracing::warn!(
            worker_id,
            detail,
            "the worker renders prompts otherwise than this router: compare tokenizer and chat template"
        ),
        _ => tracing::info!(worker_id, parity = parity.as_str(), detail, "asked how the worker renders prompts"),
    }
}

impl Registry {
    fn new(
        config: DiscoveryConfig,
        shared: Arc<Shared>,
        tools: Tools,
        workers_file: watch::Sender<Option<PathBuf>>,
    ) -> Self {
        Registry {
            config,
            shared,
            tools,
            sets: BTreeMap::new(),
            departures: Departures::default(),
            probes: BTreeMap::new(),
            entries: BTreeMap::new(),
            visits: 0,
            published: None,
            workers_file,
        }
    }

    fn take_command_line(&mut self) {
        let registration = |record: &WorkerRecord| {
            Arc::new(Registration { source: SourceKind::CommandLine, record: record.clone(), freshness: 0 })
        };
        let registrations: Vec<_> = self.config.workers.iter().map(registration).collect();
        self.sets.insert(SourceKind::CommandLine, registrations);
        self.reconcile();
    }

    fn replace(&mut self, replacement: Replacement) {
        let Replacement { workers, workers_file, authorization } = replacement;
        if authorization != self.config.authorization {
            match ask::client(self.config.timing.ask_timeout, authorization.as_ref(), &self.config.tls) {
                Ok(client) => self.tools.client.store(Arc::new(client)),
                Err(error) => tracing::error!("no HTTP client with the new key: {error}; the former one stays"),
            }
            self.config.authorization = authorization;
        }
        if workers != self.config.workers {
            self.config.workers = workers;
            self.take_command_line();
        }
        self.shared.has_file(workers_file.is_some());
        self.workers_file.send_replace(workers_file);
    }

    fn take(&mut self, message: Message) {
        match message {
            Message::Source(SourceKind::Etcd, set) => {
                let grace = self.config.timing.departure_grace;
                self.departures.apply(set.registrations, set.departures_suspect, grace, Instant::now());
                self.take_departures();
            }
            Message::Source(kind, set) => {
                self.sets.insert(kind, set.registrations);
                self.reconcile();
            }
            Message::Replace(replacement) => self.replace(replacement),
            Message::Probe(id, alive) => {
                if self.departures.probed(&id, alive) {
                    tracing::info!(worker = id, "vanished worker does not answer any more; removed");
                    self.take_departures();
                }
            }
            Message::Address(visit, result) => {
                let Some(entry) = self.entry(&visit) else { return };
                match (&entry.address, result) {
                    // A resolver's bad moment does not move a worker.
                    (Ok(_), Err(problem)) => tracing::debug!(worker = %visit.worker_id, "not resolved: {problem}"),
                    (_, result) if result == entry.address => {}
                    (_, result) => {
                        entry.address = result.clone();
                        self.tell_if_own(&visit.worker_id, &result);
                    }
                }
            }
            Message::Parity(visit, parity, detail) => {
                let Some(entry) = self.entry(&visit) else { return };
                if parity != entry.parity {
                    tell_parity(&visit.worker_id, parity, &detail);
                }
                entry.parity = parity;
            }
            Message::Answer(visit, answer) => {
                let Some(entry) = self.entry(&visit) else { return };
                match answer {
                    Ok(facts) => {
                        if entry.facts != facts {
                            tracing::info!(worker = %visit.worker_id, ?facts, "worker answered");
                        }
                        (entry.facts, entry.unanswered) = (facts, None);
                    }
                    Err((facts, problem)) => {
                        // What it said before stays in force; a first, partial answer is better than none.
                        if entry.facts == Facts::default() {
                            entry.facts = facts;
                        }
                        if entry.unanswered.as_ref() != Some(&problem) {
                            tracing::info!(worker = %visit.worker_id, "worker does not say what it is yet: {problem}");
                        }
                        entry.unanswered = Some(problem);
                    }
                }
            }
        }
    }

    fn tell_if_own(&self, worker_id: &str, address: &Result<SocketAddr, String>) {
        if let Ok(address) = address
            && is_own(&self.config.own_listeners, *address)
        {
            tracing::warn!(worker = worker_id, "{address} is this router's own listener; it is no worker");
        }
    }

    fn entry(&mut self, visit: &Visit) -> Option<&mut Entry> {
        self.entries.get_mut(&*visit.worker_id).filter(|entry| entry.visit == *visit)
    }

    fn expire(&mut self) {
        if self.departures.expire(Instant::now()) {
            tracing::warn!("vanished workers did not register again in time; removed");
            self.take_departures();
        }
    }

    fn take_departures(&mut self) {
        let held: BTreeMap<String, Arc<Registration>> =
            self.departures.held().map(|(id, registration)| (id.clone(), registration.clone())).collect();
        self.probes.retain(|id, probe| {
            let keep = held.contains_key(id);
            if !keep {
                probe.abort();
            }
            keep
        });
        let new = held.iter().filter(|(id, _)| !self.probes.contains_key(*id)).collect::<Vec<_>>();
        if !new.is_empty() {
            tracing::warn!(workers = new.len(), "workers vanished together; kept while they answer");
        }
        for (id, registration) in new {
            let probe = attendant::probe(self.tools.clone(), registration.record.clone());
            self.probes.insert(id.clone(), tokio::spawn(probe).abort_handle());
        }
        self.shared.held(held.len());
        self.sets.insert(SourceKind::Etcd, self.departures.serving().cloned().collect());
        self.reconcile();
    }

    /// Brings the entries in line with the merged sets.
    fn reconcile(&mut self) {
        let merged = merge(self.sets.values().flatten());
        self.entries.retain(|id, _| merged.contains_key(id));
        for (id, registration) in merged {
            match self.entries.get_mut(&id) {
                // A heartbeat: written again, nothing new in it.
                Some(entry) if entry.registration.record == registration.record => {
                    entry.registration = registration;
                }
                // Another record is another stay with its own questions. At the same URL, what was learnt before
                // stands in until they are answered: a changed role must not make a worker vanish for a moment.
                known => {
                    let same_url = known.filter(|entry| entry.registration.record.url == registration.record.url);
                    let carried = same_url.map(|entry| (entry.facts.clone(), entry.address.clone()));
                    let mut entry = self.admit(&id, registration);
                    if let Some((facts, address)) = carried {
                        entry.address = address;
                        if entry.is_asked {
                            entry.facts = facts;
                        }
                    }
                    self.entries.insert(id, entry);
                }
            }
        }
    }

    fn admit(&mut self, id: &str, registration: Arc<Registration>) -> Entry {
        self.visits += 1;
        let visit = Visit { worker_id: Arc::from(id), number: self.visits };
        let record = registration.record.clone();
        let address = match record.endpoint() {
            Ok(url) => url.literal_address().ok_or_else(|| "not resolved yet".to_owned()),
            Err(error) => Err(error.to_string()),
        };
        self.tell_if_own(id, &address);
        let open = match &address {
            // Its questions would be answered by this router, or by another worker.
            Ok(address) if is_own(&self.config.own_listeners, *address) => Open::default(),
            _ => Open::of(&record, registration.source, self.config.template_arguments),
        };
        let is_asked = open.anything();
        let attendant = attendant::attend(self.tools.clone(), visit.clone(), record, open);
        let attendant = tokio::spawn(attendant).abort_handle();
        Entry {
            registration,
            visit,
            attendant,
            is_asked,
            facts: Facts::default(),
            unanswered: None,
            address,
            parity: Parity::Unknown,
        }
    }

    /// Hands the set over if it differs from the last one. Before any source has said anything there is no set.
    fn publish(&mut self, on_update: &impl Fn(Vec<DiscoveredWorker>)) {
        if self.sets.is_empty() {
            return;
        }
        let workers: Vec<_> = self.entries.values().map(|entry| entry.discovered(&self.config)).collect();
        let pending = workers.iter().filter(|worker| matches!(worker.state, WorkerState::Pending(_))).count();
        self.shared.published(workers.len(), pending);
        if self.published.as_ref() != Some(&workers) {
            self.published = Some(workers.clone());
            on_update(workers);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::discovery::State;

    #[test]
    fn of_a_burst_only_the_newest_set_of_each_source_counts() {
        let set = |kind, departures_suspect| Message::Source(kind, Set { departures_suspect, ..Set::default() });
        let (etcd, file) = (SourceKind::Etcd, SourceKind::File);
        let alive = || Message::Probe("w".to_owned(), true);
        let burst = [set(etcd, true), alive(), set(file, false), set(etcd, false), alive(), set(etcd, false)];
        let kept = newest_sets(burst.into_iter());
        let seen: Vec<_> = kept
            .iter()
            .map(|message| match message {
                Message::Source(kind, set) => Some((*kind, set.departures_suspect)),
                _ => None,
            })
            .collect();
        assert_eq!(seen, [None, Some((file, false)), None, Some((etcd, true))]);
    }

    #[test]
    fn a_source_that_panics_is_started_again() {
        let config = DiscoveryConfig { workers_file: Some("x".into()), ..DiscoveryConfig::default() };
        let shared = Arc::new(Shared::new(&config));
        let starts = Arc::new(AtomicUsize::new(0));
        let (counter, health) = (starts.clone(), shared.clone());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(supervise(SourceKind::File, shared.clone(), move || {
            let (start, health) = (counter.fetch_add(1, Ordering::SeqCst), health.clone());
            health.contact(SourceKind::File, Instant::now());
            async move {
                if start == 0 {
                    panic!("an answer nobody expects");
                }
                // The second start found the first one's end in the status.
                health.trouble(SourceKind::File, "second".to_owned());
            }
        }));
        assert_eq!(starts.load(Ordering::SeqCst), 2);
        assert_eq!(shared.snapshot(Instant::now()).state, State::Degraded);
    }
}
