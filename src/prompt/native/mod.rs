//! Chats that engines render in code instead of by the model's template, and which model directory means which.
//!
//! | model directory | vLLM 0.32 | SGLang 0.5.18 |
//! |---|---|---|
//! | `architectures[0]` has `DeepseekV4` | `deepseek_v4` | `deepseek_v4` |
//! | `model_type` is `gpt_oss` | `harmony` | the template; Responses refused |
//! | `architectures[0]` has `KimiK3` | `kimi_k3` | `kimi_k3` |
//! | `DeepseekV32`, `DeepseekV41`, `Inkling` | refused by name | refused by name |
//! | `DeepseekV3` without a template | no template | refused by name |
//!
//! Sources: `config/model.py` of vLLM (default tokenizer modes), `chat_encoding.py` of SGLang. A refusal is counted,
//! and the request is routed by load. Never reads files.

mod deepseek_v4;
mod harmony;
mod kimi_k3;
mod typescript;

use std::borrow::Cow;

use super::content_form::ContentForm;
use super::model_files::ModelFiles;
use super::request::{Body, Conversation, boolean, list, messages};
use super::tree::{Map, Tree};
use super::{Endpoint, EngineRules, NoBlocks, PrompterOptions, Variant, sglang, vllm};

pub use harmony::Rendered;

/// Stands for a template that knows the developer role: the engines' encoders do, so no roles are merged.
const KNOWS_DEVELOPER: &str = "'developer'";

/// A model whose chats at least one engine renders in code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Native {
    DeepseekV4 {
        has_three_efforts: bool,
    },
    Harmony,
    KimiK3,
    /// Known to be rendered in code by both engines, and not here; the text names it.
    Refused(&'static str),
}

/// How much of the model's text about effort stands in front of a thinking chat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effort {
    Plain,
    Much,
    More,
}

/// What an engine's rules and the request decide about a DeepSeek-V4 chat.
#[derive(Debug)]
pub struct Settings {
    is_thinking: bool,
    /// Reasoning of before the last user's turn is left out, unless there are tools.
    drop_thinking: bool,
    effort: Effort,
    reasoning_member: &'static str,
    /// An empty system message is put in front of a chat without one.
    leads_with_system: bool,
    /// A system message before an assistant's, or at the end, opens the assistant's turn.
    system_opens_turn: bool,
    /// The request's own task, for the last user's message.
    task: Option<String>,
}

/// `--kv-chat-encoding`: an encoder by name, whatever the model directory says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChatEncoding {
    Dsv4,
    KimiK3,
}

impl Native {
    /// The encoder that was asked for by name, else what the files of a model directory say.
    pub fn chosen(encoding: Option<ChatEncoding>, files: &ModelFiles) -> Option<Self> {
        match encoding {
            None => Self::of_model(files),
            Some(ChatEncoding::KimiK3) => Some(Native::KimiK3),
            Some(ChatEncoding::Dsv4) => {
                Some(Native::DeepseekV4 { has_three_efforts: files.deepseek_v4_has_three_efforts })
            }
        }
    }

    /// What the files of a model directory say; `None` for a model of templates.
    pub fn of_model(files: &ModelFiles) -> Option<Self> {
        let architecture = files.architecture.as_deref().unwrap_or_default();
        let model_type = files.model_type.as_deref().unwrap_or_default();
        let has = |name: &str| architecture.contains(name);
        if has("DeepseekV41") || model_type == "deepseek_v41" {
            Some(Native::Refused("DeepSeek-V4.1 chats"))
        } else if has("DeepseekV4") {
            Some(Native::DeepseekV4 { has_three_efforts: files.deepseek_v4_has_three_efforts })
        } else if has("DeepseekV32") {
            Some(Native::Refused("DeepSeek-V3.2 chats"))
        } else if has("DeepseekV3") && files.templates.is_empty() {
            Some(Native::Refused("DeepSeek-V3 chats without a template"))
        } else if has("KimiK3") {
            Some(Native::KimiK3)
        } else if has("Inkling") {
            Some(Native::Refused("Inkling chats"))
        } else if model_type == "gpt_oss" {
            Some(Native::Harmony)
        } else {
            None
        }
    }

    /// Name for the log and `inspect`.
    pub fn name(self) -> &'static str {
        match self {
            Native::DeepseekV4 { .. } => "deepseek_v4",
            Native::Harmony => "harmony",
            Native::KimiK3 => "kimi_k3",
            Native::Refused(what) => what,
        }
    }

    /// Whether this engine renders this request in code; a model may have a template for the other engine.
    pub fn applies(self, engine: EngineRules, endpoint: Endpoint) -> bool {
        self != Native::Harmony || engine == EngineRules::Vllm || endpoint == Endpoint::Responses
    }

    /// Renders a chat body. `date` is today, `2026-01-31`.
    pub fn render(
        self,
        engine: EngineRules,
        endpoint: Endpoint,
        body: Body<'_>,
        variant: &Variant,
        options: &PrompterOptions,
        date: impl FnOnce() -> Result<String, NoBlocks>,
    ) -> Result<Rendered, NoBlocks> {
        match (self, engine) {
            (Native::Refused(what), _) => Err(NoBlocks::Unsupported(what)),
            (Native::Harmony, _) if endpoint == Endpoint::Responses => {
                Err(NoBlocks::Unsupported("Responses of a harmony model"))
            }
            (Native::Harmony, _) => harmony::render(body, &date()?, options.vllm_reads_reasoning_content),
            (Native::KimiK3, EngineRules::Vllm) => vllm_k3(body, variant, options),
            (Native::KimiK3, EngineRules::Sglang) => sglang_k3(body, variant),
            (Native::DeepseekV4 { .. }, EngineRules::Vllm) => {
                let conversation =
                    vllm::conversation(body, ContentForm::Parts, KNOWS_DEVELOPER, &variant.kwargs, options)?;
                let settings = vllm_settings(&conversation);
                let text = deepseek_v4::render(&conversation, &settings)?;
                Ok(Rendered { text, ..Rendered::default() })
            }
            (Native::DeepseekV4 { has_three_efforts }, EngineRules::Sglang) => {
                sglang_chat(body, variant, has_three_efforts)
            }
        }
    }
}

/// `get_deepseek_v4_tokenizer` of vLLM: thinking unless told otherwise, the effort's names folded to three.
fn vllm_settings(conversation: &Conversation<'_>) -> Settings {
    let variables = &conversation.variables;
    let switches = [variables.get("thinking"), variables.get("enable_thinking")];
    let mut is_thinking =
        switches.iter().all(Option::is_none) || switches.iter().flatten().any(|switch| switch.is_truthy());
    let effort = match variables.get("reasoning_effort").and_then(Tree::as_text) {
        None if is_thinking => Effort::Much,
        None => Effort::Plain,
        Some("none") => {
            is_thinking = false;
            Effort::Plain
        }
        Some("max") => Effort::More,
        Some("low" | "minimal" | "medium") => Effort::Plain,
        Some(_) => Effort::Much,
    };
    Settings {
        is_thinking,
        drop_thinking: variables.get("drop_thinking").is_none_or(Tree::is_truthy),
        effort,
        reasoning_member: "reasoning",
        leads_with_system: false,
        system_opens_turn: true,
        task: None,
    }
}

/// The `dsv4` path of SGLang's `_apply_jinja_template`: all tools whatever the choice, thinking only when asked for,
/// and an effort only where the model's own encoder knows it (`chat_encoding.py`: two names or three).
fn sglang_chat(mut body: Body<'_>, variant: &Variant, has_three_efforts: bool) -> Result<Rendered, NoBlocks> {
    body.tool_choice = None;
    let task = match body.task.take() {
        None => None,
        Some(Tree::Text(task)) => Some(task.into_owned()),
        Some(_) => return Err(NoBlocks::BadJson),
    };
    let mut conversation = sglang::conversation(body, ContentForm::Text, "", &variant.kwargs)?;
    let variables = &conversation.variables;
    let effort = match (variables.get("reasoning_effort").and_then(Tree::as_text), has_three_efforts) {
        (Some("max"), true) => Effort::More,
        (Some("max"), false) | (Some("high"), true) => Effort::Much,
        _ => Effort::Plain,
    };
    let settings = Settings {
        is_thinking: variables.get("thinking").is_some_and(Tree::is_truthy),
        drop_thinking: true,
        effort,
        reasoning_member: "reasoning_content",
        leads_with_system: true,
        system_opens_turn: false,
        task,
    };
    let text = deepseek_v4::render(&conversation, &settings)?;
    Ok(Rendered { text, suffix: conversation.suffix.take().map(|suffix| suffix.into_owned()), ..Rendered::default() })
}

/// `KimiK3Renderer` of vLLM: messages as for a template of text, tools as vLLM writes them.
fn vllm_k3(mut body: Body<'_>, variant: &Variant, options: &PrompterOptions) -> Result<Rendered, NoBlocks> {
    let response_format = body.response_format.take();
    let has_tools = body.tools.as_ref().is_some_and(Tree::is_truthy);
    let tool_choice = k3_choice(body.tool_choice.as_ref(), has_tools);
    let mut conversation = vllm::conversation(body, ContentForm::Text, KNOWS_DEVELOPER, &variant.kwargs, options)?;
    if conversation.continue_final_message {
        return Err(NoBlocks::Unsupported("continue_final_message of a Kimi-K3 chat"));
    }
    let variables = std::mem::take(&mut conversation.variables);
    let effort = variables.get("reasoning_effort").and_then(Tree::as_text);
    let is_thinking = match variables.get("thinking").or(variables.get("enable_thinking")) {
        Some(switch) => switch.is_truthy(),
        None => effort != Some("none"),
    };
    let settings = kimi_k3::Settings {
        is_thinking,
        effort: k3_effort(&variables, effort.filter(|effort| *effort != "none"))?,
        tools: conversation.tools.take().unwrap_or_default(),
        tool_choice,
        response_format,
        opens_answer: conversation.add_generation_prompt,
        has_aliases: true,
    };
    kimi_k3::render(&conversation, &settings)
}

/// The `kimi_k3` path of SGLang's `_encode_messages`: tools with the members that the request gives them.
fn sglang_k3(mut body: Body<'_>, variant: &Variant) -> Result<Rendered, NoBlocks> {
    if boolean(body.continue_final_message.as_ref(), false)? {
        return Err(NoBlocks::Unsupported("continue_final_message of a Kimi-K3 chat"));
    }
    let response_format = body.response_format.take();
    let tools = list(body.tools.take())?.unwrap_or_default();
    let tools = tools.into_iter().map(tool_as_given).collect::<Result<Vec<_>, _>>()?;
    let tool_choice = k3_choice(body.tool_choice.as_ref(), !tools.is_empty());
    let mut turns = Vec::new();
    for message in messages(body.messages)? {
        let role = message.get("role").and_then(Tree::as_text);
        let parts = matches!(message.get("content"), Some(Tree::List(parts)) if parts.len() > 1);
        if role == Some("tool") && parts {
            return Err(NoBlocks::Unsupported("a tool result of several parts"));
        }
        let mut turn = sglang::normalised(message, ContentForm::Parts)?;
        if turn.get("role").and_then(Tree::as_text) == Some("developer") {
            turn.set("role", Tree::text("system"));
        }
        turns.push(turn);
    }
    let mut variables =
        sglang::variables(body.chat_template_kwargs, body.reasoning, body.reasoning_effort, "", &variant.kwargs)?;
    let effort = variables.take("reasoning_effort");
    let effort = effort.as_ref().and_then(Tree::as_text).filter(|effort| matches!(*effort, "low" | "high" | "max"));
    let settings = kimi_k3::Settings {
        is_thinking: variables.get("thinking").is_none_or(Tree::is_truthy),
        effort: k3_effort(&variables, effort)?.into_owned().into(),
        tools,
        tool_choice,
        response_format,
        opens_answer: true,
        has_aliases: false,
    };
    kimi_k3::render(&Conversation { messages: turns, ..Conversation::default() }, &settings)
}

/// The effort that a Kimi-K3 chat states: its own argument, else the request's, else `max`. Other arguments could
/// change the prompt in ways that are not modelled.
fn k3_effort<'v>(variables: &'v Map<'_>, effort: Option<&'v str>) -> Result<Cow<'v, str>, NoBlocks> {
    const KNOWN: [&str; 4] = ["thinking", "enable_thinking", "thinking_effort", "reasoning_effort"];
    if variables.0.iter().any(|(name, _)| !KNOWN.contains(&name.as_ref())) {
        return Err(NoBlocks::Unsupported("template arguments of a Kimi-K3 chat"));
    }
    let given = variables.get("thinking_effort").filter(|effort| !effort.is_null());
    match given.map_or(Some(effort.unwrap_or("max")), Tree::as_text) {
        Some(effort @ ("low" | "high" | "max")) => Ok(effort.into()),
        _ => Err(NoBlocks::Unsupported("a thinking effort that Kimi-K3 does not have")),
    }
}

fn k3_choice(choice: Option<&Tree<'_>>, has_tools: bool) -> Option<&'static str> {
    match choice.and_then(Tree::as_text).filter(|_| has_tools) {
        Some("required") => Some("required"),
        Some("none") => Some("none"),
        _ => None,
    }
}

/// A tool with those members of SGLang's typed model that the request sets (`exclude_unset`).
fn tool_as_given(tool: Tree<'_>) -> Result<Tree<'_>, NoBlocks> {
    let Tree::Map(mut tool) = tool else { return Err(NoBlocks::BadJson) };
    let Some(Tree::Map(function)) = tool.get_mut("function") else { return Err(NoBlocks::BadJson) };
    function
        .0
        .retain(|(name, _)| matches!(&**name, "description" | "name" | "parameters" | "strict" | "defer_loading"));
    tool.0.retain(|(name, _)| matches!(&**name, "type" | "function" | "defer_loading"));
    Ok(Tree::Map(tool))
}
