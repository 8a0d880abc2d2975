//! The members of a request body that decide its prompt, and the conversation the engine's rules make of them.
//!
//! Pure data; which rules apply is decided by `vllm` and `sglang`, which fill a `Conversation`.

use std::borrow::Cow;

use super::NoBlocks;
use super::json::{JsonResult, LONE_SURROGATE, Reader};
use super::tree::{Cursor, Map, Tree};

/// What one engine renders: the template's variables and what is done around the rendering.
#[derive(Debug, Default)]
pub struct Conversation<'a> {
    pub messages: Vec<Map<'a>>,
    /// `None` is Python's `None`; the variable is always defined.
    pub tools: Option<Vec<Tree<'a>>>,
    pub documents: Option<Vec<Tree<'a>>>,
    /// Further variables; they win over special tokens.
    pub variables: Map<'a>,
    pub add_generation_prompt: bool,
    /// Leave the last message open: cut the rendering behind its content.
    pub continue_final_message: bool,
    /// Text encoded by itself behind the rendering.
    pub suffix: Option<Cow<'a, str>>,
    /// Render again with each tool replaced by its `function` when the first rendering fails.
    pub retry_with_flat_tools: bool,
}

/// Members of a chat or completion body, in the types in which they arrived.
#[derive(Clone, Debug, Default)]
pub struct Body<'a> {
    pub messages: Option<Tree<'a>>,
    pub prompt: Option<Tree<'a>>,
    pub tools: Option<Tree<'a>>,
    pub tool_choice: Option<Tree<'a>>,
    pub documents: Option<Tree<'a>>,
    pub chat_template: Option<Tree<'a>>,
    pub chat_template_kwargs: Option<Tree<'a>>,
    pub add_generation_prompt: Option<Tree<'a>>,
    pub continue_final_message: Option<Tree<'a>>,
    pub add_special_tokens: Option<Tree<'a>>,
    pub reasoning: Option<Tree<'a>>,
    pub reasoning_effort: Option<Tree<'a>>,
    /// SGLang: ready token ids beside the messages.
    pub input_ids: Option<Tree<'a>>,
    pub truncate_prompt_tokens: Option<Tree<'a>>,
    pub prompt_embeds: Option<Tree<'a>>,
    pub suffix: Option<Tree<'a>>,
    /// The engine keys this request's blocks by more than their tokens: a salt, an adapter, an extra key.
    pub has_namespace: bool,
    pub response_format: Option<Tree<'a>>,
    /// SGLang: a task of the model's own, for DeepSeek-V4.
    pub task: Option<Tree<'a>>,
    /// Responses: what is to be answered, and what stands before it.
    pub input: Option<Tree<'a>>,
    pub instructions: Option<Tree<'a>>,
    /// Responses: names of what the engine keeps.
    pub previous_response_id: Option<Tree<'a>>,
    pub previous_input_messages: Option<Tree<'a>>,
    pub conversation: Option<Tree<'a>>,
    /// Messages: the system text beside the turns, and what is asked of the model's thinking.
    pub system: Option<Tree<'a>>,
    pub thinking: Option<Tree<'a>>,
    pub output_config: Option<Tree<'a>>,
}

/// A top-level value as it was found: still to be consumed, or read already.
pub enum Look<'l, 't, 'a> {
    Text(&'l mut Reader<'a>),
    Tree(&'l mut Cursor<'t>),
}

impl Look<'_, '_, '_> {
    /// Nothing to see.
    pub fn pass(self) -> JsonResult<()> {
        match self {
            Look::Text(reader) => reader.skip(),
            Look::Tree(_) => Ok(()),
        }
    }
}

impl<'a> Body<'a> {
    /// Reads a body; members that do not touch the prompt are skipped, `null` is absence.
    pub fn read(text: &'a str) -> Result<Self, NoBlocks> {
        let mut reader = Reader::new(text);
        let mut body = Body::default();
        if reader.peek() != Some(b'{') {
            return Err(NoBlocks::BadJson);
        }
        reader
            .object(|reader, key| body.member(reader, &key, |look| look.pass()))
            .and_then(|()| reader.end())
            .map_err(|error| bad_json(error.what))?;
        Ok(body)
    }

    /// Refuses what the engine does not keep as plain blocks of the prompt as it came: credit for those would be false.
    pub fn check_is_plain(&self) -> Result<(), NoBlocks> {
        if self.has_namespace {
            return Err(NoBlocks::Unsupported("a cache namespace of the request's own"));
        }
        if self.truncate_prompt_tokens.is_some() || self.prompt_embeds.is_some() {
            return Err(NoBlocks::Unsupported("truncated or embedded prompts"));
        }
        Ok(())
    }

    /// Reads the top-level member `key`, whose value the reader is at, or passes over it. `look` sees every value once.
    pub fn member(
        &mut self,
        reader: &mut Reader<'a>,
        key: &str,
        look: impl FnOnce(Look<'_, '_, 'a>) -> JsonResult<()>,
    ) -> JsonResult<()> {
        let slot = match key {
            "messages" => &mut self.messages,
            "prompt" => &mut self.prompt,
            "tools" => &mut self.tools,
            "tool_choice" => &mut self.tool_choice,
            "documents" => &mut self.documents,
            "chat_template" => &mut self.chat_template,
            "chat_template_kwargs" => &mut self.chat_template_kwargs,
            "add_generation_prompt" => &mut self.add_generation_prompt,
            "continue_final_message" => &mut self.continue_final_message,
            "add_special_tokens" => &mut self.add_special_tokens,
            "reasoning" => &mut self.reasoning,
            "reasoning_effort" => &mut self.reasoning_effort,
            "input_ids" => &mut self.input_ids,
            "truncate_prompt_tokens" => &mut self.truncate_prompt_tokens,
            "prompt_embeds" => &mut self.prompt_embeds,
            "suffix" => &mut self.suffix,
            "cache_salt" | "extra_key" | "lora_path" => {
                let value = Tree::read(reader)?;
                self.has_namespace |= !value.is_null() && value.as_text() != Some("");
                return Ok(());
            }
            "response_format" => &mut self.response_format,
            "task" => &mut self.task,
            "input" => &mut self.input,
            "instructions" => &mut self.instructions,
            "previous_response_id" => &mut self.previous_response_id,
            "previous_input_messages" => &mut self.previous_input_messages,
            "conversation" => &mut self.conversation,
            "system" => &mut self.system,
            "thinking" => &mut self.thinking,
            "output_config" => &mut self.output_config,
            _ => return look(Look::Text(reader)),
        };
        let value = Tree::read(reader)?;
        look(Look::Tree(&mut Cursor(&value)))?;
        *slot = Some(value).filter(|value| !value.is_null());
        Ok(())
    }
}

/// A text that only Python could read (half a surrogate pair) is no client error, but cannot be encoded either.
pub fn bad_json(what: &'static str) -> NoBlocks {
    if what == LONE_SURROGATE { NoBlocks::Unsupported("a lone surrogate") } else { NoBlocks::BadJson }
}

/// Pydantic's reading of a boolean member.
pub fn boolean(value: Option<&Tree<'_>>, default: bool) -> Result<bool, NoBlocks> {
    match value {
        None => Ok(default),
        Some(Tree::Bool(value)) => Ok(*value),
        Some(Tree::Integer(digits)) if digits == "0" || digits == "1" => Ok(digits == "1"),
        Some(Tree::Text(text)) => match text.to_ascii_lowercase().as_str() {
            "true" | "1" | "yes" | "on" | "t" | "y" => Ok(true),
            "false" | "0" | "no" | "off" | "f" | "n" => Ok(false),
            _ => Err(NoBlocks::BadJson),
        },
        Some(_) => Err(NoBlocks::BadJson),
    }
}

/// An optional member that must be an object.
pub fn object(value: Option<Tree<'_>>) -> Result<Map<'_>, NoBlocks> {
    match value {
        None => Ok(Map::default()),
        Some(Tree::Map(map)) => Ok(map),
        Some(_) => Err(NoBlocks::BadJson),
    }
}

/// An optional member that must be a list.
pub fn list(value: Option<Tree<'_>>) -> Result<Option<Vec<Tree<'_>>>, NoBlocks> {
    match value {
        None => Ok(None),
        Some(Tree::List(items)) => Ok(Some(items)),
        Some(_) => Err(NoBlocks::BadJson),
    }
}

/// Messages of a body as maps; an empty list is refused as both engines refuse it.
pub fn messages(value: Option<Tree<'_>>) -> Result<Vec<Map<'_>>, NoBlocks> {
    let Some(items) = list(value)?.filter(|items| !items.is_empty()) else { return Err(NoBlocks::NoPrompt) };
    let as_map = |item| match item {
        Tree::Map(map) => Ok(map),
        _ => Err(NoBlocks::BadJson),
    };
    items.into_iter().map(as_map).collect()
}

/// The ids of a list of token ids; `None` for any other list.
pub fn token_ids(items: &[Tree<'_>]) -> Option<Vec<u32>> {
    let id = |item: &Tree<'_>| match item {
        Tree::Integer(digits) => digits.parse().ok(),
        _ => None,
    };
    items.iter().map(id).collect::<Option<Vec<u32>>>().filter(|ids| !ids.is_empty())
}

/// Whether a content part carries something other than text, whatever its `type` says.
pub fn is_media_part(part: &Map<'_>) -> bool {
    const MEDIA: [&str; 11] = [
        "image_url",
        "input_image",
        "image",
        "image_pil",
        "image_embeds",
        "audio_url",
        "input_audio",
        "audio_embeds",
        "video_url",
        "video_embeds",
        "prompt_embeds",
    ];
    let kind = part.get("type").and_then(Tree::as_text);
    kind.is_some_and(|kind| MEDIA.contains(&kind) || kind == "file" || kind == "video" || kind == "audio")
        || (kind.is_none() && MEDIA.iter().any(|key| part.get(key).is_some()))
}
