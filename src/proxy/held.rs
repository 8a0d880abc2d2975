//! KV that a prefill worker holds for a decode request that may never come: what is needed to free it, and the guard of
//! a prefill leg that does so when the request ends between its legs. Never decides what the client sees.
//!
//! Only for protocols without an abort call. Their engines free by themselves when a connection breaks over a prefill
//! that is being computed, or over a decode request that they have. In between nobody owns the KV but this.

use std::future::poll_fn;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;

use infera_shards::{Request, SendProgress, spawn_local, time};

use super::cleanup::{self, LegCall, ShardSide};
use super::leg_end::{PrefillEnd, PrefillFuture};
use super::legs::{Attempt, Job};
use super::pair::PairPeers;
use super::service::RouterService;
use crate::fleet::Worker;
use crate::limits;
use crate::pd::{self, AttemptIds, Handoff, Members, PdEndpoint, Schedule};
use crate::worker::Name;

/// KV that nobody has pulled, or that a prefill leg may still leave.
pub(super) struct Held {
    request: Rc<Request>,
    endpoint: PdEndpoint,
    ids: AttemptIds,
    peers: PairPeers,
    prefill_worker: Name,
    /// What the prefill answer said, in a serial protocol.
    handoff: Option<Handoff>,
    /// The leg, told that its client left, as long as it may have something to say.
    unanswered: Option<PrefillFuture>,
}

/// A decode worker that may free it; outlives the attempt that picked it.
#[derive(Clone)]
struct Way {
    side: Rc<ShardSide>,
    peers: PairPeers,
    worker: Arc<Worker>,
    address: SocketAddr,
    rank: Option<u32>,
}

impl Way {
    fn of(attempt: &Attempt<'_>) -> Self {
        let picked = &attempt.pair.decode;
        Self {
            side: attempt.service.side.clone(),
            peers: attempt.pair.peers.clone(),
            worker: picked.worker.clone(),
            address: picked.address,
            rank: picked.rank,
        }
    }
}

impl Held {
    /// Sends the short request that pulls the KV through the attempt's decode worker.
    pub fn release_through(self, attempt: &Attempt<'_>) {
        self.release(Way::of(attempt));
    }

    fn release(mut self, way: Way) {
        match self.unanswered.take() {
            None => self.pull(way),
            Some(prefill) => spawn_local(async move {
                if self.is_left_by(prefill).await {
                    self.pull(way);
                }
            }),
        }
    }

    /// Waits for what the leg still says: whether there is KV.
    async fn is_left_by(&mut self, prefill: PrefillFuture) -> bool {
        let Some(PrefillEnd::Done(answer)) = time::timeout(limits::ABORT_DEADLINE, prefill).await else { return false };
        let protocol = self.peers.pair().protocol();
        if protocol.schedule() == Schedule::Serial {
            let Ok(Some(handoff)) = Handoff::of(protocol, &answer) else { return false };
            self.handoff = Some(handoff);
        }
        true
    }

    /// The body is read again here: few requests end between their legs.
    fn pull(self, way: Way) {
        let pair = self.peers.with_decode_of(&way.peers);
        let Ok(members) = Members::scan(&self.request.body) else { return };
        if pair.decode.protocol != pair.protocol() {
            return cleanup::stranded(&way.side.shared, &self.prefill_worker);
        }
        let leg = pd::release_leg(&pair, self.endpoint, &members, &self.ids, self.handoff.as_ref());
        let call = LegCall {
            side: way.side,
            worker: way.worker,
            address: way.address,
            rank: way.rank,
            request: self.request,
            leg,
            is_read_here: true,
            progress: None,
        };
        cleanup::release(call, self.prefill_worker);
    }

    /// There is no decode worker to free it through.
    pub fn count_stranded(mut self, service: &RouterService) {
        let side = service.side.clone();
        match self.unanswered.take() {
            None => cleanup::stranded(&side.shared, &self.prefill_worker),
            Some(prefill) => spawn_local(async move {
                if self.is_left_by(prefill).await {
                    cleanup::stranded(&side.shared, &self.prefill_worker);
                }
            }),
        }
    }
}

/// A prefill leg under way, or the KV that it has left. Dropped before the decode worker has its request, it ends the
/// leg in a way that tells whether KV was left, and frees that.
pub(super) struct PrefillLeg {
    pub future: Option<PrefillFuture>,
    /// Absent where abort calls end the legs, and when there is nothing to free any more.
    left: Option<Box<Left>>,
}

/// What the end of a leg's request leaves to be freed.
struct Left {
    held: Held,
    way: Way,
    /// The prefill request.
    progress: Rc<SendProgress>,
    /// The decode request, once it is being sent.
    decode: Option<Rc<SendProgress>>,
    is_kv_left: bool,
}

impl PrefillLeg {
    /// `progress` of the prefill request: present where KV may be left for somebody to free.
    pub fn new(attempt: &Attempt<'_>, job: &Job, progress: Option<Rc<SendProgress>>, future: PrefillFuture) -> Self {
        let held = || Held {
            request: job.request.clone(),
            endpoint: job.endpoint,
            ids: attempt.ids.clone(),
            peers: attempt.pair.peers.clone(),
            prefill_worker: attempt.pair.prefill.worker.id.clone(),
            handoff: None,
            unanswered: None,
        };
        let left = |progress| Left { held: held(), way: Way::of(attempt), progress, decode: None, is_kv_left: false };
        Self { future: Some(future), left: progress.map(|progress| Box::new(left(progress))) }
    }

    /// Waits for the leg; pending for ever once it has ended.
    pub async fn end(&mut self) -> PrefillEnd {
        let end = poll_fn(|context| match &mut self.future {
            Some(future) => future.as_mut().poll(context),
            None => Poll::Pending,
        })
        .await;
        self.future = None;
        end
    }

    /// The prefill worker keeps KV from here on.
    pub fn answered(&mut self, handoff: Option<Handoff>) {
        if let Some(left) = &mut self.left {
            left.is_kv_left = true;
            left.held.handoff = handoff;
        }
    }

    /// As soon as the decode worker has this request, the KV is its own to pull or to free.
    pub fn awaited_by(&mut self, decode: Option<Rc<SendProgress>>) {
        if let Some(left) = &mut self.left {
            left.decode = decode;
        }
    }

    /// Whether the decode worker has its request.
    pub fn is_with_decode(&self) -> bool {
        self.left.as_ref().is_some_and(|left| left.is_with_decode())
    }

    pub fn disarm(&mut self) {
        self.left = None;
    }

    /// Decode has begun to answer: nothing is left to free, and what is left of the leg may run on.
    pub fn into_running(mut self) -> Option<PrefillFuture> {
        self.disarm();
        self.future.take()
    }

    /// Gives away the KV that the leg has left or may still leave; frees nothing more by itself then. A leg that is under
    /// way ends here: an undelivered request dies with its connection, a delivered one is told that its client left, and an
    /// answer that was already on its way is still to be read.
    pub fn take_held(&mut self) -> Option<Held> {
        let mut left = self.left.take()?;
        if left.is_kv_left {
            return Some(left.held);
        }
        let prefill = self.future.take().filter(|_| left.progress.is_delivered() && !left.is_with_decode())?;
        left.progress.close_sending();
        left.held.unanswered = Some(prefill);
        Some(left.held)
    }
}

impl Left {
    fn is_with_decode(&self) -> bool {
        self.decode.as_ref().is_some_and(|decode| decode.is_delivered())
    }
}

impl Drop for PrefillLeg {
    fn drop(&mut self) {
        if self.is_with_decode() {
            return;
        }
        let way = self.left.as_ref().map(|left| left.way.clone());
        if let (Some(held), Some(way)) = (self.take_held(), way) {
            held.release(way);
        }
    }
}
