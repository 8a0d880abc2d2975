//! Bodies and what routing makes of them.

use super::*;
use crate::prompt::outline::Outline;

/// As requests are read: with the outline, in one pass; nothing for what is no JSON.
fn facts(body: &str) -> BodyFacts {
    let mut scan = FactsScan::default();
    let body = bytes::Bytes::copy_from_slice(body.as_bytes());
    match Outline::read_with(&body, |reader, key| scan.member(reader, key)) {
        Ok(_) => scan.facts(),
        Err(_) => BodyFacts::default(),
    }
}

fn check_images(body: &str, is_multimodal: bool, references: &[&str]) {
    let expected: Vec<_> = references.iter().filter_map(|reference| ImageKey::of_reference(reference)).collect();
    let facts = facts(body);
    assert_eq!((facts.is_multimodal, facts.images), (is_multimodal, expected), "{body}");
}

/// What decides whether a short body is rendered on the shard: many small entries take long, wherever they stand.
#[test]
fn entries_are_counted_in_every_form_of_a_conversation() {
    let part = r#"{"type":"text","text":"t"}"#;
    let parts = |count: usize| format!("[{}]", vec![part; count].join(","));
    for (body, expected) in [
        (r#"{"messages":[{"content":"a"},{"content":null},7]}"#.to_owned(), 2),
        (format!(r#"{{"messages":[{{"content":{0}}},{{"content":{0}}}]}}"#, parts(1)), 2),
        (format!(r#"{{"messages":[{{"content":{}}}]}}"#, parts(600)), 600),
        (format!(r#"{{"input":{}}}"#, parts(600)), 600),
        (r#"{"input":"text","tools":[{},{}]}"#.to_owned(), 0),
    ] {
        assert_eq!(facts(&body).messages, expected, "{body}");
    }
}

#[test]
fn openai_parts() {
    check_images(
        r#"{"messages":[{"role":"user","content":[{"type":"text","text":"what is this?"},
           {"type":"image_url","image_url":{"url":"https://h/cat.png","detail":"low"}}]}]}"#,
        true,
        &["https://h/cat.png"],
    );
    check_images(r#"{"messages":[{"content":[{"image_url":"u","type":"image_url"}]}]}"#, true, &["u"]);
    check_images(r#"{"messages":[{"content":[{"image_url":" u "}]}]}"#, true, &["u"]);
    check_images(
        r#"{"messages":[{"content":[{"type":"input_audio","input_audio":{"data":"UklGR","format":"wav"}}]}]}"#,
        true,
        &["UklGR"],
    );
    check_images(
        r#"{"messages":[{"content":[{"type":"file","file":{"file_id":"f-1","filename":"a.pdf"}},
           {"type":"file","file":{"filename":"a.pdf","file_data":"data:application/pdf;base64,AA"}},
           {"type":"video_url","video_url":{"url":"v"}}]}]}"#,
        true,
        &["f-1", "data:application/pdf;base64,AA", "v"],
    );
    check_images(
        r#"{"input":[{"role":"user","content":[{"type":"input_image","image_url":"i"}]},{"type":"input_image","image_url":"j"}]}"#,
        true,
        &["i", "j"],
    );
}

#[test]
fn anthropic_blocks_and_nested_results() {
    check_images(
        r#"{"messages":[{"content":[{"type":"image","source":{"type":"base64","media_type":"image/png","data":"iVBOR"}}]}],
            "system":[{"type":"text","text":"s"},{"type":"image","source":{"type":"url","url":"https://h/s.png"}}]}"#,
        true,
        &["iVBOR", "https://h/s.png"],
    );
    check_images(
        r#"{"messages":[{"content":[{"type":"tool_result","tool_use_id":"t","content":[
            {"type":"image","source":{"type":"base64","data":"AAAA"}}]}]}]}"#,
        true,
        &["AAAA"],
    );
    check_images(r#"{"messages":[{"content":[{"type":"document","source":{"type":"url","url":"d"}}]}]}"#, true, &["d"]);
}

#[test]
fn top_level_lists_and_the_order_of_sources() {
    check_images(
        r#"{"images":["c",{"url":"d"},{"type":"image_url","image_url":{"url":"e"}}],
            "messages":[{"content":[{"type":"image_url","image_url":{"url":"a"}},{"type":"image_url","image_url":{"url":"a"}}]}]}"#,
        true,
        &["a", "a", "c", "d", "e"],
    );
    check_images(r#"{"images":[]}"#, false, &[]);
    check_images(r#"{"images":[7]}"#, true, &[]);
    check_images(r#"{"audio":{"voice":"v"}}"#, true, &[]);
    check_images(r#"{"audio":[]}"#, false, &[]);
}

#[test]
fn what_is_no_image_is_none() {
    for body in [
        "{}",
        "[]",
        "not json",
        r#"{"messages":"image_url"}"#,
        r#"{"messages":[{"content":"data:image/png;base64,AAAA"}]}"#,
        r#"{"messages":[{"content":[{"type":"text","text":"image","url":"u"}]}]}"#,
        r#"{"messages":[{"content":[{"type":"image_file","url":"u"}]}]}"#,
        r#"{"messages":[{"tool_calls":[{"type":"image","image_url":"u"}]}]}"#,
        r#"{"tools":[{"type":"function","function":{"parameters":{"image_url":{"type":"string"}}}}]}"#,
        r#"{"messages":[{"content":[{"image_url":null}]}]}"#,
        r#"{"messages":[{"content":[{"type":"image","source":{"data":"A"}}]}],"messages":[]}"#,
        r#"{"messages":[{"content":[{"type":"image","source":{"data":"A"}}]}],"#,
    ] {
        check_images(body, false, &[]);
    }
    // A reference that is blank: multimodal, but nothing to be near to.
    check_images(r#"{"messages":[{"content":[{"type":"image_url","image_url":{"url":"  "}}]}]}"#, true, &[]);
}

#[test]
fn escaped_references_name_the_same_image() {
    let plain =
        r#"{"messages":[{"content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,a/b+c"}}]}]}"#;
    let escaped =
        r#"{"messages":[{"content":[{"type":"image_url","image_url":{"url":"data:image\/png;base64,a\/b\u002bc"}}]}]}"#;
    assert_eq!(facts(plain), facts(escaped));
}

#[test]
fn a_request_of_thousands_of_images_keeps_a_bounded_list() {
    let parts: Vec<String> =
        (0..5_000).map(|i| format!(r#"{{"type":"image_url","image_url":{{"url":"u{i}"}}}}"#)).collect();
    let facts = facts(&format!(r#"{{"messages":[{{"content":[{}]}}]}}"#, parts.join(",")));
    assert_eq!(facts.images.len(), IMAGES_PER_REQUEST_MAX);
    assert_eq!(facts.images[0], ImageKey::of_reference("u0").unwrap());
}

fn check_retention(body: &str, expected: Retention) {
    assert_eq!(facts(body).retention, expected, "{body}");
}

#[test]
fn openai_hints() {
    check_retention(r#"{"prompt_cache_retention":"24h"}"#, Retention::Long);
    check_retention(r#"{"prompt_cache_retention":"none","prompt_cache_key":"k"}"#, Retention::None);
    check_retention(r#"{"prompt_cache_key":"k"}"#, Retention::Short);
    check_retention(r#"{"prompt_cache_key":null}"#, Retention::Unsaid);
    check_retention(r#"{"prompt_cache_retention":"in_memory","prompt_cache_key":"k"}"#, Retention::Unsaid);
    check_retention(r#"{"prompt_cache_retention":24,"prompt_cache_key":"k"}"#, Retention::Short);
    check_retention(r#"{"metadata":{"prompt_cache_key":"k"}}"#, Retention::Unsaid);
}

#[test]
fn anthropic_hints() {
    let marked = |place: &str, mark: &str| match place {
        "system" => format!(r#"{{"system":[{{"type":"text","text":"s","cache_control":{mark}}}]}}"#),
        "tools" => format!(r#"{{"tools":[{{"name":"t","input_schema":{{}},"cache_control":{mark}}}]}}"#),
        _ => format!(
            r#"{{"messages":[{{"role":"user","content":[{{"type":"text","text":"m","cache_control":{mark}}}]}}]}}"#
        ),
    };
    for place in ["system", "tools", "messages"] {
        check_retention(&marked(place, r#"{"type":"ephemeral"}"#), Retention::Short);
        check_retention(&marked(place, r#"{"ttl":"1h","type":"ephemeral"}"#), Retention::Long);
        check_retention(&marked(place, r#"{"type":"ephemeral","ttl":"soon"}"#), Retention::Unsaid);
        check_retention(&marked(place, r#"{"type":"ephemeral","ttl":3600}"#), Retention::Unsaid);
        check_retention(&marked(place, r#"{"type":"other"}"#), Retention::Unsaid);
        check_retention(&marked(place, "null"), Retention::Unsaid);
        check_retention(&marked(place, "[]"), Retention::Unsaid);
    }
    check_retention(
        r#"{"messages":[{"content":[{"cache_control":{"type":"ephemeral","ttl":"1h"},"type":"thinking","thinking":"t"}]}]}"#,
        Retention::Unsaid,
    );
    check_retention(
        r#"{"system":[{"type":"text","cache_control":{"type":"ephemeral"}}],
            "messages":[{"content":[{"type":"text","cache_control":{"type":"ephemeral","ttl":"1h"}}]}]}"#,
        Retention::Long,
    );
}

/// A body cut anywhere has no facts, and never a panic.
#[test]
fn every_cut_of_a_body_is_without_facts() {
    let body = r#"{"prompt_cache_key":"k","messages":[{"content":[{"type":"image_url","image_url":{"url":"a\u00e9"}}]}],"images":["x"]}"#;
    assert!(facts(body).is_multimodal);
    for cut in 0..body.len() {
        assert_eq!(facts(&body[..cut]), BodyFacts::default(), "{cut}");
    }
}
