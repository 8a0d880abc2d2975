//! The immutable index that shards read, and the one walk that answers every worker's depth. Readers never lock, never
//! allocate and never free: the ingest core keeps each snapshot until no reader has it.

use super::holders::Holders;
use super::table::Table;
use crate::fleet::Slot;
use crate::hash::BlockHash;

/// A run: consecutive blocks, each chained onto the one before, that the same slots hold.
#[derive(Clone, Debug)]
pub struct Node {
    /// Never empty.
    pub hashes: Vec<BlockHash>,
    pub holders: Holders,
}

impl Node {
    /// Number of leading blocks of `query` that this run spells. Hashes are chained, so an equal block proves all before it:
    /// a run that matches as a whole costs one comparison, any other a binary search.
    #[inline]
    fn matched(&self, query: &[BlockHash]) -> usize {
        let length = self.hashes.len().min(query.len());
        if self.hashes[length - 1] == query[length - 1] {
            return length;
        }
        let (mut low, mut high) = (0, length - 1);
        while low < high {
            let middle = (low + high) / 2;
            if self.hashes[middle] == query[middle] {
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

    /// Number of runs; a measure of fragmentation.
    pub fn run_count(&self) -> usize {
        self.table.len()
    }

    /// Depth, in blocks, of the longest prefix of `blocks` that each slot holds without a hole.
    pub fn query(&self, blocks: &[BlockHash], hits: &mut Hits) {
        hits.clear();
        let mut at = 0;
        while let Some(block) = blocks.get(at) {
            let Some(node) = self.table.get(*block) else { break };
            if at == 0 {
                hits.begin(&node.holders);
            } else if !hits.narrow(&node.holders, at as u32) {
                break;
            }
            // The table's key is the run's first hash, so at least one block matches; `max` keeps a broken run from hanging a shard.
            at += node.matched(&blocks[at..]).max(1);
        }
        hits.finish(at as u32);
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

    fn begin(&mut self, holders: &Holders) {
        let words = holders.word_count();
        self.alive.extend((0..words).map(|at| holders.word(at)));
        if self.depths.len() < words * 64 {
            self.depths.resize(words * 64, 0);
        }
        let touched = &mut self.touched;
        holders.for_each(|slot| touched.push(slot));
    }

    /// Drops every slot that does not hold the run at depth `at`; false when none is left.
    #[inline]
    fn narrow(&mut self, holders: &Holders, at: u32) -> bool {
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
    fn a_run_matches_by_its_last_block_or_by_search() {
        let node = Node { hashes: (10..20).map(BlockHash).collect(), holders: Holders::default() };
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
