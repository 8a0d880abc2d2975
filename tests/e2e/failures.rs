//! Workers that fail: what is retried, what is not, and what the client is told.

use crate::support::client::{self, Connection};
use crate::support::router::{Router, router};
use crate::support::worker::{Then, Worker, dead_address, json_worker, worker};

const BODY: &str = r#"{"model":"m","prompt":"x"}"#;

/// Many requests over a healthy and a failing worker: all are answered by the healthy one.
fn all_answered(router: &Router, healthy: &Worker) {
    for _ in 0..6 {
        let answer = router.post("/v1/completions", BODY);
        assert_eq!((answer.status, answer.text().as_str()), (200, r#"{"from":"healthy"}"#));
    }
    assert_eq!(healthy.requests(), 6);
    router.wait_for_rest();
}

#[test]
fn b50_connect_and_first_byte_failures_go_to_another_worker() {
    let healthy = json_worker(r#"{"from":"healthy"}"#);
    let check = |address: std::net::SocketAddr| {
        let healthy = json_worker(r#"{"from":"healthy"}"#);
        let router = router().round_robin().worker(address).worker(healthy.address).ready();
        all_answered(&router, &healthy);
        assert!(router.metric_sum("infera_router_retries_total") >= 3.0);
    };
    drop(healthy);
    check(dead_address());
    check(worker(|_, conversation| conversation.reset()).address);
    check(worker(|_, _| Then::Close).address);
    let half_a_head = worker(|_, conversation| {
        conversation.write(b"HTTP/1.1 200 OK\r\nContent-Le");
        Then::Close
    });
    check(half_a_head.address);
    let unavailable = worker(|_, conversation| conversation.json(503, r#"{"error":"starting"}"#));
    check(unavailable.address);
    let garbage = worker(|_, conversation| {
        conversation.write(b"SSH-2.0-OpenSSH_9.2\r\n\r\n");
        Then::Close
    });
    check(garbage.address);
}

#[test]
fn a_worker_that_never_answers_is_left_after_the_first_byte_limit() {
    let silent = worker(|_, conversation| conversation.wait_for_close());
    let healthy = json_worker(r#"{"from":"healthy"}"#);
    let router = router()
        .round_robin()
        .worker(silent.address)
        .worker(healthy.address)
        .args(&["--upstream-first-byte-timeout-s", "0.3"])
        .ready();
    all_answered(&router, &healthy);
    // Alone, it costs the client a clear 504.
    let alone = router_of(&silent, &["--upstream-first-byte-timeout-s", "0.3"]);
    let answer = alone.post("/v1/completions", BODY);
    assert_eq!((answer.status, answer.json()["error"]["code"].as_str()), (504, Some("worker_timeout")));
}

fn router_of(worker: &Worker, arguments: &[&str]) -> Router {
    router().round_robin().worker(worker.address).args(arguments).ready()
}

#[test]
fn the_last_failure_is_told_as_it_is() {
    let answer = router().round_robin().worker(dead_address()).ready().post("/v1/completions", BODY);
    assert_eq!((answer.status, answer.json()["error"]["code"].as_str()), (502, Some("worker_failed")));
    // A worker's own answer passes unchanged when there is nobody else to ask, whatever its status.
    for (status, body) in [(400, r#"{"error":{"message":"too long"}}"#), (429, "{}"), (500, "{\"a\":1}"), (503, "{}")] {
        let refusing = worker(move |_, conversation| conversation.json(status, body));
        let router = router_of(&refusing, &[]);
        let answer = router.post("/v1/completions", BODY);
        assert_eq!((answer.status, answer.text().as_str()), (status, body));
        assert_eq!(refusing.requests(), 1, "{status} was tried again");
    }
}

#[test]
fn b04_a_client_error_of_a_worker_is_not_tried_elsewhere() {
    let refusing = worker(|_, conversation| conversation.json(400, r#"{"error":{"message":"no"}}"#));
    let other = worker(|_, conversation| conversation.json(400, r#"{"error":{"message":"no"}}"#));
    let router = router().round_robin().worker(refusing.address).worker(other.address).ready();
    for stream in [false, true] {
        let body = format!(r#"{{"model":"m","stream":{stream}}}"#);
        let answer = router.post("/v1/chat/completions", &body);
        assert_eq!((answer.status, answer.text().as_str()), (400, r#"{"error":{"message":"no"}}"#));
    }
    assert_eq!(refusing.requests() + other.requests(), 2);
}

#[test]
fn b51_a_cut_stream_is_neither_replayed_nor_finished_politely() {
    // Whatever was asked for and whatever has come: a comment or an empty delta is a byte too.
    let bodies = [
        r#"{"model":"m","stream":true}"#,
        r#"{"model":"m","stream":true,"n":2,"logprobs":true,"max_tokens":5,"min_tokens":4}"#,
        r#"{"model":"m","stream":true,"response_format":{"type":"json_schema","json_schema":{"name":"s","schema":{}}}}"#,
    ];
    for (body, said) in
        bodies.into_iter().zip(["data: {\"t\":\"A\"}\n\n", ": ping\n\n", "data: {\"delta\":{\"role\":\"a\"}}\n\n"])
    {
        let cutting = || {
            worker(move |_, conversation| {
                conversation.sse_head();
                conversation.chunk(said);
                conversation.reset()
            })
        };
        let (one, other) = (cutting(), cutting());
        let router = router().round_robin().worker(one.address).worker(other.address).ready();
        let answer = router.post("/v1/chat/completions", body);
        assert_eq!(answer.status, 200);
        assert!(!answer.complete, "a cut stream must not end with the final chunk");
        let text = answer.text();
        assert!(text.starts_with(said) && !text.contains("[DONE]"), "{text}");
        assert_eq!(text.matches("worker_failed").count(), 1, "one error event: {text}");
        assert_eq!(one.requests() + other.requests(), 1);
        router.wait_for_rest();
        assert_eq!(router.metric(r#"infera_requests_total{outcome="error",router="mixed"}"#), Some(1.0));
    }

    // Cut behind its end: clients stop reading there, and must not meet an error event.
    let behind = worker(|_, conversation| {
        conversation.sse_head();
        conversation.chunk("data: {\"t\":\"A\"}\n\n");
        conversation.chunk("data: [DONE]\n\n");
        Then::Close
    });
    let answer = router_of(&behind, &[]).post("/v1/chat/completions", r#"{"model":"m","stream":true}"#);
    assert_eq!((answer.text().as_str(), answer.complete), ("data: {\"t\":\"A\"}\n\ndata: [DONE]\n\n", false));

    let half = worker(|_, conversation| {
        conversation.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{\"half\":");
        Then::Close
    });
    let answer = router_of(&half, &[]).post("/v1/completions", BODY);
    assert!(!answer.complete);
}

/// Field report B02: a reused connection that dies before any byte of an answer is nobody's fault.
#[test]
fn b02_a_reused_connection_that_dies_is_replayed_once_on_a_fresh_one() {
    let fragile = worker(|_, conversation| {
        conversation.json(200, r#"{"from":"healthy"}"#);
        // Promises keep-alive, then closes: the next request finds a dead connection.
        Then::Close
    });
    let router = router_of(&fragile, &["--request-max-retries", "0"]);
    for size in [10, 2_000_000] {
        let body = format!(r#"{{"model":"m","prompt":"{}"}}"#, "x".repeat(size));
        for _ in 0..5 {
            assert_eq!(router.post("/v1/completions", &body).status, 200);
        }
    }
    assert_eq!(router.metric_sum("infera_router_retries_total"), 0.0);
    assert_eq!(router.metric_sum("infera_router_worker_breaker_trips_total"), 0.0);
    assert_eq!(router.breaker_of(fragile.address), "closed");
}

#[test]
fn b50_a_large_body_is_sent_whole_to_the_next_worker() {
    let reading = worker(|_, conversation| conversation.reset());
    let healthy = json_worker(r#"{"from":"healthy"}"#);
    let router = router().round_robin().worker(reading.address).worker(healthy.address).ready();
    let body = format!(r#"{{"model":"m","prompt":"{}"}}"#, "0123456789abcdef".repeat(512 << 10));
    for _ in 0..2 {
        assert_eq!(router.post("/v1/completions", &body).status, 200);
    }
    assert!(reading.requests() >= 1);
    assert!(healthy.seen().iter().all(|seen| seen.body == body.as_bytes()), "another body arrived");
}

#[test]
fn b52_ambiguous_framing_is_refused_and_nothing_reaches_the_worker() {
    let worker = json_worker("{}");
    let router = router().round_robin().worker(worker.address).args(&["--max-body-bytes", "1000"]).ready();
    let check = |raw: &[u8], status: u16| {
        let mut connection = Connection::open(router.address);
        connection.send(raw);
        let answer = connection.answer("POST");
        assert_eq!(answer.status, status, "{}", String::from_utf8_lossy(raw));
        assert!(answer.json()["error"]["message"].is_string());
        let mut rest = Vec::new();
        std::io::Read::read_to_end(&mut connection.reader, &mut rest).ok();
        assert!(rest.is_empty(), "the remainder was read as a request: {}", String::from_utf8_lossy(&rest));
    };
    let smuggled = "GET /v1/admin HTTP/1.1\r\nHost: t\r\n\r\n";
    let head = "POST /v1/completions HTTP/1.1\r\nHost: t\r\n";
    check(format!("{head}Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{smuggled}").as_bytes(), 400);
    check(format!("{head}Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef{smuggled}").as_bytes(), 400);
    check(format!("{head}Content-Length: +5\r\n\r\nabcde{smuggled}").as_bytes(), 400);
    check(format!("{head}Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n{smuggled}").as_bytes(), 400);
    check(format!("{head}Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n{smuggled}").as_bytes(), 400);
    // Read as a framing header by workers that know no difference between `_` and `-`.
    check(format!("{head}Content-Length: 5\r\nTransfer_Encoding: chunked\r\n\r\n0\r\n\r\n{smuggled}").as_bytes(), 400);
    check(format!("{head}Content_Length: 5\r\n\r\nabcde{smuggled}").as_bytes(), 400);
    check(format!("{head}Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFF\r\n{smuggled}").as_bytes(), 400);
    check(format!("{head}Content-Length: 5000\r\n\r\n").as_bytes(), 413);
    check(format!("{head}Content-Length: 5000\r\nExpect: 100-continue\r\n\r\n").as_bytes(), 413);
    check(format!("{head}X-Long: {}\r\n\r\n", "y".repeat(100_000)).as_bytes(), 431);
    assert_eq!(worker.requests(), 0);
    assert_eq!(client::get(router.address, "/health").status, 200);
}

/// An answer whose framing the client's side may read otherwise does not get there; its other odd names do.
#[test]
fn b52_answers_whose_names_become_framing_behind_us_are_502() {
    let bad = worker(|_, conversation| {
        conversation.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer_Encoding: chunked\r\n\r\n{}");
        Then::KeepAlive
    });
    let answer = router_of(&bad, &[]).post("/v1/completions", BODY);
    assert_eq!((answer.status, answer.json()["error"]["code"].as_str()), (502, Some("worker_failed")));
    let fine = worker(|_, conversation| {
        let lines = "X_Trace: t\r\nKeep_Alive: 9\r\nX_Worker_Instance_Id: w\r\n";
        conversation.write(format!("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n{lines}\r\n{{}}").as_bytes());
        Then::KeepAlive
    });
    let answer = router_of(&fine, &["--answer-names-worker", "true"]).post("/v1/completions", BODY);
    let seen = ["x_trace", "keep_alive", "x_worker_instance_id"].map(|name| answer.header(name));
    assert_eq!((answer.status, seen), (200, [Some("t"), None, None]));
    assert!(answer.header("x-worker-instance-id").is_some_and(|id| id != "w"));
}

/// A body that breaks in what came with its head: nothing has gone out yet, so the client reads who is to blame.
#[test]
fn b52_an_answer_that_breaks_at_its_first_chunk_is_a_502_and_the_workers_fault() {
    for broken in
        ["zz\r\n".to_owned(), format!("2;{}\r\n{{}}\r\n0\r\n\r\n", "e".repeat(100_000)), "2\r\n{}\r\nzz\r\n".to_owned()]
    {
        for kind in ["application/json", "text/event-stream"] {
            let answer =
                format!("HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n{broken}");
            let worker = worker(move |_, conversation| {
                conversation.write(answer.as_bytes());
                Then::KeepAlive
            });
            let router = router_of(&worker, &["--breaker-failure-threshold", "1"]);
            let answer = router.post("/v1/completions", BODY);
            assert_eq!((answer.status, answer.complete), (502, true), "{kind} {broken:?}: {}", answer.text());
            assert!(answer.text().contains("not valid HTTP"), "{}", answer.text());
            assert_eq!(router.breaker_of(worker.address), "open");
            router.wait_for_rest();
        }
    }
}

/// An engine that tells of its failure inside the stream and is cut behind that has told it: the client gets one error event.
#[test]
fn b04_an_error_event_and_a_cut_behind_it_are_one_error() {
    let worker = worker(|seen, conversation| {
        conversation.sse_head();
        conversation.chunk("data: 1\n\n");
        let error = "data: {\"error\":{\"message\":\"engine died\",\"code\":500}}";
        // Told to its end, or cut in its middle.
        let is_whole = String::from_utf8_lossy(&seen.body).contains("whole");
        conversation.chunk(&if is_whole { format!("{error}\n\n") } else { error[..30].to_owned() });
        Then::Close
    });
    let router = router().round_robin().worker(worker.address).ready();
    for (prompt, engines, ours) in [("whole", 1, 0), ("half", 1, 1)] {
        let body = format!(r#"{{"model":"m","prompt":"{prompt}","stream":true}}"#);
        let answer = router.post("/v1/completions", &body);
        let text = answer.text();
        assert!(!answer.complete && text.starts_with("data: 1\n\n"), "{text}");
        assert_eq!(
            (text.matches("data: {\"error\"").count() - ours, text.matches("worker_failed").count()),
            (engines, ours)
        );
    }
    router.wait_for_rest();
}
