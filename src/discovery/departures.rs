//! Who may leave at once, and who is kept for a while. A registry that loses its leases makes healthy workers
//! vanish together; believing it would take the service down. Pure: `now` is an argument, probing is done by
//! the registry loop.
//!
//! The rule: a departure acts at once, unless
//! - the source says its departures are suspect (just back from an outage, or a fresh cluster), or
//! - it is one of at least [`MASS_MIN`] departures within [`WINDOW`] that took at least half of the fleet.
//!
//! Such workers are kept until they register again, stop answering, or the grace time is over.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::source::Registration;

/// Fewer departures than this are never a mass disappearance.
const MASS_MIN: usize = 2;
/// Departures this close together are looked at as one: leases are revoked one by one.
const WINDOW: Duration = Duration::from_secs(3);
/// Questions in a row that a kept worker may leave unanswered.
const PROBE_FAILURES_MAX: u32 = 2;

#[derive(Debug)]
struct Departed {
    registration: Arc<Registration>,
    at: Instant,
}

#[derive(Debug)]
struct Held {
    registration: Arc<Registration>,
    until: Instant,
    probe_failures: u32,
}

/// The registered set, and beside it the workers that vanished lately.
#[derive(Debug, Default)]
pub(super) struct Departures {
    present: BTreeMap<String, Arc<Registration>>,
    departed: BTreeMap<String, Departed>,
    held: BTreeMap<String, Held>,
}

impl Departures {
    /// Takes the source's new set over.
    pub fn apply(&mut self, set: Vec<Arc<Registration>>, suspect: bool, grace: Duration, now: Instant) {
        // Of two registrations with one id the newer counts, as in `merge`.
        let mut present: BTreeMap<String, Arc<Registration>> = BTreeMap::new();
        for registration in set {
            let id = registration.record.worker_id.clone();
            match present.get(&id) {
                Some(known) if known.freshness >= registration.freshness => {}
                _ => drop(present.insert(id, registration)),
            }
        }
        self.held.retain(|id, _| !present.contains_key(id));
        self.departed.retain(|id, departed| !present.contains_key(id) && now - departed.at < WINDOW);
        let before = std::mem::replace(&mut self.present, present);
        for (id, registration) in before {
            if !self.present.contains_key(&id) {
                self.departed.insert(id, Departed { registration, at: now });
            }
        }
        let gone = self.departed.len();
        let is_mass = gone >= MASS_MIN && gone >= self.present.len();
        if is_mass || suspect {
            let until = now + grace;
            for (id, departed) in std::mem::take(&mut self.departed) {
                // A suspect source does not revive who left before the trouble began.
                if is_mass || departed.at == now {
                    self.held.insert(id, Held { registration: departed.registration, until, probe_failures: 0 });
                } else {
                    self.departed.insert(id, departed);
                }
            }
        }
    }

    /// Reports whether a kept worker answered. Returns whether that removed it.
    pub fn probed(&mut self, id: &str, alive: bool) -> bool {
        let Some(held) = self.held.get_mut(id) else { return false };
        held.probe_failures = if alive { 0 } else { held.probe_failures + 1 };
        let leaves = held.probe_failures >= PROBE_FAILURES_MAX;
        if leaves {
            self.held.remove(id);
        }
        leaves
    }

    /// Lets those go whose grace time is over. Returns whether there were any.
    pub fn expire(&mut self, now: Instant) -> bool {
        let before = self.held.len();
        self.held.retain(|_, held| held.until > now);
        before != self.held.len()
    }

    /// When [`Departures::expire`] has something to do.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.held.values().map(|held| held.until).min()
    }

    /// Everything that is to be served: registered and kept.
    pub fn serving(&self) -> impl Iterator<Item = &Arc<Registration>> {
        self.present.values().chain(self.held.values().map(|held| &held.registration))
    }

    pub fn held(&self) -> impl ExactSizeIterator<Item = (&String, &Arc<Registration>)> {
        self.held.iter().map(|(id, held)| (id, &held.registration))
    }
}

#[cfg(test)]
mod tests;
