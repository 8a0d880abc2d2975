//! How many copies of a block an engine has announced, by medium and group; and the 16 bytes that a mirror keeps for each
//! engine hash. Nearly every block has one kind of copy, so further kinds lie in a table on the side.

use hashbrown::HashMap;

use crate::events::{CopyKey, EngineHash, Medium};
use crate::hash::BlockHash;

/// Counted copies of one block. The general form: any number of kinds.
#[derive(Clone, Debug, Default)]
pub(super) struct Copies {
    first: Option<CopyKey>,
    count: u32,
    #[allow(clippy::box_collection, reason = "one word in the common case, where the list is absent")]
    others: Option<Box<Vec<(CopyKey, u32)>>>,
}

impl Copies {
    pub fn of(key: CopyKey) -> Self {
        Self { first: Some(key), count: 1, others: None }
    }

    pub fn is_empty(&self) -> bool {
        self.first.is_none() && self.others.is_none()
    }

    pub fn add(&mut self, key: CopyKey) {
        self.add_many(key, 1);
    }

    fn add_many(&mut self, key: CopyKey, count: u32) {
        if self.first.is_none_or(|first| first == key) && !self.others_hold(key) {
            self.first = Some(key);
            self.count = self.count.saturating_add(count);
            return;
        }
        let others = self.others.get_or_insert_default();
        match others.iter_mut().find(|(other, _)| *other == key) {
            Some((_, known)) => *known = known.saturating_add(count),
            None => others.push((key, count)),
        }
    }

    fn others_hold(&self, key: CopyKey) -> bool {
        self.others.as_ref().is_some_and(|others| others.iter().any(|(other, _)| *other == key))
    }

    /// Takes one copy away; one that was never announced changes nothing.
    pub fn remove(&mut self, key: CopyKey) -> bool {
        if self.first == Some(key) {
            self.count -= 1;
            if self.count == 0 {
                self.first = None;
            }
            return true;
        }
        let Some(others) = self.others.as_mut() else { return false };
        let Some(at) = others.iter().position(|(other, _)| *other == key) else { return false };
        others[at].1 -= 1;
        if others[at].1 == 0 {
            others.swap_remove(at);
        }
        if others.is_empty() {
            self.others = None;
        }
        true
    }

    pub fn absorb(&mut self, other: &Copies) {
        other.for_each(|key, count| self.add_many(key, count));
    }

    pub fn for_each(&self, mut each: impl FnMut(CopyKey, u32)) {
        if let Some(key) = self.first {
            each(key, self.count);
        }
        for (key, count) in self.others.iter().flat_map(|others| others.iter()) {
            each(*key, *count);
        }
    }
}

/// Copies of kinds other than the one that [`Name`] has room for, by engine hash.
pub(super) type MoreCopies = HashMap<EngineHash, Copies>;

const IS_PLAIN: u32 = 1 << 31;
const HAS_MORE: u32 = 1 << 30;
const COUNT: u32 = HAS_MORE - 1;

/// What one engine hash stands for. Without copies it is a tombstone: not visible, but still a possible parent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Name {
    block: BlockHash,
    /// Meaningful while the count is not 0.
    copy: CopyKey,
    /// Count of `copy`, whether there are more kinds, and whether the block is plain.
    bits: u32,
}

impl Name {
    /// A name without copies.
    pub fn new(block: BlockHash, is_plain: bool) -> Self {
        let copy = CopyKey { medium: Medium::DEVICE, group: CopyKey::NO_GROUP };
        Self { block, copy, bits: if is_plain { IS_PLAIN } else { 0 } }
    }

    pub fn block(&self) -> BlockHash {
        self.block
    }

    /// No adapter, salt or image on the block or an ancestor.
    pub fn is_plain(&self) -> bool {
        self.bits & IS_PLAIN != 0
    }

    pub fn is_visible(&self) -> bool {
        self.bits & (HAS_MORE | COUNT) != 0
    }

    /// Lets the name stand for another block; the copies stay.
    pub fn rebind(&mut self, block: BlockHash, is_plain: bool) {
        self.block = block;
        self.bits = self.bits & !IS_PLAIN | if is_plain { IS_PLAIN } else { 0 };
    }

    fn count(&self) -> u32 {
        self.bits & COUNT
    }

    /// Adds copies; `engine` is the key of this name.
    pub fn add(&mut self, engine: EngineHash, copies: &Copies, more: &mut MoreCopies) {
        copies.for_each(|key, count| {
            let is_free = self.bits & (HAS_MORE | COUNT) == 0;
            if is_free || (self.count() > 0 && self.copy == key) {
                self.copy = key;
                let count = self.count().saturating_add(count).min(COUNT);
                self.bits = self.bits & !COUNT | count;
            } else {
                more.entry(engine).or_default().add_many(key, count);
                self.bits |= HAS_MORE;
            }
        });
    }

    /// Takes one copy away; false, and no change, for one that was never announced.
    pub fn remove(&mut self, engine: EngineHash, key: CopyKey, more: &mut MoreCopies) -> bool {
        if self.count() > 0 && self.copy == key {
            self.bits -= 1;
            return true;
        }
        let Some(copies) = more.get_mut(&engine).filter(|_| self.bits & HAS_MORE != 0) else { return false };
        let removed = copies.remove(key);
        if copies.is_empty() {
            more.remove(&engine);
            self.bits &= !HAS_MORE;
        }
        removed
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// Random copies of several kinds against a plain count by kind.
    #[test]
    fn a_name_counts_like_a_plain_map() {
        let mut random = fastrand::Rng::with_seed(13);
        let engine = EngineHash(9);
        assert_eq!(size_of::<Name>(), 16);
        for _ in 0..200 {
            let mut more = MoreCopies::new();
            let mut name = Name::new(BlockHash(1), random.bool());
            let mut model: BTreeMap<u16, u32> = BTreeMap::new();
            for step in 0..100 {
                let group = random.u16(0..3);
                let key = CopyKey { medium: Medium::HOST, group };
                if random.u8(0..10) < if step < 50 { 6 } else { 3 } {
                    name.add(engine, &Copies::of(key), &mut more);
                    *model.entry(group).or_insert(0) += 1;
                } else {
                    let known = model.get(&group).copied().unwrap_or(0);
                    assert_eq!(name.remove(engine, key, &mut more), known > 0);
                    model.insert(group, known.saturating_sub(1));
                }
                assert_eq!(name.is_visible(), model.values().any(|count| *count > 0));
                let plain = random.bool();
                name.rebind(BlockHash(step), plain);
                assert_eq!((name.block(), name.is_plain()), (BlockHash(step), plain));
            }
            assert_eq!(more.is_empty(), name.bits & HAS_MORE == 0);
        }
    }
}
