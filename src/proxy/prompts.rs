//! From a body to block hashes: on the shard when all but a little of its text is known, with the rest on the encoder
//! pool. Whatever goes wrong costs cache locality only: the request is then routed by load, and the reason is counted.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use infera_shards::time::timeout;
use tracing::{debug, warn};

use super::service::RouterService;
use super::shared::Shared;
use crate::api::Endpoint;
use crate::decode_demand::{self, Input};
use crate::fleet::{Fleet, Parity, Target};
use crate::hash::BlockHash;
use crate::limits;
use crate::prompt::outline::Outline;
use crate::prompt::{self, Attempt, EngineRules, NoBlocks, PromptBody, PromptPreview, PromptTimes, Prompter, Variant};
use crate::route::BodyFacts;

/// Tokens per block for a target that has no block size of its own: the canonical value of the field.
pub(super) const DEFAULT_BLOCK_TOKENS: u32 = 16;

/// One prompt as one engine family renders it, hashed in every block size of the pool.
#[derive(Clone, Debug)]
pub(super) struct HashedPrompt {
    rules: EngineRules,
    variant: Option<u64>,
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
    /// What the prompt was made of; absent when there is none.
    pub source: Option<Source>,
}

/// A prompt as it came.
#[derive(Clone, Debug)]
pub(super) struct Source {
    pub endpoint: prompt::Endpoint,
    pub body: Bytes,
}

impl Prompts {
    /// Before anything was hashed.
    pub fn of(facts: BodyFacts) -> Self {
        Self { facts, ..Self::default() }
    }

    /// Tokens of the prompt as this target counts them. Exact where the router's own rendering is the
    /// worker's; parts other than text make it an estimate, and so do a worker that is known to render otherwise and a
    /// prompt that was not tokenized.
    pub fn tokens_for(&self, target: &Target) -> (u64, Input) {
        match self.hashed_for(Wanted::of(target)) {
            Some(prompt) if self.facts.is_multimodal || target.parity.verdict() == Parity::Diverged => {
                (prompt.tokens, Input::Estimated)
            }
            Some(prompt) => (prompt.tokens, Input::Exact),
            None => (self.estimated_tokens, Input::Estimated),
        }
    }

    /// The prompt's blocks as this target names them.
    pub fn blocks_for(&self, target: &Target) -> Option<&Arc<[BlockHash]>> {
        self.hashed_and_blocks_for(target).map(|(_, blocks)| blocks)
    }

    /// Those of them that the target's cache can spare it. Engines compute the last token of a prompt anew, whatever they
    /// hold, and with it its block: of a prompt that ends with a block, that block is never taken from the cache.
    pub fn reusable_for(&self, target: &Target) -> Option<&[BlockHash]> {
        let (prompt, blocks) = self.hashed_and_blocks_for(target)?;
        let block_size = u64::from(Wanted::of(target).block_size.max(1));
        let reusable = prompt.tokens.saturating_sub(1) / block_size;
        Some(&blocks[..blocks.len().min(reusable as usize)])
    }

    fn hashed_and_blocks_for(&self, target: &Target) -> Option<(&HashedPrompt, &Arc<[BlockHash]>)> {
        let wanted = Wanted::of(target);
        let prompt = self.hashed_for(wanted)?;
        let (_, blocks) = prompt.by_block_size.iter().find(|(size, _)| *size == wanted.block_size)?;
        Some((prompt, blocks))
    }

    fn hashed_for(&self, wanted: Wanted) -> Option<&HashedPrompt> {
        self.hashed.iter().find(|prompt| (prompt.rules, prompt.variant) == (wanted.rules, wanted.variant))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Wanted {
    rules: EngineRules,
    /// Of the worker's own template arguments; absent for the fleet's.
    variant: Option<u64>,
    block_size: u32,
}

impl Wanted {
    fn of(target: &Target) -> Self {
        Self {
            rules: EngineRules::of_engine(&target.worker.record.engine),
            variant: target.worker.variant,
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
    let started = Instant::now();
    // What somebody else's prompt has left on this thread is not this one's.
    prompt::take_times();
    let shared = &service.shared;
    let work = Work::of(service, endpoint, fleet, pool);
    let bytes = outline.body();
    prompts.source = Some(Source { endpoint: work.endpoint, body: bytes.clone() });
    let prompter = shared.prompter.as_deref();
    let brings_template = prompter.is_some_and(|prompter| prompter.may_bring_template(bytes));
    let done = match (prompter, body) {
        (None, _) if !brings_ids(outline) => work.failed(NoBlocks::NoTokenizer, bytes),
        (None, _) if bytes.len() <= limits::SHARD_NEW_TEXT_BYTES => work.run(None, bytes),
        (Some(prompter), Some(body)) if prompts.facts.messages <= limits::SHARD_PROMPT_MESSAGES && !brings_template => {
            match work.attempt_here(prompter, body, bytes.len()) {
                Ok(parts) if parts.iter().any(|part| matches!(part.attempt, Attempt::Later(_))) => {
                    return Some(Unfinished { work, parts: Some(parts), started, times: prompt::take_times() });
                }
                parts => work.done(Some(prompter), parts, bytes),
            }
        }
        _ => return Some(Unfinished { work, parts: None, started, times: PromptTimes::default() }),
    };
    take(service, prompts, done, started, prompt::take_times());
    None
}

/// The rest of the way, on the encoder pool.
pub(super) async fn finish(service: &RouterService, prompts: &mut Prompts, body: &Bytes, unfinished: Unfinished) {
    let Unfinished { work, parts, started, times } = unfinished;
    let (prompter, bytes) = (service.shared.prompter.clone(), body.clone());
    let job = move || {
        prompt::take_times();
        let done = match parts {
            Some(parts) => work.done(prompter.as_deref(), Ok(parts), &bytes),
            None => work.run(prompter.as_deref(), &bytes),
        };
        (done, prompt::take_times())
    };
    match on_the_pool(service, job).await {
        Ok((done, more)) => take(service, prompts, done, started, times.and(more)),
        Err(reason) => {
            // No time on this core for what the pool had none for: the whole body stands for its text.
            prompts.estimated_tokens = body.len() as u64 / 4;
            if service.shared.metrics.prompt_failed_because(reason) {
                warn!(reason, "a prompt was routed by load alone; further ones are only counted");
            }
        }
    }
}

/// What became of a prompt that is only looked at.
pub(super) struct Previewed {
    /// One for each rendering that the pool needs.
    pub renderings: Vec<(EngineRules, Vec<u32>, PromptPreview)>,
    /// Why there are no blocks, if there are none.
    pub reason: Option<(&'static str, String)>,
}

/// The same way for a request that is only explained: always on the encoder pool, and nothing is counted or kept.
pub(super) async fn preview(service: &RouterService, prompts: &mut Prompts, work: Work, body: Bytes) -> Previewed {
    let (prompter, length) = (service.shared.prompter.clone(), body.len());
    match on_the_pool(service, move || work.preview(prompter.as_deref(), &body)).await {
        Ok((done, renderings)) => {
            (prompts.hashed, prompts.estimated_tokens) = (done.hashed, done.estimated_tokens);
            let reason = done.failure.map(|failure| (failure.reason(), failure.to_string()));
            Previewed { renderings, reason }
        }
        Err(reason) => {
            prompts.estimated_tokens = length as u64 / 4;
            Previewed { renderings: Vec::new(), reason: Some((reason, "the encoder pool had no time".to_owned())) }
        }
    }
}

fn take(service: &RouterService, prompts: &mut Prompts, done: Done, started: Instant, times: PromptTimes) {
    let shared = &service.shared;
    shared.metrics.prompt_done(started.elapsed().as_secs_f64());
    service.prompt_took(times);
    if let Some(failure) = &done.failure {
        report(shared, failure);
    }
    (prompts.hashed, prompts.estimated_tokens) = (done.hashed, done.estimated_tokens);
}

/// A body whose prompt is token ids, which need no tokenizer.
fn brings_ids(outline: &Outline) -> bool {
    outline.raw("input_ids").is_some() || outline.raw("prompt").is_some_and(|prompt| prompt.starts_with(b"["))
}

/// What an encoder thread makes of the job, or why none did.
pub(super) async fn on_the_pool<T: Send + 'static>(
    service: &RouterService,
    job: impl FnOnce() -> T + Send + 'static,
) -> Result<T, &'static str> {
    let (completion, pending) = service.context.mailbox.ticket();
    // Gone with this future: a job whose request has left or given up does nothing.
    let wanted_still = Arc::new(());
    let watch = Arc::downgrade(&wanted_still);
    let accepted = service.shared.encoders.submit(move || {
        if watch.strong_count() > 0 {
            completion.complete(job());
        }
    });
    if !accepted {
        return Err("encoder_queue_full");
    }
    match timeout(limits::PROMPT_DEADLINE, pending).await {
        Some(Some(done)) => Ok(done),
        Some(None) => Err("encoder_failed"),
        None => Err("encoder_deadline"),
    }
}

/// What is to be made of a body; runs on any thread.
pub(super) struct Work {
    endpoint: prompt::Endpoint,
    wanted: Vec<Wanted>,
    /// The workers' own, by the ids that `wanted` names.
    variants: Vec<Variant>,
    /// Whether a prompt that cannot be tokenized is to be measured all the same.
    estimates: bool,
}

struct Done {
    hashed: Vec<HashedPrompt>,
    estimated_tokens: u64,
    /// Why there are no blocks, if there are none.
    failure: Option<NoBlocks>,
}

/// What tells one rendering from another: the engine's rules and the template arguments' id.
type Rendering = (EngineRules, u64);

/// Workers that render alike, and what they want of the rendering.
struct Family {
    rendering: Rendering,
    rules: EngineRules,
    /// Absent for the fleet's.
    variant: Option<Variant>,
    /// Ids of the variants that come to this rendering.
    shared_by: Vec<Option<u64>>,
    block_sizes: Vec<usize>,
}

/// One rendering of a prompt, or as far as it has come.
struct Part {
    family: Family,
    attempt: Attempt,
}

/// A prompt for the encoder pool: rendered, with more new text than a shard may encode, or not begun.
pub(super) struct Unfinished {
    work: Work,
    parts: Option<Vec<Part>>,
    started: Instant,
    /// What its stages took so far.
    times: PromptTimes,
}

impl Work {
    /// What the targets of `pool` want of a prompt.
    pub fn of(service: &RouterService, endpoint: &Endpoint, fleet: &Fleet, pool: &[u32]) -> Self {
        let mut wanted: Vec<Wanted> = Vec::with_capacity(1);
        let mut variants: Vec<Variant> = Vec::new();
        for index in pool {
            let target = &fleet.targets[*index as usize];
            let want = Wanted::of(target);
            if wanted.contains(&want) {
                continue;
            }
            if want.variant.is_some_and(|id| variants.iter().all(|variant| variant.id() != id)) {
                // What cannot be made a variant has no id, so this one can.
                let arguments = target.worker.record.default_chat_template_kwargs.as_ref();
                variants.extend(arguments.and_then(|arguments| Variant::of(arguments).ok()));
            }
            wanted.push(want);
        }
        let endpoint = match endpoint {
            Endpoint::ChatCompletions => prompt::Endpoint::Chat,
            Endpoint::Responses | Endpoint::InputTokens => prompt::Endpoint::Responses,
            Endpoint::Messages | Endpoint::CountTokens => prompt::Endpoint::Messages,
            _ => prompt::Endpoint::Completions,
        };
        Work { endpoint, wanted, variants, estimates: service.shared.steering.demand.is_some() }
    }

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
        let families = self.families(Some(prompter));
        let last = families.len().saturating_sub(1);
        let parts = families.into_iter().enumerate().map(|(index, family)| {
            let body = if index == last { body.take() } else { body.clone() }.unwrap_or_default();
            let (body, variant, sizes) = ((body, body_bytes), family.variant.as_ref(), &family.block_sizes);
            let attempt = prompter.attempt_read(self.endpoint, family.rules, variant, body, sizes, new_bytes_max)?;
            Ok(Part { family, attempt })
        });
        parts.collect()
    }

    fn attempt(&self, prompter: Option<&Prompter>, body: &[u8]) -> Result<Vec<Part>, NoBlocks> {
        let parts = self.families(prompter).into_iter().map(|family| {
            let (variant, sizes) = (family.variant.as_ref(), &family.block_sizes);
            let attempt = prompt::attempt(prompter, self.endpoint, family.rules, variant, body, sizes, usize::MAX)?;
            Ok(Part { family, attempt })
        });
        parts.collect()
    }

    /// The whole way, with what was seen on it, and without a trace.
    fn preview(&self, prompter: Option<&Prompter>, body: &[u8]) -> (Done, Vec<(EngineRules, Vec<u32>, PromptPreview)>) {
        let mut renderings = Vec::new();
        let parts = self.families(prompter).into_iter().map(|family| {
            let (variant, sizes) = (family.variant.as_ref(), &family.block_sizes);
            let seen = match prompter {
                Some(prompter) => prompter.preview(self.endpoint, family.rules, variant, body, sizes)?,
                None => PromptPreview::of_ids(&prompt::tokens_without_tokenizer(self.endpoint, body)?, sizes),
            };
            let attempt = Attempt::Ready(seen.blocks.clone());
            renderings.push((family.rules, sizes.iter().map(|size| *size as u32).collect(), seen));
            Ok(Part { family, attempt })
        });
        let parts = parts.collect();
        (self.done(prompter, parts, body), renderings)
    }

    /// One for each rendering that is needed.
    fn families(&self, prompter: Option<&Prompter>) -> Vec<Family> {
        let mut families: Vec<Family> = Vec::with_capacity(1);
        for want in &self.wanted {
            let rendering = self.rendering(want, prompter);
            let at = families.iter().position(|family| family.rendering == rendering).unwrap_or_else(|| {
                let variant = self.variants.iter().find(|variant| want.variant == Some(variant.id())).cloned();
                families.push(Family {
                    rendering,
                    rules: want.rules,
                    variant,
                    shared_by: Vec::new(),
                    block_sizes: Vec::new(),
                });
                families.len() - 1
            });
            let family = &mut families[at];
            if !family.shared_by.contains(&want.variant) {
                family.shared_by.push(want.variant);
            }
            if !family.block_sizes.contains(&(want.block_size as usize)) {
                family.block_sizes.push(want.block_size as usize);
            }
        }
        families
    }

    fn done(&self, prompter: Option<&Prompter>, parts: Result<Vec<Part>, NoBlocks>, body: &[u8]) -> Done {
        let hashed: Result<Vec<Vec<HashedPrompt>>, NoBlocks> =
            parts.and_then(|parts| parts.into_iter().map(|part| part.finished(prompter)).collect());
        match hashed {
            Ok(hashed) => Done { hashed: hashed.into_iter().flatten().collect(), estimated_tokens: 0, failure: None },
            Err(failure) => self.failed(failure, body),
        }
    }
}

impl Part {
    /// The same blocks for every variant that shares the rendering.
    fn finished(self, prompter: Option<&Prompter>) -> Result<Vec<HashedPrompt>, NoBlocks> {
        let blocks = match (self.attempt, prompter) {
            (Attempt::Ready(blocks), _) => blocks,
            (Attempt::Later(pending), Some(prompter)) => prompter.finish(pending)?,
            (Attempt::Later(_), None) => return Err(NoBlocks::NoTokenizer),
        };
        let tokens = blocks.first().map_or(0, |blocks| blocks.tokens as u64);
        let Family { rules, shared_by, block_sizes, .. } = self.family;
        let sizes = block_sizes.iter().map(|size| *size as u32);
        let by_block_size: Vec<_> = sizes.zip(blocks.into_iter().map(|blocks| blocks.hashes)).collect();
        let of = |variant| HashedPrompt { rules, variant, tokens, by_block_size: by_block_size.clone() };
        Ok(shared_by.into_iter().map(of).collect())
    }
}

impl Work {
    /// What tells one rendering from another. Arguments that are the fleet's own anyway make no other, and a
    /// completion has no template to give them to.
    fn rendering(&self, want: &Wanted, prompter: Option<&Prompter>) -> Rendering {
        let fleets = prompter.map_or(0, |prompter| prompter.fleet_variant().id());
        let variant = want.variant.filter(|_| self.endpoint != prompt::Endpoint::Completions);
        (want.rules, variant.unwrap_or(fleets))
    }
}

fn report(shared: &Shared, failure: &NoBlocks) {
    // Without a tokenizer every prompt fails alike; that was said once at start.
    let first = shared.metrics.prompt_failed(failure);
    if first && !matches!(failure, NoBlocks::NoTokenizer) {
        warn!(reason = failure.reason(), "a prompt was routed by load alone; further ones are only counted");
    }
    // A template may quote the prompt that it refuses: texts are shown where they are asked for and nowhere else.
    debug!(target: "infera_router::parity", detail = %failure, "a prompt was routed by load alone");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::fixtures::{fleet, member};
    use crate::worker::Role;

    /// Responses and Messages bodies become chats, which the engines render with their own arguments too.
    #[test]
    fn what_has_a_template_is_rendered_once_for_each_workers_arguments() {
        let variant = |text: &str| Variant::of(&serde_json::from_str(text).unwrap()).unwrap();
        let variants = vec![variant(r#"{"a":1}"#), variant(r#"{"a":2}"#)];
        let ids = [Some(variants[0].id()), None, Some(variants[1].id())];
        let wanted = ids.map(|variant| Wanted { rules: EngineRules::Vllm, variant, block_size: 16 }).to_vec();
        let families = |endpoint| {
            let (wanted, variants) = (wanted.clone(), variants.clone());
            Work { endpoint, wanted, variants, estimates: false }.families(None)
        };
        for endpoint in [prompt::Endpoint::Chat, prompt::Endpoint::Responses, prompt::Endpoint::Messages] {
            let own = families(endpoint).into_iter().map(|it| (it.variant.map(|variant| variant.id()), it.shared_by));
            assert_eq!(own.collect::<Vec<_>>(), ids.map(|id| (id, vec![id])), "{endpoint:?}");
        }
        let shared: Vec<_> = families(prompt::Endpoint::Completions).into_iter().map(|it| it.shared_by).collect();
        assert_eq!(shared, [ids], "without a template all render alike");
    }

    #[test]
    fn a_worker_that_renders_otherwise_is_counted_by_estimate() {
        let fleet = fleet(&[member("a", "m", Role::Decode), member("b", "m", Role::Decode)]);
        let hashed = HashedPrompt { rules: EngineRules::Vllm, variant: None, tokens: 7, by_block_size: Vec::new() };
        let prompts = Prompts { hashed: vec![hashed], ..Prompts::default() };
        let counts = || [0, 1].map(|at| prompts.tokens_for(&fleet.targets[at]));
        assert_eq!(counts(), [(7, Input::Exact); 2]);
        fleet.targets[1].parity.set_probed(Parity::Confirmed);
        assert_eq!(counts(), [(7, Input::Exact); 2]);
        fleet.targets[1].parity.set_watched(Parity::Diverged);
        assert_eq!(counts(), [(7, Input::Exact), (7, Input::Estimated)]);
    }
}
