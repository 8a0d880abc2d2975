//! Start, signals, drain, drivers.

use std::net::TcpStream;

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
