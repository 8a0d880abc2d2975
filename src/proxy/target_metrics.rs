//! Metrics of single targets: their families, the handles that a shard holds, and the forgetting of series whose worker
//! has left. A shard looks a target up once and then touches atomics only. Who has left is decided elsewhere (`metrics`).

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam::queue::SegQueue;
use hashbrown::HashMap;
use prometheus::core::Collector;
use prometheus::{Histogram, HistogramVec, IntCounter, IntCounterVec};

use super::metrics::{Make, RouterLabel};
use crate::fleet::{RecordId, Target};
use crate::limits::SLOTS_MAX;
use crate::worker::{Name, Role};

const TTFT_BUCKETS_SECONDS: &[f64] = &[0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];
const INPUT_TOKEN_BUCKETS: &[f64] = &[64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0, 1048576.0];
const OUTPUT_TOKEN_BUCKETS: &[f64] = &[4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0];

/// The labels of series that live and end together.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Series {
    /// Of one rank of a worker; `rank` is absent where requests name none.
    Target { role: Role, worker: Name, rank: Option<u32>, route_key: Name },
    /// Of all ranks together.
    Worker { router: RouterLabel, model: Name, worker: Name },
    /// Of all workers of a model together.
    Model { router: RouterLabel, model: Name },
}

/// What was counted for one target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TargetTotals {
    pub picks: u64,
    pub blocks_hit: u64,
    pub blocks: u64,
}

/// One of them.
type TargetNumber = fn(&mut TargetTotals) -> &mut u64;

/// The families; one per process, shared by all shards.
pub struct TargetFamilies {
    picks_total: IntCounterVec,
    blocks_hit_total: IntCounterVec,
    blocks_total: IntCounterVec,
    ttft: HistogramVec,
    prompt_tokens_total: IntCounterVec,
    generation_tokens_total: IntCounterVec,
    input_tokens: HistogramVec,
    output_tokens: HistogramVec,
    /// Series that a shard has looked up, for whoever watches over their end. A queue, so that no shard waits for another.
    looked_up: SegQueue<Series>,
    /// Grows when series are dropped: handles taken before that may count into the void.
    forgotten: AtomicU64,
}

/// Handles of one target, held by a shard.
pub struct TargetMetrics {
    /// Names the target in reports.
    pub route_key: Name,
    pub picks: IntCounter,
    pub blocks_hit: IntCounter,
    pub blocks: IntCounter,
    pub ttft: Histogram,
    pub prompt_tokens: IntCounter,
    pub generation_tokens: IntCounter,
    pub input_tokens: Histogram,
    pub output_tokens: Histogram,
}

impl TargetFamilies {
    /// Registers them; fails only if two share a name, which a test would see.
    pub(super) fn new(make: &Make<'_>) -> Result<Self, prometheus::Error> {
        Ok(Self {
            picks_total: make.counters("infera_router_picks_total", "Picks per target.", &["role", "worker_id"])?,
            blocks_hit_total: make.counters(
                "infera_router_target_blocks_hit_total",
                "Prompt blocks that the target already held when it was picked.",
                &["role", "worker_id"],
            )?,
            blocks_total: make.counters(
                "infera_router_target_blocks_total",
                "Full blocks of the prompts that the target was picked for.",
                &["role", "worker_id"],
            )?,
            ttft: make.histograms(
                "infera_time_to_first_token_seconds",
                "Seconds from the request's last byte to the first byte of the answer's body.",
                &["router", "model", "prefill_worker"],
                TTFT_BUCKETS_SECONDS,
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
            looked_up: SegQueue::new(),
            forgotten: AtomicU64::new(0),
        })
    }

    /// Makes the series that are missing.
    fn of(&self, target: &Target) -> TargetMetrics {
        let record = &target.worker.record;
        let (role, model) = (record.disagg_mode, &*record.model_name);
        let (router, worker) = (RouterLabel::of(role), &target.worker.id);
        let (of_target, of_worker) = ([role.as_str(), &*target.route_key], [router.as_str(), model, &**worker]);
        let of_model = &of_worker[..2];
        let handles = TargetMetrics {
            route_key: target.route_key.clone(),
            picks: self.picks_total.with_label_values(&of_target),
            blocks_hit: self.blocks_hit_total.with_label_values(&of_target),
            blocks: self.blocks_total.with_label_values(&of_target),
            ttft: self.ttft.with_label_values(&of_worker),
            prompt_tokens: self.prompt_tokens_total.with_label_values(&of_worker),
            generation_tokens: self.generation_tokens_total.with_label_values(&of_worker),
            input_tokens: self.input_tokens.with_label_values(of_model),
            output_tokens: self.output_tokens.with_label_values(of_model),
        };
        let (worker, model, route_key) = (worker.clone(), Name::from(model), target.route_key.clone());
        self.looked_up.push(Series::Target { role, worker: worker.clone(), rank: target.rank, route_key });
        self.looked_up.push(Series::Worker { router, model: model.clone(), worker });
        self.looked_up.push(Series::Model { router, model });
        handles
    }

    /// Series that shards have looked up since the last call, repeats included.
    pub fn looked_up(&self) -> impl Iterator<Item = Series> + '_ {
        std::iter::from_fn(|| self.looked_up.pop())
    }

    /// Drops these series. Shards look their targets up anew at their next picks, so that of a worker that is back nothing
    /// is lost but what is counted between the two steps here.
    pub fn forget<'a>(&self, series: impl Iterator<Item = &'a Series>) {
        // An error of the removals means that there is no such series.
        for series in series {
            match series {
                Series::Target { role, route_key, .. } => {
                    for family in [&self.picks_total, &self.blocks_hit_total, &self.blocks_total] {
                        let _ = family.remove_label_values(&[role.as_str(), &**route_key]);
                    }
                }
                Series::Worker { router, model, worker } => {
                    let labels = [router.as_str(), &**model, &**worker];
                    let _ = self.ttft.remove_label_values(&labels);
                    let _ = self.prompt_tokens_total.remove_label_values(&labels);
                    let _ = self.generation_tokens_total.remove_label_values(&labels);
                }
                Series::Model { router, model } => {
                    let labels = [router.as_str(), &**model];
                    let _ = self.input_tokens.remove_label_values(&labels);
                    let _ = self.output_tokens.remove_label_values(&labels);
                }
            }
        }
        self.forgotten.fetch_add(1, Ordering::Release);
    }

    /// By route key. Makes no series of targets that nobody was sent to.
    pub fn totals(&self) -> BTreeMap<String, TargetTotals> {
        let mut totals: BTreeMap<String, TargetTotals> = BTreeMap::new();
        let families: [(&IntCounterVec, TargetNumber); 3] = [
            (&self.picks_total, |totals| &mut totals.picks),
            (&self.blocks_hit_total, |totals| &mut totals.blocks_hit),
            (&self.blocks_total, |totals| &mut totals.blocks),
        ];
        for (family, number) in families {
            for metric in family.collect().iter().flat_map(|family| family.get_metric()) {
                let route_key = metric.get_label().iter().find(|label| label.name() == "worker_id");
                let Some(route_key) = route_key else { continue };
                *number(totals.entry(route_key.value().to_owned()).or_default()) +=
                    metric.get_counter().get_value() as u64;
            }
        }
        totals
    }
}

/// A shard's own table of target handles, by record: one that has changed its role counts under its new labels.
#[derive(Default)]
pub struct TargetHandles {
    by_record: RefCell<HashMap<RecordId, Rc<TargetMetrics>>>,
    /// [`TargetFamilies::forgotten`] as it was when the table was begun.
    forgotten: Cell<u64>,
}

/// Entries of the table; beyond them it begins anew.
const HANDLES_MAX: usize = SLOTS_MAX;

impl TargetHandles {
    pub fn of(&self, families: &TargetFamilies, target: &Target) -> Rc<TargetMetrics> {
        let mut by_record = self.by_record.borrow_mut();
        let forgotten = families.forgotten.load(Ordering::Acquire);
        if self.forgotten.replace(forgotten) != forgotten || by_record.len() >= HANDLES_MAX {
            *by_record = HashMap::new();
        }
        by_record.entry(target.record_id).or_insert_with(|| Rc::new(families.of(target))).clone()
    }

    pub fn len(&self) -> usize {
        self.by_record.borrow().len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
