//! Prefill first, then decode with what the prefill answer says: vLLM's NixlConnector and the like.

use super::*;

pub const HANDOFF: &str =
    r#"{"do_remote_prefill":true,"remote_block_ids":[1,2],"remote_engine_id":"e","remote_host":"h","remote_port":1}"#;

fn nixl_prefill() -> Worker {
    worker(|_, conversation| conversation.json(200, &format!(r#"{{"id":"x","kv_transfer_params":{HANDOFF}}}"#)))
}

fn nixl(prefill: &[SocketAddr], decode: &[SocketAddr]) -> Router {
    start(&pair_of("vllm-nixl", prefill, decode), |start| start)
}

#[test]
fn the_prefill_answer_tells_decode_where_the_kv_is() {
    let (prefill, decode) = (nixl_prefill(), decoding());
    let router = nixl(&[prefill.address], &[decode.address]);
    let body = r#"{"model":"m","messages":[],"stream":true,"stream_options":{"include_usage":true},"max_tokens":9,"min_tokens":3,"n":2}"#;
    let answer = router.post("/v1/chat/completions", body);
    assert!(answer.complete && answer.text().ends_with("data: [DONE]\n\n"), "{}", answer.text());
    let (left, right) = (prefill.seen().pop().unwrap(), decode.seen().pop().unwrap());
    let asked = body_of(&left);
    assert_eq!((&asked["stream"], &asked["max_tokens"]), (&json!(false), &json!(1)));
    for gone in ["stream_options", "min_tokens", "n"] {
        assert!(asked.get(gone).is_none(), "{asked}");
    }
    assert_eq!(asked["kv_transfer_params"]["do_remote_decode"], true);
    // Decode keeps the client's own bytes; the handoff is passed on as it is spelled.
    let expected = format!("{},\"kv_transfer_params\":{HANDOFF}}}", &body[..body.len() - 1]);
    assert_eq!(String::from_utf8(right.body).unwrap(), expected);
    at_rest(&router);
}

#[test]
fn b36_a_failed_prefill_never_dispatches_decode() {
    let refusal = r#"{"error":{"message":"too long"}}"#;
    for (status, body, expected) in
        [(400, refusal, 400), (500, "{}", 502), (200, "not json", 502), (200, r#"{"kv_transfer_params":[]}"#, 502)]
    {
        let prefill = worker(move |_, conversation| conversation.json(status, body));
        let decode = decoding();
        let router = nixl(&[prefill.address], &[decode.address]);
        let answer = ask(&router, true);
        assert_eq!(answer.status, expected, "{status} {body}: {}", answer.text());
        match status {
            400 => assert_eq!(answer.text(), refusal),
            _ => assert!(answer.text().contains("prefill worker"), "{}", answer.text()),
        }
        assert_eq!(decode.requests(), 0);
        at_rest(&router);
    }
    let (healthy, decode, dead) = (nixl_prefill(), decoding(), refusing());
    let router = nixl(&[dead.address, healthy.address], &[decode.address]);
    for _ in 0..4 {
        assert_eq!(ask(&router, false).status, 200);
    }
}

#[test]
fn a_prefill_that_has_nothing_to_hand_over_leaves_decode_to_itself() {
    let prefill = worker(|_, conversation| conversation.json(200, r#"{"kv_transfer_params":null}"#));
    let decode = decoding();
    let router = nixl(&[prefill.address], &[decode.address]);
    assert_eq!(ask(&router, false).status, 200);
    assert!(bodies(&decode)[0].get("kv_transfer_params").is_none());
    assert_eq!(router.metric("infera_router_pd_prefills_without_handoff_total"), Some(1.0));
}

#[test]
fn kv_that_a_failed_decode_worker_did_not_take_is_freed_through_another() {
    let (prefill, decode, dead) = (nixl_prefill(), decoding(), refusing());
    let router = nixl(&[prefill.address], &[dead.address, decode.address]);
    for _ in 0..4 {
        assert_eq!(ask(&router, true).status, 200);
    }
    at_rest(&router);
    // Each request is one stream; each dead pick left KV that a short request freed.
    let prefills = bodies(&prefill).len();
    assert!(prefills > 4, "the dead worker was never picked");
    wait_until("the KV of every prefill was taken", || bodies(&decode).len() == prefills);
    let short = bodies(&decode).into_iter().filter(|body| body["stream"] == false && body["max_tokens"] == 1);
    assert_eq!(short.count(), prefills - 4);
    wait_until("they are counted", || {
        router.metric(r#"infera_router_pd_aborts_total{result="ok"}"#) == Some((prefills - 4) as f64)
    });
    assert_eq!(router.metric("infera_router_pd_stranded_transfers_total"), Some(0.0));
    // With nobody left it is reported.
    let alone = nixl(&[prefill.address], &[dead.address]);
    assert_eq!(ask(&alone, true).status, 502);
    assert_eq!(alone.metric("infera_router_pd_stranded_transfers_total"), Some(1.0));
}

/// Field report B40: cancelled long prompts must not keep a one-slot prefill worker busy.
#[test]
fn b40_a_client_that_leaves_during_prefill_frees_the_slot() {
    let slot = std::sync::Mutex::new(());
    let prefill = worker(move |seen, conversation| {
        let _slot = slot.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        match body_of(seen)["prompt"] == "long" {
            true => conversation.wait_for_close(),
            false => conversation.json(200, &format!(r#"{{"kv_transfer_params":{HANDOFF}}}"#)),
        }
    });
    let decode = decoding();
    let router = nixl(&[prefill.address], &[decode.address]);
    let long: Vec<_> = (0..10)
        .map(|_| {
            let mut connection = client::Connection::open(router.address);
            connection.send(&client::request("POST", "/v1/completions", "", br#"{"model":"m","prompt":"long"}"#));
            connection
        })
        .collect();
    wait_until("all long prompts are at the worker", || prefill.requests() == 10);
    drop(long);
    let asked = std::time::Instant::now();
    assert_eq!(router.post("/v1/completions", r#"{"model":"m","prompt":"short"}"#).status, 200);
    assert!(asked.elapsed() < Duration::from_secs(5), "{:?}", asked.elapsed());
    assert_eq!(bodies(&decode).len(), 1, "decode never hears of the others");
    at_rest(&router);
}

/// Between the legs: the prefill answer is on its way when the client leaves.
#[test]
fn b40_kv_of_a_client_that_left_between_the_legs_is_freed() {
    let prefill = worker(|_, conversation| {
        // The client has left, and the router has closed its sending side, before the answer is written.
        conversation.wait_for_end_of_requests();
        conversation.json(200, &format!(r#"{{"kv_transfer_params":{HANDOFF}}}"#));
        Then::Close
    });
    let decode = decoding();
    let router = nixl(&[prefill.address], &[decode.address]);
    leave_when(&router, r#"{"model":"m","prompt":"x"}"#, || prefill.requests() == 1);
    wait_until("a short decode request frees the KV", || bodies(&decode).len() == 1);
    let short = &bodies(&decode)[0];
    assert_eq!((&short["max_tokens"], &short["stream"]), (&json!(1), &json!(false)));
    assert_eq!(short["kv_transfer_params"]["remote_engine_id"], "e");
    at_rest(&router);
    assert_eq!(router.metric("infera_router_pd_stranded_transfers_total"), Some(0.0));
}

/// The short request that is to free the KV ends in some other way. Its status says who has the KV then.
#[test]
fn b40_kv_that_the_short_request_did_not_free_is_counted_once() {
    // A 5xx comes from an engine that has looked for the KV; a 4xx and a reset from one that may not have.
    for (ending, result, stranded) in
        [("200", "ok", 0.0), ("500", "failed", 0.0), ("400", "failed", 1.0), ("reset", "failed", 1.0)]
    {
        let prefill = worker(|_, conversation| {
            conversation.wait_for_end_of_requests();
            conversation.json(200, &format!(r#"{{"kv_transfer_params":{HANDOFF}}}"#));
            Then::Close
        });
        let decode = worker(move |_, conversation| match ending.parse() {
            Ok(status) => conversation.json(status, "{}"),
            Err(_) => conversation.reset(),
        });
        let router = nixl(&[prefill.address], &[decode.address]);
        leave_when(&router, r#"{"model":"m","prompt":"x"}"#, || prefill.requests() == 1);
        let counted = format!(r#"infera_router_pd_aborts_total{{result="{result}"}}"#);
        wait_until(&format!("the short request is counted ({ending})"), || router.metric(&counted) == Some(1.0));
        router.wait_for_rest();
        assert_eq!(router.metric("infera_router_pd_stranded_transfers_total"), Some(stranded), "{ending}");
        assert_eq!(router.metric_sum("infera_router_pd_aborts_total"), 1.0, "{ending}");
    }
}
