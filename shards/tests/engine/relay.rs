//! Relayed answers: framing byte for byte, headers, cuts, and a client that does not read.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::harness::{DRIVERS, TestEngine, Upstream, eventually};

const STREAM: &str = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";

#[test]
fn chunked_answers_pass_byte_for_byte_at_every_cut() {
    let body = "9\r\ndata: a\n\n\r\nA;ext=1\r\ndata: bb\n\n\r\n00009\r\ndata: c\n\n\r\n0\r\n\r\n";
    let whole = format!("{STREAM}{body}");
    for driver in DRIVERS {
        let served_whole = whole.clone();
        let upstream = Upstream::start(move |mut served| {
            let mut cut = 1;
            while served.request().is_some() {
                served.send(&served_whole[..cut]);
                std::thread::sleep(Duration::from_micros(300));
                served.send(&served_whole[cut..]);
                cut = 1 + cut % (served_whole.len() - 1);
            }
        });
        let engine = TestEngine::start(driver, upstream.address);
        let mut client = engine.connect();
        for cut in 1..whole.len() {
            let answer = client.get("/p");
            assert_eq!(String::from_utf8_lossy(&answer.raw), body, "cut at {cut}");
            assert_eq!(answer.header("content-type"), Some("text/event-stream"));
            let relayed = std::mem::take(&mut *engine.seen.relayed.lock().expect("not poisoned"));
            assert_eq!(String::from_utf8_lossy(&relayed), "data: a\n\ndata: bb\n\ndata: c\n\n", "cut at {cut}");
        }
        assert_eq!(upstream.connection_count(), 1, "whole answers leave the connection usable");
    }
}

#[test]
fn trailers_are_left_out_and_headers_are_edited() {
    for driver in DRIVERS {
        let upstream = Upstream::start(|mut served| {
            while served.request().is_some() {
                served.send(
                    "HTTP/1.1 200 Fine\r\nX-Secret: s\r\nx-relayed: theirs\r\nConnection: X-Hop\r\nX-Hop: \
                     h\r\nKeep-Alive: timeout=5\r\nTrailer: T\r\nX-Keep: k\r\nTransfer-Encoding: \
                     chunked\r\n\r\n2\r\nok\r\n0\r\nT: x\r\nContent-Length: 5\r\n\r\n",
                );
            }
        });
        let engine = TestEngine::start(driver, upstream.address);
        let mut client = engine.connect();
        for _ in 0..3 {
            let answer = client.get("/p");
            let expected = "HTTP/1.1 200 Fine\r\nX-Keep: k\r\nx-relayed: yes\r\nTransfer-Encoding: chunked\r\n\r\n";
            assert_eq!(answer.head, expected);
            assert_eq!(String::from_utf8_lossy(&answer.raw), "2\r\nok\r\n0\r\n\r\n");
        }
        assert_eq!(upstream.connection_count(), 1);
    }
}

#[test]
fn head_answers_keep_their_length_and_have_no_body() {
    for driver in DRIVERS {
        let upstream = Upstream::start(|mut served| {
            while let Some(request) = served.request() {
                let status = if request.head.contains("/same") { "304 Not Modified" } else { "200 OK" };
                served.send(format!("HTTP/1.1 {status}\r\nContent-Length: 1234\r\n\r\n"));
            }
        });
        let engine = TestEngine::start(driver, upstream.address);
        let mut client = engine.connect();
        for _ in 0..2 {
            client.send("HEAD /p HTTP/1.1\r\nHost: t\r\n\r\n");
            assert_eq!(client.head().header("content-length"), Some("1234"));
            client.send("GET /same HTTP/1.1\r\nHost: t\r\n\r\n");
            assert_eq!(client.head().status, 304);
        }
        assert_eq!(upstream.connection_count(), 1);
    }
}

#[test]
fn an_answer_until_close_gets_chunks_of_ours() {
    for driver in DRIVERS {
        let upstream = Upstream::start(|mut served| {
            served.request();
            served.send("HTTP/1.0 200 OK\r\n\r\nfirst ");
            std::thread::sleep(Duration::from_millis(20));
            served.send("second");
        });
        let engine = TestEngine::start(driver, upstream.address);
        let mut client = engine.connect();
        for _ in 0..2 {
            assert_eq!(client.get("/p").text(), "first second");
        }
        assert_eq!(engine.stats().upstream_idle, 0);
    }
}

#[test]
fn events_pass_one_by_one_as_they_come() {
    for driver in DRIVERS {
        let upstream = Upstream::start(|mut served| {
            served.request();
            served.send(STREAM);
            let mut go = [0_u8; 1];
            for number in 0..20 {
                let event = format!("data: {number}\n\n");
                served.send(format!("{:x}\r\n{event}\r\n", event.len()));
                // The next event is only sent when the client has this one: nothing may hold it back.
                if std::io::Read::read(&mut served.stream, &mut go).is_err() {
                    return;
                }
            }
        });
        let engine = TestEngine::start(driver, upstream.address);
        // A direct connection to tell the script to go on is not possible through a proxy: read with a deadline instead.
        let mut client = engine.connect();
        client.send("GET /p HTTP/1.1\r\nHost: t\r\n\r\n");
        assert_eq!(client.head().status, 200);
        assert_eq!(client.read_until(b"data: 0\n\n\r\n"), b"9\r\ndata: 0\n\n\r\n");
    }
}

/// Payload of an answer in chunks, and whether it has its final one.
fn dechunked(raw: &[u8]) -> (String, bool) {
    let (mut payload, mut rest) = (String::new(), std::str::from_utf8(raw).expect("text"));
    while let Some((size, after)) = rest.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).expect("a size");
        if size == 0 {
            assert_eq!(after, "\r\n", "nothing behind the final chunk");
            return (payload, true);
        }
        payload.push_str(&after[..size]);
        rest = after[size..].strip_prefix("\r\n").expect("a chunk's end");
    }
    (payload, false)
}

#[test]
fn a_rewritten_answer_is_the_same_whatever_its_framing_and_cuts() {
    let whole = [
        format!("{STREAM}6\r\nab\ncd\n\r\n2\r\ne\n\r\n0\r\n\r\n"),
        "HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\nab\ncd\ne\n".to_owned(),
        "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nab\ncd\ne\n".to_owned(),
    ];
    for driver in DRIVERS {
        for whole in &whole {
            let served_whole = whole.clone();
            let cut = AtomicUsize::new(1);
            let upstream = Upstream::start(move |mut served| {
                while served.request().is_some() {
                    let at = cut.fetch_add(1, Ordering::SeqCst);
                    served.send(&served_whole[..at]);
                    std::thread::sleep(Duration::from_micros(300));
                    served.send(&served_whole[at..]);
                    if served_whole.contains("close") {
                        return;
                    }
                }
            });
            let engine = TestEngine::start(driver, upstream.address);
            let mut client = engine.connect();
            for cut in 1..whole.len() {
                let answer = client.get("/shout");
                assert_eq!(dechunked(&answer.raw), ("AB\nCD\nE\n!".to_owned(), true), "cut at {cut} of {whole:?}");
                assert_eq!(answer.header("content-length"), None);
                assert_eq!(answer.header("x-relayed"), Some("yes"));
            }
        }
    }
}

#[test]
fn a_rewritten_answer_that_is_cut_has_its_last_words_and_no_end() {
    let unfinished = "body: the answer ended before it was finished";
    let closed = "body: the connection was closed inside the answer";
    for driver in DRIVERS {
        for (sent, expected, outcome) in [
            ("6\r\nab\ncd\n\r\n", "AB\nCD\n!", closed),
            ("6\r\nab\n", "AB\n!", closed),
            ("4\r\nab\nc\r\n0\r\n\r\n", "AB\nc!", unfinished),
        ] {
            let upstream = Upstream::start(move |mut served| {
                served.request();
                served.send(format!("{STREAM}{sent}"));
            });
            let engine = TestEngine::start(driver, upstream.address);
            let mut client = engine.connect();
            client.send("GET /shout HTTP/1.1\r\nHost: t\r\n\r\n");
            assert_eq!(client.head().status, 200);
            assert_eq!(dechunked(&client.rest()), (expected.to_owned(), false), "{sent:?}");
            eventually("the outcome is known", || !engine.seen.outcomes.lock().expect("not poisoned").is_empty());
            let outcomes = engine.seen.outcomes.lock().expect("not poisoned").clone();
            assert!(outcomes.len() == 1 && outcomes[0].starts_with(outcome), "{outcomes:?}");
        }
    }
}

#[test]
fn a_rewritten_answer_for_an_old_client_ends_with_its_connection() {
    for driver in DRIVERS {
        let upstream = Upstream::start(|mut served| {
            served.request();
            served.send(format!("{STREAM}3\r\nab\n\r\n0\r\n\r\n"));
        });
        let engine = TestEngine::start(driver, upstream.address);
        let mut client = engine.connect();
        client.send("GET /shout HTTP/1.0\r\nConnection: keep-alive\r\n\r\n");
        let answer = client.head();
        assert_eq!((answer.status, answer.header("transfer-encoding")), (200, None));
        assert_eq!(String::from_utf8_lossy(&client.rest()), "AB\n!");
    }
}

/// The upstream sends `sent` and closes or resets; the client must see exactly `expected` after the head.
fn cut_answer(sent: &'static str, reset: bool, expected: &str, outcome: &str) {
    for driver in DRIVERS {
        let upstream = Upstream::start(move |mut served| {
            served.request();
            served.send(sent);
            if reset {
                // The bytes must arrive before the reset does.
                std::thread::sleep(Duration::from_millis(50));
                served.reset();
            }
        });
        let engine = TestEngine::start(driver, upstream.address);
        let mut client = engine.connect();
        client.send("GET /p HTTP/1.1\r\nHost: t\r\n\r\n");
        assert_eq!(client.head().status, 200);
        assert_eq!(String::from_utf8_lossy(&client.rest()), expected, "after {sent:?}");
        eventually("the outcome is known", || !engine.seen.outcomes.lock().expect("not poisoned").is_empty());
        let outcomes = engine.seen.outcomes.lock().expect("not poisoned").clone();
        assert!(outcomes.len() == 1 && outcomes[0].starts_with(outcome), "{outcomes:?}");
        assert_eq!(engine.stats().upstream_idle, 0);
    }
}

#[test]
fn a_cut_between_chunks_is_noticed_to_the_client_and_stays_visible() {
    let sent = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n";
    let expected = "3\r\nabc\r\nb\r\ndata: cut\n\n\r\n";
    cut_answer(sent, false, expected, "body: the connection was closed inside the answer");
    cut_answer(sent, true, expected, "body: the connection broke inside the answer");
}

#[test]
fn a_cut_inside_a_chunk_gets_no_notice() {
    let head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nab";
    cut_answer(head, false, "3\r\nab", "body: the connection was closed inside the answer");
    cut_answer(head, true, "3\r\nab", "body: the connection broke inside the answer");
}

#[test]
fn a_cut_sized_answer_is_cut_for_the_client() {
    let sent = "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc";
    cut_answer(sent, false, "abc", "body: the connection was closed inside the answer");
    cut_answer(sent, true, "abc", "body: the connection broke inside the answer");
}

#[test]
fn a_broken_answer_until_close_gets_no_final_chunk() {
    let expected = "3\r\nabc\r\nb\r\ndata: cut\n\n\r\n";
    cut_answer("HTTP/1.1 200 OK\r\n\r\nabc", true, expected, "body: the connection broke inside the answer");
}

/// An HTTP/1.0 client knows an answer's end by its connection's, unless there is a length: nginx with its defaults is one.
/// FIN would tell it that a cut answer is whole.
#[test]
fn a_cut_answer_is_told_or_reset_for_an_old_client() {
    let (chunked, until_close) = ("Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\n", "\r\nabc");
    // `/quiet`: without a notice.
    for (path, framing, expected) in [
        ("/p", chunked, Ok("abcdata: cut\n\n")),
        ("/quiet", chunked, Err("abc")),
        ("/p", until_close, Ok("abcdata: cut\n\n")),
        ("/quiet", until_close, Err("abc")),
    ] {
        for driver in DRIVERS {
            let upstream = Upstream::start(move |mut served| {
                served.request();
                served.send(format!("HTTP/1.1 200 OK\r\n{framing}"));
                // The bytes must arrive before the reset does.
                std::thread::sleep(Duration::from_millis(50));
                served.reset();
            });
            let engine = TestEngine::start(driver, upstream.address);
            let mut client = engine.connect();
            client.send(format!("GET {path} HTTP/1.0\r\n\r\n"));
            assert_eq!(client.head().status, 200);
            let (rest, end) = client.rest_and_end();
            let seen = String::from_utf8_lossy(&rest);
            let is_reset = end.is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionReset);
            assert_eq!(if is_reset { Err(&*seen) } else { Ok(&*seen) }, expected, "{path} {framing:?}");
        }
    }
}

/// The same where the worker just stops: only what was neither whole nor told ends with a reset.
#[test]
fn an_old_client_sees_whole_answers_end() {
    for driver in DRIVERS {
        for (target, sent, expected) in [
            ("/p", "3\r\nabc\r\n0\r\n\r\n", Ok("abc")),
            ("/quiet", "3\r\nabc\r\n0\r\n\r\n", Ok("abc")),
            ("/quiet", "3\r\nabc\r\n", Err("abc")),
            ("/shout", "4\r\nabc\n\r\n0\r\n\r\n", Ok("ABC\n!")),
            ("/shout", "4\r\nabc\n\r\n", Ok("ABC\n!")),
        ] {
            let upstream = Upstream::start(move |mut served| {
                served.request();
                served.send(format!("{STREAM}{sent}"));
            });
            let engine = TestEngine::start(driver, upstream.address);
            let mut client = engine.connect();
            client.send(format!("GET {target} HTTP/1.0\r\n\r\n"));
            assert_eq!(client.head().status, 200);
            client.read_until(expected.unwrap_or_else(|cut| cut).as_bytes());
            let mut rest = Vec::new();
            let end = std::io::Read::read_to_end(&mut client.stream, &mut rest).map_err(|error| error.kind());
            match expected {
                Ok(_) => assert_eq!((end, rest.len()), (Ok(0), 0), "{target} {sent:?}"),
                Err(_) => assert_eq!(end, Err(std::io::ErrorKind::ConnectionReset), "{target} {sent:?}"),
            }
        }
    }
}

/// What is kept from the client of an answer that ends too early is its final chunk, however that is written.
#[test]
fn an_unfinished_answer_keeps_its_head_and_its_payload() {
    for driver in DRIVERS {
        for (pieces, expected) in [
            (&["3\r\nabc\r\n0\r\n\r\n"][..], "3\r\nabc\r\nb\r\ndata: cut\n\n\r\n"),
            (&["3\r\nabc\r\n0;x=y\r\n\r\n"], "3\r\nabc\r\nb\r\ndata: cut\n\n\r\n"),
            (&["3\r\nabc\r\n", "0;x=y\r\n\r\n"], "3\r\nabc\r\n"),
            (&["3\r\nabc\r\n0", ";x=y\r\n\r\n"], "3\r\nabc\r\n0"),
            (&["3\r\nabc\r\n0\r\n", "\r\n"], "3\r\nabc\r\n0\r\n"),
        ] {
            let upstream = Upstream::start(move |mut served| {
                served.request();
                served.send(format!("{STREAM}{}", pieces[0]));
                for piece in &pieces[1..] {
                    std::thread::sleep(Duration::from_millis(30));
                    served.send(piece);
                }
                served.until_closed();
            });
            let engine = TestEngine::start(driver, upstream.address);
            let mut client = engine.connect();
            client.send("GET /unfinished HTTP/1.1\r\nHost: t\r\n\r\n");
            assert_eq!(client.head().status, 200);
            assert_eq!(String::from_utf8_lossy(&client.rest()), expected, "{pieces:?}");
        }
    }
}

#[test]
fn a_chunk_that_breaks_the_rules_later_on_ends_both_connections() {
    let sent = "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n";
    cut_answer(sent, false, "", "body: the connection was closed inside the answer");
}

/// Sends without end until the socket takes no more; returns what the router read, in bytes.
fn flood(
    driver: infera_shards::DriverChoice,
    stall: Duration,
) -> (TestEngine, Upstream, Arc<AtomicUsize>, crate::harness::Client) {
    let sent = Arc::new(AtomicUsize::new(0));
    let counter = sent.clone();
    let upstream = Upstream::start(move |mut served| {
        served.request();
        served.send(STREAM);
        let chunk = format!("4000\r\n{}\r\n", "x".repeat(0x4000));
        while served.stream.write_all(chunk.as_bytes()).is_ok() {
            counter.fetch_add(chunk.len(), Ordering::SeqCst);
        }
        served.until_closed();
    });
    let engine = TestEngine::configured(driver, upstream.address, |config| {
        config.limits.write_stall_timeout = stall;
    });
    let mut client = engine.connect();
    client.send("GET /p HTTP/1.1\r\nHost: t\r\n\r\n");
    assert_eq!(client.head().status, 200);
    (engine, upstream, sent, client)
}

#[test]
fn a_client_that_does_not_read_stops_the_reading_from_its_upstream() {
    for driver in DRIVERS {
        let (engine, _upstream, sent, mut client) = flood(driver, Duration::from_secs(60));
        // Until nothing moves any more: the sockets are full, and the router holds one piece.
        let mut last = usize::MAX;
        let mut still_since = Instant::now();
        eventually("the flood stands still", || {
            let now = sent.load(Ordering::SeqCst);
            if now != last {
                (last, still_since) = (now, Instant::now());
            }
            still_since.elapsed() > Duration::from_millis(300)
        });
        let taken = engine.stats().bytes_to_client as usize;
        let observed = engine.seen.relayed.lock().expect("not poisoned").len();
        // Read from the upstream = handed to the client's socket + at most one buffer.
        assert!(observed <= taken + (64 << 10), "read {observed}, passed on {taken}");
        // It goes on when the client does, with nothing lost in between.
        let more = client.read_until(format!("4000\r\n{}\r\n", "x".repeat(0x4000)).as_bytes());
        assert!(more.len() >= 0x4000);
        drop(client);
    }
}

#[test]
fn a_client_that_never_reads_is_given_up() {
    for driver in DRIVERS {
        let (engine, upstream, _, client) = flood(driver, Duration::from_millis(300));
        eventually("the stalled client is closed", || engine.stats().connections_open == 0);
        eventually("its upstream too", || upstream.closed.load(Ordering::SeqCst) == 1);
        assert_eq!(engine.seen.outcomes.lock().expect("not poisoned").as_slice(), ["client gone"]);
        assert_eq!(engine.stats().client_aborts, 1);
        drop(client);
    }
}
