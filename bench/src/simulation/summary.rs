//! Medians and spreads of runs, and what a rule reached of the best that full knowledge reaches. Never runs anything.

use loadgen::sim::Outcome;
use serde::Serialize;

use super::plan::RunResult;
use crate::statistics::{Spread, spread};

/// One rule over its seeds.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub rule: String,
    pub hit_rate: Spread,
    /// The part of it that host memory alone had.
    pub host_hit_rate: Spread,
    /// Of the oracle's hit rate with the same seed.
    pub of_oracle: Spread,
    pub ttft_mean_s: Spread,
    pub ttft_p50_s: Spread,
    pub ttft_p99_s: Spread,
    pub itl_p99_s: Spread,
    pub goodput: Spread,
    /// Most over mean, by engine that computes prompts: requests, and prompt tokens computed.
    pub imbalance_requests: Spread,
    pub imbalance_prefill: Spread,
    /// Most over mean, by engine that decodes: prompt tokens times the time for which they were decoded on.
    pub imbalance_decode: Spread,
}

/// One workload over one fleet.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    pub name: String,
    /// Highest hit rate that a rule with full knowledge of the caches reached, and that no rule can exceed.
    pub oracle: Spread,
    pub best_for_memory: Spread,
    pub infinite_cache: Spread,
    pub rows: Vec<Row>,
}

fn of<'a>(values: impl Iterator<Item = f64> + 'a) -> Spread {
    spread(values).expect("a rule has runs")
}

/// Sums up runs that are in the order of rules. The oracle is, seed by seed, the best of those runs whose rule
/// `is_oracle`; they have no rows of their own. Panics where none is.
pub fn summarise(name: &str, results: &[RunResult], is_oracle: impl Fn(&str) -> bool) -> Summary {
    let oracle_of = |seed: u64| {
        let known = results.iter().filter(|result| result.seed == seed && is_oracle(&result.rule));
        known.map(|result| result.outcome.hit_rate).max_by(f64::total_cmp).expect("each seed has an oracle")
    };
    let mut rows = Vec::new();
    for runs in results.chunk_by(|left, right| left.rule == right.rule).filter(|runs| !is_oracle(&runs[0].rule)) {
        let figure = |figure: fn(&Outcome) -> f64| of(runs.iter().map(|run| figure(&run.outcome)));
        rows.push(Row {
            rule: runs[0].rule.clone(),
            hit_rate: figure(|it| it.hit_rate),
            host_hit_rate: figure(|it| it.host_hit_rate),
            of_oracle: of(runs.iter().map(|run| run.outcome.hit_rate / oracle_of(run.seed))),
            ttft_mean_s: figure(|it| it.ttft_mean_s),
            ttft_p50_s: figure(|it| it.ttft_p50_s),
            ttft_p99_s: figure(|it| it.ttft_p99_s),
            itl_p99_s: figure(|it| it.itl_p99_s),
            goodput: figure(|it| it.goodput),
            imbalance_requests: figure(|it| it.imbalance_requests),
            imbalance_prefill: figure(|it| it.imbalance_prefill),
            imbalance_decode: figure(|it| it.imbalance_decode),
        });
    }
    let seeds = results.chunk_by(|left, right| left.rule == right.rule).next().unwrap_or_default();
    Summary {
        name: name.to_owned(),
        oracle: of(seeds.iter().map(|run| oracle_of(run.seed))),
        best_for_memory: of(results.iter().filter_map(|run| Some(run.bounds?.memory))),
        infinite_cache: of(results.iter().filter_map(|run| Some(run.bounds?.infinite))),
        rows,
    }
}

impl Summary {
    pub fn row(&self, rule: &str) -> Option<&Row> {
        self.rows.iter().find(|row| row.rule == rule)
    }

    /// A Markdown table: medians over seeds, and the range of what matters most.
    pub fn table(&self) -> String {
        let mut text = format!(
            "### {}\n\nHit rate of the oracle {:.3}; best possible for the fleet's memory {:.3}; one infinite cache {:.3}.\n\n\
             | rule | hit rate | of it host | of the oracle's | TTFT mean | p50 | p99 | ITL p99 | goodput | busiest/mean: requests | prefill | decode |\n\
             |---|---|---|---|---|---|---|---|---|---|---|---|\n",
            self.name, self.oracle.median, self.best_for_memory.median, self.infinite_cache.median
        );
        for row in &self.rows {
            text += &format!(
                "| `{}` | {:.3} | {:.3} | {:.1} % ({:.1} to {:.1}) | {:.3} s | {:.3} s | {:.2} s | {:.0} ms | {:.1} % ({:.1} to {:.1}) | {:.2} | {:.2} | {:.2} |\n",
                row.rule,
                row.hit_rate.median,
                row.host_hit_rate.median,
                row.of_oracle.median * 100.0,
                row.of_oracle.minimum * 100.0,
                row.of_oracle.maximum * 100.0,
                row.ttft_mean_s.median,
                row.ttft_p50_s.median,
                row.ttft_p99_s.median,
                row.itl_p99_s.median * 1e3,
                row.goodput.median * 100.0,
                row.goodput.minimum * 100.0,
                row.goodput.maximum * 100.0,
                row.imbalance_requests.median,
                row.imbalance_prefill.median,
                row.imbalance_decode.median,
            );
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::plan::Bounds;
    use super::*;

    fn result(rule: &str, seed: u64, hit_rate: f64) -> RunResult {
        let outcome = Outcome {
            requests: 1,
            hit_rate,
            host_hit_rate: 0.0,
            ttft_mean_s: 1.0,
            ttft_p50_s: 1.0,
            ttft_p99_s: 1.0,
            itl_p50_s: 0.1,
            itl_p99_s: 0.1,
            goodput: 1.0,
            imbalance_requests: 1.0,
            imbalance_prefill: 1.0,
            imbalance_decode: 1.0,
            seconds: 1.0,
        };
        let bounds = Some(Bounds { infinite: 0.9, memory: 0.8 });
        RunResult { rule: rule.into(), seed, outcome, bounds, took: Duration::ZERO }
    }

    #[test]
    fn the_oracle_is_the_best_that_knows_of_the_same_seed() {
        let results = [
            result("plain", 1, 0.3),
            result("plain", 2, 0.4),
            result("knows", 1, 0.6),
            result("knows", 2, 0.4),
            result("knows,too", 1, 0.5),
            result("knows,too", 2, 0.5),
        ];
        let summary = summarise("s", &results, |rule| rule.starts_with("knows"));
        assert_eq!(summary.rows.len(), 1);
        let row = summary.row("plain").unwrap();
        assert_eq!((row.of_oracle.minimum, row.of_oracle.maximum), (0.5, 0.8));
        assert!((summary.oracle.median - 0.55).abs() < 1e-9);
        assert!(summary.table().contains("| `plain` | 0.350 | 0.000 | 65.0 % (50.0 to 80.0) |"), "{}", summary.table());
    }
}
