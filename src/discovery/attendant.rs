//! The tasks that attend to one worker: resolving its name, asking it for what its record leaves open, and, for a
//! vanished worker that is kept, checking that it still answers. None of them can hold up another worker.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::sync::{Semaphore, mpsc, watch};

use super::Timing;
use super::ask::{self, Open};
use super::facts::Facts;
use super::registry::{Message, Visit};
use super::render_probe;
use crate::prompt::Prompter;
use crate::worker::{WorkerRecord, WorkerUrl};

/// Between two probes of a kept worker.
const PROBE_EVERY: Duration = Duration::from_secs(1);

/// What every attendant needs.
#[derive(Clone)]
pub(super) struct Tools {
    /// Another one when the key that workers are shown changes.
    pub client: Arc<ArcSwap<reqwest::Client>>,
    /// Caps the questions that are open at engines at a time.
    pub questions: Arc<Semaphore>,
    pub timing: Timing,
    pub queue: mpsc::Sender<Message>,
    /// Absent where nothing is rendered: then no worker is asked how it renders.
    pub prompter: Option<Arc<Prompter>>,
    pub template_arguments: bool,
}

/// Attends to a worker until aborted. `visit` marks every report, so that one of a former registration is known.
pub(super) async fn attend(tools: Tools, visit: Visit, record: WorkerRecord, open: Open) {
    let Ok(url) = record.endpoint() else { return };
    let (tell, told) = watch::channel(None);
    tokio::join!(
        resolve(&tools, &visit, &url),
        question(&tools, &visit, &record, open, tell),
        render_probe::compare(&tools, &visit, &record, told)
    );
}

/// Names are looked up here, never on a shard. An address that stops resolving stays in force.
async fn resolve(tools: &Tools, visit: &Visit, url: &WorkerUrl) {
    if url.literal_address().is_some() {
        return;
    }
    let mut current = None;
    let mut pause = tools.timing.ask_backoff.0;
    loop {
        let looked_up = tokio::net::lookup_host((url.host.as_str(), url.port)).await;
        let result = looked_up
            .map_err(|error| error.to_string())
            .and_then(|found| choose(current, found.collect()).ok_or_else(|| "the name has no address".to_owned()));
        pause = match result {
            Ok(_) => tools.timing.resolve_every,
            Err(_) => (pause * 2).min(tools.timing.ask_backoff.1),
        };
        if let Ok(address) = result {
            current = Some(address);
        }
        if tools.queue.send(Message::Address(visit.clone(), result)).await.is_err() {
            return;
        }
        tokio::time::sleep(pause).await;
    }
}

/// Keeps the address in use while the name still has it, so that a rotating answer does not move a worker.
fn choose(current: Option<SocketAddr>, found: Vec<SocketAddr>) -> Option<SocketAddr> {
    match current {
        Some(current) if found.contains(&current) => Some(current),
        _ => found.first().copied(),
    }
}

/// Asks until everything is answered, then goes on asking at growing distances: the first answer may be from an
/// engine that is just being replaced, and nothing registers a static worker again when its model changes.
async fn question(tools: &Tools, visit: &Visit, record: &WorkerRecord, open: Open, tell: watch::Sender<Option<Facts>>) {
    if !open.anything() {
        tell.send_replace(Some(Facts::default()));
        return;
    }
    let (first, longest) = tools.timing.ask_backoff;
    let mut pause = first;
    let mut known: Option<Facts> = None;
    loop {
        let answer = match tools.questions.acquire().await {
            Ok(_permit) => ask::ask(&tools.client.load_full(), record, open).await,
            Err(_) => return,
        };
        let longest_now = if answer.is_ok() { tools.timing.ask_again_every } else { longest };
        let unchanged = matches!(&answer, Ok(facts) if known.as_ref() == Some(facts));
        let failed_before = known.is_none() && answer.is_err();
        let (Ok(facts) | Err((facts, _))) = &answer;
        tell.send_if_modified(|told| {
            // A question that failed takes nothing back.
            let is_news = told.as_ref() != Some(facts) && (answer.is_ok() || told.is_none());
            if is_news {
                *told = Some(facts.clone());
            }
            is_news
        });
        if let Ok(facts) = &answer {
            known = Some(facts.clone());
        }
        if tools.queue.send(Message::Answer(visit.clone(), answer)).await.is_err() {
            return;
        }
        let jitter = 0.75 + fastrand::f64() / 2.0;
        tokio::time::sleep(pause.mul_f64(jitter).min(longest_now)).await;
        pause = if unchanged || failed_before { (pause * 2).min(longest_now) } else { first };
    }
}

/// Probes a kept worker until aborted.
pub(super) async fn probe(tools: Tools, record: WorkerRecord) {
    loop {
        let alive = match tools.questions.acquire().await {
            Ok(_permit) => ask::is_alive(&tools.client.load_full(), &record).await,
            Err(_) => return,
        };
        if tools.queue.send(Message::Probe(record.worker_id.clone(), alive)).await.is_err() {
            return;
        }
        tokio::time::sleep(PROBE_EVERY).await;
    }
}
