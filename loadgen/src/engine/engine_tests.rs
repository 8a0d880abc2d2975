//! Engines over real sockets: OpenAI shapes, aborts, faults, and event streams rebuilt by an independent decoder.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::TcpStream;

use super::*;

const PATIENCE: Duration = Duration::from_secs(20);

fn fast() -> EngineConfig {
    let speed = Speed {
        step_base: Duration::from_micros(500),
        prefill_per_token: Duration::from_micros(1),
        decode_per_sequence: Duration::ZERO,
        decode_per_kilotoken: Duration::ZERO,
        ..Speed::default()
    };
    EngineConfig { speed, ..EngineConfig::default() }
}

fn connect(engine: &EngineHandle) -> TcpStream {
    let stream = TcpStream::connect(engine.addr).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

fn send(stream: &mut TcpStream, method: &str, path: &str, extra: &str, body: &str) {
    let length = body.len();
    let head = format!("{method} {path} HTTP/1.1\r\nhost: test\r\n{extra}content-length: {length}\r\n\r\n");
    stream.write_all((head + body).as_bytes()).unwrap();
}

/// Status and decoded body of one exchange on a fresh connection.
fn exchange(engine: &EngineHandle, method: &str, path: &str, extra: &str, body: &Value) -> (u16, String) {
    let mut stream = connect(engine);
    let body = if body.is_null() { String::new() } else { body.to_string() };
    send(&mut stream, method, path, &format!("connection: close\r\n{extra}"), &body);
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    let text = String::from_utf8(answer).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
    let status = head.split(' ').nth(1).map_or(0, |status| status.parse().unwrap());
    let chunked = head.contains("transfer-encoding: chunked");
    (status, if chunked { unchunk(body) } else { body.to_string() })
}

fn unchunk(mut body: &str) -> String {
    let mut out = String::new();
    while let Some((size, rest)) = body.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap();
        if size == 0 {
            return out;
        }
        out.push_str(&rest[..size]);
        body = &rest[size + 2..];
    }
    panic!("chunked body without its end");
}

fn post(engine: &EngineHandle, path: &str, body: &Value) -> (u16, Value) {
    let (status, text) = exchange(engine, "POST", path, "", body);
    (status, serde_json::from_str(&text).unwrap_or(Value::Null))
}

fn chat(text: &str, more: Value) -> Value {
    let mut body = json!({"model": "demo", "messages": [{"role": "user", "content": text}], "max_tokens": 4});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn events_of(text: &str) -> Vec<Value> {
    let (events, done) = text.strip_suffix("data: [DONE]\n\n").map_or((text, false), |events| (events, true));
    assert!(done, "stream ends with [DONE]: {text}");
    let data = |event: &str| serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap();
    events.split_terminator("\n\n").map(data).collect()
}

#[test]
fn chat_stream_has_openai_shape() {
    let engine = Engine::start(fast()).unwrap();
    let body = chat("able about", json!({"stream": true, "stream_options": {"include_usage": true}}));
    let (status, text) = exchange(&engine, "POST", "/v1/chat/completions", "", &body);
    assert_eq!(status, 200);
    let events = events_of(&text);
    assert_eq!(events.len(), 6, "role, four tokens, usage: {text}");
    assert_eq!(events[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    assert_eq!(events[4]["choices"][0]["finish_reason"], "length");
    assert!(events[1..4].iter().all(|event| event["choices"][0]["finish_reason"].is_null()));
    assert_eq!(events[5]["choices"], json!([]));
    assert_eq!(events[5]["usage"]["completion_tokens"], 4);
    let ids: std::collections::BTreeSet<String> = events.iter().map(|event| event["id"].to_string()).collect();
    assert_eq!(ids.len(), 1);
    let streamed: String =
        events[1..5].iter().map(|it| it["choices"][0]["delta"]["content"].as_str().unwrap()).collect();
    let expected = TextModel::shipped().unwrap().expected_chat_answer(&body, 4).unwrap();
    assert_eq!(streamed, expected);
    let (_, unary) = post(&engine, "/v1/chat/completions", &chat("able about", json!({})));
    assert_eq!(unary["choices"][0]["message"]["content"], expected);
    assert_eq!(unary["usage"]["prompt_tokens"], events[5]["usage"]["prompt_tokens"]);
}

#[test]
fn without_usage_wanted_none_is_sent() {
    let engine = Engine::start(fast()).unwrap();
    let (_, text) = exchange(&engine, "POST", "/v1/chat/completions", "", &chat("able", json!({"stream": true})));
    assert!(events_of(&text).iter().all(|event| event.get("usage").is_none()), "{text}");
}

#[test]
fn completions_take_text_and_ids_and_samples() {
    let engine = Engine::start(fast()).unwrap();
    let body = json!({"model": "demo", "prompt": [[1, 2, 3], [4, 5]], "n": 2, "max_tokens": 3});
    let (status, answer) = post(&engine, "/v1/completions", &body);
    assert_eq!(status, 200);
    assert_eq!(answer["choices"].as_array().unwrap().len(), 4);
    assert_eq!(answer["usage"]["prompt_tokens"], 5);
    assert_eq!(answer["usage"]["completion_tokens"], 12);
    let body = json!({"model": "demo", "prompt": "able about", "max_tokens": 500});
    let (_, answer) = post(&engine, "/v1/completions", &body);
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    assert_eq!(answer["usage"]["completion_tokens"], 256);
    let (_, counted) = post(&engine, "/tokenize", &json!({"prompt": "able about"}));
    assert_eq!(counted["count"], 2);
}

#[test]
fn a_repeated_prompt_reports_cached_tokens() {
    let engine = Engine::start(fast()).unwrap();
    let long = vec!["able about above"; 100].join(" ");
    let (_, first) = post(&engine, "/v1/chat/completions", &chat(&long, json!({})));
    assert!(engine.wait_until(PATIENCE, EngineState::is_idle));
    let resident = engine.state().blocks_resident();
    let (_, second) = post(&engine, "/v1/chat/completions", &chat(&long, json!({})));
    assert_eq!(first["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    assert_eq!(second["usage"]["prompt_tokens_details"]["cached_tokens"], 304);
    assert!(engine.wait_until(PATIENCE, EngineState::is_idle));
    assert_eq!(engine.state().blocks_resident(), resident);
}

#[test]
fn errors_have_openai_shape() {
    let engine = Engine::start(EngineConfig { context_length: 64, ..fast() }).unwrap();
    let check = |body: &str, status: u16| {
        let mut stream = connect(&engine);
        send(&mut stream, "POST", "/v1/chat/completions", "connection: close\r\n", body);
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{body} -> {answer}");
        let body: Value = serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap();
        assert!(body["error"]["message"].is_string() && body["error"]["code"] == status, "{body}");
    };
    check("{nonsense", 400);
    check(&json!({"model": "other", "messages": []}).to_string(), 404);
    check(&chat(&"able ".repeat(80), json!({})).to_string(), 400);
    check(&chat("able", json!({"max_tokens": 64})).to_string(), 400);
    check(&json!({"model": "demo"}).to_string(), 400);
    check(&chat("able", json!({"n": 0})).to_string(), 400);
    assert_eq!(exchange(&engine, "GET", "/nowhere", "", &Value::Null).0, 404);
}

#[test]
fn a_client_that_leaves_frees_its_blocks() {
    let mut config = fast();
    config.speed.step_base = Duration::from_millis(20);
    let engine = Engine::start(config).unwrap();
    for streaming in [true, false] {
        let mut stream = connect(&engine);
        let body = chat("able about", json!({"stream": streaming, "max_tokens": 200}));
        send(&mut stream, "POST", "/v1/chat/completions", "", &body.to_string());
        assert!(engine.wait_until(PATIENCE, |state| state.ranks[0].totals.generated_tokens > 0 && !state.is_idle()));
        drop(stream);
        assert!(engine.wait_until(Duration::from_secs(1), EngineState::is_idle), "streaming {streaming}");
    }
    assert_eq!(engine.state().totals().aborted, 2);
}

#[test]
fn abort_request_ends_a_stream() {
    let mut config = fast();
    config.speed.step_base = Duration::from_millis(20);
    let engine = Engine::start(config).unwrap();
    let mut stream = connect(&engine);
    let body = chat("able", json!({"stream": true, "max_tokens": 200, "rid": "r1"}));
    send(&mut stream, "POST", "/v1/chat/completions", "connection: close\r\n", &body.to_string());
    assert!(engine.wait_until(PATIENCE, |state| state.ranks[0].running == 1));
    assert_eq!(post(&engine, "/abort_request", &json!({"rid": "r1"})).1, json!({"aborted": 1}));
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert!(text.contains("\"finish_reason\":\"abort\"") && text.contains("[DONE]"), "{text}");
    assert!(engine.wait_until(PATIENCE, EngineState::is_idle));
}

#[test]
fn pipelined_and_chunked_requests_are_served() {
    let engine = Engine::start(fast()).unwrap();
    let mut stream = connect(&engine);
    let body = chat("able", json!({})).to_string();
    let (left, right) = body.split_at(10);
    let mut bytes = Vec::new();
    let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n";
    bytes.extend_from_slice(head.as_bytes());
    bytes.extend_from_slice(
        format!("{:x}\r\n{left}\r\n{:x};x=1\r\n{right}\r\n0\r\nt: 1\r\n\r\n", left.len(), right.len()).as_bytes(),
    );
    bytes.extend_from_slice(b"GET /v1/models HTTP/1.1\r\nconnection: close\r\n\r\n");
    stream.write_all(&bytes).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert_eq!(text.matches("HTTP/1.1 200 OK").count(), 2, "{text}");
    assert!(text.contains("chat.completion") && text.contains("max_model_len"));
}

#[test]
fn faults_are_shown_and_used_up() {
    let engine = Engine::start(fast()).unwrap();
    let ask = || exchange(&engine, "POST", "/v1/chat/completions", "", &chat("able", json!({}))).0;
    assert_eq!(post(&engine, "/admin/faults", &json!({"fail_next": 1, "fail_status": 503})).0, 200);
    assert_eq!((ask(), ask()), (503, 200));
    engine.set_faults(Faults { close_next: 1, ..Faults::default() });
    assert_eq!((ask(), ask()), (0, 200));
    engine.set_faults(Faults { fail_rate: 1.0, ..Faults::default() });
    assert_eq!((ask(), ask()), (500, 500));
    engine.set_faults(Faults { stall: true, unhealthy: true, ..Faults::default() });
    assert_eq!(exchange(&engine, "GET", "/health", "", &Value::Null).0, 503);
    let mut stalled = connect(&engine);
    send(&mut stalled, "POST", "/v1/chat/completions", "connection: close\r\n", &chat("able", json!({})).to_string());
    assert!(engine.wait_until(PATIENCE, |state| state.ranks[0].waiting == 1));
    engine.set_faults(Faults::default());
    let mut text = String::new();
    stalled.read_to_string(&mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
    assert_eq!(post(&engine, "/admin/faults", &json!({"no_such": 1})).0, 400);
}

#[test]
fn stopping_closes_everything() {
    let engine = Engine::start(fast()).unwrap();
    let (addr, mut idle, mut busy) = (engine.addr, connect(&engine), connect(&engine));
    engine.set_faults(Faults { stall: true, ..Faults::default() });
    send(&mut busy, "POST", "/v1/chat/completions", "", &chat("able", json!({})).to_string());
    assert!(engine.wait_until(PATIENCE, |state| state.ranks[0].waiting == 1 && state.connections_open == 2));
    engine.stop();
    let mut rest = Vec::new();
    assert_eq!(idle.read_to_end(&mut rest).unwrap_or(0), 0);
    assert_eq!(busy.read_to_end(&mut rest).unwrap_or(0), 0);
    assert!(TcpStream::connect(addr).is_err());
}

/// Just enough msgpack, written from the format's specification.
#[derive(Clone, Debug, PartialEq)]
enum Pack {
    Nil,
    Number(i128),
    Float(f64),
    Text(String),
    Bytes(Vec<u8>),
    List(Vec<Pack>),
    Map(Vec<(Pack, Pack)>),
}

impl Pack {
    fn parse(bytes: &mut &[u8]) -> Pack {
        let tag = Pack::big(bytes, 1) as u8;
        match tag {
            0x00..=0x7f => Pack::Number(tag.into()),
            0x80..=0x8f => Pack::map(bytes, usize::from(tag & 15)),
            0x90..=0x9f => Pack::list(bytes, usize::from(tag & 15)),
            0xa0..=0xbf => Pack::text(bytes, usize::from(tag & 31)),
            0xc0 => Pack::Nil,
            0xc4..=0xc6 => {
                let length = Pack::big(bytes, 1 << (tag - 0xc4)) as usize;
                Pack::Bytes(Pack::take(bytes, length).to_vec())
            }
            0xcb => Pack::Float(f64::from_bits(Pack::big(bytes, 8) as u64)),
            0xcc..=0xcf => Pack::Number(Pack::big(bytes, 1 << (tag - 0xcc))),
            0xd0..=0xd3 => {
                let size = 1 << (tag - 0xd0);
                let value = Pack::big(bytes, size);
                let wrap = 1i128 << (8 * size);
                Pack::Number(if value >= wrap / 2 { value - wrap } else { value })
            }
            0xd9..=0xdb => {
                let length = Pack::big(bytes, 1 << (tag - 0xd9)) as usize;
                Pack::text(bytes, length)
            }
            0xdc | 0xdd => {
                let length = Pack::big(bytes, if tag == 0xdc { 2 } else { 4 }) as usize;
                Pack::list(bytes, length)
            }
            0xde => {
                let length = Pack::big(bytes, 2) as usize;
                Pack::map(bytes, length)
            }
            0xe0..=0xff => Pack::Number(i128::from(tag as i8)),
            other => panic!("msgpack tag {other:#x}"),
        }
    }

    fn take<'a>(bytes: &mut &'a [u8], count: usize) -> &'a [u8] {
        let (head, rest) = bytes.split_at(count);
        *bytes = rest;
        head
    }

    fn big(bytes: &mut &[u8], count: usize) -> i128 {
        Pack::take(bytes, count).iter().fold(0, |value, byte| value << 8 | i128::from(*byte))
    }

    fn text(bytes: &mut &[u8], count: usize) -> Pack {
        Pack::Text(String::from_utf8(Pack::take(bytes, count).to_vec()).unwrap())
    }

    fn list(bytes: &mut &[u8], count: usize) -> Pack {
        Pack::List((0..count).map(|_| Pack::parse(bytes)).collect())
    }

    fn map(bytes: &mut &[u8], count: usize) -> Pack {
        Pack::Map((0..count).map(|_| (Pack::parse(bytes), Pack::parse(bytes))).collect())
    }

    fn items(&self) -> &[Pack] {
        let Pack::List(items) = self else { panic!("a list, not {self:?}") };
        items
    }

    /// A field of an event in either form: by name, or by place.
    fn field(&self, name: &str, place: usize) -> &Pack {
        match self {
            Pack::List(items) => &items[place],
            Pack::Map(pairs) => {
                &pairs.iter().find(|(key, _)| *key == Pack::Text(name.into())).expect("field is there").1
            }
            other => panic!("an event, not {other:?}"),
        }
    }

    fn hash(&self) -> WireHash {
        match self {
            Pack::Number(value) => u64::try_from(*value).map_or(WireHash::Signed(*value as i64), WireHash::Unsigned),
            Pack::Bytes(bytes) => WireHash::Bytes(bytes.clone()),
            other => panic!("a hash, not {other:?}"),
        }
    }
}

/// Names by bits, so that a signed positive and an unsigned spelling of one number agree.
fn name(hash: &WireHash) -> Vec<u8> {
    match hash {
        WireHash::Unsigned(value) => value.to_be_bytes().to_vec(),
        WireHash::Signed(value) => value.to_be_bytes().to_vec(),
        WireHash::Bytes(bytes) => bytes.clone(),
    }
}

fn apply(mirror: &mut HashMap<Vec<u8>, u32>, payload: &[u8], rank: u32, block_size: usize) {
    let mut rest = payload;
    let batch = Pack::parse(&mut rest);
    assert!(rest.is_empty());
    assert!(matches!(batch.items()[0], Pack::Float(_)));
    assert_eq!(batch.items()[2], Pack::Number(rank.into()));
    for event in batch.items()[1].items() {
        let Pack::Text(tag) = event.field("type", 0) else { panic!("{event:?}") };
        match tag.as_str() {
            "BlockStored" => {
                let hashes = event.field("block_hashes", 1).items();
                assert_eq!(event.field("token_ids", 3).items().len(), hashes.len() * block_size);
                assert_eq!(*event.field("block_size", 4), Pack::Number(block_size as i128));
                for hash in hashes {
                    *mirror.entry(name(&hash.hash())).or_default() += 1;
                }
            }
            "BlockRemoved" => {
                for hash in event.field("block_hashes", 1).items() {
                    let copies = mirror.get_mut(&name(&hash.hash())).expect("stored before");
                    *copies -= 1;
                }
                mirror.retain(|_, copies| *copies > 0);
            }
            "AllBlocksCleared" => mirror.clear(),
            other => panic!("event {other}"),
        }
    }
}

/// Reads batches until the mirror has all that the engine has published.
fn follow(
    engine: &EngineHandle,
    rank: usize,
    socket: &zmq::Socket,
    mirror: &mut HashMap<Vec<u8>, u32>,
    next: &mut u64,
) {
    let published = engine.state().ranks[rank].event_batches;
    while *next < published {
        let frames = socket.recv_multipart(0).expect("a batch within the receive timeout");
        assert_eq!(frames[0], engine.config.topic.as_bytes());
        assert_eq!(frames[1], next.to_be_bytes(), "sequence numbers are contiguous");
        apply(mirror, &frames[2], rank as u32, engine.config.block_size);
        *next += 1;
    }
}

fn subscribe(endpoint: &str) -> (zmq::Context, zmq::Socket) {
    let context = zmq::Context::new();
    let socket = context.socket(zmq::SUB).unwrap();
    socket.set_rcvtimeo(PATIENCE.as_millis() as i32).unwrap();
    socket.set_linger(0).unwrap();
    socket.set_subscribe(b"").unwrap();
    socket.connect(endpoint).unwrap();
    (context, socket)
}

#[test]
fn event_streams_rebuild_the_cache_in_every_style() {
    for (style, byte_hashes) in [
        (EngineStyle::Vllm, false),
        (EngineStyle::Vllm, true),
        (EngineStyle::VllmArray, false),
        (EngineStyle::Sglang, false),
    ] {
        let config = EngineConfig { style, byte_hashes, blocks_total: 60, ..fast() };
        let engine = Engine::start(config).unwrap();
        // SGLang's clearing at the start goes out before anyone subscribes.
        let mut next = u64::from(style == EngineStyle::Sglang);
        assert!(engine.wait_until(PATIENCE, |state| state.ranks[0].event_batches >= next));
        let (_context, socket) = subscribe(&engine.events_addr);
        assert!(engine.wait_for_subscriber(PATIENCE));
        let mut mirror = HashMap::new();
        for round in 0..30u32 {
            if round == 15 {
                assert!(engine.clear_cache());
            }
            let prompt: Vec<u32> = (0..200).map(|it| 300 + (round % 5) * 50 + it).collect();
            let body = json!({"model": "demo", "prompt": prompt, "max_tokens": 20, "n": 1 + round % 2});
            assert_eq!(post(&engine, "/v1/completions", &body).0, 200);
            assert!(engine.wait_until(PATIENCE, EngineState::is_idle));
            follow(&engine, 0, &socket, &mut mirror, &mut next);
            let mut expected: Vec<Vec<u8>> = engine.resident_hashes(0).iter().map(name).collect();
            let mut seen: Vec<Vec<u8>> = mirror.keys().cloned().collect();
            expected.sort();
            seen.sort();
            assert_eq!(seen, expected, "{style:?}, bytes {byte_hashes}, round {round}");
        }
        assert!(mirror.len() > 30, "the pool was used");
    }
}

#[test]
fn replay_repeats_the_live_payloads() {
    for style in [EngineStyle::Vllm, EngineStyle::VllmArray] {
        let engine = Engine::start(EngineConfig { style, ..fast() }).unwrap();
        let (context, socket) = subscribe(&engine.events_addr);
        assert!(engine.wait_for_subscriber(PATIENCE));
        let first = 0u64;
        engine.set_faults(Faults { lose_event_batches: 1, ..Faults::default() });
        for start in [1000u32, 2000] {
            let prompt: Vec<u32> = (start..start + 40).collect();
            post(&engine, "/v1/completions", &json!({"model": "demo", "prompt": prompt, "max_tokens": 1}));
        }
        let live = socket.recv_multipart(0).unwrap();
        assert_eq!(live[1], (first + 1).to_be_bytes(), "one batch was lost on purpose");
        let dealer = context.socket(zmq::DEALER).unwrap();
        dealer.set_linger(0).unwrap();
        dealer.set_rcvtimeo(PATIENCE.as_millis() as i32).unwrap();
        dealer.connect(engine.replay_addr.as_deref().unwrap()).unwrap();
        dealer.send_multipart([&b""[..], &first.to_be_bytes()], 0).unwrap();
        let mut answers = Vec::new();
        loop {
            let mut frames = dealer.recv_multipart(0).unwrap();
            assert_eq!(frames.len(), if style == EngineStyle::Vllm { 4 } else { 3 });
            let payload = frames.pop().unwrap();
            let number = u64::from_be_bytes(frames.pop().unwrap().try_into().unwrap());
            if number == u64::MAX {
                break;
            }
            answers.push((number, payload));
        }
        assert_eq!(answers.iter().map(|(number, _)| *number).collect::<Vec<_>>(), [first, first + 1]);
        assert_eq!(answers[1].1, live[2]);
        let mut mirror = HashMap::new();
        answers.iter().for_each(|(_, payload)| apply(&mut mirror, payload, 0, 16));
        assert_eq!(mirror.len(), 4);
    }
}

/// Adds a subscriber to rank 0, so that every rank has one, and waits for them.
fn subscribed_to_both(engine: &EngineHandle, context: &zmq::Context) -> bool {
    let other = context.socket(zmq::SUB).unwrap();
    other.set_subscribe(b"").unwrap();
    other.connect(&engine.events_addr).unwrap();
    engine.wait_for_subscriber(PATIENCE)
}

#[test]
fn ranks_have_pools_and_feeds_of_their_own() {
    let engine = Engine::start(EngineConfig { dp_size: 2, ..fast() }).unwrap();
    let (host, port) = engine.events_addr.rsplit_once(':').unwrap();
    let second = format!("{host}:{}", port.parse::<u16>().unwrap() + 1);
    let (context, socket) = subscribe(&second);
    let prompt: Vec<u32> = (0..100).collect();
    let body = json!({"model": "demo", "prompt": prompt, "max_tokens": 1});
    let rank = "X-Data-Parallel-Rank: 1\r\n";
    assert!(subscribed_to_both(&engine, &context));
    assert_eq!(exchange(&engine, "POST", "/v1/completions", rank, &body).0, 200);
    let heard = socket.recv_multipart(0).unwrap();
    let mut rest = &heard[2][..];
    assert_eq!(Pack::parse(&mut rest).items()[2], Pack::Number(1));
    let state = engine.state();
    assert_eq!((state.ranks[0].blocks_resident, state.ranks[1].blocks_resident), (0, 6));
    let bad = exchange(
        &engine,
        "POST",
        "/v1/completions",
        "X-Data-Parallel-Rank: 2\r\n",
        &json!({"model": "demo", "prompt": "able"}),
    );
    assert_eq!(bad.0, 400);
    assert!(engine.worker_flag().contains(",kv-replay=tcp://") && engine.worker_flag().ends_with(",dp-size=2"));
    let sources = exchange(&engine, "GET", "/kv_event_sources", "", &Value::Null).1;
    assert_eq!(serde_json::from_str::<Value>(&sources).unwrap()["1"]["endpoint"], second);
}
