//! Streams that are silent for long are reported, once for each phase, and go on.

use std::time::Duration;

use crate::support::client::{Connection, request};
use crate::support::router::{Router, router};
use crate::support::wait_until;
use crate::support::worker::{Then, worker};

const BEFORE: &str = "infera_router_silent_streams_total{phase=\"awaiting first byte\"}";
const MIDDLE: &str = "infera_router_silent_streams_total{phase=\"mid-stream\"}";
const LIMITS: [&str; 4] = ["--stream-admission-warn-s", "1", "--stream-stall-warn-s", "1"];

fn reports(router: &Router) -> Vec<String> {
    router.log_lines().into_iter().filter(|line| line.contains("a stream is silent")).collect()
}

#[test]
fn a_silent_stream_is_reported_once_for_each_phase_and_goes_on() {
    let scripted = worker(|seen, conversation| {
        let body = String::from_utf8_lossy(&seen.body);
        let pause = || std::thread::sleep(Duration::from_millis(if body.contains("quick") { 20 } else { 2_500 }));
        pause();
        if !body.contains("\"stream\":true") {
            return conversation.json(200, "{}");
        }
        conversation.sse_head();
        conversation.chunk("data: 1\n\n");
        pause();
        conversation.chunk("data: [DONE]\n\n");
        conversation.last_chunk()
    });
    let router = router().worker(scripted.address).args(&LIMITS).ready();
    assert_eq!((router.metric(BEFORE), router.metric(MIDDLE)), (Some(0.0), Some(0.0)));
    let ask = |id: &str, body: &str| {
        let mut connection = Connection::open(router.address);
        connection.send(&request("POST", "/v1/completions", &format!("X-Request-Id: {id}\r\n"), body.as_bytes()));
        let answer = connection.answer("POST");
        assert!(answer.complete && answer.status == 200, "{}", answer.text());
    };
    std::thread::scope(|scope| {
        scope.spawn(|| ask("id-7", r#"{"model":"m","prompt":"secret words","stream":true}"#));
        scope.spawn(|| ask("quick", r#"{"model":"m","prompt":"quick","stream":true}"#));
        scope.spawn(|| ask("whole", r#"{"model":"m","prompt":"x"}"#));
    });
    assert_eq!((router.metric(BEFORE), router.metric(MIDDLE)), (Some(1.0), Some(1.0)));
    let reports = reports(&router);
    assert_eq!(reports.len(), 2, "{reports:#?}");
    for (line, phase) in reports.iter().zip(["awaiting first byte", "mid-stream"]) {
        let worker = format!("worker=\"{}\"", scripted.address);
        let parts = [phase, &worker, "path=\"/v1/completions\"", "request_id=\"id-7\"", "silent_for_s="];
        assert!(parts.iter().all(|part| line.contains(part)), "{line}");
        assert!(!line.contains("secret"), "{line}");
    }
}

#[test]
fn a_client_that_does_not_read_is_not_its_workers_silence() {
    let scripted = worker(|_, conversation| {
        conversation.sse_head();
        let payload = format!("data: {}\n\n", "x".repeat(60_000));
        // Far more than all sockets on the way take.
        while conversation.chunk(&payload) {}
        Then::Close
    });
    let router = router().worker(scripted.address).args(&LIMITS).ready();
    let mut connection = Connection::open(router.address);
    connection.send(&request("POST", "/v1/completions", "", br#"{"model":"m","prompt":"x","stream":true}"#));
    connection.head().unwrap();
    let sent = || router.metric_sum("infera_router_client_bytes_total");
    let mut before = -1.0;
    wait_until("nothing moves any more", || {
        // The page itself is part of the count, so a standstill is one of less than a stream's piece.
        std::thread::sleep(Duration::from_millis(1_500));
        let now = sent();
        let stands = now - before < 60_000.0;
        before = now;
        stands
    });
    assert_eq!((router.metric(MIDDLE), reports(&router).len()), (Some(0.0), 0));
    drop(connection);
    router.wait_for_rest();
}

#[test]
fn nothing_is_reported_where_that_is_off() {
    let scripted = worker(|_, conversation| {
        conversation.sse_head();
        conversation.chunk("data: 1\n\n");
        conversation.wait_for_close()
    });
    let off = ["--stream-admission-warn-s", "0", "--stream-stall-warn-s", "0", "--http-req-idle-timeout-s", "0.5"];
    let router = router().worker(scripted.address).args(&off).args(&["--request-max-retries", "0"]).ready();
    let answer = router.post("/v1/completions", r#"{"model":"m","prompt":"x","stream":true}"#);
    assert!(!answer.complete, "cut by the limit of silence");
    assert_eq!(router.metric_sum("infera_router_silent_streams_total"), 0.0);
    assert!(reports(&router).is_empty());
}
