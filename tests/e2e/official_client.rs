//! The official `openai` and `anthropic` Python clients against the router, over a simulated engine, a scripted one that
//! asks for a tool, and one that cuts its streams.

use std::path::Path;
use std::process::Command;

use loadgen::engine::{Engine, EngineConfig};
use serde_json::{Value, json};

use crate::support::PATIENCE;
use crate::support::router::{Router, router};
use crate::support::worker::{Conversation, Seen, Then, Worker, worker};

const TOOL: &str = r#"{"id":"call_1","index":0,"type":"function","function":{"name":"weather","arguments":""}}"#;

/// A worker of model `tool` that knows chats alone: asks for the weather, and repeats what it was told.
fn asking() -> Worker {
    worker(|seen, conversation| {
        if seen.target != "/v1/chat/completions" {
            return conversation.json(404, r#"{"detail":"Not Found"}"#);
        }
        let body: Value = serde_json::from_slice(&seen.body).unwrap();
        let last = body["messages"].as_array().unwrap().last().unwrap();
        if last["role"] == "tool" {
            let text = format!("{}: {}", last["tool_call_id"].as_str().unwrap(), last["content"].as_str().unwrap());
            return conversation.json(200, &completion(json!({"role": "assistant", "content": text}), "stop"));
        }
        let mut call: Value = serde_json::from_str(TOOL).unwrap();
        if body["stream"] == true {
            return stream_call(&body, &call, conversation);
        }
        call["function"]["arguments"] = r#"{"place":"Bonn"}"#.into();
        let message = json!({"role": "assistant", "content": null, "tool_calls": [call]});
        conversation.json(200, &completion(message, "tool_calls"))
    })
}

fn completion(message: Value, reason: &str) -> String {
    json!({"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "tool",
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}})
    .to_string()
}

fn stream_call(body: &Value, call: &Value, conversation: &mut Conversation<'_>) -> Then {
    let chunk = |choices: Value, usage: Value| {
        let chunk = json!({"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "tool",
            "choices": choices, "usage": usage});
        format!("data: {chunk}\n\n")
    };
    let delta = |delta: Value, reason: Value| {
        chunk(json!([{"index": 0, "delta": delta, "finish_reason": reason}]), Value::Null)
    };
    let arguments =
        |text: &str| delta(json!({"tool_calls": [{"index": 0, "function": {"arguments": text}}]}), Value::Null);
    conversation.sse_head();
    conversation.chunk(&delta(json!({"role": "assistant", "tool_calls": [call]}), Value::Null));
    conversation.chunk(&arguments("{\"place\":"));
    conversation.chunk(&arguments("\"Bonn\"}"));
    conversation.chunk(&delta(json!({}), json!("tool_calls")));
    if body["stream_options"]["include_usage"] == true {
        conversation.chunk(&chunk(json!([]), json!({"prompt_tokens": 9, "completion_tokens": 3})));
    }
    conversation.chunk("data: [DONE]\n\n");
    conversation.last_chunk()
}

/// A worker of model `cut` that resets its stream behind one word, in the form that was asked for.
fn cutting() -> Worker {
    worker(|seen: &Seen, conversation| {
        conversation.sse_head();
        match seen.target.as_str() {
            "/v1/messages" => {
                let message = json!({"id": "msg_1", "type": "message", "role": "assistant", "model": "cut", "content": [],
                    "stop_reason": null, "stop_sequence": null, "usage": {"input_tokens": 1, "output_tokens": 0}});
                let events = [
                    json!({"type": "message_start", "message": message}),
                    json!({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}),
                    json!({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}}),
                ];
                for event in events {
                    conversation.chunk(&format!("event: {}\ndata: {event}\n\n", event["type"].as_str().unwrap()));
                }
            }
            _ => {
                conversation.chunk("data: {\"id\":\"c\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"cut\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"},\"finish_reason\":null}]}\n\n");
            }
        }
        conversation.reset()
    })
}

fn run(script: &str, router: &Router) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let python = root.join("target/python/bin/python");
    assert!(python.exists(), "{} is not there: tests/setup/python_clients.sh makes it", python.display());
    let output = Command::new(python)
        .arg(root.join("tests/e2e").join(script))
        .args([format!("http://{}", router.address).as_str(), "demo", "tool", "cut"])
        .output()
        .expect("python starts");
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}");
    assert!(said.contains("all good"), "{said}");
}

/// Runs a script over an engine that knows Messages or does not.
fn check(script: &str, speaks_messages: bool) {
    let engine = Engine::start(EngineConfig { speaks_messages, ..EngineConfig::default() }).unwrap();
    let (asking, cutting) = (asking(), cutting());
    let tokenizer = tempfile::tempdir().unwrap();
    loadgen::prompt::write_shipped_tokenizer(tokenizer.path()).unwrap();
    let router = router()
        .args(&["--worker", &engine.worker_flag()])
        .args(&["--worker", &format!("http://{},model=tool,block-size=16", asking.address)])
        .args(&["--worker", &format!("http://{},model=cut,block-size=16", cutting.address)])
        .args(&["--router-tokenizer-path", tokenizer.path().to_str().unwrap()])
        .ready();
    run(script, &router);
    router.wait_for_rest();
    assert!(engine.wait_until(PATIENCE, |state| state.is_idle()), "the client that left was aborted at the engine");
}

#[test]
fn openais_client_lists_completes_streams_and_is_cut_off_cleanly() {
    check("openai_client.py", true);
}

#[test]
fn anthropics_client_over_a_worker_that_knows_messages() {
    check("anthropic_client.py", true);
}

#[test]
fn anthropics_client_over_a_worker_that_knows_chats_alone() {
    check("anthropic_client.py", false);
}
