//! The writer's side of the radix index: runs, the place of every block, and what must be published. Splits a run where its
//! holders come to differ, joins runs whose holders have become alike, and frees what nobody holds. Lives on the ingest core.

use std::sync::Arc;

use hashbrown::HashMap;

use super::holders::Holders;
use super::snapshot::{Node, Snapshot};
use super::table::Table;
use crate::hash::{BlockHash, ROOT};
use crate::limits::RUN_BLOCKS_MAX;

const NONE: u32 = u32::MAX;

/// Where a block lies: `offset - run.base` is its index in the run.
#[derive(Clone, Copy, Debug)]
struct Place {
    run: u32,
    offset: u32,
}

#[derive(Debug)]
struct Run {
    /// Shared with the table from one publication to the next change.
    node: Arc<Node>,
    /// The block that the first one is chained onto, in the index or not.
    parent: BlockHash,
    /// A run that may continue this one; a hint, believed only if its parent is this run's last block.
    next: u32,
    /// Moves when blocks are added or taken at the front, so that the places of the others stay right.
    base: u32,
}

impl Run {
    fn first(&self) -> BlockHash {
        self.node.hashes[0]
    }

    fn last(&self) -> BlockHash {
        self.node.hashes[self.node.hashes.len() - 1]
    }

    fn len(&self) -> usize {
        self.node.hashes.len()
    }

    fn index(&self, place: Place) -> usize {
        place.offset.wrapping_sub(self.base) as usize
    }

    fn offset(&self, index: usize) -> u32 {
        self.base.wrapping_add(index as u32)
    }

    fn node_mut(&mut self) -> &mut Node {
        Arc::make_mut(&mut self.node)
    }
}

#[derive(Debug, Default)]
pub struct Tree {
    places: HashMap<BlockHash, Place>,
    runs: Vec<Option<Run>>,
    free: Vec<u32>,
    /// First blocks of runs that have changed, come or gone since the last publication.
    touched: Vec<BlockHash>,
    table: Table,
    /// Blocks held, by slot.
    counts: Vec<u32>,
}

impl Tree {
    /// Distinct blocks in the index.
    pub fn block_count(&self) -> usize {
        self.places.len()
    }

    pub fn run_count(&self) -> usize {
        self.runs.len() - self.free.len()
    }

    /// Distinct blocks that the slot holds, holes or not.
    pub fn held_count(&self, slot: u16) -> u32 {
        self.counts.get(usize::from(slot)).copied().unwrap_or(0)
    }

    /// Whether a publication would show anything new.
    pub fn is_changed(&self) -> bool {
        !self.touched.is_empty()
    }

    /// Brings the table up to date and returns it as an immutable snapshot. Costs by the runs that changed.
    pub fn publish(&mut self) -> Snapshot {
        let mut touched = std::mem::take(&mut self.touched);
        for first in touched.drain(..) {
            match self.place(first) {
                Some((id, 0)) => {
                    let node = self.run(id).node.clone();
                    self.table.insert(first, node);
                }
                _ => self.table.remove(first),
            }
        }
        self.touched = touched;
        Snapshot::new(self.table.clone())
    }

    /// Whether the slot holds the block.
    pub fn holds(&self, slot: u16, block: BlockHash) -> bool {
        self.place(block).is_some_and(|(id, _)| self.run(id).node.holders.contains(slot))
    }

    /// Makes `slot` a holder of `blocks`, each chained onto the one before and the first onto `parent`. Calls
    /// `already_held` for each block that the slot held before.
    pub fn insert(
        &mut self,
        slot: u16,
        parent: BlockHash,
        blocks: &[BlockHash],
        mut already_held: impl FnMut(BlockHash),
    ) {
        if self.counts.len() <= usize::from(slot) {
            self.counts.resize(usize::from(slot) + 1, 0);
        }
        let mut previous = parent;
        let mut rest = blocks;
        while let Some(first) = rest.first() {
            let taken = match self.place(*first) {
                Some((id, index)) => {
                    let length = common_prefix(&self.run(id).node.hashes[index..], rest);
                    if self.run(id).node.holders.contains(slot) {
                        rest[..length].iter().for_each(|block| already_held(*block));
                    } else {
                        self.counts[usize::from(slot)] += length as u32;
                        let id = self.isolate(id, index, index + length);
                        self.touch(id);
                        self.run_mut(id).node_mut().holders.insert(slot);
                        self.join_around(id);
                    }
                    length
                }
                None => {
                    let length = rest.iter().position(|block| self.places.contains_key(block)).unwrap_or(rest.len());
                    self.counts[usize::from(slot)] += length as u32;
                    self.insert_new(slot, previous, &rest[..length]);
                    length
                }
            };
            previous = rest[taken - 1];
            rest = &rest[taken..];
        }
    }

    /// Blocks that nobody held: they prolong the run before them where its holders are the same, else begin a new one.
    fn insert_new(&mut self, slot: u16, parent: BlockHash, blocks: &[BlockHash]) {
        let mut previous = parent;
        let mut rest = blocks;
        let mut tail = self.run_ending_at(parent);
        while !rest.is_empty() {
            let (id, taken) = match tail {
                Some(id) if self.run(id).node.holders.is_only(slot) && self.run(id).len() < RUN_BLOCKS_MAX => {
                    let taken = rest.len().min(RUN_BLOCKS_MAX - self.run(id).len());
                    self.touch(id);
                    self.append(id, &rest[..taken]);
                    (id, taken)
                }
                _ => {
                    let taken = rest.len().min(RUN_BLOCKS_MAX);
                    let node = Node { hashes: rest[..taken].to_vec(), holders: Holders::of(slot) };
                    let id = self.add_run(node, previous, NONE);
                    if let Some(before) = tail {
                        self.hint(before, id);
                    }
                    (id, taken)
                }
            };
            previous = rest[taken - 1];
            rest = &rest[taken..];
            tail = Some(id);
        }
        // What waited behind a hole that is now filled may continue the last run.
        if let Some(id) = tail {
            self.join_around(id);
        }
    }

    /// Takes `slot` out of the holders of `blocks`, given in any order; neighbours in the list that are neighbours in a run
    /// (engines remove leaf first or root first) cost one split. A block that the slot does not hold is left alone.
    pub fn remove(&mut self, slot: u16, blocks: &[BlockHash]) {
        let mut at = 0;
        while let Some(block) = blocks.get(at) {
            let Some((id, index)) = self.place(*block) else {
                at += 1;
                continue;
            };
            let hashes = &self.run(id).node.hashes;
            let rest = &blocks[at..];
            let ascending = common_prefix(&hashes[index..], rest);
            let descending = rest.iter().zip(hashes[..=index].iter().rev()).take_while(|(a, b)| a == b).count();
            let (from, to) =
                if ascending >= descending { (index, index + ascending) } else { (index + 1 - descending, index + 1) };
            at += to - from;
            self.remove_extent(slot, id, from, to);
        }
    }

    fn remove_extent(&mut self, slot: u16, id: u32, from: usize, to: usize) {
        if !self.run(id).node.holders.contains(slot) {
            return;
        }
        self.counts[usize::from(slot)] -= (to - from) as u32;
        let id = self.isolate(id, from, to);
        self.drop_holder(slot, id);
        if self.runs[id as usize].is_some() {
            self.join_around(id);
        }
    }

    /// Takes the slot out of every block it holds; `blocks` must name all of them, in any order, repeats allowed. Whole runs
    /// lose the holder at once, so nothing is split.
    pub fn clear(&mut self, slot: u16, blocks: impl Iterator<Item = BlockHash>) {
        let mut changed = Vec::new();
        for block in blocks {
            let Some((id, _)) = self.place(block) else { continue };
            if self.run(id).node.holders.contains(slot) {
                self.counts[usize::from(slot)] -= self.run(id).len() as u32;
                self.drop_holder(slot, id);
                if self.runs[id as usize].is_some() {
                    changed.push(id);
                }
            }
        }
        for id in changed {
            // An earlier join may have swallowed this one.
            if self.runs[id as usize].is_some() {
                self.join_around(id);
            }
        }
        debug_assert_eq!(self.held_count(slot), 0, "a cleared slot still holds blocks");
    }

    fn drop_holder(&mut self, slot: u16, id: u32) {
        self.touch(id);
        if self.run(id).node.holders.is_only(slot) {
            self.free_run(id);
        } else {
            self.run_mut(id).node_mut().holders.remove(slot);
        }
    }

    // Runs -------------------------------------------------------------------------------------------------------

    fn run(&self, id: u32) -> &Run {
        self.runs[id as usize].as_ref().expect("a place or hint that was checked names a live run")
    }

    fn run_mut(&mut self, id: u32) -> &mut Run {
        self.runs[id as usize].as_mut().expect("a place or hint that was checked names a live run")
    }

    /// The block's run and its index there.
    fn place(&self, block: BlockHash) -> Option<(u32, usize)> {
        let place = *self.places.get(&block)?;
        Some((place.run, self.run(place.run).index(place)))
    }

    fn touch(&mut self, id: u32) {
        let first = self.run(id).first();
        if self.touched.last() != Some(&first) {
            self.touched.push(first);
        }
    }

    fn add_run(&mut self, node: Node, parent: BlockHash, next: u32) -> u32 {
        let id = self.free.pop().unwrap_or_else(|| {
            self.runs.push(None);
            (self.runs.len() - 1) as u32
        });
        for (index, block) in node.hashes.iter().enumerate() {
            self.places.insert(*block, Place { run: id, offset: index as u32 });
        }
        self.runs[id as usize] = Some(Run { node: Arc::new(node), parent, next, base: 0 });
        self.touch(id);
        id
    }

    fn free_run(&mut self, id: u32) {
        let Some(run) = self.runs[id as usize].take() else { return };
        for block in &run.node.hashes {
            self.places.remove(block);
        }
        self.free.push(id);
        self.shrink();
    }

    /// Gives memory back after a shrinkage; a quarter full, so that a steady state never rebuilds.
    fn shrink(&mut self) {
        if self.places.capacity() > 1024 && self.places.len() < self.places.capacity() / 8 {
            self.places.shrink_to(self.places.len() * 2);
        }
        // Looked at once in a thousand, because the free list is rebuilt as a whole.
        if self.free.len() % 1024 == 1023 && self.run_count() * 4 < self.runs.len() {
            while self.runs.last().is_some_and(Option::is_none) {
                self.runs.pop();
            }
            let length = self.runs.len() as u32;
            self.free.retain(|id| *id < length);
            self.runs.shrink_to(self.runs.len() * 2);
            self.free.shrink_to(self.free.len() * 2);
        }
    }

    fn append(&mut self, id: u32, blocks: &[BlockHash]) {
        let run = self.runs[id as usize].as_mut().expect("the caller has just looked the run up");
        for (index, block) in (run.len()..).zip(blocks) {
            self.places.insert(*block, Place { run: id, offset: run.offset(index) });
        }
        run.node_mut().hashes.extend_from_slice(blocks);
    }

    /// Makes `from..to` of a run a run of its own and returns it.
    fn isolate(&mut self, id: u32, from: usize, to: usize) -> u32 {
        let id = if to < self.run(id).len() { self.split(id, to).0 } else { id };
        if from > 0 { self.split(id, from).1 } else { id }
    }

    /// Splits a run before index `at`; the smaller part moves. Returns (front, back).
    fn split(&mut self, id: u32, at: usize) -> (u32, u32) {
        let run = self.run(id);
        assert!(0 < at && at < run.len(), "a split leaves two parts");
        let (parent, next, holders) = (run.parent, run.next, run.node.holders.clone());
        let joint = run.node.hashes[at - 1];
        self.touch(id);
        if at * 2 <= self.run(id).len() {
            let before = self.run_ending_at(parent).filter(|before| self.run(*before).next == id);
            let run = self.run_mut(id);
            run.base = run.base.wrapping_add(at as u32);
            run.parent = joint;
            let hashes = run.node_mut().hashes.drain(..at).collect();
            self.touch(id);
            let front = self.add_run(Node { hashes, holders }, parent, id);
            if let Some(before) = before {
                self.run_mut(before).next = front;
            }
            (front, id)
        } else {
            let hashes = self.run_mut(id).node_mut().hashes.split_off(at);
            let back = self.add_run(Node { hashes, holders }, joint, next);
            self.run_mut(id).next = back;
            (id, back)
        }
    }

    /// The run whose last block is `block`.
    fn run_ending_at(&self, block: BlockHash) -> Option<u32> {
        if block == ROOT {
            return None;
        }
        let (id, index) = self.place(block)?;
        (index + 1 == self.run(id).len()).then_some(id)
    }

    /// The run after this one, if the hint still holds.
    fn next_of(&self, id: u32) -> Option<u32> {
        let run = self.run(id);
        let next = self.runs.get(run.next as usize)?.as_ref()?;
        (next.parent == run.last()).then_some(run.next)
    }

    fn hint(&mut self, id: u32, next: u32) {
        if self.next_of(id).is_none() {
            self.run_mut(id).next = next;
        }
    }

    /// Joins the run with the one before and the one after where their holders are alike.
    fn join_around(&mut self, id: u32) {
        let mut id = id;
        if let Some(before) = self.run_ending_at(self.run(id).parent) {
            self.hint(before, id);
            id = self.join(before, id).unwrap_or(id);
        }
        if let Some(next) = self.next_of(id) {
            self.join(id, next);
        }
    }

    /// Joins two consecutive runs into one, moving the smaller; `None` where they must stay apart.
    fn join(&mut self, front: u32, back: u32) -> Option<u32> {
        let (first, second) = (self.run(front), self.run(back));
        if front == back || first.node.holders != second.node.holders || first.len() + second.len() > RUN_BLOCKS_MAX {
            return None;
        }
        let front_moves = first.len() < second.len();
        let parent = first.parent;
        self.touch(front);
        self.touch(back);
        if !front_moves {
            let second = self.runs[back as usize].take()?;
            self.free.push(back);
            self.append(front, &second.node.hashes);
            self.run_mut(front).next = second.next;
            return Some(front);
        }
        let before = self.run_ending_at(parent).filter(|before| self.run(*before).next == front);
        let first = self.runs[front as usize].take()?;
        self.free.push(front);
        let run = self.runs[back as usize].as_mut()?;
        run.base = run.base.wrapping_sub(first.len() as u32);
        run.parent = parent;
        run.node_mut().hashes.splice(..0, first.node.hashes.iter().copied());
        for (index, block) in first.node.hashes.iter().enumerate() {
            self.places.insert(*block, Place { run: back, offset: run.offset(index) });
        }
        if let Some(before) = before {
            self.run_mut(before).next = back;
        }
        Some(back)
    }

    /// Every invariant, for tests: places and runs agree, no run is empty or unheld, counts are exact.
    #[cfg(test)]
    pub fn check(&self) {
        let mut blocks = 0;
        let mut counts = vec![0u32; self.counts.len()];
        for (id, run) in self.runs.iter().enumerate() {
            let Some(run) = run else {
                assert!(self.free.contains(&(id as u32)));
                continue;
            };
            assert!(run.len() > 0 && run.len() <= RUN_BLOCKS_MAX && !run.node.holders.is_empty());
            for (index, block) in run.node.hashes.iter().enumerate() {
                assert_eq!(self.place(*block), Some((id as u32, index)));
            }
            run.node.holders.for_each(|slot| counts[usize::from(slot)] += run.len() as u32);
            blocks += run.len();
        }
        assert_eq!(blocks, self.places.len());
        assert_eq!(counts, self.counts);
    }

    /// What the last publication holds, as (block, slot) pairs, and whether its keys are the runs' first blocks.
    #[cfg(test)]
    pub fn published_memberships(&self) -> std::collections::BTreeSet<(BlockHash, u16)> {
        let mut pairs = std::collections::BTreeSet::new();
        for (key, node) in self.table.nodes() {
            assert_eq!(key, node.hashes[0]);
            node.holders.for_each(|slot| pairs.extend(node.hashes.iter().map(|block| (*block, slot))));
        }
        pairs
    }

    #[cfg(test)]
    pub fn page_count(&self) -> usize {
        self.table.page_count()
    }
}

/// Length of the common prefix of two chains that start with the same block.
fn common_prefix(left: &[BlockHash], right: &[BlockHash]) -> usize {
    left.iter().zip(right).take_while(|(a, b)| a == b).count()
}
