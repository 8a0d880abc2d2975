//! Owns seeded randomness: one generator type and the way sub-seeds are derived. Never reads the clock or the OS.

use rand::SeedableRng;
use rand::rngs::SmallRng;

/// A generator for one purpose: `purpose` keeps independent uses of one seed apart.
pub fn generator(seed: u64, purpose: &str) -> SmallRng {
    SmallRng::seed_from_u64(xxhash_rust::xxh3::xxh3_64_with_seed(purpose.as_bytes(), seed))
}

/// A 64-bit mix of two numbers, order included.
pub fn mixed(left: u64, right: u64) -> u64 {
    xxhash_rust::xxh3::xxh3_64_with_seed(&right.to_le_bytes(), left)
}
