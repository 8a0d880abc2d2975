//! Owns the shapes of answers that say in `type` (or, whole, in `object`) what they are: the events of `/v1/responses` and
//! `/v1/messages`, and their whole answers. Never reads a stream and never keeps anything.

use std::borrow::Cow;

use serde::Deserialize;

/// What one event, or a whole answer, brought.
#[derive(Debug, Default, PartialEq)]
pub struct Typed<'a> {
    pub text: Option<Cow<'a, str>>,
    /// A piece of a tool's call.
    pub calls_tool: bool,
    pub counts: Counts,
    /// The last event of a stream.
    pub ended: bool,
    pub failed: bool,
}

/// Token counts as far as they were told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub prompt_tokens: Option<u64>,
    pub completion_tokens: Option<u64>,
    pub cached_tokens: Option<u64>,
}

/// `usage` of both.
#[derive(Clone, Copy, Default, Deserialize)]
struct Usage {
    input_tokens: Option<u64>,
    output_tokens: Option<u64>,
    input_tokens_details: Option<Details>,
    cache_read_input_tokens: Option<u64>,
    cache_creation_input_tokens: Option<u64>,
}

#[derive(Clone, Copy, Deserialize)]
struct Details {
    cached_tokens: Option<u64>,
}

impl Usage {
    /// A response's input tokens are all of the prompt's; a message's are those that were neither read from the cache nor
    /// written to it.
    fn counts(self) -> Counts {
        let apart = self.cache_read_input_tokens.unwrap_or(0) + self.cache_creation_input_tokens.unwrap_or(0);
        Counts {
            prompt_tokens: self.input_tokens.map(|tokens| tokens + apart),
            completion_tokens: self.output_tokens,
            cached_tokens: self.cache_read_input_tokens.or(self.input_tokens_details.and_then(|it| it.cached_tokens)),
        }
    }
}

#[derive(Deserialize)]
struct Spoken<'a> {
    #[serde(borrow)]
    delta: Cow<'a, str>,
}

/// A block of a message, or a change of one.
#[derive(Deserialize)]
struct Block<'a> {
    #[serde(borrow, default)]
    text: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    thinking: Option<Cow<'a, str>>,
}

#[derive(Deserialize)]
struct Changed<'a> {
    #[serde(borrow)]
    delta: Block<'a>,
}

/// A whole answer, or the part of one that an event shows.
#[derive(Default, Deserialize)]
struct Whole<'a> {
    #[serde(default)]
    usage: Option<Usage>,
    /// Of a message.
    #[serde(borrow, default)]
    content: Vec<Block<'a>>,
    /// Of a response.
    #[serde(borrow, default)]
    output: Vec<Item<'a>>,
}

#[derive(Deserialize)]
struct Item<'a> {
    #[serde(borrow, default)]
    content: Option<Vec<Block<'a>>>,
}

#[derive(Deserialize)]
struct Shown<'a> {
    #[serde(borrow, alias = "message")]
    response: Whole<'a>,
}

impl<'a> Whole<'a> {
    fn counts(&self) -> Counts {
        self.usage.map(Usage::counts).unwrap_or_default()
    }

    fn typed(self) -> Typed<'a> {
        let counts = self.counts();
        let items = self.output.into_iter().filter_map(|item| item.content).flatten();
        let text: String = self.content.into_iter().chain(items).filter_map(|block| block.text).collect();
        Typed { text: Some(text.into()), counts, ..Typed::default() }
    }
}

/// What `data` of this kind brought, if it is a kind that brings something. An error is data that is not of its kind.
pub fn read<'a>(kind: &str, data: &'a [u8]) -> serde_json::Result<Option<Typed<'a>>> {
    Ok(Some(match kind {
        "response.output_text.delta" | "response.reasoning_text.delta" | "response.reasoning_summary_text.delta" => {
            let Spoken { delta } = serde_json::from_slice(data)?;
            Typed { text: Some(delta), ..Typed::default() }
        }
        "response.function_call_arguments.delta" => Typed { calls_tool: true, ..Typed::default() },
        "content_block_delta" => {
            let Changed { delta } = serde_json::from_slice(data)?;
            let text = delta.text.or(delta.thinking);
            Typed { calls_tool: text.is_none(), text, ..Typed::default() }
        }
        "response.completed" | "response.incomplete" => {
            let Shown { response } = serde_json::from_slice(data)?;
            Typed { counts: response.counts(), ended: true, ..Typed::default() }
        }
        "message_start" => {
            let Shown { response } = serde_json::from_slice(data)?;
            Typed { counts: response.counts(), ..Typed::default() }
        }
        "message_delta" => {
            let whole: Whole = serde_json::from_slice(data)?;
            Typed { counts: whole.counts(), ..Typed::default() }
        }
        "message_stop" => Typed { ended: true, ..Typed::default() },
        "response.failed" | "error" => Typed { failed: true, ..Typed::default() },
        "response" | "message" => serde_json::from_slice::<Whole>(data)?.typed(),
        _ => return Ok(None),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(kind: &str, data: &str, expected: Typed) {
        assert_eq!(read(kind, data.as_bytes()).unwrap(), Some(expected), "{data}");
    }

    #[test]
    fn events_bring_words_calls_counts_and_ends() {
        let text = |text: &'static str| Typed { text: Some(text.into()), ..Typed::default() };
        check("response.output_text.delta", r#"{"delta":"a\"b","item_id":"x"}"#, text("a\"b"));
        check("content_block_delta", r#"{"index":0,"delta":{"type":"text_delta","text":"a"}}"#, text("a"));
        check("content_block_delta", r#"{"delta":{"type":"thinking_delta","thinking":"hm"}}"#, text("hm"));
        let call = || Typed { calls_tool: true, ..Typed::default() };
        check("content_block_delta", r#"{"delta":{"type":"input_json_delta","partial_json":"{"}}"#, call());
        check("response.function_call_arguments.delta", r#"{"delta":"{"}"#, call());
        let counts = |prompt, completion, cached| Counts {
            prompt_tokens: prompt,
            completion_tokens: completion,
            cached_tokens: cached,
        };
        check(
            "response.completed",
            r#"{"response":{"output":[],"usage":{"input_tokens":9,"output_tokens":2,"input_tokens_details":{"cached_tokens":4}}}}"#,
            Typed { counts: counts(Some(9), Some(2), Some(4)), ended: true, ..Typed::default() },
        );
        check(
            "message_start",
            r#"{"message":{"content":[],"usage":{"input_tokens":5,"cache_read_input_tokens":4,"output_tokens":1}}}"#,
            Typed { counts: counts(Some(9), Some(1), Some(4)), ..Typed::default() },
        );
        check(
            "message_delta",
            r#"{"delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":2}}"#,
            Typed { counts: counts(None, Some(2), None), ..Typed::default() },
        );
        check("message_stop", "{}", Typed { ended: true, ..Typed::default() });
        check("error", "{}", Typed { failed: true, ..Typed::default() });
        for other in ["ping", "response.created", "content_block_start", "chat.completion.chunk", "list"] {
            assert_eq!(read(other, b"{}").unwrap(), None);
        }
        assert!(read("response.output_text.delta", b"{\"delta\":1}").is_err());
    }

    #[test]
    fn whole_answers_are_their_texts() {
        let whole = |kind, data: &str| read(kind, data.as_bytes()).unwrap().unwrap().text.unwrap().into_owned();
        let output = r#"{"output":[{"type":"reasoning"},{"content":[{"type":"output_text","text":"a"},{"text":"b"}]}],"content":[]}"#;
        assert_eq!(whole("response", output), "ab");
        assert_eq!(whole("message", r#"{"content":[{"type":"text","text":"a"},{"type":"tool_use"}]}"#), "a");
    }
}
