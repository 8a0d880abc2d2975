//! TLS towards real TLS upstreams: whose certificates are believed, pooling, cuts, and what a connection says at its end.

use std::io::Read;
use std::net::TcpStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use infera_shards::{ClientTls, DriverChoice};
use rustls::{HandshakeKind, ServerConfig, ServerConnection, StreamOwned};

use crate::certificates::{self, Authority};
use crate::harness::{Answer, DRIVERS, Served, TestEngine, Upstream, eventually};

type Secure = Served<StreamOwned<ServerConnection, TcpStream>>;

/// An upstream that speaks TLS.
fn upstream(config: Arc<ServerConfig>, script: impl Fn(Secure) + Send + Sync + 'static) -> Upstream {
    Upstream::start(move |served| script(served.wrapped(|stream| certificates::behind(stream, &config))))
}

fn echo(mut served: Secure) {
    while let Some(request) = served.request() {
        served.send_ok(&request.body);
    }
}

fn engine(driver: DriverChoice, upstream: &Upstream, tls: &ClientTls) -> TestEngine {
    TestEngine::configured(driver, upstream.address, |config| {
        config.upstream.tls = tls.clone();
        config.upstream.connect_timeout = Duration::from_secs(2);
    })
}

fn trusting(authority: &Authority) -> ClientTls {
    ClientTls::new(Arc::new(authority.roots()))
}

fn post(engine: &TestEngine, name: &str, body: &[u8]) -> Answer {
    let mut client = engine.connect();
    client.send(format!("POST /p HTTP/1.1\r\nHost: t\r\nX-Tls-Name: {name}\r\nContent-Length: {}\r\n\r\n", body.len()));
    client.send(body);
    client.answer()
}

#[test]
fn bodies_of_all_sizes_pass_over_one_connection() {
    let authority = Authority::new();
    for driver in DRIVERS {
        let upstream = upstream(authority.issue(&["worker.test"]).server(), echo);
        let engine = engine(driver, &upstream, &trusting(&authority));
        for length in [0, 1, 700, 769, 16_384, 16_385, 400_000, 3_000_000] {
            let body: Vec<u8> = (0..length).map(|at| (at * 7 % 251) as u8).collect();
            let answer = post(&engine, "worker.test", &body);
            assert!((answer.status, &answer.body) == (200, &body), "{length} bytes on {driver:?}");
        }
        // Session tickets, which arrive after the handshake, do not count as unexpected bytes.
        assert_eq!(upstream.connection_count(), 1);
    }
}

#[test]
fn only_a_certificate_for_that_host_by_a_known_authority_is_believed() {
    let (known, unknown) = (Authority::new(), Authority::new());
    for driver in DRIVERS {
        for (shown, name, expected) in [
            (known.issue(&["worker.test"]), "worker.test", Ok(())),
            (known.issue(&["WORKER.test"]), "worker.TEST", Ok(())),
            (known.issue(&["127.0.0.1"]), "127.0.0.1", Ok(())),
            (known.issue(&["::1"]), "::1", Ok(())),
            (known.issue(&["other.test"]), "worker.test", Err("certificate not valid for name")),
            (known.issue(&["localhost"]), "127.0.0.1", Err("certificate not valid for name")),
            (known.issue(&["127.0.0.2"]), "127.0.0.1", Err("certificate not valid for name")),
            (unknown.issue(&["worker.test"]), "worker.test", Err("UnknownIssuer")),
            (known.issue_expired(&["worker.test"]), "worker.test", Err("certificate expired")),
        ] {
            let served = Arc::new(AtomicUsize::new(0));
            let count = served.clone();
            let upstream = upstream(shown.server(), move |mut one| {
                while let Some(request) = one.request() {
                    count.fetch_add(1, Ordering::SeqCst);
                    one.send_ok(&request.body);
                }
            });
            let engine = engine(driver, &upstream, &trusting(&known));
            let answer = post(&engine, name, b"secret");
            match expected {
                Ok(()) => assert_eq!((answer.status, answer.text()), (200, "secret"), "{name}"),
                Err(reason) => {
                    assert_eq!(answer.status, 502, "{name}");
                    assert!(answer.text().starts_with("connect: "), "{}", answer.text());
                    assert!(answer.text().contains(reason), "{} should say {reason}", answer.text());
                    assert_eq!(served.load(Ordering::SeqCst), 0, "{name}: nothing was sent");
                }
            }
        }
    }
}

#[test]
fn by_default_nobody_is_believed_and_without_verification_everybody() {
    let unknown = Authority::new();
    let upstream = upstream(unknown.issue_expired(&["other.test"]).server(), echo);
    let refused = post(&engine(DriverChoice::Auto, &upstream, &ClientTls::default()), "worker.test", b"secret");
    assert_eq!(refused.status, 502);
    let believed =
        post(&engine(DriverChoice::Auto, &upstream, &ClientTls::without_verification()), "worker.test", b"secret");
    assert_eq!((believed.status, believed.text()), (200, "secret"));
}

#[test]
fn an_upstream_without_tls_or_without_an_answer_fails_at_connect() {
    let authority = Authority::new();
    for driver in DRIVERS {
        let plain = Upstream::start(|mut served| served.send("HTTP/1.1 400 Bad Request\r\n\r\n"));
        let answer = post(&engine(driver, &plain, &trusting(&authority)), "worker.test", b"x");
        assert!(answer.text().starts_with("connect: cannot connect"), "{}", answer.text());
        let silent = Upstream::start(|mut served| drop(served.stream.read_to_end(&mut Vec::new())));
        let answer = post(&engine(driver, &silent, &trusting(&authority)), "worker.test", b"x");
        assert!(answer.text().contains("no connection within the connect timeout"), "{}", answer.text());
    }
}

#[test]
fn connections_of_different_names_or_without_tls_are_not_mixed_up() {
    let authority = Authority::new();
    let upstream = upstream(authority.issue(&["a.test", "b.test"]).server(), |mut served| {
        while served.request().is_some() {
            let name = served.stream.conn.server_name().unwrap_or("none").to_owned();
            served.send_ok(name.as_bytes());
        }
    });
    let engine = engine(DriverChoice::Auto, &upstream, &trusting(&authority));
    for _ in 0..3 {
        for name in ["a.test", "b.test"] {
            assert_eq!(post(&engine, name, b"").text(), name);
        }
    }
    assert_eq!(upstream.connection_count(), 2);
    // Plain HTTP must not go out on one of them.
    assert_eq!(engine.connect().post("/p", b"plain").status, 502);
    assert_eq!(upstream.connection_count(), 3);
}

#[test]
fn the_next_connection_resumes_the_session() {
    let authority = Authority::new();
    for driver in DRIVERS {
        let kinds = Arc::new(Mutex::new(Vec::new()));
        let seen = kinds.clone();
        let upstream = upstream(authority.issue(&["worker.test"]).server(), move |mut served| {
            served.request();
            seen.lock().expect("not poisoned").extend(served.stream.conn.handshake_kind());
            served.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok");
        });
        let engine = engine(driver, &upstream, &trusting(&authority));
        for _ in 0..3 {
            assert_eq!(post(&engine, "worker.test", b"").text(), "ok");
        }
        let kinds = kinds.lock().expect("not poisoned").clone();
        assert_eq!(kinds, [HandshakeKind::Full, HandshakeKind::Resumed, HandshakeKind::Resumed]);
    }
}

/// Ends what was said on the connection with close_notify.
fn say_goodbye(served: &mut Secure) {
    served.stream.conn.send_close_notify();
    let (connection, socket) = (&mut served.stream.conn, &mut served.stream.sock);
    while connection.wants_write() {
        connection.write_tls(socket).expect("sends");
    }
}

#[test]
fn an_end_without_close_notify_is_a_cut() {
    let authority = Authority::new();
    for driver in DRIVERS {
        for (sent, is_polite, outcome) in [
            ("HTTP/1.1 200 OK\r\n\r\nbody", true, "complete"),
            ("HTTP/1.1 200 OK\r\n\r\nbody", false, "body: the connection broke inside the answer"),
            ("HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nbody", false, "complete"),
            ("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nbody", true, "body: the connection was closed inside"),
            ("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nbody", false, "body: the connection broke inside"),
            ("HTTP/1.1 200 OK\r\nTransf", false, "head: the connection broke before an answer"),
        ] {
            let upstream = upstream(authority.issue(&["worker.test"]).server(), move |mut served| {
                served.request();
                served.send(sent);
                if is_polite {
                    say_goodbye(&mut served);
                }
            });
            let engine = engine(driver, &upstream, &trusting(&authority));
            let mut client = engine.connect();
            client.send("GET /p HTTP/1.1\r\nHost: t\r\nX-Tls-Name: worker.test\r\nConnection: close\r\n\r\n");
            client.head();
            let is_chunked = sent.contains("OK\r\n\r\n");
            assert_eq!(client.rest().ends_with(b"0\r\n\r\n"), is_chunked && outcome == "complete", "{sent:?}");
            eventually("the outcome is known", || !engine.seen.outcomes.lock().expect("not poisoned").is_empty());
            let outcomes = engine.seen.outcomes.lock().expect("not poisoned").clone();
            assert!(outcomes[0].starts_with(outcome), "{sent:?}, polite: {is_polite}: {outcomes:?}");
        }
    }
}

#[test]
fn a_connection_that_was_closed_while_idle_is_not_used() {
    let authority = Authority::new();
    for driver in DRIVERS {
        let (ended, ends) = std::sync::mpsc::channel();
        let ended = Mutex::new(ended);
        let upstream = upstream(authority.issue(&["worker.test"]).server(), move |mut served| {
            served.request();
            served.send_ok(b"ok");
            // Polite, and TCP stays open: only the session knows that this is the end.
            say_goodbye(&mut served);
            ended.lock().expect("not poisoned").send(()).expect("the test waits");
            served.until_closed();
        });
        let engine = engine(driver, &upstream, &trusting(&authority));
        for number in 1..=3 {
            assert_eq!(post(&engine, "worker.test", b"").text(), "ok");
            ends.recv().expect("the upstream says goodbye");
            // Past the moment in which a connection that has just come back is not looked at.
            std::thread::sleep(Duration::from_millis(5));
            assert_eq!(upstream.connection_count(), number);
        }
        assert_eq!(engine.stats().upstream_reuses, 0);
    }
}

#[test]
fn a_reused_connection_that_dies_is_replayed_once() {
    let authority = Authority::new();
    for driver in DRIVERS {
        let upstream = upstream(authority.issue(&["worker.test"]).server(), |mut served| {
            // Each connection serves one request and dies, without a word, over the next.
            if served.request().is_some() {
                served.send_ok(b"ok");
                served.request();
            }
        });
        let engine = engine(driver, &upstream, &trusting(&authority));
        for _ in 0..3 {
            assert_eq!(post(&engine, "worker.test", b"again").text(), "ok");
        }
        assert_eq!(upstream.connection_count(), 3);
        assert_eq!(engine.stats().upstream_reuses, 2);
    }
}

#[test]
fn a_client_that_leaves_is_told_to_the_upstream_at_once() {
    let authority = Authority::new();
    for driver in DRIVERS {
        let (told, tells) = std::sync::mpsc::channel();
        let told = Mutex::new(told);
        let upstream = upstream(authority.issue(&["worker.test"]).server(), move |mut served| {
            served.request();
            served.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n");
            let end = served.stream.read(&mut [0; 1]);
            told.lock().expect("not poisoned").send(end.map_err(|error| error.kind())).expect("the test waits");
        });
        let engine = engine(driver, &upstream, &trusting(&authority));
        let mut client = engine.connect();
        client.send("GET /p HTTP/1.1\r\nHost: t\r\nX-Tls-Name: worker.test\r\n\r\n");
        client.read_until(b"a\r\n");
        drop(client);
        // With close_notify: it knows that nobody cut the connection.
        assert_eq!(tells.recv_timeout(Duration::from_secs(1)).expect("it is told"), Ok(0));
    }
}

#[test]
fn an_upstream_that_does_not_read_stalls_and_is_given_up() {
    let authority = Authority::new();
    for driver in DRIVERS {
        let (answered, waits) = std::sync::mpsc::channel::<()>();
        let waits = Mutex::new(waits);
        let upstream = upstream(authority.issue(&["worker.test"]).server(), move |mut served| {
            // The handshake, and then not a byte until the test is over.
            let (connection, socket) = (&mut served.stream.conn, &mut served.stream.sock);
            connection.complete_io(socket).expect("shakes hands");
            let _ = waits.lock().expect("not poisoned").recv();
        });
        let engine = TestEngine::configured(driver, upstream.address, |config| {
            config.upstream.tls = trusting(&authority);
            config.upstream.write_stall_timeout = Duration::from_millis(300);
        });
        let answer = post(&engine, "worker.test", &vec![b'x'; 20 << 20]);
        drop(answered);
        assert!(answer.text().starts_with("send: the upstream stopped reading"), "{}", answer.text());
    }
}
