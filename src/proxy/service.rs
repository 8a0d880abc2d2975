//! The service that the engine calls for each request: path to endpoint, local answers, and the hand-over
//! to the exchange.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::{ArcSwap, Cache};
use bytes::Bytes;
use http::{HeaderValue, Method, StatusCode, header};
use infera_shards::{Rejection, Request, Responder, Response, Service, ShardContext};
use serde_json::json;

use super::access::{self, AccessSink, Ended};
use super::budget::RetryBudget;
use super::cleanup::ShardSide;
use super::count;
use super::dialect::Dialect;
use super::exchange;
use super::explain;
use super::live::{LiveCopy, LiveSettings};
use super::peers::Peers;
use super::queries::Queries;
use super::shared::{ControlAsk, Shared};
use super::silence::Streams;
use super::stages::Stage;
use super::target_metrics::{TargetHandles, TargetMetrics};
use crate::api::{self, ApiError, Endpoint};
use crate::index::View;
use crate::prompt::PromptTimes;
use crate::route::{Candidate, RoundRobin};

/// What a listener answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Surface {
    All,
    /// Requests for models; the control pages are on an address of their own.
    Traffic,
    /// The control pages alone.
    Control,
}

impl Surface {
    fn answers(self, endpoint: &Endpoint) -> bool {
        let is_control = matches!(
            endpoint,
            Endpoint::Workers
                | Endpoint::Metrics
                | Endpoint::CacheView(_)
                | Endpoint::Explain
                | Endpoint::Config
                | Endpoint::LogLevel
                | Endpoint::Overview
                | Endpoint::Dashboard
        );
        let is_common = matches!(endpoint, Endpoint::Health | Endpoint::Ready | Endpoint::Models | Endpoint::Model(_));
        match self {
            Surface::All => true,
            Surface::Traffic => !is_control,
            Surface::Control => is_control || is_common,
        }
    }
}

/// One shard's half of the router.
pub struct RouterService {
    surface: Surface,
    pub(super) shared: Arc<Shared>,
    /// For what outlives a request.
    pub(super) side: Rc<ShardSide>,
    pub(super) context: ShardContext,
    pub(super) handles: TargetHandles,
    pub(super) peers: Peers,
    pub(super) retry_budget: RetryBudget,
    pub(super) streams: Rc<Streams>,
    pub(super) round_robin: RefCell<RoundRobin>,
    pub(super) scratch: RefCell<Scratch>,
    access: Option<AccessSink>,
    view: RefCell<Cache<Arc<ArcSwap<View>>, Arc<View>>>,
}

/// Reused by every pick of the shard; borrowed between two awaits only.
#[derive(Default)]
pub(super) struct Scratch {
    pub queries: Queries,
    pub candidates: Vec<Candidate>,
    pub indexes: Vec<u32>,
}

impl RouterService {
    pub fn new(surface: Surface, shared: Arc<Shared>, context: ShardContext) -> Self {
        let live = LiveCopy::of(&shared.live);
        Self {
            surface,
            view: RefCell::new(Cache::new(shared.view.clone())),
            round_robin: RefCell::new(RoundRobin::new(context.shard)),
            handles: TargetHandles::default(),
            peers: Peers::default(),
            retry_budget: RetryBudget::new(live.get().retry_budget_percent, shared.settings.shards),
            scratch: RefCell::default(),
            access: shared.access.clone().map(|queues| AccessSink { queues, shard: context.shard }),
            side: Rc::new(ShardSide {
                shared: shared.clone(),
                upstream: context.upstream.clone(),
                shard: context.shard,
                live,
            }),
            streams: Streams::start(shared.clone()),
            shared,
            context,
        }
    }

    /// The newest view. Costs one atomic load unless a new one was published.
    pub(super) fn view(&self) -> Arc<View> {
        self.view.borrow_mut().load().clone()
    }

    /// The settings that this shard has seen last.
    pub(super) fn live(&self) -> Rc<LiveSettings> {
        self.side.live.get()
    }

    /// Costs one load of a line that is hardly ever written.
    fn follow_reloads(&self) {
        if let Some(newer) = self.side.live.refresh(&self.shared.live) {
            self.retry_budget.set_percent(newer.retry_budget_percent);
            self.context.upstream.set_timeouts(newer.upstream);
        }
    }

    /// Takes a retry out of the shard's budget; counted where there is none left.
    pub(super) fn may_spend_a_retry(&self) -> bool {
        let has_one = self.retry_budget.take(self.shared.now_ms());
        if !has_one {
            self.shared.metrics.retry_refused();
        }
        has_one
    }

    /// A stage of the request at hand took so long.
    pub(super) fn took(&self, stage: Stage, took: Duration) {
        self.shared.took(self.context.shard, stage, took);
    }

    /// The stages of its prompt; those that it did not come to are not counted.
    pub(super) fn prompt_took(&self, times: PromptTimes) {
        let PromptTimes { render, encode, hash } = times;
        for (stage, took) in [(Stage::Render, render), (Stage::Encode, encode), (Stage::Hash, hash)] {
            if !took.is_zero() {
                self.took(stage, took);
            }
        }
    }

    async fn local(&self, endpoint: Endpoint, request: Request) -> Response {
        match endpoint {
            Endpoint::Models => {
                let view = self.view();
                api::json_response(StatusCode::OK, &api::models(&view.fleet, self.shared.started_unix_seconds))
            }
            Endpoint::Model(name) => self.model(&name),
            Endpoint::Workers => self.ask(ControlAsk::Workers).await,
            Endpoint::Health => {
                let active = self.view().fleet.active_workers();
                api::json_response(StatusCode::OK, &json!({"status": "ok", "active_workers": active}))
            }
            Endpoint::Ready => self.ready(),
            Endpoint::Metrics => self.ask(ControlAsk::Metrics).await,
            Endpoint::Config => self.ask(ControlAsk::Config).await,
            Endpoint::Overview => self.ask(ControlAsk::Overview).await,
            Endpoint::Dashboard => self.ask(ControlAsk::Dashboard).await,
            Endpoint::LogLevel => {
                let filter = (request.method == Method::PUT).then(|| request.body.clone());
                self.ask(ControlAsk::LogLevel { filter }).await
            }
            Endpoint::Explain => match explain::explain(self, request).await {
                Ok(answer) => api::json_response(StatusCode::OK, &answer),
                Err(error) => error.into_response(),
            },
            Endpoint::CacheView(worker_id) => self.cache_view(worker_id, &request.target).await,
            Endpoint::InputTokens => count::of_responses(self, &request).await,
            Endpoint::WrongMethod(allow) => ApiError::WrongMethod { allow }.into_response(),
            Endpoint::Unknown
            | Endpoint::ChatCompletions
            | Endpoint::Completions
            | Endpoint::Responses
            | Endpoint::Messages
            | Endpoint::CountTokens
            | Endpoint::Forward => {
                let path = request.target.split('?').next().unwrap_or_default();
                ApiError::NotFound(format!("no such path: {} {path}", request.method)).into_response()
            }
        }
    }

    fn model(&self, name: &str) -> Response {
        let view = self.view();
        if view.fleet.models.contains_key(name) {
            return api::json_response(StatusCode::OK, &api::model(name, self.shared.started_unix_seconds));
        }
        let known = view.fleet.models.keys().map(|name| name.to_string()).collect();
        ApiError::ModelNotFound { model: name.to_owned(), known }.into_response()
    }

    fn ready(&self) -> Response {
        if self.shared.lifecycle.is_draining() {
            return ApiError::NoWorker { reason: "draining: this router is about to stop".to_owned() }.into_response();
        }
        match self.view().fleet.active_workers() {
            0 => ApiError::NoWorker { reason: "no routable worker yet".to_owned() }.into_response(),
            active => api::json_response(StatusCode::OK, &json!({"status": "ready", "active_workers": active})),
        }
    }

    async fn cache_view(&self, worker_id: String, target: &str) -> Response {
        // A route key names its rank by itself; `?dp_rank=` does for a plain worker id.
        let (worker_id, key_rank) = match worker_id.rsplit_once("#dp") {
            Some((id, rank)) if rank.parse::<u32>().is_ok() => (id.to_owned(), rank.parse().ok()),
            _ => (worker_id, None),
        };
        let rank = match api::query_parameter(target, "dp_rank").as_deref() {
            None | Some("") => key_rank,
            Some(text) => match text.parse() {
                Ok(rank) => Some(rank),
                Err(_) => return ApiError::BadRequest(format!("dp_rank is not a number: {text:?}")).into_response(),
            },
        };
        self.ask(ControlAsk::CacheView { worker_id, rank }).await
    }

    async fn ask(&self, ask: ControlAsk) -> Response {
        let (completion, pending) = self.context.mailbox.ticket();
        self.shared.control.submit(ask, completion);
        match pending.await {
            Some(response) => response,
            None => ApiError::NoWorker { reason: "the control thread is busy".to_owned() }.into_response(),
        }
    }
}

impl Service for RouterService {
    // The exchange's future stands here as it is: in one more around it, the request would be stored once more.
    async fn call(&self, request: Request, responder: &mut Responder) {
        self.follow_reloads();
        let logged = self.access.as_ref().map(|sink| access::Opened::of(sink, &request));
        let response = match self.admitted(&request) {
            Ok(endpoint) if endpoint.goes_to_a_worker() => {
                return match logged {
                    None => exchange::serve(self, endpoint, request, responder).await,
                    Some(line) => line.closed_by(exchange::serve(self, endpoint, request, responder)).await,
                };
            }
            Ok(endpoint) => Box::pin(self.local(endpoint, request)).await,
            Err(refusal) => refusal,
        };
        let answered = async {
            answer(response, responder).await;
        };
        match logged {
            None => answered.await,
            Some(line) => line.closed_by(answered).await,
        }
    }

    fn reject(&self, rejection: &Rejection) -> Response {
        if let Some(sink) = &self.access {
            sink.rejected(rejection);
        }
        api::from_rejection(rejection)
    }
}

impl RouterService {
    /// What the request asks for, if it may; else the answer that says so.
    fn admitted(&self, request: &Request) -> Result<Endpoint, Response> {
        let mut endpoint = api::endpoint(&request.method, &request.target);
        if !self.surface.answers(&endpoint) {
            endpoint = Endpoint::Unknown;
        }
        // Probes and scrapers carry no keys, and are told nothing but numbers; the dashboard's page holds no data.
        let is_open = matches!(endpoint, Endpoint::Health | Endpoint::Ready | Endpoint::Metrics | Endpoint::Dashboard);
        if !is_open && !self.live().client_keys.admit(&request.head) {
            self.shared.metrics.refused_key();
            return Err(Dialect::of(&endpoint).refusal(ApiError::WrongKey));
        }
        Ok(endpoint)
    }
}

/// An answer of the router's own. Tells whether it went out: the client may be gone, and there is nobody left to tell.
pub(super) async fn answer(response: Response, responder: &mut Responder) -> bool {
    let (status, bytes) = (response.status, response.body.len());
    let is_sent = responder.send(response).await.is_ok();
    if is_sent {
        access::note(|line| {
            line.status = Some(status);
            line.body_bytes_out = bytes as u64;
            line.ended = if status.is_success() { Ended::Complete } else { Ended::Refused };
        });
    }
    is_sent
}

/// A text answer of the metrics page.
pub fn metrics_response(page: String) -> Response {
    let content_type = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    Response { status: StatusCode::OK, headers: vec![(header::CONTENT_TYPE, content_type)], body: Bytes::from(page) }
}

/// Shared by the parts of one request on one shard.
pub(super) type Handles = Rc<TargetMetrics>;
