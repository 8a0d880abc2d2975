//! What clients and workers send: HTTP heads and chunked bodies (in the engine's own crate), event streams, and JSON bodies
//! on their way to the legs of a pair.

use std::hash::{DefaultHasher, Hash, Hasher};

use bytes::Bytes;
use infera_router::pd::{Completion, Edits, Members};
use infera_router::prompt::extract::RoutingFields;
use infera_router::prompt::outline::Outline;
use serde_json::Value;

pub use infera_shards::fuzz::{chunked_body, request_head, response_head};

fn digest(facts: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    facts.hash(&mut hasher);
    hasher.finish()
}

/// An event stream means the same whatever its cuts; the first byte says how large the pieces are.
pub fn event_stream(data: &[u8]) -> u64 {
    let Some((&size, stream)) = data.split_first() else { return 0 };
    let read = |size: usize| {
        let mut completion = Completion::default();
        stream.chunks(size.max(1)).for_each(|piece| completion.feed(piece));
        let failure = completion.failure().map(|failure| format!("{failure:?}"));
        assert_eq!(failure.is_some(), completion.has_failed());
        (completion.has_ended(), completion.has_failed(), completion.has_data(), failure)
    };
    let whole = read(stream.len());
    assert_eq!(whole, read(usize::from(size)), "the cuts changed what the stream says");
    digest(whole)
}

/// The value of a member, had by a parser that keeps the last of several.
fn parsed(body: &[u8]) -> Option<serde_json::Map<String, Value>> {
    match serde_json::from_slice(body) {
        Ok(Value::Object(members)) => Some(members),
        _ => None,
    }
}

/// Edits of a body: valid stays valid, the edited members are what they were set to, and all others what they were.
pub fn splice(data: &[u8]) -> u64 {
    let body = Bytes::copy_from_slice(data);
    if let Ok(outline) = Outline::read(&body) {
        // That it comes back at all is what is asked of it.
        let fields = RoutingFields::of(&outline);
        assert!(fields.samples.count() >= 1);
    }
    let before = parsed(data);
    let members = match Members::scan(&body) {
        Ok(members) => members,
        Err(error) => {
            // A parser that is stricter than ours elsewhere never takes what ours refuses.
            assert!(before.is_none() || error.to_string().contains("nest"), "refused: {error}");
            return digest(error.to_string());
        }
    };
    let mut edits = Edits::default();
    edits.set("max_tokens", "1").set("stream", "false").replace("n", "1").remove("stream_options").set("room", "[1,2]");
    let edited = members.apply(&edits).concat();
    let Some(before) = before else { return digest("taken by us alone") };
    let after = parsed(&edited).unwrap_or_else(|| panic!("no JSON any more: {:?}", String::from_utf8_lossy(&edited)));
    assert_eq!(
        (&after["max_tokens"], &after["stream"], &after["room"]),
        (&1.into(), &false.into(), &serde_json::json!([1, 2]))
    );
    assert_eq!(after.contains_key("n"), before.contains_key("n"));
    assert!(!after.contains_key("stream_options"));
    for (name, value) in &before {
        if !["max_tokens", "stream", "n", "stream_options", "room"].contains(&name.as_str()) {
            assert_eq!(after.get(name), Some(value), "{name:?} was not to change");
        }
    }
    for (name, value) in &after {
        assert!(
            before.contains_key(name) || ["max_tokens", "stream", "room"].contains(&name.as_str()),
            "{name} {value}"
        );
    }
    digest((before.len(), after.len(), members.raw("prompt").is_some(), members.raw("messages").is_some()))
}
