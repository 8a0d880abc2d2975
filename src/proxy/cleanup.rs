//! What outlives a request: abort calls, requests that free held KV, and prefill answers that are still on their way.
//! Each runs as a task of its own on the same shard with its own deadline; none holds a booking longer than it says.

use std::borrow::Cow;
use std::cell::Cell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Method, header};
use infera_shards::{SendProgress, Upstream, UpstreamError, UpstreamRequest, UpstreamResponse, spawn_local, time};
use tracing::{debug, warn};

use super::keys::OutboundHeaders;
use super::live::LiveCopy;
use super::shared::Shared;
use super::stages::Stage;
use crate::fleet::Worker;
use crate::limits;
use crate::pd::{Leg, RequestIds};
use crate::worker::Name;

pub(super) const DATA_PARALLEL_RANK: HeaderName = HeaderName::from_static("x-data-parallel-rank");
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const ABORT_PATH: &str = "/abort_request";

/// What a task of one shard needs to call workers. Counted on the shard: counts that other cores write too would bounce
/// between them with every leg.
pub(super) struct ShardSide {
    pub shared: Arc<Shared>,
    pub upstream: Upstream,
    /// The shard's number: whose stage times show the legs.
    pub shard: usize,
    pub live: LiveCopy,
}

/// One request to one worker of a pair, with everything it needs, so that it can outlive the request it serves.
pub(super) struct LegCall {
    pub side: Rc<ShardSide>,
    pub worker: Arc<Worker>,
    pub address: SocketAddr,
    pub rank: Option<u32>,
    /// The client's request: method, path and headers are passed on, the body is not.
    pub request: Rc<infera_shards::Request>,
    pub leg: Leg,
    /// The answer is read here and not relayed.
    pub is_read_here: bool,
    /// Absent where nobody asks how far the request has come.
    pub progress: Option<Rc<SendProgress>>,
}

impl LegCall {
    /// Sends and waits for the head. To be dropped with the head's arrival, which lets the bodies go.
    pub async fn send(&self) -> Result<UpstreamResponse, UpstreamError> {
        let live = self.side.live.get();
        let outbound = &live.outbound;
        let set = self.own_headers(outbound);
        let request = UpstreamRequest {
            address: self.address,
            tls: self.worker.tls.as_ref(),
            authority: &self.worker.authority,
            method: &self.request.method,
            path_prefix: &self.worker.base_path,
            target: &self.request.target,
            headers: Some(&self.request.head),
            remove: outbound.removed_of_leg(self.is_read_here),
            set: &set,
            body: &self.leg.body,
        };
        let response = self.side.upstream.send_watched(&request, self.progress.as_deref()).await?;
        if let Some(took) = response.connect_time() {
            self.side.shared.took(self.side.shard, Stage::Connect, took);
        }
        Ok(response)
    }

    /// The same, and waits for the first byte of a successful answer's body: until then it may be given up unseen.
    // An `async fn` would keep the call twice: as its argument and as its local.
    #[allow(clippy::manual_async_fn)]
    pub fn send_and_begin(self) -> impl Future<Output = Result<UpstreamResponse, UpstreamError>> {
        async move {
            let sent = self.send().await;
            drop(self);
            let mut response = sent?;
            if response.status.is_success() {
                response.body_started().await?;
            }
            Ok(response)
        }
    }

    fn own_headers<'a>(&self, outbound: &'a OutboundHeaders) -> Cow<'a, [(HeaderName, HeaderValue)]> {
        let own = outbound.own();
        if self.rank.is_none() && self.leg.request_id.is_none() {
            return Cow::Borrowed(own);
        }
        let mut set = own.to_vec();
        set.extend(self.rank.map(|rank| (DATA_PARALLEL_RANK, HeaderValue::from(rank))));
        let request_id = self.leg.request_id.as_deref().map(HeaderValue::from_str);
        set.extend(request_id.and_then(Result::ok).map(|value| (REQUEST_ID, value)));
        Cow::Owned(set)
    }
}

/// Ends both legs of a pair when it is dropped before [`PairGuard::disarm`]: one abort call per sequence and worker.
/// Protocols without such a call notice that their connections closed.
pub(super) struct PairGuard {
    side: Rc<ShardSide>,
    workers: [(Arc<Worker>, SocketAddr); 2],
    rids: Option<RequestIds>,
    sent_at: Instant,
    is_armed: bool,
    /// Set once the decode answer is whole: a client that leaves behind it ends nothing.
    pub is_complete: Cell<bool>,
}

impl PairGuard {
    /// `rids` is absent for a protocol without an abort call.
    pub fn new(side: Rc<ShardSide>, workers: [(Arc<Worker>, SocketAddr); 2], rids: Option<RequestIds>) -> Self {
        let is_armed = rids.is_some();
        Self { side, workers, rids, sent_at: Instant::now(), is_armed, is_complete: Cell::default() }
    }

    /// Both legs have ended well.
    pub fn disarm(&mut self) {
        self.is_armed = false;
    }
}

impl Drop for PairGuard {
    fn drop(&mut self) {
        if !self.is_armed || self.is_complete.get() {
            return;
        }
        let Some(rids) = self.rids else { return };
        let rids: Rc<[String]> = rids.spelled().into();
        for (worker, address) in &self.workers {
            let (side, worker, address) = (self.side.clone(), worker.clone(), *address);
            let (rids, sent_at) = (rids.clone(), self.sent_at);
            spawn_local(async move {
                time::sleep_until(sent_at + limits::ABORT_AGE_MIN).await;
                for rid in rids.iter() {
                    let call = abort(&side, &worker, address, rid);
                    let is_ok = time::timeout(limits::ABORT_DEADLINE, call).await;
                    side.shared.metrics.pairs.aborted(is_ok.unwrap_or(false));
                    debug!(worker = &*worker.id, rid, is_ok, "aborted a leg");
                    // A worker that hangs would hold up this task as many times as there are sequences.
                    if is_ok.is_none() {
                        break;
                    }
                }
            });
        }
    }
}

async fn abort(side: &ShardSide, worker: &Worker, address: SocketAddr, rid: &str) -> bool {
    let mut set = side.live.get().outbound.own().to_vec();
    set.push((header::CONTENT_TYPE, HeaderValue::from_static("application/json")));
    let body = Bytes::from(serde_json::json!({ "rid": rid }).to_string());
    let request = UpstreamRequest {
        address,
        tls: worker.tls.as_ref(),
        authority: &worker.authority,
        method: &Method::POST,
        path_prefix: &worker.base_path,
        target: ABORT_PATH,
        headers: None,
        remove: &[],
        set: &set,
        body: std::slice::from_ref(&body),
    };
    match side.upstream.send(&request).await {
        Ok(response) => {
            let status = response.status;
            // Read to its end, so that the connection can be used again.
            response.collect(limits::PREFILL_ANSWER_BYTES_MAX).await.is_ok() && status.is_success()
        }
        Err(error) => {
            debug!(worker = &*worker.id, rid, %error, "an abort call failed");
            false
        }
    }
}

/// Frees KV that a prefill worker holds for a decode request that will not come: a decode request of one token, whose
/// answer nobody reads, pulls it.
pub(super) fn release(call: LegCall, prefill_worker: Name) {
    spawn_local(async move {
        let side = call.side.clone();
        let shared = &side.shared;
        let served = async {
            let response = call.send().await.ok()?;
            let status = response.status;
            response.collect(limits::PREFILL_ANSWER_BYTES_MAX).await.ok().map(|_| status)
        };
        let status = time::timeout(limits::RELEASE_DEADLINE, served).await.flatten();
        shared.metrics.pairs.aborted(status.is_some_and(|status| status.is_success()));
        // A decode engine that took the request and failed on it has looked for the KV: it was gone already.
        if status.is_none_or(|status| status.is_client_error()) {
            stranded(shared, &prefill_worker);
        }
    });
}

/// Nobody is left to free the KV.
pub(super) fn stranded(shared: &Shared, prefill_worker: &str) {
    shared.metrics.pairs.stranded_transfers_total.inc();
    warn!(
        worker = prefill_worker,
        "KV of a request that ended may stay on its prefill worker until that frees it by itself"
    );
}

/// Lets a prefill answer go on after decode has ended, for at most `limit`; then the pair is aborted.
pub(super) fn drain(prefill: impl Future<Output = bool> + 'static, mut guard: PairGuard, limit: Option<Duration>) {
    // Decode is whole, but the prefill leg is not: it is what the guard is for now.
    guard.is_complete.set(false);
    spawn_local(async move {
        let ended_well = match limit {
            Some(limit) => time::timeout(limit, prefill).await.unwrap_or(false),
            None => prefill.await,
        };
        if ended_well {
            guard.disarm();
        }
    });
}
