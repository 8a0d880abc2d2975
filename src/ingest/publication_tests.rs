//! The publication over its real cell and real threads; apart from its source, which the model of every interleaving includes.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::publication::Publication;
use super::sync::{Arc, Cell};

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
