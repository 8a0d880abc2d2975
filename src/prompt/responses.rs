//! `/v1/responses` bodies as the chat bodies that the engines make of them; the chat rules then apply.
//!
//! Sources: vLLM 0.32, `entrypoints/openai/responses/protocol.py` and `utils.py`, `renderers/online_renderer.py`;
//! SGLang 0.5.18, `entrypoints/openai/serving_responses.py` and `protocol.py`. What an engine keeps on its own side
//! (a former response, a stored conversation) is not known here and is refused.

use std::borrow::Cow;

use super::request::{Body, list, object};
use super::tree::{Map, Tree};
use super::{EngineRules, NoBlocks};

/// The chat body that an engine of these rules renders for a Responses body.
pub fn chat_body(body: Body<'_>, rules: EngineRules) -> Result<Body<'_>, NoBlocks> {
    if body.previous_response_id.is_some() {
        return Err(NoBlocks::Unsupported("previous_response_id"));
    }
    if body.conversation.is_some() || body.previous_input_messages.is_some() || body.prompt.is_some() {
        return Err(NoBlocks::Unsupported("a stored conversation or prompt"));
    }
    match rules {
        EngineRules::Vllm => for_vllm(body),
        EngineRules::Sglang => for_sglang(body),
    }
}

fn message<'a>(role: &'static str, name: &'static str, value: Tree<'a>) -> Map<'a> {
    Map(vec![("role".into(), Tree::text(role)), (name.into(), value)])
}

fn role<'m>(message: &'m Map<'_>) -> &'m str {
    message.get("role").and_then(Tree::as_text).unwrap_or_default()
}

/// `instructions` as the first message; an empty text is none.
fn instructions(value: Option<Tree<'_>>) -> Result<Vec<Map<'_>>, NoBlocks> {
    match value {
        None => Ok(Vec::new()),
        Some(Tree::Text(text)) if text.is_empty() => Ok(Vec::new()),
        Some(text @ Tree::Text(_)) => Ok(vec![message("system", "content", text)]),
        Some(_) => Err(NoBlocks::BadJson),
    }
}

fn items(input: Tree<'_>) -> Result<Vec<Map<'_>>, NoBlocks> {
    let as_map = |item| match item {
        Tree::Map(item) => Ok(item),
        _ => Err(NoBlocks::BadJson),
    };
    list(Some(input))?.unwrap_or_default().into_iter().map(as_map).collect()
}

fn for_vllm(body: Body<'_>) -> Result<Body<'_>, NoBlocks> {
    let mut messages = instructions(body.instructions)?;
    let mut is_open = false;
    match body.input {
        None => return Err(NoBlocks::NoPrompt),
        Some(text @ Tree::Text(_)) => messages.push(message("user", "content", text)),
        Some(input) => {
            let items = items(input)?;
            is_open = items.last().is_some_and(is_unfinished);
            let mut turns = Vec::with_capacity(items.len());
            for item in items {
                vllm_item(item, &mut turns)?;
            }
            messages.append(&mut turns);
        }
    }
    let effort = object(body.reasoning)?.take("effort").filter(|effort| !effort.is_null());
    Ok(Body {
        messages: Some(Tree::List(messages.into_iter().map(Tree::Map).collect())),
        tools: vllm_tools(body.tools)?,
        tool_choice: body.tool_choice,
        chat_template_kwargs: body.chat_template_kwargs,
        reasoning_effort: effort,
        add_generation_prompt: Some(Tree::Bool(!is_open)),
        continue_final_message: Some(Tree::Bool(is_open)),
        ..Body::default()
    })
}

/// An unfinished last message or reasoning is continued, as `should_continue_final_message` has it.
fn is_unfinished(item: &Map<'_>) -> bool {
    let text = |name| item.get(name).and_then(Tree::as_text);
    matches!(text("type"), None | Some("message" | "reasoning"))
        && matches!(text("status"), Some("in_progress" | "incomplete"))
}

/// One item of the input. Parts of one assistant turn come as several items and end up in one message where the
/// former message has no such member yet.
fn vllm_item<'a>(mut item: Map<'a>, turns: &mut Vec<Map<'a>>) -> Result<(), NoBlocks> {
    let kind = item.get("type").and_then(Tree::as_text).unwrap_or("message").to_owned();
    match kind.as_str() {
        "function_call" => {
            let call = vllm_call(item)?;
            match turns.last_mut().filter(|last| role(last) == "assistant") {
                Some(last) => match last.get_mut("tool_calls") {
                    Some(Tree::List(calls)) => calls.push(call),
                    _ => last.set("tool_calls", Tree::List(vec![call])),
                },
                None => turns.push(message("assistant", "tool_calls", Tree::List(vec![call]))),
            }
        }
        "reasoning" => {
            if item.get("encrypted_content").is_some_and(Tree::is_truthy) {
                return Err(NoBlocks::Unsupported("encrypted reasoning"));
            }
            let text = match first_text(item.get_mut("content"))? {
                Some(text) => text,
                None => first_text(item.get_mut("summary"))?.unwrap_or_default(),
            };
            set_or_push(turns, "reasoning", Tree::Text(text));
        }
        "function_call_output" => {
            let output = item.take("output").unwrap_or(Tree::Null);
            let mut turn = message("tool", "content", output);
            turn.set("tool_call_id", item.take("call_id").unwrap_or(Tree::Null));
            turns.push(turn);
        }
        "message" => vllm_message(item, turns)?,
        _ => return Err(NoBlocks::Unsupported("an input item of this type")),
    }
    Ok(())
}

/// An assistant's message is its first text alone; all others are chat messages as they are.
fn vllm_message<'a>(mut item: Map<'a>, turns: &mut Vec<Map<'a>>) -> Result<(), NoBlocks> {
    let Some(Tree::Text(role)) = item.take("role") else { return Err(NoBlocks::BadJson) };
    if role == "assistant" {
        let text = match item.get_mut("content") {
            Some(Tree::Text(text)) => Some(std::mem::take(text)),
            Some(parts @ Tree::List(_)) => {
                let text = first_text(Some(parts))?;
                Some(text.ok_or(NoBlocks::Unsupported("an assistant message without text"))?)
            }
            _ => None,
        };
        if let Some(text) = text {
            set_or_push(turns, "content", Tree::Text(text));
            return Ok(());
        }
    }
    let content = item.take("content").unwrap_or(Tree::Null);
    turns.push(Map(vec![("role".into(), Tree::Text(role)), ("content".into(), content)]));
    Ok(())
}

fn set_or_push<'a>(turns: &mut Vec<Map<'a>>, name: &'static str, value: Tree<'a>) {
    match turns.last_mut().filter(|last| role(last) == "assistant" && last.get(name).is_none_or(Tree::is_null)) {
        Some(last) => last.set(name, value),
        None => turns.push(message("assistant", name, value)),
    }
}

/// Text of the first part of a list; `None` for no list and for an empty one.
fn first_text<'a>(parts: Option<&mut Tree<'a>>) -> Result<Option<Cow<'a, str>>, NoBlocks> {
    let Some(Tree::List(parts)) = parts else { return Ok(None) };
    let Some(first) = parts.first_mut() else { return Ok(None) };
    let text = match first {
        Tree::Map(part) => part.take("text"),
        _ => None,
    };
    match text {
        Some(Tree::Text(text)) => Ok(Some(text)),
        _ => Err(NoBlocks::Unsupported("a content part without text")),
    }
}

fn vllm_call(mut item: Map<'_>) -> Result<Tree<'_>, NoBlocks> {
    let mut text = |name: &str| match item.take(name) {
        Some(Tree::Text(text)) => Ok(text),
        _ => Err(NoBlocks::BadJson),
    };
    let (id, name, arguments) = (text("call_id")?, text("name")?, text("arguments")?);
    let name = match item.get("namespace").and_then(Tree::as_text).filter(|space| !space.is_empty()) {
        Some(namespace) => Cow::Owned(format!("{namespace}__{name}")),
        None => name,
    };
    Ok(call(Tree::Text(id), Tree::Text(name), Tree::Text(arguments)))
}

/// A chat tool call, its members in the order in which vLLM writes them.
fn call<'a>(id: Tree<'a>, name: Tree<'a>, arguments: Tree<'a>) -> Tree<'a> {
    let function = Map(vec![("name".into(), name), ("arguments".into(), arguments)]);
    Tree::Map(Map(vec![
        ("id".into(), id),
        ("function".into(), Tree::Map(function)),
        ("type".into(), Tree::text("function")),
    ]))
}

/// Function tools in the nested form of chat; those of a namespace get its name in front.
fn vllm_tools(tools: Option<Tree<'_>>) -> Result<Option<Tree<'_>>, NoBlocks> {
    let tools = list(tools)?.unwrap_or_default();
    if tools.is_empty() {
        return Ok(None);
    }
    let mut found = Vec::with_capacity(tools.len());
    for tool in tools {
        let Tree::Map(mut tool) = tool else { return Err(NoBlocks::BadJson) };
        match tool.get("type").and_then(Tree::as_text) {
            Some("function") => found.push(nested(tool, None)?),
            Some("namespace") => {
                let Some(Tree::Text(namespace)) = tool.take("name") else { return Err(NoBlocks::BadJson) };
                for inner in list(tool.take("tools"))?.unwrap_or_default() {
                    let Tree::Map(inner) = inner else { return Err(NoBlocks::BadJson) };
                    if inner.get("type").and_then(Tree::as_text) == Some("function") {
                        found.push(nested(inner, Some(&namespace))?);
                    }
                }
            }
            Some("custom") => return Err(NoBlocks::Unsupported("a custom tool")),
            // Tools of the engine's own are not rendered.
            _ => {}
        }
    }
    if found.is_empty() {
        // The engine renders an empty list, which a template can tell from none.
        return Err(NoBlocks::Unsupported("tools without a function"));
    }
    Ok(Some(Tree::List(found)))
}

fn nested<'a>(mut tool: Map<'a>, namespace: Option<&str>) -> Result<Tree<'a>, NoBlocks> {
    tool.take("type");
    if let Some(namespace) = namespace {
        let Some(Tree::Text(name)) = tool.get("name") else { return Err(NoBlocks::BadJson) };
        let name = format!("{namespace}__{name}");
        tool.set("name", Tree::text(name));
    }
    Ok(Tree::Map(Map(vec![("type".into(), Tree::text("function")), ("function".into(), Tree::Map(tool))])))
}

fn for_sglang(body: Body<'_>) -> Result<Body<'_>, NoBlocks> {
    let mut messages = instructions(body.instructions)?;
    match body.input {
        None => return Err(NoBlocks::NoPrompt),
        Some(text @ Tree::Text(_)) => messages.push(message("user", "content", text)),
        Some(input) => {
            for item in items(input)? {
                if let Some(turn) = sglang_item(item)? {
                    push_merged(&mut messages, turn)?;
                }
            }
        }
    }
    let mut tools = Vec::new();
    for tool in list(body.tools)?.unwrap_or_default() {
        let Tree::Map(tool) = tool else { return Err(NoBlocks::BadJson) };
        if tool.get("type").and_then(Tree::as_text) == Some("function") {
            tools.push(nested(tool, None)?);
        }
    }
    Ok(Body {
        messages: Some(Tree::List(with_one_system(messages).into_iter().map(Tree::Map).collect())),
        tools: Some(Tree::List(tools)).filter(Tree::is_truthy),
        tool_choice: body.tool_choice.map(sglang_choice),
        chat_template_kwargs: body.chat_template_kwargs,
        reasoning_effort: sglang_effort(body.reasoning)?,
        ..Body::default()
    })
}

/// A `reasoning` object that names no effort asks for `medium` there.
fn sglang_effort(reasoning: Option<Tree<'_>>) -> Result<Option<Tree<'_>>, NoBlocks> {
    let Some(Tree::Map(mut reasoning)) = reasoning else { return object(reasoning).map(|_| None) };
    if reasoning.get("reasoning_effort").is_some() {
        return Err(NoBlocks::Unsupported("reasoning.reasoning_effort"));
    }
    match reasoning.take("effort") {
        None => Ok(Some(Tree::text("medium"))),
        Some(Tree::Null) => Ok(None),
        Some(effort) => Ok(Some(effort)),
    }
}

/// Of the object forms only a named function survives, in the nested form of chat.
fn sglang_choice(choice: Tree<'_>) -> Tree<'_> {
    let Tree::Map(mut choice) = choice else { return choice };
    let is_function = choice.get("type").and_then(Tree::as_text) == Some("function");
    let name = choice.take("name").filter(Tree::is_truthy).or_else(|| match choice.take("function") {
        Some(Tree::Map(mut function)) => function.take("name").filter(Tree::is_truthy),
        _ => None,
    });
    match name.filter(|_| is_function) {
        Some(name) => {
            let function = Tree::Map(Map(vec![("name".into(), name)]));
            Tree::Map(Map(vec![("type".into(), Tree::text("function")), ("function".into(), function)]))
        }
        None => Tree::text("auto"),
    }
}

/// The chat message of one item; `None` for reasoning without text.
fn sglang_item(mut item: Map<'_>) -> Result<Option<Map<'_>>, NoBlocks> {
    let kind = item.take("type").filter(|kind| !kind.is_null());
    match kind.as_ref().map_or(Some("message"), Tree::as_text) {
        Some("function_call") => {
            let arguments = match item.take("arguments") {
                Some(Tree::Text(text)) if matches!(Tree::parse(&text), Ok(Tree::Map(_))) => Tree::Text(text),
                Some(map @ Tree::Map(_)) => map,
                _ => Tree::text("{}"),
            };
            let id = item.take("call_id").filter(Tree::is_truthy).or_else(|| item.take("id"));
            let call = call(id.unwrap_or(Tree::Null), item.take("name").unwrap_or(Tree::Null), arguments);
            Ok(Some(message("assistant", "tool_calls", Tree::List(vec![call]))))
        }
        Some("function_call_output") => {
            let output = match item.take("output") {
                Some(Tree::List(parts)) => Tree::text(texts(&parts).concat()),
                output => output.unwrap_or(Tree::text("")),
            };
            let mut turn = message("tool", "content", output);
            turn.set("tool_call_id", item.take("call_id").unwrap_or(Tree::Null));
            Ok(Some(turn))
        }
        Some("reasoning") => {
            let mut collected = |name| match item.take(name) {
                Some(Tree::List(parts)) => texts(&parts).join("\n"),
                _ => String::new(),
            };
            let text = Some(collected("summary")).filter(|text| !text.is_empty());
            let text = text.unwrap_or_else(|| collected("content"));
            Ok((!text.is_empty()).then(|| message("assistant", "reasoning_content", Tree::text(text))))
        }
        Some("message") => sglang_message(item).map(Some),
        _ => Err(NoBlocks::Unsupported("an input item of this type")),
    }
}

fn sglang_message(mut item: Map<'_>) -> Result<Map<'_>, NoBlocks> {
    item.0.retain(|(name, value)| !value.is_null() && !matches!(&**name, "id" | "status"));
    if role(&item) == "developer" {
        item.set("role", Tree::text("system"));
    }
    if let Some(Tree::List(parts)) = item.get_mut("content") {
        for part in parts {
            let Tree::Map(part) = part else { return Err(NoBlocks::BadJson) };
            if matches!(part.get("type").and_then(Tree::as_text), Some("input_text" | "output_text")) {
                let text = part.take("text").unwrap_or(Tree::text(""));
                *part = Map(vec![("type".into(), Tree::text("text")), ("text".into(), text)]);
            }
        }
    }
    Ok(item)
}

/// Non-empty texts of a list of parts.
fn texts<'t>(parts: &'t [Tree<'_>]) -> Vec<&'t str> {
    let text = |part: &'t Tree<'_>| match part {
        Tree::Map(part) => part.get("text").and_then(Tree::as_text).filter(|text| !text.is_empty()),
        _ => None,
    };
    parts.iter().filter_map(text).collect()
}

/// Appends a message, an assistant's to the assistant's before it.
fn push_merged<'a>(messages: &mut Vec<Map<'a>>, mut turn: Map<'a>) -> Result<(), NoBlocks> {
    let Some(last) = messages.last_mut().filter(|last| role(last) == "assistant" && role(&turn) == "assistant") else {
        messages.push(turn);
        return Ok(());
    };
    if let Some(content) = turn.take("content").filter(Tree::is_truthy) {
        let content = match (last.take("content").filter(Tree::is_truthy), content) {
            (None, content) => content,
            (Some(Tree::Text(before)), Tree::Text(content)) => Tree::text(format!("{before}\n\n{content}")),
            (Some(before), content) => Tree::List([as_parts(before)?, as_parts(content)?].concat()),
        };
        last.set("content", content);
    }
    if let Some(Tree::List(calls)) = turn.take("tool_calls") {
        match last.get_mut("tool_calls") {
            Some(Tree::List(before)) => before.extend(calls),
            _ => last.set("tool_calls", Tree::List(calls)),
        }
    }
    if let Some(Tree::Text(reasoning)) = turn.take("reasoning_content").filter(Tree::is_truthy) {
        let reasoning = match last.get("reasoning_content").and_then(Tree::as_text).filter(|text| !text.is_empty()) {
            Some(before) => Tree::text(format!("{before}\n{reasoning}")),
            None => Tree::Text(reasoning),
        };
        last.set("reasoning_content", reasoning);
    }
    Ok(())
}

fn as_parts(content: Tree<'_>) -> Result<Vec<Tree<'_>>, NoBlocks> {
    match content {
        Tree::List(parts) => Ok(parts),
        text @ Tree::Text(_) => {
            Ok(vec![Tree::Map(Map(vec![("type".into(), Tree::text("text")), ("text".into(), text)]))])
        }
        _ => Err(NoBlocks::BadJson),
    }
}

/// All system texts as one first message, a blank line between them.
fn with_one_system(messages: Vec<Map<'_>>) -> Vec<Map<'_>> {
    let (system, rest): (Vec<_>, Vec<_>) = messages.into_iter().partition(|message| role(message) == "system");
    let mut chunks: Vec<&str> = Vec::new();
    for message in &system {
        match message.get("content") {
            Some(Tree::Text(text)) => chunks.push(text),
            Some(Tree::List(parts)) => chunks.extend(parts.iter().filter_map(|part| match part {
                Tree::Map(part) => part.get("text").and_then(Tree::as_text),
                _ => None,
            })),
            _ => {}
        }
    }
    if chunks.is_empty() {
        return rest;
    }
    let first = message("system", "content", Tree::text(chunks.join("\n\n")));
    std::iter::once(first).chain(rest).collect()
}
