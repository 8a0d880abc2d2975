//! Settings of the request path that a reload may change. One value for all shards, and a copy on each, which it looks at
//! without touching anything that another core writes. Never read from a file here.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arc_swap::ArcSwap;
use infera_shards::UpstreamTimeouts;

use super::keys::{ClientKeys, OutboundHeaders};
use super::shared::{DisaggregationSettings, InflightCaps};
use crate::breaker::BreakerSettings;
use crate::route::LoadTerm;
use crate::worker::Role;

/// In force from the next request on.
#[derive(Clone, Debug)]
pub struct LiveSettings {
    /// `--kv-overlap-weight`; absent: as the load term of the pick has it.
    pub overlap_weight: Option<f64>,
    /// `--kv-host-tier-weight`.
    pub host_tier_weight: f64,
    /// `--request-max-retries`: attempts on other workers after the first.
    pub retries_max: u32,
    /// `--retry-budget-percent`: retries, as a share of the requests.
    pub retry_budget_percent: f64,
    pub breaker: BreakerSettings,
    pub caps: InflightCaps,
    pub client_keys: ClientKeys,
    pub outbound: OutboundHeaders,
    pub disaggregation: DisaggregationSettings,
    pub upstream: UpstreamTimeouts,
    /// `--answer-names-worker`.
    pub answer_names_worker: bool,
}

impl LiveSettings {
    /// Weight of the cache term when a worker of this role is picked by this load term.
    pub fn overlap_weight_of(&self, role: Role, load_term: LoadTerm) -> f64 {
        let given = match role {
            Role::Mixed => self.overlap_weight,
            Role::Prefill => self.disaggregation.prefill_overlap_weight,
            Role::Decode => self.disaggregation.decode_overlap_weight,
        };
        given.unwrap_or_else(|| load_term.overlap_weight())
    }
}

/// The settings in force, written by the main thread.
pub struct LiveCell {
    current: ArcSwap<LiveSettings>,
    /// Raised behind every change: a shard that sees it finds the settings of that change, or newer ones.
    version: AtomicU64,
}

impl LiveCell {
    pub fn new(settings: LiveSettings) -> Self {
        Self { current: ArcSwap::from_pointee(settings), version: AtomicU64::new(0) }
    }

    /// In force on each shard from its next request on.
    pub fn replace(&self, settings: LiveSettings) {
        self.current.store(Arc::new(settings));
        self.version.fetch_add(1, Ordering::Release);
    }

    /// For one shard, and not the shared count: that one would be written by every shard at every request.
    fn copy(&self) -> Rc<LiveSettings> {
        Rc::new(LiveSettings::clone(&self.current.load()))
    }
}

/// One shard's copy.
pub(super) struct LiveCopy {
    settings: RefCell<Rc<LiveSettings>>,
    version: Cell<u64>,
}

impl LiveCopy {
    pub fn of(cell: &LiveCell) -> Self {
        let version = Cell::new(cell.version.load(Ordering::Acquire));
        Self { settings: RefCell::new(cell.copy()), version }
    }

    pub fn get(&self) -> Rc<LiveSettings> {
        self.settings.borrow().clone()
    }

    /// Follows the cell; the new settings if there are any.
    pub fn refresh(&self, cell: &LiveCell) -> Option<Rc<LiveSettings>> {
        let version = cell.version.load(Ordering::Acquire);
        if version == self.version.replace(version) {
            return None;
        }
        let newer = cell.copy();
        self.settings.replace(newer.clone());
        Some(newer)
    }
}
