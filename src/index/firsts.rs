//! Strands by their first block, and a quick no for the rest: every new block of a strand must be asked whether it begins
//! another one, and almost none does. Never knows what a strand holds.

use hashbrown::HashMap;

use crate::hash::BlockHash;

/// Bits of the filter per first block, when it is made; it is made anew at half of that.
const BITS_EACH: usize = 32;
const WORD_BITS: usize = 64;

#[derive(Debug)]
pub(super) struct Firsts {
    strands: HashMap<BlockHash, u32>,
    /// A set bit for the low bits of every first block, and of some that have gone; as many words as a power of two. Block
    /// hashes are mixed well, so their own bits do. One bit each: a second one would help less than it costs.
    filter: Box<[u64]>,
    /// First blocks that have come since the filter was made, the ones of that moment included.
    marked: usize,
}

impl Default for Firsts {
    fn default() -> Self {
        Self { strands: HashMap::new(), filter: [0].into(), marked: 0 }
    }
}

impl Firsts {
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.strands.len()
    }

    /// Memory, free places included.
    pub fn bytes(&self) -> usize {
        self.strands.capacity() * size_of::<(BlockHash, u32)>() + size_of_val(&*self.filter)
    }

    /// The strand that begins with this block.
    #[inline]
    pub fn get(&self, block: BlockHash) -> Option<u32> {
        let (word, bit) = place(&self.filter, block);
        if self.filter[word] >> bit & 1 == 0 {
            return None;
        }
        self.strands.get(&block).copied()
    }

    pub fn insert(&mut self, block: BlockHash, strand: u32) {
        self.strands.insert(block, strand);
        self.marked += 1;
        if self.marked * BITS_EACH > self.filter.len() * WORD_BITS * 2 {
            self.remake();
        } else {
            mark(&mut self.filter, block);
        }
    }

    pub fn remove(&mut self, block: BlockHash) {
        self.strands.remove(&block);
    }

    /// Gives memory back after a shrinkage; far below full, so that a steady state never rebuilds.
    pub fn shrink(&mut self) {
        if self.strands.capacity() > 1024 && self.strands.len() < self.strands.capacity() / 8 {
            self.strands.shrink_to(self.strands.len() * 2);
            self.remake();
        }
    }

    /// By what is there now: forgets what has gone. Costs as much as what has come since the last time.
    fn remake(&mut self) {
        let bits = (self.strands.len() * BITS_EACH).next_power_of_two().max(WORD_BITS);
        self.filter = vec![0; bits / WORD_BITS].into();
        self.marked = self.strands.len();
        self.strands.keys().for_each(|block| mark(&mut self.filter, *block));
    }
}

/// Word and bit of a block.
#[inline]
fn place(filter: &[u64], block: BlockHash) -> (usize, u32) {
    let bit = block.0 as usize & (filter.len() * WORD_BITS - 1);
    (bit / WORD_BITS, (bit % WORD_BITS) as u32)
}

fn mark(filter: &mut [u64], block: BlockHash) {
    let (word, bit) = place(filter, block);
    filter[word] |= 1 << bit;
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    /// Blocks come and go, also ones that share their low bits.
    #[test]
    fn agrees_with_a_plain_map() {
        for seed in 0..10 {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut firsts = Firsts::default();
            let mut model = HashMap::new();
            for step in 0..20_000u32 {
                let number = random.u64(0..4_000);
                let block =
                    BlockHash(if seed % 2 == 0 { number << 40 } else { number.wrapping_mul(0x9e37_79b9_7f4a_7c15) });
                assert_eq!(firsts.get(block), model.get(&block).copied(), "seed {seed} step {step}");
                if random.u8(0..10) < if step / 5_000 % 2 == 0 { 8 } else { 1 } {
                    firsts.insert(block, step);
                    model.insert(block, step);
                } else {
                    firsts.remove(block);
                    model.remove(&block);
                    firsts.shrink();
                }
                assert_eq!(firsts.len(), model.len());
            }
            assert!(model.iter().all(|(block, step)| firsts.get(*block) == Some(*step)), "seed {seed}");
            let bits = firsts.filter.len() * WORD_BITS;
            assert!(bits <= 8_000 * BITS_EACH, "seed {seed}: {bits} bits");
        }
    }
}
