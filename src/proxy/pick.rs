//! Pick and booking as one step, between two awaits: candidates from the view, hits from the index, load
//! from the atomics, the choice from `route`, from the request's session or from decode demand, and the charge on
//! the chosen target. The choice is made by the same code for a request and for a preview of one, which books nothing
//! and hears what was weighed.

use std::cell::Cell;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use tracing::info;

use super::access::{self, Leg};
use super::demand::Demand;
use super::parity;
use super::preview::{DecidedBy, LeftOut, Witness};
use super::prompts::{DEFAULT_BLOCK_TOKENS, Prompts};
use super::service::{Handles, RouterService, Scratch};
use super::stages::Stage;
use super::steering::{SessionName, Turn};
use crate::breaker::{Admission, BreakerSettings, Probe, admission_of, trouble_of};
use crate::decode_demand::Reservation;
use crate::fleet::{Fleet, HealthState, RecordId, Target, Worker};
use crate::hash::BlockHash;
use crate::index::View;
use crate::load::Booking;
use crate::route::affinity::Lease;
use crate::route::{self, Candidate, IMAGE_BLOCKS, LoadTerm, LoadWeights, Policy, RecentLoad};
use crate::worker::{Name, Role};

/// A booked target. Dropping it releases all that was charged for it.
pub(super) struct Picked {
    pub worker: Arc<Worker>,
    pub address: SocketAddr,
    pub rank: Option<u32>,
    pub handles: Handles,
    /// When it was picked.
    pub at: Instant,
    /// Absent once it was handed to somebody who ends earlier.
    pub booking: Option<Booking>,
    _reservation: Option<Reservation>,
    pub(super) session: Option<Lease>,
    /// Present when the request tries a worker that the circuit breaker has opened.
    pub(super) probe: Cell<Option<Probe>>,
    /// Its worker was not to be asked, but all others neither.
    pub(super) is_in_need: bool,
    /// It has failed the request, and was judged by that.
    pub(super) has_failed: Cell<bool>,
    /// As it stood at the pick.
    pub(super) breaker: BreakerSettings,
}

impl Picked {
    fn has_lost_its_probe(&self) -> bool {
        let probe = self.probe.take();
        let is_lost = probe.is_none() && self.worker.health.read().state.is_open();
        self.probe.set(probe);
        is_lost
    }
}

/// Why nobody was picked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoPick {
    /// Every worker of the pool has been tried, or the pool is empty.
    NoneLeft,
    /// Those that are left hold as many requests as they may.
    Full,
}

/// What a pick is for.
pub(super) struct Wish<'a> {
    pub model: &'a Name,
    pub role: Role,
    pub pool: &'a [u32],
    pub prompts: &'a Prompts,
    /// Samples that the request asks for.
    pub samples: u32,
    /// The session that the request belongs to.
    pub session: Option<SessionName>,
    /// Workers that failed this request already.
    pub tried: &'a [Name],
    /// Paths without a prompt are spread by load, whatever the policy.
    pub by_load: bool,
}

/// A pick for a request.
struct ForARequest;

impl Witness for ForARequest {
    const BOOKS: bool = true;
}

pub(super) fn pick(service: &RouterService, view: &View, wish: &Wish<'_>) -> Result<Picked, NoPick> {
    let started = Instant::now();
    let mut scratch = service.scratch.borrow_mut();
    let is_chosen_well = shortlist(service, view, wish, &mut scratch.indexes, &mut ForARequest)?;
    loop {
        let chosen = choose(service, view, wish, &mut scratch, &mut ForARequest).ok_or(NoPick::NoneLeft)?;
        let mut picked = chosen.booked(service, view, wish).ok_or(NoPick::NoneLeft)?;
        let left = &mut scratch.indexes;
        if is_chosen_well && picked.has_lost_its_probe() {
            // Another shard has taken the probe, or the worker was opened, in this very moment.
            left.retain(|index| view.fleet.targets[*index as usize].worker.id != picked.worker.id);
            if !left.is_empty() {
                continue;
            }
        }
        if !is_chosen_well {
            picked.breaker.asked_in_need(&picked.worker.health);
            picked.is_in_need = true;
        }
        let query = scratch.queries.took();
        if !query.is_zero() {
            service.took(Stage::Query, query);
        }
        service.took(Stage::Pick, picked.at.duration_since(started).saturating_sub(query));
        return Ok(picked);
    }
}

/// What [`pick`] would choose now, and how, in the words of `witness`.
pub(super) fn preview(
    service: &RouterService,
    view: &View,
    wish: &Wish<'_>,
    witness: &mut impl Witness,
) -> Result<Chosen, NoPick> {
    let mut scratch = service.scratch.borrow_mut();
    shortlist(service, view, wish, &mut scratch.indexes, witness)?;
    choose(service, view, wish, &mut scratch, witness).ok_or(NoPick::NoneLeft)
}

/// Collects who may be asked. Tells whether all of them may be, or whether it is for want of better ones.
fn shortlist<W: Witness>(
    service: &RouterService,
    view: &View,
    wish: &Wish<'_>,
    indexes: &mut Vec<u32>,
    witness: &mut W,
) -> Result<bool, NoPick> {
    indexes.clear();
    indexes.extend(route::untried(&view.fleet, wish.pool, wish.tried));
    if indexes.is_empty() {
        return Err(NoPick::NoneLeft);
    }
    let cap = service.live().caps.per_target;
    if let Some(cap) = cap {
        indexes.retain(|index| {
            let has_room = view.fleet.targets[*index as usize].load.requests() < cap;
            if !has_room {
                witness.left_out(*index, LeftOut::Full);
            }
            has_room
        });
        if indexes.is_empty() {
            return Err(NoPick::Full);
        }
    }
    Ok(leave_out_ailing(service, &view.fleet, indexes, witness))
}

/// Leaves out workers that the circuit breaker has opened or that have asked for time. Where that leaves nobody, those stay
/// in that are least in trouble: a wrong verdict must not take a model down. Tells whether all that are left may be asked.
fn leave_out_ailing<W: Witness>(
    service: &RouterService,
    fleet: &Fleet,
    indexes: &mut Vec<u32>,
    witness: &mut W,
) -> bool {
    if !fleet.has_ailing() {
        return true;
    }
    let (live, now_ms) = (service.live(), service.shared.now_ms());
    let may_be_asked = |index: &u32| {
        let health = &fleet.targets[*index as usize].worker.health;
        let admission =
            if W::BOOKS { live.breaker.admission(health, now_ms) } else { admission_of(health.read(), now_ms) };
        admission != Admission::Excluded
    };
    // One look at each: what another shard changes between two of them must not leave nobody.
    let mut kept = keep(indexes, |index| may_be_asked(index).then_some(0));
    let is_anyone_left = kept > 0;
    if !is_anyone_left {
        witness.breaker_overruled();
        kept = keep(indexes, |index| Some(trouble_of(fleet.targets[*index as usize].worker.health.read())));
    }
    indexes.drain(kept..).for_each(|index| witness.left_out(index, LeftOut::Breaker));
    is_anyone_left
}

/// Brings those of the least rank to the front, in their order, and gives their number. Without any all stay as they were.
fn keep(indexes: &mut [u32], rank: impl Fn(&u32) -> Option<u32>) -> usize {
    let (mut kept, mut least) = (0, u32::MAX);
    for place in 0..indexes.len() {
        let Some(rank) = rank(&indexes[place]).filter(|rank| *rank <= least) else { continue };
        if rank < least {
            (kept, least) = (0, rank);
        }
        indexes.swap(kept, place);
        kept += 1;
    }
    kept
}

/// A target, and what was decided beside it.
pub(super) struct Chosen {
    pub index: u32,
    /// What it was chosen by; absent where the prompt had no part in it.
    by_cost: Option<(Candidate, f64)>,
    reservation: Option<Reservation>,
    session: Option<Lease>,
}

impl Chosen {
    fn without_a_prompt(index: u32, session: Option<Lease>) -> Self {
        Self { index, by_cost: None, reservation: None, session }
    }
}

fn choose<W: Witness>(
    service: &RouterService,
    view: &View,
    wish: &Wish<'_>,
    scratch: &mut Scratch,
    witness: &mut W,
) -> Option<Chosen> {
    let shared = &service.shared;
    scratch.queries.begin();
    let indexes = &scratch.indexes;
    if wish.by_load {
        witness.in_order(indexes);
        witness.decided(DecidedBy::RequestsInFlight);
        return route::by_load(&view.fleet, indexes.iter().copied()).map(|index| Chosen::without_a_prompt(index, None));
    }
    let sessions = shared.steering.sessions.as_ref();
    let turn = sessions.zip(wish.session).and_then(|(sessions, name)| sessions.turn(name, wish.model, wish.role));
    if shared.settings.policy == Policy::RoundRobin {
        witness.in_order(indexes);
        let session = Session { turn, fleet: &view.fleet, indexes };
        let (place, lease) = in_turn(service, wish, indexes, &session, witness)?;
        return Some(Chosen::without_a_prompt(indexes[place], lease));
    }
    let facts = &wish.prompts.facts;
    // Of an image nobody knows how long its computing takes: such picks keep the plain formula.
    let load_term = if facts.is_multimodal { LoadTerm::Active } else { shared.steering.load_term.of(wish.role) };
    let weight = service.live().overlap_weight_of(wish.role, load_term) * facts.retention.weight_factor();
    let costing = Costing { load: load_term.weights(), weight };
    witness.costed_by(&costing);
    fill(service, view, wish, costing, scratch, witness);
    let session = Session { turn, fleet: &view.fleet, indexes: &scratch.indexes };
    kv_aware(service, view, wish, weight, &scratch.candidates, &session, witness)
}

fn in_turn<W: Witness>(
    service: &RouterService,
    wish: &Wish<'_>,
    indexes: &[u32],
    session: &Session<'_>,
    witness: &mut W,
) -> Option<(usize, Option<Lease>)> {
    if let Some(followed) = session.follow::<W>() {
        witness.decided(DecidedBy::Session);
        return Some(followed);
    }
    witness.decided(DecidedBy::Turn);
    let index = match W::BOOKS {
        true => {
            let is_known = |model: &Name| session.fleet.models.contains_key(model);
            service.round_robin.borrow_mut().pick(wish.model, wish.role, indexes, is_known)
        }
        false => service.round_robin.borrow().peek(wish.model, wish.role, indexes),
    }?;
    let claimed = if W::BOOKS { session.claim(index) } else { None };
    match claimed {
        Some((place, lease)) => Some((place, Some(lease))),
        None => Some((indexes.iter().position(|known| *known == index)?, None)),
    }
}

/// What a pick's cost is made of.
#[derive(Clone, Copy)]
pub(super) struct Costing {
    pub load: LoadWeights,
    /// Of a missing block.
    pub weight: f64,
}

/// One candidate per target: what it holds of the prompt or of the images, and its load.
fn fill<W: Witness>(
    service: &RouterService,
    view: &View,
    wish: &Wish<'_>,
    costing: Costing,
    scratch: &mut Scratch,
    witness: &mut W,
) {
    let Scratch { queries, candidates, indexes } = scratch;
    let steering = &service.shared.steering;
    let facts = &wish.prompts.facts;
    // Images are encoded at prefill: a decode worker holds none.
    let images: &[_] = if wish.role == Role::Decode { &[] } else { &facts.images };
    let is_idle = indexes.iter().all(|index| view.fleet.targets[*index as usize].load.requests() == 0);
    let recent_weight = steering.recent_load.weight(is_idle, costing.weight);
    let pick_number = steering.picks.current().wrapping_add(witness.uncounted_picks());
    candidates.clear();
    let host_weight = service.live().host_tier_weight;
    for index in indexes.iter().copied() {
        let target = &view.fleet.targets[index as usize];
        // Beside an image the text's blocks say nothing: the placeholder is the same whatever the image.
        let blocks = wish.prompts.blocks_for(target).filter(|_| !facts.is_multimodal);
        let reusable = blocks.and_then(|_| wish.prompts.reusable_for(target));
        let mut held_blocks = None;
        let (request_blocks, cache_hits, block_tokens) = if facts.is_multimodal {
            let held = if images.is_empty() { 0 } else { steering.images.held(target.id, images) };
            (IMAGE_BLOCKS * images.len() as u32, IMAGE_BLOCKS * held, DEFAULT_BLOCK_TOKENS)
        } else {
            (
                blocks.map_or(0, |blocks| blocks.len() as u32),
                reusable.map_or(0, |blocks| {
                    // A preview shows what host memory holds also where that has no weight.
                    let hits = queries.of(view, blocks, host_weight > 0.0 || !W::BOOKS);
                    if !W::BOOKS {
                        held_blocks = Some((hits.device.depth(target.slot), hits.any().depth(target.slot)));
                    }
                    view.credit(target.slot, &hits.device, hits.any(), host_weight)
                }),
                target.block_size.unwrap_or(DEFAULT_BLOCK_TOKENS),
            )
        };
        let recent_blocks = match recent_weight > 0.0 {
            true => recent_weight * route::recent_blocks(&target.load, pick_number),
            false => 0.0,
        };
        let candidate = Candidate {
            target: index,
            request_blocks,
            cache_hits,
            active_blocks: target.load.active_blocks(),
            load_blocks: costing.load.blocks(&target.load, block_tokens) + recent_blocks,
            picked_at_ns: target.load.picked_at_ns(),
            block_tokens,
        };
        witness.looked_up(&candidate, held_blocks, recent_blocks);
        candidates.push(candidate);
    }
}

fn kv_aware<W: Witness>(
    service: &RouterService,
    view: &View,
    wish: &Wish<'_>,
    weight: f64,
    candidates: &[Candidate],
    session: &Session<'_>,
    witness: &mut W,
) -> Option<Chosen> {
    let demand = Demand::of(service, view, wish);
    let mut place;
    let mut reservation = None;
    let mut lease = None;
    if let Some((bound, held)) = session.follow::<W>() {
        (place, lease) = (bound, held);
        witness.decided(DecidedBy::Session);
        if let Some(demand) = &demand {
            reservation = demand.book::<W>(candidates, place);
        }
        if !W::BOOKS {
            // The session has decided; what the others would have cost is shown all the same.
            demand.iter().for_each(|demand| demand.show_to(candidates, None, witness));
            route::pick_noted(weight, candidates, |terms| witness.weighed(terms));
        }
    } else {
        let original = route::pick_noted(weight, candidates, |terms| witness.weighed(terms))?.target;
        place = candidates.iter().position(|candidate| candidate.target == original)?;
        witness.decided(DecidedBy::Cost);
        if let Some(demand) = &demand {
            let (selection, reserved) = demand.select(candidates, place, witness);
            if selection.picked != place {
                witness.decided(DecidedBy::Demand);
            }
            (place, reservation) = (selection.picked, reserved);
        }
        let claimed = if W::BOOKS { session.claim(candidates[place].target) } else { None };
        if let Some((agreed, held)) = claimed {
            if agreed != place {
                // Another turn of the session was first; what was reserved by this one's own choice is given up.
                place = agreed;
                reservation = demand.as_ref().and_then(|demand| demand.book::<W>(candidates, place));
            }
            lease = Some(held);
        }
    }
    let candidate = candidates[place];
    Some(Chosen { index: candidate.target, by_cost: Some((candidate, weight)), reservation, session: lease })
}

impl Chosen {
    /// Charges the target with the request. A target without an address is not routable, and the fleet lists none.
    fn booked(self, service: &RouterService, view: &View, wish: &Wish<'_>) -> Option<Picked> {
        let target = &view.fleet.targets[self.index as usize];
        let address = target.worker.address?;
        let shared = &service.shared;
        let handles = service.handles.of(&shared.metrics.targets, target);
        handles.picks.inc();
        let (cache_hits, request_blocks) = match &self.by_cost {
            // What images stand for is no block of a cache.
            Some((candidate, _)) if !wish.prompts.facts.is_multimodal => {
                (candidate.cache_hits, candidate.request_blocks)
            }
            _ => (0, 0),
        };
        if request_blocks > 0 {
            handles.blocks_hit.inc_by(cache_hits.into());
            handles.blocks.inc_by(request_blocks.into());
        }
        let blocks = match &self.by_cost {
            Some((candidate, weight)) => {
                shared.metrics.picked(wish.role, cache_hits, request_blocks);
                note_the_choice(service, view, wish, target, candidate, *weight)
            }
            None => {
                if !wish.by_load {
                    info!(policy = "round-robin", role = wish.role.as_str(), picked = &*target.route_key, "pick");
                }
                Arc::new([])
            }
        };
        access::note(|line| {
            line.legs.push(Leg { role: wish.role, route_key: target.route_key.clone(), cache_hits, request_blocks });
        });
        let breaker = service.live().breaker;
        let health = &target.worker.health;
        let probe = match health.read().state {
            HealthState::Well => None,
            _ => breaker.claim(health, shared.now_ms()),
        };
        let at = Instant::now();
        let booking = Booking::new(target.id, &target.load, blocks, &shared.ledger, shared.ns_at(at));
        // What a decode worker gets is computed already; what says nothing of its length weighs as one block.
        let queued_blocks = match (wish.role, &self.by_cost) {
            (Role::Decode, _) | (_, None) => 0,
            (_, Some((chosen, _))) if chosen.request_blocks == 0 => 1,
            (_, Some((chosen, _))) => u64::from(chosen.request_blocks.saturating_sub(chosen.cache_hits)),
        };
        Some(Picked {
            worker: target.worker.clone(),
            address,
            rank: target.rank,
            handles,
            at,
            booking: Some(booking.queueing(queued_blocks)),
            _reservation: self.reservation,
            session: self.session,
            probe: Cell::new(probe),
            is_in_need: false,
            has_failed: Cell::new(false),
            breaker,
        })
    }
}

/// What a choice by cost leaves beside its booking. Gives the blocks to book.
fn note_the_choice(
    service: &RouterService,
    view: &View,
    wish: &Wish<'_>,
    target: &Target,
    chosen: &Candidate,
    weight: f64,
) -> Arc<[BlockHash]> {
    let shared = &service.shared;
    let facts = &wish.prompts.facts;
    let (cache_hits, request_blocks) =
        if facts.is_multimodal { (0, 0) } else { (chosen.cache_hits, chosen.request_blocks) };
    let mm_affinity_hits = if facts.is_multimodal { chosen.cache_hits / IMAGE_BLOCKS } else { 0 };
    if facts.is_multimodal && wish.role != Role::Decode {
        shared.steering.images.record(&view.fleet, target.id, &facts.images);
    }
    if shared.steering.recent_load != RecentLoad::Off {
        route::charge(&target.load, &shared.steering.picks, chosen.request_blocks, chosen.cache_hits);
    }
    info!(
        policy = "kv-aware",
        role = wish.role.as_str(),
        retention = facts.retention.as_str(),
        picked = &*target.route_key,
        cache_hits,
        request_blocks,
        active_blocks = chosen.active_blocks,
        load_blocks = chosen.load_blocks,
        w_overlap = if facts.is_multimodal { 0.0 } else { weight },
        mm_images = facts.images.len(),
        mm_affinity_hits,
        "pick"
    );
    let blocks = wish.prompts.blocks_for(target).cloned().unwrap_or_else(|| Arc::new([]));
    parity::watch(shared, wish, target, &blocks);
    blocks
}

/// The session of a pick, if it has one, among the targets that may serve it.
struct Session<'a> {
    turn: Option<Turn<'a>>,
    fleet: &'a Fleet,
    indexes: &'a [u32],
}

impl Session<'_> {
    /// Place of the target that the session is bound to; for a request with the hold on it.
    fn follow<W: Witness>(&self) -> Option<(usize, Option<Lease>)> {
        let turn = self.turn?;
        let may_serve = |record| self.place_of(record).is_some();
        if !W::BOOKS {
            return Some((self.place_of(turn.peek(may_serve)?)?, None));
        }
        self.placed(turn.follow(may_serve)?).map(|(place, lease)| (place, Some(lease)))
    }

    /// Binds the session to the target of this index of the fleet, or to what another turn has bound it to
    /// meanwhile: gives the place of the target that it is to be.
    fn claim(&self, index: u32) -> Option<(usize, Lease)> {
        let record = self.fleet.targets[index as usize].record_id;
        self.placed(self.turn?.claim(record, |record| self.place_of(record).is_some())?)
    }

    fn placed(&self, lease: Lease) -> Option<(usize, Lease)> {
        Some((self.place_of(lease.target())?, lease))
    }

    fn place_of(&self, record: RecordId) -> Option<usize> {
        self.indexes.iter().position(|index| self.fleet.targets[*index as usize].record_id == record)
    }
}

#[cfg(test)]
mod tests {
    use super::keep;

    #[test]
    fn the_least_stay_in_their_order_and_nobody_is_lost_where_none_may() {
        let check = |ranks: &[Option<u32>], expected: &[u32]| {
            let mut indexes: Vec<u32> = (0..ranks.len() as u32).collect();
            let kept = keep(&mut indexes, |index| ranks[*index as usize]);
            assert_eq!(&indexes[..kept], expected, "{ranks:?}");
            let mut all = indexes.clone();
            all.sort_unstable();
            assert_eq!(all, (0..ranks.len() as u32).collect::<Vec<_>>(), "{ranks:?}");
            assert!(kept > 0 || indexes.is_sorted(), "{ranks:?}");
        };
        check(&[], &[]);
        check(&[None, None, None], &[]);
        check(&[None, Some(0), None, Some(0), Some(0)], &[1, 3, 4]);
        check(&[Some(3), Some(1), Some(2), Some(1), Some(0), Some(4), Some(0)], &[4, 6]);
    }
}
