//! vLLM's way from a chat body to the template's variables.
//!
//! Source: `renderers/chat_utils.py`, `renderers/hf.py`, `renderers/params.py` and the chat protocol of vLLM
//! 0.32, and the golden set recorded from it.

use std::borrow::Cow;

use super::content_form::ContentForm;
use super::request::{Body, Conversation, bad_json, boolean, is_media_part, list, messages, object};
use super::tree::{Map, Tree};
use super::{NoBlocks, PrompterOptions};

/// First words of a system line that one client sends with a changing value; vLLM drops the line.
const BILLING_HEADER: &str = "x-anthropic-billing-header";

/// Normalises a body. `template` is the source of the template that will be rendered.
pub fn conversation<'a>(
    body: Body<'a>,
    form: ContentForm,
    template: &str,
    default_kwargs: &Map<'static>,
    options: &PrompterOptions,
) -> Result<Conversation<'a>, NoBlocks> {
    let add_generation_prompt = boolean(body.add_generation_prompt.as_ref(), true)?;
    let continue_final_message = boolean(body.continue_final_message.as_ref(), false)?;
    if continue_final_message && add_generation_prompt {
        return Err(NoBlocks::Unsupported("both continue_final_message and add_generation_prompt"));
    }
    let tools = list(body.tools)?.filter(|tools| !tools.is_empty());
    let tools = tools.map(|tools| tools.into_iter().map(tool).collect::<Result<Vec<_>, _>>()).transpose()?;

    let mut conversation = Conversation {
        messages: messages(body.messages)?
            .into_iter()
            .map(|message| normalised(message, form, options))
            .collect::<Result<_, _>>()?,
        tools,
        documents: list(body.documents)?,
        add_generation_prompt,
        continue_final_message,
        ..Conversation::default()
    };
    let knows_developer = template.contains("\"developer\"") || template.contains("'developer'");
    if !knows_developer && conversation.messages.iter().any(|message| role(message) == "developer") {
        conversation.messages = merged_system(developer_as_system(conversation.messages));
    }
    set_variables(&mut conversation, body.chat_template_kwargs, body.reasoning_effort, default_kwargs)?;
    Ok(conversation)
}

fn role<'m>(message: &'m Map<'_>) -> &'m str {
    message.get("role").and_then(Tree::as_text).unwrap_or_default()
}

/// The request's own template arguments, without those that mean "not set" to vLLM; body members win.
fn set_variables<'a>(
    conversation: &mut Conversation<'a>,
    kwargs: Option<Tree<'a>>,
    reasoning_effort: Option<Tree<'a>>,
    default_kwargs: &Map<'static>,
) -> Result<(), NoBlocks> {
    let mut kwargs = object(kwargs)?;
    let names_thinking = kwargs.get("enable_thinking").is_some();
    kwargs.0.retain(|(_, value)| !value.is_null() && value.as_text() != Some("auto"));
    for name in ["chat_template", "conversation", "messages"] {
        if kwargs.get(name).is_some() {
            return Err(NoBlocks::Unsupported("a reserved name in chat_template_kwargs"));
        }
    }
    for name in ["add_generation_prompt", "continue_final_message", "tokenize", "return_dict"] {
        kwargs.take(name);
    }
    if let Some(tools) = kwargs.take("tools") {
        conversation.tools = list(Some(tools))?;
    }
    if let Some(documents) = kwargs.take("documents")
        && conversation.documents.is_none()
    {
        conversation.documents = list(Some(documents))?;
    }
    if let Some(effort) = reasoning_effort {
        let Some(name) = effort.as_text() else { return Err(NoBlocks::BadJson) };
        if !names_thinking {
            kwargs.set("enable_thinking", Tree::Bool(name != "none"));
        }
        kwargs.set("reasoning_effort", effort);
    }
    for (name, value) in &default_kwargs.0 {
        if kwargs.get(name).is_none() {
            kwargs.set(name.clone(), value.clone());
        }
    }
    conversation.variables = kwargs;
    Ok(())
}

/// The members of a message that vLLM reads, in the order in which it writes them.
fn normalised<'a>(mut message: Map<'a>, form: ContentForm, options: &PrompterOptions) -> Result<Map<'a>, NoBlocks> {
    let role = match message.take("role") {
        Some(Tree::Text(role)) => role,
        _ => return Err(NoBlocks::BadJson),
    };
    let content = content_parts(message.take("content"), role == "system")?;
    let mut out = Map(vec![("role".into(), Tree::Text(role.clone()))]);
    // A tool's parts become one string in either form: templates handle nothing else there.
    let content = match (&*role, form) {
        ("tool", ContentForm::Parts) => {
            Tree::text(content.iter().map(|(text, _)| &**text).collect::<Vec<_>>().join("\n"))
        }
        (_, form) => joined(content, form),
    };
    out.set("content", content);
    match &*role {
        "assistant" => {
            if let Some(calls) = message.take("tool_calls").filter(|calls| !calls.is_null()) {
                let calls = tool_calls(calls)?;
                if !calls.is_empty() {
                    out.set("tool_calls", Tree::List(calls));
                }
            }
            let reasoning = message.take("reasoning").filter(|value| !value.is_null());
            let older = message.take("reasoning_content").filter(|_| options.vllm_reads_reasoning_content);
            if let Some(reasoning) = reasoning.or(older).filter(|value| !value.is_null()) {
                out.set("reasoning", reasoning.clone());
                out.set("reasoning_content", reasoning);
            }
        }
        "tool" => {
            if let Some(id) = message.take("tool_call_id") {
                out.set("tool_call_id", id);
            }
        }
        _ => {}
    }
    for name in ["name", "task"] {
        if let Some(value @ Tree::Text(_)) = message.take(name) {
            out.set(name, value);
        }
    }
    if role == "developer"
        && let Some(tools) = message.take("tools")
    {
        out.set("tools", tools);
    }
    Ok(out)
}

/// Text parts of a message's content, each with the further members a part template could read.
type Part<'a> = (Cow<'a, str>, Vec<(Cow<'a, str>, Tree<'a>)>);

fn content_parts<'a>(content: Option<Tree<'a>>, is_system: bool) -> Result<Vec<Part<'a>>, NoBlocks> {
    let parts = match content {
        None | Some(Tree::Null) => Vec::new(),
        Some(Tree::Text(text)) => vec![(text, Vec::new())],
        Some(Tree::List(items)) => {
            let mut parts = Vec::with_capacity(items.len());
            for item in items {
                parts.extend(text_part(item)?);
            }
            parts
        }
        Some(_) => return Err(NoBlocks::BadJson),
    };
    Ok(if is_system { without_billing_header(parts) } else { parts })
}

fn text_part(item: Tree<'_>) -> Result<Option<Part<'_>>, NoBlocks> {
    let mut part = match item {
        Tree::Text(text) => return Ok(Some((text, Vec::new()))),
        Tree::Map(part) => part,
        _ => return Err(NoBlocks::BadJson),
    };
    if is_media_part(&part) {
        return Err(NoBlocks::Multimodal);
    }
    let member = match part.get("type").and_then(Tree::as_text) {
        Some("text" | "input_text" | "output_text") => "text",
        Some("refusal") => "refusal",
        Some("thinking") => "thinking",
        _ => return Err(NoBlocks::Unsupported("a content part of unknown type")),
    };
    let text = match part.take(member) {
        Some(Tree::Text(text)) => text,
        None | Some(Tree::Null) => return Ok(None),
        Some(_) => return Err(NoBlocks::BadJson),
    };
    part.0.retain(|(key, _)| !matches!(&**key, "type" | "text" | "refusal" | "thinking" | "uuid" | "detail"));
    Ok(Some((text, part.0)))
}

fn without_billing_header(parts: Vec<Part<'_>>) -> Vec<Part<'_>> {
    let mut kept = Vec::with_capacity(parts.len());
    for (text, extra) in parts {
        let rest = match text {
            Cow::Borrowed(text) if text.starts_with(BILLING_HEADER) => Cow::Borrowed(after_line(text)),
            Cow::Owned(text) if text.starts_with(BILLING_HEADER) => Cow::Owned(after_line(&text).to_owned()),
            text => {
                kept.push((text, extra));
                continue;
            }
        };
        if !rest.is_empty() {
            kept.push((rest, extra));
        }
    }
    kept
}

fn after_line(text: &str) -> &str {
    text.split_once('\n').map_or("", |(_, rest)| rest)
}

/// Empty texts are no lines of their own in the joined form.
fn joined(mut parts: Vec<Part<'_>>, form: ContentForm) -> Tree<'_> {
    if form == ContentForm::Parts {
        return Tree::List(parts.into_iter().map(wrapped).collect());
    }
    parts.retain(|(text, _)| !text.is_empty());
    if parts.len() <= 1 {
        return Tree::Text(parts.pop().map_or(Cow::Borrowed(""), |(text, _)| text));
    }
    let texts: Vec<&str> = parts.iter().map(|(text, _)| &**text).collect();
    Tree::Text(Cow::Owned(texts.join("\n")))
}

fn wrapped<'a>((text, extra): Part<'a>) -> Tree<'a> {
    let mut part = Map(vec![("type".into(), Tree::text("text")), ("text".into(), Tree::Text(text))]);
    extra.into_iter().for_each(|(key, value)| part.set(key, value));
    Tree::Map(part)
}

/// Tool calls with their arguments as objects; what is no object becomes an empty one.
fn tool_calls(calls: Tree<'_>) -> Result<Vec<Tree<'_>>, NoBlocks> {
    let Tree::List(mut calls) = calls else { return Err(NoBlocks::BadJson) };
    for call in &mut calls {
        let Tree::Map(call) = call else { return Err(NoBlocks::BadJson) };
        if call.get("type").is_some_and(|kind| kind.as_text() != Some("function")) {
            return Err(NoBlocks::Unsupported("a tool call of unknown type"));
        }
        let Some(Tree::Map(function)) = call.get_mut("function") else { return Err(NoBlocks::BadJson) };
        let arguments = match function.get("arguments") {
            Some(Tree::Map(_)) => continue,
            Some(Tree::Text(text)) => match Tree::parse(text) {
                Ok(value @ Tree::Map(_)) => value.into_owned(),
                Err(error) if matches!(bad_json(error.what), NoBlocks::Unsupported(_)) => {
                    return Err(bad_json(error.what));
                }
                _ => Tree::Map(Map::default()),
            },
            _ => Tree::Map(Map::default()),
        };
        function.set("arguments", arguments);
    }
    Ok(calls)
}

/// A tool as vLLM's typed model writes it again: its own members in its own order, defaults filled in.
fn tool(tool: Tree<'_>) -> Result<Tree<'_>, NoBlocks> {
    let Tree::Map(mut tool) = tool else { return Err(NoBlocks::BadJson) };
    if tool.get("type").is_some_and(|kind| kind.as_text() != Some("function")) {
        return Err(NoBlocks::Unsupported("a tool of unknown type"));
    }
    let Some(Tree::Map(mut function)) = tool.take("function") else { return Err(NoBlocks::BadJson) };
    let Some(name @ Tree::Text(_)) = function.take("name") else { return Err(NoBlocks::BadJson) };
    let defer = tool.take("defer_loading").filter(|value| !value.is_null());
    let mut out = Map(vec![
        ("name".into(), name),
        ("description".into(), function.take("description").unwrap_or(Tree::Null)),
        ("parameters".into(), function.take("parameters").unwrap_or(Tree::Null)),
    ]);
    if let Some(strict) = function.take("strict").filter(|value| !value.is_null()) {
        out.set("strict", strict);
    }
    if let Some(defer) = function.take("defer_loading").filter(|value| !value.is_null()).or(defer.clone()) {
        out.set("defer_loading", defer);
    }
    let mut tool = Map(vec![("type".into(), Tree::text("function")), ("function".into(), Tree::Map(out))]);
    if let Some(defer) = defer {
        tool.set("defer_loading", defer);
    }
    Ok(Tree::Map(tool))
}

fn developer_as_system(mut messages: Vec<Map<'_>>) -> Vec<Map<'_>> {
    for message in &mut messages {
        if role(message) == "developer" {
            message.set("role", Tree::text("system"));
            message.take("tools");
        }
    }
    messages
}

/// All system texts in one first message, unless there is at most one and it is first already.
fn merged_system(messages: Vec<Map<'_>>) -> Vec<Map<'_>> {
    let late = messages.iter().enumerate().any(|(index, message)| index > 0 && role(message) == "system");
    if !late {
        return messages;
    }
    let (system, rest): (Vec<_>, Vec<_>) = messages.into_iter().partition(|message| role(message) == "system");
    let text = |message: &Map<'_>| match message.get("content") {
        Some(Tree::Text(text)) => text.to_string(),
        Some(Tree::List(parts)) => {
            let texts = parts.iter().filter_map(|part| match part {
                Tree::Map(part) => part.get("text").and_then(Tree::as_text),
                part => part.as_text(),
            });
            texts.collect::<Vec<_>>().join("\n")
        }
        _ => String::new(),
    };
    let texts: Vec<String> = system.iter().map(text).filter(|text| !text.is_empty()).collect();
    let merged = Map(vec![("role".into(), Tree::text("system")), ("content".into(), Tree::text(texts.join("\n\n")))]);
    std::iter::once(merged).chain(rest).collect()
}
