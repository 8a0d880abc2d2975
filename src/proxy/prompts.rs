//! From a body to block hashes, on the shard when it is short, on the encoder pool when it is long. Whatever
//! goes wrong costs cache locality only: the request is then routed by load, and the reason is counted.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use infera_shards::time::timeout;
use tracing::warn;

use super::service::RouterService;
use super::shared::Shared;
use crate::api::Endpoint;
use crate::fleet::{Fleet, Target};
use crate::hash::BlockHash;
use crate::limits;
use crate::prompt::{self, EngineRules, NoBlocks, Prompter};

/// Tokens per block for a target that has no block size of its own: the canonical value of the field.
pub(super) const DEFAULT_BLOCK_TOKENS: u32 = 16;

/// One prompt as one engine family renders it, hashed in every block size of the pool.
#[derive(Clone, Debug)]
pub(super) struct HashedPrompt {
    rules: EngineRules,
    by_block_size: Vec<(u32, Arc<[BlockHash]>)>,
}

/// All renderings of one request's prompt; empty when it has no blocks.
#[derive(Clone, Debug, Default)]
pub(super) struct Prompts(Vec<HashedPrompt>);

impl Prompts {
    /// The prompt's blocks as this target names them.
    pub fn blocks_for(&self, target: &Target) -> Option<&Arc<[BlockHash]>> {
        let wanted = Wanted::of(target);
        let prompt = self.0.iter().find(|prompt| prompt.rules == wanted.rules)?;
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
        _ => prompt::Endpoint::Completions,
    };
    let started = Instant::now();
    let result = if body.len() <= limits::INLINE_PROMPT_BODY_BYTES {
        hash_all(service.shared.prompter.as_deref(), endpoint, &wanted, body)
    } else {
        match on_the_pool(service, endpoint, wanted, body).await {
            Some(result) => result,
            None => return Prompts::default(),
        }
    };
    service.shared.metrics.prompt_done(started.elapsed().as_secs_f64());
    result.unwrap_or_else(|failure| {
        report(&service.shared, &failure);
        Prompts::default()
    })
}

/// Nothing when the pool was full or late; that is counted here.
async fn on_the_pool(
    service: &RouterService,
    endpoint: prompt::Endpoint,
    wanted: Vec<Wanted>,
    body: &Bytes,
) -> Option<Result<Prompts, NoBlocks>> {
    let shared = &service.shared;
    let (completion, pending) = service.context.mailbox.ticket();
    let (prompter, body) = (shared.prompter.clone(), body.clone());
    // Gone with this future: a job whose request has left or given up does nothing.
    let wanted_still = Arc::new(());
    let watch = Arc::downgrade(&wanted_still);
    let accepted = shared.encoders.submit(move || {
        if watch.strong_count() > 0 {
            completion.complete(hash_all(prompter.as_deref(), endpoint, &wanted, &body));
        }
    });
    let reason = if !accepted {
        "encoder_queue_full"
    } else {
        match timeout(limits::PROMPT_DEADLINE, pending).await {
            Some(Some(result)) => return Some(result),
            Some(None) => "encoder_failed",
            None => "encoder_deadline",
        }
    };
    if shared.metrics.prompt_failed_because(reason) {
        warn!(reason, "a prompt was routed by load alone; further ones are only counted");
    }
    None
}

fn hash_all(
    prompter: Option<&Prompter>,
    endpoint: prompt::Endpoint,
    wanted: &[Wanted],
    body: &[u8],
) -> Result<Prompts, NoBlocks> {
    let mut prompts = Prompts::default();
    for want in wanted {
        if prompts.0.iter().any(|prompt| prompt.rules == want.rules) {
            continue;
        }
        let sizes = wanted.iter().filter(|other| other.rules == want.rules).map(|other| other.block_size as usize);
        let sizes: Vec<usize> = sizes.collect();
        let blocks = prompt::blocks_by_size(prompter, endpoint, want.rules, body, &sizes)?;
        let by_block_size = sizes.iter().zip(blocks).map(|(size, blocks)| (*size as u32, blocks.hashes)).collect();
        prompts.0.push(HashedPrompt { rules: want.rules, by_block_size });
    }
    Ok(prompts)
}

fn report(shared: &Shared, failure: &NoBlocks) {
    // Without a tokenizer every prompt fails alike; that was said once at start.
    let first = shared.metrics.prompt_failed(failure);
    if first && !matches!(failure, NoBlocks::NoTokenizer) {
        warn!(reason = failure.reason(), detail = %failure, "a prompt was routed by load alone; further ones are only counted");
    }
}
