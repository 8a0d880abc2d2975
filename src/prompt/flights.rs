//! Encode once: threads that miss the same long piece at the same time wait for the one that came first.
//!
//! Only encoder threads wait here, and only for a piece they would otherwise encode themselves.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Longest wait for another thread's work; after it a thread does the work itself.
const WAIT_MAX: Duration = Duration::from_secs(1);

#[derive(Default)]
struct Flight {
    landed: Mutex<bool>,
    changed: Condvar,
}

/// Pieces that are being encoded now, by key.
#[derive(Default)]
pub struct Flights(Mutex<HashMap<u128, Arc<Flight>>>);

/// The right and duty to do the work of one key; dropping it, by whatever way, wakes those who wait.
pub struct Lead<'f> {
    flights: &'f Flights,
    key: u128,
}

impl Flights {
    /// `Some` for the first to come; `None` after having waited for that one to finish.
    pub fn lead_or_wait(&self, key: u128) -> Option<Lead<'_>> {
        let flight = {
            let mut flights = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            match flights.get(&key) {
                Some(flight) => flight.clone(),
                None => {
                    flights.insert(key, Arc::default());
                    return Some(Lead { flights: self, key });
                }
            }
        };
        let deadline = Instant::now() + WAIT_MAX;
        let mut landed = flight.landed.lock().unwrap_or_else(PoisonError::into_inner);
        while !*landed {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            landed = flight.changed.wait_timeout(landed, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        None
    }
}

impl Drop for Lead<'_> {
    fn drop(&mut self) {
        let flight = self.flights.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.key);
        if let Some(flight) = flight {
            *flight.landed.lock().unwrap_or_else(PoisonError::into_inner) = true;
            flight.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn one_leads_and_the_others_wait_for_it() {
        let flights = Flights::default();
        let done = AtomicUsize::new(0);
        let led = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            let lead = flights.lead_or_wait(1).expect("the first leads");
            for _ in 0..4 {
                scope.spawn(|| match flights.lead_or_wait(1) {
                    None => assert_eq!(done.load(Ordering::SeqCst), 1, "woken before the work was done"),
                    // A thread that was late finds nobody at work and leads by itself.
                    Some(_) => {
                        assert_eq!(done.load(Ordering::SeqCst), 1);
                        led.fetch_add(1, Ordering::SeqCst);
                    }
                });
            }
            assert!(flights.lead_or_wait(2).is_some(), "another key is free");
            done.store(1, Ordering::SeqCst);
            drop(lead);
        });
        assert!(flights.lead_or_wait(1).is_some());
    }

    #[test]
    fn a_leader_that_panics_leaves_nobody_waiting() {
        let flights = Flights::default();
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _lead = flights.lead_or_wait(1);
            panic!("on purpose");
        }));
        assert!(caught.is_err());
        assert!(flights.lead_or_wait(1).is_some());
    }
}
