//! All targets' checks, on the ingest core: at most one open per target, the next one wanted only after a pause. Costs
//! one look at a flag for each store while no check is open. Never does IO but log lines.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use crossbeam::channel::Sender;

use super::check::{Check, Finding, Stored};
use super::explain::Divergence;
use super::standing::{News, Standing};
use crate::fleet::{Parity, TargetId, TargetParity};
use crate::hash::BlockHash;
use crate::index::RankStatus;
use crate::index::view::Number;
use crate::limits::{DIVERGED_MODELS_MAX, PARITY_INTERVAL_CONFIRMED, PARITY_INTERVAL_IN_DOUBT};
use crate::load::{Expectation, Ledger};

/// Findings since the start. Written by the ingest core, read by the metrics page.
#[derive(Debug, Default)]
pub struct ParityCounts {
    /// In the order of [`Finding::NAMES`].
    pub findings: [Number; Finding::COUNT],
    /// Times that a target was found to have diverged, by model; outlives the worker.
    diverged: Mutex<BTreeMap<String, u64>>,
}

impl ParityCounts {
    pub fn diverged_by_model(&self) -> BTreeMap<String, u64> {
        self.diverged.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn count_diverged(&self, model: &str) {
        let mut diverged = self.diverged.lock().unwrap_or_else(PoisonError::into_inner);
        let has_place = diverged.len() < DIVERGED_MODELS_MAX || diverged.contains_key(model);
        *diverged.entry(if has_place { model } else { "other" }.to_owned()).or_default() += 1;
    }
}

/// One target that can be watched.
#[derive(Debug)]
struct Watch {
    target: TargetId,
    /// All ranks of its worker, itself included.
    worker_slots: Arc<[usize]>,
    status: Arc<RankStatus>,
    cell: Arc<TargetParity>,
    standing: Standing,
    open: Option<(Check, Box<Expectation>)>,
}

/// A target as the core admits it.
#[derive(Debug)]
pub struct Admission {
    pub slot: usize,
    pub target: TargetId,
    /// Slots of all ranks of its worker.
    pub worker_slots: Arc<[usize]>,
    pub status: Arc<RankStatus>,
    pub cell: Arc<TargetParity>,
}

#[derive(Debug, Default)]
pub struct Watches {
    slots: Vec<Option<Watch>>,
    /// Open checks, by target.
    open: HashMap<TargetId, usize>,
    /// Slots whose check has heard something since the last turn; the others' findings only wait for their time.
    touched: Vec<usize>,
    /// No finding of an untouched check is due before.
    next_due_ns: u64,
    /// Targets between two checks, and when the next one is due.
    resting: Vec<(u64, usize, TargetId)>,
    next_rest_ns: u64,
    counts: Arc<ParityCounts>,
    explanations: Option<Sender<Divergence>>,
}

impl Watches {
    /// `explanations`: who says what a divergence was, if anybody listens.
    pub fn new(counts: Arc<ParityCounts>, explanations: Option<Sender<Divergence>>) -> Self {
        Self { counts, explanations, ..Self::default() }
    }

    pub fn admit(&mut self, admission: Admission) {
        let Admission { slot, target, worker_slots, status, cell } = admission;
        self.leave(slot);
        if self.slots.len() <= slot {
            self.slots.resize_with(slot + 1, || None);
        }
        cell.want_check();
        self.slots[slot] =
            Some(Watch { target, worker_slots, status, cell, standing: Standing::default(), open: None });
    }

    pub fn leave(&mut self, slot: usize) {
        if let Some(watch) = self.slots.get_mut(slot).and_then(Option::take) {
            self.open.remove(&watch.target);
        }
    }

    /// Whether stores of this slot are of interest now.
    pub fn is_watched(&self, slot: usize) -> bool {
        !self.open.is_empty()
            && self.watch(slot).is_some_and(|watch| {
                let is_open = |slot: &usize| self.watch(*slot).is_some_and(|watch| watch.open.is_some());
                watch.worker_slots.iter().any(is_open)
            })
    }

    /// A request is about to be booked. `held`: leading blocks that its target holds already.
    pub fn expect(&mut self, mut expectation: Box<Expectation>, held: usize, now_ns: u64) {
        let slot = expectation.slot.0 as usize;
        let Some(watch) = self.slots.get_mut(slot).and_then(Option::as_mut) else { return };
        // Late, from before the slot changed hands: the present holder has its own first check.
        if watch.target != expectation.target || watch.open.is_some() {
            return;
        }
        // Nobody to hear it from; an endpoint that becomes known is a new admission.
        if watch.status.endpoint.is_none() {
            return;
        }
        let is_plain = watch.status.is_connected() && !super::is_set_apart(&expectation.body);
        if self.explanations.is_none() {
            // Nobody will render it again, and the answer may take minutes.
            expectation.body.clear();
        }
        let check = Check::new(expectation.blocks.clone(), expectation.block_size as usize, held, now_ns);
        match check.filter(|_| is_plain) {
            Some(check) => {
                self.next_due_ns =
                    if self.open.is_empty() { check.due_ns() } else { self.next_due_ns.min(check.due_ns()) };
                self.open.insert(watch.target, slot);
                watch.open = Some((check, expectation));
            }
            None => self.rest(slot, now_ns),
        }
    }

    pub fn on_store(&mut self, slot: usize, stored: &Stored<'_>, ledger: &Ledger) {
        let Some(watch) = self.watch(slot) else { return };
        let worker_slots = watch.worker_slots.clone();
        let targets: Vec<TargetId> =
            worker_slots.iter().filter_map(|slot| self.watch(*slot).map(|watch| watch.target)).collect();
        let is_accounted = |block: BlockHash| targets.iter().any(|target| ledger.is_booked(*target, block));
        for each in worker_slots.iter().copied() {
            let watch = self.slots.get_mut(each).and_then(Option::as_mut);
            let Some((check, _)) = watch.and_then(|watch| watch.open.as_mut()) else { continue };
            if each == slot {
                check.on_store(stored, is_accounted);
                self.touched.push(each);
            } else {
                check.on_store_elsewhere(stored);
            }
        }
    }

    /// The slot has stored blocks under a parent that nobody knows.
    pub fn on_unplaced(&mut self, slot: usize) {
        let watch = self.slots.get_mut(slot).and_then(Option::as_mut);
        if let Some((check, _)) = watch.and_then(|watch| watch.open.as_mut()) {
            check.on_unplaced();
        }
    }

    /// Events of the slot were lost.
    pub fn on_disturbance(&mut self, slot: usize) {
        let watch = self.slots.get_mut(slot).and_then(Option::as_mut);
        if let Some((check, _)) = watch.and_then(|watch| watch.open.as_mut()) {
            check.on_disturbance();
            self.touched.push(slot);
        }
    }

    /// A booking has ended.
    pub fn on_end(&mut self, target: TargetId, blocks: &Arc<[BlockHash]>, is_complete: bool, now_ns: u64) {
        let Some(slot) = self.open.get(&target).copied() else { return };
        let watch = self.slots.get_mut(slot).and_then(Option::as_mut);
        if let Some((check, _)) = watch.and_then(|watch| watch.open.as_mut()).filter(|(check, _)| check.is_of(blocks)) {
            check.on_end(is_complete, now_ns);
            self.touched.push(slot);
        }
    }

    /// Draws findings and wants checks that are due. Returns how long to sleep at most until the next finding may be
    /// due, ms (-1: none is open). A pause that is over wakes nobody: it matters at the next booking only.
    pub fn turn(&mut self, now_ns: u64) -> i64 {
        if !self.resting.is_empty() && now_ns >= self.next_rest_ns {
            self.wake_rested(now_ns);
        }
        let is_due = !self.open.is_empty() && now_ns >= self.next_due_ns;
        let mut heard = std::mem::take(&mut self.touched);
        if is_due {
            heard.clear();
            heard.extend(self.open.values());
            self.next_due_ns = u64::MAX;
        }
        for slot in heard.drain(..) {
            let Some((check, _)) = self.watch(slot).and_then(|watch| watch.open.as_ref()) else { continue };
            let (finding, due_ns) = (check.finding(now_ns), check.due_ns());
            match finding {
                Some(finding) => self.close(slot, finding, now_ns),
                None => self.next_due_ns = self.next_due_ns.min(due_ns),
            }
        }
        self.touched = heard;
        match self.open.is_empty() {
            true => -1,
            false => (self.next_due_ns.saturating_sub(now_ns) / 1_000_000 + 1) as i64,
        }
    }

    fn close(&mut self, slot: usize, finding: Finding, now_ns: u64) {
        let Some(watch) = self.slots.get_mut(slot).and_then(Option::as_mut) else { return };
        let Some((check, expectation)) = watch.open.take() else { return };
        self.open.remove(&watch.target);
        // What is not heard is no evidence.
        let is_heard = watch.status.is_connected() || finding == Finding::Confirmed;
        let finding = if is_heard { finding } else { Finding::Unclear };
        self.counts.findings[finding as usize].add(1);
        let news = watch.standing.take(finding);
        watch.cell.set_watched(watch.standing.verdict());
        watch.cell.set_unseen(watch.standing.unseen());
        let model = &expectation.worker.record.model_name;
        if let Some(news) = news {
            if news == News::Diverged {
                self.counts.count_diverged(model);
            }
            tell(news, &watch.status, model);
        }
        if finding == Finding::Diverged
            && let Some(explanations) = &self.explanations
        {
            // A full queue drops the explanation: others of the same kind are on their way.
            let _ = explanations.try_send(Divergence { expectation, branches: check.into_branches() });
        }
        self.rest(slot, now_ns);
    }

    fn rest(&mut self, slot: usize, now_ns: u64) {
        let Some(watch) = self.watch(slot) else { return };
        let (is_in_doubt, target) = (watch.standing.is_in_doubt(), watch.target);
        let pause = if is_in_doubt { PARITY_INTERVAL_IN_DOUBT } else { PARITY_INTERVAL_CONFIRMED };
        let due_ns = now_ns + pause.as_nanos() as u64;
        self.next_rest_ns = if self.resting.is_empty() { due_ns } else { self.next_rest_ns.min(due_ns) };
        self.resting.push((due_ns, slot, target));
    }

    fn wake_rested(&mut self, now_ns: u64) {
        let slots = &self.slots;
        self.resting.retain(|(due_ns, slot, target)| {
            if *due_ns > now_ns {
                return true;
            }
            // A slot that has changed hands meanwhile is not the one that rested.
            if let Some(watch) = slots.get(*slot).and_then(Option::as_ref).filter(|watch| watch.target == *target) {
                watch.cell.want_check();
            }
            false
        });
        self.next_rest_ns = self.resting.iter().map(|(due_ns, ..)| *due_ns).min().unwrap_or(0);
    }

    fn watch(&self, slot: usize) -> Option<&Watch> {
        self.slots.get(slot)?.as_ref()
    }
}

fn tell(news: News, status: &RankStatus, model: &str) {
    let (worker_id, rank) = (&*status.worker_id, status.rank);
    match news {
        News::Diverged => tracing::warn!(
            worker_id,
            rank,
            model,
            parity = Parity::Diverged.as_str(),
            "the worker renders prompts otherwise than this router: its cache is found only as far as both agree. \
             Compare tokenizer and chat template; RUST_LOG=infera_router::parity=debug shows the first difference"
        ),
        News::Recovered => tracing::info!(worker_id, rank, model, "the worker renders prompts as this router again"),
        News::Unseen => tracing::warn!(
            worker_id,
            rank,
            model,
            "requests are sent for blocks that the worker's KV events never show: is prefix caching on, and are events \
             published for this rank?"
        ),
    }
}

#[cfg(test)]
#[path = "watches_tests.rs"]
mod tests;
