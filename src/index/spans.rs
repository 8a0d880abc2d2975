//! Which slots hold which stretch of a strand: consecutive spans with their holders. Neighbours always differ, and the last
//! span is never empty of holders, so equal contents have one form.

use smallvec::SmallVec;

use super::holders::Holders;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// Offset after the last block of the span; the span begins where the one before ends.
    pub end: u32,
    pub holders: Holders,
}

/// Nearly every strand has one span, which lies inside the node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Spans(SmallVec<[Span; 1]>);

/// What a change did, in blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Changed {
    /// Blocks that the slot has come to hold, or holds no more.
    pub blocks: u32,
    /// Of these, the ones that nobody else holds.
    pub alone: u32,
}

impl Spans {
    /// Offset after the last block that anyone holds.
    pub fn covered(&self) -> u32 {
        self.0.last().map_or(0, |span| span.end)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    #[inline]
    pub fn iter(&self) -> impl Iterator<Item = &Span> {
        self.0.iter()
    }

    /// Makes `slot` a holder of `from..to`; calls `already_held` with each offset that it held before.
    pub fn insert(&mut self, slot: u16, from: u32, to: u32, mut already_held: impl FnMut(u32)) -> Changed {
        let covered = self.covered();
        if from == covered {
            match self.0.last_mut() {
                Some(last) if last.holders.is_only(slot) => last.end = to,
                _ => self.0.push(Span { end: to, holders: Holders::of(slot) }),
            }
            return Changed { blocks: to - from, alone: to - from };
        }
        if covered < to {
            if covered < from {
                self.0.push(Span { end: from, holders: Holders::default() });
            }
            self.0.push(Span { end: to, holders: Holders::default() });
        }
        self.change(from, to, |start, span| {
            let was_empty = span.holders.is_empty();
            if span.holders.insert(slot) {
                return (true, was_empty);
            }
            (start..span.end).for_each(&mut already_held);
            (false, false)
        })
    }

    /// Takes `slot` out of the holders of `from..to`; blocks that it does not hold are left alone.
    pub fn remove(&mut self, slot: u16, from: u32, to: u32) -> Changed {
        let to = to.min(self.covered());
        if from >= to {
            return Changed::default();
        }
        // Engines evict the leaves first: the usual removal shortens the last span.
        let count = self.0.len();
        let start = if count < 2 { 0 } else { self.0[count - 2].end };
        if let Some(last) = self.0.last_mut()
            && to == last.end
            && from > start
            && last.holders.is_only(slot)
        {
            last.end = from;
            return Changed { blocks: to - from, alone: to - from };
        }
        self.change(from, to, |_, span| {
            let removed = span.holders.remove(slot);
            (removed, removed && span.holders.is_empty())
        })
    }

    /// Changes the holders of `from..to`, which is covered; `each` gets the start of each span and tells whether it has
    /// changed it, and whether that was the first or last holder.
    fn change(&mut self, from: u32, to: u32, mut each: impl FnMut(u32, &mut Span) -> (bool, bool)) -> Changed {
        let begin = self.split(from);
        let end = self.split(to);
        let mut changed = Changed::default();
        let mut start = from;
        for span in &mut self.0[begin..end] {
            let (is_changed, is_alone) = each(start, span);
            let blocks = span.end - start;
            changed.blocks += if is_changed { blocks } else { 0 };
            changed.alone += if is_alone { blocks } else { 0 };
            start = span.end;
        }
        self.join(begin.saturating_sub(1), (end + 1).min(self.0.len()));
        while self.0.last().is_some_and(|last| last.holders.is_empty()) {
            self.0.pop();
        }
        if self.0.spilled() && self.0.len() * 4 <= self.0.capacity() {
            self.0.shrink_to_fit();
        }
        changed
    }

    /// Makes `at` a boundary; returns the index of the span that begins there.
    fn split(&mut self, at: u32) -> usize {
        let index = self.0.partition_point(|span| span.end <= at);
        let start = if index == 0 { 0 } else { self.0[index - 1].end };
        if start == at || index == self.0.len() {
            return index;
        }
        let holders = self.0[index].holders.clone();
        self.0.insert(index, Span { end: at, holders });
        index + 1
    }

    /// Joins neighbours with equal holders among the spans `begin..end`.
    fn join(&mut self, begin: usize, end: usize) {
        let mut index = end;
        while index > begin + 1 {
            index -= 1;
            if self.0[index - 1].holders == self.0[index].holders {
                self.0.remove(index - 1);
            }
        }
    }

    #[cfg(test)]
    pub fn check(&self) {
        let mut start = 0;
        for (at, span) in self.0.iter().enumerate() {
            assert!(span.end > start);
            assert!(at == 0 || self.0[at - 1].holders != span.holders, "neighbours with equal holders");
            start = span.end;
        }
        assert!(self.0.last().is_none_or(|last| !last.holders.is_empty()));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn agrees_with_a_plain_set_for_each_block() {
        for seed in 0..50 {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut spans = Spans::default();
            let mut model = vec![BTreeSet::<u16>::new(); 60];
            for step in 0..400 {
                let slot = random.u16(0..9) * 31;
                let from = random.u32(0..60);
                let to = random.u32(from + 1..=60);
                let held: Vec<u32> = (from..to).filter(|at| model[*at as usize].contains(&slot)).collect();
                let fresh = to - from - held.len() as u32;
                if random.u8(0..10) < if step / 100 % 2 == 0 { 7 } else { 3 } {
                    let alone = (from..to).filter(|at| model[*at as usize].is_empty()).count() as u32;
                    let mut seen = Vec::new();
                    let changed = spans.insert(slot, from, to, |at| seen.push(at));
                    assert_eq!((changed, seen), (Changed { blocks: fresh, alone }, held), "seed {seed} step {step}");
                    (from..to).for_each(|at| {
                        model[at as usize].insert(slot);
                    });
                } else {
                    let changed = spans.remove(slot, from, to);
                    (from..to).for_each(|at| {
                        model[at as usize].remove(&slot);
                    });
                    let alone = held.iter().filter(|at| model[**at as usize].is_empty()).count() as u32;
                    assert_eq!(changed, Changed { blocks: held.len() as u32, alone }, "seed {seed} step {step}");
                }
                spans.check();
                let mut at = 0;
                for span in spans.iter() {
                    for block in at..span.end {
                        let mut holders = BTreeSet::new();
                        span.holders.for_each(|slot| {
                            holders.insert(slot);
                        });
                        assert_eq!(holders, model[block as usize], "seed {seed} step {step} block {block}");
                    }
                    at = span.end;
                }
                assert!(model[at as usize..].iter().all(BTreeSet::is_empty));
            }
        }
    }
}
