//! The checks of a whole worker, with the ledger beside them and the clock in the test's hands.

use std::sync::atomic::Ordering;

use super::*;
use crate::fleet::fixtures::{fleet, member};
use crate::fleet::{Fleet, Slot, Worker};
use crate::hash::{ROOT, prompt_blocks};
use crate::load::LedgerMessage;
use crate::prompt::Endpoint;
use crate::worker::{Generation, Role};

const SECOND_NS: u64 = 1_000_000_000;
const BLOCK: usize = 4;

/// Ranks of one worker, each in the slot of its number.
struct Bench {
    fleet: Fleet,
    watches: Watches,
    ledger: Ledger,
    counts: Arc<ParityCounts>,
    statuses: Vec<Arc<RankStatus>>,
}

impl Bench {
    fn new(ranks: u32) -> Self {
        let counts = Arc::new(ParityCounts::default());
        let mut bench = Self {
            fleet: fleet(&[member("w", "m", Role::Mixed).ranks(ranks)]),
            watches: Watches::new(counts.clone(), None),
            ledger: Ledger::default(),
            counts,
            statuses: Vec::new(),
        };
        for slot in 0..ranks as usize {
            let endpoint = Some("tcp://127.0.0.1:1".to_owned());
            let status = Arc::new(RankStatus::new("w".into(), Generation(1), slot as u32, Slot(slot as u32), endpoint));
            status.connected.store(true, Ordering::Relaxed);
            bench.statuses.push(status);
            bench.admit(slot);
        }
        bench
    }

    fn admit(&mut self, slot: usize) {
        let target = &self.fleet.targets[slot];
        self.watches.admit(Admission {
            slot,
            target: target.id,
            worker_slots: (0..self.fleet.targets.len()).collect(),
            status: self.statuses[slot].clone(),
            cell: target.parity.clone(),
        });
    }

    fn worker(&self) -> Arc<Worker> {
        self.fleet.workers[0].clone()
    }

    /// A request of these tokens goes to a slot, if the slot wants one watched.
    fn send(&mut self, slot: usize, tokens: &[u32], now_ns: u64) -> Option<Arc<[BlockHash]>> {
        let target = &self.fleet.targets[slot];
        if !target.parity.take_check() {
            return None;
        }
        let blocks: Arc<[BlockHash]> = prompt_blocks(tokens, BLOCK).into();
        let expectation = Expectation {
            target: target.id,
            slot: target.slot,
            worker: self.worker(),
            block_size: BLOCK as u32,
            blocks: blocks.clone(),
            endpoint: Endpoint::Completions,
            body: "{}".into(),
        };
        let started = LedgerMessage::Started { target: target.id, load: target.load.clone(), blocks: blocks.clone() };
        self.watches.expect(Box::new(expectation), 0, now_ns);
        self.ledger.apply(started);
        Some(blocks)
    }

    fn store(&mut self, slot: usize, tokens: &[u32]) {
        let chain = prompt_blocks(tokens, BLOCK);
        let stored = Stored { parent: ROOT, chain: &chain, tokens, block_size: BLOCK };
        if self.watches.is_watched(slot) {
            self.watches.on_store(slot, &stored, &self.ledger);
        }
    }

    fn end(&mut self, slot: usize, blocks: &Arc<[BlockHash]>, now_ns: u64) {
        self.watches.on_end(self.fleet.targets[slot].id, blocks, true, now_ns);
        self.ledger.apply(LedgerMessage::Finished {
            target: self.fleet.targets[slot].id,
            blocks: blocks.clone(),
            is_complete: true,
        });
    }

    fn found(&self) -> Vec<u64> {
        self.counts.findings.iter().map(Number::get).collect()
    }

    fn verdict(&self, slot: usize) -> Parity {
        self.fleet.targets[slot].parity.verdict()
    }
}

fn prompt(seed: u32) -> Vec<u32> {
    (0..12).map(|at| seed * 100 + at).collect()
}

#[test]
fn one_request_of_a_target_is_watched_and_the_next_only_after_a_pause() {
    let mut bench = Bench::new(1);
    let blocks = bench.send(0, &prompt(1), 0).expect("the first is wanted");
    assert_eq!(bench.send(0, &prompt(2), 0), None, "one at a time");
    assert!(bench.watches.turn(1) > 0, "an open check has a deadline");
    bench.store(0, &prompt(1));
    assert_eq!(bench.watches.turn(SECOND_NS), -1);
    assert_eq!((bench.verdict(0), bench.found()), (Parity::Confirmed, vec![1, 0, 0, 0]));
    bench.end(0, &blocks, SECOND_NS);
    bench.watches.turn(10 * SECOND_NS);
    assert_eq!(bench.send(0, &prompt(2), 10 * SECOND_NS), None, "confirmed: not so soon");
    bench.watches.turn(11 * SECOND_NS);
    assert!(bench.send(0, &prompt(2), 11 * SECOND_NS).is_some());
}

#[test]
fn two_divergences_are_believed_and_counted_by_model() {
    let mut bench = Bench::new(1);
    let mut now_ns = 0;
    for round in 1..=2 {
        let blocks = bench.send(0, &prompt(round), now_ns).expect("wanted");
        bench.store(0, &prompt(round + 10));
        bench.end(0, &blocks, now_ns + SECOND_NS);
        assert!(bench.watches.turn(now_ns + SECOND_NS) > 0, "events may trail the answer");
        now_ns += 3 * SECOND_NS;
        bench.watches.turn(now_ns);
        now_ns += SECOND_NS;
        bench.watches.turn(now_ns);
    }
    assert_eq!((bench.verdict(0), bench.found()), (Parity::Diverged, vec![0, 2, 0, 0]));
    assert_eq!(bench.counts.diverged_by_model().into_iter().collect::<Vec<_>>(), [("m".to_owned(), 1)]);
}

#[test]
fn another_request_in_flight_on_any_rank_accounts_for_a_branch() {
    let mut bench = Bench::new(2);
    let blocks = bench.send(0, &prompt(1), 0).expect("wanted");
    bench.send(1, &prompt(2), 0).expect("wanted");
    // The engine balances ranks by itself: each shows the other's prompt.
    bench.store(0, &prompt(2));
    bench.end(0, &blocks, SECOND_NS);
    bench.store(1, &prompt(1));
    bench.watches.turn(4 * SECOND_NS);
    assert_eq!((bench.verdict(0), bench.found()), (Parity::Unknown, vec![0, 0, 0, 1]));
}

#[test]
fn what_cannot_be_heard_is_unclear_and_a_former_holder_of_the_slot_is_nothing() {
    let mut bench = Bench::new(1);
    let blocks = bench.send(0, &prompt(1), 0).expect("wanted");
    bench.store(0, &prompt(2));
    bench.end(0, &blocks, 0);
    bench.statuses[0].connected.store(false, Ordering::Relaxed);
    bench.watches.turn(5 * SECOND_NS);
    assert_eq!((bench.verdict(0), bench.found()), (Parity::Unknown, vec![0, 0, 0, 1]));
    bench.statuses[0].connected.store(true, Ordering::Relaxed);
    // A new holder: the check of the former one is gone with it, and its late messages find nothing.
    bench.watches.turn(9 * SECOND_NS);
    bench.send(0, &prompt(3), 9 * SECOND_NS).expect("wanted again");
    bench.watches.leave(0);
    assert!(!bench.watches.is_watched(0));
    assert_eq!(bench.watches.turn(60 * SECOND_NS), -1);
    bench.admit(0);
    assert!(!bench.watches.is_watched(0));
    assert!(bench.send(0, &prompt(4), 61 * SECOND_NS).is_some(), "a newcomer is watched at once");
}
