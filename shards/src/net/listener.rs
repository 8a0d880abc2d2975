//! The listening socket of one shard. It accepts by readiness: the runtime's own `accept` loses the connection and
//! leaks its descriptor when it is dropped at the wrong moment, a readiness wait loses nothing.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use super::Stream;
use super::stream::set_options;

const BACKLOG: i32 = 4096;

/// Binds and listens with SO_REUSEPORT, so that each shard can have its own socket on one port.
pub(crate) fn bind(address: SocketAddr) -> io::Result<(OwnedFd, SocketAddr)> {
    let family = if address.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    sockopt::set_socket_reuseport(&socket, true)?;
    // Linux hands these down to accepted sockets, which saves their system calls per connection.
    set_options(&socket)?;
    rustix::net::bind(&socket, &address)?;
    rustix::net::listen(&socket, BACKLOG)?;
    let bound = SocketAddr::try_from(rustix::net::getsockname(&socket)?)?;
    Ok((socket, bound))
}

/// Whether another process (or this one) listens on the address already: a socket that would not share it cannot have it.
pub(crate) fn is_taken(address: SocketAddr) -> bool {
    let family = if address.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
    let bound = || {
        let socket = rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        // Connections of a former listener that are still in TIME_WAIT do not count.
        sockopt::set_socket_reuseaddr(&socket, true)?;
        rustix::net::bind(&socket, &address)
    };
    address.port() != 0 && bound() == Err(rustix::io::Errno::ADDRINUSE)
}

pub(crate) struct Listener {
    stream: Stream,
    socket: OwnedFd,
}

impl Listener {
    /// Takes over a socket of [`bind`] on the shard's thread.
    pub(crate) fn adopt(socket: OwnedFd) -> io::Result<Listener> {
        let stream = Stream::adopt(socket.try_clone()?)?;
        Ok(Listener { stream, socket })
    }

    pub(crate) async fn readable(&self) -> io::Result<()> {
        self.stream.readable().await
    }

    /// From now on nobody new comes in, and nobody is refused; see [`crate::raw::drop_new_handshakes`].
    pub(crate) fn drop_new_handshakes(&self) -> io::Result<()> {
        crate::raw::drop_new_handshakes(self.socket.as_fd())
    }

    /// The next waiting connection; `WouldBlock` when there is none. CLOEXEC is set in the same call.
    pub(crate) fn try_accept(&self) -> io::Result<(Stream, SocketAddr)> {
        let mut flags = SocketFlags::CLOEXEC;
        if monoio::utils::is_legacy() {
            // The epoll driver works by EAGAIN; the ring waits by itself and is better off with blocking sockets.
            flags |= SocketFlags::NONBLOCK;
        }
        let (socket, peer) = rustix::net::acceptfrom_with(&self.socket, flags)?;
        let peer = peer.ok_or(io::ErrorKind::NotConnected)?;
        Ok((Stream::adopt(socket)?, SocketAddr::try_from(peer)?))
    }
}
