//! Registrations of workers and the fleet made of them: generations, slots, target ids, pools per model. Never opens a
//! socket; the core opens and closes what [`Registry::update`] says.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use infera_shards::TlsName;

use crate::fleet::{
    DemandCells, DiscoveredWorker, Fleet, ModelPool, RecordId, Slot, Target, TargetDemand, TargetParity, Worker,
    WorkerHealth, WorkerSpeech, WorkerState,
};
use crate::limits::{DP_RANKS_MAX, SLOTS_MAX};
use crate::load::{TargetId, TargetLoad};
use crate::prompt::Variant;
use crate::worker::{Generation, Name, Role, WorkerRecord};

/// One rank of one registration.
#[derive(Clone, Debug)]
pub struct Rank {
    pub slot: Slot,
    pub target: TargetId,
    pub record_id: RecordId,
    /// `worker_id` or `worker_id#dp<rank>`.
    pub route_key: Name,
    pub load: Arc<TargetLoad>,
    pub demand: Arc<TargetDemand>,
    pub parity: Arc<TargetParity>,
}

/// One worker as registered now.
#[derive(Debug)]
pub struct Registration {
    pub worker: Arc<Worker>,
    pub ranks: Vec<Rank>,
}

/// What an update has changed, for the core to follow.
#[derive(Debug, Default)]
pub struct Changes {
    /// Slots whose holder has gone; each is to be given back with [`Registry::release`] once the index has no trace of it.
    pub left: Vec<Slot>,
    /// Ids of workers that are new registrations.
    pub joined: Vec<Name>,
}

#[derive(Debug, Default)]
pub struct Registry {
    workers: BTreeMap<Name, Registration>,
    free_slots: BTreeSet<u32>,
    slots: u32,
    next_target: u64,
    next_record: u64,
    demand: DemandCells,
    next_generation: u64,
    ailing: Arc<AtomicUsize>,
}

impl Registry {
    pub fn get(&self, worker_id: &str) -> Option<&Registration> {
        self.workers.get(worker_id)
    }

    /// One more than the largest slot in use.
    pub fn slot_bound(&self) -> usize {
        self.slots as usize
    }

    /// Makes the registrations those of `discovered`. A worker named twice counts once, as named first.
    pub fn update(&mut self, discovered: Vec<DiscoveredWorker>) -> Changes {
        let mut changes = Changes::default();
        let mut wanted: BTreeMap<Name, DiscoveredWorker> = BTreeMap::new();
        for worker in discovered {
            let id: Name = worker.record.worker_id.as_str().into();
            if wanted.contains_key(&id) {
                tracing::warn!(worker_id = %id, "a worker is named twice; the first record counts");
                continue;
            }
            wanted.insert(id, worker);
        }
        let gone: Vec<Name> = self
            .workers
            .iter()
            .filter(|(id, known)| {
                !wanted.get(*id).is_some_and(|new| is_same_registration(&known.worker.record, &new.record))
            })
            .map(|(id, _)| id.clone())
            .collect();
        for id in gone {
            if let Some(registration) = self.workers.remove(&id) {
                changes.left.extend(registration.ranks.iter().map(|rank| rank.slot));
            }
        }
        for (id, new) in wanted {
            if let Some(known) = self.workers.get_mut(&id) {
                let is_same_record = known.worker.record == new.record;
                if !is_same_record {
                    for rank in &mut known.ranks {
                        self.next_record += 1;
                        rank.record_id = RecordId(self.next_record);
                    }
                }
                known.ranks.iter().for_each(|rank| rank.parity.set_probed(new.probed));
                // What was learned of one address says nothing about another.
                let health = match known.worker.record.url == new.record.url {
                    true => known.worker.health.clone(),
                    false => Arc::new(WorkerHealth::new(self.ailing.clone())),
                };
                let speech = if is_same_record { known.worker.speech.clone() } else { Arc::default() };
                known.worker = Arc::new(worker(id, known.worker.generation, new, health, speech));
            } else if self.join(id.clone(), new) {
                changes.joined.push(id);
            }
        }
        changes
    }

    fn join(&mut self, id: Name, new: DiscoveredWorker) -> bool {
        let wanted = new.record.rank_count();
        if wanted > DP_RANKS_MAX {
            tracing::error!(worker_id = %id, ranks = wanted, "a worker has more ranks than the router can hold; the rest is ignored");
        }
        let count = wanted.min(DP_RANKS_MAX);
        if self.slots as usize - self.free_slots.len() + count as usize > SLOTS_MAX {
            tracing::error!(worker_id = %id, slots = SLOTS_MAX, "the index has no slot left; the worker is ignored");
            return false;
        }
        let is_multiplexed = new.record.is_rank_multiplexed();
        let route_key = |number| if is_multiplexed { format!("{id}#dp{number}").into() } else { id.clone() };
        let ranks: Vec<Rank> = (0..count).map(|number| self.rank(route_key(number))).collect();
        ranks.iter().for_each(|rank| rank.parity.set_probed(new.probed));
        self.demand.forget_departed();
        self.next_generation += 1;
        let health = Arc::new(WorkerHealth::new(self.ailing.clone()));
        let worker = Arc::new(worker(id.clone(), Generation(self.next_generation), new, health, Arc::default()));
        self.workers.insert(id, Registration { worker, ranks });
        true
    }

    fn rank(&mut self, route_key: Name) -> Rank {
        let slot = self.free_slots.pop_first().unwrap_or_else(|| {
            self.slots += 1;
            self.slots - 1
        });
        self.next_target += 1;
        self.next_record += 1;
        Rank {
            slot: Slot(slot),
            target: TargetId(self.next_target),
            record_id: RecordId(self.next_record),
            load: Arc::default(),
            parity: Arc::default(),
            // The same cell as before while requests of an earlier registration are still in flight.
            demand: self.demand.cell(&route_key),
            route_key,
        }
    }

    /// Gives a slot back: nothing in the index belongs to its former holder any more.
    pub fn release(&mut self, slot: Slot) {
        self.free_slots.insert(slot.0);
        while self.slots > 0 && self.free_slots.remove(&(self.slots - 1)) {
            self.slots -= 1;
        }
    }

    /// The fleet as it stands. `learned` gives the block size that a slot's events have shown.
    pub fn fleet(&self, learned: impl Fn(Slot) -> Option<u32>) -> Fleet {
        let mut fleet = Fleet { ailing: self.ailing.clone(), ..Fleet::default() };
        // Pools name targets by place; grouping by name first would lose the stable order of worker and rank.
        let mut models: HashMap<&str, ModelPool> = HashMap::new();
        for registration in self.workers.values() {
            let worker = &registration.worker;
            fleet.workers.push(worker.clone());
            if worker.state != WorkerState::Active {
                continue;
            }
            let first = fleet.targets.len() as u32;
            for name in worker.record.model_names() {
                let pool = models.entry(name).or_default();
                let of_role = match worker.record.disagg_mode {
                    Role::Mixed => &mut pool.mixed,
                    Role::Prefill => &mut pool.prefill,
                    Role::Decode => &mut pool.decode,
                };
                of_role.extend((first..).take(registration.ranks.len()));
            }
            for (number, rank) in registration.ranks.iter().enumerate() {
                fleet.targets.push(Target {
                    id: rank.target,
                    record_id: rank.record_id,
                    slot: rank.slot,
                    worker: worker.clone(),
                    rank: worker.record.is_rank_multiplexed().then_some(number as u32),
                    route_key: rank.route_key.clone(),
                    load: rank.load.clone(),
                    demand: rank.demand.clone(),
                    parity: rank.parity.clone(),
                    block_size: worker.record.kv_block_size.filter(|size| *size > 0).or_else(|| learned(rank.slot)),
                });
            }
        }
        fleet.models = models.into_iter().map(|(name, pool)| (name.into(), pool)).collect();
        fleet
    }
}

/// Whether a new record is the same registration: then the engine's cache, and so the mirror, is the same. What was not known
/// before and is now (a static worker is asked for its model, block size and event address) changes nothing.
fn is_same_registration(known: &WorkerRecord, new: &WorkerRecord) -> bool {
    fn agrees<T: PartialEq>(known: Option<T>, new: Option<T>) -> bool {
        known.is_none() || new.is_none() || known == new
    }
    let model = |record: &WorkerRecord| (!record.model_name.is_empty()).then(|| record.model_name.clone());
    (known.kv_events_endpoint.is_none() || known.kv_events_endpoint == new.kv_events_endpoint)
        && known.rank_count() == new.rank_count()
        && known.dp_rank == new.dp_rank
        && agrees(known.kv_block_size, new.kv_block_size)
        && agrees(model(known), model(new))
}

fn worker(
    id: Name,
    generation: Generation,
    discovered: DiscoveredWorker,
    health: Arc<WorkerHealth>,
    speech: Arc<WorkerSpeech>,
) -> Worker {
    let record = discovered.record;
    let (authority, base_path, tls, fault) = match record.endpoint() {
        Ok(url) if url.is_tls => {
            let name = TlsName::parse(&url.host);
            let fault = name.is_none().then(|| format!("no certificate can be for the host `{}`", url.host));
            (url.authority, url.base_path, name, fault)
        }
        Ok(url) => (url.authority, url.base_path, None, None),
        Err(error) => (String::new(), String::new(), None, Some(error.to_string())),
    };
    let state = match discovered.state {
        WorkerState::Active if !record.is_active() => WorkerState::Inactive,
        WorkerState::Active => match fault {
            Some(fault) => WorkerState::Pending(fault),
            None if record.model_name.is_empty() => WorkerState::Pending("model name not known yet".to_owned()),
            None if discovered.address.is_none() => WorkerState::Pending("address does not resolve".to_owned()),
            None => WorkerState::Active,
        },
        state => state,
    };
    let variant = record.default_chat_template_kwargs.as_ref().and_then(|arguments| match Variant::of(arguments) {
        Ok(variant) => Some(variant.id()),
        Err(error) => {
            tracing::warn!(worker_id = %id, %error, "the worker's template arguments cannot be used; the fleet's are");
            None
        }
    });
    let address = discovered.address;
    Worker { id, generation, record, address, authority, base_path, tls, state, health, speech, variant }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::Parity;

    fn discovered(json: serde_json::Value) -> DiscoveredWorker {
        let record: WorkerRecord = serde_json::from_value(json).unwrap();
        DiscoveredWorker {
            record,
            address: Some(([127, 0, 0, 1], 80).into()),
            state: WorkerState::Active,
            probed: Parity::Unknown,
        }
    }

    fn plain(id: &str) -> serde_json::Value {
        serde_json::json!({"worker_id": id, "url": format!("http://{id}/base/"), "model_name": "m",
            "kv_events_endpoint": "tcp://127.0.0.1:5557"})
    }

    #[test]
    fn a_fleet_lists_targets_by_worker_and_rank_and_models_by_routable_targets() {
        let mut registry = Registry::default();
        let mut ranked = plain("b:1");
        ranked["dp_size"] = 2.into();
        ranked["disagg_mode"] = "decode".into();
        let mut nameless = plain("c:1");
        nameless["model_name"] = "".into();
        let mut draining = plain("d:1");
        draining["status"] = "draining".into();
        draining["model_name"] = "other".into();
        let all = [draining, ranked, nameless, plain("a:1"), plain("a:1")];
        let changes = registry.update(all.into_iter().map(discovered).collect());
        assert_eq!((changes.joined.len(), changes.left.len()), (4, 0));
        let fleet = registry.fleet(|_| Some(32));
        let keys: Vec<&str> = fleet.targets.iter().map(|target| &*target.route_key).collect();
        assert_eq!(keys, ["a:1", "b:1#dp0", "b:1#dp1"]);
        assert_eq!(fleet.targets[1].rank, Some(0));
        assert_eq!(fleet.targets[0].block_size, Some(32));
        assert_eq!(fleet.models.keys().map(|name| &**name).collect::<Vec<_>>(), ["m"]);
        assert_eq!(fleet.models["m"], ModelPool { mixed: vec![0], prefill: vec![], decode: vec![1, 2] });
        assert_eq!(fleet.workers.len(), 4);
        assert_eq!((fleet.workers[0].authority.as_str(), fleet.workers[0].base_path.as_str()), ("a:1", "/base"));
        assert!(matches!(fleet.workers[2].state, WorkerState::Pending(_)));
        assert_eq!(fleet.workers[3].state, WorkerState::Inactive);
    }

    #[test]
    fn b45_a_worker_is_in_the_pool_of_each_name_it_serves() {
        let mut registry = Registry::default();
        let mut two_names = plain("a:1");
        two_names["further_model_names"] = serde_json::json!(["n", "o"]);
        two_names["dp_size"] = 2.into();
        registry.update([two_names, plain("b:1")].into_iter().map(discovered).collect());
        let fleet = registry.fleet(|_| None);
        assert_eq!(fleet.targets.len(), 3);
        let mixed = |name: &str| fleet.models[name].mixed.clone();
        assert_eq!((mixed("m"), mixed("n"), mixed("o")), (vec![0, 1, 2], vec![0, 1], vec![0, 1]));
    }

    #[test]
    fn what_makes_a_new_generation() {
        let check = |change: &dyn Fn(&mut serde_json::Value), is_new: bool| {
            let mut registry = Registry::default();
            registry.update(vec![discovered(plain("a:1"))]);
            let before = registry.fleet(|_| None).targets[0].id;
            let mut changed = plain("a:1");
            change(&mut changed);
            let changes = registry.update(vec![discovered(changed.clone())]);
            let fleet = registry.fleet(|_| None);
            assert_eq!(fleet.targets[0].id != before, is_new, "{changed}");
            assert_eq!(changes.joined.len() + changes.left.len(), if is_new { 2 } else { 0 }, "{changed}");
            assert_eq!(fleet.workers[0].generation, Generation(if is_new { 2 } else { 1 }));
        };
        check(&|_| {}, false);
        check(&|record| record["url"] = "http://a:2".into(), false);
        check(&|record| record["kv_block_size"] = 16.into(), false);
        check(&|record| record["kv_events_endpoint"] = "tcp://127.0.0.1:5558".into(), true);
        check(&|record| record["model_name"] = "n".into(), true);
        check(&|record| record["dp_rank"] = 1.into(), true);
    }

    #[test]
    fn a_changed_record_is_a_new_record_id_and_a_registration_keeps_its_live_demand() {
        let mut registry = Registry::default();
        let target = |registry: &mut Registry, record: serde_json::Value| {
            registry.update(vec![discovered(record)]);
            let fleet = registry.fleet(|_| None);
            let target = &fleet.targets[0];
            (target.id, target.record_id, target.demand.clone())
        };
        let first = target(&mut registry, plain("a:1"));
        let same = target(&mut registry, plain("a:1"));
        assert_eq!((first.0, first.1), (same.0, same.1));
        let mut moved = plain("a:1");
        moved["disagg_meta"] = serde_json::json!({"bootstrap_port": 9});
        let changed = target(&mut registry, moved);
        assert_eq!(first.0, changed.0);
        assert_ne!(first.1, changed.1);
        // A request in flight holds the cell over a departure.
        let held = changed.2;
        drop((first.2, same.2));
        registry.update(Vec::new());
        let back = target(&mut registry, plain("a:1"));
        assert_ne!(back.0, first.0);
        assert!(Arc::ptr_eq(&back.2, &held));
        drop((back.2, held));
        registry.update(Vec::new());
        assert_eq!(Arc::strong_count(&target(&mut registry, plain("a:1")).2), 2);
    }

    #[test]
    fn slots_are_dense_and_reused_only_after_release() {
        let mut registry = Registry::default();
        registry.update(vec![discovered(plain("a:1")), discovered(plain("b:1"))]);
        let left = registry.update(vec![discovered(plain("b:1"))]).left;
        assert_eq!(left, [Slot(0)]);
        registry.update(vec![discovered(plain("b:1")), discovered(plain("c:1"))]);
        assert_eq!(registry.get("c:1").unwrap().ranks[0].slot, Slot(2));
        registry.release(Slot(0));
        registry.update(vec![discovered(plain("b:1")), discovered(plain("c:1")), discovered(plain("d:1"))]);
        assert_eq!(registry.get("d:1").unwrap().ranks[0].slot, Slot(0));
        for slot in registry.update(Vec::new()).left {
            registry.release(slot);
        }
        assert_eq!((registry.slot_bound(), registry.free_slots.len()), (0, 0));
    }
}
