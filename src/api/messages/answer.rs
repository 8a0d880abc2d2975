//! A chat completion as a message.

use bytes::Bytes;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{ChatUsage, call_id, message_id, stop_reason};

#[derive(Deserialize)]
struct Chat {
    #[serde(default)]
    id: Option<String>,
    choices: Vec<Choice>,
    #[serde(default)]
    usage: Option<ChatUsage>,
}

#[derive(Deserialize)]
struct Choice {
    message: ChatMessage,
    #[serde(default)]
    finish_reason: Option<String>,
    /// vLLM's name of the stop that was matched, then SGLang's.
    #[serde(default)]
    stop_reason: Option<Value>,
    #[serde(default)]
    matched_stop: Option<Value>,
}

#[derive(Deserialize)]
struct ChatMessage {
    #[serde(default)]
    content: Option<String>,
    #[serde(default)]
    reasoning: Option<String>,
    #[serde(default)]
    reasoning_content: Option<String>,
    #[serde(default)]
    tool_calls: Option<Vec<Call>>,
}

#[derive(Deserialize)]
struct Call {
    #[serde(default)]
    id: Option<String>,
    function: Function,
}

#[derive(Deserialize)]
struct Function {
    name: String,
    #[serde(default)]
    arguments: String,
}

/// The message that a chat completion says; `None` for what is no chat completion. `model` is the client's name of it.
pub fn message_of_chat(chat: &[u8], model: &str) -> Option<Bytes> {
    let Chat { id, choices, usage } = serde_json::from_slice(chat).ok()?;
    let Choice { message, finish_reason, stop_reason: matched, matched_stop } = choices.into_iter().next()?;
    let mut content = Vec::new();
    // No worker signs what it has thought; the member is required.
    let reasoning = message.reasoning.or(message.reasoning_content).filter(|text| !text.is_empty());
    content.extend(reasoning.map(|text| json!({"type": "thinking", "thinking": text, "signature": ""})));
    let text = message.content.filter(|text| !text.is_empty());
    content.extend(text.map(|text| json!({"type": "text", "text": text})));
    let calls = message.tool_calls.unwrap_or_default();
    let has_tool = !calls.is_empty();
    content.extend(calls.into_iter().map(|call| {
        json!({"type": "tool_use", "id": call_id(call.id), "name": call.function.name,
            "input": input_of(&call.function.arguments)})
    }));
    if content.is_empty() {
        // Clients read `content[0]`.
        content.push(json!({"type": "text", "text": ""}));
    }
    let (reason, sequence) = stop_reason(finish_reason.as_deref(), matched.or(matched_stop).as_ref(), has_tool);
    let message = json!({"id": message_id(id.as_deref()), "type": "message", "role": "assistant", "model": model,
        "content": content, "stop_reason": reason, "stop_sequence": sequence,
        "usage": usage.unwrap_or_default().of_message()});
    Some(Bytes::from(message.to_string()))
}

/// What is no object is no input: an empty one.
fn input_of(arguments: &str) -> Value {
    serde_json::from_str(arguments).ok().filter(Value::is_object).unwrap_or_else(|| json!({}))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(choice: Value, content: Value, reason: &str, sequence: Value) {
        let chat = json!({"id": "chatcmpl-1", "choices": [choice], "usage": {"prompt_tokens": 9, "completion_tokens": 2,
            "prompt_tokens_details": {"cached_tokens": 4}}});
        let message = message_of_chat(chat.to_string().as_bytes(), "claude").unwrap();
        let expected = json!({"id": "msg_1", "type": "message", "role": "assistant", "model": "claude",
            "content": content, "stop_reason": reason, "stop_sequence": sequence,
            "usage": {"input_tokens": 5, "output_tokens": 2, "cache_read_input_tokens": 4,
                "cache_creation_input_tokens": 0}});
        assert_eq!(serde_json::from_slice::<Value>(&message).unwrap(), expected);
    }

    #[test]
    fn content_and_the_reason_of_its_end() {
        let text = json!([{"type": "text", "text": "Hi"}]);
        let said = json!({"content": "Hi"});
        let end =
            |finish: &str, matched: Value| json!({"message": said, "finish_reason": finish, "stop_reason": matched});
        check(end("stop", Value::Null), text.clone(), "end_turn", Value::Null);
        check(end("stop", json!(151645)), text.clone(), "end_turn", Value::Null);
        check(end("stop", json!("END")), text.clone(), "stop_sequence", json!("END"));
        check(
            json!({"message": said, "finish_reason": "stop", "matched_stop": "END"}),
            text.clone(),
            "stop_sequence",
            json!("END"),
        );
        check(end("length", Value::Null), text.clone(), "max_tokens", Value::Null);
        check(end("content_filter", Value::Null), text, "end_turn", Value::Null);
        check(json!({"message": {"content": null}}), json!([{"type": "text", "text": ""}]), "end_turn", Value::Null);
        let call =
            |arguments: &str| json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}});
        check(
            json!({"message": {"reasoning": "Hm.", "content": "So", "tool_calls": [call("{\"a\":1}"), call("oops")]},
                "finish_reason": "stop"}),
            json!([{"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "So"},
                {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
                {"type": "tool_use", "id": "c", "name": "f", "input": {}}]),
            "tool_use",
            Value::Null,
        );
    }

    #[test]
    fn what_is_no_chat_is_no_message() {
        for body in ["", "{}", r#"{"choices":[]}"#, r#"{"choices":[{"text":"x"}]}"#] {
            assert_eq!(message_of_chat(body.as_bytes(), "m"), None, "{body}");
        }
    }
}
