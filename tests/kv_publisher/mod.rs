//! A KV-event publisher on 127.0.0.1 or [::1] for tests, and what tests ask of the ingest core. The socket is an XPUB, which
//! sees subscriptions arrive: a test knows that its first message will be heard.
#![allow(clippy::unwrap_used)]
#![allow(dead_code, reason = "each test binary uses a part")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use infera_router::fleet::{DiscoveredWorker, Parity, WorkerState};
use infera_router::hash::{BlockHash, prompt_blocks};
use infera_router::index::{Hits, RankStatus, View};
use infera_router::ingest::IngestHandle;
use rmp::encode;

pub const BLOCK_SIZE: usize = 4;
const PATIENCE: Duration = Duration::from_secs(20);

pub enum Event<'a> {
    /// Blocks `from..` of a prompt, chained onto what is before.
    Store {
        tokens: &'a [u32],
        from: usize,
    },
    Remove(&'a [BlockHash]),
    Clear,
}

/// The engine's own name for a block: anything but the router's.
fn name(block: BlockHash) -> u64 {
    block.0 ^ 0x5555_5555
}

pub fn batch(events: &[Event<'_>], rank: Option<u32>) -> Vec<u8> {
    let mut out = Vec::new();
    encode::write_array_len(&mut out, if rank.is_some() { 3 } else { 2 }).unwrap();
    encode::write_f64(&mut out, 1.5).unwrap();
    encode::write_array_len(&mut out, events.len() as u32).unwrap();
    for event in events {
        match event {
            Event::Store { tokens, from } => {
                let blocks = prompt_blocks(tokens, BLOCK_SIZE);
                encode::write_array_len(&mut out, 6).unwrap();
                encode::write_str(&mut out, "BlockStored").unwrap();
                encode::write_array_len(&mut out, (blocks.len() - from) as u32).unwrap();
                blocks[*from..].iter().for_each(|block| encode::write_u64(&mut out, name(*block)).unwrap());
                match from.checked_sub(1) {
                    Some(parent) => encode::write_u64(&mut out, name(blocks[parent])).unwrap(),
                    None => encode::write_nil(&mut out).unwrap(),
                }
                let stored = &tokens[from * BLOCK_SIZE..blocks.len() * BLOCK_SIZE];
                encode::write_array_len(&mut out, stored.len() as u32).unwrap();
                stored.iter().for_each(|token| encode::write_u32(&mut out, *token).unwrap());
                encode::write_u32(&mut out, BLOCK_SIZE as u32).unwrap();
                encode::write_nil(&mut out).unwrap();
            }
            Event::Remove(blocks) => {
                encode::write_array_len(&mut out, 2).unwrap();
                encode::write_str(&mut out, "BlockRemoved").unwrap();
                encode::write_array_len(&mut out, blocks.len() as u32).unwrap();
                blocks.iter().for_each(|block| encode::write_u64(&mut out, name(*block)).unwrap());
            }
            Event::Clear => {
                encode::write_array_len(&mut out, 1).unwrap();
                encode::write_str(&mut out, "AllBlocksCleared").unwrap();
            }
        }
    }
    if let Some(rank) = rank {
        encode::write_u32(&mut out, rank).unwrap();
    }
    out
}

pub struct Publisher {
    socket: zmq::Socket,
    pub endpoint: String,
    pub sequence: u64,
}

impl Publisher {
    pub fn bind(context: &zmq::Context, address: &str) -> Option<Self> {
        let socket = context.socket(zmq::XPUB).unwrap();
        socket.set_linger(0).unwrap();
        socket.set_ipv6(address.contains('[')).unwrap();
        socket.set_sndhwm(0).unwrap();
        // A subscriber that is back before its former connection has been missed subscribes too.
        socket.set_xpub_verbose(true).unwrap();
        socket.bind(address).ok()?;
        let endpoint = socket.get_last_endpoint().unwrap().unwrap();
        Some(Self { socket, endpoint, sequence: 0 })
    }

    pub fn new(context: &zmq::Context) -> Self {
        Self::bind(context, "tcp://127.0.0.1:*").expect("a free port")
    }

    /// A new life on the address of a former one.
    pub fn rebind(context: &zmq::Context, endpoint: &str) -> Self {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(publisher) = Self::bind(context, endpoint) {
                return publisher;
            }
            assert!(Instant::now() < deadline, "{endpoint} stays taken");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits until a subscription has arrived.
    #[track_caller]
    pub fn subscribed(self) -> Self {
        self.wait_subscription(1);
        self
    }

    /// Waits for a subscription (1) or its end (0).
    #[track_caller]
    pub fn wait_subscription(&self, kind: u8) {
        self.socket.set_rcvtimeo(PATIENCE.as_millis() as i32).unwrap();
        loop {
            let message = self.socket.recv_bytes(0).expect("a subscription in time");
            if message.first() == Some(&kind) {
                return;
            }
        }
    }

    pub fn send(&mut self, events: &[Event<'_>]) {
        self.send_as(self.sequence, &batch(events, None));
        self.sequence += 1;
    }

    pub fn send_as(&self, sequence: u64, payload: &[u8]) {
        self.send_frames(&[b"kv-events", &sequence.to_be_bytes(), payload]);
    }

    pub fn send_frames(&self, frames: &[&[u8]]) {
        self.socket.send_multipart(frames, 0).unwrap();
    }
}

/// Batches that a publisher can send again: sequence numbers and payloads, oldest first.
pub type Buffer = Arc<Mutex<Vec<(u64, Vec<u8>)>>>;

/// A replay socket as engines have it: a ROUTER that answers from its buffer and looks at requests only now and then.
pub struct ReplayServer {
    pub endpoint: String,
    asked: Arc<Mutex<Vec<u64>>>,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl ReplayServer {
    /// `buffer`: sequence numbers and payloads, oldest first. `with_topic`: the newer form of the answers.
    pub fn start(context: &zmq::Context, buffer: Vec<(u64, Vec<u8>)>, with_topic: bool) -> Self {
        Self::start_on(context, Arc::new(Mutex::new(buffer)), with_topic)
    }

    /// The same on a buffer that the test goes on changing.
    pub fn start_on(context: &zmq::Context, buffer: Buffer, with_topic: bool) -> Self {
        let socket = context.socket(zmq::ROUTER).unwrap();
        socket.set_linger(0).unwrap();
        socket.bind("tcp://127.0.0.1:*").unwrap();
        let endpoint = socket.get_last_endpoint().unwrap().unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let flag = stop.clone();
        let asked: Arc<Mutex<Vec<u64>>> = Arc::default();
        let record = asked.clone();
        let thread = std::thread::spawn(move || {
            while !flag.load(Ordering::Relaxed) {
                if socket.poll(zmq::POLLIN, 20).unwrap() == 0 {
                    continue;
                }
                let request = socket.recv_multipart(0).unwrap();
                assert_eq!((request.len(), request[1].len(), request[2].len()), (3, 0, 8), "{request:?}");
                let start = u64::from_be_bytes(request[2].as_slice().try_into().unwrap());
                let answer = |topic: &[u8], sequence: u64, payload: &[u8]| {
                    let mut frames: Vec<&[u8]> = vec![&request[0], b""];
                    if with_topic {
                        frames.push(topic);
                    }
                    let sequence = sequence.to_be_bytes();
                    frames.extend([&sequence[..], payload]);
                    socket.send_multipart(&frames, 0).unwrap();
                };
                let kept = buffer.lock().unwrap().clone();
                for (sequence, payload) in kept.iter().filter(|(sequence, _)| *sequence >= start) {
                    answer(b"kv-events", *sequence, payload);
                }
                answer(b"", u64::MAX, b"");
                record.lock().unwrap().push(start);
            }
        });
        Self { endpoint, asked, stop, thread: Some(thread) }
    }

    /// Waits until this many requests have been answered.
    pub fn wait_answered(&self, count: usize) {
        wait_until(&format!("{count} replays"), || self.asked.lock().unwrap().len() >= count);
    }

    /// Stops the server; the sequence numbers it was asked for.
    pub fn stop(mut self) -> Vec<u64> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().expect("not stopped before").join().unwrap();
        self.asked.lock().unwrap().clone()
    }
}

pub fn worker(id: &str, endpoint: Option<&str>) -> DiscoveredWorker {
    let record = serde_json::from_value(serde_json::json!({
        "worker_id": id, "url": format!("http://{id}"), "model_name": "m", "kv_events_endpoint": endpoint,
        "kv_block_size": BLOCK_SIZE,
    }))
    .unwrap();
    DiscoveredWorker {
        record,
        address: Some(([127, 0, 0, 1], 9).into()),
        state: WorkerState::Active,
        probed: Parity::Unknown,
    }
}

#[track_caller]
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "in vain: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Depth of the prompt on the target with this route key; `None` while there is no such target.
pub fn depth(ingest: &IngestHandle, route_key: &str, tokens: &[u32]) -> Option<u32> {
    let view: Arc<View> = ingest.view.load_full();
    let target = view.fleet.targets.iter().find(|target| &*target.route_key == route_key)?;
    let mut hits = Hits::new();
    view.index.query(&prompt_blocks(tokens, BLOCK_SIZE), &mut hits);
    Some(hits.depth(target.slot))
}

#[track_caller]
pub fn wait_depth(ingest: &IngestHandle, route_key: &str, tokens: &[u32], expected: u32) {
    wait_until(&format!("depth {expected} on {route_key}"), || depth(ingest, route_key, tokens) == Some(expected));
}

/// Applies `read` to the status of one rank.
pub fn status<T>(ingest: &IngestHandle, worker_id: &str, rank: u32, read: impl Fn(&RankStatus) -> T) -> T {
    let view = ingest.view.load_full();
    let ranks = view.ranks_of(worker_id);
    read(ranks.iter().find(|status| status.rank == rank).expect("a rank that the view knows"))
}
