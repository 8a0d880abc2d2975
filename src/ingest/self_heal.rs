//! `--kv-self-heal`: asks an engine to forget its cache when its events hang in the air for good: it has published blocks,
//! none of them reaches a first block, and there is no replay to get the beginning from. The engine then stores from the root
//! again, and its cache can be seen. Costs the engine its cache once, so it is off by default. One thread that sleeps between
//! two looks at the view; never touches a request and never waits on the ingest core.
//!
//! Source of the rule: `reference` behaviour of the router this one replaces; there a request's pick delivers the ask, here
//! a look once a second does, so that the request path knows nothing of it.

use std::collections::HashMap;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use infera_shards::ClientTls;
use prometheus::{IntCounterVec, Opts, Registry};
use tokio::sync::mpsc;

use crate::fleet::{Fleet, WorkerState};
use crate::index::{SharedView, View};
use crate::limits::{DEPARTED_SERIES_KEPT, SELF_HEAL_ASK_DEADLINE, SELF_HEAL_ASKS_MAX};
use crate::worker::{EngineKind, Generation, Name, WorkerRecord};

/// Between two looks at the view.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Until a worker may be asked again after it has done so, and after it has refused or failed (SGLang refuses while busy).
const REST_AFTER_SUCCESS: Duration = Duration::from_secs(300);
const REST_AFTER_FAILURE: Duration = Duration::from_secs(30);

/// One worker to be asked.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Ask {
    worker_id: Name,
    generation: Generation,
    url: String,
}

/// What is remembered of a worker that was asked.
#[derive(Debug)]
struct Asked {
    generation: Generation,
    /// Batches without an anchor, all ranks together, that this ask has answered for; only more of them are a new reason.
    unanchored: u64,
    is_in_flight: bool,
    rests_until: Option<Instant>,
}

/// Whom to ask and when; pure.
#[derive(Debug, Default)]
struct Healer {
    asked: HashMap<Name, Asked>,
}

impl Healer {
    /// Workers to ask now. A worker is in flight until [`Healer::done`] says otherwise.
    fn due(&mut self, view: &View, now: Instant) -> Vec<Ask> {
        let mut due = Vec::new();
        for worker in &view.fleet.workers {
            let Some(url) = (worker.state == WorkerState::Active).then(|| reset_url(&worker.record)).flatten() else {
                continue;
            };
            let ranks = view.ranks_of(&worker.id);
            let unanchored: u64 = ranks.iter().map(|rank| rank.unanchored_batches.get()).sum();
            let hangs = ranks.iter().any(|rank| rank.is_unanchored() && rank.is_connected());
            if !hangs {
                continue;
            }
            let known = self.asked.get(&worker.id).filter(|asked| asked.generation == worker.generation);
            let is_new_reason = known.is_none_or(|asked| {
                !asked.is_in_flight
                    && asked.rests_until.is_none_or(|until| until <= now)
                    && asked.unanchored < unanchored
            });
            if is_new_reason {
                let generation = worker.generation;
                let asked = Asked { generation, unanchored, is_in_flight: true, rests_until: None };
                self.asked.insert(worker.id.clone(), asked);
                due.push(Ask { worker_id: worker.id.clone(), generation, url });
            }
        }
        self.asked.retain(|id, asked| {
            asked.is_in_flight
                || view.fleet.workers.iter().any(|worker| worker.id == *id && worker.generation == asked.generation)
        });
        due
    }

    fn done(&mut self, ask: &Ask, is_success: bool, now: Instant) {
        let Some(asked) = self.asked.get_mut(&ask.worker_id).filter(|asked| asked.generation == ask.generation) else {
            return;
        };
        asked.is_in_flight = false;
        asked.rests_until = Some(now + if is_success { REST_AFTER_SUCCESS } else { REST_AFTER_FAILURE });
        if !is_success {
            // Nothing was forgotten: the reason stands.
            asked.unanchored = asked.unanchored.saturating_sub(1);
        }
    }
}

/// Where the engine is asked to forget its cache; `None` for one that offers no such thing.
fn reset_url(record: &WorkerRecord) -> Option<String> {
    let path = match record.engine_kind() {
        EngineKind::Atom => return None,
        EngineKind::Vllm => "/reset_prefix_cache",
        EngineKind::Sglang | EngineKind::Unknown => "/flush_cache",
    };
    record.endpoint().ok().map(|url| url.join(path))
}

/// The running thread. Dropping it stops the thread; an ask in flight is given up.
pub struct SelfHeal {
    tls: ClientTls,
    client: Arc<ArcSwap<reqwest::Client>>,
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl SelfHeal {
    /// `registry` gets the counter of asks by worker and outcome; `authorization` is what engines are shown, if they have
    /// a key; `tls` judges their certificates.
    pub fn start(
        view: SharedView,
        registry: &Registry,
        authorization: Option<&http::HeaderValue>,
        tls: &ClientTls,
    ) -> anyhow::Result<Self> {
        let opts = Opts::new(
            "infera_router_kv_self_heal_total",
            "Times a worker was asked to forget its cache because its events had no beginning, by outcome.",
        );
        let outcomes = IntCounterVec::new(opts, &["worker_id", "outcome"])?;
        registry.register(Box::new(outcomes.clone()))?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let client = Arc::new(ArcSwap::from_pointee(client_with(authorization, tls)?));
        let asking = client.clone();
        let (stop, stopped) = mpsc::channel(1);
        let thread = std::thread::Builder::new()
            .name("self-heal".to_owned())
            .spawn(move || runtime.block_on(run(&view, &asking, &outcomes, stopped)))?;
        Ok(Self { client, tls: tls.clone(), stop: Some(stop), thread: Some(thread) })
    }
}

impl SelfHeal {
    /// What engines are shown from the next ask on.
    pub fn show(&self, authorization: Option<&http::HeaderValue>) -> reqwest::Result<()> {
        self.client.store(Arc::new(client_with(authorization, &self.tls)?));
        Ok(())
    }
}

fn client_with(authorization: Option<&http::HeaderValue>, tls: &ClientTls) -> reqwest::Result<reqwest::Client> {
    let headers = authorization.map(|value| (http::header::AUTHORIZATION, value.clone())).into_iter().collect();
    reqwest::Client::builder()
        .default_headers(headers)
        .tls_backend_preconfigured(tls.config())
        .no_proxy()
        .redirect(reqwest::redirect::Policy::none())
        .timeout(SELF_HEAL_ASK_DEADLINE)
        .pool_max_idle_per_host(0)
        .build()
}

impl Drop for SelfHeal {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // A panic there was logged by its own hook.
            let _ = thread.join();
        }
    }
}

async fn run(
    view: &SharedView,
    client: &ArcSwap<reqwest::Client>,
    outcomes: &IntCounterVec,
    mut stopped: mpsc::Receiver<()>,
) {
    let mut healer = Healer::default();
    let mut counted = Counted { outcomes, seen: HashMap::new() };
    let mut asks = tokio::task::JoinSet::new();
    let mut waiting: Vec<Ask> = Vec::new();
    let mut look = tokio::time::interval(LOOK_EVERY);
    look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = stopped.recv() => return,
            _ = look.tick() => {
                let view: Arc<View> = view.load_full();
                waiting.extend(healer.due(&view, Instant::now()));
                counted.forget_departed(&view.fleet, Instant::now());
            }
            Some(done) = asks.join_next() => {
                // A task that panicked leaves its worker in flight: it is not asked again.
                if let Ok((ask, outcome)) = done {
                    finish(&mut healer, &ask, outcome, &mut counted);
                }
            }
        }
        while asks.len() < SELF_HEAL_ASKS_MAX
            && let Some(ask) = waiting.pop()
        {
            tracing::warn!(worker_id = %ask.worker_id, url = ask.url, "KV events without a beginning: the engine is asked to forget its cache");
            let request = client.load().post(&ask.url);
            asks.spawn(async move {
                let outcome = request.send().await.map(|response| response.status());
                (ask, outcome)
            });
        }
    }
}

/// The counter, and whom it has series of.
struct Counted<'a> {
    outcomes: &'a IntCounterVec,
    /// When each was last in the fleet.
    seen: HashMap<Name, Instant>,
}

impl Counted<'_> {
    fn add(&mut self, worker_id: &Name, label: &str, now: Instant) {
        self.outcomes.with_label_values(&[&**worker_id, label]).inc();
        self.seen.insert(worker_id.clone(), now);
    }

    /// Series end with their workers, as those of requests do.
    fn forget_departed(&mut self, fleet: &Fleet, now: Instant) {
        self.seen.retain(|id, seen| {
            if fleet.workers.iter().any(|worker| worker.id == *id) {
                *seen = now;
            }
            let stays = now.duration_since(*seen) < DEPARTED_SERIES_KEPT;
            if !stays {
                for label in LABELS {
                    // An error means that there is no such series.
                    let _ = self.outcomes.remove_label_values(&[&**id, label]);
                }
            }
            stays
        });
    }
}

/// How an ask may end.
const LABELS: [&str; 3] = ["done", "refused", "failed"];

fn finish(healer: &mut Healer, ask: &Ask, outcome: reqwest::Result<reqwest::StatusCode>, counted: &mut Counted<'_>) {
    let is_success = outcome.as_ref().is_ok_and(|status| status.is_success());
    healer.done(ask, is_success, Instant::now());
    let label = match &outcome {
        Ok(_) if is_success => LABELS[0],
        Ok(_) => LABELS[1],
        Err(_) => LABELS[2],
    };
    counted.add(&ask.worker_id, label, Instant::now());
    match outcome {
        Ok(status) => {
            tracing::info!(worker_id = %ask.worker_id, status = status.as_u16(), "answer to the ask to forget the cache")
        }
        Err(error) => {
            let error = error.without_url();
            tracing::warn!(worker_id = %ask.worker_id, %error, "the engine was not reached with the ask to forget its cache");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::fleet::{Slot, Worker};
    use crate::index::RankStatus;

    fn record(engine: &str) -> WorkerRecord {
        let record =
            serde_json::json!({"worker_id": "a:1", "url": "http://a:1/base", "model_name": "m", "engine": engine});
        serde_json::from_value(record).unwrap()
    }

    fn view(generation: u64, engine: &str) -> View {
        let generation = Generation(generation);
        let worker = Worker {
            id: "a:1".into(),
            generation,
            record: record(engine),
            address: None,
            authority: String::new(),
            base_path: String::new(),
            tls: None,
            state: WorkerState::Active,
            variant: None,
            health: Arc::default(),
            speech: Arc::default(),
        };
        let ranks: Vec<_> = (0..2)
            .map(|rank| Some(Arc::new(RankStatus::new("a:1".into(), generation, rank, Slot(rank), None))))
            .collect();
        ranks.iter().flatten().for_each(|rank| {
            rank.connected.store(true, Ordering::Relaxed);
            rank.orphans_waiting.set(1);
        });
        let fleet = Fleet { workers: vec![Arc::new(worker)], ..Fleet::default() };
        View { fleet: Arc::new(fleet), ranks: ranks.into(), ..View::default() }
    }

    fn rank(view: &View, rank: usize) -> &RankStatus {
        view.ranks[rank].as_deref().unwrap()
    }

    #[test]
    fn each_engine_has_its_way() {
        let check = |engine: &str, expected: Option<&str>| {
            assert_eq!(reset_url(&record(engine)).as_deref(), expected, "{engine}")
        };
        check("vllm", Some("http://a:1/base/reset_prefix_cache"));
        check("sglang", Some("http://a:1/base/flush_cache"));
        check("", Some("http://a:1/base/flush_cache"));
        check("atom", None);
    }

    #[test]
    fn a_worker_is_asked_once_for_one_reason_and_rests() {
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let mut healer = Healer::default();
        let view = view(1, "sglang");
        assert_eq!(healer.due(&view, at(0)), [], "nothing hangs");
        // Any rank counts; one that has an anchor does not hide the other.
        rank(&view, 0).anchored_blocks.set(5);
        rank(&view, 1).unanchored_batches.set(1);
        let due = healer.due(&view, at(1));
        assert_eq!(due.len(), 1);
        assert_eq!(healer.due(&view, at(2)), [], "one in flight");
        healer.done(&due[0], false, at(3));
        assert_eq!(healer.due(&view, at(32)), [], "rests after a refusal");
        let due = healer.due(&view, at(33));
        assert_eq!(due.len(), 1, "the reason still stands");
        healer.done(&due[0], true, at(34));
        assert_eq!(healer.due(&view, at(10_000)), [], "a quiet time is no new reason");
        rank(&view, 1).unanchored_batches.set(2);
        assert_eq!(healer.due(&view, at(333)), [], "rests after a success");
        assert_eq!(healer.due(&view, at(334)).len(), 1);
    }

    #[test]
    fn series_end_a_while_after_their_worker() {
        let start = Instant::now();
        let outcomes = IntCounterVec::new(Opts::new("asks", "asks"), &["worker_id", "outcome"]).unwrap();
        let mut counted = Counted { outcomes: &outcomes, seen: HashMap::new() };
        let series = || prometheus::core::Collector::collect(&outcomes)[0].get_metric().len();
        let (there, gone) = (view(1, "vllm").fleet, Fleet::default());
        counted.add(&"a:1".into(), LABELS[0], start);
        counted.add(&"a:1".into(), LABELS[2], start);
        counted.forget_departed(&there, start + DEPARTED_SERIES_KEPT);
        counted.forget_departed(&gone, start + DEPARTED_SERIES_KEPT * 2 - LOOK_EVERY);
        assert_eq!(series(), 2);
        counted.forget_departed(&gone, start + DEPARTED_SERIES_KEPT * 2);
        assert_eq!((series(), counted.seen.len()), (0, 0));
    }

    #[test]
    fn an_anchor_a_lost_publisher_and_a_new_registration() {
        let now = Instant::now();
        let mut healer = Healer::default();
        let first = view(1, "vllm");
        rank(&first, 0).unanchored_batches.set(1);
        rank(&first, 0).anchored_blocks.set(1);
        assert_eq!(healer.due(&first, now), [], "has an anchor meanwhile");
        rank(&first, 0).anchored_blocks.set(0);
        rank(&first, 0).connected.store(false, Ordering::Relaxed);
        assert_eq!(healer.due(&first, now), [], "nobody would hear of what it stores next");
        rank(&first, 0).connected.store(true, Ordering::Relaxed);
        let asked = healer.due(&first, now);
        assert_eq!(asked.len(), 1);
        let second = view(2, "vllm");
        rank(&second, 0).unanchored_batches.set(1);
        assert_eq!(healer.due(&second, now).len(), 1, "another registration, another cache");
        // The late answer to the former one changes nothing for its successor.
        healer.done(&asked[0], true, now);
        assert!(healer.asked["a:1"].is_in_flight);
    }
}
