//! Reads requests from a client: head, `Expect`, body, with their limits, and what arrives of the next ones meanwhile.
//! It owns the connection's input buffer and never answers anything but `100 Continue`.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::StatusCode;

use super::client::Client;
use crate::buffers::{self, LARGE_BYTES};
use crate::clock::{Fired, now_ms};
use crate::http1::chunked::Chunked;
use crate::http1::request::{self, Refusal, RequestFraming, RequestHead};
use crate::http1::{HeadScan, Malformed};
use crate::net::{Peeked, Stream};
use crate::service::{Rejection, RejectionKind, Request};
use crate::shard::Shard;

/// How long a connection on which nothing has come yet has for its first byte once there is a drain.
const FIRST_REQUEST_GRACE: Duration = Duration::from_secs(1);
/// First allocation for a body whose length is only claimed, bytes.
const BODY_BYTES_FIRST: usize = 256 << 10;
/// A request that begins this soon after the answer before it, on the coarse clock, is quick.
const QUICK_GAP_MS: u64 = 1000;
/// So many quick requests in a row make a connection wait by a posted read.
const QUICK_REQUESTS: u8 = 3;
/// Empty lines that may precede a request; old clients send one behind a body.
const EMPTY_LINES_MAX: usize = 16;
/// Bytes read in a row before the task lets others run.
const BYTES_PER_TURN: usize = 256 << 10;

/// Why there is no request.
pub(super) enum Ended {
    /// Nothing to say: idle too long, closed by the client, draining, or broken off inside a message.
    Quietly,
    Refused(Rejection),
}

/// How to wait for bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    /// By readiness: holds no buffer, costs a system call more.
    Ready,
    /// By a posted read with a small buffer: for connections whose requests follow each other closely.
    Read,
}

/// What a wait brought.
pub(super) enum Woken {
    Readable,
    Received(io::Result<usize>, Vec<u8>),
}

/// A wait that survives from one use to the next: it watches for the client's leaving during an exchange and is then
/// the wait for the next request. While one is pending nobody else may read from the stream: a posted read and a direct
/// one would take the bytes in an order that nobody knows.
pub(super) type Watch<'a, F> = Pin<&'a mut Option<F>>;

pub(super) async fn wait(stream: Stream, how: Wait) -> Woken {
    match how {
        Wait::Ready => {
            // An error shows again, and better, in the read that follows.
            let _ = stream.readable().await;
            Woken::Readable
        }
        Wait::Read => {
            let (result, buffer) = stream.receive(buffers::take_small()).await;
            Woken::Received(result, buffer)
        }
    }
}

/// Bytes that were read and not yet used.
#[derive(Default)]
pub(super) struct Input {
    pub(super) bytes: Vec<u8>,
    /// Requests in a row that came soon after the answer before them.
    quick: u8,
}

impl Input {
    /// Waits for bytes and takes them in; `Ok(0)` = end of stream.
    pub(super) fn poll_more<F: Future<Output = Woken>>(
        &mut self,
        client: &Client,
        mut watch: Watch<'_, F>,
        arm: impl Fn(Wait) -> F,
        how: Wait,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<usize>> {
        loop {
            if watch.is_none() {
                watch.set(Some(arm(how)));
            }
            let Some(armed) = watch.as_mut().as_pin_mut() else { return Poll::Pending };
            let Poll::Ready(woken) = armed.poll(cx) else { return Poll::Pending };
            watch.set(None);
            match woken {
                Woken::Readable => match self.read_from(client) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    result => return Poll::Ready(result),
                },
                Woken::Received(result, buffer) => {
                    let filled = result.as_ref().is_ok_and(|&received| received == buffer.capacity());
                    self.absorb(buffer);
                    if filled {
                        // The rest is probably there already; an error or the end will show again.
                        let _ = self.read_from(client);
                    }
                    return Poll::Ready(result);
                }
            }
        }
    }

    fn absorb(&mut self, buffer: Vec<u8>) {
        if self.bytes.is_empty() {
            buffers::give(std::mem::replace(&mut self.bytes, buffer));
            self.release_if_empty();
        } else {
            self.bytes.extend_from_slice(&buffer);
            buffers::give(buffer);
        }
    }

    /// How to watch and wait on this connection now.
    pub(super) fn wait(&self) -> Wait {
        if self.quick >= QUICK_REQUESTS { Wait::Read } else { Wait::Ready }
    }

    /// Reads what has arrived into the buffer; `WouldBlock` when nothing has. Nothing may be waiting meanwhile.
    pub(super) fn read_from(&mut self, client: &Client) -> io::Result<usize> {
        if self.bytes.capacity() < LARGE_BYTES {
            let mut large = buffers::take_large();
            large.extend_from_slice(&self.bytes);
            buffers::give(std::mem::replace(&mut self.bytes, large));
        }
        if self.bytes.len() == self.bytes.capacity() {
            self.bytes.reserve(self.bytes.capacity());
        }
        let result = client.stream.try_receive(&mut self.bytes);
        self.release_if_empty();
        result
    }

    pub(super) fn release_if_empty(&mut self) {
        if self.bytes.is_empty() {
            buffers::give(std::mem::take(&mut self.bytes));
        }
    }

    fn consume(&mut self, count: usize) {
        self.bytes.drain(..count);
        self.release_if_empty();
    }
}

impl Drop for Input {
    fn drop(&mut self) {
        buffers::give(std::mem::take(&mut self.bytes));
    }
}

/// What a body that is on its way holds of the shard's room for such; given back by drop.
struct Unfinished<'a> {
    shard: &'a Shard,
    bytes: usize,
}

impl<'a> Unfinished<'a> {
    fn new(shard: &'a Shard) -> Unfinished<'a> {
        Unfinished { shard, bytes: 0 }
    }

    /// So many bytes of it have come; whether there is room for them.
    fn holds(&mut self, bytes: usize) -> bool {
        let all = self.shard.unfinished_body_bytes.get() - self.bytes + bytes;
        if all > self.shard.limits.unfinished_body_bytes_max {
            return false;
        }
        self.shard.unfinished_body_bytes.set(all);
        self.bytes = bytes;
        true
    }
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        self.shard.unfinished_body_bytes.set(self.shard.unfinished_body_bytes.get() - self.bytes);
    }
}

pub(super) struct Reader<'a, 'w, F> {
    pub(super) client: &'a Client,
    pub(super) input: &'a mut Input,
    pub(super) watch: Watch<'w, F>,
    pub(super) peer: SocketAddr,
}

impl<F: Future<Output = Woken>> Reader<'_, '_, F> {
    /// The next request and whether it is HTTP/1.0 and wants to keep the connection.
    pub(super) async fn request(
        &mut self,
        first: bool,
        arm: impl Fn(Wait) -> F,
    ) -> Result<(Request, bool, bool), Ended> {
        let length = self.head(first, &arm).await?;
        let head = self.parse(length)?;
        let body = match self.body_at_hand(&head)? {
            Some(body) => body,
            // Boxed: few requests come in several reads, and that state would sit in every connection's task.
            None => Box::pin(self.rest_of_body(head.framing, head.expects_continue, &arm)).await?,
        };
        let RequestHead { method, target, http10, keep_alive, head, .. } = head;
        let request = Request { method, target, head, body, peer: self.peer, received: Instant::now() };
        Ok((request, http10, keep_alive))
    }

    fn parse(&mut self, length: usize) -> Result<RequestHead, Ended> {
        let parsed = request::parse(&self.input.bytes[..length], self.client.shard.limits.headers_max);
        let head = parsed.map_err(|refusal| self.refused(refusal))?;
        self.input.consume(length);
        Ok(head)
    }

    /// The body, if it is empty or has arrived with the head.
    fn body_at_hand(&mut self, head: &RequestHead) -> Result<Option<Bytes>, Ended> {
        match head.framing {
            RequestFraming::Length(0) => Ok(Some(Bytes::new())),
            RequestFraming::Length(length) if length > self.client.shard.limits.body_bytes_max as u64 => {
                Err(self.too_large())
            }
            RequestFraming::Length(length) if self.input.bytes.len() as u64 >= length => {
                let body = Bytes::copy_from_slice(&self.input.bytes[..length as usize]);
                self.input.consume(length as usize);
                Ok(Some(body))
            }
            _ => Ok(None),
        }
    }

    async fn rest_of_body(
        &mut self,
        framing: RequestFraming,
        expects_continue: bool,
        arm: &impl Fn(Wait) -> F,
    ) -> Result<Bytes, Ended> {
        if expects_continue && self.input.bytes.is_empty() {
            let mut go_on = Bytes::from_static(b"HTTP/1.1 100 Continue\r\n\r\n");
            self.client.write_all(&mut go_on).await.map_err(|_| Ended::Quietly)?;
        }
        match framing {
            RequestFraming::Length(length) => self.sized_body(length as usize, arm).await,
            RequestFraming::Chunked => self.chunked_body(arm).await,
        }
    }

    /// Reads until a whole head is in the buffer; returns its length. The idle wait before its first byte holds no
    /// buffer and may be drained.
    async fn head(&mut self, first: bool, arm: &impl Fn(Wait) -> F) -> Result<usize, Ended> {
        let limits = &self.client.shard.limits;
        let (head_timeout, head_bytes_max) = (limits.head_timeout, limits.head_bytes_max);
        let mut scan = HeadScan::default();
        let mut empty_lines = 0;
        let mut deadline_ms = None;
        loop {
            // Empty lines before a request line are ignored (RFC 9112, section 2.2), but not without end.
            let empty = self.input.bytes.chunks_exact(2).take_while(|line| *line == b"\r\n").count();
            if empty > 0 {
                empty_lines += empty;
                if empty_lines > EMPTY_LINES_MAX {
                    return Err(self.refused(Malformed("too many empty lines before a request").into()));
                }
                self.input.consume(2 * empty);
                scan = HeadScan::default();
            }
            // Another protocol's greeting may never come to a line's end.
            if self.input.bytes.first().is_some_and(|byte| !byte.is_ascii_graphic() && *byte != b'\r') {
                return Err(self.refused(Malformed("a request begins with its method").into()));
            }
            let found = scan.end(&self.input.bytes).map_err(|malformed| self.refused(malformed.into()))?;
            let length = found.unwrap_or(self.input.bytes.len());
            if length > head_bytes_max || (found.is_none() && length == head_bytes_max) {
                return Err(self.head_too_large());
            }
            if let Some(length) = found {
                self.client.task.head_is_whole();
                return Ok(length);
            }
            let idle = self.input.bytes.is_empty();
            let limit = if idle && !first {
                limits.keep_alive_timeout
            } else {
                let deadline = *deadline_ms.get_or_insert(now_ms() + head_timeout.as_millis() as u64);
                Duration::from_millis(deadline.saturating_sub(now_ms()))
            };
            self.client.task.set_idle(idle);
            if first || !idle {
                self.client.task.head_is_open();
            }
            let waited_from_ms = now_ms();
            let more = self.more(limit, self.input.wait(), arm).await;
            self.client.task.set_idle(false);
            if idle {
                let quick = now_ms() - waited_from_ms <= QUICK_GAP_MS;
                self.input.quick = if quick { self.input.quick.saturating_add(1) } else { 0 };
            }
            match more {
                Ok(Ok(0) | Err(_)) => return Err(Ended::Quietly),
                Ok(Ok(_)) => {}
                // A request may have arrived in the same moment, or be on its way on a new connection: it is served, the
                // connection closes after it.
                Err(Fired::Drained) if first || self.client.stream.peek() == Peeked::Bytes => {
                    let limit = FIRST_REQUEST_GRACE;
                    if !matches!(self.more(limit, Wait::Ready, arm).await, Ok(Ok(1..))) {
                        return Err(Ended::Quietly);
                    }
                }
                Err(Fired::Expired) if !idle => return Err(self.timed_out("the request head did not arrive in time")),
                Err(_) => return Err(Ended::Quietly),
            }
        }
    }

    /// Reads a body of known length straight into its own buffer, which grows with what arrives, not with the claim.
    async fn sized_body(&mut self, length: usize, arm: &impl Fn(Wait) -> F) -> Result<Bytes, Ended> {
        let mut body = Vec::with_capacity(length.min(BODY_BYTES_FIRST));
        let mut unfinished = Unfinished::new(&self.client.shard);
        let mut turn = 0;
        loop {
            let taken = self.input.bytes.len().min(length - body.len());
            body.extend_from_slice(&self.input.bytes[..taken]);
            self.input.consume(taken);
            if body.len() == length {
                return Ok(Bytes::from(body));
            }
            // As long as nobody else waits for bytes they go straight to where they belong.
            while self.watch.is_none() && turn < BYTES_PER_TURN && body.len() < length {
                if body.len() == body.capacity() {
                    body.reserve_exact(body.len().min(length - body.len()));
                }
                match self.client.stream.try_receive(&mut body) {
                    Ok(0) => return Err(Ended::Quietly),
                    Ok(received) => turn += received,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(_) => return Err(Ended::Quietly),
                }
            }
            if body.len() > length {
                // The allocator gave more room than asked for, and the next request's first bytes are in it.
                self.input.absorb(body.split_off(length));
            }
            if body.len() < length {
                self.more_body(&mut unfinished, body.len(), arm).await?;
                turn = 0;
            }
        }
    }

    async fn chunked_body(&mut self, arm: &impl Fn(Wait) -> F) -> Result<Bytes, Ended> {
        let body_bytes_max = self.client.shard.limits.body_bytes_max;
        let mut chunked = Chunked::default();
        let mut body = Vec::new();
        let mut unfinished = Unfinished::new(&self.client.shard);
        loop {
            let bytes = &self.input.bytes;
            let fed = chunked.feed(bytes, |range| body.extend_from_slice(&bytes[range]));
            let fed = fed.map_err(|malformed| self.refused(malformed.into()))?;
            self.input.consume(fed.consumed);
            if body.len() > body_bytes_max || chunked.left_of_chunk() > (body_bytes_max - body.len()) as u64 {
                return Err(self.too_large());
            }
            if chunked.is_done() {
                return Ok(Bytes::from(body));
            }
            self.more_body(&mut unfinished, body.len(), arm).await?;
        }
    }

    /// Takes more of a body into the input buffer; `bytes` of it have come.
    async fn more_body(
        &mut self,
        unfinished: &mut Unfinished<'_>,
        bytes: usize,
        arm: &impl Fn(Wait) -> F,
    ) -> Result<(), Ended> {
        if !unfinished.holds(bytes) {
            let status = StatusCode::SERVICE_UNAVAILABLE;
            return Err(self.rejected(
                RejectionKind::TooManyBodies,
                status,
                "too many request bodies are on their way",
            ));
        }
        match self.more(self.client.shard.limits.body_timeout, Wait::Ready, arm).await {
            Ok(Ok(1..)) => Ok(()),
            Err(Fired::Expired) => Err(self.timed_out("the request body stopped arriving")),
            Ok(_) | Err(_) => Err(Ended::Quietly),
        }
    }

    async fn more(&mut self, limit: Duration, how: Wait, arm: &impl Fn(Wait) -> F) -> Result<io::Result<usize>, Fired> {
        let (client, input, watch) = (self.client, &mut *self.input, &mut self.watch);
        let more = std::future::poll_fn(|cx| input.poll_more(client, watch.as_mut(), arm, how, cx));
        client.task.within(Some(limit), std::pin::pin!(more)).await
    }

    fn refused(&self, refusal: Refusal) -> Ended {
        let kind = match refusal.status {
            StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE => RejectionKind::HeadTooLarge,
            _ => RejectionKind::BadRequest,
        };
        self.rejected(kind, refusal.status, refusal.reason)
    }

    fn head_too_large(&self) -> Ended {
        let status = StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE;
        self.rejected(RejectionKind::HeadTooLarge, status, "the request head is too large")
    }

    fn too_large(&self) -> Ended {
        let status = StatusCode::PAYLOAD_TOO_LARGE;
        self.rejected(RejectionKind::BodyTooLarge, status, "the request body is too large")
    }

    fn timed_out(&self, reason: &'static str) -> Ended {
        self.rejected(RejectionKind::Timeout, StatusCode::REQUEST_TIMEOUT, reason)
    }

    fn rejected(&self, kind: RejectionKind, status: StatusCode, reason: &'static str) -> Ended {
        Ended::Refused(Rejection { kind, status, reason, peer: self.peer })
    }
}
