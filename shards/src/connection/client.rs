//! The client's end of a connection while an answer is written: whole writes with a stall limit, counted. It never
//! reads.

use std::cell::Cell;
use std::pin::pin;
use std::rc::Rc;

use crate::buffers;
use crate::clock::{Fired, Slot};
use crate::net::{IoBuf, Stream};
use crate::shard::Shard;

/// The client left, or stopped reading for too long: nothing can be sent to it any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientGone;

impl std::fmt::Display for ClientGone {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("the client has left or stopped reading")
    }
}

impl std::error::Error for ClientGone {}

pub(crate) struct Client {
    pub(super) stream: Stream,
    pub(super) shard: Rc<Shard>,
    /// The connection task's own waits: head, body, keep-alive, stop.
    pub(super) task: Slot,
    /// Writes wait elsewhere in the task's tree, possibly under another waker.
    writes: Slot,
    /// A write failed, or made no progress for too long.
    is_lost: Cell<bool>,
}

impl Client {
    pub(super) fn new(shard: Rc<Shard>, stream: Stream) -> Client {
        Client { stream, shard, task: Slot::new(), writes: Slot::new(), is_lost: Cell::new(false) }
    }

    pub(super) fn is_lost(&self) -> bool {
        self.is_lost.get()
    }

    /// Writes all of `buffer`, which is whole again afterwards unless this fails or is dropped. The stall limit starts
    /// anew with each progress.
    pub(super) async fn write_all<B: IoBuf + Default>(&self, buffer: &mut B) -> Result<(), ClientGone> {
        let stall = self.shard.limits.write_stall_timeout;
        let mut sent = 0;
        while sent < buffer.bytes_init() {
            let write = pin!(self.stream.send(std::mem::take(buffer).slice(sent..)));
            let (result, rest) = self.writes.within(Some(stall), write).await.map_err(|fired| {
                self.is_lost.set(fired == Fired::Expired);
                ClientGone
            })?;
            *buffer = rest.into_inner();
            match result {
                Ok(0) | Err(_) => {
                    self.is_lost.set(true);
                    return Err(ClientGone);
                }
                Ok(written) => {
                    sent += written;
                    self.shard.counters.bytes_to_client.add(written as u64);
                }
            }
        }
        Ok(())
    }

    /// Writes a buffer of the shard's and gives it back.
    pub(super) async fn write_pooled(&self, mut buffer: Vec<u8>) -> Result<(), ClientGone> {
        self.write_all(&mut buffer).await?;
        buffers::give(buffer);
        Ok(())
    }
}
