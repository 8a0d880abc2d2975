//! The way back to the client for one request: an answer of the service's own, or a relayed one. It owns what may
//! still be sent and what becomes of the connection, and never sends two answers.

use std::future::Future;
use std::rc::Rc;

use http::{HeaderName, HeaderValue, Method, StatusCode};

use super::client::{Client, ClientGone};
use super::relay;
use crate::buffers::{self, LARGE_BYTES};
use crate::http1::write::{self, After};
use crate::service::Response;
use crate::upstream::{UpstreamError, UpstreamResponse};

/// Watches a relayed body on its way.
pub trait BodyObserver {
    /// A piece of payload, without framing, in order, before it goes out. Pieces end where reads end, not where
    /// events do.
    fn data(&mut self, payload: &[u8]);

    /// All payload so far has been taken by the client's socket.
    fn passed_on(&mut self) {}

    /// Asked once, when the body has ended as its framing says: whether that was the end of what it carried. A body
    /// that was not whole is treated as cut: the client does not get its final chunk.
    fn is_whole(&self) -> bool {
        true
    }

    /// Asked when a body was cut: whether what it carried had said its end or its failure already, so that nothing may be
    /// put behind it.
    fn has_ended(&self) -> bool {
        false
    }
}

/// Makes another body of an upstream's while it passes.
pub trait BodyRewriter {
    /// Appends what a piece of payload becomes, possibly nothing yet. Pieces end where reads end.
    fn rewrite(&mut self, payload: &[u8], out: &mut Vec<u8>);

    /// Appends what is still to be said when the upstream's body is over, as its framing says or by a failure. False:
    /// that was not the end of what it carried, and the client does not get a final chunk.
    fn end(&mut self, out: &mut Vec<u8>) -> bool;
}

/// Looks at nothing.
pub struct IgnoreBody;

impl BodyObserver for IgnoreBody {
    fn data(&mut self, _payload: &[u8]) {}
}

/// How to relay an answer.
pub struct Relay<'a> {
    /// Headers sent instead of the upstream's of the same name.
    pub set: &'a [(HeaderName, HeaderValue)],
    /// Names of the upstream's headers to leave out.
    pub remove: &'a [HeaderName],
    pub observer: &'a mut dyn BodyObserver,
    /// Sent as one last chunk when a chunked answer is cut between two chunks (an SSE error event, say). The connection
    /// is then closed without the final chunk, so that the cut stays visible.
    pub cut_notice: Option<bytes::Bytes>,
}

/// How a relay ended.
#[derive(Debug)]
pub enum RelayOutcome {
    Complete,
    /// Nothing more can be sent to the client once [`Responder::started`] is true.
    UpstreamFailed(UpstreamError),
    ClientGone,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Fresh,
    /// Bytes of an answer were handed to the socket; the answer is not whole.
    Started,
    Complete,
}

/// Answers one request.
pub struct Responder {
    pub(super) client: Rc<Client>,
    state: State,
    pub(super) http10: bool,
    to_head_request: bool,
    keep_alive: bool,
    /// The client can tell a whole answer from a cut one, by its framing or because it was told.
    end_is_visible: bool,
}

impl Responder {
    pub(super) fn new(client: Rc<Client>, method: &Method, http10: bool, keep_alive: bool) -> Responder {
        let to_head_request = *method == Method::HEAD;
        Responder { client, state: State::Fresh, http10, to_head_request, keep_alive, end_is_visible: true }
    }

    /// A byte of the answer was handed to the client's socket: no other answer is possible any more.
    pub fn started(&self) -> bool {
        self.state != State::Fresh
    }

    /// Sends a whole answer. The body of an answer to HEAD, 204 or 304 is left out.
    ///
    /// # Errors
    /// [`ClientGone`], also when an answer was started before.
    pub async fn send(&mut self, response: Response) -> Result<(), ClientGone> {
        if self.started() {
            return Err(ClientGone);
        }
        let after = self.after(true);
        let mut out = buffers::take_large();
        let Response { status, headers, body } = response;
        write::own_head(&mut out, status, &headers, body.len() as u64, after);
        let bodiless = self.to_head_request || matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
        let mut rest = if bodiless { bytes::Bytes::new() } else { body };
        let joined = rest.split_to(rest.len().min(LARGE_BYTES.saturating_sub(out.len())));
        out.extend_from_slice(&joined);
        self.begin();
        self.client.write_pooled(out).await?;
        if !rest.is_empty() {
            self.client.write_all(&mut rest).await?;
        }
        self.complete();
        Ok(())
    }

    /// Passes an upstream's answer on: head and body, chunk framing byte for byte. Reads no further than the client
    /// takes. The upstream's connection goes back to its pool only after a whole body.
    // Not an async fn: the arguments would be stored once more.
    pub fn relay<'a>(
        &'a mut self,
        upstream: UpstreamResponse,
        relay: Relay<'a>,
    ) -> impl Future<Output = RelayOutcome> + 'a {
        relay::run(self, upstream, relay)
    }

    /// The same with another body in the place of the upstream's: payload through `rewriter`, in chunks of our own. What
    /// is said to a client whose answer was cut is the rewriter's, and [`Relay::cut_notice`] is not used.
    pub fn relay_rewritten<'a>(
        &'a mut self,
        upstream: UpstreamResponse,
        relay: Relay<'a>,
        rewriter: &'a mut dyn BodyRewriter,
    ) -> impl Future<Output = RelayOutcome> + 'a {
        relay::run_rewritten(self, upstream, relay, rewriter)
    }

    pub(super) fn begin(&mut self) {
        self.state = State::Started;
    }

    pub(super) fn complete(&mut self) {
        self.state = State::Complete;
    }

    /// Fixes what becomes of the connection, as the head will say. `delimited`: the client can see the answer's end.
    pub(super) fn after(&mut self, delimited: bool) -> After {
        self.keep_alive &= delimited && !self.client.shard.draining.get();
        self.end_is_visible = delimited;
        match (self.keep_alive, self.http10) {
            (false, _) => After::Close,
            (true, false) => After::Keep,
            (true, true) => After::KeepSaid,
        }
    }

    /// What has gone out says by itself that the answer failed, or that it was at its end.
    pub(super) fn end_is_told(&mut self) {
        self.end_is_visible = true;
    }

    /// Before the connection is closed inside an answer. One whose end is that of its connection would look whole.
    pub(super) fn break_off(&self) {
        if !self.end_is_visible && self.state == State::Started {
            self.client.stream.reset_at_close();
        }
    }

    /// The answer is whole and the connection may carry another request.
    pub(super) fn may_continue(&self) -> bool {
        self.state == State::Complete && self.keep_alive && !self.client.shard.draining.get()
    }

    /// The answer is whole.
    pub(super) fn is_complete(&self) -> bool {
        self.state == State::Complete
    }

    /// Before a refusal: the connection will not go on.
    pub(super) fn close_after(&mut self) {
        self.keep_alive = false;
    }
}
