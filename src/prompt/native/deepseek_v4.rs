//! DeepSeek-V4 chats: a model without a template, whose prompts both engines build in code.
//!
//! Sources: `tokenizers/deepseek_v4.py` and `deepseek_v4_encoding.py` of vLLM 0.32; `encoding_dsv4.py`,
//! `chat_encoding.py` and `serving_chat.py` of SGLang 0.5.18. The fixed texts are part of the model's format
//! (`encoding/encoding_dsv4.py` of the model, MIT). Recorded answers of both: `tests/fixtures/native`.

use std::borrow::Cow;
use std::collections::HashMap;

use super::super::NoBlocks;
use super::super::python::{self, JsonStyle};
use super::super::request::Conversation;
use super::super::tree::{Map, Tree};
use super::{Effort, Settings};

const BEGIN: &str = "<｜begin▁of▁sentence｜>";
const END: &str = "<｜end▁of▁sentence｜>";
const USER: &str = "<｜User｜>";
const ASSISTANT: &str = "<｜Assistant｜>";
const REMINDER: &str = "<｜latest_reminder｜>";
const THINK: &str = "<think>";
const THINK_END: &str = "</think>";

/// Tasks of the model's own use, each with a token of its own.
const TASKS: [&str; 6] = ["action", "query", "authority", "domain", "title", "read_url"];

const MUCH_EFFORT: &str = "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n\
You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n\
Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n";

const MORE_EFFORT: &str = "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n\
You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying cause rather than any surface symptom.\n\
Do not stop reasoning until you have independently verified the solution from multiple angles and are certain that no assumption remains unchecked and no error remains undiscovered.\n\n";

const TOOLS_BEFORE: &str = r#"## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<｜DSML｜tool_calls>" block like the following:

<｜DSML｜tool_calls>
<｜DSML｜invoke name="$TOOL_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$TOOL_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

"#;

const TOOLS_BEHIND: &str =
    "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n";

/// A message, or a user's message with the tool results around it.
struct Turn<'m> {
    role: &'m str,
    message: &'m Map<'m>,
    /// Blocks of a user's turn, empty for all others.
    blocks: Vec<Block<'m>>,
    tools: &'m [Tree<'m>],
    task: Option<&'m str>,
    reasoning_dropped: bool,
}

struct Block<'m> {
    text: Cow<'m, str>,
    /// Id of the call that a tool result answers; `None` for text.
    answers: Option<&'m str>,
}

/// Renders a conversation; `conversation.tools` go to its leading system message.
pub fn render(conversation: &Conversation<'_>, settings: &Settings) -> Result<String, NoBlocks> {
    let head = Map(vec![("role".into(), Tree::text("system"))]);
    let tools = conversation.tools.as_deref().unwrap_or_default();
    let mut messages: Vec<&Map<'_>> = conversation.messages.iter().collect();
    let mut holder = place_of_tools(&messages, settings, !tools.is_empty());
    if holder == Holder::New {
        messages.insert(0, &head);
        holder = Holder::At(0);
    }
    let mut turns = merged(&messages, holder, tools, settings)?;
    sort_results(&mut turns);
    let drops = settings.drop_thinking && turns.iter().all(|turn| turn.tools.is_empty());
    if settings.is_thinking && drops {
        drop_reasoning(&mut turns);
    }
    let last_user = last_user(&turns);
    let mut out = String::from(BEGIN);
    if settings.is_thinking && !turns.is_empty() {
        out.push_str(match settings.effort {
            Effort::Plain => "",
            Effort::Much => MUCH_EFFORT,
            Effort::More => MORE_EFFORT,
        });
    }
    for index in 0..turns.len() {
        Place { turns: &turns, index, last_user, drops, settings }.write(&mut out)?;
    }
    Ok(out)
}

/// Which message the request's tools belong to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Holder {
    At(usize),
    /// A new first one.
    New,
    None,
}

/// vLLM takes the first system message wherever it is; SGLang always has a system message in front.
fn place_of_tools(messages: &[&Map<'_>], settings: &Settings, has_tools: bool) -> Holder {
    let first_system = messages.iter().position(|message| role(message) == "system");
    match first_system {
        Some(0) => Holder::At(0),
        _ if settings.leads_with_system => Holder::New,
        _ if !has_tools => Holder::None,
        Some(at) => Holder::At(at),
        None => Holder::New,
    }
}

fn role<'m>(message: &'m Map<'_>) -> &'m str {
    message.get("role").and_then(Tree::as_text).unwrap_or_default()
}

/// A message's text; parts are joined by a blank line.
fn text_of<'m>(message: &'m Map<'_>) -> Cow<'m, str> {
    match message.get("content") {
        Some(Tree::Text(text)) => Cow::Borrowed(text),
        Some(Tree::List(parts)) => {
            let texts = parts.iter().filter_map(|part| match part {
                Tree::Map(part) => part.get("text").and_then(Tree::as_text),
                _ => None,
            });
            Cow::Owned(texts.collect::<Vec<_>>().join("\n\n"))
        }
        _ => Cow::Borrowed(""),
    }
}

/// Tool results become blocks of a user's turn; users' messages join a turn before them that has no task.
fn merged<'m>(
    messages: &[&'m Map<'m>],
    holder: Holder,
    tools: &'m [Tree<'m>],
    settings: &'m Settings,
) -> Result<Vec<Turn<'m>>, NoBlocks> {
    let last_user = messages.iter().rposition(|message| matches!(role(message), "user" | "developer"));
    let mut turns: Vec<Turn<'m>> = Vec::with_capacity(messages.len());
    for (index, message) in messages.iter().copied().enumerate() {
        let role = role(message);
        let own_task = message.get("task").and_then(Tree::as_text);
        let task = own_task.or(settings.task.as_deref().filter(|_| Some(index) == last_user));
        let block = match role {
            "tool" => Block { text: text_of(message), answers: Some(id_of(message.get("tool_call_id"))) },
            "user" => Block { text: text_of(message), answers: None },
            _ => {
                let tools = match message.get("tools") {
                    _ if holder == Holder::At(index) && !tools.is_empty() => tools,
                    Some(Tree::List(own)) => own,
                    _ => &[],
                };
                turns.push(Turn { role, message, blocks: Vec::new(), tools, task, reasoning_dropped: false });
                continue;
            }
        };
        let open = turns.last_mut().filter(|last| last.role == "user" && (role == "tool" || last.task.is_none()));
        match open {
            Some(turn) => turn.blocks.push(block),
            None => {
                let task = task.filter(|_| role == "user");
                let blocks = vec![block];
                turns.push(Turn { role: "user", message, blocks, tools: &[], task, reasoning_dropped: false });
            }
        }
    }
    if settings.task.is_some() && last_user.is_none() {
        return Err(NoBlocks::TemplateRefused("a task without a user's message".into()));
    }
    Ok(turns)
}

fn id_of<'m>(id: Option<&'m Tree<'_>>) -> &'m str {
    id.and_then(Tree::as_text).unwrap_or_default()
}

/// Tool results of one turn go in the order of the calls that they answer; unknown ids count as the first call.
fn sort_results(turns: &mut [Turn<'_>]) {
    let mut order: HashMap<String, usize> = HashMap::new();
    for turn in turns {
        if turn.role == "assistant"
            && let Some(Tree::List(calls)) = turn.message.get("tool_calls")
            && !calls.is_empty()
        {
            order = calls
                .iter()
                .enumerate()
                .filter_map(|(index, call)| match call {
                    Tree::Map(call) => Some((id_of(call.get("id")), index)),
                    _ => None,
                })
                .filter(|(id, _)| !id.is_empty())
                .map(|(id, index)| (id.to_owned(), index))
                .collect();
        }
        let places: Vec<usize> = (0..turn.blocks.len()).filter(|place| turn.blocks[*place].answers.is_some()).collect();
        if turn.role != "user" || places.len() < 2 || order.is_empty() {
            continue;
        }
        let mut sorted = places.clone();
        sorted.sort_by_key(|place| order.get(turn.blocks[*place].answers.unwrap_or_default()).copied().unwrap_or(0));
        let mut blocks: Vec<Option<Block<'_>>> = std::mem::take(&mut turn.blocks).into_iter().map(Some).collect();
        let mut sorted = sorted.into_iter();
        for place in 0..blocks.len() {
            let from = if places.contains(&place) { sorted.next().unwrap_or(place) } else { place };
            turn.blocks.extend(blocks.get_mut(from).and_then(Option::take));
        }
    }
}

fn last_user(turns: &[Turn<'_>]) -> Option<usize> {
    turns.iter().rposition(|turn| matches!(turn.role, "user" | "developer"))
}

/// Before the last user's turn nobody's reasoning is kept, and nothing of a developer or an unknown role.
fn drop_reasoning(turns: &mut Vec<Turn<'_>>) {
    let last_user = last_user(turns);
    let mut index = 0;
    turns.retain_mut(|turn| {
        let is_late = last_user.is_none_or(|last| index >= last);
        index += 1;
        turn.reasoning_dropped = !is_late && turn.role == "assistant";
        is_late || matches!(turn.role, "user" | "system" | "latest_reminder" | "direct_search_results" | "assistant")
    });
}

/// One turn among the others.
struct Place<'p, 'm> {
    turns: &'p [Turn<'m>],
    index: usize,
    last_user: Option<usize>,
    drops: bool,
    settings: &'p Settings,
}

impl Place<'_, '_> {
    fn turn(&self) -> &Turn<'_> {
        &self.turns[self.index]
    }

    fn next_role(&self) -> Option<&str> {
        self.turns.get(self.index + 1).map(|turn| turn.role)
    }

    fn write(&self, out: &mut String) -> Result<(), NoBlocks> {
        let turn = self.turn();
        match turn.role {
            "system" => out.push_str(&text_of(turn.message)),
            "developer" => {
                let text = text_of(turn.message);
                if text.is_empty() {
                    return Err(NoBlocks::TemplateRefused("a developer's message without text".into()));
                }
                out.push_str(USER);
                out.push_str(&text);
            }
            "user" => write_blocks(out, &turn.blocks),
            "latest_reminder" => {
                out.push_str(REMINDER);
                out.push_str(&text_of(turn.message));
            }
            "assistant" => self.write_assistant(out)?,
            _ => return Err(NoBlocks::TemplateRefused("a role that DeepSeek-V4 does not have".into())),
        }
        if matches!(turn.role, "system" | "developer") && !turn.tools.is_empty() {
            write_tools(out, turn.tools)?;
        }
        if self.next_role().is_none_or(|next| matches!(next, "assistant" | "latest_reminder")) {
            self.write_transition(out)?;
        }
        Ok(())
    }

    fn write_assistant(&self, out: &mut String) -> Result<(), NoBlocks> {
        let turn = self.turn();
        let follows_task = self.index > 0 && self.turns[self.index - 1].task.is_some();
        let is_late = self.last_user.is_none_or(|last| self.index > last);
        if self.settings.is_thinking && !follows_task && (!self.drops || is_late) {
            if !turn.reasoning_dropped {
                let reasoning = turn.message.get(self.settings.reasoning_member);
                out.push_str(reasoning.and_then(Tree::as_text).unwrap_or_default());
            }
            out.push_str(THINK_END);
        }
        out.push_str(&text_of(turn.message));
        match turn.message.get("tool_calls") {
            Some(Tree::List(calls)) if !calls.is_empty() => write_calls(out, calls)?,
            _ => {}
        }
        out.push_str(END);
        Ok(())
    }

    /// What opens the next turn.
    fn write_transition(&self, out: &mut String) -> Result<(), NoBlocks> {
        let turn = self.turn();
        if let Some(task) = turn.task {
            if !TASKS.contains(&task) {
                return Err(NoBlocks::TemplateRefused("an unknown task".into()));
            }
            if task == "action" {
                out.push_str(ASSISTANT);
                out.push_str(if self.settings.is_thinking { THINK } else { THINK_END });
            }
            out.push_str(&format!("<｜{task}｜>"));
            return Ok(());
        }
        let opens = match turn.role {
            "user" | "developer" => true,
            "system" => self.settings.system_opens_turn && self.next_role().is_none_or(|next| next == "assistant"),
            _ => false,
        };
        if opens {
            out.push_str(ASSISTANT);
            let is_late = self.last_user.is_none_or(|last| self.index >= last);
            out.push_str(if self.settings.is_thinking && (!self.drops || is_late) { THINK } else { THINK_END });
        }
        Ok(())
    }
}

fn write_blocks(out: &mut String, blocks: &[Block<'_>]) {
    out.push_str(USER);
    for (index, block) in blocks.iter().enumerate() {
        if index > 0 {
            out.push_str("\n\n");
        }
        match block.answers {
            Some(_) => {
                out.push_str("<tool_result>");
                out.push_str(&block.text);
                out.push_str("</tool_result>");
            }
            None => out.push_str(&block.text),
        }
    }
}

fn json(value: &Tree<'_>) -> Result<String, NoBlocks> {
    python::json(&value.to_value(), &JsonStyle::default()).map_err(|error| NoBlocks::TemplateFailed(error.to_string()))
}

fn write_tools(out: &mut String, tools: &[Tree<'_>]) -> Result<(), NoBlocks> {
    out.push_str("\n\n");
    out.push_str(TOOLS_BEFORE);
    for (index, tool) in tools.iter().enumerate() {
        let Tree::Map(tool) = tool else { return Err(NoBlocks::BadJson) };
        let Some(function) = tool.get("function") else { return Err(NoBlocks::BadJson) };
        if index > 0 {
            out.push('\n');
        }
        out.push_str(&json(function)?);
    }
    out.push_str(TOOLS_BEHIND);
    Ok(())
}

fn write_calls(out: &mut String, calls: &[Tree<'_>]) -> Result<(), NoBlocks> {
    out.push_str("\n\n<｜DSML｜tool_calls>\n");
    for (index, call) in calls.iter().enumerate() {
        let Tree::Map(call) = call else { return Err(NoBlocks::BadJson) };
        let Some(Tree::Map(function)) = call.get("function") else { return Err(NoBlocks::BadJson) };
        let name = function.get("name").unwrap_or(&Tree::Null).to_value();
        let arguments = match function.get("arguments") {
            Some(Tree::Map(arguments)) => arguments,
            _ => return Err(NoBlocks::Unsupported("tool call arguments that are no JSON object")),
        };
        if index > 0 {
            out.push('\n');
        }
        let name = python::str(&name).map_err(|error| NoBlocks::TemplateFailed(error.to_string()))?;
        out.push_str(&format!("<｜DSML｜invoke name=\"{name}\">\n"));
        for (index, (key, value)) in arguments.0.iter().enumerate() {
            if index > 0 {
                out.push('\n');
            }
            let (is_text, value) = match value {
                Tree::Text(text) => (true, Cow::Borrowed(&**text)),
                value => (false, Cow::Owned(json(value)?)),
            };
            out.push_str(&format!(
                "<｜DSML｜parameter name=\"{key}\" string=\"{is_text}\">{value}</｜DSML｜parameter>"
            ));
        }
        out.push_str("\n</｜DSML｜invoke>");
    }
    out.push_str("\n</｜DSML｜tool_calls>");
    Ok(())
}
