//! gpt-oss chats as vLLM builds them: by the harmony library, not by the model's template (SGLang uses the template).
//!
//! Sources: `entrypoints/openai/parser/harmony_utils.py` and `renderers/online_renderer.py` of vLLM 0.32, and
//! `openai-harmony` 0.0.11 (`encoding.rs`), which it calls; the fixed texts are part of that format (Apache-2.0).
//! Recorded answers: `tests/fixtures/native`. The engine encodes each text on its own and never reads a special
//! token in one: the caller refuses texts that spell one, and encodes between `cuts` separately.

use std::borrow::Cow;

use super::super::NoBlocks;
use super::super::request::{Body, boolean, list, messages};
use super::super::tree::{Map, Tree};
use super::typescript;

const IDENTITY: &str = "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06";
const CHANNELS: &str = "# Valid channels: analysis, commentary, final. Channel must be included for every message.";
const CALLS_CHANNEL: &str = "\nCalls to these tools must go to the commentary channel: 'functions'.";

/// A rendered chat.
#[derive(Debug, Default)]
pub struct Rendered {
    pub text: String,
    /// Byte offsets at which the engine ends one text and begins another, in order.
    pub cuts: Vec<usize>,
    /// Byte ranges of what came from the request.
    pub foreign: Vec<std::ops::Range<usize>>,
    /// Text encoded by itself behind the rendering.
    pub suffix: Option<String>,
}

impl Rendered {
    fn push_foreign(&mut self, text: &str) {
        let start = self.text.len();
        self.text.push_str(text);
        self.foreign.push(start..self.text.len());
    }

    fn cut(&mut self) {
        self.cuts.push(self.text.len());
    }
}

/// One harmony message, before its place among the others is known.
struct Turn<'a> {
    /// Text between `<|start|>` and the channel.
    author: Cow<'a, str>,
    channel: Option<&'static str>,
    /// What follows the channel's name.
    header: &'static str,
    contents: Vec<Cow<'a, str>>,
    is_call: bool,
}

impl<'a> Turn<'a> {
    fn new(author: impl Into<Cow<'a, str>>, channel: Option<&'static str>, text: impl Into<Cow<'a, str>>) -> Self {
        Self { author: author.into(), channel, header: "", contents: vec![text.into()], is_call: false }
    }

    fn is_final(&self) -> bool {
        self.author == "assistant" && self.channel == Some("final")
    }

    fn write(&self, out: &mut Rendered) {
        out.text.push_str("<|start|>");
        out.push_foreign(&self.author);
        if let Some(channel) = self.channel {
            out.text.push_str("<|channel|>");
            out.text.push_str(channel);
            out.text.push_str(self.header);
        }
        out.text.push_str("<|message|>");
        for (index, content) in self.contents.iter().enumerate() {
            if index > 0 {
                out.cut();
            }
            out.push_foreign(content);
        }
        out.text.push_str(if self.is_call { "<|call|>" } else { "<|end|>" });
    }
}

/// Renders a chat body. `date` is today as `2026-01-31`, in the engine's time zone.
pub fn render(body: Body<'_>, date: &str, reads_reasoning_content: bool) -> Result<Rendered, NoBlocks> {
    if boolean(body.continue_final_message.as_ref(), false)? {
        return Err(NoBlocks::Unsupported("continue_final_message of a harmony model"));
    }
    let effort = match body.reasoning_effort.as_ref() {
        None => "medium",
        Some(effort) => match effort.as_text() {
            Some(effort @ ("low" | "medium" | "high")) => effort,
            _ => return Err(NoBlocks::Unsupported("a reasoning effort that harmony does not have")),
        },
    };
    let tools = list(body.tools)?.filter(|tools| !tools.is_empty());
    let mut messages = messages(body.messages)?;
    let instructions = match messages.first().map(role) {
        Some("system" | "developer") => flat_text(messages.remove(0).take("content"))?,
        _ => None,
    };
    let mut turns = Vec::with_capacity(messages.len() + 2);
    let tools_note = if tools.is_some() { CALLS_CHANNEL } else { "" };
    let system = format!("{IDENTITY}\nCurrent date: {date}\n\nReasoning: {effort}\n\n{CHANNELS}{tools_note}");
    turns.push(Turn::new("system", None, system));
    if instructions.as_ref().is_some_and(|text| !text.is_empty()) || tools.is_some() {
        turns.push(Turn::new("developer", None, developer_text(instructions.as_deref(), tools.as_deref())?));
    }
    converted(messages, reads_reasoning_content, &mut turns)?;
    // Reasoning of before the last final answer is not shown.
    let last_final = turns.iter().rposition(Turn::is_final).unwrap_or(0);
    let mut out = Rendered::default();
    for (index, turn) in turns.iter().enumerate() {
        if index >= last_final || turn.channel != Some("analysis") {
            turn.write(&mut out);
        }
    }
    out.text.push_str("<|start|>assistant");
    Ok(out)
}

fn role<'m>(message: &'m Map<'_>) -> &'m str {
    message.get("role").and_then(Tree::as_text).unwrap_or_default()
}

fn developer_text(instructions: Option<&str>, tools: Option<&[Tree<'_>]>) -> Result<String, NoBlocks> {
    let mut sections = Vec::new();
    if let Some(instructions) = instructions {
        sections.push(format!("# Instructions\n\n{instructions}"));
    }
    if let Some(tools) = tools {
        let mut text = String::from("# Tools\n\n## functions\n\nnamespace functions {\n\n");
        for tool in tools {
            let Tree::Map(tool) = tool else { return Err(NoBlocks::BadJson) };
            if tool.get("type").is_some_and(|kind| kind.as_text() != Some("function")) {
                return Err(NoBlocks::Unsupported("a tool of unknown type"));
            }
            let Some(Tree::Map(function)) = tool.get("function") else { return Err(NoBlocks::BadJson) };
            typescript::write_function(&mut text, function)?;
        }
        text.push_str("} // namespace functions");
        sections.push(text);
    }
    Ok(sections.join("\n\n"))
}

/// A content's texts put together; `None` where there is none.
fn flat_text<'a>(content: Option<Tree<'a>>) -> Result<Option<Cow<'a, str>>, NoBlocks> {
    let mut parts = match content {
        None | Some(Tree::Null) => return Ok(None),
        Some(Tree::Text(text)) => return Ok(Some(text)),
        content => texts(content)?,
    };
    Ok(match parts.len() {
        0 => None,
        1 => parts.pop(),
        _ => Some(parts.concat().into()),
    })
}

/// The texts of a content's parts.
fn texts(content: Option<Tree<'_>>) -> Result<Vec<Cow<'_, str>>, NoBlocks> {
    let parts = match content {
        None | Some(Tree::Null) => return Ok(vec!["".into()]),
        Some(Tree::Text(text)) => return Ok(vec![text]),
        Some(Tree::List(parts)) => parts,
        Some(_) => return Err(NoBlocks::BadJson),
    };
    let text = |part| match part {
        Tree::Map(mut part) => match part.take("text") {
            Some(Tree::Text(text)) => Ok(text),
            _ => Err(NoBlocks::Unsupported("a content part without text")),
        },
        _ => Err(NoBlocks::Unsupported("a content part without text")),
    };
    parts.into_iter().map(text).collect()
}

fn converted<'a>(
    messages: Vec<Map<'a>>,
    reads_reasoning_content: bool,
    turns: &mut Vec<Turn<'a>>,
) -> Result<(), NoBlocks> {
    let names = call_names(&messages);
    for mut message in messages {
        let role = role(&message).to_owned();
        let content = message.take("content");
        match role.as_str() {
            "assistant" => {
                let reasoning = message.take("reasoning").filter(|reasoning| !reasoning.is_null());
                let older = message.take("reasoning_content").filter(|_| reads_reasoning_content);
                let reasoning = match reasoning.or(older) {
                    Some(Tree::Text(reasoning)) => Some(reasoning).filter(|text| !text.is_empty()),
                    None | Some(Tree::Null) => None,
                    Some(_) => return Err(NoBlocks::BadJson),
                };
                let analysis = reasoning.map(|text| Turn::new("assistant", Some("analysis"), text));
                match message.take("tool_calls").filter(Tree::is_truthy) {
                    Some(Tree::List(calls)) => push_calls(content, analysis, calls, turns)?,
                    Some(_) => return Err(NoBlocks::BadJson),
                    None => {
                        turns.extend(analysis);
                        let contents = texts(content)?;
                        if contents.first().is_some_and(|text| !text.is_empty()) {
                            turns.push(Turn { contents, ..Turn::new("assistant", Some("final"), "") });
                        }
                    }
                }
            }
            "tool" => {
                let id = message.get("tool_call_id").and_then(Tree::as_text).unwrap_or_default();
                let name = names.iter().rev().find(|(known, _)| known == id).map_or("", |(_, name)| name);
                let text = flat_text(content)?.unwrap_or_default();
                let turn = Turn::new(format!("functions.{name}"), Some("commentary"), text);
                turns.push(Turn { header: " to=assistant", ..turn });
            }
            "system" | "developer" => {
                if let Some(text) = flat_text(content)? {
                    turns.push(Turn::new("developer", None, developer_text(Some(&text), None)?));
                }
            }
            "user" => turns.push(Turn { contents: texts(content)?, ..Turn::new("user", None, "") }),
            _ => return Err(NoBlocks::Unsupported("a role that harmony does not have")),
        }
    }
    Ok(())
}

/// (id, function name) of all calls; of equal ids the last counts.
fn call_names(messages: &[Map<'_>]) -> Vec<(String, String)> {
    let calls = messages.iter().filter_map(|message| match message.get("tool_calls") {
        Some(Tree::List(calls)) => Some(calls),
        _ => None,
    });
    let pair = |call: &Tree<'_>| {
        let Tree::Map(call) = call else { return None };
        let Some(Tree::Map(function)) = call.get("function") else { return None };
        let text = |map: &Map<'_>, name| map.get(name).and_then(Tree::as_text).map(str::to_owned);
        Some((text(call, "id")?, text(function, "name")?))
    };
    calls.flatten().filter_map(pair).collect()
}

/// A turn with calls: what was said, then what was thought, then the calls.
fn push_calls<'a>(
    content: Option<Tree<'a>>,
    analysis: Option<Turn<'a>>,
    calls: Vec<Tree<'a>>,
    turns: &mut Vec<Turn<'a>>,
) -> Result<(), NoBlocks> {
    if let Some(text) = flat_text(content)?.filter(|text| !text.is_empty()) {
        turns.push(Turn::new("assistant", Some("commentary"), text));
    }
    turns.extend(analysis);
    for call in calls {
        let Tree::Map(mut call) = call else { return Err(NoBlocks::BadJson) };
        let Some(Tree::Map(mut function)) = call.take("function") else { return Err(NoBlocks::BadJson) };
        let Some(Tree::Text(name)) = function.take("name") else { return Err(NoBlocks::BadJson) };
        let arguments = match function.take("arguments") {
            Some(Tree::Text(arguments)) => arguments,
            None | Some(Tree::Null) => "".into(),
            Some(_) => return Err(NoBlocks::Unsupported("tool call arguments that are no text")),
        };
        let turn = Turn::new(format!("assistant to=functions.{name}"), Some("commentary"), arguments);
        turns.push(Turn { header: " json", is_call: true, ..turn });
    }
    Ok(())
}
