//! What the end of an attempt says about its worker: the session that is bound to it, and the circuit breaker. Every
//! attempt is judged once, at the end of its answer, whatever the endpoint; one that is dropped unjudged (its client
//! left) says nothing.

use std::io;
use std::time::Duration;

use http::StatusCode;
use infera_shards::{UpstreamError, UpstreamErrorKind, UpstreamResponse};
use jiff::Timestamp;
use jiff::fmt::rfc2822::DateTimeParser;
use tracing::{info, warn};

use super::cleanup::ShardSide;
use super::keys::OutboundHeaders;
use super::pick::Picked;
use super::shared::Shared;
use crate::breaker::Change;
use crate::fleet::Worker;
use crate::load::QueuedBlocks;

/// How an answer of a worker counts before its body is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// Judged by the end of its body.
    Fine,
    /// The client's own mistake: says nothing about the worker.
    Refused,
    /// The worker does not take this router's key. Its words are not for the client, whose key that is not: they may
    /// quote it. No fault: a path that wants another key must not open a worker for all others.
    KeyRefused,
    /// The worker is alive and wants to be left alone for a while, if it said for how long.
    Overloaded(Option<Duration>),
    Fault,
}

impl Standing {
    /// A 429 is no fault, nor is a 503 that says when to come back; all other 5xx are.
    pub fn of(response: &UpstreamResponse, outbound: &OutboundHeaders) -> Self {
        let retry_after = || retry_after(response.head.get("retry-after")?, response.head.get("date"));
        match response.status {
            StatusCode::TOO_MANY_REQUESTS => Standing::Overloaded(retry_after()),
            StatusCode::SERVICE_UNAVAILABLE => match retry_after() {
                Some(delay) => Standing::Overloaded(Some(delay)),
                None => Standing::Fault,
            },
            StatusCode::UNAUTHORIZED if outbound.has_worker_key() => Standing::KeyRefused,
            status if status.is_client_error() => Standing::Refused,
            // Also beyond 599, which stands for nothing else (RFC 9110, section 15).
            status if status.as_u16() >= 500 => Standing::Fault,
            _ => Standing::Fine,
        }
    }

    /// Whether another worker may do better.
    pub fn is_worth_a_retry(self) -> bool {
        matches!(self, Standing::Overloaded(_) | Standing::KeyRefused | Standing::Fault)
    }
}

/// `Retry-After`: seconds, or a date by the clock of the answer's `Date`, else by ours. One that is over asks for nothing.
fn retry_after(value: &[u8], date: Option<&[u8]>) -> Option<Duration> {
    let text = std::str::from_utf8(value).ok()?.trim();
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Some(Duration::from_secs(text.parse().unwrap_or(u64::MAX)));
    }
    let read = |text: &[u8]| DateTimeParser::new().parse_timestamp(text).ok();
    let until = read(text.as_bytes())?;
    let now = date.and_then(read).unwrap_or_else(Timestamp::now);
    Some(Duration::try_from(until.duration_since(now)).unwrap_or_default())
}

impl Picked {
    /// The worker has begun to answer well: the request's session stays with it.
    pub fn served(&self) {
        if let Some(session) = &self.session {
            session.served();
        }
    }

    /// The worker has computed the prompt: it waits for it no longer.
    pub fn prompt_done(&self) {
        drop(self.take_queued());
    }

    /// For whoever sees that moment.
    pub fn take_queued(&self) -> Option<QueuedBlocks> {
        self.booking.as_ref()?.take_queued()
    }

    /// The worker has answered the request to its end: its events may show the prompt from now on.
    pub fn completed(&self) {
        if let Some(booking) = &self.booking {
            booking.note_complete();
        }
    }

    /// The worker has answered to the end, and well.
    pub fn succeeded(&self) {
        let mut change = self.breaker.succeeded(&self.worker.health, self.probe.take());
        if self.is_in_need {
            change = change.or(self.breaker.succeeded_in_need(&self.worker.health));
        }
        tell(&self.worker, change);
    }

    /// The worker has failed the request: its session is free to go elsewhere. It may fail it by its status and by the end
    /// of its body, which is one fault.
    pub fn failed(&self, shared: &Shared) {
        if self.has_failed.replace(true) {
            return;
        }
        self.free_session();
        let change = self.breaker.faulted(&self.worker.health, self.probe.take(), shared.now_ms());
        tell(&self.worker, change);
    }

    /// The exchange with the worker has failed. Want of descriptors or ports of our own is not the worker's fault.
    pub fn failed_by(&self, shared: &Shared, error: &UpstreamError) {
        match &error.kind {
            UpstreamErrorKind::Connect(cause) if is_our_own(cause) => self.free_session(),
            _ => self.failed(shared),
        }
    }

    /// The worker's answer is one that ends the attempt by its status alone.
    pub fn answered(&self, shared: &Shared, standing: Standing) {
        match standing {
            Standing::Fine | Standing::Refused => {}
            Standing::Fault => self.failed(shared),
            Standing::KeyRefused => {
                warn!(worker = &*self.worker.id, "a worker does not accept this router's key (--worker-api-key-file)");
                self.free_session();
                drop(self.probe.take());
            }
            Standing::Overloaded(delay) => {
                self.free_session();
                drop(self.probe.take());
                if let Some(delay) = delay {
                    self.breaker.overloaded(&self.worker.health, delay, shared.now_ms());
                }
            }
        }
    }

    fn free_session(&self) {
        if let Some(session) = &self.session {
            session.failed();
        }
    }
}

/// A leg that ends when its request is over can still say that its worker is to be left alone.
pub(super) fn late(side: &ShardSide, worker: &Worker, standing: Standing) {
    let (breaker, health, now_ms) = (side.live.get().breaker, &worker.health, side.shared.now_ms());
    match standing {
        Standing::Fault => tell(worker, breaker.faulted(health, None, now_ms)),
        Standing::Overloaded(Some(delay)) => breaker.overloaded(health, delay, now_ms),
        Standing::Fine | Standing::Refused | Standing::KeyRefused | Standing::Overloaded(None) => {}
    }
}

fn tell(worker: &Worker, change: Option<Change>) {
    let worker = &*worker.id;
    match change {
        Some(Change::Opened { for_ms }) => {
            warn!(worker, for_ms, "a worker has failed too often in a row and gets no requests for a while");
        }
        Some(Change::Closed) => info!(worker, "a worker that had failed serves again"),
        None => {}
    }
}

fn is_our_own(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let ours = [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM, Errno::ADDRNOTAVAIL];
    error.raw_os_error().is_some_and(|code| ours.iter().any(|errno| errno.raw_os_error() == code))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_delay_is_read_as_seconds_or_as_a_date() {
        let seconds = |value: &[u8], date: Option<&[u8]>| retry_after(value, date).map(|delay| delay.as_secs());
        assert_eq!(seconds(b" 7 ", None), Some(7));
        assert_eq!(seconds(b"0", None), Some(0));
        assert_eq!(seconds(b"99999999999999999999999", None), Some(u64::MAX));
        let date: &[u8] = b"Wed, 21 Oct 2026 07:28:00 GMT";
        assert_eq!(seconds(date, Some(b"Wed, 21 Oct 2026 07:27:18 GMT")), Some(42));
        assert_eq!(seconds(date, Some(b"Wed, 21 Oct 2026 07:28:01 GMT")), Some(0));
        // Without the worker's clock ours counts.
        assert_eq!(seconds(b"Sat, 01 Jan 2000 00:00:00 GMT", None), Some(0));
        assert!(seconds(b"Fri, 01 Jan 2100 00:00:00 GMT", Some(b"now")) > Some(1_000_000));
        for odd in [&b"-1"[..], b"+1", b"1.5", b"1, 2", b"", b"\xff", b"tomorrow"] {
            assert_eq!(seconds(odd, None), None);
        }
    }

    #[test]
    fn want_of_descriptors_is_our_own() {
        assert!(is_our_own(&io::Error::from_raw_os_error(rustix::io::Errno::MFILE.raw_os_error())));
        assert!(!is_our_own(&io::Error::from_raw_os_error(rustix::io::Errno::CONNREFUSED.raw_os_error())));
        assert!(!is_our_own(&io::Error::other("text")));
    }
}
