//! One model's tokenizer and templates, loaded once and shared by all shards; from a body to its token ids.

use std::path::Path;
use std::time::SystemTime;

use super::encoder::Encoder;
use super::model_files::ModelFiles;
use super::request::{self, Body, Conversation, boolean};
use super::template::ChatTemplate;
use super::tree::Tree;
use super::{Endpoint, EngineRules, NoBlocks, Prompt, PromptBlocks, hugging_face, sglang, vllm};

/// How a prompter is to behave; the defaults are those of the command line.
#[derive(Clone, Debug, Default)]
pub struct PrompterOptions {
    /// `--allow-request-chat-template`: let a request bring its own `chat_template`.
    pub allow_request_chat_template: bool,
    /// Take an assistant's `reasoning_content` for `reasoning` under vLLM's rules. vLLM's `/tokenize` ignores the
    /// older name; its chat endpoint reads it since 0.32.
    pub vllm_reads_reasoning_content: bool,
    /// Clock of `strftime_now`; `None` reads the machine's.
    pub now: Option<SystemTime>,
}

/// Tokenizer and templates of one model. Immutable, `Send + Sync`: share it, never clone it.
pub struct Prompter {
    encoder: Encoder,
    templates: Vec<(String, Result<ChatTemplate, String>)>,
    special_tokens: Vec<(String, String)>,
    options: PrompterOptions,
}

impl Prompter {
    /// Loads a directory or a `tokenizer.json`; files beside it are read too. A template that cannot be compiled
    /// here does not fail the load: it is logged once, and chat requests are routed without prefix credit.
    pub fn load(path: &Path, options: PrompterOptions) -> anyhow::Result<Self> {
        let files = ModelFiles::read(path)?;
        let encoder = Encoder::load(&files)?;
        let templates = files.templates.into_iter().map(|(name, source)| {
            let compiled = ChatTemplate::compile(&source, options.now).map_err(|error| error.to_string());
            if let Err(error) = &compiled {
                tracing::error!(
                    template = name,
                    error,
                    "this chat template cannot be rendered here; its requests are routed by load"
                );
            }
            (name, compiled)
        });
        Ok(Self { encoder, templates: templates.collect(), special_tokens: files.special_tokens, options })
    }

    /// Text and token ids of a body.
    pub fn tokens(&self, endpoint: Endpoint, engine: EngineRules, body: &[u8]) -> Result<Prompt, NoBlocks> {
        let text = std::str::from_utf8(body).map_err(|_| NoBlocks::BadJson)?;
        let body = Body::read(text)?;
        if let Some(ids) = given_ids(&body, engine) {
            return Ok(Prompt { text: None, ids });
        }
        if body.truncate_prompt_tokens.is_some() || body.prompt_embeds.is_some() {
            return Err(NoBlocks::Unsupported("truncated or embedded prompts"));
        }
        match endpoint {
            Endpoint::Chat => self.chat(engine, body),
            Endpoint::Completions => self.completion(engine, body),
        }
    }

    /// Block hashes of a body.
    pub fn blocks(
        &self,
        endpoint: Endpoint,
        engine: EngineRules,
        body: &[u8],
        block_size: usize,
    ) -> Result<PromptBlocks, NoBlocks> {
        self.tokens(endpoint, engine, body).map(|prompt| prompt.blocks(block_size))
    }

    fn chat(&self, engine: EngineRules, mut body: Body<'_>) -> Result<Prompt, NoBlocks> {
        let with_ends = engine == EngineRules::Vllm && boolean(body.add_special_tokens.as_ref(), false)?;
        let own_template = match body.chat_template.take() {
            Some(Tree::Text(source)) if self.options.allow_request_chat_template => {
                let compiled = ChatTemplate::compile(&source, self.options.now);
                Some(compiled.map_err(|error| NoBlocks::TemplateFailed(error.to_string()))?)
            }
            // SGLang has no such member and ignores it; vLLM refuses the request.
            Some(_) if engine == EngineRules::Vllm => {
                return Err(NoBlocks::Unsupported("chat_template in the request"));
            }
            _ => None,
        };
        let has_tools = matches!(&body.tools, Some(Tree::List(tools)) if !tools.is_empty());
        let template = match &own_template {
            Some(template) => template,
            None => self.template(has_tools)?,
        };
        let conversation = self.conversation(engine, body, template)?;
        let suffix = conversation.suffix.clone();
        let mut text = hugging_face::render(template, &self.special_tokens, conversation)?;
        let mut ids = self.encoder.encode(&text, with_ends)?;
        if let Some(suffix) = suffix {
            // Encoded by itself, as the engine does; a BOS in front of it is dropped there.
            ids.extend(self.encoder.encode(&suffix, false)?);
            text.push_str(&suffix);
        }
        Ok(Prompt { text: Some(text), ids })
    }

    fn conversation<'a>(
        &self,
        engine: EngineRules,
        body: Body<'a>,
        template: &ChatTemplate,
    ) -> Result<Conversation<'a>, NoBlocks> {
        let form = template.content_form(engine);
        match engine {
            EngineRules::Vllm => vllm::conversation(body, form, template.source(), &self.options),
            EngineRules::Sglang => sglang::conversation(body, form, template.source()),
        }
    }

    /// `tool_use` for a request with tools where there is such a template, else `default`.
    fn template(&self, has_tools: bool) -> Result<&ChatTemplate, NoBlocks> {
        let named = |name| self.templates.iter().find(|(known, _)| known == name).map(|(_, template)| template);
        let template = named("tool_use").filter(|_| has_tools).or_else(|| named("default"));
        match template {
            None => Err(NoBlocks::NoTemplate),
            Some(Ok(template)) => Ok(template),
            Some(Err(error)) => Err(NoBlocks::TemplateFailed(error.clone())),
        }
    }

    /// A list of prompts is routed by its first: the engine makes one request of each, and they go together.
    fn completion(&self, engine: EngineRules, body: Body<'_>) -> Result<Prompt, NoBlocks> {
        if body.suffix.is_some() {
            return Err(NoBlocks::Unsupported("suffix"));
        }
        let with_ends = engine == EngineRules::Sglang || boolean(body.add_special_tokens.as_ref(), true)?;
        let first = match body.prompt {
            Some(Tree::List(prompts)) => prompts.into_iter().next(),
            prompt => prompt,
        };
        match first {
            Some(Tree::Text(text)) => {
                let ids = self.encoder.encode(&text, with_ends)?;
                Ok(Prompt { text: Some(text.into_owned()), ids })
            }
            _ => Err(NoBlocks::NoPrompt),
        }
    }
}

/// Ids that the body itself brings: `prompt` as token ids (or a list of such lists, routed by its first), and
/// SGLang's `input_ids`. They win over `messages` and need no tokenizer.
fn given_ids(body: &Body<'_>, engine: EngineRules) -> Option<Vec<u32>> {
    if let Some(Tree::List(items)) = &body.prompt {
        let first = match items.first() {
            Some(Tree::List(first)) => request::token_ids(first),
            _ => None,
        };
        if let Some(ids) = request::token_ids(items).or(first) {
            return Some(ids);
        }
    }
    match &body.input_ids {
        Some(Tree::List(items)) if engine == EngineRules::Sglang => request::token_ids(items),
        _ => None,
    }
}

/// The prompt of a body that brings token ids, without any tokenizer.
pub(super) fn token_ids(body: &[u8]) -> Result<Prompt, NoBlocks> {
    let text = std::str::from_utf8(body).map_err(|_| NoBlocks::BadJson)?;
    let body = Body::read(text)?;
    match given_ids(&body, EngineRules::Sglang) {
        Some(ids) => Ok(Prompt { text: None, ids }),
        None if body.messages.is_none() && body.prompt.is_none() => Err(NoBlocks::NoPrompt),
        None => Err(NoBlocks::NoTokenizer),
    }
}
