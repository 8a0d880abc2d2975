//! Golden bodies: every protocol, endpoint and stream mode, byte for byte.

use bytes::Bytes;
use serde_json::{Value, json};
use smallvec::smallvec;

use super::*;
use crate::worker::WorkerRecord;

fn peer(golden: &Value, role: &str, host: &str) -> Peer {
    let record = json!({"worker_id": format!("{host}:30000"), "url": format!("http://{host}:30000"), "disagg_mode": role,
        "dp_size": golden[format!("{role}_ranks")],
        "disagg_meta": {"protocol": golden["protocol"], "params": golden[format!("{role}_params")]}});
    let record: WorkerRecord = serde_json::from_value(record).expect("a record");
    Peer::of(&record).unwrap_or_else(|error| panic!("{error}: {golden}"))
}

fn text(leg: &Leg) -> String {
    String::from_utf8(leg.body.concat()).expect("UTF-8")
}

#[test]
fn golden_bodies_of_every_protocol() {
    let goldens = include_str!("../../../tests/fixtures/pd/golden.jsonl");
    let mut seen = std::collections::BTreeSet::new();
    for line in goldens.lines() {
        let golden: Value = serde_json::from_str(line).expect("a golden line");
        let (prefill, decode) = (peer(&golden, "prefill", "10.0.0.1"), peer(&golden, "decode", "10.0.0.2"));
        let rank = golden["prefill_rank"].as_u64().map(|rank| rank as u32);
        let pair = Pair { prefill: &prefill, decode: &decode, prefill_rank: rank };
        let endpoint = match golden["endpoint"].as_str() {
            Some("chat") => PdEndpoint::Chat,
            Some("completions") => PdEndpoint::Completions,
            _ => PdEndpoint::Responses,
        };
        let rooms: Vec<u64> = serde_json::from_value(golden["rooms"].clone()).expect("rooms");
        let ids = AttemptIds::of(rooms.into());
        let body = Bytes::from(golden["body"].as_str().expect("a body").to_owned());
        let members = Members::scan(&body).expect("an object");
        let answer = Bytes::from(json!({"id": "x", TRANSFER: golden["handoff"]}).to_string());
        let handoff = Handoff::of(pair.protocol(), &answer).expect("a handoff");
        let about = format!("{} {} {}", golden["name"], golden["protocol"], golden["endpoint"]);

        let leg = prefill_leg(&pair, endpoint, &members, &ids);
        assert_eq!(text(&leg), golden["prefill"], "prefill of {about}");
        assert_eq!(leg.request_id.as_deref(), golden["request_id"].as_str(), "{about}");
        let leg = decode_leg(&pair, endpoint, &members, &ids, handoff.as_ref());
        assert_eq!(text(&leg), golden["decode"], "decode of {about}");
        assert_eq!(leg.request_id.as_deref(), golden["request_id"].as_str(), "{about}");
        let is_stream = members.raw("stream") == Some(b"true");
        seen.insert((pair.protocol(), endpoint.path(), is_stream));
    }
    // Three endpoints for five protocols, one for ATOM, each streaming and not.
    assert_eq!(seen.len(), 32);
}

#[test]
fn a_prefill_without_kv_to_hand_over_leaves_decode_to_itself() {
    let golden = json!({"protocol": "vllm-nixl"});
    let (prefill, decode) = (peer(&golden, "prefill", "p"), peer(&golden, "decode", "d"));
    let pair = Pair { prefill: &prefill, decode: &decode, prefill_rank: None };
    let members =
        Members::scan(&Bytes::from_static(br#"{"model":"m","kv_transfer_params":{"x":1},"n":2}"#)).expect("fine");
    let leg = decode_leg(&pair, PdEndpoint::Chat, &members, &AttemptIds::of(smallvec![1]), None);
    assert_eq!(text(&leg), r#"{"model":"m","n":2}"#);
}

#[test]
fn rooms_follow_the_rank_that_was_picked_or_that_the_worker_is() {
    let golden = json!({"protocol": "vllm-nixl", "prefill_ranks": 4});
    let (mut prefill, decode) = (peer(&golden, "prefill", "p"), peer(&golden, "decode", "d"));
    let rank = |prefill: &Peer, picked| Pair { prefill, decode: &decode, prefill_rank: picked }.room_rank();
    assert_eq!(rank(&prefill, Some(3)), Some((3, 4)));
    assert_eq!(rank(&prefill, None), None);
    prefill.own_rank = Some(1);
    assert_eq!(rank(&prefill, None), Some((1, 4)));
    prefill.ranks = 1;
    assert_eq!(rank(&prefill, None), None);
}

/// The bytes of a long body are shared by both legs, so they are held once however often it is tried.
#[test]
fn legs_do_not_copy_a_long_body() {
    let golden = json!({"protocol": "vllm-nixl"});
    let (prefill, decode) = (peer(&golden, "prefill", "p"), peer(&golden, "decode", "d"));
    let pair = Pair { prefill: &prefill, decode: &decode, prefill_rank: None };
    let body = Bytes::from(format!(r#"{{"model":"m","stream":true,"prompt":"{}","n":2}}"#, "x".repeat(1 << 20)));
    let members = Members::scan(&body).expect("an object");
    let ids = AttemptIds::of(smallvec![1]);
    for leg in [
        prefill_leg(&pair, PdEndpoint::Completions, &members, &ids),
        decode_leg(&pair, PdEndpoint::Completions, &members, &ids, None),
    ] {
        let long = leg.body.iter().filter(|segment| segment.len() > 1000).collect::<Vec<_>>();
        assert!(long.iter().all(|segment| body.as_ptr_range().contains(&segment.as_ptr())));
        assert!(long.iter().map(|segment| segment.len()).sum::<usize>() > 1 << 20);
    }
}
