//! Passing one leg's answer of a pair to the client. Decides whether a stream was whole and counts what it carried;
//! never decides what happens to the legs.

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Instant;

use http::StatusCode;
use infera_shards::{BodyObserver, RelayOutcome, Responder, UpstreamResponse};
use tracing::warn;

use super::access::{self, Ended, Tally};
use super::added::AddedHeaders;
use super::dialect::{Dialect, is_stream};
use super::direct;
use super::live::LiveSettings;
use super::metrics::Outcome;
use super::observe::AnswerObserver;
use super::service::{Handles, answer};
use super::silence::Watched;
use crate::api::ApiError;
use crate::load::QueuedBlocks;
use crate::pd::{Completion, StreamFailure};
use crate::worker::Name;

/// Who answers, and whose figures the answer belongs to.
pub(super) struct Answering<'a> {
    /// Of the prefill and of the decode worker.
    pub handles: (&'a Handles, &'a Handles),
    pub decode_worker: &'a Name,
    pub live: Rc<LiveSettings>,
    pub received: Instant,
    pub watched: &'a Watched<'a>,
    /// Set as soon as the answer is known to be whole, also when the client leaves right behind it.
    pub is_complete: &'a Cell<bool>,
}

/// How an answer went.
pub(super) struct Answer {
    pub outcome: Outcome,
    /// The engine said all it had to say.
    pub is_whole: bool,
    /// What went wrong inside it, and by whom.
    pub failure: Option<StreamFailure>,
}

/// Watches an answer: what it carries, and for a stream what its events say about its end.
pub(super) struct StreamObserver<'a> {
    pub answer: AnswerObserver,
    watched: &'a Watched<'a>,
    /// Absent for what is no stream of events.
    completion: Option<Completion>,
    /// Until the first byte.
    queued: Option<QueuedBlocks>,
    /// Set at a stream's terminator; then the stream is whole only with one.
    is_complete: Option<&'a Cell<bool>>,
    /// Absent without an access log.
    tally: Option<Tally>,
}

impl<'a> StreamObserver<'a> {
    /// Of one worker's answer. Endpoints differ in how a stream ends, so any stream that has said something is whole once
    /// its body is; one without a single data line has said nothing.
    pub fn of_a_worker(is_stream: bool, watched: &'a Watched<'a>) -> Self {
        let (completion, tally) = (is_stream.then(Completion::default), Tally::of_current());
        Self { answer: AnswerObserver::new(), watched, completion, queued: None, is_complete: None, tally }
    }

    /// The same for a prompt that has been in its worker's queue until now: the first byte takes it off.
    pub fn queueing(self, queued: Option<QueuedBlocks>) -> Self {
        Self { queued, ..self }
    }

    /// Of a decode leg's answer: its stream is whole only with its terminator.
    fn of_decode(is_stream: bool, answering: &Answering<'a>) -> Self {
        let is_complete = Some(answering.is_complete);
        Self { is_complete, ..Self::of_a_worker(is_stream, answering.watched) }
    }

    /// An error that came inside the stream.
    pub fn failure(&self) -> Option<StreamFailure> {
        self.completion.as_ref().and_then(Completion::failure)
    }
}

impl BodyObserver for StreamObserver<'_> {
    fn data(&mut self, payload: &[u8]) {
        self.watched.came();
        self.answer.data(payload);
        self.queued = None;
        if let Some(tally) = &self.tally {
            tally.passed_on(payload.len());
        }
        let Some(completion) = &mut self.completion else { return };
        completion.feed(payload);
        if let Some(is_complete) = &self.is_complete
            && completion.has_ended()
        {
            is_complete.set(true);
        }
    }

    fn passed_on(&mut self) {
        self.watched.passed_on();
    }

    fn is_whole(&self) -> bool {
        let Some(completion) = &self.completion else { return true };
        if self.is_complete.is_some() { completion.has_ended() } else { completion.has_data() }
    }

    fn has_ended(&self) -> bool {
        self.completion.as_ref().is_some_and(|completion| completion.has_ended() || completion.has_told_its_failure())
    }
}

/// Relays a successful decode answer. `beside` is polled along with it: the other leg goes on meanwhile.
pub(super) async fn relay_decode(
    response: UpstreamResponse,
    dialect: &Dialect,
    responder: &mut Responder,
    answering: Answering<'_>,
    beside: impl FnMut(&mut Context<'_>),
) -> Answer {
    let status = response.status;
    access::note(|line| line.status = Some(status));
    let is_stream = is_stream(&response);
    let worker = answering.decode_worker;
    let (prefill, decode) = answering.handles;
    let workers = [(direct::WORKER, &decode.route_key), (direct::PREFILL, &prefill.route_key)];
    let added = &AddedHeaders::of(&answering.live, is_stream, workers);
    let mut observer = StreamObserver::of_decode(is_stream, &answering);
    let outcome = match dialect.is_translated() {
        true => relay_beside(dialect.passing(response, responder, added, &mut observer), beside).await,
        false => {
            let relaying = pin!(responder.relay(response, dialect.as_it_came(is_stream, added, &mut observer)));
            relay_beside(relaying, beside).await
        }
    };
    let failure = observer.failure();
    match outcome {
        RelayOutcome::Complete if failure.is_some() => {
            access::note(|line| line.ended = Ended::StreamError);
            warn!(worker = &**worker, "a decode worker reported an error inside its stream");
            Answer { outcome: Outcome::Error, is_whole: true, failure }
        }
        RelayOutcome::Complete => {
            access::note(|line| line.ended = Ended::Complete);
            if status == StatusCode::OK {
                count(answering.handles, answering.received, &observer.answer);
            }
            Answer { outcome: Outcome::from(status), is_whole: true, failure }
        }
        RelayOutcome::UpstreamFailed(error) => {
            access::note(|line| line.ended = Ended::Cut);
            warn!(worker = &**worker, phase = error.phase(), %error, "an answer was cut by its decode worker");
            answer_if_possible(
                dialect,
                responder,
                format!("decode worker {worker} failed ({}): {error}", error.phase()),
            )
            .await;
            Answer { outcome: Outcome::Error, is_whole: false, failure: Some(StreamFailure::Worker) }
        }
        RelayOutcome::ClientGone => {
            Answer { outcome: Outcome::StreamFailed, is_whole: answering.is_complete.get(), failure }
        }
    }
}

async fn relay_beside(
    mut relaying: impl Future<Output = RelayOutcome> + Unpin,
    mut beside: impl FnMut(&mut Context<'_>),
) -> RelayOutcome {
    poll_fn(|context| {
        let outcome = Pin::new(&mut relaying).poll(context);
        if outcome.is_pending() {
            beside(context);
        }
        outcome
    })
    .await
}

/// Passes on an answer that ends the request as it is: a leg's refusal, in its own words.
pub(super) async fn relay_refusal(response: UpstreamResponse, dialect: &Dialect, responder: &mut Responder) -> Outcome {
    let status = response.status;
    access::note(|line| line.status = Some(status));
    match dialect.passing(response, responder, &AddedHeaders::default(), &mut Counted(Tally::of_current())).await {
        RelayOutcome::Complete => {
            access::note(|line| line.ended = Ended::Complete);
            Outcome::from(status)
        }
        RelayOutcome::UpstreamFailed(error) => {
            access::note(|line| line.ended = Ended::Cut);
            answer_if_possible(dialect, responder, format!("a worker failed inside its refusal: {error}")).await;
            Outcome::Error
        }
        RelayOutcome::ClientGone => Outcome::StreamFailed,
    }
}

/// Looks at nothing but how much there is.
struct Counted(Option<Tally>);

impl BodyObserver for Counted {
    fn data(&mut self, payload: &[u8]) {
        if let Some(tally) = &self.0 {
            tally.passed_on(payload.len());
        }
    }
}

async fn answer_if_possible(dialect: &Dialect, responder: &mut Responder, reason: String) {
    if !responder.started() {
        // A client that has left needs no answer.
        answer(dialect.refusal(ApiError::WorkerFailed { reason }), responder).await;
    }
}

/// Time to first token and prompt tokens belong to the prefill worker, the generated ones to the decode worker.
/// Counts a whole answer for the worker that computed its prompt and the one that generated it; they may be one.
pub(super) fn count((prefill, decode): (&Handles, &Handles), received: Instant, answer: &AnswerObserver) {
    if let Some(first_byte) = answer.first_byte() {
        prefill.ttft.observe(first_byte.duration_since(received).as_secs_f64());
    }
    // A count of 0 means that the worker did not tell.
    let Some(usage) = answer.usage() else { return };
    if usage.prompt_tokens > 0 {
        prefill.prompt_tokens.inc_by(usage.prompt_tokens);
        prefill.input_tokens.observe(usage.prompt_tokens as f64);
    }
    if usage.completion_tokens > 0 {
        decode.generation_tokens.inc_by(usage.completion_tokens);
        decode.output_tokens.observe(usage.completion_tokens as f64);
    }
}

/// Polls a future that is stored beside the relay; forgets it once it has ended.
pub(super) fn poll_beside<T>(
    future: &mut Option<std::pin::Pin<Box<dyn Future<Output = T>>>>,
    context: &mut Context<'_>,
) -> Option<T> {
    let Poll::Ready(value) = future.as_mut()?.as_mut().poll(context) else { return None };
    *future = None;
    Some(value)
}
