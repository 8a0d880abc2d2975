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

use infera_shards::{Request, SendProgress, Upstream, spawn_local, time};

use super::cleanup::{self, LegCall};
use super::legs::{Attempt, Job, PrefillEnd, PrefillFuture};
use super::pair::PairPeers;
use super::service::RouterService;
use super::shared::Shared;
use crate::fleet::Worker;
use crate::limits;
use crate::pd::{self, AttemptIds, Handoff, Members, PdEndpoint, Schedule};
use crate::worker::Name;

/// KV that nobody has pulled.
pub(super) struct Held {
    request: Rc<Request>,
    endpoint: PdEndpoint,
    ids: AttemptIds,
    peers: PairPeers,
    prefill_worker: Name,
    /// What the prefill answer said, in a serial protocol.
    handoff: Option<Handoff>,
}

/// A decode worker that may free it; outlives the attempt that picked it.
struct Way {
    shared: Arc<Shared>,
    upstream: Upstream,
    peers: PairPeers,
    worker: Arc<Worker>,
    address: SocketAddr,
    rank: Option<u32>,
}

impl Way {
    fn of(attempt: &Attempt<'_>) -> Self {
        let picked = &attempt.pair.decode;
        Self {
            shared: attempt.service.shared.clone(),
            upstream: attempt.service.context.upstream.clone(),
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

    /// The body is read again here: few requests end between their legs.
    fn release(self, way: Way) {
        let pair = self.peers.with_decode_of(&way.peers);
        let Ok(members) = Members::scan(&self.request.body) else { return };
        if pair.decode.protocol != pair.protocol() {
            return cleanup::stranded(&way.shared, &self.prefill_worker);
        }
        let leg = pd::release_leg(&pair, self.endpoint, &members, &self.ids, self.handoff.as_ref());
        let call = LegCall {
            shared: way.shared.clone(),
            upstream: way.upstream,
            shard: None,
            worker: way.worker,
            address: way.address,
            rank: way.rank,
            request: self.request,
            request_id: leg.request_id,
            body: leg.body,
            is_read_here: true,
            progress: Rc::default(),
        };
        cleanup::release(&way.shared, call);
    }

    pub fn count_stranded(self, service: &RouterService) {
        cleanup::stranded(&service.shared, &self.prefill_worker);
    }
}

/// A prefill leg under way, or the KV that it has left. Dropped before the decode worker has its request, it ends the
/// leg in a way that tells whether KV was left, and frees that.
pub(super) struct PrefillLeg {
    pub future: Option<PrefillFuture>,
    progress: Rc<SendProgress>,
    /// The decode request, once it is being sent.
    decode: Option<Rc<SendProgress>>,
    is_kv_left: bool,
    /// Absent where abort calls end the legs, and when there is nothing to free any more.
    held: Option<Box<(Held, Way)>>,
}

impl PrefillLeg {
    pub fn new(attempt: &Attempt<'_>, job: &Job, progress: Rc<SendProgress>, future: PrefillFuture) -> Self {
        let held = || Held {
            request: job.request.clone(),
            endpoint: job.endpoint,
            ids: attempt.ids.clone(),
            peers: attempt.pair.peers.clone(),
            prefill_worker: attempt.pair.prefill.worker.id.clone(),
            handoff: None,
        };
        let has_abort_call = attempt.pair.peers.pair().protocol().has_abort_call();
        let held = (!has_abort_call).then(|| Box::new((held(), Way::of(attempt))));
        Self { future: Some(future), progress, decode: None, is_kv_left: false, held }
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
        self.is_kv_left = true;
        if let Some(held) = &mut self.held {
            held.0.handoff = handoff;
        }
    }

    /// As soon as the decode worker has this request, the KV is its own to pull or to free.
    pub fn awaited_by(&mut self, decode: Rc<SendProgress>) {
        self.decode = Some(decode);
    }

    pub fn disarm(&mut self) {
        self.held = None;
    }

    /// Decode has begun to answer: nothing is left to free, and what is left of the leg may run on.
    pub fn into_running(mut self) -> Option<PrefillFuture> {
        self.disarm();
        self.future.take()
    }

    /// Gives away the KV that the leg has left, if there is any; frees nothing more by itself then.
    pub fn take_held(&mut self) -> Option<Held> {
        if !self.is_kv_left {
            return None;
        }
        self.held.take().map(|held| held.0)
    }
}

impl Drop for PrefillLeg {
    fn drop(&mut self) {
        let Some((held, way)) = self.held.take().map(|held| *held) else { return };
        if self.decode.as_ref().is_some_and(|decode| decode.is_delivered()) {
            return;
        }
        if self.is_kv_left {
            return held.release(way);
        }
        // An undelivered request dies with its connection. A delivered one is told that its client left; an answer that
        // was already on its way is still read.
        let Some(future) = self.future.take().filter(|_| self.progress.is_delivered()) else { return };
        self.progress.close_sending();
        spawn_local(free_what_it_still_says(future, held, way));
    }
}

async fn free_what_it_still_says(prefill: PrefillFuture, mut held: Held, way: Way) {
    let Some(PrefillEnd::Done(answer)) = time::timeout(limits::ABORT_DEADLINE, prefill).await else { return };
    let protocol = held.peers.pair().protocol();
    if protocol.schedule() == Schedule::Serial {
        let Ok(Some(handoff)) = Handoff::of(protocol, &answer) else { return };
        held.handoff = Some(handoff);
    }
    held.release(way);
}
