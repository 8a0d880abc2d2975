//! Owns the table of a prefill engine's transfers: named KV from the start of its computation until it is pulled, freed
//! or given up. Pure but for its clock argument; never does IO.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use crate::net::signal::Latch;

/// Names of ended transfers that are remembered, so that a late pull is told at once.
const ENDED_MAX: usize = 4096;

/// Transfers so far and now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct TransferCounts {
    /// KV that is computed or being computed and waits for its decode engine.
    pub held: usize,
    pub delivered: u64,
    /// Freed before a pull: by an abort, a closed connection or a decode request that ended early.
    pub freed: u64,
    /// Given up after the hold timeout: nobody pulled and nobody freed it.
    pub stranded: u64,
    /// A name that was already in use.
    pub collisions: u64,
    /// Pulls for a name, engine or rank that is not here.
    pub misdirected: u64,
    /// Requests of a decode engine that wait for KV.
    pub decode_waiting: usize,
}

impl TransferCounts {
    /// Of two engines together.
    pub fn plus(self, other: TransferCounts) -> TransferCounts {
        TransferCounts {
            held: self.held + other.held,
            delivered: self.delivered + other.delivered,
            freed: self.freed + other.freed,
            stranded: self.stranded + other.stranded,
            collisions: self.collisions + other.collisions,
            misdirected: self.misdirected + other.misdirected,
            decode_waiting: self.decode_waiting + other.decode_waiting,
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Stage {
    /// A pull came before the prefill request.
    Expected,
    Computing,
    Ready,
}

struct Entry {
    stage: Stage,
    rank: u32,
    abort_name: Option<String>,
    since: Instant,
    changed: Latch,
}

/// What a pull finds.
pub(super) enum Pulled {
    Delivered,
    Ended,
    /// The wrong rank.
    Misdirected,
    /// Look again when this opens.
    Wait(Latch),
}

#[derive(Default)]
pub(super) struct Transfers {
    entries: HashMap<String, Entry>,
    /// Whether a prefill request had begun under the name: one that was given up before is no reuse when it comes.
    ended: HashMap<String, bool>,
    ended_order: VecDeque<String>,
    counts: TransferCounts,
}

impl Transfers {
    pub fn counts(&self) -> TransferCounts {
        let held = self.entries.values().filter(|entry| entry.stage != Stage::Expected).count();
        TransferCounts { held, ..self.counts }
    }

    /// A prefill request starts computing under `name`. False when the name is or was in use.
    pub fn begin(&mut self, name: &str, rank: u32, abort_name: Option<String>, now: Instant) -> bool {
        let expected = self.entries.get(name).is_some_and(|entry| entry.stage == Stage::Expected);
        let ended = self.ended.get(name).copied();
        if ended.is_some() || (!expected && self.entries.contains_key(name)) {
            self.counts.collisions += u64::from(ended != Some(false));
            return false;
        }
        let waiting = self.entries.remove(name);
        let entry = Entry { stage: Stage::Computing, rank, abort_name, since: now, changed: Latch::default() };
        self.entries.insert(name.to_string(), entry);
        wake(waiting);
        true
    }

    /// The KV is complete.
    pub fn ready(&mut self, name: &str, now: Instant) {
        if let Some(entry) = self.entries.get_mut(name) {
            (entry.stage, entry.since) = (Stage::Ready, now);
            std::mem::take(&mut entry.changed).open();
        }
    }

    /// Opens at the next change of `name`; nothing when it has ended.
    pub fn watch(&self, name: &str) -> Option<Latch> {
        self.entries.get(name).map(|entry| entry.changed.clone())
    }

    /// Takes the KV if it is there. `rank` is the one that the decode request names.
    pub fn pull(&mut self, name: &str, rank: Option<u32>, now: Instant) -> Pulled {
        if self.ended.contains_key(name) {
            return Pulled::Ended;
        }
        let expected =
            || Entry { stage: Stage::Expected, rank: 0, abort_name: None, since: now, changed: Latch::default() };
        let entry = self.entries.entry(name.to_string()).or_insert_with(expected);
        match entry.stage {
            Stage::Expected => Pulled::Wait(entry.changed.clone()),
            _ if rank.is_some_and(|rank| rank != entry.rank) => {
                self.counts.misdirected += 1;
                Pulled::Misdirected
            }
            Stage::Computing => Pulled::Wait(entry.changed.clone()),
            Stage::Ready => {
                self.counts.delivered += 1;
                self.end(name);
                Pulled::Delivered
            }
        }
    }

    /// A pull was given up before the prefill request came.
    pub fn forget_expected(&mut self, name: &str) {
        if self.entries.get(name).is_some_and(|entry| entry.stage == Stage::Expected) {
            self.entries.remove(name);
        }
    }

    pub fn misdirected(&mut self) {
        self.counts.misdirected += 1;
    }

    /// Frees KV that will not be pulled. Returns whether there was any.
    pub fn free(&mut self, name: &str) -> bool {
        let held = self.entries.get(name).is_some_and(|entry| entry.stage != Stage::Expected);
        if held {
            self.counts.freed += 1;
        }
        self.end(name);
        held
    }

    pub fn abort_named(&mut self, matches: &impl Fn(&str) -> bool) -> usize {
        let named = |entry: &Entry| entry.abort_name.as_deref().is_some_and(matches);
        let hit: Vec<String> = self.entries.iter().filter(|(_, it)| named(it)).map(|(name, _)| name.clone()).collect();
        hit.iter().filter(|name| self.free(name)).count()
    }

    /// Gives up what is older than `timeout`.
    pub fn expire(&mut self, timeout: Duration, now: Instant) {
        let old = |entry: &Entry| now.duration_since(entry.since) > timeout && entry.stage != Stage::Computing;
        let hit: Vec<String> = self.entries.iter().filter(|(_, it)| old(it)).map(|(name, _)| name.clone()).collect();
        for name in hit {
            let held = self.entries.get(&name).is_some_and(|entry| entry.stage == Stage::Ready);
            self.counts.stranded += u64::from(held);
            self.end(&name);
        }
    }

    fn end(&mut self, name: &str) {
        let entry = self.entries.remove(name);
        let has_begun = entry.as_ref().is_some_and(|entry| entry.stage != Stage::Expected);
        wake(entry);
        if !self.ended.contains_key(name) {
            self.ended.insert(name.to_string(), has_begun);
            self.ended_order.push_back(name.to_string());
        }
        if self.ended_order.len() > ENDED_MAX
            && let Some(oldest) = self.ended_order.pop_front()
        {
            self.ended.remove(&oldest);
        }
    }
}

fn wake(entry: Option<Entry>) {
    if let Some(entry) = entry {
        entry.changed.open();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kv_is_held_until_it_is_pulled_or_freed() {
        let now = Instant::now();
        let mut transfers = Transfers::default();
        let Pulled::Wait(early) = transfers.pull("a", Some(1), now) else { panic!("nothing is there yet") };
        assert_eq!(transfers.counts().held, 0);
        assert!(transfers.begin("a", 1, Some("rid".into()), now));
        assert!(early.is_open());
        assert!(!transfers.begin("a", 1, None, now), "a name is used once");
        assert!(matches!(transfers.pull("a", Some(1), now), Pulled::Wait(_)));
        assert!(matches!(transfers.pull("a", Some(0), now), Pulled::Misdirected));
        transfers.ready("a", now);
        assert_eq!(transfers.counts().held, 1);
        assert!(matches!(transfers.pull("a", Some(1), now), Pulled::Delivered));
        assert!(matches!(transfers.pull("a", None, now), Pulled::Ended));
        assert!(!transfers.begin("a", 1, None, now), "nor ever again");

        assert!(transfers.begin("b", 0, Some("rid-b".into()), now));
        let watch = transfers.watch("b").expect("it is there");
        assert_eq!(transfers.abort_named(&|name: &str| name == "rid-b"), 1);
        assert!(watch.is_open());

        // Its decode request left before the prefill request came: refused, and no collision.
        assert!(!transfers.free("early"));
        assert!(!transfers.begin("early", 0, None, now));

        assert!(transfers.begin("c", 0, None, now));
        transfers.ready("c", now);
        transfers.expire(Duration::from_secs(1), now + Duration::from_secs(2));
        let expected =
            TransferCounts { delivered: 1, freed: 1, stranded: 1, collisions: 2, misdirected: 1, ..Default::default() };
        assert_eq!(transfers.counts(), expected);
    }
}
