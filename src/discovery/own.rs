//! Whether an address is this router's own listener. A worker there would make each request come back until connections or
//! descriptors run out. Routers that name each other through other hosts are not seen here.

use std::net::{IpAddr, SocketAddr, UdpSocket};

/// Whether a connection to `address` reaches one of `listeners`.
pub(super) fn is_own(listeners: &[SocketAddr], address: SocketAddr) -> bool {
    let reaches = |listener: &SocketAddr| {
        let (at, to) = (listener.ip().to_canonical(), address.ip().to_canonical());
        listener.port() == address.port()
            && (at == to || (at.is_unspecified() && is_of_this_host(to)) || is_loop(at, to))
    };
    address.port() != 0 && listeners.iter().any(reaches)
}

/// Connecting to the unspecified address means this host's loopback.
fn is_loop(at: IpAddr, to: IpAddr) -> bool {
    to.is_unspecified() && at.is_loopback()
}

/// The kernel lets a socket be bound to this host's addresses alone; nothing is sent.
fn is_of_this_host(address: IpAddr) -> bool {
    address.is_unspecified() || address.is_loopback() || UdpSocket::bind((address, 0)).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(listener: &str, address: &str, expected: bool) {
        assert_eq!(is_own(&[listener.parse().unwrap()], address.parse().unwrap()), expected, "{listener} {address}");
    }

    #[test]
    fn spellings_of_the_same_place() {
        for (listener, address) in [
            ("127.0.0.1:8000", "127.0.0.1:8000"),
            ("127.0.0.1:8000", "0.0.0.0:8000"),
            ("0.0.0.0:8000", "127.0.0.1:8000"),
            ("0.0.0.0:8000", "127.8.8.8:8000"),
            ("[::]:8000", "127.0.0.1:8000"),
            ("[::]:8000", "[::1]:8000"),
            ("[::1]:8000", "[::]:8000"),
            ("0.0.0.0:8000", "[::ffff:127.0.0.1]:8000"),
        ] {
            check(listener, address, true);
        }
        for (listener, address) in [
            ("127.0.0.1:8000", "127.0.0.1:8001"),
            ("127.0.0.1:8000", "127.0.0.2:8000"),
            // Addresses that are nobody's (RFC 5737, RFC 3849).
            ("0.0.0.0:8000", "192.0.2.7:8000"),
            ("[::]:8000", "[2001:db8::7]:8000"),
            ("127.0.0.1:0", "127.0.0.1:0"),
        ] {
            check(listener, address, false);
        }
    }
}
