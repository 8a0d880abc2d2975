//! Metrics that the request path writes, but for those of single targets (`target_metrics`). Names are those of the system
//! this one replaces. Never reads what others count.

use prometheus::{
    Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
};

use super::silence::SilentPhase;
use super::stages::Stages;
use super::target_metrics::TargetFamilies;
use crate::prompt::NoBlocks;
use crate::worker::Role;

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

/// Who serves a request; the `router` label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RouterLabel {
    /// One worker.
    Mixed,
    /// A prefill and a decode worker.
    Disagg,
}

impl RouterLabel {
    const ALL: [RouterLabel; 2] = [RouterLabel::Mixed, RouterLabel::Disagg];

    pub(super) const fn as_str(self) -> &'static str {
        match self {
            RouterLabel::Mixed => "mixed",
            RouterLabel::Disagg => "disagg",
        }
    }

    /// Which of them a worker of this role has a part in.
    pub const fn of(role: Role) -> Self {
        match role {
            Role::Mixed => RouterLabel::Mixed,
            Role::Prefill | Role::Decode => RouterLabel::Disagg,
        }
    }
}

/// Figures of the picks for one role.
struct RoleMetrics {
    pick_cache_hits: Histogram,
    pick_request_blocks: Histogram,
    prefix_blocks_hit_total: IntCounter,
    prefix_blocks_total: IntCounter,
}

/// What becomes of pairs and their transfers.
pub struct PairMetrics {
    leg_failures_total: IntCounterVec,
    aborts_total: IntCounterVec,
    pub stranded_transfers_total: IntCounter,
    pub prefills_without_handoff_total: IntCounter,
}

impl PairMetrics {
    fn new(make: &Make<'_>) -> Result<Self, prometheus::Error> {
        Ok(Self {
            leg_failures_total: make.counters(
                "infera_router_pd_leg_failures_total",
                "Legs of prefill/decode pairs that failed, by leg and by what happened.",
                &["leg", "reason"],
            )?,
            aborts_total: make.counters(
                "infera_router_pd_aborts_total",
                "Calls that ended a leg or freed its KV on a worker, by how they ended.",
                &["result"],
            )?,
            stranded_transfers_total: make.counter(
                "infera_router_pd_stranded_transfers_total",
                "Transfers whose KV may stay on a prefill worker until its own timer frees it.",
            )?,
            prefills_without_handoff_total: make.counter(
                "infera_router_pd_prefills_without_handoff_total",
                "Prefill answers without transfer parameters; decode computed the prompt itself.",
            )?,
        })
    }

    /// A leg failed; `leg` is the role's name, `reason` the phase or `status`.
    pub fn leg_failed(&self, leg: Role, reason: &str) {
        self.leg_failures_total.with_label_values(&[leg.as_str(), reason]).inc();
    }

    /// An abort call or a release of held KV has ended.
    pub fn aborted(&self, is_ok: bool) {
        self.aborts_total.with_label_values(&[if is_ok { "ok" } else { "failed" }]).inc();
    }
}

const DURATION_BUCKETS_SECONDS: &[f64] = &[0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];
const BLOCK_BUCKETS: &[f64] = &[0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0];
const PROMPT_BUCKETS_SECONDS: &[f64] = &[0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0];

/// Process-wide request metrics. One per process; made at start, shared by all shards.
pub struct RequestMetrics {
    registry: Registry,
    /// By router label, then by outcome.
    outcomes: [Vec<(IntCounter, Histogram)>; 2],
    inflight: [IntGauge; 2],
    /// In the order of [`Role::ALL`].
    roles: [RoleMetrics; 3],
    pub pairs: PairMetrics,
    pub targets: TargetFamilies,
    retries_total: IntCounterVec,
    retries_refused_total: IntCounter,
    refused_keys_total: IntCounter,
    silent_streams_total: [IntCounter; SilentPhase::ALL.len()],
    prompt_failures_total: IntCounterVec,
    prompt_seconds: Histogram,
    pub stages: Stages,
}

/// What has been counted since the start, all requests together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    pub requests: u64,
    /// Those that did not end well by the router's or a worker's fault.
    pub failed: u64,
    /// Blocks that picked workers held, and blocks of the prompts; a pair counts for prefill.
    pub blocks_hit: u64,
    pub blocks: u64,
}

impl RequestMetrics {
    /// Registers every family; fails only if two share a name, which a test would see.
    pub fn new(shards: usize) -> Result<Self, prometheus::Error> {
        let registry = Registry::new();
        let stages = Stages::new(shards)?;
        registry.register(Box::new(stages.clone()))?;
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
        let silent_streams = make.counters(
            "infera_router_silent_streams_total",
            "Streams reported as silent for too long, by phase.",
            &["phase"],
        )?;
        let prompt_seconds = Histogram::with_opts(
            HistogramOpts::new("infera_router_prompt_seconds", "Seconds spent on turning a body into block hashes.")
                .buckets(PROMPT_BUCKETS_SECONDS.to_vec()),
        )?;
        registry.register(Box::new(prompt_seconds.clone()))?;
        Ok(Self {
            outcomes: RouterLabel::ALL.map(|router| {
                let labels = OUTCOMES.iter().map(|(_, outcome)| [router.as_str(), *outcome]);
                labels.map(|it| (totals.with_label_values(&it), durations.with_label_values(&it))).collect()
            }),
            inflight: RouterLabel::ALL.map(|router| inflight.with_label_values(&[router.as_str()])),
            roles: Role::ALL.map(|role| {
                let label = [role.as_str()];
                RoleMetrics {
                    pick_cache_hits: cache_hits.with_label_values(&label),
                    pick_request_blocks: request_blocks.with_label_values(&label),
                    prefix_blocks_hit_total: blocks_hit.with_label_values(&label),
                    prefix_blocks_total: blocks.with_label_values(&label),
                }
            }),
            pairs: PairMetrics::new(&make)?,
            targets: TargetFamilies::new(&make)?,
            retries_total: make.counters(
                "infera_router_retries_total",
                "Attempts repeated on another worker, by what ended the one before.",
                &["reason"],
            )?,
            refused_keys_total: make
                .counter("infera_router_refused_keys_total", "Requests without one of the router's keys.")?,
            retries_refused_total: make.counter(
                "infera_router_retries_refused_total",
                "Failures passed on to the client because the retry budget was spent.",
            )?,
            silent_streams_total: SilentPhase::ALL.map(|phase| silent_streams.with_label_values(&[phase.as_str()])),
            prompt_failures_total: make.counters(
                "infera_router_prompt_failures_total",
                "Requests routed by load alone because their prompt gave no blocks.",
                &["reason"],
            )?,
            prompt_seconds,
            stages,
            registry,
        })
    }

    /// What has been counted since the start.
    pub fn totals(&self) -> Totals {
        let mut totals = Totals::default();
        for ((outcome, _), (total, _)) in self.outcomes.iter().flat_map(|by| OUTCOMES.iter().zip(by)) {
            totals.requests += total.get();
            if matches!(outcome, Outcome::ServerError | Outcome::Error) {
                totals.failed += total.get();
            }
        }
        let with_prompts = Role::ALL.iter().zip(&self.roles).filter(|(role, _)| **role != Role::Decode);
        for (_, metrics) in with_prompts {
            totals.blocks_hit += metrics.prefix_blocks_hit_total.get();
            totals.blocks += metrics.prefix_blocks_total.get();
        }
        totals
    }

    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    pub fn request_started(&self, router: RouterLabel) {
        self.inflight[router as usize].inc();
    }

    /// A request that was counted under `from` is served under `to`.
    pub fn request_moved(&self, from: RouterLabel, to: RouterLabel) {
        self.inflight[to as usize].inc();
        self.inflight[from as usize].dec();
    }

    pub fn request_ended(&self, router: RouterLabel, outcome: Outcome, seconds: f64) {
        self.inflight[router as usize].dec();
        if let Some(place) = OUTCOMES.iter().position(|(known, _)| *known == outcome) {
            let (total, duration) = &self.outcomes[router as usize][place];
            total.inc();
            duration.observe(seconds);
        }
    }

    /// One pick of the kv-aware policy; a prompt without blocks counts as 0 of 0 and not as a miss.
    pub fn picked(&self, role: Role, cache_hits: u32, request_blocks: u32) {
        let metrics = &self.roles[role as usize];
        metrics.pick_cache_hits.observe(f64::from(cache_hits));
        metrics.pick_request_blocks.observe(f64::from(request_blocks));
        if request_blocks > 0 {
            metrics.prefix_blocks_hit_total.inc_by(u64::from(cache_hits));
            metrics.prefix_blocks_total.inc_by(u64::from(request_blocks));
        }
    }

    pub fn retried(&self, reason: &'static str) {
        self.retries_total.with_label_values(&[reason]).inc();
    }

    pub fn retry_refused(&self) {
        self.retries_refused_total.inc();
    }

    pub fn refused_key(&self) {
        self.refused_keys_total.inc();
    }

    pub fn stream_was_silent(&self, phase: SilentPhase) {
        self.silent_streams_total[phase as usize].inc();
    }

    /// Requests being served now.
    pub fn inflight(&self) -> u64 {
        self.inflight.iter().map(|gauge| gauge.get().max(0) as u64).sum()
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
}

/// Makes families and registers them.
pub(super) struct Make<'a>(&'a Registry);

impl Make<'_> {
    pub(super) fn counters(&self, name: &str, help: &str, labels: &[&str]) -> Result<IntCounterVec, prometheus::Error> {
        let family = IntCounterVec::new(Opts::new(name, help), labels)?;
        self.0.register(Box::new(family.clone()))?;
        Ok(family)
    }

    fn counter(&self, name: &str, help: &str) -> Result<IntCounter, prometheus::Error> {
        let counter = IntCounter::new(name, help)?;
        self.0.register(Box::new(counter.clone()))?;
        Ok(counter)
    }

    fn gauges(&self, name: &str, help: &str, labels: &[&str]) -> Result<IntGaugeVec, prometheus::Error> {
        let family = IntGaugeVec::new(Opts::new(name, help), labels)?;
        self.0.register(Box::new(family.clone()))?;
        Ok(family)
    }

    pub(super) fn histograms(
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
