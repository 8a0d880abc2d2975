//! What all shards hold in common: fixed settings, the published view, the prompt side, metrics, lifecycle.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use infera_shards::{Completion, Response};

use super::access::{self, AccessQueues};
use super::live::LiveCell;
use super::metrics::RequestMetrics;
use super::silence::SilenceLimits;
use super::stages::Stage;
use super::steering::Steering;
use crate::index::SharedView;
use crate::load::LedgerSink;
use crate::prompt::Prompter;
use crate::prompt::pool::EncoderPool;
use crate::route::Policy;

/// Settings of the request path that are fixed for the life of the process.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    pub policy: Policy,
    /// How many shards there are.
    pub shards: usize,
    pub silence: SilenceLimits,
}

/// Requests in flight beyond which further ones are answered with 429; `None` for no cap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InflightCaps {
    /// `--max-inflight`.
    pub total: Option<u64>,
    /// `--max-inflight-per-worker`, for each target: a rank-multiplexed worker has one per rank.
    pub per_target: Option<u64>,
}

/// Settings of requests that a prefill and a decode worker share.
#[derive(Clone, Debug)]
pub struct DisaggregationSettings {
    /// `--kv-prefill-overlap-weight`, else the global one.
    pub prefill_overlap_weight: Option<f64>,
    /// `--kv-decode-overlap-weight`, else the global one.
    pub decode_overlap_weight: Option<f64>,
    pub prefill_release: PrefillRelease,
    /// How long a prefill answer may go on after decode has ended; `None` for ever.
    pub prefill_drain_timeout: Option<Duration>,
    pub mode: RouterMode,
}

/// `--pd-prefill-guard-release`: when a request's charge leaves its prefill worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrefillRelease {
    /// When the decode answer has ended.
    Decode,
    /// When the prefill answer has ended.
    Completion,
}

/// `--router-mode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouterMode {
    /// This router picks.
    Auto,
    /// A gateway in front picks and names the workers in headers; without them as in auto mode.
    Direct,
}

/// Where the process stands; one atomic, written by `main`.
#[derive(Debug, Default)]
pub struct Lifecycle(AtomicU8);

impl Lifecycle {
    const DRAINING: u8 = 1;

    pub fn drain(&self) {
        self.0.store(Self::DRAINING, Ordering::Relaxed);
    }

    pub fn is_draining(&self) -> bool {
        self.0.load(Ordering::Relaxed) == Self::DRAINING
    }
}

/// A question that is answered off the shards.
#[derive(Debug, PartialEq, Eq)]
pub enum ControlAsk {
    /// The metrics page.
    Metrics,
    /// The fleet, record by record.
    Workers,
    /// Blocks mirrored for a worker, or for one of its ranks.
    CacheView { worker_id: String, rank: Option<u32> },
    /// The settings in force.
    Config,
    /// The log's filter; a new one first, where it is given.
    LogLevel { filter: Option<Bytes> },
    /// The fleet and its figures of the last minutes, for the dashboard.
    Overview,
    /// The dashboard's page.
    Dashboard,
}

/// The slow side as the request path sees it.
pub trait ControlPlane: Send + Sync {
    /// Takes the question, or drops the completion when too many wait already. Never blocks.
    fn submit(&self, ask: ControlAsk, answer: Completion<Response>);
}

/// One per process, shared by all shards.
pub struct Shared {
    pub settings: Settings,
    pub live: LiveCell,
    pub view: SharedView,
    pub ledger: Arc<dyn LedgerSink>,
    /// Absent without a tokenizer: prompts given as token ids still have blocks.
    pub prompter: Option<Arc<Prompter>>,
    pub encoders: EncoderPool,
    pub metrics: Arc<RequestMetrics>,
    pub steering: Arc<Steering>,
    pub control: Arc<dyn ControlPlane>,
    /// Absent without an access log.
    pub access: Option<Arc<AccessQueues>>,
    pub lifecycle: Arc<Lifecycle>,
    /// Zero of the monotonic nanoseconds that picks are stamped with.
    pub epoch: Instant,
    /// Start of the process, Unix seconds.
    pub started_unix_seconds: u64,
}

impl Shared {
    /// Lets the encoder threads help each other with one long cold prompt.
    pub fn share_encoders(self: &Arc<Self>) {
        // Weak: the prompter is part of what it would hold.
        let shared = Arc::downgrade(self);
        let submit =
            move |job: Box<dyn FnOnce() + Send>| shared.upgrade().is_some_and(|shared| shared.encoders.submit(job));
        let others = self.encoders.threads().saturating_sub(1);
        if let Some(prompter) = self.prompter.as_ref().filter(|_| others > 0) {
            prompter.set_volunteers(others, Arc::new(submit));
        }
    }

    /// A stage of the request at hand took so long on this shard.
    pub(super) fn took(&self, shard: usize, stage: Stage, took: Duration) {
        if let Some(stages) = self.metrics.stages.of_shard(shard) {
            stages.observe(stage, took);
        }
        access::note(|line| line.stages[stage as usize] += took);
    }

    /// An attempt is repeated on another worker.
    pub(super) fn retried(&self, reason: &'static str) {
        self.metrics.retried(reason);
        access::note(|line| line.retries += 1);
    }

    /// A moment as picks are stamped with it.
    pub fn ns_at(&self, moment: Instant) -> u64 {
        moment.duration_since(self.epoch).as_nanos() as u64
    }

    /// The same clock as the circuit breaker has it.
    pub fn now_ms(&self) -> u64 {
        self.epoch.elapsed().as_millis() as u64
    }
}
