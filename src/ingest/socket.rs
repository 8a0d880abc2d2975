//! One SUB socket per (worker, rank): options, addresses, and whether the publisher is there. Never reads a message's meaning.

use std::sync::Arc;

use zmq::SocketEvent;

use crate::events::frame;
use crate::limits::{EVENT_FRAMES_MAX, EVENT_MESSAGE_BYTES_MAX, RANKS_PER_EVENT_CONTEXT};

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

/// A rank's subscription and the monitor that tells whether its publisher is there.
pub(super) struct Subscription {
    pub events: zmq::Socket,
    pub monitor: zmq::Socket,
    /// Counted: see [`Contexts`].
    pub context: Arc<zmq::Context>,
    /// Unique within the context.
    name: u64,
}

impl Drop for Subscription {
    /// The socket's monitor ends before its other end goes. The library writes a monitor event with a send that waits: a
    /// handshake that succeeds while a worker leaves would hold the context's I/O thread for ever, and with it the events of
    /// every rank in the context. Another monitor takes the former one's place at once, and one for no events writes none.
    fn drop(&mut self) {
        if let Err(error) = self.events.monitor(&format!("inproc://infera-events-{}-closed", self.name), 0) {
            tracing::error!(%error, "cannot end a monitor of a KV-event socket");
        }
    }
}

/// As many ZMQ contexts as the ranks need. Each has an I/O thread of its own.
#[derive(Default)]
pub(super) struct Contexts {
    contexts: Vec<Arc<zmq::Context>>,
    monitors_opened: u64,
}

impl Contexts {
    pub fn subscribe(&mut self, endpoint: &str) -> Result<Subscription, zmq::Error> {
        let has_room = |context: &&Arc<zmq::Context>| Arc::strong_count(context) <= RANKS_PER_EVENT_CONTEXT;
        let context = match self.contexts.iter().find(has_room) {
            Some(context) => context.clone(),
            None => {
                let context = Arc::new(zmq::Context::new());
                self.contexts.push(context.clone());
                context
            }
        };
        self.monitors_opened += 1;
        Subscription::open(context, endpoint, self.monitors_opened)
    }

    /// Ends contexts that no rank uses any more, but for one.
    pub fn prune(&mut self) {
        let mut kept = 0;
        self.contexts.retain(|context| {
            kept += 1;
            kept == 1 || Arc::strong_count(context) > 1
        });
    }
}

impl Subscription {
    /// `name` is unique within the context.
    fn open(context: Arc<zmq::Context>, endpoint: &str, name: u64) -> Result<Self, zmq::Error> {
        let events = context.socket(zmq::SUB)?;
        configure(&events)?;
        events.set_subscribe(b"")?;
        // Before the connection, so that its handshake is not missed.
        let address = format!("inproc://infera-events-{name}");
        let wanted =
            i32::from(SocketEvent::HANDSHAKE_SUCCEEDED.to_raw()) | i32::from(SocketEvent::DISCONNECTED.to_raw());
        events.monitor(&address, wanted)?;
        let monitor = context.socket(zmq::PAIR)?;
        monitor.set_linger(0)?;
        monitor.connect(&address)?;
        events.connect(endpoint)?;
        Ok(Self { events, monitor, context, name })
    }

    /// Reads what the monitor has to say, if anything.
    pub fn connection_change(&self) -> Option<ConnectionChange> {
        let mut change: Option<ConnectionChange> = None;
        while let Ok(event) = self.monitor.recv_bytes(zmq::DONTWAIT) {
            // First frame: event number (16 bits) and value; second frame: address.
            while self.monitor.get_rcvmore().unwrap_or(false) && self.monitor.recv_bytes(zmq::DONTWAIT).is_ok() {}
            if let Some(number) = event.first_chunk::<2>() {
                let is_connected = u16::from_ne_bytes(*number) == SocketEvent::HANDSHAKE_SUCCEEDED.to_raw();
                let has_broken = !is_connected || change.is_some_and(|change| change.has_broken);
                change = Some(ConnectionChange { is_connected, has_broken });
            }
        }
        change
    }
}

/// What has become of a connection since the last look.
#[derive(Clone, Copy, Debug)]
pub(super) struct ConnectionChange {
    /// The last word.
    pub is_connected: bool,
    /// Whether it was lost at any time, even if it is there again.
    pub has_broken: bool,
}

/// A DEALER socket that has asked for every batch from `start` on. The engine answers when it next looks, which may take
/// it a tenth of a second.
pub(super) fn ask_replay(context: &zmq::Context, endpoint: &str, start: u64) -> Result<zmq::Socket, zmq::Error> {
    let socket = context.socket(zmq::DEALER)?;
    configure(&socket)?;
    socket.connect(endpoint)?;
    socket.send_multipart(frame::replay_request(start), zmq::DONTWAIT)?;
    Ok(socket)
}

/// Reads one message, if there is one, into `frames`. Frames beyond the bound, which is past what any message form has, are
/// read and dropped.
pub(super) fn receive(socket: &zmq::Socket, frames: &mut Vec<zmq::Message>) -> bool {
    frames.clear();
    loop {
        let Ok(frame) = socket.recv_msg(zmq::DONTWAIT) else { return !frames.is_empty() };
        let has_more = frame.get_more();
        if frames.len() < EVENT_FRAMES_MAX {
            frames.push(frame);
        }
        if !has_more {
            return true;
        }
    }
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
