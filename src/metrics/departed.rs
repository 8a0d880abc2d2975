//! Which series belong to nobody any more. Their last values stay for a while, so that a scrape sees them and a worker that
//! comes back goes on where it was; then they go, and so rollouts do not grow the page. Never counts anything itself.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use crate::fleet::{Fleet, Worker};
use crate::limits::{DEPARTED_SERIES_KEPT, DEPARTED_SERIES_MAX};
use crate::proxy::{Series, TargetFamilies};
use crate::worker::{Name, Role};

/// What is known of the series that shards have made.
#[derive(Debug, Default)]
pub struct DepartedSeries {
    /// With the moment at which their owner was first missed.
    known: HashMap<Series, Option<Instant>>,
}

/// Between two looks.
pub const LOOK_INTERVAL: Duration = Duration::from_secs(5);

impl DepartedSeries {
    /// Notes who is there, and drops the series of those who have not been for long enough.
    pub fn look(&mut self, now: Instant, fleet: &Fleet, families: &TargetFamilies) {
        for series in families.looked_up() {
            self.known.entry(series).or_default();
        }
        if self.known.is_empty() {
            return;
        }
        let owners = Owners::of(fleet);
        let mut missed = Vec::new();
        for (series, since) in &mut self.known {
            *since = if owners.have(series) { None } else { Some(since.unwrap_or(now)) };
            missed.extend(since.map(|since| (since, series.clone())));
        }
        // Those beyond the cap go at once, the longest gone first.
        missed.sort_unstable_by_key(|(since, _)| *since);
        let too_many = missed.len().saturating_sub(DEPARTED_SERIES_MAX);
        let over = missed.partition_point(|(since, _)| now.duration_since(*since) >= DEPARTED_SERIES_KEPT);
        let gone = &missed[..over.max(too_many)];
        if gone.is_empty() {
            return;
        }
        gone.iter().for_each(|(_, series)| drop(self.known.remove(series)));
        families.forget(gone.iter().map(|(_, series)| series));
    }
}

/// Whose series are to stay: also of workers that get no requests now.
struct Owners<'a> {
    workers: HashMap<&'a str, &'a Worker>,
    models: HashSet<(&'a str, Role)>,
}

impl<'a> Owners<'a> {
    fn of(fleet: &'a Fleet) -> Self {
        let workers = || fleet.workers.iter().map(|worker| &**worker);
        Self {
            workers: workers().map(|worker| (&*worker.id, worker)).collect(),
            models: workers().map(|worker| (worker.record.model_name.as_str(), worker.record.disagg_mode)).collect(),
        }
    }

    fn worker(&self, id: &Name) -> Option<&'a Worker> {
        self.workers.get(&**id).copied()
    }

    fn have(&self, series: &Series) -> bool {
        match series {
            Series::Target { role, worker, rank, .. } => self.worker(worker).is_some_and(|worker| {
                let is_ranked = worker.record.is_rank_multiplexed();
                worker.record.disagg_mode == *role
                    && rank.is_some() == is_ranked
                    && rank.is_none_or(|rank| rank < worker.record.rank_count())
            }),
            Series::Worker { router, model, worker } => self.worker(worker).is_some_and(|worker| {
                worker.record.model_name == **model && router.is_of(worker.record.disagg_mode)
            }),
            Series::Model { router, model } => {
                Role::ALL.into_iter().any(|role| router.is_of(role) && self.models.contains(&(&**model, role)))
            }
        }
    }
}
