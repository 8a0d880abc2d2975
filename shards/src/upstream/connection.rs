//! One connection to an upstream: buffered reads and whole writes with their time limits. It owns the socket and the
//! read buffer, and never knows whose exchange it carries.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::time::Duration;

use bytes::Bytes;

use crate::buffers::{self, LARGE_BYTES, SMALL_BYTES};
use crate::clock::Slot;
use crate::net::{IoBuf, IoBufMut, Stream};
use crate::tls::TlsName;

pub(crate) struct Connection {
    pub(super) stream: Stream,
    pub(super) address: SocketAddr,
    /// The name that its certificate was checked for; absent without TLS.
    pub(super) tls: Option<TlsName>,
    /// It has carried an exchange before this one.
    pub(super) reused: bool,
    /// What opening it took.
    pub(super) connect_time: Duration,
    /// A byte of the current exchange's answer has arrived.
    pub(super) answered: bool,
    slot: Slot,
    /// Unconsumed bytes; has capacity only while there are some or a read is under way.
    pub(super) buffer: Vec<u8>,
    /// The last read filled its buffer: more is probably waiting.
    bulk: bool,
}

/// Why a read or write ended without success.
#[derive(Debug)]
pub(super) enum Trouble {
    Timeout,
    Broken(io::Error),
}

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Trouble {
        Trouble::Broken(error)
    }
}

impl Connection {
    pub(super) fn new(stream: Stream, address: SocketAddr, tls: Option<TlsName>, connect_time: Duration) -> Connection {
        Connection {
            stream,
            address,
            tls,
            reused: false,
            connect_time,
            answered: false,
            slot: Slot::new(),
            buffer: Vec::new(),
            bulk: false,
        }
    }

    /// Appends at least one byte to the buffer; `Ok(0)` = end of stream. After an error the connection is of no use.
    pub(super) async fn fill(&mut self, limit: Option<Duration>) -> Result<usize, Trouble> {
        let received = self.fill_once(limit).await?;
        self.answered |= received > 0;
        Ok(received)
    }

    async fn fill_once(&mut self, limit: Option<Duration>) -> Result<usize, Trouble> {
        if self.buffer.is_empty() {
            if self.bulk
                && let Some(received) = self.fill_from_queue()?
            {
                return Ok(received);
            }
            let waiting = buffers::take_small();
            let (result, buffer) = self.timed(limit, pin!(self.stream.receive(waiting))).await?;
            self.buffer = buffer;
            let received = result?;
            if received == self.buffer.capacity() {
                self.widen();
                return Ok(received + self.fill_from_queue()?.unwrap_or(0));
            }
            return Ok(received);
        }
        if self.buffer.len() == self.buffer.capacity() {
            self.widen();
        }
        let (start, end) = (self.buffer.len(), self.buffer.capacity());
        let rest = std::mem::take(&mut self.buffer).slice_mut(start..end);
        let (result, rest) = self.timed(limit, pin!(self.stream.receive(rest))).await?;
        self.buffer = rest.into_inner();
        Ok(result?)
    }

    /// Takes what is in the receive queue without waiting; `None` when it is empty.
    fn fill_from_queue(&mut self) -> Result<Option<usize>, Trouble> {
        if self.buffer.capacity() - self.buffer.len() < SMALL_BYTES {
            self.widen();
        }
        match self.stream.try_receive(&mut self.buffer) {
            Ok(received) => {
                self.bulk = self.buffer.len() == self.buffer.capacity();
                Ok(Some(received))
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.bulk = false;
                self.release_if_empty();
                Ok(None)
            }
            // After bytes were received, the error will show up again on the next read.
            Err(_) if !self.buffer.is_empty() => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Moves the bytes to a buffer with more room.
    fn widen(&mut self) {
        if self.buffer.capacity() >= LARGE_BYTES {
            self.buffer.reserve(self.buffer.capacity());
            return;
        }
        let mut wide = buffers::take_large();
        wide.extend_from_slice(&self.buffer);
        buffers::give(std::mem::replace(&mut self.buffer, wide));
    }

    pub(super) fn release_if_empty(&mut self) {
        if self.buffer.is_empty() {
            buffers::give(std::mem::take(&mut self.buffer));
        }
    }

    /// Writes all of `buffer`, which is whole again afterwards unless this fails or is dropped. `stall` limits each
    /// pause, not the whole.
    pub(super) async fn write_all<B: IoBuf + Default>(&self, buffer: &mut B, stall: Duration) -> Result<(), Trouble> {
        let mut sent = 0;
        while sent < buffer.bytes_init() {
            let write = pin!(self.stream.send(std::mem::take(buffer).slice(sent..)));
            let (result, rest) = self.timed(Some(stall), write).await?;
            *buffer = rest.into_inner();
            match result? {
                0 => return Err(io::Error::from(io::ErrorKind::WriteZero).into()),
                written => sent += written,
            }
        }
        Ok(())
    }

    /// Sends what the socket takes at once of `head` and the segments behind it; gives the bytes taken.
    pub(super) fn try_send_gathered(&self, head: &[u8], body: &[Bytes]) -> Result<usize, Trouble> {
        match self.stream.try_send_gathered(head, body) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
            outcome => Ok(outcome?),
        }
    }

    async fn timed<F: Future>(&self, limit: Option<Duration>, future: Pin<&mut F>) -> Result<F::Output, Trouble> {
        match limit {
            // Without a limit the slot has nothing to do: stop reaches this wait through its task.
            None => Ok(future.await),
            Some(_) => self.slot.within(limit, future).await.map_err(|_| Trouble::Timeout),
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.stream.announce_end();
        buffers::give(std::mem::take(&mut self.buffer));
    }
}
