//! Families of what steers picks, read at the scrape: decode demand per target, sessions per role.

use std::sync::atomic::{AtomicU64, Ordering};

use prometheus::Error;

use super::live::{Scrape, signed};
use crate::fleet::{Fleet, ModelPool};
use crate::proxy::Steering;
use crate::route::affinity::Counts;

type SessionCounter = (&'static str, &'static str, fn(&Counts) -> u64);

fn read(number: &AtomicU64) -> u64 {
    number.load(Ordering::Relaxed)
}

const SESSION_COUNTERS: [SessionCounter; 5] = [
    ("infera_router_session_hits_total", "Turns that followed their session.", |counts| read(&counts.followed)),
    (
        "infera_router_session_selected_total",
        "Turns for which a target was chosen: a session's first, or a replacement.",
        |counts| read(&counts.first) + read(&counts.replaced),
    ),
    (
        "infera_router_session_replaced_total",
        "Turns whose session's target had left, changed, or could not be picked.",
        |counts| read(&counts.replaced),
    ),
    ("infera_router_session_unbound_total", "Turns whose session could not be held.", |counts| read(&counts.unbound)),
    ("infera_router_session_evicted_total", "Sessions given up for others before their time.", |counts| {
        read(&counts.evicted)
    }),
];

/// Families of the features that are switched on.
pub(super) fn families(scrape: &Scrape, steering: &Steering, fleet: &Fleet) -> Result<(), Error> {
    if steering.demand.is_some() {
        demand(scrape, fleet)?;
    }
    let Some(sessions) = &steering.sessions else { return Ok(()) };
    let help = "Sessions bound, idle ones in their time included.";
    let active = scrape.gauges("infera_router_session_active", help, &["role"])?;
    for (role, table) in sessions.tables() {
        active.with_label_values(&[role.as_str()]).set(table.active() as i64);
    }
    for (name, help, number) in SESSION_COUNTERS {
        let family = scrape.counters(name, help, &["role"])?;
        for (role, table) in sessions.tables() {
            family.with_label_values(&[role.as_str()]).inc_by(number(&table.counts));
        }
    }
    Ok(())
}

fn demand(scrape: &Scrape, fleet: &Fleet) -> Result<(), Error> {
    const LABELS: &[&str] = &["target"];
    let help = "Input tokens in flight per decode route key.";
    let tokens = scrape.gauges("infera_router_decode_demand_tokens", help, LABELS)?;
    let help = "Requests held per decode route key.";
    let requests = scrape.gauges("infera_router_decode_demand_requests", help, LABELS)?;
    for target in fleet.models.values().flat_map(|ModelPool { decode, .. }| decode) {
        let target = &fleet.targets[*target as usize];
        tokens.with_label_values(&[&*target.route_key]).set(signed(target.demand.tokens()));
        requests.with_label_values(&[&*target.route_key]).set(signed(target.demand.requests()));
    }
    Ok(())
}
