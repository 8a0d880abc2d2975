//! The life of one client connection: read a request, run the service on it while watching the client, answer, go on
//! or close. It owns the order of those steps, the cancellation when the client leaves, and the farewell.

mod client;
mod handshake;
mod input;
mod relay;
mod responder;

use std::any::Any;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::StatusCode;

use self::client::Client;
pub use self::client::ClientGone;
use self::input::{Ended, Input, Reader, Wait, Watch, Woken, wait};
pub use self::responder::{BodyObserver, BodyRewriter, IgnoreBody, Relay, RelayOutcome, Responder};
use crate::buffers;
use crate::clock::Fired;
use crate::http1::write::{self, After};
use crate::net::Stream;
use crate::service::{Rejection, RejectionKind, Response, Service};
use crate::shard::{self, Shard};

/// Longest farewell: after a refusal the rest of the message is read and thrown away for this long, because closing
/// with unread bytes sends a reset that can overtake the answer.
const FAREWELL: Duration = Duration::from_secs(2);
/// Bytes thrown away during a farewell at most.
const FAREWELL_BYTES_MAX: usize = 1 << 20;
/// While unread pipelined bytes hide the client's leaving, it is looked for this often.
const HIDDEN_HANG_UP_CHECK: Duration = Duration::from_secs(1);

/// How an exchange ended.
enum Exchange {
    Done,
    Panicked(Box<dyn Any + Send>),
    ClientGone,
    Stopped,
}

/// Serves one connection of a TLS listener to its end.
pub(crate) async fn serve_secure<S: Service>(
    shard: Rc<Shard>,
    service: Rc<S>,
    stream: Stream,
    peer: SocketAddr,
    open: Level,
) {
    match Box::pin(handshake::run(&shard, &stream)).await {
        Ok(()) => serve(shard, service, stream, peer, open).await,
        Err(failure) => {
            shard.counters.tls_failures.add(1);
            tracing::debug!(%peer, %failure, "a TLS handshake failed");
            if let handshake::Failure::PlainHttp = failure {
                let rejection = Rejection {
                    kind: RejectionKind::BadRequest,
                    status: StatusCode::BAD_REQUEST,
                    reason: "this port speaks TLS: write https:// in front of it",
                    peer,
                };
                refuse(&Client::new(shard, stream), &*service, &rejection).await;
            }
        }
    }
}

/// Serves one connection to its end.
pub(crate) async fn serve<S: Service>(
    shard: Rc<Shard>,
    service: Rc<S>,
    stream: Stream,
    peer: SocketAddr,
    _open: Level,
) {
    let client = Rc::new(Client::new(shard, stream));
    let mut input = Input::default();
    let mut watch = pin!(None);
    let arm = |how| wait(client.stream.clone(), how);
    let mut first = true;
    loop {
        let mut reader = Reader { client: &client, input: &mut input, watch: watch.as_mut(), peer };
        let (request, http10, keep_alive) = match reader.request(first, arm).await {
            Ok(read) => read,
            Err(Ended::Quietly) => return client.stream.announce_end(),
            Err(Ended::Refused(rejection)) => return Box::pin(refuse(&client, &*service, &rejection)).await,
        };
        first = false;
        let mut responder = Responder::new(client.clone(), &request.method, http10, keep_alive);
        // Boxed: it exists only while an exchange runs, so an idle connection does not carry its size.
        let call = shard::boxed(|| service.call(request, &mut responder));
        let outcome = exchange(&client, call, &mut input, watch.as_mut(), arm).await;
        match outcome {
            Exchange::Done if responder.may_continue() => {}
            Exchange::Done if responder.is_complete() => return Box::pin(farewell(&client)).await,
            Exchange::Done if responder.started() => {
                client.shard.counters.client_aborts.add(u64::from(client.is_lost()));
                return responder.break_off();
            }
            Exchange::Done => return Box::pin(internal_error(&*service, &mut responder, peer)).await,
            Exchange::Panicked(panic) => {
                shard::report_panic(&*panic, "service");
                if !responder.started() {
                    Box::pin(internal_error(&*service, &mut responder, peer)).await;
                }
                return responder.break_off();
            }
            Exchange::ClientGone => {
                client.shard.counters.client_aborts.add(1);
                return;
            }
            Exchange::Stopped => return responder.break_off(),
        }
    }
}

/// Runs the service's call until it is done or the client leaves; it is dropped either way.
async fn exchange<C: Future<Output = ()>, F: Future<Output = Woken>>(
    client: &Rc<Client>,
    mut call: Pin<Box<C>>,
    input: &mut Input,
    mut watch: Watch<'_, F>,
    arm: impl Fn(Wait) -> F,
) -> Exchange {
    client.shard.counters.requests.add(1);
    let _active = Level::up(&client.shard, |counters| &counters.requests_active);
    let mut watching = Watching::new(client);
    std::future::poll_fn(|cx| {
        match shard::poll_caught(call.as_mut(), cx) {
            Poll::Ready(Ok(())) => return Poll::Ready(Exchange::Done),
            Poll::Ready(Err(panic)) => return Poll::Ready(Exchange::Panicked(panic)),
            Poll::Pending => {}
        }
        watching.poll(input, watch.as_mut(), &arm, cx)
    })
    .await
}

/// Sees a client leave while its request is served, in every phase. A half-closed sending side counts as leaving.
struct Watching<'a> {
    client: &'a Client,
    /// The pipelining limit is reached: readiness says nothing any more.
    full: bool,
}

impl<'a> Watching<'a> {
    fn new(client: &'a Client) -> Watching<'a> {
        Watching { client, full: false }
    }

    fn poll<F: Future<Output = Woken>>(
        &mut self,
        input: &mut Input,
        mut watch: Watch<'_, F>,
        arm: &impl Fn(Wait) -> F,
        cx: &mut Context<'_>,
    ) -> Poll<Exchange> {
        while !self.full {
            if input.bytes.len() >= self.client.shard.limits.pipelined_bytes_max {
                self.full = true;
                self.client.task.arm(HIDDEN_HANG_UP_CHECK);
                break;
            }
            match input.poll_more(self.client, watch.as_mut(), arm, input.wait(), cx) {
                Poll::Ready(Ok(1..)) => {}
                Poll::Ready(Ok(_) | Err(_)) => return Poll::Ready(Exchange::ClientGone),
                Poll::Pending => break,
            }
        }
        loop {
            match self.client.task.poll_fired(cx) {
                Poll::Ready(Fired::Stopped) => return Poll::Ready(Exchange::Stopped),
                Poll::Ready(Fired::Expired) if self.client.stream.hung_up() => {
                    return Poll::Ready(Exchange::ClientGone);
                }
                Poll::Ready(Fired::Expired) => self.client.task.arm(HIDDEN_HANG_UP_CHECK),
                Poll::Ready(Fired::Drained) | Poll::Pending => return Poll::Pending,
            }
        }
    }
}

impl Drop for Watching<'_> {
    fn drop(&mut self) {
        self.client.task.disarm();
    }
}

/// Answers a message that is not served, then closes.
async fn refuse<S: Service>(client: &Client, service: &S, rejection: &Rejection) {
    client.shard.counters.rejections.add(1);
    if client.write_pooled(rejection_bytes(service, rejection)).await.is_ok() {
        farewell(client).await;
    }
}

/// The bytes of a refusal, shaped by the service, announcing the close.
pub(crate) fn rejection_bytes<S: Service>(service: &S, rejection: &Rejection) -> Vec<u8> {
    let Response { status, headers, body } = service.reject(rejection);
    let mut out = buffers::take_large();
    write::own_head(&mut out, status, &headers, body.len() as u64, After::Close);
    out.extend_from_slice(&body);
    out
}

/// The service ended without an answer.
async fn internal_error<S: Service>(service: &S, responder: &mut Responder, peer: SocketAddr) {
    let rejection = Rejection {
        kind: RejectionKind::Internal,
        status: StatusCode::INTERNAL_SERVER_ERROR,
        reason: "the request ended without an answer",
        peer,
    };
    responder.close_after();
    let response = service.reject(&rejection);
    if responder.send(response).await.is_ok() {
        farewell(&responder.client).await;
    }
}

/// Closes so that the last answer arrives: FIN first, then the client's remaining bytes are thrown away until it closes
/// too. A client that has sent nothing more is closed at once.
async fn farewell(client: &Client) {
    client.stream.shutdown_write();
    let mut thrown = buffers::take_large();
    let mut left = FAREWELL_BYTES_MAX;
    let rest = async {
        loop {
            thrown.clear();
            match client.stream.try_receive(&mut thrown) {
                Ok(0) => return,
                Ok(received) if received >= left => return,
                Ok(received) => left -= received,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if client.stream.readable().await.is_err() {
                        return;
                    }
                }
                Err(_) => return,
            }
        }
    };
    let _ = client.task.within(Some(FAREWELL), pin!(rest)).await;
    buffers::give(thrown);
}

/// A level in the shard's counters that falls again by drop.
pub(crate) struct Level {
    shard: Rc<Shard>,
    counter: fn(&crate::stats::ShardCounters) -> &crate::stats::Counter,
}

impl Level {
    /// An accepted connection counts from then on, and not from when its task first runs: many may be accepted before that.
    pub(crate) fn open_connection(shard: &Rc<Shard>) -> Level {
        Level::up(shard, |counters| &counters.connections_open)
    }

    fn up(shard: &Rc<Shard>, counter: fn(&crate::stats::ShardCounters) -> &crate::stats::Counter) -> Level {
        counter(&shard.counters).add(1);
        Level { shard: shard.clone(), counter }
    }
}

impl Drop for Level {
    fn drop(&mut self) {
        (self.counter)(&self.shard.counters).subtract(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::service::Request;
    use crate::upstream::{Upstream, UpstreamRequest, UpstreamResponse};

    fn size<A, F: Future>(_: impl Fn(A) -> F) -> usize {
        size_of::<F>()
    }

    struct Minimal(Upstream);

    impl Service for Minimal {
        async fn call(&self, request: Request, responder: &mut Responder) {
            let body = [request.body];
            let outgoing = UpstreamRequest {
                address: request.peer,
                tls: None,
                authority: "",
                method: &request.method,
                path_prefix: "",
                target: &request.target,
                headers: Some(&request.head),
                remove: &[],
                set: &[],
                body: &body,
            };
            if let Ok(answer) = self.0.send(&outgoing).await {
                let relay = Relay { set: &[], remove: &[], observer: &mut IgnoreBody, cut_notice: None };
                responder.relay(answer, relay).await;
            }
        }

        fn reject(&self, rejection: &Rejection) -> Response {
            Response { status: rejection.status, headers: Vec::new(), body: bytes::Bytes::new() }
        }
    }

    #[test]
    fn futures_stay_small() {
        type Send<'a> = (&'a Upstream, &'a UpstreamRequest<'a>);
        let serve = size(|(a, b, c, d, e)| serve::<Minimal>(a, b, c, d, e));
        let call = size(|(a, b, c): (&Minimal, Request, &'static mut Responder)| a.call(b, c));
        let send = size(|(a, b): Send<'static>| a.send(b));
        let relay = size(|(a, b, c): (&'static mut Responder, UpstreamResponse, Relay<'static>)| a.relay(b, c));
        // Together they are most of what an open stream costs; a number that grows here grows ten thousand times.
        for (name, bytes, bytes_max) in
            [("serve", serve, 1200), ("send", send, 700), ("relay", relay, 950), ("call", call, 1700)]
        {
            assert!(bytes <= bytes_max, "{name} takes {bytes} bytes, at most {bytes_max} are allowed");
        }
    }
}
