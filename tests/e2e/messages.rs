//! Anthropic's Messages: natively where a worker knows them, as chats where it does not, over pairs, and the counting of
//! tokens. The bodies of scripted workers are those that engines send.

use loadgen::engine::events::EngineStyle;
use loadgen::engine::{Engine, EngineConfig, EngineHandle};
use serde_json::{Value, json};

use crate::pd;
use crate::support::PATIENCE;
use crate::support::client::{self, Answer};
use crate::support::router::{Router, Start, router};
use crate::support::wait_until;
use crate::support::worker::{Conversation, Seen, Then, Worker, dead_address, json_worker, worker};

const NOT_FOUND: &str = r#"{"detail":"Not Found"}"#;

fn messages(text: &str) -> String {
    json!({"model": "demo", "max_tokens": 4, "messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]})
        .to_string()
}

fn engine(style: EngineStyle, speaks_messages: bool) -> EngineHandle {
    Engine::start(EngineConfig { style, speaks_messages, ..EngineConfig::default() }).unwrap()
}

fn tokenizer() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    loadgen::prompt::write_shipped_tokenizer(directory.path()).unwrap();
    directory
}

fn over(engines: &[EngineHandle], tokenizer: &tempfile::TempDir) -> Start {
    let start = router().args(&["--router-tokenizer-path", tokenizer.path().to_str().unwrap()]);
    engines.iter().fold(start, |start, engine| start.args(&["--worker", &engine.worker_flag()]))
}

/// A worker that knows chats alone; `chat` answers them.
fn chat_worker(chat: impl Fn(&Seen, &mut Conversation<'_>) -> Then + Send + Sync + 'static) -> Worker {
    worker(move |seen, conversation| match seen.target.starts_with("/v1/chat/completions") {
        true => chat(seen, conversation),
        false => conversation.json(404, NOT_FOUND),
    })
}

fn error_of(answer: &Answer) -> (String, String) {
    let body = answer.json();
    assert_eq!(body["type"], "error", "{body}");
    let text = |name: &str| body["error"][name].as_str().unwrap().to_owned();
    (text("type"), text("message"))
}

/// Event names and data of a stream.
fn events(answer: &Answer) -> Vec<Value> {
    let text = answer.text();
    let parsed = text.split_terminator("\n\n").map(|event| {
        let (name, data) = event.strip_prefix("event: ").and_then(|event| event.split_once("\ndata: ")).unwrap();
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!(data["type"], name);
        data
    });
    parsed.collect()
}

fn text_of(events: &[Value]) -> String {
    events.iter().filter_map(|event| event["delta"]["text"].as_str()).collect()
}

fn asks_of(worker: &Worker, path: &str) -> Vec<Value> {
    let of_path = worker.seen().into_iter().filter(|seen| seen.target == path);
    of_path.map(|seen| serde_json::from_slice(&seen.body).unwrap()).collect()
}

#[test]
fn a_worker_that_knows_messages_gets_the_clients_own_bytes() {
    let body = r#"{ "model":"m","messages":[ {"role":"user","content":"h\u00e9"} ],"max_tokens":9,"temperature":1.0,"x":{"é":1}}"#;
    let answer = r#"{"type":"message","usage":{"input_tokens":5,"cache_read_input_tokens":2,"output_tokens":3}}"#;
    let worker = json_worker(answer);
    let router = router().worker(worker.address).ready();
    let got = client::exchange(
        router.address,
        "POST",
        "/v1/messages?beta=true",
        "anthropic-version: 2023-06-01\r\n",
        body.as_bytes(),
    );
    assert_eq!((got.status, got.text().as_str()), (200, answer));
    let seen = &worker.seen()[0];
    assert_eq!((seen.target.as_str(), seen.body.as_slice()), ("/v1/messages?beta=true", body.as_bytes()));
    assert_eq!(seen.header("anthropic-version"), Some("2023-06-01"));
    assert_eq!(router.metric_sum("infera_prompt_tokens_total"), 7.0);
    assert_eq!(router.metric_sum("infera_generation_tokens_total"), 3.0);
    // Its own refusals are its own: an unknown model is not an unknown path.
    let refusal = r#"{"type":"error","error":{"type":"not_found_error","message":"no such model"}}"#;
    let refusing = crate::support::worker::worker(move |_, conversation| conversation.json(404, refusal));
    let router = crate::support::router::router().round_robin().worker(refusing.address).ready();
    for _ in 0..2 {
        let got = router.post("/v1/messages", body);
        assert_eq!((got.status, got.text().as_str()), (404, refusal));
    }
    assert!(refusing.seen().iter().all(|seen| seen.target == "/v1/messages"));
}

/// The same conversation as a message, as a chat, and as a message again: one prompt, one worker, hits from the second on.
#[test]
fn messages_are_routed_by_the_prompt_that_their_engine_renders() {
    let tokenizer = tokenizer();
    for (style, speaks) in [(EngineStyle::Vllm, true), (EngineStyle::Sglang, true), (EngineStyle::Vllm, false)] {
        let engines: Vec<_> = (0..3).map(|_| engine(style, speaks)).collect();
        let router = over(&engines, &tokenizer).ready();
        wait_until("every event feed is connected", || router.metric_sum("infera_router_kv_events_connected") == 3.0);
        let text = "Prefixes stay warm where they were computed. ".repeat(60);
        let body = messages(&text);
        let first = router.post("/v1/messages", &body).json();
        assert_eq!(first["usage"]["cache_read_input_tokens"], 0, "{first}");
        assert_eq!((&first["type"], &first["stop_reason"]), (&json!("message"), &json!("max_tokens")));
        let total = |engine: &EngineHandle| engine.state().totals().prompt_tokens;
        let computed: u64 = engines.iter().map(total).sum();
        wait_until("the prompt's blocks are known", || {
            router.metric_sum("infera_router_index_blocks") as u64 >= computed / 16
        });
        let chat = json!({"model": "demo", "max_tokens": 4, "messages": [{"role": "user", "content": text}]});
        let chat = router.post("/v1/chat/completions", &chat.to_string()).json();
        let prompt = chat["usage"]["prompt_tokens"].as_u64().unwrap();
        assert!(chat["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() + 16 >= prompt, "{chat}");
        let again = router.post("/v1/messages", &body).json();
        assert!(again["usage"]["cache_read_input_tokens"].as_u64().unwrap() + 16 >= prompt, "{style:?} {again}");
        assert_eq!(again["content"], first["content"], "the same words, natively or not");
        // What was predicted is what was there.
        let hits = router.metric_sum("infera_prefix_cache_blocks_hit_total") as u64;
        let cached: u64 = engines.iter().map(|engine| engine.state().totals().cached_tokens).sum();
        assert_eq!(hits, cached.div_ceil(16));
        router.wait_for_rest();
    }
}

#[test]
fn a_worker_that_knows_chats_alone_is_asked_for_the_same_as_a_chat() {
    let worker = chat_worker(|seen, conversation| {
        assert_eq!(seen.header("accept-encoding"), None, "the answer is read here");
        conversation.json(200, r#"{"id":"chatcmpl-9","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":null,"reasoning_content":"Hm.","tool_calls":[{"id":"call_1","type":"function","function":{"name":"weather","arguments":"{\"place\": \"Bonn\"}"}}]},"finish_reason":"tool_calls"}],"usage":{"prompt_tokens":20,"completion_tokens":8,"prompt_tokens_details":{"cached_tokens":16}}}"#)
    });
    let router = router().round_robin().worker(worker.address).ready();
    let body = json!({"model": "m", "max_tokens": 64, "system": "Short.", "stop_sequences": ["END"],
        "tools": [{"name": "weather", "description": "d", "input_schema": {"type": "object"}}],
        "messages": [{"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "weather", "input": {"place": "Köln"}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "rain"},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}]}]});
    for _ in 0..3 {
        let answer = client::exchange(
            router.address,
            "POST",
            "/v1/messages",
            "Accept-Encoding: gzip\r\n",
            body.to_string().as_bytes(),
        );
        let expected = json!({"id": "msg_9", "type": "message", "role": "assistant", "model": "m",
            "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"place": "Bonn"}}],
            "stop_reason": "tool_use", "stop_sequence": null,
            "usage": {"input_tokens": 4, "output_tokens": 8, "cache_read_input_tokens": 16,
                "cache_creation_input_tokens": 0}});
        assert_eq!((answer.status, answer.json()), (200, expected));
    }
    assert_eq!(asks_of(&worker, "/v1/messages").len(), 1, "what a worker does not know is asked once");
    let function = json!({"name": "weather", "description": "d", "parameters": {"type": "object"}});
    let call = json!({"name": "weather", "arguments": "{\"place\": \"K\\u00f6ln\"}"});
    let image = json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}});
    let expected = json!({"model": "m", "max_tokens": 64, "stop": ["END"],
        "messages": [{"role": "system", "content": "Short."}, {"role": "user", "content": "Weather?"},
            {"role": "assistant", "tool_calls": [{"id": "t1", "type": "function", "function": call}]},
            {"role": "tool", "content": "rain", "tool_call_id": "t1"}, {"role": "user", "content": [image]}],
        "tools": [{"type": "function", "function": function}]});
    let chats = asks_of(&worker, "/v1/chat/completions");
    assert_eq!((chats.len(), &chats[0]), (3, &expected));
    assert_eq!(router.metric_sum("infera_prompt_tokens_total"), 60.0);
    router.logged(&["does not know /v1/messages"]);
}

#[test]
fn a_translated_stream_ends_as_its_chat_ends() {
    let word = |text: &str| {
        format!(
            "data: {{\"id\":\"chatcmpl-1\",\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"{text}\"}},\"finish_reason\":null}}]}}\n\n"
        )
    };
    let worker = chat_worker(move |seen, conversation| {
        let asked: Value = serde_json::from_slice(&seen.body).unwrap();
        assert_eq!(asked["stream_options"]["include_usage"], true);
        conversation.sse_head();
        // An event in two pieces, and two in one.
        let first = word("Hé");
        let (head, tail) = first.split_at(30);
        conversation.chunk(head);
        conversation.chunk(&format!("{tail}{}", word("llo")));
        match asked["messages"][0]["content"].as_str().unwrap() {
            "cut" => return conversation.reset(),
            "short" => return conversation.last_chunk(),
            "error" => {
                conversation
                    .chunk("data: {\"error\":{\"message\":\"out of memory\",\"code\":500}}\n\ndata: [DONE]\n\n");
            }
            _ => {
                conversation.chunk("data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n");
                conversation.chunk("data: {\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":2}}\n\ndata: [DONE]\n\n");
            }
        }
        conversation.last_chunk()
    });
    let router = router().round_robin().worker(worker.address).args(&["--breaker-failure-threshold", "0"]).ready();
    let ask = |text: &str| {
        let body =
            json!({"model": "m", "max_tokens": 9, "stream": true, "messages": [{"role": "user", "content": text}]});
        router.post("/v1/messages", &body.to_string())
    };
    let answer = ask("whole");
    assert_eq!((answer.status, answer.complete), (200, true));
    assert_eq!(answer.header("content-type"), Some("text/event-stream"));
    assert_eq!(answer.header("x-accel-buffering"), Some("no"));
    let found = events(&answer);
    assert_eq!(text_of(&found), "Héllo");
    let last: Vec<&str> = found.iter().rev().take(3).map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(last, ["message_stop", "message_delta", "content_block_stop"]);
    let delta = &found[found.len() - 2];
    assert_eq!((&delta["delta"]["stop_reason"], &delta["usage"]["output_tokens"]), (&json!("end_turn"), &json!(2)));
    for (text, said, complete) in
        [("cut", "before its end", false), ("short", "before its end", false), ("error", "out of memory", true)]
    {
        let answer = ask(text);
        let found = events(&answer);
        let last = found.last().unwrap();
        assert_eq!(last["type"], "error", "{text}: {found:?}");
        assert!(last["error"]["message"].as_str().unwrap().contains(said), "{text}: {last}");
        assert_eq!(answer.complete, complete, "{text}: a cut answer is never finished politely");
    }
    router.wait_for_rest();
}

#[test]
fn a_client_that_leaves_a_translated_stream_is_left_by_its_worker() {
    let tokenizer = tokenizer();
    let engines = [engine(EngineStyle::Vllm, false)];
    let router = over(&engines, &tokenizer).ready();
    let body = json!({"model": "demo", "max_tokens": 100_000, "stream": true, "ignore_eos": true,
        "messages": [{"role": "user", "content": "Talk."}]});
    let mut connection = client::Connection::open(router.address);
    connection.send(&client::request("POST", "/v1/messages", "", body.to_string().as_bytes()));
    assert_eq!(connection.head().unwrap().0, 200);
    assert!(connection.chunk().unwrap().unwrap().starts_with(b"event: message_start\n"));
    drop(connection);
    assert!(engines[0].wait_until(PATIENCE, |state| state.is_idle()), "the client that left was aborted");
    assert_eq!(engines[0].state().totals().aborted, 1);
    router.wait_for_rest();
}

#[test]
fn errors_have_the_shape_of_anthropic() {
    let tired = chat_worker(|_, conversation| {
        conversation.json(400, r#"{"error":{"message":"max_tokens is too large","type":"BadRequestError","code":400}}"#)
    });
    let router = router().worker(tired.address).ready();
    let check = |body: &str, status: u16, kind: &str, said: &str| {
        let answer = router.post("/v1/messages", body);
        assert_eq!(answer.status, status, "{}", answer.text());
        let (found, message) = error_of(&answer);
        assert_eq!(found, kind, "{message}");
        assert!(message.contains(said), "{message:?} does not say {said:?}");
    };
    let plain = |model: &str| json!({"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]});
    check(&plain("m").to_string(), 400, "invalid_request_error", "too large");
    check(&plain("absent").to_string(), 404, "not_found_error", "absent");
    check("{", 400, "invalid_request_error", "line 1");
    let odd = chat_worker(|_, conversation| conversation.json(200, r#"{"choices":[]}"#));
    let over_odd = crate::support::router::router().round_robin().worker(odd.address).ready();
    let answer = over_odd.post("/v1/messages", &plain("m").to_string());
    assert_eq!((answer.status, error_of(&answer).0.as_str()), (502, "api_error"));
    wait_until("the failure is counted", || {
        over_odd.metric(r#"infera_requests_total{outcome="error",router="mixed"}"#) == Some(1.0)
    });
    let document = json!({"model": "m", "messages": [{"role": "user", "content": [{"type": "document"}]}]});
    check(&document.to_string(), 400, "invalid_request_error", "content block");
    assert_eq!(router.get("/v1/messages").status, 405);

    let mut keys = tempfile::NamedTempFile::new().unwrap();
    std::io::Write::write_all(&mut keys, b"sk-ours\n").unwrap();
    let dead = dead_address();
    let closed = crate::support::router::router()
        .round_robin()
        .worker(dead)
        .args(&["--api-key-file", keys.path().to_str().unwrap()])
        .ready();
    let ask = |key: &str| {
        let headers = format!("X-Api-Key: {key}\r\n");
        let body = plain("m").to_string();
        client::exchange(closed.address, "POST", "/v1/messages", &headers, body.as_bytes())
    };
    let answer = ask("sk-other");
    assert_eq!((answer.status, error_of(&answer).0.as_str()), (401, "authentication_error"));
    let answer = ask("sk-ours");
    assert_eq!((answer.status, error_of(&answer).0.as_str()), (502, "api_error"));
}

#[test]
fn a_pair_serves_messages_as_chats() {
    let prefill = pd::done();
    let decode = pd::leg(|seen, conversation| {
        assert_eq!((seen.target.as_str(), seen.header("accept-encoding")), ("/v1/chat/completions", None));
        let asked: Value = serde_json::from_slice(&seen.body).unwrap();
        if asked["stream"] != true {
            return conversation.json(200, r#"{"choices":[{"message":{"content":"Hi"},"finish_reason":"stop"}],"usage":{"prompt_tokens":3,"completion_tokens":1}}"#);
        }
        conversation.sse_head();
        conversation.chunk(
            "data: {\"choices\":[{\"delta\":{\"content\":\"Hi\"},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n",
        );
        conversation.last_chunk()
    });
    let router = pd::sglang(&[prefill.address], &[decode.address]);
    let ask = |stream: bool| {
        let body = json!({"model": "m", "max_tokens": 9, "stream": stream, "system": "S",
            "messages": [{"role": "user", "content": "x"}]});
        client::exchange(
            router.address,
            "POST",
            "/v1/messages",
            "Accept-Encoding: gzip\r\n",
            body.to_string().as_bytes(),
        )
    };
    let answer = ask(false);
    assert_eq!(answer.json()["content"], json!([{"type": "text", "text": "Hi"}]), "{}", answer.text());
    let found = events(&ask(true));
    assert_eq!((text_of(&found).as_str(), &found.last().unwrap()["type"]), ("Hi", &json!("message_stop")));
    let bodies = pd::wait_for_bodies(&prefill, 2);
    // In no order: a prefill leg may be read late.
    let rooms: Vec<&Value> = bodies.iter().map(|body| &body["bootstrap_room"]).collect();
    for body in pd::bodies(&decode) {
        assert!(rooms.contains(&&body["bootstrap_room"]), "{body} and {rooms:?}");
        assert_eq!(body["messages"], json!([{"role": "system", "content": "S"}, {"role": "user", "content": "x"}]));
    }
    pd::at_rest(&router);
    // Decode's refusal comes in the client's words too.
    let refusing = pd::leg(|_, conversation| conversation.json(400, r#"{"error":{"message":"no"}}"#));
    let prefill = pd::held();
    let router = pd::sglang(&[prefill.address], &[refusing.address]);
    let answer = router.post("/v1/messages", r#"{"model":"m","messages":[{"role":"user","content":"x"}]}"#);
    assert_eq!((answer.status, error_of(&answer)), (400, ("invalid_request_error".to_owned(), "no".to_owned())));
}

fn count(router: &Router, path: &str, body: &Value) -> Answer {
    router.post(path, &body.to_string())
}

#[test]
fn tokens_are_counted_as_the_engine_counts_them() {
    let tokenizer = tokenizer();
    let engines = [engine(EngineStyle::Vllm, true)];
    let router = over(&engines, &tokenizer).ready();
    let body = json!({"model": "demo", "system": "Be kind.", "messages": [{"role": "user", "content": "How many?"}]});
    let counted = count(&router, "/v1/messages/count_tokens", &body).json();
    let of_engine = client::post(engines[0].addr, "/v1/messages/count_tokens", &body.to_string()).json();
    assert_eq!(counted, of_engine);
    assert!(counted["input_tokens"].as_u64().unwrap() > 5);
    let input = json!({"model": "demo", "instructions": "Be kind.", "input": "How many?"});
    let expected = json!({"object": "response.input_tokens", "input_tokens": counted["input_tokens"]});
    assert_eq!(count(&router, "/v1/responses/input_tokens", &input).json(), expected);
    let given = json!({"model": "demo", "input": "hi", "prompt": [1, 2, 3, 4]});
    assert_eq!(count(&router, "/v1/responses/input_tokens", &given).json()["input_tokens"], 4);
    // An image's tokens are the engine's to count.
    let image = json!({"type": "image", "source": {"type": "url", "url": "http://h/i.png"}});
    let body =
        json!({"model": "demo", "messages": [{"role": "user", "content": [image, {"type": "text", "text": "x"}]}]});
    assert_eq!(count(&router, "/v1/messages/count_tokens", &body).status, 200);
    let refused = |body: Value, said: &str| {
        let answer = count(&router, "/v1/responses/input_tokens", &body);
        assert_eq!((answer.status, answer.json()["error"]["type"].as_str()), (400, Some("invalid_request_error")));
        assert!(answer.text().contains(said), "{}", answer.text());
    };
    refused(json!({"model": "demo"}), "`input` is required");
    refused(json!({"model": "demo", "input": "x", "previous_response_id": "resp_1"}), "previous_response_id");
}

#[test]
fn without_a_tokenizer_a_worker_counts_or_nobody() {
    let counting = json_worker(r#"{"input_tokens":42}"#);
    let router = router().round_robin().worker(counting.address).ready();
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "x"}]});
    assert_eq!(count(&router, "/v1/messages/count_tokens", &body).json(), json!({"input_tokens": 42}));
    assert_eq!(asks_of(&counting, "/v1/messages/count_tokens"), std::slice::from_ref(&body));
    let answer = count(&router, "/v1/responses/input_tokens", &json!({"model": "m", "input": "x"}));
    assert_eq!((answer.status, answer.text().contains("tokenizer")), (503, true));
    assert_eq!(
        count(&router, "/v1/responses/input_tokens", &json!({"model":"m","input":"x","prompt":[1,2]})).json()["input_tokens"],
        2
    );

    let chatting = chat_worker(|_, conversation| conversation.json(200, "{}"));
    let router = crate::support::router::router().round_robin().worker(chatting.address).ready();
    let answer = count(&router, "/v1/messages/count_tokens", &body);
    assert_eq!((answer.status, error_of(&answer).0.as_str()), (501, "api_error"));
}
