//! `POST /v1/admin/explain`: how a request with this body and these headers would be routed now, and by what figures. Goes
//! the way of a request up to the choice. Nothing is sent, booked, counted or remembered; the prompt cache is read.

use http::Method;
use infera_shards::Request;
use serde_json::{Value, json};

use super::disaggregated::{legs_facts, wish_for_a_pair};
use super::exchange::{Route, narrowed_pool, none_left, pool_for_prompt, wish_for_one};
use super::explained;
use super::messages;
use super::pair::{Tried, preview_pair};
use super::pick::{NoPick, preview};
use super::preview::Notes;
use super::prompts::{self, Previewed, Work};
use super::reading::Reading;
use super::service::RouterService;
use crate::api::{self, ApiError, Endpoint};
use crate::index::View;
use crate::pd::PdEndpoint;
use crate::prompt::outline::Outline;
use crate::worker::Role;

const DEFAULT_PATH: &str = "/v1/chat/completions";

/// The answer. `?path=` names the endpoint that the request would go to, `?text=1` shows the rendered prompt.
///
/// # Errors
/// The one that a request would be answered with instead of going to a worker.
pub(super) async fn explain(service: &RouterService, request: Request) -> Result<Value, ApiError> {
    let path = api::query_parameter(&request.target, "path").unwrap_or_else(|| DEFAULT_PATH.to_owned());
    let shows_text = api::query_parameter(&request.target, "text").is_some_and(|value| value == "1");
    let mut request = Request { method: Method::POST, target: path.clone(), ..request };
    let mut endpoint = api::endpoint(&request.method, &request.target);
    if !endpoint.goes_to_a_worker() {
        return Err(ApiError::BadRequest(format!("?path={:?} is no path that goes to a worker", request.target)));
    }
    if let Some(cap) = service.live().caps.total.filter(|cap| service.shared.metrics.inflight() >= *cap) {
        return Err(ApiError::too_many(cap));
    }
    if endpoint == Endpoint::Messages && messages::made_for_a_pair(service, &mut request).await?.is_some() {
        endpoint = Endpoint::ChatCompletions;
    }
    let mut reading = Reading::of(service, &endpoint, &request)?;
    let session = service.shared.steering.sessions.as_ref().map(|sessions| sessions.read(&request.head));
    let session_name = session.and_then(Result::ok);
    let view = service.view();
    let mut route = Route::of(service, &view.fleet, endpoint, &request.head, session_name, &mut reading)?;
    let (pair, outline) = (route.pair(&view.fleet), reading.outline);
    let prompt = preview_prompt(service, &mut route, pair, outline.as_ref()).await?;
    let view = service.view();
    let decision = match pair {
        Some(endpoint) => of_a_pair(service, &view, &route, endpoint, &request, outline)?,
        None => of_one(service, &view, &route)?,
    };
    let mut answer = json!({
        "path": path,
        "model": route.model,
        "policy": service.shared.settings.policy.as_str(),
        "samples": route.samples,
        "session": explained::session(session),
        "retention": route.prompts.facts.retention.as_str(),
        "is_multimodal": route.prompts.facts.is_multimodal,
        "images": route.prompts.facts.images.len(),
        "view_version": view.version,
        "shard": service.context.shard,
        "prompt": prompt.map(|prompt| explained::prompt(&prompt, shows_text)),
    });
    if let (Value::Object(answer), Value::Object(decision)) = (&mut answer, decision) {
        answer.extend(decision);
        let note =
            "nothing was sent, booked or counted; the prompt cache was read, and what it did not know was not kept";
        answer.insert("note".to_owned(), note.into());
    }
    Ok(answer)
}

async fn preview_prompt(
    service: &RouterService,
    route: &mut Route,
    pair: Option<PdEndpoint>,
    outline: Option<&Outline>,
) -> Result<Option<Previewed>, ApiError> {
    let view = service.view();
    let Some((outline, pool)) = outline.zip(pool_for_prompt(service, &view.fleet, route, pair)?) else {
        return Ok(None);
    };
    let work = Work::of(service, &route.endpoint, &view.fleet, &pool);
    Ok(Some(prompts::preview(service, &mut route.prompts, work, outline.body().clone()).await))
}

fn of_one(service: &RouterService, view: &View, route: &Route) -> Result<Value, ApiError> {
    let (model, pool) = narrowed_pool(&view.fleet, route)?;
    let mut notes = Notes::default();
    let picked = match preview(service, view, &wish_for_one(route, model, &pool, &[]), &mut notes) {
        Ok(chosen) => chosen.index,
        Err(NoPick::NoneLeft) => return Err(none_left()),
        Err(NoPick::Full) => return Err(ApiError::full(model)),
    };
    Ok(json!({"topology": "one", "legs": [explained::leg(service, view, Role::Mixed, &notes, Some(picked))]}))
}

fn of_a_pair(
    service: &RouterService,
    view: &View,
    route: &Route,
    endpoint: PdEndpoint,
    request: &Request,
    outline: Option<Outline>,
) -> Result<Value, ApiError> {
    let (_, pins, sequences) = legs_facts(endpoint, request, outline)?;
    let (tried, mut notes) = (Tried::default(), Vec::new());
    let protocol = match wish_for_a_pair(&view.fleet, route, endpoint, pins, sequences, &tried)? {
        Some(wish) => preview_pair(service, view, &wish, &mut notes)?,
        None => None,
    };
    let legs = notes.iter().map(|(role, notes, picked)| explained::leg(service, view, *role, notes, *picked));
    let legs: Vec<Value> = legs.collect();
    Ok(json!({"topology": "pair", "protocol": protocol.map(|protocol| protocol.as_str()), "legs": legs}))
}
