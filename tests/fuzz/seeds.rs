//! Inputs that the fuzz targets begin with: recordings of real engines, and a few short programs of the state target.

use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

/// Inputs of one target; never empty.
pub fn of(target: &str) -> Vec<Vec<u8>> {
    let messages = || recordings().iter().flat_map(|path| messages(path)).collect::<Vec<_>>();
    let seeds = match target {
        "kv_frames" => messages().iter().map(|frames| multipart(frames)).collect(),
        "kv_payload" => messages().into_iter().filter_map(|mut frames| frames.pop()).collect(),
        "kv_state" => programs(),
        "request_head" => in_pieces(REQUESTS),
        "response_head" => in_pieces(RESPONSES),
        "chunked_body" => in_pieces(CHUNKED),
        "event_stream" => in_pieces(STREAMS),
        "splice" => BODIES.iter().map(|body| body.as_bytes().to_vec()).collect(),
        other => panic!("no inputs for {other}"),
    };
    assert!(!seeds.is_empty(), "{target}");
    seeds
}

const REQUESTS: &[&str] = &[
    "POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 13\r\nContent-Type: application/json\r\n\r\n",
    "POST http://t:80/v1?a=b HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n",
    "GET /health HTTP/1.0\r\nConnection: keep-alive, X-Own\r\nX-Own: 1\r\n\r\n",
    "OPTIONS * HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n",
    "POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
    "GET / HTTP/1.1\r\nHost: t\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
    "GET / HTTP/2.0\r\nHost : t\r\n folded\r\n\r\n",
];

const RESPONSES: &[&str] = &[
    "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n",
    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n",
    "HTTP/1.0 404 Not Found\r\nConnection: keep-alive\r\nRetry-After: 7\r\n\r\n",
    "HTTP/1.1 100 Continue\r\n\r\n",
    "HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\nConnection: close\r\n\r\n",
    "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
    "HTTP/1.1 999\r\n\r\n",
];

const CHUNKED: &[&str] = &[
    "4\r\nabcd\r\n0\r\n\r\nNEXT",
    "A;name=\"x\"\r\n0123456789\r\n1\r\nz\r\n0\r\nTrailer: 1\r\nOther: 2\r\n\r\n",
    "0\r\n\r\n",
    "FFFFFFFFFFFFFFF\r\nab",
    "4\rabcd",
    "4\r\nabcde\r\n",
];

const STREAMS: &[&str] = &[
    "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\ndata: [DONE]\n\n",
    ": ping\r\n\r\nevent: response.completed\r\ndata: {}\r\n\r\n",
    "data: {\"error\":{\"message\":\"no\",\"code\":400}}\n\ndata: [DONE]",
    "event: error\ndata: {\"error\":{\"type\":\"invalid_request_error\"}}\n\n",
    "event:response.failed\ndata:{\"response\":{\"error\":{\"code\":\"server_error\"}}}\n\n",
    "data: {\"error\":null}\n\n",
];

const BODIES: &[&str] = &[
    r#"{"model":"m","messages":[{"role":"user","content":"h\u00e9 \ud83c\udf0d"}],"stream":true,"n":2,"max_tokens":5}"#,
    r#"{ "stream_options" : {"include_usage":true} , "prompt" : ["a","b"], "room": 1e400, "stream":true }"#,
    r#"{"n":1,"n":2,"vendor":[null,{"x":-0.0}],"temperature":1e-7,"seed":9223372036854775807}"#,
    r#"{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}}]}]}"#,
    r#"{}"#,
    r#"{"\u006eame":"n","\u006e":3,"prompt":"\"\\"}"#,
    r#"[1,2]"#,
];

/// Behind a byte that says how large the pieces are.
fn in_pieces(texts: &[&str]) -> Vec<Vec<u8>> {
    let sizes = [1u8, 3, 16, 255];
    texts.iter().flat_map(|text| sizes.map(|size| [&[size], text.as_bytes()].concat())).collect()
}

fn recordings() -> Vec<PathBuf> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/kv-events");
    let mut paths: Vec<PathBuf> = std::fs::read_dir(directory)
        .expect("the recordings")
        .map(|entry| entry.expect("a file").path())
        .filter(|path| {
            path.to_string_lossy().ends_with(".jsonl") && !path.to_string_lossy().ends_with(".expected.jsonl")
        })
        .collect();
    paths.sort();
    paths
}

/// Live and replayed messages of one recording.
fn messages(path: &Path) -> Vec<Vec<Vec<u8>>> {
    let text = std::fs::read_to_string(path).expect("a recording");
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    lines
        .filter(|line| line["kind"] == "sub" || line["kind"] == "replay")
        .filter_map(|line| {
            let frames = line["frames"].as_array()?.iter();
            Some(frames.map(|frame| STANDARD.decode(frame.as_str().unwrap_or_default()).expect("base64")).collect())
        })
        .collect()
}

/// The form that the frames target reads. Topics are short, so their length fits a byte.
fn multipart(frames: &[Vec<u8>]) -> Vec<u8> {
    let mut out = vec![frames.len() as u8];
    out.extend(frames.iter().map(|frame| frame.len().min(255) as u8));
    frames.iter().for_each(|frame| out.extend(frame));
    out
}

/// With and without replay: plain growth; a gap with an answer, with half of one, with none; a restart; a straggler.
fn programs() -> Vec<Vec<u8>> {
    let store = |number: u8, place: u8| [0, number << 3, place];
    let mut programs = Vec::new();
    for first in [0u8, 1, 0x31] {
        let grow: Vec<u8> = (0..6).flat_map(|at| store(at % 4, at * 7)).collect();
        let with = |steps: &[[u8; 3]]| {
            let mut program = vec![first];
            program.extend(&grow);
            program.extend(steps.concat());
            program.extend(&grow);
            program
        };
        programs.push(with(&[]));
        programs.push(with(&[[6, 8, 1], store(1, 3), [11, 31, 0]]));
        programs.push(with(&[[70, 8, 1], store(1, 3), [11, 31, 7], [14, 0, 0]]));
        programs.push(with(&[[6, 8, 1], store(1, 3), store(2, 4), [15, 255, 1]]));
        programs.push(with(&[[8, 0, 0], store(1, 3), store(2, 9)]));
        programs.push(with(&[[6, 5, 1], store(1, 3), [7, 1, 0], [9, 2, 2], [10, 1, 4]]));
    }
    programs
}
