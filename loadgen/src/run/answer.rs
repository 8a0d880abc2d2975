//! Owns the reading of an answer's body: SSE events or one JSON object to text, token counts, usage and ending. Never
//! reads sockets or clocks.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::typed::{self, Counts, Typed};

/// Largest SSE line kept while incomplete.
const LINE_BYTES_MAX: usize = 16 * 1024 * 1024;

#[derive(Deserialize)]
struct Chunk<'a> {
    #[serde(borrow, default)]
    choices: Vec<Choice<'a>>,
    #[serde(default)]
    usage: Option<Usage>,
    #[serde(default)]
    error: Option<serde::de::IgnoredAny>,
    /// What answers of other endpoints say of themselves.
    #[serde(borrow, default, rename = "type")]
    kind: Option<&'a RawValue>,
    #[serde(borrow, default)]
    object: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(borrow, default)]
    delta: Option<Text<'a>>,
    #[serde(borrow, default)]
    message: Option<Text<'a>>,
    #[serde(borrow, default)]
    text: Option<Words<'a>>,
}

#[derive(Deserialize)]
struct Text<'a> {
    #[serde(borrow, default)]
    content: Option<Words<'a>>,
    #[serde(borrow, default)]
    reasoning_content: Option<Words<'a>>,
    #[serde(default)]
    tool_calls: Option<Vec<serde::de::IgnoredAny>>,
}

/// A part of the event as it stands, unless it has escapes. (Within an `Option` a bare `Cow` would always be copied.)
#[derive(Deserialize)]
struct Words<'a>(#[serde(borrow)] Cow<'a, str>);

/// Token counts as the server reports them.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
pub struct Usage {
    #[serde(default)]
    pub prompt_tokens: u64,
    #[serde(default)]
    pub completion_tokens: u64,
    #[serde(default)]
    prompt_tokens_details: Option<PromptDetails>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
struct PromptDetails {
    #[serde(default)]
    cached_tokens: Option<u64>,
}

impl Usage {
    /// `None` when the server does not tell.
    pub fn cached_tokens(&self) -> Option<u64> {
        self.prompt_tokens_details.and_then(|details| details.cached_tokens)
    }

    /// What is told later goes before; what is not told again stays.
    fn update(&mut self, counts: Counts) {
        self.prompt_tokens = counts.prompt_tokens.unwrap_or(self.prompt_tokens);
        self.completion_tokens = counts.completion_tokens.unwrap_or(self.completion_tokens);
        let cached_tokens = counts.cached_tokens.or(self.cached_tokens());
        self.prompt_tokens_details = Some(PromptDetails { cached_tokens });
    }
}

/// What is known of one answer.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    /// Empty where nobody wants it.
    pub text: String,
    /// Events that brought text, or a piece of a tool's call.
    pub content_events: u64,
    pub usage: Option<Usage>,
    /// `[DONE]` arrived, or the JSON object was whole.
    pub complete: bool,
    /// An error object arrived in place of a chunk.
    pub failed: bool,
    /// Something arrived that is neither.
    pub malformed: bool,
    line: Vec<u8>,
    usual: Usual,
    is_counting: bool,
}

/// The bytes around the text of the latest event that brought one. In a stream hardly anything else changes, and an event
/// with the same bytes around a string without escapes says the same with another text: nothing needs to be parsed.
#[derive(Clone, Debug, Default)]
struct Usual {
    before: Vec<u8>,
    after: Vec<u8>,
}

impl Usual {
    /// Learns from an event whose whole text is `text`, where that is a part of `data` as it stands.
    fn learn(&mut self, data: &[u8], text: &str) {
        let start = (text.as_ptr() as usize).wrapping_sub(data.as_ptr() as usize);
        let Some(end) = start.checked_add(text.len()).filter(|end| *end <= data.len()) else { return };
        self.before.clear();
        self.before.extend_from_slice(&data[..start]);
        self.after.clear();
        self.after.extend_from_slice(&data[end..]);
    }

    /// The text of an event that differs in nothing else.
    fn text<'a>(&self, data: &'a [u8]) -> Option<&'a [u8]> {
        if self.before.is_empty() {
            return None;
        }
        let text = data.strip_prefix(&self.before[..])?.strip_suffix(&self.after[..])?;
        (!text.is_empty() && memchr::memchr2(b'"', b'\\', text).is_none()).then_some(text)
    }
}

impl Answer {
    /// An answer whose text nobody wants.
    pub fn counting() -> Answer {
        Answer { is_counting: true, ..Answer::default() }
    }

    /// Takes a piece of an event stream, cut anywhere. Returns how many events with text it completed.
    pub fn push_events(&mut self, mut bytes: &[u8]) -> u64 {
        let before = self.content_events;
        while let Some(end) = memchr::memchr(b'\n', bytes) {
            if self.line.is_empty() {
                self.take_line(&bytes[..end]);
            } else {
                let mut line = std::mem::take(&mut self.line);
                line.extend_from_slice(&bytes[..end]);
                self.take_line(&line);
                line.clear();
                self.line = line;
            }
            bytes = &bytes[end + 1..];
        }
        self.line.extend_from_slice(bytes);
        if self.line.len() > LINE_BYTES_MAX {
            self.malformed = true;
            self.line.clear();
        }
        self.content_events - before
    }

    /// Takes a whole JSON answer.
    pub fn set_json(&mut self, bytes: &[u8]) {
        self.take_chunk(bytes);
        self.complete = !self.malformed && !self.failed;
    }

    fn take_line(&mut self, line: &[u8]) {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        // Comments, blank lines and other SSE fields carry nothing that is measured.
        let Some(data) = line.strip_prefix(b"data:") else { return };
        match data.trim_ascii() {
            b"[DONE]" => self.complete = true,
            data => self.take_chunk(data),
        }
    }

    fn take_chunk(&mut self, data: &[u8]) {
        if let Some(text) = self.usual.text(data)
            && (self.is_counting || std::str::from_utf8(text).map(|text| self.text.push_str(text)).is_ok())
        {
            self.content_events += 1;
            return;
        }
        let Ok(chunk) = serde_json::from_slice::<Chunk>(data) else {
            self.malformed = true;
            return;
        };
        self.failed |= chunk.error.is_some();
        if let Some(kind) = chunk.kind.or(chunk.object).filter(|_| chunk.choices.is_empty()) {
            match typed::read(kind.get().trim_matches('"'), data) {
                Ok(Some(typed)) => return self.take_typed(typed),
                Ok(None) => {}
                Err(_) => self.malformed = true,
            }
        }
        self.usage = chunk.usage.or(self.usage);
        let (mut texts, mut only) = (0, None);
        for choice in &chunk.choices {
            let parts = [&choice.delta, &choice.message].into_iter().flatten();
            let strings = parts.clone().flat_map(|part| [&part.reasoning_content, &part.content]);
            for text in strings.chain([&choice.text]).flatten().filter(|text| !text.0.is_empty()) {
                if !self.is_counting {
                    self.text.push_str(&text.0);
                }
                texts += 1;
                only = Some(text);
            }
            texts += parts.filter(|part| part.tool_calls.as_ref().is_some_and(|calls| !calls.is_empty())).count();
        }
        self.content_events += u64::from(texts > 0);
        if let (1, Some(Words(Cow::Borrowed(text))), None, false) = (texts, only, chunk.usage, self.failed) {
            self.usual.learn(data, text);
        }
    }

    fn take_typed(&mut self, typed: Typed) {
        let text = typed.text.filter(|text| !text.is_empty());
        self.content_events += u64::from(text.is_some() || typed.calls_tool);
        if let Some(text) = text.filter(|_| !self.is_counting) {
            self.text.push_str(&text);
        }
        self.complete |= typed.ended;
        self.failed |= typed.failed;
        if typed.counts != Counts::default() {
            self.usage.get_or_insert_default().update(typed.counts);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &str = concat!(
        ": comment\r\n\r\n",
        "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n",
        "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\\n\u{e9}\"}}]}\n\n",
        "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"b\"},\"finish_reason\":\"stop\"}],\"usage\":null}\n\n",
        "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":2,",
        "\"prompt_tokens_details\":{\"cached_tokens\":4}}}\r\n\r\n",
        "data: [DONE]\n\n"
    );

    fn check(answer: &Answer, context: &str) {
        assert_eq!(answer.text, "a\n\u{e9}b", "{context}");
        assert_eq!(answer.content_events, 2, "{context}");
        let usage = answer.usage.unwrap();
        assert_eq!((usage.prompt_tokens, usage.cached_tokens()), (9, Some(4)), "{context}");
        assert!(answer.complete && !answer.failed && !answer.malformed, "{context}");
    }

    #[test]
    fn streams_may_be_cut_anywhere() {
        let bytes = STREAM.as_bytes();
        let mut single = Answer::default();
        for byte in bytes {
            single.push_events(&[*byte]);
        }
        check(&single, "byte by byte");
        for cut in 0..=bytes.len() {
            let mut answer = Answer::default();
            answer.push_events(&bytes[..cut]);
            answer.push_events(&bytes[cut..]);
            check(&answer, &format!("cut at {cut}"));
        }
    }

    #[test]
    fn events_like_the_one_before_are_read_as_if_parsed() {
        let event = |text: &str, more: &str| {
            format!("data: {{\"choices\":[{{\"delta\":{{\"content\":\"{text}\"}}{more}}}],\"usage\":null}}\n\n")
        };
        let stop = ",\"finish_reason\":\"stop\"";
        let mut answer = Answer::default();
        for (text, more) in
            [("a", ""), ("b", ""), ("", ""), ("\\n", ""), ("c\\\"", ""), ("\u{e9}", ""), ("d", stop), ("e", "")]
        {
            answer.push_events(event(text, more).as_bytes());
        }
        assert_eq!((answer.text.as_str(), answer.content_events), ("ab\nc\"\u{e9}de", 7));
        assert!(!answer.malformed && !answer.failed && answer.usual.text(b"").is_none());
        let like = event("f", "");
        let data = like.trim_end().strip_prefix("data: ").unwrap().as_bytes();
        assert_eq!(answer.usual.text(data), Some(&b"f"[..]), "the latest event was learnt");
        // What only looks alike: another member follows the text, an error, a usage, a cut string.
        answer
            .push_events(b"data: {\"choices\":[{\"delta\":{\"content\":\"f\",\"content\":\"g\"}}],\"usage\":null}\n\n");
        assert_eq!((answer.malformed, answer.content_events), (true, 7), "a member told twice is no chunk");
        let mut answer = Answer::counting();
        answer.push_events(event("a", "").as_bytes());
        answer.push_events(event("b", "").replace("null", "{\"prompt_tokens\":3}").as_bytes());
        answer.push_events(b"data: {\"choices\":[{\"delta\":{\"tool_calls\":[{\"index\":0}]}}]}\n\n");
        assert_eq!((answer.content_events, answer.text.as_str(), answer.usage.unwrap().prompt_tokens), (3, "", 3));
        answer.push_events(b"data: {\"choices\":[{\"delta\":{\"content\":\"c}}],\"usage\":null}\n\n");
        assert!(answer.malformed);
    }

    #[test]
    fn responses_and_messages_end_by_their_own_events() {
        let responses = "event: a\ndata: {\"type\":\"response.created\",\"response\":{\"usage\":null,\"error\":null}}\n\n\
            data: {\"type\":\"response.output_text.delta\",\"delta\":\"a\\n\"}\n\n\
            data: {\"type\":\"response.output_text.delta\",\"delta\":\"b\"}\n\n\
            data: {\"type\":\"response.completed\",\"response\":{\"usage\":{\"input_tokens\":9,\"output_tokens\":2,\
            \"input_tokens_details\":{\"cached_tokens\":4}}}}\n\n";
        let messages = "data: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":5,\
            \"cache_read_input_tokens\":4,\"output_tokens\":0}}}\n\n\
            data: {\"type\":\"content_block_delta\",\"delta\":{\"type\":\"text_delta\",\"text\":\"a\\n\"}}\n\n\
            data: {\"type\":\"content_block_delta\",\"delta\":{\"type\":\"text_delta\",\"text\":\"b\"}}\n\n\
            data: {\"type\":\"message_delta\",\"usage\":{\"output_tokens\":2}}\n\n\
            data: {\"type\":\"message_stop\"}\n\n";
        for stream in [responses, messages] {
            let mut answer = Answer::default();
            let (most, last) = stream.split_at(stream.trim_end().rfind("data:").unwrap());
            answer.push_events(most.as_bytes());
            assert!(!answer.complete && answer.content_events == 2, "{answer:?}");
            answer.push_events(last.as_bytes());
            let usage = answer.usage.unwrap();
            assert_eq!((usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens()), (9, 2, Some(4)));
            assert!(answer.complete && !answer.failed && !answer.malformed && answer.text == "a\nb", "{answer:?}");
        }
        let mut answer = Answer::default();
        answer.push_events(b"data: {\"type\":\"error\",\"error\":{\"message\":\"x\"}}\n\n");
        assert!(answer.failed && !answer.complete);
        let mut answer = Answer::default();
        answer.set_json(
            br#"{"object":"response","error":null,"output":[{"content":[{"text":"a"}]}],"usage":{"input_tokens":3}}"#,
        );
        assert_eq!((answer.text.as_str(), answer.complete, answer.usage.unwrap().prompt_tokens), ("a", true, 3));
    }

    #[test]
    fn errors_and_rubbish_are_told_apart() {
        let mut answer = Answer::default();
        answer.push_events(b"data: {\"error\":{\"message\":\"x\"}}\n\n");
        assert!(answer.failed && !answer.malformed && !answer.complete);
        let mut answer = Answer::default();
        answer.push_events(b"data: {\"choi\n\ndata: [DONE]\n\n");
        assert!(answer.malformed);
        let mut answer = Answer::default();
        answer.set_json(br#"{"choices":[{"message":{"content":"hi"}}],"usage":{"prompt_tokens":1}}"#);
        assert!(answer.complete);
        assert_eq!((answer.text.as_str(), answer.usage.unwrap().cached_tokens()), ("hi", None));
    }
}
