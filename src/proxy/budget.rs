//! How much of a shard's traffic may be retries. When many workers fail at once, every request would be sent several
//! times, and what is left of the fleet would fall too: beyond a share of the traffic, failures go to the client.

use std::cell::Cell;

use crate::limits;

/// One retry in the account's unit: sums of many small parts must come out exactly.
const RETRY: u64 = 1_000_000;

/// Retries per second that are always allowed, all shards together: a quiet router must be able to retry at all.
const RESERVE_PER_SECOND: u64 = 10;

/// Seconds of the reserve that a quiet shard saves up.
const RESERVE_SECONDS: u64 = 10;

/// Retries that traffic saves up: a burst of failures after an hour without any is still a burst.
const SAVED_MAX: u64 = 100;

fn share(percent: f64) -> u64 {
    (percent / 100.0 * RETRY as f64).round() as u64
}

/// The attempts of one request that have failed. Those that were refused a connection have cost nothing and nobody: they do not
/// count, up to a limit, so that no request fails beside a worker that would serve it.
#[derive(Clone, Copy, Default)]
pub(super) struct Failures {
    counted: usize,
    refused: usize,
}

impl Failures {
    pub fn add(&mut self, is_refused: bool) {
        match is_refused && self.refused < limits::REFUSED_CONNECTIONS_MAX {
            true => self.refused += 1,
            false => self.counted += 1,
        }
    }

    pub fn any(self) -> bool {
        self.counted + self.refused > 0
    }

    /// Those that have asked something of a worker.
    pub fn counted(self) -> usize {
        self.counted
    }

    /// Whether `--request-max-retries` allows another attempt after one more failure. 0 means one attempt, come what may.
    pub fn allow_another(mut self, is_refused: bool, retries_max: u32) -> bool {
        self.add(is_refused);
        retries_max > 0 && self.counted <= retries_max as usize
    }
}

/// One shard's account; never shared.
pub(super) struct RetryBudget {
    /// What one request pays in.
    share: Cell<u64>,
    reserve_per_ms: u64,
    saved: Cell<u64>,
    reserve: Cell<u64>,
    refilled_ms: Cell<u64>,
}

impl RetryBudget {
    /// `percent` of the traffic of each of `shards` shards.
    pub fn new(percent: f64, shards: usize) -> Self {
        let reserve_per_ms = RESERVE_PER_SECOND * RETRY / 1_000 / shards.max(1) as u64;
        Self {
            share: Cell::new(share(percent)),
            reserve_per_ms,
            saved: Cell::new(0),
            reserve: Cell::new(RESERVE_SECONDS * 1_000 * reserve_per_ms),
            refilled_ms: Cell::new(0),
        }
    }

    /// What is saved stays.
    pub fn set_percent(&self, percent: f64) {
        self.share.set(share(percent));
    }

    /// A request pays in.
    pub fn request(&self) {
        self.saved.set((self.saved.get() + self.share.get()).min(SAVED_MAX * RETRY));
    }

    /// Takes one retry out, if there is one.
    pub fn take(&self, now_ms: u64) -> bool {
        let passed_ms = now_ms.saturating_sub(self.refilled_ms.replace(now_ms));
        let most = (RESERVE_SECONDS * 1_000 * self.reserve_per_ms).max(RETRY);
        self.reserve.set(self.reserve.get().saturating_add(passed_ms.saturating_mul(self.reserve_per_ms)).min(most));
        let account = [&self.saved, &self.reserve].into_iter().find(|account| account.get() >= RETRY);
        account.inspect(|account| account.set(account.get() - RETRY)).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_connections_are_no_retries_up_to_a_limit() {
        let mut failures = Failures::default();
        assert!(failures.allow_another(false, 1) && !failures.allow_another(true, 0));
        (0..limits::REFUSED_CONNECTIONS_MAX).for_each(|_| failures.add(true));
        assert!(failures.allow_another(true, 1) && failures.allow_another(false, 1));
        failures.add(true);
        assert!(!failures.allow_another(true, 1) && !failures.allow_another(false, 1));
        assert_eq!(failures.counted(), 1);
    }

    fn taken(budget: &RetryBudget, wanted: usize, now_ms: u64) -> usize {
        (0..wanted).filter(|_| budget.take(now_ms)).count()
    }

    #[test]
    fn a_share_of_the_traffic_and_a_reserve() {
        let budget = RetryBudget::new(20.0, 1);
        assert_eq!(taken(&budget, 1_000, 0), 100, "what a quiet router has saved");
        for _ in 0..50 {
            budget.request();
        }
        assert_eq!(taken(&budget, 1_000, 0), 10, "a fifth of fifty requests");
        assert_eq!(taken(&budget, 1_000, 1_000), 10, "ten per second");
        assert_eq!(taken(&budget, 1_000, 1_050), 0);
        assert_eq!(taken(&budget, 1_000, 1_100), 1);
        for _ in 0..10_000 {
            budget.request();
        }
        assert_eq!(taken(&budget, 1_000, 1_100), 100, "savings are capped");
    }

    #[test]
    fn shards_share_the_reserve_and_0_percent_leaves_only_that() {
        let budget = RetryBudget::new(0.0, 10);
        assert_eq!(taken(&budget, 100, 0), 10);
        for _ in 0..1_000 {
            budget.request();
        }
        assert_eq!(taken(&budget, 100, 2_000), 2);
    }
}
