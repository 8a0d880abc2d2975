//! Owns the shapes of `/v1/messages`: its body as a chat, its answer, the events of its stream, its errors. Never
//! generates and never does IO.

use serde_json::{Value, json};

use super::shapes::ApiError;

/// The body as the chat that the model sees: texts alone, results of tools as messages of their own. Nothing for a body
/// without messages.
pub(super) fn as_chat(body: &Value) -> Option<Value> {
    let mut messages = Vec::new();
    let system = match &body["system"] {
        Value::Array(blocks) => blocks.iter().filter_map(|block| block["text"].as_str()).collect(),
        system => system.as_str().unwrap_or_default().to_string(),
    };
    if !system.is_empty() {
        messages.push(json!({"role": "system", "content": system}));
    }
    for turn in body["messages"].as_array()? {
        add_turn(turn, &mut messages);
    }
    let tools = body["tools"].as_array().filter(|tools| !tools.is_empty()).map(|tools| {
        let tool = |tool: &Value| {
            json!({"type": "function", "function": {"name": tool["name"], "description": tool["description"],
                "parameters": tool["input_schema"]}})
        };
        Value::Array(tools.iter().map(tool).collect())
    });
    let mut chat = json!({"messages": messages});
    if let Some(tools) = tools {
        chat["tools"] = tools;
    }
    Some(chat)
}

fn add_turn(turn: &Value, messages: &mut Vec<Value>) {
    let Value::Array(blocks) = &turn["content"] else {
        messages.push(json!({"role": turn["role"], "content": turn["content"]}));
        return;
    };
    let (mut parts, mut calls) = (Vec::new(), Vec::new());
    for block in blocks {
        match block["type"].as_str() {
            Some("text") => parts.push(json!({"type": "text", "text": block["text"]})),
            Some("tool_use") => {
                let function = json!({"name": block["name"], "arguments": block["input"].to_string()});
                calls.push(json!({"id": block["id"], "type": "function", "function": function}));
            }
            Some("tool_result") => messages.push(
                json!({"role": "tool", "tool_call_id": block["tool_use_id"], "content": text_of(&block["content"])}),
            ),
            _ => {}
        }
    }
    let mut message = json!({"role": turn["role"]});
    match &parts[..] {
        [] if calls.is_empty() => return,
        [] => message["content"] = Value::Null,
        [part] => message["content"] = part["text"].clone(),
        _ => message["content"] = parts.into(),
    }
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    messages.push(message);
}

fn text_of(content: &Value) -> String {
    match content {
        Value::Array(parts) => parts.iter().filter_map(|part| part["text"].as_str()).collect::<Vec<_>>().join("\n"),
        content => content.as_str().unwrap_or_default().to_string(),
    }
}

/// `usage` of a chat: cached tokens are counted apart here.
fn usage_of(usage: &Value) -> Value {
    let count = |at: &str| usage.pointer(at).and_then(Value::as_u64).unwrap_or(0);
    let cached = count("/prompt_tokens_details/cached_tokens");
    json!({"input_tokens": count("/prompt_tokens") - cached, "output_tokens": count("/completion_tokens"),
        "cache_read_input_tokens": cached})
}

fn stop_reason(reason: &str) -> &'static str {
    if reason == "length" { "max_tokens" } else { "end_turn" }
}

/// A finished answer; `usage` is that of a chat.
pub(super) fn body(id: &str, model: &str, text: &str, reason: &str, usage: &Value) -> Value {
    json!({"id": id, "type": "message", "role": "assistant", "model": model,
        "content": [{"type": "text", "text": text}], "stop_reason": stop_reason(reason), "stop_sequence": null,
        "usage": usage_of(usage)})
}

/// The events before the first word.
pub(super) fn start(out: &mut Vec<u8>, id: &str, model: &str, prompt_tokens: usize) {
    let message = json!({"id": id, "type": "message", "role": "assistant", "model": model, "content": [],
        "stop_reason": null, "stop_sequence": null, "usage": {"input_tokens": prompt_tokens, "output_tokens": 0}});
    event(out, json!({"type": "message_start", "message": message}));
    event(out, json!({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}));
}

pub(super) fn word(out: &mut Vec<u8>, text: &str) {
    event(out, json!({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}));
}

/// The events behind the last word; `usage` is that of a chat.
pub(super) fn end(out: &mut Vec<u8>, reason: &str, usage: &Value) {
    event(out, json!({"type": "content_block_stop", "index": 0}));
    let delta = json!({"stop_reason": stop_reason(reason), "stop_sequence": null});
    event(out, json!({"type": "message_delta", "delta": delta, "usage": usage_of(usage)}));
    event(out, json!({"type": "message_stop"}));
}

/// The last event of a stream that was aborted.
pub(super) fn aborted(out: &mut Vec<u8>) {
    event(out, json!({"type": "error", "error": {"type": "api_error", "message": "aborted"}}));
}

fn event(out: &mut Vec<u8>, data: Value) {
    let name = data["type"].as_str().unwrap_or_default();
    out.extend_from_slice(format!("event: {name}\ndata: {data}\n\n").as_bytes());
}

/// An error in Anthropic's form.
pub(super) fn error_body(error: &ApiError) -> Value {
    let told = error.body();
    json!({"type": "error", "error": {"type": told["error"]["type"], "message": told["error"]["message"]}})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_is_a_chat() {
        let body = json!({"system": [{"type": "text", "text": "S"}, {"type": "text", "text": "T"}], "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": [{"type": "text", "text": "b"},
                {"type": "tool_use", "id": "t", "name": "f", "input": {"x": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t",
                "content": [{"type": "text", "text": "r"}]}]}]});
        let call = json!({"id": "t", "type": "function", "function": {"name": "f", "arguments": "{\"x\":1}"}});
        let expected = json!({"messages": [{"role": "system", "content": "ST"}, {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "t", "content": "r"}]});
        assert_eq!(as_chat(&body), Some(expected));
        assert_eq!(as_chat(&json!({"model": "m"})), None);
    }
}
