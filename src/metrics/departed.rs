//! Which series belong to nobody any more. Their last values stay for a while, so that a scrape sees them and a worker that
//! comes back goes on where it was; then they go, and so rollouts do not grow the page. Never counts anything itself.

use std::collections::{HashMap, HashSet};
use std::time::Instant;

use crate::fleet::{Fleet, Worker};
use crate::limits::{DEPARTED_SERIES_KEPT, DEPARTED_SERIES_MAX};
use crate::proxy::{RouterLabel, Series, TargetFamilies};
use crate::worker::{Name, Role};

/// What is known of the series that shards have made.
#[derive(Debug, Default)]
pub struct DepartedSeries {
    /// With the moment at which their owner was first missed.
    known: HashMap<Series, Option<Instant>>,
}

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
        for (_, series) in gone {
            self.known.remove(series);
        }
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
                worker.record.model_name == **model && RouterLabel::of(worker.record.disagg_mode) == *router
            }),
            Series::Model { router, model } => Role::ALL
                .into_iter()
                .any(|role| RouterLabel::of(role) == *router && self.models.contains(&(&**model, role))),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::fleet::fixtures::{Member, fleet, member};
    use crate::proxy::{RequestMetrics, TargetHandles, TargetTotals};

    struct Bench {
        metrics: RequestMetrics,
        shard: TargetHandles,
        departed: DepartedSeries,
        now: Instant,
    }

    impl Bench {
        fn new() -> Self {
            let metrics = RequestMetrics::new(1).unwrap();
            Self { metrics, shard: TargetHandles::default(), departed: DepartedSeries::default(), now: Instant::now() }
        }

        /// One request of each target. `round` makes the records new ones.
        fn count(&self, members: &[Member], round: u64) {
            let mut fleet = fleet(members);
            for target in &mut fleet.targets {
                target.record_id.0 += round << 32;
                if let Some(rank) = target.rank {
                    target.route_key = format!("{}#dp{rank}", target.worker.id).into();
                }
                let handles = self.shard.of(&self.metrics.targets, target);
                handles.picks.inc();
                handles.ttft.observe(1.0);
                handles.input_tokens.observe(7.0);
            }
        }

        fn look(&mut self, members: &[Member], after: Duration) {
            self.now += after;
            self.departed.look(self.now, &fleet(members), &self.metrics.targets);
        }

        fn series(&self, family: &str) -> Vec<String> {
            let families = self.metrics.registry().gather();
            let metrics = families.iter().filter(|it| it.name() == family).flat_map(|it| it.get_metric());
            metrics.map(|it| it.get_label().iter().map(|label| label.value()).collect::<Vec<_>>().join(" ")).collect()
        }

        fn picks(&self, route_key: &str) -> Option<u64> {
            self.metrics.targets.totals().get(route_key).map(|TargetTotals { picks, .. }| *picks)
        }
    }

    const MOMENT: Duration = Duration::from_secs(5);

    #[test]
    fn series_stay_for_a_while_and_a_worker_that_returns_goes_on() {
        let mut bench = Bench::new();
        let both = || [member("a:1", "m", Role::Mixed), member("b:1", "m", Role::Mixed)];
        let one = || [member("a:1", "m", Role::Mixed)];
        bench.count(&both(), 0);
        bench.look(&both(), MOMENT);
        bench.look(&one(), MOMENT);
        bench.look(&one(), DEPARTED_SERIES_KEPT - MOMENT);
        assert_eq!(bench.picks("b:1"), Some(1), "a scrape sees the last value");
        // Back in time: nothing has happened, and the time begins anew when it leaves again.
        bench.count(&both(), 1);
        bench.look(&both(), MOMENT);
        assert_eq!((bench.picks("a:1"), bench.picks("b:1")), (Some(2), Some(2)));
        bench.look(&one(), DEPARTED_SERIES_KEPT);
        assert_eq!(bench.picks("b:1"), Some(2));
        bench.look(&one(), DEPARTED_SERIES_KEPT);
        assert_eq!((bench.picks("a:1"), bench.picks("b:1")), (Some(2), None));
        assert_eq!(bench.series("infera_time_to_first_token_seconds"), ["m a:1 mixed"]);
        assert_eq!(bench.series("infera_input_sequence_tokens"), ["m mixed"]);
        // Back afterwards it begins anew, and what the shard held from before is not what it counts with.
        bench.count(&both(), 1);
        bench.count(&both(), 1);
        assert_eq!((bench.picks("a:1"), bench.picks("b:1")), (Some(4), Some(2)));
        assert_eq!(bench.shard.len(), 2);
    }

    #[test]
    fn a_changed_role_rank_or_model_leaves_what_it_was_before() {
        let mut bench = Bench::new();
        let before = || [member("a:1", "m", Role::Prefill), member("b:1", "m", Role::Mixed).ranks(2)];
        bench.count(&before(), 0);
        bench.look(&before(), MOMENT);
        let after = || [member("a:1", "m", Role::Decode), member("b:1", "n", Role::Mixed)];
        bench.count(&after(), 1);
        bench.look(&after(), MOMENT);
        let of_ranks = ["decode a:1", "mixed b:1", "mixed b:1#dp0", "mixed b:1#dp1", "prefill a:1"];
        assert_eq!(bench.series("infera_router_picks_total"), of_ranks);
        bench.look(&after(), DEPARTED_SERIES_KEPT);
        assert_eq!(bench.series("infera_router_picks_total"), ["decode a:1", "mixed b:1"]);
        assert_eq!(bench.series("infera_time_to_first_token_seconds"), ["m a:1 disagg", "n b:1 mixed"]);
        assert_eq!(bench.series("infera_input_sequence_tokens"), ["m disagg", "n mixed"]);
    }

    #[test]
    fn beyond_the_cap_the_longest_gone_go_at_once() {
        let mut bench = Bench::new();
        let names: Vec<&'static str> =
            (0..DEPARTED_SERIES_MAX + 100).map(|number| &*Box::leak(format!("w{number}").into_boxed_str())).collect();
        for (round, some) in names.chunks(500).enumerate() {
            let members = || some.iter().map(|name| member(name, "m", Role::Mixed)).collect::<Vec<_>>();
            bench.count(&members(), round as u64);
            bench.look(&members(), Duration::ZERO);
            bench.look(&[], Duration::from_millis(1));
            let kept = bench.series("infera_router_picks_total").len()
                + bench.series("infera_time_to_first_token_seconds").len();
            assert!(kept <= DEPARTED_SERIES_MAX, "{kept} series of workers that left");
        }
        assert_eq!(bench.picks(names[0]), None);
        assert_eq!(bench.picks(names[names.len() - 1]), Some(1));
    }
}
