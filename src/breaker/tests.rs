//! The breaker as a state machine, and under threads.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;

const SETTINGS: BreakerSettings =
    BreakerSettings { failure_threshold: 3, cooldown: Duration::from_secs(5), cooldown_max: Duration::from_secs(60) };

struct Bench {
    health: Arc<WorkerHealth>,
    ailing: Arc<AtomicUsize>,
}

fn worker() -> Bench {
    let ailing: Arc<AtomicUsize> = Arc::default();
    Bench { health: Arc::new(WorkerHealth::new(ailing.clone())), ailing }
}

impl Bench {
    fn fault(&self, now_ms: u64) -> Option<Change> {
        SETTINGS.faulted(&self.health, None, now_ms)
    }

    fn success(&self) {
        assert_eq!(SETTINGS.succeeded(&self.health, None), None);
    }

    fn admission(&self, now_ms: u64) -> Admission {
        SETTINGS.admission(&self.health, now_ms)
    }

    fn claim(&self, now_ms: u64) -> Option<Probe> {
        SETTINGS.claim(&self.health, now_ms)
    }

    fn opened() -> Self {
        let bench = worker();
        for _ in 0..3 {
            bench.fault(0);
        }
        bench
    }

    fn ailing(&self) -> usize {
        self.ailing.load(Ordering::Relaxed)
    }
}

#[test]
fn consecutive_faults_open_and_a_success_between_them_does_not() {
    let bench = worker();
    for round in 0..4 {
        assert_eq!((bench.fault(round), bench.fault(round)), (None, None));
        bench.success();
    }
    assert_eq!((bench.fault(9), bench.fault(9), bench.ailing()), (None, None, 0));
    assert_eq!(bench.fault(10), Some(Change::Opened { for_ms: 5_000 }));
    assert_eq!((bench.admission(10), bench.admission(5_009), bench.admission(5_010)), {
        (Admission::Excluded, Admission::Excluded, Admission::Probe)
    });
    assert_eq!((bench.health.trips(), bench.ailing()), (1, 1));
}

#[test]
fn one_probe_at_a_time_whose_success_closes() {
    let bench = Bench::opened();
    assert!(bench.claim(4_999).is_none(), "too early");
    let probe = bench.claim(5_000).unwrap();
    assert!(bench.claim(5_000).is_none(), "a second probe beside the first");
    assert_eq!(bench.admission(5_001), Admission::Excluded);
    assert_eq!(SETTINGS.succeeded(&bench.health, Some(probe)), Some(Change::Closed));
    assert_eq!((bench.admission(5_002), bench.ailing()), (Admission::Free, 0));
    assert_eq!(bench.health.read(), HealthWord::default());
}

#[test]
fn a_failed_probe_doubles_the_rest_up_to_the_cap() {
    let bench = Bench::opened();
    let mut now_ms = 5_000;
    for expected in [10_000, 20_000, 40_000, 60_000, 60_000] {
        let probe = bench.claim(now_ms).unwrap();
        let change = SETTINGS.faulted(&bench.health, Some(probe), now_ms);
        assert_eq!(change, Some(Change::Opened { for_ms: expected }));
        assert_eq!(bench.admission(now_ms + expected - 1), Admission::Excluded);
        now_ms += expected;
    }
    // Closed and opened again, it begins with the first cool-down.
    SETTINGS.succeeded(&bench.health, bench.claim(now_ms));
    assert_eq!((bench.fault(now_ms), bench.fault(now_ms)), (None, None));
    assert_eq!(bench.fault(now_ms), Some(Change::Opened { for_ms: 5_000 }));
}

#[test]
fn a_probe_without_a_verdict_frees_its_place_and_says_nothing() {
    let bench = Bench::opened();
    drop(bench.claim(5_000).unwrap());
    assert_eq!(bench.admission(5_000), Admission::Probe);
    // Never settled: the place expires, and what comes late from its holder does not count.
    let lost = bench.claim(5_000).unwrap();
    assert!(bench.claim(5_000 + PROBE_MS - 1).is_none());
    let second = bench.claim(5_000 + PROBE_MS).unwrap();
    assert_eq!(SETTINGS.succeeded(&bench.health, Some(lost)), None);
    assert_eq!(SETTINGS.succeeded(&bench.health, Some(second)), Some(Change::Closed));
}

#[test]
fn what_was_sent_before_the_worker_opened_neither_closes_nor_extends() {
    let bench = Bench::opened();
    bench.success();
    assert_eq!(bench.fault(4_000), None);
    assert_eq!((bench.admission(4_999), bench.admission(5_000)), (Admission::Excluded, Admission::Probe));
    assert_eq!(bench.health.trips(), 1);
}

#[test]
fn where_all_are_open_whoever_fails_is_asked_ever_less_and_a_success_closes() {
    let (dead, alive) = (Bench::opened(), Bench::opened());
    let trouble = |bench: &Bench| trouble_of(bench.health.read());
    for _ in 0..5 {
        assert_eq!(trouble(&dead), trouble(&alive));
        SETTINGS.asked_in_need(&dead.health);
        assert!(trouble(&dead) > trouble(&alive), "one at a time goes to each");
        SETTINGS.asked_in_need(&alive.health);
    }
    assert_eq!(dead.fault(0), None, "not opened twice");
    assert_eq!(SETTINGS.succeeded_in_need(&alive.health), Some(Change::Closed));
    assert_eq!((trouble(&alive), alive.admission(1), alive.ailing()), (0, Admission::Free, 0));
    SETTINGS.asked_in_need(&alive.health);
    assert_eq!(SETTINGS.succeeded_in_need(&alive.health), None);
    assert_eq!(alive.health.read(), HealthWord::default(), "a worker that is well is not touched");
    // A probe's verdict counts whatever was asked beside it, and a failed one leaves the worker behind the others.
    let probe = dead.claim(5_000).unwrap();
    SETTINGS.asked_in_need(&dead.health);
    assert_eq!(SETTINGS.faulted(&dead.health, Some(probe), 5_001), Some(Change::Opened { for_ms: 10_000 }));
    assert!(trouble(&dead) > trouble(&Bench::opened()));
}

#[test]
fn a_worker_that_asks_for_time_rests_and_is_not_faulty() {
    let bench = worker();
    bench.fault(0);
    SETTINGS.overloaded(&bench.health, Duration::from_secs(2), 100);
    SETTINGS.overloaded(&bench.health, Duration::from_secs(1), 100);
    assert_eq!((bench.admission(2_099), bench.ailing()), (Admission::Excluded, 1));
    assert_eq!((bench.admission(2_100), bench.ailing()), (Admission::Free, 0));
    assert_eq!(bench.health.trips(), 0);
    // The run of faults goes on where it was.
    bench.fault(2_100);
    assert_eq!(bench.fault(2_100), Some(Change::Opened { for_ms: 5_000 }));
    SETTINGS.overloaded(&worker().health, Duration::MAX, 0);
    let greedy = worker();
    SETTINGS.overloaded(&greedy.health, Duration::MAX, 0);
    assert_eq!((greedy.admission(59_999), greedy.admission(60_000)), (Admission::Excluded, Admission::Free));
}

#[test]
fn threshold_0_is_off_and_a_worker_that_leaves_is_not_counted() {
    let off = BreakerSettings { failure_threshold: 0, ..SETTINGS };
    let bench = worker();
    for _ in 0..100 {
        assert_eq!(off.faulted(&bench.health, None, 0), None);
    }
    assert_eq!(bench.admission(0), Admission::Free);
    // Switched off while a worker is open: it is asked again at once.
    let bench = Bench::opened();
    assert_eq!((bench.admission(0), bench.ailing()), (Admission::Excluded, 1));
    assert_eq!((off.admission(&bench.health, 0), bench.ailing()), (Admission::Free, 0));
    let Bench { health, ailing } = Bench::opened();
    assert_eq!(ailing.load(Ordering::Relaxed), 1);
    drop(health);
    assert_eq!(ailing.load(Ordering::Relaxed), 0);
}

/// Every value survives its packing, and the count of ailing workers comes back whatever threads do.
#[test]
fn threads_that_fault_succeed_and_probe_leave_a_true_count() {
    let bench = worker();
    let seed: u64 = rand::random();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (health, seed) = (bench.health.clone(), seed.wrapping_add(thread));
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(seed);
                for now_ms in 0..20_000 {
                    let probe = match SETTINGS.admission(&health, now_ms) {
                        Admission::Excluded => continue,
                        Admission::Free => None,
                        Admission::Probe => match SETTINGS.claim(&health, now_ms) {
                            Some(probe) => Some(probe),
                            None => continue,
                        },
                    };
                    match random.u8(..8) {
                        0..4 => _ = SETTINGS.faulted(&health, probe, now_ms),
                        4..6 => _ = SETTINGS.succeeded(&health, probe),
                        6 => SETTINGS.overloaded(&health, Duration::from_millis(random.u64(..50)), now_ms),
                        _ => drop(probe),
                    }
                }
            });
        }
    });
    let is_well = bench.health.read().state == HealthState::Well;
    assert_eq!(bench.ailing(), usize::from(!is_well), "seed {seed}");
}
