//! The events of a chat's stream as those of a message: `message_start`, blocks one after another, `message_delta`,
//! `message_stop`. Fed payload in any pieces; holds one unfinished line and the text that waits for a call's end.

use serde::Deserialize;
use serde_json::{Value, json};

use super::{ChatUsage, call_id, error_body, message_id, message_of_error, stop_reason};
use crate::limits;

/// Translates one stream.
pub struct EventTranslator {
    model: String,
    /// The beginning of a line whose end has not come yet.
    line: Vec<u8>,
    is_first_line: bool,
    state: State,
    open: Option<Block>,
    /// Index of the next block.
    blocks: usize,
    /// Text that came while a call was open: calls come in one piece.
    waiting: String,
    has_tool: bool,
    finish: Option<String>,
    matched: Option<Value>,
    usage: ChatUsage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Fresh,
    /// `message_start` has gone out.
    Started,
    /// `message_stop` or an error has gone out: nothing may follow.
    Ended,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Block {
    Text,
    Thinking,
    /// The chat's index of the call.
    Call(u64),
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Chunk {
    id: Option<String>,
    choices: Vec<Choice>,
    usage: Option<ChatUsage>,
    error: Option<Value>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Choice {
    delta: Option<Delta>,
    finish_reason: Option<String>,
    stop_reason: Option<Value>,
    matched_stop: Option<Value>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Delta {
    content: Option<String>,
    reasoning: Option<String>,
    reasoning_content: Option<String>,
    tool_calls: Option<Vec<CallDelta>>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct CallDelta {
    index: u64,
    id: Option<String>,
    function: Option<FunctionDelta>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct FunctionDelta {
    name: Option<String>,
    arguments: Option<String>,
}

impl EventTranslator {
    /// `model` is the client's name of it.
    pub fn new(model: &str) -> Self {
        Self {
            model: model.to_owned(),
            line: Vec::new(),
            is_first_line: true,
            state: State::Fresh,
            open: None,
            blocks: 0,
            waiting: String::new(),
            has_tool: false,
            finish: None,
            matched: None,
            usage: ChatUsage::default(),
        }
    }

    /// The next piece of the chat's stream; appends whole events.
    pub fn feed(&mut self, mut payload: &[u8], out: &mut Vec<u8>) {
        while self.state != State::Ended
            && let Some(end) = memchr::memchr2(b'\n', b'\r', payload)
        {
            let piece = &payload[..end];
            payload = &payload[end + 1..];
            if self.line.is_empty() {
                self.line(piece, out);
            } else {
                let mut line = std::mem::take(&mut self.line);
                line.extend_from_slice(piece);
                self.line(&line, out);
            }
        }
        if self.state == State::Ended {
            return;
        }
        if self.line.len() + payload.len() > limits::TRANSLATED_EVENT_BYTES_MAX {
            self.fail("an event of the worker was longer than may be", out);
            return;
        }
        self.line.extend_from_slice(payload);
    }

    /// The chat's stream is over. One that had given its reason to end is whole without `[DONE]`. False: it was cut.
    pub fn end(&mut self, out: &mut Vec<u8>) -> bool {
        let line = std::mem::take(&mut self.line);
        self.line(&line, out);
        match self.state {
            State::Started if self.finish.is_some() => self.stop(out),
            State::Ended => {}
            State::Fresh | State::Started => {
                self.fail("the worker ended the stream before its end", out);
                return false;
            }
        }
        true
    }

    /// One line without its end; that of `\r\n` is followed by an empty one. Events of a chat are single `data` lines.
    fn line(&mut self, line: &[u8], out: &mut Vec<u8>) {
        // A byte order mark may stand before the first one (WHATWG HTML, server-sent events).
        let line = match std::mem::take(&mut self.is_first_line) {
            true => line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(line),
            false => line,
        };
        if line.starts_with(b":") && self.state == State::Started {
            // A comment keeps the connection alive; so does a ping.
            event(out, "ping", &json!({"type": "ping"}));
            return;
        }
        let Some(data) = line.strip_prefix(b"data:").map(<[u8]>::trim_ascii) else { return };
        if data == b"[DONE]" {
            match self.state {
                State::Started => self.stop(out),
                _ => self.fail("the worker ended the stream before its end", out),
            }
            return;
        }
        match serde_json::from_slice::<Chunk>(data) {
            Ok(Chunk { error: Some(error), .. }) if !error.is_null() => {
                let said = json!({"error": error});
                self.fail(message_of_error(&said).unwrap_or("the worker failed inside its stream"), out);
            }
            Ok(chunk) => self.chunk(chunk, out),
            Err(_) => self.fail("the worker sent an event that is no chat chunk", out),
        }
    }

    fn chunk(&mut self, chunk: Chunk, out: &mut Vec<u8>) {
        if let Some(usage) = chunk.usage {
            self.usage = usage;
        }
        if self.state == State::Fresh {
            let message = json!({"id": message_id(chunk.id.as_deref()), "type": "message", "role": "assistant",
                "model": self.model, "content": [], "stop_reason": null, "stop_sequence": null,
                "usage": ChatUsage { completion_tokens: None, ..self.usage }.of_message()});
            event(out, "message_start", &json!({"type": "message_start", "message": message}));
            event(out, "ping", &json!({"type": "ping"}));
            self.state = State::Started;
        }
        let Some(choice) = chunk.choices.into_iter().next() else { return };
        if choice.finish_reason.is_some() {
            self.finish = choice.finish_reason;
            self.matched = choice.stop_reason.or(choice.matched_stop);
        }
        let delta = choice.delta.unwrap_or_default();
        if let Some(text) = delta.reasoning.or(delta.reasoning_content).filter(|text| !text.is_empty()) {
            self.open_block(Block::Thinking, || json!({"type": "thinking", "thinking": "", "signature": ""}), out);
            self.delta(json!({"type": "thinking_delta", "thinking": text}), out);
        }
        if let Some(text) = delta.content.filter(|text| !text.is_empty()) {
            match self.open {
                Some(Block::Call(_)) => self.waiting.push_str(&text),
                _ => self.text(&text, out),
            }
        }
        for call in delta.tool_calls.unwrap_or_default() {
            self.call(call, out);
        }
    }

    fn text(&mut self, text: &str, out: &mut Vec<u8>) {
        self.open_block(Block::Text, || json!({"type": "text", "text": ""}), out);
        self.delta(json!({"type": "text_delta", "text": text}), out);
    }

    fn call(&mut self, call: CallDelta, out: &mut Vec<u8>) {
        let FunctionDelta { name, arguments } = call.function.unwrap_or_default();
        let block = Block::Call(call.index);
        if self.open != Some(block) {
            let Some(name) = name.filter(|name| !name.is_empty()) else {
                // Blocks do not nest: what belongs to a closed one cannot be said any more.
                return self.fail("the worker went back to a tool call that had ended", out);
            };
            let id = call_id(call.id);
            self.open_block(block, || json!({"type": "tool_use", "id": id, "name": name, "input": {}}), out);
            self.has_tool = true;
        }
        if let Some(arguments) = arguments.filter(|arguments| !arguments.is_empty()) {
            self.delta(json!({"type": "input_json_delta", "partial_json": arguments}), out);
        }
    }

    /// Makes `block` the open one, closing another first.
    fn open_block(&mut self, block: Block, content: impl FnOnce() -> Value, out: &mut Vec<u8>) {
        if self.open == Some(block) {
            return;
        }
        self.close_block(out);
        event(
            out,
            "content_block_start",
            &json!({"type": "content_block_start", "index": self.blocks, "content_block": content()}),
        );
        self.open = Some(block);
    }

    fn close_block(&mut self, out: &mut Vec<u8>) {
        if self.open.take().is_some() {
            event(out, "content_block_stop", &json!({"type": "content_block_stop", "index": self.blocks}));
            self.blocks += 1;
        }
        if !self.waiting.is_empty() {
            let text = std::mem::take(&mut self.waiting);
            self.text(&text, out);
            self.close_block(out);
        }
    }

    fn delta(&self, delta: Value, out: &mut Vec<u8>) {
        event(
            out,
            "content_block_delta",
            &json!({"type": "content_block_delta", "index": self.blocks, "delta": delta}),
        );
    }

    fn stop(&mut self, out: &mut Vec<u8>) {
        self.close_block(out);
        let (reason, sequence) = stop_reason(self.finish.as_deref(), self.matched.as_ref(), self.has_tool);
        let delta = json!({"stop_reason": reason, "stop_sequence": sequence});
        let usage = self.usage.of_message();
        event(out, "message_delta", &json!({"type": "message_delta", "delta": delta, "usage": usage}));
        event(out, "message_stop", &json!({"type": "message_stop"}));
        self.state = State::Ended;
    }

    fn fail(&mut self, message: &str, out: &mut Vec<u8>) {
        event(out, "error", &error_body("api_error", message));
        self.state = State::Ended;
    }
}

fn event(out: &mut Vec<u8>, name: &str, data: &Value) {
    out.extend_from_slice(format!("event: {name}\ndata: {data}\n\n").as_bytes());
}

#[cfg(test)]
#[path = "stream_tests.rs"]
mod tests;
