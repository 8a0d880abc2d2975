//! What reaches the worker is what the client sent, and what reaches the client is what the worker answered.

use loadgen::engine::{Engine, EngineConfig};
use serde_json::json;

use crate::support::client::{self, Connection};
use crate::support::router::router;
use crate::support::worker::{Then, json_worker, worker};

/// Field report B08: key order, number spelling, duplicate keys, unknown members and escapes survive.
#[test]
fn b08_the_body_is_forwarded_byte_for_byte() {
    let bodies = [
        r#"{"model":"m","messages":[{"role":"user","content":"hi","x_meta":{"a":1}}],"tools":[{"type":"function","function":{"name":"f"}}],"return_token_ids":true,"logit_bias":{"50":-100},"seed":9223372036854775807,"top_p":0.30000000000000004,"temperature":1e-7,"vendor_field":[null,{"é":"\u00e9\ud83c\udf0d"}]}"#.to_owned(),
        r#"{ "stream":false, "model":"x" , "model" : "m","messages":[{"role":"martian","content":null}], "stream":false }"#.to_owned(),
        format!(r#"{{"model":"m","messages":[{{"role":"user","content":"{}"}}]}}"#, "long ".repeat(200_000)),
    ];
    let worker = json_worker("{}");
    for policy in ["round-robin", "kv-aware"] {
        let router = router().policy(policy).worker(worker.address).ready();
        for body in &bodies {
            let before = worker.requests();
            assert_eq!(router.post("/v1/chat/completions?x=1", body).status, 200);
            let seen = &worker.seen()[before];
            assert_eq!((seen.method.as_str(), seen.target.as_str()), ("POST", "/v1/chat/completions?x=1"));
            assert!(seen.body == body.as_bytes(), "{policy}: another body arrived");
        }
    }
}

#[test]
fn end_to_end_headers_pass_and_hop_by_hop_headers_do_not() {
    let worker = worker(|_, conversation| {
        conversation.write(
            b"HTTP/1.1 201 Made\r\nContent-Type: application/json\r\nX-Engine: e1\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\n\
              Connection: keep-alive, X-Hop\r\nX-Hop: 1\r\nKeep-Alive: timeout=5\r\nContent-Length: 2\r\n\r\n{}",
        );
        Then::KeepAlive
    });
    let router = router().round_robin().worker(worker.address).ready();
    let headers = "Authorization: Bearer abc\r\nX-Request-Id: r-1\r\ntraceparent: 00-aa-bb-01\r\nX-Twice: 1\r\nX-Twice: 2\r\n\
                   Connection: close, X-Private\r\nX-Private: secret\r\nTE: trailers\r\nProxy-Authorization: no\r\n";
    let answer = client::exchange(router.address, "POST", "/v1/completions", headers, br#"{"model":"m"}"#);
    assert_eq!(answer.status, 201);
    assert_eq!(answer.header("x-engine"), Some("e1"));
    assert_eq!(answer.headers.iter().filter(|(name, _)| name == "set-cookie").count(), 2);
    assert_eq!((answer.header("x-hop"), answer.header("keep-alive")), (None, None));
    let seen = &worker.seen()[0];
    assert_eq!(seen.header("authorization"), Some("Bearer abc"));
    assert_eq!(seen.header("x-request-id"), Some("r-1"));
    assert_eq!(seen.header("traceparent"), Some("00-aa-bb-01"));
    assert_eq!(seen.headers.iter().filter(|line| line.to_ascii_lowercase().starts_with("x-twice:")).count(), 2);
    for hop in ["x-private", "te", "proxy-authorization", "expect"] {
        assert_eq!(seen.header(hop), None, "{hop} was forwarded");
    }
    assert_eq!(seen.header("host"), Some(worker.address.to_string().as_str()));
}

#[test]
fn streams_are_relayed_byte_for_byte_as_they_come() {
    let (go, gate) = std::sync::mpsc::sync_channel::<()>(0);
    let gate = std::sync::Mutex::new(gate);
    let worker = worker(move |_, conversation| {
        conversation.sse_head();
        for number in 0..3 {
            conversation.chunk(&format!("data: {{\"n\":{number}}}\n\n"));
            gate.lock().unwrap().recv().unwrap();
        }
        conversation.chunk("data: [DONE]\n\n");
        conversation.last_chunk()
    });
    let router = router().round_robin().worker(worker.address).ready();
    let mut connection = Connection::open(router.address);
    connection.send(&client::request("POST", "/v1/chat/completions", "", br#"{"model":"m","stream":true}"#));
    let (status, headers) = connection.head().unwrap();
    assert_eq!(status, 200);
    let header = |name: &str| headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str());
    assert_eq!(header("content-type"), Some("text/event-stream"));
    assert_eq!(header("x-accel-buffering"), Some("no"));
    for number in 0..3 {
        // The worker sends the next one only after this one has come through.
        assert_eq!(connection.chunk().unwrap().unwrap(), format!("data: {{\"n\":{number}}}\n\n").as_bytes());
        go.send(()).unwrap();
    }
    assert_eq!(connection.chunk().unwrap().unwrap(), b"data: [DONE]\n\n");
    assert_eq!(connection.chunk().unwrap(), None);
    // The connection is good for the next request.
    connection.send(&client::request("GET", "/health", "", b""));
    assert_eq!(connection.answer("GET").status, 200);
}

#[test]
fn chunked_request_bodies_and_expect_are_understood_and_pipelined_requests_answered_in_order() {
    let worker = worker(|seen, conversation| {
        let body = String::from_utf8_lossy(&seen.body).into_owned();
        conversation.json(200, &body)
    });
    let router = router().round_robin().worker(worker.address).ready();
    let mut connection = Connection::open(router.address);
    connection.send(
        b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nExpect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n",
    );
    assert_eq!(connection.head().unwrap().0, 100);
    connection.send(b"8\r\n{\"model\"\r\n6;x=y\r\n:\"m\"} \r\n0\r\n\r\n");
    assert_eq!(connection.answer("POST").text(), "{\"model\":\"m\"} ");
    let seen = &worker.seen()[0];
    assert_eq!((seen.header("content-length"), seen.header("transfer-encoding")), (Some("14"), None));

    let mut pipelined = Vec::new();
    for number in 0..5 {
        pipelined.extend(client::request(
            "POST",
            "/v1/completions",
            "",
            format!(r#"{{"model":"m","n":{number}}}"#).as_bytes(),
        ));
    }
    connection.send(&pipelined);
    for number in 0..5 {
        assert_eq!(connection.answer("POST").json()["n"], number);
    }
}

#[test]
fn other_paths_go_to_a_worker_of_the_named_model_by_load() {
    let first = json_worker(r#"{"from":"m"}"#);
    let second = json_worker(r#"{"from":"other"}"#);
    let router = router()
        .worker(first.address)
        .args(&["--worker", &format!("http://{},model=other,block-size=16", second.address)])
        .ready();
    let from = |answer: client::Answer| answer.json()["from"].as_str().map(str::to_owned);
    assert_eq!(from(router.post("/v1/embeddings", r#"{"model":"other","input":"x"}"#)).as_deref(), Some("other"));
    assert_eq!(from(router.post("/v1/rerank", r#"{"query":"q","model":"m"}"#)).as_deref(), Some("m"));
    assert_eq!(from(router.get("/v1/responses/r1?model=other")).as_deref(), Some("other"));
    let form = "--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nother\r\n--b--\r\n";
    let headers = "X-Content: 1\r\n";
    let mut raw = format!(
        "POST /v1/audio/transcriptions HTTP/1.1\r\nHost: t\r\n{headers}Content-Type: multipart/form-data; boundary=b\r\nContent-Length: {}\r\n\r\n",
        form.len()
    );
    raw.push_str(form);
    let mut connection = Connection::open(router.address);
    connection.send(raw.as_bytes());
    assert_eq!(from(connection.answer("POST")).as_deref(), Some("other"));
    // Two models and none named: the router cannot guess.
    let answer = router.post("/v1/embeddings", r#"{"input":"x"}"#);
    assert_eq!((answer.status, answer.json()["error"]["code"].as_str()), (400, Some("model_required")));
    assert_eq!(router.post("/v1/embeddings", r#"{"model":"absent"}"#).status, 404);
}

#[test]
fn the_engines_own_paths_that_serve_a_model_are_passed_on_and_no_others() {
    let engine = Engine::start(EngineConfig::default()).unwrap();
    let router = router().args(&["--worker", &engine.worker_flag()]).ready();
    // One model: none has to be named.
    let tokens = router.post("/tokenize", r#"{"prompt":"one two three"}"#).json();
    assert!(tokens["count"].as_u64().unwrap() > 2, "{tokens}");
    let text = router.post("/detokenize", &json!({"model": "demo", "tokens": tokens["tokens"]}).to_string()).json();
    assert_eq!(text["prompt"], "one two three");
    let pair = r#"{"model":"demo","text_1":"a","text_2":"b"}"#;
    let scored = router.post("/score", pair).json();
    assert_eq!(scored["data"][0]["score"], router.post("/v1/score", pair).json()["data"][0]["score"]);
    let ranked = r#"{"model":"demo","query":"q","documents":["a","b"]}"#;
    for path in ["/rerank", "/v1/rerank", "/v2/rerank"] {
        assert_eq!(router.post(path, ranked).json()["results"].as_array().unwrap().len(), 2, "{path}");
    }
    for path in ["/pooling", "/classify", "/v1/embeddings"] {
        let answer = router.post(path, r#"{"model":"demo","input":["a","b"]}"#).json();
        assert_eq!(answer["data"].as_array().unwrap().len(), 2, "{path}: {answer}");
    }
    assert_eq!(router.post("/score", r#"{"model":"absent"}"#).status, 404);
    assert_eq!(router.get("/score").status, 405);
    // What changes an engine is not for clients.
    for path in ["/reset_prefix_cache", "/flush_cache", "/abort_request", "/admin/faults", "/sleep", "/score/x"] {
        let answer = router.post(path, "{}");
        assert_eq!((answer.status, answer.json()["error"]["code"].as_str()), (404, Some("not_found")), "{path}");
    }
    router.wait_for_rest();
}

#[test]
fn a_body_without_a_model_is_served_when_there_is_just_one() {
    let worker = json_worker(r#"{"ok":1}"#);
    let router = router().round_robin().worker(worker.address).ready();
    assert_eq!(router.post("/v1/chat/completions", r#"{"messages":[]}"#).text(), r#"{"ok":1}"#);
}

#[test]
fn round_robin_spreads_evenly() {
    let workers: Vec<_> = (0..3).map(|_| json_worker("{}")).collect();
    let start = workers.iter().fold(router().round_robin(), |start, worker| start.worker(worker.address));
    let router = start.ready();
    for _ in 0..30 {
        assert_eq!(router.post("/v1/completions", r#"{"model":"m"}"#).status, 200);
    }
    assert_eq!(workers.iter().map(|worker| worker.requests()).collect::<Vec<_>>(), [10, 10, 10]);
}

/// Off, nothing of the fleet is told; on, the worker stands in for what the answer says of itself under that name.
#[test]
fn an_answer_names_its_worker_where_that_is_asked_for() {
    let worker = worker(|seen, conversation| {
        let kind = if seen.target.contains("stream") { "text/event-stream" } else { "application/json" };
        let body = "data: {}\n\n";
        let length = body.len();
        conversation.write(
            format!(
                "HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nX-Worker-Instance-Id: engine\r\nContent-Length: {length}\r\n\r\n{body}"
            )
            .as_bytes(),
        );
        Then::KeepAlive
    });
    let named = worker.address.to_string();
    for (flag, expected) in [("false", "engine"), ("true", named.as_str())] {
        let router = router().worker(worker.address).args(&["--answer-names-worker", flag]).ready();
        for path in ["/v1/completions", "/v1/completions?stream"] {
            let answer = router.post(path, r#"{"model":"m","prompt":"x"}"#);
            let told: Vec<&String> = answer
                .headers
                .iter()
                .filter(|(name, _)| name == "x-worker-instance-id")
                .map(|(_, value)| value)
                .collect();
            assert_eq!((answer.status, told), (200, vec![&expected.to_owned()]), "{flag} {path}");
            assert_eq!(answer.header("x-accel-buffering").is_some(), path.ends_with("stream"), "{flag} {path}");
            assert_eq!(answer.header("x-prefill-instance-id"), None);
        }
    }
}
