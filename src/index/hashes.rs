//! Block hashes of one strand, shared by the writer and by every published state of the strand. Owns no length: who has a
//! length may read that far and no further. `tests/publication_model.rs` runs this file under every interleaving.
//!
//! Relaxed accesses are enough, by this argument. The writer stores a hash only past every length that it has published
//! (what was published and is to change is copied first, see `tree`). A reader's length comes out of the published view; the
//! view's swap releases and its load acquires, so every store made before the publication is visible to who has the length.
//! A store made after it goes past the length, where that reader does not look. So no place is ever read while it is written,
//! and being atomic only says so to the compiler without `unsafe`.

use std::sync::Arc;

use super::sync::{AtomicU64, Ordering};
use crate::hash::BlockHash;

/// Room for the hashes of one strand.
#[derive(Clone, Debug)]
pub struct Hashes(Arc<[AtomicU64]>);

impl Hashes {
    /// Room for `capacity` hashes, of which the first `length` are taken from `former`.
    pub fn with_room(capacity: usize, former: Option<&Hashes>, length: usize) -> Self {
        let old: &[AtomicU64] = former.map_or(&[], |former| &former.0[..length]);
        let kept = old.iter().map(|hash| AtomicU64::new(hash.load(Ordering::Relaxed)));
        // Both parts know their length, so this is one allocation and one pass.
        Self(kept.chain((length..capacity).map(|_| AtomicU64::new(0))).collect())
    }

    pub fn capacity(&self) -> usize {
        self.0.len()
    }

    #[inline]
    pub fn get(&self, at: usize) -> BlockHash {
        BlockHash(self.0[at].load(Ordering::Relaxed))
    }

    /// For the writer only, past everything published.
    pub fn set(&self, at: usize, hash: BlockHash) {
        self.0[at].store(hash.0, Ordering::Relaxed);
    }
}
