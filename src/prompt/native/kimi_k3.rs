//! Kimi-K3 chats: XTML, written by the model's own tokenizer class, which both engines call.
//!
//! Sources: the model's `tokenization_kimi.py` and `encoding_k3.py`; `renderers/kimi_k3.py` of vLLM 0.32;
//! `_prepare_kimi_k3_messages` and the `kimi_k3` path of SGLang 0.5.18. The fixed texts are part of that format. Each
//! segment is encoded by itself and only control segments are read as special tokens: `cuts` lie where two texts
//! meet, and the caller refuses a text that spells a token.

use std::borrow::Cow;

use super::super::python::{self, JsonStyle, is_space};
use super::super::request::Conversation;
use super::super::tree::{Map, Tree};
use super::super::{NoBlocks, tiktoken};
use super::Rendered;

const OPEN: &str = "<|open|>";
const CLOSE: &str = "<|close|>";
const SEPARATOR: &str = "<|sep|>";
const END: &str = "<|end_of_msg|>";

/// Stands for an image; the engines take it for one wherever it is.
const IMAGE: &str = "<|kimi_image_placeholder|>";

/// What the request and an engine's rules decide beside the messages.
#[derive(Debug)]
pub struct Settings<'a> {
    pub is_thinking: bool,
    /// `low`, `high` or `max`.
    pub effort: Cow<'a, str>,
    /// Tools as they are written: already reduced to what the engine passes on.
    pub tools: Vec<Tree<'a>>,
    /// `required` or `none` ask for a turn that says so.
    pub tool_choice: Option<&'static str>,
    pub response_format: Option<Tree<'a>>,
    pub opens_answer: bool,
    /// A result may name its call as `function:place`, too.
    pub has_aliases: bool,
}

/// Renders a conversation.
pub fn render(conversation: &Conversation<'_>, settings: &Settings<'_>) -> Result<Rendered, NoBlocks> {
    let mut out = Writer::default();
    if !settings.tools.is_empty() {
        let tools = compact(&Tree::List(settings.tools.clone()))?;
        let body = format!("# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{tools}\n```");
        out.system("tool-declare", &body);
    }
    if settings.is_thinking {
        let body = format!(
            "`thinking_effort` guides on how much to think in your thinking channel (not including the response \
             channel), supported values include `low`, `medium`, `high`, and `max`.\n\
             Now the system is invoked with `thinking_effort={}`.",
            settings.effort
        );
        out.system("thinking-effort", &body);
    }
    messages(&mut out, &conversation.messages, settings)?;
    match settings.tool_choice {
        Some("required") => out.system(
            "tool-choice",
            "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
        ),
        Some("none") => out.system(
            "tool-choice",
            "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
        ),
        _ => {}
    }
    response_format(&mut out, settings.response_format.as_ref())?;
    if settings.opens_answer {
        out.open("message", &[("role", "assistant")]);
        out.open(if settings.is_thinking { "think" } else { "response" }, &[]);
    }
    if out.rendered.text.contains(IMAGE) {
        return Err(NoBlocks::Multimodal);
    }
    Ok(out.rendered)
}

/// Writes segments.
#[derive(Default)]
struct Writer {
    rendered: Rendered,
    /// The segment before was a text.
    follows_text: bool,
}

impl Writer {
    fn control(&mut self, token: &str) {
        self.rendered.text.push_str(token);
        self.follows_text = false;
    }

    fn text(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        let start = self.rendered.text.len();
        if self.follows_text {
            self.rendered.cuts.push(start);
        }
        self.rendered.text.push_str(text);
        self.rendered.cuts.extend(tiktoken::forced_cuts(text).iter().map(|cut| start + cut));
        self.rendered.foreign.push(start..start + text.len());
        self.follows_text = true;
    }

    fn open(&mut self, tag: &str, attributes: &[(&str, &str)]) {
        self.control(OPEN);
        self.text(tag);
        for (name, value) in attributes {
            self.text(&format!(" {name}"));
            self.text("=\"");
            self.text(&value.replace('&', "&amp;").replace('"', "&quot;"));
            self.text("\"");
        }
        self.control(SEPARATOR);
    }

    fn close(&mut self, tag: &str) {
        self.control(CLOSE);
        self.text(tag);
        self.control(SEPARATOR);
    }

    fn end_message(&mut self) {
        self.close("message");
        self.control(END);
    }

    fn system(&mut self, kind: &str, body: &str) {
        self.open("message", &[("role", "system"), ("type", kind)]);
        self.text(body);
        self.end_message();
    }

    fn content(&mut self, content: Option<&Tree<'_>>) -> Result<(), NoBlocks> {
        match content {
            None | Some(Tree::Null) => {}
            Some(Tree::Text(text)) => self.text(text),
            Some(Tree::List(parts)) => {
                for part in parts {
                    let Tree::Map(part) = part else { return Err(NoBlocks::BadJson) };
                    let Some(Tree::Text(text)) = part.get("text") else { return Err(NoBlocks::BadJson) };
                    self.text(text);
                }
            }
            Some(_) => return Err(NoBlocks::BadJson),
        }
        Ok(())
    }
}

fn text_of<'m>(message: &'m Map<'_>, name: &str) -> Option<&'m str> {
    message.get(name).and_then(Tree::as_text)
}

fn compact(value: &Tree<'_>) -> Result<String, NoBlocks> {
    let style =
        JsonStyle { item_separator: ",".into(), key_separator: ":".into(), sort_keys: true, ..JsonStyle::default() };
    python::json(&value.to_value(), &style).map_err(|error| NoBlocks::TemplateFailed(error.to_string()))
}

/// One call of the assistant's turn before a run of tool results.
struct Call<'m> {
    id: Option<&'m str>,
    name: &'m str,
}

fn messages(out: &mut Writer, messages: &[Map<'_>], settings: &Settings<'_>) -> Result<(), NoBlocks> {
    let mut calls: Vec<Call<'_>> = Vec::new();
    // Results since the last assistant's turn.
    let mut results = 0;
    let mut index = 0;
    while let Some(message) = messages.get(index) {
        index += 1;
        let role = text_of(message, "role").unwrap_or_default();
        let name = text_of(message, "name").filter(|name| !name.is_empty());
        let attributes: Vec<(&str, &str)> =
            [("role", role)].into_iter().chain(name.map(|name| ("name", name))).collect();
        match role {
            "user" | "system" => {
                if message.get("tools").is_some_and(Tree::is_truthy) {
                    return Err(NoBlocks::Unsupported("tools of a message"));
                }
                out.open("message", &attributes);
                out.content(message.get("content"))?;
                out.end_message();
            }
            "assistant" => {
                calls = calls_of(message)?;
                results = 0;
                out.open("message", &attributes);
                assistant(out, message, settings.is_thinking)?;
                out.end_message();
            }
            "tool" => {
                let start = index - 1;
                while messages.get(index).and_then(|next| text_of(next, "role")) == Some("tool") {
                    index += 1;
                }
                let run = &messages[start..index];
                tool_results(out, run, &calls, results, settings.has_aliases)?;
                results += run.len();
            }
            // The model's encoder passes over what it does not know, a developer's message among it.
            _ => {}
        }
    }
    Ok(())
}

fn calls_of<'m>(message: &'m Map<'_>) -> Result<Vec<Call<'m>>, NoBlocks> {
    let Some(Tree::List(calls)) = message.get("tool_calls") else { return Ok(Vec::new()) };
    let call = |call: &'m Tree<'_>| {
        let Tree::Map(call) = call else { return Err(NoBlocks::BadJson) };
        let Some(Tree::Map(function)) = call.get("function") else { return Err(NoBlocks::BadJson) };
        let name = text_of(function, "name").ok_or(NoBlocks::BadJson)?;
        Ok(Call { id: text_of(call, "id"), name })
    };
    calls.iter().map(call).collect()
}

/// A run of results goes in the order of the calls before it if every one names its call; else as it came, each
/// taken for the answer to the call at its place.
fn tool_results(
    out: &mut Writer,
    run: &[Map<'_>],
    calls: &[Call<'_>],
    results_before: usize,
    has_aliases: bool,
) -> Result<(), NoBlocks> {
    let place = |message: &Map<'_>| {
        let id = text_of(message, "tool_call_id")?;
        calls
            .iter()
            .enumerate()
            .position(|(place, call)| call.id == Some(id) || has_aliases && id == format!("{}:{place}", call.name))
    };
    let mut order: Vec<usize> = (0..run.len()).collect();
    let places: Option<Vec<usize>> = run.iter().map(place).collect();
    if let Some(places) = &places {
        order.sort_by_key(|index| places[*index]);
    }
    for (shown, index) in order.into_iter().enumerate() {
        let message = &run[index];
        let name = match &places {
            Some(places) => Some(calls[places[index]].name),
            None => text_of(message, "name").or_else(|| calls.get(results_before + shown).map(|call| call.name)),
        };
        let Some(name) = name else {
            return Err(NoBlocks::TemplateRefused("a tool result without a call".into()));
        };
        out.open("message", &[("role", "tool"), ("tool", name), ("index", &(results_before + shown + 1).to_string())]);
        out.content(message.get("content"))?;
        out.end_message();
    }
    Ok(())
}

fn assistant(out: &mut Writer, message: &Map<'_>, is_thinking: bool) -> Result<(), NoBlocks> {
    if is_thinking {
        let reasoning = text_of(message, "reasoning_content").filter(|text| !text.is_empty());
        out.open("think", &[]);
        if let Some(text) = reasoning.filter(|text| !text.trim_matches(is_space).is_empty()) {
            out.text(text);
        }
        out.close("think");
    }
    out.open("response", &[]);
    out.content(message.get("content"))?;
    out.close("response");
    let Some(Tree::List(calls)) = message.get("tool_calls") else { return Ok(()) };
    if calls.is_empty() {
        return Ok(());
    }
    out.open("tools", &[]);
    for (index, call) in calls.iter().enumerate() {
        let Tree::Map(call) = call else { return Err(NoBlocks::BadJson) };
        let Some(Tree::Map(function)) = call.get("function") else { return Err(NoBlocks::BadJson) };
        let name = text_of(function, "name").ok_or(NoBlocks::BadJson)?;
        let Some(Tree::Map(arguments)) = function.get("arguments") else {
            return Err(NoBlocks::Unsupported("tool call arguments that are no JSON object"));
        };
        out.open("call", &[("tool", name), ("index", &(index + 1).to_string())]);
        for (key, value) in &arguments.0 {
            let (kind, shown) = argument(value)?;
            out.open("argument", &[("key", key), ("type", kind)]);
            out.text(&shown);
            out.close("argument");
        }
        out.close("call");
    }
    out.close("tools");
    Ok(())
}

/// Name of a value's type, and the value as it is shown: a text as it is, anything else as JSON.
fn argument<'m>(value: &'m Tree<'_>) -> Result<(&'static str, Cow<'m, str>), NoBlocks> {
    let kind = match value {
        Tree::Text(text) => return Ok(("string", Cow::Borrowed(text))),
        Tree::Null => "null",
        Tree::Bool(_) => "boolean",
        Tree::Integer(_) | Tree::Float(_) => "number",
        Tree::Map(_) => "object",
        Tree::List(_) => "array",
    };
    let shown = python::json(&value.to_value(), &JsonStyle::default());
    Ok((kind, shown.map_err(|error| NoBlocks::TemplateFailed(error.to_string()))?.into()))
}

fn response_format(out: &mut Writer, format: Option<&Tree<'_>>) -> Result<(), NoBlocks> {
    const RAW_JSON: &str = "Your response must be raw JSON data without markdown code blocks (```json) or any \
                            additional formatting.";
    let Some(Tree::Map(format)) = format else { return Ok(()) };
    match text_of(format, "type") {
        Some("json_object") => out.system(
            "response-format",
            &format!("The system is invoked with `response_format=json_object`.\n{RAW_JSON}"),
        ),
        Some("json_schema") => {
            let schema = match format.get("json_schema") {
                Some(Tree::Map(outer)) => outer.get("schema").filter(|schema| !schema.is_null()),
                _ => None,
            };
            let Some(schema) = schema else { return Err(NoBlocks::Unsupported("a json_schema without a schema")) };
            let schema = compact(schema)?;
            let body = format!(
                "The system is invoked with `response_format=json_schema`.\n{RAW_JSON}\n\
                 The JSON data must match the following schema:\n```json\n{schema}\n```"
            );
            out.system("response-format", &body);
        }
        _ => {}
    }
    Ok(())
}
