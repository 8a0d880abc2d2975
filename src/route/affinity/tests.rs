//! Bindings turn by turn, a seeded model, and turns of many threads at once.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::*;
use crate::fleet::RecordId;

const TTL_S: u32 = 100;

struct Fixture {
    table: Arc<SessionTable>,
    now_s: Arc<AtomicU32>,
}

impl Fixture {
    fn new(capacity: usize) -> Self {
        let now_s = Arc::new(AtomicU32::new(1));
        let clock = now_s.clone();
        let clock: ClockSeconds = Arc::new(move || clock.load(Ordering::Relaxed));
        Self { table: Arc::new(SessionTable::new(capacity, TTL_S, clock)), now_s }
    }

    fn pass(&self, seconds: u32) {
        self.now_s.fetch_add(seconds, Ordering::Relaxed);
    }

    /// One turn as the exchange makes it: follow, else choose and claim.
    fn turn(&self, session: u64, choice: u64, candidates: &[u64]) -> Lease {
        let may_serve = |target: RecordId| candidates.contains(&target.0);
        let key = key(session);
        self.table
            .follow(key, may_serve)
            .or_else(|| self.table.claim(key, RecordId(choice), may_serve))
            .expect("there is room")
    }

    fn served(&self, session: u64, choice: u64, candidates: &[u64]) -> u64 {
        let lease = self.turn(session, choice, candidates);
        lease.served();
        lease.target().0
    }
}

fn key(session: u64) -> SessionKey {
    SessionKey::new(7, "m", Role::Mixed, format!("session {session}").as_bytes())
}

#[test]
fn names_are_taken_from_headers_or_not_at_all() {
    let check = |values: &[&[u8]], expected: Result<&[u8], NoSession>| {
        assert_eq!(session_name(values.iter().copied()), expected, "{values:?}");
    };
    check(&[b"s1"], Ok(b"s1"));
    check(&[b" s1 "], Ok(b"s1"));
    check(&[b"s1", b"s1"], Ok(b"s1"));
    check(&[&[b'x'; SESSION_NAME_BYTES_MAX]], Ok(&[b'x'; SESSION_NAME_BYTES_MAX]));
    check(&[], Err(NoSession::Absent));
    check(&[b"  "], Err(NoSession::Empty));
    check(&[b"a", b"b"], Err(NoSession::Ambiguous));
    check(&[&[b'x'; SESSION_NAME_BYTES_MAX + 1]], Err(NoSession::TooLong));
    check(&[&[b'x'; 1 << 16]], Err(NoSession::TooLong));
    check(&["sé".as_bytes()], Err(NoSession::NotAscii));
    check(&[b"a\x1b[31m"], Err(NoSession::NotAscii));
}

/// One shard has read the clock just before a second began, another just after it, and the bucket is full.
#[test]
fn a_session_used_just_now_is_not_taken_for_the_longest_idle() {
    let fixture = Fixture::new(1);
    fixture.pass(9);
    let older = 100..107;
    older.clone().for_each(|session| assert_eq!(fixture.served(session, 1, &[1]), 1));
    fixture.pass(1);
    assert_eq!(fixture.served(200, 1, &[1]), 1);
    fixture.now_s.fetch_sub(1, Ordering::Relaxed);
    assert_eq!(fixture.served(300, 1, &[1]), 1);
    let is_bound = |session| fixture.table.peek(key(session), |_| true).is_some();
    assert!(is_bound(200) && is_bound(300));
    assert_eq!(older.filter(|session| is_bound(*session)).count(), 6, "one of these gave way");
}

#[test]
fn keys_differ_by_model_role_name_and_secret() {
    let keys = [
        SessionKey::new(1, "m", Role::Mixed, b"s"),
        SessionKey::new(1, "m", Role::Decode, b"s"),
        SessionKey::new(1, "m2", Role::Mixed, b"s"),
        SessionKey::new(1, "m", Role::Mixed, b"s2"),
        SessionKey::new(2, "m", Role::Mixed, b"s"),
        SessionKey::new(1, "mm", Role::Mixed, b"ixed\0s"),
    ];
    for (place, key) in keys.iter().enumerate() {
        assert!(!keys[..place].contains(key), "{place}");
    }
    assert_eq!(keys[0], SessionKey::new(1, "m", Role::Mixed, b"s"));
}

#[test]
fn modes_cover_roles() {
    use SessionAffinity::{Both, Off, Prefill};
    for (mode, expected) in [(Off, [false; 3]), (Prefill, [true, false, false]), (Both, [true; 3])] {
        assert_eq!([Role::Prefill, Role::Decode, Role::Mixed].map(|role| mode.covers(role)), expected);
    }
}

/// The first worker refuses turn 1 and the second serves it: turn 2 must not go to the one that never had it.
#[test]
fn b35_a_session_is_bound_by_service_and_not_by_choice() {
    let fixture = Fixture::new(64);
    let refused = fixture.turn(1, 10, &[10, 20]);
    assert_eq!(refused.target().0, 10);
    refused.failed();
    drop(refused);
    assert_eq!(fixture.served(1, 20, &[20]), 20);
    assert_eq!(fixture.turn(1, 10, &[10, 20]).target().0, 20);
    assert_eq!(fixture.table.active(), 1);
}

#[test]
fn a_turn_that_ends_unserved_binds_nothing() {
    let fixture = Fixture::new(64);
    drop(fixture.turn(1, 10, &[10, 20]));
    assert_eq!(fixture.turn(1, 20, &[10, 20]).target().0, 20);
    assert_eq!(fixture.table.active(), 0);
}

#[test]
fn b35_two_turns_at_once_agree_before_either_is_served() {
    let fixture = Fixture::new(64);
    let first = fixture.turn(1, 10, &[10, 20]);
    let second = fixture.turn(1, 20, &[10, 20]);
    assert_eq!(second.target().0, 10);
    // The claim lives as long as one of them may still be served.
    drop(first);
    assert_eq!(fixture.turn(1, 20, &[10, 20]).target().0, 10);
    second.served();
    drop(second);
    assert_eq!(fixture.turn(1, 20, &[10, 20]).target().0, 10);
}

/// Both looked before either claimed, so both come with a choice of their own.
#[test]
fn a_claim_that_comes_second_follows_the_first() {
    let fixture = Fixture::new(64);
    let any = |_: RecordId| true;
    let first = fixture.table.claim(key(1), RecordId(10), any).unwrap();
    let second = fixture.table.claim(key(1), RecordId(20), any).unwrap();
    assert_eq!((first.target().0, second.target().0), (10, 10));
}

#[test]
fn b35_a_session_whose_target_is_gone_moves_once_and_stays() {
    let fixture = Fixture::new(64);
    assert_eq!(fixture.served(1, 10, &[10, 20, 30]), 10);
    assert_eq!(fixture.served(1, 20, &[20, 30]), 20);
    assert_eq!(fixture.served(1, 30, &[20, 30]), 20);
    // The first one is back: no ping-pong.
    assert_eq!(fixture.served(1, 10, &[10, 20, 30]), 20);
    assert_eq!(fixture.table.counts.replaced.load(Ordering::Relaxed), 1);
}

/// Turn 1 runs on w1 for long. Meanwhile the session moved to w2; when turn 1 fails at last, that says nothing
/// about w2.
#[test]
fn a_late_failure_leaves_a_newer_binding_alone() {
    let fixture = Fixture::new(64);
    let old = fixture.turn(1, 10, &[10, 20]);
    old.served();
    assert_eq!(fixture.served(1, 20, &[20]), 20);
    old.failed();
    drop(old);
    assert_eq!(fixture.turn(1, 10, &[10, 20]).target().0, 20);
    // And even if it moved back to the same target since.
    let old = fixture.turn(2, 10, &[10]);
    old.failed();
    assert_eq!(fixture.served(2, 10, &[10]), 10);
    old.failed();
    assert_eq!(fixture.turn(2, 20, &[10, 20]).target().0, 10);
}

#[test]
fn idle_sessions_expire_and_busy_ones_do_not() {
    let fixture = Fixture::new(64);
    fixture.served(1, 10, &[10, 20]);
    fixture.pass(TTL_S - 1);
    assert_eq!(fixture.served(1, 20, &[10, 20]), 10, "in its time, which starts again");
    fixture.pass(TTL_S);
    assert_eq!(fixture.table.active(), 0);
    let long = fixture.turn(1, 20, &[10, 20]);
    assert_eq!(long.target().0, 20);
    long.served();
    fixture.pass(10 * TTL_S);
    assert_eq!(fixture.turn(1, 10, &[10, 20]).target().0, 20);
    drop(long);
    fixture.pass(TTL_S - 1);
    assert_eq!(fixture.table.active(), 1, "counted from the end of the last turn");
}

#[test]
fn b35_a_joining_worker_moves_no_session_and_a_leaving_one_only_its_own() {
    let fixture = Fixture::new(1 << 16);
    let before: Vec<u64> = (0..10_000).map(|session| fixture.served(session, session % 4, &[0, 1, 2, 3])).collect();
    let joined: Vec<u64> = (0..10_000).map(|session| fixture.served(session, 4, &[0, 1, 2, 3, 4])).collect();
    assert_eq!(before, joined);
    for (session, was) in before.iter().enumerate() {
        let now = fixture.served(session as u64, 4, &[0, 1, 2, 4]);
        assert_eq!(now, if *was == 3 { 4 } else { *was });
    }
}

#[test]
fn b35_a_flood_of_names_is_bounded_and_spares_busy_sessions() {
    let fixture = Fixture::new(256);
    let busy = fixture.turn(u64::MAX, 1, &[1]);
    busy.served();
    for session in 0..100_000 {
        fixture.pass(u32::from(session % 1_000 == 0));
        fixture.served(session, 2, &[1, 2]);
    }
    assert!(fixture.table.active() <= 2 * 256, "{}", fixture.table.active());
    assert_eq!(fixture.turn(u64::MAX, 2, &[1, 2]).target().0, 1);
    assert!(fixture.table.counts.evicted.load(Ordering::Relaxed) > 90_000);
    drop(busy);
    assert_eq!(fixture.table.leases(), 0);
    fixture.pass(TTL_S);
    assert_eq!(fixture.table.active(), 0);
}

#[test]
fn a_bucket_whose_sessions_are_all_busy_serves_without_a_binding() {
    let fixture = Fixture::new(1);
    let any = |_: RecordId| true;
    let held: Vec<_> = (0..8).filter_map(|session| fixture.table.claim(key(session), RecordId(1), any)).collect();
    assert_eq!(held.len(), 8);
    assert!(fixture.table.claim(key(9), RecordId(1), any).is_none());
    assert_eq!(fixture.table.counts.unbound.load(Ordering::Relaxed), 1);
    drop(held);
    assert!(fixture.table.claim(key(9), RecordId(1), any).is_some());
}

/// Random turns against the rules written down with a map.
#[test]
fn agrees_with_a_naive_model() {
    #[derive(Clone, Copy, PartialEq, Debug)]
    struct Entry {
        target: u64,
        binding: u32,
        bound: bool,
        used_s: u32,
    }
    for seed in 0..64u64 {
        let mut random = SmallRng::seed_from_u64(seed);
        let fixture = Fixture::new(4096);
        let mut model: HashMap<u64, Entry> = HashMap::new();
        let mut held: Vec<(u64, u32, Lease)> = Vec::new();
        let mut bindings = 0;
        for step in 0..400 {
            let now = fixture.now_s.load(Ordering::Relaxed);
            match random.random_range(0..5) {
                0 => fixture.pass(random.random_range(0..TTL_S)),
                1 | 2 => {
                    let session = random.random_range(0..6);
                    let candidates: Vec<u64> = (1..5).filter(|_| random.random_bool(0.8)).collect();
                    let choice = random.random_range(1..5);
                    let busy = held.iter().any(|(other, ..)| *other == session);
                    let known = model
                        .get(&session)
                        .copied()
                        .filter(|entry| candidates.contains(&entry.target) && (busy || now - entry.used_s < TTL_S));
                    let entry = known.unwrap_or_else(|| {
                        bindings += 1;
                        Entry { target: choice, binding: bindings, bound: false, used_s: now }
                    });
                    model.insert(session, Entry { used_s: now, ..entry });
                    let lease = fixture.turn(session, choice, &candidates);
                    assert_eq!(lease.target().0, entry.target, "seed {seed} step {step}");
                    held.push((session, entry.binding, lease));
                }
                _ if held.is_empty() => {}
                end => {
                    let (session, binding, lease) = held.swap_remove(random.random_range(0..held.len()));
                    let outcome = random.random_range(0..3);
                    let mine = model.get(&session).is_some_and(|entry| entry.binding == binding);
                    match outcome {
                        0 => {
                            lease.served();
                            if let Some(entry) = model.get_mut(&session).filter(|_| mine) {
                                entry.bound = true;
                            }
                        }
                        1 => {
                            lease.failed();
                            if mine {
                                model.remove(&session);
                            }
                        }
                        _ => {}
                    }
                    if end == 4 && outcome == 0 {
                        // Said twice changes nothing.
                        lease.served();
                    }
                    drop(lease);
                    let busy = held.iter().any(|(other, ..)| *other == session);
                    if let Some(entry) = model.get_mut(&session) {
                        entry.used_s = now;
                        if !busy && !entry.bound {
                            model.remove(&session);
                        }
                    }
                }
            }
            assert_eq!(fixture.table.leases(), held.len() as u64, "seed {seed} step {step}");
        }
    }
}

/// Threads take turns of few sessions at once. Turns of one session that overlap must agree as long as nothing
/// fails; each thread records where its turns went while another thread's were running.
#[test]
fn turns_of_many_threads_agree_and_leave_no_lease() {
    const THREADS: u64 = 16;
    let rounds = if cfg!(debug_assertions) { 2_000 } else { 50_000 };
    let fixture = Fixture::new(64);
    let candidates: Vec<u64> = (1..=THREADS).collect();
    let went: Vec<HashMap<u64, u64>> = thread::scope(|scope| {
        let threads: Vec<_> = (1..=THREADS)
            .map(|thread| {
                let (fixture, candidates) = (&fixture, &candidates);
                scope.spawn(move || {
                    let mut random = SmallRng::seed_from_u64(thread);
                    let mut went = HashMap::new();
                    for _ in 0..rounds {
                        let session = random.random_range(0..32u64);
                        let may_serve = |target: RecordId| candidates.contains(&target.0);
                        let lease = fixture
                            .table
                            .follow(key(session), may_serve)
                            .or_else(|| fixture.table.claim(key(session), RecordId(thread), may_serve));
                        let Some(lease) = lease else { continue };
                        lease.served();
                        let first = *went.entry(session).or_insert(lease.target().0);
                        assert_eq!(first, lease.target().0, "a bound session moved");
                    }
                    went
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for session in 0..32u64 {
        let mut targets: Vec<u64> = went.iter().filter_map(|went| went.get(&session).copied()).collect();
        targets.dedup();
        assert_eq!(targets.len(), 1, "session {session} went to {targets:?}");
    }
    assert_eq!(fixture.table.leases(), 0);
}
