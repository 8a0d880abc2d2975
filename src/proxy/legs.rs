//! The life of one pair's legs: both at once or prefill first, until one of them decides what the client sees. Owns
//! the rule that nothing is promised to the client before decode's first byte, and that whatever ends a pair early ends
//! both legs. Never picks.

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::Poll;
use std::time::Instant;

use infera_shards::{Responder, UpstreamError, UpstreamResponse, boxed};
use tracing::{debug, warn};

use super::budget::Failures;
use super::cleanup::{self, LegCall, PairGuard};
use super::dialect::Dialect;
use super::held::{Held, PrefillLeg};
use super::leg_end::{Blame, LegFailure, PrefillEnd, PrefillFuture, prefill_to_its_end};
use super::metrics::Outcome;
use super::pair::PickedPair;
use super::pick::Picked;
use super::relay::{Answer, Answering, poll_beside, relay_decode, relay_refusal};
use super::service::RouterService;
use super::shared::PrefillRelease;
use super::silence::Watched;
use super::stages::Stage;
use super::verdict::{self, Standing};
use crate::api::ApiError;
use crate::load::Booking;
use crate::pd::{self, AttemptIds, Handoff, Leg, Members, PdEndpoint, Schedule, StreamFailure};
use crate::worker::{Name, Role};

/// One request, held until nothing can be tried again.
pub(super) struct Job {
    pub request: Rc<infera_shards::Request>,
    pub members: Members,
    pub endpoint: PdEndpoint,
    pub received: Instant,
    /// Decode's answer becomes another one on its way to the client.
    pub is_translated: bool,
}

/// How one attempt ended.
pub(super) enum Ending {
    /// The client has an answer, or has left.
    Answered(Outcome),
    /// Nothing reached the client and no other pair is to be tried.
    Failed(ApiError),
    /// Nothing reached the client; another pair may serve.
    Retry { role: Role, worker: Name, is_refused: bool, held: Option<Held> },
}

/// Everything of one attempt but the client.
pub(super) struct Attempt<'a> {
    pub service: &'a RouterService,
    pub pair: PickedPair,
    pub ids: AttemptIds,
    /// What failed before this one.
    pub failures: Failures,
    pub dialect: &'a Dialect,
    pub watched: &'a Watched<'a>,
}

/// Runs one attempt. `job` is taken once nothing can be tried again, so that a long answer does not hold the prompt.
pub(super) async fn run(attempt: &mut Attempt<'_>, job: &mut Option<Job>, responder: &mut Responder) -> Ending {
    match attempt.pair.peers.pair().protocol().schedule() {
        Schedule::Concurrent => concurrent(attempt, job, responder).await,
        Schedule::Serial => serial(attempt, job, responder).await,
    }
}

impl Attempt<'_> {
    fn picked(&self, role: Role) -> &Picked {
        if role == Role::Prefill { &self.pair.prefill } else { &self.pair.decode }
    }

    /// What decode's answer says of the two. One that its worker cut is a fault; one that its client left says nothing.
    fn answered(&self, answer: &Answer) {
        let shared = &self.service.shared;
        match (answer.failure, answer.outcome) {
            (Some(StreamFailure::Worker), _) => self.pair.decode.failed(shared),
            (Some(StreamFailure::Client), _) | (None, Outcome::StreamFailed) => {}
            (None, _) => self.pair.decode.succeeded(),
        }
        if answer.is_whole {
            self.pair.prefill.completed();
        }
    }

    /// The first byte of decode's answer is there, which there cannot be without prefill: sessions stay with both.
    fn served(&self) {
        self.service.took(Stage::FirstByte, self.pair.decode.at.elapsed());
        self.pair.prefill.served();
        self.pair.decode.served();
    }

    fn call(&self, role: Role, job: &Job, leg: Leg) -> LegCall {
        let picked = self.picked(role);
        LegCall {
            side: self.service.side.clone(),
            worker: picked.worker.clone(),
            address: picked.address,
            rank: picked.rank,
            request: job.request.clone(),
            leg,
            is_read_here: role == Role::Prefill || job.is_translated,
            // Where one call ends both legs, nobody asks how far they have come.
            progress: (!self.has_abort_call()).then(Rc::default),
        }
    }

    fn has_abort_call(&self) -> bool {
        self.pair.peers.pair().protocol().has_abort_call()
    }

    /// Ends both legs unless it is disarmed.
    fn guard(&self) -> PairGuard {
        let rids = self.has_abort_call().then(|| self.ids.request_ids());
        let workers = [&self.pair.prefill, &self.pair.decode].map(|it| (it.worker.clone(), it.address));
        PairGuard::new(self.service.side.clone(), workers, rids)
    }

    /// The prefill booking, if it goes with the prefill leg instead of with the decode answer.
    fn booking_of_the_leg(&mut self) -> Option<Booking> {
        match self.service.live().disaggregation.prefill_release {
            PrefillRelease::Completion => self.pair.prefill.booking.take(),
            PrefillRelease::Decode => None,
        }
    }

    /// Whether another pair is to be tried. Takes the retry out of the budget, except where the leg's worker could not be
    /// reached, as for a request that one worker serves. Asked once per failure; `transport` is absent where an answer was one.
    fn takes_retry(&self, failed: Role, transport: Option<&UpstreamError>) -> bool {
        self.pair.has_another(failed)
            && self
                .failures
                .allow_another(transport.is_some_and(UpstreamError::is_refused), self.service.live().retries_max)
            && (transport.is_some_and(UpstreamError::is_unreached) || self.service.may_spend_a_retry())
    }

    /// A leg has failed: its worker alone is to blame.
    fn blame(&self, failure: &LegFailure) {
        match &failure.blame {
            Blame::Transport(error) => self.picked(failure.role).failed_by(&self.service.shared, error),
            Blame::Answer(standing) => self.picked(failure.role).answered(&self.service.shared, *standing),
        }
    }

    fn failed(&self, failure: LegFailure, held: Option<Held>, is_retried: bool) -> Ending {
        self.service.shared.metrics.pairs.leg_failed(failure.role, failure.phase);
        self.blame(&failure);
        if !is_retried {
            warn!(
                leg = failure.role.as_str(),
                worker = &*failure.worker,
                phase = failure.phase,
                reason = failure.reason,
                "a pair failed"
            );
            return Ending::Failed(failure.into_error());
        }
        warn!(
            leg = failure.role.as_str(),
            worker = &*failure.worker,
            phase = failure.phase,
            reason = failure.reason,
            "retrying on another pair"
        );
        self.service.shared.retried(failure.phase);
        let is_refused = failure.transport().is_some_and(UpstreamError::is_refused);
        Ending::Retry { role: failure.role, worker: failure.worker, is_refused, held }
    }

    fn answering<'b>(&'b self, received: Instant, is_complete: &'b Cell<bool>) -> Answering<'b> {
        let PickedPair { prefill, decode, .. } = &self.pair;
        let handles = (&prefill.handles, &decode.handles);
        let live = self.service.live();
        Answering { handles, decode_worker: &decode.worker.id, live, received, watched: self.watched, is_complete }
    }
}

/// What the first of two legs had to say.
enum Event {
    Prefill(PrefillEnd),
    Decode(Result<UpstreamResponse, UpstreamError>),
}

/// Polls both, prefill first: where both have ended, the prefill's refusal explains the decode's failure. Neither
/// future is dropped by waiting here, so nothing that was read is lost.
async fn next_event(
    prefill: &mut Option<PrefillFuture>,
    mut decode: Pin<&mut impl Future<Output = Result<UpstreamResponse, UpstreamError>>>,
) -> Event {
    poll_fn(|context| {
        if let Some(leg) = prefill
            && let Poll::Ready(end) = leg.as_mut().poll(context)
        {
            *prefill = None;
            return Poll::Ready(Event::Prefill(end));
        }
        decode.as_mut().poll(context).map(Event::Decode)
    })
    .await
}

/// Both legs at once. The client gets decode's answer once its first byte is there; until then whichever leg fails
/// ends the other one.
async fn concurrent(attempt: &mut Attempt<'_>, job: &mut Option<Job>, responder: &mut Responder) -> Ending {
    let Some(held_job) = job.as_ref() else { return Ending::Failed(ApiError::Internal) };
    let received = held_job.received;
    let booking = attempt.booking_of_the_leg();
    let attempt = &*attempt;
    let pair = attempt.pair.peers.pair();
    let prefill_leg = pd::prefill_leg(&pair, held_job.endpoint, &held_job.members, &attempt.ids);
    let decode_leg = pd::decode_leg(&pair, held_job.endpoint, &held_job.members, &attempt.ids, None);
    let mut guard = attempt.guard();
    let prefill_call = attempt.call(Role::Prefill, held_job, prefill_leg);
    let decode_call = attempt.call(Role::Decode, held_job, decode_leg);
    let progress = prefill_call.progress.clone();
    let mut prefill = PrefillLeg::new(attempt, held_job, progress, boxed(|| prefill_to_its_end(prefill_call, booking)));
    prefill.awaited_by(decode_call.progress.clone());
    // The decode leg ends with this block unless it has begun to answer.
    let decided = {
        let decode = pin!(decode_call.send_and_begin());
        first_to_decide(attempt, &mut prefill, decode).await
    };
    let response = match decided {
        Event::Decode(Ok(response)) if response.status.is_success() => response,
        Event::Decode(outcome) => {
            let is_with_decode = prefill.is_with_decode();
            let held = prefill.take_held();
            // Dropped before the client is answered: the prefill leg is to end at once.
            drop(prefill);
            return decode_failed(attempt, outcome, held, is_with_decode, responder).await;
        }
        Event::Prefill(end) => return prefill_failed(attempt, prefill, end, responder).await,
    };
    // No replay from here on.
    drop(job.take());
    let mut prefill = prefill.into_running();
    attempt.served();
    attempt.pair.prefill.prompt_done();
    let answering = attempt.answering(received, &guard.is_complete);
    let answer = relay_decode(response, attempt.dialect, responder, answering, |context| {
        // Decode has begun to answer: what the prefill leg still says changes nothing for the client.
        match poll_beside(&mut prefill, context) {
            Some(PrefillEnd::Done(_)) => attempt.pair.prefill.succeeded(),
            Some(PrefillEnd::Failed(failure)) => {
                attempt.blame(&failure);
                debug!(
                    worker = &*failure.worker,
                    reason = failure.reason,
                    "a prefill leg failed behind its decode leg"
                );
            }
            Some(PrefillEnd::Declined(answer)) => {
                let standing = Standing::of(&answer, &attempt.service.live().outbound);
                attempt.pair.prefill.answered(&attempt.service.shared, standing);
            }
            None => {}
        }
    })
    .await;
    attempt.answered(&answer);
    if answer.is_whole {
        match prefill {
            None => guard.disarm(),
            Some(prefill) => {
                // Decode's whole answer shows that the KV came.
                attempt.pair.prefill.succeeded();
                let limit = attempt.service.live().disaggregation.prefill_drain_timeout;
                let (side, worker) = (attempt.service.side.clone(), attempt.pair.prefill.worker.clone());
                let rest = async move {
                    let end = prefill.await;
                    verdict::late(&side, &worker, end.standing(&side.live.get().outbound));
                    matches!(end, PrefillEnd::Done(_))
                };
                cleanup::drain(rest, guard, limit);
            }
        }
    }
    Ending::Answered(answer.outcome)
}

/// Waits for what ends the time in which either leg may still fail: decode's outcome, or a prefill leg that did not end
/// well.
async fn first_to_decide(
    attempt: &Attempt<'_>,
    prefill: &mut PrefillLeg,
    mut decode: Pin<&mut impl Future<Output = Result<UpstreamResponse, UpstreamError>>>,
) -> Event {
    loop {
        match next_event(&mut prefill.future, decode.as_mut()).await {
            Event::Prefill(PrefillEnd::Done(_)) => {
                attempt.pair.prefill.succeeded();
                attempt.pair.prefill.prompt_done();
                prefill.answered(None);
            }
            event => return event,
        }
    }
}

/// The prefill leg has ended without KV for decode.
async fn prefill_failed(
    attempt: &Attempt<'_>,
    mut prefill: PrefillLeg,
    end: PrefillEnd,
    responder: &mut Responder,
) -> Ending {
    prefill.disarm();
    match end {
        PrefillEnd::Declined(answer) => {
            attempt.service.shared.metrics.pairs.leg_failed(Role::Prefill, "refused");
            answered_badly(attempt, Role::Prefill, answer, None, responder).await
        }
        PrefillEnd::Failed(failure) => {
            let is_retried = attempt.takes_retry(Role::Prefill, failure.transport());
            attempt.failed(failure, None, is_retried)
        }
        PrefillEnd::Done(_) => Ending::Failed(ApiError::Internal),
    }
}

/// Decode failed before its first byte, or refused. `held`: KV that waits on the prefill worker.
async fn decode_failed(
    attempt: &Attempt<'_>,
    outcome: Result<UpstreamResponse, UpstreamError>,
    held: Option<Held>,
    is_with_decode: bool,
    responder: &mut Responder,
) -> Ending {
    let live = attempt.service.live();
    let worker = &attempt.pair.decode.worker.id;
    let (failure, held) = match outcome {
        // It has done nothing for the request: the KV waits on.
        Ok(response) if Standing::of(&response, &live.outbound) == Standing::KeyRefused => {
            (LegFailure::key_refused(Role::Decode, worker), held)
        }
        Ok(response) => {
            attempt.service.shared.metrics.pairs.leg_failed(Role::Decode, "status");
            return answered_badly(attempt, Role::Decode, response, held, responder).await;
        }
        // An engine that had the request frees its KV when the connection breaks.
        Err(error) => (LegFailure::of(Role::Decode, worker, error), held.filter(|_| !is_with_decode)),
    };
    let is_retried = attempt.takes_retry(Role::Decode, failure.transport());
    if is_retried {
        return attempt.failed(failure, held, true);
    }
    if let Some(held) = held {
        held.count_stranded(attempt.service);
    }
    attempt.failed(failure, None, false)
}

/// A leg's answer ends the attempt by its status: another pair is tried where it may do better, else the worker's own
/// words reach the client.
async fn answered_badly(
    attempt: &Attempt<'_>,
    role: Role,
    answer: UpstreamResponse,
    held: Option<Held>,
    responder: &mut Responder,
) -> Ending {
    let live = attempt.service.live();
    let (picked, standing) = (attempt.picked(role), Standing::of(&answer, &live.outbound));
    picked.answered(&attempt.service.shared, standing);
    if standing.is_worth_a_retry() && attempt.takes_retry(role, None) {
        let (leg, worker) = (role.as_str(), &picked.worker.id);
        debug!(leg, worker = &**worker, status = answer.status.as_u16(), "retrying on another pair");
        attempt.service.shared.retried("status");
        return Ending::Retry { role, worker: worker.clone(), is_refused: false, held };
    }
    let outcome = relay_refusal(answer, attempt.dialect, responder).await;
    // Decode answers, so it may well take the short request that frees the KV.
    if let Some(held) = held {
        held.release_through(attempt);
    }
    Ending::Answered(outcome)
}

/// Prefill first; its answer says where decode finds the KV.
async fn serial(attempt: &mut Attempt<'_>, job: &mut Option<Job>, responder: &mut Responder) -> Ending {
    let Some(held_job) = job.as_ref() else { return Ending::Failed(ApiError::Internal) };
    let received = held_job.received;
    let leg = pd::prefill_leg(&attempt.pair.peers.pair(), held_job.endpoint, &held_job.members, &attempt.ids);
    let booking = attempt.booking_of_the_leg();
    let call = attempt.call(Role::Prefill, held_job, leg);
    let progress = call.progress.clone();
    let mut prefill = PrefillLeg::new(attempt, held_job, progress, boxed(|| prefill_to_its_end(call, booking)));
    let answer = match prefill.end().await {
        PrefillEnd::Done(answer) => {
            attempt.pair.prefill.succeeded();
            attempt.pair.prefill.prompt_done();
            answer
        }
        end => return prefill_failed(attempt, prefill, end, responder).await,
    };
    let protocol = attempt.pair.peers.pair().protocol();
    let handoff = match Handoff::of(protocol, &answer) {
        Ok(handoff) => handoff,
        Err(error) => {
            prefill.disarm();
            let failure = LegFailure::of_handoff(&attempt.pair.prefill.worker.id, &error);
            return attempt.failed(failure, None, attempt.takes_retry(Role::Prefill, None));
        }
    };
    let leg = pd::decode_leg(
        &attempt.pair.peers.pair(),
        held_job.endpoint,
        &held_job.members,
        &attempt.ids,
        handoff.as_ref(),
    );
    match handoff {
        Some(handoff) => prefill.answered(Some(handoff)),
        None => {
            attempt.service.shared.metrics.pairs.prefills_without_handoff_total.inc();
            prefill.disarm();
        }
    }
    let call = attempt.call(Role::Decode, held_job, leg);
    prefill.awaited_by(call.progress.clone());
    let outcome = call.send_and_begin().await;
    let (is_with_decode, held) = (prefill.is_with_decode(), prefill.take_held());
    match outcome {
        Ok(response) if response.status.is_success() => {
            drop((held, job.take()));
            attempt.served();
            let is_complete = Cell::default();
            let answering = attempt.answering(received, &is_complete);
            let answer = relay_decode(response, attempt.dialect, responder, answering, |_| ()).await;
            attempt.answered(&answer);
            Ending::Answered(answer.outcome)
        }
        outcome => decode_failed(attempt, outcome, held, is_with_decode, responder).await,
    }
}
