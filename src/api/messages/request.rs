//! A Messages body as the chat-completions body that asks for the same.

use bytes::Bytes;
use serde_json::value::RawValue;

use crate::prompt::messages::{Purpose, TemplateTraits, chat_body};
use crate::prompt::outline::Outline;
use crate::prompt::{EngineRules, NoBlocks, PromptBody};

/// Members that mean the same in both forms, by their names there and here. Those behind the first five are engines' own.
const COPIED: [(&str, &str); 13] = [
    ("model", "model"),
    ("max_tokens", "max_tokens"),
    ("temperature", "temperature"),
    ("top_p", "top_p"),
    ("stop_sequences", "stop"),
    ("top_k", "top_k"),
    ("seed", "seed"),
    ("ignore_eos", "ignore_eos"),
    ("cache_salt", "cache_salt"),
    ("extra_key", "extra_key"),
    ("lora_path", "lora_path"),
    ("priority", "priority"),
    ("vllm_xargs", "vllm_xargs"),
];

/// The chat. Values that are copied keep their spelling. `budget_tokens` of thinking has no counterpart and is not
/// enforced.
///
/// # Errors
/// What the body has that no chat can say, for a 400; the text is for the client.
pub fn chat_of_messages(body: &Bytes, engine: EngineRules, traits: TemplateTraits) -> Result<Bytes, String> {
    let mut prompt = PromptBody::default();
    let outline = Outline::read_with(body, |reader, key| prompt.member(reader, key, |look| look.pass()))
        .map_err(|error| error.to_string())?;
    let chat = chat_body(prompt, engine, traits, Purpose::Send).map_err(refused)?;
    let mut out = Vec::with_capacity(body.len() + body.len() / 8 + 64);
    out.push(b'{');
    for (name, there) in COPIED {
        if let Some(value) = outline.raw(name).filter(|value| !matches!(*value, b"null" | b"[]")) {
            member(&mut out, there, value);
        }
    }
    let made = [
        ("messages", chat.messages),
        ("tools", chat.tools),
        ("tool_choice", chat.tool_choice),
        ("reasoning_effort", chat.reasoning_effort),
        ("chat_template_kwargs", chat.chat_template_kwargs),
    ];
    for (name, value) in made {
        let Some(value) = value else { continue };
        member(&mut out, name, b"");
        value.write_json(&mut out);
    }
    if outline.raw("stream") == Some(b"true") {
        member(&mut out, "stream", b"true");
        member(&mut out, "stream_options", br#"{"include_usage":true}"#);
    }
    if part::<ToolChoice>(&outline, "tool_choice").is_some_and(|choice| choice.disable_parallel_tool_use) {
        member(&mut out, "parallel_tool_calls", b"false");
    }
    if let Some(user) = part::<Metadata>(&outline, "metadata").and_then(|metadata| metadata.user_id) {
        member(&mut out, "user", user.get().as_bytes());
    }
    if let Some(schema) =
        part::<OutputConfig>(&outline, "output_config").and_then(|config| config.format).and_then(|it| it.schema)
    {
        let format = format!(r#"{{"type":"json_schema","json_schema":{{"name":"json_schema","schema":{schema}}}}}"#);
        member(&mut out, "response_format", format.as_bytes());
    }
    out.push(b'}');
    Ok(Bytes::from(out))
}

fn refused(refusal: NoBlocks) -> String {
    match refusal {
        NoBlocks::NoPrompt => "`messages` is required and must not be empty".to_owned(),
        NoBlocks::Unsupported(what) => format!("this model's workers speak chat completions, which has no {what}"),
        _ => "a member has a type that the Messages API does not take".to_owned(),
    }
}

fn member(out: &mut Vec<u8>, name: &str, value: &[u8]) {
    if out.last() != Some(&b'{') {
        out.push(b',');
    }
    out.extend_from_slice(format!("\"{name}\":").as_bytes());
    out.extend_from_slice(value);
}

#[derive(serde::Deserialize)]
struct ToolChoice {
    #[serde(default)]
    disable_parallel_tool_use: bool,
}

#[derive(serde::Deserialize)]
struct Metadata<'a> {
    #[serde(borrow)]
    user_id: Option<&'a RawValue>,
}

#[derive(serde::Deserialize)]
struct OutputConfig<'a> {
    #[serde(borrow)]
    format: Option<Format<'a>>,
}

#[derive(serde::Deserialize)]
struct Format<'a> {
    #[serde(borrow)]
    schema: Option<&'a RawValue>,
}

/// A member in a form of its own; nothing where it has another form.
fn part<'a, T: serde::Deserialize<'a>>(outline: &'a Outline, name: &str) -> Option<T> {
    serde_json::from_slice(outline.raw(name)?).ok()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn chat(body: &str) -> Result<Value, String> {
        let chat = chat_of_messages(&Bytes::copy_from_slice(body.as_bytes()), EngineRules::Vllm, Default::default())?;
        Ok(serde_json::from_slice(&chat).unwrap())
    }

    #[test]
    fn every_member_goes_to_its_counterpart() {
        let body = json!({"model": "m", "max_tokens": 9, "system": "S", "messages": [{"role": "user", "content": "é\n"}],
            "stop_sequences": ["a"], "temperature": 0.5, "top_p": null, "top_k": 4, "stream": true, "cache_salt": "s",
            "metadata": {"user_id": "u\"1"}, "tool_choice": {"type": "any", "disable_parallel_tool_use": true},
            "tools": [{"name": "f", "input_schema": {"type": "object"}}], "service_tier": "auto",
            "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}}});
        let expected = json!({"model": "m", "max_tokens": 9, "temperature": 0.5, "stop": ["a"], "top_k": 4,
            "cache_salt": "s",
            "messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "é\n"}],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
            "tool_choice": "required", "reasoning_effort": "low", "stream": true,
            "stream_options": {"include_usage": true}, "parallel_tool_calls": false, "user": "u\"1",
            "response_format": {"type": "json_schema",
                "json_schema": {"name": "json_schema", "schema": {"type": "object"}}}});
        assert_eq!(chat(&body.to_string()).unwrap(), expected);
    }

    #[test]
    fn numbers_keep_their_spelling() {
        let body = Bytes::from_static(
            br#"{"temperature":0.30000000000000004,"seed":9223372036854775808,"messages":[{"role":"user","content":"x"}],
            "tools":[{"name":"f","input_schema":{"maximum":12345678901234567890123}}]}"#,
        );
        let chat = chat_of_messages(&body, EngineRules::Vllm, Default::default()).unwrap();
        let chat = std::str::from_utf8(&chat).unwrap();
        for spelled in ["0.30000000000000004", "9223372036854775808", "12345678901234567890123"] {
            assert!(chat.contains(spelled), "{chat}");
        }
    }

    #[test]
    fn what_no_chat_can_say_is_the_clients_to_know() {
        let check = |body: &str, said: &str| {
            let error = chat(body).unwrap_err();
            assert!(error.contains(said), "{error:?} does not say {said:?}");
        };
        check("{", "line 1");
        check("[]", "messages");
        check(r#"{"messages":[]}"#, "messages");
        check(r#"{"messages":[{"role":"user","content":[{"type":"document"}]}]}"#, "content block");
        check(r#"{"messages":[{"role":"user","content":"x"}],"tools":[{"name":"f"}]}"#, "input_schema");
        check(r#"{"messages":"x"}"#, "type");
    }
}
