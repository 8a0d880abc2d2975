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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use super::*;

    /// A published state; dropping it says on which thread.
    struct State {
        number: usize,
        numbers: Vec<usize>,
        core: std::thread::ThreadId,
        freed: Arc<AtomicUsize>,
    }

    impl Drop for State {
        fn drop(&mut self) {
            assert_eq!(std::thread::current().id(), self.core, "freed on a shard");
            self.freed.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The real cell under threads, which the model replaces. Also runs under Miri, which sees torn and freed memory.
    #[test]
    fn readers_see_whole_states_and_free_none() {
        let publications = if cfg!(miri) { 60 } else { 20_000 };
        let freed = Arc::new(AtomicUsize::new(0));
        let core = std::thread::current().id();
        let state = |number: usize| State { number, numbers: vec![number; 8], core, freed: freed.clone() };
        let cell = Arc::new(Cell::from_pointee(state(0)));
        let mut publication = Publication::new(cell.clone());
        let (stop, cells) = (AtomicBool::new(false), &cell);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let mut cached = arc_swap::Cache::new(cells.clone());
                    let mut last = 0;
                    while !stop.load(Ordering::Relaxed) {
                        let state = cached.load().clone();
                        assert!(state.number >= last, "never back");
                        last = state.number;
                        assert_eq!(state.numbers, [last; 8]);
                        std::thread::yield_now();
                    }
                });
            }
            for number in 1..=publications {
                publication.publish(Arc::new(state(number)));
            }
            stop.store(true, Ordering::Relaxed);
        });
        assert_eq!(publication.publish(Arc::new(state(publications + 1))), 0, "nobody reads any more");
        drop((publication, cell));
        assert_eq!(freed.load(Ordering::Relaxed), publications + 2);
    }
}
