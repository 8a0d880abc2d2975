//! One rank's view: the engine's names for blocks, their counted copies, and the router's block each name stands for.
//! Applies events to itself and to the shared tree. Everything here belongs to one (worker registration, rank); a block is
//! visible while at least one announced copy, keyed (medium, group, engine hash), has not been removed.

use std::collections::VecDeque;

use hashbrown::HashMap;
use hashbrown::hash_map::Entry as MapEntry;
use xxhash_rust::xxh3::xxh3_64;

use super::copies::{Copies, MoreCopies, Name};
use super::orphans::Orphans;
use super::tree::Tree;
use crate::events::{CopyKey, EngineHash, Event, Stored};
use crate::hash::{BlockHash, ROOT, chain};
use crate::limits::TOMBSTONES_MAX;

/// What one event did, for the counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    pub blocks_stored: u64,
    pub blocks_removed: u64,
    /// Blocks put aside because their parent is not known.
    pub orphaned: u64,
    /// Orphans that found their parent.
    pub joined: u64,
    /// Orphans given up to stay within the bound.
    pub orphans_dropped: u64,
}

#[derive(Debug)]
pub struct Mirror {
    slot: u16,
    names: HashMap<EngineHash, Name>,
    more_copies: MoreCopies,
    /// Visible names beyond the first for one block (one content announced under two engine hashes).
    aliases: HashMap<BlockHash, u32>,
    orphans: Orphans,
    /// Removed names, oldest first; ones that came back are passed over.
    tombstones: VecDeque<EngineHash>,
    /// Blocks of the event at hand that became visible, consecutive, not in the tree yet; and what the first is chained onto.
    fresh: Vec<BlockHash>,
    fresh_parent: BlockHash,
    gone: Vec<BlockHash>,
}

impl Mirror {
    pub fn new(slot: u16) -> Self {
        Self {
            slot,
            names: HashMap::new(),
            more_copies: MoreCopies::new(),
            aliases: HashMap::new(),
            orphans: Orphans::default(),
            tombstones: VecDeque::new(),
            fresh: Vec::new(),
            fresh_parent: ROOT,
            gone: Vec::new(),
        }
    }

    pub fn apply(&mut self, tree: &mut Tree, event: &Event<'_>) -> Applied {
        match event {
            Event::Stored(stored) => self.store(tree, stored),
            Event::Removed { hashes, copy } => self.remove(tree, hashes, *copy),
            Event::Cleared => {
                let blocks_removed = self.clear(tree);
                Applied { blocks_removed, ..Applied::default() }
            }
        }
    }

    /// Forgets everything; the slot has no trace in the tree afterwards. Returns the number of blocks that were visible.
    pub fn clear(&mut self, tree: &mut Tree) -> u64 {
        let held = u64::from(tree.held_count(self.slot));
        tree.clear(self.slot, self.names.values().filter(|name| name.is_visible()).map(|name| name.block()));
        self.names = HashMap::new();
        self.more_copies = MoreCopies::new();
        self.aliases = HashMap::new();
        self.orphans.clear();
        self.tombstones = VecDeque::new();
        held
    }

    /// Blocks waiting for their parent.
    pub fn orphan_count(&self) -> usize {
        self.orphans.len()
    }

    /// Distinct visible blocks of the plain namespace, sorted. For inspection: walks the whole view.
    pub fn plain_blocks(&self) -> Vec<BlockHash> {
        let live = self.names.values().filter(|name| name.is_plain() && name.is_visible());
        let mut blocks: Vec<BlockHash> = live.map(Name::block).collect();
        blocks.sort_unstable();
        blocks.dedup();
        blocks
    }

    fn store(&mut self, tree: &mut Tree, stored: &Stored<'_>) -> Applied {
        let mut applied = Applied::default();
        // What the next block is chained onto, as far as it is known.
        let mut known = match stored.parent {
            None => Some((ROOT, true)),
            Some(parent) => self.names.get(&parent).map(|name| (name.block(), name.is_plain())),
        };
        let mut parent_engine = stored.parent;
        let blocks = stored.hashes.iter().zip(stored.tokens.chunks_exact(stored.block_size));
        for (at, (engine, tokens)) in blocks.enumerate() {
            let identity = stored.identities.get(at).copied().unwrap_or(0);
            if let Some((parent, parent_is_plain)) = known {
                let block = chained(parent, identity, tokens);
                let is_plain = parent_is_plain && identity == 0;
                self.bind(tree, *engine, (block, is_plain), Copies::of(stored.copy), parent);
                known = Some((block, is_plain));
                applied.blocks_stored += 1;
            } else if let Some(name) = self.names.get(engine) {
                // The parent is forgotten, but the engine's name still says which block this is.
                let revived = (name.block(), name.is_plain());
                known = Some(revived);
                self.bind(tree, *engine, revived, Copies::of(stored.copy), ROOT);
                applied.blocks_stored += 1;
            } else if let Some(parent) = parent_engine {
                applied.orphans_dropped += self.orphans.insert(*engine, parent, tokens, identity, stored.copy);
                applied.orphaned += 1;
            }
            parent_engine = Some(*engine);
        }
        self.flush(tree);
        if !self.orphans.is_empty() {
            for engine in stored.hashes {
                applied.joined += self.adopt(tree, *engine);
            }
        }
        applied
    }

    /// Gives a name its block, plain or not, and more copies. A name that stood for another block leaves that one.
    fn bind(
        &mut self,
        tree: &mut Tree,
        engine: EngineHash,
        (block, is_plain): (BlockHash, bool),
        mut copies: Copies,
        parent: BlockHash,
    ) {
        if !self.orphans.is_empty()
            && let Some(orphan) = self.orphans.take(engine)
        {
            copies.absorb(&orphan.copies);
        }
        let name = self.names.entry(engine).or_insert_with(|| Name::new(block, is_plain));
        let (was_visible, former) = (name.is_visible(), name.block());
        name.add(engine, &copies, &mut self.more_copies);
        name.rebind(block, is_plain);
        let is_visible = name.is_visible();
        let has_moved = was_visible && former != block;
        if has_moved {
            self.flush(tree);
            self.release(former);
            self.drop_gone(tree);
        }
        let became_visible = is_visible && (has_moved || !was_visible);
        if !became_visible {
            self.flush(tree);
            return;
        }
        if self.fresh.is_empty() {
            self.fresh_parent = parent;
        }
        self.fresh.push(block);
    }

    /// Puts the blocks that have become visible into the tree.
    fn flush(&mut self, tree: &mut Tree) {
        if self.fresh.is_empty() {
            return;
        }
        let aliases = &mut self.aliases;
        tree.insert(self.slot, self.fresh_parent, &self.fresh, |block| *aliases.entry(block).or_insert(0) += 1);
        self.fresh.clear();
    }

    /// Joins everything that waited for `engine`, and what waited for that.
    fn adopt(&mut self, tree: &mut Tree, engine: EngineHash) -> u64 {
        let mut joined = 0;
        let mut known = vec![engine];
        while let Some(parent_engine) = known.pop() {
            let Some((parent, parent_is_plain)) =
                self.names.get(&parent_engine).map(|name| (name.block(), name.is_plain()))
            else {
                continue;
            };
            for (child, orphan) in self.orphans.take_children(parent_engine) {
                let block = chained(parent, orphan.identity, &orphan.tokens);
                let is_plain = parent_is_plain && orphan.identity == 0;
                self.bind(tree, child, (block, is_plain), orphan.copies, parent);
                self.flush(tree);
                joined += 1;
                known.push(child);
            }
        }
        joined
    }

    fn remove(&mut self, tree: &mut Tree, hashes: &[EngineHash], copy: CopyKey) -> Applied {
        let mut applied = Applied::default();
        for engine in hashes {
            let Some(name) = self.names.get_mut(engine) else {
                self.orphans.remove_copy(*engine, copy);
                continue;
            };
            if !name.remove(*engine, copy, &mut self.more_copies) || name.is_visible() {
                continue;
            }
            let block = name.block();
            applied.blocks_removed += 1;
            self.release(block);
            self.bury(*engine);
        }
        self.drop_gone(tree);
        applied
    }

    /// One visible name of the block is gone; the block goes with the last.
    fn release(&mut self, block: BlockHash) {
        if self.aliases.is_empty() {
            self.gone.push(block);
            return;
        }
        match self.aliases.entry(block) {
            MapEntry::Occupied(mut occupied) if *occupied.get() > 1 => *occupied.get_mut() -= 1,
            MapEntry::Occupied(occupied) => {
                occupied.remove();
            }
            MapEntry::Vacant(_) => self.gone.push(block),
        }
    }

    fn drop_gone(&mut self, tree: &mut Tree) {
        tree.remove(self.slot, &self.gone);
        self.gone.clear();
    }

    /// Keeps a removed name for a while, within the bound.
    fn bury(&mut self, engine: EngineHash) {
        self.tombstones.push_back(engine);
        while self.tombstones.len() > TOMBSTONES_MAX {
            let Some(oldest) = self.tombstones.pop_front() else { break };
            if let MapEntry::Occupied(occupied) = self.names.entry(oldest)
                && !occupied.get().is_visible()
            {
                occupied.remove();
            }
        }
        if self.names.capacity() > 8 * TOMBSTONES_MAX && self.names.len() < self.names.capacity() / 8 {
            self.names.shrink_to(self.names.len() * 2);
        }
    }
}

/// A block with an identity is chained under a parent that carries it, so that it and all that follows it live in a
/// namespace of their own and never match a prompt without that identity.
pub fn chained(parent: BlockHash, identity: u64, tokens: &[u32]) -> BlockHash {
    if identity == 0 {
        return chain(parent, tokens);
    }
    let mut bytes = [0u8; 16];
    bytes[..8].copy_from_slice(&parent.0.to_le_bytes());
    bytes[8..].copy_from_slice(&identity.to_le_bytes());
    chain(BlockHash(xxh3_64(&bytes)), tokens)
}
