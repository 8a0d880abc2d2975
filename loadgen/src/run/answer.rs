//! Owns the reading of an answer's body: SSE events or one JSON object to text, token counts, usage and ending. Never
//! reads sockets or clocks.

use std::borrow::Cow;

use serde::Deserialize;

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
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(borrow, default)]
    delta: Option<Text<'a>>,
    #[serde(borrow, default)]
    message: Option<Text<'a>>,
    #[serde(borrow, default)]
    text: Option<Cow<'a, str>>,
}

#[derive(Deserialize)]
struct Text<'a> {
    #[serde(borrow, default)]
    content: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    reasoning_content: Option<Cow<'a, str>>,
}

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
}

/// What is known of one answer.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    pub text: String,
    /// Events that brought text.
    pub content_events: u64,
    pub usage: Option<Usage>,
    /// `[DONE]` arrived, or the JSON object was whole.
    pub complete: bool,
    /// An error object arrived in place of a chunk.
    pub failed: bool,
    /// Something arrived that is neither.
    pub malformed: bool,
    line: Vec<u8>,
}

impl Answer {
    /// Takes a piece of an event stream, cut anywhere. Returns how many events with text it completed.
    pub fn push_events(&mut self, mut bytes: &[u8]) -> u64 {
        let before = self.content_events;
        while let Some(end) = bytes.iter().position(|byte| *byte == b'\n') {
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
        let Ok(chunk) = serde_json::from_slice::<Chunk>(data) else {
            self.malformed = true;
            return;
        };
        self.failed |= chunk.error.is_some();
        self.usage = chunk.usage.or(self.usage);
        let mut brought_text = false;
        for choice in chunk.choices {
            let parts = [choice.delta, choice.message].into_iter().flatten();
            let texts = parts.flat_map(|part| [part.reasoning_content, part.content]).chain([choice.text]).flatten();
            for text in texts.filter(|text| !text.is_empty()) {
                self.text.push_str(&text);
                brought_text = true;
            }
        }
        self.content_events += u64::from(brought_text);
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
