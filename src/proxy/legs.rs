//! The life of one pair's legs: both at once or prefill first, until one of them decides what the client sees. Owns
//! the rule that nothing is promised to the client before decode's first byte, and that whatever ends a pair early ends
//! both legs. Never picks.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Instant;

use bytes::Bytes;
use infera_shards::{Responder, UpstreamError, UpstreamErrorKind, UpstreamResponse};
use tracing::{debug, warn};

use super::cleanup::{self, LegCall, PairGuard};
use super::held::{Held, PrefillLeg};
use super::metrics::Outcome;
use super::pair::PickedPair;
use super::pick::Picked;
use super::relay::{Answer, Answering, poll_beside, relay_decode, relay_refusal};
use super::service::RouterService;
use super::shared::PrefillRelease;
use super::silence::Watched;
use super::stages::Stage;
use super::verdict::Standing;
use crate::api::ApiError;
use crate::limits;
use crate::load::Booking;
use crate::pd::{self, AttemptIds, Handoff, Leg, Members, PdEndpoint, Schedule, StreamFailure};
use crate::worker::{Name, Role};

/// One request, held until nothing can be tried again.
pub(super) struct Job {
    pub request: Rc<infera_shards::Request>,
    pub members: Members,
    pub endpoint: PdEndpoint,
    pub received: Instant,
}

/// How one attempt ended.
pub(super) enum Ending {
    /// The client has an answer, or has left.
    Answered(Outcome),
    /// Nothing reached the client and no other pair is to be tried.
    Failed(ApiError),
    /// Nothing reached the client; another pair may serve.
    Retry { role: Role, worker: Name, held: Option<Held> },
}

/// A failed leg, in words that name it.
pub(super) struct LegFailure {
    role: Role,
    worker: Name,
    reason: String,
    /// What the worker said, for the client alone: it may quote the prompt or a key.
    said: String,
    phase: &'static str,
    is_timeout: bool,
    blame: Blame,
}

/// What a failed leg says of its worker.
enum Blame {
    Transport(UpstreamError),
    Answer(Standing),
}

impl LegFailure {
    fn of(role: Role, worker: &Name, error: UpstreamError) -> Self {
        let is_timeout = matches!(
            error.kind,
            UpstreamErrorKind::ConnectTimeout | UpstreamErrorKind::FirstByteTimeout | UpstreamErrorKind::IdleTimeout
        );
        let (reason, phase) = (error.to_string(), error.phase());
        Self {
            role,
            worker: worker.clone(),
            reason,
            said: String::new(),
            phase,
            is_timeout,
            blame: Blame::Transport(error),
        }
    }

    fn key_refused(role: Role, worker: &Name) -> Self {
        let reason = "it does not accept this router's key".to_owned();
        let blame = Blame::Answer(Standing::KeyRefused);
        Self { role, worker: worker.clone(), reason, said: String::new(), phase: "key", is_timeout: false, blame }
    }

    fn into_error(self) -> ApiError {
        let Self { worker, phase, reason, said, .. } = &self;
        let reason = format!("{} worker {worker} failed ({phase}): {reason}{said}", self.role.as_str());
        if self.is_timeout { ApiError::WorkerTimeout { reason } } else { ApiError::WorkerFailed { reason } }
    }
}

/// How a prefill leg ended.
pub(super) enum PrefillEnd {
    Done(Bytes),
    /// A 4xx: the client's fault, and the client's to read.
    Refused(UpstreamResponse),
    Failed(LegFailure),
}

pub(super) type PrefillFuture = Pin<Box<dyn Future<Output = PrefillEnd>>>;
type DecodeFuture = Pin<Box<dyn Future<Output = Result<UpstreamResponse, UpstreamError>>>>;

/// Everything of one attempt but the client.
pub(super) struct Attempt<'a> {
    pub service: &'a RouterService,
    pub pair: PickedPair,
    pub ids: AttemptIds,
    pub retries_left: bool,
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
            (None, _) => self.pair.decode.succeeded(shared),
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
            shared: self.service.shared.clone(),
            upstream: self.service.context.upstream.clone(),
            shard: Some(self.service.context.shard),
            worker: picked.worker.clone(),
            address: picked.address,
            rank: picked.rank,
            request: job.request.clone(),
            request_id: leg.request_id,
            body: leg.body,
            is_read_here: role == Role::Prefill,
            progress: Rc::default(),
        }
    }

    /// Ends both legs unless it is disarmed.
    fn guard(&self) -> PairGuard {
        let rids = self.pair.peers.pair().protocol().has_abort_call().then(|| self.ids.request_ids());
        let workers = [&self.pair.prefill, &self.pair.decode].map(|it| (it.worker.clone(), it.address));
        PairGuard::new(&self.service.shared, &self.service.context.upstream, workers, rids)
    }

    /// The prefill booking, if it goes with the prefill leg instead of with the decode answer.
    fn booking_of_the_leg(&mut self) -> Option<Booking> {
        match self.service.shared.settings.disaggregation.prefill_release {
            PrefillRelease::Completion => self.pair.prefill.booking.take(),
            PrefillRelease::Decode => None,
        }
    }

    fn may_retry(&self, failed: Role) -> bool {
        self.retries_left && self.pair.has_another(failed)
    }

    fn failed(&self, failure: LegFailure, held: Option<Held>) -> Ending {
        self.service.shared.metrics.pairs.leg_failed(failure.role, failure.phase);
        match &failure.blame {
            Blame::Transport(error) => self.picked(failure.role).failed_by(&self.service.shared, error),
            Blame::Answer(standing) => self.picked(failure.role).answered(&self.service.shared, *standing),
        }
        if !self.may_retry(failure.role) {
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
        Ending::Retry { role: failure.role, worker: failure.worker, held }
    }

    /// Prefill has answered with a 4xx: the client's mistake goes to the client, a full worker's work to another pair.
    async fn refused(&self, refusal: UpstreamResponse, responder: &mut Responder) -> Ending {
        let shared = &self.service.shared;
        let standing = Standing::of(&refusal, &shared.settings.outbound);
        shared.metrics.pairs.leg_failed(Role::Prefill, "refused");
        self.pair.prefill.answered(shared, standing);
        if standing.is_worth_a_retry() && self.may_retry(Role::Prefill) {
            shared.metrics.retried("status");
            return Ending::Retry { role: Role::Prefill, worker: self.pair.prefill.worker.id.clone(), held: None };
        }
        Ending::Answered(relay_refusal(refusal, responder).await)
    }

    fn answering(&self, received: Instant, guard: Option<&PairGuard>) -> Answering<'_> {
        Answering {
            prefill: self.pair.prefill.handles.clone(),
            decode: self.pair.decode.handles.clone(),
            decode_worker: self.pair.decode.worker.id.clone(),
            received,
            watched: self.watched,
            is_complete: guard.map(PairGuard::is_complete).unwrap_or_default(),
        }
    }
}

/// What the first of two legs had to say.
enum Event {
    Prefill(PrefillEnd),
    Decode(Result<UpstreamResponse, UpstreamError>),
}

/// Polls both, prefill first: where both have ended, the prefill's refusal explains the decode's failure. Neither
/// future is dropped by waiting here, so nothing that was read is lost.
async fn next_event(prefill: &mut Option<PrefillFuture>, decode: &mut DecodeFuture) -> Event {
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

// An `async fn` would keep the call twice: as its argument and as its local.
#[allow(clippy::manual_async_fn)]
fn prefill_to_its_end(call: LegCall, booking: Option<Booking>) -> impl Future<Output = PrefillEnd> {
    async move {
        let sent = call.send().await;
        let standing = sent.as_ref().ok().map(|response| Standing::of(response, &call.shared.settings.outbound));
        let worker = call.worker.clone();
        drop(call);
        let end = match sent {
            Err(error) => PrefillEnd::Failed(LegFailure::of(Role::Prefill, &worker.id, error)),
            Ok(_) if standing == Some(Standing::KeyRefused) => {
                PrefillEnd::Failed(LegFailure::key_refused(Role::Prefill, &worker.id))
            }
            Ok(response) if response.status.is_client_error() => PrefillEnd::Refused(response),
            Ok(response) => read_to_its_end(&worker.id, response, standing.unwrap_or(Standing::Fault)).await,
        };
        if let (Some(booking), PrefillEnd::Done(_)) = (&booking, &end) {
            booking.note_complete();
        }
        drop(booking);
        end
    }
}

async fn read_to_its_end(worker: &Name, response: UpstreamResponse, standing: Standing) -> PrefillEnd {
    if response.status.is_success() {
        return match response.collect(limits::PREFILL_ANSWER_BYTES_MAX).await {
            Ok(body) => PrefillEnd::Done(body),
            Err(error) => PrefillEnd::Failed(LegFailure::of(Role::Prefill, worker, error)),
        };
    }
    let status = response.status;
    let body = response.collect(limits::ERROR_EXCERPT_BYTES).await.unwrap_or_default();
    PrefillEnd::Failed(LegFailure {
        role: Role::Prefill,
        worker: worker.clone(),
        reason: format!("status {}", status.as_u16()),
        said: format!(": {}", String::from_utf8_lossy(&body)),
        phase: "status",
        is_timeout: false,
        blame: Blame::Answer(standing),
    })
}

/// Both legs at once. The client gets decode's answer once its first byte is there; until then whichever leg fails
/// ends the other one.
async fn concurrent(attempt: &mut Attempt<'_>, job: &mut Option<Job>, responder: &mut Responder) -> Ending {
    let Some(held_job) = job.as_ref() else { return Ending::Failed(ApiError::Internal) };
    let received = held_job.received;
    let pair = attempt.pair.peers.pair();
    let prefill_leg = pd::prefill_leg(&pair, held_job.endpoint, &held_job.members, &attempt.ids);
    let decode_leg = pd::decode_leg(&pair, held_job.endpoint, &held_job.members, &attempt.ids, None);
    let mut guard = attempt.guard();
    let booking = attempt.booking_of_the_leg();
    let prefill_call = attempt.call(Role::Prefill, held_job, prefill_leg);
    let decode_call = attempt.call(Role::Decode, held_job, decode_leg);
    let decode_progress = decode_call.progress.clone();
    let progress = prefill_call.progress.clone();
    let mut prefill = PrefillLeg::new(attempt, held_job, progress, Box::pin(prefill_to_its_end(prefill_call, booking)));
    prefill.awaited_by(decode_progress.clone());
    let mut decode: DecodeFuture = Box::pin(decode_call.send_and_begin());

    let response = loop {
        match next_event(&mut prefill.future, &mut decode).await {
            Event::Prefill(PrefillEnd::Done(_)) => {
                attempt.pair.prefill.succeeded(&attempt.service.shared);
                prefill.answered(None);
            }
            Event::Prefill(PrefillEnd::Refused(refusal)) => {
                prefill.disarm();
                drop(decode);
                return attempt.refused(refusal, responder).await;
            }
            Event::Prefill(PrefillEnd::Failed(failure)) => {
                prefill.disarm();
                drop(decode);
                return attempt.failed(failure, None);
            }
            Event::Decode(Ok(response)) if response.status.is_success() => break response,
            Event::Decode(outcome) => {
                let held = prefill.take_held();
                // Dropped before the client is answered: the prefill leg is to end at once.
                drop(prefill);
                return decode_failed(attempt, outcome, held, decode_progress.is_delivered(), responder).await;
            }
        }
    };
    // No replay from here on.
    drop(job.take());
    let mut prefill = prefill.into_running();
    attempt.served();
    let answering = attempt.answering(received, Some(&guard));
    let answer = relay_decode(response, responder, answering, |context| {
        // Decode has begun to answer: what the prefill leg still says changes nothing for the client.
        match poll_beside(&mut prefill, context) {
            Some(PrefillEnd::Done(_)) => attempt.pair.prefill.succeeded(&attempt.service.shared),
            Some(PrefillEnd::Failed(failure)) => {
                debug!(
                    worker = &*failure.worker,
                    reason = failure.reason,
                    "a prefill leg failed behind its decode leg"
                );
            }
            Some(PrefillEnd::Refused(_)) | None => {}
        }
    })
    .await;
    attempt.answered(&answer);
    if answer.is_whole {
        match prefill {
            None => guard.disarm(),
            Some(prefill) => {
                let limit = attempt.service.shared.settings.disaggregation.prefill_drain_timeout;
                cleanup::drain(async move { matches!(prefill.await, PrefillEnd::Done(_)) }, guard, limit);
            }
        }
    }
    Ending::Answered(answer.outcome)
}

/// Decode failed before its first byte, or refused. `held`: KV that waits on the prefill worker.
async fn decode_failed(
    attempt: &Attempt<'_>,
    outcome: Result<UpstreamResponse, UpstreamError>,
    held: Option<Held>,
    is_delivered: bool,
    responder: &mut Responder,
) -> Ending {
    let worker = &attempt.pair.decode.worker.id;
    let may_retry = attempt.may_retry(Role::Decode);
    let shared = &attempt.service.shared;
    let standing = outcome.as_ref().ok().map(|response| Standing::of(response, &shared.settings.outbound));
    if standing == Some(Standing::KeyRefused) {
        return attempt.failed(LegFailure::key_refused(Role::Decode, worker), held);
    }
    if let Some(standing) = standing {
        attempt.pair.decode.answered(shared, standing);
    }
    match outcome {
        Ok(response) if may_retry && standing.is_some_and(Standing::is_worth_a_retry) => {
            debug!(worker = &**worker, status = response.status.as_u16(), "retrying on another pair");
            attempt.service.shared.metrics.pairs.leg_failed(Role::Decode, "status");
            attempt.service.shared.retried("status");
            Ending::Retry { role: Role::Decode, worker: worker.clone(), held }
        }
        // Decode's own words reach the client, whatever its status.
        Ok(response) => {
            attempt.service.shared.metrics.pairs.leg_failed(Role::Decode, "status");
            let outcome = relay_refusal(response, responder).await;
            // It answers, so it may well take the short request that frees the KV.
            if let Some(held) = held {
                held.release_through(attempt);
            }
            Ending::Answered(outcome)
        }
        Err(error) => {
            // An engine that had the request frees its KV when the connection breaks.
            let held = held.filter(|_| !is_delivered);
            if let (Some(_), false) = (&held, may_retry) {
                cleanup::stranded(&attempt.service.shared, &attempt.pair.prefill.worker.id);
            }
            attempt.failed(LegFailure::of(Role::Decode, worker, error), held)
        }
    }
}

/// Prefill first; its answer says where decode finds the KV.
async fn serial(attempt: &mut Attempt<'_>, job: &mut Option<Job>, responder: &mut Responder) -> Ending {
    let Some(held_job) = job.as_ref() else { return Ending::Failed(ApiError::Internal) };
    let received = held_job.received;
    let leg = pd::prefill_leg(&attempt.pair.peers.pair(), held_job.endpoint, &held_job.members, &attempt.ids);
    let booking = attempt.booking_of_the_leg();
    let call = attempt.call(Role::Prefill, held_job, leg);
    let progress = call.progress.clone();
    let mut prefill = PrefillLeg::new(attempt, held_job, progress, Box::pin(prefill_to_its_end(call, booking)));
    let answer = match prefill.end().await {
        PrefillEnd::Done(answer) => {
            attempt.pair.prefill.succeeded(&attempt.service.shared);
            answer
        }
        PrefillEnd::Refused(refusal) => {
            prefill.disarm();
            return attempt.refused(refusal, responder).await;
        }
        PrefillEnd::Failed(failure) => {
            prefill.disarm();
            return attempt.failed(failure, None);
        }
    };
    let protocol = attempt.pair.peers.pair().protocol();
    let handoff = match Handoff::of(protocol, &answer) {
        Ok(handoff) => handoff,
        Err(error) => {
            prefill.disarm();
            let worker = attempt.pair.prefill.worker.id.clone();
            let reason = error.to_string();
            let blame = Blame::Answer(Standing::Fault);
            let failure = LegFailure {
                role: Role::Prefill,
                worker,
                reason,
                said: String::new(),
                phase: "handoff",
                is_timeout: false,
                blame,
            };
            return attempt.failed(failure, None);
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
    let progress = call.progress.clone();
    prefill.awaited_by(progress.clone());
    let outcome = call.send_and_begin().await;
    let (held, is_delivered) = (prefill.take_held(), progress.is_delivered());
    match outcome {
        Ok(response) if response.status.is_success() => {
            drop((held, job.take()));
            attempt.served();
            let answer = relay_decode(response, responder, attempt.answering(received, None), |_| ()).await;
            attempt.answered(&answer);
            Ending::Answered(answer.outcome)
        }
        outcome => decode_failed(attempt, outcome, held, is_delivered, responder).await,
    }
}
