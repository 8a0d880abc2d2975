//! Streams of chats, in pieces of every size, and the events that come of them.

use serde_json::{Value, json};

use super::*;

/// Events of a stream fed whole, byte by byte and cut in two at every place: always the same.
fn events(stream: &str) -> Vec<Value> {
    let run = |pieces: &[&[u8]]| {
        let (mut translator, mut out) = (EventTranslator::new("m"), Vec::new());
        pieces.iter().for_each(|piece| translator.feed(piece, &mut out));
        translator.end(&mut out);
        assert_eq!(translator.state, State::Ended);
        String::from_utf8(out).unwrap()
    };
    let bytes = stream.as_bytes();
    let whole = run(&[bytes]);
    assert_eq!(run(&bytes.chunks(1).collect::<Vec<_>>()), whole);
    for cut in 0..bytes.len() {
        assert_eq!(run(&[&bytes[..cut], &bytes[cut..]]), whole, "cut at {cut}");
    }
    let parsed = whole.split_terminator("\n\n").map(|event| {
        let (name, data) = event.strip_prefix("event: ").and_then(|event| event.split_once("\ndata: ")).unwrap();
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!(data["type"], name);
        data
    });
    parsed.collect()
}

fn delta(delta: Value) -> String {
    chunk(json!({"index": 0, "delta": delta, "finish_reason": null}))
}

fn chunk(choice: Value) -> String {
    format!("data: {}\n\n", json!({"id": "chatcmpl-7", "object": "chat.completion.chunk", "choices": [choice]}))
}

fn finish(reason: &str, matched: Value) -> String {
    chunk(json!({"index": 0, "delta": {}, "finish_reason": reason, "stop_reason": matched}))
}

const USAGE: &str = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":3,\"prompt_tokens_details\":{\"cached_tokens\":2}}}\n\n";
const DONE: &str = "data: [DONE]\n\n";

fn started() -> Vec<Value> {
    let message = json!({"id": "msg_7", "type": "message", "role": "assistant", "model": "m", "content": [],
        "stop_reason": null, "stop_sequence": null, "usage": {"input_tokens": 0, "output_tokens": 0}});
    vec![json!({"type": "message_start", "message": message}), json!({"type": "ping"})]
}

fn block(index: usize, content: Value, deltas: &[Value]) -> Vec<Value> {
    let mut events = vec![json!({"type": "content_block_start", "index": index, "content_block": content})];
    events.extend(deltas.iter().map(|it| json!({"type": "content_block_delta", "index": index, "delta": it})));
    events.push(json!({"type": "content_block_stop", "index": index}));
    events
}

fn text(index: usize, pieces: &[&str]) -> Vec<Value> {
    let deltas: Vec<Value> = pieces.iter().map(|text| json!({"type": "text_delta", "text": text})).collect();
    block(index, json!({"type": "text", "text": ""}), &deltas)
}

fn stopped(reason: &str, sequence: Value) -> Vec<Value> {
    let usage = json!({"input_tokens": 7, "output_tokens": 3, "cache_read_input_tokens": 2,
        "cache_creation_input_tokens": 0});
    let delta = json!({"stop_reason": reason, "stop_sequence": sequence});
    vec![json!({"type": "message_delta", "delta": delta, "usage": usage}), json!({"type": "message_stop"})]
}

#[track_caller]
fn check(stream: &[String], expected: &[Vec<Value>]) {
    let found = events(&stream.concat());
    let expected: Vec<Value> = expected.concat();
    assert_eq!(found, expected, "{found:#?}");
}

#[test]
fn a_text_is_one_block() {
    let role = delta(json!({"role": "assistant", "content": ""}));
    let stream = [role, delta(json!({"content": "Hé"})), delta(json!({"content": "llo"}))];
    let ends: [(&str, Value, &str, Value); 3] = [
        ("stop", Value::Null, "end_turn", Value::Null),
        ("length", Value::Null, "max_tokens", Value::Null),
        ("stop", json!("END"), "stop_sequence", json!("END")),
    ];
    for (finished, matched, reason, sequence) in ends {
        let end = [finish(finished, matched), USAGE.into(), DONE.into()];
        let stream = [&stream[..], &end].concat();
        check(&stream, &[started(), text(0, &["Hé", "llo"]), stopped(reason, sequence)]);
    }
}

#[test]
fn lines_end_as_they_like_and_a_byte_order_mark_is_no_part_of_the_first() {
    let stream = [delta(json!({"content": "hi"})), finish("stop", Value::Null), USAGE.into(), DONE.into()].concat();
    let expected = [started(), text(0, &["hi"]), stopped("end_turn", Value::Null)];
    for end in ["\n", "\r\n", "\r"] {
        check(&[format!("\u{feff}{}", stream.replace('\n', end))], &expected);
    }
}

#[test]
fn an_answer_without_a_word_is_whole() {
    check(&[finish("stop", Value::Null), USAGE.into(), DONE.into()], &[started(), stopped("end_turn", Value::Null)]);
}

#[test]
fn thinking_text_and_calls_are_blocks_in_turn() {
    let call = |index: u64, id: Value, name: Value, arguments: &str| {
        delta(json!({"tool_calls": [{"index": index, "id": id, "type": "function",
            "function": {"name": name, "arguments": arguments}}]}))
    };
    let tool = |index: usize, id: &str, name: &str, pieces: &[&str]| {
        let deltas: Vec<Value> =
            pieces.iter().map(|json| json!({"type": "input_json_delta", "partial_json": json})).collect();
        block(index, json!({"type": "tool_use", "id": id, "name": name, "input": {}}), &deltas)
    };
    check(
        &[
            delta(json!({"reasoning_content": "Hm"})),
            delta(json!({"reasoning": "m."})),
            delta(json!({"content": "I look."})),
            call(0, json!("a"), json!("f"), ""),
            call(0, Value::Null, Value::Null, "{\"x\":"),
            delta(json!({"content": "\n"})),
            call(0, Value::Null, Value::Null, "1}"),
            call(1, json!("b"), json!("g"), "{}"),
            finish("tool_calls", Value::Null),
            USAGE.into(),
            DONE.into(),
        ],
        &[
            started(),
            block(
                0,
                json!({"type": "thinking", "thinking": "", "signature": ""}),
                &[
                    json!({"type": "thinking_delta", "thinking": "Hm"}),
                    json!({"type": "thinking_delta", "thinking": "m."}),
                ],
            ),
            text(1, &["I look."]),
            tool(2, "a", "f", &["{\"x\":", "1}"]),
            text(3, &["\n"]),
            tool(4, "b", "g", &["{}"]),
            stopped("tool_use", Value::Null),
        ],
    );
}

#[test]
fn comments_are_pings_and_a_stream_may_end_without_done() {
    let stream =
        [delta(json!({"content": "a"})), ": keep-alive\r\n\r\n".into(), finish("stop", Value::Null), USAGE.into()];
    let found = events(&stream.concat());
    let kinds: Vec<&str> = found.iter().map(|event| event["type"].as_str().unwrap()).collect();
    let expected = [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "ping",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ];
    assert_eq!(kinds, expected);
}

#[test]
fn trouble_is_an_error_event_and_nothing_follows_it() {
    let last = |stream: &[&str]| {
        let found = events(&stream.concat());
        let at = found.iter().position(|event| event["type"] == "error").expect("an error");
        assert_eq!(at, found.len() - 1, "{found:?}");
        found[at]["error"]["message"].as_str().unwrap().to_owned()
    };
    let content = delta(json!({"content": "a"}));
    assert_eq!(last(&[&content, "data: {\"error\":{\"message\":\"out of memory\"}}\n\n", &content]), "out of memory");
    assert_eq!(last(&["data: {\"error\":\"KVTransferError\"}\n\n", DONE]), "KVTransferError");
    assert!(last(&[&content]).contains("before its end"));
    assert!(last(&[DONE]).contains("before its end"));
    assert!(last(&[""]).contains("before its end"));
    assert!(last(&[&content, "data: nonsense\n\n"]).contains("no chat chunk"));
    let late = delta(json!({"tool_calls": [{"index": 3, "function": {"arguments": "{}"}}]}));
    assert!(last(&[&late]).contains("had ended"));
}

#[test]
fn a_line_without_end_is_bounded() {
    let (mut translator, mut out) = (EventTranslator::new("m"), Vec::new());
    translator.feed(b"data: ", &mut out);
    let piece = vec![b'x'; limits::TRANSLATED_EVENT_BYTES_MAX];
    translator.feed(&piece, &mut out);
    assert!(translator.state == State::Ended && translator.line.len() < 100);
    assert!(String::from_utf8(out).unwrap().contains("longer than may be"));
}
