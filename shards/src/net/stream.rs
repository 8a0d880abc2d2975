//! A TCP stream of one shard, and TLS on it where somebody put it there. Two ways to read: `receive` posts a read that
//! owns its buffer (upstream side), and `readable` + `try_receive` hold none while they wait (client side). It never
//! buffers and never times out.

use std::cell::OnceCell;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use monoio::buf::{IoBuf, IoBufMut};
use rustix::event::{PollFd, PollFlags};
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown, sockopt};

use super::secure::{self, Session};
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

/// A socket, and TLS on it where there is any. Without TLS the second member is empty, and every call below is one branch
/// away from the socket.
pub(super) struct Inner {
    pub(super) socket: SharedStream,
    session: OnceCell<Rc<Session>>,
}

impl AsRef<SharedStream> for Inner {
    fn as_ref(&self) -> &SharedStream {
        &self.socket
    }
}

#[derive(Clone)]
pub(crate) struct Stream(Rc<Inner>);

/// A stream that may be closed meanwhile.
#[derive(Default)]
pub(crate) struct WeakStream(Weak<Inner>);

impl WeakStream {
    pub(crate) fn upgrade(&self) -> Option<Stream> {
        self.0.upgrade().map(Stream)
    }
}

impl Stream {
    fn new(stream: monoio::net::TcpStream) -> Stream {
        Stream(Rc::new(Inner { socket: SharedStream::new(stream), session: OnceCell::new() }))
    }

    /// Takes over an accepted socket, or a listening one for [`Stream::readable`] only. Blocking mode must be as the
    /// driver needs it (see [`super::Listener`]).
    pub(crate) fn adopt(socket: OwnedFd) -> io::Result<Stream> {
        Ok(Stream::new(monoio::net::TcpStream::from_std(std::net::TcpStream::from(socket))?))
    }

    /// Connects to a resolved address. There is no timeout here.
    pub(crate) async fn connect(address: SocketAddr) -> io::Result<Stream> {
        let stream = Stream::new(monoio::net::TcpStream::connect_addr(address).await?);
        set_options(stream.0.socket.descriptor())?;
        Ok(stream)
    }

    /// Puts TLS on the stream, on which nothing may have been sent or received before, and runs the handshake. There is no
    /// timeout here. After a failure the stream is of no use.
    pub(crate) async fn secure(&self, connection: rustls::Connection) -> io::Result<()> {
        let session = self.0.session.get_or_init(|| Rc::new(Session::new(connection)));
        secure::handshake(&self.0, session).await
    }

    pub(crate) fn is_secure(&self) -> bool {
        self.0.session.get().is_some()
    }

    pub(crate) fn downgrade(&self) -> WeakStream {
        WeakStream(Rc::downgrade(&self.0))
    }

    #[inline]
    pub(crate) fn send<B: IoBuf>(&self, buffer: B) -> impl Future<Output = (io::Result<usize>, B)> + use<B> {
        match self.0.session.get() {
            None => Either::Plain { future: self.0.socket.send(buffer) },
            Some(session) => Either::secure(secure::send(self.0.clone(), session.clone(), buffer)),
        }
    }

    /// Reads into all of the buffer's capacity, from its start: pass a slice to append. Dropping the future loses
    /// bytes that had arrived, so the stream must then be closed.
    #[inline]
    pub(crate) fn receive<B: IoBufMut>(&self, buffer: B) -> impl Future<Output = (io::Result<usize>, B)> + use<B> {
        match self.0.session.get() {
            None => Either::Plain { future: self.0.socket.receive(buffer) },
            Some(session) => Either::secure(secure::receive(self.0.clone(), session.clone(), buffer)),
        }
    }

    pub(crate) fn readable(&self) -> impl Future<Output = io::Result<()>> + use<> {
        match self.0.session.get() {
            Some(session) if session.has_buffered() => Either::secure(std::future::ready(Ok(()))),
            _ => Either::Plain { future: SharedStream::readable(self.0.clone()) },
        }
    }

    /// Appends what has arrived to the buffer's spare capacity (which must not be zero). `Ok(0)` = end of stream;
    /// `WouldBlock` when nothing is there.
    pub(crate) fn try_receive(&self, buffer: &mut Vec<u8>) -> io::Result<usize> {
        match self.0.session.get() {
            None => receive_now(&self.0.socket, buffer),
            Some(session) => session.try_receive(&self.0.socket, buffer),
        }
    }

    /// Sends what fits at once, for farewells on the way out; not over TLS.
    pub(crate) fn try_send(&self, bytes: &[u8]) -> io::Result<usize> {
        self.try_send_gathered(bytes, &[])
    }

    /// The same for a head and the segments behind it, in one call. Over TLS nothing fits at once: what is encrypted must
    /// go out whole, so it is sent by [`Stream::send`], which waits for that.
    pub(crate) fn try_send_gathered(&self, head: &[u8], body: &[Bytes]) -> io::Result<usize> {
        if self.is_secure() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let mut slices = [io::IoSlice::new(&[]); GATHERED_MAX];
        let mut used = 0;
        for piece in std::iter::once(head).chain(body.iter().map(|segment| &**segment)).take(GATHERED_MAX) {
            slices[used] = io::IoSlice::new(piece);
            used += 1;
        }
        send_now(&self.0.socket, &slices[..used])
    }

    /// What waits to be read. Over TLS bytes may turn out to be none for us, see [`Stream::look`].
    pub(crate) fn peek(&self) -> Peeked {
        match self.0.session.get() {
            Some(session) if session.has_buffered() => Peeked::Bytes,
            _ => self.first_byte().0,
        }
    }

    /// As [`Stream::peek`], and exact over TLS. Only while nobody waits for the stream to become readable.
    pub(crate) fn look(&self) -> Peeked {
        match self.0.session.get() {
            None => self.peek(),
            Some(session) => session.look(&self.0.socket),
        }
    }

    /// Looks at the socket's queue; the byte means something only when there are bytes.
    pub(crate) fn first_byte(&self) -> (Peeked, u8) {
        let mut byte = [0_u8; 1];
        let seen = match rustix::net::recv(self.0.socket.descriptor(), &mut byte, RecvFlags::PEEK | RecvFlags::DONTWAIT)
        {
            Ok((_, 0)) => Peeked::Closed,
            Ok(_) => Peeked::Bytes,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Peeked::Nothing,
            Err(_) => Peeked::Closed,
        };
        (seen, byte[0])
    }

    /// Whether the peer has closed its side, also when unread bytes hide it from [`Stream::peek`].
    pub(crate) fn hung_up(&self) -> bool {
        let watched = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        let descriptor = self.0.socket.descriptor();
        let mut polled = [PollFd::new(&descriptor, watched)];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut polled, Some(&now)).is_ok() && polled[0].revents().intersects(watched)
    }

    /// Tells a TLS peer that nothing more comes, so that it can tell this end from a cut one. Does nothing without TLS.
    pub(crate) fn announce_end(&self) {
        if let Some(session) = self.0.session.get() {
            session.announce_end(&self.0.socket);
        }
    }

    /// From now on closing sends RST, and what was not sent yet is lost: for an end that must not look like one. Over TLS the
    /// missing close_notify says so.
    pub(crate) fn reset_at_close(&self) {
        if !self.is_secure() {
            // An error means that the connection is broken already.
            let _ = sockopt::set_socket_linger(self.0.socket.descriptor(), Some(Duration::ZERO));
        }
    }

    /// Sends FIN and keeps reading possible. Errors mean that the peer is gone already.
    pub(crate) fn shutdown_write(&self) {
        self.announce_end();
        let _ = rustix::net::shutdown(self.0.socket.descriptor(), Shutdown::Write);
    }
}

/// Appends what the socket's queue holds to the spare capacity, without waiting.
pub(super) fn receive_now(socket: &SharedStream, buffer: &mut Vec<u8>) -> io::Result<usize> {
    loop {
        match rustix::net::recv(socket.descriptor(), rustix::buffer::spare_capacity(buffer), RecvFlags::DONTWAIT) {
            Ok((_, received)) => return Ok(received),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Sends what the socket takes at once.
pub(super) fn send_now(socket: &SharedStream, slices: &[io::IoSlice<'_>]) -> io::Result<usize> {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    Ok(rustix::net::sendmsg(socket.descriptor(), slices, &mut SendAncillaryBuffer::default(), flags)?)
}

pin_project_lite::pin_project! {
    /// An operation on the socket itself, or through TLS. The latter is boxed: it must not make the former larger.
    #[project = EitherProjection]
    enum Either<F, T> {
        Plain { #[pin] future: F },
        Secure { future: Pin<Box<dyn Future<Output = T>>> },
    }
}

impl<F, T> Either<F, T> {
    fn secure(future: impl Future<Output = T> + 'static) -> Self {
        Either::Secure { future: Box::pin(future) }
    }
}

impl<T, F: Future<Output = T>> Future for Either<F, T> {
    type Output = T;

    #[inline]
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        match self.project() {
            EitherProjection::Plain { future } => future.poll(cx),
            EitherProjection::Secure { future } => future.as_mut().poll(cx),
        }
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
