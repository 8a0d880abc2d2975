//! How one leg of a pair ends: a prefill leg read to its end, and failures in words that name the leg. Never decides what
//! becomes of the other leg or of the client.

use std::future::Future;
use std::pin::Pin;

use bytes::Bytes;
use infera_shards::{UpstreamError, UpstreamErrorKind, UpstreamResponse};

use super::cleanup::LegCall;
use super::keys::OutboundHeaders;
use super::verdict::Standing;
use crate::api::ApiError;
use crate::limits;
use crate::load::Booking;
use crate::pd::HandoffError;
use crate::worker::{Name, Role};

/// A failed leg, in words that name it.
pub(super) struct LegFailure {
    pub role: Role,
    pub worker: Name,
    pub reason: String,
    /// What the worker said, for the client alone: it may quote the prompt or a key.
    said: String,
    pub phase: &'static str,
    is_timeout: bool,
    pub blame: Blame,
}

/// What a failed leg says of its worker.
pub(super) enum Blame {
    Transport(UpstreamError),
    Answer(Standing),
}

impl LegFailure {
    pub fn of(role: Role, worker: &Name, error: UpstreamError) -> Self {
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

    pub fn key_refused(role: Role, worker: &Name) -> Self {
        let reason = "it does not accept this router's key".to_owned();
        let blame = Blame::Answer(Standing::KeyRefused);
        Self { role, worker: worker.clone(), reason, said: String::new(), phase: "key", is_timeout: false, blame }
    }

    /// A prefill answer that tells decode nothing.
    pub fn of_handoff(worker: &Name, error: &HandoffError) -> Self {
        let blame = Blame::Answer(Standing::Fault);
        let (reason, said) = (error.to_string(), String::new());
        Self { role: Role::Prefill, worker: worker.clone(), reason, said, phase: "handoff", is_timeout: false, blame }
    }

    /// What went wrong between us and the worker, if it was that.
    pub fn transport(&self) -> Option<&UpstreamError> {
        match &self.blame {
            Blame::Transport(error) => Some(error),
            Blame::Answer(_) => None,
        }
    }

    pub fn into_error(self) -> ApiError {
        let Self { worker, phase, reason, said, .. } = &self;
        let reason = format!("{} worker {worker} failed ({phase}): {reason}{said}", self.role.as_str());
        if self.is_timeout { ApiError::WorkerTimeout { reason } } else { ApiError::WorkerFailed { reason } }
    }
}

/// How a prefill leg ended.
pub(super) enum PrefillEnd {
    Done(Bytes),
    /// An answer that is the client's to read unless another pair may do better: a 4xx, or the wish to be left alone.
    Declined(UpstreamResponse),
    Failed(LegFailure),
}

impl PrefillEnd {
    /// What it says of the worker.
    pub fn standing(&self, outbound: &OutboundHeaders) -> Standing {
        match self {
            PrefillEnd::Done(_) => Standing::Fine,
            PrefillEnd::Declined(answer) => Standing::of(answer, outbound),
            PrefillEnd::Failed(LegFailure { blame: Blame::Answer(standing), .. }) => *standing,
            PrefillEnd::Failed(LegFailure { blame: Blame::Transport(_), .. }) => Standing::Fault,
        }
    }
}

pub(super) type PrefillFuture = Pin<Box<dyn Future<Output = PrefillEnd>>>;

/// Sends a prefill request and reads its answer. The booking, if it is given, ends with it.
// An `async fn` would keep the call twice: as its argument and as its local.
#[allow(clippy::manual_async_fn)]
pub(super) fn prefill_to_its_end(call: LegCall, booking: Option<Booking>) -> impl Future<Output = PrefillEnd> {
    async move {
        let sent = call.send().await;
        let standing = sent.as_ref().ok().map(|response| Standing::of(response, &call.side.live.get().outbound));
        let worker = call.worker.clone();
        drop(call);
        let end = match sent {
            Err(error) => PrefillEnd::Failed(LegFailure::of(Role::Prefill, &worker.id, error)),
            Ok(response) => match standing.unwrap_or(Standing::Fault) {
                Standing::KeyRefused => PrefillEnd::Failed(LegFailure::key_refused(Role::Prefill, &worker.id)),
                Standing::Refused | Standing::Overloaded(_) => PrefillEnd::Declined(response),
                standing @ (Standing::Fine | Standing::Fault) => read_to_its_end(&worker.id, response, standing).await,
            },
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
