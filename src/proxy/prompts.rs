//! From a body to block hashes: on the shard when all but a little of its text is known, with the rest on the encoder
//! pool. Whatever goes wrong costs cache locality only: the request is then routed by load, and the reason is counted.

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
use crate::prompt::outline::Outline;
use crate::prompt::{self, Attempt, EngineRules, NoBlocks, PromptBody, Prompter};
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
    /// Before anything was hashed.
    pub fn of(facts: BodyFacts) -> Self {
        Self { facts, ..Self::default() }
    }

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

/// Renders, encodes and hashes for every engine family and block size in `pool`, into `prompts`, as far as a shard may
/// go: a prompt whose text is known but for a small rest is finished. `body` is what was read of it, if it was.
pub(super) fn begin(
    service: &RouterService,
    prompts: &mut Prompts,
    endpoint: &Endpoint,
    fleet: &Fleet,
    pool: &[u32],
    outline: &Outline,
    body: Option<PromptBody<'_>>,
) -> Option<Unfinished> {
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
    let shared = &service.shared;
    let work = Work { endpoint, wanted, estimates: shared.steering.demand.is_some() };
    let bytes = outline.body();
    let prompter = shared.prompter.as_deref();
    let done = match (prompter, body) {
        (None, _) if !brings_ids(outline) => work.failed(NoBlocks::NoTokenizer, bytes),
        (None, _) if bytes.len() <= limits::SHARD_NEW_TEXT_BYTES => work.run(None, bytes),
        (Some(prompter), Some(body)) if prompts.facts.messages <= limits::SHARD_PROMPT_MESSAGES => {
            match work.attempt_here(prompter, body, bytes.len()) {
                Ok(parts) if parts.iter().any(|part| matches!(part.attempt, Attempt::Later(_))) => {
                    return Some(Unfinished { work, parts: Some(parts), started });
                }
                parts => work.done(Some(prompter), parts, bytes),
            }
        }
        _ => return Some(Unfinished { work, parts: None, started }),
    };
    take(shared, prompts, done, started);
    None
}

/// The rest of the way, on the encoder pool.
pub(super) async fn finish(service: &RouterService, prompts: &mut Prompts, body: &Bytes, unfinished: Unfinished) {
    let Unfinished { work, parts, started } = unfinished;
    let (prompter, bytes) = (service.shared.prompter.clone(), body.clone());
    let job = move || match parts {
        Some(parts) => work.done(prompter.as_deref(), Ok(parts), &bytes),
        None => work.run(prompter.as_deref(), &bytes),
    };
    match on_the_pool(service, Box::new(job)).await {
        Some(done) => take(&service.shared, prompts, done, started),
        // No time on this core for what the pool had none for: the whole body stands for its text.
        None => prompts.estimated_tokens = body.len() as u64 / 4,
    }
}

fn take(shared: &Shared, prompts: &mut Prompts, done: Done, started: Instant) {
    shared.metrics.prompt_done(started.elapsed().as_secs_f64());
    if let Some(failure) = &done.failure {
        report(shared, failure);
    }
    (prompts.hashed, prompts.estimated_tokens) = (done.hashed, done.estimated_tokens);
}

/// A body whose prompt is token ids, which need no tokenizer.
fn brings_ids(outline: &Outline) -> bool {
    outline.raw("input_ids").is_some() || outline.raw("prompt").is_some_and(|prompt| prompt.starts_with(b"["))
}

type Job = Box<dyn FnOnce() -> Done + Send>;

/// Nothing when the pool was full or late; that is counted here.
async fn on_the_pool(service: &RouterService, job: Job) -> Option<Done> {
    let shared = &service.shared;
    let (completion, pending) = service.context.mailbox.ticket();
    // Gone with this future: a job whose request has left or given up does nothing.
    let wanted_still = Arc::new(());
    let watch = Arc::downgrade(&wanted_still);
    let accepted = shared.encoders.submit(move || {
        if watch.strong_count() > 0 {
            completion.complete(job());
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
    hashed: Vec<HashedPrompt>,
    estimated_tokens: u64,
    /// Why there are no blocks, if there are none.
    failure: Option<NoBlocks>,
}

/// One rendering of a prompt, or as far as it has come.
struct Part {
    rules: EngineRules,
    block_sizes: Vec<usize>,
    attempt: Attempt,
}

/// A prompt for the encoder pool: rendered, with more new text than a shard may encode, or not begun.
pub(super) struct Unfinished {
    work: Work,
    parts: Option<Vec<Part>>,
    started: Instant,
}

impl Work {
    /// The whole way, from the body's bytes.
    fn run(&self, prompter: Option<&Prompter>, body: &[u8]) -> Done {
        self.done(prompter, self.attempt(prompter, body), body)
    }

    fn failed(&self, failure: NoBlocks, body: &[u8]) -> Done {
        let estimated_tokens = if self.estimates { decode_demand::estimate_tokens(body) } else { 0 };
        Done { hashed: Vec::new(), estimated_tokens, failure: Some(failure) }
    }

    /// From what was read, with as much encoding as a shard may do.
    fn attempt_here(
        &self,
        prompter: &Prompter,
        body: PromptBody<'_>,
        body_bytes: usize,
    ) -> Result<Vec<Part>, NoBlocks> {
        let new_bytes_max = match prompter.encodes_fast() {
            true => limits::SHARD_NEW_TEXT_BYTES,
            false => limits::SHARD_NEW_TEXT_BYTES_REFERENCE,
        };
        let mut body = Some(body);
        let families = self.families();
        let last = families.len().saturating_sub(1);
        let parts = families.into_iter().enumerate().map(|(index, (rules, block_sizes))| {
            let body = if index == last { body.take() } else { body.clone() }.unwrap_or_default();
            let body = (body, body_bytes);
            let attempt = prompter.attempt_read(self.endpoint, rules, None, body, &block_sizes, new_bytes_max)?;
            Ok(Part { rules, block_sizes, attempt })
        });
        parts.collect()
    }

    fn attempt(&self, prompter: Option<&Prompter>, body: &[u8]) -> Result<Vec<Part>, NoBlocks> {
        let parts = self.families().into_iter().map(|(rules, block_sizes)| {
            let attempt = prompt::attempt(prompter, self.endpoint, rules, body, &block_sizes, usize::MAX)?;
            Ok(Part { rules, block_sizes, attempt })
        });
        parts.collect()
    }

    /// Engine families, each with its block sizes: one rendering for each.
    fn families(&self) -> Vec<(EngineRules, Vec<usize>)> {
        let mut families: Vec<(EngineRules, Vec<usize>)> = Vec::with_capacity(1);
        for want in &self.wanted {
            match families.iter_mut().find(|(rules, _)| *rules == want.rules) {
                Some((_, sizes)) => sizes.push(want.block_size as usize),
                None => families.push((want.rules, vec![want.block_size as usize])),
            }
        }
        families
    }

    fn done(&self, prompter: Option<&Prompter>, parts: Result<Vec<Part>, NoBlocks>, body: &[u8]) -> Done {
        let hashed = parts.and_then(|parts| parts.into_iter().map(|part| part.finished(prompter)).collect());
        match hashed {
            Ok(hashed) => Done { hashed, estimated_tokens: 0, failure: None },
            Err(failure) => self.failed(failure, body),
        }
    }
}

impl Part {
    fn finished(self, prompter: Option<&Prompter>) -> Result<HashedPrompt, NoBlocks> {
        let blocks = match (self.attempt, prompter) {
            (Attempt::Ready(blocks), _) => blocks,
            (Attempt::Later(pending), Some(prompter)) => prompter.finish(pending)?,
            (Attempt::Later(_), None) => return Err(NoBlocks::NoTokenizer),
        };
        let tokens = blocks.first().map_or(0, |blocks| blocks.tokens as u64);
        let sizes = self.block_sizes.iter().map(|size| *size as u32);
        let by_block_size = sizes.zip(blocks.into_iter().map(|blocks| blocks.hashes)).collect();
        Ok(HashedPrompt { rules: self.rules, tokens, by_block_size })
    }
}

fn report(shared: &Shared, failure: &NoBlocks) {
    // Without a tokenizer every prompt fails alike; that was said once at start.
    let first = shared.metrics.prompt_failed(failure);
    if first && !matches!(failure, NoBlocks::NoTokenizer) {
        warn!(reason = failure.reason(), detail = %failure, "a prompt was routed by load alone; further ones are only counted");
    }
}
