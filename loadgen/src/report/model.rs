//! Owns the shape of a run's report, written and read by the same types. What each member means stands in
//! `loadgen/report.schema.json`, which a test holds real reports against. Never measures and never reads files.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Of `loadgen run`.
pub const SCHEMA: &str = "loadgen.run/2";

/// A distribution of latencies, milliseconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Distribution {
    pub count: u64,
    pub mean: f64,
    pub p50: f64,
    pub p90: f64,
    pub p95: f64,
    pub p99: f64,
    pub p999: f64,
    pub max: f64,
    /// The largest value of each bucket and how many it holds; a bucket is at most 1 % wide.
    pub buckets: Vec<(f64, u64)>,
}

impl Distribution {
    /// Points of the cumulative distribution: value, and share of values up to it.
    pub fn cumulative(&self) -> impl Iterator<Item = (f64, f64)> + '_ {
        let total = self.buckets.iter().map(|(_, count)| count).sum::<u64>().max(1) as f64;
        self.buckets.iter().scan(0, move |sum, (upper, count)| {
            *sum += count;
            Some((*upper, *sum as f64 / total))
        })
    }
}

/// What every kind of report says of a run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Figures {
    pub requests: u64,
    pub errors: u64,
    pub error_rate: f64,
    pub errors_by_class: BTreeMap<String, u64>,
    pub aborted: u64,
    pub slow_readers: u64,
    pub hit_rate: Option<f64>,
    pub ttft_ms: Distribution,
    pub ttft_from_send_ms: Distribution,
    pub inter_token_ms: Distribution,
    pub end_to_end_ms: Distribution,
    pub throughput_rps: f64,
    pub goodput_rps: Option<f64>,
    pub output_tokens_per_second: f64,
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub output_tokens: u64,
    pub duration_seconds: f64,
    pub generator: Generator,
    pub interrupted: bool,
    pub timeline: Timeline,
    /// Absent where no answer named its worker.
    pub placement: Option<Placement>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Generator {
    pub send_lag_ms: Distribution,
    pub cpu_share: f64,
    pub cpu_seconds: f64,
    pub saturated: bool,
}

/// The run in steps of equal length; every list has a value for each step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Timeline {
    pub step_seconds: f64,
    /// Requests that were to be sent in the step.
    pub started: Vec<u64>,
    /// Answers that ended well in the step.
    pub completed: Vec<u64>,
    pub errors: Vec<u64>,
    /// Requests under way, on average over the step.
    pub in_flight: Vec<f64>,
    /// Of requests that were to be sent in the step; `None` where none got an answer.
    pub ttft_p50_ms: Vec<Option<f64>>,
    pub ttft_p99_ms: Vec<Option<f64>>,
}

/// Which worker served the requests that share a prefix, as the answers said.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Placement {
    pub workers: Vec<String>,
    /// The busiest groups first.
    pub groups: Vec<GroupPlacement>,
    /// Requests of groups that are not listed.
    pub requests_of_other_groups: u64,
    /// Share of the requests that went to the worker which served most of their group.
    pub concentration: f64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GroupPlacement {
    pub group: u64,
    /// In the order of `workers`.
    pub requests: Vec<u64>,
}

/// The target's own figures, polled from `/metrics` while the run went on.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Fleet {
    pub source: String,
    /// Why there is nothing, or less than there should be.
    pub problem: Option<String>,
    /// When each sample was taken, from the start of the run.
    pub seconds: Vec<f64>,
    /// Prompt blocks and those of them that picked workers held, since the first sample.
    pub blocks: Vec<f64>,
    pub blocks_hit: Vec<f64>,
    pub workers: Vec<FleetWorker>,
}

/// One worker, or one of its ranks.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct FleetWorker {
    pub name: String,
    pub role: String,
    /// Requests booked on it, sample by sample; `None` where it was not listed.
    pub inflight: Vec<Option<f64>>,
    /// Over the whole run.
    pub picks: f64,
    pub blocks: f64,
    pub blocks_hit: f64,
}

/// The file of `loadgen run --json`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct RunReport {
    pub schema: String,
    #[serde(default)]
    pub name: Option<String>,
    pub target: String,
    pub workload: Value,
    pub pace: Value,
    #[serde(default)]
    pub burst: usize,
    #[serde(default)]
    pub speedup: f64,
    pub warmup: Value,
    /// Null without limits.
    #[serde(default)]
    pub slo: Value,
    #[serde(default)]
    pub manners: Value,
    #[serde(flatten)]
    pub figures: Figures,
    /// Absent where nobody polled.
    #[serde(default)]
    pub fleet: Option<Fleet>,
}
