//! Results as one table and one JSON document.
//!
//! Owns the schema (documented in `bench/README.md`) and every ratio. Never measures.

use std::fmt::Write as _;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;
use serde::Serialize;

use crate::harness::{Plan, Results};
use crate::idle::Idle;
use crate::load::Measured;
use crate::low_load::{Added, LatencySample, added};
use crate::machine::{Cores, Host};
use crate::rivals::{ROUTER, ROUTER_PAIR, YARDSTICK};
use crate::scenario::{Group, Scenario, Unit};
use crate::statistics::{Spread, percentile, spread};

pub const SCHEMA: &str = "infera-bench/1";

/// One line to standard error; a reader that has left does not end a run.
pub fn progress(line: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}

/// How a tool ends: 0 every goal met, 1 one missed, 2 the run could not be done, and the reason to standard error.
pub fn ending(tool: &str, result: anyhow::Result<bool>) -> ExitCode {
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            progress(&format!("{tool}: {error:#}"));
            ExitCode::from(2)
        }
    }
}

/// Writes a report to the file that `--json` names, if it names one.
pub fn write_json(path: Option<&Path>, report: &impl Serialize) -> anyhow::Result<()> {
    let Some(path) = path else { return Ok(()) };
    let text = serde_json::to_string_pretty(report)?;
    std::fs::write(path, text + "\n").with_context(|| format!("cannot write {}", path.display()))
}

/// One window of one proxy.
#[derive(Clone, Debug, Serialize)]
pub struct Sample {
    pub scenario: &'static str,
    pub proxy: String,
    pub round: usize,
    /// Requests or chunks inside the window.
    pub units: f64,
    pub wall_ns: u64,
    pub cpu_ns: u64,
    pub cpu_ns_per_unit: f64,
    pub latency_p50_ns: u64,
    pub latency_p99_ns: u64,
    pub reconnects: u64,
}

impl Sample {
    pub fn new(scenario: &Scenario, proxy: &str, round: usize, measured: &Measured) -> Sample {
        let units = scenario.units(measured.answers, measured.payload_bytes);
        let cpu_ns = measured.cpu.as_nanos() as u64;
        Sample {
            scenario: scenario.name,
            proxy: proxy.to_owned(),
            round,
            units,
            wall_ns: measured.wall.as_nanos() as u64,
            cpu_ns,
            cpu_ns_per_unit: cpu_ns as f64 / units.max(1.0),
            latency_p50_ns: percentile(&measured.latencies_ns, 50.0),
            latency_p99_ns: percentile(&measured.latencies_ns, 99.0),
            reconnects: measured.reconnects,
        }
    }

    pub fn line(&self) -> String {
        let per_second = self.units / (self.wall_ns as f64 / 1e9);
        format!("{:<20} {:>7.2} us/unit {:>9.0} units/s", self.proxy, self.cpu_ns_per_unit / 1e3, per_second)
    }
}

/// One proxy in one scenario over all rounds.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub scenario: &'static str,
    pub unit: Unit,
    pub proxy: String,
    /// CPU per unit divided by the yardstick's of the same round; `None` without a yardstick.
    pub ratio: Option<Spread>,
    pub cpu_us_per_unit: Spread,
    pub units_per_second: Spread,
    /// Of the proxy's own CPU time.
    pub units_per_cpu_second: Spread,
    /// Median over the rounds; 0 where no answer ended inside the window.
    pub latency_p50_us: f64,
    pub latency_p99_us: f64,
}

/// A limit that the project has set itself.
#[derive(Clone, Debug, Serialize)]
pub struct Goal {
    pub name: String,
    pub value: f64,
    pub limit: f64,
    pub met: bool,
}

#[derive(Serialize)]
pub struct Report {
    pub schema: &'static str,
    pub host: Host,
    pub cores: Cores,
    pub rounds: usize,
    pub window_s: f64,
    pub scenarios: Vec<Scenario>,
    pub rows: Vec<Row>,
    pub idle: Vec<Idle>,
    pub added_latency: Vec<Added>,
    pub goals: Vec<Goal>,
    pub failures: Vec<String>,
    pub samples: Vec<Sample>,
    pub latency_samples: Vec<LatencySample>,
}

impl Report {
    pub fn new(host: Host, cores: Cores, plan: &Plan, results: Results) -> Report {
        let rows = rows(plan, &results.samples);
        let goals = goals(&rows, &results.samples, &results.idle);
        Report {
            schema: SCHEMA,
            host,
            cores,
            rounds: plan.rounds,
            window_s: plan.window.as_secs_f64(),
            scenarios: plan.scenarios.clone(),
            rows,
            idle: results.idle,
            added_latency: added(&results.latency),
            goals,
            failures: results.failures,
            samples: results.samples,
            latency_samples: results.latency,
        }
    }

    /// For people: one line per proxy and scenario, then idle streams, goals, failures.
    pub fn table(&self) -> String {
        let mut text = String::new();
        let _ = writeln!(
            text,
            "{:<16} {:<22} {:>7} {:>13} {:>3}  {:>9} {:>7}  {:>9} {:>9}  {:>9}",
            "scenario", "proxy", "ratio", "(quartiles)", "n", "CPU us", "best", "per CPU s", "per s", "p50 us"
        );
        let mut scenario = "";
        for row in &self.rows {
            if row.scenario != scenario && !scenario.is_empty() {
                text.push('\n');
            }
            scenario = row.scenario;
            let ratio = row.ratio.map_or_else(
                || format!("{:>7} {:>13} {:>3}", "-", "", row.cpu_us_per_unit.samples),
                |ratio| format!("{:>7.2} {:>13} {:>3}", ratio.median, quartiles(&ratio), ratio.samples),
            );
            let cpu = &row.cpu_us_per_unit;
            let latency = Some(row.latency_p50_us).filter(|micros| *micros > 0.0);
            let latency = latency.map_or_else(|| "-".to_owned(), |micros| format!("{micros:.1}"));
            let _ = writeln!(
                text,
                "{:<16} {:<22} {ratio}  {:>9.2} {:>7.2}  {:>9.0} {:>9.0}  {latency:>9}",
                row.scenario,
                row.proxy,
                cpu.median,
                cpu.minimum,
                row.units_per_cpu_second.median,
                row.units_per_second.median
            );
        }
        if !self.rows.is_empty() {
            text.push_str(
                "\nratio: CPU per request (json, body) or per chunk (sse) to nginx of the same round, median\n",
            );
        }
        self.added_table(&mut text);
        self.idle_table(&mut text);
        for goal in &self.goals {
            let verdict = if goal.met { "met" } else { "MISSED" };
            let _ =
                writeln!(text, "goal {:<44} {:>9.2} of at most {:>7.2}  {verdict}", goal.name, goal.value, goal.limit);
        }
        for failure in &self.failures {
            let _ = writeln!(text, "FAILED {failure}");
        }
        text
    }

    fn added_table(&self, text: &mut String) {
        if self.added_latency.is_empty() {
            return;
        }
        let _ = writeln!(
            text,
            "\n{:<22} {:>9} {:>17} {:>9} {:>3}",
            "added at low load", "p50 us", "(quartiles)", "p99 us", "n"
        );
        for added in &self.added_latency {
            let p50 = &added.p50_us;
            let quartiles = format!("({:.1}-{:.1})", p50.q1, p50.q3);
            let _ = writeln!(
                text,
                "{:<22} {:>9.1} {quartiles:>17} {:>9.1} {:>3}",
                added.proxy, p50.median, added.p99_us.median, p50.samples
            );
        }
    }

    fn idle_table(&self, text: &mut String) {
        if self.idle.is_empty() {
            return;
        }
        let _ = writeln!(
            text,
            "\n{:<22} {:>7}  {:>16} {:>12} {:>18} {:>9}",
            "idle streams", "streams", "private B/stream", "pss B/stream", "left after close", "idle CPU"
        );
        for idle in &self.idle {
            let _ = writeln!(
                text,
                "{:<22} {:>7}  {:>16.0} {:>12.0} {:>18.0} {:>8.2}%",
                idle.proxy,
                idle.streams,
                idle.private_bytes_per_stream,
                idle.pss_bytes_per_stream,
                idle.private_bytes_per_stream_after_close,
                idle.idle_cpu_share * 100.0
            );
        }
        text.push('\n');
    }
}

fn quartiles(ratio: &Spread) -> String {
    format!("({:.2}-{:.2})", ratio.q1, ratio.q3)
}

fn rows(plan: &Plan, samples: &[Sample]) -> Vec<Row> {
    let mut rows = Vec::new();
    for scenario in &plan.scenarios {
        let here: Vec<&Sample> = samples.iter().filter(|sample| sample.scenario == scenario.name).collect();
        let mut proxies: Vec<&str> = Vec::new();
        for sample in &here {
            if !proxies.contains(&sample.proxy.as_str()) {
                proxies.push(&sample.proxy);
            }
        }
        rows.extend(proxies.iter().filter_map(|proxy| row(scenario, proxy, &here)));
    }
    rows
}

fn row(scenario: &Scenario, proxy: &str, here: &[&Sample]) -> Option<Row> {
    let own: Vec<&&Sample> = here.iter().filter(|sample| sample.proxy == proxy).collect();
    let median = |value: fn(&Sample) -> f64| spread(own.iter().map(|sample| value(sample)));
    Some(Row {
        scenario: scenario.name,
        unit: scenario.unit,
        proxy: proxy.to_owned(),
        ratio: spread(ratios(here, proxy, YARDSTICK)),
        cpu_us_per_unit: median(|sample| sample.cpu_ns_per_unit / 1e3)?,
        units_per_second: median(|sample| sample.units / (sample.wall_ns as f64 / 1e9))?,
        units_per_cpu_second: median(|sample| 1e9 / sample.cpu_ns_per_unit)?,
        latency_p50_us: median(|sample| sample.latency_p50_ns as f64 / 1e3)?.median,
        latency_p99_us: median(|sample| sample.latency_p99_ns as f64 / 1e3)?.median,
    })
}

/// CPU per unit of `proxy` to that of `base`, round by round.
fn ratios<'a>(here: &'a [&Sample], proxy: &'a str, base: &'a str) -> impl Iterator<Item = f64> + 'a {
    let base_of = move |round| here.iter().find(|sample| sample.proxy == base && sample.round == round);
    let own = here.iter().filter(move |sample| sample.proxy == proxy);
    own.filter_map(move |sample| Some(sample.cpu_ns_per_unit / base_of(sample.round)?.cpu_ns_per_unit))
}

/// Ratio limits of small requests and chunks, and bytes of an idle stream.
const RATIO_LIMIT: f64 = 1.0;
/// CPU of a request with two legs to that of one with one, of the same body.
const PAIR_RATIO_LIMIT: f64 = 1.6;
const IDLE_STREAM_BYTES_LIMIT: f64 = 8192.0;

fn goals(rows: &[Row], samples: &[Sample], idle: &[Idle]) -> Vec<Goal> {
    let limited = |group: Group, row: &Row| {
        crate::scenario::ALL
            .iter()
            .any(|scenario| scenario.name == row.scenario && scenario.group == group && scenario.connections > 1)
    };
    let mut goals = Vec::new();
    for row in rows.iter().filter(|row| row.proxy == ROUTER) {
        // One connection measures two wake-ups more than the proxy, so that it is shown but not judged.
        if let Some(ratio) = row.ratio.filter(|_| limited(Group::Json, row) || limited(Group::Sse, row)) {
            let name = format!("{}: CPU to nginx", row.scenario);
            goals.push(Goal { name, value: ratio.median, limit: RATIO_LIMIT, met: ratio.median <= RATIO_LIMIT });
        }
    }
    for row in rows.iter().filter(|row| row.proxy == ROUTER_PAIR) {
        let here: Vec<&Sample> = samples.iter().filter(|sample| sample.scenario == row.scenario).collect();
        if let Some(ratio) = spread(ratios(&here, ROUTER_PAIR, ROUTER)) {
            let name = format!("{}: CPU of a pair to one worker", row.scenario);
            goals.push(Goal {
                name,
                value: ratio.median,
                limit: PAIR_RATIO_LIMIT,
                met: ratio.median <= PAIR_RATIO_LIMIT,
            });
        }
    }
    for idle in idle.iter().filter(|idle| idle.proxy == ROUTER) {
        let value = idle.private_bytes_per_stream;
        let name = format!("{} idle streams: bytes each", idle.streams);
        goals.push(Goal { name, value, limit: IDLE_STREAM_BYTES_LIMIT, met: value <= IDLE_STREAM_BYTES_LIMIT });
        let value = idle.private_bytes_per_stream_after_close;
        let name = "idle streams: bytes each after close".to_owned();
        let limit = (idle.private_bytes_per_stream / 2.0).max(512.0);
        goals.push(Goal { name, value, limit, met: value <= limit });
    }
    goals
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(proxy: &str, round: usize, cpu_ns_per_unit: f64) -> Sample {
        Sample {
            scenario: "json c=32",
            proxy: proxy.to_owned(),
            round,
            units: 1000.0,
            wall_ns: 1_000_000_000,
            cpu_ns: 0,
            cpu_ns_per_unit,
            latency_p50_ns: 1,
            latency_p99_ns: 2,
            reconnects: 0,
        }
    }

    #[test]
    fn ratios_are_taken_within_a_round() {
        let scenarios: Vec<Scenario> = crate::harness::scenarios(&[Group::Json]);
        let plan = Plan {
            rounds: 2,
            window: std::time::Duration::from_secs(1),
            scenarios,
            idle_streams: 0,
            idle_proxies: Vec::new(),
            low_load_requests: 0,
        };
        // The second round is twice as noisy for both: the ratio must not move.
        let samples =
            [sample(YARDSTICK, 0, 10.0), sample(ROUTER, 0, 8.0), sample(YARDSTICK, 1, 20.0), sample(ROUTER, 1, 16.0)];
        let rows = rows(&plan, &samples);
        let router = rows.iter().find(|row| row.proxy == ROUTER).unwrap();
        let ratio = router.ratio.unwrap();
        assert_eq!((ratio.median, ratio.q1, ratio.q3, ratio.samples), (0.8, 0.8, 0.8, 2));
        let goals = goals(&rows, &samples, &[]);
        assert_eq!(goals.len(), 1);
        assert!(goals[0].met);
    }

    #[test]
    fn a_pair_is_judged_by_one_worker_of_the_same_round() {
        let check = |pair: [f64; 2], expected: (f64, bool)| {
            let [first, second] = pair;
            let samples = [
                sample(ROUTER, 0, 10.0),
                sample(ROUTER_PAIR, 0, first),
                sample(ROUTER, 1, 20.0),
                sample(ROUTER_PAIR, 1, second),
            ];
            let here: Vec<&Sample> = samples.iter().collect();
            let rows = [row(&crate::harness::scenarios(&[Group::Json])[1], ROUTER_PAIR, &here).unwrap()];
            let goals = goals(&rows, &samples, &[]);
            assert_eq!(goals.iter().map(|goal| (goal.value, goal.met)).collect::<Vec<_>>(), [expected]);
        };
        check([15.0, 30.0], (1.5, true));
        check([17.0, 34.0], (1.7, false));
    }

    #[test]
    fn no_yardstick_no_ratio() {
        let scenario = crate::harness::scenarios(&[Group::Json])[1];
        let alone = sample("other", 0, 1.0);
        assert!(row(&scenario, "other", &[&alone]).unwrap().ratio.is_none());
    }
}
