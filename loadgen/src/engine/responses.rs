//! Owns the shapes of `/v1/responses`: its input as a chat, its answer. Never generates and never does IO.

use serde_json::{Value, json};

/// The body as the chat that the model sees; nothing without an input.
pub(super) fn as_chat(body: &Value) -> Option<Value> {
    let mut messages = Vec::new();
    if let Some(instructions) = body["instructions"].as_str() {
        messages.push(json!({"role": "system", "content": instructions}));
    }
    match &body["input"] {
        Value::String(text) => messages.push(json!({"role": "user", "content": text})),
        Value::Array(items) => messages.extend(items.iter().map(as_message)),
        _ => return None,
    }
    Some(json!({"messages": messages}))
}

/// One input item; what is no message is shown to the model as its JSON.
fn as_message(item: &Value) -> Value {
    let role = item["role"].as_str().unwrap_or("user");
    let content = match &item["content"] {
        Value::Null => json!(item.to_string()),
        // `input_text`, `output_text` and `input_image` have the members that chat parts have.
        content => content.clone(),
    };
    json!({"role": role, "content": content})
}

/// A finished answer; `usage` is that of a chat.
pub(super) fn body(id: &str, created: u64, model: &str, text: &str, reason: &str, usage: &Value) -> Value {
    let is_cut = reason == "length";
    json!({"id": id, "object": "response", "created_at": created, "model": model,
        "status": if is_cut { "incomplete" } else { "completed" },
        "incomplete_details": is_cut.then(|| json!({"reason": "max_output_tokens"})),
        "output": [{"type": "message", "id": format!("msg_{id}"), "role": "assistant", "status": "completed",
            "content": [{"type": "output_text", "text": text, "annotations": []}]}],
        "usage": {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"],
            "total_tokens": usage["total_tokens"], "input_tokens_details": usage["prompt_tokens_details"]}})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn input_is_text_or_a_list_of_items() {
        let check = |body: Value, messages: Value| {
            assert_eq!(as_chat(&body), Some(json!({"messages": messages})), "{body}");
        };
        check(json!({"input": "a"}), json!([{"role": "user", "content": "a"}]));
        let parts = json!([{"type": "input_text", "text": "b"}]);
        check(
            json!({"instructions": "i", "input": [{"role": "assistant", "content": parts}]}),
            json!([{"role": "system", "content": "i"}, {"role": "assistant", "content": parts}]),
        );
        assert_eq!(as_chat(&json!({"model": "m"})), None);
    }
}
