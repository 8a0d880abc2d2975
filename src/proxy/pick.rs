//! Pick and booking as one step, between two awaits: candidates from the view, hits from the index, load
//! from the atomics, the choice from `route`, from the request's session or from decode demand, and the charge on
//! the chosen target.

use std::cell::Cell;
use std::net::SocketAddr;
use std::sync::Arc;

use tracing::{Level, debug, enabled, info};

use super::parity;
use super::prompts::{DEFAULT_BLOCK_TOKENS, Prompts};
use super::queries::Queries;
use super::service::{Handles, RouterService, Scratch};
use super::steering::{SessionName, Turn};
use crate::breaker::{Admission, BreakerSettings, Probe};
use crate::decode_demand::{self, DecodeCandidate, DecodeDemand, Input, Reservation, Selection};
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
    /// Absent once it was handed to somebody who ends earlier.
    pub booking: Option<Booking>,
    _reservation: Option<Reservation>,
    pub(super) session: Option<Lease>,
    /// Present when the request tries a worker that the circuit breaker has opened.
    pub(super) probe: Cell<Option<Probe>>,
    /// As it stood at the pick.
    pub(super) breaker: BreakerSettings,
}

impl Picked {
    fn has_lost_its_probe(&self) -> bool {
        let probe = self.probe.take();
        let is_lost =
            probe.is_none() && matches!(self.worker.health.read().state, HealthState::Open | HealthState::Probing);
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

pub(super) fn pick(service: &RouterService, view: &View, wish: &Wish<'_>) -> Result<Picked, NoPick> {
    let mut scratch = service.scratch.borrow_mut();
    let Scratch { indexes, .. } = &mut *scratch;
    indexes.clear();
    indexes.extend(route::untried(&view.fleet, wish.pool, wish.tried));
    if indexes.is_empty() {
        return Err(NoPick::NoneLeft);
    }
    let cap = service.live().caps.per_target;
    if let Some(cap) = cap {
        indexes.retain(|index| view.fleet.targets[*index as usize].load.requests() < cap);
        if indexes.is_empty() {
            return Err(NoPick::Full);
        }
    }
    let is_chosen_well = leave_out_ailing(service, &view.fleet, indexes);
    loop {
        let picked = pick_among(service, view, wish, &mut scratch).ok_or(NoPick::NoneLeft)?;
        if !is_chosen_well || !picked.has_lost_its_probe() {
            return Ok(picked);
        }
        // Another shard has taken the probe, or the worker was opened, in this very moment.
        let indexes = &mut scratch.indexes;
        indexes.retain(|index| view.fleet.targets[*index as usize].worker.id != picked.worker.id);
        if indexes.is_empty() {
            return Ok(picked);
        }
    }
}

/// Leaves out workers that the circuit breaker has opened or that have asked for time. Where that leaves nobody, all stay
/// in: a wrong verdict must not take a model down. Tells whether all that are left may be asked.
fn leave_out_ailing(service: &RouterService, fleet: &Fleet, indexes: &mut Vec<u32>) -> bool {
    if !fleet.has_ailing() {
        return true;
    }
    let (live, now_ms) = (service.live(), service.shared.now_ms());
    let may_be_asked = |index: &u32| {
        live.breaker.admission(&fleet.targets[*index as usize].worker.health, now_ms) != Admission::Excluded
    };
    let is_anyone_left = indexes.iter().any(may_be_asked);
    if is_anyone_left {
        indexes.retain(may_be_asked);
    }
    is_anyone_left
}

fn pick_among(service: &RouterService, view: &View, wish: &Wish<'_>, scratch: &mut Scratch) -> Option<Picked> {
    let shared = &service.shared;
    let Scratch { queries, candidates, indexes } = scratch;
    if wish.by_load {
        let index = route::by_load(&view.fleet, indexes.iter().copied())?;
        return Charge::of(Arc::new([])).on(service, &view.fleet.targets[index as usize]);
    }
    let sessions = shared.steering.sessions.as_ref();
    let turn = sessions.zip(wish.session).and_then(|(sessions, name)| sessions.turn(name, wish.model, wish.role));
    let session = Session { turn, fleet: &view.fleet, indexes: &*indexes };
    if shared.settings.policy == Policy::RoundRobin {
        let choose = || service.round_robin.borrow_mut().pick(wish.model, wish.role, indexes);
        let (index, lease) = match session.follow() {
            Some((place, lease)) => (indexes[place], Some(lease)),
            None => {
                let index = choose()?;
                match session.claim(index) {
                    Some((place, lease)) => (indexes[place], Some(lease)),
                    None => (index, None),
                }
            }
        };
        let target = &view.fleet.targets[index as usize];
        info!(policy = "round-robin", role = wish.role.as_str(), picked = &*target.route_key, "pick");
        return Charge { session: lease, ..Charge::of(Arc::new([])) }.on(service, target);
    }
    let facts = &wish.prompts.facts;
    // Of an image nobody knows how long its computing takes: such picks keep the plain formula.
    let load_term = if facts.is_multimodal { LoadTerm::Active } else { shared.steering.load_term.of(wish.role) };
    let weight = service.live().overlap_weight_of(wish.role, load_term) * facts.retention.weight_factor();
    let terms = Terms { load: load_term.weights(), weight };
    fill(service, view, wish, terms, indexes, queries, candidates);
    kv_aware(service, view, wish, weight, candidates, &session)
}

/// What a pick's cost is made of.
#[derive(Clone, Copy)]
struct Terms {
    load: LoadWeights,
    /// Of a missing block.
    weight: f64,
}

/// One candidate per target: what it holds of the prompt or of the images, and its load.
fn fill(
    service: &RouterService,
    view: &View,
    wish: &Wish<'_>,
    terms: Terms,
    indexes: &[u32],
    queries: &mut Queries,
    candidates: &mut Vec<Candidate>,
) {
    let steering = &service.shared.steering;
    let facts = &wish.prompts.facts;
    // Images are encoded at prefill: a decode worker holds none.
    let images: &[_] = if wish.role == Role::Decode { &[] } else { &facts.images };
    let is_idle = indexes.iter().all(|index| view.fleet.targets[*index as usize].load.requests() == 0);
    let recent_weight = steering.recent_load.weight(is_idle, terms.weight);
    let pick_number = steering.picks.current();
    candidates.clear();
    let host_weight = service.live().host_tier_weight;
    queries.begin();
    for index in indexes.iter().copied() {
        let target = &view.fleet.targets[index as usize];
        // Beside an image the text's blocks say nothing: the placeholder is the same whatever the image.
        let blocks = wish.prompts.blocks_for(target).filter(|_| !facts.is_multimodal);
        let reusable = blocks.and_then(|_| wish.prompts.reusable_for(target));
        let (request_blocks, cache_hits, block_tokens) = if facts.is_multimodal {
            let held = if images.is_empty() { 0 } else { steering.images.held(target.id, images) };
            (IMAGE_BLOCKS * images.len() as u32, IMAGE_BLOCKS * held, DEFAULT_BLOCK_TOKENS)
        } else {
            (
                blocks.map_or(0, |blocks| blocks.len() as u32),
                reusable.map_or(0, |blocks| {
                    let hits = queries.of(view, blocks, host_weight > 0.0);
                    view.credit(target.slot, &hits.device, &hits.any, host_weight)
                }),
                target.block_size.unwrap_or(DEFAULT_BLOCK_TOKENS),
            )
        };
        candidates.push(Candidate {
            target: index,
            request_blocks,
            cache_hits,
            active_blocks: target.load.active_blocks(),
            load_blocks: terms.load.blocks(&target.load, block_tokens)
                + if recent_weight > 0.0 {
                    recent_weight * route::recent_blocks(&target.load, pick_number)
                } else {
                    0.0
                },
            picked_at_ns: target.load.picked_at_ns(),
            block_tokens,
        });
    }
}

fn kv_aware(
    service: &RouterService,
    view: &View,
    wish: &Wish<'_>,
    weight: f64,
    candidates: &[Candidate],
    session: &Session<'_>,
) -> Option<Picked> {
    let shared = &service.shared;
    let facts = &wish.prompts.facts;
    let demand = Demand::of(service, view, wish);
    let mut place;
    let mut reservation = None;
    let mut lease = None;
    if let Some((followed, held)) = session.follow() {
        (place, lease) = (followed, Some(held));
        reservation = demand.as_ref().map(|demand| demand.book(candidates, place));
    } else {
        let original = route::pick(weight, candidates)?.target;
        place = candidates.iter().position(|candidate| candidate.target == original)?;
        if let Some(demand) = &demand {
            let (selection, reserved) = demand.select(candidates, place);
            (place, reservation) = (selection.picked, Some(reserved));
        }
        if let Some((agreed, held)) = session.claim(candidates[place].target) {
            if agreed != place {
                // Another turn of the session was first; what was reserved by this one's own choice is given up.
                place = agreed;
                reservation = demand.as_ref().map(|demand| demand.book(candidates, place));
            }
            lease = Some(held);
        }
    }
    let chosen = &candidates[place];
    let target = &view.fleet.targets[chosen.target as usize];
    let (cache_hits, request_blocks) =
        if facts.is_multimodal { (0, 0) } else { (chosen.cache_hits, chosen.request_blocks) };
    shared.metrics.picked(wish.role, cache_hits, request_blocks);
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
    // What a decode worker gets is computed already; what says nothing of its length weighs as one block.
    let queued_blocks = match (wish.role, chosen.request_blocks) {
        (Role::Decode, _) => 0,
        (_, 0) => 1,
        (_, blocks) => u64::from(blocks.saturating_sub(chosen.cache_hits)),
    };
    Charge { blocks, queued_blocks, reservation, session: lease }.on(service, target)
}

/// The session of a pick, if it has one, among the targets that may serve it.
struct Session<'a> {
    turn: Option<Turn<'a>>,
    fleet: &'a Fleet,
    indexes: &'a [u32],
}

impl Session<'_> {
    /// Place of the target that the session is bound to.
    fn follow(&self) -> Option<(usize, Lease)> {
        self.placed(self.turn?.follow(|record| self.place_of(record).is_some())?)
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

/// Decode demand as one pick sees it; only for decode picks, and only when it is switched on.
struct Demand<'a> {
    demand: &'a DecodeDemand,
    view: &'a View,
    wish: &'a Wish<'a>,
}

impl<'a> Demand<'a> {
    fn of(service: &'a RouterService, view: &'a View, wish: &'a Wish<'a>) -> Option<Self> {
        let demand = service.shared.steering.demand.as_ref().filter(|_| wish.role == Role::Decode)?;
        Some(Self { demand, view, wish })
    }

    fn candidate(&self, candidate: &Candidate) -> (DecodeCandidate<'a>, Input) {
        let target = &self.view.fleet.targets[candidate.target as usize];
        let (tokens, input) = self.wish.prompts.tokens_for(target);
        let tokens = decode_demand::request_tokens(tokens, self.wish.samples);
        (DecodeCandidate { demand: &target.demand, tokens, load: candidate.load_blocks }, input)
    }

    fn book(&self, candidates: &[Candidate], place: usize) -> Reservation {
        self.demand.book(&self.candidate(&candidates[place]).0)
    }

    fn select(&self, candidates: &[Candidate], original: usize) -> (Selection, Reservation) {
        let mut input = Input::Exact;
        let rows: Vec<DecodeCandidate<'_>> = candidates
            .iter()
            .map(|candidate| {
                let (row, counted) = self.candidate(candidate);
                if counted == Input::Estimated {
                    input = counted;
                }
                row
            })
            .collect();
        let is_shown = enabled!(target: "infera_router::decode_demand", Level::DEBUG);
        let mut projected = Vec::new();
        let (selection, reservation) = self.demand.select(&rows, original, input, is_shown.then_some(&mut projected));
        if is_shown {
            self.show(candidates, &projected, selection, input);
        }
        (selection, reservation)
    }

    /// The debug event of one decision: targets and numbers, no text of the request.
    fn show(&self, candidates: &[Candidate], projected: &[u64], selection: Selection, input: Input) {
        let key = |place: usize| &*self.view.fleet.targets[candidates[place].target as usize].route_key;
        debug!(
            target: "infera_router::decode_demand",
            mode = self.demand.mode().as_str(),
            input = input.as_str(),
            candidates = ?(0..candidates.len()).map(key).collect::<Vec<_>>(),
            projected_tokens = ?projected,
            original = key(selection.original),
            suggested = key(selection.suggested),
            selected = key(selection.picked),
            "decode input demand"
        );
    }
}

/// What is charged with a pick.
struct Charge {
    blocks: Arc<[BlockHash]>,
    /// Blocks that the target has to compute before its answer begins.
    queued_blocks: u64,
    reservation: Option<Reservation>,
    session: Option<Lease>,
}

impl Charge {
    fn of(blocks: Arc<[BlockHash]>) -> Self {
        Self { blocks, queued_blocks: 0, reservation: None, session: None }
    }

    /// A target without an address is not routable, and the fleet lists none.
    fn on(self, service: &RouterService, target: &Target) -> Option<Picked> {
        let address = target.worker.address?;
        let shared = &service.shared;
        let handles = service.handles.of(&shared.metrics, target);
        handles.picks.inc();
        let breaker = service.live().breaker;
        let health = &target.worker.health;
        let probe = match health.read().state {
            HealthState::Well => None,
            _ => breaker.claim(health, shared.now_ms()),
        };
        let booking = Booking::new(target.id, &target.load, self.blocks, &shared.ledger, shared.now_ns());
        Some(Picked {
            worker: target.worker.clone(),
            address,
            rank: target.rank,
            handles,
            booking: Some(booking.queueing(self.queued_blocks)),
            _reservation: self.reservation,
            session: self.session,
            probe: Cell::new(probe),
            breaker,
        })
    }
}
