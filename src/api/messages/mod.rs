//! Anthropic's Messages over a worker that speaks chat completions alone: the request as a chat, its answer and its
//! stream as a message, and errors in Anthropic's shape. Pure; never decides which worker is spoken to how.
//!
//! Source of the shapes: Anthropic's API reference, version `2023-06-01`. Rules where the two do not fit: vLLM 0.32,
//! `entrypoints/anthropic/serving.py`.

mod answer;
mod request;
mod stream;

use bytes::Bytes;
use http::StatusCode;
use infera_shards::Response;
use serde_json::{Value, json};

pub use answer::message_of_chat;
pub use request::chat_of_messages;
pub use stream::EventTranslator;

use super::error::json_response;

/// The type of an error by its status, as the reference lists them.
fn error_type(status: StatusCode) -> &'static str {
    match status.as_u16() {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 | 529 => "overloaded_error",
        504 => "timeout_error",
        400..500 => "invalid_request_error",
        _ => "api_error",
    }
}

/// An error as Anthropic's clients read it.
pub fn error_response(status: StatusCode, message: &str) -> Response {
    json_response(status, &error_body(error_type(status), message))
}

fn error_body(kind: &str, message: &str) -> Value {
    json!({"type": "error", "error": {"type": kind, "message": message}})
}

/// The last event of a native stream that its worker cut.
pub fn stream_error_event() -> Bytes {
    Bytes::from_static(
        b"event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"api_error\",\
          \"message\":\"the worker ended the stream before its end\"}}\n\n",
    )
}

/// A worker's error in chat's form, as Anthropic's clients read it.
pub fn error_of_chat(status: StatusCode, body: &[u8]) -> Response {
    let value = serde_json::from_slice::<Value>(body).unwrap_or_default();
    let said = message_of_error(&value);
    error_response(status, said.unwrap_or("the worker refused the request without saying why"))
}

/// What an error says, whatever the form: `{"error":{"message"}}`, `{"error":"…"}`, `{"message"}`, `{"detail"}`.
fn message_of_error(value: &Value) -> Option<&str> {
    let text = |at: &str| value.pointer(at).and_then(Value::as_str);
    ["/error/message", "/error", "/message", "/detail"].into_iter().find_map(text)
}

/// Whether a worker's answer means that it does not know the path, and not that the request was wrong: an engine that
/// knows it answers in Anthropic's shape.
pub fn is_unknown_path(status: StatusCode, body: &[u8]) -> bool {
    is_doubtful(status)
        && serde_json::from_slice::<Value>(body).map_or(true, |value| value.get("type") != Some(&json!("error")))
}

/// Whether the body of an answer of this status has to be looked at for that.
pub fn is_doubtful(status: StatusCode) -> bool {
    matches!(status, StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED | StatusCode::NOT_IMPLEMENTED)
}

/// Why a turn ended, and with which stop sequence.
fn stop_reason(finish: Option<&str>, matched: Option<&Value>, has_tool: bool) -> (&'static str, Value) {
    match (finish, matched) {
        (Some("length"), _) => ("max_tokens", Value::Null),
        (Some("tool_calls"), _) => ("tool_use", Value::Null),
        // A forced call ends with `stop`.
        _ if has_tool => ("tool_use", Value::Null),
        // Engines name the stop string; a number is a token that ends a turn anyway.
        (Some("stop"), Some(Value::String(text))) => ("stop_sequence", text.as_str().into()),
        _ => ("end_turn", Value::Null),
    }
}

/// `prompt_tokens` of a chat are all of them; Anthropic counts the cached ones apart.
#[derive(Clone, Copy, Debug, Default, serde::Deserialize)]
#[serde(default)]
struct ChatUsage {
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    prompt_tokens_details: Option<CachedTokens>,
}

#[derive(Clone, Copy, Debug, Default, serde::Deserialize)]
#[serde(default)]
struct CachedTokens {
    cached_tokens: Option<u64>,
}

impl ChatUsage {
    fn of_message(self) -> Value {
        let prompt = self.prompt_tokens.unwrap_or(0);
        let cached = self.prompt_tokens_details.and_then(|details| details.cached_tokens);
        let mut usage = json!({"input_tokens": prompt.saturating_sub(cached.unwrap_or(0)),
            "output_tokens": self.completion_tokens.unwrap_or(0)});
        if let Some(cached) = cached {
            usage["cache_read_input_tokens"] = cached.into();
            usage["cache_creation_input_tokens"] = 0.into();
        }
        usage
    }
}

/// A call's name for the client, which sends it back with the result.
fn call_id(given: Option<String>) -> String {
    given.filter(|id| !id.is_empty()).unwrap_or_else(|| format!("toolu_{:016x}", fastrand::u64(..)))
}

fn message_id(chat_id: Option<&str>) -> String {
    match chat_id.map(|id| id.strip_prefix("chatcmpl-").unwrap_or(id)).filter(|id| !id.is_empty()) {
        Some(id) => format!("msg_{id}"),
        None => format!("msg_{:016x}", fastrand::u64(..)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_path_is_told_from_an_unknown_model() {
        let check = |status: u16, body: &str, expected: bool| {
            assert_eq!(is_unknown_path(StatusCode::from_u16(status).unwrap(), body.as_bytes()), expected, "{body}");
        };
        check(404, r#"{"detail":"Not Found"}"#, true);
        check(404, r#"{"error":{"message":"Not Found","type":"NotFoundError","code":404}}"#, true);
        check(405, "", true);
        check(404, r#"{"type":"error","error":{"type":"NotFoundError","message":"no such model"}}"#, false);
        check(400, r#"{"detail":"x"}"#, false);
    }

    #[test]
    fn errors_keep_their_words_and_get_their_type() {
        let check = |status: u16, body: &str, kind: &str, message: &str| {
            let response = error_of_chat(StatusCode::from_u16(status).unwrap(), body.as_bytes());
            let value: Value = serde_json::from_slice(&response.body).unwrap();
            assert_eq!(value, json!({"type": "error", "error": {"type": kind, "message": message}}));
            assert_eq!(response.status.as_u16(), status);
        };
        check(400, r#"{"error":{"message":"too long","code":400}}"#, "invalid_request_error", "too long");
        check(422, r#"{"detail":"no"}"#, "invalid_request_error", "no");
        check(429, r#"{"error":"slow down"}"#, "rate_limit_error", "slow down");
        check(500, "<html>", "api_error", "the worker refused the request without saying why");
        check(503, r#"{"object":"error","message":"full"}"#, "overloaded_error", "full");
    }

    #[test]
    fn a_native_streams_last_event_is_one_of_anthropics() {
        let event = stream_error_event();
        let text = std::str::from_utf8(&event).unwrap();
        let json = text.strip_prefix("event: error\ndata: ").and_then(|rest| rest.strip_suffix("\n\n")).unwrap();
        let value: Value = serde_json::from_str(json).unwrap();
        assert_eq!((&value["type"], &value["error"]["type"]), (&json!("error"), &json!("api_error")));
    }
}
