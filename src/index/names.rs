//! One rank's table of engine hashes: name -> place in the tree and copies in short form, 12.8 bytes per entry before the
//! free space. Never knows what a place or a state means.
//!
//! Buckets of one cache line hold five entries each; a full bucket spills into the next and counts what it has spilled, and
//! a removal brings back what was spilled. So a bucket that counts any is full, most lookups touch one line, and those of
//! unknown names two. (Without the bringing back, entries that lie away from home beside free places would make the search
//! for an unknown name longer with every turnover, to dozens of lines.) Capacity grows by a half or a sixth, not by doubling:
//! half-empty tables would be the largest part of the index. Refused: fingerprints instead of whole names (4 bytes less per
//! entry): two names of one rank would be taken for each other once in some hours of a storm.

use crate::events::EngineHash;
use crate::index::tree::Place;

const ENTRIES: usize = 5;
/// Buckets are allocated in chunks of one size, 4 KiB: tables of any size would lie in as many size classes of the
/// allocator, which rounds up and keeps pages of each; that was a third of the index's memory.
const CHUNK: usize = 64;
/// Largest filling, in entries per 100 places.
const FULL_PERCENT: usize = 80;
/// Below this filling the table is made smaller, to the next one; just under what growing by a half leaves of a full one.
const LOW_PERCENT: usize = 53;
const MIDDLE_PERCENT: usize = 67;
/// What a full table grows by, of itself: a half while nothing is removed, since then more is likely to come and every
/// growth moves all entries; else a sixth, since a cache that is full turns over and hardly grows.
const FILLING_PERCENT: usize = 50;
const STEADY_PERCENT: usize = 17;
const SPILLED_MAX: u32 = 0xff;
/// [`Bucket::taken`] of a full bucket.
const TAKEN_ALL: u32 = 0x1_1111;

/// What is kept of a name's copies, 4 bits; 0 marks a free place and is never stored.
pub type State = u8;

#[derive(Clone, Copy, Debug, Default)]
#[repr(align(64))]
struct Bucket {
    names: [u64; ENTRIES],
    places: [u32; ENTRIES],
    /// Low 8 bits: entries that found no room here and lie further on (sticks at the most that fits). Then 4 bits for
    /// each entry's state.
    control: u32,
}

impl Bucket {
    fn state(&self, entry: usize) -> State {
        (self.control >> (8 + 4 * entry)) as State & 0xf
    }

    fn set_state(&mut self, entry: usize, state: State) {
        let shift = 8 + 4 * entry;
        self.control = self.control & !(0xf << shift) | u32::from(state) << shift;
    }

    fn spilled(&self) -> u32 {
        self.control & SPILLED_MAX
    }

    fn spill(&mut self) {
        self.control += u32::from(self.spilled() < SPILLED_MAX);
    }

    fn unspill(&mut self) {
        self.control -= u32::from(self.spilled() < SPILLED_MAX);
    }

    /// Lowest bit of each entry's state set where the entry is taken.
    fn taken(&self) -> u32 {
        let states = self.control >> 8;
        let pairs = states | states >> 1;
        (pairs | pairs >> 2) & TAKEN_ALL
    }

    /// No branch for each entry: nobody can predict which one it is.
    #[inline]
    fn find(&self, name: u64) -> Option<usize> {
        let equal = (0..ENTRIES).fold(0, |bits, entry| bits | u32::from(self.names[entry] == name) << (4 * entry));
        lowest(equal & self.taken())
    }

    #[inline]
    fn free(&self) -> Option<usize> {
        lowest(!self.taken() & TAKEN_ALL)
    }

    /// Fills a free place.
    fn put(&mut self, entry: usize, name: u64, place: u32, state: State) {
        self.names[entry] = name;
        self.places[entry] = place;
        self.control |= u32::from(state) << (8 + 4 * entry);
    }

    fn entries(&self) -> impl Iterator<Item = usize> + '_ {
        (0..ENTRIES).filter(|entry| self.state(*entry) != 0)
    }
}

fn empty() -> Box<Chunk> {
    Box::new([Bucket::default(); CHUNK])
}

fn lowest(entries: u32) -> Option<usize> {
    (entries != 0).then(|| entries.trailing_zeros() as usize / 4)
}

/// Where an entry lies; good until the next insertion or removal.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    bucket: usize,
    entry: usize,
}

#[derive(Clone, Debug)]
pub struct Names {
    chunks: Vec<Box<Chunk>>,
    /// Buckets of all chunks, also of those that a resize has still to come to.
    buckets: usize,
    length: usize,
    /// Whether nothing has been removed since the table was made or last resized.
    is_filling: bool,
}

type Chunk = [Bucket; CHUNK];

/// Name, place and state of one entry.
type Item = (u64, u32, State);

impl Default for Names {
    fn default() -> Self {
        Self { chunks: Vec::new(), buckets: 0, length: 0, is_filling: true }
    }
}

impl Names {
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.length
    }

    /// Memory of the table, free places included.
    pub fn bytes(&self) -> usize {
        self.buckets * size_of::<Bucket>()
    }

    fn bucket(&self, at: usize) -> &Bucket {
        &self.chunks[at / CHUNK][at % CHUNK]
    }

    fn bucket_mut(&mut self, at: usize) -> &mut Bucket {
        &mut self.chunks[at / CHUNK][at % CHUNK]
    }

    /// Bucket of a name. Engines may count up or shift their names, so they are mixed first.
    fn home(name: u64, buckets: usize) -> usize {
        let product = u128::from(name) * 0x9e37_79b9_7f4a_7c15;
        let mixed = (product >> 64) as u64 ^ product as u64;
        ((u128::from(mixed) * buckets as u128) >> 64) as usize
    }

    /// Has a name's bucket brought near, and the next one, without waiting. (A plain read of each bucket would wait: the
    /// processor holds a few hundred instructions, which is as many as ten names need.)
    #[inline]
    pub fn fetch(&self, name: EngineHash) {
        if !self.chunks.is_empty() {
            let home = Self::home(name.0, self.buckets);
            infera_shards::prefetch(self.bucket(home));
            infera_shards::prefetch(self.bucket(self.after(home)));
        }
    }

    #[inline]
    pub fn find(&self, name: EngineHash) -> Option<Entry> {
        if self.chunks.is_empty() {
            return None;
        }
        let mut at = Self::home(name.0, self.buckets);
        for _ in 0..self.buckets {
            let bucket = self.bucket(at);
            if let Some(entry) = bucket.find(name.0) {
                return Some(Entry { bucket: at, entry });
            }
            if bucket.spilled() == 0 {
                return None;
            }
            at = self.after(at);
        }
        None
    }

    fn after(&self, bucket: usize) -> usize {
        if bucket + 1 == self.buckets { 0 } else { bucket + 1 }
    }

    pub fn place(&self, entry: Entry) -> Place {
        Place(self.bucket(entry.bucket).places[entry.entry])
    }

    pub fn state(&self, entry: Entry) -> State {
        self.bucket(entry.bucket).state(entry.entry)
    }

    /// Changes an entry; `state` is not 0.
    pub fn set(&mut self, entry: Entry, place: Place, state: State) {
        assert!(state != 0, "an entry without copies is removed");
        let bucket = self.bucket_mut(entry.bucket);
        bucket.places[entry.entry] = place.0;
        bucket.set_state(entry.entry, state);
    }

    /// Makes room for `more` names.
    pub fn reserve(&mut self, more: usize) {
        let wanted = (self.length + more) * 100;
        if wanted > self.buckets * ENTRIES * FULL_PERCENT {
            let enough = wanted.div_ceil(CHUNK * ENTRIES * FULL_PERCENT);
            let percent = if self.is_filling { FILLING_PERCENT } else { STEADY_PERCENT };
            self.resize(enough.max(self.chunks.len() * (100 + percent) / 100));
        }
    }

    /// Adds a name that is not there; `state` is not 0.
    pub fn insert(&mut self, name: EngineHash, place: Place, state: State) {
        assert!(state != 0, "an entry without copies is not kept");
        self.reserve(1);
        self.length += 1;
        self.put(Self::home(name.0, self.buckets), (name.0, place.0, state), &mut Vec::new());
    }

    /// The entry of a name; or, if there is none, adds it. There is room for it: see [`Names::reserve`].
    #[inline]
    pub fn find_or_insert(&mut self, name: EngineHash, place: Place, state: State) -> Option<Entry> {
        assert!(state != 0 && !self.chunks.is_empty(), "room is reserved for an entry with copies");
        let home = Self::home(name.0, self.buckets);
        let bucket = self.bucket_mut(home);
        if let Some(entry) = bucket.find(name.0) {
            return Some(Entry { bucket: home, entry });
        }
        // A bucket that has spilled is full.
        if let Some(entry) = bucket.free() {
            bucket.put(entry, name.0, place.0, state);
            self.length += 1;
            return None;
        }
        self.find_or_insert_beyond(home, (name.0, place.0, state))
    }

    /// The same for a name that is not in its home, which is full.
    fn find_or_insert_beyond(&mut self, home: usize, (name, place, state): Item) -> Option<Entry> {
        let mut at = home;
        // Ends, because the table is never full.
        while self.bucket(at).spilled() > 0 {
            at = self.after(at);
            if let Some(entry) = self.bucket(at).find(name) {
                return Some(Entry { bucket: at, entry });
            }
        }
        self.length += 1;
        self.put(home, (name, place, state), &mut Vec::new());
        None
    }

    /// Puts a name that is not there into the first free place from `home` on. A table that is being built has its first
    /// chunks only; the next ones come from `spare`.
    fn put(&mut self, home: usize, (name, place, state): Item, spare: &mut Vec<Box<Chunk>>) {
        let mut at = home;
        // Ends, because the table is never full.
        loop {
            let bucket = self.bucket_mut(at);
            if let Some(entry) = bucket.free() {
                return bucket.put(entry, name, place, state);
            }
            bucket.spill();
            at = self.after(at);
            if at / CHUNK == self.chunks.len() {
                self.chunks.push(spare.pop().unwrap_or_else(empty));
            }
        }
    }

    pub fn remove(&mut self, entry: Entry) {
        let bucket = self.bucket_mut(entry.bucket);
        let name = bucket.names[entry.entry];
        bucket.set_state(entry.entry, 0);
        self.unspill(Self::home(name, self.buckets), entry.bucket);
        let mut hole = Some(entry);
        while let Some(entry) = hole {
            hole = self.bring_back(entry);
        }
        self.length -= 1;
        self.is_filling = false;
        if self.chunks.len() > 1 && self.length * 100 < self.buckets * ENTRIES * LOW_PERCENT {
            self.resize(self.length * 100 / (CHUNK * ENTRIES * MIDDLE_PERCENT) + 1);
        }
    }

    fn unspill(&mut self, from: usize, to: usize) {
        let mut at = from;
        while at != to {
            self.bucket_mut(at).unspill();
            at = self.after(at);
        }
    }

    /// Fills a hole with the nearest entry that was spilled over it; returns the hole that leaves.
    fn bring_back(&mut self, hole: Entry) -> Option<Entry> {
        let buckets = self.buckets;
        let mut at = hole.bucket;
        for way in 1..buckets {
            if self.bucket(at).spilled() == 0 {
                return None;
            }
            at = self.after(at);
            let bucket = self.bucket(at);
            // Spilled over the hole, if its home is at least as far away as the hole is.
            let spilled = bucket.entries().find(|entry| {
                let home = Self::home(bucket.names[*entry], buckets);
                let from_home = if home <= at { at - home } else { at + buckets - home };
                from_home >= way
            });
            if let Some(entry) = spilled {
                let (name, place, state) = (bucket.names[entry], bucket.places[entry], bucket.state(entry));
                self.bucket_mut(at).set_state(entry, 0);
                self.bucket_mut(hole.bucket).put(hole.entry, name, place, state);
                self.unspill(hole.bucket, at);
                return Some(Entry { bucket: at, entry });
            }
        }
        None
    }

    /// Homes are monotone in the mixed name, so this reads the old table and writes the new one front to back. A chunk that
    /// was read is the next one to be written: a table that grows takes what it grows by and no more, and what it writes
    /// is in the nearest cache.
    fn resize(&mut self, chunks: usize) {
        let former = std::mem::replace(&mut self.chunks, Vec::with_capacity(chunks));
        let former_count = former.len();
        self.buckets = chunks * CHUNK;
        self.is_filling = true;
        let (mut spare, mut deferred) = (Vec::new(), Vec::new());
        for (at, mut chunk) in former.into_iter().enumerate() {
            // As far as the homes of what lies in this chunk.
            let reach = ((at + 1) * chunks).div_ceil(former_count);
            while self.chunks.len() < reach {
                self.chunks.push(spare.pop().unwrap_or_else(empty));
            }
            for bucket in chunk.iter() {
                for entry in bucket.entries() {
                    let item = (bucket.names[entry], bucket.places[entry], bucket.state(entry));
                    let home = Self::home(item.0, self.buckets);
                    let Some(chunk) = self.chunks.get_mut(home / CHUNK) else {
                        // The old table's last entries may have spilled over its end into the first bucket.
                        deferred.push((home, item));
                        continue;
                    };
                    let bucket = &mut chunk[home % CHUNK];
                    match bucket.free() {
                        Some(free) => bucket.put(free, item.0, item.1, item.2),
                        None => self.put(home, item, &mut spare),
                    }
                }
            }
            *chunk = [Bucket::default(); CHUNK];
            spare.push(chunk);
        }
        while self.chunks.len() < chunks {
            self.chunks.push(spare.pop().unwrap_or_else(empty));
        }
        for (home, item) in deferred {
            self.put(home, item, &mut spare);
        }
    }

    /// Every entry, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = (EngineHash, Place, State)> + '_ {
        self.chunks.iter().flat_map(|chunk| chunk.iter()).flat_map(|bucket| {
            bucket
                .entries()
                .map(|entry| (EngineHash(bucket.names[entry]), Place(bucket.places[entry]), bucket.state(entry)))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    /// Random insertions, changes and removals, of names in a row, shifted and random, up to full and back to empty.
    #[test]
    fn agrees_with_a_plain_map() {
        for seed in 0..20 {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut names = Names::default();
            let mut model: HashMap<u64, (u32, State)> = HashMap::new();
            let range = 1 << random.u32(2..13);
            for step in 0..20_000u32 {
                let number = random.u64(0..range);
                let name = match seed % 4 {
                    0 => number,
                    1 => number << 40,
                    2 => number.wrapping_mul(0x9e37_79b9_7f4a_7c15),
                    _ => number << 3 | 1 << 63,
                };
                let known = names.find(EngineHash(name)).map(|entry| (names.place(entry).0, names.state(entry)));
                assert_eq!(known, model.get(&name).copied(), "seed {seed} step {step}");
                let state = random.u8(1..16);
                match names.find(EngineHash(name)) {
                    None => {
                        names.insert(EngineHash(name), Place(step), state);
                        model.insert(name, (step, state));
                    }
                    Some(entry) if random.u8(0..10) < if step / 3_000 % 2 == 0 { 2 } else { 9 } => {
                        names.remove(entry);
                        model.remove(&name);
                    }
                    Some(entry) => {
                        names.set(entry, Place(step), state);
                        model.insert(name, (step, state));
                    }
                }
                assert_eq!(names.len(), model.len());
            }
            let is_kept = |bucket: &Bucket| bucket.spilled() == 0 || bucket.free().is_none();
            assert!(
                names.chunks.iter().flat_map(|chunk| chunk.iter()).all(is_kept),
                "a free place that was spilled over"
            );
            let mut seen: Vec<_> = names.iter().map(|(name, place, state)| (name.0, (place.0, state))).collect();
            let mut expected: Vec<_> = model.into_iter().collect();
            seen.sort_unstable();
            expected.sort_unstable();
            assert_eq!(seen, expected, "seed {seed}");
            for (name, _) in expected {
                let entry = names.find(EngineHash(name)).unwrap();
                names.remove(entry);
            }
            assert!(names.len() == 0 && names.chunks.len() <= 2);
            let stuck = |bucket: &Bucket| bucket.control & SPILLED_MAX != 0 && bucket.spilled() < SPILLED_MAX;
            assert!(
                !names.chunks.iter().flat_map(|chunk| chunk.iter()).any(stuck),
                "an empty table has spilled nothing"
            );
        }
    }

    #[test]
    fn a_bucket_is_one_cache_line() {
        assert_eq!(size_of::<Bucket>(), 64);
    }
}
