//! Every interleaving of a publication with its readers, by loom, on the router's own sources for shared hashes and for the
//! published cell, compiled against loom's atomics. Included rather than linked, as in `tests/demand_model.rs`.
#![allow(clippy::unwrap_used)]

#[allow(dead_code)]
#[path = "../src/index/hashes.rs"]
mod hashes;
#[allow(dead_code)]
#[path = "../src/ingest/publication.rs"]
mod publication;

mod hash {
    pub use infera_router::hash::BlockHash;
}

/// What both sources are built from, instrumented. Counts of shared slices are the standard library's: not what is modelled.
mod sync {
    pub use loom::sync::Arc;
    pub use loom::sync::atomic::{AtomicU64, Ordering};

    /// A cell that keeps what the router's one promises: `swap` releases and acquires, `load` acquires and counts its
    /// reader before `swap` returns.
    pub struct Cell<V>(loom::sync::Mutex<Arc<V>>);

    impl<V> Cell<V> {
        pub fn new(view: V) -> Self {
            Self(loom::sync::Mutex::new(Arc::new(view)))
        }

        pub fn swap(&self, view: Arc<V>) -> Arc<V> {
            std::mem::replace(&mut *self.0.lock().unwrap(), view)
        }

        pub fn load_full(&self) -> Arc<V> {
            self.0.lock().unwrap().clone()
        }
    }
}

use hash::BlockHash;
use hashes::Hashes;
use loom::sync::Arc;
use loom::sync::atomic::AtomicUsize;
use loom::thread;
use publication::Publication;
use sync::{Cell, Ordering};

const BLOCKS: [u64; 3] = [11, 12, 13];

/// A strand grows in place while a reader walks what it has a length for. `store` and `load` are the orders of the cell
/// that carries the length.
fn grow(store: Ordering, load: Ordering) {
    loom::model(move || {
        let hashes = Hashes::with_room(BLOCKS.len(), None, 0);
        let length = std::sync::Arc::new(AtomicUsize::new(0));
        let readers: Vec<_> = (0..2)
            .map(|_| {
                let (hashes, length) = (hashes.clone(), length.clone());
                thread::spawn(move || {
                    let length = length.load(load);
                    for (at, block) in BLOCKS[..length].iter().enumerate() {
                        assert_eq!(hashes.get(at), BlockHash(*block), "of {length}");
                    }
                })
            })
            .collect();
        hashes.set(0, BlockHash(BLOCKS[0]));
        length.store(1, store);
        hashes.set(1, BlockHash(BLOCKS[1]));
        hashes.set(2, BlockHash(BLOCKS[2]));
        length.store(3, store);
        readers.into_iter().for_each(|reader| reader.join().unwrap());
    });
}

#[test]
fn a_length_shows_every_hash_before_it() {
    grow(Ordering::Release, Ordering::Acquire);
}

/// The model sees what it is there for: a cell that does not order lets a reader see a hash that is not there yet.
#[test]
#[should_panic(expected = "of ")]
fn a_cell_that_does_not_order_would_not_do() {
    grow(Ordering::Relaxed, Ordering::Relaxed);
}

/// One published state: a strand as far as it goes, and which blocks it is to spell.
struct State {
    hashes: Hashes,
    expected: Vec<u64>,
    core: thread::ThreadId,
    freed: std::sync::Arc<std::sync::atomic::AtomicUsize>,
}

impl State {
    fn check(&self) {
        for (at, block) in self.expected.iter().enumerate() {
            assert_eq!(self.hashes.get(at), BlockHash(*block));
        }
    }
}

impl Drop for State {
    fn drop(&mut self) {
        assert_eq!(thread::current().id(), self.core, "freed on a shard");
        self.freed.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    }
}

/// The core publishes three states, of which the last has other blocks in the place of the second's, while two shards read
/// and let go. Every reader sees one state as it was published; the core frees each state, and each once.
#[test]
fn states_are_whole_and_are_freed_by_the_core() {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(|| {
        let core = thread::current().id();
        let freed = std::sync::Arc::default();
        let state = |hashes: &Hashes, expected: &[u64]| State {
            hashes: hashes.clone(),
            expected: expected.to_vec(),
            core,
            freed: std::sync::Arc::clone(&freed),
        };
        let hashes = Hashes::with_room(2, None, 0);
        hashes.set(0, BlockHash(11));
        let cell = Arc::new(Cell::new(state(&hashes, &[11])));
        let readers: Vec<_> = (0..2)
            .map(|_| {
                let cell = cell.clone();
                thread::spawn(move || cell.load_full().check())
            })
            .collect();
        let mut publication = Publication::new(cell.clone());
        hashes.set(1, BlockHash(12));
        publication.publish(Arc::new(state(&hashes, &[11, 12])));
        // What was published is not changed in place: the first block is kept, the second is another one.
        let copy = Hashes::with_room(2, Some(&hashes), 1);
        copy.set(1, BlockHash(21));
        publication.publish(Arc::new(state(&copy, &[11, 21])));
        readers.into_iter().for_each(|reader| reader.join().unwrap());
        assert_eq!(publication.publish(Arc::new(state(&copy, &[11]))), 0, "nobody reads any more");
        drop((publication, cell));
        assert_eq!(freed.load(std::sync::atomic::Ordering::Relaxed), 4);
    });
}
