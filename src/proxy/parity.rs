//! Asks the ingest core to watch a request: will the worker's own events show the blocks that the router has hashed? A
//! pick that is not watched pays one relaxed load.

use std::sync::Arc;

use super::pick::Wish;
use super::prompts::DEFAULT_BLOCK_TOKENS;
use super::shared::Shared;
use crate::fleet::Target;
use crate::hash::BlockHash;
use crate::limits::PARITY_BODY_BYTES_MAX;
use crate::load::{Expectation, LedgerMessage};
use crate::worker::Role;

/// To be called before the booking, with the booking's own blocks: the end of the one is known by them.
pub(super) fn watch(shared: &Shared, wish: &Wish<'_>, target: &Target, blocks: &Arc<[BlockHash]>) {
    // A decode worker gets its blocks from elsewhere, and an image's blocks are named by more than their tokens.
    if blocks.is_empty() || wish.role == Role::Decode || wish.prompts.facts.is_multimodal {
        return;
    }
    let Some(source) = wish.prompts.source.as_ref().filter(|source| source.body.len() <= PARITY_BODY_BYTES_MAX) else {
        return;
    };
    if !target.parity.take_check() {
        return;
    }
    shared.ledger.send(LedgerMessage::Expected(Box::new(Expectation {
        target: target.id,
        slot: target.slot,
        worker: target.worker.clone(),
        block_size: target.block_size.unwrap_or(DEFAULT_BLOCK_TOKENS),
        blocks: blocks.clone(),
        endpoint: source.endpoint,
        body: source.body.clone(),
    })));
}
