//! Picking the two workers of one attempt: only workers whose protocol has a partner, prefill first (its cache is what
//! counts), then decode among those that speak the same protocol. Picks and bookings are one step, between two awaits.

use std::rc::Rc;
use std::sync::Arc;

use smallvec::SmallVec;

use super::budget::Failures;
use super::direct::{self, Named};
use super::pick::{NoPick, Picked, Wish, pick, preview};
use super::preview::Notes;
use super::prompts::Prompts;
use super::service::RouterService;
use super::steering::SessionName;
use crate::api::ApiError;
use crate::fleet::{Target, Worker};
use crate::index::View;
use crate::limits;
use crate::pd::{Pair, PdEndpoint, Peer, Pin, Protocol, RankPins, Sequences};
use crate::route::RecentLoad;
use crate::worker::{Name, Role};

/// What a pair is for.
pub(super) struct PairWish<'a> {
    pub model: &'a Name,
    pub prefill: &'a [u32],
    pub decode: &'a [u32],
    pub endpoint: PdEndpoint,
    pub prompts: &'a Prompts,
    /// Samples that the request asks for.
    pub samples: u32,
    pub session: Option<SessionName>,
    pub pins: RankPins,
    pub sequences: Sequences,
    pub named: &'a Named,
    pub tried: &'a Tried,
}

/// Workers that failed this request, by the leg they failed in.
#[derive(Default)]
pub(super) struct Tried {
    pub prefill: Vec<Name>,
    pub decode: Vec<Name>,
    pub failures: Failures,
}

impl Tried {
    pub fn add(&mut self, role: Role, worker: Name, is_refused: bool) {
        self.of_mut(role).push(worker);
        self.failures.add(is_refused);
    }

    fn of_mut(&mut self, role: Role) -> &mut Vec<Name> {
        if role == Role::Prefill { &mut self.prefill } else { &mut self.decode }
    }

    fn of(&self, role: Role) -> &[Name] {
        if role == Role::Prefill { &self.prefill } else { &self.decode }
    }
}

/// Two booked workers.
pub(super) struct PickedPair {
    pub prefill: Picked,
    pub decode: Picked,
    pub peers: PairPeers,
    another_prefill: bool,
    another_decode: bool,
}

/// What the protocols must know of two workers; outlives their bookings.
#[derive(Clone)]
pub(super) struct PairPeers {
    prefill: Rc<Peer>,
    decode: Rc<Peer>,
    prefill_rank: Option<u32>,
}

impl PairPeers {
    pub fn pair(&self) -> Pair<'_> {
        Pair { prefill: &self.prefill, decode: &self.decode, prefill_rank: self.prefill_rank }
    }

    /// This pair's prefill side with another one's decode side; they may speak different protocols.
    pub fn with_decode_of<'a>(&'a self, other: &'a PairPeers) -> Pair<'a> {
        Pair { decode: &other.decode, ..self.pair() }
    }
}

impl PickedPair {
    /// Whether another pair would be left if this leg's worker failed.
    pub fn has_another(&self, failed: Role) -> bool {
        if failed == Role::Prefill { self.another_prefill } else { self.another_decode }
    }
}

/// Targets of one role; most pools are small.
type Side = SmallVec<[Member; 8]>;

/// One target that may take part.
struct Member {
    index: u32,
    peer: Rc<Peer>,
}

/// Two targets chosen for each other, each as its chooser gives it.
struct PairOf<T> {
    prefill: (T, Rc<Peer>),
    decode: (T, Rc<Peer>),
    another_prefill: bool,
    another_decode: bool,
}

/// Nothing when every pair has been tried.
pub(super) fn pick_pair(
    service: &RouterService,
    view: &View,
    wish: &PairWish<'_>,
) -> Result<Option<PickedPair>, ApiError> {
    let booked = |role, pool: &[u32]| pick(service, view, &wish.of_one(role, pool));
    let Some(pair) = choose_pair(service, view, wish, booked, |picked, worker| Arc::ptr_eq(&picked.worker, worker))?
    else {
        return Ok(None);
    };
    let ((prefill, prefill_peer), (decode, decode_peer)) = (pair.prefill, pair.decode);
    Ok(Some(PickedPair {
        peers: PairPeers { prefill: prefill_peer, decode: decode_peer, prefill_rank: prefill.rank },
        prefill,
        decode,
        another_prefill: pair.another_prefill,
        another_decode: pair.another_decode,
    }))
}

/// What [`pick_pair`] would choose now, and the protocol that the two share. `notes` has each pick with its target,
/// prefill's first.
pub(super) fn preview_pair(
    service: &RouterService,
    view: &View,
    wish: &PairWish<'_>,
    notes: &mut Vec<(Role, Notes, Option<u32>)>,
) -> Result<Option<Protocol>, ApiError> {
    let counts_picks = service.shared.steering.recent_load != RecentLoad::Off;
    let previewed = |role, pool: &[u32]| {
        // A pick for a request counts itself before the next one.
        let uncounted_picks = if counts_picks { notes.len() as u32 } else { 0 };
        let mut own = Notes { uncounted_picks, ..Notes::default() };
        let chosen = preview(service, view, &wish.of_one(role, pool), &mut own);
        notes.push((role, own, chosen.as_ref().ok().map(|chosen| chosen.index)));
        chosen.map(|chosen| chosen.index)
    };
    let is_on = |index: &u32, worker: &Arc<Worker>| Arc::ptr_eq(&view.fleet.targets[*index as usize].worker, worker);
    let pair = choose_pair(service, view, wish, previewed, is_on)?;
    Ok(pair.map(|pair| pair.prefill.1.protocol))
}

/// Prefill first, then decode among those that speak its protocol.
fn choose_pair<T>(
    service: &RouterService,
    view: &View,
    wish: &PairWish<'_>,
    mut choose: impl FnMut(Role, &[u32]) -> Result<T, NoPick>,
    is_on: impl Fn(&T, &Arc<Worker>) -> bool,
) -> Result<Option<PairOf<T>>, ApiError> {
    let (prefill, prefill_faults) = members(service, view, wish, Role::Prefill)?;
    let (decode, decode_faults) = members(service, view, wish, Role::Decode)?;
    let speaks = |side: &[Member], protocol: Protocol| side.iter().any(|member| member.peer.protocol == protocol);
    let paired: SmallVec<[u32; 16]> =
        prefill.iter().filter(|it| speaks(&decode, it.peer.protocol)).map(|member| member.index).collect();
    if paired.is_empty() {
        return match wish.tried.failures.any() {
            false => Err(incompatible(view, wish, (&prefill[..], prefill_faults), (&decode[..], decode_faults))),
            true => Ok(None),
        };
    }
    let mut one_of = |role, pool: &[u32]| match choose(role, pool) {
        Ok(chosen) => Ok(Some(chosen)),
        Err(NoPick::NoneLeft) => Ok(None),
        Err(NoPick::Full) => Err(ApiError::full(wish.model)),
    };
    // Ranks of one worker share its registration.
    let worker = |index: u32| &view.fleet.targets[index as usize].worker;
    let peer_of = |side: &[Member], chosen: &T| {
        side.iter().find(|it| is_on(chosen, worker(it.index))).map(|member| member.peer.clone())
    };
    let Some(chosen_prefill) = one_of(Role::Prefill, &paired)? else { return Ok(None) };
    let Some(prefill_peer) = peer_of(&prefill, &chosen_prefill) else { return Ok(None) };
    let protocol = prefill_peer.protocol;
    let partners: SmallVec<[u32; 16]> =
        decode.iter().filter(|it| it.peer.protocol == protocol).map(|member| member.index).collect();
    let Some(chosen_decode) = one_of(Role::Decode, &partners)? else { return Ok(None) };
    let Some(decode_peer) = peer_of(&decode, &chosen_decode) else { return Ok(None) };
    let another_prefill = paired.iter().any(|index| !is_on(&chosen_prefill, worker(*index)));
    let another_decode =
        decode.iter().any(|it| !is_on(&chosen_decode, worker(it.index)) && speaks(&prefill, it.peer.protocol));
    Ok(Some(PairOf {
        prefill: (chosen_prefill, prefill_peer),
        decode: (chosen_decode, decode_peer),
        another_prefill,
        another_decode,
    }))
}

impl<'a> PairWish<'a> {
    /// The part of it that one of the two is picked by.
    fn of_one(&self, role: Role, pool: &'a [u32]) -> Wish<'a> {
        let PairWish { model, prompts, samples, session, .. } = *self;
        Wish { model, role, pool, prompts, samples, session, tried: &[], by_load: false }
    }
}

/// The untried targets of one pool that fit the request, and what is wrong with the others.
fn members(
    service: &RouterService,
    view: &View,
    wish: &PairWish<'_>,
    role: Role,
) -> Result<(Side, Vec<String>), ApiError> {
    let fleet = &view.fleet;
    let (pool, pin) = match role {
        Role::Prefill => (wish.prefill, wish.pins.prefill),
        _ => (wish.decode, wish.pins.decode),
    };
    let narrowed = match wish.named.of_role(role) {
        Some(id) => Some(direct::narrowed(fleet, pool, id, wish.model)?),
        None => None,
    };
    let pool = narrowed.as_deref().unwrap_or(pool);
    check_pin(view, pool, pin, role)?;
    let tried = wish.tried.of(role);
    let (mut members, mut faults): (Side, Vec<String>) = Default::default();
    for index in pool.iter().copied() {
        let target = &fleet.targets[index as usize];
        let worker = &target.worker;
        match service.peers.of(worker) {
            _ if tried.contains(&worker.id) || !has_rank(target, pin) => {}
            Err(fault) => faults.push(format!("{} {fault}", worker.id)),
            Ok(peer) if !peer.protocol.serves(wish.endpoint) => {
                faults.push(format!(
                    "{} speaks {}, which does not serve {}",
                    worker.id,
                    peer.protocol,
                    wish.endpoint.path()
                ));
            }
            Ok(peer) if wish.sequences.prompts > 1 && !peer.protocol.names_each_prompt() => {
                faults.push(format!("{} speaks {}, which takes one prompt per request", worker.id, peer.protocol));
            }
            Ok(peer) => members.push(Member { index, peer }),
        }
    }
    Ok((members, faults))
}

fn check_pin(view: &View, pool: &[u32], pin: Option<Pin>, role: Role) -> Result<(), ApiError> {
    if pin.is_none() {
        return Ok(());
    }
    let ranks = pool.iter().map(|index| view.fleet.targets[*index as usize].worker.record.dp_size.unwrap_or(1)).max();
    RankPins::check(pin, role.as_str(), ranks.unwrap_or(1).max(1))
        .map_err(|error| ApiError::BadRequest(error.to_string()))
}

/// A pinned rank is one of a rank-multiplexed worker's, the one that a worker is dedicated to, or 0 of a plain worker.
fn has_rank(target: &Target, pin: Option<Pin>) -> bool {
    let Some(Pin { rank, .. }) = pin else { return true };
    target.rank.or(target.worker.record.dp_rank).unwrap_or(0) == rank
}

fn incompatible(
    view: &View,
    wish: &PairWish<'_>,
    prefill: (&[Member], Vec<String>),
    decode: (&[Member], Vec<String>),
) -> ApiError {
    let side = |(members, mut faults): (&[Member], Vec<String>)| {
        let spoken =
            |it: &Member| format!("{} speaks {}", view.fleet.targets[it.index as usize].worker.id, it.peer.protocol);
        let mut all: Vec<String> = members.iter().map(spoken).collect();
        all.append(&mut faults);
        all.dedup();
        let hidden = all.len().saturating_sub(limits::NAMED_WORKERS_MAX);
        all.truncate(limits::NAMED_WORKERS_MAX);
        match (all.is_empty(), hidden) {
            (true, _) => "none fits".to_owned(),
            (_, 0) => all.join(", "),
            _ => format!("{} and {hidden} more", all.join(", ")),
        }
    };
    let message = format!(
        "model={:?} has no prefill and decode workers that can share {}; prefill: {}; decode: {}",
        &**wish.model,
        wish.endpoint.path(),
        side(prefill),
        side(decode)
    );
    ApiError::NotBuilt(message)
}
