//! Owns what defines a run and what it yields. Never runs.

use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Context, Result};
use serde::Serialize;

use super::manners::Manners;
use super::pace::Pace;
use super::record::Record;
use super::slo::{Slo, parse_duration};
use super::workload::Workload;

/// What is sent but not counted.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Warmup {
    /// The first so many requests.
    Requests(usize),
    /// Requests due within the first seconds.
    #[serde(rename = "seconds", serialize_with = "as_seconds")]
    Time(Duration),
}

fn as_seconds<S: serde::Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(time.as_secs_f64())
}

impl Default for Warmup {
    fn default() -> Warmup {
        Warmup::Requests(0)
    }
}

impl FromStr for Warmup {
    type Err = anyhow::Error;

    /// A number of requests, or a time with its unit.
    fn from_str(text: &str) -> Result<Warmup> {
        match text.trim().parse() {
            Ok(requests) => Ok(Warmup::Requests(requests)),
            Err(_) => parse_duration(text).map(Warmup::Time).context("a warm-up is a number of requests or a time"),
        }
    }
}

/// One run.
#[derive(Clone)]
pub struct RunConfig {
    /// `http://host:port[/prefix]`.
    pub target: String,
    pub workload: Workload,
    pub pace: Pace,
    /// Open loop: sessions that begin in one moment; the rate stays what it is.
    pub burst: usize,
    /// Recorded times and pauses between turns pass so many times faster.
    pub speedup: f64,
    /// Whole request, from sending to the last byte; looked at every 20 ms.
    pub timeout: Duration,
    /// Open loop: requests beyond it wait, and the wait counts as latency.
    pub in_flight_max: usize,
    pub api_key: Option<String>,
    pub warmup: Warmup,
    pub slo: Option<Slo>,
    pub manners: Manners,
    /// Exact answers by request index, if known.
    pub expected: Option<Arc<Vec<String>>>,
    /// Ends the run early when set.
    pub interrupt: Arc<AtomicBool>,
    pub progress: bool,
}

impl RunConfig {
    /// A run without warm-up, limits or misbehaving clients.
    pub fn new(target: &str, workload: Workload, pace: Pace) -> RunConfig {
        RunConfig {
            target: target.into(),
            workload,
            pace,
            burst: 1,
            speedup: 1.0,
            timeout: Duration::from_secs(120),
            in_flight_max: 100_000,
            api_key: None,
            warmup: Warmup::default(),
            slo: None,
            manners: Manners::default(),
            expected: None,
            interrupt: Arc::default(),
            progress: false,
        }
    }
}

/// What a run yields.
#[derive(Debug)]
pub struct RunResult {
    pub record: Record,
    /// From the first measured request's intended send to the last end of one.
    pub duration: Duration,
    /// Share of one core that the generator's thread used since the first measured request.
    pub cpu_share: f64,
    /// CPU time of the generator's thread since then.
    pub cpu: Duration,
    /// Whether there were limits to meet.
    pub has_limits: bool,
    pub interrupted: bool,
    /// The first error's body, cut.
    pub first_error: Option<String>,
}

impl RunResult {
    /// So many of something over the run's duration.
    pub fn per_second(&self, count: u64) -> f64 {
        count as f64 / self.duration.as_secs_f64().max(1e-9)
    }

    /// Requests that got a whole answer, per second.
    pub fn throughput_rps(&self) -> f64 {
        self.per_second(self.record.answered())
    }

    /// Requests that met the limits, per second; absent without limits.
    pub fn goodput_rps(&self) -> Option<f64> {
        self.has_limits.then(|| self.per_second(self.record.slo_met))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_warm_up_is_requests_or_time() {
        let read = |text: &str| text.parse::<Warmup>();
        assert_eq!(read("100").unwrap(), Warmup::Requests(100));
        assert_eq!(read("2.5s").unwrap(), Warmup::Time(Duration::from_millis(2500)));
        let shown = |warmup: Warmup| serde_json::to_value(warmup).unwrap();
        assert_eq!(shown(read("7").unwrap()), serde_json::json!({"requests": 7}));
        assert_eq!(shown(read("2.5s").unwrap()), serde_json::json!({"seconds": 2.5}));
        assert!(read("soon").is_err() && read("-3").is_err() && read("").is_err());
    }
}
