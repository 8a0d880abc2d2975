//! The circuit breaker, the retry budget and the caps, as clients and workers meet them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};

use crate::support::client::{Connection, request};
use crate::support::router::{Router, router};
use crate::support::wait_until;
use crate::support::worker::{Then, Worker, dead_address, json_worker, worker};

const BODY: &str = r#"{"model":"m","prompt":"x"}"#;
const STREAM: &str = r#"{"model":"m","prompt":"x","stream":true}"#;

/// A worker whose status a test turns.
fn turnable(status: u16) -> (Worker, Arc<AtomicU16>) {
    let dial = Arc::new(AtomicU16::new(status));
    let shown = dial.clone();
    (worker(move |_, conversation| conversation.json(shown.load(Ordering::SeqCst), "{}")), dial)
}

fn trips(router: &Router) -> f64 {
    router.metric_sum("infera_router_worker_breaker_trips_total")
}

fn state(router: &Router, worker: &Worker) -> String {
    router.breaker_of(worker.address)
}

#[test]
fn b47_client_mistakes_do_not_open_the_breaker_and_faults_in_a_row_do() {
    let (worker, dial) = turnable(200);
    let arguments = ["--breaker-failure-threshold", "5", "--request-max-retries", "0"];
    let router = router().round_robin().worker(worker.address).args(&arguments).ready();
    let block = |status: u16, times: usize, expected_trips: f64| {
        dial.store(status, Ordering::SeqCst);
        for _ in 0..times {
            assert_eq!(router.post("/v1/completions", BODY).status, status);
        }
        router.wait_for_rest();
        assert_eq!(trips(&router), expected_trips, "after {times} of {status}");
    };
    for status in [400, 404, 413, 422, 429] {
        block(status, 25, 0.0);
    }
    // A run that is broken by a success, and one that client mistakes do not break.
    block(500, 4, 0.0);
    block(200, 1, 0.0);
    block(500, 4, 0.0);
    block(400, 1, 0.0);
    assert_eq!(state(&router, &worker), "closed");
    block(500, 1, 1.0);
    assert_eq!(state(&router, &worker), "open");
    // The only worker is asked all the same, and its own answer is the client's.
    block(503, 3, 1.0);
    block(200, 1, 1.0);
    // A status that HTTP does not know is the worker's fault too.
    block(777, 5, 2.0);
}

#[test]
fn b47_clients_that_leave_in_mid_stream_are_nobodys_fault() {
    let worker = worker(|_, conversation| {
        conversation.sse_head();
        conversation.chunk("data: {\"t\":1}\n\n");
        conversation.wait_for_close()
    });
    let arguments = ["--breaker-failure-threshold", "2"];
    let router = router().round_robin().worker(worker.address).args(&arguments).ready();
    for _ in 0..10 {
        let mut connection = Connection::open(router.address);
        connection.send(&request("POST", "/v1/completions", "", STREAM.as_bytes()));
        assert_eq!(connection.head().unwrap().0, 200);
        assert!(connection.chunk().unwrap().is_some());
    }
    router.wait_for_rest();
    assert_eq!((trips(&router), state(&router, &worker).as_str()), (0.0, "closed"));
}

#[test]
fn a_worker_that_fails_is_asked_three_times_and_then_left_alone() {
    let check = |bad: std::net::SocketAddr, count: &dyn Fn() -> Option<usize>, path: &str| {
        let good = json_worker("{}");
        let router = router().round_robin().worker(bad).worker(good.address).ready();
        for _ in 0..10 {
            assert_eq!(router.post(path, BODY).status, 200);
        }
        assert_eq!(good.requests(), 10);
        assert_eq!(router.metric_sum("infera_router_retries_total"), 3.0);
        assert!(count().is_none_or(|requests| requests == 3));
        assert_eq!(trips(&router), 1.0);
        router.logged(&["failed too often", "for_ms=5000"]);
    };
    check(dead_address(), &|| None, "/v1/completions");
    // Paths that the router does not know are judged alike.
    for path in ["/v1/completions", "/v1/embeddings"] {
        let (bad, _) = turnable(500);
        check(bad.address, &|| Some(bad.requests()), path);
    }
    // An answer that breaks inside its body is judged by its end, and is not tried again.
    let cutting = worker(|_, conversation| {
        conversation.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{\"half\":");
        Then::Close
    });
    let good = json_worker("{}");
    let router = router().round_robin().worker(cutting.address).worker(good.address).ready();
    let cut = (0..10).filter(|_| !router.post("/v1/completions", BODY).complete).count();
    assert_eq!((cut, cutting.requests(), good.requests()), (3, 3, 7));
}

/// A status of 500 is a fault, and so is a cut body: together they are still one failed request.
#[test]
fn an_answer_that_fails_by_its_status_and_is_cut_is_one_fault() {
    let worker = worker(|_, conversation| {
        conversation.write(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 100\r\n\r\n{\"half\":");
        Then::Close
    });
    let arguments = ["--breaker-failure-threshold", "2", "--request-max-retries", "0"];
    let router = router().round_robin().worker(worker.address).args(&arguments).ready();
    for expected_trips in [0.0, 1.0] {
        let answer = router.post("/v1/completions", BODY);
        assert_eq!((answer.status, answer.complete), (500, false));
        router.wait_for_rest();
        assert_eq!(trips(&router), expected_trips);
    }
}

/// A worker that fails at once is never busy: where all are open it must not get all requests while another one serves.
#[test]
fn b50_where_all_are_open_the_one_that_serves_is_found_and_kept() {
    for policy in ["kv-aware", "round-robin"] {
        let (serving, dial) = turnable(500);
        let (refusing, _) = turnable(503);
        let arguments = ["--breaker-cooldown-s", "60", "--request-max-retries", "0"];
        let router = router()
            .policy(policy)
            .worker(dead_address())
            .worker(refusing.address)
            .worker(serving.address)
            .args(&arguments)
            .ready();
        wait_until("all are open", || {
            router.post("/v1/completions", BODY);
            trips(&router) == 3.0
        });
        dial.store(200, Ordering::SeqCst);
        let failed = (0..50).filter(|_| router.post("/v1/completions", BODY).status != 200).count();
        // Each of the other two may be asked first, once more than the one that serves has been asked in need so far.
        assert!(failed <= 6, "{policy}: {failed} of 50");
        assert_eq!(state(&router, &serving), "closed");
        assert_eq!(trips(&router), 3.0);
    }
}

/// A request that nobody has read is no second one: its way to another worker costs the fleet nothing.
/// As many as are dead, though one retry is allowed: nothing but a living worker ends the search.
#[test]
fn b50_dead_workers_cost_no_retries() {
    let good = json_worker("good");
    let ask = |retries_max: &str| {
        let arguments = ["--breaker-failure-threshold", "0", "--request-max-retries", retries_max];
        let dead: Vec<SocketAddr> = (0..5).map(|_| dead_address()).collect();
        let start = dead.iter().fold(router().round_robin(), |start, dead| start.worker(*dead));
        let router = start.worker(good.address).args(&arguments).ready();
        let statuses: Vec<u16> = (0..12).map(|_| router.post("/v1/completions", BODY).status).collect();
        (statuses.iter().filter(|status| **status == 200).count(), router.metric_sum("infera_router_retries_total"))
    };
    let (served, retries) = ask("1");
    assert_eq!(served, 12);
    assert!(retries >= 12.0, "{retries}");
    assert_eq!(ask("0"), (2, 0.0), "none are none");
}

#[test]
fn b50_a_worker_that_cannot_be_reached_is_replaced_without_a_budget() {
    let good = json_worker("{}");
    let arguments = ["--breaker-failure-threshold", "0", "--retry-budget-percent", "0"];
    let router = router().round_robin().worker(dead_address()).worker(good.address).args(&arguments).ready();
    for _ in 0..400 {
        assert_eq!(router.post("/v1/completions", BODY).status, 200);
    }
    // More than a budget without a share would have let through.
    assert!(router.metric_sum("infera_router_retries_total") >= 200.0);
    assert_eq!(router.metric_sum("infera_router_retries_refused_total"), 0.0);
}

#[test]
fn one_request_at_a_time_tries_a_worker_that_has_failed() {
    let (is_well, is_held) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let (well, held) = (is_well.clone(), is_held.clone());
    let ailing = worker(move |_, conversation| match well.load(Ordering::SeqCst) {
        false => conversation.json(500, "{}"),
        true => {
            wait_until("the probe is let go", || !held.load(Ordering::SeqCst));
            conversation.json(200, r#"{"from":"ailing"}"#)
        }
    });
    let good = json_worker("{}");
    let arguments = ["--breaker-cooldown-s", "0.2"];
    let router = router().round_robin().worker(ailing.address).worker(good.address).args(&arguments).ready();
    wait_until("the worker is open", || {
        assert_eq!(router.post("/v1/completions", BODY).status, 200);
        trips(&router) >= 1.0
    });
    is_held.store(true, Ordering::SeqCst);
    is_well.store(true, Ordering::SeqCst);
    let asked = ailing.requests();
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    wait_until("a request meets the worker", || {
                        ailing.requests() > asked || router.post("/v1/completions", BODY).status != 200
                    })
                })
            })
            .collect();
        wait_until("one request tries it", || ailing.requests() > asked);
        assert_eq!(state(&router, &ailing), "half-open");
        for _ in 0..10 {
            assert_eq!(router.post("/v1/completions", BODY).text(), "{}", "served by the other one");
        }
        assert_eq!(ailing.requests(), asked + 1);
        is_held.store(false, Ordering::SeqCst);
        clients.into_iter().for_each(|client| client.join().unwrap());
    });
    wait_until("the worker is closed again", || state(&router, &ailing) == "closed");
    let asked = ailing.requests();
    wait_until("it serves again", || {
        router.post("/v1/completions", BODY);
        ailing.requests() > asked + 3
    });
    assert_eq!(router.metric_sum("infera_router_worker_breaker_state"), 0.0);
}

#[test]
fn a_worker_that_asks_for_time_gets_it() {
    let date = "Fri, 01 Jan 2100 00:00:30 GMT\r\nDate: Fri, 01 Jan 2100 00:00:00 GMT";
    for (status, delay) in [(503, "30"), (429, "30"), (503, date), (429, date)] {
        let busy = worker(move |_, conversation| {
            let head = format!("HTTP/1.1 {status} Busy\r\nRetry-After: {delay}\r\nContent-Length: 2\r\n\r\n{{}}");
            conversation.write(head.as_bytes());
            Then::KeepAlive
        });
        let good = json_worker("{}");
        let router = router().round_robin().worker(busy.address).worker(good.address).ready();
        for _ in 0..6 {
            assert_eq!(router.post("/v1/completions", BODY).status, 200, "tried on the other one");
        }
        assert_eq!((busy.requests(), good.requests(), trips(&router)), (1, 6, 0.0));
        assert_eq!(state(&router, &busy), "resting");
    }
}

#[test]
fn b04_a_stream_that_says_nothing_is_an_error_and_the_workers_fault() {
    for said in ["", ": ping\n\n: ping\n\n"] {
        let silent = worker(move |_, conversation| {
            conversation.sse_head();
            if !said.is_empty() {
                conversation.chunk(said);
            }
            conversation.last_chunk()
        });
        let arguments = ["--breaker-failure-threshold", "1"];
        let router = router().round_robin().worker(silent.address).args(&arguments).ready();
        let answer = router.post("/v1/completions", STREAM);
        let text = answer.text();
        assert!(!answer.complete || answer.status == 502, "not finished politely");
        assert!(text.contains("worker_failed") && !text.contains("[DONE]"), "{said:?}: {} {text}", answer.status);
        router.wait_for_rest();
        assert_eq!(router.metric(r#"infera_requests_total{outcome="error",router="mixed"}"#), Some(1.0));
        assert_eq!(trips(&router), 1.0);
    }
}

#[test]
fn b04_an_error_inside_a_stream_passes_and_counts_for_whom_it_blames() {
    for (code, expected_trips) in [(400, 0.0), (500, 1.0)] {
        let event = format!("data: {{\"error\":{{\"message\":\"no\",\"code\":{code}}}}}\n\n");
        let sent = event.clone();
        let failing = worker(move |_, conversation| {
            conversation.sse_head();
            conversation.chunk(&sent);
            conversation.last_chunk()
        });
        let arguments = ["--breaker-failure-threshold", "1"];
        let router = router().round_robin().worker(failing.address).args(&arguments).ready();
        let answer = router.post("/v1/completions", STREAM);
        assert_eq!((answer.status, answer.text(), answer.complete), (200, event, true));
        router.wait_for_rest();
        assert_eq!(router.metric(r#"infera_requests_total{outcome="error",router="mixed"}"#), Some(1.0));
        assert_eq!(router.metric_sum("infera_time_to_first_token_seconds_count"), 0.0);
        assert_eq!(trips(&router), expected_trips, "{code}");
    }
}

#[test]
fn b50_a_failing_fleet_is_not_asked_twice_by_everybody() {
    let (a, _) = turnable(500);
    let (b, _) = turnable(500);
    let arguments = ["--breaker-failure-threshold", "0", "--retry-budget-percent", "10"];
    let router = router().round_robin().worker(a.address).worker(b.address).args(&arguments).ready();
    let started = std::time::Instant::now();
    for _ in 0..1_000 {
        assert_eq!(router.post("/v1/completions", BODY).status, 500);
    }
    let retried = router.metric_sum("infera_router_retries_total");
    // What a quiet router has saved (100), a tenth of the requests, ten a second.
    let most = 200.0 + 10.0 * started.elapsed().as_secs_f64();
    assert!((150.0..=most + 1.0).contains(&retried), "{retried} retries, at most {most}");
    assert_eq!(router.metric_sum("infera_router_retries_refused_total"), 1_000.0 - retried);
}

#[test]
fn caps_are_answered_with_429_and_when_to_come_back() {
    let release = Arc::new(AtomicBool::new(false));
    let check = |arguments: &[&str], allowed: usize| {
        let (held, seen) = (release.clone(), release.clone());
        release.store(false, Ordering::SeqCst);
        let slow = move |held: Arc<AtomicBool>| {
            worker(move |_, conversation| {
                wait_until("the test lets go", || held.load(Ordering::SeqCst));
                conversation.json(200, "{}")
            })
        };
        let (a, b) = (slow(held), slow(seen));
        let router = router().round_robin().worker(a.address).worker(b.address).args(arguments).ready();
        std::thread::scope(|scope| {
            let running: Vec<_> =
                (0..allowed).map(|_| scope.spawn(|| router.post("/v1/completions", BODY).status)).collect();
            wait_until("all run", || a.requests() + b.requests() == allowed);
            let answer = router.post("/v1/completions", BODY);
            assert_eq!((answer.status, answer.header("retry-after")), (429, Some("1")));
            assert_eq!(answer.json()["error"]["code"].as_str(), Some("overloaded"));
            assert_eq!(router.get("/health").status, 200);
            release.store(true, Ordering::SeqCst);
            assert!(running.into_iter().all(|client| client.join().unwrap() == 200));
        });
        assert_eq!(router.post("/v1/completions", BODY).status, 200, "room again");
    };
    check(&["--max-inflight-per-worker", "2"], 4);
    check(&["--max-inflight", "3"], 3);
}
