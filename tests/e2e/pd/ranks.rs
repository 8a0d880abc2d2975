//! Data-parallel ranks: one target per rank, rooms that agree with them, and pins that stay with their leg.

use super::*;

fn ranked(prefill_ranks: u32, decode_ranks: u32) -> (Worker, Worker, Router) {
    let (prefill, decode) = (done(), decoding());
    let ranks = |ranks: u32| if ranks > 1 { json!({"dp_size": ranks}) } else { json!({}) };
    let records = [
        record(prefill.address, "prefill", "sglang-bootstrap", ranks(prefill_ranks)),
        record(decode.address, "decode", "sglang-bootstrap", ranks(decode_ranks)),
    ];
    let router = start(&records, |start| start);
    (prefill, decode, router)
}

#[test]
fn b41_the_room_says_the_rank_that_was_picked() {
    for ranks in [2, 4] {
        let (prefill, decode, router) = ranked(ranks, 1);
        for _ in 0..40 {
            assert_eq!(ask(&router, false).status, 200);
        }
        wait_for_bodies(&prefill, 40);
        let mut seen_ranks = vec![false; ranks as usize];
        for seen in prefill.seen() {
            let rank: u64 = seen.header("x-data-parallel-rank").unwrap().parse().unwrap();
            assert_eq!(body_of(&seen)["bootstrap_room"].as_u64().unwrap() % u64::from(ranks), rank);
            seen_ranks[rank as usize] = true;
        }
        assert!(seen_ranks.iter().all(|seen| *seen), "every rank is a target: {seen_ranks:?}");
        for seen in decode.seen() {
            assert_eq!(seen.header("x-data-parallel-rank"), None, "decode has one rank");
            let body = body_of(&seen);
            let named = body["disagg_prefill_dp_rank"].as_u64().unwrap();
            assert_eq!(body["bootstrap_room"].as_u64().unwrap() % u64::from(ranks), named);
        }
    }
}

#[test]
fn b41_pins_stay_with_their_leg_and_are_checked() {
    let (prefill, decode, router) = ranked(2, 4);
    let ask = |more: Value, headers: &str| {
        let mut body = json!({"model": "m", "prompt": "x"});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        client::exchange(router.address, "POST", "/v1/completions", headers, body.to_string().as_bytes())
    };
    let cases = [(json!({"dp_rank": 3}), ""), (json!({}), "X-Data-Parallel-Rank: 3\r\n")];
    for (at, (more, headers)) in cases.into_iter().enumerate() {
        assert_eq!(ask(more, headers).status, 200);
        wait_for_bodies(&prefill, at + 1);
        let (left, right) = (prefill.seen().pop().unwrap(), decode.seen().pop().unwrap());
        assert_eq!(right.header("x-data-parallel-rank"), Some("3"));
        assert_ne!(left.header("x-data-parallel-rank"), Some("3"));
        assert_eq!(body_of(&left)["dp_rank"], Value::Null, "decode's pin does not reach prefill");
    }
    assert_eq!(ask(json!({"disagg_prefill_dp_rank": 1}), "").status, 200);
    wait_for_bodies(&prefill, 3);
    assert_eq!(prefill.seen().pop().unwrap().header("x-data-parallel-rank"), Some("1"));
    let before = prefill.requests() + decode.requests();
    for (more, headers) in [
        (json!({"dp_rank": 4}), ""),
        (json!({"disagg_prefill_dp_rank": 2}), ""),
        (json!({"dp_rank": "x"}), ""),
        (json!({}), "X-Data-Parallel-Rank: 9\r\n"),
    ] {
        let answer = ask(more.clone(), headers);
        assert_eq!(
            (answer.status, answer.json()["error"]["code"].as_str()),
            (400, Some("bad_request")),
            "{more} {headers}"
        );
    }
    assert_eq!(prefill.requests() + decode.requests(), before, "nothing was sent");
    at_rest(&router);
}
