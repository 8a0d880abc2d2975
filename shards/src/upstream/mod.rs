//! The client side of one shard: requests to upstreams over pooled HTTP/1.1 connections. It owns connecting, the one
//! transparent replay on a stale connection, and response heads; it never resolves names, never chooses an upstream
//! and never retries anything else.

mod connection;
mod error;
mod pool;
mod response;

use std::cell::{Cell, RefCell};
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Method};

pub(crate) use self::connection::Connection;
use self::connection::Trouble;
pub use self::error::{UpstreamError, UpstreamErrorKind};
use self::pool::Pool;
pub(crate) use self::response::BodyShape;
pub use self::response::UpstreamResponse;
use crate::buffers::{self, LARGE_BYTES};
use crate::config::{UpstreamConfig, UpstreamTimeouts};
use crate::http1::head::Head;
use crate::http1::{HeadScan, response as codec, write};
use crate::net::{Peeked, Stream, WeakStream};
use crate::stats::ShardCounters;
use crate::tls::TlsName;

/// Interim answers (1xx) that are skipped before an answer counts as broken.
const INTERIM_MAX: usize = 16;

/// This shard's upstream client. Cheap to clone.
#[derive(Clone)]
pub struct Upstream(Rc<Shared>);

pub(crate) struct Shared {
    config: UpstreamConfig,
    timeouts: Cell<UpstreamTimeouts>,
    pool: Pool,
    counters: Arc<ShardCounters>,
}

/// One request to an upstream.
pub struct UpstreamRequest<'a> {
    /// Resolved address.
    pub address: SocketAddr,
    /// Speak TLS with it, and take only a certificate for that name.
    pub tls: Option<&'a TlsName>,
    /// `Host` of the request.
    pub authority: &'a str,
    pub method: &'a Method,
    /// Put in front of `target`; no slash at its end.
    pub path_prefix: &'a str,
    /// Path and query.
    pub target: &'a str,
    /// Headers to pass on: end-to-end ones, in order and spelling. `Host`, framing and `Expect` are ours.
    pub headers: Option<&'a Head>,
    /// Names of passed-on headers to leave out.
    pub remove: &'a [HeaderName],
    /// Headers to send instead of passed-on ones of the same name.
    pub set: &'a [(HeaderName, HeaderValue)],
    /// The body's segments, sent in order under one Content-Length.
    pub body: &'a [Bytes],
}

/// How far one request has come, for callers that must know it after they gave the request up.
#[derive(Default)]
pub struct SendProgress {
    stream: RefCell<WeakStream>,
    delivered: Cell<bool>,
}

impl SendProgress {
    /// The whole request was handed to the socket: the upstream may have begun to serve it.
    pub fn is_delivered(&self) -> bool {
        self.delivered.get()
    }

    /// Ends the sending side of the connection. The upstream sees a client that has left, while an answer that it had
    /// already sent can still be read: whether it was served is then certain.
    pub fn close_sending(&self) {
        if let Some(stream) = self.stream.borrow().upgrade() {
            stream.shutdown_write();
        }
    }

    /// The request goes out anew: the connection that had taken it is dead.
    fn lost(&self) {
        self.delivered.set(false);
    }

    fn delivered(&self, stream: &Stream) {
        self.delivered.set(true);
        *self.stream.borrow_mut() = stream.downgrade();
    }
}

impl Upstream {
    pub(crate) fn new(mut config: UpstreamConfig, counters: Arc<ShardCounters>) -> Upstream {
        config.tls = config.tls.of_shard();
        let pool = Pool::new(&config, counters.clone());
        let timeouts = Cell::new(config.timeouts());
        Upstream(Rc::new(Shared { config, timeouts, pool, counters }))
    }

    /// In force for every wait that begins from now on. The sweep that ends waits keeps its period, which was chosen by the
    /// timeouts at the start: shorter ones may be late by half a second.
    pub fn set_timeouts(&self, timeouts: UpstreamTimeouts) {
        self.0.timeouts.set(timeouts);
    }

    /// Sends a request and waits for the head of the answer. A reused connection that turns out to be dead before any
    /// byte of an answer is replaced once by a fresh one; everything else is the caller's to retry.
    ///
    /// # Errors
    /// [`UpstreamError`]; dropping the future closes the connection.
    pub async fn send(&self, request: &UpstreamRequest<'_>) -> Result<UpstreamResponse, UpstreamError> {
        self.send_with(request, None).await
    }

    /// The same, and notes its progress for whoever asks for it.
    pub async fn send_watched(
        &self,
        request: &UpstreamRequest<'_>,
        progress: Option<&SendProgress>,
    ) -> Result<UpstreamResponse, UpstreamError> {
        self.send_with(request, progress).await
    }

    async fn send_with(
        &self,
        request: &UpstreamRequest<'_>,
        progress: Option<&SendProgress>,
    ) -> Result<UpstreamResponse, UpstreamError> {
        let mut pooled = self.0.pool.take(&request.address, request.tls);
        loop {
            let connection = match pooled.take() {
                Some(connection) => {
                    self.0.counters.upstream_reuses.add(1);
                    connection
                }
                // Boxed: the timer inside is large and aligned to cache lines, which every exchange would inherit.
                None => Box::pin(self.connect(request.address, request.tls)).await?,
            };
            match self.exchange(connection, request, progress).await {
                Err(error) if error.is_stale_connection() => {
                    progress.inspect(|progress| progress.lost());
                }
                outcome => return outcome,
            }
        }
    }

    async fn connect(&self, address: SocketAddr, tls: Option<&TlsName>) -> Result<Box<Connection>, UpstreamError> {
        let failed = |kind| UpstreamError { kind, reused_connection: false, response_started: false };
        let connecting = async {
            let stream = Stream::connect(address).await?;
            if let Some(name) = tls {
                stream.secure(self.0.config.tls.connect(name).map_err(io::Error::other)?).await?;
            }
            Ok(stream)
        };
        let started = Instant::now();
        match crate::net::timeout(self.0.timeouts.get().connect, connecting).await {
            Some(Ok(stream)) => {
                self.0.counters.upstream_connects.add(1);
                Ok(Box::new(Connection::new(stream, address, tls.cloned(), started.elapsed())))
            }
            Some(Err(error)) => Err(failed(UpstreamErrorKind::Connect(error))),
            None => Err(failed(UpstreamErrorKind::ConnectTimeout)),
        }
    }

    async fn exchange(
        &self,
        mut connection: Box<Connection>,
        request: &UpstreamRequest<'_>,
        progress: Option<&SendProgress>,
    ) -> Result<UpstreamResponse, UpstreamError> {
        let failed = |connection: &Connection, kind| UpstreamError {
            kind,
            reused_connection: connection.reused,
            response_started: connection.answered,
        };
        connection.answered = false;
        let sent = self.write_request(&connection, request).await;
        if let (Ok(()), Some(progress)) = (&sent, progress) {
            progress.delivered(&connection.stream);
        }
        // An upstream may refuse a request early and read no more of it: its answer says more than a stall or EPIPE.
        if matches!(sent, Err(Trouble::Timeout)) && connection.stream.look() != Peeked::Bytes {
            return Err(failed(&connection, UpstreamErrorKind::SendStalled));
        }
        let to_head_request = *request.method == Method::HEAD;
        match self.read_head(&mut connection, to_head_request).await {
            Ok(parsed) => {
                let keep_alive = parsed.keep_alive && sent.is_ok();
                Ok(UpstreamResponse::new(self.0.clone(), connection, parsed, keep_alive))
            }
            Err(kind) => match sent {
                Err(Trouble::Broken(error)) if !connection.answered => {
                    Err(failed(&connection, UpstreamErrorKind::Send(error)))
                }
                _ => Err(failed(&connection, kind)),
            },
        }
    }

    async fn write_request(&self, connection: &Connection, request: &UpstreamRequest<'_>) -> Result<(), Trouble> {
        let stall = self.0.config.write_stall_timeout;
        let body_bytes: usize = request.body.iter().map(Bytes::len).sum();
        let mut out = buffers::take_large();
        write::request(
            &mut out,
            &write::RequestLines {
                method: request.method,
                path_prefix: request.path_prefix,
                target: request.target,
                authority: request.authority,
                headers: request.headers,
                remove: request.remove,
                set: request.set,
                body_bytes: body_bytes as u64,
            },
        );
        if out.len() + body_bytes <= LARGE_BYTES {
            // A small request is one packet.
            request.body.iter().for_each(|segment| out.extend_from_slice(segment));
            connection.write_all(&mut out, stall).await?;
            buffers::give(out);
            return Ok(());
        }
        // A large one goes from where it lies: head and body in one call as far as the socket takes them.
        let mut sent = connection.try_send_gathered(&out, request.body)?;
        if sent < out.len() {
            out.drain(..sent);
            connection.write_all(&mut out, stall).await?;
            sent = 0;
        } else {
            sent -= out.len();
        }
        buffers::give(out);
        for segment in request.body {
            if sent >= segment.len() {
                sent -= segment.len();
                continue;
            }
            let mut rest = segment.slice(sent..);
            sent = 0;
            connection.write_all(&mut rest, stall).await?;
        }
        Ok(())
    }

    /// Reads up to the end of the final answer's head; leaves what follows in the connection's buffer.
    async fn read_head(
        &self,
        connection: &mut Connection,
        to_head_request: bool,
    ) -> Result<ParsedHead, UpstreamErrorKind> {
        let mut scan = HeadScan::default();
        let mut interim = 0;
        loop {
            let found = scan.end(&connection.buffer);
            match found.map_err(|malformed| UpstreamErrorKind::BadResponse(malformed.0))? {
                Some(length) => {
                    let parsed = codec::parse(&connection.buffer[..length], to_head_request)
                        .map_err(|malformed| UpstreamErrorKind::BadResponse(malformed.0))?;
                    if parsed.status == http::StatusCode::SWITCHING_PROTOCOLS {
                        return Err(UpstreamErrorKind::BadResponse("it switches protocols, which nobody asked for"));
                    }
                    if !parsed.status.is_informational() {
                        return Ok(ParsedHead { parsed, length });
                    }
                    interim += 1;
                    if interim > INTERIM_MAX {
                        return Err(UpstreamErrorKind::BadResponse("too many interim answers"));
                    }
                    connection.buffer.drain(..length);
                    scan = HeadScan::default();
                }
                None => {
                    // What speaks another protocol may never come to a line's end.
                    if connection.buffer.first().is_some_and(|byte| *byte != b'H' && *byte != b'\r') {
                        return Err(UpstreamErrorKind::BadResponse("an answer begins with its version"));
                    }
                    if connection.buffer.len() >= self.0.config.response_head_bytes_max {
                        return Err(UpstreamErrorKind::TooLarge);
                    }
                    let limit = self.head_limit(connection);
                    match connection.fill(limit).await {
                        Ok(0) => return Err(UpstreamErrorKind::ClosedBeforeHead),
                        Ok(_) => {}
                        Err(Trouble::Broken(error)) => return Err(UpstreamErrorKind::ResetBeforeHead(error)),
                        Err(Trouble::Timeout) if !connection.answered => {
                            return Err(UpstreamErrorKind::FirstByteTimeout);
                        }
                        Err(Trouble::Timeout) => return Err(UpstreamErrorKind::IdleTimeout),
                    }
                }
            }
        }
    }

    /// The first byte has a limit of its own; a head that has begun is held to the idle limit.
    fn head_limit(&self, connection: &Connection) -> Option<Duration> {
        let timeouts = self.0.timeouts.get();
        if !connection.answered {
            return timeouts.first_byte;
        }
        timeouts.idle.or(timeouts.first_byte)
    }

    /// Closes unused connections that have become too old.
    pub(crate) fn reap(&self) {
        self.0.pool.reap();
    }

    /// Closes all unused connections.
    pub(crate) fn clear(&self) {
        self.0.pool.clear();
    }
}

/// A response head and how many bytes of the connection's buffer it takes.
pub(crate) struct ParsedHead {
    parsed: codec::ResponseHead,
    length: usize,
}

impl std::ops::Deref for ParsedHead {
    type Target = codec::ResponseHead;

    fn deref(&self) -> &codec::ResponseHead {
        &self.parsed
    }
}
