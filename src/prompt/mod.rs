//! The prompt side: request body -> rendered text -> token ids -> block hashes, exactly as the engine does it.
//!
//! Never fails a request: whatever goes wrong is a counted `NoBlocks`, and the request is routed by load.
//! Never does IO after `Prompter::load`.

pub mod extract;
pub mod json;
pub mod messages;
pub mod outline;
pub mod pool;

mod ahead;
mod block_maker;
mod cache;
mod content_form;
mod encoder;
mod environment;
mod flights;
mod hugging_face;
mod methods;
mod model_files;
mod native;
mod prompter;
mod python;
mod refusal;
mod request;
mod responses;
mod segments;
mod self_check;
mod sglang;
mod spare;
mod stopwatch;
mod template;
#[cfg(test)]
mod template_tests;
mod tiktoken;
mod tree;
mod variant;
mod vllm;

use std::sync::Arc;

use crate::hash::{self, BlockHash};

pub use ahead::Submit;
pub use encoder::EncoderChoice;
pub use native::ChatEncoding;
pub use prompter::{Attempt, PendingPrompt, PromptPreview, Prompter, PrompterOptions};
pub use refusal::NoBlocks;
pub use request::{Body as PromptBody, Look};
pub use stopwatch::{PromptTimes, take as take_times};
pub use variant::Variant;

/// Which OpenAI endpoint a body was sent to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Endpoint {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
    /// `/v1/responses`
    Responses,
    /// `/v1/messages`
    Messages,
}

/// Whose rules turn messages into the template's input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum EngineRules {
    #[default]
    Vllm,
    Sglang,
}

impl EngineRules {
    pub const fn as_str(self) -> &'static str {
        match self {
            EngineRules::Vllm => "vllm",
            EngineRules::Sglang => "sglang",
        }
    }

    /// Rules for the `engine` member of a worker record; unknown engines are taken for vLLM.
    pub fn of_engine(engine: &str) -> Self {
        if engine.eq_ignore_ascii_case("sglang") { EngineRules::Sglang } else { EngineRules::Vllm }
    }
}

/// The engine's view of one prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// Rendered text; `None` for a prompt that was given as token ids.
    pub text: Option<String>,
    pub ids: Vec<u32>,
}

/// What routing needs of one prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PromptBlocks {
    /// Chained hashes of the full blocks, first to last.
    pub hashes: Arc<[BlockHash]>,
    /// Tokens of the prompt, the unfinished tail included.
    pub tokens: usize,
}

/// Counters of the prompt side, since start; sizes are those of now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PromptStats {
    /// Prompts of which a beginning was known, and of which nothing was.
    pub prefixes_found: u64,
    pub prefixes_missed: u64,
    pub tokens_reused: u64,
    pub tokens_encoded: u64,
    pub cache_bytes: usize,
    pub cache_entries: usize,
    pub cache_evictions: u64,
}

impl Prompt {
    /// Blocks of `block_size` tokens.
    pub fn blocks(&self, block_size: usize) -> PromptBlocks {
        PromptBlocks { hashes: hash::prompt_blocks(&self.ids, block_size).into(), tokens: self.ids.len() }
    }
}

/// `Prompter::attempt` for the fleet's variant, with or without a tokenizer at hand: a prompt of token ids needs none.
pub fn attempt(
    prompter: Option<&Prompter>,
    endpoint: Endpoint,
    engine: EngineRules,
    variant: Option<&Variant>,
    body: &[u8],
    block_sizes: &[usize],
    new_bytes_max: usize,
) -> Result<Attempt, NoBlocks> {
    match prompter {
        Some(prompter) => prompter.attempt(endpoint, engine, variant, body, block_sizes, new_bytes_max),
        None => {
            let prompt = tokens_without_tokenizer(endpoint, body)?;
            Ok(Attempt::Ready(block_sizes.iter().map(|block_size| prompt.blocks(*block_size)).collect()))
        }
    }
}

/// The prompt of a body whose prompt is token ids; `NoTokenizer` for any other that has one.
pub fn tokens_without_tokenizer(endpoint: Endpoint, body: &[u8]) -> Result<Prompt, NoBlocks> {
    let _ = endpoint;
    prompter::token_ids(body)
}
