//! Pick and booking as one step, between two awaits: candidates from the view, hits from the index, load
//! from the atomics, the choice from `route`, and the charge on the chosen target.

use std::net::SocketAddr;
use std::sync::Arc;

use tracing::info;

use super::prompts::{DEFAULT_BLOCK_TOKENS, Prompts};
use super::service::{Handles, RouterService, Scratch};
use crate::fleet::{Target, Worker};
use crate::hash::BlockHash;
use crate::index::View;
use crate::load::Booking;
use crate::route::{self, Candidate, Policy};
use crate::worker::{Name, Role};

/// A booked target. Dropping it releases the charge.
pub(super) struct Picked {
    pub worker: Arc<Worker>,
    pub address: SocketAddr,
    pub rank: Option<u32>,
    pub handles: Handles,
    _booking: Booking,
}

/// What a pick is for.
pub(super) struct Wish<'a> {
    pub model: &'a Name,
    pub role: Role,
    pub pool: &'a [u32],
    pub prompts: &'a Prompts,
    /// Workers that failed this request already.
    pub tried: &'a [Name],
    /// Paths without a prompt are spread by load, whatever the policy.
    pub by_load: bool,
}

/// Nothing when every worker of the pool has been tried.
pub(super) fn pick(service: &RouterService, view: &View, wish: &Wish<'_>) -> Option<Picked> {
    let shared = &service.shared;
    let mut scratch = service.scratch.borrow_mut();
    let Scratch { hits, any_hits, candidates, indexes } = &mut *scratch;
    indexes.clear();
    indexes.extend(route::untried(&view.fleet, wish.pool, wish.tried));

    if wish.by_load {
        let index = route::by_load(&view.fleet, indexes.iter().copied())?;
        return book(service, &view.fleet.targets[index as usize], Arc::new([]));
    }
    if shared.settings.policy == Policy::RoundRobin {
        let index = service.round_robin.borrow_mut().pick(wish.model, wish.role, indexes)?;
        let target = &view.fleet.targets[index as usize];
        info!(policy = "round-robin", role = wish.role.as_str(), picked = &*target.route_key, "pick");
        return book(service, target, Arc::new([]));
    }

    candidates.clear();
    let host_weight = shared.settings.host_tier_weight;
    let mut queried: Option<*const BlockHash> = None;
    for index in indexes.iter().copied() {
        let target = &view.fleet.targets[index as usize];
        let blocks = wish.prompts.blocks_for(target);
        // Targets with the same rules and block size share one query.
        if let Some(blocks) = blocks
            && queried != Some(blocks.as_ptr())
        {
            view.index.query(blocks, hits);
            if host_weight > 0.0 {
                view.index.query_any(blocks, any_hits);
            }
            queried = Some(blocks.as_ptr());
        }
        candidates.push(Candidate {
            target: index,
            request_blocks: blocks.map_or(0, |blocks| blocks.len() as u32),
            cache_hits: blocks.map_or(0, |_| view.credit(target.slot, hits, any_hits, host_weight)),
            active_blocks: target.load.active_blocks(),
            picked_at_ns: target.load.picked_at_ns(),
            block_tokens: target.block_size.unwrap_or(DEFAULT_BLOCK_TOKENS),
        });
    }
    let weight = shared.settings.overlap_weight;
    let choice = route::pick(weight, candidates)?;
    let target = &view.fleet.targets[choice.target as usize];
    let blocks = wish.prompts.blocks_for(target).cloned().unwrap_or_else(|| Arc::new([]));
    shared.metrics.picked(choice.cache_hits, choice.request_blocks);
    info!(
        policy = "kv-aware",
        role = wish.role.as_str(),
        picked = &*target.route_key,
        cache_hits = choice.cache_hits,
        request_blocks = choice.request_blocks,
        active_blocks = choice.active_blocks,
        w_overlap = weight,
        "pick"
    );
    book(service, target, blocks)
}

/// A target without an address is not routable, and the fleet lists none.
fn book(service: &RouterService, target: &Target, blocks: Arc<[BlockHash]>) -> Option<Picked> {
    let address = target.worker.address?;
    let shared = &service.shared;
    let handles = service.handles.of(&shared.metrics, target);
    handles.picks.inc();
    Some(Picked {
        worker: target.worker.clone(),
        address,
        rank: target.rank,
        handles,
        _booking: Booking::new(target.id, &target.load, blocks, &shared.ledger, shared.now_ns()),
    })
}
