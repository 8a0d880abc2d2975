//! The sequence rules of one publisher (one worker registration, one rank) as a pure state machine: batches are applied
//! once and in order, a gap is replayed or the rank is reset, a sequence that goes back is a restarted publisher.
//! Never owns a socket or a clock: `now_ns` is an argument (nanoseconds, monotonic), decisions are return values.

use std::collections::VecDeque;

use xxhash_rust::xxh3::xxh3_64;

use crate::limits::{REPLAY_HELD_BATCHES_MAX, REPLAY_HELD_BYTES_MAX};

/// Recent sequence numbers remembered to tell a duplicate or late batch from a restarted publisher.
const RECENT: usize = 64;

/// How long a replay may take without progress. Engines look at their replay socket only every 100 ms.
const REPLAY_PATIENCE_NS: u64 = 2_000_000_000;

/// What to do with a live batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Apply,
    /// Forget the rank's whole view first. `lost` batches never arrived; 0 for a restarted publisher.
    ResetAndApply {
        lost: u64,
    },
    /// Seen before, or overtaken by a reset; drop it.
    Drop,
    /// Kept here; ask the replay socket for `start..end`, then feed its answers to [`Sequence::on_replay`]. With `reset`
    /// (the publisher began anew) forget the rank's whole view first.
    AskReplay {
        reset: bool,
        start: u64,
        end: u64,
    },
    /// Kept here until the replay that runs is over.
    Held,
}

/// What to do with one answer of the replay socket, or with its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplayStep {
    Apply,
    /// The engine no longer had the batches before this one; `lost` of them are gone.
    ResetAndApply {
        lost: u64,
    },
    Ignore,
    /// The publisher is not the one that the view came from: forget the view, and ask for everything from 0 on.
    BeginAnew,
}

/// A batch that was held back while a replay ran.
#[derive(Debug, PartialEq, Eq)]
pub struct HeldBatch {
    pub sequence: u64,
    pub payload: Vec<u8>,
}

/// How a replay ended: the held batches are to be applied in order, after a reset if `lost` is not 0. Then, if there was a
/// further gap behind them, its replay is to be asked for, from the number in `ask` on.
#[derive(Debug, PartialEq, Eq)]
pub struct Recovered {
    pub lost: u64,
    /// The publisher is not the one that the view came from: to be forgotten first, as after a loss.
    pub is_new_life: bool,
    pub held: Vec<HeldBatch>,
    pub ask: Option<u64>,
}

#[derive(Debug)]
struct Recovery {
    /// Next sequence number wanted from the replay.
    next: u64,
    /// The first that is held; absent as long as none is, after a connection was made.
    end: Option<u64>,
    /// Asked for on connection, before `end` was known: the answer may stop short of it without anything being lost.
    was_open: bool,
    /// The batch `next` was heard before, with this digest: the replay has to give the same one, or it is of another life.
    proof: Option<u64>,
    /// In order; may have gaps of their own, which are filled one after the other.
    held: VecDeque<HeldBatch>,
    held_bytes: usize,
    deadline_ns: u64,
}

#[derive(Debug)]
pub struct Sequence {
    can_replay: bool,
    next: Option<u64>,
    /// Newest last: sequence number, and the digest of its payload unless it was lost.
    recent: VecDeque<(u64, Option<u64>)>,
    recovery: Option<Recovery>,
    /// Batches that may still come before the effects of a broken connection: then it may be another publisher that speaks.
    doubtful: usize,
    /// A batch without a number was applied.
    has_unnumbered: bool,
    /// And the connection has broken since.
    is_unproved: bool,
}

impl Sequence {
    /// `can_replay`: whether a replay socket of this publisher is known.
    pub fn new(can_replay: bool) -> Self {
        Self {
            can_replay,
            next: None,
            recent: VecDeque::with_capacity(RECENT),
            recovery: None,
            doubtful: 0,
            has_unnumbered: false,
            is_unproved: false,
        }
    }

    /// Last sequence number that was accepted.
    pub fn last(&self) -> Option<u64> {
        self.next.map(|next| next.wrapping_sub(1))
    }

    /// The publisher's replay socket has become known, or is known no more.
    pub fn set_can_replay(&mut self, can_replay: bool) {
        self.can_replay = can_replay;
    }

    /// The connection to the publisher broke. A restarted one may already be past the number that the former one had reached,
    /// and then its first batch looks like a gap. So the replay of a gap behind a break begins with the last batch that was
    /// heard, as the proof that it is of the same life. Batches of the former connection may still be waiting to be read, so
    /// the doubt outlasts some. What stays possible is that a new life is first heard at exactly the next number.
    pub fn on_disconnect(&mut self) {
        self.doubtful = RECENT;
        self.is_unproved = self.has_unnumbered;
    }

    /// A connection was made again. Tells, once, whether the rank's whole view is to be forgotten: without numbers nothing says
    /// what was lost meanwhile, nor that the publisher is the same.
    pub fn takes_all_back(&mut self) -> bool {
        let is_unproved = std::mem::take(&mut self.is_unproved);
        self.has_unnumbered &= !is_unproved;
        is_unproved
    }

    /// A connection to the publisher was made. Gives the number from which on its replay is to be asked for: what was said
    /// before a late router came, or while the connection was broken, is not waited for until the next live batch. With a view
    /// there already, that begins with the last batch heard, as the proof that the publisher is the same.
    pub fn on_connect(&mut self, now_ns: u64) -> Option<u64> {
        if !self.can_replay || self.recovery.is_some() {
            return None;
        }
        let proof = self.next.and(self.recent.back()).and_then(|(_, digest)| *digest);
        let next = self.next.map_or(0, |next| next - u64::from(proof.is_some()));
        self.doubtful = 0;
        self.recovery = Some(Recovery {
            next,
            end: None,
            was_open: true,
            proof,
            held: VecDeque::new(),
            held_bytes: 0,
            deadline_ns: now_ns + REPLAY_PATIENCE_NS,
        });
        Some(next)
    }

    pub fn is_recovering(&self) -> bool {
        self.recovery.is_some()
    }

    /// When [`Sequence::on_deadline`] wants to be called.
    pub fn deadline_ns(&self) -> Option<u64> {
        self.recovery.as_ref().map(|recovery| recovery.deadline_ns)
    }

    /// A live batch has arrived. Batches without a sequence number are applied as they come.
    pub fn on_live(&mut self, sequence: Option<u64>, payload: &[u8], now_ns: u64) -> Step {
        // The all-ones number ends replays and cannot be a batch's own.
        let Some(sequence) = sequence.filter(|sequence| *sequence != u64::MAX) else {
            self.has_unnumbered = true;
            return Step::Apply;
        };
        let digest = xxh3_64(payload);
        let is_open = self.recovery.as_ref().is_some_and(|recovery| recovery.end.is_none());
        let Some(next) = self.next else {
            if is_open {
                return self.on_live_while_open(sequence, 0, payload, digest);
            }
            // Joined mid-stream: what came before is not known, but nothing known is wrong either.
            self.accept(sequence, digest);
            if sequence > 0 && self.can_replay {
                return self.start_recovery(0, sequence, None, payload, now_ns);
            }
            return Step::Apply;
        };
        if sequence < next {
            return self.on_older(sequence, payload, digest, now_ns);
        }
        if is_open {
            return self.on_live_while_open(sequence, next, payload, digest);
        }
        let lost = sequence - next;
        let doubtful = self.doubtful;
        self.doubtful = if lost > 0 { 0 } else { doubtful.saturating_sub(1) };
        if lost > 0 && doubtful > 0 && self.recovery.is_some() {
            return self.begin_anew(sequence, payload, digest, now_ns);
        }
        let proof = self.recent.back().and_then(|(_, digest)| *digest).filter(|_| doubtful > 0);
        if lost > 0 {
            self.remember_lost(next, sequence);
        }
        self.accept(sequence, digest);
        match (lost, self.recovery.is_some()) {
            (0, false) => Step::Apply,
            // A further gap while the first is being filled has its turn when that is done.
            (_, true) => self.hold(sequence, payload),
            (_, false) if self.can_replay => {
                let start = if proof.is_some() { next - 1 } else { next };
                self.start_recovery(start, sequence, proof, payload, now_ns)
            }
            (_, false) => Step::ResetAndApply { lost },
        }
    }

    /// While the replay that was asked for on connection runs, the view grows by both: `wanted` is the next batch either way.
    fn on_live_while_open(&mut self, sequence: u64, wanted: u64, payload: &[u8], digest: u64) -> Step {
        let Some(recovery) = self.recovery.as_mut() else { return Step::Apply };
        if recovery.proof.is_none() && sequence == wanted {
            recovery.next = sequence + 1;
            self.accept(sequence, digest);
            return Step::Apply;
        }
        recovery.end = Some(sequence);
        if self.next.is_some() {
            self.remember_lost(wanted, sequence);
        }
        self.accept(sequence, digest);
        self.hold(sequence, payload)
    }

    /// A batch that should have come earlier. Over one connection messages keep their order, so an old number
    /// is a repeat (same bytes), a straggler that was already given up, or the first words of a new publisher.
    fn on_older(&mut self, sequence: u64, payload: &[u8], digest: u64, now_ns: u64) -> Step {
        match self.recent.iter().rev().find(|(known, _)| *known == sequence) {
            Some((_, None)) if self.doubtful == 0 => Step::Drop,
            Some((_, Some(known))) if *known == digest => Step::Drop,
            _ => self.begin_anew(sequence, payload, digest, now_ns),
        }
    }

    /// The batch is of a new life of the publisher.
    fn begin_anew(&mut self, sequence: u64, payload: &[u8], digest: u64, now_ns: u64) -> Step {
        self.recent.clear();
        self.recovery = None;
        self.accept(sequence, digest);
        if sequence > 0 && self.can_replay {
            return match self.start_recovery(0, sequence, None, payload, now_ns) {
                Step::AskReplay { start, end, .. } => Step::AskReplay { start, end, reset: true },
                step => step,
            };
        }
        Step::ResetAndApply { lost: 0 }
    }

    fn start_recovery(&mut self, start: u64, end: u64, proof: Option<u64>, payload: &[u8], now_ns: u64) -> Step {
        self.recovery = Some(Recovery {
            next: start,
            end: Some(end),
            was_open: false,
            proof,
            held: VecDeque::new(),
            held_bytes: 0,
            deadline_ns: now_ns + REPLAY_PATIENCE_NS,
        });
        match self.hold(end, payload) {
            Step::Held => Step::AskReplay { start, end, reset: false },
            step => step,
        }
    }

    fn hold(&mut self, sequence: u64, payload: &[u8]) -> Step {
        let Some(recovery) = self.recovery.as_mut() else { return Step::Apply };
        recovery.held_bytes += payload.len();
        if recovery.held.len() >= REPLAY_HELD_BATCHES_MAX || recovery.held_bytes > REPLAY_HELD_BYTES_MAX {
            // All from the first missing one up to this one, whether it came and was held or not.
            let lost = sequence - recovery.next;
            self.recovery = None;
            return Step::ResetAndApply { lost };
        }
        recovery.held.push_back(HeldBatch { sequence, payload: payload.to_vec() });
        Step::Held
    }

    /// A replayed batch has arrived. When it says apply, apply it; then, whatever it said, ask [`Sequence::finished`].
    pub fn on_replay(&mut self, sequence: u64, payload: &[u8], now_ns: u64) -> ReplayStep {
        let Some(recovery) = self.recovery.as_mut() else { return ReplayStep::Ignore };
        if sequence < recovery.next || recovery.end.is_some_and(|end| sequence >= end) || sequence == u64::MAX {
            return ReplayStep::Ignore;
        }
        recovery.deadline_ns = now_ns + REPLAY_PATIENCE_NS;
        let digest = xxh3_64(payload);
        let is_open = recovery.end.is_none();
        let proof = recovery.proof.take();
        let lost = sequence - recovery.next;
        if let Some(known) = proof.filter(|_| lost == 0) {
            if digest == known {
                recovery.next += 1;
                return ReplayStep::Ignore;
            }
            recovery.next = 0;
            if is_open {
                self.next = None;
                self.recent.clear();
            }
            return ReplayStep::BeginAnew;
        }
        recovery.next = sequence + 1;
        if is_open {
            self.accept(sequence, digest);
        }
        match lost {
            0 => ReplayStep::Apply,
            // The proof itself was not lost; that it is no longer there leaves the life unknown.
            _ => ReplayStep::ResetAndApply { lost: lost - u64::from(proof.is_some()) },
        }
    }

    /// Ends the recovery of a gap once every missing batch has come.
    pub fn finished(&mut self, now_ns: u64) -> Option<Recovered> {
        self.recovery.as_ref().filter(|recovery| recovery.end == Some(recovery.next))?;
        self.conclude(true, now_ns)
    }

    /// The engine has said that its replay is over, whether or not everything came.
    pub fn on_replay_end(&mut self, now_ns: u64) -> Option<Recovered> {
        self.conclude(true, now_ns)
    }

    fn conclude(&mut self, is_answered: bool, now_ns: u64) -> Option<Recovered> {
        let recovery = self.recovery.as_mut()?;
        recovery.deadline_ns = now_ns + REPLAY_PATIENCE_NS;
        if is_answered && recovery.was_open && recovery.end.is_some_and(|end| recovery.next < end) {
            // Answered before the gap was there.
            recovery.was_open = false;
            return Some(Recovered { lost: 0, is_new_life: false, held: Vec::new(), ask: Some(recovery.next) });
        }
        // A publisher keeps the batches it said last, so one that does not have the last that was heard did not say it.
        let is_unproved = recovery.proof.take().is_some();
        let is_new_life = is_unproved && is_answered;
        let Some(end) = recovery.end else {
            let mut ask = None;
            if is_new_life {
                (recovery.next, ask) = (0, Some(0));
                self.next = None;
                self.recent.clear();
            } else {
                self.recovery = None;
                self.doubtful = if is_unproved { RECENT } else { 0 };
            }
            return Some(Recovered { lost: 0, is_new_life, held: Vec::new(), ask });
        };
        let lost = end - recovery.next - u64::from(is_unproved);
        let mut held = Vec::new();
        recovery.next = end;
        while recovery.held.front().is_some_and(|batch| batch.sequence == recovery.next)
            && let Some(batch) = recovery.held.pop_front()
        {
            recovery.held_bytes -= batch.payload.len();
            recovery.next += 1;
            held.push(batch);
        }
        let Some(behind) = recovery.held.front() else {
            self.recovery = None;
            return Some(Recovered { lost, is_new_life, held, ask: None });
        };
        recovery.end = Some(behind.sequence);
        Some(Recovered { lost, is_new_life, held, ask: Some(recovery.next) })
    }

    /// Gives a replay up that made no progress until its deadline.
    pub fn on_deadline(&mut self, now_ns: u64) -> Option<Recovered> {
        if self.deadline_ns()? > now_ns {
            return None;
        }
        self.conclude(false, now_ns)
    }

    fn accept(&mut self, sequence: u64, digest: u64) {
        self.next = Some(sequence + 1);
        self.remember(sequence, Some(digest));
    }

    fn remember_lost(&mut self, start: u64, end: u64) {
        for sequence in start.max(end.saturating_sub(RECENT as u64))..end {
            self.remember(sequence, None);
        }
    }

    fn remember(&mut self, sequence: u64, digest: Option<u64>) {
        if self.recent.len() == RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back((sequence, digest));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn live(state: &mut Sequence, sequence: u64, life: &str) -> Step {
        state.on_live(Some(sequence), format!("{life}{sequence}").as_bytes(), 0)
    }

    fn check(can_replay: bool, steps: &[(u64, &str, Step)]) {
        let mut state = Sequence::new(can_replay);
        for (sequence, life, expected) in steps {
            assert_eq!(live(&mut state, *sequence, life), *expected, "sequence {sequence} of life {life} in {steps:?}");
        }
    }

    #[test]
    fn without_replay_a_gap_resets() {
        use Step::{Apply, Drop, ResetAndApply};
        check(
            false,
            &[(0, "a", Apply), (1, "a", Apply), (2, "a", Apply), (5, "a", ResetAndApply { lost: 2 }), (6, "a", Apply)],
        );
        check(false, &[(40, "a", Apply), (41, "a", Apply)]);
        // Restart with other contents, even where the numbers overlap.
        check(false, &[(7, "a", Apply), (8, "a", Apply), (0, "b", ResetAndApply { lost: 0 }), (1, "b", Apply)]);
        check(false, &[(0, "a", Apply), (0, "b", ResetAndApply { lost: 0 }), (1, "b", Apply)]);
        // A repeat and a straggler change nothing.
        check(false, &[(5, "a", Apply), (6, "a", Apply), (6, "a", Drop), (5, "a", Drop), (7, "a", Apply)]);
        check(false, &[(4, "a", Apply), (6, "a", ResetAndApply { lost: 1 }), (5, "a", Drop), (7, "a", Apply)]);
    }

    #[test]
    fn batches_without_numbers_are_applied_as_they_come() {
        let mut state = Sequence::new(true);
        assert_eq!(state.on_live(None, b"x", 0), Step::Apply);
        assert_eq!(state.on_live(None, b"x", 0), Step::Apply);
        assert_eq!(state.last(), None);
        assert!(!state.takes_all_back(), "while the connection holds");
        state.on_disconnect();
        assert_eq!((state.takes_all_back(), state.takes_all_back()), (true, false));
        state.on_disconnect();
        assert!(!state.takes_all_back(), "nothing was told since");
    }

    /// Lost 3 and 4; while the replay runs 6 arrives live. The replay repeats 5, which is held already: each is applied once.
    #[test]
    fn a_replay_fills_exactly_the_gap() {
        let mut state = Sequence::new(true);
        for sequence in 0..3 {
            assert_eq!(live(&mut state, sequence, "a"), Step::Apply);
        }
        assert_eq!(live(&mut state, 5, "a"), Step::AskReplay { start: 3, end: 5, reset: false });
        assert_eq!(live(&mut state, 6, "a"), Step::Held);
        assert_eq!(state.on_replay(3, b"a3", 0), ReplayStep::Apply);
        assert_eq!(state.finished(0), None);
        assert_eq!(state.on_replay(3, b"a3", 0), ReplayStep::Ignore);
        assert_eq!(state.on_replay(4, b"a4", 0), ReplayStep::Apply);
        let recovered = state.finished(0).expect("all there");
        assert_eq!(recovered.lost, 0);
        assert_eq!(recovered.held.iter().map(|held| held.sequence).collect::<Vec<_>>(), [5, 6]);
        assert_eq!(state.on_replay(5, b"a5", 0), ReplayStep::Ignore);
        assert_eq!(state.on_replay_end(0), None);
        assert_eq!(live(&mut state, 7, "a"), Step::Apply);
    }

    #[test]
    fn a_replay_that_starts_too_late_resets_and_one_that_never_comes_is_given_up() {
        let mut state = Sequence::new(true);
        assert_eq!(live(&mut state, 0, "a"), Step::Apply);
        assert_eq!(live(&mut state, 9, "a"), Step::AskReplay { start: 1, end: 9, reset: false });
        assert_eq!(state.on_replay(7, b"a7", 0), ReplayStep::ResetAndApply { lost: 6 });
        assert_eq!(state.on_replay_end(0).map(|recovered| recovered.lost), Some(1));

        let mut state = Sequence::new(true);
        assert_eq!(live(&mut state, 0, "a"), Step::Apply);
        assert_eq!(live(&mut state, 1, "a"), Step::Apply);
        assert_eq!(
            live(&mut state, 1, "b"),
            Step::AskReplay { start: 0, end: 1, reset: true },
            "a new life, joined late"
        );

        let mut state = Sequence::new(true);
        assert_eq!(live(&mut state, 3, "a"), Step::AskReplay { start: 0, end: 3, reset: false });
        assert_eq!(state.on_deadline(REPLAY_PATIENCE_NS - 1), None);
        let given_up = state.on_deadline(REPLAY_PATIENCE_NS).expect("given up");
        assert_eq!((given_up.lost, given_up.held.len()), (3, 1));
        assert_eq!(live(&mut state, 4, "a"), Step::Apply);
    }

    #[test]
    fn the_hold_buffer_is_bounded_and_a_second_gap_ends_the_recovery() {
        let mut state = Sequence::new(true);
        assert_eq!(live(&mut state, 0, "a"), Step::Apply);
        assert_eq!(live(&mut state, 2, "a"), Step::AskReplay { start: 1, end: 2, reset: false });
        let mut sequence = 3;
        let step = loop {
            match live(&mut state, sequence, "a") {
                Step::Held => sequence += 1,
                step => break step,
            }
        };
        assert_eq!(sequence as usize, REPLAY_HELD_BATCHES_MAX + 2);
        // Sequence 1 was asked for; 2 to this one were held, or would have been.
        assert_eq!(step, Step::ResetAndApply { lost: sequence - 1 });
        assert!(!state.is_recovering());
        assert_eq!(live(&mut state, sequence + 1, "a"), Step::Apply);
    }

    /// The engine restarts, and by the time of the reconnection its new life is past the former one's numbers: what looks like
    /// a gap must not be filled into the old view.
    #[test]
    fn a_gap_behind_a_broken_connection_is_a_new_life() {
        let broken = || {
            let mut state = Sequence::new(true);
            assert_eq!(live(&mut state, 0, "a"), Step::Apply);
            assert_eq!(live(&mut state, 1, "a"), Step::Apply);
            state.on_disconnect();
            state
        };
        let mut state = broken();
        assert_eq!(live(&mut state, 4, "b"), Step::AskReplay { start: 1, end: 4, reset: false });
        assert_eq!(state.on_replay(1, b"b1", 0), ReplayStep::BeginAnew);
        for sequence in 0..4 {
            assert_eq!(state.on_replay(sequence, b"b", 0), ReplayStep::Apply);
        }
        assert_eq!(state.finished(0).map(|recovered| (recovered.lost, recovered.held.len())), Some((0, 1)));
        // The same publisher over a new connection: exactly the gap. What was on its way before the break is no proof.
        let mut state = broken();
        assert_eq!(live(&mut state, 2, "a"), Step::Apply);
        assert_eq!(live(&mut state, 4, "a"), Step::AskReplay { start: 2, end: 4, reset: false });
        assert_eq!(state.on_replay(2, b"a2", 0), ReplayStep::Ignore);
        assert_eq!(state.on_replay(3, b"a3", 0), ReplayStep::Apply);
        assert_eq!(state.finished(0).map(|recovered| recovered.lost), Some(0));
        assert_eq!(live(&mut state, 6, "a"), Step::AskReplay { start: 5, end: 6, reset: false }, "no doubt any more");
        // No answer: what is lost is the gap, not the proof.
        let mut state = broken();
        assert_eq!(live(&mut state, 4, "a"), Step::AskReplay { start: 1, end: 4, reset: false });
        assert_eq!(state.on_deadline(REPLAY_PATIENCE_NS).map(|recovered| recovered.lost), Some(2));
        // The engine no longer has the proof: whose the gap is cannot be known.
        let mut state = broken();
        assert_eq!(live(&mut state, 4, "a"), Step::AskReplay { start: 1, end: 4, reset: false });
        assert_eq!(state.on_replay(2, b"a2", 0), ReplayStep::ResetAndApply { lost: 0 });
        // Its first batch has the number of one that was lost.
        let mut state = Sequence::new(false);
        assert_eq!(live(&mut state, 0, "a"), Step::Apply);
        assert_eq!(live(&mut state, 4, "a"), Step::ResetAndApply { lost: 3 });
        state.on_disconnect();
        assert_eq!(live(&mut state, 2, "b"), Step::ResetAndApply { lost: 0 });
    }

    /// A late router asks at once, and the live batches that come meanwhile are applied, held or dropped as they fit.
    #[test]
    fn a_connection_asks_for_what_was_said_before() {
        assert_eq!(Sequence::new(false).on_connect(0), None);
        let mut state = Sequence::new(true);
        assert_eq!(state.on_connect(0), Some(0));
        assert_eq!(state.on_connect(0), None, "runs already");
        assert_eq!(state.on_replay(0, b"a0", 0), ReplayStep::Apply);
        assert_eq!(live(&mut state, 1, "a"), Step::Apply, "the next one, by chance live first");
        assert_eq!(state.on_replay(1, b"a1", 0), ReplayStep::Ignore);
        assert_eq!(live(&mut state, 0, "a"), Step::Drop);
        assert_eq!(live(&mut state, 4, "a"), Step::Held);
        assert_eq!(state.on_replay(2, b"a2", 0), ReplayStep::Apply);
        assert_eq!(state.finished(0), None);
        // The answer was made before 3 was said.
        assert_eq!(state.on_replay_end(0).map(|recovered| (recovered.lost, recovered.ask)), Some((0, Some(3))));
        assert_eq!(state.on_replay(3, b"a3", 0), ReplayStep::Apply);
        let recovered = state.finished(0).expect("all there");
        assert_eq!((recovered.lost, recovered.held[0].sequence, recovered.ask), (0, 4, None));
        // Nothing to tell; nobody answers.
        for is_answered in [true, false] {
            let mut state = Sequence::new(true);
            assert_eq!(state.on_connect(0), Some(0));
            let end = if is_answered { state.on_replay_end(0) } else { state.on_deadline(REPLAY_PATIENCE_NS) };
            assert_eq!(end.map(|recovered| (recovered.lost, recovered.ask)), Some((0, None)));
            assert_eq!(live(&mut state, 0, "a"), Step::Apply);
        }
    }

    /// Over a new connection the last batch heard proves that the publisher is the same. One that does not have it, or other
    /// bytes under its number, is another, also when its first live batch has exactly the next number.
    #[test]
    fn a_new_connection_proves_the_life_or_ends_it() {
        let again = || {
            let mut state = Sequence::new(true);
            assert_eq!((live(&mut state, 0, "a"), live(&mut state, 1, "a")), (Step::Apply, Step::Apply));
            state.on_disconnect();
            assert_eq!(state.on_connect(0), Some(1));
            state
        };
        let mut state = again();
        assert_eq!(state.on_replay(1, b"a1", 0), ReplayStep::Ignore);
        assert_eq!(state.on_replay(2, b"a2", 0), ReplayStep::Apply);
        assert_eq!(state.on_replay_end(0).map(|recovered| (recovered.lost, recovered.is_new_life)), Some((0, false)));
        assert_eq!(live(&mut state, 3, "a"), Step::Apply);

        let mut state = again();
        let ended = state.on_replay_end(0).expect("no proof");
        assert_eq!((ended.is_new_life, ended.ask, state.last()), (true, Some(0), None));
        assert_eq!(state.on_replay(0, b"b0", 0), ReplayStep::Apply);
        assert_eq!(live(&mut state, 1, "b"), Step::Apply);

        let mut state = again();
        assert_eq!(live(&mut state, 2, "b"), Step::Held, "not without the proof");
        assert_eq!(state.on_replay(1, b"b1", 0), ReplayStep::BeginAnew);
        assert_eq!(
            (state.on_replay(0, b"b0", 0), state.on_replay(1, b"b1", 0)),
            (ReplayStep::Apply, ReplayStep::Apply)
        );
        assert_eq!(state.finished(0).map(|recovered| recovered.held.len()), Some(1));

        let mut state = again();
        assert_eq!(live(&mut state, 2, "a"), Step::Held);
        assert_eq!(state.on_replay(1, b"a1", 0), ReplayStep::Ignore);
        assert_eq!(state.finished(0).map(|recovered| (recovered.lost, recovered.held.len())), Some((0, 1)));

        // Nobody answers: the view is kept, and the next gap has to prove itself.
        let mut state = again();
        assert_eq!(
            state.on_deadline(REPLAY_PATIENCE_NS).map(|ended| (ended.lost, ended.is_new_life)),
            Some((0, false))
        );
        assert_eq!(live(&mut state, 4, "a"), Step::AskReplay { start: 1, end: 4, reset: false });
    }

    /// Lost are 1, then 3 and 4 while the first replay runs: each gap is asked for in its turn, and each batch applied once.
    #[test]
    fn gaps_behind_a_gap_are_filled_one_after_the_other() {
        let mut state = Sequence::new(true);
        assert_eq!(live(&mut state, 0, "a"), Step::Apply);
        assert_eq!(live(&mut state, 2, "a"), Step::AskReplay { start: 1, end: 2, reset: false });
        assert_eq!(live(&mut state, 5, "a"), Step::Held);
        assert_eq!(live(&mut state, 6, "a"), Step::Held);
        assert_eq!(state.on_replay(1, b"a1", 0), ReplayStep::Apply);
        let numbers = |recovered: &Recovered| recovered.held.iter().map(|held| held.sequence).collect::<Vec<_>>();
        let first = state.finished(7).expect("the first gap is filled");
        assert_eq!((first.lost, numbers(&first), first.ask), (0, vec![2], Some(3)));
        assert_eq!(state.deadline_ns(), Some(7 + REPLAY_PATIENCE_NS));
        assert_eq!(live(&mut state, 3, "a"), Step::Drop, "a straggler; its replay is on the way");
        assert_eq!(state.on_replay(4, b"a4", 8), ReplayStep::ResetAndApply { lost: 1 }, "3 is no longer there");
        let second = state.finished(9).expect("what there was has come");
        assert_eq!((second.lost, numbers(&second), second.ask), (0, vec![5, 6], None));
        assert_eq!(live(&mut state, 7, "a"), Step::Apply);
    }
}
