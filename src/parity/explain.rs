//! Says what a divergence was: renders the request once more, finds the first token that differs, and writes it with
//! its surroundings to the debug log. On a thread of its own, and only while somebody listens; texts go nowhere else.

use std::sync::Arc;

use crossbeam::channel::{Receiver, Sender, bounded};
use tracing::{Level, debug, enabled};

use super::check::Branch;
use crate::limits::PARITY_EXPLANATIONS_MAX;
use crate::load::Expectation;
use crate::prompt::{self, EngineRules, NoBlocks, Prompter, Variant};

/// Tokens shown on each side of the first difference.
const CONTEXT_TOKENS: usize = 12;

/// A request whose worker has shown other blocks.
#[derive(Debug)]
pub struct Divergence {
    pub expectation: Box<Expectation>,
    pub branches: Vec<Branch>,
}

/// Starts the thread if debug events of parity are enabled; it ends with the last sender.
pub fn start_if_heard(prompter: Option<Arc<Prompter>>) -> std::io::Result<Option<Sender<Divergence>>> {
    if !enabled!(target: "infera_router::parity", Level::DEBUG) {
        return Ok(None);
    }
    let (sender, receiver) = bounded(PARITY_EXPLANATIONS_MAX);
    std::thread::Builder::new().name("parity".to_owned()).spawn(move || run(prompter.as_deref(), &receiver))?;
    Ok(Some(sender))
}

fn run(prompter: Option<&Prompter>, divergences: &Receiver<Divergence>) {
    while let Ok(divergence) = divergences.recv() {
        let worker_id = &*divergence.expectation.worker.id;
        match explain(prompter, &divergence) {
            Ok(Some(difference)) => debug!(
                target: "infera_router::parity",
                worker_id,
                token = difference.token,
                tokens = difference.tokens,
                expected = difference.expected,
                shown = difference.shown,
                "the worker's tokens differ"
            ),
            Ok(None) => debug!(target: "infera_router::parity", worker_id, "no difference among the worker's tokens"),
            Err(reason) => debug!(target: "infera_router::parity", worker_id, %reason, "a divergence is not explained"),
        }
    }
}

/// The first difference.
#[derive(Debug, PartialEq, Eq)]
struct Difference {
    /// Index of the first token that differs, and how many the prompt has.
    token: usize,
    tokens: usize,
    /// Text around it, as this router has it and as the worker has it.
    expected: String,
    shown: String,
}

fn explain(prompter: Option<&Prompter>, divergence: &Divergence) -> Result<Option<Difference>, NoBlocks> {
    let Expectation { worker, endpoint, body, block_size, .. } = &*divergence.expectation;
    let rules = EngineRules::of_engine(&worker.record.engine);
    let ids = match prompter {
        Some(prompter) => {
            let arguments = worker.record.default_chat_template_kwargs.as_ref();
            let variant = arguments.and_then(|arguments| Variant::of(arguments).ok());
            prompter.tokens_of_variant(*endpoint, rules, variant.as_ref(), body)?.ids
        }
        None => prompt::tokens_without_tokenizer(*endpoint, body)?.ids,
    };
    let text = |ids: &[u32]| match prompter.and_then(|prompter| prompter.text_of(ids)) {
        Some(text) => text,
        None => format!("{ids:?}"),
    };
    Ok(first_difference(&ids, *block_size as usize, &divergence.branches, text))
}

/// Of the branch that agrees longest: most likely the request's own.
fn first_difference(
    ids: &[u32],
    block_size: usize,
    branches: &[Branch],
    text: impl Fn(&[u32]) -> String,
) -> Option<Difference> {
    let agreed = |branch: &Branch| {
        let expected = ids.get(branch.at * block_size..).unwrap_or_default();
        expected.iter().zip(&branch.tokens).take_while(|(ours, theirs)| ours == theirs).count()
    };
    let (agreed, branch) = branches.iter().map(|branch| (agreed(branch), branch)).max_by_key(|(agreed, _)| *agreed)?;
    if agreed == branch.tokens.len() {
        return None;
    }
    let token = branch.at * block_size + agreed;
    let around = |ids: &[u32], at: usize| {
        let ids = &ids[at.saturating_sub(CONTEXT_TOKENS)..ids.len().min(at + CONTEXT_TOKENS)];
        text(ids)
    };
    Some(Difference {
        token,
        tokens: ids.len(),
        expected: around(ids, token.min(ids.len())),
        shown: around(&branch.tokens, agreed),
    })
}
