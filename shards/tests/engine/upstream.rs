//! The way to upstreams: pooling, stale connections and their one replay, broken answers, timeouts.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use crate::harness::{DRIVERS, Served, TestEngine, Upstream, eventually, nowhere};

#[test]
fn connections_are_reused_newest_first() {
    for driver in DRIVERS {
        let upstream = Upstream::echo();
        let engine = TestEngine::start(driver, upstream.address);
        let mut client = engine.connect();
        for _ in 0..20 {
            assert_eq!(client.post("/p", b"body").text(), "body");
        }
        assert_eq!(upstream.connection_count(), 1);
        eventually("the connection is back in the pool", || engine.stats().upstream_idle == 1);
        let stats = engine.stats();
        assert_eq!((stats.upstream_connects, stats.upstream_reuses), (1, 19));
    }
}

#[test]
fn the_request_arrives_whole_with_our_framing() {
    for driver in DRIVERS {
        let upstream = Upstream::start(|mut served| {
            while let Some(request) = served.request() {
                let seen = format!("{}{}", request.head, request.body.len());
                served.send_ok(seen.as_bytes());
            }
        });
        let engine = TestEngine::start(driver, upstream.address);
        let mut client = engine.connect();
        client.send(
            "POST /v1/x?y=z HTTP/1.1\r\nHost: public\r\nAuthorization: Bearer k\r\nConnection: keep-alive, \
             X-Hop\r\nX-Hop: 1\r\nExpect: 100-continue\r\nTransfer-Encoding: chunked\r\nX-Keep: 2\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        );
        let expected = "POST /v1/x?y=z HTTP/1.1\r\nHost: worker.test:1\r\nAuthorization: Bearer k\r\nX-Keep: \
                        2\r\nContent-Length: 3\r\n\r\n3";
        assert_eq!(client.answer().text(), expected);
        let seen = client.get("/get");
        assert_eq!(seen.text(), "GET /get HTTP/1.1\r\nHost: worker.test:1\r\n\r\n0");
    }
}

/// Two requests with a stale connection between them; `go_stale` is what the first connection does with the second.
fn stale_connection(go_stale: impl Fn(Served) + Send + Sync + 'static, expected: u16, connections: usize) {
    let go_stale = std::sync::Arc::new(go_stale);
    for driver in DRIVERS {
        for body_bytes in [200, 2 << 20] {
            for streaming in [false, true] {
                let go_stale = go_stale.clone();
                let upstream = Upstream::start(move |mut served| {
                    let Some(request) = served.request() else { return };
                    answer(&mut served, &request.body, streaming);
                    if served.number == 0 {
                        return go_stale(served);
                    }
                    while let Some(request) = served.request() {
                        answer(&mut served, &request.body, streaming);
                    }
                });
                let engine = TestEngine::start(driver, upstream.address);
                let mut client = engine.connect();
                assert_eq!(client.post("/p", b"first").text(), "first");
                let body = vec![b'b'; body_bytes];
                let second = client.post("/p", &body);
                assert_eq!(second.status, expected, "{}", String::from_utf8_lossy(&second.body));
                if expected == 200 {
                    assert!(second.body == body, "the replay carries the whole body");
                }
                assert_eq!(upstream.connection_count(), connections);
            }
        }
    }
}

fn answer(served: &mut Served, body: &[u8], streaming: bool) {
    if streaming {
        let mut message = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec();
        message.extend_from_slice(format!("{:x}\r\n", body.len()).as_bytes());
        message.extend_from_slice(body);
        message.extend_from_slice(b"\r\n0\r\n\r\n");
        served.send(message);
    } else {
        served.send_ok(body);
    }
}

#[test]
fn b02a_a_connection_closed_while_idle_is_not_used() {
    stale_connection(drop, 200, 2);
}

#[test]
fn b02b_a_close_after_the_request_is_replayed_once() {
    let closed_after_request = |mut served: Served| drop(served.request());
    stale_connection(closed_after_request, 200, 2);
}

#[test]
fn b02c_a_reset_after_the_request_is_replayed_once() {
    let reset_after_request = |mut served: Served| {
        served.request();
        served.reset();
    };
    stale_connection(reset_after_request, 200, 2);
}

#[test]
fn b02d_a_begun_answer_is_never_replayed() {
    let begun = |mut served: Served| {
        served.request();
        served.send("HTTP/1.1 200 OK\r\n");
    };
    stale_connection(begun, 502, 1);
}

#[test]
fn a_fresh_connection_that_dies_is_not_replayed() {
    for driver in DRIVERS {
        let upstream = Upstream::start(|mut served| drop(served.request()));
        let engine = TestEngine::start(driver, upstream.address);
        let answer = engine.connect().post("/p", b"x");
        assert_eq!(answer.status, 502);
        assert!(answer.text().starts_with("first_byte: "), "{}", answer.text());
        assert_eq!(upstream.connection_count(), 1);
    }
}

#[test]
fn a_second_death_in_a_row_ends_the_request() {
    // Every connection answers one request and dies on the next; the replay goes out on a fresh connection, whose
    // first request is answered: so let fresh ones die at once from the third connection on.
    let upstream = Upstream::start(|mut served| {
        served.request();
        if served.number == 0 {
            served.send_ok(b"one");
            served.request();
        }
    });
    let engine = TestEngine::start(DRIVERS[0], upstream.address);
    let mut client = engine.connect();
    assert_eq!(client.post("/p", b"x").status, 200);
    assert_eq!(client.post("/p", b"x").status, 502);
    assert_eq!(upstream.connection_count(), 2);
}

/// The first connection took the request and died; the second one does not read it. Who gives the request up then must not
/// take it for delivered.
#[test]
fn a_replayed_request_is_not_delivered_before_it_is_again() {
    for driver in DRIVERS {
        let (stalled, is_stalled) = std::sync::mpsc::channel();
        let upstream = Upstream::start(move |mut served| match served.number {
            0 => {
                served.request();
                served.send_ok(b"");
                served.request();
            }
            _ => stalled.send(served).expect("the test waits"),
        });
        let engine = TestEngine::start(driver, upstream.address);
        assert_eq!(engine.connect().get("/p").status, 200);
        let mut client = engine.connect();
        client.send(format!("POST /progress HTTP/1.1\r\nHost: t\r\nContent-Length: {}\r\n\r\n", 32 << 20));
        client.send(vec![b'x'; 32 << 20]);
        let served = is_stalled.recv_timeout(crate::harness::PATIENCE).expect("a second connection");
        drop(client);
        let outcome =
            || engine.seen.outcomes.lock().expect("not poisoned").iter().find(|it| it.contains("delivered")).cloned();
        eventually("the request is given up", || outcome().is_some());
        assert_eq!(outcome().as_deref(), Some("delivered: false"));
        drop((engine, served));
    }
}

#[test]
fn unused_connections_are_closed_when_old() {
    for driver in DRIVERS {
        let upstream = Upstream::start(|mut served| {
            while let Some(request) = served.request() {
                served.send_ok(&request.body);
            }
            served.until_closed();
        });
        let engine = TestEngine::configured(driver, upstream.address, |config| {
            config.upstream.pool_idle_timeout = Duration::from_millis(100);
        });
        let mut client = engine.connect();
        client.post("/p", b"x");
        eventually("the upstream sees the close", || upstream.closed.load(Ordering::SeqCst) == 1);
        assert_eq!(engine.stats().upstream_idle, 0);
        client.post("/p", b"x");
        assert_eq!(upstream.connection_count(), 2);
    }
}

#[test]
fn the_pool_keeps_no_more_than_its_cap() {
    let upstream = Upstream::start(|mut served| {
        while served.request().is_some() {
            std::thread::sleep(Duration::from_millis(100));
            served.send_ok(b"late");
        }
    });
    let engine = TestEngine::configured(DRIVERS[0], upstream.address, |config| config.upstream.pool_idle_max = 2);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| assert_eq!(engine.connect().get("/p").text(), "late"));
        }
    });
    eventually("the rest was closed", || engine.stats().requests_active == 0);
    assert_eq!(engine.stats().upstream_idle, 2);
}

#[test]
fn answers_that_break_the_rules_are_502_and_their_connections_go() {
    let bad: &[&str] = &[
        "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "HTTP/1.1 200 OK\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
        "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok",
        "HTTP/1.1 200 OK\nContent-Length: 2\n\nok",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer_Encoding: chunked\r\n\r\nok",
        "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        "not http at all\r\n\r\n",
        "HTTP/1.1 200 OK\r\nX: a\0b\r\n\r\n",
        // The first frame of HTTP/2, which ends no line.
        "\0\0\x12\x04\0\0\0\0\0",
    ];
    for driver in DRIVERS {
        for message in bad {
            let upstream = Upstream::start(move |mut served| {
                served.request();
                served.send(message);
                served.until_closed();
            });
            let engine = TestEngine::start(driver, upstream.address);
            let mut client = engine.connect();
            let answer = client.get("/p");
            assert_eq!(answer.status, 502, "{message:?}: {}", answer.text());
            eventually("the connection is dropped", || upstream.closed.load(Ordering::SeqCst) == 1);
            assert_eq!(engine.stats().upstream_idle, 0);
            assert_eq!(client.get("/hello").text(), "hello");
        }
    }
}

#[test]
fn bytes_after_an_answer_spoil_the_connection_only() {
    let upstream = Upstream::start(|mut served| {
        while served.request().is_some() {
            served
                .send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nbad");
        }
    });
    let engine = TestEngine::start(DRIVERS[0], upstream.address);
    let mut client = engine.connect();
    assert_eq!(client.get("/p").text(), "ok");
    assert_eq!(client.get("/p").text(), "ok");
    assert_eq!(upstream.connection_count(), 2);
}

#[test]
fn interim_answers_are_skipped() {
    for driver in DRIVERS {
        let upstream = Upstream::start(|mut served| {
            while served.request().is_some() {
                served.send("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n");
                served.send_ok(b"final");
            }
        });
        let engine = TestEngine::start(driver, upstream.address);
        let mut client = engine.connect();
        for _ in 0..3 {
            let answer = client.get("/p");
            assert_eq!((answer.status, answer.text(), answer.header("link")), (200, "final", None));
        }
        assert_eq!(upstream.connection_count(), 1);
    }
}

#[test]
fn an_early_refusal_of_a_large_body_is_relayed() {
    for driver in DRIVERS {
        let upstream = Upstream::start(|mut served| {
            let mut some = [0_u8; 1000];
            let _ = std::io::Read::read(&mut served.stream, &mut some);
            served.send("HTTP/1.1 413 Payload Too Large\r\nContent-Length: 3\r\nConnection: close\r\n\r\nbig");
            let _ = served.stream.shutdown(std::net::Shutdown::Write);
            // Reads on, as a careful server does, so that its answer is not lost to a reset.
            served.until_closed();
        });
        let engine = TestEngine::start(driver, upstream.address);
        let answer = engine.connect().post("/p", &vec![b'x'; 4 << 20]);
        assert_eq!((answer.status, answer.text()), (413, "big"));
    }
}

/// A server that answers and then neither reads on nor closes: what it said is read once the rest of the request is stuck.
#[test]
fn an_early_refusal_by_an_upstream_that_reads_no_more_is_relayed() {
    for driver in DRIVERS {
        let is_told = Arc::new(Barrier::new(2));
        let until_told = is_told.clone();
        let upstream = Upstream::start(move |mut served| {
            let mut some = [0_u8; 1000];
            let _ = std::io::Read::read(&mut served.stream, &mut some);
            served.send("HTTP/1.1 413 Payload Too Large\r\nContent-Length: 3\r\n\r\nbig");
            until_told.wait();
        });
        let engine = TestEngine::configured(driver, upstream.address, |config| {
            config.upstream.write_stall_timeout = Duration::from_millis(300);
        });
        let answer = engine.connect().post("/p", &vec![b'x'; 16 << 20]);
        assert_eq!((answer.status, answer.text()), (413, "big"));
        assert_eq!(engine.stats().upstream_idle, 0, "half a request is on the connection");
        is_told.wait();
    }
}

#[test]
fn each_phase_has_its_timeout() {
    let phases: &[(&str, &str, &str)] = &[
        ("", "first_byte: no answer within the first-byte timeout", ""),
        ("HTTP/1.1 200 OK\r\n", "body: the answer stopped", ""),
        ("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab", "body: the answer stopped", "200"),
    ];
    for driver in DRIVERS {
        for (sent, expected, status) in phases {
            let upstream = Upstream::start(move |mut served| {
                served.request();
                served.send(sent);
                served.until_closed();
            });
            let engine = TestEngine::configured(driver, upstream.address, |config| {
                config.upstream.first_byte_timeout = Some(Duration::from_millis(150));
                config.upstream.idle_timeout = Some(Duration::from_millis(150));
            });
            let mut client = engine.connect();
            client.send("GET /p HTTP/1.1\r\nHost: t\r\n\r\n");
            let head = client.head();
            assert_eq!(head.status, if status.is_empty() { 502 } else { 200 });
            let outcome = || engine.seen.outcomes.lock().expect("not poisoned").first().cloned();
            eventually("the exchange has an outcome", || outcome().is_some());
            assert!(outcome().is_some_and(|text| text.starts_with(expected)), "{:?}", outcome());
            eventually("the upstream connection is closed", || upstream.closed.load(Ordering::SeqCst) == 1);
        }
    }
}

#[test]
fn a_refused_connection_is_said_to_be_one() {
    for driver in DRIVERS {
        let engine = TestEngine::start(driver, nowhere());
        let mut client = engine.connect();
        let answer = client.get("/p");
        assert_eq!(answer.status, 502);
        assert!(answer.text().starts_with("connect: cannot connect: "), "{}", answer.text());
        assert_eq!(client.get("/hello").text(), "hello");
    }
}

#[test]
fn collecting_takes_any_framing_and_has_a_cap() {
    let long = vec![b'z'; 5 << 20];
    let number = AtomicUsize::new(0);
    let upstream = Upstream::start(move |mut served| {
        while let Some(request) = served.request() {
            match number.fetch_add(1, Ordering::SeqCst) {
                0 => served.send_ok(b"sized"),
                1 => served.send(
                    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nchun\r\n3\r\nked\r\n0\r\nT: x\r\n\r\n",
                ),
                2 => answer(&mut served, &long, true),
                3 => served.send_ok(&long),
                _ => {
                    served.send("HTTP/1.1 200 OK\r\n\r\nuntil the end");
                    return;
                }
            }
            drop(request);
        }
    });
    let engine = TestEngine::start(DRIVERS[0], upstream.address);
    let mut client = engine.connect();
    assert_eq!(client.get("/collect").text(), "sized");
    assert_eq!(client.get("/collect").text(), "chunked");
    assert_eq!(upstream.connection_count(), 1);
    for _ in 0..2 {
        assert_eq!(client.get("/collect").text(), "body: the answer is larger than allowed");
    }
    assert_eq!(client.get("/collect").text(), "until the end");
}
