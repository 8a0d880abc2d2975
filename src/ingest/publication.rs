//! The one cell that shards read, and what becomes of its former contents. Written by the ingest core only.
//! `tests/publication_model.rs` runs this file under every interleaving.
//!
//! A former view is kept here until nobody else has it, so that it is freed on this core and never on a shard. Looking at the
//! count is enough: once out of the cell a view can only be copied from a copy, so a count of one, ours, stays one; a shard
//! that has read the cell and not yet counted itself is counted by the swap before it returns.

use super::sync::{Arc, Cell};

pub struct Publication<V> {
    cell: Arc<Cell<V>>,
    /// Former views that some shard may still read.
    retired: Vec<Arc<V>>,
}

impl<V> Publication<V> {
    pub fn new(cell: Arc<Cell<V>>) -> Self {
        Self { cell, retired: Vec::new() }
    }

    /// Makes `view` the current one, and frees former ones that nobody reads. Returns how many are left.
    pub fn publish(&mut self, view: Arc<V>) -> usize {
        self.retired.push(self.cell.swap(view));
        self.retired.retain(|view| Arc::strong_count(view) > 1);
        self.retired.len()
    }
}
