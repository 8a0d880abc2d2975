//! What a pair's legs say of their workers: rests, faults and retries are those of requests that one worker serves, and
//! belong to the leg that they happened in.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::support::worker::{dead_address, json_worker};

/// One for each way of pairing: with an abort call, by transfer id, prefill first.
const PROTOCOLS: [&str; 3] = ["sglang-bootstrap", "vllm-mooncake", "vllm-nixl"];

const BODY: &str = r#"{"model":"m","prompt":"x","stream":true}"#;

/// Every fault counts.
const AT_ONCE: [&str; 4] = ["--breaker-failure-threshold", "1", "--request-max-retries", "0"];

/// Prefills well under each protocol.
fn prefilling() -> Worker {
    leg(prefill)
}

fn prefill(_: &Seen, conversation: &mut Conversation<'_>) -> Then {
    conversation.json(200, &format!(r#"{{"kv_transfer_params":{}}}"#, serial::HANDOFF))
}

fn busy(status: u16) -> Worker {
    leg(move |_, conversation| {
        let head = format!("HTTP/1.1 {status} Busy\r\nRetry-After: 30\r\nContent-Length: 7\r\n\r\n{{\"b\":1}}");
        conversation.write(head.as_bytes());
        Then::KeepAlive
    })
}

fn trips(router: &Router) -> f64 {
    router.metric_sum("infera_router_worker_breaker_trips_total")
}

#[test]
fn a_leg_that_asks_for_time_gets_it_and_another_pair_serves() {
    for protocol in PROTOCOLS {
        for status in [429, 503] {
            for role in ["prefill", "decode"] {
                let about = format!("{protocol} {status} {role}");
                let (busy, prefill) = (busy(status), prefilling());
                let busy_port = busy.address.port();
                // KV of the worker that is busy never comes.
                let decode = leg(move |seen, conversation| match concurrent::is_for(seen, busy_port) {
                    true => conversation.wait_for_close(),
                    false => answer_as_asked(seen, conversation),
                });
                let mut records = pair_of(protocol, &[prefill.address], &[decode.address]);
                records.insert(0, record(busy.address, role, protocol, json!({})));
                let router = start(&records, |start| start);
                for _ in 0..6 {
                    let answer = router.post("/v1/completions", BODY);
                    assert_eq!((answer.status, answer.complete), (200, true), "{about}: {}", answer.text());
                }
                assert_eq!((bodies(&busy).len(), trips(&router)), (1, 0.0), "{about}");
                assert_eq!(router.breaker_of(busy.address), "resting", "{about}");
                for well in [&prefill, &decode] {
                    assert_eq!(router.breaker_of(well.address), "closed", "{about}");
                }
                at_rest(&router);
            }
        }
    }
}

#[test]
fn where_no_other_pair_is_left_the_client_reads_when_to_come_back() {
    for protocol in PROTOCOLS {
        for (status, role) in [(429, "prefill"), (503, "prefill"), (429, "decode"), (503, "decode")] {
            let (busy, prefill, decode) = (busy(status), prefilling(), held());
            let (left, right) = if role == "prefill" { (&busy, &decode) } else { (&prefill, &busy) };
            let router = start(&pair_of(protocol, &[left.address], &[right.address]), |start| start);
            let answer = router.post("/v1/completions", BODY);
            let seen = (answer.status, answer.header("retry-after"), answer.text());
            assert_eq!(seen, (status, Some("30"), r#"{"b":1}"#.to_owned()), "{protocol} {role}");
            wait_until("the decode leg is gone", || decode.closed().len() == bodies(&decode).len());
            router.wait_for_rest();
        }
    }
}

/// What a worker may do wrong before its first byte.
fn faults(protocol: &str, role: &str) -> Vec<Worker> {
    let mut all =
        vec![leg(|_, conversation| conversation.json(500, "{}")), leg(|_, conversation| conversation.reset())];
    if role == "decode" {
        // Within the answer.
        all.push(leg(|_, conversation| {
            conversation.sse_head();
            conversation.chunk("data: {\"t\":1}\n\n");
            conversation.reset()
        }));
    } else if protocol == "vllm-nixl" {
        all.push(json_worker("no JSON"));
    }
    all
}

#[test]
fn b47_a_fault_is_charged_to_the_leg_it_happened_in() {
    for protocol in PROTOCOLS {
        for role in ["prefill", "decode"] {
            for failing in faults(protocol, role) {
                let (prefill, decode) = (prefilling(), held());
                let is_prefill = role == "prefill";
                let (left, right) = if is_prefill { (&failing, &decode) } else { (&prefill, &failing) };
                let records = pair_of(protocol, &[left.address], &[right.address]);
                let router = start(&records, |start| start.args(&AT_ONCE));
                let answer = router.post("/v1/completions", BODY);
                assert!(answer.status >= 500 || !answer.complete, "{}", answer.text());
                router.wait_for_rest();
                let other = if is_prefill { &decode } else { &prefill };
                let states = (router.breaker_of(failing.address), router.breaker_of(other.address));
                assert_eq!(states, ("open".to_owned(), "closed".to_owned()), "{protocol} {role}");
            }
        }
    }
}

/// A prefill leg that breaks when decode has begun to answer changes nothing for the client, and is a fault all the same.
/// One that is still to end well when decode has ended has done its work.
#[test]
fn b47_a_prefill_leg_behind_its_decode_leg_is_judged_too() {
    let has_begun = Arc::new(AtomicBool::new(false));
    let (seen_begun, begins) = (has_begun.clone(), has_begun.clone());
    let prefill = leg(move |seen, conversation| {
        match body_of(seen)["user"].as_str() {
            Some("500") => return conversation.json(500, "{}"),
            Some("late") => return conversation.wait_for_close(),
            _ => wait_until("decode has begun", || seen_begun.load(Ordering::SeqCst)),
        }
        conversation.reset()
    });
    let decode = leg(move |seen, conversation| {
        if body_of(seen)["user"] == "500" {
            return conversation.wait_for_close();
        }
        conversation.sse_head();
        conversation.chunk("data: {\"t\":1}\n\n");
        begins.store(true, Ordering::SeqCst);
        if body_of(seen)["user"] != "late" {
            // To its end only when the router has seen the prefill leg break.
            wait_until("the prefill leg has broken", || !begins.load(Ordering::SeqCst));
        }
        conversation.chunk("data: [DONE]\n\n");
        conversation.last_chunk()
    });
    let records = pair_of("sglang-bootstrap", &[prefill.address], &[decode.address]);
    let router = start(&records, |start| start.args(&["--breaker-failure-threshold", "2"]));
    let body = |user: &str| format!(r#"{{"model":"m","prompt":"x","stream":true,"user":"{user}"}}"#);
    let fault = || assert_eq!(router.post("/v1/completions", &body("500")).status, 502);
    // Faults that are no run, because a success stands between them.
    fault();
    assert!(router.post("/v1/completions", &body("late")).complete);
    router.wait_for_rest();
    fault();
    assert_eq!((trips(&router), router.breaker_of(prefill.address).as_str()), (0.0, "closed"));
    has_begun.store(false, Ordering::SeqCst);
    std::thread::scope(|scope| {
        let client = scope.spawn(|| router.post("/v1/completions", &body("reset")));
        wait_until("the fault is charged", || trips(&router) == 1.0);
        has_begun.store(false, Ordering::SeqCst);
        let answer = client.join().unwrap();
        assert_eq!((answer.status, answer.complete), (200, true));
    });
    assert_eq!(router.breaker_of(prefill.address), "open");
    assert_eq!(router.breaker_of(decode.address), "closed");
}

/// A leg that is open is left out of pairs, and tried again by one request after its rest; its partner is not.
#[test]
fn b47_an_open_leg_is_left_out_and_one_pair_tries_it_again() {
    for role in ["prefill", "decode"] {
        let is_well = Arc::new(AtomicBool::new(false));
        let seen_well = is_well.clone();
        let ailing = leg(move |seen, conversation| match (seen_well.load(Ordering::SeqCst), role) {
            (false, _) => conversation.json(500, "{}"),
            (true, "prefill") => prefill(seen, conversation),
            (true, _) => answer_as_asked(seen, conversation),
        });
        let (prefill, decode) = (prefilling(), decoding());
        let mut records = pair_of("vllm-nixl", &[prefill.address], &[decode.address]);
        records.insert(0, record(ailing.address, role, "vllm-nixl", json!({})));
        let arguments = ["--breaker-failure-threshold", "1", "--breaker-cooldown-s", "0.3"];
        let router = start(&records, |start| start.args(&arguments));
        let ask = || assert!(router.post("/v1/completions", BODY).complete);
        wait_until("the fault is found", || {
            ask();
            trips(&router) == 1.0
        });
        is_well.store(true, Ordering::SeqCst);
        // Without requests it stays open: nobody else tries it.
        assert_eq!(router.breaker_of(ailing.address), "open", "{role}");
        let before = bodies(&ailing).len();
        wait_until("a request tries it", || {
            ask();
            router.breaker_of(ailing.address) == "closed"
        });
        assert_eq!(trips(&router), 1.0, "{role}");
        assert!(bodies(&ailing).len() > before, "{role}: closed without a try");
        for well in [&prefill, &decode] {
            assert_eq!(router.breaker_of(well.address), "closed", "{role}");
        }
        at_rest(&router);
    }
}

/// As with a single worker: nobody has seen the request of a leg that could not be reached.
#[test]
fn b50_a_leg_that_cannot_be_reached_is_replaced_without_a_budget() {
    for protocol in PROTOCOLS {
        for dead_role in ["prefill", "decode"] {
            let (prefill, decode, dead) = (prefilling(), decoding(), dead_address());
            let mut records = pair_of(protocol, &[prefill.address], &[decode.address]);
            records.insert(0, record(dead, dead_role, protocol, json!({})));
            let arguments = ["--breaker-failure-threshold", "0", "--retry-budget-percent", "0"];
            let router = start(&records, |start| start.args(&arguments));
            for _ in 0..300 {
                let answer = router.post("/v1/completions", r#"{"model":"m","prompt":"x"}"#);
                assert_eq!(answer.status, 200, "{protocol} {dead_role}: {}", answer.text());
            }
            // More than a budget without a share would have let through.
            let retried = router.metric(r#"infera_router_retries_total{reason="connect"}"#);
            assert!(retried >= Some(140.0), "{protocol} {dead_role}: {retried:?}");
            assert_eq!(router.metric_sum("infera_router_retries_refused_total"), 0.0, "{protocol} {dead_role}");
            at_rest(&router);
        }
    }
}

#[test]
fn b50_dead_legs_cost_no_retries() {
    for protocol in PROTOCOLS {
        for dead_role in ["prefill", "decode"] {
            let (prefill, decode) = (prefilling(), decoding());
            let mut records = pair_of(protocol, &[prefill.address], &[decode.address]);
            records.extend((0..4).map(|_| record(dead_address(), dead_role, protocol, json!({}))));
            let arguments = ["--breaker-failure-threshold", "0", "--request-max-retries", "1"];
            let router = start(&records, |start| start.args(&arguments));
            for _ in 0..10 {
                let answer = router.post("/v1/completions", BODY);
                assert_eq!(answer.status, 200, "{protocol} {dead_role}: {}", answer.text());
            }
            assert!(router.metric_sum("infera_router_retries_total") >= 10.0, "{protocol} {dead_role}");
            // KV that was handed over to two dead workers in a row is given up.
            router.wait_for_rest();
        }
    }
}

/// Counted by the router itself: the first retry of a request goes out at once, each further one after a pause.
#[test]
fn b50_each_further_pair_is_tried_after_a_pause() {
    let pauses = |router: &Router| router.metric(r#"infera_router_stage_seconds_count{stage="pause"}"#);
    // With an abort call for decode: where KV is left behind the next pair is tried at once, so that it is freed.
    for (failing_role, protocol) in [("prefill", "vllm-nixl"), ("decode", "sglang-bootstrap")] {
        let (prefill, decode) = (prefilling(), decoding());
        let workers: Vec<Worker> = (0..4).map(|_| leg(|_, conversation| conversation.json(500, "{}"))).collect();
        let failing: Vec<SocketAddr> = workers.iter().map(|worker| worker.address).collect();
        let (left, right) = match failing_role {
            "prefill" => (&failing[..], std::slice::from_ref(&decode.address)),
            _ => (std::slice::from_ref(&prefill.address), &failing[..]),
        };
        let arguments = ["--breaker-failure-threshold", "0", "--request-max-retries", "3"];
        let router = start(&pair_of(protocol, left, right), |start| start.args(&arguments));
        for asked in 1..=3 {
            assert!(router.post("/v1/completions", BODY).status >= 500);
            // Four pairs each: one at once, one more at once, two after a pause.
            assert_eq!(pauses(&router), Some(2.0 * f64::from(asked)), "{failing_role}");
        }
        assert_eq!(router.metric_sum("infera_router_retries_total"), 9.0);
    }
}

#[test]
fn b50_pairs_pay_into_the_retry_budget_and_are_bound_by_it() {
    let failing = || leg(|_, conversation| conversation.json(500, "{}"));
    let (one, other, decode) = (failing(), failing(), decoding());
    let records = pair_of("vllm-nixl", &[one.address, other.address], &[decode.address]);
    let arguments = ["--breaker-failure-threshold", "0", "--retry-budget-percent", "20"];
    let router = start(&records, |start| start.args(&arguments));
    let started = std::time::Instant::now();
    for _ in 0..600 {
        assert_eq!(router.post("/v1/completions", BODY).status, 502);
    }
    let retried = router.metric_sum("infera_router_retries_total");
    // What a quiet router has saved (100), a fifth of the requests, ten a second.
    let most = 220.0 + 10.0 * started.elapsed().as_secs_f64();
    assert!((200.0..=most + 1.0).contains(&retried), "{retried} retries, at most {most}");
    assert_eq!(router.metric_sum("infera_router_retries_refused_total"), 600.0 - retried);
    router.wait_for_rest();
}
