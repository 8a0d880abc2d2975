//! One watched request: the blocks that its worker's events are to show, and what they show instead. Pure: stores, ends
//! and a clock value go in, one finding comes out. Never owns a socket, never knows a metric.
//!
//! Divergence needs positive evidence, all of it: the worker has answered the request well, so it has computed the whole
//! prompt; the events since then have come without a hole; not one of them has shown the missing block; and one has shown
//! another block in its place, below the last block that both sides have in common, which no request in flight on that
//! worker accounts for.

use std::sync::Arc;

use crate::hash::{BlockHash, ROOT};
use crate::limits::{PARITY_BRANCH_TOKENS_MAX, PARITY_BRANCHES_MAX, PARITY_CHECK_MAX, PARITY_GRACE};

/// Consecutive blocks that a worker has stored, in the router's names. No adapter, salt or image on any.
#[derive(Clone, Copy, Debug)]
pub struct Stored<'a> {
    /// [`ROOT`] for the start of a prompt.
    pub parent: BlockHash,
    pub chain: &'a [BlockHash],
    /// `block_size` token ids for each block of `chain`, and perhaps more.
    pub tokens: &'a [u32],
    /// Tokens per block.
    pub block_size: usize,
}

/// What one check has come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finding {
    Confirmed,
    Diverged,
    /// The worker was done with the request, and none of the blocks that it lacked has shown.
    Unseen,
    /// Nothing can be said: an aborted request, a hole in the events, a time that ran out.
    Unclear,
}

impl Finding {
    pub const COUNT: usize = 4;

    /// Label values, in the order of the variants.
    pub const NAMES: [&'static str; Self::COUNT] = ["confirmed", "diverged", "unseen", "unclear"];
}

/// Tokens that hang where expected ones were missing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Branch {
    /// Index of the first block of the request that they stand in the place of.
    pub at: usize,
    pub tokens: Vec<u32>,
    /// The router's name of the last block.
    tail: BlockHash,
}

#[derive(Debug)]
pub struct Check {
    blocks: Arc<[BlockHash]>,
    block_size: usize,
    /// Leading blocks that the worker held before the request.
    held: usize,
    /// Leading blocks that it is known to have, or to have had, since.
    depth: usize,
    branches: Vec<Branch>,
    /// Something was stored that cannot be compared, and may have been the request's: no evidence against the worker.
    is_blurred: bool,
    is_disturbed: bool,
    opened_ns: u64,
    ended: Option<End>,
}

#[derive(Clone, Copy, Debug)]
struct End {
    at_ns: u64,
    is_complete: bool,
}

impl Check {
    /// `held`: leading blocks that the worker has already; nothing is to be learnt when that is all of them.
    pub fn new(blocks: Arc<[BlockHash]>, block_size: usize, held: usize, now_ns: u64) -> Option<Self> {
        (held < blocks.len()).then(|| Self {
            blocks,
            block_size,
            held,
            depth: held,
            branches: Vec::new(),
            is_blurred: false,
            is_disturbed: false,
            opened_ns: now_ns,
            ended: None,
        })
    }

    /// The target itself has stored blocks. `is_accounted` tells whether a request in flight on the worker has a block.
    pub fn on_store(&mut self, stored: &Stored<'_>, is_accounted: impl Fn(BlockHash) -> bool) {
        if stored.block_size != self.block_size {
            // A model may have groups of layers with blocks of another size.
            self.is_blurred = true;
            return;
        }
        let Some(from) = self.place_behind(stored.parent) else {
            self.extend_branch(stored);
            return;
        };
        let expected = self.blocks.get(from..).unwrap_or_default();
        let common = expected.iter().zip(stored.chain).take_while(|(ours, theirs)| ours == theirs).count();
        let at = from + common;
        if at > self.depth {
            self.depth = at;
            // Beside blocks that have shown, another branch is another request's.
            self.branches.clear();
        }
        if at == self.depth && at < self.blocks.len() && common < stored.chain.len() {
            let first = stored.chain[common];
            if self.branches.len() < PARITY_BRANCHES_MAX && !is_accounted(first) {
                let tokens = stored.tokens.get(common * self.block_size..stored.chain.len() * self.block_size);
                let tail = stored.chain[stored.chain.len() - 1];
                self.branches.push(Branch { at, tokens: tokens.unwrap_or_default().to_vec(), tail });
            }
        }
    }

    /// Another rank of the worker has stored blocks: one that does not follow the router's choice of rank.
    pub fn on_store_elsewhere(&mut self, stored: &Stored<'_>) {
        self.is_blurred |= self.blocks.get(self.depth).is_some_and(|missing| stored.chain.contains(missing));
    }

    /// Blocks were stored under a parent that nobody knows.
    pub fn on_unplaced(&mut self) {
        self.is_blurred = true;
    }

    /// Events were lost.
    pub fn on_disturbance(&mut self) {
        self.is_disturbed = true;
    }

    /// The request is over. `is_complete`: the worker has computed all of its prompt.
    pub fn on_end(&mut self, is_complete: bool, now_ns: u64) {
        self.ended = Some(End { at_ns: now_ns, is_complete });
    }

    /// Whether these are the blocks of this check's own booking.
    pub fn is_of(&self, blocks: &Arc<[BlockHash]>) -> bool {
        Arc::ptr_eq(&self.blocks, blocks)
    }

    /// When the check ends by itself, on the clock of its inputs.
    pub fn due_ns(&self) -> u64 {
        let limit = self.opened_ns + PARITY_CHECK_MAX.as_nanos() as u64;
        self.ended.map_or(limit, |end| limit.min(end.at_ns + PARITY_GRACE.as_nanos() as u64))
    }

    /// The finding, once there is one.
    pub fn finding(&self, now_ns: u64) -> Option<Finding> {
        if self.depth == self.blocks.len() {
            return Some(Finding::Confirmed);
        }
        if self.is_disturbed || self.ended.is_some_and(|end| !end.is_complete) {
            return Some(Finding::Unclear);
        }
        if now_ns < self.due_ns() {
            return None;
        }
        Some(match () {
            () if self.ended.is_none() || self.is_blurred => Finding::Unclear,
            () if !self.branches.is_empty() => Finding::Diverged,
            // Some engines keep the block that the answer goes on in.
            () if self.depth > self.held && self.depth + 1 == self.blocks.len() => Finding::Confirmed,
            () if self.depth > self.held || self.depth + 1 == self.blocks.len() => Finding::Unclear,
            () => Finding::Unseen,
        })
    }

    /// What the worker has shown in the place of the missing blocks.
    pub fn into_branches(self) -> Vec<Branch> {
        self.branches
    }

    /// Index of the block that follows `parent` in the request's own chain.
    fn place_behind(&self, parent: BlockHash) -> Option<usize> {
        if parent == ROOT {
            return Some(0);
        }
        // From the end: a block that is named as a parent is there, whatever was known of it.
        self.blocks.iter().rposition(|block| *block == parent).map(|at| at + 1)
    }

    fn extend_branch(&mut self, stored: &Stored<'_>) {
        let Some(branch) = self.branches.iter_mut().find(|branch| branch.tail == stored.parent) else { return };
        if let Some(tail) = stored.chain.last() {
            branch.tail = *tail;
        }
        let room = PARITY_BRANCH_TOKENS_MAX.saturating_sub(branch.tokens.len());
        branch.tokens.extend(stored.tokens.iter().take(room.min(stored.chain.len() * stored.block_size)));
    }
}

#[cfg(test)]
#[path = "check_tests.rs"]
mod tests;
