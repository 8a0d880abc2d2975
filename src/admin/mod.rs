//! The control thread: answers what would take a shard too long (the metrics page, lists of workers), needs the mirrors
//! (cache view) or changes the process (the log's filter). Never touches a request.

mod dashboard;
mod history;
mod overview;

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use bytes::Bytes;
use crossbeam::channel::{Receiver, RecvTimeoutError, Sender, bounded};
use http::StatusCode;
use infera_shards::{Completion, Response};
use serde_json::{Value, json};

use crate::api::{self, ApiError};
use crate::config::Effective;
use crate::limits::{CONTROL_QUEUE, LOG_FILTER_BYTES_MAX};
use crate::logging::LogFilter;
use crate::metrics::{DepartedSeries, MetricsPage};
use crate::proxy::{ControlAsk, ControlPlane, metrics_response};
use crate::route::Policy;
use history::History;

struct Question {
    ask: ControlAsk,
    answer: Completion<Response>,
}

/// Handle of the control thread; one per process.
pub struct Admin {
    questions: Sender<Question>,
    thread: JoinHandle<()>,
}

/// What shards hold of it.
struct Desk(Sender<Question>);

impl ControlPlane for Desk {
    fn submit(&self, ask: ControlAsk, answer: Completion<Response>) {
        // A full queue drops the completion, and the shard answers that the thread is busy.
        let _ = self.0.try_send(Question { ask, answer });
    }
}

/// State that the answers are made of.
pub struct AdminState {
    pub policy: Policy,
    /// And with it what the other answers read.
    pub page: MetricsPage,
    /// The settings in force.
    pub settings: Effective,
    pub log: LogFilter,
}

impl Admin {
    /// Starts the thread.
    pub fn start(state: AdminState) -> std::io::Result<Self> {
        let (questions, receiver) = bounded(CONTROL_QUEUE);
        let thread = std::thread::Builder::new().name("admin".into()).spawn(move || run(&state, &receiver))?;
        Ok(Self { questions, thread })
    }

    pub fn control_plane(&self) -> Arc<dyn ControlPlane> {
        Arc::new(Desk(self.questions.clone()))
    }

    /// Ends the thread once every shard has let go of its handle.
    pub fn stop(self) {
        drop(self.questions);
        // A panic there was logged by its own hook.
        let _ = self.thread.join();
    }
}

fn run(state: &AdminState, questions: &Receiver<Question>) {
    let mut history = History::new(Instant::now());
    let mut departed = DepartedSeries::default();
    loop {
        let now = Instant::now();
        if history.look(now, || (state.page.requests.totals(), state.page.requests.inflight())) {
            state.page.forget_departed(&mut departed, now);
        }
        let Question { ask, answer } = match questions.recv_timeout(history.wait(now)) {
            Ok(question) => question,
            Err(RecvTimeoutError::Timeout) => continue,
            Err(RecvTimeoutError::Disconnected) => return,
        };
        let response = match ask {
            ControlAsk::Workers => api::json_response(StatusCode::OK, &api::workers(&state.page.view.load().fleet)),
            ControlAsk::Config => api::json_response(StatusCode::OK, &state.settings.json()),
            ControlAsk::LogLevel { filter } => log_level(&state.log, filter),
            ControlAsk::Overview => overview::overview(state, &history),
            ControlAsk::Dashboard => dashboard::page(),
            ControlAsk::Metrics => metrics_response(state.page.render()),
            ControlAsk::CacheView { worker_id, rank } => cache_view(state, &worker_id, rank),
        };
        answer.complete(response);
    }
}

/// The filter in force; a new one comes as plain text or as `{"filter":"…"}`.
fn log_level(log: &LogFilter, body: Option<Bytes>) -> Response {
    let changed = match body {
        None => Ok(()),
        Some(body) if body.len() > LOG_FILTER_BYTES_MAX => {
            Err(format!("a filter has at most {LOG_FILTER_BYTES_MAX} bytes"))
        }
        Some(body) => {
            let given = serde_json::from_slice::<Value>(&body).ok();
            let member = given.as_ref().and_then(|value| value.get("filter")).and_then(Value::as_str);
            match member.or_else(|| std::str::from_utf8(&body).ok()) {
                Some(filter) => log.set(filter),
                None => Err("the filter is not UTF-8".to_owned()),
            }
        }
    };
    match changed {
        Ok(()) => api::json_response(StatusCode::OK, &json!({"filter": log.get()})),
        Err(problem) => ApiError::BadRequest(problem).into_response(),
    }
}

/// `{"worker_id","dp_rank","block_count"}`; without a rank the blocks of all ranks of the worker together.
fn cache_view(state: &AdminState, worker_id: &str, rank: Option<u32>) -> Response {
    if state.policy != Policy::KvAware {
        let reason = "the cache view needs --router-policy kv-aware".to_owned();
        return ApiError::NoWorker { reason }.into_response();
    }
    let view = state.page.view.load_full();
    let Some(worker) = view.fleet.workers.iter().find(|worker| *worker.id == *worker_id) else {
        return ApiError::NotFound(format!("no such worker: {worker_id:?}; GET /v1/workers lists them"))
            .into_response();
    };
    let ranks = worker.record.rank_count();
    if let Some(rank) = rank.filter(|rank| worker.record.is_rank_multiplexed() && *rank >= ranks) {
        return ApiError::NotFound(format!("worker {worker_id:?} has {ranks} ranks, not rank {rank}")).into_response();
    }
    let block_count: u64 = view
        .fleet
        .targets_of(worker)
        .iter()
        .filter(|target| rank.is_none() || target.rank.is_none() || target.rank == rank)
        .map(|target| view.block_count(target))
        .sum();
    let answer = json!({"worker_id": worker_id, "dp_rank": rank, "block_count": block_count});
    api::json_response(StatusCode::OK, &answer)
}
