//! The writer's side of the radix index: strands of consecutive blocks, who holds which stretch, and what must be published.
//! Lives on the ingest core.
//!
//! A strand is cut nowhere: a chain that leaves it in the middle begins a strand of its own, and holders that differ are
//! spans within it. So a block's place never changes while anyone refers to it, and the mirrors can keep places where they
//! would otherwise need hashes and a table of all blocks. The next block of a chain is either the next of its strand or the
//! first of another; no block is anywhere else.

use std::sync::Arc;

use super::firsts::Firsts;
use super::hashes::Hashes;
use super::snapshot::{Node, Snapshot};
use super::spans::{Changed, Spans};
use super::table::Table;
use crate::hash::BlockHash;
use crate::limits::{RUN_BLOCKS_MAX, STRANDS_MAX};

const OFFSET_BITS: u32 = RUN_BLOCKS_MAX.trailing_zeros();
const _: () = assert!(RUN_BLOCKS_MAX.is_power_of_two(), "a place is a strand's number and an offset within it");
const _: () = assert!((STRANDS_MAX as u64) << OFFSET_BITS <= 1 << 32, "every place has a number of 32 bits");

/// Where a block lies: number of its strand, and offset within it. Good while a slot holds the block or a tombstone pins it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Place(pub(super) u32);

impl Place {
    fn new(strand: u32, offset: u32) -> Self {
        Place(strand << OFFSET_BITS | offset)
    }

    fn strand(self) -> u32 {
        self.0 >> OFFSET_BITS
    }

    fn offset(self) -> u32 {
        self.0 & (RUN_BLOCKS_MAX as u32 - 1)
    }

    /// The place `by` blocks further on in the same strand, which must be that long.
    pub(super) fn further(self, by: usize) -> Place {
        Place(self.0 + by as u32)
    }

    /// Whether `next` is the next place of the same strand.
    pub fn is_followed_by(self, next: Place) -> bool {
        self.0 + 1 == next.0 && self.strand() == next.strand()
    }
}

/// Which memory a copy lies in, as far as credit goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tiers {
    pub device: bool,
    /// In any memory; always set with `device`.
    pub any: bool,
}

impl Tiers {
    pub const NONE: Tiers = Tiers { device: false, any: false };
    pub const BOTH: Tiers = Tiers { device: true, any: true };

    /// What is here and not in `other`.
    pub fn without(self, other: Tiers) -> Tiers {
        Tiers { device: self.device && !other.device, any: self.any && !other.any }
    }

    pub fn is_none(self) -> bool {
        self == Self::NONE
    }
}

#[derive(Debug)]
struct Strand {
    /// Shared with the table from one publication to the next change.
    node: Arc<Node>,
    /// Tombstones that refer to blocks here.
    pins: u32,
    /// Largest length that was ever published with these hashes: below it, nothing is written.
    published_length: u32,
    /// No adapter, salt or image on the blocks or their ancestors.
    is_plain: bool,
    is_touched: bool,
    is_published: bool,
}

#[derive(Debug, Default)]
pub struct Tree {
    strands: Vec<Option<Strand>>,
    free: Vec<u32>,
    /// Strand by its first block.
    firsts: Firsts,
    /// Strands that have changed or come since the last publication, and first blocks of published ones that have gone.
    touched: Vec<u32>,
    gone: Vec<BlockHash>,
    table: Table,
    /// Blocks held in any memory, by slot.
    counts: Vec<u32>,
    /// Distinct blocks, and strands, that anyone holds.
    blocks: usize,
    held_strands: usize,
}

impl Tree {
    /// Distinct blocks in the index.
    pub fn block_count(&self) -> usize {
        self.blocks
    }

    /// Strands with a holder.
    pub fn run_count(&self) -> usize {
        self.held_strands
    }

    /// Distinct blocks that the slot holds, holes or not.
    pub fn held_count(&self, slot: u16) -> u32 {
        self.counts.get(usize::from(slot)).copied().unwrap_or(0)
    }

    /// Memory of the block hashes, room to grow included, and of the strands' records. Walks all strands.
    pub fn strand_bytes(&self) -> usize {
        let strands = self.strands.iter().flatten();
        let hashes: usize = strands.map(|strand| size_of::<Node>() + 8 * strand.node.hashes.capacity()).sum();
        hashes + self.strands.capacity() * size_of::<Option<Strand>>() + self.firsts.bytes()
    }

    /// Whether a publication would show anything new.
    pub fn is_changed(&self) -> bool {
        !self.touched.is_empty() || !self.gone.is_empty()
    }

    /// Brings the table up to date and returns it as an immutable snapshot. Costs by the strands that changed.
    pub fn publish(&mut self) -> Snapshot {
        for first in self.gone.drain(..) {
            self.table.remove(first);
        }
        for id in self.touched.drain(..) {
            // A strand that came and went since the last publication leaves a number that is free or another's.
            let Some(strand) = self.strands[id as usize].as_mut().filter(|strand| strand.is_touched) else { continue };
            strand.is_touched = false;
            let first = strand.node.hashes.get(0);
            if !strand.node.any().is_empty() {
                strand.published_length = strand.published_length.max(strand.node.length);
                strand.is_published = true;
                self.table.insert(first, strand.node.clone());
            } else if std::mem::take(&mut strand.is_published) {
                self.table.remove(first);
            }
        }
        Snapshot::new(self.table.clone())
    }

    // Places -----------------------------------------------------------------------------------------------------

    pub fn block(&self, place: Place) -> BlockHash {
        self.strand(place.strand()).node.hashes.get(place.offset() as usize)
    }

    /// Whether the block has no adapter, salt or image, on itself or an ancestor.
    pub fn is_plain(&self, place: Place) -> bool {
        self.strand(place.strand()).is_plain
    }

    /// The place of the block that follows `parent` (`None`: that starts a prompt); made if there is none. `more` is the
    /// number of blocks that are to follow it. `None` when the index has as many strands as it can number. The place is
    /// good until the next release, unless it is held or pinned before.
    pub fn child(&mut self, parent: Option<Place>, block: BlockHash, is_plain: bool, more: usize) -> Option<Place> {
        let Some(parent) = parent else {
            let known = self.firsts.get(block).map(|id| Place::new(id, 0));
            return known.or_else(|| self.add_strand(block, is_plain, more));
        };
        let strand = self.strand(parent.strand());
        let next = parent.offset() as usize + 1;
        let length = strand.node.length as usize;
        if next < length && strand.node.hashes.get(next) == block {
            return Some(Place::new(parent.strand(), next as u32));
        }
        if let Some(id) = self.firsts.get(block) {
            return Some(Place::new(id, 0));
        }
        if next == length && length < RUN_BLOCKS_MAX && strand.is_plain == is_plain {
            self.append(parent.strand(), &[block], more);
            return Some(Place::new(parent.strand(), next as u32));
        }
        self.add_strand(block, is_plain, more)
    }

    /// The places of `blocks`, which follow `parent` and each other, as far as they lie in one strand: the first, and how
    /// many there are, at least one. Otherwise as [`Tree::child`].
    pub fn children(
        &mut self,
        parent: Option<Place>,
        blocks: &[BlockHash],
        is_plain: bool,
        more: usize,
    ) -> Option<(Place, usize)> {
        let (first, rest) = blocks.split_first()?;
        let place = self.child(parent, *first, is_plain, more + rest.len())?;
        let strand = self.strand(place.strand());
        let length = strand.node.length as usize;
        let from = place.offset() as usize + 1;
        let known = (from..length).zip(rest).take_while(|(at, block)| strand.node.hashes.get(*at) == **block).count();
        if from + known < length || strand.is_plain != is_plain {
            return Some((place, 1 + known));
        }
        let fresh = rest[known..].iter().take(RUN_BLOCKS_MAX - length);
        let fresh = fresh.take_while(|block| self.firsts.get(**block).is_none()).count();
        if fresh > 0 {
            self.append(place.strand(), &rest[known..known + fresh], more + rest.len() - known - fresh);
        }
        Some((place, 1 + known + fresh))
    }

    /// Adds blocks to a strand that has places for them.
    fn append(&mut self, id: u32, blocks: &[BlockHash], more: usize) {
        let strand = self.strand_mut(id);
        let length = strand.node.length as usize;
        let is_shared = (length as u32) < strand.published_length;
        let node = Arc::make_mut(&mut strand.node);
        if length + blocks.len() > node.hashes.capacity() || is_shared {
            // Doubling would leave a third of all strands empty; by a quarter, a short strand would move with every event.
            let extra = if length < 256 { length / 2 } else { length / 4 };
            let wanted = (length + blocks.len() + more).max(length + extra).next_multiple_of(8).min(RUN_BLOCKS_MAX);
            node.hashes = Hashes::with_room(wanted, Some(&node.hashes), length);
            strand.published_length = 0;
        }
        for (at, block) in blocks.iter().enumerate() {
            node.hashes.set(length + at, *block);
        }
        node.length += blocks.len() as u32;
    }

    fn add_strand(&mut self, first: BlockHash, is_plain: bool, more: usize) -> Option<Place> {
        let id = match self.free.pop() {
            Some(id) => id,
            None if self.strands.len() == STRANDS_MAX => return None,
            None => {
                self.strands.push(None);
                (self.strands.len() - 1) as u32
            }
        };
        let hashes = Hashes::with_room((1 + more).min(RUN_BLOCKS_MAX), None, 0);
        hashes.set(0, first);
        let node = Arc::new(Node { hashes, length: 1, device: Spans::default(), any: None });
        self.strands[id as usize] =
            Some(Strand { node, pins: 0, published_length: 0, is_plain, is_touched: false, is_published: false });
        self.firsts.insert(first, id);
        Some(Place::new(id, 0))
    }

    // Holders ----------------------------------------------------------------------------------------------------

    /// Makes `slot` a holder of `count` blocks of one strand, from `place` on, in the memories of `tiers`. Calls
    /// `already_held` for each block and memory that the slot held before.
    pub fn hold(
        &mut self,
        slot: u16,
        place: Place,
        count: u32,
        tiers: Tiers,
        mut already_held: impl FnMut(Place, Tiers),
    ) {
        let id = place.strand();
        let (from, to) = (place.offset(), place.offset() + count);
        let changed = self.edit(id, tiers, |spans, tier| {
            spans.insert(slot, from, to, |offset| already_held(Place::new(id, offset), tier))
        });
        if self.counts.len() <= usize::from(slot) {
            self.counts.resize(usize::from(slot) + 1, 0);
        }
        self.counts[usize::from(slot)] += changed.blocks;
        self.blocks += changed.alone as usize;
    }

    /// Takes `slot` out of the holders of `count` blocks of one strand, from `place` on. Places in it that neither a slot
    /// nor a tombstone needs any more are no longer good.
    pub fn release(&mut self, slot: u16, place: Place, count: u32, tiers: Tiers) {
        let (from, to) = (place.offset(), place.offset() + count);
        let changed = self.edit(place.strand(), tiers, |spans, _| spans.remove(slot, from, to));
        self.uncount(slot, changed);
        self.trim(place.strand());
    }

    /// Takes the slot out of everything it holds; `places` must name a block of each strand that it holds any of.
    pub fn clear(&mut self, slot: u16, places: impl Iterator<Item = Place>) {
        let mut strands: Vec<u32> = places.map(Place::strand).collect();
        strands.sort_unstable();
        strands.dedup();
        for id in strands {
            let changed = self.edit(id, Tiers::BOTH, |spans, _| spans.remove(slot, 0, RUN_BLOCKS_MAX as u32));
            self.uncount(slot, changed);
            self.trim(id);
        }
        debug_assert_eq!(self.held_count(slot), 0, "a cleared slot still holds blocks");
    }

    fn uncount(&mut self, slot: u16, changed: Changed) {
        if let Some(count) = self.counts.get_mut(usize::from(slot)) {
            *count -= changed.blocks;
        }
        self.blocks -= changed.alone as usize;
    }

    /// Changes a strand's spans, one list or both; returns what that did to the list of any memory.
    fn edit(&mut self, id: u32, tiers: Tiers, mut change: impl FnMut(&mut Spans, Tiers) -> Changed) -> Changed {
        let strand = self.strands[id as usize].as_mut().expect("a place names a live strand");
        let node = Arc::make_mut(&mut strand.node);
        let was_held = !node.any().is_empty();
        let mut changed = Changed::default();
        if tiers == Tiers::BOTH && node.any.is_none() {
            changed = change(&mut node.device, Tiers::BOTH);
        } else {
            let any = node.any.get_or_insert_with(|| Box::new(node.device.clone()));
            if tiers.any {
                changed = change(any, Tiers { device: false, any: true });
            }
            if tiers.device {
                change(&mut node.device, Tiers { device: true, any: false });
            }
            if **any == node.device {
                node.any = None;
            }
        }
        let is_held = !node.any().is_empty();
        self.held_strands = self.held_strands + usize::from(is_held) - usize::from(was_held);
        if !strand.is_touched {
            strand.is_touched = true;
            self.touched.push(id);
        }
        changed
    }

    /// Keeps the block's place good though nobody may hold it.
    pub fn pin(&mut self, place: Place) {
        self.strand_mut(place.strand()).pins += 1;
    }

    pub fn unpin(&mut self, place: Place) {
        let strand = self.strand_mut(place.strand());
        strand.pins -= 1;
        if strand.pins == 0 {
            self.trim(place.strand());
        }
    }

    /// Cuts off what lies after the last held block, and frees the strand when nothing is left.
    fn trim(&mut self, id: u32) {
        let strand = self.strand(id);
        let covered = strand.node.any().covered();
        if strand.pins > 0 || covered == strand.node.length {
            return;
        }
        if covered > 0 {
            Arc::make_mut(&mut self.strand_mut(id).node).length = covered;
            return;
        }
        let Some(strand) = self.strands[id as usize].take() else { return };
        let first = strand.node.hashes.get(0);
        self.firsts.remove(first);
        if strand.is_published {
            self.gone.push(first);
        }
        self.free.push(id);
        self.shrink();
    }

    /// Gives memory back after a shrinkage; far below full, so that a steady state never rebuilds.
    fn shrink(&mut self) {
        self.firsts.shrink();
        // Looked at once in a thousand, because the free list is rebuilt as a whole.
        if self.free.len() % 1024 == 1023 && self.free.len() * 4 > self.strands.len() * 3 {
            while self.strands.last().is_some_and(Option::is_none) {
                self.strands.pop();
            }
            let length = self.strands.len() as u32;
            self.free.retain(|id| *id < length);
            self.touched.retain(|id| *id < length);
            self.strands.shrink_to(self.strands.len() * 2);
            self.free.shrink_to(self.free.len() * 2);
        }
    }

    fn strand(&self, id: u32) -> &Strand {
        self.strands[id as usize].as_ref().expect("a place names a live strand")
    }

    fn strand_mut(&mut self, id: u32) -> &mut Strand {
        self.strands[id as usize].as_mut().expect("a place names a live strand")
    }

    /// Every invariant, for tests: strands, first blocks and counts agree, and each block has one place.
    #[cfg(test)]
    pub fn check(&self) {
        let mut counts = vec![0u32; self.counts.len()];
        let (mut blocks, mut held, mut all) = (0, 0, std::collections::HashSet::new());
        for (id, strand) in self.strands.iter().enumerate() {
            let Some(strand) = strand else {
                assert!(self.free.contains(&(id as u32)));
                continue;
            };
            let node = &strand.node;
            assert_eq!(self.firsts.get(node.hashes.get(0)), Some(id as u32));
            assert!(node.length > 0 && node.any().covered() <= node.length && node.length as usize <= RUN_BLOCKS_MAX);
            assert!(strand.pins > 0 || node.any().covered() == node.length, "an unheld tail");
            assert!((0..node.length as usize).all(|at| all.insert(node.hashes.get(at))), "a block with two places");
            node.device.check();
            node.any().check();
            assert!(node.any.as_deref() != Some(&node.device));
            let mut start = 0;
            for span in node.any().iter() {
                span.holders.for_each(|slot| counts[usize::from(slot)] += span.end - start);
                blocks += if span.holders.is_empty() { 0 } else { (span.end - start) as usize };
                start = span.end;
            }
            held += usize::from(!node.any().is_empty());
        }
        assert_eq!((blocks, held), (self.blocks, self.held_strands));
        assert_eq!(counts, self.counts);
        assert_eq!(self.firsts.len() + self.free.len(), self.strands.len());
    }

    /// What a publication holds, as (block, slot) pairs in any memory, and whether its keys are the strands' first blocks.
    #[cfg(test)]
    pub fn published_memberships(&self) -> std::collections::BTreeSet<(BlockHash, u16)> {
        let mut pairs = std::collections::BTreeSet::new();
        for (key, node) in Snapshot::new(self.table.clone()).nodes() {
            assert_eq!(key, node.hashes.get(0));
            let mut start = 0;
            for span in node.any().iter() {
                let blocks = start..span.end as usize;
                span.holders.for_each(|slot| pairs.extend(blocks.clone().map(|at| (node.hashes.get(at), slot))));
                start = span.end as usize;
            }
        }
        pairs
    }

    #[cfg(test)]
    pub fn page_count(&self) -> usize {
        self.table.page_count()
    }

    /// Spans of all strands together; one each when nothing is fragmented.
    #[cfg(test)]
    pub fn span_count(&self) -> usize {
        self.strands.iter().flatten().map(|strand| strand.node.any().iter().count()).sum()
    }
}
