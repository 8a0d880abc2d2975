//! A TLS listener against real TLS clients: handshakes good and bad, cuts anywhere, leaving, back-pressure, drain.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use infera_shards::{DriverChoice, EngineConfig, ServerTls};
use rustls::{ClientConfig, ClientConnection, HandshakeKind, ProtocolVersion, StreamOwned};

use crate::certificates::{self, Authority};
use crate::harness::{Client, DRIVERS, TestEngine, Upstream, cpu_time, eventually, nowhere};

type Secure<S = TcpStream> = Client<StreamOwned<ClientConnection, S>>;

fn listener(authority: &Authority) -> ServerTls {
    let shown = authority.issue(&["localhost", "127.0.0.1"]);
    ServerTls::new(shown.chain(), shown.key(), None).expect("a listener")
}

fn engine(driver: DriverChoice, upstream: std::net::SocketAddr, authority: &Authority) -> TestEngine {
    configured(driver, upstream, authority, |_| {})
}

fn configured(
    driver: DriverChoice,
    upstream: std::net::SocketAddr,
    authority: &Authority,
    change: impl FnOnce(&mut EngineConfig),
) -> TestEngine {
    TestEngine::configured(driver, upstream, |config| {
        config.tls = Some(listener(authority));
        change(config);
    })
}

fn secure(engine: &TestEngine, config: &Arc<ClientConfig>) -> Secure {
    engine.connect().wrapped(|stream| certificates::over(stream, config.clone(), "localhost"))
}

/// Passes one byte at a time in both directions.
struct Dribble(TcpStream);

impl Read for Dribble {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let most = buffer.len().min(1);
        self.0.read(&mut buffer[..most])
    }
}

impl Write for Dribble {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.write(&bytes[..bytes.len().min(1)])
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.0.flush()
    }
}

#[test]
fn requests_of_all_sizes_pass_in_both_versions() {
    let authority = Authority::new();
    for driver in DRIVERS {
        for version in [&rustls::version::TLS12, &rustls::version::TLS13] {
            let provider = Arc::new(rustls::crypto::ring::default_provider());
            let builder = ClientConfig::builder_with_provider(provider).with_protocol_versions(&[version]);
            let builder = builder.expect("a version").with_root_certificates(authority.roots());
            let mut config = builder.with_no_client_auth();
            config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
            let upstream = Upstream::echo();
            let engine = engine(driver, upstream.address, &authority);
            let mut client = secure(&engine, &Arc::new(config));
            assert_eq!(client.get("/hello").text(), "hello");
            for length in [0, 1, 700, 768, 769, 16_384, 16_385, 400_000, 3_000_000] {
                let body: Vec<u8> = (0..length).map(|at| (at * 7 % 251) as u8).collect();
                assert!(client.post("/p", &body).body == body, "{length} bytes, {version:?} on {driver:?}");
            }
            assert_eq!(client.get("/large").body.len(), 2 << 20);
            // Two requests in one record.
            client.send("GET /hello HTTP/1.1\r\nHost: t\r\n\r\nGET /hello HTTP/1.1\r\nHost: t\r\n\r\n");
            assert_eq!((client.answer().text(), client.answer().text()), ("hello", "hello"));
            assert_eq!(client.stream.conn.protocol_version(), Some(version.version));
            assert_eq!(client.stream.conn.alpn_protocol(), Some(&b"http/1.1"[..]));
            assert_eq!(engine.stats().tls_failures, 0);
        }
    }
}

#[test]
fn a_client_that_comes_back_needs_no_signature_on_whichever_shard() {
    let authority = Authority::new();
    for driver in DRIVERS {
        let engine = configured(driver, nowhere(), &authority, |config| config.shards = 3);
        let config = Arc::new(certificates::client(&authority, None));
        let mut shards = std::collections::BTreeSet::new();
        for number in 0..40 {
            let mut client = secure(&engine, &config);
            shards.insert(client.get("/shard").text().to_owned());
            let kind = client.stream.conn.handshake_kind();
            let expected = if number == 0 { HandshakeKind::Full } else { HandshakeKind::Resumed };
            assert_eq!(kind, Some(expected), "connection {number}");
            assert_eq!(client.stream.conn.protocol_version(), Some(ProtocolVersion::TLSv1_3));
        }
        assert!(shards.len() > 1, "{shards:?}");
    }
}

#[test]
fn messages_read_the_same_byte_by_byte() {
    let authority = Authority::new();
    for driver in DRIVERS {
        let upstream = Upstream::echo();
        let engine = engine(driver, upstream.address, &authority);
        let config = certificates::client(&authority, None);
        let mut client = engine.connect().wrapped(|stream| certificates::over(Dribble(stream), config, "localhost"));
        let body = vec![b'b'; 5000];
        for _ in 0..2 {
            assert!(client.post("/p", &body).body == body);
        }
        // The peer may change its keys at any time.
        client.stream.conn.refresh_traffic_keys().expect("TLS 1.3");
        assert!(client.post("/p", &body).body == body);
    }
}

#[test]
fn events_pass_one_by_one_as_they_come() {
    let authority = Authority::new();
    for driver in DRIVERS {
        let (next, waits) = std::sync::mpsc::channel::<()>();
        let waits = std::sync::Mutex::new(waits);
        let upstream = Upstream::start(move |mut served| {
            let waits = waits.lock().expect("not poisoned");
            served.request();
            served.send("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n");
            while waits.recv().is_ok() {
                served.send("9\r\ndata: a\n\n\r\n");
            }
            served.send("0\r\n\r\n");
        });
        let engine = engine(driver, upstream.address, &authority);
        let mut client = secure(&engine, &Arc::new(certificates::client(&authority, None)));
        client.send("GET /p HTTP/1.1\r\nHost: t\r\n\r\n");
        assert_eq!(client.head().status, 200);
        for _ in 0..20 {
            // The next one is only sent once this one has arrived.
            next.send(()).expect("the upstream waits");
            assert_eq!(client.read_until(b"\n\n\r\n"), b"9\r\ndata: a\n\n\r\n");
        }
        drop(next);
        assert_eq!(client.read_until(b"0\r\n\r\n"), b"0\r\n\r\n");
        assert_eq!(client.get("/hello").text(), "hello");
    }
}

#[test]
fn plain_http_gets_a_plain_refusal() {
    let authority = Authority::new();
    for driver in DRIVERS {
        let engine = engine(driver, nowhere(), &authority);
        let mut client = engine.connect();
        client.send("POST /p HTTP/1.1\r\nHost: t\r\nContent-Length: 5\r\n\r\nhello");
        let answer = client.answer();
        assert_eq!((answer.status, answer.header("connection")), (400, Some("close")));
        assert!(answer.text().contains("https://"), "{}", answer.text());
        assert!(client.rest().is_empty());
        let stats = engine.stats();
        assert_eq!((stats.tls_failures, stats.rejections, stats.requests), (1, 1, 0));
    }
}

#[test]
fn what_is_no_handshake_is_closed() {
    let authority = Authority::new();
    let hello_of_version_1_0 = b"\x16\x03\x01\x00\x2f\x01\x00\x00\x2b\x03\x01";
    for driver in DRIVERS {
        let engine = engine(driver, nowhere(), &authority);
        let mut failures = 0;
        for garbage in [
            &b"\x00\x00\x00\x00\x00\x00\x00\x00"[..],
            b"\x16\x03\x01\xff\xff garbage that claims to be a record longer than one may be",
            b"\x16\x03\x01\x00\x05hello",
            b"\x17\x03\x03\x00\x05hello",
            b"\x15\x03\x03\x00\x02\x02\x28",
            b"lower case\r\n\r\n",
        ] {
            let mut client = engine.connect();
            client.send_lossy(garbage);
            let answer = client.rest();
            assert!(answer.is_empty() || answer[0] == 21, "an alert or nothing, not {answer:?}");
            failures += 1;
        }
        // Cut inside the handshake, and before it.
        for sent in [&hello_of_version_1_0[..], b""] {
            let mut client = engine.connect();
            client.send(sent);
            client.stream.shutdown(Shutdown::Write).expect("half-closes");
            client.rest();
            failures += 1;
        }
        eventually("all are counted", || engine.stats().tls_failures == failures);
        assert_eq!((engine.stats().requests, engine.stats().connections_open), (0, 0));
    }
}

#[test]
fn a_slow_handshake_is_given_up_and_costs_nothing_meanwhile() {
    let authority = Authority::new();
    for driver in DRIVERS {
        let limit = Duration::from_millis(400);
        let engine = configured(driver, nowhere(), &authority, |config| config.limits.head_timeout = limit);
        let began = Instant::now();
        let mut silent = engine.connect();
        let mut slow = engine.connect();
        slow.send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03");
        let before = cpu_time();
        silent.rest();
        slow.rest();
        assert!(began.elapsed() >= limit);
        assert_eq!(engine.stats().tls_failures, 2);
        if std::env::var("RUST_TEST_THREADS").is_ok_and(|threads| threads == "1") {
            assert!(cpu_time() - before <= Duration::from_millis(60));
        }
        // A peer that shook hands has as long again for its head.
        let mut client = secure(&engine, &Arc::new(certificates::client(&authority, None)));
        client.send("GET /hello HTTP/1.1\r\n");
        assert_eq!(client.answer().status, 408);
    }
}

#[test]
fn clients_must_show_a_certificate_where_one_is_wanted() {
    let authority = Authority::new();
    let (own, strangers) = (Authority::new(), Authority::new());
    for driver in DRIVERS {
        let shown = authority.issue(&["localhost"]);
        let wanting = ServerTls::new(shown.chain(), shown.key(), Some(own.roots())).expect("a listener");
        let engine = TestEngine::configured(driver, nowhere(), |config| config.tls = Some(wanting));
        let good = own.issue(&["client"]);
        let mut client = secure(&engine, &Arc::new(certificates::client(&authority, Some(&good))));
        assert_eq!(client.get("/hello").text(), "hello");
        let (foreign, expired) = (strangers.issue(&["client"]), own.issue_expired(&["client"]));
        for shown in [None, Some(&foreign), Some(&expired)] {
            let mut client = secure(&engine, &Arc::new(certificates::client(&authority, shown)));
            // The client's side of the handshake ends before its certificate is judged.
            client.send_lossy(b"GET /hello HTTP/1.1\r\nHost: t\r\n\r\n");
            let outcome = client.stream.read(&mut [0; 16]);
            assert!(matches!(&outcome, Err(error) if error.kind() == ErrorKind::InvalidData), "{outcome:?}");
        }
        // A client hears of its refusal a moment before that is counted.
        eventually("the three are counted", || engine.stats().tls_failures == 3);
        assert_eq!(engine.stats().requests, 1);
    }
}

#[test]
fn a_client_that_speaks_only_http2_is_refused() {
    let authority = Authority::new();
    let engine = engine(DriverChoice::Auto, nowhere(), &authority);
    let mut config = certificates::client(&authority, None);
    config.alpn_protocols = vec![b"h2".to_vec()];
    let mut client = secure(&engine, &Arc::new(config));
    let refused = client.stream.write(b"PRI").expect_err("an alert").to_string();
    assert!(refused.contains("NoApplicationProtocol"), "{refused}");
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    CloseNotify,
    CloseNotifyAndFin,
    Fin,
    Reset,
}

#[test]
fn clients_that_leave_are_noticed_however_they_do() {
    let authority = Authority::new();
    for driver in DRIVERS {
        for way in [Way::CloseNotify, Way::CloseNotifyAndFin, Way::Fin, Way::Reset] {
            let upstream = Upstream::start(|mut served| {
                served.request();
                served.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n");
                served.until_closed();
            });
            let engine = engine(driver, upstream.address, &authority);
            let mut client = secure(&engine, &Arc::new(certificates::client(&authority, None)));
            client.send("GET /p HTTP/1.1\r\nHost: t\r\n\r\n");
            client.read_until(b"a\r\n");
            let left_at = Instant::now();
            if matches!(way, Way::CloseNotify | Way::CloseNotifyAndFin) {
                client.stream.conn.send_close_notify();
                let (connection, socket) = (&mut client.stream.conn, &mut client.stream.sock);
                connection.write_tls(socket).expect("sends");
            }
            if way == Way::Reset {
                let linger = rustix::net::sockopt::set_socket_linger(&client.stream.sock, Some(Duration::ZERO));
                linger.expect("linger");
            }
            let _kept = (way == Way::CloseNotify).then_some(client);
            eventually("the upstream sees the close", || upstream.closed.load(Ordering::SeqCst) == 1);
            assert!(left_at.elapsed() < Duration::from_secs(1), "{way:?} on {driver:?}");
            eventually("the exchange is over", || engine.stats().connections_open == 0);
            assert_eq!(engine.stats().client_aborts, 1, "{way:?}");
        }
    }
}

#[test]
fn a_client_that_does_not_read_stops_the_reading_from_its_upstream() {
    let authority = Authority::new();
    for driver in DRIVERS {
        let upstream = Upstream::start(|mut served| {
            served.request();
            served.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n");
            let chunk = format!("4000\r\n{}\r\n", "x".repeat(0x4000));
            for _ in 0..2000 {
                served.send(&chunk);
            }
            served.send("0\r\n\r\n");
            served.until_closed();
        });
        let engine = engine(driver, upstream.address, &authority);
        let mut client = secure(&engine, &Arc::new(certificates::client(&authority, None)));
        client.send("GET /p HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n");
        assert_eq!(client.head().status, 200);
        let read = || engine.seen.relayed.lock().expect("not poisoned").len();
        let (mut last, mut still_since) = (usize::MAX, Instant::now());
        eventually("the flood stands still", || {
            if read() != last {
                (last, still_since) = (read(), Instant::now());
            }
            still_since.elapsed() > Duration::from_millis(300)
        });
        let taken = engine.stats().bytes_to_client as usize;
        assert!(last <= taken + (64 << 10) && last < 0x4000 * 2000, "read {last}, passed on {taken}");
        // A neighbour notices nothing.
        let mut other = secure(&engine, &Arc::new(certificates::client(&authority, None)));
        assert_eq!(other.get("/hello").text(), "hello");
        // It goes on when the client does, and nothing is lost.
        let whole = client.rest();
        assert!(whole.ends_with(b"\r\n0\r\n\r\n"));
        assert_eq!(whole.iter().filter(|byte| **byte == b'x').count(), 0x4000 * 2000);
    }
}

#[test]
fn a_client_that_never_reads_is_given_up() {
    let authority = Authority::new();
    for driver in DRIVERS {
        let upstream = Upstream::start(|mut served| {
            served.request();
            served.send("HTTP/1.1 200 OK\r\n\r\n");
            while served.stream.write_all(&[b'x'; 0x4000]).is_ok() {}
            served.until_closed();
        });
        let stall = Duration::from_millis(300);
        let engine =
            configured(driver, upstream.address, &authority, |config| config.limits.write_stall_timeout = stall);
        let mut client = secure(&engine, &Arc::new(certificates::client(&authority, None)));
        client.send("GET /p HTTP/1.1\r\nHost: t\r\n\r\n");
        eventually("the stalled client is closed", || {
            engine.stats().connections_open == 0 && engine.stats().requests == 1
        });
        eventually("its upstream too", || upstream.closed.load(Ordering::SeqCst) == 1);
        // What it finds when it reads at last is a cut, not an end.
        let outcome = client.stream.read_to_end(&mut Vec::new());
        assert!(outcome.is_err(), "{outcome:?}");
    }
}

#[test]
fn a_whole_answer_ends_with_close_notify_and_a_cut_one_does_not() {
    let authority = Authority::new();
    for driver in DRIVERS {
        for (sent, is_whole) in [
            ("HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nbody", true),
            ("HTTP/1.1 200 OK\r\n\r\nbody", true),
            ("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nbody", false),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n", false),
        ] {
            let upstream = Upstream::start(move |mut served| {
                served.request();
                served.send(sent);
            });
            let engine = engine(driver, upstream.address, &authority);
            let mut client = secure(&engine, &Arc::new(certificates::client(&authority, None)));
            // Nothing but the connection's end tells such a client where the answer ends.
            client.send("GET /p HTTP/1.0\r\n\r\n");
            let mut answer = Vec::new();
            let outcome = client.stream.read_to_end(&mut answer).map_err(|error| error.kind());
            let expected = if is_whole { Ok(answer.len()) } else { Err(ErrorKind::UnexpectedEof) };
            assert_eq!(outcome, expected, "{sent:?} on {driver:?}");
            assert!(answer.windows(4).any(|window| window == b"body"));
        }
    }
}

#[test]
fn drain_ends_idle_connections_politely_and_running_ones_after_their_answer() {
    let authority = Authority::new();
    for driver in DRIVERS {
        let engine = engine(driver, nowhere(), &authority);
        let config = Arc::new(certificates::client(&authority, None));
        let (mut idle, mut running) = (secure(&engine, &config), secure(&engine, &config));
        assert_eq!(idle.get("/hello").text(), "hello");
        running.send("GET /sleep HTTP/1.1\r\nHost: t\r\n\r\n");
        eventually("it runs", || engine.stats().requests_active == 1);
        engine.engine().drain();
        assert_eq!(idle.stream.read(&mut [0; 1]).expect("close_notify"), 0);
        let answer = running.answer();
        assert_eq!((answer.text(), answer.header("connection")), ("slept", Some("close")));
        assert_eq!(running.stream.read(&mut [0; 1]).expect("close_notify"), 0);
        eventually("all are closed", || engine.stats().connections_open == 0);
    }
}

#[test]
fn connections_beyond_the_cap_are_closed_before_a_handshake() {
    let authority = Authority::new();
    let engine = configured(DriverChoice::Auto, nowhere(), &authority, |config| config.limits.connections_max = 1);
    let config = Arc::new(certificates::client(&authority, None));
    // One that has not shaken hands yet counts as well.
    let half_open = engine.connect();
    eventually("it is counted", || engine.stats().connections_open == 1);
    let mut refused = secure(&engine, &config);
    assert!(refused.stream.write(b"GET").is_err());
    assert_eq!(engine.stats().rejections, 1);
    drop(half_open);
    eventually("there is room again", || engine.stats().connections_open == 0);
    assert_eq!(secure(&engine, &config).get("/hello").text(), "hello");
}

#[test]
fn new_certificates_are_shown_to_new_connections() {
    let (old, new) = (Authority::new(), Authority::new());
    let shown = listener(&old);
    let engine = TestEngine::configured(DriverChoice::Auto, nowhere(), |config| config.tls = Some(shown.clone()));
    let believes_old = Arc::new(certificates::client(&old, None));
    let mut before = secure(&engine, &believes_old);
    assert_eq!(before.get("/hello").text(), "hello");
    shown.replace(&listener(&new));
    assert_eq!(before.get("/hello").text(), "hello");
    assert_eq!(secure(&engine, &Arc::new(certificates::client(&new, None))).get("/hello").text(), "hello");
    // Not even with a session of before.
    let refused = secure(&engine, &believes_old).stream.write(b"GET").expect_err("another authority").to_string();
    assert!(refused.contains("UnknownIssuer"), "{refused}");
}
