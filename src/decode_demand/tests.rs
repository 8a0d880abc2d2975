//! The rules of the mission text one by one, a seeded model, and a stress run of many threads.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use prometheus::Registry;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::*;
use crate::fleet::{DemandCells, TargetDemand};
use crate::worker::Name;

fn demand(mode: Mode, request_weight: f64) -> DecodeDemand {
    let metrics = DemandMetrics::new(&Registry::new()).unwrap();
    DecodeDemand::new(mode, request_weight, metrics).expect("not off")
}

struct Pool(Vec<Arc<TargetDemand>>);

impl Pool {
    fn new(targets: usize) -> Self {
        Self((0..targets).map(|_| Arc::default()).collect())
    }

    /// Candidates with equal loads for a request of `tokens`.
    fn candidates(&self, tokens: u64) -> Vec<DecodeCandidate<'_>> {
        self.0.iter().map(|demand| DecodeCandidate { demand, tokens, load: 0.0 }).collect()
    }

    fn tokens(&self) -> Vec<u64> {
        self.0.iter().map(|cell| cell.tokens()).collect()
    }

    fn requests(&self) -> Vec<u64> {
        self.0.iter().map(|cell| cell.requests()).collect()
    }
}

fn pick(demand: &DecodeDemand, pool: &Pool, tokens: u64) -> (Selection, Reservation) {
    demand.select(&pool.candidates(tokens), 0, Input::Exact, None)
}

#[test]
fn the_lowest_projected_input_wins_and_samples_count() {
    let (demand, pool) = (demand(Mode::On, 0.0), Pool::new(2));
    let held: Vec<_> = [(320, 1), (32, 1), (32, 2)]
        .map(|(tokens, samples)| pick(&demand, &pool, request_tokens(tokens, samples)))
        .into_iter()
        .collect();
    assert_eq!(held.iter().map(|(selection, _)| selection.picked).collect::<Vec<_>>(), [0, 1, 1]);
    assert_eq!(pool.tokens(), [320, 96]);
    drop(held);
    assert_eq!((pool.tokens(), pool.requests()), (vec![0, 0], vec![0, 0]));
}

#[test]
fn ties_go_to_the_lower_original_load_then_to_order() {
    let (demand, pool) = (demand(Mode::On, 0.0), Pool::new(3));
    let check = |loads: [f64; 3], picked| {
        let candidates: Vec<_> =
            pool.0.iter().zip(loads).map(|(demand, load)| DecodeCandidate { demand, tokens: 5, load }).collect();
        assert_eq!(demand.select(&candidates, 0, Input::Exact, None).0.picked, picked, "{loads:?}");
    };
    check([2.0, 1.0, 1.0], 1);
    check([0.0, 0.0, 0.0], 0);
    check([3.0, 2.0, 1.5], 2);
    let _held = pick(&demand, &pool, 1);
    check([0.0, 9.0, 8.0], 2);
}

#[test]
fn shadow_suggests_and_books_on_the_original_pick() {
    let (demand, pool) = (demand(Mode::Shadow, 0.0), Pool::new(2));
    let (first, _held) = pick(&demand, &pool, 100);
    assert_eq!((first.picked, first.suggested, first.agrees()), (0, 0, true));
    let (second, _held_too) = pick(&demand, &pool, 100);
    assert_eq!((second.picked, second.suggested, second.agrees()), (0, 1, false));
    assert_eq!(pool.tokens(), [200, 0]);
}

#[test]
fn off_makes_nothing_that_could_count() {
    let metrics = DemandMetrics::new(&Registry::new()).unwrap();
    assert!(DecodeDemand::new(Mode::Off, 0.0, metrics).is_none());
}

#[test]
fn the_request_weight_evens_requests_against_tokens() {
    // One long request on the first target, three short ones on the second.
    let check = |weight, picked| {
        let (demand, pool) = (demand(Mode::On, weight), Pool::new(2));
        let candidates = pool.candidates(0);
        let long = DecodeCandidate { tokens: 1000, ..candidates[0] };
        let short = DecodeCandidate { tokens: 10, ..candidates[1] };
        let _held = (demand.book(&long), [demand.book(&short), demand.book(&short), demand.book(&short)]);
        assert_eq!(pick(&demand, &pool, 10).0.picked, picked, "W = {weight}");
    };
    check(0.0, 1);
    check(484.0, 1);
    check(485.0, 0); // 1010 + 485 on either side: the tie goes to order
    check(1_000_000.0, 0);
}

#[test]
fn projected_tokens_are_those_of_the_decision() {
    let (demand, pool) = (demand(Mode::On, 0.0), Pool::new(2));
    let _held = pick(&demand, &pool, 100);
    let mut projected = Vec::new();
    let _held_too = demand.select(&pool.candidates(7), 0, Input::Estimated, Some(&mut projected));
    assert_eq!(projected, [107, 7]);
    assert_eq!(pool.tokens(), [100, 7]);
}

#[test]
fn a_reservation_outlives_its_worker_and_never_touches_a_new_entry() {
    let demand = demand(Mode::On, 0.0);
    let mut cells = DemandCells::default();
    let key: Name = "w:1#dp0".into();

    // The worker leaves while a response runs, and comes back: the response still counts.
    let cell = cells.cell(&key);
    let held = demand.book(&DecodeCandidate { demand: &cell, tokens: 50, load: 0.0 });
    drop(cell);
    let returned = cells.cell(&key);
    assert_eq!((returned.tokens(), returned.requests()), (50, 1));
    drop(held);
    assert_eq!((returned.tokens(), returned.requests()), (0, 0));

    // It leaves idle: a new entry is made, and it starts at nothing.
    let old = Arc::downgrade(&returned);
    drop(returned);
    let recreated = cells.cell(&key);
    assert!(old.upgrade().is_none());
    assert_eq!((recreated.tokens(), recreated.requests()), (0, 0));
}

#[test]
fn decisions_are_counted_by_mode_input_and_agreement() {
    let registry = Registry::new();
    let demand = DecodeDemand::new(Mode::Shadow, 0.0, DemandMetrics::new(&registry).unwrap()).unwrap();
    let pool = Pool::new(2);
    let _first = demand.select(&pool.candidates(10), 0, Input::Exact, None);
    let _second = demand.select(&pool.candidates(10), 0, Input::Estimated, None);
    let _booked = demand.book(&pool.candidates(10)[1]);
    let page = prometheus::TextEncoder::new().encode_to_string(&registry.gather()).unwrap();
    for line in [
        r#"infera_router_decode_demand_decisions_total{agrees="true",input="exact",mode="shadow"} 1"#,
        r#"infera_router_decode_demand_decisions_total{agrees="false",input="estimated",mode="shadow"} 1"#,
        r#"infera_router_decode_demand_decisions_total{agrees="true",input="exact",mode="on"} 0"#,
        "infera_router_decode_demand_lock_hold_seconds_count 3",
    ] {
        assert!(page.contains(line), "{line} not in\n{page}");
    }
}

/// Random picks and releases against the rules written down naively.
#[test]
fn agrees_with_a_naive_model() {
    for seed in 0..64u64 {
        let mut random = SmallRng::seed_from_u64(seed);
        let weight = [0.0, 1.0, 250.0][random.random_range(0..3)];
        let mode = if random.random() { Mode::On } else { Mode::Shadow };
        let (demand, pool) = (demand(mode, weight), Pool::new(random.random_range(1..9)));
        let mut held: Vec<(usize, u64, Reservation)> = Vec::new();
        for step in 0..200 {
            if !held.is_empty() && random.random_bool(0.45) {
                drop(held.swap_remove(random.random_range(0..held.len())));
            } else {
                let tokens = random.random_range(0..400);
                let candidates: Vec<_> = pool
                    .0
                    .iter()
                    .map(|demand| DecodeCandidate { demand, tokens, load: f64::from(random.random_range(0..3u32)) })
                    .collect();
                let cost = |place: usize| {
                    let on_it = held.iter().filter(|(at, _, _)| *at == place);
                    let sum: u64 = on_it.clone().map(|(_, tokens, _)| tokens).sum();
                    (sum + tokens) as f64 + weight * on_it.count() as f64
                };
                let expected = (0..candidates.len())
                    .min_by(|a, b| {
                        cost(*a).total_cmp(&cost(*b)).then(candidates[*a].load.total_cmp(&candidates[*b].load))
                    })
                    .unwrap();
                let original = random.random_range(0..candidates.len());
                let (selection, reservation) = demand.select(&candidates, original, Input::Exact, None);
                assert_eq!(selection.suggested, expected, "seed {seed} step {step}");
                assert_eq!(selection.picked, if mode == Mode::On { expected } else { original }, "seed {seed}");
                held.push((selection.picked, tokens, reservation));
            }
            for (place, cell) in pool.0.iter().enumerate() {
                let on_it = held.iter().filter(|(at, _, _)| *at == place);
                let sums = (on_it.clone().map(|(_, tokens, _)| tokens).sum::<u64>(), on_it.count() as u64);
                assert_eq!((cell.tokens(), cell.requests()), sums, "seed {seed} step {step}");
            }
        }
        drop(held);
        assert!(pool.tokens().iter().chain(&pool.requests()).all(|rest| *rest == 0), "seed {seed}");
    }
}

#[test]
fn picks_at_once_never_see_the_same_gap() {
    let (demand, pool) = (demand(Mode::On, 0.0), Pool::new(2));
    let held: Vec<Reservation> = thread::scope(|scope| {
        let threads: Vec<_> = (0..16).map(|_| scope.spawn(|| pick(&demand, &pool, 100).1)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(pool.tokens(), [800, 800]);
    drop(held);
}

/// 64 threads pick and release, some at once (a client that left), some later, some from another thread than
/// the one that picked. A watcher must never see a sum beyond what can be in flight, which a negative number
/// would be; at rest everything is exactly 0.
#[test]
fn many_threads_end_at_exactly_zero() {
    const THREADS: u64 = 64;
    const TOKENS_MAX: u64 = 1000;
    const HELD_MAX: usize = 16;
    let picks = std::env::var("INFERA_STRESS_PICKS").ok().and_then(|picks| picks.parse().ok()).unwrap_or(100_000);
    let (demand, pool) = (demand(Mode::On, 10.0), Pool::new(48));
    let in_flight_max = THREADS * (HELD_MAX as u64 + 1) + THREADS;
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let mut looks = 0u64;
            while !done.load(Ordering::Relaxed) {
                for cell in &pool.0 {
                    assert!(cell.requests() <= in_flight_max, "{} requests", cell.requests());
                    assert!(cell.tokens() <= in_flight_max * TOKENS_MAX, "{} tokens", cell.tokens());
                }
                looks += 1;
                thread::yield_now();
            }
            looks
        });
        let (gift, gifts) = crossbeam::channel::bounded::<Reservation>(THREADS as usize);
        let workers: Vec<_> = (0..THREADS)
            .map(|thread| {
                let (demand, pool, gift, gifts) = (&demand, &pool, gift.clone(), gifts.clone());
                scope.spawn(move || {
                    let mut random = SmallRng::seed_from_u64(thread);
                    let mut held: Vec<Reservation> = Vec::new();
                    for _ in 0..picks {
                        let tokens = random.random_range(0..=TOKENS_MAX);
                        let reservation = pick(demand, pool, tokens).1;
                        match random.random_range(0..4) {
                            0 => drop(reservation),
                            1 => drop((gift.try_send(reservation), gifts.try_recv())),
                            _ => held.push(reservation),
                        }
                        if held.len() > HELD_MAX || (!held.is_empty() && random.random_bool(0.5)) {
                            drop(held.swap_remove(random.random_range(0..held.len())));
                        }
                    }
                })
            })
            .collect();
        for worker in workers {
            worker.join().unwrap();
        }
        drop((gift, gifts));
        done.store(true, Ordering::Relaxed);
        assert!(watcher.join().unwrap() > 0);
    });
    assert!(pool.tokens().iter().chain(&pool.requests()).all(|rest| *rest == 0), "{:?}", pool.tokens());
}
