//! Knows whether a stream reached its end as its engine sees it: `data: [DONE]`, or for Responses one of the
//! closing events, and for Messages its last one. Fed payload in any pieces; looks at the start of lines only, so generated text that talks
//! about terminators is not one. Keeps a few bytes, never the stream.

use crate::limits;

/// Bytes of a line that decide what it is; what comes behind is skipped.
const LINE_START_BYTES: usize = 40;

/// May stand before a stream's first line, and is not part of it (WHATWG HTML, server-sent events).
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

const EVENT: &[u8] = b"event:";
const DATA: &[u8] = b"data:";

/// Events after which nothing more is to come. Engines close a response with `completed`; the next two are how one
/// ends that ran into its token limit or failed, and are ends all the same. A message ends with `message_stop`.
const CLOSING_EVENTS: [&[u8]; 4] = [b"response.completed", b"response.incomplete", b"response.failed", b"message_stop"];

/// Whose mistake an error inside a stream was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamFailure {
    /// The engine says that the request was wrong.
    Client,
    Worker,
}

/// Watches one SSE stream.
#[derive(Clone, Debug)]
pub struct Completion {
    line: [u8; LINE_START_BYTES],
    filled: usize,
    is_first_line: bool,
    /// The line is longer than what decides.
    skipping: bool,
    has_ended: bool,
    has_failed: bool,
    has_data: bool,
    /// The last event was named as an error; its data line says which.
    is_error_named: bool,
    /// The data line of the first error event, as far as it is read.
    error: Option<Box<ErrorLine>>,
}

#[derive(Clone, Debug, Default)]
struct ErrorLine {
    bytes: Vec<u8>,
    is_whole: bool,
}

impl Default for Completion {
    fn default() -> Self {
        Self {
            line: [0; LINE_START_BYTES],
            filled: 0,
            is_first_line: true,
            skipping: false,
            has_ended: false,
            has_failed: false,
            has_data: false,
            is_error_named: false,
            error: None,
        }
    }
}

impl Completion {
    /// The next piece of the payload.
    pub fn feed(&mut self, mut payload: &[u8]) {
        while !payload.is_empty() {
            let end = memchr::memchr2(b'\n', b'\r', payload);
            let piece = &payload[..end.unwrap_or(payload.len())];
            self.collect(piece);
            let Some(end) = end else { return };
            self.line_end();
            payload = &payload[end + 1..];
        }
    }

    fn collect(&mut self, piece: &[u8]) {
        let room = LINE_START_BYTES - self.filled;
        let taken = piece.len().min(room);
        self.line[self.filled..self.filled + taken].copy_from_slice(&piece[..taken]);
        self.filled += taken;
        self.skipping |= piece.len() > room;
        if let Some(error) = &mut self.error {
            error.feed(piece);
            return;
        }
        // An error object is known from its first bytes; the rest of the line may be long.
        let line = self.line();
        if taken > 0 && (is_error_data(line) || self.is_error_named && field(line, DATA).is_some()) {
            let mut error = Box::new(ErrorLine::default());
            error.feed(line);
            error.feed(&piece[taken..]);
            self.error = Some(error);
            self.has_failed = true;
        }
    }

    fn line_end(&mut self) {
        if let Some(error) = &mut self.error {
            error.is_whole = true;
        }
        let line = self.line();
        let is_error = matches!(field(line, EVENT), Some(b"error" | b"response.failed"));
        let (is_data, is_end) = (line.starts_with(DATA), is_terminator(line));
        self.has_data |= is_data;
        if !self.skipping {
            self.has_ended |= is_end;
            self.is_error_named |= is_error;
            self.has_failed |= self.is_error_named;
        }
        self.filled = 0;
        self.is_first_line = false;
        self.skipping = false;
    }

    /// What is kept of the line at hand.
    fn line(&self) -> &[u8] {
        let line = &self.line[..self.filled];
        if self.is_first_line { line.strip_prefix(BYTE_ORDER_MARK).unwrap_or(line) } else { line }
    }

    /// The engine said that it is done. A last line without its line end counts, as an engine may close there.
    pub fn has_ended(&self) -> bool {
        self.has_ended || (!self.skipping && is_terminator(self.line()))
    }

    /// An error object came as an event, or the response was reported as failed.
    pub fn has_failed(&self) -> bool {
        self.has_failed
    }

    /// The data line of an error event has come to its end.
    pub fn has_told_its_failure(&self) -> bool {
        self.error.as_ref().is_some_and(|error| error.is_whole)
    }

    /// Whose mistake the first error event was, if one came. One that does not tell is the worker's.
    pub fn failure(&self) -> Option<StreamFailure> {
        if !self.has_failed {
            return None;
        }
        let is_the_clients = self.error.as_ref().is_some_and(|error| error.is_the_clients());
        Some(if is_the_clients { StreamFailure::Client } else { StreamFailure::Worker })
    }

    /// At least one data line came: a stream of comments alone says nothing.
    pub fn has_data(&self) -> bool {
        self.has_data || self.line().starts_with(DATA)
    }
}

impl ErrorLine {
    fn feed(&mut self, piece: &[u8]) {
        if !self.is_whole {
            let room = limits::STREAM_ERROR_BYTES_MAX.saturating_sub(self.bytes.len());
            self.bytes.extend_from_slice(&piece[..piece.len().min(room)]);
        }
    }

    /// A status of 4xx, as a number or a string, or the type that OpenAI-style engines give to a bad request.
    fn is_the_clients(&self) -> bool {
        let value = field(&self.bytes, DATA).and_then(|value| serde_json::from_slice::<serde_json::Value>(value).ok());
        let Some(value) = value else { return false };
        let error = value.get("error").or_else(|| value.pointer("/response/error")).unwrap_or(&value);
        let code = error.get("code").and_then(|code| code.as_u64().or_else(|| code.as_str()?.parse().ok()));
        let kind = error.get("type").and_then(|kind| kind.as_str()).unwrap_or_default();
        code.is_some_and(|code| (400..500).contains(&code))
            || matches!(kind, "invalid_request_error" | "BadRequestError" | "BadRequest")
    }
}

/// Field value: one space behind the colon belongs to the syntax (WHATWG HTML, server-sent events).
fn field<'a>(line: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    let value = line.strip_prefix(name)?;
    Some(value.strip_prefix(b" ").unwrap_or(value))
}

fn is_terminator(line: &[u8]) -> bool {
    match (field(line, DATA), field(line, EVENT)) {
        (Some(value), _) => value.trim_ascii_end() == b"[DONE]",
        (_, Some(value)) => CLOSING_EVENTS.contains(&value.trim_ascii_end()),
        _ => false,
    }
}

fn is_error_data(line: &[u8]) -> bool {
    let Some(value) = field(line, DATA) else { return false };
    let Some(members) = value.strip_prefix(b"{") else { return false };
    let Some(rest) = members.trim_ascii_start().strip_prefix(b"\"error\"") else { return false };
    // `"error": null` is a member some engines always send.
    let value = rest.trim_ascii_start().strip_prefix(b":").map(<[u8]>::trim_ascii_start);
    value.is_some_and(|value| matches!(value.first(), Some(b'{' | b'"')))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whole, byte by byte, and cut in two at every place.
    fn check(stream: &str, ended: bool, failed: bool, data: bool) {
        let run = |pieces: &[&[u8]]| {
            let mut completion = Completion::default();
            pieces.iter().for_each(|piece| completion.feed(piece));
            let seen = (completion.has_ended(), completion.has_failed(), completion.has_data());
            assert_eq!(seen, (ended, failed, data), "{stream:?} in {} pieces", pieces.len());
        };
        let bytes = stream.as_bytes();
        run(&[bytes]);
        run(&bytes.chunks(1).collect::<Vec<_>>());
        for cut in 0..bytes.len() {
            run(&[&bytes[..cut], &bytes[cut..]]);
        }
    }

    fn ended(stream: &str) {
        check(stream, true, false, has_data(stream));
    }

    fn cut(stream: &str) {
        check(stream, false, false, has_data(stream));
    }

    fn has_data(stream: &str) -> bool {
        stream.lines().any(|line| line.starts_with("data:"))
    }

    #[test]
    fn a_terminator_is_found_however_the_stream_is_cut() {
        ended("data: {\"a\":1}\n\ndata: [DONE]\n\n");
        ended("data: {\"a\":1}\r\n\r\ndata: [DONE]\r\n\r\n");
        ended("data:[DONE]\n");
        ended("data: [DONE]");
        ended("data: data: [DONE\n\ndata: [DONE]\n\n");
        ended("event: response.completed\ndata: {\"type\":\"response.completed\"}\n\n");
        ended("event:response.incomplete\ndata: {}\n\n");
        ended(": ping\n\nevent: response.completed\n");
        ended("event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n");
        check("\u{feff}data: [DONE]\r\r", true, false, true);
    }

    #[test]
    fn text_about_terminators_is_no_terminator() {
        cut("");
        cut("data: {\"text\":\"data: [DONE]\"}\n\n");
        cut("data: {\"text\":\"\\ndata: [DONE]\\n\"}\n\n");
        cut("data: [DONE\n\n");
        cut("data: [DONE]x\n\n");
        cut("data: x[DONE]\n\n");
        cut(" data: [DONE]\n\n");
        cut(": data: [DONE]\n\n");
        cut("data:  [DONE]\n\n");
        cut(": ping\n\n\u{feff}data: [DONE]\n\n");
        cut("event: response.completed.not\n\n");
        cut("id: response.completed\n\n");
        cut("event: message_start\ndata: {\"type\":\"message_start\"}\n\n");
        cut(&format!("data: {}data: [DONE]\n\n", "x".repeat(100)));
        cut(&format!("data: {{\"t\":\"{}\"}}\n\n", "y".repeat(300)));
        check(": ping\n\n", false, false, false);
    }

    #[test]
    fn an_error_event_is_seen() {
        check("data: {\"error\":{\"message\":\"invalid\",\"code\":400}}\n\n", false, true, true);
        check("data: {\"error\": \"KVTransferError\"}\n\ndata: [DONE]\n\n", true, true, true);
        check("event: error\ndata: {}\n\n", false, true, true);
        check("event: response.failed\ndata: {}\n\n", true, true, true);
        check("data: {\"error\":null,\"choices\":[]}\n\ndata: [DONE]\n\n", true, false, true);
        check("data: {\"errors\":{}}\n\n", false, false, true);
        check("\u{feff}data: {\"error\":{}}\r\r", false, true, true);
        check("event: errors\ndata: 1\n\n", false, false, true);
    }

    #[test]
    fn whose_mistake_an_error_was() {
        let check = |stream: &str, expected: Option<StreamFailure>| {
            for size in [1, 7, stream.len()] {
                let mut completion = Completion::default();
                stream.as_bytes().chunks(size).for_each(|piece| completion.feed(piece));
                assert_eq!(completion.failure(), expected, "{stream:?} in pieces of {size}");
            }
        };
        let (client, worker) = (Some(StreamFailure::Client), Some(StreamFailure::Worker));
        check("data: {\"error\":{\"message\":\"invalid\",\"code\":400}}\n\n", client);
        check("data: {\"error\":{\"code\":\"404\"}}\n\ndata: {\"x\":1}\n\n", client);
        check("data: {\"error\":{\"type\":\"BadRequestError\",\"code\":null}}\n\n", client);
        check("event: error\ndata: {\"error\":{\"type\":\"invalid_request_error\"}}\n\n", client);
        check("event: response.failed\ndata: {\"response\":{\"error\":{\"code\":400}}}\n\n", client);
        check("data: {\"error\":{\"message\":\"died\",\"code\":500}}\n\n", worker);
        check("data: {\"error\":\"KVTransferError\"}\n\n", worker);
        check("event: error\n\n", worker);
        let overloaded = "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\"}}\n\n";
        check(overloaded, worker);
        check(&format!("data: {{\"error\":{{\"message\":\"{}\",\"code\":400}}}}\n\n", "x".repeat(10_000)), worker);
        check("data: {\"error\":null}\n\n", None);
        check("data: {\"a\":1}\n\n", None);
    }

    #[test]
    fn an_idle_watcher_is_small() {
        assert!(std::mem::size_of::<Completion>() <= 64);
    }
}
