//! SGLang's way from a chat body to the template's variables.
//!
//! Source: `entrypoints/openai/serving_chat.py`, `protocol.py` and `parser/jinja_template_utils.py` of SGLang
//! 0.5.18.

use std::borrow::Cow;

use super::NoBlocks;
use super::content_form::ContentForm;
use super::request::{Body, Conversation, boolean, is_media_part, list, messages, object};
use super::tree::{Map, Tree};

/// Members of a message in the order of SGLang's typed model; the rest of a message is dropped there.
const MESSAGE_MEMBERS: [&str; 5] = ["tool_call_id", "name", "reasoning_content", "tool_calls", "tools"];

/// Efforts that SGLang takes from a `reasoning` object.
const EFFORTS: [&str; 7] = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];

/// Normalises a body. `template` is the source of the template that will be rendered.
pub fn conversation<'a>(
    body: Body<'a>,
    form: ContentForm,
    template: &str,
    default_kwargs: &Map<'static>,
) -> Result<Conversation<'a>, NoBlocks> {
    let continue_final_message = boolean(body.continue_final_message.as_ref(), false)?;
    let tools = chosen_tools(body.tools, body.tool_choice.as_ref())?;
    let mut turns =
        messages(body.messages)?.into_iter().map(|message| normalised(message, form)).collect::<Result<Vec<_>, _>>()?;
    let suffix = split_last_assistant(&mut turns, continue_final_message);
    if turns.is_empty() {
        return Err(NoBlocks::NoPrompt);
    }
    Ok(Conversation {
        messages: turns,
        tools,
        variables: variables(
            body.chat_template_kwargs,
            body.reasoning,
            body.reasoning_effort,
            template,
            default_kwargs,
        )?,
        add_generation_prompt: true,
        suffix,
        retry_with_flat_tools: true,
        ..Conversation::default()
    })
}

/// A last assistant turn is never rendered as one: continued, its text is encoded behind the rendering;
/// otherwise it is rendered as a user's.
fn split_last_assistant<'a>(turns: &mut Vec<Map<'a>>, continued: bool) -> Option<Cow<'a, str>> {
    let last = turns.last_mut()?;
    if last.get("role").and_then(Tree::as_text) != Some("assistant") {
        return None;
    }
    let Some(Tree::Text(text)) = last.get("content") else { return None };
    let text = text.clone();
    if continued {
        turns.pop();
        return Some(text).filter(|text| !text.is_empty());
    }
    *last = Map(vec![("role".into(), Tree::text("user")), ("content".into(), Tree::Text(text))]);
    None
}

pub(super) fn variables<'a>(
    kwargs: Option<Tree<'a>>,
    reasoning: Option<Tree<'a>>,
    effort: Option<Tree<'a>>,
    template: &str,
    default_kwargs: &Map<'static>,
) -> Result<Map<'a>, NoBlocks> {
    let mut kwargs = object(kwargs)?;
    let (mut effort, mut thinking) = (effort, None);
    if let Some(Tree::Map(mut reasoning)) = reasoning {
        let given = reasoning.take("effort").filter(|value| !value.is_null());
        match given.or_else(|| reasoning.take("reasoning_effort")).filter(|value| !value.is_null()) {
            Some(Tree::Text(name)) if EFFORTS.contains(&&*name) => effort = Some(Tree::Text(name)),
            Some(_) => return Err(NoBlocks::Unsupported("a numeric reasoning effort")),
            None => {}
        }
        let enabled = reasoning.take("enabled").filter(|value| !value.is_null()).or_else(|| reasoning.take("enable"));
        thinking = enabled.filter(is_on).map(|_| true);
    }
    match &effort {
        None => {}
        Some(Tree::Text(name)) => thinking = Some(&**name != "none"),
        Some(_) => return Err(NoBlocks::Unsupported("a numeric reasoning effort")),
    }
    if let Some(thinking) = thinking {
        for name in ["thinking", "enable_thinking"] {
            if kwargs.get(name).is_none() {
                kwargs.set(name, Tree::Bool(thinking));
            }
        }
    }
    for name in
        ["messages", "conversation", "tools", "add_generation_prompt", "tokenize", "return_dict", "chat_template"]
    {
        if kwargs.get(name).is_some() {
            return Err(NoBlocks::Unsupported("a reserved name in chat_template_kwargs"));
        }
    }
    for (name, value) in &default_kwargs.0 {
        if kwargs.get(name).is_none() {
            kwargs.set(name.clone(), value.clone());
        }
    }
    // A default effort in the arguments counts as the request's own where it gives none.
    let effort = effort.or_else(|| kwargs.get("reasoning_effort").filter(|value| !value.is_null()).cloned());
    let is_low = effort.as_ref().and_then(Tree::as_text) == Some("low");
    let mut variables = Map::default();
    if let Some(effort) = effort {
        variables.set("reasoning_effort", effort);
    }
    kwargs.0.into_iter().for_each(|(key, value)| variables.set(key, value));
    let has_low_effort = template.contains("low_effort") && template.contains("truncate_history_thinking");
    if is_low && has_low_effort && variables.get("low_effort").is_none() {
        variables.set("low_effort", Tree::Bool(true));
    }
    Ok(variables)
}

fn is_on(value: &Tree<'_>) -> bool {
    match value {
        Tree::Text(text) => {
            matches!(text.trim().to_ascii_lowercase().as_str(), "1" | "true" | "yes" | "y" | "on")
        }
        value => value.is_truthy(),
    }
}

pub(super) fn normalised(mut message: Map<'_>, form: ContentForm) -> Result<Map<'_>, NoBlocks> {
    let role = match message.take("role") {
        Some(Tree::Text(role)) => role.to_ascii_lowercase(),
        _ => return Err(NoBlocks::BadJson),
    };
    let content = content(message.take("content"), form, &role)?;
    let mut out = Map(vec![("role".into(), Tree::text(role.clone())), ("content".into(), content)]);
    for name in MESSAGE_MEMBERS {
        let Some(value) = message.take(name).filter(|value| !value.is_null()) else { continue };
        let value = match (name, value) {
            // A user's message has no members but these two.
            _ if role == "user" => continue,
            ("tool_calls", calls) => Tree::List(tool_calls(calls, role == "assistant")?),
            ("tools", tools) => {
                let tools = list(Some(tools))?.unwrap_or_default();
                Tree::List(tools.into_iter().map(tool).collect::<Result<_, _>>()?)
            }
            (_, value @ Tree::Text(_)) => value,
            _ => return Err(NoBlocks::BadJson),
        };
        out.set(name, value);
    }
    Ok(out)
}

fn content<'a>(content: Option<Tree<'a>>, form: ContentForm, role: &str) -> Result<Tree<'a>, NoBlocks> {
    let items = match content {
        None | Some(Tree::Null) => return Ok(Tree::text("")),
        Some(text @ Tree::Text(_)) => return Ok(text),
        Some(Tree::List(items)) => items,
        Some(_) => return Err(NoBlocks::BadJson),
    };
    let mut texts = Vec::with_capacity(items.len());
    for item in items {
        let Tree::Map(mut part) = item else { return Err(NoBlocks::BadJson) };
        if is_media_part(&part) {
            return Err(NoBlocks::Multimodal);
        }
        let is_text = matches!(part.get("type").and_then(Tree::as_text), Some("text" | "input_text"));
        match part.take("text") {
            Some(Tree::Text(text)) if is_text => texts.push(text),
            _ => return Err(NoBlocks::Unsupported("a content part of unknown type")),
        }
    }
    // A tool's parts are joined in either form; both joins use one space.
    if form == ContentForm::Text || role == "tool" {
        return Ok(match texts.len() {
            1 => Tree::Text(texts.remove(0)),
            _ => Tree::text(texts.join(" ")),
        });
    }
    let part = |text| Tree::Map(Map(vec![("type".into(), Tree::text("text")), ("text".into(), Tree::Text(text))]));
    Ok(Tree::List(texts.into_iter().map(part).collect()))
}

/// Tool calls in the order of SGLang's typed model (`id`, `index`, `type`, `function`), arguments parsed.
/// Arguments that are no object are refused by the engine.
fn tool_calls(calls: Tree<'_>, parse_arguments: bool) -> Result<Vec<Tree<'_>>, NoBlocks> {
    let Tree::List(calls) = calls else { return Err(NoBlocks::BadJson) };
    let mut out = Vec::with_capacity(calls.len());
    for call in calls {
        let Tree::Map(mut call) = call else { return Err(NoBlocks::BadJson) };
        let Some(Tree::Map(mut function)) = call.take("function") else { return Err(NoBlocks::BadJson) };
        let arguments = match function.take("arguments").unwrap_or(Tree::Null) {
            Tree::Text(text) if parse_arguments => match Tree::parse(&text) {
                Ok(value @ Tree::Map(_)) => as_orjson(value)?.into_owned(),
                _ => return Err(NoBlocks::Unsupported("tool call arguments that are no JSON object")),
            },
            arguments => arguments,
        };
        let function =
            Map(vec![("name".into(), function.take("name").unwrap_or(Tree::Null)), ("arguments".into(), arguments)]);
        out.push(Tree::Map(Map(vec![
            ("id".into(), call.take("id").unwrap_or(Tree::Null)),
            ("index".into(), call.take("index").unwrap_or(Tree::Null)),
            ("type".into(), call.take("type").unwrap_or(Tree::text("function"))),
            ("function".into(), Tree::Map(function)),
        ])));
    }
    Ok(out)
}

/// What `orjson.loads` makes of numbers: integers beyond 64 bits become floats, `NaN` is an error.
fn as_orjson(value: Tree<'_>) -> Result<Tree<'_>, NoBlocks> {
    Ok(match value {
        Tree::Integer(digits) if digits.parse::<i64>().is_err() && digits.parse::<u64>().is_err() => {
            Tree::Float(digits.parse().unwrap_or(f64::INFINITY))
        }
        Tree::Float(value) if !value.is_finite() => {
            return Err(NoBlocks::Unsupported("a number that SGLang refuses"));
        }
        Tree::List(items) => Tree::List(items.into_iter().map(as_orjson).collect::<Result<_, _>>()?),
        Tree::Map(map) => {
            let members = map.0.into_iter().map(|(key, value)| Ok((key, as_orjson(value)?)));
            Tree::Map(Map(members.collect::<Result<_, NoBlocks>>()?))
        }
        value => value,
    })
}

/// The tools that reach the template: none for `none`, one by name, else all.
fn chosen_tools<'a>(tools: Option<Tree<'a>>, choice: Option<&Tree<'a>>) -> Result<Option<Vec<Tree<'a>>>, NoBlocks> {
    let tools = list(tools)?.unwrap_or_default();
    let tools = tools.into_iter().map(tool).collect::<Result<Vec<_>, _>>()?;
    let chosen = match choice {
        Some(Tree::Text(choice)) if choice == "none" => Vec::new(),
        Some(Tree::Map(choice)) => {
            let Some(Tree::Map(function)) = choice.get("function") else { return Err(NoBlocks::BadJson) };
            let name = function.get("name").cloned();
            tools.into_iter().filter(|tool| function_name(tool) == name.as_ref()).collect()
        }
        _ => tools,
    };
    Ok(Some(chosen).filter(|chosen| !chosen.is_empty()))
}

fn function_name<'t, 'a>(tool: &'t Tree<'a>) -> Option<&'t Tree<'a>> {
    match tool {
        Tree::Map(tool) => match tool.get("function") {
            Some(Tree::Map(function)) => function.get("name"),
            _ => None,
        },
        _ => None,
    }
}

/// A tool as SGLang's typed model writes it again.
fn tool(tool: Tree<'_>) -> Result<Tree<'_>, NoBlocks> {
    let Tree::Map(mut tool) = tool else { return Err(NoBlocks::BadJson) };
    let Some(Tree::Map(mut function)) = tool.take("function") else { return Err(NoBlocks::BadJson) };
    let Some(name @ Tree::Text(_)) = function.take("name") else { return Err(NoBlocks::BadJson) };
    let defer = tool.take("defer_loading").unwrap_or(Tree::Null);
    let mut out = Map(vec![
        ("description".into(), function.take("description").unwrap_or(Tree::Null)),
        ("name".into(), name),
        ("parameters".into(), function.take("parameters").unwrap_or(Tree::Null)),
        ("strict".into(), function.take("strict").unwrap_or(Tree::Bool(false))),
    ]);
    let own_defer = function.take("defer_loading").filter(|value| !value.is_null());
    if let Some(value) = own_defer.or_else(|| Some(defer.clone()).filter(|value| !value.is_null())) {
        out.set("defer_loading", value);
    }
    let kind = match tool.take("type") {
        None => Tree::text("function"),
        Some(kind @ Tree::Text(_)) => kind,
        Some(_) => return Err(NoBlocks::BadJson),
    };
    Ok(Tree::Map(Map(vec![
        ("type".into(), kind),
        ("function".into(), Tree::Map(out)),
        ("defer_loading".into(), defer),
    ])))
}
