//! What `apply_chat_template` does around a template: special tokens, aliases, open last messages.
//!
//! Source: `utils/chat_template_utils.py` of transformers 5.24, which both engines call.

use minijinja::Value;

use super::NoBlocks;
use super::python::is_space;
use super::request::Conversation;
use super::template::ChatTemplate;
use super::tree::{Map, Tree};

/// Names under which a message's reasoning is passed; the first that is set is the one that counts.
const REASONING_MEMBERS: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// Put behind the last message's text to find where the rendering must be cut.
const CONTINUE_TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// Renders a conversation; `special_tokens` are (variable name, text) pairs such as `bos_token`, `bytes_hint` is
/// about how long the text will be.
pub fn render(
    template: &ChatTemplate,
    special_tokens: &[(String, String)],
    mut conversation: Conversation<'_>,
    bytes_hint: usize,
) -> Result<String, NoBlocks> {
    for message in &mut conversation.messages {
        message.0.retain(|(_, value)| !value.is_null());
        alias_reasoning(message);
    }
    let open_text = match conversation.continue_final_message {
        true => Some(mark_open_message(template, conversation.messages.last_mut())?),
        false => None,
    };
    let mut text = template.render(variables(special_tokens, &conversation, false), bytes_hint);
    if text.is_err() && conversation.retry_with_flat_tools && conversation.tools.is_some() {
        text = template.render(variables(special_tokens, &conversation, true), bytes_hint);
    }
    match open_text {
        None => text,
        Some(open_text) => cut_at_tag(text?, &open_text),
    }
}

/// gpt-oss templates read `thinking`, others `reasoning_content`: whichever is set fills both.
fn alias_reasoning(message: &mut Map<'_>) {
    let Some(reasoning) = REASONING_MEMBERS.iter().find_map(|name| message.get(name)).cloned() else { return };
    if message.get("thinking").is_none() {
        message.0.insert(0, ("thinking".into(), reasoning.clone()));
    }
    message.set("reasoning_content", reasoning);
}

fn variables(special_tokens: &[(String, String)], conversation: &Conversation<'_>, flat_tools: bool) -> Value {
    let special_tokens = special_tokens.iter().map(|(name, text)| (name.as_str(), Value::from(text.as_str())));
    let own = conversation.variables.0.iter().map(|(name, value)| (name.as_ref(), value.to_value()));
    let messages: Vec<Value> = conversation.messages.iter().map(|message| message.to_value()).collect();
    let tool = |tool: &Tree<'_>| match tool {
        Tree::Map(map) if flat_tools => map.get("function").unwrap_or(tool).to_value(),
        tool => tool.to_value(),
    };
    let list = |items: Option<Vec<Value>>| items.map_or_else(|| Value::from(()), Value::from);
    let tools = conversation.tools.as_ref().map(|tools| tools.iter().map(tool).collect());
    let documents = conversation.documents.as_ref().map(|documents| documents.iter().map(Tree::to_value).collect());
    let fixed = [
        ("messages", Value::from(messages)),
        ("tools", list(tools)),
        ("documents", list(documents)),
        ("add_generation_prompt", Value::from(conversation.add_generation_prompt)),
    ];
    Value::from_pairs(special_tokens.chain(own).chain(fixed))
}

/// Appends the tag to the last message's text, or to its last text part, and gives the text before that.
fn mark_open_message(template: &ChatTemplate, last: Option<&mut Map<'_>>) -> Result<String, NoBlocks> {
    let unsupported = Err(NoBlocks::Unsupported("continue_final_message without text to continue"));
    if !template.source().contains("content") {
        return unsupported;
    }
    let slot = match last.and_then(|last| last.get_mut("content")) {
        Some(Tree::Text(text)) => text,
        Some(Tree::List(parts)) => {
            let texts = parts.iter_mut().rev().filter_map(|part| match part {
                Tree::Map(part) => part.get_mut("text"),
                _ => None,
            });
            match texts.into_iter().next() {
                Some(Tree::Text(text)) => text,
                _ => return unsupported,
            }
        }
        _ => return unsupported,
    };
    let before = slot.to_string();
    *slot = format!("{before}{CONTINUE_TAG}").into();
    Ok(before)
}

fn cut_at_tag(mut rendered: String, open_text: &str) -> Result<String, NoBlocks> {
    let place = rendered.rfind(CONTINUE_TAG.trim_end());
    let Some(place) = place.filter(|_| rendered.contains(open_text.trim_matches(is_space))) else {
        return Err(NoBlocks::Unsupported("a final message that the template does not show"));
    };
    let keeps_spacing = rendered[place..].starts_with(CONTINUE_TAG);
    rendered.truncate(place);
    if !keeps_spacing {
        // The template trimmed the message, so the engine trims what is before the tag.
        rendered.truncate(rendered.trim_end_matches(is_space).len());
    }
    Ok(rendered)
}
