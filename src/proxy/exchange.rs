//! The attempts of one request: pick, send, and either relay the answer or try another worker. A retry is
//! allowed until the first byte has gone to the client and never goes to a worker that failed this request.

use std::borrow::Cow;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::StatusCode;
use infera_shards::{
    Head, RelayOutcome, Request, Responder, Response, UpstreamError, UpstreamErrorKind, UpstreamRequest,
    UpstreamResponse, boxed, time,
};
use tracing::{debug, warn};

use super::access::{self, Ended};
use super::added::AddedHeaders;
use super::budget::Failures;
use super::count as counting;
use super::dialect::{Dialect, is_stream};
use super::direct::{self, Named};
use super::disaggregated::{self, Paired};
use super::messages::{self, Chat, Said, Trouble, is_by_load};
use super::metrics::{Outcome, RequestMetrics, RouterLabel};
use super::pick::{NoPick, Picked, Wish, pick};
use super::prompts::{self, Prompts, Unfinished};
use super::reading::Reading;
use super::relay::{StreamObserver, count};
use super::service::{RouterService, answer};
use super::silence::Watched;
use super::stages::Stage;
use super::steering::SessionName;
use super::verdict::Standing;
use crate::api::{ApiError, Endpoint};
use crate::fleet::Fleet;
use crate::limits;
use crate::pd::{PdEndpoint, StreamFailure};
use crate::prompt::outline::Outline;
use crate::route::{self, Policy, Topology};
use crate::worker::{Name, Role};

/// Counts a request from its start to its end. A record that is dropped unfinished belongs to a client that
/// left: the engine drops the request's future then.
struct Record<'a> {
    metrics: &'a RequestMetrics,
    router: RouterLabel,
    received: Instant,
    outcome: Outcome,
}

impl<'a> Record<'a> {
    fn start(metrics: &'a RequestMetrics, received: Instant) -> Self {
        let router = RouterLabel::Mixed;
        metrics.request_started(router);
        Self { metrics, router, received, outcome: Outcome::StreamFailed }
    }

    fn serve_as(&mut self, router: RouterLabel) {
        self.metrics.request_moved(self.router, router);
        self.router = router;
    }
}

impl Drop for Record<'_> {
    fn drop(&mut self) {
        self.metrics.request_ended(self.router, self.outcome, self.received.elapsed().as_secs_f64());
    }
}

/// Serves one request that goes to a worker.
///
/// What happens before the answer and what happens without one live in futures of their own, on the heap: a stream that
/// is relayed for minutes keeps only the relay's state.
pub(super) async fn serve(service: &RouterService, endpoint: Endpoint, request: Request, responder: &mut Responder) {
    if endpoint == Endpoint::CountTokens
        && let Some(counted) = Box::pin(counting::of_messages(service, &request)).await
    {
        answer(counted, responder).await;
        return;
    }
    let received = request.received;
    let dialect = Dialect::of(&endpoint);
    let mut record = Record::start(&service.shared.metrics, received);
    let cap = service.live().caps.total;
    if let Some(cap) = cap
        && service.shared.metrics.inflight() > cap
    {
        record.outcome = Box::pin(refuse(&dialect, ApiError::too_many(cap), responder)).await;
        return;
    }
    let watched = Watched::new(&service.streams);
    record.outcome = match boxed(|| attempts(service, endpoint, request, &watched)).await {
        Ok(Served::ByOne(picked, response, dialect)) => {
            relay(service, &picked, (response, &dialect), responder, (received, &watched)).await
        }
        Ok(Served::ByAPair(paired)) => {
            record.serve_as(RouterLabel::Disagg);
            match boxed(|| disaggregated::serve(service, paired, responder, &watched)).await {
                Ok(outcome) => outcome,
                Err(error) => Box::pin(refuse(&dialect, error, responder)).await,
            }
        }
        Ok(Served::Refused(refusal)) => Box::pin(send_refusal(refusal, responder)).await,
        Err(error) => Box::pin(refuse(&dialect, error, responder)).await,
    };
}

async fn refuse(dialect: &Dialect, error: ApiError, responder: &mut Responder) -> Outcome {
    send_refusal(dialect.refusal(error), responder).await
}

async fn send_refusal(refusal: Response, responder: &mut Responder) -> Outcome {
    let outcome = if refusal.status.is_client_error() { Outcome::ClientError } else { Outcome::Error };
    let is_told = answer(refusal, responder).await;
    if is_told { outcome } else { Outcome::StreamFailed }
}

/// What the router knows of a request before it picks.
pub(super) struct Route {
    pub endpoint: Endpoint,
    /// As the client wrote it; empty for none.
    pub model: String,
    /// Workers that a gateway has chosen.
    pub named: Named,
    pub samples: u32,
    pub session: Option<SessionName>,
    pub prompts: Prompts,
}

impl Route {
    /// What is known before the prompt was looked at; takes from `reading` what it keeps.
    pub fn of(
        service: &RouterService,
        fleet: &Fleet,
        endpoint: Endpoint,
        head: &Head,
        session: Option<SessionName>,
        reading: &mut Reading<'_>,
    ) -> Result<Self, ApiError> {
        let named = Named::of(service.live().disaggregation.mode, head, fleet)?;
        let (model, facts) = (std::mem::take(&mut reading.model), std::mem::take(&mut reading.facts));
        Ok(Self { endpoint, model, named, samples: reading.samples, session, prompts: Prompts::of(facts) })
    }

    /// The endpoint as two legs know it, where two share the request.
    pub fn pair(&self, fleet: &Fleet) -> Option<PdEndpoint> {
        disaggregated::endpoint_of(&self.endpoint)
            .filter(|_| disaggregated::is_pair(fleet, named_model(fleet, &self.model), &self.named))
    }
}

/// Who serves a request. Made once and taken apart at once, so its size costs nothing.
#[allow(clippy::large_enum_variant)]
enum Served {
    /// One worker, whose answer has begun.
    ByOne(Picked, UpstreamResponse, Dialect),
    /// A worker's refusal, as the client is to have it.
    Refused(Response),
    /// A prefill and a decode worker, still to be picked.
    ByAPair(Box<Paired>),
}

/// What a request is, as far as it can be said without waiting.
struct Begun {
    route: Route,
    outline: Option<Outline>,
    /// A prompt that is still to be encoded elsewhere.
    unfinished: Option<Unfinished>,
    pair: Option<PdEndpoint>,
}

/// In one go, because the prompt's text lies in the request's body until it is hashed.
fn begin(
    service: &RouterService,
    endpoint: Endpoint,
    request: &Request,
    watched: &Watched<'_>,
) -> Result<Begun, ApiError> {
    let reading = Reading::of(service, &endpoint, request);
    service.took(Stage::Parse, request.received.elapsed());
    let mut reading = reading?;
    access::note(|line| line.model = access::clipped(reading.model.as_bytes()));
    if reading.is_stream {
        watched.begin(&endpoint, request);
    }
    let sessions = service.shared.steering.sessions.as_ref();
    let session = sessions.and_then(|sessions| sessions.name_of(&request.head));
    let view = service.view();
    let mut route = Route::of(service, &view.fleet, endpoint, &request.head, session, &mut reading)?;
    let pair = route.pair(&view.fleet);
    let Reading { outline, prompt, .. } = reading;
    let mut unfinished = None;
    if let Some((outline, pool)) = outline.as_ref().zip(pool_for_prompt(service, &view.fleet, &route, pair)?) {
        unfinished = prompts::begin(service, &mut route.prompts, &route.endpoint, &view.fleet, &pool, outline, prompt);
    }
    Ok(Begun { route, outline, unfinished, pair })
}

/// The targets that the prompt is to be hashed for; nothing where it has no part in the choice.
pub(super) fn pool_for_prompt<'a>(
    service: &RouterService,
    fleet: &'a Fleet,
    route: &Route,
    pair: Option<PdEndpoint>,
) -> Result<Option<Cow<'a, [u32]>>, ApiError> {
    if service.shared.settings.policy != Policy::KvAware || is_by_load(&route.endpoint) {
        return Ok(None);
    }
    Ok(Some(match pair {
        // For both roles at once: their engines may differ in rules and block size.
        Some(_) => disaggregated::both_pools(fleet, named_model(fleet, &route.model)),
        None => Cow::Borrowed(pool_of(fleet, route)?.1),
    }))
}

/// Ends with an answer's head, from the first worker that gave one or from the last that could be asked. The request is
/// gone with this future: there is no replay once the answer goes to the client.
async fn attempts(
    service: &RouterService,
    mut endpoint: Endpoint,
    mut request: Request,
    watched: &Watched<'_>,
) -> Result<Served, ApiError> {
    let mut dialect = Dialect::of(&endpoint);
    if endpoint == Endpoint::Messages
        && let Some(translated) = Box::pin(messages::made_for_a_pair(service, &mut request)).await?
    {
        (endpoint, dialect) = (Endpoint::ChatCompletions, translated);
    }
    let Begun { mut route, outline, unfinished, pair } = begin(service, endpoint, &request, watched)?;
    if let Some(unfinished) = unfinished {
        // Boxed: the timer inside is large, and most prompts never come here.
        Box::pin(prompts::finish(service, &mut route.prompts, &request.body, unfinished)).await;
    }
    if let Some(endpoint) = pair {
        return Ok(Served::ByAPair(Box::new(Paired { endpoint, route, request, outline, dialect })));
    }
    drop(outline);
    service.retry_budget.request();
    let shared = &service.shared;
    let mut tried: Vec<Name> = Vec::new();
    let mut failures = Failures::default();
    let mut chat = Chat::default();
    loop {
        let (picked, has_another) = match next_worker(service, &route, &tried)? {
            Some(next) => next,
            None => {
                return Err(none_left());
            }
        };
        watched.asks(&picked.handles);
        let may_retry = |is_refused| has_another && failures.allow_another(is_refused, service.live().retries_max);
        let mut is_refused = false;
        let said = match route.endpoint {
            // Boxed: few requests are of these, and all would carry their room.
            Endpoint::Messages => Box::pin(messages::send(service, &request, &route.model, &picked, &mut chat)).await,
            Endpoint::CountTokens => Box::pin(messages::count(service, &request, &picked)).await,
            _ => {
                let is_read_here = dialect.is_translated();
                let outbound = Outbound { is_read_here, ..Outbound::as_it_came(&request) };
                let sent = send(service, &request, &picked, &outbound).await;
                sent.map(|response| Said::Begun(response, dialect.clone())).map_err(Trouble::Worker)
            }
        };
        match said {
            Ok(Said::Refused(status, body)) => return Ok(Served::Refused(messages::refusal(status, body))),
            Err(Trouble::Request(error)) => return Err(error),
            Ok(Said::Begun(response, dialect)) => {
                if let Some(took) = response.connect_time() {
                    service.took(Stage::Connect, took);
                }
                let standing = Standing::of(&response, &service.live().outbound);
                picked.answered(shared, standing);
                if !(may_retry(false) && standing.is_worth_a_retry() && service.may_spend_a_retry()) {
                    return match standing {
                        Standing::KeyRefused => Err(ApiError::key_refused(&picked.worker.id)),
                        _ => Ok(Served::ByOne(picked, response, dialect)),
                    };
                }
                debug!(worker = &*picked.worker.id, status = response.status.as_u16(), "retrying on another worker");
                shared.retried("status");
            }
            Err(Trouble::Worker(error)) => {
                picked.failed_by(shared, &error);
                // Whoever was not reached has done nothing: trying the next one asks no more of the fleet than one request may.
                is_refused = error.is_refused();
                if !(may_retry(is_refused) && (error.is_unreached() || service.may_spend_a_retry())) {
                    return Err(worker_error(&picked, &error));
                }
                warn!(worker = &*picked.worker.id, phase = error.phase(), %error, "retrying on another worker");
                shared.retried(error.phase());
            }
        }
        tried.push(picked.worker.id.clone());
        // What the failed attempt held must not be held while waiting.
        drop(picked);
        failures.add(is_refused);
        back_off(service, failures.counted()).await;
    }
}

/// The first retry goes out at once: another worker knows nothing of this one's trouble. Further ones wait a random
/// while, so that a failing fleet is not asked by everybody in step.
pub(super) async fn back_off(service: &RouterService, failed_attempts: usize) {
    if let Some(most_ms) = longest_delay_ms(failed_attempts) {
        let begun = Instant::now();
        // Boxed: the timer is large and aligned to cache lines, which every request would inherit.
        boxed(|| time::sleep(Duration::from_millis(fastrand::u64(..=most_ms)))).await;
        service.took(Stage::Pause, begun.elapsed());
    }
}

fn longest_delay_ms(failed_attempts: usize) -> Option<u64> {
    let doublings = failed_attempts.checked_sub(2)?;
    Some(limits::RETRY_DELAY_MS << doublings.min(limits::RETRY_DELAY_DOUBLINGS_MAX))
}

pub(super) fn none_left() -> ApiError {
    ApiError::NoWorker { reason: "every worker of the model left during the request".to_owned() }
}

/// Picks and books among the workers not tried yet, on the newest view; also tells whether another one would be left.
fn next_worker(service: &RouterService, route: &Route, tried: &[Name]) -> Result<Option<(Picked, bool)>, ApiError> {
    let view = service.view();
    let (model, pool) = narrowed_pool(&view.fleet, route)?;
    let wish = wish_for_one(route, model, &pool, tried);
    let picked = match pick(service, &view, &wish) {
        Ok(picked) => picked,
        Err(NoPick::NoneLeft) => return Ok(None),
        Err(NoPick::Full) => return Err(ApiError::full(model)),
    };
    let has_another = route::untried(&view.fleet, &pool, tried)
        .any(|index| view.fleet.targets[index as usize].worker.id != picked.worker.id);
    Ok(Some((picked, has_another)))
}

/// The targets that one worker for the request is picked from, whichever were tried.
pub(super) fn narrowed_pool<'a>(fleet: &'a Fleet, route: &Route) -> Result<(&'a Name, Cow<'a, [u32]>), ApiError> {
    let (model, pool) = pool_of(fleet, route)?;
    let pool = match &route.named.worker {
        Some(id) => Cow::Owned(direct::narrowed(fleet, pool, id, model)?),
        None => Cow::Borrowed(pool),
    };
    Ok((model, pool))
}

/// What one worker for the request is to be.
pub(super) fn wish_for_one<'a>(route: &'a Route, model: &'a Name, pool: &'a [u32], tried: &'a [Name]) -> Wish<'a> {
    Wish {
        model,
        role: Role::Mixed,
        pool,
        prompts: &route.prompts,
        samples: route.samples,
        session: route.session,
        tried,
        by_load: is_by_load(&route.endpoint),
    }
}

/// The model that the request is for. A body without a model is served when the fleet has just one.
pub(super) fn named_model<'a>(fleet: &'a Fleet, model: &'a str) -> &'a str {
    match (model, fleet.models.len()) {
        ("", 1) => fleet.models.keys().next().map_or("", |name| &**name),
        (model, _) => model,
    }
}

/// The pool that may serve the request.
fn pool_of<'a>(fleet: &'a Fleet, route: &Route) -> Result<(&'a Name, &'a [u32]), ApiError> {
    let named = named_model(fleet, &route.model);
    let topology = route::topology(fleet, named).map_err(|error| ApiError::from_topology(named, error))?;
    let Some((name, _)) = fleet.models.get_key_value(named) else {
        return Err(ApiError::from_topology(named, route::TopologyError::NoWorkers));
    };
    match topology {
        Topology::Mixed(pool) => Ok((name, pool)),
        // Paths without a prompt need no pair: any worker of the decode pool answers them.
        Topology::Disaggregated { decode, .. } if is_by_load(&route.endpoint) => Ok((name, decode)),
        // Left to a gateway that named a mixed worker; pairs are served elsewhere.
        Topology::Disaggregated { .. } => Ok((name, fleet.models.get(named).map_or(&[][..], |pool| &pool.mixed))),
    }
}

/// What of a request to a worker may differ from the client's.
pub(super) struct Outbound<'a> {
    pub target: &'a str,
    pub body: &'a Bytes,
    /// The answer is read here: it must not come compressed.
    pub is_read_here: bool,
}

impl<'a> Outbound<'a> {
    pub fn as_it_came(request: &'a Request) -> Self {
        Self { target: &request.target, body: &request.body, is_read_here: false }
    }
}

pub(super) async fn send(
    service: &RouterService,
    request: &Request,
    picked: &Picked,
    outbound: &Outbound<'_>,
) -> Result<UpstreamResponse, UpstreamError> {
    let worker = &picked.worker;
    let live = service.live();
    let headers = &live.outbound;
    let edits = headers.for_rank(picked.rank);
    let upstream_request = UpstreamRequest {
        address: picked.address,
        tls: worker.tls.as_ref(),
        authority: &worker.authority,
        method: &request.method,
        path_prefix: &worker.base_path,
        target: outbound.target,
        headers: Some(&request.head),
        remove: if outbound.is_read_here { headers.removed_of_leg(true) } else { edits.remove() },
        set: edits.set(),
        body: std::slice::from_ref(outbound.body),
    };
    service.context.upstream.send(&upstream_request).await
}

async fn relay(
    service: &RouterService,
    picked: &Picked,
    (response, dialect): (UpstreamResponse, &Dialect),
    responder: &mut Responder,
    (received, watched): (Instant, &Watched<'_>),
) -> Outcome {
    let shared = &service.shared;
    let status = response.status;
    access::note(|line| line.status = Some(status));
    if status.is_success() {
        picked.served();
    }
    let is_stream = is_stream(&response) && status.is_success();
    let added = AddedHeaders::of(&service.live(), is_stream, [(direct::WORKER, &picked.handles.route_key)]);
    let mut observer = StreamObserver::of_a_worker(is_stream, watched).queueing(picked.take_queued());
    let relayed = match dialect.is_translated() {
        true => dialect.passing(response, responder, &added, &mut observer).await,
        // Not boxed: this is what a stream that is relayed for minutes holds.
        false => responder.relay(response, dialect.as_it_came(is_stream, &added, &mut observer)).await,
    };
    if let Some(first_byte) = observer.answer.first_byte() {
        service.took(Stage::FirstByte, first_byte.duration_since(picked.at));
    }
    match relayed {
        RelayOutcome::Complete => match observer.failure() {
            Some(failure) => {
                access::note(|line| line.ended = Ended::StreamError);
                warn!(worker = &*picked.worker.id, "a worker reported an error inside its stream");
                if failure == StreamFailure::Worker {
                    picked.failed(shared);
                }
                Outcome::Error
            }
            None => {
                access::note(|line| line.ended = Ended::Complete);
                if status == StatusCode::OK {
                    picked.completed();
                    count((&picked.handles, &picked.handles), received, &observer.answer);
                }
                if status.as_u16() < 400 {
                    picked.succeeded();
                }
                Outcome::from(status)
            }
        },
        RelayOutcome::UpstreamFailed(error) => {
            access::note(|line| line.ended = Ended::Cut);
            picked.failed(shared);
            warn!(worker = &*picked.worker.id, phase = error.phase(), %error, "an answer was cut by its worker");
            if !responder.started() {
                // What came with the head was broken, and so nothing of it has gone out.
                return Box::pin(refuse(dialect, worker_error(picked, &error), responder)).await;
            }
            Outcome::Error
        }
        RelayOutcome::ClientGone => Outcome::StreamFailed,
    }
}

fn worker_error(picked: &Picked, error: &UpstreamError) -> ApiError {
    let reason = format!("worker {} failed ({}): {error}", picked.worker.id, error.phase());
    match error.kind {
        UpstreamErrorKind::ConnectTimeout | UpstreamErrorKind::FirstByteTimeout | UpstreamErrorKind::IdleTimeout => {
            ApiError::WorkerTimeout { reason }
        }
        _ => ApiError::WorkerFailed { reason },
    }
}

#[cfg(test)]
mod tests {
    use super::longest_delay_ms;

    #[test]
    fn the_second_retry_and_further_ones_wait_for_a_doubling_while_with_a_cap() {
        assert_eq!([0, 1].map(longest_delay_ms), [None, None]);
        assert_eq!([2, 3, 4, 7, 8, 1_000].map(longest_delay_ms), [25, 50, 100, 800, 800, 800].map(Some));
    }
}
