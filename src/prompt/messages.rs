//! `/v1/messages` bodies (Anthropic's form) as the chat bodies that the engines make of them; the chat rules then apply.
//! Also what is sent to a worker that knows chat alone, so that it renders the same prompt.
//!
//! Sources: vLLM 0.32, `entrypoints/anthropic/serving.py` and `protocol.py`; SGLang 0.5.23, the files of the same names.
//! Two things that only a server knows are taken as its defaults: `thinking` of type `disabled` asks vLLM for no effort
//! (some templates make it ask for a low one), and SGLang's reasoning parser has `<think>` for its marks.

use std::borrow::Cow;

use super::python::{self, JsonStyle};
use super::request::{Body, list, messages, object};
use super::tree::{Map, Tree};
use super::{EngineRules, NoBlocks};

/// First words of a system block that one client sends with a changing value; vLLM drops the block.
const BILLING_HEADER: &str = "x-anthropic-billing-header";

/// What the chat body is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// To be rendered here: what a template is never given is refused early.
    Render,
    /// To be sent to a worker.
    Send,
}

/// What the engines look for in a model's templates before they convert.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TemplateTraits {
    /// System messages may stand between others. Where they may not, the engines put all of them first.
    pub takes_late_system: bool,
    /// The reasoning of former turns stands between `<think>` and `</think>`.
    pub has_think_tags: bool,
}

/// The chat body of a Messages body. The error's text says what an engine refuses, or what is not known here.
pub fn chat_body(
    mut body: Body<'_>,
    engine: EngineRules,
    traits: TemplateTraits,
    purpose: Purpose,
) -> Result<Body<'_>, NoBlocks> {
    let rules = Rules { engine, traits, purpose };
    let turns = messages(body.messages.take())?;
    let mut chat = Vec::with_capacity(turns.len() + 1);
    if let Some(system) = rules.leading_system(body.system.take(), &turns)? {
        chat.push(message("system", Tree::text(system)));
    }
    for turn in turns {
        rules.turn(turn, &mut chat)?;
    }
    let effort = rules.effort(body.output_config.take())?;
    let thinking = thinking(body.thinking.take())?;
    let mut kwargs = match engine {
        EngineRules::Vllm => object(body.chat_template_kwargs.take())?,
        // Not a member of its Messages requests.
        EngineRules::Sglang => Map::default(),
    };
    let effort = match (engine, thinking, purpose) {
        (EngineRules::Vllm, Some(false), Purpose::Render) => Some(Tree::text("none")),
        (EngineRules::Vllm, Some(false), Purpose::Send) => {
            // Chat endpoints of older releases do not know that effort.
            kwargs.set("enable_thinking", Tree::Bool(false));
            None
        }
        (EngineRules::Sglang, Some(enabled), _) => {
            // The engine sets the one that its parser names; a template reads one of the two.
            ["thinking", "enable_thinking"].iter().for_each(|name| kwargs.set(*name, Tree::Bool(enabled)));
            effort
        }
        _ => effort,
    };
    Ok(Body {
        messages: Some(Tree::List(chat.into_iter().map(Tree::Map).collect())),
        tools: rules.tools(body.tools.take())?,
        tool_choice: tool_choice(body.tool_choice.take())?,
        chat_template_kwargs: (!kwargs.0.is_empty()).then_some(Tree::Map(kwargs)),
        reasoning_effort: effort,
        ..Body::default()
    })
}

fn message<'a>(role: &'static str, content: Tree<'a>) -> Map<'a> {
    Map(vec![("role".into(), Tree::text(role)), ("content".into(), content)])
}

fn text_of<'m>(map: &'m Map<'_>, name: &str) -> Option<&'m str> {
    map.get(name).and_then(Tree::as_text)
}

fn part<'a>(kind: &'static str, name: &'static str, value: Tree<'a>) -> Tree<'a> {
    Tree::Map(Map(vec![("type".into(), Tree::text(kind)), (name.into(), value)]))
}

/// One part of text alone is that text; nothing is nothing.
fn content_of(mut parts: Vec<Tree<'_>>) -> Option<Tree<'_>> {
    if let [Tree::Map(only)] = &mut parts[..]
        && text_of(only, "type") == Some("text")
    {
        return only.take("text");
    }
    (!parts.is_empty()).then_some(Tree::List(parts))
}

/// Whether thinking is asked for; absent where the request leaves it to the model.
fn thinking(value: Option<Tree<'_>>) -> Result<Option<bool>, NoBlocks> {
    if value.is_none() {
        return Ok(None);
    }
    match object(value)?.take("type") {
        Some(Tree::Text(kind)) if kind == "disabled" => Ok(Some(false)),
        Some(Tree::Text(kind)) if kind == "enabled" || kind == "adaptive" => Ok(Some(true)),
        _ => Err(NoBlocks::Unsupported("thinking of this type")),
    }
}

fn tool_choice(value: Option<Tree<'_>>) -> Result<Option<Tree<'_>>, NoBlocks> {
    if value.is_none() {
        return Ok(None);
    }
    let mut choice = object(value)?;
    Ok(Some(match text_of(&choice, "type") {
        Some("auto") => Tree::text("auto"),
        Some("any") => Tree::text("required"),
        Some("none") => Tree::text("none"),
        Some("tool") => {
            let Some(name @ Tree::Text(_)) = choice.take("name") else {
                return Err(NoBlocks::Unsupported("a tool_choice without a name"));
            };
            part("function", "function", Tree::Map(Map(vec![("name".into(), name)])))
        }
        _ => return Err(NoBlocks::Unsupported("a tool_choice of this type")),
    }))
}

/// `json.dumps` of a call's input; an empty one for none.
fn arguments(input: Option<Tree<'_>>) -> Result<Tree<'static>, NoBlocks> {
    let input = input.filter(Tree::is_truthy).unwrap_or(Tree::Map(Map::default()));
    let style = JsonStyle { ensure_ascii: true, ..JsonStyle::default() };
    python::json(&input.to_value(), &style).map(Tree::text).map_err(|_| NoBlocks::BadJson)
}

/// What one block of a turn is made into, beside what goes straight into the chat.
#[derive(Default)]
struct Turn<'a> {
    parts: Vec<Tree<'a>>,
    calls: Vec<Tree<'a>>,
    reasoning: Vec<Cow<'a, str>>,
}

#[derive(Clone, Copy)]
struct Rules {
    engine: EngineRules,
    traits: TemplateTraits,
    purpose: Purpose,
}

impl Rules {
    fn is_vllm(self) -> bool {
        self.engine == EngineRules::Vllm
    }

    /// The first system message: the body's own, and where the template wants it those between the turns.
    fn leading_system(self, system: Option<Tree<'_>>, turns: &[Map<'_>]) -> Result<Option<String>, NoBlocks> {
        let mut texts: Vec<String> = Vec::new();
        match system {
            None => {}
            Some(Tree::Text(text)) if self.is_vllm() && text.is_empty() => {}
            Some(Tree::Text(text)) if !self.is_vllm() && text.trim().is_empty() => {}
            Some(Tree::Text(text)) => texts.push(text.into_owned()),
            Some(Tree::List(blocks)) => texts.extend(self.system_texts(&blocks)?.into_iter().map(str::to_owned)),
            Some(_) => return Err(NoBlocks::BadJson),
        }
        if !self.traits.takes_late_system {
            for turn in turns.iter().filter(|turn| text_of(turn, "role") == Some("system")) {
                texts.extend(self.inline_system(turn)?);
            }
        }
        let between = if self.is_vllm() { "" } else { "\n" };
        Ok((!texts.is_empty()).then(|| texts.join(between)))
    }

    /// Texts of a system's blocks that are not empty.
    fn system_texts<'t>(self, blocks: &'t [Tree<'_>]) -> Result<Vec<&'t str>, NoBlocks> {
        let mut texts = Vec::with_capacity(blocks.len());
        for block in blocks {
            let Tree::Map(block) = block else { return Err(NoBlocks::BadJson) };
            if text_of(block, "type") != Some("text") {
                return Err(NoBlocks::Unsupported("a system block of this type"));
            }
            let text = text_of(block, "text").unwrap_or_default();
            let is_dropped = self.is_vllm() && text.starts_with(BILLING_HEADER);
            if !text.is_empty() && !is_dropped {
                texts.push(text);
            }
        }
        Ok(texts)
    }

    /// The text of a system message between the turns; nothing where it has none.
    fn inline_system(self, turn: &Map<'_>) -> Result<Option<String>, NoBlocks> {
        let text = match (turn.get("content"), self.engine) {
            (Some(Tree::Text(text)), EngineRules::Vllm) if text.starts_with(BILLING_HEADER) => String::new(),
            (Some(Tree::Text(text)), EngineRules::Vllm) => text.to_string(),
            (Some(Tree::Text(text)), EngineRules::Sglang) => text.trim().to_owned(),
            (Some(Tree::List(blocks)), EngineRules::Vllm) => self.system_texts(blocks)?.concat(),
            (Some(Tree::List(blocks)), EngineRules::Sglang) => {
                let texts = self.system_texts(blocks)?.into_iter().map(str::trim).filter(|text| !text.is_empty());
                texts.collect::<Vec<_>>().join("\n")
            }
            _ => return Err(NoBlocks::BadJson),
        };
        Ok(Some(text).filter(|text| !text.is_empty()))
    }

    /// Appends one turn. Results of tools are messages of their own: vLLM puts them before the turn's other content,
    /// SGLang where they stand.
    fn turn<'a>(self, mut turn: Map<'a>, chat: &mut Vec<Map<'a>>) -> Result<(), NoBlocks> {
        let role = match text_of(&turn, "role") {
            Some("user") => "user",
            Some("assistant") => "assistant",
            Some("system") if !self.traits.takes_late_system => return Ok(()),
            Some("system") if self.is_vllm() => {
                chat.extend(self.inline_system(&turn)?.map(|text| message("system", Tree::text(text))));
                return Ok(());
            }
            Some("system") => "system",
            _ => return Err(NoBlocks::Unsupported("a message of this role")),
        };
        let blocks = match turn.take("content") {
            Some(text @ Tree::Text(_)) => {
                chat.push(message(role, text));
                return Ok(());
            }
            Some(Tree::List(blocks)) => blocks,
            _ => return Err(NoBlocks::BadJson),
        };
        let mut made = Turn::default();
        for block in blocks {
            let Tree::Map(block) = block else { return Err(NoBlocks::BadJson) };
            self.block(role, block, &mut made, chat)?;
        }
        let mut out = Map(vec![("role".into(), Tree::text(role))]);
        self.add_reasoning(&mut out, &mut made)?;
        if !made.calls.is_empty() {
            out.set("tool_calls", Tree::List(made.calls));
        }
        match content_of(made.parts) {
            Some(content) => out.set("content", content),
            // A turn of nothing but results is said already.
            None if role == "user" => return Ok(()),
            None if !self.is_vllm() && out.get("tool_calls").is_none() => out.set("content", Tree::text("")),
            None => {}
        }
        chat.push(out);
        Ok(())
    }

    /// Former thinking is a member of the message for vLLM, and text between the parser's marks for SGLang.
    fn add_reasoning<'a>(self, out: &mut Map<'a>, made: &mut Turn<'a>) -> Result<(), NoBlocks> {
        if made.reasoning.is_empty() {
            return Ok(());
        }
        if self.is_vllm() {
            out.set("reasoning", Tree::text(made.reasoning.concat()));
            return Ok(());
        }
        let text = made.reasoning.join("\n");
        if self.traits.has_think_tags {
            made.parts.insert(0, part("text", "text", Tree::text(format!("<think>{text}\n</think>"))));
        } else if self.purpose == Purpose::Send {
            out.set("reasoning_content", Tree::text(text));
        } else {
            return Err(NoBlocks::Unsupported("former thinking whose marks are not known"));
        }
        Ok(())
    }

    fn block<'a>(
        self,
        role: &'static str,
        mut block: Map<'a>,
        made: &mut Turn<'a>,
        chat: &mut Vec<Map<'a>>,
    ) -> Result<(), NoBlocks> {
        let kind = match block.take("type") {
            Some(Tree::Text(kind)) => kind,
            _ => return Err(NoBlocks::BadJson),
        };
        match &*kind {
            "text" => match block.take("text") {
                // SGLang keeps an empty text: the turn must not vanish.
                Some(Tree::Text(text)) if text.is_empty() && self.is_vllm() => {}
                Some(text @ Tree::Text(_)) => made.parts.push(part("text", "text", text)),
                None if self.is_vllm() => {}
                _ => return Err(NoBlocks::BadJson),
            },
            "image" => made.parts.extend(self.image(block.take("source"))?),
            "thinking" => match block.take("thinking") {
                Some(Tree::Text(text)) if text.is_empty() && !self.is_vllm() => {}
                Some(Tree::Text(text)) => made.reasoning.push(text),
                _ => {}
            },
            // Opaque to everybody but who wrote it. SGLang refuses it.
            "redacted_thinking" if self.is_vllm() => {}
            "redacted_thinking" => return Err(NoBlocks::Unsupported("redacted thinking")),
            "tool_use" => made.calls.push(call(block)?),
            "tool_result" => self.tool_result(role, block, made, chat)?,
            _ => return Err(NoBlocks::Unsupported("a content block of this type")),
        }
        Ok(())
    }

    fn tool_result<'a>(
        self,
        role: &'static str,
        mut block: Map<'a>,
        made: &mut Turn<'a>,
        chat: &mut Vec<Map<'a>>,
    ) -> Result<(), NoBlocks> {
        if role != "user" {
            return Err(NoBlocks::Unsupported("a tool_result outside of a user's message"));
        }
        let id = block.take("tool_use_id").unwrap_or(Tree::text(""));
        let (mut texts, mut images) = (Vec::new(), Vec::new());
        match block.take("content") {
            None | Some(Tree::Null) => {}
            Some(Tree::Text(text)) => texts.push(text),
            Some(Tree::List(items)) => {
                for item in items {
                    let Tree::Map(mut item) = item else { return Err(NoBlocks::BadJson) };
                    match text_of(&item, "type") {
                        Some("text") => match item.take("text") {
                            Some(Tree::Text(text)) => texts.push(text),
                            None if self.is_vllm() => texts.push("".into()),
                            _ => return Err(NoBlocks::BadJson),
                        },
                        Some("image") => images.extend(self.image(item.take("source"))?),
                        _ => return Err(NoBlocks::Unsupported("a part of this type in a tool_result")),
                    }
                }
            }
            Some(_) => return Err(NoBlocks::BadJson),
        }
        let content = match self.engine {
            EngineRules::Vllm => joined(texts, "\n"),
            EngineRules::Sglang => {
                // What stood before it in the turn comes before it in the chat.
                chat.extend(content_of(std::mem::take(&mut made.parts)).map(|content| message("user", content)));
                texts.retain(|text| !text.is_empty());
                let parts = texts.into_iter().map(|text| part("text", "text", Tree::Text(text)));
                content_of(parts.chain(images.drain(..)).collect()).unwrap_or(Tree::text(""))
            }
        };
        let mut result = message("tool", content);
        result.set("tool_call_id", id);
        chat.push(result);
        if !images.is_empty() {
            chat.push(message("user", Tree::List(images)));
        }
        Ok(())
    }

    /// An image as a chat's part. Its blocks are the engine's own business, so none is made only to be refused.
    fn image<'a>(self, source: Option<Tree<'a>>) -> Result<Option<Tree<'a>>, NoBlocks> {
        if self.purpose == Purpose::Render {
            return Err(NoBlocks::Multimodal);
        }
        let mut source = match source {
            None => return Ok(None),
            source => object(source)?,
        };
        let url = match text_of(&source, "type") {
            Some("url") => source.take("url").filter(|url| url.as_text().is_some_and(|url| !url.is_empty())),
            Some("base64") | None => {
                let kind = text_of(&source, "media_type").unwrap_or("image/jpeg");
                Some(Tree::text(format!("data:{kind};base64,{}", text_of(&source, "data").unwrap_or_default())))
            }
            _ => return Err(NoBlocks::Unsupported("an image source of this type")),
        };
        Ok(url.map(|url| part("image_url", "image_url", Tree::Map(Map(vec![("url".into(), url)])))))
    }

    fn effort(self, output_config: Option<Tree<'_>>) -> Result<Option<Tree<'_>>, NoBlocks> {
        let effort = object(output_config)?.take("effort").filter(|effort| !effort.is_null());
        Ok(match (self.engine, effort.as_ref().and_then(Tree::as_text)) {
            (EngineRules::Sglang, Some("xhigh")) => Some(Tree::text("max")),
            _ => effort,
        })
    }

    fn tools<'a>(self, tools: Option<Tree<'a>>) -> Result<Option<Tree<'a>>, NoBlocks> {
        let Some(tools) = list(tools)? else { return Ok(None) };
        let mut made = Vec::with_capacity(tools.len());
        for tool in tools {
            let Tree::Map(tool) = tool else { return Err(NoBlocks::BadJson) };
            made.extend(self.tool(tool)?);
        }
        Ok((!made.is_empty()).then_some(Tree::List(made)))
    }

    /// Tools that a vendor's own servers run have no schema: SGLang leaves them out, vLLM refuses them.
    fn tool<'a>(self, mut tool: Map<'a>) -> Result<Option<Tree<'a>>, NoBlocks> {
        let mut schema = match (tool.take("input_schema"), self.engine) {
            (Some(Tree::Map(schema)), _) => schema,
            (None, EngineRules::Sglang) => return Ok(None),
            _ => return Err(NoBlocks::Unsupported("a tool without an input_schema")),
        };
        let Some(name @ Tree::Text(_)) = tool.take("name") else {
            return Err(NoBlocks::Unsupported("a tool without a name"));
        };
        if schema.get("type").is_none() {
            schema.set("type", Tree::text("object"));
        }
        let description = tool.take("description").filter(|description| !description.is_null());
        let description = description.or((!self.is_vllm()).then(|| Tree::text("")));
        let mut function = Map(vec![("name".into(), name)]);
        if let Some(description) = description {
            function.set("description", description);
        }
        function.set("parameters", Tree::Map(schema));
        // SGLang's model writes `strict` where none is given.
        match tool.take("strict").filter(|strict| !strict.is_null()) {
            Some(strict) => function.set("strict", strict),
            None if !self.is_vllm() && self.purpose == Purpose::Render => function.set("strict", Tree::Bool(false)),
            None => {}
        }
        let mut out = Map(vec![("type".into(), Tree::text("function")), ("function".into(), Tree::Map(function))]);
        if let Some(defer) = tool.take("defer_loading").filter(|defer| !defer.is_null()) {
            out.set("defer_loading", defer);
        }
        Ok(Some(Tree::Map(out)))
    }
}

fn call(mut block: Map<'_>) -> Result<Tree<'_>, NoBlocks> {
    let id = block.take("id").filter(|id| !id.is_null()).unwrap_or(Tree::text(""));
    let name = block.take("name").filter(|name| !name.is_null()).unwrap_or(Tree::text(""));
    let function = Map(vec![("name".into(), name), ("arguments".into(), arguments(block.take("input"))?)]);
    Ok(Tree::Map(Map(vec![
        ("id".into(), id),
        ("type".into(), Tree::text("function")),
        ("function".into(), Tree::Map(function)),
    ])))
}

fn joined<'a>(mut texts: Vec<Cow<'a, str>>, between: &str) -> Tree<'a> {
    match texts.len() {
        1 => Tree::Text(texts.remove(0)),
        _ => Tree::text(texts.join(between)),
    }
}

#[cfg(test)]
#[path = "messages_tests.rs"]
mod tests;
