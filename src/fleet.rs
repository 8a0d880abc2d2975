//! The immutable fleet: every known worker, its routing targets, and the pools per model. Built by the
//! ingest core, published together with the index, read by every shard. No IO, no locks, no clock.

mod parity;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use infera_shards::TlsName;

use crate::worker::{Generation, Name, Role, WorkerRecord};

pub use parity::{Parity, TargetParity};

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
    /// Whether the worker's own token ids are the router's, by asking it.
    pub probed: Parity,
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
    /// What its certificate must be for; absent where requests go over plain TCP.
    pub tls: Option<TlsName>,
    pub state: WorkerState,
    pub health: Arc<WorkerHealth>,
    pub speech: Arc<WorkerSpeech>,
    /// Id of the template arguments that the engine adds to every chat; absent where they are not known, and the fleet's
    /// are taken for them.
    pub variant: Option<u64>,
}

/// Identity of a target over the life of the process; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TargetId(pub u64);

/// Load of one target, changed by `crate::load` only. On its own pair of cache lines, so that neighbours do
/// not fight.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct TargetLoad {
    /// Distinct blocks of in-flight prompts; written by the ingest core only.
    pub(crate) distinct_blocks: AtomicU64,
    /// Blocks booked by shards and not yet read by the ingest core.
    pub(crate) pending_blocks: AtomicU64,
    /// In-flight requests without blocks; each weighs as one block.
    pub(crate) blockless_requests: AtomicU64,
    /// All in-flight requests.
    pub(crate) requests: AtomicU64,
    /// Blocks that the target has yet to compute for requests whose answers have not begun.
    pub(crate) queued_blocks: AtomicU64,
    /// When the target was last picked, nanoseconds on the caller's monotonic clock.
    pub(crate) picked_at_ns: AtomicU64,
    /// Blocks missed by recent picks, decayed; packed by `route` only.
    pub(crate) recent: AtomicU64,
}

/// Decode input in flight under one route key. Changed by decode demand only, inside its critical
/// section; anybody may read. Outlives the target while a reservation holds it, and is found again by a
/// worker that comes back meanwhile.
#[derive(Debug, Default)]
pub struct TargetDemand {
    /// Input tokens of the requests held, each times its samples.
    pub(crate) tokens: AtomicU64,
    /// Requests held.
    pub(crate) requests: AtomicU64,
}

impl TargetDemand {
    pub fn tokens(&self) -> u64 {
        self.tokens.load(Ordering::Relaxed)
    }

    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }
}

/// The demand cells by route key, for whoever builds fleets.
#[derive(Debug, Default)]
pub struct DemandCells {
    by_route_key: BTreeMap<Name, Weak<TargetDemand>>,
}

impl DemandCells {
    /// The cell of a route key: the one that a reservation or an older fleet still holds, else a new one.
    pub fn cell(&mut self, route_key: &Name) -> Arc<TargetDemand> {
        if let Some(cell) = self.by_route_key.get(route_key).and_then(Weak::upgrade) {
            return cell;
        }
        let cell = Arc::new(TargetDemand::default());
        self.by_route_key.insert(route_key.clone(), Arc::downgrade(&cell));
        cell
    }

    /// Drops what nobody holds any more, so that rollouts do not grow the map.
    pub fn forget_departed(&mut self) {
        self.by_route_key.retain(|_, cell| cell.strong_count() > 0);
    }
}

impl TargetLoad {
    /// Blocks in flight, the load term of the cost: distinct ones, plus one per request that has none.
    pub fn active_blocks(&self) -> u64 {
        // The ledger reads a release a moment after it happened. A client that goes on at once must not find its own
        // last request still charged: it would be sent away from its prefix.
        if self.requests() == 0 {
            return 0;
        }
        self.distinct_blocks.load(Ordering::Relaxed)
            + self.pending_blocks.load(Ordering::Relaxed)
            + self.blockless_requests.load(Ordering::Relaxed)
    }

    /// Blocks to be computed before all answers under way have begun; exact at once, unlike the distinct ones.
    pub fn queued_blocks(&self) -> u64 {
        self.queued_blocks.load(Ordering::Relaxed)
    }

    /// Requests in flight.
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    pub fn picked_at_ns(&self) -> u64 {
        self.picked_at_ns.load(Ordering::Relaxed)
    }
}

/// Which forms a worker has turned out not to know; lives as long as the worker's record.
#[derive(Debug, Default)]
pub struct WorkerSpeech {
    lacks_messages: AtomicBool,
}

impl WorkerSpeech {
    /// The worker does not know `/v1/messages`.
    pub fn lacks_messages(&self) -> bool {
        self.lacks_messages.load(Ordering::Relaxed)
    }

    /// Keeps that; true for who was the first to notice.
    pub fn note_lack_of_messages(&self) -> bool {
        !self.lacks_messages.swap(true, Ordering::Relaxed)
    }
}

/// Where a worker stands with the circuit breaker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HealthState {
    #[default]
    Well,
    /// No requests before a time; then one probe.
    Open,
    /// A probe is under way; its place is free again after a time.
    Probing,
    /// Not faulty, but it has asked for time.
    Resting,
}

impl HealthState {
    /// Whether the circuit breaker keeps requests away, but for a probe.
    pub fn is_open(self) -> bool {
        matches!(self, HealthState::Open | HealthState::Probing)
    }
}

/// All that the circuit breaker knows of a worker, as one value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HealthWord {
    pub state: HealthState,
    /// End of the state, milliseconds of the router's own clock; 40 bits, which is 34 years.
    pub until_ms: u64,
    /// How often the cool-down has doubled; 6 bits.
    pub level: u32,
    /// Faults in a row while well, and while open the requests for want of better ones since; 16 bits, the largest stands for
    /// more.
    pub faults: u32,
}

impl HealthWord {
    const UNTIL_MAX: u64 = (1 << 40) - 1;

    fn pack(self) -> u64 {
        let state = match self.state {
            HealthState::Well => 0,
            HealthState::Open => 1,
            HealthState::Probing => 2,
            HealthState::Resting => 3,
        };
        let (level, faults) = (self.level.min(63), self.faults.min(u32::from(u16::MAX)));
        state | self.until_ms.min(Self::UNTIL_MAX) << 2 | u64::from(level) << 42 | u64::from(faults) << 48
    }

    fn unpack(word: u64) -> Self {
        let state = match word & 3 {
            0 => HealthState::Well,
            1 => HealthState::Open,
            2 => HealthState::Probing,
            _ => HealthState::Resting,
        };
        let (level, faults) = ((word >> 42 & 63) as u32, (word >> 48) as u32);
        HealthWord { state, until_ms: word >> 2 & Self::UNTIL_MAX, level, faults }
    }
}

/// A worker's standing with the circuit breaker; changed by `crate::breaker` only. Lives as long as the registration
/// at one address: a worker that comes back is a new one.
#[derive(Debug, Default)]
pub struct WorkerHealth {
    word: AtomicU64,
    trips: AtomicU64,
    /// Workers of the fleet that are not well, this one included while it is not.
    ailing: Arc<AtomicUsize>,
}

impl WorkerHealth {
    /// A worker that is well, counted in `ailing` while it is not.
    pub fn new(ailing: Arc<AtomicUsize>) -> Self {
        Self { word: AtomicU64::default(), trips: AtomicU64::default(), ailing }
    }

    pub fn read(&self) -> HealthWord {
        HealthWord::unpack(self.word.load(Ordering::Relaxed))
    }

    /// Times that the worker was opened.
    pub fn trips(&self) -> u64 {
        self.trips.load(Ordering::Relaxed)
    }

    pub(crate) fn tripped(&self) {
        self.trips.fetch_add(1, Ordering::Relaxed);
    }

    /// Replaces the word by what `change` makes of it, in one step; gives both, or nothing where `change` wants none.
    pub(crate) fn update(&self, change: impl Fn(HealthWord) -> Option<HealthWord>) -> Option<(HealthWord, HealthWord)> {
        let packed = |word| change(HealthWord::unpack(word)).map(HealthWord::pack);
        let before = HealthWord::unpack(self.word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, packed).ok()?);
        let after = change(before)?;
        match (before.state == HealthState::Well, after.state == HealthState::Well) {
            (true, false) => _ = self.ailing.fetch_add(1, Ordering::Relaxed),
            (false, true) => _ = self.ailing.fetch_sub(1, Ordering::Relaxed),
            _ => {}
        }
        Some((before, after))
    }
}

impl Drop for WorkerHealth {
    fn drop(&mut self) {
        if self.read().state != HealthState::Well {
            self.ailing.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Identity of one state of a target's record; a fresh one whenever anything in the record changes, and never
/// reused. What was true of a worker under another record (a session's cache on it) need not be now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RecordId(pub u64);

/// One routing target: a worker, or one data-parallel rank of a rank-multiplexed worker.
#[derive(Debug)]
pub struct Target {
    pub id: TargetId,
    pub record_id: RecordId,
    pub slot: Slot,
    pub worker: Arc<Worker>,
    /// Set for a rank-multiplexed worker: sent as `X-Data-Parallel-Rank`.
    pub rank: Option<u32>,
    /// `worker_id` or `worker_id#dp<rank>`.
    pub route_key: Name,
    pub load: Arc<TargetLoad>,
    pub demand: Arc<TargetDemand>,
    pub parity: Arc<TargetParity>,
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
    /// Targets of the routable workers, sorted by worker id, then rank. Each has an address.
    pub targets: Vec<Target>,
    /// Pools by model name. A model is listed exactly while it has at least one routable target.
    pub models: BTreeMap<Name, ModelPool>,
    /// Workers, of this fleet or of one before it, that the circuit breaker knows as not well; mostly 0, and then no
    /// pick looks at any worker's own state.
    pub ailing: Arc<AtomicUsize>,
}

impl Fleet {
    /// Workers that requests may go to.
    pub fn active_workers(&self) -> usize {
        self.workers.iter().filter(|worker| worker.state == WorkerState::Active).count()
    }

    /// Targets of one of its workers, by rank.
    pub fn targets_of(&self, worker: &Worker) -> &[Target] {
        let start = self.targets.partition_point(|target| target.worker.id < worker.id);
        let end = self.targets.partition_point(|target| target.worker.id <= worker.id);
        &self.targets[start..end]
    }

    /// Whether any worker is not well.
    pub fn has_ailing(&self) -> bool {
        self.ailing.load(Ordering::Relaxed) > 0
    }
}

#[cfg(test)]
pub(crate) mod fixtures {
    //! Small fleets for the tests of the layers above.

    use super::*;

    /// One worker of a test fleet.
    pub(crate) struct Member {
        id: &'static str,
        model: &'static str,
        role: Role,
        ranks: u32,
    }

    pub(crate) fn member(id: &'static str, model: &'static str, role: Role) -> Member {
        Member { id, model, role, ranks: 1 }
    }

    impl Member {
        pub(crate) fn ranks(mut self, ranks: u32) -> Self {
            self.ranks = ranks;
            self
        }
    }

    /// Targets in the order of `members`, slots and ids counted from 0.
    pub(crate) fn fleet(members: &[Member]) -> Fleet {
        let mut fleet = Fleet::default();
        for (number, member) in members.iter().enumerate() {
            let record = WorkerRecord {
                model_name: member.model.to_owned(),
                disagg_mode: member.role,
                kv_block_size: Some(16),
                ..WorkerRecord::new(member.id, format!("http://{}", member.id))
            };
            let worker = Arc::new(Worker {
                id: member.id.into(),
                generation: Generation(number as u64),
                record,
                address: None,
                authority: member.id.to_owned(),
                base_path: String::new(),
                tls: None,
                state: WorkerState::Active,
                health: Arc::new(WorkerHealth::new(fleet.ailing.clone())),
                speech: Arc::default(),
                variant: None,
            });
            fleet.workers.push(worker.clone());
            for rank in 0..member.ranks {
                let index = fleet.targets.len() as u32;
                fleet.targets.push(Target {
                    id: TargetId(u64::from(index)),
                    record_id: RecordId(u64::from(index)),
                    slot: Slot(index),
                    worker: worker.clone(),
                    rank: (member.ranks > 1).then_some(rank),
                    route_key: member.id.into(),
                    load: Arc::default(),
                    demand: Arc::default(),
                    parity: Arc::default(),
                    block_size: Some(16),
                });
                let pool = fleet.models.entry(member.model.into()).or_default();
                match member.role {
                    Role::Mixed => pool.mixed.push(index),
                    Role::Prefill => pool.prefill.push(index),
                    Role::Decode => pool.decode.push(index),
                }
            }
        }
        fleet
    }
}
