//! Start, signals, drain, drivers.

use std::net::TcpStream;
use std::os::unix::net::UnixDatagram;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::support::client::{self, Connection};
use crate::support::router::{router, router_without_io_uring};
use crate::support::wait_until;
use crate::support::worker::{json_worker, worker};

#[test]
fn sigterm_and_sigint_finish_running_streams_and_end_with_0() {
    for signal in [Signal::TERM, Signal::INT] {
        let (go, gate) = std::sync::mpsc::channel::<()>();
        let gate = std::sync::Mutex::new(gate);
        let worker = worker(move |_, conversation| {
            conversation.sse_head();
            conversation.chunk("data: 1\n\n");
            gate.lock().unwrap().recv().unwrap();
            conversation.chunk("data: [DONE]\n\n");
            conversation.last_chunk()
        });
        let mut router = router().round_robin().worker(worker.address).ready();
        let mut idle = Connection::open(router.address);
        idle.send(&client::request("GET", "/health", "", b""));
        assert_eq!(idle.answer("GET").status, 200);
        let mut stream = Connection::open(router.address);
        stream.send(&client::request("POST", "/v1/completions", "", br#"{"model":"m","stream":true}"#));
        stream.head().unwrap();
        assert_eq!(stream.chunk().unwrap().unwrap(), b"data: 1\n\n");

        router.signal(signal);
        router.logged(&["draining"]);
        wait_until("new connections are refused", || TcpStream::connect(router.address).is_err());
        // An idle keep-alive connection is closed, the running stream is not.
        let mut rest = Vec::new();
        std::io::Read::read_to_end(&mut idle.reader, &mut rest).unwrap();
        assert!(rest.is_empty());
        go.send(()).unwrap();
        assert_eq!(stream.chunk().unwrap().unwrap(), b"data: [DONE]\n\n");
        assert_eq!(stream.chunk().unwrap(), None);
        assert_eq!(router.wait().code(), Some(0), "{signal:?}");
    }
}

#[test]
fn streams_that_outlast_the_drain_timeout_are_ended() {
    let worker = worker(|_, conversation| {
        conversation.sse_head();
        conversation.chunk("data: 1\n\n");
        conversation.wait_for_close()
    });
    let mut router = router().round_robin().worker(worker.address).args(&["--drain-timeout", "0.3"]).ready();
    let mut stream = Connection::open(router.address);
    stream.send(&client::request("POST", "/v1/completions", "", br#"{"model":"m","stream":true}"#));
    stream.head().unwrap();
    router.signal(Signal::TERM);
    assert_eq!(router.wait().code(), Some(0));
    wait_until("the worker was left", || worker.closed().len() == 1);
}

#[test]
fn the_driver_in_use_is_told_and_epoll_is_a_working_fallback() {
    let worker = json_worker(r#"{"ok":1}"#);
    let uring = router().round_robin().worker(worker.address).ready();
    uring.logged(&["listening", "driver"]);
    assert_eq!(uring.metric_sum("infera_router_io_driver"), 1.0);

    let fallback = router_without_io_uring().round_robin().worker(worker.address).ready();
    fallback.logged(&["io_uring", "kernel.io_uring_disabled", "seccomp"]);
    fallback.logged(&["listening", "driver=\"epoll\""]);
    assert_eq!(fallback.post("/v1/completions", r#"{"model":"m"}"#).text(), r#"{"ok":1}"#);

    let output = router_without_io_uring().round_robin().worker(worker.address).args(&["--require-io-uring"]).output();
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("kernel.io_uring_disabled"));
}

#[test]
fn a_port_in_use_is_a_clear_error() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let worker = json_worker("{}");
    let output = router().round_robin().worker(worker.address).port(port).output();
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains(&port.to_string()));
}

#[test]
fn a_second_signal_ends_at_once() {
    let worker = worker(|_, conversation| {
        conversation.sse_head();
        conversation.chunk("data: 1\n\n");
        conversation.wait_for_close()
    });
    let mut router = router().round_robin().worker(worker.address).args(&["--drain-timeout", "600"]).ready();
    let mut stream = Connection::open(router.address);
    stream.send(&client::request("POST", "/v1/completions", "", br#"{"model":"m","stream":true}"#));
    stream.head().unwrap();
    router.signal(Signal::TERM);
    router.logged(&["draining"]);
    router.signal(Signal::INT);
    assert_eq!(router.wait().code(), Some(0));
}

#[test]
fn the_service_manager_hears_of_ready_watchdog_and_stopping() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let worker = json_worker("{}");
    let started = router().round_robin().worker(worker.address);
    let mut router = started.env("NOTIFY_SOCKET", path.to_str().unwrap()).env("WATCHDOG_USEC", "200000").start();
    let hear = || {
        let mut buffer = [0; 256];
        let length = socket.recv(&mut buffer).expect("a message of the router");
        String::from_utf8_lossy(&buffer[..length]).trim().to_owned()
    };
    let ready = hear();
    assert!(ready.starts_with("READY=1\nSTATUS=listening on 127.0.0.1:"), "{ready}");
    for _ in 0..3 {
        assert_eq!(hear(), "WATCHDOG=1");
    }
    router.signal(Signal::TERM);
    let mut last = hear();
    while last == "WATCHDOG=1" {
        last = hear();
    }
    assert_eq!(last, "STOPPING=1\nSTATUS=draining");
    assert_eq!(router.wait().code(), Some(0));
}

#[test]
fn control_pages_can_have_an_address_of_their_own() {
    let worker = json_worker("{}");
    let router = router().round_robin().worker(worker.address).args(&["--admin-listen", "127.0.0.1:0"]).start();
    let line = router.logged(&["control pages", "address=127.0.0.1:"]);
    let address = line.split("address=").nth(1).unwrap().split_whitespace().next().unwrap().parse().unwrap();
    wait_until("ready", || client::get(address, "/ready").status == 200);
    for path in ["/metrics", "/v1/workers", "/v1/models", "/health"] {
        assert_eq!(client::get(address, path).status, 200, "{path}");
    }
    for path in ["/metrics", "/v1/workers", "/v1/admin/cache-view/x"] {
        assert_eq!(router.get(path).status, 404, "{path}");
    }
    assert_eq!(router.post("/v1/completions", r#"{"model":"m"}"#).status, 200);
    assert_eq!(client::post(address, "/v1/completions", r#"{"model":"m"}"#).status, 404);
    assert_ne!(client::get(address, "/v1/admin/cache-view/x").json()["error"]["code"].as_str(), Some("not_found"));
}

/// Both listen on one port (SO_REUSEPORT) until the old one has gone.
#[test]
fn a_new_process_takes_the_port_over_without_a_lost_request() {
    let worker = json_worker(r#"{"ok":1}"#);
    let mut old = router().round_robin().worker(worker.address).ready();
    let (is_over, served) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        let (is_over, served, address) = (&is_over, &served, old.address);
        let clients: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(move || {
                    while !is_over.load(Ordering::SeqCst) {
                        let answer = client::post(address, "/v1/completions", r#"{"model":"m"}"#);
                        assert_eq!((answer.status, answer.complete), (200, true));
                        served.fetch_add(1, Ordering::SeqCst);
                    }
                })
            })
            .collect();
        let goes_on = |what: &str| {
            let before = served.load(Ordering::SeqCst);
            wait_until(what, || served.load(Ordering::SeqCst) > before + 200);
        };
        goes_on("traffic before");
        let new = router().round_robin().port(address.port()).worker(worker.address).start();
        new.logged(&["listening"]);
        goes_on("traffic over both");
        let asked = Instant::now();
        old.signal(Signal::TERM);
        assert_eq!(old.wait().code(), Some(0));
        assert!(asked.elapsed() < Duration::from_secs(10), "idle connections do not hold the old one");
        goes_on("traffic after");
        is_over.store(true, Ordering::SeqCst);
        clients.into_iter().for_each(|client| client.join().unwrap());
    });
}
