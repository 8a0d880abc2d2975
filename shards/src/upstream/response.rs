//! An answer of an upstream: its head, and its body piece by piece in the framing that its reader needs. It owns the
//! connection until the body has ended, and gives it back to the pool then and only then.

use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;

use super::connection::{Connection, Trouble};
use super::{ParsedHead, Shared, UpstreamError, UpstreamErrorKind};
use crate::buffers;
use crate::connection::{BodyObserver, IgnoreBody};
use crate::http1::head::Head;
use crate::http1::response::Framing;
use crate::http1::{Malformed, write};

/// Framing of the pieces handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BodyShape {
    /// Byte for byte as they came, but for trailer lines, which are left out.
    AsIs,
    /// Payload alone.
    Plain,
    /// Payload in chunks of our own.
    Chunks,
}

/// An answer whose head has arrived. Dropping it before the body's end closes the connection.
pub struct UpstreamResponse {
    pub status: StatusCode,
    pub head: Head,
    content_length: Option<u64>,
    framing: Framing,
    keep_alive: bool,
    /// A byte of the body has come. Until then the first-byte limit holds: engines send their head at once and then
    /// queue the request.
    has_begun: bool,
    /// `None` only after the end of `drop`.
    connection: Option<Box<Connection>>,
    shared: Rc<Shared>,
}

impl UpstreamResponse {
    pub(super) fn new(
        shared: Rc<Shared>,
        mut connection: Box<Connection>,
        head: ParsedHead,
        keep_alive: bool,
    ) -> UpstreamResponse {
        connection.buffer.drain(..head.length);
        connection.release_if_empty();
        let parsed = head.parsed;
        UpstreamResponse {
            status: parsed.status,
            head: parsed.head,
            content_length: parsed.content_length,
            framing: parsed.framing,
            keep_alive,
            has_begun: false,
            connection: Some(connection),
            shared,
        }
    }

    /// Content-Length as the upstream declared it.
    pub fn content_length(&self) -> Option<u64> {
        self.content_length
    }

    /// Whether the connection had served other exchanges before this one.
    pub fn reused_connection(&self) -> bool {
        self.connection.as_ref().is_some_and(|connection| connection.reused)
    }

    /// What opening the connection took; absent where it had served other exchanges before this one.
    pub fn connect_time(&self) -> Option<Duration> {
        self.connection.as_ref().filter(|connection| !connection.reused).map(|connection| connection.connect_time)
    }

    /// Waits until the first byte of the body is at hand, or the body has ended. Nothing is consumed, and the head may
    /// still be thrown away afterwards: a caller that has promised nothing to its client yet can go elsewhere.
    pub async fn body_started(&mut self) -> Result<(), UpstreamError> {
        let limit = self.limit();
        if self.framing.is_done() || self.has_buffered() {
            return Ok(());
        }
        let Some(connection) = self.connection.as_mut() else { return Ok(()) };
        match connection.fill(limit).await {
            Ok(0) if matches!(self.framing, Framing::Close { .. }) => Ok(()),
            Ok(0) => Err(self.failed(UpstreamErrorKind::ClosedInBody)),
            Ok(_) => Ok(()),
            Err(Trouble::Timeout) => Err(self.late()),
            Err(Trouble::Broken(error)) => Err(self.failed(UpstreamErrorKind::ResetInBody(error))),
        }
    }

    /// Longest wait for the next byte.
    fn limit(&self) -> Option<Duration> {
        let timeouts = self.shared.timeouts.get();
        if self.has_begun { timeouts.idle } else { timeouts.first_byte }
    }

    fn late(&mut self) -> UpstreamError {
        self.failed(if self.has_begun { UpstreamErrorKind::IdleTimeout } else { UpstreamErrorKind::FirstByteTimeout })
    }

    /// The body ended as its framing says, but not as its observer expects.
    pub(crate) fn unfinished(&mut self) -> UpstreamError {
        self.failed(UpstreamErrorKind::Unfinished)
    }

    /// Reads the whole body, without its framing.
    ///
    /// # Errors
    /// [`UpstreamErrorKind::TooLarge`] beyond `max` bytes; the connection is closed then.
    pub async fn collect(mut self, max: usize) -> Result<Bytes, UpstreamError> {
        let declared = self.content_length.unwrap_or(0);
        if !self.framing.is_done() && declared > max as u64 {
            return Err(self.failed(UpstreamErrorKind::TooLarge));
        }
        let mut body = Vec::with_capacity(declared.min(1 << 20) as usize);
        while let Some(piece) = self.next_piece(BodyShape::Plain, &mut IgnoreBody).await? {
            if body.len() + piece.len() > max {
                return Err(self.failed(UpstreamErrorKind::TooLarge));
            }
            body.extend_from_slice(&piece);
            buffers::give(piece);
        }
        Ok(Bytes::from(body))
    }

    pub(crate) fn framing(&self) -> &Framing {
        &self.framing
    }

    /// Body bytes are at hand without waiting.
    pub(crate) fn has_buffered(&self) -> bool {
        !self.framing.is_done() && self.connection.as_ref().is_some_and(|connection| !connection.buffer.is_empty())
    }

    /// Everything sent so far ends with a whole chunk.
    pub(crate) fn is_at_chunk_boundary(&self) -> bool {
        matches!(&self.framing, Framing::Chunked(chunked) if chunked.is_at_boundary())
    }

    /// The next piece in that shape, possibly empty; `None` after the end. Waits only when nothing is buffered.
    pub(crate) async fn next_piece(
        &mut self,
        shape: BodyShape,
        observer: &mut dyn BodyObserver,
    ) -> Result<Option<Vec<u8>>, UpstreamError> {
        if self.framing.is_done() {
            return Ok(None);
        }
        let limit = self.limit();
        let Some(connection) = self.connection.as_mut() else { return Ok(None) };
        if connection.buffer.is_empty() {
            match connection.fill(limit).await {
                Ok(0) => return self.end_of_stream(shape).map(Some),
                Ok(_) => {}
                Err(Trouble::Timeout) => return Err(self.late()),
                Err(Trouble::Broken(error)) => return Err(self.failed(UpstreamErrorKind::ResetInBody(error))),
            }
        }
        self.has_begun = true;
        let mut piece = std::mem::take(&mut connection.buffer);
        match take_body(&mut self.framing, &mut piece, shape, observer) {
            Ok(within) => {
                // Bytes after the end belong to no request of ours: the connection cannot be trusted any more.
                self.keep_alive &= within;
                Ok(Some(piece))
            }
            Err(malformed) => Err(self.failed(UpstreamErrorKind::BadResponse(malformed.0))),
        }
    }

    fn end_of_stream(&mut self, shape: BodyShape) -> Result<Vec<u8>, UpstreamError> {
        match &mut self.framing {
            Framing::Close { closed } => {
                *closed = true;
                let end: &[u8] = if shape == BodyShape::Chunks { b"0\r\n\r\n" } else { b"" };
                Ok(end.to_vec())
            }
            _ => Err(self.failed(UpstreamErrorKind::ClosedInBody)),
        }
    }

    fn failed(&mut self, kind: UpstreamErrorKind) -> UpstreamError {
        self.keep_alive = false;
        UpstreamError { kind, reused_connection: self.reused_connection(), response_started: true }
    }
}

impl Drop for UpstreamResponse {
    fn drop(&mut self) {
        let Some(connection) = self.connection.take() else { return };
        if self.framing.is_done() && self.keep_alive && connection.buffer.is_empty() {
            self.shared.pool.give(connection);
        }
    }
}

/// Turns received bytes into the wanted shape, in place where possible. `Ok(false)`: there were bytes after the end.
fn take_body(
    framing: &mut Framing,
    piece: &mut Vec<u8>,
    shape: BodyShape,
    observer: &mut dyn BodyObserver,
) -> Result<bool, Malformed> {
    let received = piece.len();
    let within = match framing {
        Framing::Nothing => {
            piece.clear();
            received == 0
        }
        Framing::Length(left) => {
            let taken = (received as u64).min(*left) as usize;
            *left -= taken as u64;
            piece.truncate(taken);
            observer.data(piece);
            taken == received
        }
        Framing::Close { .. } => {
            observer.data(piece);
            true
        }
        Framing::Chunked(chunked) if shape == BodyShape::Plain => {
            let mut payloads = Vec::new();
            let fed = chunked.feed(piece, |range| payloads.push(range))?;
            let mut kept = 0;
            for range in payloads {
                let length = range.len();
                piece.copy_within(range, kept);
                kept += length;
            }
            piece.truncate(kept);
            observer.data(piece);
            fed.consumed == received
        }
        Framing::Chunked(chunked) => {
            let bytes: &[u8] = piece;
            let fed = chunked.feed(bytes, |range| observer.data(&bytes[range]))?;
            piece.truncate(fed.trailer_at.unwrap_or(fed.consumed));
            if fed.trailer_at.is_some() && chunked.is_done() {
                piece.extend_from_slice(b"\r\n");
            }
            fed.consumed == received
        }
    };
    if shape == BodyShape::Chunks && !piece.is_empty() {
        let mut chunk = buffers::take_large();
        write::chunk_start(&mut chunk, piece.len());
        chunk.extend_from_slice(piece);
        chunk.extend_from_slice(b"\r\n");
        buffers::give(std::mem::replace(piece, chunk));
    }
    Ok(within)
}
