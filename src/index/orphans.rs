//! Blocks whose parent is not known: kept detached, with their tokens, under their parent's name, and handed out when it
//! comes. Never rooted: an orphan taken for a first block would match prompts that begin with its tokens. Bounded.

use std::collections::VecDeque;

use hashbrown::HashMap;

use super::copies::Copies;
use crate::events::{CopyKey, EngineHash};
use crate::limits::ORPHAN_BLOCKS_MAX;

#[derive(Debug)]
pub struct Orphan {
    pub parent: EngineHash,
    pub tokens: Box<[u32]>,
    /// Digest of adapter, salt and image keys; 0 for none.
    pub identity: u64,
    /// May be empty: removed, but still the parent of others.
    pub copies: Copies,
}

#[derive(Debug, Default)]
pub struct Orphans {
    blocks: HashMap<EngineHash, Orphan>,
    waiting: HashMap<EngineHash, Vec<EngineHash>>,
    /// Oldest first; names that are gone are passed over.
    order: VecDeque<EngineHash>,
}

impl Orphans {
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Keeps one block; a repeat is one more copy. Returns the number of blocks that had to go for it.
    pub fn insert(
        &mut self,
        hash: EngineHash,
        parent: EngineHash,
        tokens: &[u32],
        identity: u64,
        copy: CopyKey,
    ) -> u64 {
        if let Some(orphan) = self.blocks.get_mut(&hash) {
            orphan.copies.add(copy);
            return 0;
        }
        let mut dropped = 0;
        while self.blocks.len() >= ORPHAN_BLOCKS_MAX {
            let Some(oldest) = self.order.pop_front() else { break };
            dropped += u64::from(self.take(oldest).is_some());
        }
        self.blocks.insert(hash, Orphan { parent, tokens: tokens.into(), identity, copies: Copies::of(copy) });
        self.waiting.entry(parent).or_default().push(hash);
        self.order.push_back(hash);
        if self.order.len() > 2 * ORPHAN_BLOCKS_MAX {
            self.order.retain(|name| self.blocks.contains_key(name));
        }
        dropped
    }

    /// A copy is gone. The block itself stays while others wait for it.
    pub fn remove_copy(&mut self, hash: EngineHash, copy: CopyKey) {
        let Some(orphan) = self.blocks.get_mut(&hash) else { return };
        orphan.copies.remove(copy);
        if orphan.copies.is_empty() && !self.waiting.contains_key(&hash) {
            self.take(hash);
        }
    }

    /// Takes one block out.
    pub fn take(&mut self, hash: EngineHash) -> Option<Orphan> {
        let orphan = self.blocks.remove(&hash)?;
        if let Some(siblings) = self.waiting.get_mut(&orphan.parent) {
            siblings.retain(|sibling| *sibling != hash);
            if siblings.is_empty() {
                self.waiting.remove(&orphan.parent);
            }
        }
        Some(orphan)
    }

    /// Takes out every block that waits for `parent`.
    pub fn take_children(&mut self, parent: EngineHash) -> Vec<(EngineHash, Orphan)> {
        let children = self.waiting.remove(&parent).unwrap_or_default();
        children.into_iter().filter_map(|hash| Some((hash, self.blocks.remove(&hash)?))).collect()
    }
}
