//! TLS on the socket of a stream. It owns the session (keys, bytes not yet decrypted, bytes not yet sent) and everything
//! that is done with it; it never chooses certificates, never times out, and never touches a stream without TLS.
//!
//! Every step takes what the socket has and gives what the socket takes, without waiting; between steps one waits for
//! readiness, which consumes nothing. So a wait that is dropped loses no byte: what was read stays in the session.

use std::cell::RefCell;
use std::io::{self, BufRead, Write};
use std::rc::Rc;

use rustls::Connection;

use super::stream::{self, Inner, Peeked};
use super::{IoBuf, IoBufMut};
use crate::buffers;
use crate::raw::{self, SharedStream};

pub(super) struct Session(RefCell<State>);

struct State {
    connection: Connection,
    /// Received and not yet decrypted, from `fed` on. It has capacity only while there are such bytes.
    arrived: Vec<u8>,
    fed: usize,
}

impl Session {
    pub(super) fn new(connection: Connection) -> Session {
        Session(RefCell::new(State { connection, arrived: Vec::new(), fed: 0 }))
    }

    /// As [`super::Stream::try_receive`].
    pub(super) fn try_receive(&self, socket: &SharedStream, buffer: &mut Vec<u8>) -> io::Result<usize> {
        self.take(socket, |bytes| {
            let taken = bytes.len().min(buffer.capacity() - buffer.len());
            buffer.extend_from_slice(&bytes[..taken]);
            taken
        })
    }

    /// Hands decrypted bytes to `copy`, which says how many it took, until it takes none or nothing more is at hand.
    /// `Ok(0)` = the peer has said that nothing more comes.
    fn take(&self, socket: &SharedStream, mut copy: impl FnMut(&[u8]) -> usize) -> io::Result<usize> {
        let state = &mut *self.0.borrow_mut();
        let mut taken = 0;
        loop {
            let mut reader = state.connection.reader();
            let nothing = match reader.fill_buf() {
                Ok([]) => return Ok(taken),
                Ok(bytes) => {
                    let copied = copy(bytes);
                    reader.consume(copied);
                    taken += copied;
                    if copied == 0 {
                        return Ok(taken);
                    }
                    continue;
                }
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => cut(),
                Err(error) => error,
            };
            // What ends the stream shows again on the next call.
            if taken > 0 && (nothing.kind() != io::ErrorKind::WouldBlock || state.is_fed()) {
                return Ok(taken);
            }
            if nothing.kind() != io::ErrorKind::WouldBlock {
                return Err(nothing);
            }
            match state.pump(socket) {
                Err(_) if taken > 0 => return Ok(taken),
                outcome => outcome?,
            };
        }
    }

    /// Whether bytes can be had without the socket; also when all that is left is the news of the stream's end.
    pub(super) fn has_buffered(&self) -> bool {
        let state = &mut *self.0.borrow_mut();
        !state.is_fed()
            || !matches!(state.connection.reader().fill_buf(), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
    }

    /// Takes in what has arrived and says what it was: records that carry no bytes for us (session tickets) are nothing.
    /// Not while somebody waits for the socket to become readable: the bytes that wake it would be gone.
    pub(super) fn look(&self, socket: &SharedStream) -> Peeked {
        let state = &mut *self.0.borrow_mut();
        loop {
            match state.connection.reader().fill_buf() {
                Ok([]) => return Peeked::Closed,
                Ok(_) => return Peeked::Bytes,
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Peeked::Closed,
                Err(_) => {}
            }
            match state.pump(socket) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Peeked::Nothing,
                Err(_) => return Peeked::Closed,
            }
        }
    }

    /// Tells the peer that nothing more comes from here, as far as the socket takes it at once.
    pub(super) fn announce_end(&self, socket: &SharedStream) {
        let state = &mut *self.0.borrow_mut();
        state.connection.send_close_notify();
        let _ = state.flush(socket);
    }

    /// One step of the handshake; whether it has ended. What it has to say is sent by whoever calls.
    fn proceed(&self, socket: &SharedStream) -> io::Result<bool> {
        let state = &mut *self.0.borrow_mut();
        if !state.connection.is_handshaking() {
            return Ok(true);
        }
        match state.pump(socket)? {
            0 => Err(cut()),
            _ => Ok(false),
        }
    }

    /// Takes as much as is encrypted at a time, four records.
    fn encrypt(&self, bytes: &[u8]) -> io::Result<usize> {
        self.0.borrow_mut().connection.writer().write(bytes)
    }

    fn flush(&self, socket: &SharedStream) -> io::Result<()> {
        self.0.borrow_mut().flush(socket)
    }
}

impl State {
    fn is_fed(&self) -> bool {
        self.fed == self.arrived.len()
    }

    /// Feeds the session with what has arrived, from the socket when nothing is left from before, and sends what it has to
    /// say about it. `Ok(0)` = end of the socket's stream; `WouldBlock` when nothing is there.
    fn pump(&mut self, socket: &SharedStream) -> io::Result<usize> {
        if self.is_fed() {
            // The session by itself reads 4 KiB at a time; a record has up to 16.
            let mut arrived = buffers::take_large();
            let received = stream::receive_now(socket, &mut arrived);
            if !matches!(received, Ok(1..)) {
                buffers::give(arrived);
                if let Ok(0) = received {
                    self.connection.read_tls(&mut io::empty())?;
                }
                return received;
            }
            (self.arrived, self.fed) = (arrived, 0);
        }
        let fed = self.connection.read_tls(&mut &self.arrived[self.fed..])?;
        self.fed += fed;
        if self.is_fed() {
            buffers::give(std::mem::take(&mut self.arrived));
            self.fed = 0;
        }
        let processed = self.connection.process_new_packets();
        // What does not go out now goes out with the next bytes that are sent; an error shows there as well.
        let _ = self.flush(socket);
        match processed {
            Ok(_) => Ok(fed),
            Err(error) => Err(io::Error::new(io::ErrorKind::InvalidData, error)),
        }
    }

    fn flush(&mut self, socket: &SharedStream) -> io::Result<()> {
        while self.connection.wants_write() {
            self.connection.write_tls(&mut Outlet(socket))?;
        }
        Ok(())
    }
}

impl Drop for State {
    fn drop(&mut self) {
        buffers::give(std::mem::take(&mut self.arrived));
    }
}

/// The socket ended and the session did not: anybody on the way may have done that.
fn cut() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "TLS was cut off without close_notify")
}

/// The sending side of a socket, which never waits.
struct Outlet<'a>(&'a SharedStream);

impl Write for Outlet<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[io::IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, slices: &[io::IoSlice<'_>]) -> io::Result<usize> {
        stream::send_now(self.0, slices)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Runs the handshake to its end. Nothing may be sent or received before it has ended well.
pub(super) async fn handshake(inner: &Rc<Inner>, session: &Session) -> io::Result<()> {
    loop {
        flush(inner, session).await?;
        match session.proceed(&inner.socket) {
            Ok(true) => return Ok(()),
            Ok(false) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => SharedStream::readable(inner.clone()).await?,
            Err(error) => return Err(error),
        }
    }
}

/// As [`super::Stream::receive`].
pub(super) async fn receive<B: IoBufMut>(
    inner: Rc<Inner>,
    session: Rc<Session>,
    mut buffer: B,
) -> (io::Result<usize>, B) {
    loop {
        let mut filled = 0;
        let result = session.take(&inner.socket, |bytes| {
            let copied = raw::append_to(&mut buffer, filled, bytes);
            filled += copied;
            copied
        });
        match result {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            result => return (result, buffer),
        }
        if let Err(error) = SharedStream::readable(inner.clone()).await {
            return (Err(error), buffer);
        }
    }
}

/// As [`super::Stream::send`]: resolves once the socket has taken all that came of the bytes which are reported as sent.
pub(super) async fn send<B: IoBuf>(inner: Rc<Inner>, session: Rc<Session>, buffer: B) -> (io::Result<usize>, B) {
    let encrypted = session.encrypt(raw::bytes_of(&buffer));
    let result = match encrypted {
        Ok(taken) => flush(&inner, &session).await.map(|()| taken),
        Err(error) => Err(error),
    };
    (result, buffer)
}

async fn flush(inner: &Rc<Inner>, session: &Session) -> io::Result<()> {
    loop {
        match session.flush(&inner.socket) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            outcome => return outcome,
        }
        SharedStream::writable(inner.clone()).await?;
    }
}
