//! The set of slots that hold a run: a few inline, or a bitset. One set has one form, so equality is equality of contents.

/// Slots kept inline before the set becomes a bitset.
const FEW: usize = 6;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Holders {
    /// Sorted; unused places are 0.
    Few { count: u8, slots: [u16; FEW] },
    /// One bit per slot, without trailing zero words.
    Bits(Box<[u64]>),
}

impl Default for Holders {
    fn default() -> Self {
        Holders::Few { count: 0, slots: [0; FEW] }
    }
}

impl Holders {
    pub fn of(slot: u16) -> Self {
        let mut holders = Self::default();
        holders.insert(slot);
        holders
    }

    pub fn is_empty(&self) -> bool {
        matches!(self, Holders::Few { count: 0, .. })
    }

    /// Whether `slot` is the only holder.
    pub fn is_only(&self, slot: u16) -> bool {
        matches!(self, Holders::Few { count: 1, slots } if slots[0] == slot)
    }

    pub fn contains(&self, slot: u16) -> bool {
        match self {
            Holders::Few { count, slots } => slots[..usize::from(*count)].contains(&slot),
            Holders::Bits(words) => words.get(usize::from(slot) / 64).is_some_and(|word| word >> (slot % 64) & 1 == 1),
        }
    }

    /// Returns whether the slot was not there before.
    pub fn insert(&mut self, slot: u16) -> bool {
        if self.contains(slot) {
            return false;
        }
        match self {
            Holders::Few { count, slots } if usize::from(*count) < FEW => {
                let length = usize::from(*count);
                let at = slots[..length].partition_point(|other| *other < slot);
                slots.copy_within(at..length, at + 1);
                slots[at] = slot;
                *count += 1;
            }
            Holders::Few { slots, .. } => {
                let last = slots[FEW - 1].max(slot);
                let mut words = vec![0u64; usize::from(last) / 64 + 1].into_boxed_slice();
                for member in slots.iter().chain([&slot]) {
                    words[usize::from(*member) / 64] |= 1 << (member % 64);
                }
                *self = Holders::Bits(words);
            }
            Holders::Bits(words) => {
                let word = usize::from(slot) / 64;
                if word >= words.len() {
                    let mut longer = vec![0u64; word + 1].into_boxed_slice();
                    longer[..words.len()].copy_from_slice(words);
                    *words = longer;
                }
                words[word] |= 1 << (slot % 64);
            }
        }
        true
    }

    /// Returns whether the slot was there.
    pub fn remove(&mut self, slot: u16) -> bool {
        if !self.contains(slot) {
            return false;
        }
        match self {
            Holders::Few { count, slots } => {
                let length = usize::from(*count);
                let at = slots[..length].partition_point(|other| *other < slot);
                slots.copy_within(at + 1..length, at);
                slots[length - 1] = 0;
                *count -= 1;
            }
            Holders::Bits(words) => {
                words[usize::from(slot) / 64] &= !(1 << (slot % 64));
                let count: u32 = words.iter().map(|word| word.count_ones()).sum();
                if count as usize <= FEW {
                    let mut few = Self::default();
                    self.for_each(|member| {
                        few.insert(member);
                    });
                    *self = few;
                } else if let Some(used) = words.iter().rposition(|word| *word != 0)
                    && used + 1 < words.len()
                {
                    *words = words[..=used].into();
                }
            }
        }
        true
    }

    pub fn for_each(&self, mut each: impl FnMut(u16)) {
        match self {
            Holders::Few { count, slots } => slots[..usize::from(*count)].iter().for_each(|slot| each(*slot)),
            Holders::Bits(words) => {
                for (at, word) in words.iter().enumerate() {
                    let mut rest = *word;
                    while rest != 0 {
                        each((at * 64) as u16 + rest.trailing_zeros() as u16);
                        rest &= rest - 1;
                    }
                }
            }
        }
    }

    /// One 64-slot word of the set.
    #[inline]
    pub fn word(&self, at: usize) -> u64 {
        match self {
            Holders::Few { count, slots } => slots[..usize::from(*count)]
                .iter()
                .filter(|slot| usize::from(**slot) / 64 == at)
                .fold(0, |word, slot| word | 1 << (slot % 64)),
            Holders::Bits(words) => words.get(at).copied().unwrap_or(0),
        }
    }

    /// Number of 64-slot words that can be other than 0.
    #[inline]
    pub fn word_count(&self) -> usize {
        match self {
            Holders::Few { count: 0, .. } => 0,
            Holders::Few { count, slots } => usize::from(slots[usize::from(*count) - 1]) / 64 + 1,
            Holders::Bits(words) => words.len(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn agrees_with_a_plain_set_and_has_one_form() {
        let mut random = fastrand::Rng::with_seed(7);
        let mut holders = Holders::default();
        let mut model = BTreeSet::new();
        for step in 0..20_000 {
            let slot = if random.bool() { random.u16(0..8) } else { random.u16(0..300) };
            let insert = random.u8(0..10) < if step / 1000 % 2 == 0 { 8 } else { 2 };
            if insert {
                assert_eq!(holders.insert(slot), model.insert(slot));
            } else {
                assert_eq!(holders.remove(slot), model.remove(&slot));
            }
            let mut seen = Vec::new();
            holders.for_each(|slot| seen.push(slot));
            assert_eq!(seen, model.iter().copied().collect::<Vec<_>>(), "step {step}");
            assert_eq!(holders.is_empty(), model.is_empty());
            assert_eq!(holders.contains(slot), model.contains(&slot));
            let mut rebuilt = Holders::default();
            model.iter().rev().for_each(|slot| {
                rebuilt.insert(*slot);
            });
            assert_eq!(rebuilt, holders, "step {step}");
            let words: u32 = (0..holders.word_count()).map(|at| holders.word(at).count_ones()).sum();
            assert_eq!(words as usize, model.len());
        }
    }
}
