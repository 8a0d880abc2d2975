//! A TCP stream of one shard. Two ways to read: `receive` posts a read that owns its buffer (upstream side), and
//! `readable` + `try_receive` hold none while they wait (client side). It never buffers and never times out.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::{Rc, Weak};
use std::time::Duration;

use bytes::Bytes;
use monoio::buf::{IoBuf, IoBufMut};
use rustix::event::{PollFd, PollFlags};
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown, sockopt};

use crate::raw::SharedStream;

/// Idle time before the first keep-alive probe, time between probes, and probes: a vanished host is noticed after
/// about two minutes, also where nothing is ever written.
const PROBE_AFTER: Duration = Duration::from_secs(60);
const PROBE_EVERY: Duration = Duration::from_secs(15);
const PROBES: u32 = 4;

/// Pieces of one gathered send; what comes behind is sent by itself.
const GATHERED_MAX: usize = 8;

/// What a look at the receive queue showed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Peeked {
    Nothing,
    Bytes,
    /// End of stream or an error.
    Closed,
}

#[derive(Clone)]
pub(crate) struct Stream(Rc<SharedStream>);

/// A stream that may be closed meanwhile.
#[derive(Default)]
pub(crate) struct WeakStream(Weak<SharedStream>);

impl WeakStream {
    pub(crate) fn upgrade(&self) -> Option<Stream> {
        self.0.upgrade().map(Stream)
    }
}

impl Stream {
    /// Takes over an accepted socket, or a listening one for [`Stream::readable`] only. Blocking mode must be as the
    /// driver needs it (see [`super::Listener`]).
    pub(crate) fn adopt(socket: OwnedFd) -> io::Result<Stream> {
        let stream = monoio::net::TcpStream::from_std(std::net::TcpStream::from(socket))?;
        Ok(Stream(Rc::new(SharedStream::new(stream))))
    }

    /// Connects to a resolved address. There is no timeout here.
    pub(crate) async fn connect(address: SocketAddr) -> io::Result<Stream> {
        let stream = monoio::net::TcpStream::connect_addr(address).await?;
        let stream = Stream(Rc::new(SharedStream::new(stream)));
        set_options(stream.0.descriptor())?;
        Ok(stream)
    }

    pub(crate) fn downgrade(&self) -> WeakStream {
        WeakStream(Rc::downgrade(&self.0))
    }

    pub(crate) fn send<B: IoBuf>(&self, buffer: B) -> impl Future<Output = (io::Result<usize>, B)> + use<B> {
        self.0.send(buffer)
    }

    /// Reads into all of the buffer's capacity, from its start: pass a slice to append. Dropping the future loses
    /// bytes that had arrived, so the stream must then be closed.
    pub(crate) fn receive<B: IoBufMut>(&self, buffer: B) -> impl Future<Output = (io::Result<usize>, B)> + use<B> {
        self.0.receive(buffer)
    }

    pub(crate) fn readable(&self) -> impl Future<Output = io::Result<()>> + use<> {
        self.0.readable()
    }

    /// Appends what has arrived to the buffer's spare capacity (which must not be zero). `Ok(0)` = end of stream;
    /// `WouldBlock` when nothing is there.
    pub(crate) fn try_receive(&self, buffer: &mut Vec<u8>) -> io::Result<usize> {
        loop {
            match rustix::net::recv(self.0.descriptor(), rustix::buffer::spare_capacity(buffer), RecvFlags::DONTWAIT) {
                Ok((_, received)) => return Ok(received),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Sends what fits at once, for farewells on the way out.
    pub(crate) fn try_send(&self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::net::send(self.0.descriptor(), bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?)
    }

    /// The same for a head and the segments behind it, in one call.
    pub(crate) fn try_send_gathered(&self, head: &[u8], body: &[Bytes]) -> io::Result<usize> {
        let mut slices = [io::IoSlice::new(&[]); GATHERED_MAX];
        let mut used = 0;
        for piece in std::iter::once(head).chain(body.iter().map(|segment| &**segment)).take(GATHERED_MAX) {
            slices[used] = io::IoSlice::new(piece);
            used += 1;
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        Ok(rustix::net::sendmsg(self.0.descriptor(), &slices[..used], &mut SendAncillaryBuffer::default(), flags)?)
    }

    pub(crate) fn peek(&self) -> Peeked {
        let mut byte = [0_u8; 1];
        match rustix::net::recv(self.0.descriptor(), &mut byte, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Ok((_, 0)) => Peeked::Closed,
            Ok(_) => Peeked::Bytes,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Peeked::Nothing,
            Err(_) => Peeked::Closed,
        }
    }

    /// Whether the peer has closed its side, also when unread bytes hide it from [`Stream::peek`].
    pub(crate) fn hung_up(&self) -> bool {
        let watched = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        let descriptor = self.0.descriptor();
        let mut polled = [PollFd::new(&descriptor, watched)];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut polled, Some(&now)).is_ok() && polled[0].revents().intersects(watched)
    }

    /// Sends FIN and keeps reading possible. Errors mean that the peer is gone already.
    pub(crate) fn shutdown_write(&self) {
        let _ = rustix::net::shutdown(self.0.descriptor(), Shutdown::Write);
    }
}

/// No delay for small writes, and probes for a silent peer.
pub(super) fn set_options(socket: impl AsFd) -> io::Result<()> {
    sockopt::set_tcp_nodelay(&socket, true)?;
    sockopt::set_socket_keepalive(&socket, true)?;
    sockopt::set_tcp_keepidle(&socket, PROBE_AFTER)?;
    sockopt::set_tcp_keepintvl(&socket, PROBE_EVERY)?;
    sockopt::set_tcp_keepcnt(&socket, PROBES)?;
    Ok(())
}
