//! Owns one line per request, and what is drawn from them: the CSV, the timeline, which worker served which prefix. Never
//! times anything.

use std::collections::{BTreeMap, HashMap};
use std::io::Write;
use std::time::Instant;

use anyhow::Result;

use super::record::{Exchange, Latencies, Phase};
use crate::report::chart::round_step;
use crate::report::model::{GroupPlacement, Placement, Timeline};

/// Steps of a timeline: enough to see what changes, few enough that a step has requests to tell of.
const STEPS_MIN: f64 = 12.0;
const STEPS_MAX: f64 = 100.0;
const STEP_REQUESTS: f64 = 10.0;
/// Shortest step, seconds.
const STEP_SECONDS_MIN: f64 = 0.1;
/// Groups that a report lists; there may be as many as requests.
const GROUPS_MAX: usize = 256;

/// One request. Times are seconds from the start of the run.
#[derive(Clone, Debug)]
pub struct Row {
    index: usize,
    replay_index: Option<usize>,
    session: u64,
    prefix_group: Option<u64>,
    is_measured: bool,
    intended: f64,
    sent: f64,
    first_content: Option<f64>,
    ended: f64,
    prompt_tokens: Option<u64>,
    cached_tokens: Option<u64>,
    output_tokens: u64,
    /// Place in the names.
    worker: Option<u32>,
    /// `ok`, `aborted`, or the class of the error.
    outcome: Outcome,
    is_slow_reader: bool,
    slo_met: Option<bool>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Ok,
    Aborted,
    Failed(super::record::Failure),
}

impl Row {
    /// The first token's latency, seconds, where it counts as one.
    fn ttft(&self) -> Option<f64> {
        let counts = self.is_measured && self.outcome == Outcome::Ok && !self.is_slow_reader;
        self.first_content.filter(|_| counts).map(|first| (first - self.intended).max(0.0))
    }

    fn is_error(&self) -> bool {
        matches!(self.outcome, Outcome::Failed(_))
    }
}

/// All requests of a run, in order of completion: about 150 bytes each.
#[derive(Clone, Debug, Default)]
pub struct Rows {
    rows: Vec<Row>,
    /// Workers as answers named them.
    names: Vec<String>,
    places: HashMap<String, u32>,
}

impl Rows {
    pub fn push(&mut self, exchange: &Exchange, start: Instant) {
        let since = |at: Instant| at.saturating_duration_since(start).as_secs_f64();
        let outcome = match (exchange.aborted, exchange.outcome) {
            (true, _) => Outcome::Aborted,
            (false, Ok(())) => Outcome::Ok,
            (false, Err(failure)) => Outcome::Failed(failure),
        };
        let worker = exchange.worker.as_deref().map(|name| self.place(name));
        self.rows.push(Row {
            index: exchange.index,
            replay_index: exchange.replay_index,
            session: exchange.session,
            prefix_group: exchange.prefix_group,
            is_measured: exchange.phase == Phase::Measured,
            intended: since(exchange.intended),
            sent: since(exchange.sent),
            first_content: exchange.first_content.map(since),
            ended: since(exchange.ended),
            prompt_tokens: exchange.usage.map(|usage| usage.prompt_tokens),
            cached_tokens: exchange.usage.and_then(|usage| usage.cached_tokens()),
            output_tokens: exchange.usage.map_or(exchange.content_events, |usage| usage.completion_tokens),
            worker,
            outcome,
            is_slow_reader: exchange.slow_reader,
            slo_met: exchange.slo_met,
        });
    }

    fn place(&mut self, name: &str) -> u32 {
        if let Some(place) = self.places.get(name) {
            return *place;
        }
        let place = self.names.len() as u32;
        self.names.push(name.to_owned());
        self.places.insert(name.to_owned(), place);
        place
    }

    /// Per measured answer, in order of completion: when it was to be sent, seconds, and its TTFT, milliseconds.
    pub fn ttft_series(&self) -> impl Iterator<Item = (f64, f64)> + '_ {
        self.rows.iter().filter_map(|row| Some((row.intended, row.ttft()? * 1000.0)))
    }

    /// A line per request, warm-up included, under a line of names. Times are seconds from the start of the run, empty
    /// where there is none.
    ///
    /// # Errors
    /// Those of the writer.
    pub fn write_csv(&self, out: impl Write) -> Result<()> {
        let mut writer = csv::Writer::from_writer(out);
        writer.write_record([
            "index",
            "replay_index",
            "session",
            "prefix_group",
            "phase",
            "intended_s",
            "sent_s",
            "first_content_s",
            "ended_s",
            "prompt_tokens",
            "cached_tokens",
            "output_tokens",
            "worker",
            "outcome",
            "slow_reader",
            "slo_met",
        ])?;
        let seconds = |value: f64| format!("{value:.6}");
        let text = |value: Option<u64>| value.map_or_else(String::new, |value| value.to_string());
        for row in &self.rows {
            writer.write_record([
                row.index.to_string(),
                text(row.replay_index.map(|index| index as u64)),
                row.session.to_string(),
                text(row.prefix_group),
                (if row.is_measured { "measured" } else { "warm-up" }).to_owned(),
                seconds(row.intended),
                seconds(row.sent),
                row.first_content.map_or_else(String::new, seconds),
                seconds(row.ended),
                text(row.prompt_tokens),
                text(row.cached_tokens),
                row.output_tokens.to_string(),
                row.worker.map_or_else(String::new, |place| self.names[place as usize].clone()),
                match row.outcome {
                    Outcome::Ok => "ok".to_owned(),
                    Outcome::Aborted => "aborted".to_owned(),
                    Outcome::Failed(failure) => failure.name(),
                },
                row.is_slow_reader.to_string(),
                row.slo_met.map_or_else(String::new, |met| met.to_string()),
            ])?;
        }
        Ok(writer.flush()?)
    }

    fn measured(&self) -> impl Iterator<Item = &Row> {
        self.rows.iter().filter(|row| row.is_measured)
    }

    /// The measured part of the run in steps; empty without requests.
    pub fn timeline(&self) -> Timeline {
        let end = self.measured().map(|row| row.ended.max(row.intended)).fold(0.0, f64::max);
        let requests = self.measured().count();
        if requests == 0 {
            return Timeline::default();
        }
        let wanted = (requests as f64 / STEP_REQUESTS).clamp(STEPS_MIN, STEPS_MAX);
        let step = round_step((end / wanted).max(STEP_SECONDS_MIN));
        let steps = (end / step) as usize + 1;
        let step_of = |at: f64| ((at / step) as usize).min(steps - 1);
        let mut timeline = Timeline {
            step_seconds: step,
            started: vec![0; steps],
            completed: vec![0; steps],
            errors: vec![0; steps],
            in_flight: vec![0.0; steps],
            ..Timeline::default()
        };
        let mut ttft: Vec<Option<Latencies>> = vec![None; steps];
        for row in self.measured() {
            timeline.started[step_of(row.intended)] += 1;
            match row.outcome {
                _ if row.is_error() => timeline.errors[step_of(row.ended)] += 1,
                Outcome::Ok => timeline.completed[step_of(row.ended)] += 1,
                _ => {}
            }
            if let Some(seconds) = row.ttft() {
                let latencies = ttft[step_of(row.intended)].get_or_insert_default();
                latencies.record(std::time::Duration::from_secs_f64(seconds));
            }
            for (number, in_flight) in
                timeline.in_flight.iter_mut().enumerate().take(step_of(row.ended) + 1).skip(step_of(row.sent))
            {
                let (from, to) = (number as f64 * step, (number + 1) as f64 * step);
                *in_flight += (row.ended.min(to) - row.sent.max(from)).max(0.0) / step;
            }
        }
        let quantile = |share: f64| {
            let of = |latencies: &Option<Latencies>| latencies.as_ref().map(|it| rounded(it.quantile_ms(share)));
            ttft.iter().map(of).collect()
        };
        (timeline.ttft_p50_ms, timeline.ttft_p99_ms) = (quantile(0.5), quantile(0.99));
        timeline.in_flight.iter_mut().for_each(|value| *value = rounded(*value));
        timeline
    }

    /// Of the measured requests with a prefix group whose answer named its worker; `None` where there are none.
    pub fn placement(&self) -> Option<Placement> {
        let mut groups: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
        for row in self.measured() {
            let (Some(group), Some(worker)) = (row.prefix_group, row.worker) else { continue };
            groups.entry(group).or_insert_with(|| vec![0; self.names.len()])[worker as usize] += 1;
        }
        let total: u64 = groups.values().flatten().sum();
        let on_main: u64 = groups.values().filter_map(|counts| counts.iter().max()).sum();
        // In order of the names, as in the table of workers.
        let mut order: Vec<usize> = (0..self.names.len()).collect();
        order.sort_by_key(|place| &self.names[*place]);
        let group = |(group, counts): (u64, Vec<u64>)| GroupPlacement {
            group,
            requests: order.iter().map(|place| counts[*place]).collect(),
        };
        let mut groups: Vec<GroupPlacement> = groups.into_iter().map(group).collect();
        groups.sort_by_key(|group| std::cmp::Reverse(group.requests.iter().sum::<u64>()));
        let others = groups.split_off(groups.len().min(GROUPS_MAX));
        (total > 0).then(|| Placement {
            workers: order.iter().map(|place| self.names[*place].clone()).collect(),
            groups,
            requests_of_other_groups: others.iter().flat_map(|group| &group.requests).sum(),
            concentration: on_main as f64 / total as f64,
        })
    }
}

/// As much as a picture needs.
fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::run::record::Failure;

    /// A request from `sent` to `ended`, with its first token halfway.
    fn exchange(start: Instant, index: usize, (sent, ended): (f64, f64)) -> Exchange {
        let at = |seconds: f64| start + Duration::from_secs_f64(seconds);
        Exchange {
            prefix_group: Some(index as u64 % 2),
            first_content: Some(at((sent + ended) / 2.0)),
            ended: at(ended),
            content_events: 3,
            worker: Some(format!("w,{}", index % 4)),
            ..Exchange::new(index, at(sent))
        }
    }

    #[test]
    fn a_timeline_counts_each_request_where_it_belongs() {
        let (start, mut rows) = (Instant::now(), Rows::default());
        assert_eq!(rows.timeline(), Timeline::default());
        rows.push(&exchange(start, 0, (0.0, 0.25)), start);
        rows.push(&exchange(start, 1, (0.05, 0.05)), start);
        rows.push(&Exchange { outcome: Err(Failure::Timeout), ..exchange(start, 2, (0.1, 0.3)) }, start);
        rows.push(&Exchange { phase: Phase::WarmUp, ..exchange(start, 3, (0.0, 9.0)) }, start);
        rows.push(&Exchange { aborted: true, ..exchange(start, 4, (0.35, 0.36)) }, start);
        let timeline = rows.timeline();
        assert_eq!(timeline.step_seconds, 0.1);
        assert_eq!(timeline.started, [2, 1, 0, 1]);
        assert_eq!(timeline.completed, [1, 0, 1, 0]);
        assert_eq!(timeline.errors.iter().sum::<u64>(), 1);
        let area: f64 = timeline.in_flight.iter().sum::<f64>() * timeline.step_seconds;
        assert!((area - (0.25 + 0.2 + 0.01)).abs() < 1e-3, "{:?}", timeline.in_flight);
        assert!((timeline.ttft_p99_ms[0].unwrap() - 125.0).abs() < 1.0, "{:?}", timeline.ttft_p99_ms);
        assert_eq!(timeline.ttft_p50_ms[1..], [None, None, None], "errors and aborted ones have no TTFT");
        assert_eq!(rows.ttft_series().count(), 2);
    }

    #[test]
    fn a_long_run_has_few_steps() {
        let (start, mut rows) = (Instant::now(), Rows::default());
        rows.push(&exchange(start, 0, (0.0, 3601.0)), start);
        let timeline = rows.timeline();
        assert_eq!((timeline.step_seconds, timeline.started.len()), (500.0, 8));
        assert!(timeline.in_flight[..7].iter().all(|value| *value == 1.0));
    }

    #[test]
    fn placement_shows_groups_by_worker() {
        let (start, mut rows) = (Instant::now(), Rows::default());
        assert_eq!(rows.placement(), None);
        for index in [3, 1, 1, 0, 2, 5] {
            rows.push(&exchange(start, index, (0.0, 1.0)), start);
        }
        rows.push(&Exchange { worker: None, ..exchange(start, 0, (0.0, 1.0)) }, start);
        rows.push(&Exchange { prefix_group: None, ..exchange(start, 0, (0.0, 1.0)) }, start);
        let placement = rows.placement().unwrap();
        assert_eq!(placement.workers, ["w,0", "w,1", "w,2", "w,3"]);
        let group = |group, requests: [u64; 4]| GroupPlacement { group, requests: requests.to_vec() };
        assert_eq!(placement.groups, [group(1, [0, 3, 0, 1]), group(0, [1, 0, 1, 0])]);
        assert!((placement.concentration - 4.0 / 6.0).abs() < 1e-9);
    }

    #[test]
    fn a_line_of_csv_per_request() {
        let (start, mut rows) = (Instant::now(), Rows::default());
        rows.push(&exchange(start, 7, (0.5, 1.5)), start);
        rows.push(
            &Exchange { outcome: Err(Failure::Status(503)), slo_met: Some(false), ..exchange(start, 8, (1.0, 2.0)) },
            start,
        );
        let mut out = Vec::new();
        rows.write_csv(&mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3);
        assert!(lines[0].starts_with("index,replay_index,session,prefix_group,phase,intended_s,"));
        assert_eq!(lines[1], "7,,7,1,measured,0.500000,0.500000,1.000000,1.500000,,,3,\"w,3\",ok,false,");
        assert!(lines[2].ends_with(",http_503,false,false"), "{}", lines[2]);
    }
}
