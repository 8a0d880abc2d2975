//! The words of an explanation: what a preview has noted, as JSON. Decides nothing.

use std::cmp::Ordering;
use std::time::Instant;

use serde_json::{Value, json};

use super::preview::{DecidedBy, LeftOut, Notes, Weighed};
use super::prompts::Previewed;
use super::service::RouterService;
use super::steering::SessionName;
use crate::api;
use crate::fleet::Target;
use crate::index::View;
use crate::route::affinity::NoSession;
use crate::route::{LoadWeights, Terms};
use crate::worker::Role;

/// Null where sessions are off or the request names none.
pub(super) fn session(session: Option<Result<SessionName, NoSession>>) -> Value {
    match session {
        None | Some(Err(NoSession::Absent)) => Value::Null,
        Some(Ok(_)) => json!({"ignored": null}),
        Some(Err(reason)) => json!({"ignored": reason.as_str()}),
    }
}

/// What became of the prompt, once for each rendering that the pool needs.
pub(super) fn prompt(prompt: &Previewed, shows_text: bool) -> Value {
    let renderings = prompt.renderings.iter().map(|(rules, block_sizes, seen)| {
        let by_size = block_sizes
            .iter()
            .zip(&seen.blocks)
            .map(|(block_size, blocks)| json!({"block_size": block_size, "blocks": blocks.hashes.len()}));
        json!({
            "rules": rules.as_str(),
            "text_bytes": seen.text.as_ref().map(String::len),
            "tokens": seen.blocks.first().map(|blocks| blocks.tokens),
            "cached_bytes": seen.known_bytes,
            "cached_tokens": seen.known_tokens,
            "by_block_size": by_size.collect::<Vec<_>>(),
            "text": seen.text.as_ref().filter(|_| shows_text),
        })
    });
    let no_blocks = prompt.reason.as_ref().map(|(reason, detail)| json!({"reason": reason, "detail": detail}));
    json!({"renderings": renderings.collect::<Vec<_>>(), "no_blocks": no_blocks})
}

/// One pick: its candidates with every figure, and who won by what.
pub(super) fn leg(service: &RouterService, view: &View, role: Role, notes: &Notes, picked: Option<u32>) -> Value {
    let target = |index: u32| &view.fleet.targets[index as usize];
    let now_ns = service.shared.ns_at(Instant::now());
    let candidates: Vec<Value> = match notes.weighed.is_empty() {
        true => notes.in_order.iter().map(|index| standing(target(*index), now_ns)).collect(),
        false => notes.weighed.iter().map(|it| weighed(target(it.candidate.target), it, now_ns)).collect(),
    };
    let left_out = notes.left_out.iter().map(|(index, reason)| {
        let target = target(*index);
        let reason = match reason {
            LeftOut::Full => "full",
            LeftOut::Breaker => "breaker",
        };
        json!({"target": &*target.route_key, "reason": reason, "breaker": api::breaker(&target.worker),
            "requests": target.load.requests()})
    });
    let suggested = notes.suggested.and_then(|place| notes.weighed.get(place));
    json!({
        "role": role.as_str(),
        "overlap_weight": notes.costing.map(|costing| costing.weight),
        "load_weights": notes.costing.map(|costing| {
            let LoadWeights { queued, active, request_tokens } = costing.load;
            json!({"queued": queued, "active": active, "request_tokens": request_tokens})
        }),
        "host_tier_weight": service.live().host_tier_weight,
        "candidates": candidates,
        "left_out": left_out.collect::<Vec<_>>(),
        "breaker_overruled": notes.is_breaker_overruled,
        "demand_suggests": suggested.map(|it| &*target(it.candidate.target).route_key),
        "picked": picked.map(|index| &*target(index).route_key),
        "decided_by": notes.decided_by.map(by),
        "tie_broken_by": picked.and_then(|index| tie(notes, index)),
    })
}

fn by(decided: DecidedBy) -> &'static str {
    match decided {
        DecidedBy::Cost => "cost",
        DecidedBy::Session => "session",
        DecidedBy::Demand => "demand",
        DecidedBy::Turn => "turn",
        DecidedBy::RequestsInFlight => "requests_in_flight",
    }
}

/// What told the picked candidate from others of the same cost; nothing where there was none.
fn tie(notes: &Notes, picked: u32) -> Option<&'static str> {
    if notes.decided_by != Some(DecidedBy::Cost) {
        return None;
    }
    let cost = |it: &Weighed| it.terms.as_ref().map_or(f64::INFINITY, Terms::cost);
    let winner = notes.weighed.iter().find(|it| it.candidate.target == picked)?;
    let equal = notes.weighed.iter().filter(|it| it.candidate.target != picked && cost(it) == cost(winner));
    let told = |it: &Weighed| match it.candidate.load_blocks.total_cmp(&winner.candidate.load_blocks) {
        Ordering::Equal if it.candidate.picked_at_ns == winner.candidate.picked_at_ns => "order",
        Ordering::Equal => "least_recently_picked",
        _ => "less_load",
    };
    // The last rule that was needed against any of them.
    let rules = ["less_load", "least_recently_picked", "order"];
    equal.map(told).max_by_key(|rule| rules.iter().position(|known| known == rule))
}

/// What is true of a target whatever the request is.
fn standing(target: &Target, now_ns: u64) -> Value {
    let picked_at_ns = target.load.picked_at_ns();
    json!({
        "target": &*target.route_key,
        "worker_id": &*target.worker.id,
        "dp_rank": target.rank,
        "requests": target.load.requests(),
        "active_blocks": target.load.active_blocks(),
        "queued_blocks": target.load.queued_blocks(),
        "picked_ms_ago": (picked_at_ns > 0).then(|| now_ns.saturating_sub(picked_at_ns) / 1_000_000),
        "breaker": api::breaker(&target.worker),
        "parity": target.parity.verdict().as_str(),
    })
}

fn weighed(target: &Target, weighed: &Weighed, now_ns: u64) -> Value {
    let Weighed { candidate, held, recent_blocks, terms, demand } = weighed;
    let terms = terms
        .as_ref()
        .map(|terms| json!({"prefill": terms.prefill, "load": terms.load, "scale": terms.scale, "cost": terms.cost()}));
    let demand = demand.as_ref().map(|demand| {
        json!({"tokens_held": demand.held, "requests_held": demand.requests_held, "tokens_added": demand.added,
            "input": demand.input.as_str(), "cost": demand.cost})
    });
    let mut value = standing(target, now_ns);
    let own = json!({
        "block_size": candidate.block_tokens,
        "request_blocks": candidate.request_blocks,
        "device_blocks": held.map(|(device, _)| device),
        "any_memory_blocks": held.map(|(_, any)| any),
        "cache_hits": candidate.cache_hits,
        "active_blocks": candidate.active_blocks,
        "recent_blocks": recent_blocks,
        "terms": terms,
        "demand": demand,
    });
    if let (Value::Object(value), Value::Object(own)) = (&mut value, own) {
        value.extend(own);
    }
    value
}
