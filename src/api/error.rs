//! Errors as OpenAI clients read them: `{"error":{"message","type","code"}}`, one place that maps a cause
//! to its status. `param` is always there (null), as the official client's type has it.

use bytes::Bytes;
use http::{HeaderName, HeaderValue, StatusCode, header};
use infera_shards::{Rejection, RejectionKind, Response};
use serde_json::json;

use super::messages;
use crate::route::TopologyError;

/// Seconds a client is asked to wait when no worker can take its request.
const RETRY_AFTER_SECONDS: u64 = 1;

/// Everything the router itself answers with an error.
#[derive(Debug, PartialEq, Eq)]
pub enum ApiError {
    /// The body is not what the endpoint takes; the text says where.
    BadRequest(String),
    /// No `model` in the body, and the fleet serves more than one (or none).
    ModelRequired {
        known: Vec<String>,
    },
    ModelNotFound {
        model: String,
        known: Vec<String>,
    },
    /// Nothing can serve the model now; a later try may succeed.
    NoWorker {
        reason: String,
    },
    /// Every attempt failed before a byte of the answer; the text is about the last one.
    WorkerFailed {
        reason: String,
    },
    WorkerTimeout {
        reason: String,
    },
    /// The request carries none of the router's keys.
    WrongKey,
    /// As many requests are in flight as are allowed.
    Overloaded {
        reason: String,
    },
    NotBuilt(String),
    NotFound(String),
    WrongMethod {
        allow: &'static str,
    },
    Internal,
}

struct Shape {
    status: StatusCode,
    kind: &'static str,
    code: &'static str,
    message: String,
}

impl ApiError {
    /// The pool of `model` could not be chosen.
    pub fn from_topology(model: &str, error: TopologyError) -> Self {
        match error {
            TopologyError::UnknownModel { known } if model.is_empty() => ApiError::ModelRequired { known },
            TopologyError::UnknownModel { known } => ApiError::ModelNotFound { model: model.to_owned(), known },
            TopologyError::NoWorkers => ApiError::NoWorker { reason: format!("no active worker for model={model:?}") },
            TopologyError::NoneRoutable => ApiError::NoWorker {
                reason: format!("model={model:?} is known, but none of its workers is active now"),
            },
            TopologyError::HalfPair { present, count, missing } => ApiError::NoWorker {
                reason: format!(
                    "model={model:?} has {count} {} worker(s) but no {} worker; disaggregated dispatch requires both pools",
                    present.as_str(),
                    missing.as_str()
                ),
            },
        }
    }

    /// Every worker of the model that could serve holds as many requests as it may.
    pub fn full(model: &str) -> Self {
        ApiError::Overloaded { reason: format!("every worker of model={model:?} holds as many requests as it may") }
    }

    /// The router holds as many requests as it may.
    pub fn too_many(cap: u64) -> Self {
        ApiError::Overloaded { reason: format!("{cap} requests are in flight, which is as many as may be") }
    }

    /// A worker that wants another key than the one this router shows.
    pub fn key_refused(worker: &str) -> Self {
        ApiError::WorkerFailed { reason: format!("worker {worker} does not accept this router's key") }
    }

    fn shape(&self) -> Shape {
        let shape = |status, kind, code, message: String| Shape { status, kind, code, message };
        let invalid = "invalid_request_error";
        match self {
            ApiError::BadRequest(message) => shape(StatusCode::BAD_REQUEST, invalid, "bad_request", message.clone()),
            ApiError::ModelRequired { known } => {
                let message = format!("`model` is required; available models: {}", listed(known));
                shape(StatusCode::BAD_REQUEST, invalid, "model_required", message)
            }
            ApiError::ModelNotFound { model, known } => {
                let message = format!("The model `{model}` does not exist; available models: {}", listed(known));
                shape(StatusCode::NOT_FOUND, invalid, "model_not_found", message)
            }
            ApiError::NoWorker { reason } => {
                shape(StatusCode::SERVICE_UNAVAILABLE, "server_error", "no_worker_available", reason.clone())
            }
            ApiError::WorkerFailed { reason } => {
                shape(StatusCode::BAD_GATEWAY, "server_error", "worker_failed", reason.clone())
            }
            ApiError::WorkerTimeout { reason } => {
                shape(StatusCode::GATEWAY_TIMEOUT, "server_error", "worker_timeout", reason.clone())
            }
            ApiError::WrongKey => {
                let message = "give one of this router's keys: `Authorization: Bearer KEY`".to_owned();
                shape(StatusCode::UNAUTHORIZED, invalid, "invalid_api_key", message)
            }
            ApiError::Overloaded { reason } => {
                shape(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", "overloaded", reason.clone())
            }
            ApiError::NotBuilt(message) => {
                shape(StatusCode::NOT_IMPLEMENTED, "server_error", "not_implemented", message.clone())
            }
            ApiError::NotFound(message) => shape(StatusCode::NOT_FOUND, invalid, "not_found", message.clone()),
            ApiError::WrongMethod { allow } => {
                let message = format!("this path takes {allow}");
                shape(StatusCode::METHOD_NOT_ALLOWED, invalid, "method_not_allowed", message)
            }
            ApiError::Internal => {
                let message = "the router failed on this request; its log has the reason".to_owned();
                shape(StatusCode::INTERNAL_SERVER_ERROR, "server_error", "internal_error", message)
            }
        }
    }

    pub fn status(&self) -> StatusCode {
        self.shape().status
    }

    pub fn into_response(self) -> Response {
        let Shape { status, kind, code, message } = self.shape();
        self.with_headers(error_response(status, kind, code, &message))
    }

    /// The same as Anthropic's clients read it.
    pub fn into_anthropic_response(self) -> Response {
        let Shape { status, message, .. } = self.shape();
        self.with_headers(messages::error_response(status, &message))
    }

    fn with_headers(self, mut response: Response) -> Response {
        match self {
            ApiError::NoWorker { .. } | ApiError::Overloaded { .. } => {
                response.headers.push(retry_after());
            }
            ApiError::WrongKey => {
                response.headers.push((header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer")));
            }
            ApiError::WrongMethod { allow } => response.headers.push((header::ALLOW, HeaderValue::from_static(allow))),
            _ => {}
        }
        response
    }
}

/// The answer to a message that the engine itself refused (framing, size, time).
pub fn from_rejection(rejection: &Rejection) -> Response {
    let kind = if rejection.status.is_server_error() { "server_error" } else { "invalid_request_error" };
    let code = match rejection.kind {
        RejectionKind::BadRequest => "bad_request",
        RejectionKind::HeadTooLarge => "request_header_fields_too_large",
        RejectionKind::BodyTooLarge => "request_too_large",
        RejectionKind::Timeout => "request_timeout",
        RejectionKind::TooManyConnections => "too_many_connections",
        RejectionKind::TooManyBodies => "too_many_bodies",
        RejectionKind::Internal => "internal_error",
    };
    let mut response = error_response(rejection.status, kind, code, rejection.reason);
    if rejection.status == StatusCode::SERVICE_UNAVAILABLE {
        response.headers.push(retry_after());
    }
    response
}

fn retry_after() -> (HeaderName, HeaderValue) {
    (header::RETRY_AFTER, HeaderValue::from(RETRY_AFTER_SECONDS))
}

/// Payload of the last SSE event of a stream that its worker cut. The same for every worker, so that a stream does not
/// carry it along; the log names the worker.
pub fn stream_error_event() -> Bytes {
    Bytes::from_static(
        b"data: {\"error\":{\"message\":\"the worker ended the stream before its end\",\"type\":\"server_error\",\
          \"param\":null,\"code\":\"worker_failed\"}}\n\n",
    )
}

/// A JSON answer.
pub fn json_response(status: StatusCode, body: &impl serde::Serialize) -> Response {
    json_bytes(status, Bytes::from(serde_json::to_vec(body).unwrap_or_default()))
}

/// An answer whose body is JSON already.
pub fn json_bytes(status: StatusCode, body: Bytes) -> Response {
    let content_type: (HeaderName, HeaderValue) = (header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Response { status, headers: vec![content_type], body }
}

fn error_response(status: StatusCode, kind: &str, code: &str, message: &str) -> Response {
    json_response(status, &json!({"error": {"message": message, "type": kind, "param": null, "code": code}}))
}

fn listed(names: &[String]) -> String {
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stream_error_is_one_event_with_the_shape_of_every_error() {
        let event = stream_error_event();
        let text = std::str::from_utf8(&event).unwrap();
        let json = text.strip_prefix("data: ").and_then(|rest| rest.strip_suffix("\n\n")).unwrap();
        let value: serde_json::Value = serde_json::from_str(json).unwrap();
        assert_eq!(value["error"]["code"], "worker_failed");
        let other = ApiError::Internal.into_response();
        let other: serde_json::Value = serde_json::from_slice(&other.body).unwrap();
        let members =
            |value: &serde_json::Value| value["error"].as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        assert_eq!(members(&value), members(&other));
    }
}
