//! The answers a backend gives, as bytes prepared once, and the payload a client must then have received.
//!
//! Owns shapes and sizes. Never sends anything.

use std::sync::Arc;
use std::time::Duration;

/// Payload of one SSE event as engines send it, bytes.
pub const CHUNK_BYTES: usize = 167;

/// Events of one stream, `[DONE]` in the last.
pub const STREAM_CHUNKS: usize = 64;

/// Events in one write of a burst.
pub const BURST_CHUNKS: usize = 16;

/// Payload of a small JSON answer, bytes.
pub const JSON_BYTES: usize = 193;

/// One prepared answer.
pub struct Answer {
    /// Leaves at once: the whole answer, or head and first event of a stream.
    pub first: Vec<u8>,
    /// Leave in writes of their own: `interval` apart, or at once without one.
    pub later: Vec<Vec<u8>>,
    pub interval: Option<Duration>,
    /// Never ends by itself.
    pub endless: bool,
    /// The answer's payload without framing.
    pub payload: Arc<[u8]>,
}

impl Answer {
    /// A chat completion of `bytes` payload bytes (at least [`JSON_BYTES`]) with a Content-Length.
    pub fn json(bytes: usize) -> Answer {
        let (before, after) = (
            r#"{"id":"chatcmpl-0","object":"chat.completion","model":"m","choices":[{"index":0,"message":{"role":"assistant","content":""#,
            r#""},"finish_reason":"stop"}],"usage":{"total_tokens":9}}"#,
        );
        let payload = padded(before, after, bytes);
        let mut first = format!(
            "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\nServer: backend\r\n\r\n",
            payload.len()
        )
        .into_bytes();
        first.extend_from_slice(&payload);
        Answer { first, later: Vec::new(), interval: None, endless: false, payload: payload.into() }
    }

    /// [`STREAM_CHUNKS`] events of [`CHUNK_BYTES`], one every `interval`, or [`BURST_CHUNKS`] a write
    /// without a pause, as from an engine whose own relay has fallen behind.
    pub fn stream(interval: Option<Duration>) -> Answer {
        let events: Vec<Vec<u8>> = (1..=STREAM_CHUNKS).map(|number| event(number == STREAM_CHUNKS)).collect();
        let payload: Vec<u8> = events.concat();
        let mut frames: Vec<Vec<u8>> = events.iter().map(|event| chunk(event)).collect();
        if let Some(last) = frames.last_mut() {
            last.extend_from_slice(b"0\r\n\r\n");
        }
        frames[0].splice(0..0, STREAM_HEAD.iter().copied());
        if interval.is_none() {
            frames = frames.chunks(BURST_CHUNKS).map(<[Vec<u8>]>::concat).collect();
        }
        let first = frames.remove(0);
        let later = frames;
        Answer { first, later, interval, endless: false, payload: payload.into() }
    }

    /// Head and one event, then silence until the peer leaves.
    pub fn idle_stream() -> Answer {
        let event = event(false);
        let first = [STREAM_HEAD, &chunk(&event)].concat();
        Answer { first, later: Vec::new(), interval: None, endless: true, payload: event.into() }
    }

    /// What a router may ask before it sends requests: the model list, or an empty object for anything else.
    pub fn control(models: bool) -> &'static [u8] {
        if models {
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 69\r\n\r\n{\"object\":\"list\",\"data\":[{\"id\":\"m\",\"object\":\"model\",\"owned_by\":\"b\"}]}"
        } else {
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
        }
    }
}

const STREAM_HEAD: &[u8] =
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\nTransfer-Encoding: chunked\r\n\r\n";

/// One SSE event of exactly [`CHUNK_BYTES`].
fn event(last: bool) -> Vec<u8> {
    let before = r#"data: {"id":"chatcmpl-0","object":"chat.completion.chunk","model":"m","choices":[{"index":0,"delta":{"content":""#;
    let after = if last {
        "\"},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n"
    } else {
        "\"},\"finish_reason\":null}]}\n\n"
    };
    padded(before, after, CHUNK_BYTES)
}

fn padded(before: &str, after: &str, bytes: usize) -> Vec<u8> {
    let filler = bytes.saturating_sub(before.len() + after.len());
    let words = "the quick brown fox jumps over the lazy dog ";
    let filler = words.bytes().cycle().take(filler);
    before.bytes().chain(filler).chain(after.bytes()).collect()
}

fn chunk(payload: &[u8]) -> Vec<u8> {
    [format!("{:x}\r\n", payload.len()).as_bytes(), payload, b"\r\n"].concat()
}

/// A chat request for model `m` whose body has about `body_bytes` bytes.
pub fn request(host: &str, stream: bool, body_bytes: usize) -> Vec<u8> {
    let before = format!(r#"{{"model":"m","stream":{stream},"messages":[{{"role":"user","content":""#);
    let body = padded(&before, r#""}]}"#, body_bytes);
    let mut request = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nAccept: */*\r\nContent-Length: {}\r\n\r\n",
        body.len()
    )
    .into_bytes();
    request.extend_from_slice(&body);
    request
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::{BodyReader, response_head};

    fn check(answer: &Answer, expected_bytes: usize, ends: bool) {
        let bytes: Vec<u8> = [answer.first.clone(), answer.later.concat()].concat();
        let head = response_head(&bytes).unwrap().unwrap();
        let mut body = BodyReader::new(head.framing);
        let mut payload = Vec::new();
        let used = body
            .push(&bytes[head.bytes..], |data| {
                payload.extend_from_slice(data);
                Ok(())
            })
            .unwrap();
        assert_eq!((head.status, used, body.done()), (200, bytes.len() - head.bytes, ends));
        assert_eq!(payload.len(), expected_bytes);
        assert_eq!(payload[..], answer.payload[..]);
    }

    #[test]
    fn sizes_and_framing() {
        check(&Answer::json(JSON_BYTES), JSON_BYTES, true);
        check(&Answer::json(5000), 5000, true);
        check(&Answer::stream(None), STREAM_CHUNKS * CHUNK_BYTES, true);
        check(&Answer::stream(Some(Duration::from_millis(20))), STREAM_CHUNKS * CHUNK_BYTES, true);
        check(&Answer::idle_stream(), CHUNK_BYTES, false);
        let paced = Answer::stream(Some(Duration::from_millis(20)));
        assert_eq!(paced.later.len(), STREAM_CHUNKS - 1);
        assert!(paced.payload.ends_with(b"data: [DONE]\n\n"));
    }

    #[test]
    fn json_parses() {
        serde_json::from_slice::<serde_json::Value>(&Answer::json(JSON_BYTES).payload).unwrap();
        for control in [Answer::control(true), Answer::control(false)] {
            let head = response_head(control).unwrap().unwrap();
            assert_eq!(head.framing, crate::http::Framing::Length((control.len() - head.bytes) as u64));
            serde_json::from_slice::<serde_json::Value>(&control[head.bytes..]).unwrap();
        }
        let request = request("h", true, 300);
        let body = request.windows(4).position(|window| window == b"\r\n\r\n").unwrap() + 4;
        assert_eq!(request.len() - body, 300);
        serde_json::from_slice::<serde_json::Value>(&request[body..]).unwrap();
    }
}
