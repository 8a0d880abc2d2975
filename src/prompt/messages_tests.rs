//! Chats made of Messages bodies, against those that the engines' own code made of the same bodies
//! (`tests/fixtures/messages/chats.jsonl`: vLLM 0.32 and SGLang 0.5.23, for templates that take late system messages and
//! for those that do not; no `chat` where the engine refused the body).

use serde_json::value::RawValue;
use serde_json::{Map as JsonMap, Value, json};

use super::*;

const CHATS: &str = include_str!("../../tests/fixtures/messages/chats.jsonl");

/// One line of the fixture; the body in its own spelling.
#[derive(serde::Deserialize)]
struct Case<'a> {
    id: &'a str,
    engine: &'a str,
    late_system: bool,
    #[serde(borrow)]
    body: &'a RawValue,
    chat: Option<Value>,
}

fn made(body: &str, engine: EngineRules, takes_late_system: bool, purpose: Purpose) -> Result<Value, NoBlocks> {
    let traits = TemplateTraits { takes_late_system, has_think_tags: true };
    let chat = chat_body(Body::read(body).unwrap(), engine, traits, purpose)?;
    let members = [
        ("messages", chat.messages),
        ("tools", chat.tools),
        ("tool_choice", chat.tool_choice),
        ("reasoning_effort", chat.reasoning_effort),
        ("chat_template_kwargs", chat.chat_template_kwargs),
    ];
    let members = members.into_iter().filter_map(|(name, value)| {
        let mut text = Vec::new();
        value?.write_json(&mut text);
        Some((name.to_owned(), serde_json::from_slice(&text).unwrap()))
    });
    Ok(Value::Object(members.collect()))
}

/// Without members that are null, which templates are never given.
fn without_nulls(value: &Value) -> Value {
    match value {
        Value::Object(members) => {
            let kept = members.iter().filter(|(_, value)| !value.is_null());
            Value::Object(kept.map(|(name, value)| (name.clone(), without_nulls(value))).collect::<JsonMap<_, _>>())
        }
        Value::Array(items) => items.iter().map(without_nulls).collect(),
        other => other.clone(),
    }
}

#[test]
fn chats_are_those_of_the_engines() {
    let mut checked = 0;
    for line in CHATS.lines() {
        let case: Case<'_> = serde_json::from_str(line).unwrap();
        let engine = EngineRules::of_engine(case.engine);
        let name = format!("{} {engine:?} late {}", case.id, case.late_system);
        match (made(case.body.get(), engine, case.late_system, Purpose::Render), case.chat) {
            (Err(_), None) => {}
            (Ok(mut made), Some(mut expected)) => {
                if engine == EngineRules::Sglang {
                    // Of the two switches the engine sets the one that its template reads.
                    made["chat_template_kwargs"].as_object_mut().map(|kwargs| kwargs.remove("thinking"));
                }
                for chat in [&mut made, &mut expected] {
                    let chat = chat.as_object_mut().unwrap();
                    chat.retain(|name, value| !value.is_null() && (name != "tool_choice" || value != "auto"));
                    chat.remove("tools").map(|tools| chat.insert("tools".into(), in_one_form(&tools)));
                }
                assert_eq!(without_nulls(&made), without_nulls(&expected), "{name}");
            }
            (made, expected) => panic!("{name}: {made:?} instead of {expected:?}"),
        }
        checked += 1;
    }
    assert!(checked > 60, "{checked}");
}

/// vLLM writes `defer_loading` into the function, SGLang beside it; both are read alike.
fn in_one_form(tools: &Value) -> Value {
    let tools = tools.as_array().unwrap().iter().map(|tool| {
        let mut tool = tool.clone();
        let inner = tool["function"].as_object_mut().and_then(|function| function.remove("defer_loading"));
        if let Some(defer) = inner.filter(|defer| !defer.is_null()) {
            tool["defer_loading"] = defer;
        }
        tool
    });
    tools.collect()
}

#[test]
fn images_are_sent_as_parts_and_never_rendered() {
    let block = |source: Value| json!({"type": "image", "source": source});
    let body = json!({"messages": [{"role": "user", "content": [
        block(json!({"type": "base64", "media_type": "image/png", "data": "aGk="})),
        {"type": "text", "text": "What is it?"},
        {"type": "tool_result", "tool_use_id": "t", "content": [
            {"type": "text", "text": "seen"}, block(json!({"type": "url", "url": "http://h/i.png"}))]},
    ]}]});
    let body = body.to_string();
    let url = |url: &str| json!({"type": "image_url", "image_url": {"url": url}});
    let text = |text: &str| json!({"type": "text", "text": text});
    let question = json!({"role": "user", "content": [url("data:image/png;base64,aGk="), text("What is it?")]});
    let vllm = json!([{"role": "tool", "content": "seen", "tool_call_id": "t"},
        {"role": "user", "content": [url("http://h/i.png")]}, question]);
    let sglang = json!([question,
        {"role": "tool", "content": [text("seen"), url("http://h/i.png")], "tool_call_id": "t"}]);
    for (engine, expected) in [(EngineRules::Vllm, vllm), (EngineRules::Sglang, sglang)] {
        assert_eq!(made(&body, engine, false, Purpose::Send).unwrap()["messages"], expected, "{engine:?}");
        assert_eq!(made(&body, engine, false, Purpose::Render), Err(NoBlocks::Multimodal));
    }
}

#[test]
fn what_cannot_be_known_is_refused_for_rendering_alone() {
    let body = json!({"messages": [{"role": "assistant", "content": [
        {"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "A"}]}]});
    let body = body.to_string();
    let chat = |purpose| {
        chat_body(Body::read(&body).unwrap(), EngineRules::Sglang, TemplateTraits::default(), purpose).map(|chat| {
            let Some(Tree::List(messages)) = chat.messages else { panic!("no messages") };
            let Some(Tree::Map(message)) = messages.into_iter().next() else { panic!("no message") };
            message.get("reasoning_content").and_then(Tree::as_text).map(str::to_owned)
        })
    };
    assert_eq!(chat(Purpose::Send), Ok(Some("Hm.".to_owned())));
    assert!(matches!(chat(Purpose::Render), Err(NoBlocks::Unsupported(_))));
}
