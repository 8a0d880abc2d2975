//! What the client speaks, and how a worker's answer reaches it: as it came, or translated. Never picks and never judges
//! a worker.

use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;

use http::{HeaderName, HeaderValue, header};
use infera_shards::{
    BodyObserver, BodyRewriter, Relay, RelayOutcome, Responder, Response, UpstreamError, UpstreamErrorKind,
    UpstreamResponse,
};

use super::added::AddedHeaders;
use crate::api::messages::{self, EventTranslator};
use crate::api::{self, ApiError, Endpoint};
use crate::limits;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// What the client speaks, and whether its worker speaks it too.
#[derive(Clone, Debug)]
pub(super) enum Dialect {
    OpenAi,
    Anthropic,
    /// Anthropic's, over a worker that answers in chat's; with the client's name of the model.
    Translated(Rc<str>),
}

impl Dialect {
    /// Of an endpoint whose worker speaks as its client does.
    pub fn of(endpoint: &Endpoint) -> Self {
        match endpoint {
            Endpoint::Messages | Endpoint::CountTokens => Dialect::Anthropic,
            _ => Dialect::OpenAi,
        }
    }

    pub fn is_translated(&self) -> bool {
        matches!(self, Dialect::Translated(_))
    }

    /// An error of the router's own in the client's shape.
    pub fn refusal(&self, error: ApiError) -> Response {
        match self {
            Dialect::OpenAi => error.into_response(),
            Dialect::Anthropic | Dialect::Translated(_) => error.into_anthropic_response(),
        }
    }

    /// How an answer goes to the client that needs no translation: as it came, with what is added, and a stream with a notice
    /// should its worker cut it.
    pub fn as_it_came<'a>(
        &self,
        is_stream: bool,
        added: &'a AddedHeaders,
        observer: &'a mut dyn BodyObserver,
    ) -> Relay<'a> {
        let notice = match self {
            Dialect::OpenAi => api::stream_error_event,
            Dialect::Anthropic | Dialect::Translated(_) => messages::stream_error_event,
        };
        Relay { set: added.as_slice(), remove: &[], observer, cut_notice: is_stream.then(notice) }
    }

    /// Passes an answer on, whatever that takes.
    pub fn passing<'a>(
        &'a self,
        response: UpstreamResponse,
        responder: &'a mut Responder,
        added: &'a AddedHeaders,
        observer: &'a mut dyn BodyObserver,
    ) -> Pin<Box<dyn Future<Output = RelayOutcome> + 'a>> {
        match self {
            Dialect::Translated(model) => Box::pin(translate(model, response, responder, added, observer)),
            _ => {
                let is_stream = is_stream(&response) && response.status.is_success();
                Box::pin(responder.relay(response, self.as_it_came(is_stream, added, observer)))
            }
        }
    }
}

pub(super) fn is_stream(response: &UpstreamResponse) -> bool {
    response.head.get("content-type").is_some_and(|value| value.starts_with(b"text/event-stream"))
}

async fn translate(
    model: &str,
    response: UpstreamResponse,
    responder: &mut Responder,
    added: &AddedHeaders,
    observer: &mut dyn BodyObserver,
) -> RelayOutcome {
    let status = response.status;
    if status.is_success() && is_stream(&response) {
        let relay = Relay { set: added.as_slice(), remove: &[], observer, cut_notice: None };
        return responder.relay_rewritten(response, relay, &mut Events(EventTranslator::new(model))).await;
    }
    let kept = [REQUEST_ID, header::RETRY_AFTER].map(|name| {
        let value = response.head.get(name.as_str()).and_then(|value| HeaderValue::from_bytes(value).ok());
        value.map(|value| (name, value))
    });
    let reused_connection = response.reused_connection();
    let collected = response.collect(limits::TRANSLATED_ANSWER_BYTES_MAX).await.and_then(|body| {
        observer.data(&body);
        if !status.is_success() {
            return Ok(messages::error_of_chat(status, &body));
        }
        let kind = UpstreamErrorKind::BadResponse("no chat completion");
        let error = || UpstreamError { kind, reused_connection, response_started: true };
        messages::message_of_chat(&body, model).map(|body| api::json_bytes(status, body)).ok_or_else(error)
    });
    let (mut answer, failure) = match collected {
        Ok(answer) => (answer, None),
        Err(error) => {
            let reason = format!("the worker failed inside its answer: {error}");
            (ApiError::WorkerFailed { reason }.into_anthropic_response(), Some(error))
        }
    };
    answer.headers.extend(kept.into_iter().flatten().chain(added.as_slice().iter().cloned()));
    match (responder.send(answer).await, failure) {
        (Err(_), _) => RelayOutcome::ClientGone,
        (Ok(()), Some(error)) => RelayOutcome::UpstreamFailed(error),
        (Ok(()), None) => RelayOutcome::Complete,
    }
}

struct Events(EventTranslator);

impl BodyRewriter for Events {
    fn rewrite(&mut self, payload: &[u8], out: &mut Vec<u8>) {
        self.0.feed(payload, out);
    }

    fn end(&mut self, out: &mut Vec<u8>) -> bool {
        self.0.end(out)
    }
}
