//! The TLS handshake of a client connection, within the time a request head has. It owns the decision what a peer that
//! does not speak TLS is; it never answers anything by itself but TLS alerts.

use std::fmt;
use std::io;
use std::pin::pin;

use crate::clock::{Fired, Slot};
use crate::net::{Peeked, Stream};
use crate::shard::Shard;

/// Why there is no session.
#[derive(Debug)]
pub(super) enum Failure {
    /// The peer has sent the beginning of a plain HTTP request.
    PlainHttp,
    /// It took too long.
    Late,
    Broken(io::Error),
    /// The shard ends.
    Stopped,
}

impl fmt::Display for Failure {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::PlainHttp => out.write_str("the client speaks plain HTTP"),
            Failure::Late => out.write_str("the client took too long"),
            Failure::Broken(error) => error.fmt(out),
            Failure::Stopped => out.write_str("the process ends"),
        }
    }
}

/// Puts TLS on a fresh connection of a listener that has it.
pub(super) async fn run(shard: &Shard, stream: &Stream) -> Result<(), Failure> {
    let slot = Slot::new();
    // Where too many connections are half open, those that are in their handshake count among them.
    slot.head_is_open();
    let outcome = slot.within(Some(shard.limits.head_timeout), pin!(secure(shard, stream))).await;
    outcome.unwrap_or_else(|fired| Err(if fired == Fired::Stopped { Failure::Stopped } else { Failure::Late }))
}

async fn secure(shard: &Shard, stream: &Stream) -> Result<(), Failure> {
    let Some(tls) = &shard.tls else { return Ok(()) };
    stream.readable().await.map_err(Failure::Broken)?;
    // Every handshake begins with a record of type 22, every HTTP method with a letter.
    if let (Peeked::Bytes, b'A'..=b'Z') = stream.first_byte() {
        return Err(Failure::PlainHttp);
    }
    let connection = tls.accept().map_err(|error| Failure::Broken(io::Error::other(error)))?;
    stream.secure(connection).await.map_err(Failure::Broken)
}
