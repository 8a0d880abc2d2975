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
use crate::buffers;
use crate::clock::{Fired, now_ms};
use crate::http1::HeadScan;
use crate::http1::chunked::Chunked;
use crate::http1::request::{self, Refusal, RequestFraming, RequestHead};
use crate::service::{Rejection, RejectionKind, Request};

/// First allocation for a body whose length is only claimed, bytes.
const BODY_BYTES_FIRST: usize = 256 << 10;
/// Bytes read in a row before the task lets others run.
const BYTES_PER_TURN: usize = 256 << 10;

/// Why there is no request.
pub(super) enum Ended {
    /// Nothing to say: idle too long, closed by the client, draining, or broken off inside a message.
    Quietly,
    Refused(Rejection),
}

/// A readiness wait that survives from one use to the next: it watches for the client's leaving during an exchange and
/// is then the wait for the next request.
pub(super) type Watch<'a, F> = Pin<&'a mut Option<F>>;

pub(super) fn poll_readable<F>(mut watch: Watch<'_, F>, arm: impl FnOnce() -> F, cx: &mut Context<'_>) -> Poll<()>
where
    F: Future<Output = io::Result<()>>,
{
    if watch.is_none() {
        watch.set(Some(arm()));
    }
    let Some(armed) = watch.as_mut().as_pin_mut() else { return Poll::Pending };
    match armed.poll(cx) {
        // An error shows again, and better, in the read that follows.
        Poll::Ready(_) => {
            watch.set(None);
            Poll::Ready(())
        }
        Poll::Pending => Poll::Pending,
    }
}

/// Bytes that were read and not yet used.
#[derive(Default)]
pub(super) struct Input {
    pub(super) bytes: Vec<u8>,
}

impl Input {
    /// Reads what has arrived into the buffer; `WouldBlock` when nothing has.
    pub(super) fn read_from(&mut self, client: &Client) -> io::Result<usize> {
        if self.bytes.capacity() == 0 {
            self.bytes = buffers::take_large();
        } else if self.bytes.len() == self.bytes.capacity() {
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

pub(super) struct Reader<'a, 'w, F> {
    pub(super) client: &'a Client,
    pub(super) input: &'a mut Input,
    pub(super) watch: Watch<'w, F>,
    pub(super) peer: SocketAddr,
}

impl<F: Future<Output = io::Result<()>>> Reader<'_, '_, F> {
    /// The next request and whether it is HTTP/1.0 and wants to keep the connection.
    pub(super) async fn request(&mut self, first: bool, arm: impl Fn() -> F) -> Result<(Request, bool, bool), Ended> {
        let length = self.head(first, &arm).await?;
        let limits = &self.client.shard.limits;
        let parsed = request::parse(&self.input.bytes[..length], limits.headers_max);
        let head = parsed.map_err(|refusal| self.refused(refusal))?;
        self.input.consume(length);
        let RequestHead { method, target, http10, keep_alive, expects_continue, framing, head } = head;
        let body = match framing {
            RequestFraming::Length(0) => Bytes::new(),
            RequestFraming::Length(length) if length > limits.body_bytes_max as u64 => return Err(self.too_large()),
            RequestFraming::Length(length) if self.input.bytes.len() as u64 >= length => {
                let body = Bytes::copy_from_slice(&self.input.bytes[..length as usize]);
                self.input.consume(length as usize);
                body
            }
            framing => {
                if expects_continue && self.input.bytes.is_empty() {
                    let go_on = Bytes::from_static(b"HTTP/1.1 100 Continue\r\n\r\n");
                    self.client.write_all(go_on).await.map_err(|_| Ended::Quietly)?;
                }
                // Boxed: few requests come in several reads, and their state would sit in every connection's task.
                match framing {
                    RequestFraming::Length(length) => Box::pin(self.sized_body(length as usize, &arm)).await?,
                    RequestFraming::Chunked => Box::pin(self.chunked_body(&arm)).await?,
                }
            }
        };
        let request = Request { method, target, head, body, peer: self.peer, received: Instant::now() };
        Ok((request, http10, keep_alive))
    }

    /// Reads until a whole head is in the buffer; returns its length. The idle wait before its first byte holds no
    /// buffer and may be drained.
    async fn head(&mut self, first: bool, arm: &impl Fn() -> F) -> Result<usize, Ended> {
        let limits = &self.client.shard.limits;
        let (head_timeout, head_bytes_max) = (limits.head_timeout, limits.head_bytes_max);
        let mut scan = HeadScan::default();
        let mut deadline_ms = None;
        loop {
            while self.input.bytes.starts_with(b"\r\n") {
                // Empty lines before a request line are ignored (RFC 9112, section 2.2).
                self.input.consume(2);
                scan = HeadScan::default();
            }
            let found = scan.end(&self.input.bytes).map_err(|malformed| self.refused(malformed.into()))?;
            let length = found.unwrap_or(self.input.bytes.len());
            if length > head_bytes_max || (found.is_none() && length == head_bytes_max) {
                return Err(self.head_too_large());
            }
            if let Some(length) = found {
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
            let ready = self.readable(limit, arm).await;
            self.client.task.set_idle(false);
            match ready {
                Ok(()) => {}
                // A request may have arrived in the same moment: it is served, the connection closes after it.
                Err(Fired::Drained) if self.input.read_from(self.client).is_ok_and(|received| received > 0) => continue,
                Err(Fired::Expired) if !idle => return Err(self.timed_out("the request head did not arrive in time")),
                Err(_) => return Err(Ended::Quietly),
            }
            match self.input.read_from(self.client) {
                Ok(0) => return Err(Ended::Quietly),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return Err(Ended::Quietly),
            }
        }
    }

    /// Reads a body of known length straight into its own buffer, which grows with what arrives, not with the claim.
    async fn sized_body(&mut self, length: usize, arm: &impl Fn() -> F) -> Result<Bytes, Ended> {
        let mut body = Vec::with_capacity(length.min(BODY_BYTES_FIRST));
        body.extend_from_slice(&self.input.bytes);
        self.input.consume(body.len());
        let mut turn = 0;
        while body.len() < length {
            if body.len() == body.capacity() {
                body.reserve_exact(body.len().min(length - body.len()));
            }
            match self.client.stream.try_receive(&mut body) {
                Ok(0) => return Err(Ended::Quietly),
                Ok(received) => turn += received,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.body_readable(arm).await?;
                    turn = 0;
                }
                Err(_) => return Err(Ended::Quietly),
            }
            if turn >= BYTES_PER_TURN && body.len() < length {
                self.body_readable(arm).await?;
                turn = 0;
            }
        }
        if body.len() > length {
            // The allocator gave more room than asked for and the next request's first bytes are in it.
            self.input.bytes = buffers::take_large();
            self.input.bytes.extend_from_slice(&body[length..]);
            body.truncate(length);
        }
        Ok(Bytes::from(body))
    }

    async fn chunked_body(&mut self, arm: &impl Fn() -> F) -> Result<Bytes, Ended> {
        let body_bytes_max = self.client.shard.limits.body_bytes_max;
        let mut chunked = Chunked::default();
        let mut body = Vec::new();
        let mut turn = 0;
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
            // Only now, with every byte at hand looked at, is it certain that more must come.
            if turn >= BYTES_PER_TURN {
                self.body_readable(arm).await?;
                turn = 0;
            }
            match self.input.read_from(self.client) {
                Ok(0) => return Err(Ended::Quietly),
                Ok(received) => turn += received,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => turn = BYTES_PER_TURN,
                Err(_) => return Err(Ended::Quietly),
            }
        }
    }

    async fn body_readable(&mut self, arm: &impl Fn() -> F) -> Result<(), Ended> {
        match self.readable(self.client.shard.limits.body_timeout, arm).await {
            Ok(()) => Ok(()),
            Err(Fired::Expired) => Err(self.timed_out("the request body stopped arriving")),
            Err(_) => Err(Ended::Quietly),
        }
    }

    async fn readable(&mut self, limit: Duration, arm: &impl Fn() -> F) -> Result<(), Fired> {
        let watch = &mut self.watch;
        let ready = std::future::poll_fn(|cx| poll_readable(watch.as_mut(), arm, cx));
        self.client.task.within(Some(limit), ready).await
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
