//! The seam to whoever answers requests: the service trait and the plain data that crosses it. It owns no behaviour.

use std::future::Future;
use std::net::SocketAddr;
use std::time::Instant;

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Method, StatusCode};

use crate::connection::Responder;
use crate::http1::head::Head;
use crate::mailbox::Mailbox;
use crate::upstream::Upstream;

/// What a shard gives to the service it builds. Everything in it belongs to that shard's thread.
#[derive(Clone)]
pub struct ShardContext {
    /// Number of the shard, from 0.
    pub shard: usize,
    /// This shard's upstream client and pool.
    pub upstream: Upstream,
    /// Where other threads deliver results to this shard.
    pub mailbox: Mailbox,
}

/// Answers requests. Built once on each shard's thread; its methods run on that thread only.
pub trait Service: 'static {
    /// Answers one request through `responder`.
    ///
    /// The future is **dropped when the client leaves**, in every phase, also when it half-closes its sending side:
    /// whatever must be released is released by guards. If it returns without having sent anything the engine answers 500.
    fn call(&self, request: Request, responder: &mut Responder) -> impl Future<Output = ()>;

    /// Shape of the answer when the engine refuses a message by itself. The engine closes the connection after it.
    fn reject(&self, rejection: &Rejection) -> Response;
}

/// One request, complete.
#[derive(Debug)]
pub struct Request {
    pub method: Method,
    /// Path and query as sent, or `*`.
    pub target: String,
    pub head: Head,
    /// The whole body, de-chunked.
    pub body: Bytes,
    pub peer: SocketAddr,
    /// When its last byte was read.
    pub received: Instant,
}

/// An answer of the service's own. The engine adds `Content-Length`, `Date` and `Connection`.
#[derive(Clone, Debug)]
pub struct Response {
    pub status: StatusCode,
    pub headers: Vec<(HeaderName, HeaderValue)>,
    pub body: Bytes,
}

/// Why the engine answers by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RejectionKind {
    /// The message breaks HTTP's rules or is not supported (400, 417, 501, 505).
    BadRequest,
    /// Head too large (431).
    HeadTooLarge,
    /// Body too large (413).
    BodyTooLarge,
    /// Head or body did not arrive in time (408).
    Timeout,
    /// The shard holds as many connections as it may (503).
    TooManyConnections,
    /// The shard holds as much of unfinished bodies as it may (503).
    TooManyBodies,
    /// The service panicked or returned without an answer (500).
    Internal,
}

/// A refusal by the engine.
#[derive(Clone, Copy, Debug)]
pub struct Rejection {
    pub kind: RejectionKind,
    pub status: StatusCode,
    /// One phrase for the sender, such as "too many header lines".
    pub reason: &'static str,
    pub peer: SocketAddr,
}
