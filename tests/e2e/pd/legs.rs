//! Both legs at once: what the client sees, and what becomes of the other leg, whatever one of them does.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::*;
use crate::support::eventually;

#[test]
fn both_legs_carry_one_fresh_room_and_the_decode_answer_reaches_the_client() {
    let (prefill, decode) = (done(), decoding());
    let router = sglang(&[prefill.address], &[decode.address]);
    for stream in [false, true] {
        let answer = ask(&router, stream);
        assert_eq!((answer.status, answer.complete), (200, true));
        let text = answer.text();
        assert!(if stream { text.ends_with("data: [DONE]\n\n") } else { text.contains("from\":\"decode") }, "{text}");
    }
    wait_until("both prefill legs arrived", || bodies(&prefill).len() == 2);
    // In the order of the decode legs: a prefill leg may be read late.
    let right = bodies(&decode);
    let of_room = |room: &Value| bodies(&prefill).into_iter().find(|body| body["bootstrap_room"] == *room).unwrap();
    let left: Vec<Value> = right.iter().map(|body| of_room(&body["bootstrap_room"])).collect();
    for (left, right) in left.iter().zip(&right) {
        for member in ["bootstrap_host", "bootstrap_port", "bootstrap_room", "rid"] {
            assert_eq!(left[member], right[member], "{left} {right}");
        }
        assert_eq!(left["rid"], format!("infera-{}", left["bootstrap_room"]));
        assert_eq!(right["bootstrap_port"], prefill.address.port());
    }
    assert_ne!(left[0]["bootstrap_room"], left[1]["bootstrap_room"]);
    // The prefill leg is no stream; the decode leg is what the client asked for.
    assert_eq!((&left[1]["stream"], &right[1]["stream"]), (&json!(false), &json!(true)));
    at_rest(&router);
    assert_eq!(router.metric(r#"infera_requests_total{outcome="ok",router="disagg"}"#), Some(2.0));
    assert_eq!((aborts(&prefill), aborts(&decode)), (vec![], vec![]), "nothing is aborted when all went well");
}

#[test]
fn b36_a_prefill_refusal_reaches_the_client_at_once_and_ends_decode() {
    let refusal = r#"{"error":{"message":"prompt too long","code":400}}"#;
    let prefill = leg(move |_, conversation| conversation.json(400, refusal));
    let decode = held();
    let router = sglang(&[prefill.address], &[decode.address]);
    for stream in [false, true] {
        let asked = Instant::now();
        let answer = ask(&router, stream);
        assert_eq!((answer.status, answer.text().as_str()), (400, refusal));
        assert!(asked.elapsed() < SOON);
    }
    wait_until("both decode legs are gone", || decode.closed().len() == 2);
    let rids: Vec<String> = bodies(&decode).iter().map(|body| body["rid"].as_str().unwrap().to_owned()).collect();
    wait_until("decode is told", || rids.iter().all(|rid| aborts(&decode).contains(rid)));
    assert_eq!(prefill.requests() - aborts(&prefill).len(), 2, "a client's mistake is not tried again");
    at_rest(&router);
}

/// Prefill workers that fail in the ways of the field report.
fn failing_prefills() -> Vec<(&'static str, Worker)> {
    vec![
        ("500", leg(|_, conversation| conversation.json(500, "{}"))),
        ("reset", leg(|_, conversation| conversation.reset())),
        ("closed", leg(|_, _| Then::Close)),
    ]
}

#[test]
fn b36_a_failed_prefill_ends_decode_and_another_pair_serves_with_fresh_ids() {
    for (name, failing) in failing_prefills() {
        let healthy = done();
        let decode = leg(|seen, conversation| match body_of(seen)["bootstrap_port"].as_u64() {
            // Waits for KV of the failing worker for ever.
            Some(port) if Some(port) == body_of(seen)["fail_port"].as_u64() => conversation.wait_for_close(),
            _ => answer_as_asked(seen, conversation),
        });
        let router = sglang(&[failing.address, healthy.address], &[decode.address]);
        for _ in 0..4 {
            let body = json!({"model": "m", "messages": [], "fail_port": failing.address.port()}).to_string();
            let answer = router.post("/v1/chat/completions", &body);
            assert_eq!((answer.status, answer.json()["from"].as_str()), (200, Some("decode")), "{name}");
        }
        let failed = bodies(&failing).len();
        assert!(failed >= 1, "{name}: the failing worker was never picked");
        wait_until("decode legs of failed pairs are gone", || decode.closed().len() == failed);
        let rooms: HashSet<String> = bodies(&decode).iter().map(|body| body["bootstrap_room"].to_string()).collect();
        assert_eq!(rooms.len(), bodies(&decode).len(), "{name}: a room was used twice");
        at_rest(&router);
        assert!(router.metric_sum("infera_router_retries_total") >= failed as f64);
    }
}

#[test]
fn b36_without_another_pair_the_error_names_the_prefill_leg() {
    let mut cases: Vec<(&str, SocketAddr, Option<Worker>)> =
        failing_prefills().into_iter().map(|(name, it)| (name, it.address, Some(it))).collect();
    let dead = refusing();
    cases.push(("refused", dead.address, None));
    for (name, address, _prefill) in cases {
        let decode = held();
        let router = sglang(&[address], &[decode.address]);
        let asked = Instant::now();
        let answer = ask(&router, true);
        assert_eq!((answer.status, answer.json()["error"]["code"].as_str()), (502, Some("worker_failed")), "{name}");
        let message = answer.json()["error"]["message"].to_string();
        assert!(message.contains(&format!("prefill worker {address}")), "{name}: {message}");
        assert!(asked.elapsed() < SOON, "{name}");
        // Decode may not have been reached before prefill was refused.
        wait_until("the decode leg is gone", || decode.closed().len() == bodies(&decode).len());
        at_rest(&router);
    }
}

/// A full worker says nothing about the request: another pair takes it, and the full one gets the time it asked for.
#[test]
fn a_leg_that_is_full_goes_to_another_pair_and_the_last_one_is_told_as_it_is() {
    // As an engine does, decode begins only when prefill has taken the room.
    let rooms = Arc::new(Mutex::new(HashMap::new()));
    let note = |taken: bool| {
        let rooms = rooms.clone();
        move |seen: &Seen| rooms.lock().unwrap().insert(body_of(seen)["bootstrap_room"].as_u64().unwrap(), taken)
    };
    let full = || {
        let note = note(false);
        leg(move |seen, conversation| {
            note(seen);
            conversation.write(b"HTTP/1.1 429 Busy\r\nRetry-After: 30\r\nContent-Length: 4\r\n\r\nfull");
            Then::KeepAlive
        })
    };
    let (busy_prefill, busy_decode) = (full(), full());
    let taken = note(true);
    let prefill = leg(move |seen, conversation| {
        taken(seen);
        conversation.json(200, "{}")
    });
    let known = rooms.clone();
    let decode = leg(move |seen, conversation| {
        let room = body_of(seen)["bootstrap_room"].as_u64().unwrap();
        match eventually("prefill was asked", || known.lock().unwrap().get(&room).copied()) {
            true => answer_as_asked(seen, conversation),
            false => conversation.wait_for_close(),
        }
    });
    for (prefills, decodes, busy) in [
        (vec![busy_prefill.address, prefill.address], vec![decode.address], &busy_prefill),
        (vec![prefill.address], vec![busy_decode.address, decode.address], &busy_decode),
    ] {
        let router = sglang(&prefills, &decodes);
        for _ in 0..4 {
            assert_eq!(ask(&router, true).status, 200);
        }
        assert_eq!(bodies(busy).len(), 1, "it rests");
        at_rest(&router);
    }
    let alone = full();
    for (prefills, decodes) in [([alone.address], [decode.address]), ([prefill.address], [alone.address])] {
        let answer = ask(&sglang(&prefills, &decodes), true);
        assert_eq!((answer.status, answer.header("retry-after"), answer.text().as_str()), (429, Some("30"), "full"));
    }
}

/// What a failed worker says may quote the prompt or a key: it is for the client and for no log.
#[test]
fn b57_what_a_failed_prefill_says_is_told_to_the_client_and_not_logged() {
    let prefill = leg(|_, conversation| conversation.json(500, r#"{"error":"cannot take `secret words`"}"#));
    let decode = held();
    let router = sglang(&[prefill.address], &[decode.address]);
    let answer = ask(&router, true);
    assert_eq!(answer.status, 502);
    let message = answer.json()["error"]["message"].to_string();
    assert!(message.contains("status 500") && message.contains("secret words"), "{message}");
    router.logged(&["a pair failed", "status 500"]);
    assert!(!router.log_lines().join("\n").contains("secret"));
    at_rest(&router);
}

#[test]
fn b36_a_prefill_answer_behind_the_decode_answer_is_normal() {
    let released = Arc::new(AtomicBool::new(false));
    let gate = released.clone();
    let prefill = leg(move |_, conversation| {
        wait_until("decode has ended", || gate.load(Ordering::SeqCst));
        conversation.json(200, "{}")
    });
    let decode = decoding();
    let router = sglang(&[prefill.address], &[decode.address]);
    assert_eq!(ask(&router, true).status, 200);
    // The drain holds no booking.
    at_rest(&router);
    released.store(true, Ordering::SeqCst);
    assert_eq!(ask(&router, false).status, 200);
    at_rest(&router);
    assert_eq!((aborts(&prefill), aborts(&decode)), (vec![], vec![]));
}

#[test]
fn b04_decodes_own_words_reach_the_client() {
    let refusal = r#"{"error":{"message":"max_tokens too large"}}"#;
    for stream in [false, true] {
        let prefill = held();
        let decode = leg(move |_, conversation| conversation.json(400, refusal));
        let other = leg(move |_, conversation| conversation.json(400, refusal));
        let router = sglang(&[prefill.address], &[decode.address, other.address]);
        let answer = ask(&router, stream);
        assert_eq!((answer.status, answer.text().as_str()), (400, refusal));
        assert_eq!(bodies(&decode).len() + bodies(&other).len(), 1, "a 400 is not tried elsewhere");
        wait_until("the prefill leg is gone", || prefill.closed().len() == 1);
        let rid = bodies(&prefill)[0]["rid"].as_str().unwrap().to_owned();
        wait_for_aborts(&prefill, &[rid]);
        at_rest(&router);
    }
}

#[test]
fn a_decode_failure_before_its_first_byte_goes_to_another_pair() {
    let half_begun = || {
        leg(|_, conversation| {
            conversation.sse_head();
            Then::Close
        })
    };
    let unavailable = || leg(|_, conversation| conversation.json(503, r#"{"error":"starting"}"#));
    for (name, failing) in [("503", unavailable()), ("reset", leg(|_, c| c.reset())), ("head only", half_begun())] {
        let (prefill, healthy) = (done(), decoding());
        let router = sglang(&[prefill.address], &[failing.address, healthy.address]);
        for _ in 0..4 {
            let answer = ask(&router, true);
            assert_eq!((answer.status, answer.complete), (200, true), "{name}: {}", answer.text());
        }
        assert!(!bodies(&failing).is_empty(), "{name}");
        let rooms: HashSet<String> = bodies(&prefill).iter().map(|body| body["bootstrap_room"].to_string()).collect();
        assert_eq!(rooms.len(), bodies(&prefill).len(), "{name}: every attempt has a room of its own");
        at_rest(&router);
    }
    // Alone, its own answer is the last word.
    let (prefill, decode) = (done(), unavailable());
    let answer = ask(&sglang(&[prefill.address], &[decode.address]), false);
    assert_eq!((answer.status, answer.text().as_str()), (503, r#"{"error":"starting"}"#));
    let dead = refusing();
    let answer = ask(&sglang(&[prefill.address], &[dead.address]), false);
    assert_eq!(answer.status, 502);
    assert!(answer.json()["error"]["message"].as_str().unwrap().contains("decode worker"), "{}", answer.text());
}

#[test]
fn a_stream_without_its_terminator_is_an_error_and_aborts_the_pair() {
    let events = ["", ": ping\n\n", "data: {\"t\":\"data: [DONE]\"}\n\n"];
    for event in events {
        let prefill = done();
        let decode = leg(move |_, conversation| {
            conversation.sse_head();
            if !event.is_empty() {
                conversation.chunk(event);
            }
            conversation.last_chunk()
        });
        let router = sglang(&[prefill.address], &[decode.address]);
        let answer = ask(&router, true);
        assert_eq!((answer.status, answer.complete), (200, false), "{event:?}: {}", answer.text());
        let text = answer.text();
        assert!(text.contains("worker_failed") && !text.contains("\ndata: [DONE]"), "{text}");
        let rid = bodies(&decode)[0]["rid"].as_str().unwrap().to_owned();
        wait_for_aborts(&prefill, std::slice::from_ref(&rid));
        wait_for_aborts(&decode, &[rid]);
        at_rest(&router);
        assert_eq!(router.metric(r#"infera_requests_total{outcome="error",router="disagg"}"#), Some(1.0));
    }
}

#[test]
fn b51_after_the_first_byte_nothing_is_replayed() {
    let prefill = done();
    let cutting = || {
        leg(|_, conversation| {
            conversation.sse_head();
            conversation.chunk("data: {\"t\":\"A\"}\n\n");
            conversation.reset()
        })
    };
    let (decode, other) = (cutting(), cutting());
    let router = sglang(&[prefill.address], &[decode.address, other.address]);
    let answer = ask(&router, true);
    assert!(!answer.complete && answer.text().contains("\"A\""), "{}", answer.text());
    assert_eq!(bodies(&decode).len() + bodies(&other).len(), 1);
    at_rest(&router);
}

#[test]
fn b05_a_client_that_leaves_ends_both_legs_one_abort_per_sample() {
    for (body, samples) in [
        (r#"{"model":"m","prompt":"x","stream":true}"#, 1),
        (r#"{"model":"m","prompt":"x","n":3}"#, 3),
        (r#"{"model":"m","prompt":["x","y"]}"#, 2),
    ] {
        let (prefill, decode) = (held(), held());
        let router = sglang(&[prefill.address], &[decode.address]);
        leave_when(&router, body, || bodies(&prefill).len() + bodies(&decode).len() == 2);
        let left = Instant::now();
        wait_until("both legs are gone", || prefill.closed().len() + decode.closed().len() == 2);
        let rid = bodies(&prefill)[0]["rid"].as_str().unwrap().to_owned();
        let rids: Vec<String> =
            if samples == 1 { vec![rid] } else { (0..samples).map(|at| format!("{rid}_{at}")).collect() };
        wait_for_aborts(&prefill, &rids);
        wait_for_aborts(&decode, &rids);
        assert!(left.elapsed() < SOON);
        at_rest(&router);
        let outcome = r#"infera_requests_total{outcome="stream_failed",router="disagg"}"#;
        wait_until("it is counted", || router.metric(outcome) == Some(1.0));
    }
}

#[test]
fn b40_a_client_that_leaves_in_mid_stream_ends_the_pair_and_one_that_leaves_behind_the_terminator_does_not() {
    for terminated in [false, true] {
        let prefill = done();
        let decode = leg(move |_, conversation| {
            conversation.sse_head();
            conversation.chunk("data: {\"t\":\"A\"}\n\n");
            if terminated {
                conversation.chunk("data: [DONE]\n\n");
            }
            // Never ends its chunked body.
            conversation.wait_for_close()
        });
        let router = sglang(&[prefill.address], &[decode.address]);
        let mut connection = client::Connection::open(router.address);
        let body = br#"{"model":"m","prompt":"x","stream":true}"#;
        connection.send(&client::request("POST", "/v1/completions", "", body));
        assert_eq!(connection.head().unwrap().0, 200);
        let mut seen = String::new();
        while !seen.contains(if terminated { "[DONE]" } else { "\"A\"" }) {
            seen += &String::from_utf8(connection.chunk().unwrap().unwrap()).unwrap();
        }
        drop(connection);
        wait_until("the decode leg is gone", || decode.closed().len() == 1);
        at_rest(&router);
        let rid = bodies(&decode)[0]["rid"].as_str().unwrap().to_owned();
        if terminated {
            // Nothing to wait for but time: an abort call would come within this.
            std::thread::sleep(Duration::from_millis(600));
            assert_eq!((aborts(&prefill), aborts(&decode)), (vec![], vec![]));
        } else {
            wait_for_aborts(&prefill, std::slice::from_ref(&rid));
            wait_for_aborts(&decode, &[rid]);
        }
    }
}

#[test]
fn b38_ids_are_fresh_and_never_the_clients() {
    let (prefill, decode) = (done(), decoding());
    let router = sglang(&[prefill.address], &[decode.address]);
    let evil = json!({"model": "m", "prompt": "x", "rid": "mine", "bootstrap_room": 7, "bootstrap_host": "h",
        "bootstrap_port": 1, "user": "u"})
    .to_string();
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let (address, evil) = (router.address, evil.clone());
            std::thread::spawn(move || {
                for _ in 0..50 {
                    let headers = "X-Request-Id: same\r\n";
                    assert_eq!(
                        client::exchange(address, "POST", "/v1/completions", headers, evil.as_bytes()).status,
                        200
                    );
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    let rooms: HashSet<u64> =
        wait_for_bodies(&prefill, 200).iter().map(|it| it["bootstrap_room"].as_u64().unwrap()).collect();
    assert_eq!(rooms.len(), 200);
    assert!(!rooms.contains(&7) && rooms.iter().all(|room| *room < 1 << 63));
    let decoded: HashSet<u64> = bodies(&decode).iter().map(|it| it["bootstrap_room"].as_u64().unwrap()).collect();
    assert_eq!(rooms, decoded);

    let body = json!({"model": "m", "prompt": ["a", "b"], "n": 2}).to_string();
    assert_eq!(router.post("/v1/completions", &body).status, 200);
    let (left, right) = (wait_for_bodies(&prefill, 201).pop().unwrap(), bodies(&decode).pop().unwrap());
    assert_eq!(left["bootstrap_room"], right["bootstrap_room"], "both legs agree on the order");
    let sequence: HashSet<u64> =
        left["bootstrap_room"].as_array().unwrap().iter().map(|room| room.as_u64().unwrap()).collect();
    assert_eq!(sequence.len(), 4, "one room per prompt and sample");
}

#[test]
fn the_prefill_load_is_released_with_decode_or_with_the_prefill_leg() {
    for (mode, expected_while_decoding) in [("decode", 1.0), ("completion", 0.0)] {
        let prefill = done();
        let decode = held();
        let records = pair_of("sglang-bootstrap", &[prefill.address], &[decode.address]);
        let router = start(&records, |start| start.args(&["--pd-prefill-guard-release", mode]));
        let mut connection = client::Connection::open(router.address);
        connection.send(&client::request("POST", "/v1/completions", "", br#"{"model":"m","prompt":"x"}"#));
        wait_until("both legs were sent", || bodies(&prefill).len() + bodies(&decode).len() == 2);
        let inflight = |worker: &Worker| {
            let target = format!("infera_router_inflight_requests{{target=\"{}\"}}", worker.address);
            router.metric(&target).unwrap_or_else(|| panic!("no {target}:\n{}", router.get("/metrics").text()))
        };
        wait_until("the prefill load is as the mode says", || inflight(&prefill) == expected_while_decoding);
        assert_eq!(inflight(&decode), 1.0, "{mode}");
        drop(connection);
        at_rest(&router);
    }
}

#[test]
fn the_drain_timeout_starts_when_decode_ends_and_then_aborts_the_pair() {
    let slow = Duration::from_millis(900);
    let prefill = held();
    let decode = leg(move |_, conversation| {
        conversation.sse_head();
        conversation.chunk("data: {\"t\":\"A\"}\n\n");
        // Longer than the drain timeout: were it counted from the dispatch, the prefill leg would be gone by now.
        std::thread::sleep(slow);
        conversation.chunk("data: [DONE]\n\n");
        conversation.last_chunk()
    });
    let records = pair_of("sglang-bootstrap", &[prefill.address], &[decode.address]);
    let router = start(&records, |start| start.args(&["--pd-prefill-drain-timeout-s", "0.5"]));
    let answer = ask(&router, true);
    assert!(answer.complete && answer.text().ends_with("data: [DONE]\n\n"));
    let ended = Instant::now();
    at_rest(&router);
    wait_until("the prefill leg is gone", || prefill.closed().len() == 1);
    assert!(prefill.closed()[0] + Duration::from_millis(100) > ended, "it was ended before decode was");
    let rid = bodies(&decode)[0]["rid"].as_str().unwrap().to_owned();
    wait_for_aborts(&prefill, std::slice::from_ref(&rid));
    wait_for_aborts(&decode, &[rid]);
}

#[test]
fn responses_are_whole_with_their_closing_event() {
    let prefill = done();
    let decode = leg(|seen, conversation| {
        conversation.sse_head();
        conversation.chunk("event: response.created\ndata: {}\n\n");
        if body_of(seen)["input"] == "cut" {
            return conversation.last_chunk();
        }
        conversation.chunk("event: response.comp");
        conversation.chunk("leted\ndata: {}\n\n");
        conversation.last_chunk()
    });
    let router = sglang(&[prefill.address], &[decode.address]);
    let answer = router.post("/v1/responses", r#"{"model":"m","input":"hi","stream":true}"#);
    assert!(answer.complete && answer.status == 200, "{}", answer.text());
    assert_eq!(bodies(&decode)[0]["request_id"], bodies(&decode)[0]["rid"]);
    assert!(!router.post("/v1/responses", r#"{"model":"m","input":"cut","stream":true}"#).complete);
    at_rest(&router);
}

/// Python engines read these as numbers, so a pair passes them on as a mixed worker gets them.
#[test]
fn numbers_that_only_python_reads_are_passed_on() {
    let (prefill, decode) = (leg(|_, c| c.json(200, "{}")), leg(|_, c| c.json(200, r#"{"from":"decode"}"#)));
    let router = sglang(&[prefill.address], &[decode.address]);
    let body = r#"{"model":"m","prompt":"x","temperature":NaN,"top_p":-Infinity,"logit_bias":{"1":Infinity}}"#;
    assert_eq!(router.post("/v1/completions", body).status, 200);
    wait_until("both legs arrived", || prefill.requests() + decode.requests() == 2);
    for worker in [&prefill, &decode] {
        let sent = String::from_utf8(worker.seen()[0].body.clone()).unwrap();
        assert!(sent.starts_with(&body[..body.len() - 1]), "{sent}");
    }
    at_rest(&router);
}
