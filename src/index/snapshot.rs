//! The immutable index that shards read, and the one walk that answers every worker's depth. Readers never lock, never
//! allocate and never free: the ingest core keeps each snapshot until no reader has it.

#[cfg(test)]
use std::sync::Arc;

use super::hashes::Hashes;
use super::spans::Spans;
use super::table::Table;
use crate::fleet::Slot;
use crate::hash::BlockHash;

/// A strand as published: consecutive blocks, each chained onto the one before, and who holds which stretch of them.
#[derive(Clone, Debug)]
pub struct Node {
    pub(super) hashes: Hashes,
    /// Blocks of the strand, never 0; some may be held by nobody.
    pub(super) length: u32,
    /// Who has a stretch in device memory.
    pub(super) device: Spans,
    /// Who has it in any memory; absent while that is the same.
    pub(super) any: Option<Box<Spans>>,
}

impl Node {
    pub(super) fn any(&self) -> &Spans {
        self.any.as_deref().unwrap_or(&self.device)
    }

    /// Number of leading blocks of `query` that this strand spells. Hashes are chained, so an equal block proves all before
    /// it: a strand that matches as a whole costs one comparison, any other a binary search.
    #[inline]
    fn matched(&self, query: &[BlockHash]) -> usize {
        let length = (self.length as usize).min(query.len());
        if self.hashes.get(length - 1) == query[length - 1] {
            return length;
        }
        let (mut low, mut high) = (0, length - 1);
        while low < high {
            let middle = (low + high) / 2;
            if self.hashes.get(middle) == query[middle] {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        low
    }
}

/// One published state of the index.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    table: Table,
}

impl Snapshot {
    pub(super) fn new(table: Table) -> Self {
        Self { table }
    }

    /// Number of strands; a measure of fragmentation.
    pub fn run_count(&self) -> usize {
        self.table.len()
    }

    /// Depth, in blocks, of the longest prefix of `blocks` that each slot holds in device memory without a hole. Tells
    /// whether [`Snapshot::query_any`] could say anything else: not where nobody has told of another memory on the way.
    pub fn query(&self, blocks: &[BlockHash], hits: &mut Hits) -> bool {
        let mut differs = false;
        self.walk(blocks, hits, |node| {
            differs |= node.any.is_some();
            &node.device
        });
        differs
    }

    /// The same for any memory: never less than [`Snapshot::query`]. What it has more is the extension of the device
    /// prefix that lies on the host or beyond.
    pub fn query_any(&self, blocks: &[BlockHash], hits: &mut Hits) {
        self.walk(blocks, hits, Node::any);
    }

    #[inline]
    fn walk<'a>(&'a self, blocks: &[BlockHash], hits: &mut Hits, mut spans: impl FnMut(&'a Node) -> &'a Spans) {
        hits.clear();
        let mut at = 0;
        'strands: while let Some(block) = blocks.get(at) {
            let Some(node) = self.table.get(*block) else { break };
            // The table's key is the first hash, so at least one block matches; `max` keeps a broken node from hanging a shard.
            let matched = node.matched(&blocks[at..]).max(1);
            let mut start = 0;
            for span in spans(node).iter() {
                if start >= matched {
                    break;
                }
                let depth = (at + start) as u32;
                let is_left = if depth == 0 { hits.begin(&span.holders) } else { hits.narrow(&span.holders, depth) };
                if !is_left {
                    break 'strands;
                }
                start = span.end as usize;
            }
            if start < matched {
                // The rest of the strand is held by nobody.
                at += start;
                break;
            }
            at += matched;
        }
        hits.finish(at as u32);
    }

    #[cfg(test)]
    pub(super) fn nodes(&self) -> Vec<(BlockHash, Arc<Node>)> {
        self.table.nodes()
    }
}

/// Reusable answer of a query.
#[derive(Clone, Debug, Default)]
pub struct Hits {
    /// Depth by slot; 0 for all but `touched`.
    depths: Vec<u32>,
    /// Slots that have matched so far, one bit each.
    alive: Vec<u64>,
    /// Slots with a depth above 0.
    touched: Vec<u16>,
}

impl Hits {
    pub fn new() -> Self {
        Self::default()
    }

    /// Blocks of the query's prefix that the slot holds.
    #[inline]
    pub fn depth(&self, slot: Slot) -> u32 {
        self.depths.get(slot.0 as usize).copied().unwrap_or(0)
    }

    /// Slots with at least one block, in slot order.
    pub fn iter(&self) -> impl Iterator<Item = (Slot, u32)> + '_ {
        self.touched.iter().map(|slot| (Slot(u32::from(*slot)), self.depths[usize::from(*slot)]))
    }

    /// Forgets the last answer, so that one scratch serves every request of a shard.
    pub fn clear(&mut self) {
        for slot in self.touched.drain(..) {
            self.depths[usize::from(slot)] = 0;
        }
        self.alive.clear();
    }

    fn begin(&mut self, holders: &super::holders::Holders) -> bool {
        let words = holders.word_count();
        self.alive.extend((0..words).map(|at| holders.word(at)));
        if self.depths.len() < words * 64 {
            self.depths.resize(words * 64, 0);
        }
        let touched = &mut self.touched;
        holders.for_each(|slot| touched.push(slot));
        words > 0
    }

    /// Drops every slot that does not hold the stretch at depth `at`; false when none is left.
    #[inline]
    fn narrow(&mut self, holders: &super::holders::Holders, at: u32) -> bool {
        let mut left = 0;
        for (word, alive) in self.alive.iter_mut().enumerate() {
            if *alive == 0 {
                continue;
            }
            let kept = *alive & holders.word(word);
            let mut dropped = *alive & !kept;
            while dropped != 0 {
                self.depths[word * 64 + dropped.trailing_zeros() as usize] = at;
                dropped &= dropped - 1;
            }
            *alive = kept;
            left |= kept;
        }
        left != 0
    }

    fn finish(&mut self, at: u32) {
        for (word, alive) in self.alive.iter_mut().enumerate() {
            while *alive != 0 {
                self.depths[word * 64 + alive.trailing_zeros() as usize] = at;
                *alive &= *alive - 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_strand_matches_by_its_last_block_or_by_search() {
        let hashes = Hashes::with_room(16, None, 0);
        (0..10).for_each(|at| hashes.set(at, BlockHash(10 + at as u64)));
        let node = Node { hashes, length: 10, device: Spans::default(), any: None };
        for matched in 1..=10usize {
            for length in matched..=12 {
                let query: Vec<BlockHash> = (0..length)
                    .map(|at| BlockHash(if at < matched { 10 + at as u64 } else { 900 + at as u64 }))
                    .collect();
                assert_eq!(node.matched(&query), matched, "{query:?}");
            }
        }
    }
}
