//! Splices against serde_json on random objects, and at every cut.

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use serde::de::{Deserializer as _, MapAccess, Visitor};
use serde_json::Value;

use super::*;

fn text(segments: &[Bytes]) -> String {
    String::from_utf8(segments.concat()).expect("edits keep UTF-8")
}

fn members(body: &str) -> Members {
    Members::scan(&Bytes::copy_from_slice(body.as_bytes())).unwrap_or_else(|error| panic!("{error}: {body}"))
}

fn check(body: &str, edit: impl Fn(&mut Edits), expected: &str) {
    let mut edits = Edits::default();
    edit(&mut edits);
    assert_eq!(text(&members(body).apply(&edits)), expected, "{body}");
}

#[test]
fn members_are_set_replaced_and_removed_where_they_stand() {
    check(r#"{"a":1,"b":2}"#, |_| {}, r#"{"a":1,"b":2}"#);
    check(r#"{"a":1,"b":2}"#, |edits| _ = edits.set("a", "9"), r#"{"a":9,"b":2}"#);
    check(r#"{"a":1,"b":2}"#, |edits| _ = edits.set("c", "[]").set("d", "null"), r#"{"a":1,"b":2,"c":[],"d":null}"#);
    check(r#"{"a":1}"#, |edits| _ = edits.replace("c", "1").replace("a", "2"), r#"{"a":2}"#);
    check(r#"{"a":1,"b":2,"c":3}"#, |edits| _ = edits.remove("a"), r#"{"b":2,"c":3}"#);
    check(r#"{"a":1,"b":2,"c":3}"#, |edits| _ = edits.remove("b"), r#"{"a":1,"c":3}"#);
    check(r#"{"a":1,"b":2,"c":3}"#, |edits| _ = edits.remove("c"), r#"{"a":1,"b":2}"#);
    check(r#"{"a":1,"b":2}"#, |edits| _ = edits.remove("a").remove("b"), "{}");
    check(r#"{"a":1,"b":2}"#, |edits| _ = edits.remove("a").remove("b").set("c", "3"), r#"{"c":3}"#);
    check("{}", |edits| _ = edits.set("a", "1").set("b", "2"), r#"{"a":1,"b":2}"#);
    check(" { } ", |edits| _ = edits.set("a", "1"), " {\"a\":1 } ");
}

#[test]
fn whitespace_number_spelling_and_nesting_survive() {
    let body = "\n{ \"top_p\" : 0.30000000000000004 ,\t\"stream_options\": {\"include_usage\": true, \"stream\": 1},\r\n \"seed\":1E-7 }\n";
    check(
        body,
        |edits| _ = edits.set("stream", "false").remove("stream_options"),
        "\n{ \"top_p\" : 0.30000000000000004,\r\n \"seed\":1E-7,\"stream\":false }\n",
    );
    check(
        body,
        |edits| _ = edits.remove("top_p"),
        "\n{\"stream_options\": {\"include_usage\": true, \"stream\": 1},\r\n \"seed\":1E-7 }\n",
    );
}

#[test]
fn duplicates_and_escaped_spellings_are_one_member() {
    check(r#"{"n":1,"x":0,"n":2,"\u006e":3}"#, |edits| _ = edits.set("n", "7"), r#"{"n":7,"x":0}"#);
    check(r#"{"\u006e":3,"n":1,"x":0}"#, |edits| _ = edits.remove("n"), r#"{"x":0}"#);
    check(r#"{"na":1,"":2}"#, |edits| _ = edits.remove("n"), r#"{"na":1,"":2}"#);
    assert_eq!(members(r#"{"n":1,"\u006e":2}"#).raw("n"), Some(&b"2"[..]));
    assert_eq!(members(r#"{"nn":1}"#).raw("n"), None);
}

#[test]
fn what_is_no_object_is_refused_with_a_reason() {
    for other in ["[]", "1", "\"{}\"", "null"] {
        assert_eq!(
            Members::scan(&Bytes::from_static(other.as_bytes())).unwrap_err(),
            SpliceError::NotAnObject,
            "{other}"
        );
    }
    let broken = [
        "",
        "{",
        "{\"a\"}",
        "{\"a\":}",
        "{\"a\":1,}",
        "{a:1}",
        "{\"a\":01}",
        "{\"a\":[1,,2]}",
        "{\"a\":tru}",
        "{}}",
        "{} x",
        "{\"a\":1 \"b\":2}",
        "{\"a\":\"\\x\"}",
        "{\"a\":\"\n\"}",
        "{'a':1}",
        "\u{feff}{}",
    ];
    for other in broken {
        let error = Members::scan(&Bytes::from_static(other.as_bytes())).unwrap_err();
        assert!(matches!(error, SpliceError::Invalid(_)), "{other}: {error}");
    }
    assert!(Members::scan(&Bytes::from_static(b"{\"a\":\"\xff\"}")).is_err());
}

#[test]
fn a_long_body_is_shared_and_not_copied() {
    let body = Bytes::from(format!("{{\"model\":\"m\",\"prompt\":\"{}\",\"n\":2}}", "x".repeat(1 << 20)));
    let mut edits = Edits::default();
    edits.set("model", "\"other\"").remove("n").set("stream", "false");
    let segments = Members::scan(&body).unwrap().apply(&edits);
    assert!(segments.len() <= 3, "{} segments", segments.len());
    let shared = body.as_ptr_range();
    let copied: usize = segments.iter().filter(|segment| !shared.contains(&segment.as_ptr())).map(Bytes::len).sum();
    assert!(copied < 100, "{copied} bytes were copied");
}

const KEYS: [&str; 8] = ["model", "n", "stream", "max_tokens", "stream_options", "prompt", "rid", "x"];

/// A random value as text, with odd but legal spellings.
fn random_value(random: &mut StdRng, depth: u32) -> String {
    let leaf =
        ["1", "-0", "1e3", "0.30000000000000004", "true", "null", "\"\"", "\"\\\"}],:{[\"", "\"é\\u00e9\"", "\"a,b\""];
    match random.random_range(0..if depth > 0 { 12 } else { 10 }) {
        at @ 0..10 => leaf[at].to_owned(),
        10 => {
            let items: Vec<String> = (0..random.random_range(0..4)).map(|_| random_value(random, depth - 1)).collect();
            format!("[{}]", items.join(" ,"))
        }
        _ => random_object(random, depth - 1),
    }
}

fn random_object(random: &mut StdRng, depth: u32) -> String {
    let space = |random: &mut StdRng| *["", "", " ", "\n\t", " \r\n "].choose(random).unwrap();
    let mut text = format!("{{{}", space(random));
    for at in 0..random.random_range(0..7) {
        if at > 0 {
            text += &format!("{},{}", space(random), space(random));
        }
        let key = *KEYS.choose(random).unwrap();
        let key = if random.random_range(0..5) == 0 {
            format!("\\u{:04x}{}", key.as_bytes()[0], &key[1..])
        } else {
            key.to_owned()
        };
        let (left, right) = (space(random), space(random));
        text += &format!("\"{key}\"{left}:{right}{}", random_value(random, depth));
    }
    text + space(random) + "}"
}

/// Every member in order, duplicates included.
fn pairs(text: &str) -> Vec<(String, Value)> {
    struct Pairs;
    impl<'de> Visitor<'de> for Pairs {
        type Value = Vec<(String, Value)>;
        fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            formatter.write_str("an object")
        }
        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut list = Vec::new();
            while let Some(pair) = map.next_entry()? {
                list.push(pair);
            }
            Ok(list)
        }
    }
    let mut document = serde_json::Deserializer::from_str(text);
    let list = document.deserialize_map(Pairs).unwrap_or_else(|error| panic!("{error}: {text}"));
    document.end().unwrap_or_else(|error| panic!("{error}: {text}"));
    list
}

/// What the edits mean, on parsed members: the last one of each member counts.
fn model(mut list: Vec<(String, Value)>, edits: &Edits<'_>) -> Vec<(String, Value)> {
    for (place, (key, change)) in edits.changes.iter().enumerate() {
        if edits.changes[place + 1..].iter().any(|(later, _)| later == key) {
            continue;
        }
        let at = list.iter().position(|(known, _)| known == key);
        let mut first = true;
        match change {
            Change::Remove => list.retain(|(known, _)| known != key),
            Change::Set(value) | Change::Replace(value) => {
                let value: Value = serde_json::from_str(value).unwrap();
                match at {
                    Some(at) => list[at].1 = value,
                    None if matches!(change, Change::Set(_)) => list.push(((*key).to_owned(), value)),
                    None => {}
                }
                list.retain(|(known, _)| known != key || std::mem::take(&mut first));
            }
        }
    }
    list
}

#[test]
fn random_objects_and_edits_agree_with_a_parsed_model() {
    let seed = rand::random();
    let mut random = StdRng::seed_from_u64(seed);
    for round in 0..3000 {
        let body = random_object(&mut random, 3);
        let mut edits = Edits::default();
        for _ in 0..random.random_range(0..6) {
            let key = *KEYS.choose(&mut random).unwrap();
            let value = random_value(&mut random, 2);
            match random.random_range(0..3) {
                0 => edits.set(key, value),
                1 => edits.replace(key, value),
                _ => edits.remove(key),
            };
        }
        let output = text(&members(&body).apply(&edits));
        let message = format!("seed {seed}, round {round}: {body} with {edits:?} gave {output}");
        assert_eq!(pairs(&output), model(pairs(&body), &edits), "{message}");
        // Unedited bytes are the client's own.
        for member in members(&body).outline.members() {
            if !edits.changes.iter().any(|(key, _)| members(&body).outline.name(member) == key.as_bytes()) {
                assert!(output.contains(&body[member.start..member.value.end]), "{message}");
            }
        }
    }
}

#[test]
fn every_cut_of_an_object_is_refused_and_every_scan_agrees_with_the_parser() {
    let seed = rand::random();
    let mut random = StdRng::seed_from_u64(seed);
    for round in 0..200 {
        let body = random_object(&mut random, 2);
        for cut in 0..body.len() {
            let piece = Bytes::copy_from_slice(&body.as_bytes()[..cut]);
            assert!(Members::scan(&piece).is_err(), "seed {seed}, round {round}: cut at {cut} of {body}");
            // One byte lost anywhere: refused exactly when a parser refuses it.
            let lost = Bytes::from([&body.as_bytes()[..cut], &body.as_bytes()[cut + 1..]].concat());
            let parses = serde_json::from_slice::<serde_json::Map<String, Value>>(&lost).is_ok();
            assert_eq!(
                Members::scan(&lost).is_ok(),
                parses,
                "seed {seed}, round {round}: without byte {cut} of {body}"
            );
        }
    }
}
