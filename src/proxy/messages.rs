//! Messages requests towards one worker: as they came where it knows the path, else as the chat that asks for the same.
//! Which it is, is learnt from the worker's own answer and kept beside its record.

use bytes::Bytes;
use http::{HeaderValue, StatusCode, header};
use infera_shards::{Request, Response, UpstreamError, UpstreamResponse};
use tracing::info;

use super::dialect::Dialect;
use super::direct::Named;
use super::disaggregated;
use super::exchange::{self, Outbound, named_model};
use super::pick::Picked;
use super::prompts;
use super::service::RouterService;
use crate::api::messages as form;
use crate::api::{ApiError, Endpoint};
use crate::fleet::Fleet;
use crate::limits;
use crate::prompt::EngineRules;
use crate::prompt::extract::RoutingFields;
use crate::prompt::outline::Outline;
use crate::route::{self, Topology};
use crate::worker::EngineKind;

const CHAT: &str = "/v1/chat/completions";

/// What a worker has begun to answer.
pub(super) enum Said {
    Begun(UpstreamResponse, Dialect),
    /// A refusal that was read to its end here.
    Refused(StatusCode, Bytes),
}

/// Why there is no answer.
pub(super) enum Trouble {
    Worker(UpstreamError),
    /// Nothing another worker would do better.
    Request(ApiError),
}

/// The chat that a Messages request was made into; made once, however many workers are asked for it.
#[derive(Default)]
pub(super) struct Chat(Option<(EngineRules, Bytes)>);

impl Chat {
    async fn of(&mut self, service: &RouterService, request: &Request, engine: EngineRules) -> Result<Bytes, ApiError> {
        if let Some((_, chat)) = self.0.as_ref().filter(|(rules, _)| *rules == engine) {
            return Ok(chat.clone());
        }
        let chat = chat_of(service, &request.body, engine).await?;
        self.0 = Some((engine, chat.clone()));
        Ok(chat)
    }
}

async fn chat_of(service: &RouterService, body: &Bytes, engine: EngineRules) -> Result<Bytes, ApiError> {
    let traits = service.shared.prompter.as_ref().map(|prompter| prompter.template_traits(engine));
    let traits = traits.unwrap_or_default();
    let made = if body.len() <= limits::SHARD_TRANSLATED_BODY_BYTES {
        form::chat_of_messages(body, engine, traits)
    } else {
        let (there, here) = (body.clone(), body);
        let job = move || form::chat_of_messages(&there, engine, traits);
        match prompts::on_the_pool(service, job).await {
            Ok(made) => made,
            // The client is to have its answer, pool or not.
            Err(_) => form::chat_of_messages(here, engine, traits),
        }
    };
    made.map_err(ApiError::BadRequest)
}

/// Sends a Messages request to the picked worker, in the form that the worker takes. `model` as the client wrote it, empty
/// for none.
pub(super) async fn send(
    service: &RouterService,
    request: &Request,
    model: &str,
    picked: &Picked,
    chat: &mut Chat,
) -> Result<Said, Trouble> {
    let worker = &picked.worker;
    // ATOM's own conversion leaves images and former thinking out.
    let is_asked = worker.record.engine_kind() != EngineKind::Atom;
    if is_asked && !worker.speech.lacks_messages() {
        match ask_natively(service, request, picked).await? {
            Some(said) => return Ok(said),
            None => {
                if worker.speech.note_lack_of_messages() {
                    info!(worker = &*worker.id, "a worker does not know /v1/messages; such requests go to it as chats");
                }
            }
        }
    }
    let engine = EngineRules::of_engine(&worker.record.engine);
    let body = chat.of(service, request, engine).await.map_err(Trouble::Request)?;
    let target = chat_target(&request.target);
    let outbound = Outbound { target: &target, body: &body, is_read_here: true };
    let response = exchange::send(service, request, picked, &outbound).await.map_err(Trouble::Worker)?;
    let model = if model.is_empty() { &worker.record.model_name } else { model };
    Ok(Said::Begun(response, Dialect::Translated(model.into())))
}

/// Asks the worker to count; one that cannot leaves nobody who could.
pub(super) async fn count(service: &RouterService, request: &Request, picked: &Picked) -> Result<Said, Trouble> {
    match ask_natively(service, request, picked).await? {
        Some(said) => Ok(said),
        None => Err(Trouble::Request(ApiError::NotBuilt(format!(
            "tokens are counted with the router's own tokenizer or by the worker, and worker {} does not count them",
            picked.worker.id
        )))),
    }
}

/// Nothing for a worker that does not know the path.
async fn ask_natively(service: &RouterService, request: &Request, picked: &Picked) -> Result<Option<Said>, Trouble> {
    let outbound = Outbound::as_it_came(request);
    let response = exchange::send(service, request, picked, &outbound).await.map_err(Trouble::Worker)?;
    let status = response.status;
    if !form::is_doubtful(status) {
        return Ok(Some(Said::Begun(response, Dialect::Anthropic)));
    }
    let body = response.collect(limits::UNKNOWN_PATH_ANSWER_BYTES_MAX).await.map_err(Trouble::Worker)?;
    Ok((!form::is_unknown_path(status, &body)).then_some(Said::Refused(status, body)))
}

/// The client's answer to a refusal that was read here.
pub(super) fn refusal(status: StatusCode, body: Bytes) -> Response {
    let content_type = (header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Response { status, headers: vec![content_type], body }
}

/// Makes the request a chat, where a prefill and a decode worker share it: their protocols know chats. Tells how to answer
/// it then; nothing where no pair serves it.
pub(super) async fn made_for_a_pair(
    service: &RouterService,
    request: &mut Request,
) -> Result<Option<Dialect>, ApiError> {
    let Some((engine, model)) = pair_of(service, request)? else { return Ok(None) };
    request.body = chat_of(service, &request.body, engine).await?;
    request.target = chat_target(&request.target);
    Ok(Some(Dialect::Translated(model.into())))
}

/// Rules and model of the pair that serves the request; nothing where none does.
fn pair_of(service: &RouterService, request: &Request) -> Result<Option<(EngineRules, String)>, ApiError> {
    let view = service.view();
    let fleet: &Fleet = &view.fleet;
    if fleet.models.values().all(|pool| pool.prefill.is_empty() || pool.decode.is_empty()) {
        return Ok(None);
    }
    let model = model_of(request);
    let model = named_model(fleet, &model);
    let named = Named::of(service.live().disaggregation.mode, &request.head, fleet)?;
    if !disaggregated::is_pair(fleet, model, &named) {
        return Ok(None);
    }
    let Ok(Topology::Disaggregated { prefill, .. }) = route::topology(fleet, model) else { return Ok(None) };
    let engine = |index: &u32| EngineRules::of_engine(&fleet.targets[*index as usize].worker.record.engine);
    Ok(prefill.first().map(engine).map(|rules| (rules, model.to_owned())))
}

/// Empty for none, and for a body that cannot be read.
fn model_of(request: &Request) -> String {
    let outline = Outline::read(&request.body).ok();
    let model = outline.as_ref().and_then(|outline| RoutingFields::of(outline).model);
    model.map(|model| model.into_owned()).unwrap_or_default()
}

/// The chat's path with the client's query.
fn chat_target(target: &str) -> String {
    let query = target.find('?').map_or("", |at| &target[at..]);
    format!("{CHAT}{query}")
}

/// Whether requests to this endpoint are spread by load, without a look at their prompt.
pub(super) fn is_by_load(endpoint: &Endpoint) -> bool {
    matches!(endpoint, Endpoint::Forward | Endpoint::CountTokens)
}
