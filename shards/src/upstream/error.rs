//! What can go wrong towards an upstream, in words an operator understands. It decides one thing only: whether the
//! engine itself may send the request a second time.

use std::fmt;
use std::io;

/// What happened.
#[derive(Debug)]
pub enum UpstreamErrorKind {
    /// No connection: refused, unreachable, out of descriptors.
    Connect(io::Error),
    ConnectTimeout,
    /// The request could not be written and no answer explains why.
    Send(io::Error),
    /// The upstream stopped reading the request.
    SendStalled,
    /// Nothing came within the first-byte limit.
    FirstByteTimeout,
    /// The answer stopped coming for longer than the idle limit.
    IdleTimeout,
    /// Closed cleanly before the end of the answer's head.
    ClosedBeforeHead,
    /// Broken before the end of the answer's head.
    ResetBeforeHead(io::Error),
    /// Closed cleanly inside the answer's body.
    ClosedInBody,
    /// Broken inside the answer's body.
    ResetInBody(io::Error),
    /// The body ended cleanly before what its observer takes for its end.
    Unfinished,
    /// The answer breaks HTTP's rules; the text says which.
    BadResponse(&'static str),
    /// The answer, or its head, is larger than allowed.
    TooLarge,
}

/// A failed upstream exchange.
#[derive(Debug)]
pub struct UpstreamError {
    pub kind: UpstreamErrorKind,
    /// The request went out on a connection that had served others before.
    pub reused_connection: bool,
    /// At least one byte of an answer had arrived.
    pub response_started: bool,
}

impl UpstreamError {
    /// Where in the exchange it failed: `connect`, `send`, `first_byte`, `head` or `body`.
    pub fn phase(&self) -> &'static str {
        match self.kind {
            UpstreamErrorKind::Connect(_) | UpstreamErrorKind::ConnectTimeout => "connect",
            UpstreamErrorKind::Send(_) | UpstreamErrorKind::SendStalled => "send",
            UpstreamErrorKind::FirstByteTimeout => "first_byte",
            UpstreamErrorKind::ClosedBeforeHead | UpstreamErrorKind::ResetBeforeHead(_) if !self.response_started => {
                "first_byte"
            }
            UpstreamErrorKind::ClosedBeforeHead | UpstreamErrorKind::ResetBeforeHead(_) => "head",
            UpstreamErrorKind::BadResponse(_) => "head",
            UpstreamErrorKind::IdleTimeout
            | UpstreamErrorKind::ClosedInBody
            | UpstreamErrorKind::ResetInBody(_)
            | UpstreamErrorKind::Unfinished
            | UpstreamErrorKind::TooLarge => "body",
        }
    }

    /// No connection came about: nobody has seen the request.
    pub fn is_unreached(&self) -> bool {
        matches!(self.kind, UpstreamErrorKind::Connect(_) | UpstreamErrorKind::ConnectTimeout)
    }

    /// Nobody listens there, which is known at once.
    pub fn is_refused(&self) -> bool {
        matches!(&self.kind, UpstreamErrorKind::Connect(cause) if cause.kind() == io::ErrorKind::ConnectionRefused)
    }

    /// A reused connection that dies before any byte of an answer was most likely closed by the upstream's keep-alive
    /// timer: the request was not processed, and a fresh connection may carry it once more (RFC 9112, section 9.3.1).
    pub(super) fn is_stale_connection(&self) -> bool {
        let died = matches!(
            self.kind,
            UpstreamErrorKind::Send(_) | UpstreamErrorKind::ClosedBeforeHead | UpstreamErrorKind::ResetBeforeHead(_)
        );
        died && self.reused_connection && !self.response_started
    }
}

impl fmt::Display for UpstreamError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.kind {
            UpstreamErrorKind::Connect(error) => write!(out, "cannot connect: {error}"),
            UpstreamErrorKind::ConnectTimeout => out.write_str("no connection within the connect timeout"),
            UpstreamErrorKind::Send(error) => write!(out, "the request could not be sent: {error}"),
            UpstreamErrorKind::SendStalled => out.write_str("the upstream stopped reading the request"),
            UpstreamErrorKind::FirstByteTimeout => out.write_str("no answer within the first-byte timeout"),
            UpstreamErrorKind::IdleTimeout => out.write_str("the answer stopped for longer than the idle timeout"),
            UpstreamErrorKind::ClosedBeforeHead => out.write_str("the connection was closed before an answer"),
            UpstreamErrorKind::ResetBeforeHead(error) => write!(out, "the connection broke before an answer: {error}"),
            UpstreamErrorKind::ClosedInBody => out.write_str("the connection was closed inside the answer"),
            UpstreamErrorKind::ResetInBody(error) => write!(out, "the connection broke inside the answer: {error}"),
            UpstreamErrorKind::Unfinished => out.write_str("the answer ended before it was finished"),
            UpstreamErrorKind::BadResponse(reason) => write!(out, "the answer is not valid HTTP: {reason}"),
            UpstreamErrorKind::TooLarge => out.write_str("the answer is larger than allowed"),
        }
    }
}

impl std::error::Error for UpstreamError {}
