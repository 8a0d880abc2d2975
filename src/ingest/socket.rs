//! One SUB socket per (worker, rank): options, addresses, and whether the publisher is there. Never reads a message's meaning.

use crate::limits::EVENT_MESSAGE_BYTES_MAX;

/// First wait before a new connection attempt, and the cap that it doubles up to, ms.
const RECONNECT_MS: i32 = 100;
const RECONNECT_MS_MAX: i32 = 5_000;

/// A ping every second; a peer that has not answered for this long is gone, ms. Engines with their standard publisher answer
/// by themselves; one whose host died does not.
const HEARTBEAT_MS: i32 = 1_000;
const HEARTBEAT_TIMEOUT_MS: i32 = 5_000;

/// A SUB socket that takes every topic and keeps trying until the publisher is there.
pub fn subscribe(context: &zmq::Context, endpoint: &str) -> Result<zmq::Socket, zmq::Error> {
    let socket = context.socket(zmq::SUB)?;
    configure(&socket)?;
    socket.set_subscribe(b"")?;
    socket.connect(endpoint)?;
    Ok(socket)
}

/// Options have to stand before the connection is made.
pub(super) fn configure(socket: &zmq::Socket) -> Result<(), zmq::Error> {
    // No high-water mark: dropped batches would cost a replay or the view; memory is bounded by the publisher's own mark
    // and by the size of one message.
    socket.set_rcvhwm(0)?;
    socket.set_linger(0)?;
    socket.set_ipv6(true)?;
    socket.set_maxmsgsize(EVENT_MESSAGE_BYTES_MAX)?;
    socket.set_reconnect_ivl(RECONNECT_MS)?;
    socket.set_reconnect_ivl_max(RECONNECT_MS_MAX)?;
    socket.set_tcp_keepalive(1)?;
    socket.set_tcp_keepalive_idle(10)?;
    socket.set_tcp_keepalive_intvl(5)?;
    socket.set_tcp_keepalive_cnt(3)?;
    socket.set_heartbeat_ivl(HEARTBEAT_MS)?;
    socket.set_heartbeat_timeout(HEARTBEAT_TIMEOUT_MS)?;
    socket.set_heartbeat_ttl(HEARTBEAT_TIMEOUT_MS)?;
    Ok(())
}

/// Address of rank `rank`, which publishes on the port of rank 0 plus `rank`. `None` for an address without a port or
/// whose port would leave the range. Schemes without ports serve rank 0 only.
pub fn rank_endpoint(endpoint: &str, rank: u32) -> Option<String> {
    if rank == 0 {
        return Some(endpoint.to_owned());
    }
    let (host, port) = endpoint.rsplit_once(':')?;
    let port = u32::from(port.parse::<u16>().ok()?).checked_add(rank)?;
    u16::try_from(port).ok().map(|port| format!("{host}:{port}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_publish_on_consecutive_ports() {
        let check = |endpoint: &str, rank, expected: Option<&str>| {
            assert_eq!(rank_endpoint(endpoint, rank).as_deref(), expected, "{endpoint} rank {rank}");
        };
        check("tcp://10.0.0.5:5557", 0, Some("tcp://10.0.0.5:5557"));
        check("tcp://10.0.0.5:5557", 3, Some("tcp://10.0.0.5:5560"));
        check("tcp://[::1]:5557", 1, Some("tcp://[::1]:5558"));
        check("tcp://host:65535", 1, None);
        check("ipc:///tmp/x", 1, None);
        check("tcp://host:*", 1, None);
    }
}
