//! Owns the ZMQ side of an engine: one publishing socket per rank and, in vLLM style, the ROUTER sockets that replay old
//! batches. Never decides what is published.
//!
//! Live message: `[topic, sequence number (8 bytes, big endian), payload]`, numbers from 0. A replay request names
//! the first number wanted; the answer to a DEALER is one `["", topic, number, payload]` per kept batch from there on,
//! then `["", "", 2^64 - 1, ""]`. Array-style vLLM is older than the topic in replays and leaves that frame out.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use anyhow::{Context, Result, bail};

/// Batches kept for replay per rank: vLLM's default `buffer_steps`.
const REPLAY_BATCHES_MAX: usize = 10_000;
/// vLLM's default high-water mark; the library's own default of 1,000 loses batches silently.
const HIGH_WATER_MARK: i32 = 100_000;
const PORT_ATTEMPTS_MAX: usize = 256;

/// One kept batch.
type Batch = (u64, Vec<u8>);
type History = Arc<Mutex<VecDeque<Batch>>>;

/// Sends one rank's batches. XPUB is PUB on the wire and also tells who subscribes, so that tests can wait for a
/// subscriber instead of losing the first batches to a slow connection.
pub struct Publisher {
    socket: zmq::Socket,
    subscriptions: usize,
    topic: String,
    next: u64,
    history: History,
}

impl Publisher {
    /// Subscriptions in force.
    pub fn subscriptions(&mut self) -> usize {
        while let Ok(message) = self.socket.recv_bytes(zmq::DONTWAIT) {
            match message.first() {
                Some(1) => self.subscriptions += 1,
                Some(0) => self.subscriptions = self.subscriptions.saturating_sub(1),
                _ => {}
            }
        }
        self.subscriptions
    }

    /// Publishes one payload and returns its number. A `lost` payload takes its number and can be replayed, but is
    /// not sent: a gap as a full queue makes it.
    pub fn publish(&mut self, payload: Vec<u8>, lost: bool) -> u64 {
        let number = self.next;
        self.next += 1;
        let bytes = number.to_be_bytes();
        if !lost {
            self.subscriptions();
            // The socket never blocks: above the mark it drops, which subscribers see as a gap.
            if let Err(error) = self.socket.send_multipart([self.topic.as_bytes(), &bytes, &payload], zmq::DONTWAIT) {
                tracing::warn!(%error, number, "KV event batch not sent");
            }
        }
        let mut history = self.history.lock().unwrap_or_else(PoisonError::into_inner);
        if history.len() == REPLAY_BATCHES_MAX {
            history.pop_front();
        }
        history.push_back((number, payload));
        number
    }
}

/// The sockets of all ranks of one engine.
pub struct Feeds {
    pub publishers: Vec<Publisher>,
    /// `tcp://127.0.0.1:port` of rank 0; rank r is at port + r.
    pub events_endpoint: String,
    pub replay_endpoint: Option<String>,
    pub replay: Option<ReplayServer>,
}

/// Where and how an engine publishes.
#[derive(Clone, Debug)]
pub struct FeedConfig {
    pub host: String,
    /// 0 takes free ports.
    pub events_port: u16,
    pub replay: bool,
    pub topic: String,
    pub topic_in_replay: bool,
    pub ranks: u32,
}

impl Feeds {
    pub fn open(context: &zmq::Context, config: &FeedConfig) -> Result<Feeds> {
        let (sockets, port) = bind_ranks(context, zmq::XPUB, &config.host, config.events_port, config.ranks)?;
        let history: Vec<History> = sockets.iter().map(|_| History::default()).collect();
        let publishers = sockets
            .into_iter()
            .zip(&history)
            .map(|(socket, history)| Publisher {
                socket,
                subscriptions: 0,
                topic: config.topic.clone(),
                next: 0,
                history: history.clone(),
            })
            .collect();
        let (mut replay, mut replay_endpoint) = (None, None);
        if config.replay {
            let (routers, port) = bind_ranks(context, zmq::ROUTER, &config.host, 0, config.ranks)?;
            let topic = config.topic_in_replay.then(|| config.topic.clone());
            replay = Some(ReplayServer::start(context, routers, history, topic)?);
            replay_endpoint = Some(format!("tcp://{}:{port}", config.host));
        }
        let events_endpoint = format!("tcp://{}:{port}", config.host);
        Ok(Feeds { publishers, events_endpoint, replay_endpoint, replay })
    }
}

/// Binds one socket per rank to consecutive ports and returns the first port.
fn bind_ranks(
    context: &zmq::Context,
    kind: zmq::SocketType,
    host: &str,
    port: u16,
    ranks: u32,
) -> Result<(Vec<zmq::Socket>, u16)> {
    for _ in 0..PORT_ATTEMPTS_MAX {
        let first = new_socket(context, kind)?;
        let first_address = if port == 0 { format!("tcp://{host}:*") } else { format!("tcp://{host}:{port}") };
        first.bind(&first_address).with_context(|| format!("binding {first_address}"))?;
        let endpoint = first.get_last_endpoint()?.map_err(|_| anyhow::anyhow!("endpoint is not text"))?;
        let base: u16 =
            endpoint.rsplit(':').next().and_then(|text| text.parse().ok()).context("endpoint has no port")?;
        let mut sockets = vec![first];
        for rank in 1..ranks {
            let socket = new_socket(context, kind)?;
            let Some(next) = base.checked_add(rank as u16) else { break };
            if socket.bind(&format!("tcp://{host}:{next}")).is_err() {
                break;
            }
            sockets.push(socket);
        }
        if sockets.len() == ranks as usize {
            return Ok((sockets, base));
        }
        if port != 0 {
            break;
        }
    }
    bail!("no {ranks} consecutive free ports for KV events at {host}")
}

fn new_socket(context: &zmq::Context, kind: zmq::SocketType) -> Result<zmq::Socket> {
    let socket = context.socket(kind)?;
    socket.set_linger(0)?;
    socket.set_sndhwm(HIGH_WATER_MARK)?;
    socket.set_ipv6(true)?;
    Ok(socket)
}

/// Thread that answers replay requests of one engine; ends when dropped.
pub struct ReplayServer {
    stop: zmq::Socket,
    thread: Option<JoinHandle<()>>,
}

impl ReplayServer {
    fn start(
        context: &zmq::Context,
        routers: Vec<zmq::Socket>,
        history: Vec<History>,
        topic: Option<String>,
    ) -> Result<ReplayServer> {
        let (stop, stopped) = (context.socket(zmq::PAIR)?, context.socket(zmq::PAIR)?);
        stopped.bind(&unique_name())?;
        let name = stopped.get_last_endpoint()?.map_err(|_| anyhow::anyhow!("endpoint is not text"))?;
        stop.connect(&name)?;
        let thread = std::thread::Builder::new()
            .name("kv-replay".into())
            .spawn(move || serve_replays(&routers, &stopped, &history, topic.as_deref()))?;
        Ok(ReplayServer { stop, thread: Some(thread) })
    }
}

fn unique_name() -> String {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("inproc://kv-replay-{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

impl Drop for ReplayServer {
    fn drop(&mut self) {
        // The only failure is a peer that is already gone.
        let _ = self.stop.send("", zmq::DONTWAIT);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the replay thread panicked");
        }
    }
}

fn serve_replays(routers: &[zmq::Socket], stopped: &zmq::Socket, history: &[History], topic: Option<&str>) {
    loop {
        let mut items: Vec<zmq::PollItem> = routers.iter().map(|router| router.as_poll_item(zmq::POLLIN)).collect();
        items.push(stopped.as_poll_item(zmq::POLLIN));
        match zmq::poll(&mut items, -1) {
            Ok(_) | Err(zmq::Error::EINTR) => {}
            Err(error) => return tracing::error!(%error, "replay sockets unusable"),
        }
        let readable: Vec<bool> = items.iter().map(zmq::PollItem::is_readable).collect();
        if readable[routers.len()] {
            return;
        }
        for rank in (0..routers.len()).filter(|rank| readable[*rank]) {
            if let Err(error) = answer_replay(&routers[rank], &history[rank], topic) {
                tracing::warn!(%error, rank, "replay request not answered");
            }
        }
    }
}

fn answer_replay(router: &zmq::Socket, history: &History, topic: Option<&str>) -> Result<()> {
    let request = router.recv_multipart(zmq::DONTWAIT)?;
    let [client, _, start] = request.as_slice() else { bail!("expected 3 frames, got {}", request.len()) };
    let Ok(start) = <[u8; 8]>::try_from(start.as_slice()) else { bail!("start number is not 8 bytes") };
    let start = u64::from_be_bytes(start);
    let wanted: Vec<Batch> = {
        let history = history.lock().unwrap_or_else(PoisonError::into_inner);
        history.iter().filter(|(number, _)| *number >= start).cloned().collect()
    };
    let end = std::iter::once((u64::MAX, Vec::new()));
    for (number, payload) in wanted.into_iter().chain(end) {
        let number_bytes = number.to_be_bytes();
        let mut frames: Vec<&[u8]> = vec![client, b""];
        if let Some(topic) = topic {
            frames.push(if number == u64::MAX { b"" } else { topic.as_bytes() });
        }
        frames.push(&number_bytes);
        frames.push(&payload);
        router.send_multipart(frames, 0)?;
    }
    Ok(())
}
