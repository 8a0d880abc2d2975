//! One model's tokenizer and templates, loaded once and shared by all shards; from a body to its token ids.

use std::path::Path;
use std::time::{Instant, SystemTime};

use crate::limits::{PROMPT_CACHE_BYTES, RENDERED_BYTES_MAX};

use super::block_maker::{BlockMaker, Pending, Text};
use super::encoder::{Encoder, EncoderChoice, on_own_thread, only_encodes_here};
use super::environment::strftime;
use super::messages::{self, Purpose, TemplateTraits};
use super::model_files::ModelFiles;
use super::native::{ChatEncoding, Native};
use super::outline::utf8;
use super::request::{self, Body, Conversation, boolean};
use super::segments::Splitter;
use super::stopwatch::{Stage, lap};
use super::template::{ChatTemplate, render_hostile};
use super::tree::Tree;
use super::variant::Variant;
use super::{
    Endpoint, EngineRules, NoBlocks, Prompt, PromptBlocks, PromptStats, Submit, hugging_face, responses, sglang, vllm,
};

const WARM_UP_TEXT: &str = "Warm-up: the quick brown fox, 123 + 4.5, naïve 你好 😀\n\tfn main() {}";

/// How a prompter is to behave; the defaults are those of the command line.
#[derive(Clone, Debug)]
pub struct PrompterOptions {
    /// `--allow-request-chat-template`: let a request bring its own `chat_template`.
    pub allow_request_chat_template: bool,
    /// Take an assistant's `reasoning_content` for `reasoning` under vLLM's rules. vLLM's `/tokenize` ignores the
    /// older name; its chat endpoint reads it since 0.32.
    pub vllm_reads_reasoning_content: bool,
    /// `--kv-default-chat-template-kwargs`: template arguments that the fleet's engines add to every request.
    pub chat_template_kwargs: serde_json::Map<String, serde_json::Value>,
    /// `--kv-chat-encoding`: chats are rendered by this encoder; `None` leaves it to the model directory.
    pub chat_encoding: Option<ChatEncoding>,
    /// Clock of `strftime_now`; `None` reads the machine's.
    pub now: Option<SystemTime>,
    pub encoder: EncoderChoice,
    /// `--prompt-cache-bytes`: bound of the prefix cache, 0 for none.
    pub cache_bytes: usize,
}

impl Default for PrompterOptions {
    fn default() -> Self {
        Self {
            allow_request_chat_template: false,
            vllm_reads_reasoning_content: false,
            chat_template_kwargs: serde_json::Map::new(),
            chat_encoding: None,
            now: None,
            encoder: EncoderChoice::default(),
            cache_bytes: PROMPT_CACHE_BYTES,
        }
    }
}

/// What became of a body at the first attempt.
#[derive(Debug)]
pub enum Attempt {
    /// Blocks, in the order of the block sizes.
    Ready(Vec<PromptBlocks>),
    /// More new text than was allowed: to be finished where it may take its time.
    Later(PendingPrompt),
}

/// A rendered prompt whose new text is still to be encoded, by `Prompter::finish`.
#[derive(Debug)]
pub struct PendingPrompt(Pending);

impl PendingPrompt {
    /// Bytes of text to encode.
    pub fn new_bytes(&self) -> usize {
        self.0.new_bytes()
    }
}

/// What [`Prompter::preview`] finds.
#[derive(Clone, Debug)]
pub struct PromptPreview {
    /// Rendered text; absent for a prompt that was given as token ids.
    pub text: Option<String>,
    /// Leading bytes of the text, and their tokens, that the prefix cache knows: the least over all block sizes.
    pub known_bytes: usize,
    pub known_tokens: usize,
    /// In the order of the block sizes.
    pub blocks: Vec<PromptBlocks>,
}

impl PromptPreview {
    /// Of a prompt that needs no encoding.
    pub fn of_ids(prompt: &Prompt, block_sizes: &[usize]) -> Self {
        let blocks = block_sizes.iter().map(|size| prompt.blocks(*size)).collect();
        Self { text: None, known_bytes: 0, known_tokens: 0, blocks }
    }
}

/// A body as its engine sees it.
enum Rendered {
    Ids(Vec<u32>),
    Text(Text),
}

/// Tokenizer and templates of one model. Immutable, `Send + Sync`: share it, never clone it.
pub struct Prompter {
    maker: BlockMaker,
    templates: Vec<(String, Result<ChatTemplate, String>)>,
    special_tokens: Vec<(String, String)>,
    /// How this model's chats are rendered where an engine does it by code of its own, not by a template.
    native: Option<Native>,
    /// Of `options.chat_template_kwargs`: what workers that say nothing of their own are taken to render.
    fleet_variant: Variant,
    /// By engine: what is known of the templates before a Messages body is made a chat.
    traits: [TemplateTraits; 2],
    options: PrompterOptions,
}

impl Prompter {
    /// Loads a directory or a `tokenizer.json`; files beside it are read too. A template that cannot be compiled
    /// here does not fail the load: it is logged once, and chat requests are routed without prefix credit.
    pub fn load(path: &Path, options: PrompterOptions) -> anyhow::Result<Self> {
        let files = ModelFiles::read(path)?;
        let splitter = on_own_thread(|| Ok(Splitter::of_tokenizer(&files.tokenizer.json()?)))?;
        let encoder = Encoder::load(&files, options.encoder)?;
        let maker = BlockMaker::new(encoder, splitter, options.cache_bytes);
        tracing::info!(
            tokenizer = %files.tokenizer.path().display(),
            encoder = maker.encoder.name(),
            templates = files.templates.len(),
            prefix_cache = maker.has_cache(),
            "tokenizer loaded"
        );
        let native = Native::chosen(options.chat_encoding, &files);
        if let Some(native) = native {
            tracing::info!(encoder = native.name(), "chats of this model are rendered by code, not by a template");
        }
        if let Some(Native::Refused(what)) = native {
            tracing::warn!("{what} are not rendered here; they are routed by load");
        }
        let templates: Vec<_> = files
            .templates
            .into_iter()
            .map(|(name, source)| {
                let compiled = ChatTemplate::compile(&source, options.now).map_err(|error| error.to_string());
                if let Err(error) = &compiled {
                    tracing::error!(
                        template = name,
                        error,
                        "this chat template cannot be rendered here; its requests are routed by load"
                    );
                }
                (name, compiled)
            })
            .collect();
        let fleet_variant = Variant::of(&options.chat_template_kwargs)?;
        Ok(Self {
            maker,
            native,
            fleet_variant,
            traits: [EngineRules::Vllm, EngineRules::Sglang].map(|engine| traits(&templates, engine)),
            templates,
            special_tokens: files.special_tokens,
            options,
        })
    }

    /// Text and token ids of a body, without the prefix cache.
    pub fn tokens(&self, endpoint: Endpoint, engine: EngineRules, body: &[u8]) -> Result<Prompt, NoBlocks> {
        self.tokens_of_variant(endpoint, engine, None, body)
    }

    /// The same for a worker's own variant; `None` is the fleet's.
    pub fn tokens_of_variant(
        &self,
        endpoint: Endpoint,
        engine: EngineRules,
        variant: Option<&Variant>,
        body: &[u8],
    ) -> Result<Prompt, NoBlocks> {
        let text = utf8(body).map_err(|_| NoBlocks::BadJson)?;
        let body = (Body::read(text)?, body.len());
        match self.rendered(endpoint, engine, variant.unwrap_or(&self.fleet_variant), body)? {
            Rendered::Ids(ids) => Ok(Prompt { text: None, ids }),
            Rendered::Text(mut text) => {
                let ids = self.maker.ids(&text)?;
                text.text.push_str(text.suffix.as_deref().unwrap_or_default());
                Ok(Prompt { text: Some(text.text), ids })
            }
        }
    }

    /// Block hashes of a body in one block size.
    pub fn blocks(
        &self,
        endpoint: Endpoint,
        engine: EngineRules,
        body: &[u8],
        block_size: usize,
    ) -> Result<PromptBlocks, NoBlocks> {
        let mut blocks = self.blocks_by_size(endpoint, engine, None, body, &[block_size])?;
        blocks.pop().ok_or(NoBlocks::NoPrompt)
    }

    /// Block hashes of a body in each block size: one rendering and one encoding for all of them. `variant` is the
    /// worker's own, `None` the fleet's.
    pub fn blocks_by_size(
        &self,
        endpoint: Endpoint,
        engine: EngineRules,
        variant: Option<&Variant>,
        body: &[u8],
        block_sizes: &[usize],
    ) -> Result<Vec<PromptBlocks>, NoBlocks> {
        match self.attempt(endpoint, engine, variant, body, block_sizes, usize::MAX)? {
            Attempt::Ready(blocks) => Ok(blocks),
            Attempt::Later(pending) => self.finish(pending),
        }
    }

    /// Renders a body and looks for its known beginning; encodes the rest if that is at most `new_bytes_max` bytes.
    /// `variant` is the worker's own, `None` the fleet's.
    pub fn attempt(
        &self,
        endpoint: Endpoint,
        engine: EngineRules,
        variant: Option<&Variant>,
        body: &[u8],
        block_sizes: &[usize],
        new_bytes_max: usize,
    ) -> Result<Attempt, NoBlocks> {
        let text = utf8(body).map_err(|_| NoBlocks::BadJson)?;
        self.attempt_read(endpoint, engine, variant, (Body::read(text)?, body.len()), block_sizes, new_bytes_max)
    }

    /// The same for a body that was read already, given with its length in bytes.
    pub fn attempt_read(
        &self,
        endpoint: Endpoint,
        engine: EngineRules,
        variant: Option<&Variant>,
        body: (Body<'_>, usize),
        block_sizes: &[usize],
        new_bytes_max: usize,
    ) -> Result<Attempt, NoBlocks> {
        if block_sizes.contains(&0) {
            return Err(NoBlocks::Unsupported("a block size of 0"));
        }
        let mut mark = Instant::now();
        let rendered = self.rendered(endpoint, engine, variant.unwrap_or(&self.fleet_variant), body);
        lap(Stage::Render, &mut mark);
        let text = match rendered? {
            Rendered::Text(text) => text,
            Rendered::Ids(ids) => {
                let prompt = Prompt { text: None, ids };
                let blocks = block_sizes.iter().map(|size| prompt.blocks(*size)).collect();
                lap(Stage::Hash, &mut mark);
                return Ok(Attempt::Ready(blocks));
            }
        };
        let pending = self.maker.prepare(text, block_sizes);
        self.maker.count_lookup(&pending);
        lap(Stage::Hash, &mut mark);
        if pending.new_bytes() > new_bytes_max {
            return Ok(Attempt::Later(PendingPrompt(pending)));
        }
        self.maker.finish(pending).map(Attempt::Ready)
    }

    /// A body as a request with it would find it now: rendered, looked up and encoded alike, but nothing of it is counted
    /// or kept for later. `variant` as in [`Prompter::attempt`].
    pub fn preview(
        &self,
        endpoint: Endpoint,
        engine: EngineRules,
        variant: Option<&Variant>,
        body: &[u8],
        block_sizes: &[usize],
    ) -> Result<PromptPreview, NoBlocks> {
        let text = utf8(body).map_err(|_| NoBlocks::BadJson)?;
        let body = (Body::read(text)?, body.len());
        let text = match self.rendered(endpoint, engine, variant.unwrap_or(&self.fleet_variant), body)? {
            Rendered::Text(text) => text,
            Rendered::Ids(ids) => return Ok(PromptPreview::of_ids(&Prompt { text: None, ids }, block_sizes)),
        };
        let shown = format!("{}{}", text.text, text.suffix.as_deref().unwrap_or_default());
        let pending = self.maker.prepare(text, block_sizes);
        let (new_bytes, known_tokens) = (pending.new_bytes(), pending.known_tokens());
        let blocks = self.maker.finish_unkept(pending)?;
        Ok(PromptPreview { known_bytes: shown.len() - new_bytes, text: Some(shown), known_tokens, blocks })
    }

    /// Encodes what an attempt left over.
    pub fn finish(&self, pending: PendingPrompt) -> Result<Vec<PromptBlocks>, NoBlocks> {
        self.maker.finish(pending.0)
    }

    /// Lets cold long texts be spread over `threads` other threads, which `submit` hands jobs to; the first call counts.
    pub fn set_volunteers(&self, threads: usize, submit: Submit) {
        self.maker.set_volunteers(threads, submit);
    }

    /// Makes the encoder build what it keeps for each thread; the first text of a thread takes some 20 ms more without
    /// it. To be called on every thread that does nothing but encode, before it serves.
    pub fn warm_up(&self) {
        only_encodes_here();
        // A failure here is a failure of every prompt, and is counted there.
        let _ = self.maker.encoder.encode(WARM_UP_TEXT);
    }

    /// Text of token ids, special tokens included; for people to read.
    pub fn text_of(&self, ids: &[u32]) -> Option<String> {
        self.maker.encoder.decode(ids)
    }

    /// Counters for metrics.
    pub fn stats(&self) -> PromptStats {
        self.maker.stats()
    }

    /// Token ids of a text by itself, nothing around it.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, NoBlocks> {
        self.maker.encoder.encode(text)
    }

    /// Whether the fast encoder is in use.
    pub fn encodes_fast(&self) -> bool {
        self.maker.encoder.is_fast()
    }

    /// Whether a body may hold a template of its own that is to be rendered: that may take its time, whatever the
    /// body's length, and belongs on the encoder pool.
    pub fn may_bring_template(&self, body: &[u8]) -> bool {
        self.options.allow_request_chat_template && memchr::memmem::find(body, b"\"chat_template\"").is_some()
    }

    /// What workers that say nothing of their own are taken to render.
    pub fn fleet_variant(&self) -> &Variant {
        &self.fleet_variant
    }

    /// What the engines find in this model's templates before they make a Messages body a chat.
    pub fn template_traits(&self, engine: EngineRules) -> TemplateTraits {
        self.traits[engine as usize]
    }

    /// Name of the encoder in use.
    pub fn encoder_name(&self) -> &'static str {
        self.maker.encoder.name()
    }

    /// How chats are rendered for this engine: `template`, or the name of an encoder in code.
    pub fn chat_renderer(&self, engine: EngineRules) -> &'static str {
        match self.native.filter(|native| native.applies(engine, Endpoint::Chat)) {
            Some(native) => native.name(),
            None => "template",
        }
    }

    fn rendered(
        &self,
        endpoint: Endpoint,
        engine: EngineRules,
        variant: &Variant,
        (body, body_bytes): (Body<'_>, usize),
    ) -> Result<Rendered, NoBlocks> {
        if let Some(ids) = given_ids(&body, engine) {
            return Ok(Rendered::Ids(ids));
        }
        if body.truncate_prompt_tokens.is_some() || body.prompt_embeds.is_some() {
            return Err(NoBlocks::Unsupported("truncated or embedded prompts"));
        }
        let mut rendered = match endpoint {
            Endpoint::Completions => self.completion(engine, body),
            Endpoint::Chat => self.chat(endpoint, engine, variant, body, body_bytes),
            Endpoint::Responses => {
                self.chat(endpoint, engine, variant, responses::chat_body(body, engine)?, body_bytes)
            }
            Endpoint::Messages => {
                let chat = messages::chat_body(body, engine, self.template_traits(engine), Purpose::Render)?;
                self.chat(endpoint, engine, variant, chat, body_bytes)
            }
        }?;
        if rendered.cuts.is_empty() {
            // vLLM goes through transformers, which takes added tokens out before the model's own encoder sees a text.
            rendered.cuts = self.maker.forced_cuts(&rendered.text, engine == EngineRules::Vllm);
        }
        Ok(Rendered::Text(rendered))
    }

    fn chat(
        &self,
        endpoint: Endpoint,
        engine: EngineRules,
        variant: &Variant,
        mut body: Body<'_>,
        body_bytes: usize,
    ) -> Result<Text, NoBlocks> {
        let with_ends = engine == EngineRules::Vllm && boolean(body.add_special_tokens.as_ref(), false)?;
        if let Some(native) = self.native.filter(|native| native.applies(engine, endpoint)) {
            return self.native_chat(native, endpoint, engine, variant, body, with_ends);
        }
        let own_template = match body.chat_template.take() {
            Some(Tree::Text(source)) if self.options.allow_request_chat_template => {
                Some(ChatTemplate::compile_hostile(&source, self.options.now)?)
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
        let conversation = self.conversation(engine, variant, body, template)?;
        // Encoded by itself behind the rendering, as the engine does it.
        let suffix = conversation.suffix.as_ref().map(|suffix| suffix.to_string());
        let render = || hugging_face::render(template, &self.special_tokens, conversation, body_bytes);
        let text = if own_template.is_some() { render_hostile(render)? } else { render()? };
        Ok(Text { text, with_ends, suffix, cuts: Vec::new() })
    }

    fn native_chat(
        &self,
        native: Native,
        endpoint: Endpoint,
        engine: EngineRules,
        variant: &Variant,
        body: Body<'_>,
        with_ends: bool,
    ) -> Result<Text, NoBlocks> {
        let now = self.options.now;
        let date = || strftime(now, "%Y-%m-%d").map_err(|error| NoBlocks::TemplateFailed(error.to_string()));
        let rendered = native.render(engine, endpoint, body, variant, &self.options, date)?;
        if rendered.text.len() > RENDERED_BYTES_MAX {
            return Err(NoBlocks::TooLong);
        }
        let spells_token =
            |range: &std::ops::Range<usize>| self.maker.has_token(&rendered.text[range.clone()]) != Some(false);
        if rendered.foreign.iter().any(spells_token) {
            return Err(NoBlocks::Unsupported("text that spells a special token"));
        }
        // SGLang encodes what its DeepSeek-V4 encoder gives it with the tokenizer's own ends.
        let with_ends = with_ends || engine == EngineRules::Sglang;
        Ok(Text { text: rendered.text, with_ends, suffix: rendered.suffix, cuts: rendered.cuts })
    }

    fn conversation<'a>(
        &self,
        engine: EngineRules,
        variant: &Variant,
        body: Body<'a>,
        template: &ChatTemplate,
    ) -> Result<Conversation<'a>, NoBlocks> {
        let form = template.content_form(engine);
        match engine {
            EngineRules::Vllm => vllm::conversation(body, form, template.source(), &variant.kwargs, &self.options),
            EngineRules::Sglang => sglang::conversation(body, form, template.source(), &variant.kwargs),
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
    fn completion(&self, engine: EngineRules, body: Body<'_>) -> Result<Text, NoBlocks> {
        if body.suffix.is_some() {
            return Err(NoBlocks::Unsupported("suffix"));
        }
        let with_ends = engine == EngineRules::Sglang || boolean(body.add_special_tokens.as_ref(), true)?;
        let first = match body.prompt {
            Some(Tree::List(prompts)) => prompts.into_iter().next(),
            prompt => prompt,
        };
        match first {
            Some(Tree::Text(text)) => Ok(Text { text: text.into_owned(), with_ends, suffix: None, cuts: Vec::new() }),
            _ => Err(NoBlocks::NoPrompt),
        }
    }
}

/// vLLM looks at all templates of a model, SGLang at the default one. A model without a template has no traits.
fn traits(templates: &[(String, Result<ChatTemplate, String>)], engine: EngineRules) -> TemplateTraits {
    let asked: Vec<&ChatTemplate> = templates
        .iter()
        .filter(|(name, _)| engine == EngineRules::Vllm || name == "default")
        .filter_map(|(_, template)| template.as_ref().ok())
        .collect();
    TemplateTraits {
        takes_late_system: !asked.is_empty() && asked.iter().all(|template| template.takes_late_system(engine)),
        has_think_tags: asked.iter().any(|template| template.source().contains("<think>")),
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
        None if body.messages.is_none() && body.prompt.is_none() && body.input.is_none() => Err(NoBlocks::NoPrompt),
        None => Err(NoBlocks::NoTokenizer),
    }
}
