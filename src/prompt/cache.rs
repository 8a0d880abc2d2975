//! The prefix cache: what a text up to a cut was encoded to, so that a later prompt with the same beginning encodes
//! only what is new.
//!
//! Shared by all threads. Reads take no lock: a set of slots is searched by tag, then one entry is loaded through
//! `arc-swap`. Writers, which have just encoded text, take one mutex; a shard tries for it and does not wait. Bounded in
//! bytes; eviction is a clock: an entry goes when the hand passes it and it was not read since the last pass. Holds block
//! hashes, never text.

use std::hint::spin_loop;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use arc_swap::ArcSwapOption;

use crate::hash::{BlockHash, ROOT, chain};

/// Slots of one set: an entry can lie in any of them.
const WAYS: usize = 8;

/// Bytes of cache for each slot of the table; longer entries leave slots empty, shorter ones are evicted sooner.
const BYTES_PER_SLOT: usize = 512;

/// Links from a run to the runs before it; a longer chain is copied into one run.
const RUN_LINKS_MAX: usize = 32;

/// Tries of a thread that must not wait: about a microsecond, as long as most writers need.
const TRIES_MAX: usize = 64;

/// Bytes of an entry and of a run beside their lists.
const FIXED_BYTES: usize = 128;

/// Block hashes that one request added to a prefix. Runs share their beginnings, so that a conversation's turns take
/// memory in proportion to its length.
#[derive(Debug)]
struct Run {
    before: Option<Arc<Run>>,
    /// Blocks taken from `before`.
    blocks_before: usize,
    hashes: Box<[BlockHash]>,
    links: usize,
    bytes: Arc<AtomicUsize>,
}

impl Drop for Run {
    fn drop(&mut self) {
        self.bytes.fetch_sub(FIXED_BYTES + size_of_val(&*self.hashes), Ordering::Relaxed);
    }
}

/// What a text up to one cut was encoded to, for one block size.
#[derive(Clone, Debug)]
pub struct Prefix {
    run: Option<Arc<Run>>,
    blocks: usize,
    parent: BlockHash,
    tokens: usize,
    /// Tokens behind the last full block.
    tail: Arc<[u32]>,
}

impl Prefix {
    /// The prefix of no text; `ids` stand in front of every prompt.
    pub fn empty() -> Self {
        Self { run: None, blocks: 0, parent: ROOT, tokens: 0, tail: Arc::from([]) }
    }

    pub fn tokens(&self) -> usize {
        self.tokens
    }

    fn hashes(&self) -> Vec<BlockHash> {
        let mut hashes = vec![ROOT; self.blocks];
        let (mut run, mut end) = (self.run.as_ref(), self.blocks);
        while let Some(current) = run {
            let own = end.saturating_sub(current.blocks_before);
            hashes[end - own..end].copy_from_slice(&current.hashes[..own]);
            end -= own;
            run = current.before.as_ref();
        }
        hashes
    }
}

/// A place that is to become an entry: (key, blocks, parent, tokens, tail).
type Cut = (u128, usize, BlockHash, usize, Arc<[u32]>);

/// Adds ids behind a prefix, block by block.
pub struct Extension {
    start: Prefix,
    block_size: usize,
    fresh: Vec<BlockHash>,
    parent: BlockHash,
    tokens: usize,
    tail: Vec<u32>,
    /// Cuts passed and not kept yet.
    cuts: Vec<Cut>,
}

impl Extension {
    pub fn of(start: Prefix, block_size: usize) -> Self {
        let (parent, tokens, tail) = (start.parent, start.tokens, start.tail.to_vec());
        Self { start, block_size, fresh: Vec::new(), parent, tokens, tail, cuts: Vec::new() }
    }

    pub fn push(&mut self, ids: &[u32]) {
        self.tokens += ids.len();
        let mut ids = ids;
        if !self.tail.is_empty() {
            let missing = (self.block_size - self.tail.len()).min(ids.len());
            self.tail.extend_from_slice(&ids[..missing]);
            ids = &ids[missing..];
            if self.tail.len() < self.block_size {
                return;
            }
            let block = std::mem::take(&mut self.tail);
            self.push_block(&block);
        }
        let blocks = ids.chunks_exact(self.block_size);
        self.tail.extend_from_slice(blocks.remainder());
        blocks.for_each(|block| self.push_block(block));
    }

    fn push_block(&mut self, block: &[u32]) {
        self.parent = chain(self.parent, block);
        self.fresh.push(self.parent);
    }

    /// Marks a cut here: the text so far is named `key`.
    pub fn cut(&mut self, key: u128) {
        let blocks = self.start.blocks + self.fresh.len();
        self.cuts.push((key, blocks, self.parent, self.tokens, Arc::from(&self.tail[..])));
    }

    /// Hashes of all full blocks, and the number of tokens.
    pub fn finish(mut self) -> (Vec<BlockHash>, usize) {
        let tokens = self.tokens;
        if self.start.blocks == 0 {
            return (self.fresh, tokens);
        }
        let mut hashes = self.start.hashes();
        hashes.append(&mut self.fresh);
        (hashes, tokens)
    }
}

struct Entry {
    key: u128,
    prefix: Prefix,
    bytes: Arc<AtomicUsize>,
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.bytes.fetch_sub(FIXED_BYTES + size_of_val(&*self.prefix.tail), Ordering::Relaxed);
    }
}

#[derive(Default)]
struct Slot {
    /// Low half of the key, 0 for an empty slot: most misses are decided on it.
    tag: AtomicU64,
    /// Read since the clock's hand last passed.
    read: AtomicBool,
    entry: ArcSwapOption<Entry>,
}

/// What a writer does where another one is at it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// Waits for it.
    Waits,
    /// Keeps nothing: the text is encoded once more when it comes again.
    GivesUp,
}

/// Counters and sizes, for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    pub bytes: usize,
    pub entries: usize,
    pub evictions: u64,
}

/// The cache. `get` is lock-free; `insert` is not.
pub struct PrefixCache {
    slots: Box<[Slot]>,
    bytes_max: usize,
    bytes: Arc<AtomicUsize>,
    entries: AtomicUsize,
    evictions: AtomicU64,
    /// The clock's hand; held by the one writer.
    hand: Mutex<usize>,
}

impl PrefixCache {
    /// A cache of at most `bytes_max` bytes; `None` for 0.
    pub fn new(bytes_max: usize) -> Option<Self> {
        if bytes_max == 0 {
            return None;
        }
        let sets = (bytes_max / BYTES_PER_SLOT / WAYS).max(1).next_power_of_two();
        Some(Self {
            slots: (0..sets * WAYS).map(|_| Slot::default()).collect(),
            bytes_max,
            bytes: Arc::default(),
            entries: AtomicUsize::new(0),
            evictions: AtomicU64::new(0),
            hand: Mutex::new(0),
        })
    }

    fn set(&self, key: u128) -> &[Slot] {
        let sets = self.slots.len() / WAYS;
        let start = ((key >> 64) as usize & (sets - 1)) * WAYS;
        &self.slots[start..start + WAYS]
    }

    /// The prefix named `key`. Takes no lock and writes at most one flag.
    pub fn get(&self, key: u128) -> Option<Prefix> {
        for slot in self.set(key).iter().filter(|slot| slot.tag.load(Ordering::Acquire) == tag(key)) {
            let entry = slot.entry.load();
            if let Some(entry) = entry.as_ref().filter(|entry| entry.key == key) {
                if !slot.read.load(Ordering::Relaxed) {
                    slot.read.store(true, Ordering::Relaxed);
                }
                return Some(entry.prefix.clone());
            }
        }
        None
    }

    /// Keeps the cuts that an extension has passed since it was last kept; it goes on from here.
    pub fn keep(&self, extension: &mut Extension, patience: Patience) {
        if extension.cuts.is_empty() {
            return;
        }
        let cuts = std::mem::take(&mut extension.cuts);
        let start = &extension.start;
        // Where the chain of runs gets long, or nothing is before it, the run stands on its own.
        let (before, blocks_before, mut hashes) = match &start.run {
            Some(run) if run.links < RUN_LINKS_MAX => (Some(run.clone()), start.blocks, Vec::new()),
            _ => (None, 0, start.hashes()),
        };
        hashes.extend_from_slice(&extension.fresh);
        self.bytes.fetch_add(FIXED_BYTES + size_of_val(&*hashes), Ordering::Relaxed);
        let links = before.as_ref().map_or(0, |run| run.links + 1);
        let run = Arc::new(Run { before, blocks_before, hashes: hashes.into(), links, bytes: self.bytes.clone() });

        let prefix = |(_, blocks, parent, tokens, tail): &Cut| {
            let (run, tail) = (Some(run.clone()), tail.clone());
            Prefix { run, blocks: *blocks, parent: *parent, tokens: *tokens, tail }
        };
        if let Some(last) = cuts.last() {
            let last = prefix(last);
            extension.fresh.drain(..last.blocks - extension.start.blocks);
            extension.start = last;
        }
        let Some(mut hand) = self.hand(patience) else { return };
        for cut in &cuts {
            self.insert(cut.0, prefix(cut));
        }
        self.evict(&mut hand);
    }

    fn hand(&self, patience: Patience) -> Option<MutexGuard<'_, usize>> {
        if patience == Patience::Waits {
            return Some(self.hand.lock().unwrap_or_else(PoisonError::into_inner));
        }
        for _ in 0..TRIES_MAX {
            match self.hand.try_lock() {
                Ok(hand) => return Some(hand),
                Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
                Err(TryLockError::WouldBlock) => spin_loop(),
            }
        }
        None
    }

    /// Only under the writer's mutex.
    fn insert(&self, key: u128, prefix: Prefix) {
        let set = self.set(key);
        let held = |slot: &&Slot| {
            slot.tag.load(Ordering::Relaxed) == tag(key)
                && slot.entry.load().as_ref().is_some_and(|entry| entry.key == key)
        };
        if set.iter().any(|slot| held(&slot)) {
            return;
        }
        let empty = set.iter().find(|slot| slot.tag.load(Ordering::Relaxed) == 0);
        let slot = empty.or_else(|| set.iter().find(|slot| !slot.read.load(Ordering::Relaxed))).unwrap_or_else(|| {
            // All were read: they start again, and the key picks one.
            set.iter().for_each(|slot| slot.read.store(false, Ordering::Relaxed));
            &set[tag(key) as usize % WAYS]
        });
        self.clear(slot);
        self.bytes.fetch_add(FIXED_BYTES + size_of_val(&*prefix.tail), Ordering::Relaxed);
        self.entries.fetch_add(1, Ordering::Relaxed);
        slot.entry.store(Some(Arc::new(Entry { key, prefix, bytes: self.bytes.clone() })));
        slot.read.store(true, Ordering::Relaxed);
        // The tag last: a reader that sees it finds the entry.
        slot.tag.store(tag(key), Ordering::Release);
    }

    fn clear(&self, slot: &Slot) {
        if slot.tag.swap(0, Ordering::AcqRel) != 0 {
            slot.entry.store(None);
            self.entries.fetch_sub(1, Ordering::Relaxed);
            self.evictions.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Moves the hand until the bytes are within bounds; two rounds at most clear everything.
    fn evict(&self, hand: &mut usize) {
        for _ in 0..2 * self.slots.len() {
            if self.bytes.load(Ordering::Relaxed) <= self.bytes_max {
                return;
            }
            let slot = &self.slots[*hand];
            *hand = (*hand + 1) % self.slots.len();
            if !slot.read.swap(false, Ordering::Relaxed) {
                self.clear(slot);
            }
        }
    }

    pub fn stats(&self) -> CacheStats {
        CacheStats {
            bytes: self.bytes.load(Ordering::Relaxed),
            entries: self.entries.load(Ordering::Relaxed),
            evictions: self.evictions.load(Ordering::Relaxed),
        }
    }
}

/// Never 0, which means an empty slot.
fn tag(key: u128) -> u64 {
    (key as u64) | 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::prompt_blocks;

    fn ids(seed: u32, count: usize) -> Vec<u32> {
        (0..count as u32).map(|index| seed.wrapping_mul(7919).wrapping_add(index)).collect()
    }

    #[test]
    fn an_extended_prefix_hashes_like_the_whole() {
        for block_size in [1, 3, 16, 64] {
            let cache = PrefixCache::new(1 << 20).unwrap();
            let all = ids(1, 1000);
            let mut cut_at = 0;
            // Each turn finds the last one's cut, adds some ids, cuts, and adds a tail that is not kept.
            for (turn, length) in
                [0, 1, 15, 16, 17, 100, 63, 200, 33, 40, 5, 6, 7, 8, 9, 10].iter().cycle().take(60).enumerate()
            {
                let start = match cut_at {
                    0 => Prefix::empty(),
                    _ => cache.get(turn as u128).expect("the last turn's cut"),
                };
                assert_eq!(start.tokens(), cut_at);
                let mut extension = Extension::of(start, block_size);
                let next = (cut_at + length).min(900);
                extension.push(&all[cut_at..next]);
                extension.cut(turn as u128 + 1);
                extension.push(&all[next..next + 21]);
                cache.keep(&mut extension, Patience::Waits);
                assert_eq!(extension.finish(), (prompt_blocks(&all[..next + 21], block_size), next + 21));
                cut_at = next;
            }
        }
    }

    #[test]
    fn bytes_stay_within_bounds_and_come_back() {
        let cache = PrefixCache::new(64 << 10).unwrap();
        for request in 0..2000u32 {
            let mut extension = Extension::of(Prefix::empty(), 16);
            extension.push(&ids(request, 500));
            extension.cut((u128::from(request) << 64) | u128::from(request));
            cache.keep(&mut extension, Patience::Waits);
            assert!(cache.stats().bytes <= 64 << 10);
        }
        assert!(cache.stats().evictions > 1000 && cache.stats().entries > 20, "{:?}", cache.stats());
        let held = cache.stats().entries;
        assert_eq!((0..2000u128).filter(|request| cache.get((request << 64) | request).is_some()).count(), held);
        let bytes = cache.bytes.clone();
        drop(cache);
        assert_eq!(bytes.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn who_must_not_wait_keeps_nothing_while_another_writes_and_hashes_right() {
        let cache = PrefixCache::new(64 << 10).unwrap();
        let all = ids(1, 500);
        let hashed = |patience| {
            let mut extension = Extension::of(Prefix::empty(), 16);
            extension.push(&all[..400]);
            extension.cut(7);
            cache.keep(&mut extension, patience);
            extension.push(&all[400..]);
            extension.finish()
        };
        let expected = (prompt_blocks(&all, 16), all.len());
        let writing = cache.hand.lock().unwrap();
        assert_eq!(hashed(Patience::GivesUp), expected);
        assert!(cache.get(7).is_none() && cache.stats() == CacheStats::default());
        drop(writing);
        assert_eq!(hashed(Patience::GivesUp), expected);
        assert_eq!(cache.get(7).map(|prefix| prefix.tokens()), Some(400));
    }

    #[test]
    fn what_is_read_stays_and_what_is_not_goes() {
        let cache = PrefixCache::new(64 << 10).unwrap();
        let keep = |request: u32| {
            let mut extension = Extension::of(Prefix::empty(), 16);
            extension.push(&ids(request, 500));
            extension.cut((u128::from(request) << 64) | u128::from(request));
            cache.keep(&mut extension, Patience::Waits);
        };
        let hot = (7u128 << 64) | 7;
        keep(7);
        for request in 100..1000 {
            keep(request);
            assert!(cache.get(hot).is_some(), "lost after {request}");
        }
    }

    #[test]
    fn readers_see_whole_entries_while_writers_evict() {
        let cache = Arc::new(PrefixCache::new(32 << 10).unwrap());
        std::thread::scope(|scope| {
            for writer in 0..2u32 {
                let cache = cache.clone();
                scope.spawn(move || {
                    for request in (writer..4000).step_by(2) {
                        let request = request % 300;
                        let mut extension = Extension::of(Prefix::empty(), 16);
                        extension.push(&ids(request, 16 * (1 + request as usize % 40)));
                        extension.cut((u128::from(request) << 64) | u128::from(request + 1));
                        cache.keep(&mut extension, Patience::Waits);
                    }
                });
            }
            for _ in 0..2 {
                let cache = cache.clone();
                scope.spawn(move || {
                    for round in 0..40_000u32 {
                        let request = round % 300;
                        if let Some(prefix) = cache.get((u128::from(request) << 64) | u128::from(request + 1)) {
                            let all = ids(request, 16 * (1 + request as usize % 40));
                            assert_eq!(prefix.hashes(), prompt_blocks(&all, 16));
                        }
                    }
                });
            }
        });
    }
}
