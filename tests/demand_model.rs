//! Every interleaving of picks and releases that two or three threads can have, by loom, on the router's own
//! ledger source compiled against loom's lock and atomics.
//!
//! The source is included rather than linked: `--cfg loom` for the whole crate would switch parts of its
//! dependencies off, and this way the model runs with every `cargo test`.

#[allow(dead_code)]
#[path = "../src/decode_demand/ledger.rs"]
mod ledger;

/// What the ledger is built from, instrumented.
mod sync {
    use std::time::Duration;

    use loom::sync::atomic::AtomicU64;
    pub(super) use loom::sync::atomic::Ordering;
    pub(super) use loom::sync::{Mutex, MutexGuard};
    pub(super) use std::sync::{Arc, PoisonError, TryLockError};
    pub(super) use std::time::Instant;

    pub struct TargetDemand {
        pub(super) tokens: AtomicU64,
        pub(super) requests: AtomicU64,
    }

    impl TargetDemand {
        pub fn new() -> Arc<Self> {
            Arc::new(Self { tokens: AtomicU64::new(0), requests: AtomicU64::new(0) })
        }

        pub fn tokens(&self) -> u64 {
            self.tokens.load(Ordering::Relaxed)
        }

        pub fn requests(&self) -> u64 {
            self.requests.load(Ordering::Relaxed)
        }
    }

    pub struct LockTimes;

    impl LockTimes {
        pub fn observe(&self, _wait: Duration, _hold: Duration) {}
    }
}

use std::sync::Arc;

use ledger::{DecodeCandidate, Ledger, Reservation};
use sync::TargetDemand;

struct Router {
    ledger: Arc<Ledger>,
    targets: [Arc<TargetDemand>; 2],
}

impl Router {
    fn new() -> Arc<Self> {
        let ledger = Arc::new(Ledger::new(true, 0.0, sync::LockTimes));
        Arc::new(Self { ledger, targets: [TargetDemand::new(), TargetDemand::new()] })
    }

    fn pick(&self, tokens: u64) -> (usize, Reservation) {
        let candidates = self.targets.each_ref().map(|demand| DecodeCandidate { demand, tokens, load: 0.0 });
        let (selection, reservation) = self.ledger.select(&candidates, 0, None);
        (selection.picked, reservation)
    }

    fn held(&self) -> [(u64, u64); 2] {
        self.targets.each_ref().map(|target| (target.tokens(), target.requests()))
    }
}

#[test]
fn two_picks_at_once_take_different_targets() {
    loom::model(|| {
        let router = Router::new();
        let other = router.clone();
        let thread = loom::thread::spawn(move || other.pick(100));
        let (here, held) = router.pick(100);
        let (there, held_too) = thread.join().unwrap();
        assert_ne!(here, there);
        assert_eq!(router.held(), [(100, 1), (100, 1)]);
        drop((held, held_too));
        assert_eq!(router.held(), [(0, 0), (0, 0)]);
    });
}

#[test]
fn a_release_at_any_moment_of_other_picks_leaves_exactly_what_is_held() {
    loom::model(|| {
        let router = Router::new();
        let (_, early) = router.pick(7);
        let other = router.clone();
        let abandoning = loom::thread::spawn(move || drop(other.pick(5)));
        let other = router.clone();
        let releasing = loom::thread::spawn(move || {
            drop(early);
            other.pick(3).1
        });
        abandoning.join().unwrap();
        let held = releasing.join().unwrap();
        let sums = router.held();
        assert_eq!((sums[0].0 + sums[1].0, sums[0].1 + sums[1].1), (3, 1), "{sums:?}");
        drop(held);
        assert_eq!(router.held(), [(0, 0), (0, 0)]);
    });
}
