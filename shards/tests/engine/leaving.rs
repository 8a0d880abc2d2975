//! Clients that leave, in every phase: the service's future is dropped and the upstream sees the close within a second.

use std::net::Shutdown;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::harness::{Client, DRIVERS, Served, TestEngine, Upstream, eventually};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    Fin,
    Reset,
    HalfClose,
}

const WAYS: [Way; 3] = [Way::Fin, Way::Reset, Way::HalfClose];

/// Leaves; what is returned must live on for the way to be true.
fn leave(client: Client, way: Way) -> Option<Client> {
    match way {
        Way::Fin => {
            drop(client);
            None
        }
        Way::Reset => {
            client.reset();
            None
        }
        Way::HalfClose => {
            client.stream.shutdown(Shutdown::Write).expect("half-closes");
            Some(client)
        }
    }
}

/// The upstream answers with `sent`, then waits for the engine to close. The client leaves when `ready` has read
/// what it should.
fn leaves_while_upstream_waits(sent: &'static str, request: &str, ready: impl Fn(&mut Client)) {
    for driver in DRIVERS {
        for way in WAYS {
            let upstream = Upstream::start(move |mut served: Served| {
                served.request();
                served.send(sent);
                served.until_closed();
            });
            let engine = TestEngine::start(driver, upstream.address);
            let mut client = engine.connect();
            client.send(request);
            eventually("the upstream has the connection", || upstream.connection_count() == 1);
            ready(&mut client);
            let left_at = Instant::now();
            let _kept = leave(client, way);
            eventually("the upstream sees the close", || upstream.closed.load(Ordering::SeqCst) == 1);
            let taken = left_at.elapsed();
            assert!(taken < Duration::from_secs(1), "{way:?} on {driver:?} took {taken:?}");
            eventually("the exchange is over", || {
                let stats = engine.stats();
                (stats.requests_active, stats.connections_open) == (0, 0)
            });
            assert_eq!(engine.stats().client_aborts, 1, "{way:?}");
            assert_eq!(engine.seen.dropped.load(Ordering::SeqCst), 1, "{way:?}");
        }
    }
}

#[test]
fn before_the_answers_head() {
    leaves_while_upstream_waits("", "POST /p HTTP/1.1\r\nHost: t\r\nContent-Length: 2\r\n\r\nab", |_| {});
}

#[test]
fn before_the_answers_head_on_a_connection_to_be_closed() {
    leaves_while_upstream_waits("", "GET /p HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n", |_| {});
}

#[test]
fn between_head_and_first_event() {
    let head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
    leaves_while_upstream_waits(head, "GET /p HTTP/1.1\r\nHost: t\r\n\r\n", |client| {
        assert_eq!(client.head().status, 200);
    });
}

#[test]
fn in_the_middle_of_a_stream() {
    let begun = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\ndata: a\n\n\r\n";
    leaves_while_upstream_waits(begun, "GET /p HTTP/1.1\r\nHost: t\r\n\r\n", |client| {
        client.read_until(b"data: a\n\n\r\n");
    });
}

#[test]
fn while_an_answer_is_collected() {
    let begun = "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc";
    leaves_while_upstream_waits(begun, "GET /collect HTTP/1.1\r\nHost: t\r\n\r\n", |_| {});
}

#[test]
fn behind_a_pipelined_request() {
    let request = "GET /p HTTP/1.1\r\nHost: t\r\n\r\nGET /hello HTTP/1.1\r\nHost: t\r\n\r\n";
    leaves_while_upstream_waits("", request, |_| {});
}

#[test]
fn while_the_service_does_something_else() {
    for driver in DRIVERS {
        for way in WAYS {
            let engine = TestEngine::start(driver, crate::harness::nowhere());
            let mut client = engine.connect();
            client.send("GET /forever HTTP/1.1\r\nHost: t\r\n\r\n");
            eventually("the service runs", || engine.stats().requests_active == 1);
            let _kept = leave(client, way);
            eventually("its future is dropped", || engine.seen.dropped.load(Ordering::SeqCst) == 1);
            assert_eq!(engine.stats().requests_active, 0);
        }
    }
}

#[test]
fn hidden_behind_more_pipelined_bytes_than_are_read() {
    for driver in DRIVERS {
        let engine = TestEngine::configured(driver, crate::harness::nowhere(), |config| {
            config.limits.pipelined_bytes_max = 1000;
        });
        let mut client = engine.connect();
        client.send("GET /forever HTTP/1.1\r\nHost: t\r\n\r\n");
        // More than is read, less than the socket's window: behind a full window not even the kernel hears of a FIN.
        client.send(vec![b'x'; 40_000]);
        eventually("the service runs", || engine.stats().requests_active == 1);
        drop(client);
        eventually("its future is dropped", || engine.seen.dropped.load(Ordering::SeqCst) == 1);
    }
}

#[test]
fn at_random_moments_nothing_is_left_behind() {
    let upstream = Upstream::start(|mut served| {
        while served.request().is_some() {
            served.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n");
            for _ in 0..5 {
                std::thread::sleep(Duration::from_millis(1));
                served.send("9\r\ndata: a\n\n\r\n");
            }
            served.send("0\r\n\r\n");
        }
    });
    for driver in DRIVERS {
        let engine = TestEngine::configured(driver, upstream.address, |config| config.shards = 2);
        let seed = std::process::id() as u64;
        println!("seed {seed}");
        let mut state = seed | 1;
        let mut random = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        let clients: Vec<(u64, Way)> = (0..200).map(|_| (random() % 9000, WAYS[(random() % 3) as usize])).collect();
        let address = engine.address();
        std::thread::scope(|scope| {
            for half in clients.chunks(25) {
                scope.spawn(move || {
                    for &(delay_us, way) in half {
                        let mut client = Client::connect(address);
                        client.send("GET /p HTTP/1.1\r\nHost: t\r\n\r\n");
                        std::thread::sleep(Duration::from_micros(delay_us));
                        drop(leave(client, way));
                    }
                });
            }
        });
        eventually("everything is at rest", || {
            let stats = engine.stats();
            (stats.requests_active, stats.connections_open) == (0, 0)
        });
        let stats = engine.stats();
        assert_eq!((stats.connections_accepted, stats.panics), (200, 0));
    }
}
