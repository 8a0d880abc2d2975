//! The attempts of one request: pick, send, and either relay the answer or try another worker. A retry is
//! allowed until the first byte has gone to the client and never goes to a worker that failed this request.

use std::time::Instant;

use http::{HeaderName, HeaderValue, StatusCode};
use infera_shards::{
    RelayOutcome, Request, Responder, UpstreamError, UpstreamErrorKind, UpstreamRequest, UpstreamResponse,
};
use tracing::{debug, warn};

use super::cleanup::DATA_PARALLEL_RANK;
use super::direct::{self, Named};
use super::disaggregated;
use super::metrics::{Outcome, RequestMetrics, RouterLabel};
use super::observe::AnswerObserver;
use super::pick::{Picked, Wish, pick};
use super::prompts::{self, Prompts};
use super::relay::{as_it_came, count, is_stream};
use super::service::RouterService;
use super::steering::SessionName;
use crate::api::{self, ApiError, Endpoint};
use crate::fleet::Fleet;
use crate::pd::PdEndpoint;
use crate::prompt::extract::RoutingFields;
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
    let received = request.received;
    let mut record = Record::start(&service.shared.metrics, received);
    record.outcome = match Box::pin(attempts(service, endpoint, request)).await {
        Ok(Served::ByOne(picked, response)) => relay(&picked, response, responder, received).await,
        Ok(Served::ByAPair(endpoint, route, request)) => {
            record.serve_as(RouterLabel::Disagg);
            match Box::pin(disaggregated::serve(service, endpoint, route, request, responder)).await {
                Ok(outcome) => outcome,
                Err(error) => Box::pin(refuse(error, responder)).await,
            }
        }
        Err(error) => Box::pin(refuse(error, responder)).await,
    };
}

async fn refuse(error: ApiError, responder: &mut Responder) -> Outcome {
    let outcome = if error.status().is_client_error() { Outcome::ClientError } else { Outcome::Error };
    match responder.send(error.into_response()).await {
        Ok(()) => outcome,
        Err(_) => Outcome::StreamFailed,
    }
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

/// Who serves a request.
enum Served {
    /// One worker, whose answer has begun.
    ByOne(Picked, UpstreamResponse),
    /// A prefill and a decode worker, still to be picked.
    ByAPair(PdEndpoint, Route, Request),
}

/// Ends with an answer's head, from the first worker that gave one or from the last that could be asked. The request is
/// gone with this future: there is no replay once the answer goes to the client.
async fn attempts(service: &RouterService, endpoint: Endpoint, request: Request) -> Result<Served, ApiError> {
    let (model, samples) = requested(&endpoint, &request)?;
    let sessions = service.shared.steering.sessions.as_ref();
    let session = sessions.and_then(|sessions| sessions.name_of(&request.head));
    let mode = service.shared.settings.disaggregation.mode;
    let named = Named::of(mode, &request.head, &service.view().fleet)?;
    let mut route = Route { endpoint, model, named, samples, session, prompts: Prompts::default() };
    if let Some(endpoint) = disaggregated::endpoint_of(&route.endpoint) {
        let view = service.view();
        if disaggregated::is_pair(&view.fleet, named_model(&view.fleet, &route.model), &route.named) {
            return Ok(Served::ByAPair(endpoint, route, request));
        }
    }
    if service.shared.settings.policy == Policy::KvAware && route.endpoint != Endpoint::Forward {
        let view = service.view();
        let (_, pool) = pool_of(&view.fleet, &route)?;
        route.prompts = prompts::hash(service, &route.endpoint, &view.fleet, pool, &request.body).await;
    }
    let mut tried: Vec<Name> = Vec::new();
    loop {
        let (picked, may_retry) = match next_worker(service, &route, &tried)? {
            Some(next) => next,
            None => {
                return Err(ApiError::NoWorker {
                    reason: "every worker of the model left during the request".to_owned(),
                });
            }
        };
        match send(service, &request, &picked).await {
            Ok(response) if may_retry && response.status.is_server_error() => {
                picked.failed();
                debug!(worker = &*picked.worker.id, status = response.status.as_u16(), "retrying on another worker");
                service.shared.metrics.retried("status");
            }
            Ok(response) => return Ok(Served::ByOne(picked, response)),
            Err(error) if may_retry => {
                picked.failed();
                warn!(worker = &*picked.worker.id, phase = error.phase(), %error, "retrying on another worker");
                service.shared.metrics.retried(error.phase());
            }
            Err(error) => {
                picked.failed();
                return Err(worker_error(&picked, &error));
            }
        }
        tried.push(picked.worker.id.clone());
    }
}

/// Picks and books among the workers not tried yet, on the newest view; also tells whether another one would
/// be left for a retry.
fn next_worker(service: &RouterService, route: &Route, tried: &[Name]) -> Result<Option<(Picked, bool)>, ApiError> {
    let view = service.view();
    let (model, pool) = pool_of(&view.fleet, route)?;
    let narrowed = match &route.named.worker {
        Some(id) => Some(direct::narrowed(&view.fleet, pool, id, model)?),
        None => None,
    };
    let pool = narrowed.as_deref().unwrap_or(pool);
    let by_load = route.endpoint == Endpoint::Forward;
    let wish = Wish {
        model,
        role: Role::Mixed,
        pool,
        prompts: &route.prompts,
        samples: route.samples,
        session: route.session,
        tried,
        by_load,
    };
    let Some(picked) = pick(service, &view, &wish) else { return Ok(None) };
    let may_retry = (tried.len() as u32) < service.shared.settings.retries_max
        && route::untried(&view.fleet, pool, tried)
            .any(|index| view.fleet.targets[index as usize].worker.id != picked.worker.id);
    Ok(Some((picked, may_retry)))
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
        Topology::Disaggregated { decode, .. } if route.endpoint == Endpoint::Forward => Ok((name, decode)),
        // Left to a gateway that named a mixed worker; pairs are served elsewhere.
        Topology::Disaggregated { .. } => Ok((name, fleet.models.get(named).map_or(&[][..], |pool| &pool.mixed))),
    }
}

/// The model that a request names, empty for none, and the samples that it asks for.
fn requested(endpoint: &Endpoint, request: &Request) -> Result<(String, u32), ApiError> {
    if *endpoint == Endpoint::Forward {
        return Ok((forwarded_model(request), 1));
    }
    let fields = RoutingFields::parse(&request.body).map_err(|error| ApiError::BadRequest(error.to_string()))?;
    // A Responses request has one sample: `n` means nothing there.
    let samples = if *endpoint == Endpoint::Responses { 1 } else { fields.samples.count() };
    Ok((fields.model.map(|model| model.into_owned()).unwrap_or_default(), samples))
}

/// Paths that the router does not know: the model is where the body's form has it, else in the query. A body
/// that cannot be read is the worker's to refuse.
fn forwarded_model(request: &Request) -> String {
    let content_type = request.head.get("content-type").unwrap_or_default();
    let in_body = if content_type.starts_with(b"multipart/form-data") {
        multipart_model(&request.body)
    } else {
        RoutingFields::parse(&request.body).ok().and_then(|fields| fields.model.map(|model| model.into_owned()))
    };
    in_body.or_else(|| api::query_parameter(&request.target, "model")).unwrap_or_default()
}

/// Longest model name looked for in a multipart form, bytes.
const FORM_MODEL_BYTES_MAX: usize = 512;

/// Value of the form field `model`: what stands between the blank line after its part's head and the next
/// line end (RFC 7578).
fn multipart_model(body: &[u8]) -> Option<String> {
    let name = memchr::memmem::find(body, b"name=\"model\"")?;
    let after_name = &body[name..];
    let value = &after_name[memchr::memmem::find(after_name, b"\r\n\r\n")? + 4..];
    let end = memchr::memmem::find(&value[..value.len().min(FORM_MODEL_BYTES_MAX)], b"\r\n")?;
    std::str::from_utf8(&value[..end]).ok().map(str::to_owned)
}

async fn send(service: &RouterService, request: &Request, picked: &Picked) -> Result<UpstreamResponse, UpstreamError> {
    let worker = &picked.worker;
    let rank = picked.rank.map(|rank| (DATA_PARALLEL_RANK, HeaderValue::from(rank)));
    // Names of workers are not for workers. A rank-multiplexed one gets the picked rank; any other gets what the client
    // asked for.
    const REMOVED: [HeaderName; 3] = [direct::WORKER, direct::PREFILL, DATA_PARALLEL_RANK];
    let remove = &REMOVED[..if rank.is_some() { 3 } else { 2 }];
    let upstream_request = UpstreamRequest {
        address: picked.address,
        authority: &worker.authority,
        method: &request.method,
        path_prefix: &worker.base_path,
        target: &request.target,
        headers: Some(&request.head),
        remove,
        set: rank.as_slice(),
        body: std::slice::from_ref(&request.body),
    };
    service.context.upstream.send(&upstream_request).await
}

async fn relay(picked: &Picked, response: UpstreamResponse, responder: &mut Responder, received: Instant) -> Outcome {
    let status = response.status;
    if status.is_success() {
        picked.served();
    } else if status.is_server_error() {
        picked.failed();
    }
    let is_stream = is_stream(&response);
    let mut observer = AnswerObserver::new();
    match responder.relay(response, as_it_came(is_stream, &mut observer)).await {
        RelayOutcome::Complete => {
            if status == StatusCode::OK {
                count((&picked.handles, &picked.handles), received, &observer);
            }
            Outcome::from(status)
        }
        RelayOutcome::UpstreamFailed(error) => {
            picked.failed();
            warn!(worker = &*picked.worker.id, phase = error.phase(), %error, "an answer was cut by its worker");
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
    use super::multipart_model;

    #[test]
    fn the_model_of_a_multipart_form() {
        let form = |field: &str| {
            format!(
                "--x\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a\"\r\n\r\nRIFF\r\n--x\r\n{field}--x--\r\n"
            )
        };
        let model = form("Content-Disposition: form-data; name=\"model\"\r\n\r\nwhisper-1\r\n");
        assert_eq!(multipart_model(model.as_bytes()).as_deref(), Some("whisper-1"));
        assert_eq!(multipart_model(form("").as_bytes()), None);
        assert_eq!(multipart_model(b"name=\"model\"\r\n\r\nunfinished"), None);
    }
}
