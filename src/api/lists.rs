//! `GET /v1/models` and `GET /v1/workers`.

use serde_json::{Value, json};

use crate::fleet::{Fleet, HealthState, Worker, WorkerState};

/// `created` is when this router started, Unix seconds: engines do not tell when a model was made, and the
/// official client's type requires a number.
pub fn models(fleet: &Fleet, created: u64) -> Value {
    let data: Vec<Value> = fleet.models.keys().map(|name| model(name, created)).collect();
    json!({"object": "list", "data": data})
}

/// One entry of the list, for `GET /v1/models/<id>`.
pub fn model(name: &str, created: u64) -> Value {
    json!({"id": name, "object": "model", "created": created, "owned_by": "infera"})
}

/// Every known worker, its record as registered and completed, with its state and its load per target.
pub fn workers(fleet: &Fleet) -> Value {
    let workers: Vec<Value> = fleet.workers.iter().map(|worker| describe(fleet, worker)).collect();
    json!({"workers": workers})
}

fn describe(fleet: &Fleet, worker: &Worker) -> Value {
    let mut value = serde_json::to_value(&worker.record).unwrap_or_default();
    let targets = fleet.targets_of(worker).iter().map(|target| {
        json!({"route_key": &*target.route_key, "dp_rank": target.rank, "block_size": target.block_size,
            "requests": target.load.requests(), "active_blocks": target.load.active_blocks()})
    });
    let targets: Vec<Value> = targets.collect();
    let (state, reason) = state(worker);
    if let Value::Object(members) = &mut value {
        members.insert("state".into(), state.into());
        members.insert("reason".into(), reason.into());
        members.insert("breaker".into(), breaker(worker).into());
        members.insert("targets".into(), targets.into());
    }
    value
}

/// Whether requests may go to a worker, in the words of the lists, and why not.
pub fn state(worker: &Worker) -> (&'static str, Option<&str>) {
    match &worker.state {
        WorkerState::Active => ("active", None),
        WorkerState::Inactive => ("inactive", None),
        WorkerState::Pending(reason) => ("pending", Some(reason)),
    }
}

/// A worker's standing with the circuit breaker, in the words of the lists.
pub fn breaker(worker: &Worker) -> &'static str {
    match worker.health.read().state {
        HealthState::Well => "closed",
        HealthState::Probing => "half-open",
        HealthState::Open => "open",
        HealthState::Resting => "resting",
    }
}
