//! Wire cases of field reports on KV-event decoders, as data.

use super::*;

/// Owned form of an event, for comparing.
#[derive(Debug, PartialEq)]
enum Seen {
    Stored { hashes: Vec<u64>, parent: Option<u64>, tokens: Vec<u32>, block_size: usize, identities: Vec<u64> },
    Removed(Vec<u64>),
    Cleared,
}

fn decode(payload: &[u8]) -> (Vec<Seen>, Summary) {
    let mut seen = Vec::new();
    let summary = Decoder::default().decode(payload, |event| {
        seen.push(match event {
            Event::Stored(stored) => Seen::Stored {
                hashes: stored.hashes.iter().map(|hash| hash.0).collect(),
                parent: stored.parent.map(|hash| hash.0),
                tokens: stored.tokens.to_vec(),
                block_size: stored.block_size,
                identities: stored.identities.to_vec(),
            },
            Event::Removed { hashes, .. } => Seen::Removed(hashes.iter().map(|hash| hash.0).collect()),
            Event::Cleared => Seen::Cleared,
        });
    });
    (seen, summary)
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

/// Msgpack from JSON, with the widest integers, so that no width is favoured.
fn pack(value: &serde_json::Value, out: &mut Vec<u8>) {
    use serde_json::Value;
    match value {
        Value::Null => out.push(0xc0),
        Value::Bool(value) => out.push(0xc2 + u8::from(*value)),
        Value::Number(number) => {
            if let Some(value) = number.as_u64() {
                out.push(0xcf);
                out.extend(value.to_be_bytes());
            } else if let Some(value) = number.as_i64() {
                out.push(0xd3);
                out.extend(value.to_be_bytes());
            } else {
                out.push(0xcb);
                out.extend(number.as_f64().unwrap().to_be_bytes());
            }
        }
        Value::String(text) => {
            out.push(0xd9);
            out.push(text.len() as u8);
            out.extend(text.as_bytes());
        }
        Value::Array(items) => {
            out.push(0xdc);
            out.extend((items.len() as u16).to_be_bytes());
            items.iter().for_each(|item| pack(item, out));
        }
        Value::Object(members) => {
            out.push(0xde);
            out.extend((members.len() as u16).to_be_bytes());
            for (name, item) in members {
                pack(&Value::String(name.clone()), out);
                pack(item, out);
            }
        }
    }
}

fn packed(value: serde_json::Value) -> Vec<u8> {
    let mut out = Vec::new();
    pack(&value, &mut out);
    out
}

fn stored(hash: u64, identities: &[u64]) -> Seen {
    Seen::Stored {
        hashes: vec![hash],
        parent: None,
        tokens: vec![1, 2, 3, 4],
        block_size: 4,
        identities: identities.to_vec(),
    }
}

const UNSIGNED: &str = "93cb3ff80000000000009195ab426c6f636b53746f72656491cffc38b4aedaada613c094010203040400";
const BYTES: &str = "93cb3ff80000000000009197ab426c6f636b53746f72656491c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fc0940102030404c0a347505500";
const REMOVED: &str = "92cb3ff80000000000009193ac426c6f636b52656d6f76656491cffc38b4aedaada613a3475055";
const SIGNED: &str = "93cb3ff80000000000009195ab426c6f636b53746f72656491d3fc38b4aedaada613c094010203040400";

#[test]
fn b16_integers_signed_integers_and_bytes_name_blocks() {
    let name = 18174474959339759123;
    assert_eq!(decode(&unhex(UNSIGNED)).0, [stored(name, &[])]);
    assert_eq!(decode(&unhex(SIGNED)).0, [stored(name, &[])]);
    assert_eq!(decode(&unhex(REMOVED)).0, [Seen::Removed(vec![name])]);
    let bytes: Vec<u8> = (0..32).collect();
    assert_eq!(decode(&unhex(BYTES)).0, [stored(EngineHash::from_bytes(&bytes).0, &[])]);
    // An integer and the eight bytes of that integer are two names.
    assert_ne!(EngineHash::from_bytes(&name.to_be_bytes()), EngineHash(name));
}

#[test]
fn b16_maps_and_unknown_fields_decode_like_arrays() {
    let map = serde_json::json!([1.5, [{"block_hashes": [9], "future": {"a": [1, 2]}, "token_ids": [1, 2, 3, 4],
        "block_size": 4, "parent_block_hash": null, "type": "BlockStored", "kv_cache_spec_kind": "mla_attention"}], 0]);
    assert_eq!(decode(&packed(map)).0, [stored(9, &[])]);
    let array = serde_json::json!([1.5, [["BlockStored", [9], null, [1, 2, 3, 4], 4, null, "GPU", null, null, 0,
        "full_attention", null, "x", [1], {"y": 2}]]]);
    assert_eq!(decode(&packed(array)).0, [stored(9, &[])]);
    let bigrams = serde_json::json!([1.5, [["BlockStored", [9], null, [[1, 2], [2, 3], [3, 4], [4, 5]], 4, null]]]);
    assert_eq!(decode(&packed(bigrams)).0, [stored(9, &[])]);
}

#[test]
fn b16_every_cut_of_every_form_is_an_error_and_never_a_panic() {
    for text in [UNSIGNED, BYTES, REMOVED, SIGNED] {
        let payload = unhex(text);
        for cut in 0..payload.len() {
            let (seen, summary) = decode(&payload[..cut]);
            assert!(seen.len() <= 1, "{text} cut at {cut}");
            assert!(summary.error.is_some() || seen.len() == 1, "{text} cut at {cut}");
        }
    }
}

#[test]
fn b13_a_bad_event_is_skipped_by_reason_and_its_neighbours_are_applied() {
    use serde_json::json;
    let sixteen: Vec<u32> = (0..16).collect();
    let thirty_two: Vec<u32> = (0..32).collect();
    let cases = [
        (json!(["BlockStored", [1], null, (0..20).collect::<Vec<u32>>(), 16, null]), SkipReason::TokenCount),
        (json!(["BlockStored", [1, 2, 3], null, thirty_two, 16, null]), SkipReason::TokenCount),
        (json!(["BlockStored", [1, 2], null, [], 16, null]), SkipReason::TokenCount),
        (json!(["BlockStored", [1], null, sixteen, 0, null]), SkipReason::TokenCount),
        (json!(["BlockStored", [1], null, sixteen, -16, null]), SkipReason::TokenCount),
        (json!(["BlockStored", [1], null, sixteen, 768, null]), SkipReason::TokenCount),
        (json!(["BlockStored", [1], null, sixteen, u64::MAX, null]), SkipReason::TokenCount),
        (json!(["BlockStored", [1], 1, sixteen, 16, null]), SkipReason::HashTwice),
        (json!(["BlockStored", [1, 1], null, thirty_two, 16, null]), SkipReason::HashTwice),
        (json!(["BlockStored", [1], null, [-1], 1, null]), SkipReason::TokenRange),
        (json!(["BlockStored", [1], null, [1u64 << 33], 1, null]), SkipReason::TokenRange),
        (json!(["BlockStored", [1], null, ["x"], 1, null]), SkipReason::Malformed),
        (json!(["BlockStored", [], null, [], 16, null]), SkipReason::NoBlocks),
        (json!(["BlockStored", [null], null, [1], 1, null]), SkipReason::Malformed),
        (json!(["BlockStored", "h", null, [1], 1, null]), SkipReason::Malformed),
        (json!(["BlockStored", [1], [7], [1], 1, null]), SkipReason::Malformed),
        (json!(["BlockStored"]), SkipReason::MissingField),
        (json!(["BlockRemoved"]), SkipReason::MissingField),
        (json!(["TierBlocksCleared", "GPU"]), SkipReason::UnknownTag),
        (json!([7, [1]]), SkipReason::UnknownTag),
        (json!([]), SkipReason::UnknownTag),
        (json!({"block_hashes": [1]}), SkipReason::UnknownTag),
        (json!({"type": 7}), SkipReason::UnknownTag),
        (json!(null), SkipReason::Malformed),
        (json!("BlockStored"), SkipReason::Malformed),
        (json!(["BlockStored", [1, 2], null, [1, 2], 1, null, "GPU", null, [["a"]]]), SkipReason::ExtraKeys),
        (
            json!(["BlockStored", [1], null, [1], 1, null, "GPU", null, null, 1, "sliding_window"]),
            SkipReason::SparseGroup,
        ),
        (
            json!({"type": "BlockStored", "block_hashes": [1], "token_ids": [1], "block_size": 1,
            "kv_cache_spec_kind": "mamba"}),
            SkipReason::SparseGroup,
        ),
    ];
    let good = json!(["BlockStored", [9], null, [1, 2, 3, 4], 4, null]);
    for (bad, reason) in cases {
        let (seen, summary) = decode(&packed(json!([1.5, [["AllBlocksCleared"], bad, good]])));
        assert_eq!(seen, [Seen::Cleared, stored(9, &[])], "{bad}");
        assert_eq!((summary.skipped[reason as usize], summary.skipped_total()), (1, 1), "{bad}");
        assert_eq!((summary.applied, summary.error), (2, None), "{bad}");
    }
}

/// Events of every length on both ways of looking for repeats, names that differ in a few bits included.
#[test]
fn one_name_twice_is_found_wherever_it_lies_and_never_seen_where_it_is_not() {
    for seed in 0..300 {
        let mut random = fastrand::Rng::with_seed(seed);
        let length = 1 + seed as usize % 100;
        let spread = random.u32(0..56);
        let first = random.u64(..);
        let mut names: Vec<u64> = (0..=length as u64).map(|at| first.wrapping_add(at << spread)).collect();
        random.shuffle(&mut names);
        let (from, to) = (random.usize(0..=length), random.usize(0..=length));
        let is_twice = random.bool() && from != to;
        if is_twice {
            names[to] = names[from];
        }
        // One of them is the parent.
        let event = serde_json::json!(["BlockStored", names[1..], names[0], vec![7; length], 1, null]);
        let (seen, summary) = decode(&packed(serde_json::json!([1.5, [event]])));
        assert_eq!(
            (seen.len(), summary.skipped[SkipReason::HashTwice as usize] == 1),
            (usize::from(!is_twice), is_twice),
            "seed {seed}"
        );
    }
}

#[test]
fn what_is_not_a_batch_is_an_error() {
    use serde_json::json;
    for value in [json!([1.5, null]), json!([1.5]), json!([]), json!({"ts": 1}), json!(7), json!([1.5, {"a": 1}])] {
        assert_eq!(decode(&packed(value.clone())).1.error, Some(BatchError::NotABatch), "{value}");
    }
    assert_eq!(decode(&[]).1.error, Some(BatchError::Truncated));
    // Four billion events claimed, one there: the one is applied, and nothing is allocated for the rest.
    let mut lying = vec![0x92, 0xc0, 0xdd, 0xff, 0xff, 0xff, 0xff];
    lying.extend(packed(json!(["AllBlocksCleared"])));
    let (seen, summary) = decode(&lying);
    assert_eq!((seen, summary.error), (vec![Seen::Cleared], Some(BatchError::Truncated)));
}

#[test]
fn b12_order_within_a_batch_is_kept() {
    let good = serde_json::json!(["BlockStored", [9], null, [1, 2, 3, 4], 4, null]);
    let clear = serde_json::json!(["AllBlocksCleared"]);
    assert_eq!(decode(&packed(serde_json::json!([1, [clear, good]]))).0, [Seen::Cleared, stored(9, &[])]);
    assert_eq!(decode(&packed(serde_json::json!([1, [good, clear]]))).0, [stored(9, &[]), Seen::Cleared]);
}

#[test]
fn b19_adapter_salt_and_image_identities_are_told_apart() {
    use serde_json::json;
    let identity = |lora_id: serde_json::Value, lora_name: serde_json::Value, extra_keys: serde_json::Value| {
        let event = json!(["BlockStored", [1, 2], null, [7, 8], 1, lora_id, "GPU", lora_name, extra_keys]);
        match decode(&packed(json!([1, [event]]))).0.pop() {
            Some(Seen::Stored { identities, .. }) => identities,
            other => panic!("{other:?}"),
        }
    };
    let adapter = identity(json!(117), json!("ad-1"), json!([["ad-1"], ["ad-1"]]));
    assert!(adapter[0] != 0 && adapter[0] == adapter[1]);
    assert_eq!(adapter, identity(json!(117), json!("ad-1"), json!(null)), "the name counts once");
    assert_eq!(adapter, identity(json!(null), json!(null), json!([["ad-1"], ["ad-1"]])), "named by keys alone");
    assert_ne!(adapter, identity(json!(117), json!("ad-2"), json!(null)));
    let salted = identity(json!(117), json!("ad-1"), json!([["ad-1", "salt-x"], ["ad-1"]]));
    assert!(salted[0] != adapter[0] && salted[1] == adapter[1]);
    let image = |key| identity(json!(null), json!(null), json!([[key], null]));
    assert_ne!(image(json!("uuid-A"))[0], image(json!("uuid-B"))[0]);
    assert_ne!(image(json!(["uuid-A", 0]))[0], image(json!("uuid-A"))[0]);
    assert_eq!(image(json!("uuid-A"))[1], 0);
    assert!(identity(json!(null), json!(null), json!([null, []])).is_empty());
    assert!(identity(json!(null), json!(null), json!([])).is_empty());
    assert_ne!(identity(json!(null), json!(null), json!("odd"))[0], 0, "an odd spelling is never plain");
}

#[test]
fn the_batch_may_name_its_rank() {
    assert_eq!(rank(&packed(serde_json::json!([1, [["AllBlocksCleared"]], 3]))), Ok(Some(3)));
    assert_eq!(rank(&packed(serde_json::json!([1, [["AllBlocksCleared"]], null]))), Ok(None));
    assert_eq!(rank(&packed(serde_json::json!([1, []]))), Ok(None));
    assert_eq!(rank(&[0x93, 0xc0]), Err(BatchError::Truncated));
}
