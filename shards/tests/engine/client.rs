//! What a client sees: keep-alive, pipelining, bodies, interim answers, refusals, half-sent messages.

use std::net::Shutdown;
use std::time::{Duration, Instant};

use crate::harness::{Client, DRIVERS, TestEngine, Upstream, cpu_time, eventually, nowhere};

#[test]
fn one_connection_serves_many_requests() {
    for driver in DRIVERS {
        let engine = TestEngine::start(driver, nowhere());
        let mut client = engine.connect();
        for round in 0..50 {
            let body = vec![b'a' + (round % 26) as u8; round * 700];
            assert_eq!(client.post("/echo", &body).body, body);
        }
        assert_eq!(client.get("/hello").text(), "hello");
        eventually("the last request is over", || engine.stats().requests_active == 0);
        let stats = engine.stats();
        assert_eq!((stats.connections_accepted, stats.requests), (1, 51));
        drop(client);
        eventually("the connection is closed", || engine.stats().connections_open == 0);
        assert_eq!(engine.stats().client_aborts, 0);
    }
}

#[test]
fn pipelined_requests_are_answered_in_order_and_none_is_lost() {
    for driver in DRIVERS {
        let engine = TestEngine::start(driver, nowhere());
        let mut client = engine.connect();
        // The first takes a while, so that all others arrive during it.
        let mut requests = b"GET /sleep HTTP/1.1\r\nHost: t\r\n\r\n".to_vec();
        for number in 0..200 {
            let body = format!("body {number}");
            requests.extend_from_slice(
                format!("POST /echo HTTP/1.1\r\nHost: t\r\nContent-Length: {}\r\n\r\n{body}", body.len()).as_bytes(),
            );
        }
        for piece in requests.chunks(997) {
            client.send(piece);
        }
        assert_eq!(client.answer().text(), "slept");
        for number in 0..200 {
            assert_eq!(client.answer().text(), format!("body {number}"));
        }
    }
}

#[test]
fn a_request_is_the_same_at_every_cut() {
    let engine = TestEngine::start(DRIVERS[0], nowhere());
    let sized = b"\r\nPOST /echo HTTP/1.1\r\nHost: t\r\nContent-Length: 4\r\n\r\nabcd";
    let chunked = b"POST /echo HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n1\r\nd\r\n0\r\nT: r\r\n\r\n";
    let mut client = engine.connect();
    for message in [&sized[..], &chunked[..]] {
        for cut in 1..message.len() {
            client.send(&message[..cut]);
            // A round trip on another connection gives the first part time to be looked at alone.
            if cut % 8 == 0 {
                engine.connect().get("/hello");
            }
            client.send(&message[cut..]);
            assert_eq!(client.answer().text(), "abcd", "cut at {cut}");
        }
        for byte in message {
            client.send([*byte]);
        }
        assert_eq!(client.answer().text(), "abcd");
    }
}

#[test]
fn large_bodies_pass_both_ways() {
    for driver in DRIVERS {
        let upstream = Upstream::echo();
        let engine = TestEngine::start(driver, upstream.address);
        let body: Vec<u8> = (0..2_u32 << 20).map(|index| (index % 251) as u8).collect();
        let mut client = engine.connect();
        let mut sender = client.stream.try_clone().expect("a second handle");
        for target in ["/echo", "/proxied"] {
            for chunked in [false, true] {
                let mut message = format!("POST {target} HTTP/1.1\r\nHost: t\r\n").into_bytes();
                if chunked {
                    message.extend_from_slice(b"Transfer-Encoding: chunked\r\n\r\n");
                    for piece in body.chunks(100_000) {
                        message.extend_from_slice(format!("{:x}\r\n", piece.len()).as_bytes());
                        message.extend_from_slice(piece);
                        message.extend_from_slice(b"\r\n");
                    }
                    message.extend_from_slice(b"0\r\n\r\n");
                } else {
                    message.extend_from_slice(format!("Content-Length: {}\r\n\r\n", body.len()).as_bytes());
                    message.extend_from_slice(&body);
                }
                std::thread::scope(|scope| {
                    scope.spawn(|| std::io::Write::write_all(&mut sender, &message).expect("sends"));
                    assert!(client.answer().body == body, "{target}, chunked: {chunked}");
                });
            }
        }
        assert_eq!(client.get("/large").body.len(), 2 << 20);
    }
}

#[test]
fn continue_is_sent_only_when_the_body_will_be_read() {
    for driver in DRIVERS {
        let engine = TestEngine::configured(driver, nowhere(), |config| config.limits.body_bytes_max = 10);
        let mut client = engine.connect();
        client.send("POST /echo HTTP/1.1\r\nHost: t\r\nExpect: 100-continue\r\nContent-Length: 10\r\n\r\n");
        assert_eq!(client.read_until(b"\r\n\r\n"), b"HTTP/1.1 100 Continue\r\n\r\n");
        client.send("0123456789");
        assert_eq!(client.answer().text(), "0123456789");
        // With the body at hand there is nothing to wait for.
        client.send("POST /echo HTTP/1.1\r\nHost: t\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\nab");
        assert_eq!(client.answer().text(), "ab");
        client.send("POST /echo HTTP/1.1\r\nHost: t\r\nExpect: 100-continue\r\nContent-Length: 11\r\n\r\n");
        let refused = client.answer();
        assert_eq!((refused.status, refused.header("connection")), (413, Some("close")));
        assert!(client.rest().is_empty());
    }
}

#[test]
fn head_and_bodiless_answers_have_no_body() {
    for driver in DRIVERS {
        let engine = TestEngine::start(driver, nowhere());
        let mut client = engine.connect();
        client.send("HEAD /hello HTTP/1.1\r\nHost: t\r\n\r\n");
        let head = client.head();
        assert_eq!((head.status, head.header("content-length")), (200, Some("5")));
        let empty = client.get("/empty");
        assert_eq!((empty.status, empty.header("content-length")), (204, None));
        // Nothing was left behind: the next answer begins with its status line.
        assert_eq!(client.get("/hello").text(), "hello");
    }
}

#[test]
fn http_1_0_clients_get_what_they_understand() {
    for driver in DRIVERS {
        let upstream = Upstream::start(|mut served| {
            while let Some(request) = served.request() {
                if request.head.contains("/chunked") {
                    served
                        .send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n");
                } else {
                    served.send_ok(b"sized");
                }
            }
        });
        let engine = TestEngine::start(driver, upstream.address);
        let mut client = engine.connect();
        client.send("GET /hello HTTP/1.0\r\n\r\n");
        let answer = client.answer();
        assert_eq!((answer.text(), answer.header("connection")), ("hello", Some("close")));
        assert!(client.rest().is_empty());
        let mut client = engine.connect();
        client.send("GET /sized HTTP/1.0\r\nConnection: keep-alive\r\n\r\n");
        let answer = client.answer();
        assert_eq!((answer.text(), answer.header("connection")), ("sized", Some("keep-alive")));
        client.send("GET /chunked HTTP/1.0\r\nConnection: keep-alive\r\n\r\n");
        let head = client.head();
        assert_eq!((head.header("connection"), head.header("transfer-encoding")), (Some("close"), None));
        assert_eq!(client.rest(), b"abcde");
    }
}

#[test]
fn close_is_honoured() {
    let engine = TestEngine::start(DRIVERS[0], nowhere());
    let mut client = engine.connect();
    client.send("GET /hello HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\nGET /hello HTTP/1.1\r\nHost: t\r\n\r\n");
    let answer = client.answer();
    assert_eq!((answer.text(), answer.header("connection")), ("hello", Some("close")));
    assert!(client.rest().is_empty());
    assert_eq!(engine.stats().requests, 1);
}

#[test]
fn ipv6_works_on_both_sides() {
    for driver in DRIVERS {
        let engine = TestEngine::configured(driver, nowhere(), |config| {
            config.listen = "[::1]:0".parse().expect("an address");
        });
        assert!(engine.address().is_ipv6());
        let front = TestEngine::start(driver, engine.address());
        assert_eq!(front.connect().get("/hello").text(), "hello");
        assert_eq!(engine.connect().post("/echo", b"six").text(), "six");
    }
}

/// Bytes that must be answered with that status and closed, with the worker seeing nothing of what follows.
fn refusals() -> Vec<(Vec<u8>, u16)> {
    let mut table: Vec<(Vec<u8>, u16)> = Vec::new();
    let mut add = |bytes: &str, status| table.push((bytes.as_bytes().to_vec(), status));
    let smuggled = "GET /hello HTTP/1.1\r\nHost: t\r\n\r\n";
    let post = "POST /echo HTTP/1.1\r\nHost: t\r\n";
    add(&format!("{post}Content-Length: 13\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{smuggled}"), 400);
    add(&format!("{post}Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n5c\r\n{smuggled}"), 400);
    add(&format!("{post}Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n{smuggled}"), 400);
    add(&format!("{post}Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n{smuggled}"), 400);
    add(&format!("{post}Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{smuggled}"), 400);
    add(&format!("{post}Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n{smuggled}"), 400);
    add(&format!("{post}Content-Length: 5\r\nTransfer_Encoding: chunked\r\n\r\nhello{smuggled}"), 400);
    add(&format!("{post}Content_Length: 5\r\n\r\nhello{smuggled}"), 400);
    for length in ["+5", "5, 5", "0x5", "18446744073709551616", "5\r\nContent-Length: 6", ""] {
        add(&format!("{post}Content-Length: {length}\r\n\r\nhello{smuggled}"), 400);
    }
    add(&format!("{}{smuggled}", "\r\n".repeat(17)), 400);
    add(&format!("{post}Content-Length: 101\r\n\r\n{}{smuggled}", "x".repeat(101)), 413);
    add(&format!("{post}Transfer-Encoding: chunked\r\n\r\n65\r\n{}\r\n0\r\n\r\n{smuggled}", "x".repeat(101)), 413);
    add(&format!("{post}Transfer-Encoding: chunked\r\n\r\n64\r\n{}\r\n1\r\n", "x".repeat(100)), 413);
    add(&format!("{post}Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFF\r\n{smuggled}"), 413);
    add(&format!("{post}Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFF\r\n{smuggled}"), 400);
    add(&format!("{post}Transfer-Encoding: chunked\r\n\r\n1;{}\r\na\r\n0\r\n\r\n", "e".repeat(1 << 20)), 400);
    add(&format!("{post}Transfer-Encoding: chunked\r\n\r\n1\na\n0\n\n{smuggled}"), 400);
    add(&format!("GET / HTTP/1.1\nHost: t\n\n{smuggled}"), 400);
    add(&format!("GET / HTTP/1.1\r\nHost: t\r\nX: a\r\n b\r\n\r\n{smuggled}"), 400);
    add(&format!("GET / HTTP/1.1\r\nHost: t\r\nX: a\0\r\n\r\n{smuggled}"), 400);
    add(&format!("GET / HTTP/1.1\r\nHost: t\r\nX: {}\r\n\r\n", "x".repeat(40 << 10)), 431);
    add(&format!("GET / HTTP/1.1\r\nHost: t\r\n{}\r\n", "X: y\r\n".repeat(101)), 431);
    add(&format!("GET /{} HTTP/1.1\r\n", "x".repeat(40 << 10)), 431);
    table
}

#[test]
fn ambiguous_and_oversized_messages_are_refused_and_never_continued() {
    for driver in DRIVERS {
        let engine = TestEngine::configured(driver, nowhere(), |config| config.limits.body_bytes_max = 100);
        let table = refusals();
        let count = table.len() as u64;
        for (bytes, status) in table {
            let shown = String::from_utf8_lossy(&bytes[..bytes.len().min(120)]).into_owned();
            let mut client = engine.connect();
            client.send_lossy(&bytes);
            let answer = client.answer();
            assert_eq!(answer.status, status, "{shown:?}: {}", answer.text());
            assert_eq!((answer.header("connection"), answer.header("x-rejected")), (Some("close"), Some("engine")));
            assert!(client.rest().is_empty(), "{shown:?}");
        }
        let stats = engine.stats();
        assert_eq!((stats.requests, stats.rejections), (0, count));
    }
}

#[test]
fn a_few_empty_lines_before_a_request_are_skipped() {
    let engine = TestEngine::start(DRIVERS[0], nowhere());
    let mut client = engine.connect();
    for _ in 0..3 {
        client.send(format!("{}GET /hello HTTP/1.1\r\nHost: t\r\n\r\n", "\r\n".repeat(16)));
        assert_eq!(client.answer().text(), "hello");
    }
}

#[test]
fn an_upgrade_is_an_ordinary_request() {
    // The worker answers 200 although an upgrade was asked for; what was pipelined is a second request, not a tunnel.
    let upstream = Upstream::echo();
    let engine = TestEngine::start(DRIVERS[0], upstream.address);
    let mut client = engine.connect();
    let upgrade = "GET /p HTTP/1.1\r\nHost: t\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n";
    client.send(format!("{upgrade}GET /hello HTTP/1.1\r\nHost: t\r\n\r\n"));
    assert_eq!(client.answer().status, 200);
    assert_eq!(client.answer().text(), "hello");
}

#[test]
fn half_sent_messages_end_at_once_and_cost_nothing() {
    let chunked = "POST /echo HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n";
    let sized = "POST /echo HTTP/1.1\r\nHost: t\r\nContent-Length: 10\r\n\r\n";
    let mut halves: Vec<String> =
        ["4", "4\r", "4\r\n", "4\r\nab", "4\r\nabcd", "4\r\nabcd\r\n", "0\r\n", "0\r\nT: x", "0\r\n\r"]
            .iter()
            .map(|rest| format!("{chunked}{rest}"))
            .collect();
    halves.extend(["PO", "POST / HT", "POST / HTTP/1.1\r\nHo", "POST / HTTP/1.1\r\nHost: t\r\n\r"].map(String::from));
    halves.extend([sized.to_owned(), format!("{sized}abc")]);
    for driver in DRIVERS {
        let engine = TestEngine::start(driver, nowhere());
        for reset in [false, true] {
            for half in &halves {
                let mut client = engine.connect();
                client.send(half);
                if reset {
                    client.reset();
                } else {
                    client.stream.shutdown(Shutdown::Write).expect("half-closes");
                    assert!(client.rest().is_empty(), "{half:?}");
                }
            }
        }
        eventually("all connections are closed", || engine.stats().connections_open == 0);
        assert_eq!(engine.stats().requests, 0);

        // Left half-sent: nothing may spin while they wait.
        let waiting: Vec<Client> = halves
            .iter()
            .map(|half| {
                let mut client = engine.connect();
                client.send(half);
                client
            })
            .collect();
        assert_eq!(engine.connect().get("/hello").text(), "hello");
        let (before, started) = (cpu_time(), Instant::now());
        std::thread::sleep(Duration::from_millis(500));
        let (spent, passed) = (cpu_time() - before, started.elapsed());
        // Other tests of this binary run meanwhile; a spinning shard would alone burn all of the time.
        if std::env::var_os("RUST_TEST_THREADS").is_some_and(|threads| threads == "1") {
            assert!(spent < passed / 5, "{spent:?} of CPU in {passed:?}");
        }
        drop(waiting);
    }
}

#[test]
fn slow_clients_are_timed_out() {
    for driver in DRIVERS {
        let engine = TestEngine::configured(driver, nowhere(), |config| {
            config.limits.head_timeout = Duration::from_millis(150);
            config.limits.body_timeout = Duration::from_millis(150);
            config.limits.keep_alive_timeout = Duration::from_millis(150);
        });
        let mut in_head = engine.connect();
        in_head.send("GET / HTTP/1.1\r\nHo");
        let mut in_body = engine.connect();
        in_body.send("POST /echo HTTP/1.1\r\nHost: t\r\nContent-Length: 5\r\n\r\nab");
        let mut in_chunks = engine.connect();
        in_chunks.send("POST /echo HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab");
        for mut client in [in_head, in_body, in_chunks] {
            assert_eq!(client.answer().status, 408);
            assert!(client.rest().is_empty());
        }
        let mut idle = engine.connect();
        assert_eq!(idle.get("/hello").text(), "hello");
        assert!(idle.rest().is_empty());
        let mut silent = engine.connect();
        assert!(silent.rest().is_empty());
        eventually("all connections are closed", || engine.stats().connections_open == 0);
    }
}

#[test]
fn a_head_that_trickles_in_has_one_deadline() {
    let engine = TestEngine::configured(DRIVERS[0], nowhere(), |config| {
        config.limits.head_timeout = Duration::from_millis(300);
    });
    let mut client = engine.connect();
    let started = Instant::now();
    // Each byte comes well within the limit; the whole head does not.
    while engine.stats().rejections == 0 {
        assert!(started.elapsed() < crate::harness::PATIENCE, "never timed out");
        client.send_lossy(b"X");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(started.elapsed() >= Duration::from_millis(300));
}

#[test]
fn connections_beyond_the_cap_are_told_so() {
    let engine = TestEngine::configured(DRIVERS[0], nowhere(), |config| config.limits.connections_max = 2);
    let mut kept = [engine.connect(), engine.connect()];
    for client in &mut kept {
        assert_eq!(client.get("/hello").text(), "hello");
    }
    let mut refused = engine.connect();
    let answer = refused.answer();
    assert_eq!((answer.status, answer.header("x-rejected")), (503, Some("engine")));
    assert!(refused.rest().is_empty());
    assert_eq!(kept[0].get("/hello").text(), "hello");
}

/// While the shard is busy they gather in the listener's queue, and it takes them over in one go, before any of them has run.
#[test]
fn the_cap_holds_also_for_connections_that_come_at_once() {
    for driver in DRIVERS {
        let engine = TestEngine::configured(driver, nowhere(), |config| config.limits.connections_max = 4);
        let mut busy = engine.connect();
        busy.send("GET /block HTTP/1.1\r\nHost: t\r\n\r\n");
        eventually("the shard is busy", || engine.stats().requests_active == 1);
        let mut clients: Vec<_> = (0..30).map(|_| engine.connect()).collect();
        assert_eq!(busy.answer().text(), "blocked");
        eventually("all were accepted", || engine.stats().connections_accepted == 31);
        clients.iter_mut().for_each(|client| client.send_lossy(b"GET /hello HTTP/1.1\r\nHost: t\r\n\r\n"));
        eventually("the rest is refused", || engine.stats().rejections == 27);
        assert_eq!(engine.stats().connections_open, 4);
        drop(clients);
        eventually("their places are free again", || engine.stats().connections_open == 1);
    }
}

#[test]
fn unfinished_heads_give_way_where_there_are_too_many() {
    for driver in DRIVERS {
        let engine = TestEngine::configured(driver, nowhere(), |config| config.limits.half_open_max = 10);
        let mut busy = engine.connect();
        assert_eq!(busy.get("/hello").text(), "hello");
        let mut uploading = engine.connect();
        uploading.send("POST /echo HTTP/1.1\r\nHost: t\r\nContent-Length: 5\r\n\r\nab");
        let flood: Vec<_> = (0..30)
            .map(|number| {
                let mut client = engine.connect();
                client.send(if number % 2 == 0 { "GET / HT" } else { "" });
                client
            })
            .collect();
        // Long before the head's own limit, and only as many as are too many.
        eventually("those that are too many are closed", || engine.stats().connections_open == 12);
        assert_eq!(busy.get("/hello").text(), "hello");
        uploading.send("cde");
        assert_eq!(uploading.answer().text(), "abcde");
        assert_eq!(engine.connect().get("/hello").text(), "hello");
        eventually("the rest stays", || engine.stats().connections_open == 12);
        drop(flood);
        eventually("all are gone", || engine.stats().connections_open == 2);
    }
}

#[test]
fn another_protocols_greeting_is_refused_at_its_first_byte() {
    let engine = TestEngine::start(DRIVERS[0], nowhere());
    // The beginning of a TLS hello, a space, a null byte.
    for greeting in [&b"\x16\x03\x01"[..], b" GET", b"\0"] {
        let mut client = engine.connect();
        client.send(greeting);
        assert_eq!(client.answer().status, 400, "{greeting:?}");
        assert!(client.rest().is_empty());
    }
    // Empty lines in front of a request are skipped (RFC 9112, section 2.2), also one byte at a time.
    let mut client = engine.connect();
    for byte in b"\r\n\r\n" {
        client.send([*byte]);
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(client.get("/hello").text(), "hello");
}
