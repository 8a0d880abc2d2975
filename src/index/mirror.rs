//! One rank's view: the engine's names for blocks, their counted copies, and the place in the tree each name stands for.
//! Applies events to itself and to the shared tree. Everything here belongs to one (worker registration, rank); a block is
//! visible while at least one announced copy, keyed (medium, group, engine hash), has not been removed.

use hashbrown::HashMap;
use xxhash_rust::xxh3::xxh3_64;

use super::copies::{Copies, CopyBook};
use super::names::{Entry, Names, State};
use super::orphans::Orphans;
use super::tombstones::Tombstones;
use super::tree::{Place, Tiers, Tree};
use crate::events::{CopyKey, EngineHash, Event, Medium, Stored};
use crate::hash::{self, BlockHash, ROOT};

/// Stores from the root that are remembered of one message.
const BATCH_ROOTS_MAX: usize = 1_024;

/// What one event did, for the counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    pub blocks_stored: u64,
    pub blocks_removed: u64,
    /// Blocks put aside because their parent is not known.
    pub orphaned: u64,
    /// Orphans that found their parent.
    pub joined: u64,
    /// Blocks given up to stay within a bound: orphans, or the tree's number of strands.
    pub orphans_dropped: u64,
}

/// Consecutive places of one strand, in the same memories.
#[derive(Clone, Copy, Debug)]
struct Stretch {
    place: Place,
    count: u32,
    tiers: Tiers,
}

#[derive(Debug)]
pub struct Mirror {
    slot: u16,
    names: Names,
    copies: CopyBook,
    /// Visible names beyond the first for one block (one content announced under two engine hashes): in device memory, in any.
    aliases: HashMap<Place, [u32; 2]>,
    orphans: Orphans,
    tombstones: Tombstones,
    /// Blocks of the event at hand that became visible and that the tree does not know of yet.
    fresh: Option<Stretch>,
    gone: Vec<(Place, Tiers)>,
    /// Router hashes of the event at hand.
    chain: Vec<BlockHash>,
    /// What `chain` hangs under and how many of its blocks are plain, if the event at hand was a store of them.
    chain_root: Option<(BlockHash, usize)>,
    /// Names that stores from the root have begun with since the last [`Mirror::begin_batch`].
    batch_roots: Vec<EngineHash>,
}

impl Mirror {
    pub fn new(slot: u16) -> Self {
        Self {
            slot,
            names: Names::default(),
            copies: CopyBook::default(),
            aliases: HashMap::new(),
            orphans: Orphans::default(),
            tombstones: Tombstones::default(),
            fresh: None,
            gone: Vec::new(),
            chain: Vec::new(),
            chain_root: None,
            batch_roots: Vec::new(),
        }
    }

    /// To be called before the events of each message: tells apart what [`Mirror::is_report_of_hits`] has to.
    pub fn begin_batch(&mut self) {
        self.batch_roots.clear();
    }

    /// Has what is known of these names brought near: an event that is still being read is about them. The ways to memory then
    /// overlap with each other and with the reading; one after the other they would be most of the cost. Changes nothing.
    pub fn announce(&self, names: &[EngineHash]) {
        names.iter().for_each(|name| self.names.fetch(*name));
    }

    /// Of the event applied last, if it stored blocks in a known place: the router's name of their parent ([`ROOT`] for
    /// none) and of each block, as far as they carry no adapter, salt or image.
    pub fn stored_chain(&self) -> Option<(BlockHash, &[BlockHash])> {
        let (parent, plain) = self.chain_root?;
        Some((parent, &self.chain[..plain.min(self.chain.len())])).filter(|(_, chain)| !chain.is_empty())
    }

    pub fn apply(&mut self, tree: &mut Tree, event: &Event<'_>) -> Applied {
        self.chain_root = None;
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
        let names = std::mem::take(&mut self.names);
        tree.clear(self.slot, names.iter().map(|(_, place, _)| place));
        self.tombstones.clear(tree);
        *self = Self::new(self.slot);
        held
    }

    /// Blocks waiting for their parent.
    pub fn orphan_count(&self) -> usize {
        self.orphans.len()
    }

    /// Memory of the table of names, which is nearly all of a mirror's.
    pub fn table_bytes(&self) -> usize {
        self.names.bytes()
    }

    /// Distinct visible blocks of the plain namespace, sorted. For inspection: walks the whole view.
    pub fn plain_blocks(&self, tree: &Tree) -> Vec<BlockHash> {
        let plain = self.names.iter().filter(|(_, place, _)| tree.is_plain(*place));
        let mut blocks: Vec<BlockHash> = plain.map(|(_, place, _)| tree.block(place)).collect();
        blocks.sort_unstable();
        blocks.dedup();
        blocks
    }

    /// Where a name's block lies, also of one that has lost its copies a short while ago.
    fn place_of(&self, name: EngineHash) -> Option<Place> {
        match self.names.find(name) {
            Some(entry) => Some(self.names.place(entry)),
            None => self.tombstones.find(name),
        }
    }

    // Stores -----------------------------------------------------------------------------------------------------

    fn store(&mut self, tree: &mut Tree, stored: &Stored<'_>) -> Applied {
        let mut applied = Applied::default();
        if stored.parent.is_none() {
            if stored.may_report_hits && self.is_report_of_hits(stored) {
                return applied;
            }
            if self.batch_roots.len() < BATCH_ROOTS_MAX {
                self.batch_roots.extend(stored.hashes.first());
            }
        }
        match stored.parent.map(|parent| self.place_of(parent)) {
            Some(None) => self.store_detached(tree, stored, &mut applied),
            Some(Some(parent)) => self.store_chain(tree, stored, Some(parent), &mut applied),
            None => self.store_chain(tree, stored, None, &mut applied),
        }
        self.flush(tree);
        if !self.orphans.is_empty() {
            for engine in stored.hashes {
                applied.joined += self.adopt(tree, *engine);
            }
        }
        applied
    }

    /// Whether a store only says that a request has hit these blocks, and no copy came to be.
    ///
    /// vLLM's full report mode (since 0.32) stores the hit prefix of a request again, from the root on. Real second copies
    /// are stored from the root too, when two requests compute one prompt in the same step; but then the first has come in
    /// the same message, whereas hits were there before it. So: from the root, every block visible, and no store of this
    /// message has begun with the same block.
    ///
    /// Its error: a request that may not read the cache (prompt log-probabilities) computes copies that this rule takes for
    /// a report. The first of two evictions then hides the block, which costs credit until the block is stored again;
    /// credit that is not due is never given, and nothing leaks.
    fn is_report_of_hits(&self, stored: &Stored<'_>) -> bool {
        let has_begun = stored.hashes.first().is_some_and(|first| self.batch_roots.contains(first));
        !has_begun
            && stored.hashes.iter().all(|name| {
                self.names
                    .find(*name)
                    .is_some_and(|entry| self.copies.holds(*name, self.names.state(entry), stored.copy))
            })
    }

    /// Blocks chained onto a known parent (`None`: the root).
    fn store_chain(&mut self, tree: &mut Tree, stored: &Stored<'_>, parent: Option<Place>, applied: &mut Applied) {
        self.names.reserve(stored.hashes.len());
        let mut chain = std::mem::take(&mut self.chain);
        chain.clear();
        let mut hash = parent.map_or(ROOT, |parent| tree.block(parent));
        let mut plain_count = if parent.is_none_or(|parent| tree.is_plain(parent)) { usize::MAX } else { 0 };
        if stored.identities.is_empty() {
            chain.extend(stored.tokens.chunks_exact(stored.block_size).map(|tokens| {
                hash = hash::chain(hash, tokens);
                hash
            }));
        } else {
            let blocks = stored.tokens.chunks_exact(stored.block_size).zip(stored.identities);
            for (at, (tokens, identity)) in blocks.enumerate() {
                plain_count = if *identity == 0 { plain_count } else { plain_count.min(at) };
                hash = chained(hash, *identity, tokens);
                chain.push(hash);
            }
        }
        self.chain_root = Some((parent.map_or(ROOT, |parent| tree.block(parent)), plain_count));
        let (mut place, mut at) = (parent, 0);
        while at < chain.len() {
            let is_plain = at < plain_count;
            let end = if is_plain { chain.len().min(plain_count) } else { chain.len() };
            let Some((first, count)) = tree.children(place, &chain[at..end], is_plain, chain.len() - end) else {
                applied.orphans_dropped += (chain.len() - at) as u64;
                break;
            };
            self.bind_all(tree, &stored.hashes[at..at + count], first, stored.copy);
            applied.blocks_stored += count as u64;
            place = Some(first.further(count - 1));
            at += count;
        }
        self.chain = chain;
    }

    /// Gives names the places from `first` on, as [`Mirror::bind`] does for one, and tells the tree.
    fn bind_all(&mut self, tree: &mut Tree, names: &[EngineHash], first: Place, copy: CopyKey) {
        // A name may leave its former place meanwhile, and what nobody holds yet would be cut off with that.
        tree.pin(first);
        let state = if self.orphans.is_empty() { self.copies.state_of_one(copy) } else { None };
        if let Some(state) = state {
            self.bind_mostly_new(tree, names, first, copy, state);
        } else {
            for (at, engine) in names.iter().enumerate() {
                self.bind(tree, *engine, first.further(at), copy);
            }
        }
        self.flush(tree);
        tree.unpin(first);
    }

    /// The same where no name can be an orphan's; `state` is that of a name with this copy only. Names that are new show
    /// their blocks together.
    fn bind_mostly_new(&mut self, tree: &mut Tree, names: &[EngineHash], first: Place, copy: CopyKey, state: State) {
        let tiers = Tiers { device: copy.medium == Medium::DEVICE, any: true };
        let mut shown = 0;
        for (at, engine) in names.iter().enumerate() {
            if let Some(entry) = self.names.find_or_insert(*engine, first.further(at), state) {
                self.appear(tree, first.further(shown), (at - shown) as u32, tiers);
                self.bind_again(tree, *engine, entry, first.further(at), copy);
                shown = at + 1;
            }
        }
        self.appear(tree, first.further(shown), (names.len() - shown) as u32, tiers);
    }

    /// Blocks whose first parent is not known. One that has a name all the same is its own anchor.
    fn store_detached(&mut self, tree: &mut Tree, stored: &Stored<'_>, applied: &mut Applied) {
        let Some(mut parent_engine) = stored.parent else { return };
        let mut known: Option<Place> = None;
        let blocks = stored.hashes.iter().zip(stored.tokens.chunks_exact(stored.block_size));
        for (at, (engine, tokens)) in blocks.enumerate() {
            let identity = stored.identities.get(at).copied().unwrap_or(0);
            let place = match known {
                Some(parent) => {
                    let block = chained(tree.block(parent), identity, tokens);
                    let is_plain = tree.is_plain(parent) && identity == 0;
                    let place = tree.child(Some(parent), block, is_plain, 0);
                    applied.orphans_dropped += u64::from(place.is_none());
                    place
                }
                None => self.place_of(*engine),
            };
            match place {
                Some(place) => {
                    self.bind(tree, *engine, place, stored.copy);
                    applied.blocks_stored += 1;
                }
                None => {
                    applied.orphans_dropped +=
                        self.orphans.insert(*engine, parent_engine, tokens, identity, stored.copy);
                    applied.orphaned += 1;
                }
            }
            known = place;
            parent_engine = *engine;
        }
    }

    /// Gives a name its place and one more copy, and the copies it may have as an orphan.
    fn bind(&mut self, tree: &mut Tree, engine: EngineHash, place: Place, copy: CopyKey) {
        if !self.orphans.is_empty()
            && let Some(mut orphan) = self.orphans.take(engine)
        {
            orphan.copies.add(copy);
            self.bind_copies(tree, engine, place, &orphan.copies);
            return;
        }
        match self.names.find(engine) {
            None => {
                let state = self.copies.add(engine, 0, copy);
                self.names.insert(engine, place, state);
                let tiers = self.copies.tiers(engine, state);
                self.appear(tree, place, 1, tiers);
            }
            Some(entry) => self.bind_again(tree, engine, entry, place, copy),
        }
    }

    fn bind_again(&mut self, tree: &mut Tree, engine: EngineHash, entry: Entry, place: Place, copy: CopyKey) {
        let former = self.names.state(entry);
        let before = self.copies.tiers(engine, former);
        let state = self.copies.add(engine, former, copy);
        self.rebind(tree, engine, (place, state), before);
    }

    /// The same for any number of copies, also none: then the name is only a possible parent.
    fn bind_copies(&mut self, tree: &mut Tree, engine: EngineHash, place: Place, copies: &Copies) {
        let former = self.names.find(engine).map_or(0, |entry| self.names.state(entry));
        let before = self.copies.tiers(engine, former);
        let mut state = former;
        copies.for_each(|key| state = self.copies.add(engine, state, key));
        if former != 0 {
            self.rebind(tree, engine, (place, state), before);
        } else if state == 0 {
            self.flush(tree);
            self.tombstones.bury(tree, engine, place);
        } else {
            self.names.insert(engine, place, state);
            let tiers = self.copies.tiers(engine, state);
            self.appear(tree, place, 1, tiers);
        }
    }

    /// A known name, which showed its block in `before`, has more copies and perhaps another place; then it leaves the
    /// former one.
    fn rebind(&mut self, tree: &mut Tree, engine: EngineHash, (place, state): (Place, State), before: Tiers) {
        let Some(entry) = self.names.find(engine) else { return };
        let former = self.names.place(entry);
        self.names.set(entry, place, state);
        let tiers = self.copies.tiers(engine, state);
        if former == place {
            self.appear(tree, place, 1, tiers.without(before));
            return;
        }
        // First held at the new place, then released at the old: the other way round, a place not held yet might go.
        self.appear(tree, place, 1, tiers);
        self.flush(tree);
        self.release(former, before);
        self.drop_gone(tree);
    }

    /// Names have come to show `count` consecutive blocks in `tiers`; the tree learns it with the neighbours.
    fn appear(&mut self, tree: &mut Tree, place: Place, count: u32, tiers: Tiers) {
        if count == 0 || tiers.is_none() {
            return;
        }
        if let Some(fresh) = &mut self.fresh {
            let last = Place(fresh.place.0 + fresh.count - 1);
            if fresh.tiers == tiers && last.is_followed_by(place) {
                fresh.count += count;
                return;
            }
        }
        self.flush(tree);
        self.fresh = Some(Stretch { place, count, tiers });
    }

    fn flush(&mut self, tree: &mut Tree) {
        let Some(fresh) = self.fresh.take() else { return };
        let aliases = &mut self.aliases;
        tree.hold(self.slot, fresh.place, fresh.count, fresh.tiers, |place, tiers| {
            let counts = aliases.entry(place).or_default();
            counts[0] += u32::from(tiers.device);
            counts[1] += u32::from(tiers.any);
        });
    }

    /// Joins everything that waited for `engine`, and what waited for that.
    fn adopt(&mut self, tree: &mut Tree, engine: EngineHash) -> u64 {
        let mut joined = 0;
        let mut known = vec![engine];
        while let Some(parent_engine) = known.pop() {
            let Some(parent) = self.place_of(parent_engine) else { continue };
            // A tombstone may be the oldest, and a child without copies takes the oldest one's room.
            tree.pin(parent);
            for (child, orphan) in self.orphans.take_children(parent_engine) {
                let block = chained(tree.block(parent), orphan.identity, &orphan.tokens);
                let is_plain = tree.is_plain(parent) && orphan.identity == 0;
                let Some(place) = tree.child(Some(parent), block, is_plain, 0) else { continue };
                self.bind_copies(tree, child, place, &orphan.copies);
                self.flush(tree);
                joined += 1;
                known.push(child);
            }
            tree.unpin(parent);
        }
        joined
    }

    // Removals ---------------------------------------------------------------------------------------------------

    fn remove(&mut self, tree: &mut Tree, hashes: &[EngineHash], copy: CopyKey) -> Applied {
        let mut applied = Applied::default();
        for engine in hashes {
            let Some(entry) = self.names.find(*engine) else {
                self.orphans.remove_copy(*engine, copy);
                continue;
            };
            let (place, state) = (self.names.place(entry), self.names.state(entry));
            let before = self.copies.tiers(*engine, state);
            let Some(left) = self.copies.remove(*engine, state, copy) else { continue };
            if left == 0 {
                self.names.remove(entry);
                self.tombstones.bury(tree, *engine, place);
                applied.blocks_removed += 1;
            } else {
                self.names.set(entry, place, left);
            }
            let lost = before.without(self.copies.tiers(*engine, left));
            self.release(place, lost);
        }
        self.drop_gone(tree);
        applied
    }

    /// One name shows its block no more in `tiers`; the block goes with the last name.
    fn release(&mut self, place: Place, mut tiers: Tiers) {
        if tiers.is_none() {
            return;
        }
        if !self.aliases.is_empty()
            && let Some(counts) = self.aliases.get_mut(&place)
        {
            if tiers.device && counts[0] > 0 {
                counts[0] -= 1;
                tiers.device = false;
            }
            if tiers.any && counts[1] > 0 {
                counts[1] -= 1;
                tiers.any = false;
            }
            if *counts == [0, 0] {
                self.aliases.remove(&place);
            }
        }
        if !tiers.is_none() {
            self.gone.push((place, tiers));
        }
    }

    /// Tells the tree, one stretch at a time: engines remove neighbours together, leaf first or root first.
    fn drop_gone(&mut self, tree: &mut Tree) {
        let mut at = 0;
        while let Some((first, tiers)) = self.gone.get(at).copied() {
            let rest = &self.gone[at..];
            let follows = |back: bool| {
                let is_next = |pair: &[(Place, Tiers)]| {
                    let (one, two) = if back { (pair[1].0, pair[0].0) } else { (pair[0].0, pair[1].0) };
                    pair[1].1 == tiers && one.is_followed_by(two)
                };
                1 + rest.windows(2).take_while(|pair| is_next(pair)).count()
            };
            let (ascending, descending) = (follows(false), follows(true));
            let count = ascending.max(descending);
            let place = if ascending >= descending { first } else { rest[count - 1].0 };
            tree.release(self.slot, place, count as u32, tiers);
            at += count;
        }
        self.gone.clear();
    }
}

/// A block with an identity is chained under a parent that carries it, so that it and all that follows it live in a
/// namespace of their own and never match a prompt without that identity.
pub fn chained(parent: BlockHash, identity: u64, tokens: &[u32]) -> BlockHash {
    if identity == 0 {
        return hash::chain(parent, tokens);
    }
    let mut bytes = [0u8; 16];
    bytes[..8].copy_from_slice(&parent.0.to_le_bytes());
    bytes[8..].copy_from_slice(&identity.to_le_bytes());
    hash::chain(BlockHash(xxh3_64(&bytes)), tokens)
}
