//! Owns the numbers of a run: histograms, counters, error classes. Never prints.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;

use super::answer::Usage;
use super::rows::Rows;
use crate::net::client::ClientError;

/// Longest latency told apart: one hour.
const LATENCY_MICROS_MAX: u64 = 3_600_000_000;

/// A latency distribution in microseconds, three significant digits.
#[derive(Clone, Debug)]
pub struct Latencies(Histogram<u64>);

impl Default for Latencies {
    fn default() -> Latencies {
        Latencies(Histogram::new_with_bounds(1, LATENCY_MICROS_MAX, 3).expect("bounds are valid"))
    }
}

impl Latencies {
    pub fn record(&mut self, latency: Duration) {
        self.0.saturating_record((latency.as_micros() as u64).max(1));
    }

    pub fn count(&self) -> u64 {
        self.0.len()
    }

    /// 0 when empty.
    pub fn mean_ms(&self) -> f64 {
        if self.0.is_empty() { 0.0 } else { self.0.mean() / 1000.0 }
    }

    /// `share` in 0 to 1.
    pub fn quantile_ms(&self, share: f64) -> f64 {
        if self.0.is_empty() { 0.0 } else { self.0.value_at_quantile(share) as f64 / 1000.0 }
    }

    pub fn max_ms(&self) -> f64 {
        self.0.max() as f64 / 1000.0
    }

    /// The largest value of each bucket and how many it holds; buckets are at most 1 % wide.
    pub fn buckets_ms(&self) -> Vec<(f64, u64)> {
        let (mut buckets, mut full_at): (Vec<(f64, u64)>, u64) = (Vec::new(), 0);
        for step in self.0.iter_recorded() {
            let (micros, count) = (step.value_iterated_to(), step.count_since_last_iteration());
            let upper = micros as f64 / 1000.0;
            match buckets.last_mut() {
                Some(bucket) if micros <= full_at => *bucket = (upper, bucket.1 + count),
                _ => {
                    full_at = micros + micros / 100;
                    buckets.push((upper, count));
                }
            }
        }
        buckets
    }
}

/// Why a request counts as an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Failure {
    Connect,
    NoAnswer,
    Truncated,
    Malformed,
    Timeout,
    Status(u16),
    /// An error object within a stream.
    StreamError,
    /// The answer differs from the one expected.
    WrongContent,
    Interrupted,
}

impl Failure {
    /// Name in reports.
    pub fn name(self) -> String {
        match self {
            Failure::Connect => "connect".into(),
            Failure::NoAnswer => "no_answer".into(),
            Failure::Truncated => "truncated".into(),
            Failure::Malformed => "malformed".into(),
            Failure::Timeout => "timeout".into(),
            Failure::Status(status) => format!("http_{status}"),
            Failure::StreamError => "stream_error".into(),
            Failure::WrongContent => "wrong_content".into(),
            Failure::Interrupted => "interrupted".into(),
        }
    }
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Failure {
        match error {
            ClientError::Connect(_) => Failure::Connect,
            ClientError::NoAnswer => Failure::NoAnswer,
            ClientError::Truncated | ClientError::Left => Failure::Truncated,
            ClientError::Malformed => Failure::Malformed,
        }
    }
}

/// Whether a request is part of the report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    /// Sent, never counted.
    WarmUp,
    #[default]
    Measured,
}

/// One request's life. Latencies count from `intended`, when the schedule wanted it sent: a request that had to wait
/// for its turn because others were slow has that wait in its latency (coordinated omission).
#[derive(Clone, Debug)]
pub struct Exchange {
    /// Place among all requests of the run.
    pub index: usize,
    /// Place among the requests of a recording, in order of time; absent for generated ones.
    pub replay_index: Option<usize>,
    /// Requests of one conversation or agent have one number.
    pub session: u64,
    /// Requests that begin with the same shared text have one number; absent for those that share nothing.
    pub prefix_group: Option<u64>,
    pub phase: Phase,
    pub intended: Instant,
    pub sent: Instant,
    pub first_content: Option<Instant>,
    pub ended: Instant,
    /// Gaps between reads that brought text.
    pub gaps: Vec<Duration>,
    pub usage: Option<Usage>,
    pub content_events: u64,
    /// Who computed the prompt, if the answer says so.
    pub worker: Option<String>,
    /// The client left on purpose, so that there is nothing to time; not an error.
    pub aborted: bool,
    /// The client read at a trickle on purpose: its times are its own.
    pub slow_reader: bool,
    /// Whether the answer met every limit; absent without limits.
    pub slo_met: Option<bool>,
    pub outcome: Result<(), Failure>,
}

impl Exchange {
    /// A request of which nothing is known but when it was to be sent.
    pub fn new(index: usize, intended: Instant) -> Exchange {
        Exchange {
            index,
            replay_index: None,
            session: index as u64,
            prefix_group: None,
            phase: Phase::Measured,
            intended,
            sent: intended,
            first_content: None,
            ended: intended,
            gaps: Vec::new(),
            usage: None,
            content_events: 0,
            worker: None,
            aborted: false,
            slow_reader: false,
            slo_met: None,
            outcome: Ok(()),
        }
    }
}

/// Everything counted in a run.
#[derive(Clone, Debug, Default)]
pub struct Record {
    /// Measured ones, whatever became of them.
    pub requests: u64,
    /// Clients that left on purpose.
    pub aborted: u64,
    /// Whole answers to clients that read at a trickle on purpose; in no latency.
    pub slow_readers: u64,
    /// Answers that met every limit.
    pub slo_met: u64,
    pub errors: BTreeMap<Failure, u64>,
    pub ttft: Latencies,
    /// From the moment of sending: what the server alone is to blame for.
    pub ttft_from_send: Latencies,
    pub inter_token: Latencies,
    pub end_to_end: Latencies,
    /// How late the generator itself was in starting requests.
    pub send_lag: Latencies,
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    /// Requests whose usage told cached tokens.
    pub cached_known: u64,
    pub output_tokens: u64,
    /// Every request, warm-up included.
    pub rows: Rows,
}

impl Record {
    pub fn add(&mut self, exchange: &Exchange, start: Instant) {
        self.rows.push(exchange, start);
        if exchange.phase == Phase::WarmUp {
            return;
        }
        self.requests += 1;
        if exchange.aborted {
            self.aborted += 1;
            return;
        }
        if let Err(failure) = exchange.outcome {
            *self.errors.entry(failure).or_default() += 1;
            return;
        }
        self.slo_met += u64::from(exchange.slo_met == Some(true));
        self.add_usage(exchange);
        if exchange.slow_reader {
            self.slow_readers += 1;
            return;
        }
        if let Some(first) = exchange.first_content {
            let ttft = first.saturating_duration_since(exchange.intended);
            self.ttft.record(ttft);
            self.ttft_from_send.record(first.saturating_duration_since(exchange.sent));
        }
        self.end_to_end.record(exchange.ended.saturating_duration_since(exchange.intended));
        exchange.gaps.iter().for_each(|gap| self.inter_token.record(*gap));
    }

    fn add_usage(&mut self, exchange: &Exchange) {
        match exchange.usage {
            Some(usage) => {
                self.output_tokens += usage.completion_tokens;
                self.prompt_tokens += usage.prompt_tokens;
                if let Some(cached) = usage.cached_tokens() {
                    self.cached_known += 1;
                    self.cached_tokens += cached;
                }
            }
            None => self.output_tokens += exchange.content_events,
        }
    }

    /// Requests that got a whole answer.
    pub fn answered(&self) -> u64 {
        self.requests - self.aborted - self.errors_total()
    }

    pub fn errors_total(&self) -> u64 {
        self.errors.values().sum()
    }

    /// Cached share of all prompt tokens; `None` when no server told.
    pub fn hit_rate(&self) -> Option<f64> {
        (self.cached_known > 0 && self.prompt_tokens > 0).then(|| self.cached_tokens as f64 / self.prompt_tokens as f64)
    }
}
