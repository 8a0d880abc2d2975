//! Distinct blocks among the prompts in flight on one target. Owns a tree of runs; never knows a request.
//!
//! Block hashes are chained, so a prompt is a path, and two prompts share exactly their common beginning. A prompt of
//! 7,000 blocks is then a few runs, found by a few comparisons, where counting its blocks one by one took a third of a
//! millisecond. Runs are ranges of the prompts' own lists: nothing is copied.

use std::ops::Range;
use std::sync::Arc;

use hashbrown::HashMap;

use crate::hash::BlockHash;

/// By the first block of each run.
type Children = HashMap<BlockHash, Run>;

/// Blocks that the same prompts hold.
struct Run {
    /// A prompt that goes through this run; its list is the same up to the run's end, whichever prompt it is.
    blocks: Arc<[BlockHash]>,
    range: Range<usize>,
    /// Prompts that go through this run or end with it.
    holders: usize,
    next: Children,
}

impl Run {
    /// Ends the run at `end`; what was behind it becomes its only successor.
    fn split(&mut self, end: usize) {
        let rest = Run {
            blocks: self.blocks.clone(),
            range: end..self.range.end,
            holders: self.holders,
            next: std::mem::take(&mut self.next),
        };
        self.range.end = end;
        self.next.insert(rest.blocks[end], rest);
    }

    /// Takes over the only successor if all prompts go on to it, so that old branches leave no joints.
    fn merge(&mut self) {
        let is_whole = self.next.len() == 1 && self.next.values().all(|next| next.holders == self.holders);
        let next = if is_whole { self.next.drain().next() } else { None };
        if let Some((_, next)) = next {
            *self = Run { range: self.range.start..next.range.end, ..next };
        }
    }
}

/// The prompts in flight on one target, and how many different blocks they have.
#[derive(Default)]
pub struct DistinctBlocks {
    first: Children,
    count: usize,
}

impl DistinctBlocks {
    pub fn count(&self) -> usize {
        self.count
    }

    /// Whether any prompt has the block, wherever. Looks at every block: for the rare question, not for a pick.
    pub fn contains(&self, block: BlockHash) -> bool {
        let mut open: Vec<&Children> = vec![&self.first];
        while let Some(children) = open.pop() {
            for run in children.values() {
                if run.blocks[run.range.clone()].contains(&block) {
                    return true;
                }
                open.push(&run.next);
            }
        }
        false
    }

    /// Adds a prompt's blocks, first to last.
    pub fn add(&mut self, blocks: &Arc<[BlockHash]>) {
        let mut children = &mut self.first;
        let mut at = 0;
        while at < blocks.len() {
            let run = children.entry(blocks[at]).or_insert_with(|| {
                self.count += blocks.len() - at;
                Run { blocks: blocks.clone(), range: at..blocks.len(), holders: 0, next: Children::new() }
            });
            let end = at + common(&run.blocks[run.range.clone()], &blocks[at..]);
            if end < run.range.end {
                run.split(end);
            }
            run.holders += 1;
            at = end;
            children = &mut run.next;
        }
    }

    /// Takes away a prompt that was added.
    pub fn remove(&mut self, blocks: &[BlockHash]) {
        let mut children = &mut self.first;
        let mut at = 0;
        while at < blocks.len() {
            let is_last = children.get(&blocks[at]).is_some_and(|run| run.holders == 1);
            if is_last {
                // Everything from here on is this prompt's own.
                children.remove(&blocks[at]);
                self.count -= blocks.len() - at;
                return;
            }
            let Some(run) = children.get_mut(&blocks[at]) else {
                debug_assert!(false, "a prompt is removed that was not added");
                return;
            };
            run.holders -= 1;
            at = run.range.end;
            // Looked at from above, because the successor may go away or become part of this run.
            let goes_on = blocks.get(at).and_then(|next| run.next.get(next)).is_some_and(|next| next.holders > 1);
            if !goes_on {
                if at < blocks.len() && run.next.remove(&blocks[at]).is_some() {
                    self.count -= blocks.len() - at;
                }
                run.merge();
                return;
            }
            children = &mut run.next;
        }
    }
}

/// Blocks at which two chains, equal in their first block, are equal: being chained, they never meet again.
fn common(left: &[BlockHash], right: &[BlockHash]) -> usize {
    let most = left.len().min(right.len());
    if left[most - 1] == right[most - 1] {
        return most;
    }
    let (mut same, mut different) = (1, most - 1);
    while same < different {
        let middle = same.midpoint(different);
        if left[middle] == right[middle] { same = middle + 1 } else { different = middle }
    }
    same
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn joints(children: &Children) -> usize {
        children.values().map(|run| 1 + joints(&run.next)).sum()
    }

    /// Chains from a small alphabet, so that many share beginnings: a block's name is its whole path.
    fn chain(random: &mut fastrand::Rng) -> Arc<[BlockHash]> {
        let mut parent = 1u64;
        let length = random.usize(1..12);
        (0..length)
            .map(|_| {
                parent = parent * 3 + random.u64(..2);
                BlockHash(parent)
            })
            .collect()
    }

    #[test]
    fn counts_as_a_plain_set_does_in_any_order_of_coming_and_going() {
        let seed = fastrand::u64(..);
        let mut random = fastrand::Rng::with_seed(seed);
        for round in 0..300 {
            let (mut distinct, mut held) = (DistinctBlocks::default(), Vec::<Arc<[BlockHash]>>::new());
            for step in 0..60 {
                if held.is_empty() || random.u8(..5) < 3 {
                    let blocks = chain(&mut random);
                    distinct.add(&blocks);
                    held.push(blocks);
                } else {
                    distinct.remove(&held.swap_remove(random.usize(..held.len())));
                }
                let set: HashSet<BlockHash> = held.iter().flat_map(|blocks| blocks.iter().copied()).collect();
                assert_eq!(distinct.count(), set.len(), "seed {seed}, round {round}, step {step}");
                assert!(set.iter().all(|block| distinct.contains(*block)) && !distinct.contains(BlockHash(0)));
                let runs = joints(&distinct.first);
                assert!(runs <= 2 * held.len(), "seed {seed}, round {round}: {runs} runs for {} prompts", held.len());
            }
            held.iter().for_each(|blocks| distinct.remove(blocks));
            assert!(distinct.count() == 0 && distinct.first.is_empty(), "seed {seed}, round {round}");
        }
    }

    #[test]
    fn the_common_beginning_is_found_wherever_it_ends() {
        let list = |length: u64, same: u64| -> Vec<BlockHash> {
            (0..length).map(|at| BlockHash(if at < same { at } else { 1000 + at })).collect()
        };
        for length in 1..20 {
            for same in 1..=length {
                assert_eq!(common(&list(length, length), &list(length, same)), same as usize, "{length}, {same}");
                assert_eq!(common(&list(length, length), &list(length + 3, same)), same as usize);
            }
        }
    }
}
