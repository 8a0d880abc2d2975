//! Session affinity: later turns of a session go where its earlier ones were served. Owns the names of
//! sessions, the table of bindings and the lease of a turn; never picks a target and never does IO.
//!
//! A session is bound when a target has *served* a turn, not when one was chosen. Until then the first pick is
//! a claim: turns that come at the same moment follow it, and it is gone when the turn fails. A binding that
//! cannot be followed (its target left, changed, failed or is not among the candidates) is replaced once, and
//! stays where the replacement served. Hashing sessions to targets was refused: it moves sessions whenever a
//! worker joins, and it cannot follow a failure.

mod table;

use std::sync::Arc;

use xxhash_rust::xxh3::Xxh3;

pub use table::{Counts, Lease, SessionTable};

use crate::limits::SESSION_NAME_BYTES_MAX;
use crate::worker::Role;

/// Header that names a session, unless others are configured.
pub const DEFAULT_HEADER: &str = "x-dynamo-session-id";

/// `--session-affinity`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SessionAffinity {
    /// The header is not read.
    #[default]
    Off,
    /// Prefill picks only.
    Prefill,
    /// Prefill, decode and mixed picks.
    Both,
}

impl SessionAffinity {
    pub const fn as_str(self) -> &'static str {
        match self {
            SessionAffinity::Off => "off",
            SessionAffinity::Prefill => "prefill",
            SessionAffinity::Both => "both",
        }
    }

    /// Whether picks for this role follow sessions.
    pub const fn covers(self, role: Role) -> bool {
        match self {
            SessionAffinity::Off => false,
            SessionAffinity::Prefill => matches!(role, Role::Prefill),
            SessionAffinity::Both => true,
        }
    }
}

/// Why a request with a session header has no session. It is then routed as if it had none: a bad name costs
/// locality, never an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoSession {
    Absent,
    Empty,
    TooLong,
    /// Bytes outside of visible ASCII and space.
    NotAscii,
    /// Several values that differ.
    Ambiguous,
}

impl NoSession {
    /// As a label and in explanations.
    pub const fn as_str(self) -> &'static str {
        match self {
            NoSession::Absent => "absent",
            NoSession::Empty => "empty",
            NoSession::TooLong => "too_long",
            NoSession::NotAscii => "not_ascii",
            NoSession::Ambiguous => "ambiguous",
        }
    }
}

/// The session's name among the values of its headers, in the order in which the headers are configured.
pub fn session_name<'a>(values: impl Iterator<Item = &'a [u8]>) -> Result<&'a [u8], NoSession> {
    let mut name: Option<&[u8]> = None;
    for value in values {
        let value = value.trim_ascii();
        match name {
            None => name = Some(value),
            Some(first) if first == value => {}
            Some(_) => return Err(NoSession::Ambiguous),
        }
    }
    match name {
        None => Err(NoSession::Absent),
        Some([]) => Err(NoSession::Empty),
        Some(name) if name.len() > SESSION_NAME_BYTES_MAX => Err(NoSession::TooLong),
        Some(name) if !name.iter().all(|byte| (b' '..=b'~').contains(byte)) => Err(NoSession::NotAscii),
        Some(name) => Ok(name),
    }
}

/// A session of one model and role, as 128 bits. The name itself is not kept, so that the table has a fixed
/// size and no log or dump can show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionKey(u128);

impl SessionKey {
    /// `secret` is random per process, so that nobody outside can construct names that collide.
    pub fn new(secret: u64, model: &str, role: Role, name: &[u8]) -> Self {
        let mut hasher = Xxh3::with_seed(secret);
        hasher.update(&(model.len() as u64).to_le_bytes());
        hasher.update(model.as_bytes());
        hasher.update(role.as_str().as_bytes());
        hasher.update(&[0]);
        hasher.update(name);
        Self(hasher.digest128())
    }
}

/// Seconds on a monotonic clock; a lease reads it when it is dropped, which is no call of the pure code's own.
pub type ClockSeconds = Arc<dyn Fn() -> u32 + Send + Sync>;

#[cfg(test)]
mod tests;
