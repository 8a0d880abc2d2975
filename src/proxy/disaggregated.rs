//! One request that a prefill and a decode worker share: what must be known of it, the attempts on pairs, and the hand
//! over of KV that an attempt left behind. The legs themselves are in `legs`, the picking in `pair`.

use std::borrow::Cow;
use std::rc::Rc;

use infera_shards::{Request, Responder};
use tracing::debug;

use super::dialect::Dialect;
use super::direct::Named;
use super::exchange::{Route, back_off, named_model};
use super::held::Held;
use super::legs::{self, Attempt, Ending, Job};
use super::metrics::Outcome;
use super::pair::{PairWish, PickedPair, Tried, pick_pair};
use super::service::RouterService;
use super::silence::Watched;
use crate::api::{ApiError, Endpoint};
use crate::fleet::Fleet;
use crate::limits;
use crate::pd::{AttemptIds, Members, PdEndpoint, RankPins, Sequences};
use crate::prompt::outline::Outline;
use crate::route::{self, Topology};
use crate::worker::Role;

/// The request as an endpoint that two legs can serve.
pub(super) fn endpoint_of(endpoint: &Endpoint) -> Option<PdEndpoint> {
    match endpoint {
        Endpoint::ChatCompletions => Some(PdEndpoint::Chat),
        Endpoint::Completions => Some(PdEndpoint::Completions),
        Endpoint::Responses => Some(PdEndpoint::Responses),
        _ => None,
    }
}

/// Whether a pair serves the model. A gateway's choice of a mixed worker is one against a pair.
pub(super) fn is_pair(fleet: &Fleet, model: &str, named: &Named) -> bool {
    named.role(fleet) != Some(Role::Mixed)
        && matches!(route::topology(fleet, model), Ok(Topology::Disaggregated { .. }))
}

/// The targets of both roles.
pub(super) fn both_pools<'a>(fleet: &'a Fleet, model: &str) -> Cow<'a, [u32]> {
    match route::topology(fleet, model) {
        Ok(Topology::Disaggregated { prefill, decode }) => Cow::Owned([prefill, decode].concat()),
        _ => Cow::Borrowed(&[]),
    }
}

/// A request for a pair, as far as it is known.
pub(super) struct Paired {
    pub endpoint: PdEndpoint,
    pub route: Route,
    pub request: Request,
    /// Absent for a body that is no JSON.
    pub outline: Option<Outline>,
    /// How decode's answer reaches the client.
    pub dialect: Dialect,
}

/// Boxed as it comes: what it holds is large and goes on into parts of its own.
pub(super) async fn serve(
    service: &RouterService,
    paired: Box<Paired>,
    responder: &mut Responder,
    watched: &Watched<'_>,
) -> Result<Outcome, ApiError> {
    let Paired { endpoint, route, request, outline, dialect } = *paired;
    let received = request.received;
    let (members, pins, sequences) = legs_facts(endpoint, &request, outline)?;
    service.retry_budget.request();
    let is_translated = dialect.is_translated();
    let mut job = Some(Job { request: Rc::new(request), members, endpoint, received, is_translated });
    let mut tried = Tried::default();
    let mut held: Option<Held> = None;
    loop {
        let pair = match next_pair(service, &route, endpoint, pins, sequences, &tried) {
            Ok(Some(pair)) => pair,
            none => {
                if let Some(held) = held {
                    held.count_stranded(service);
                }
                let reason = "every pair of the model left during the request".to_owned();
                return Err(none.err().unwrap_or(ApiError::NoWorker { reason }));
            }
        };
        let ids = AttemptIds::draw(&mut rand::rng(), sequences.total(), pair.peers.pair().room_rank());
        debug!(
            prefill = &*pair.prefill.worker.id,
            decode = &*pair.decode.worker.id,
            protocol = %pair.peers.pair().protocol(),
            room = ids.room(),
            "pair"
        );
        watched.asks_pair(&pair.prefill.handles, &pair.decode.handles, ids.room());
        let mut attempt = Attempt { service, pair, ids, failures: tried.failures, dialect: &dialect, watched };
        if let Some(held) = held.take() {
            held.release_through(&attempt);
        }
        match legs::run(&mut attempt, &mut job, responder).await {
            Ending::Answered(outcome) => return Ok(outcome),
            Ending::Failed(error) => return Err(error),
            Ending::Retry { role, worker, is_refused, held: left } => {
                tried.add(role, worker, is_refused);
                held = left;
                // What the failed attempt held must not be held while waiting. KV that waits is freed first: nobody would
                // own it if the client left meanwhile.
                drop(attempt);
                if held.is_none() {
                    back_off(service, tried.failures.counted()).await;
                }
            }
        }
    }
}

/// What the legs' bodies and the choice of a pair need of the request.
pub(super) fn legs_facts(
    endpoint: PdEndpoint,
    request: &Request,
    outline: Option<Outline>,
) -> Result<(Members, RankPins, Sequences), ApiError> {
    let bad = |error: &dyn std::fmt::Display| ApiError::BadRequest(error.to_string());
    let members = match outline {
        Some(outline) => Members::of(outline),
        // It was no JSON; read again for the words.
        None => Members::scan(&request.body),
    };
    let members = members.map_err(|error| bad(&error))?;
    let pins = RankPins::of(&members, request.head.get("x-data-parallel-rank")).map_err(|error| bad(&error))?;
    let sequences = Sequences::of(endpoint, &members);
    if sequences.total() > limits::PAIR_SEQUENCES_MAX {
        return Err(ApiError::BadRequest(format!(
            "{} prompts of {} samples each are more than {} sequences",
            sequences.prompts,
            sequences.samples,
            limits::PAIR_SEQUENCES_MAX
        )));
    }
    Ok((members, pins, sequences))
}

/// Picks and books on the newest view.
fn next_pair(
    service: &RouterService,
    route: &Route,
    endpoint: PdEndpoint,
    pins: RankPins,
    sequences: Sequences,
    tried: &Tried,
) -> Result<Option<PickedPair>, ApiError> {
    let view = service.view();
    match wish_for_a_pair(&view.fleet, route, endpoint, pins, sequences, tried)? {
        Some(wish) => pick_pair(service, &view, &wish),
        None => Ok(None),
    }
}

/// What the pair is to be; nothing when its model has no pair any more.
pub(super) fn wish_for_a_pair<'a>(
    fleet: &'a Fleet,
    route: &'a Route,
    endpoint: PdEndpoint,
    pins: RankPins,
    sequences: Sequences,
    tried: &'a Tried,
) -> Result<Option<PairWish<'a>>, ApiError> {
    let model = named_model(fleet, &route.model);
    let topology = route::topology(fleet, model).map_err(|error| ApiError::from_topology(model, error))?;
    let (Topology::Disaggregated { prefill, decode }, Some((name, _))) = (topology, fleet.models.get_key_value(model))
    else {
        return Ok(None);
    };
    Ok(Some(PairWish {
        model: name,
        prefill,
        decode,
        endpoint,
        prompts: &route.prompts,
        samples: route.samples,
        session: route.session,
        pins,
        sequences,
        named: &route.named,
        tried,
    }))
}
