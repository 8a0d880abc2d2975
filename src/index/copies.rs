//! How many copies of a block an engine has announced, by medium and group. Nearly every name has one to three copies of one
//! or two kinds, which four bits in the table of names say; all else lies on the side.

use hashbrown::HashMap;

use super::names::State;
use super::tree::Tiers;
use crate::events::{CopyKey, EngineHash, Medium};

/// Counted copies of one block. The general form: any number of kinds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Copies(Vec<(CopyKey, u32)>);

impl Copies {
    pub fn of(key: CopyKey) -> Self {
        Self(vec![(key, 1)])
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn add(&mut self, key: CopyKey) {
        self.add_many(key, 1);
    }

    fn add_many(&mut self, key: CopyKey, count: u32) {
        if count == 0 {
            return;
        }
        match self.0.iter_mut().find(|(other, _)| *other == key) {
            Some((_, known)) => *known = known.saturating_add(count),
            None => self.0.push((key, count)),
        }
    }

    /// Takes one copy away; one that was never announced changes nothing.
    pub fn remove(&mut self, key: CopyKey) -> bool {
        let Some(at) = self.0.iter().position(|(other, _)| *other == key) else { return false };
        self.0[at].1 -= 1;
        if self.0[at].1 == 0 {
            self.0.swap_remove(at);
        }
        true
    }

    pub fn for_each(&self, mut each: impl FnMut(CopyKey)) {
        for (key, count) in &self.0 {
            (0..*count).for_each(|_| each(*key));
        }
    }

    fn tiers(&self) -> Tiers {
        let device = self.0.iter().any(|(key, _)| key.medium == Medium::DEVICE);
        Tiers { device, any: !self.0.is_empty() }
    }
}

/// Copies by name, where four bits do not say it.
type Odd = HashMap<EngineHash, Copies>;

/// The state that points to [`Odd`].
const ODD: State = 0b1111;
const COUNT_MAX: u32 = 3;

/// Reads and changes the copies of one rank's names.
#[derive(Debug, Default)]
pub(super) struct CopyBook {
    /// The two kinds that the four bits count, low bits first; the first two that were announced.
    kinds: [Option<CopyKey>; 2],
    odd: Odd,
}

impl CopyBook {
    pub fn tiers(&self, name: EngineHash, state: State) -> Tiers {
        match state {
            0 => Tiers::NONE,
            ODD => self.odd.get(&name).map_or(Tiers::NONE, Copies::tiers),
            _ => {
                let is_device =
                    |at: usize| count(state, at) > 0 && self.kinds[at].is_some_and(|key| key.medium == Medium::DEVICE);
                Tiers { device: is_device(0) || is_device(1), any: true }
            }
        }
    }

    /// Whether at least one copy of this kind is announced.
    pub fn holds(&self, name: EngineHash, state: State, key: CopyKey) -> bool {
        match state {
            ODD => self.odd.get(&name).is_some_and(|copies| copies.0.iter().any(|(other, _)| *other == key)),
            _ => (0..self.kinds.len()).any(|kind| self.kinds[kind] == Some(key) && count(state, kind) > 0),
        }
    }

    /// State of a name with one more copy; `state` is 0 for a name without any.
    pub fn add(&mut self, name: EngineHash, state: State, key: CopyKey) -> State {
        if state != ODD {
            let kind = self.kinds.iter().position(|kind| kind.is_none_or(|kind| kind == key));
            if let Some(kind) = kind
                && count(state, kind) < COUNT_MAX
            {
                self.kinds[kind] = Some(key);
                let more = state + (1 << (2 * kind));
                if more != ODD {
                    return more;
                }
            }
            let copies = self.spelled(state);
            self.odd.insert(name, copies);
        }
        self.odd.entry(name).or_default().add(key);
        ODD
    }

    /// State of a name whose only copy is of this kind; `None` where four bits do not say it.
    pub fn state_of_one(&mut self, key: CopyKey) -> Option<State> {
        let kind = self.kinds.iter().position(|kind| kind.is_none_or(|kind| kind == key))?;
        self.kinds[kind] = Some(key);
        Some(1 << (2 * kind))
    }

    /// State of a name with one copy less; `None`, and no change, for a copy that was never announced.
    pub fn remove(&mut self, name: EngineHash, state: State, key: CopyKey) -> Option<State> {
        if state != ODD {
            let kind = self.kinds.iter().position(|kind| *kind == Some(key))?;
            return (count(state, kind) > 0).then(|| state - (1 << (2 * kind)));
        }
        let copies = self.odd.get_mut(&name)?;
        if !copies.remove(key) {
            return None;
        }
        if copies.is_empty() {
            self.odd.remove(&name);
            return Some(0);
        }
        Some(ODD)
    }

    fn spelled(&self, state: State) -> Copies {
        let mut copies = Copies::default();
        for (at, kind) in self.kinds.iter().enumerate() {
            if let Some(kind) = kind {
                copies.add_many(*kind, count(state, at));
            }
        }
        copies
    }
}

fn count(state: State, kind: usize) -> u32 {
    u32::from(state >> (2 * kind) & 0b11)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// Random copies of several kinds against a plain count by kind.
    #[test]
    fn a_name_counts_like_a_plain_map() {
        let mut random = fastrand::Rng::with_seed(13);
        let name = EngineHash(9);
        for round in 0..300 {
            let mut book = CopyBook::default();
            let mut state = 0;
            let mut model: BTreeMap<(bool, u16), u32> = BTreeMap::new();
            for step in 0..100 {
                let (is_device, group) = (random.bool(), random.u16(0..1 + round % 3));
                let medium = if is_device { Medium::DEVICE } else { Medium::HOST };
                let key = CopyKey { medium, group };
                if random.u8(0..10) < if step < 50 { 6 } else { 3 } {
                    state = book.add(name, state, key);
                    *model.entry((is_device, group)).or_insert(0) += 1;
                } else {
                    let known = model.get(&(is_device, group)).copied().unwrap_or(0);
                    let removed = book.remove(name, state, key);
                    assert_eq!(removed.is_some(), known > 0);
                    state = removed.unwrap_or(state);
                    model.insert((is_device, group), known.saturating_sub(1));
                }
                let any = model.values().any(|count| *count > 0);
                let device = model.iter().any(|((is_device, _), count)| *is_device && *count > 0);
                assert_eq!(book.tiers(name, state), Tiers { device, any });
                assert_eq!(state != 0, any);
            }
            assert_eq!(book.odd.is_empty(), state != ODD);
        }
    }
}
