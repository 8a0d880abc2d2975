//! From a body to block hashes, on the shard when it is short, on the encoder pool when it is long. Whatever
//! goes wrong costs cache locality only: the request is then routed by load, and the reason is counted. What a
//! body says of images and caching is read in the same place.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use infera_shards::time::timeout;
use tracing::warn;

use super::service::RouterService;
use super::shared::Shared;
use crate::api::Endpoint;
use crate::decode_demand::{self, Input};
use crate::fleet::{Fleet, Target};
use crate::hash::BlockHash;
use crate::limits;
use crate::prompt::{self, EngineRules, NoBlocks, Prompter};
use crate::route::BodyFacts;

/// Tokens per block for a target that has no block size of its own: the canonical value of the field.
pub(super) const DEFAULT_BLOCK_TOKENS: u32 = 16;

/// One prompt as one engine family renders it, hashed in every block size of the pool.
#[derive(Clone, Debug)]
pub(super) struct HashedPrompt {
    rules: EngineRules,
    tokens: u64,
    by_block_size: Vec<(u32, Arc<[BlockHash]>)>,
}

/// What one request's body is to the picks: all renderings of its prompt, none when it has no blocks, and the
/// facts beside its text.
#[derive(Clone, Debug, Default)]
pub(super) struct Prompts {
    hashed: Vec<HashedPrompt>,
    pub facts: BodyFacts,
    /// Tokens by the size of the body's strings; only where demand needs them and the prompt gave none.
    estimated_tokens: u64,
}

impl Prompts {
    /// Tokens of the prompt as this target counts them. Exact where the router's own rendering is the
    /// worker's; parts other than text make it an estimate, and so does a prompt that was not tokenized.
    pub fn tokens_for(&self, target: &Target) -> (u64, Input) {
        let rules = Wanted::of(target).rules;
        match self.hashed.iter().find(|prompt| prompt.rules == rules) {
            Some(prompt) if self.facts.is_multimodal => (prompt.tokens, Input::Estimated),
            Some(prompt) => (prompt.tokens, Input::Exact),
            None => (self.estimated_tokens, Input::Estimated),
        }
    }

    /// The prompt's blocks as this target names them.
    pub fn blocks_for(&self, target: &Target) -> Option<&Arc<[BlockHash]>> {
        let wanted = Wanted::of(target);
        let prompt = self.hashed.iter().find(|prompt| prompt.rules == wanted.rules)?;
        prompt.by_block_size.iter().find(|(size, _)| *size == wanted.block_size).map(|(_, blocks)| blocks)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Wanted {
    rules: EngineRules,
    block_size: u32,
}

impl Wanted {
    fn of(target: &Target) -> Self {
        Self {
            rules: EngineRules::of_engine(&target.worker.record.engine),
            block_size: target.block_size.unwrap_or(DEFAULT_BLOCK_TOKENS),
        }
    }
}

/// Renders, encodes and hashes for every engine family and block size in `pool`.
pub(super) async fn hash(
    service: &RouterService,
    endpoint: &Endpoint,
    fleet: &Fleet,
    pool: &[u32],
    body: &Bytes,
) -> Prompts {
    let mut wanted: Vec<Wanted> = Vec::with_capacity(1);
    for index in pool {
        let want = Wanted::of(&fleet.targets[*index as usize]);
        if !wanted.contains(&want) {
            wanted.push(want);
        }
    }
    let endpoint = match endpoint {
        Endpoint::ChatCompletions => prompt::Endpoint::Chat,
        Endpoint::Responses => prompt::Endpoint::Responses,
        _ => prompt::Endpoint::Completions,
    };
    let started = Instant::now();
    let work = Work { endpoint, wanted, estimates: service.shared.steering.demand.is_some() };
    let done = if body.len() <= limits::INLINE_PROMPT_BODY_BYTES {
        work.run(service.shared.prompter.as_deref(), body)
    } else {
        match on_the_pool(service, work, body).await {
            Some(done) => done,
            // No time on this core for what the pool had none for: the whole body stands for its text.
            None => return Prompts { estimated_tokens: body.len() as u64 / 4, ..Prompts::default() },
        }
    };
    service.shared.metrics.prompt_done(started.elapsed().as_secs_f64());
    if let Some(failure) = &done.failure {
        report(&service.shared, failure);
    }
    done.prompts
}

/// Nothing when the pool was full or late; that is counted here.
async fn on_the_pool(service: &RouterService, work: Work, body: &Bytes) -> Option<Done> {
    let shared = &service.shared;
    let (completion, pending) = service.context.mailbox.ticket();
    let (prompter, body) = (shared.prompter.clone(), body.clone());
    // Gone with this future: a job whose request has left or given up does nothing.
    let wanted_still = Arc::new(());
    let watch = Arc::downgrade(&wanted_still);
    let accepted = shared.encoders.submit(move || {
        if watch.strong_count() > 0 {
            completion.complete(work.run(prompter.as_deref(), &body));
        }
    });
    let reason = if !accepted {
        "encoder_queue_full"
    } else {
        match timeout(limits::PROMPT_DEADLINE, pending).await {
            Some(Some(done)) => return Some(done),
            Some(None) => "encoder_failed",
            None => "encoder_deadline",
        }
    };
    if shared.metrics.prompt_failed_because(reason) {
        warn!(reason, "a prompt was routed by load alone; further ones are only counted");
    }
    None
}

/// What is to be made of a body; runs on any thread.
struct Work {
    endpoint: prompt::Endpoint,
    wanted: Vec<Wanted>,
    /// Whether a prompt that cannot be tokenized is to be measured all the same.
    estimates: bool,
}

struct Done {
    prompts: Prompts,
    /// Why there are no blocks, if there are none.
    failure: Option<NoBlocks>,
}

impl Work {
    fn run(&self, prompter: Option<&Prompter>, body: &[u8]) -> Done {
        let (hashed, failure) = match self.hash_all(prompter, body) {
            Ok(hashed) => (hashed, None),
            Err(failure) => (Vec::new(), Some(failure)),
        };
        let is_estimate_wanted = self.estimates && hashed.is_empty();
        let estimated_tokens = if is_estimate_wanted { decode_demand::estimate_tokens(body) } else { 0 };
        Done { prompts: Prompts { hashed, facts: BodyFacts::read(body), estimated_tokens }, failure }
    }

    fn hash_all(&self, prompter: Option<&Prompter>, body: &[u8]) -> Result<Vec<HashedPrompt>, NoBlocks> {
        let mut hashed: Vec<HashedPrompt> = Vec::with_capacity(1);
        for want in &self.wanted {
            if hashed.iter().any(|prompt| prompt.rules == want.rules) {
                continue;
            }
            let sizes = self.wanted.iter().filter(|other| other.rules == want.rules);
            let sizes: Vec<usize> = sizes.map(|other| other.block_size as usize).collect();
            let blocks = prompt::blocks_by_size(prompter, self.endpoint, want.rules, body, &sizes)?;
            let tokens = blocks.first().map_or(0, |blocks| blocks.tokens as u64);
            let by_block_size = sizes.iter().zip(blocks).map(|(size, blocks)| (*size as u32, blocks.hashes)).collect();
            hashed.push(HashedPrompt { rules: want.rules, tokens, by_block_size });
        }
        Ok(hashed)
    }
}

fn report(shared: &Shared, failure: &NoBlocks) {
    // Without a tokenizer every prompt fails alike; that was said once at start.
    let first = shared.metrics.prompt_failed(failure);
    if first && !matches!(failure, NoBlocks::NoTokenizer) {
        warn!(reason = failure.reason(), detail = %failure, "a prompt was routed by load alone; further ones are only counted");
    }
}
