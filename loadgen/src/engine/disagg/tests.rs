//! Pairs of engines over real sockets, driven as a router would drive them, one protocol at a time.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::thread::JoinHandle;

use super::super::events::EngineStyle;
use super::super::scheduler::Speed;
use super::super::{Engine, EngineConfig, EngineHandle};
use super::*;
use crate::prompt::TextModel;

const PATIENCE: Duration = Duration::from_secs(20);

fn pair(protocol: PdProtocol, ranks: u32) -> (EngineHandle, EngineHandle) {
    let speed = Speed {
        step_base: Duration::from_micros(500),
        prefill_per_token: Duration::from_micros(1),
        ..Speed::default()
    };
    let style = if protocol.is_sglang() { EngineStyle::Sglang } else { EngineStyle::Vllm };
    let config = EngineConfig { speed, style, ..EngineConfig::default() };
    let half = |role, dp_size| EngineConfig { disagg: Some(Disagg::new(role, protocol)), dp_size, ..config.clone() };
    let text = Arc::new(TextModel::shipped().expect("the tokenizer"));
    let mut engines =
        Engine::start_group(vec![half(PdRole::Prefill, ranks), half(PdRole::Decode, 1)], text).expect("engines");
    let decode = engines.remove(1);
    (engines.remove(0), decode)
}

fn send(engine: &EngineHandle, headers: &str, body: &Value) -> TcpStream {
    let mut stream = TcpStream::connect(engine.addr).expect("connect");
    stream.set_read_timeout(Some(PATIENCE)).expect("timeout");
    let body = body.to_string();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: t\r\nconnection: close\r\n{headers}content-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + &body).as_bytes()).expect("write");
    stream
}

fn answer(mut stream: TcpStream) -> (u16, String) {
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("read");
    let status = text.get(9..12).and_then(|status| status.parse().ok()).unwrap_or(0);
    (status, text.split_once("\r\n\r\n").map(|(_, body)| body.to_string()).unwrap_or_default())
}

fn later(engine: &EngineHandle, headers: &str, body: &Value) -> JoinHandle<(u16, String)> {
    let stream = send(engine, headers, body);
    std::thread::spawn(move || answer(stream))
}

fn json_of(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

fn body(more: Value) -> Value {
    let mut body = json!({"model": "demo", "prompt": [5, 6, 7, 8], "max_tokens": 4});
    body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    body
}

fn bootstrap(prefill: &EngineHandle, room: u64, more: Value) -> Value {
    let mut body = body(more);
    let address = prefill.addr;
    body["bootstrap_host"] = json!(address.ip().to_string());
    body["bootstrap_port"] = json!(address.port());
    body["bootstrap_room"] = json!(room);
    body["rid"] = json!(format!("infera-{room}"));
    body
}

#[test]
fn sglang_legs_meet_in_their_room_whichever_comes_first() {
    let (prefill, decode) = pair(PdProtocol::SglangBootstrap, 1);
    for (room, decode_first) in [(7, true), (8, false)] {
        let (first, second) = if decode_first { (&decode, &prefill) } else { (&prefill, &decode) };
        let waiting = later(first, "", &bootstrap(&prefill, room, json!({})));
        let seen = first.wait_until(PATIENCE, |state| state.transfers.decode_waiting + state.transfers.held == 1);
        assert!(seen && !waiting.is_finished(), "the first leg waits for the other");
        let other = later(second, "", &bootstrap(&prefill, room, json!({})));
        assert_eq!(waiting.join().expect("answered").0, 200);
        assert_eq!(other.join().expect("answered").0, 200);
    }
    let counts = prefill.state().transfers;
    assert_eq!((counts.delivered, counts.held, counts.collisions), (2, 0, 0));
    let reused = answer(send(&prefill, "", &bootstrap(&prefill, 7, json!({}))));
    assert_eq!(reused.0, 500, "a room is used once: {}", reused.1);
}

#[test]
fn a_decode_engine_computes_no_prompt_that_came_by_transfer() {
    let (prefill, decode) = pair(PdProtocol::SglangBootstrap, 1);
    let long: Vec<u32> = (0..4000).map(|at| at % 500).collect();
    let legs = bootstrap(&prefill, 5, json!({"prompt": long, "stream": true}));
    let leg = later(&prefill, "", &legs);
    let (status, text) = answer(send(&decode, "", &legs));
    assert!(status == 200 && text.contains("data: [DONE]"), "{text}");
    assert_eq!(leg.join().expect("answered").0, 200);
    assert_eq!(prefill.state().totals().generated_tokens, 1);
    assert_eq!(decode.state().totals().generated_tokens, 4);
    // The next request finds what came: decode names received blocks like its own.
    assert_eq!(decode.state().blocks_resident(), prefill.state().blocks_resident());
}

#[test]
fn sglang_kv_is_held_until_its_owner_aborts_it() {
    let (prefill, decode) = pair(PdProtocol::SglangBootstrap, 1);
    let leg = send(&prefill, "", &bootstrap(&prefill, 3, json!({"n": 2, "bootstrap_room": [3, 4]})));
    assert!(prefill.wait_until(PATIENCE, |state| state.transfers.held == 2), "{:?}", prefill.state());
    drop(leg);
    assert!(prefill.wait_until(PATIENCE, |state| state.requests_open == 0));
    assert_eq!(prefill.state().transfers.held, 2, "a closed connection frees nothing");
    let waiting = send(&decode, "", &bootstrap(&prefill, 9, json!({"stream": true})));
    assert!(decode.wait_until(PATIENCE, |state| state.transfers.decode_waiting == 1));
    for (engine, rid) in [(&prefill, "infera-3_0"), (&prefill, "infera-3_1"), (&decode, "infera-9")] {
        abort(engine, rid);
    }
    assert_eq!((prefill.state().transfers.held, prefill.state().transfers.freed), (0, 2));
    let (status, text) = answer(waiting);
    assert!(status == 200 && text.contains("aborted") && !text.contains("[DONE]"), "{text}");
}

fn abort(engine: &EngineHandle, rid: &str) {
    let mut stream = TcpStream::connect(engine.addr).expect("connect");
    let body = json!({"rid": rid}).to_string();
    let head = format!(
        "POST /abort_request HTTP/1.1\r\nhost: t\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + &body).as_bytes()).expect("write");
    assert!(answer(stream).1.contains("\"aborted\":1"), "{rid}");
}

#[test]
fn ranks_must_agree_with_rooms() {
    let (prefill, decode) = pair(PdProtocol::SglangBootstrap, 4);
    let refused = answer(send(&prefill, "x-data-parallel-rank: 1\r\n", &bootstrap(&prefill, 6, json!({}))));
    assert_eq!(refused.0, 400, "room 6 of 4 says rank 2: {}", refused.1);
    let leg = send(&prefill, "x-data-parallel-rank: 2\r\n", &bootstrap(&prefill, 6, json!({})));
    let wrong = answer(send(&decode, "", &bootstrap(&prefill, 6, json!({"disagg_prefill_dp_rank": 0}))));
    assert_eq!(wrong.0, 500, "{}", wrong.1);
    assert_eq!(prefill.state().transfers.misdirected, 1);
    let right = answer(send(&decode, "", &bootstrap(&prefill, 6, json!({"disagg_prefill_dp_rank": 2}))));
    assert_eq!((right.0, answer(leg).0), (200, 200));
}

fn transfer(more: Value, parameters: Value) -> Value {
    let mut body = body(more);
    body["kv_transfer_params"] = parameters;
    body
}

fn one_token() -> Value {
    json!({"max_tokens": 1, "stream": false})
}

fn to_prefill(id: Option<&str>) -> Value {
    let mut parameters = json!({"do_remote_decode": true, "do_remote_prefill": false});
    if let Some(id) = id {
        parameters["transfer_id"] = json!(id);
    }
    parameters
}

#[test]
fn serial_vllm_legs_hand_over_and_free() {
    for protocol in [PdProtocol::VllmNixl, PdProtocol::VllmMoriRead, PdProtocol::AtomMooncake] {
        let (prefill, decode) = pair(protocol, 1);
        let address =
            |engine: &EngineHandle| format!("host:{},handshake:{},notify:1", engine.addr.ip(), engine.addr.port());
        let id =
            format!("x-request-id: ___prefill_addr_{}___decode_addr_{}_00\r\n", address(&prefill), address(&decode));
        let run = |more: Value| {
            let leg = answer(send(&prefill, &id, &transfer(one_token(), to_prefill(Some(&format!("tx-{more}"))))));
            assert_eq!(leg.0, 200, "{}", leg.1);
            assert_eq!(prefill.state().transfers.held, 1);
            let mut parameters = json_of(&leg.1)["kv_transfer_params"].clone();
            assert!(parameters.is_object(), "{}", leg.1);
            parameters["remote_tp_size"] = json!(1);
            transfer(more, parameters)
        };
        let decoded = answer(send(&decode, &id, &run(json!({"seed": 1}))));
        assert_eq!(decoded.0, 200, "{protocol:?}: {}", decoded.1);
        assert_eq!(prefill.state().transfers.delivered, 1);
        // A decode request that ends before its pull frees the KV.
        let held = run(json!({"seed": 2}));
        drop(send(&decode, &id, &held));
        assert!(prefill.wait_until(PATIENCE, |state| state.transfers.held == 0), "{protocol:?}");
    }
}

#[test]
fn concurrent_vllm_legs_share_a_transfer_id() {
    let (prefill, decode) = pair(PdProtocol::VllmMooncake, 2);
    let to_decode = |engine_id: String| {
        json!({"do_remote_decode": false, "do_remote_prefill": true, "transfer_id": "xfer-1",
            "remote_bootstrap_addr": prefill.url(), "remote_engine_id": engine_id})
    };
    let id = engine_id(prefill.addr.port());
    let waiting = later(&decode, "", &transfer(json!({"n": 2}), to_decode(format!("{id}_dp1"))));
    assert!(decode.wait_until(PATIENCE, |state| state.transfers.decode_waiting == 1));
    let leg = answer(send(&prefill, "x-data-parallel-rank: 1\r\n", &transfer(one_token(), to_prefill(Some("xfer-1")))));
    assert_eq!((leg.0, json_of(&leg.1)["kv_transfer_params"].is_null()), (200, true));
    assert_eq!(waiting.join().expect("answered").0, 200);
    let misdirected = answer(send(&decode, "", &transfer(json!({}), to_decode("sim-1".into()))));
    assert_eq!(misdirected.0, 500, "{}", misdirected.1);
    // A prefill connection that closes before its answer frees what it held.
    prefill.set_faults(super::super::faults::Faults { stall: true, ..Default::default() });
    let leg = send(&prefill, "", &transfer(one_token(), to_prefill(Some("xfer-2"))));
    assert!(prefill.wait_until(PATIENCE, |state| state.transfers.held == 1));
    drop(leg);
    assert!(prefill.wait_until(PATIENCE, |state| state.transfers.held == 0));
}

#[test]
fn contradictions_are_refused() {
    let (prefill, decode) = pair(PdProtocol::VllmNixl, 1);
    let refused = |engine: &EngineHandle, more: Value, parameters: Value| {
        let (status, text) = answer(send(engine, "", &transfer(more.clone(), parameters)));
        assert_eq!(status, 400, "{more}: {text}");
    };
    refused(&prefill, json!({"stream": true, "max_tokens": 1}), to_prefill(None));
    refused(&prefill, json!({"max_tokens": 2}), to_prefill(None));
    refused(&prefill, json!({"max_tokens": 1, "n": 2}), to_prefill(None));
    refused(&prefill, json!({"max_tokens": 1, "min_tokens": 2}), to_prefill(None));
    refused(&prefill, json!({"max_tokens": 1, "stream_options": {}}), to_prefill(None));
    refused(&prefill, one_token(), Value::Null);
    refused(&decode, json!({}), to_prefill(None));
    refused(&decode, json!({}), json!({"do_remote_prefill": true}));
    // Without parameters decode computes the prompt itself.
    assert_eq!(answer(send(&decode, "", &body(json!({})))).0, 200);
}

#[test]
fn kv_that_nobody_frees_is_reported_as_stranded() {
    let disagg =
        Disagg { hold_timeout: Duration::from_millis(1), ..Disagg::new(PdRole::Prefill, PdProtocol::VllmNixl) };
    let prefill = Engine::start(EngineConfig { disagg: Some(disagg), ..EngineConfig::default() }).expect("an engine");
    assert_eq!(answer(send(&prefill, "", &transfer(one_token(), to_prefill(None)))).0, 200);
    let mut last = TransferCounts::default();
    let stranded = (0..2000).any(|_| {
        std::thread::sleep(Duration::from_millis(1));
        let (_, state) = answer(request_state(&prefill));
        last = prefill.state().transfers;
        json_of(&state)["transfers"]["stranded"] == 1
    });
    assert!(stranded, "{last:?}");
}

fn request_state(engine: &EngineHandle) -> TcpStream {
    let mut stream = TcpStream::connect(engine.addr).expect("connect");
    stream.write_all(b"GET /admin/state HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n").expect("write");
    stream
}
