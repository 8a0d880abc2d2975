//! The set of slots that hold a stretch of blocks: one word of bits while all slots lie in one, else a few slots
//! inline, else a bitset. One set has one form, so equality is equality of contents.

/// Slots kept inline, when they do not lie in one word, before the set becomes a bitset.
const FEW: usize = 6;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Holders {
    /// Slots `64 * at ..` by bit; the empty set is this with nothing set and `at` 0.
    Word { at: u16, bits: u64 },
    /// Sorted, in more than one word; unused places are 0.
    Few { count: u8, slots: [u16; FEW] },
    /// More than [`FEW`], in more than one word: one bit per slot, without trailing zero words.
    Bits(Box<[u64]>),
}

impl Default for Holders {
    fn default() -> Self {
        Holders::Word { at: 0, bits: 0 }
    }
}

impl Holders {
    pub fn of(slot: u16) -> Self {
        Holders::Word { at: slot / 64, bits: 1 << (slot % 64) }
    }

    #[inline]
    pub fn is_empty(&self) -> bool {
        matches!(self, Holders::Word { bits: 0, .. })
    }

    /// Whether `slot` is the only holder.
    #[inline]
    pub fn is_only(&self, slot: u16) -> bool {
        matches!(self, Holders::Word { at, bits } if *at == slot / 64 && *bits == 1 << (slot % 64))
    }

    #[inline]
    pub fn contains(&self, slot: u16) -> bool {
        self.word(usize::from(slot) / 64) >> (slot % 64) & 1 == 1
    }

    /// Returns whether the slot was not there before.
    pub fn insert(&mut self, slot: u16) -> bool {
        if self.contains(slot) {
            return false;
        }
        match self {
            Holders::Word { at, bits } if *at == slot / 64 || *bits == 0 => {
                *at = slot / 64;
                *bits |= 1 << (slot % 64);
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
            Holders::Word { .. } | Holders::Few { .. } => {
                let mut slots = self.slots();
                slots.push(slot);
                *self = Self::from_slots(slots);
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
            Holders::Word { at, bits } => {
                *bits &= !(1 << (slot % 64));
                if *bits == 0 {
                    *at = 0;
                }
            }
            Holders::Few { .. } => {
                let mut slots = self.slots();
                slots.retain(|other| *other != slot);
                *self = Self::from_slots(slots);
            }
            Holders::Bits(words) => {
                words[usize::from(slot) / 64] &= !(1 << (slot % 64));
                let count: u32 = words.iter().map(|word| word.count_ones()).sum();
                let used = words.iter().filter(|word| **word != 0).count();
                if count as usize <= FEW || used == 1 {
                    *self = Self::from_slots(self.slots());
                } else if let Some(used) = words.iter().rposition(|word| *word != 0)
                    && used + 1 < words.len()
                {
                    *words = words[..=used].into();
                }
            }
        }
        true
    }

    fn slots(&self) -> Vec<u16> {
        let mut slots = Vec::new();
        self.for_each(|slot| slots.push(slot));
        slots
    }

    fn from_slots(mut slots: Vec<u16>) -> Self {
        slots.sort_unstable();
        let (Some(first), Some(last)) = (slots.first().copied(), slots.last().copied()) else { return Self::default() };
        if first / 64 == last / 64 {
            return Holders::Word { at: first / 64, bits: slots.iter().fold(0, |bits, slot| bits | 1 << (slot % 64)) };
        }
        if slots.len() <= FEW {
            let mut few = [0; FEW];
            few[..slots.len()].copy_from_slice(&slots);
            return Holders::Few { count: slots.len() as u8, slots: few };
        }
        let mut words = vec![0u64; usize::from(last) / 64 + 1].into_boxed_slice();
        for slot in slots {
            words[usize::from(slot) / 64] |= 1 << (slot % 64);
        }
        Holders::Bits(words)
    }

    pub fn for_each(&self, mut each: impl FnMut(u16)) {
        let mut word = |at: usize, mut rest: u64| {
            while rest != 0 {
                each((at * 64) as u16 + rest.trailing_zeros() as u16);
                rest &= rest - 1;
            }
        };
        match self {
            Holders::Word { at, bits } => word(usize::from(*at), *bits),
            Holders::Few { count, slots } => slots[..usize::from(*count)].iter().for_each(|slot| each(*slot)),
            Holders::Bits(words) => words.iter().enumerate().for_each(|(at, bits)| word(at, *bits)),
        }
    }

    /// One 64-slot word of the set.
    #[inline]
    pub fn word(&self, at: usize) -> u64 {
        match self {
            Holders::Word { at: own, bits } => {
                if usize::from(*own) == at {
                    *bits
                } else {
                    0
                }
            }
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
            Holders::Word { bits: 0, .. } => 0,
            Holders::Word { at, .. } => usize::from(*at) + 1,
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
        assert_eq!(size_of::<Holders>(), 24);
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
            assert_eq!(holders.is_only(slot), model.iter().eq([&slot]));
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
