//! Both legs at once over protocols without an abort call (vLLM's Mooncake and MoRIIO write mode): their engines notice
//! that a connection closed, and in between nobody owns the KV but the router.

use std::collections::HashSet;
use std::time::Instant;

use super::*;

const PROTOCOLS: [&str; 2] = ["vllm-mooncake", "vllm-mori-write"];

fn fleet(protocol: &str, prefill: &[SocketAddr], decode: &[SocketAddr]) -> Router {
    start(&pair_of(protocol, prefill, decode), |start| start)
}

fn transfer_id(body: &Value) -> String {
    body["kv_transfer_params"]["transfer_id"].as_str().unwrap_or_else(|| panic!("no transfer id: {body}")).to_owned()
}

/// The client leaves when the prefill engine has answered, and so holds KV for a decode request that never came whole.
#[test]
fn b40_kv_of_a_client_that_left_before_decode_had_its_request_is_freed() {
    for protocol in PROTOCOLS {
        let (prefill, decode) = (done(), decoding());
        let router = fleet(protocol, &[prefill.address], &[decode.address]);
        decode.be_deaf_once();
        // Larger than socket buffers grow.
        let body = json!({"model": "m", "prompt": "x".repeat(24 << 20)}).to_string();
        leave_when(&router, &body, || bodies(&prefill).len() == 1 && !decode.is_deaf());
        wait_until("a short decode request pulls the KV", || bodies(&decode).len() == 1);
        let (left, short) = (&bodies(&prefill)[0], &bodies(&decode)[0]);
        assert_eq!((&short["max_tokens"], &short["stream"]), (&json!(1), &json!(false)), "{protocol}");
        assert_eq!(transfer_id(short), transfer_id(left), "{protocol}");
        assert_eq!(short["kv_transfer_params"]["do_remote_prefill"], true, "{protocol}");
        wait_until("it is counted", || router.metric(r#"infera_router_pd_aborts_total{result="ok"}"#) == Some(1.0));
        at_rest(&router);
    }
}

/// From here on the decode engine has the request, and frees the KV when its connection closes.
#[test]
fn b40_a_client_that_leaves_while_decode_waits_closes_both_legs_and_sends_nothing_more() {
    for protocol in PROTOCOLS {
        for prefill in [done(), held()] {
            let decode = held();
            let router = fleet(protocol, &[prefill.address], &[decode.address]);
            let both = || bodies(&prefill).len() + bodies(&decode).len() == 2;
            leave_when(&router, r#"{"model":"m","prompt":"x"}"#, both);
            let left = Instant::now();
            wait_until("the decode leg is gone", || decode.closed().len() == 1);
            assert!(left.elapsed() < SOON, "{protocol}");
            at_rest(&router);
            assert_eq!((bodies(&prefill).len(), bodies(&decode).len()), (1, 1), "{protocol}");
        }
    }
}

#[test]
fn b36_a_prefill_refusal_ends_decode_and_a_failure_goes_to_another_pair_with_fresh_ids() {
    let refusal = r#"{"error":{"message":"prompt too long","code":400}}"#;
    for protocol in PROTOCOLS {
        let (prefill, decode) = (leg(move |_, conversation| conversation.json(400, refusal)), held());
        let router = fleet(protocol, &[prefill.address], &[decode.address]);
        let asked = Instant::now();
        let answer = ask(&router, true);
        assert_eq!((answer.status, answer.text().as_str()), (400, refusal), "{protocol}");
        assert!(asked.elapsed() < SOON, "{protocol}");
        wait_until("the decode leg is gone", || decode.closed().len() == bodies(&decode).len());
        at_rest(&router);

        let (failing, healthy) = (leg(|_, conversation| conversation.json(500, "{}")), done());
        let failed_port = failing.address.port();
        // The KV of a failed pair never comes: those decode requests wait until they are cancelled.
        let decode = leg(move |seen, conversation| match is_for(seen, failed_port) {
            true => conversation.wait_for_close(),
            false => answer_as_asked(seen, conversation),
        });
        let router = fleet(protocol, &[failing.address, healthy.address], &[decode.address]);
        for _ in 0..4 {
            assert_eq!(ask(&router, false).status, 200, "{protocol}");
        }
        let failed = bodies(&failing).len();
        assert!(failed >= 1, "{protocol}: the failing worker was never picked");
        let all = bodies(&decode);
        let ids: HashSet<String> = all.iter().map(transfer_id).collect();
        assert_eq!(ids.len(), all.len(), "{protocol}: a transfer id was used twice");
        wait_until("failed decode legs are gone", || decode.closed().len() == bodies(&decode).len() - 4);
        at_rest(&router);
    }
}

/// Whether a decode request waits for KV of the prefill worker on this port.
pub fn is_for(seen: &Seen, port: u16) -> bool {
    let body = body_of(seen);
    let by_address = body["kv_transfer_params"]["remote_bootstrap_addr"] == format!("127.0.0.1:{port}")
        || body["bootstrap_port"] == port;
    let mori = format!("___prefill_addr_host:127.0.0.1,handshake:{port},");
    by_address || seen.header("x-request-id").is_some_and(|id| id.starts_with(&mori))
}

#[test]
fn b38_transfer_ids_are_fresh_and_never_the_clients() {
    for protocol in PROTOCOLS {
        let (prefill, decode) = (done(), decoding());
        let router = fleet(protocol, &[prefill.address], &[decode.address]);
        let evil = json!({"model": "m", "prompt": "x", "rid": "mine", "user": "u",
            "kv_transfer_params": {"transfer_id": "mine", "remote_bootstrap_addr": "10.9.9.9:1"}})
        .to_string();
        for _ in 0..50 {
            let headers = "X-Request-Id: same\r\n";
            let answer = client::exchange(router.address, "POST", "/v1/completions", headers, evil.as_bytes());
            assert_eq!(answer.status, 200, "{protocol}");
        }
        let left: HashSet<String> = wait_for_bodies(&prefill, 50).iter().map(transfer_id).collect();
        let right: HashSet<String> = bodies(&decode).iter().map(transfer_id).collect();
        assert_eq!((left.len(), left == right, left.contains("mine")), (50, true, false), "{protocol}");
        assert!(bodies(&decode).iter().all(|body| !body.to_string().contains("10.9.9.9")), "{protocol}");
        at_rest(&router);
    }
}
