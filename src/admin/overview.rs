//! `GET /v1/admin/overview`: every worker with what the router knows of it, and the last minutes. What the dashboard shows.

use std::collections::BTreeMap;
use std::time::Instant;

use http::StatusCode;
use infera_shards::Response;
use serde_json::{Value, json};

use super::AdminState;
use super::history::History;
use crate::api;
use crate::fleet::{Target, Worker};
use crate::index::View;
use crate::proxy::TargetTotals;

pub(super) fn overview(state: &AdminState, history: &History) -> Response {
    let view = state.page.view.load_full();
    let picked = state.page.requests.targets.totals();
    let workers = view.fleet.workers.iter().map(|worker| {
        let targets = view.fleet.targets_of(worker).iter();
        let targets: Vec<Value> = targets.map(|target| describe(state, &view, target, &picked)).collect();
        row(worker, targets)
    });
    let now = Instant::now();
    let answer = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "uptime_seconds": now.duration_since(state.page.started).as_secs(),
        "policy": state.policy.as_str(),
        "active_workers": view.fleet.active_workers(),
        "inflight": state.page.requests.inflight(),
        "decode_demand": state.page.steering.demand.is_some(),
        "workers": workers.collect::<Vec<_>>(),
        "history": history.json(now),
    });
    api::json_response(StatusCode::OK, &answer)
}

fn row(worker: &Worker, targets: Vec<Value>) -> Value {
    let (state, reason) = api::state(worker);
    json!({
        "worker_id": &*worker.id,
        "model": worker.record.model_name,
        "role": worker.record.disagg_mode.as_str(),
        "engine": worker.record.engine,
        "state": state,
        "reason": reason,
        "breaker": api::breaker(worker),
        "trips": worker.health.trips(),
        "targets": targets,
    })
}

fn describe(state: &AdminState, view: &View, target: &Target, picked: &BTreeMap<String, TargetTotals>) -> Value {
    let totals = picked.get(&*target.route_key).copied().unwrap_or_default();
    let feed = view.rank(target.slot).filter(|rank| rank.endpoint.is_some());
    let events = feed.map(|rank| {
        let last_ns = rank.last_message_ns.get();
        let age = (last_ns > 0).then(|| state.page.ingest.now_ns().saturating_sub(last_ns) as f64 / 1e9);
        json!({"connected": rank.is_connected(), "seconds_since_last": age, "batches_lost": rank.batches_lost.get(),
            "resets": rank.resets.get()})
    });
    json!({
        "route_key": &*target.route_key,
        "dp_rank": target.rank,
        "block_size": target.block_size,
        "requests": target.load.requests(),
        "active_blocks": target.load.active_blocks(),
        "visible_blocks": view.block_count(target),
        "picks": totals.picks,
        "blocks_hit": totals.blocks_hit,
        "blocks": totals.blocks,
        "demand_tokens": target.demand.tokens(),
        "demand_requests": target.demand.requests(),
        "parity": target.parity.verdict().as_str(),
        "events": events,
    })
}
