//! The one chained block hash of the router: XXH3-64 over parent and token ids.
//!
//! Prompt side and event side both call this module, so that equal tokens give equal names whatever
//! hash the engine itself uses. Never does IO, never knows a worker.

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// Name of one full KV block: the hash of its tokens chained onto all blocks before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct BlockHash(pub u64);

/// Parent of the first block of every prompt.
pub const ROOT: BlockHash = BlockHash(0);

/// Blocks up to this many tokens are hashed from a stack buffer in one call.
const STACK_TOKENS: usize = 254;

/// XXH3-64 (seed 0) over the parent as 8 bytes little endian, then each token id as 4 bytes little
/// endian. Source: the wire contract of AMD's Infera router; golden values in the tests below.
pub fn chain(parent: BlockHash, tokens: &[u32]) -> BlockHash {
    // The engines' usual size: with nothing left to decide, a third faster.
    if let Ok(block) = <&[u32; 16]>::try_from(tokens) {
        return chain_sixteen(parent, block);
    }
    // By size, because the buffer is zeroed first: most of the time of a short block, if it were always the longest.
    match tokens.len() {
        0..=16 => chain_within::<72>(parent, tokens),
        17..=64 => chain_within::<264>(parent, tokens),
        65..=STACK_TOKENS => chain_within::<{ 8 + 4 * STACK_TOKENS }>(parent, tokens),
        _ => chain_streaming(parent, tokens),
    }
}

#[inline]
fn chain_sixteen(parent: BlockHash, tokens: &[u32; 16]) -> BlockHash {
    let mut bytes = [0u8; 72];
    let (head, tail) = bytes.split_at_mut(8);
    head.copy_from_slice(&parent.0.to_le_bytes());
    for (slot, token) in tail.as_chunks_mut::<4>().0.iter_mut().zip(tokens) {
        *slot = token.to_le_bytes();
    }
    BlockHash(xxh3_64(&bytes))
}

#[inline]
fn chain_within<const BYTES: usize>(parent: BlockHash, tokens: &[u32]) -> BlockHash {
    let mut bytes = [0u8; BYTES];
    bytes[..8].copy_from_slice(&parent.0.to_le_bytes());
    for (slot, token) in bytes[8..].as_chunks_mut::<4>().0.iter_mut().zip(tokens) {
        *slot = token.to_le_bytes();
    }
    BlockHash(xxh3_64(&bytes[..8 + 4 * tokens.len()]))
}

fn chain_streaming(parent: BlockHash, tokens: &[u32]) -> BlockHash {
    let mut hasher = Xxh3::new();
    hasher.update(&parent.0.to_le_bytes());
    for token in tokens {
        hasher.update(&token.to_le_bytes());
    }
    BlockHash(hasher.digest())
}

/// Hashes of the full blocks of a prompt, first to last; the unfinished tail has none.
/// A `block_size` of 0 (tokens per block) gives no blocks.
pub fn prompt_blocks(tokens: &[u32], block_size: usize) -> Vec<BlockHash> {
    if block_size == 0 {
        return Vec::new();
    }
    let mut parent = ROOT;
    tokens
        .chunks_exact(block_size)
        .map(|block| {
            parent = chain(parent, block);
            parent
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(tokens: impl IntoIterator<Item = u32>, block_size: usize, expected: &[u64]) {
        let tokens: Vec<u32> = tokens.into_iter().collect();
        let blocks: Vec<u64> = prompt_blocks(&tokens, block_size).iter().map(|hash| hash.0).collect();
        assert_eq!(blocks, expected);
    }

    #[test]
    fn golden_values_of_the_wire_contract() {
        check(1..=4, 4, &[0x341839abbe30be0b]);
        check(1..=10, 4, &[0x341839abbe30be0b, 0x37b6de0623bdb5ca]);
        check(1..=32, 16, &[0x73d57c846a7f6b4e, 0xdcb64a9b2a68aec4]);
        check([0; 8], 4, &[0x743df94ee4c78a2a, 0x4e908c9769e1a4bb]);
        check([u32::MAX; 4], 4, &[0x2dae2d9ff1e44dbd]);
        check([7], 1, &[0xeef32d3f0cdb0fe8]);
        check(0..128, 64, &[0xd45bfcbd13520815, 0xdac428900c1952c7]);
        check(0..768, 768, &[0xb4c20709e20b34b6]);
    }

    #[test]
    fn partial_blocks_and_a_zero_block_size_give_nothing() {
        check(1..4, 4, &[]);
        check(1..100, 0, &[]);
    }

    #[test]
    fn long_blocks_hash_alike_on_both_sides_of_the_stack_bound() {
        for length in [0, 1, 15, 16, 17, 63, 64, 65, STACK_TOKENS - 1, STACK_TOKENS, STACK_TOKENS + 1, 1000] {
            let tokens: Vec<u32> = (0..length as u32).collect();
            assert_eq!(chain(ROOT, &tokens), chain_streaming(ROOT, &tokens));
        }
    }
}
