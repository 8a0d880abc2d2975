//! The immutable fleet: every known worker, its routing targets, and the pools per model. Built by the
//! ingest core, published together with the index, read by every shard. No IO, no locks, no clock.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};

use crate::load::{TargetId, TargetLoad};
use crate::worker::{Generation, Name, Role, WorkerRecord};

/// Small dense number of a target in the index; given out by the ingest core, reused only after every
/// trace of the former holder is gone from the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Slot(pub u32);

/// Whether and why requests may go to a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkerState {
    Active,
    /// Registered with a status other than `active`.
    Inactive,
    /// Not routable yet; the reason is shown in `/v1/workers` (model or address not known so far, …).
    Pending(String),
}

/// What discovery hands over for each worker: the record as registered (and completed by asking the
/// engine), and its resolved address.
#[derive(Clone, Debug, PartialEq)]
pub struct DiscoveredWorker {
    pub record: WorkerRecord,
    /// Resolved `host:port` of the record's URL; absent while it does not resolve.
    pub address: Option<SocketAddr>,
    pub state: WorkerState,
}

/// One registration of one worker.
#[derive(Debug)]
pub struct Worker {
    pub id: Name,
    pub generation: Generation,
    pub record: WorkerRecord,
    pub address: Option<SocketAddr>,
    /// Value of the `Host` header: `host:port` as in the record's URL.
    pub authority: String,
    /// Path in front of every request's path (the URL's own path without its trailing slash), mostly empty.
    pub base_path: String,
    pub state: WorkerState,
}

/// One routing target: a worker, or one data-parallel rank of a rank-multiplexed worker.
#[derive(Debug)]
pub struct Target {
    pub id: TargetId,
    pub slot: Slot,
    pub worker: Arc<Worker>,
    /// Set for a rank-multiplexed worker: sent as `X-Data-Parallel-Rank`.
    pub rank: Option<u32>,
    /// `worker_id` or `worker_id#dp<rank>`.
    pub route_key: Name,
    pub load: Arc<TargetLoad>,
    pub demand: Arc<TargetDemand>,
    /// Tokens per block; absent when the worker has no (usable) block size.
    pub block_size: Option<u32>,
}

/// Targets of one model by role; indexes into [`Fleet::targets`], in stable order.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct ModelPool {
    pub mixed: Vec<u32>,
    pub prefill: Vec<u32>,
    pub decode: Vec<u32>,
}

impl ModelPool {
    pub fn of(&self, role: Role) -> &[u32] {
        match role {
            Role::Mixed => &self.mixed,
            Role::Prefill => &self.prefill,
            Role::Decode => &self.decode,
        }
    }
}

/// Everything routable, and everything known.
#[derive(Debug, Default)]
pub struct Fleet {
    /// Every known worker, sorted by id.
    pub workers: Vec<Arc<Worker>>,
    /// Targets of the routable workers, sorted by worker id, then rank.
    pub targets: Vec<Target>,
    /// Pools by model name. A model is listed exactly while it has at least one routable target.
    pub models: BTreeMap<Name, ModelPool>,
}
