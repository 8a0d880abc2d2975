//! Time and size limits: what they cut, and what they leave alone.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::support::client::{self, Connection, request};
use crate::support::router::{Router, router, router_with_descriptors};
use crate::support::worker::{Then, json_worker, worker};
use crate::support::{eventually, wait_until};

const STREAM: &str = r#"{"model":"m","prompt":"x","stream":true}"#;

/// CPU seconds that a process has used.
fn cpu_seconds(router: &Router) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", router.pid())).unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    // utime and stime: fields 14 and 15 of proc(5), counted behind the name; a tick is 10 ms on Linux.
    (fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()) / 100.0
}

/// Field report B06: separate limits for connecting, the first byte and silence; none for the whole.
#[test]
fn b06_long_healthy_streams_live_and_silent_workers_do_not() {
    let scripted = worker(|seen, conversation| {
        let text = String::from_utf8_lossy(&seen.body).into_owned();
        let pause = |milliseconds| std::thread::sleep(Duration::from_millis(milliseconds));
        if text.contains("never") {
            return conversation.wait_for_close();
        }
        conversation.sse_head();
        if text.contains("late") {
            pause(1_500);
        }
        for number in 0..if text.contains("steady") { 20 } else { 3 } {
            conversation.chunk(&format!("data: {number}\n\n"));
            pause(100);
        }
        if text.contains("stops") {
            return conversation.wait_for_close();
        }
        conversation.chunk("data: [DONE]\n\n");
        conversation.last_chunk()
    });
    let limits = ["--http-req-idle-timeout-s", "0.6", "--upstream-first-byte-timeout-s", "3"];
    let further = ["--request-max-retries", "0", "--breaker-failure-threshold", "0"];
    let router = router().round_robin().worker(scripted.address).args(&limits).args(&further).ready();
    let ask = |what: &str| {
        let started = Instant::now();
        let body = format!(r#"{{"model":"m","prompt":"{what}","stream":true}}"#);
        (router.post("/v1/completions", &body), started.elapsed())
    };
    std::thread::scope(|scope| {
        let healthy = ["steady", "late", "steady"].map(|what| (what, scope.spawn(move || ask(what))));
        let never = scope.spawn(|| ask("never"));
        let stops = scope.spawn(|| ask("stops"));
        for (what, client) in healthy {
            let (answer, took) = client.join().unwrap();
            assert!(answer.complete && answer.text().ends_with("data: [DONE]\n\n"), "{what}: {}", answer.text());
            assert!(took > Duration::from_millis(1_500));
        }
        let (answer, took) = never.join().unwrap();
        assert_eq!((answer.status, answer.json()["error"]["code"].as_str()), (504, Some("worker_timeout")));
        assert!(took >= Duration::from_secs(3), "before its time: {took:?}");
        let (answer, _) = stops.join().unwrap();
        assert!(!answer.complete && answer.text().contains("data: 2\n\n"), "{}", answer.text());
        assert_eq!(answer.text().matches("worker_failed").count(), 1);
    });
}

/// A worker process that is stopped accepts connections and says nothing; only its own requests feel it.
#[test]
fn b06_a_stopped_worker_hurts_nobody_else() {
    let stopped = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let healthy = json_worker("{}");
    let limits = ["--upstream-first-byte-timeout-s", "0.5"];
    let record = format!("http://{},model=m,block-size=16", stopped.local_addr().unwrap());
    let router = router().round_robin().worker(healthy.address).args(&["--worker", &record]).args(&limits).ready();
    std::thread::scope(|scope| {
        let clients: Vec<_> =
            (0..8).map(|_| scope.spawn(|| router.post("/v1/completions", r#"{"model":"m"}"#).status)).collect();
        assert!(clients.into_iter().all(|client| client.join().unwrap() == 200));
    });
    wait_until("it is left alone", || router.metric_sum("infera_router_worker_breaker_trips_total") == 1.0);
}

/// Field report B53: half a message costs nothing, whoever sends it and however it ends.
#[test]
fn b53_half_sent_messages_cost_no_cpu() {
    let half_answer = worker(|_, conversation| {
        conversation.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r");
        conversation.wait_for_close()
    });
    let router = router().round_robin().worker(half_answer.address).ready();
    let head = "POST /v1/completions HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n";
    let chunked = |rest: &str| format!("{head}\r\n{rest}").into_bytes();
    let mut pieces: Vec<Vec<u8>> =
        ["4\r", "4", "4\r\n", "4\r\nab", "4\r\nabcd", "0\r\n", ""].iter().map(|rest| chunked(rest)).collect();
    pieces.extend([
        b"POST /v1/comp".to_vec(),
        b"POST / HTTP/1.1\r\nHo".to_vec(),
        request("POST", "/v1/completions", "", STREAM.as_bytes()),
    ]);
    let mut held = Vec::new();
    for piece in &pieces {
        for end in ["fin", "reset", "stay"] {
            let mut stream = TcpStream::connect(router.address).unwrap();
            stream.write_all(piece).unwrap();
            match end {
                "fin" => stream.shutdown(std::net::Shutdown::Write).unwrap(),
                "reset" => {
                    rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO)).unwrap();
                    continue;
                }
                _ => {}
            }
            held.push((end, stream));
        }
    }
    for (end, stream) in &mut held {
        if *end == "fin" {
            stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            // An error is a close as well; what matters is that the connection does not stay.
            let _ = stream.read_to_end(&mut Vec::new());
        }
    }
    // 500 connections that send nothing more than a byte.
    let slow: Vec<TcpStream> = (0..500)
        .map(|_| {
            let mut stream = TcpStream::connect(router.address).unwrap();
            stream.write_all(b"P").unwrap();
            stream
        })
        .collect();
    eventually("all are open", || (router.metric_sum("infera_router_connections_open") >= 500.0).then_some(()));
    let before = cpu_seconds(&router);
    let started = Instant::now();
    while started.elapsed() < Duration::from_secs(2) {
        assert_eq!(client::get(router.address, "/health").status, 200);
        std::thread::sleep(Duration::from_millis(100));
    }
    let used = cpu_seconds(&router) - before;
    assert!(used < 0.2, "{used} CPU seconds in two seconds of waiting");
    drop((held, slow));
    router.wait_for_rest();
}

/// Field report B60: one limit, the configured one, however the body comes.
#[test]
fn b60_the_body_limit_is_the_configured_one() {
    const LIMIT: usize = 8 << 20;
    let worker = json_worker("{}");
    let limit = LIMIT.to_string();
    let router = router().round_robin().worker(worker.address).args(&["--max-body-bytes", &limit]).ready();
    let body = |bytes: usize| format!(r#"{{"model":"m","prompt":"{}"}}"#, "x".repeat(bytes - 25)).into_bytes();
    for bytes in [1_900_000, 2_100_000, LIMIT - 1, LIMIT] {
        assert_eq!(body(bytes).len(), bytes);
        let whole = client::exchange(router.address, "POST", "/v1/completions", "", &body(bytes));
        assert_eq!(whole.status, 200, "{bytes}");
        let mut connection = Connection::open(router.address);
        connection.send(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n");
        for piece in body(bytes).chunks(1 << 20) {
            connection.send(&[format!("{:x}\r\n", piece.len()).as_bytes(), piece, b"\r\n"].concat());
        }
        connection.send(b"0\r\n\r\n");
        assert_eq!(connection.answer("POST").status, 200, "{bytes} in chunks");
    }
    let served = worker.requests();
    // Refused by its length alone, before a byte of the body is sent.
    let mut connection = Connection::open(router.address);
    connection
        .send(format!("POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: {}\r\n\r\n", LIMIT + 1).as_bytes());
    let answer = connection.answer("POST");
    assert_eq!((answer.status, answer.json()["error"]["type"].as_str()), (413, Some("invalid_request_error")));
    // Without a length: as soon as it is too much.
    let mut connection = Connection::open(router.address);
    connection.send(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n");
    let piece = vec![b'x'; 1 << 20];
    let sent =
        (0..9).try_for_each(|_| connection.reader.get_mut().write_all(&[b"100000\r\n", &piece[..], b"\r\n"].concat()));
    // The router may have closed in the middle of a write.
    drop(sent);
    if let Ok((status, _)) = connection.head() {
        assert_eq!(status, 413);
    }
    // Compressed bodies are the worker's to open: they count as they are.
    let mut connection = Connection::open(router.address);
    connection.send(&request("POST", "/v1/completions", "Content-Encoding: gzip\r\n", &[0x1f; 100]));
    assert_eq!(connection.answer("POST").status, 400, "no JSON that could be routed");
    assert_eq!(worker.requests(), served);
    assert!(router.metric_sum("infera_router_rejections_total") >= 2.0);
}

#[test]
fn a_connection_beyond_the_cap_is_refused_cleanly() {
    let worker = worker(|_, conversation| {
        conversation.json(200, "{}");
        Then::KeepAlive
    });
    let router = router().round_robin().worker(worker.address).args(&["--max-connections", "20"]).ready();
    let mut open: Vec<Connection> = (0..20).map(|_| Connection::open(router.address)).collect();
    for connection in &mut open {
        connection.send(&request("GET", "/health", "", b""));
        assert_eq!(connection.answer("GET").status, 200);
    }
    let mut further = Connection::open(router.address);
    let answer = further.answer("GET");
    assert_eq!((answer.status, answer.header("retry-after")), (503, Some("1")));
    assert!(answer.json()["error"]["message"].as_str().unwrap().contains("connections"), "{}", answer.text());
    for connection in &mut open {
        connection.send(&request("POST", "/v1/completions", "", br#"{"model":"m"}"#));
        assert_eq!(connection.answer("POST").status, 200, "the rest notice nothing");
    }
    drop(open);
    wait_until("there is room again", || {
        let mut connection = Connection::open(router.address);
        connection.send(&request("GET", "/health", "", b""));
        connection.head().is_ok_and(|(status, _)| status == 200)
    });
}

/// Where descriptors are short, whoever comes too late is told so; streams that are open go on, their workers included.
#[test]
fn streams_notice_nothing_of_connections_for_which_there_are_no_descriptors() {
    const FITTING: usize = 150;
    let goes_on = Arc::new(AtomicBool::new(false));
    let gate = goes_on.clone();
    let worker = worker(move |_, conversation| {
        conversation.sse_head();
        conversation.chunk("data: 1\n\n");
        // No deadline of its own: the clients have one.
        while !gate.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(5));
        }
        conversation.chunk("data: [DONE]\n\n");
        conversation.last_chunk()
    });
    // A quarter is kept, and each connection needs another one to a worker.
    let router = router_with_descriptors(FITTING as u32 * 8 / 3).round_robin().worker(worker.address).ready();
    router.logged(&["fewer connections than --max-connections", &format!("connections_max={FITTING}")]);
    let mut streams: Vec<Connection> = Vec::new();
    let refused = loop {
        let mut connection = Connection::open(router.address);
        connection.send(&request("POST", "/v1/completions", "", STREAM.as_bytes()));
        let (status, _) = connection.head().unwrap();
        if status != 200 {
            break status;
        }
        assert_eq!(connection.chunk().unwrap().as_deref(), Some(&b"data: 1\n\n"[..]));
        streams.push(connection);
    };
    // A connection of the test's own looks may not have been closed yet.
    assert!(refused == 503 && (FITTING - 5..=FITTING).contains(&streams.len()), "{refused} after {}", streams.len());
    for _ in 0..100 {
        let mut further = Connection::open(router.address);
        // It may be closed before this arrives.
        let _ = further.reader.get_mut().write_all(&request("GET", "/health", "", b""));
        if let Ok((status, _)) = further.head() {
            assert_eq!(status, 503);
        }
    }
    goes_on.store(true, Ordering::SeqCst);
    for mut stream in streams {
        assert_eq!(stream.chunk().unwrap().as_deref(), Some(&b"data: [DONE]\n\n"[..]));
        assert_eq!(stream.chunk().unwrap(), None);
    }
    assert_eq!(router.get("/health").status, 200);
    assert_eq!(router.metric_sum("infera_router_worker_breaker_trips_total"), 0.0);
}

/// Bodies are read without recursion: depth costs a refusal, at every length and on every way through.
#[test]
fn json_that_is_nested_too_deeply_is_refused_and_hurts_nobody() {
    let worker = json_worker("{}");
    let router = router().worker(worker.address).ready();
    for depth in [500, 513, 100_000] {
        for (open, close) in [("[", "]"), ("{\"a\":", "}")] {
            let nested = format!("{}1{}", open.repeat(depth), close.repeat(depth));
            for body in [
                format!("{{\"model\":\"m\",\"x\":{nested}}}"),
                format!("{{\"model\":\"m\",\"prompt\":{nested}}}"),
                format!("{{\"model\":\"m\",\"messages\":{nested}}}"),
                format!("{{\"model\":\"m\",\"x\":{}", open.repeat(depth)),
            ] {
                for path in ["/v1/completions", "/v1/chat/completions", "/v1/responses"] {
                    let status = router.post(path, &body).status;
                    let is_taken = depth < 512 && body.ends_with('}');
                    assert_eq!(status, if is_taken { 200 } else { 400 }, "{path} {depth} {}", &body[..30]);
                }
            }
        }
    }
    assert_eq!(router.metric_sum("infera_router_panics_total"), 0.0);
    assert_eq!(router.get("/health").status, 200);
}
