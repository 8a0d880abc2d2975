//! Metrics that the request path writes. Names are those of the system this one replaces. Handles are
//! looked up once per (model, worker) and shard and then held, so that a request touches atomics only.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use prometheus::{
    Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
};

use crate::load::TargetId;
use crate::prompt::NoBlocks;

/// How a request ended, as the `outcome` label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    Ok,
    ClientError,
    ServerError,
    /// The router answered with an error of its own, or the worker's stream was cut.
    Error,
    /// The client left before the end.
    StreamFailed,
}

const OUTCOMES: [(Outcome, &str); 5] = [
    (Outcome::Ok, "ok"),
    (Outcome::ClientError, "4xx"),
    (Outcome::ServerError, "5xx"),
    (Outcome::Error, "error"),
    (Outcome::StreamFailed, "stream_failed"),
];

/// The `router` label of requests served by one worker.
const MIXED: &str = "mixed";

const DURATION_BUCKETS_SECONDS: &[f64] = &[0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];
const TTFT_BUCKETS_SECONDS: &[f64] = &[0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];
const INPUT_TOKEN_BUCKETS: &[f64] = &[64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0, 1048576.0];
const OUTPUT_TOKEN_BUCKETS: &[f64] = &[4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0];
const BLOCK_BUCKETS: &[f64] = &[0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0];
const PROMPT_BUCKETS_SECONDS: &[f64] = &[0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0];

/// Process-wide request metrics. One per process; made at start, shared by all shards.
pub struct RequestMetrics {
    registry: Registry,
    outcomes: Vec<(IntCounter, Histogram)>,
    inflight: IntGauge,
    ttft: HistogramVec,
    input_tokens: HistogramVec,
    output_tokens: HistogramVec,
    prompt_tokens_total: IntCounterVec,
    generation_tokens_total: IntCounterVec,
    picks_total: IntCounterVec,
    pick_cache_hits: Histogram,
    pick_request_blocks: Histogram,
    prefix_blocks_hit_total: IntCounter,
    prefix_blocks_total: IntCounter,
    retries_total: IntCounterVec,
    prompt_failures_total: IntCounterVec,
    prompt_seconds: Histogram,
}

/// Handles of one target, held by a shard.
pub struct TargetMetrics {
    pub picks: IntCounter,
    pub ttft: Histogram,
    pub prompt_tokens: IntCounter,
    pub generation_tokens: IntCounter,
    pub input_tokens: Histogram,
    pub output_tokens: Histogram,
}

impl RequestMetrics {
    /// Registers every family; fails only if two share a name, which a test would see.
    pub fn new() -> Result<Self, prometheus::Error> {
        let registry = Registry::new();
        let make = Make(&registry);
        let totals = make.counters("infera_requests_total", "Requests by how they ended.", &["router", "outcome"])?;
        let durations = make.histograms(
            "infera_request_duration_seconds",
            "Seconds from the request's last byte to the end of its answer, all attempts included.",
            &["router", "outcome"],
            DURATION_BUCKETS_SECONDS,
        )?;
        let inflight = make.gauges("infera_request_inflight", "Requests being served.", &["router"])?;
        let cache_hits = make.histograms(
            "infera_router_pick_cache_hits",
            "Prompt blocks that the picked worker already held.",
            &["role"],
            BLOCK_BUCKETS,
        )?;
        let request_blocks = make.histograms(
            "infera_router_pick_request_blocks",
            "Full blocks of the routed prompts.",
            &["role"],
            BLOCK_BUCKETS,
        )?;
        let blocks_hit = make.counters(
            "infera_prefix_cache_blocks_hit_total",
            "Prompt blocks that the picked workers already held.",
            &["role"],
        )?;
        let blocks =
            make.counters("infera_prefix_cache_blocks_total", "Full blocks of the routed prompts.", &["role"])?;
        let prompt_seconds = Histogram::with_opts(
            HistogramOpts::new("infera_router_prompt_seconds", "Seconds spent on turning a body into block hashes.")
                .buckets(PROMPT_BUCKETS_SECONDS.to_vec()),
        )?;
        registry.register(Box::new(prompt_seconds.clone()))?;
        Ok(Self {
            outcomes: OUTCOMES
                .iter()
                .map(|(_, label)| {
                    (totals.with_label_values(&[MIXED, label]), durations.with_label_values(&[MIXED, label]))
                })
                .collect(),
            inflight: inflight.with_label_values(&[MIXED]),
            ttft: make.histograms(
                "infera_time_to_first_token_seconds",
                "Seconds from the request's last byte to the first byte of the answer's body.",
                &["router", "model", "prefill_worker"],
                TTFT_BUCKETS_SECONDS,
            )?,
            input_tokens: make.histograms(
                "infera_input_sequence_tokens",
                "Prompt tokens per request, as the worker counted them.",
                &["router", "model"],
                INPUT_TOKEN_BUCKETS,
            )?,
            output_tokens: make.histograms(
                "infera_output_sequence_tokens",
                "Completion tokens per request, as the worker counted them.",
                &["router", "model"],
                OUTPUT_TOKEN_BUCKETS,
            )?,
            prompt_tokens_total: make.counters(
                "infera_prompt_tokens_total",
                "Prompt tokens, as the workers counted them.",
                &["router", "model", "prefill_worker"],
            )?,
            generation_tokens_total: make.counters(
                "infera_generation_tokens_total",
                "Completion tokens, as the workers counted them.",
                &["router", "model", "decode_worker"],
            )?,
            picks_total: make.counters("infera_router_picks_total", "Picks per target.", &["role", "worker_id"])?,
            pick_cache_hits: cache_hits.with_label_values(&[MIXED]),
            pick_request_blocks: request_blocks.with_label_values(&[MIXED]),
            prefix_blocks_hit_total: blocks_hit.with_label_values(&[MIXED]),
            prefix_blocks_total: blocks.with_label_values(&[MIXED]),
            retries_total: make.counters(
                "infera_router_retries_total",
                "Attempts repeated on another worker, by what ended the one before.",
                &["reason"],
            )?,
            prompt_failures_total: make.counters(
                "infera_router_prompt_failures_total",
                "Requests routed by load alone because their prompt gave no blocks.",
                &["reason"],
            )?,
            prompt_seconds,
            registry,
        })
    }

    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    pub fn request_started(&self) {
        self.inflight.inc();
    }

    pub fn request_ended(&self, outcome: Outcome, seconds: f64) {
        self.inflight.dec();
        if let Some(place) = OUTCOMES.iter().position(|(known, _)| *known == outcome) {
            let (total, duration) = &self.outcomes[place];
            total.inc();
            duration.observe(seconds);
        }
    }

    /// One pick of the kv-aware policy; a prompt without blocks counts as 0 of 0 and not as a miss.
    pub fn picked(&self, cache_hits: u32, request_blocks: u32) {
        self.pick_cache_hits.observe(f64::from(cache_hits));
        self.pick_request_blocks.observe(f64::from(request_blocks));
        if request_blocks > 0 {
            self.prefix_blocks_hit_total.inc_by(u64::from(cache_hits));
            self.prefix_blocks_total.inc_by(u64::from(request_blocks));
        }
    }

    pub fn retried(&self, reason: &'static str) {
        self.retries_total.with_label_values(&[reason]).inc();
    }

    pub fn prompt_done(&self, seconds: f64) {
        self.prompt_seconds.observe(seconds);
    }

    /// Counts a prompt without blocks; tells whether it is the first with its reason.
    pub fn prompt_failed(&self, failure: &NoBlocks) -> bool {
        self.prompt_failed_because(failure.reason())
    }

    /// The same for reasons of the exchange itself (a full encoder queue, a missed deadline).
    pub fn prompt_failed_because(&self, reason: &'static str) -> bool {
        let counter = self.prompt_failures_total.with_label_values(&[reason]);
        counter.inc();
        counter.get() == 1
    }

    fn target(&self, model: &str, worker: &str, route_key: &str, role: &str) -> TargetMetrics {
        TargetMetrics {
            picks: self.picks_total.with_label_values(&[role, route_key]),
            ttft: self.ttft.with_label_values(&[MIXED, model, worker]),
            prompt_tokens: self.prompt_tokens_total.with_label_values(&[MIXED, model, worker]),
            generation_tokens: self.generation_tokens_total.with_label_values(&[MIXED, model, worker]),
            input_tokens: self.input_tokens.with_label_values(&[MIXED, model]),
            output_tokens: self.output_tokens.with_label_values(&[MIXED, model]),
        }
    }

    /// Drops the series of workers that are gone, so that rollouts do not grow the page.
    pub fn forget_target(&self, model: &str, worker: &str, route_key: &str, role: &str) {
        // An error means that the series never existed.
        let _ = self.picks_total.remove_label_values(&[role, route_key]);
        let _ = self.ttft.remove_label_values(&[MIXED, model, worker]);
        let _ = self.prompt_tokens_total.remove_label_values(&[MIXED, model, worker]);
        let _ = self.generation_tokens_total.remove_label_values(&[MIXED, model, worker]);
    }
}

/// A shard's own table of target handles.
#[derive(Default)]
pub struct TargetHandles {
    by_target: RefCell<HashMap<TargetId, Rc<TargetMetrics>>>,
}

/// Handles kept per shard before departed targets are dropped by starting over.
const HANDLES_MAX: usize = 16_384;

impl TargetHandles {
    pub fn of(&self, metrics: &RequestMetrics, target: &crate::fleet::Target) -> Rc<TargetMetrics> {
        let mut by_target = self.by_target.borrow_mut();
        if let Some(handles) = by_target.get(&target.id) {
            return handles.clone();
        }
        if by_target.len() >= HANDLES_MAX {
            by_target.clear();
        }
        let record = &target.worker.record;
        let handles =
            metrics.target(&record.model_name, &target.worker.id, &target.route_key, record.disagg_mode.as_str());
        by_target.entry(target.id).or_insert(Rc::new(handles)).clone()
    }
}

struct Make<'a>(&'a Registry);

impl Make<'_> {
    fn counters(&self, name: &str, help: &str, labels: &[&str]) -> Result<IntCounterVec, prometheus::Error> {
        let family = IntCounterVec::new(Opts::new(name, help), labels)?;
        self.0.register(Box::new(family.clone()))?;
        Ok(family)
    }

    fn gauges(&self, name: &str, help: &str, labels: &[&str]) -> Result<IntGaugeVec, prometheus::Error> {
        let family = IntGaugeVec::new(Opts::new(name, help), labels)?;
        self.0.register(Box::new(family.clone()))?;
        Ok(family)
    }

    fn histograms(
        &self,
        name: &str,
        help: &str,
        labels: &[&str],
        buckets: &[f64],
    ) -> Result<HistogramVec, prometheus::Error> {
        let family = HistogramVec::new(HistogramOpts::new(name, help).buckets(buckets.to_vec()), labels)?;
        self.0.register(Box::new(family.clone()))?;
        Ok(family)
    }
}

impl From<http::StatusCode> for Outcome {
    fn from(status: http::StatusCode) -> Self {
        match status.as_u16() {
            ..=399 => Outcome::Ok,
            400..=499 => Outcome::ClientError,
            _ => Outcome::ServerError,
        }
    }
}
