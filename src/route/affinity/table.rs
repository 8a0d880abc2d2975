//! The table of bindings: a fixed array of buckets, eight sessions each, found by a 128-bit hash.
//!
//! Why this structure. A map behind a lock would be a second lock on the request path; a map per shard would
//! let two turns of one session, which arrive on different connections and so on different shards, disagree.
//! Here all that a turn changes about a known session (target, leases, state) is one 64-bit word and changes
//! by compare-and-swap, so no shard ever waits for another. Only a session's *first* turn writes more than one word:
//! it takes its bucket's insertion right for a few stores, by trying; a shard that does not get it within a
//! bounded number of tries serves that turn without a binding. Memory is constant, whatever names arrive: a full bucket
//! gives up its longest idle session, and one with a turn in flight is never given up.

use std::hint::spin_loop;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use super::{ClockSeconds, SessionKey};
use crate::fleet::RecordId;

const WAYS: usize = 8;

/// Buckets are filled to half on average at the capacity asked for, which keeps the loss by uneven filling
/// small.
const FILL: usize = WAYS / 2;

/// Tries for an insertion right: its holder needs some 50 ns, this many tries take about a microsecond.
const TRIES_MAX: usize = 64;

/// One session's binding in one word.
///
/// ```text
/// bits 0..40 target id, 40..54 leases, 54..62 version, 62..64 state
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
struct Binding(u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// No target: never bound, or the last one failed.
    Free = 0,
    /// Chosen, and not served yet.
    Claimed = 1,
    Bound = 2,
    /// The place is being given to another session.
    Moving = 3,
}

const TARGET_BITS: u32 = 40;
const LEASE_ONE: u64 = 1 << TARGET_BITS;
const LEASES_MAX: u64 = (1 << 14) - 1;
const VERSION_SHIFT: u32 = 54;
const VERSION_MASK: u64 = 0xff;
const STATE_SHIFT: u32 = 62;

impl Binding {
    fn state(self) -> State {
        match self.0 >> STATE_SHIFT {
            0 => State::Free,
            1 => State::Claimed,
            2 => State::Bound,
            _ => State::Moving,
        }
    }

    fn target(self) -> u64 {
        self.0 & (LEASE_ONE - 1)
    }

    fn leases(self) -> u64 {
        (self.0 >> TARGET_BITS) & LEASES_MAX
    }

    fn version(self) -> u8 {
        ((self.0 >> VERSION_SHIFT) & VERSION_MASK) as u8
    }

    fn with_lease(self) -> Self {
        debug_assert!(self.leases() < LEASES_MAX);
        Self(self.0 + LEASE_ONE)
    }

    fn without_lease(self) -> Self {
        debug_assert!(self.leases() > 0);
        Self(self.0 - LEASE_ONE)
    }

    fn with_state(self, state: State) -> Self {
        Self(self.0 & !(0b11 << STATE_SHIFT) | (state as u64) << STATE_SHIFT)
    }

    /// The next version of the binding: another target or none, leases kept.
    fn rebound(self, target: u64, state: State) -> Self {
        let version = u64::from(self.version().wrapping_add(1));
        let leases = self.leases() << TARGET_BITS;
        Self(target | leases | version << VERSION_SHIFT).with_state(state)
    }
}

/// Two cache lines of tags and bindings, and what goes with them.
#[derive(Default)]
#[repr(align(64))]
struct Bucket {
    /// High half of a session's hash; 0 for a place never used.
    tags: [AtomicU64; WAYS],
    bindings: [AtomicU64; WAYS],
    /// When the last lease ended or began, seconds.
    used_at: [AtomicU32; WAYS],
    inserting: AtomicBool,
}

/// What a session's turns met, since the start.
#[derive(Debug, Default)]
pub struct Counts {
    /// Turns that followed a binding or a claim.
    pub followed: AtomicU64,
    /// Turns that bound their session to a first target.
    pub first: AtomicU64,
    /// Turns that replaced a target that could not be followed.
    pub replaced: AtomicU64,
    /// Turns served without a binding: all places of the bucket in use, or its insertion right taken.
    pub unbound: AtomicU64,
    /// Sessions given up for others before their time.
    pub evicted: AtomicU64,
}

/// All bindings of the process.
pub struct SessionTable {
    buckets: Box<[Bucket]>,
    ttl_s: u32,
    clock_s: ClockSeconds,
    pub counts: Counts,
}

/// One turn's hold on its session's binding. While any is held the session does not expire. Dropping it ends
/// the turn; a claim whose last turn ends unserved is gone.
#[must_use = "a lease that is dropped at once holds nothing"]
pub struct Lease {
    table: Arc<SessionTable>,
    place: Place,
    target: RecordId,
    version: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    bucket: usize,
    way: usize,
}

impl SessionTable {
    /// Room for about `capacity` sessions, each forgotten `ttl_s` seconds after its last turn.
    pub fn new(capacity: usize, ttl_s: u32, clock_s: ClockSeconds) -> Self {
        let buckets = capacity.div_ceil(FILL).next_power_of_two();
        Self { buckets: (0..buckets).map(|_| Bucket::default()).collect(), ttl_s, clock_s, counts: Counts::default() }
    }

    /// The target that [`SessionTable::follow`] would give; takes no lease and counts nothing.
    pub fn peek(&self, key: SessionKey, may_serve: impl Fn(RecordId) -> bool) -> Option<RecordId> {
        let (place, binding) = self.find(key)?;
        let is_followable = self.is_followable(place, binding, (self.clock_s)(), &may_serve);
        is_followable.then(|| RecordId(binding.target()))
    }

    /// The target that this turn must go to, if its session has one that `may_serve`.
    pub fn follow(self: &Arc<Self>, key: SessionKey, may_serve: impl Fn(RecordId) -> bool) -> Option<Lease> {
        let now_s = (self.clock_s)();
        loop {
            let (place, binding) = self.find(key)?;
            if !self.is_followable(place, binding, now_s, &may_serve) {
                return None;
            }
            if let Some(lease) = self.take(place, binding, binding, now_s) {
                self.counts.followed.fetch_add(1, Ordering::Relaxed);
                return Some(lease);
            }
        }
    }

    /// Binds the session to `target`, the free choice of a turn that found nothing to follow. The lease may
    /// name another target: that of a turn that came first. Nothing when the session cannot be held.
    pub fn claim(
        self: &Arc<Self>,
        key: SessionKey,
        target: RecordId,
        may_serve: impl Fn(RecordId) -> bool,
    ) -> Option<Lease> {
        let lease = (target.0 < LEASE_ONE).then(|| self.claim_place(key, target.0, &may_serve)).flatten();
        if lease.is_none() {
            self.counts.unbound.fetch_add(1, Ordering::Relaxed);
        }
        lease
    }

    /// Sessions bound, idle ones in their time included. Reads the whole table: for the metrics page.
    pub fn active(&self) -> usize {
        let now_s = (self.clock_s)();
        let places = (0..self.buckets.len()).flat_map(|bucket| (0..WAYS).map(move |way| Place { bucket, way }));
        places
            .filter(|place| {
                let binding = self.binding(*place);
                binding.state() == State::Bound && !self.is_expired(*place, binding, now_s)
            })
            .count()
    }

    /// Leases held, all sessions together: 0 at rest.
    pub fn leases(&self) -> u64 {
        let words = self.buckets.iter().flat_map(|bucket| &bucket.bindings);
        words.map(|word| Binding(word.load(Ordering::Relaxed)).leases()).sum()
    }

    fn claim_place(
        self: &Arc<Self>,
        key: SessionKey,
        target: u64,
        may_serve: &impl Fn(RecordId) -> bool,
    ) -> Option<Lease> {
        let now_s = (self.clock_s)();
        for _ in 0..TRIES_MAX {
            let Some((place, binding)) = self.find(key) else {
                match self.insert(key, target, now_s) {
                    Inserted::Here(lease) => return Some(lease),
                    Inserted::Full => return None,
                    Inserted::Busy => spin_loop(),
                }
                continue;
            };
            let follows = self.is_followable(place, binding, now_s, may_serve);
            let next = if follows { binding } else { binding.rebound(target, State::Claimed) };
            if let Some(lease) = self.take(place, binding, next, now_s) {
                let count = match binding.state() {
                    _ if follows => &self.counts.followed,
                    State::Free => &self.counts.first,
                    _ => &self.counts.replaced,
                };
                count.fetch_add(1, Ordering::Relaxed);
                return Some(lease);
            }
            spin_loop();
        }
        None
    }

    /// Where the session is. The tag is read again after the word: a word that another session has written
    /// since carries that session's tag with it.
    fn find(&self, key: SessionKey) -> Option<(Place, Binding)> {
        let (index, tag) = self.split(key);
        let bucket = &self.buckets[index];
        let way = bucket.tags.iter().position(|held| held.load(Ordering::Acquire) == tag)?;
        let place = Place { bucket: index, way };
        let binding = self.binding(place);
        let is_mine = bucket.tags[way].load(Ordering::Acquire) == tag && binding.state() != State::Moving;
        is_mine.then_some((place, binding))
    }

    fn is_followable(&self, place: Place, binding: Binding, now_s: u32, may_serve: &impl Fn(RecordId) -> bool) -> bool {
        matches!(binding.state(), State::Claimed | State::Bound)
            && binding.leases() < LEASES_MAX
            && !self.is_expired(place, binding, now_s)
            && may_serve(RecordId(binding.target()))
    }

    /// Swaps `seen` for `next` with one more lease.
    fn take(self: &Arc<Self>, place: Place, seen: Binding, next: Binding, now_s: u32) -> Option<Lease> {
        if seen.leases() >= LEASES_MAX {
            return None;
        }
        let next = next.with_lease();
        let word = self.word(place);
        word.compare_exchange(seen.0, next.0, Ordering::AcqRel, Ordering::Relaxed).ok()?;
        self.buckets[place.bucket].used_at[place.way].store(now_s, Ordering::Relaxed);
        Some(Lease { table: self.clone(), place, target: RecordId(next.target()), version: next.version() })
    }

    /// Gives a place of the bucket to a new session.
    fn insert(self: &Arc<Self>, key: SessionKey, target: u64, now_s: u32) -> Inserted {
        let (index, tag) = self.split(key);
        let bucket = &self.buckets[index];
        if bucket.inserting.swap(true, Ordering::Acquire) {
            return Inserted::Busy;
        }
        // Another shard may have inserted the session between the look and the right to insert.
        let inserted = if bucket.tags.iter().any(|held| held.load(Ordering::Relaxed) == tag) {
            Inserted::Busy
        } else {
            self.give(index, tag, target, now_s)
        };
        bucket.inserting.store(false, Ordering::Release);
        inserted
    }

    /// With the insertion right held. The old session's word is first made `Moving`, which ends every lookup of
    /// it; then the tag changes; then the word becomes the new session's.
    fn give(self: &Arc<Self>, index: usize, tag: u64, target: u64, now_s: u32) -> Inserted {
        let Some((place, seen)) = self.least_needed(index, now_s) else { return Inserted::Full };
        let moving = seen.rebound(0, State::Moving);
        if self.word(place).compare_exchange(seen.0, moving.0, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            return Inserted::Busy;
        }
        if seen.state() == State::Bound && !self.is_expired(place, seen, now_s) {
            self.counts.evicted.fetch_add(1, Ordering::Relaxed);
        }
        let bucket = &self.buckets[index];
        bucket.tags[place.way].store(tag, Ordering::Release);
        bucket.used_at[place.way].store(now_s, Ordering::Relaxed);
        let claimed = moving.rebound(target, State::Claimed).with_lease();
        self.word(place).store(claimed.0, Ordering::Release);
        self.counts.first.fetch_add(1, Ordering::Relaxed);
        Inserted::Here(Lease { table: self.clone(), place, target: RecordId(target), version: claimed.version() })
    }

    /// The place whose session is missed least: none, an expired one, or the longest idle one. Nothing when
    /// every session of the bucket has a turn in flight.
    fn least_needed(&self, index: usize, now_s: u32) -> Option<(Place, Binding)> {
        let places = (0..WAYS).map(|way| Place { bucket: index, way });
        let idle = places.map(|place| (place, self.binding(place))).filter(|(_, binding)| binding.leases() == 0);
        idle.min_by_key(|(place, binding)| {
            (binding.state() != State::Free, u32::MAX - self.idle_s(index, place.way, now_s))
        })
    }

    fn is_expired(&self, place: Place, binding: Binding, now_s: u32) -> bool {
        binding.leases() == 0 && self.idle_s(place.bucket, place.way, now_s) >= self.ttl_s
    }

    fn idle_s(&self, bucket: usize, way: usize, now_s: u32) -> u32 {
        // Another shard's clock reading may be a little ahead of ours.
        now_s.saturating_sub(self.buckets[bucket].used_at[way].load(Ordering::Relaxed))
    }

    fn split(&self, key: SessionKey) -> (usize, u64) {
        let index = key.0 as usize & (self.buckets.len() - 1);
        (index, ((key.0 >> 64) as u64).max(1))
    }

    fn word(&self, place: Place) -> &AtomicU64 {
        &self.buckets[place.bucket].bindings[place.way]
    }

    fn binding(&self, place: Place) -> Binding {
        Binding(self.word(place).load(Ordering::Acquire))
    }

    /// Applies `change` to the binding until it holds; `change` says no by giving nothing.
    fn update(&self, place: Place, change: impl Fn(Binding) -> Option<Binding>) -> bool {
        let change = |word| change(Binding(word)).map(|next| next.0);
        self.word(place).fetch_update(Ordering::AcqRel, Ordering::Acquire, change).is_ok()
    }
}

enum Inserted {
    Here(Lease),
    /// Somebody else is at it, or was.
    Busy,
    Full,
}

impl Lease {
    /// Where the turn goes.
    pub fn target(&self) -> RecordId {
        self.target
    }

    /// The target has served the turn: the session is bound to it. Without effect on a binding that is no
    /// longer the one that this turn went by.
    pub fn served(&self) {
        self.table.update(self.place, |binding| {
            (binding.version() == self.version && binding.state() == State::Claimed)
                .then(|| binding.with_state(State::Bound))
        });
    }

    /// The target has failed the turn: the session is free, unless it was bound anew meanwhile.
    pub fn failed(&self) {
        self.table.update(self.place, |binding| {
            let is_held = matches!(binding.state(), State::Claimed | State::Bound);
            (binding.version() == self.version && is_held).then(|| binding.rebound(0, State::Free))
        });
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let now_s = (self.table.clock_s)();
        self.table.buckets[self.place.bucket].used_at[self.place.way].store(now_s, Ordering::Relaxed);
        self.table.update(self.place, |binding| {
            let rest = binding.without_lease();
            let is_unserved = rest.leases() == 0 && rest.state() == State::Claimed;
            Some(if is_unserved { rest.rebound(0, State::Free) } else { rest })
        });
    }
}
