//! A persistent hash trie: block hash of a run's first block -> the run. Cloning it is one reference count; changing it
//! copies only the pages on the way that a published clone still shares, so publishing costs by what changed.
//!
//! Refused: two alternating copies (left-right). A shard that idles with a cached view would hold one of them for ever
//! and stop the other from being brought up to date.

use std::sync::Arc;

use super::snapshot::Node;
use crate::hash::BlockHash;

/// Children of a fork: 4 bits of the key per level.
const FORK: usize = 16;
/// Entries of a leaf before it becomes a fork.
const LEAF_MAX: usize = 16;
/// A fork whose leaves hold no more than this together becomes a leaf again; well under the bound above, so that one key
/// coming and going does not rebuild pages.
const LEAF_JOIN: usize = 8;
/// After this many levels the key is used up.
const LEVELS: u32 = 64 / 4;

type Item = (BlockHash, Arc<Node>);

#[derive(Clone, Debug)]
enum Page {
    Leaf(Arc<Vec<Item>>),
    Fork(Arc<[Page; FORK]>),
}

#[derive(Clone, Debug)]
pub struct Table {
    root: Page,
    length: usize,
}

impl Default for Table {
    fn default() -> Self {
        Self { root: Page::empty(), length: 0 }
    }
}

impl Table {
    pub fn len(&self) -> usize {
        self.length
    }

    #[inline]
    pub fn get(&self, key: BlockHash) -> Option<&Node> {
        let mut page = &self.root;
        let mut bits = key.0;
        loop {
            match page {
                Page::Fork(children) => {
                    page = &children[bits as usize % FORK];
                    bits >>= 4;
                }
                Page::Leaf(items) => return items.iter().find(|(other, _)| *other == key).map(|(_, node)| &**node),
            }
        }
    }

    pub fn insert(&mut self, key: BlockHash, node: Arc<Node>) {
        if self.root.insert(key, node, 0) {
            self.length += 1;
        }
    }

    pub fn remove(&mut self, key: BlockHash) {
        if self.get(key).is_some() {
            self.root.remove(key, 0);
            self.length -= 1;
        }
    }

    #[cfg(test)]
    pub fn page_count(&self) -> usize {
        self.root.page_count()
    }

    #[cfg(test)]
    pub fn nodes(&self) -> Vec<(BlockHash, Arc<Node>)> {
        let mut nodes = Vec::new();
        self.root.collect(&mut nodes);
        nodes
    }
}

impl Page {
    fn empty() -> Self {
        Page::Leaf(Arc::default())
    }

    fn child(key: BlockHash, level: u32) -> usize {
        (key.0 >> (4 * level)) as usize % FORK
    }

    /// Returns whether the key is new.
    fn insert(&mut self, key: BlockHash, node: Arc<Node>, level: u32) -> bool {
        match self {
            Page::Fork(children) => Arc::make_mut(children)[Self::child(key, level)].insert(key, node, level + 1),
            Page::Leaf(items) => {
                let items = Arc::make_mut(items);
                if let Some(item) = items.iter_mut().find(|(other, _)| *other == key) {
                    item.1 = node;
                    return false;
                }
                if items.len() < LEAF_MAX || level == LEVELS {
                    items.push((key, node));
                    return true;
                }
                let mut children: [Vec<Item>; FORK] = Default::default();
                for item in items.drain(..).chain([(key, node)]) {
                    children[Self::child(item.0, level)].push(item);
                }
                let mut fork = Page::Fork(Arc::new(children.map(|items| Page::Leaf(Arc::new(items)))));
                // All in one child is possible, if unlikely; that leaf is one over its bound until the next insertion.
                std::mem::swap(self, &mut fork);
                true
            }
        }
    }

    /// The key is known to be there.
    fn remove(&mut self, key: BlockHash, level: u32) {
        let Page::Fork(children) = self else {
            let Page::Leaf(items) = self else { return };
            Arc::make_mut(items).retain(|(other, _)| *other != key);
            return;
        };
        let children = Arc::make_mut(children);
        let child = &mut children[Self::child(key, level)];
        child.remove(key, level + 1);
        // Only a leaf that runs low can make the sum small enough, so the sum is rarely taken.
        if !matches!(child, Page::Leaf(items) if items.len() <= 1) {
            return;
        }
        let mut total = 0;
        for child in children.iter() {
            match child {
                Page::Leaf(items) => total += items.len(),
                Page::Fork(_) => return,
            }
        }
        if total <= LEAF_JOIN {
            let mut joined = Vec::with_capacity(LEAF_JOIN);
            for child in children.iter() {
                if let Page::Leaf(items) = child {
                    joined.extend(items.iter().cloned());
                }
            }
            *self = Page::Leaf(Arc::new(joined));
        }
    }

    #[cfg(test)]
    fn page_count(&self) -> usize {
        match self {
            Page::Leaf(_) => 1,
            Page::Fork(children) => 1 + children.iter().map(Page::page_count).sum::<usize>(),
        }
    }

    #[cfg(test)]
    fn collect(&self, nodes: &mut Vec<Item>) {
        match self {
            Page::Leaf(items) => nodes.extend(items.iter().cloned()),
            Page::Fork(children) => children.iter().for_each(|child| child.collect(nodes)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::index::hashes::Hashes;

    fn node(step: usize) -> Node {
        let hashes = Hashes::with_room(1, None, 0);
        hashes.set(0, BlockHash(step as u64));
        Node { hashes, length: 1, device: Default::default(), any: None }
    }

    /// Random insertions and removals, also of keys that share their low bits; every clone taken on the way stays as it was.
    #[test]
    fn agrees_with_a_plain_map_and_clones_never_change() {
        let mut random = fastrand::Rng::with_seed(11);
        let mut table = Table::default();
        let mut model: HashMap<BlockHash, usize> = HashMap::new();
        let mut clones = Vec::new();
        for step in 0..20_000usize {
            let key = match random.u8(0..4) {
                0 => BlockHash(random.u64(0..64) << 60),
                _ => BlockHash(random.u64(0..4_000).wrapping_mul(0x9e37_79b9_7f4a_7c15)),
            };
            if random.u8(0..10) < if step / 4_000 % 2 == 0 { 8 } else { 2 } {
                table.insert(key, Arc::new(node(step)));
                model.insert(key, step);
            } else {
                table.remove(key);
                model.remove(&key);
            }
            assert_eq!(table.len(), model.len());
            if step % 2_500 == 0 {
                clones.push((table.clone(), model.clone()));
            }
        }
        clones.push((table.clone(), model.clone()));
        for (table, model) in &clones {
            for (key, step) in model {
                assert_eq!(table.get(*key).map(|node| node.hashes.get(0).0), Some(*step as u64));
            }
            assert_eq!(table.nodes().len(), model.len());
        }
        for key in model.keys() {
            table.remove(*key);
        }
        assert_eq!((table.len(), table.page_count()), (0, 1));
    }
}
