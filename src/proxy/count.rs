//! Counting the tokens of a prompt without generating: `/v1/messages/count_tokens` and `/v1/responses/input_tokens`. The
//! router renders the prompt as the worker would and counts; what it cannot count exactly is asked of a worker where
//! engines have such an endpoint, and refused where they have none.

use http::StatusCode;
use infera_shards::{Request, Response};
use serde_json::json;

use super::exchange::named_model;
use super::prompts::{self, Prompts};
use super::reading::Reading;
use super::service::RouterService;
use crate::api::{self, ApiError, Endpoint};
use crate::decode_demand::Input;
use crate::prompt::outline::Outline;
use crate::route::{self, Topology};

/// The answer to `/v1/messages/count_tokens`; nothing where a worker has to be asked. A body that is refused here is
/// refused there, in words that clients know.
pub(super) async fn of_messages(service: &RouterService, request: &Request) -> Option<Response> {
    let tokens = count(service, &Endpoint::CountTokens, request).await.ok()??;
    Some(api::json_response(StatusCode::OK, &json!({"input_tokens": tokens})))
}

/// The answer to `/v1/responses/input_tokens`, which no engine has. Source of the shape and of the refusals: AMD's Infera.
pub(super) async fn of_responses(service: &RouterService, request: &Request) -> Response {
    let counted = match check_input(request) {
        Ok(()) => count(service, &Endpoint::InputTokens, request).await,
        Err(error) => Err(error),
    };
    match counted {
        Ok(Some(tokens)) => {
            let body = json!({"object": "response.input_tokens", "input_tokens": tokens});
            api::json_response(StatusCode::OK, &body)
        }
        Ok(None) => {
            let reason = "input token counting requires a kv-aware tokenizer, and a prompt that it can render";
            ApiError::NoWorker { reason: reason.to_owned() }.into_response()
        }
        Err(error) => error.into_response(),
    }
}

fn check_input(request: &Request) -> Result<(), ApiError> {
    let outline = Outline::read(&request.body).map_err(|error| ApiError::BadRequest(error.to_string()))?;
    let is_set = |name: &str| outline.raw(name).is_some_and(|value| value != b"null");
    if !is_set("input") {
        return Err(ApiError::BadRequest("`input` is required".to_owned()));
    }
    if is_set("previous_response_id") {
        let message = "the tokens behind a `previous_response_id` are the engine's, and cannot be counted here";
        return Err(ApiError::BadRequest(message.to_owned()));
    }
    Ok(())
}

/// Tokens of the prompt as the model's workers count them; nothing where that is not known exactly.
async fn count(service: &RouterService, endpoint: &Endpoint, request: &Request) -> Result<Option<u64>, ApiError> {
    let Reading { model, facts, outline, prompt, .. } = Reading::of(service, endpoint, request)?;
    let Some(outline) = outline else { return Ok(None) };
    let view = service.view();
    let fleet = &view.fleet;
    let model = named_model(fleet, &model);
    let pool = match route::topology(fleet, model).map_err(|error| ApiError::from_topology(model, error))? {
        Topology::Mixed(pool) => pool,
        Topology::Disaggregated { prefill, .. } => prefill,
    };
    let Some(first) = pool.get(..1) else { return Ok(None) };
    let mut prompts = Prompts::of(facts);
    let unfinished = prompts::begin(service, &mut prompts, endpoint, fleet, first, &outline, prompt);
    if let Some(unfinished) = unfinished {
        prompts::finish(service, &mut prompts, &request.body, unfinished).await;
    }
    match prompts.tokens_for(&fleet.targets[first[0] as usize]) {
        (tokens, Input::Exact) => Ok(Some(tokens)),
        (_, Input::Estimated) => Ok(None),
    }
}
