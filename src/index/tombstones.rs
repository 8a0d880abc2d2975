//! Names that have lost their last copy, kept for a while because a late child may still name one as its parent. A ring:
//! burying is the common case and costs a few stores, looking up is rare and reads it all.

use super::tree::{Place, Tree};
use crate::events::EngineHash;
use crate::limits::TOMBSTONES_MAX;

#[derive(Debug, Default)]
pub(super) struct Tombstones {
    /// Grow to the bound, then are written round and round.
    names: Vec<u64>,
    places: Vec<Place>,
    next: usize,
}

impl Tombstones {
    /// Keeps a name and pins its place; the oldest goes.
    pub fn bury(&mut self, tree: &mut Tree, name: EngineHash, place: Place) {
        tree.pin(place);
        if self.names.len() < TOMBSTONES_MAX {
            self.names.push(name.0);
            self.places.push(place);
            return;
        }
        self.names[self.next] = name.0;
        let oldest = std::mem::replace(&mut self.places[self.next], place);
        self.next = (self.next + 1) % TOMBSTONES_MAX;
        tree.unpin(oldest);
    }

    /// Where the block of a name lies that was buried; the latest, if several times.
    pub fn find(&self, name: EngineHash) -> Option<Place> {
        let (newer, older) = self.names.split_at(self.next);
        let latest = |names: &[u64]| names.iter().rposition(|other| *other == name.0);
        let at = latest(newer).or_else(|| latest(older).map(|at| at + newer.len()))?;
        Some(self.places[at])
    }

    pub fn clear(&mut self, tree: &mut Tree) {
        self.names = Vec::new();
        self.next = 0;
        std::mem::take(&mut self.places).into_iter().for_each(|place| tree.unpin(place));
    }
}
