//! Owns the bytes of generated requests: pieces of a plan to the messages of a chat, or to one text for the endpoints that
//! take that. Never draws a session and never sends anything.
//!
//! Texts are words of the shipped list, of which the shipped tokenizer makes one token each; other tokenizers make a few
//! more. What a chat template and the spelling of tools add comes on top. Nothing here needs escaping in JSON.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use rand::Rng;
use rand::rngs::SmallRng;

use super::endpoint::Endpoint;
use crate::plan::{Kind, Piece, Turn};
use crate::{seed, words};

/// Texts that several sessions share are kept up to this many bytes.
const SHARED_BYTES_MAX: usize = 64 << 20;
/// Tools that a recipe with tools defines.
const TOOLS: u64 = 8;
/// Tokens that the shipped tokenizer makes of a definition's members.
const TOOL_OVERHEAD_TOKENS: usize = 90;
/// Ends a message of a text, as it stands in JSON.
const LINE_END: &str = "\\n";
/// Words that a tool is called with.
const ARGUMENT_WORDS: usize = 4;

/// Makes bodies. One per run and thread.
pub struct Renderer {
    endpoint: Endpoint,
    /// The body up to its messages, or into its text.
    opening: String,
    is_stream: bool,
    has_tools: bool,
    image_bytes: usize,
    shared: RefCell<Shared>,
}

#[derive(Default)]
struct Shared {
    texts: HashMap<(Kind, u64, usize), Rc<str>>,
    bytes: usize,
}

/// A conversation as far as it has come.
#[derive(Clone, Debug, Default)]
pub struct Chat {
    /// Its messages as the elements of a JSON array; for an endpoint that takes a text, the inside of a JSON string.
    messages: String,
    tools: Option<Rc<str>>,
    /// Where it stands apart.
    system: Option<Rc<str>>,
}

impl Renderer {
    /// `image_bytes`: length of a picture's reference.
    pub fn new(endpoint: Endpoint, model: &str, is_stream: bool, has_tools: bool, image_bytes: usize) -> Renderer {
        let model = serde_json::Value::from(model);
        let member = match endpoint {
            Endpoint::Chat | Endpoint::Messages => "\"messages\":[",
            Endpoint::Responses => "\"input\":[",
            Endpoint::Completions => "\"prompt\":\"",
            Endpoint::Embeddings => "\"input\":\"",
        };
        let opening = format!("{{\"model\":{model},{member}");
        Renderer { endpoint, opening, is_stream, has_tools, image_bytes, shared: RefCell::default() }
    }

    /// Adds what was answered to the turn before, as an assistant's message. `server`: the server's own words; those of
    /// the plan if absent. `next` is the turn that follows: if it begins with a tool's result, the message calls a tool.
    pub fn add_answer(&self, chat: &mut Chat, before: &Turn, server: Option<&str>, next: &Turn) {
        let content = match server {
            Some(text) => serde_json::Value::from(text).to_string(),
            None => format!("\"{}\"", text(before.answer, before.answer_tokens)),
        };
        if self.endpoint.takes_text() {
            // As it was generated, directly behind the prompt, so that it is found where it is cached.
            return chat.messages.extend([&content[1..content.len() - 1], LINE_END]);
        }
        chat.messages.push_str(&format!(",{{\"role\":\"assistant\",\"content\":{content}"));
        if self.endpoint == Endpoint::Chat && next.pieces.first().is_some_and(|piece| piece.kind == Kind::ToolResult) {
            let arguments = text(seed::mixed(before.answer, 1), ARGUMENT_WORDS);
            chat.messages.push_str(&format!(
                ",\"tool_calls\":[{{\"id\":\"{}\",\"type\":\"function\",\"function\":{{\"name\":\"{}\",\
                 \"arguments\":\"{{\\\"query\\\":\\\"{arguments}\\\"}}\"}}}}]",
                call_id(before),
                tool_name(before.answer % TOOLS),
            ));
        }
        chat.messages.push('}');
    }

    /// Adds a turn's own messages. `before` is the turn before, if there was one.
    pub fn add_turn(&self, chat: &mut Chat, turn: &Turn, before: Option<&Turn>) {
        if self.endpoint.takes_text() {
            self.push_texts(&mut chat.messages, &turn.pieces);
            return chat.messages.push_str(LINE_END);
        }
        let mut pieces = &turn.pieces[..];
        if let Some((system, rest)) = pieces.split_first().filter(|(piece, _)| piece.kind == Kind::System) {
            self.add_system(chat, system);
            pieces = rest;
        }
        if let ([result], Some(before)) = (pieces, before)
            && result.kind == Kind::ToolResult
            && self.endpoint == Endpoint::Chat
        {
            let result = text(result.name, result.tokens);
            let message = format!(",{{\"role\":\"tool\",\"tool_call_id\":\"{}\",\"content\":\"", call_id(before));
            chat.messages.extend([message.as_str(), result.as_str(), "\"}"]);
            return;
        }
        let separator = if chat.messages.is_empty() { "" } else { "," };
        chat.messages.extend([separator, "{\"role\":\"user\",\"content\":"]);
        let image = pieces.split_first().filter(|(piece, _)| piece.kind == Kind::Image);
        if let Some((image, rest)) = image {
            let reference = self.shared(image);
            chat.messages.extend(["[{\"type\":\"image_url\",\"image_url\":{\"url\":\"", &*reference]);
            chat.messages.push_str("\"}},{\"type\":\"text\",\"text\":\"");
            self.push_texts(&mut chat.messages, rest);
            chat.messages.push_str("\"}]}");
        } else {
            chat.messages.push('"');
            self.push_texts(&mut chat.messages, pieces);
            chat.messages.push_str("\"}");
        }
    }

    /// The body that asks for an answer of so many tokens.
    pub fn body(&self, chat: &Chat, answer_tokens: usize) -> String {
        let (tools, system) = (chat.tools.as_deref().unwrap_or(""), chat.system.as_deref());
        let (closing, most) = match self.endpoint {
            Endpoint::Chat | Endpoint::Messages => ("]", ",\"max_tokens\":"),
            Endpoint::Responses => ("]", ",\"max_output_tokens\":"),
            Endpoint::Completions => ("\"", ",\"max_tokens\":"),
            Endpoint::Embeddings => ("\"}", ""),
        };
        let bytes = self.opening.len() + chat.messages.len() + tools.len() + system.map_or(0, str::len);
        let mut body = String::with_capacity(bytes + 160);
        body.extend([self.opening.as_str(), &chat.messages, closing]);
        if !self.endpoint.generates() {
            return body;
        }
        body.extend([most, &answer_tokens.to_string()]);
        body.extend([",\"temperature\":0,\"ignore_eos\":true,\"stream\":", &self.is_stream.to_string()]);
        if self.is_stream && matches!(self.endpoint, Endpoint::Chat | Endpoint::Completions) {
            body.push_str(",\"stream_options\":{\"include_usage\":true}");
        }
        if !tools.is_empty() {
            body.extend([",\"tools\":[", tools, "]"]);
        }
        if let Some(system) = system {
            body.extend([",\"system\":\"", system, "\""]);
        }
        body.push('}');
        body
    }

    fn add_system(&self, chat: &mut Chat, system: &Piece) {
        let mut words = *system;
        if self.endpoint == Endpoint::Messages {
            chat.system = Some(self.shared(&words));
            return;
        }
        if self.has_tools && self.endpoint == Endpoint::Chat {
            // One half says what to do, the other what there is to do it with.
            words.tokens = (system.tokens / 2).max(1);
            let tools = Piece { tokens: system.tokens - system.tokens / 2, kind: Kind::ToolResult, ..*system };
            chat.tools = Some(self.shared(&tools));
        }
        let text = self.shared(&words);
        chat.messages.extend(["{\"role\":\"system\",\"content\":\"", &*text, "\"}"]);
    }

    fn push_texts(&self, out: &mut String, pieces: &[Piece]) {
        for (place, piece) in pieces.iter().enumerate() {
            if place > 0 {
                out.push(' ');
            }
            match piece.kind {
                Kind::System | Kind::Document => out.push_str(&self.shared(piece)),
                _ => push_words(out, &mut generator(piece.name), piece.tokens),
            }
        }
    }

    /// The text of a piece that others have too: pictures as their reference, results of tools as definitions of them.
    fn shared(&self, piece: &Piece) -> Rc<str> {
        let (mut shared, key) = (self.shared.borrow_mut(), (piece.kind, piece.name, piece.tokens));
        if let Some(known) = shared.texts.get(&key) {
            return known.clone();
        }
        let made: Rc<str> = match piece.kind {
            Kind::Image => image_reference(piece.name, self.image_bytes).into(),
            Kind::ToolResult => definitions(piece.name, piece.tokens).into(),
            _ => text(piece.name, piece.tokens).into(),
        };
        if shared.bytes + made.len() > SHARED_BYTES_MAX {
            *shared = Shared::default();
        }
        shared.bytes += made.len();
        shared.texts.insert(key, made.clone());
        made
    }
}

/// The `data:` reference of a picture, `bytes` long after its head.
pub fn image_reference(name: u64, bytes: usize) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut draw = seed::generator(name, "image");
    let payload = (0..bytes.max(16)).map(|_| DIGITS[draw.random_range(0..DIGITS.len())] as char);
    "data:image/png;base64,".chars().chain(payload).collect()
}

/// Definitions of tools as elements of a JSON array, some `tokens` tokens together.
fn definitions(name: u64, tokens: usize) -> String {
    let words = (tokens / TOOLS as usize).saturating_sub(TOOL_OVERHEAD_TOKENS).max(1);
    let definition = |number: u64| {
        format!(
            "{{\"type\":\"function\",\"function\":{{\"name\":\"{}\",\"description\":\"{}\",\"parameters\":{{\
             \"type\":\"object\",\"properties\":{{\"query\":{{\"type\":\"string\"}}}},\"required\":[\"query\"]}}}}}}",
            tool_name(number),
            text(seed::mixed(name, number), words),
        )
    };
    (0..TOOLS).map(definition).collect::<Vec<_>>().join(",")
}

fn tool_name(number: u64) -> String {
    format!("tool_{number}")
}

/// A call is named by the answer that makes it.
fn call_id(turn: &Turn) -> String {
    format!("call_{:016x}", turn.answer)
}

fn generator(name: u64) -> SmallRng {
    seed::generator(name, "words")
}

/// `count` words; a shorter text of the same name is its beginning.
fn text(name: u64, count: usize) -> String {
    let mut out = String::with_capacity(count * 7);
    push_words(&mut out, &mut generator(name), count);
    out
}

fn push_words(out: &mut String, draw: &mut SmallRng, count: usize) {
    let words = words::words();
    for position in 0..count {
        if position > 0 {
            out.push(' ');
        }
        out.push_str(words[draw.random_range(0..words.len())]);
    }
}
