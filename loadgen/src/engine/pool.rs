//! Owns one rank's KV blocks: who holds them, which contents are resident, and the order of eviction. Never knows
//! requests, time or the wire. The rules are vLLM's block pool: a released block keeps its content and joins the
//! tail of a free list; the head of that list is evicted when a block is needed; a request's blocks are released
//! last block first, so leaves go before their parents.

use std::hash::Hash;

use hashbrown::HashMap;
use hashbrown::hash_map::Entry;

use super::hash::Digest;

pub type BlockId = u32;

const NONE: BlockId = BlockId::MAX;

#[derive(Clone, Debug)]
struct Block<N> {
    holders: u32,
    digest: Option<N>,
    /// The next copy of the same content.
    next_copy: BlockId,
    previous: BlockId,
    next: BlockId,
}

/// Fixed set of blocks with an intrusive free list, every operation in constant time per block.
#[derive(Debug)]
pub struct BlockPool<N = Digest> {
    blocks: Vec<Block<N>>,
    head: BlockId,
    tail: BlockId,
    free: usize,
    /// The oldest copy of each content, which is the one that prefix hits share; the others hang on it.
    resident: HashMap<N, BlockId>,
    /// vLLM keeps two physical copies when two requests compute the same block; SGLang's tree keeps one.
    keeps_copies: bool,
}

impl<N: Copy + Eq + Hash> BlockPool<N> {
    pub fn new(blocks_total: usize, keeps_copies: bool) -> Self {
        assert!(blocks_total > 0 && blocks_total < NONE as usize, "a pool holds between 1 and 2^32 - 2 blocks");
        let mut pool = BlockPool {
            blocks: vec![Block { holders: 0, digest: None, next_copy: NONE, previous: NONE, next: NONE }; blocks_total],
            head: NONE,
            tail: NONE,
            free: 0,
            resident: HashMap::with_capacity(blocks_total),
            keeps_copies,
        };
        (0..blocks_total as BlockId).for_each(|block| pool.push_tail(block));
        pool
    }

    pub fn blocks_total(&self) -> usize {
        self.blocks.len()
    }

    pub fn keeps_copies(&self) -> bool {
        self.keeps_copies
    }

    /// Blocks that can be handed out, evicting if need be.
    pub fn blocks_free(&self) -> usize {
        self.free
    }

    /// Blocks held by running requests.
    pub fn blocks_held(&self) -> usize {
        self.blocks.len() - self.free
    }

    /// Distinct contents that a new request could reuse.
    pub fn blocks_resident(&self) -> usize {
        self.resident.len()
    }

    /// The distinct contents, in no order.
    pub fn resident_digests(&self) -> impl Iterator<Item = &N> {
        self.resident.keys()
    }

    /// The longest resident prefix of `digests`, one block each.
    pub fn prefix(&self, digests: &[N]) -> Vec<BlockId> {
        digests.iter().map_while(|digest| self.resident.get(digest).copied()).collect()
    }

    /// Length of that prefix, blocks.
    pub fn prefix_length(&self, digests: &[N]) -> usize {
        digests.iter().take_while(|digest| self.resident.contains_key(*digest)).count()
    }

    /// How many of `blocks` would leave the free list if they were held.
    pub fn unheld(&self, blocks: &[BlockId]) -> usize {
        blocks.iter().filter(|block| self.blocks[**block as usize].holders == 0).count()
    }

    /// Adds a holder to blocks found by [`BlockPool::prefix`].
    pub fn hold(&mut self, blocks: &[BlockId]) {
        for &block in blocks {
            if self.blocks[block as usize].holders == 0 {
                self.unlink(block);
            }
            self.blocks[block as usize].holders += 1;
        }
    }

    /// Takes `count` blocks with one holder each, evicting the contents that have been free longest. `evicted` gets
    /// the content of each copy dropped, in order. Returns `None` and changes nothing if too few are free.
    pub fn take(&mut self, count: usize, evicted: &mut Vec<N>) -> Option<Vec<BlockId>> {
        if count > self.free {
            return None;
        }
        let taken = (0..count)
            .map(|_| {
                let block = self.head;
                self.unlink(block);
                if let Some(digest) = self.blocks[block as usize].digest.take() {
                    self.forget_copy(&digest, block);
                    evicted.push(digest);
                }
                self.blocks[block as usize].holders = 1;
                block
            })
            .collect();
        Some(taken)
    }

    /// Names the content of a held, so far nameless block. Returns whether a copy became resident: false when the
    /// content is resident already and this pool keeps one copy (the block then stays nameless).
    pub fn name(&mut self, block: BlockId, digest: N) -> bool {
        let slot = &self.blocks[block as usize];
        assert!(slot.holders > 0 && slot.digest.is_none(), "only a held block without content is named");
        match self.resident.entry(digest) {
            Entry::Vacant(entry) => _ = entry.insert(block),
            Entry::Occupied(_) if !self.keeps_copies => return false,
            Entry::Occupied(entry) => {
                let mut last = *entry.get();
                while self.blocks[last as usize].next_copy != NONE {
                    last = self.blocks[last as usize].next_copy;
                }
                self.blocks[last as usize].next_copy = block;
            }
        }
        self.blocks[block as usize].digest = Some(digest);
        true
    }

    /// Drops one holder of each block, last block first.
    pub fn release(&mut self, blocks: &[BlockId]) {
        for &block in blocks.iter().rev() {
            let slot = &mut self.blocks[block as usize];
            assert!(slot.holders > 0, "a block is released once per hold");
            slot.holders -= 1;
            if slot.holders == 0 {
                self.push_tail(block);
            }
        }
    }

    /// Forgets all contents. Refused (false) while any block is held, as vLLM and SGLang refuse.
    pub fn clear(&mut self) -> bool {
        if self.blocks_held() > 0 {
            return false;
        }
        self.resident.clear();
        self.blocks.iter_mut().for_each(|block| (block.digest, block.next_copy) = (None, NONE));
        true
    }

    fn forget_copy(&mut self, digest: &N, block: BlockId) {
        let next = std::mem::replace(&mut self.blocks[block as usize].next_copy, NONE);
        let Entry::Occupied(mut first) = self.resident.entry(*digest) else {
            panic!("a named block is listed under its content");
        };
        if *first.get() != block {
            let mut before = *first.get();
            while self.blocks[before as usize].next_copy != block {
                before = self.blocks[before as usize].next_copy;
            }
            self.blocks[before as usize].next_copy = next;
        } else if next == NONE {
            first.remove();
        } else {
            first.insert(next);
        }
    }

    fn push_tail(&mut self, block: BlockId) {
        let previous = self.tail;
        let slot = &mut self.blocks[block as usize];
        (slot.previous, slot.next) = (previous, NONE);
        match previous {
            NONE => self.head = block,
            previous => self.blocks[previous as usize].next = block,
        }
        self.tail = block;
        self.free += 1;
    }

    fn unlink(&mut self, block: BlockId) {
        let Block { previous, next, .. } = self.blocks[block as usize];
        match previous {
            NONE => self.head = next,
            previous => self.blocks[previous as usize].next = next,
        }
        match next {
            NONE => self.tail = previous,
            next => self.blocks[next as usize].previous = previous,
        }
        self.free -= 1;
    }
}
