//! Who may be paired with whom, and workers that a gateway has chosen.

use super::*;
use crate::support::worker::json_worker;

#[test]
fn half_a_pair_names_the_missing_pool_and_mixed_workers_stand_in() {
    let (prefill, mixed) = (done(), json_worker(r#"{"from":"mixed"}"#));
    let half = [record(prefill.address, "prefill", "sglang-bootstrap", json!({}))];
    let answer = ask(&start(&half, |start| start), false);
    assert_eq!(answer.status, 503);
    let message = answer.json()["error"]["message"].to_string();
    assert!(message.contains("no decode worker") && answer.header("retry-after").is_some(), "{message}");
    let with_mixed = [half[0].clone(), record(mixed.address, "mixed", "", json!({"disagg_meta": null}))];
    assert_eq!(ask(&start(&with_mixed, |start| start), false).text(), r#"{"from":"mixed"}"#);
    assert_eq!(prefill.requests(), 0);
}

#[test]
fn protocols_that_do_not_match_are_refused_by_name() {
    let (prefill, decode) = (done(), decoding());
    let check = |left: &str, right: &str, path: &str, named: &[&str]| {
        let records =
            [record(prefill.address, "prefill", left, json!({})), record(decode.address, "decode", right, json!({}))];
        let answer = start(&records, |start| start).post(path, r#"{"model":"m","messages":[],"prompt":"x"}"#);
        assert_eq!(answer.status, 501, "{left} {right}: {}", answer.text());
        let message = answer.json()["error"]["message"].to_string();
        assert!(named.iter().all(|name| message.contains(name)), "{message}");
    };
    let chat = "/v1/chat/completions";
    check("sglang-bootstrap", "vllm-nixl", chat, &["sglang-bootstrap", "vllm-nixl"]);
    check("unheard-of", "vllm-nixl", chat, &["unheard-of", "vllm-nixl"]);
    check("atom-mooncake", "atom-mooncake", chat, &["atom-mooncake", chat]);
    assert_eq!(prefill.requests() + decode.requests(), 0);
}

#[test]
fn a_pool_of_several_protocols_pairs_within_each() {
    let (sglang, mooncake, decode) = (done(), done(), decoding());
    let other_decode = decoding();
    let records = [
        record(sglang.address, "prefill", "sglang-bootstrap", json!({})),
        record(mooncake.address, "prefill", "vllm-mooncake", json!({})),
        record(decode.address, "decode", "sglang-bootstrap", json!({})),
        record(other_decode.address, "decode", "vllm-mooncake", json!({})),
    ];
    let router = start(&records, |start| start);
    for _ in 0..8 {
        assert_eq!(ask(&router, false).status, 200);
    }
    let has = |worker: &Worker, member: &str| bodies(worker).iter().all(|body| body.get(member).is_some());
    for (prefill, decode, member) in
        [(&sglang, &decode, "bootstrap_room"), (&mooncake, &other_decode, "kv_transfer_params")]
    {
        wait_for_bodies(prefill, 4);
        wait_for_bodies(decode, 4);
        assert!(has(prefill, member) && has(decode, member));
    }
    // A list of prompts goes where each can have a name of its own.
    for _ in 0..4 {
        assert_eq!(router.post("/v1/completions", r#"{"model":"m","prompt":["a","b"]}"#).status, 200);
    }
    wait_for_bodies(&sglang, 8);
    wait_for_bodies(&mooncake, 4);
}

#[test]
fn a_gateway_names_both_workers_in_direct_mode() {
    let (prefill, other_prefill, decode, other_decode) = (done(), done(), decoding(), decoding());
    let records =
        pair_of("sglang-bootstrap", &[prefill.address, other_prefill.address], &[decode.address, other_decode.address]);
    let router = start(&records, |start| start.args(&["--router-mode", "direct", "--answer-names-worker"]));
    let ask = |headers: &str| {
        client::exchange(router.address, "POST", "/v1/completions", headers, br#"{"model":"m","prompt":"x"}"#)
    };
    let named = format!("x-worker-instance-id: {}\r\nx-prefill-instance-id: {}\r\n", decode.address, prefill.address);
    for _ in 0..4 {
        let answer = ask(&named);
        let told =
            ["x-worker-instance-id", "x-prefill-instance-id"].map(|name| answer.header(name).unwrap().to_owned());
        assert_eq!((answer.status, told), (200, [decode.address, prefill.address].map(|it| it.to_string())));
    }
    wait_for_bodies(&prefill, 4);
    assert_eq!(decode.requests(), 4);
    assert_eq!((other_prefill.requests(), other_decode.requests()), (0, 0));
    let seen = decode.seen().pop().unwrap();
    assert!(seen.header("x-worker-instance-id").is_none() && seen.header("x-prefill-instance-id").is_none());
    // Without the headers the policy picks.
    for _ in 0..4 {
        assert_eq!(ask("").status, 200);
    }
    wait_until("the others are picked", || other_prefill.requests() > 0 && other_decode.requests() > 0);
    for malformed in ["garbage", "a b:1", "host:port", "", "http://h:1"] {
        let answer = ask(&format!("x-worker-instance-id: {malformed}\r\n"));
        assert_eq!(answer.status, 400, "{malformed:?}: {}", answer.text());
    }
    let answer = ask("x-worker-instance-id: 10.9.9.9:1\r\n");
    assert_eq!((answer.status, answer.header("retry-after").is_some()), (503, true));
    // A decode worker is no prefill worker.
    assert_eq!(ask(&format!("x-prefill-instance-id: {}\r\n", decode.address)).status, 503);
    at_rest(&router);
}

#[test]
fn direct_mode_serves_mixed_workers_and_auto_mode_ignores_the_headers() {
    let (one, other) = (json_worker(r#"{"from":"one"}"#), json_worker(r#"{"from":"other"}"#));
    let records =
        [one.address, other.address].map(|address| record(address, "mixed", "", json!({"disagg_meta": null})));
    let headers = format!("x-worker-instance-id: {}\r\nx-prefill-instance-id: nonsense\r\n", one.address);
    let body = br#"{"model":"m","prompt":"x"}"#;
    let auto = start(&records, |start| start);
    for _ in 0..4 {
        assert_eq!(client::exchange(auto.address, "POST", "/v1/completions", &headers, body).status, 200);
    }
    assert_eq!((one.requests(), other.requests()), (2, 2));
    assert!(one.seen().iter().all(|seen| seen.header("x-worker-instance-id").is_none()));
    assert!(one.seen().iter().all(|seen| seen.header("x-prefill-instance-id").is_none()));
    let direct = start(&records, |start| start.args(&["--router-mode", "direct"]));
    let headers = format!("x-worker-instance-id: {}\r\n", one.address);
    for _ in 0..4 {
        let answer = client::exchange(direct.address, "POST", "/v1/completions", &headers, body);
        assert_eq!(answer.text(), r#"{"from":"one"}"#);
    }
}
