//! What the access log is to say of each request, noted on its way and handed over at its end, however it ended. Never
//! formats or writes: that is the log's own thread (`src/access_log`). Without the log nothing is noted.
//!
//! The request at hand is found through the thread: its line is set while its future is polled. The places that know
//! something worth a note are deep inside the exchange, and without the log their callers carry nothing for it.

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use crossbeam::queue::ArrayQueue;
use http::{Method, StatusCode};
use infera_shards::{Rejection, Request};
use prometheus::{IntCounter, Registry};

use super::stages::Stage;
use crate::limits;
use crate::worker::{Name, Role};

/// How a request ended, as the log says it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ended {
    /// Its client left before the end of the answer.
    #[default]
    ClientLeft,
    /// The answer was whole; its status says the rest.
    Complete,
    /// The worker broke off its answer.
    Cut,
    /// The worker put an error into its stream.
    StreamError,
    /// The router answered itself, with an error.
    Refused,
}

impl Ended {
    pub const fn as_str(self) -> &'static str {
        match self {
            Ended::ClientLeft => "client_left",
            Ended::Complete => "complete",
            Ended::Cut => "cut",
            Ended::StreamError => "stream_error",
            Ended::Refused => "refused",
        }
    }
}

/// One pick of the request.
#[derive(Clone, Debug)]
pub struct Leg {
    pub role: Role,
    /// `worker_id` or `worker_id#dp<rank>`.
    pub route_key: Name,
    pub cache_hits: u32,
    /// Full blocks of the prompt; 0 for one without blocks.
    pub request_blocks: u32,
}

/// One request. Holds no text of it, no query of its target and no header but its id.
#[derive(Clone, Debug)]
pub struct AccessLine {
    /// When it ended.
    pub at: SystemTime,
    /// When its last byte was read.
    received: Instant,
    pub client: SocketAddr,
    pub method: Method,
    pub path: String,
    pub request_id: Option<String>,
    /// As the client wrote it; empty for none.
    pub model: String,
    pub status: Option<StatusCode>,
    pub body_bytes_in: u64,
    /// Bytes of the answer's body that were passed on, without framing.
    pub body_bytes_out: u64,
    /// In the order of the picks: more than one (of a role) where an attempt failed.
    pub legs: Vec<Leg>,
    pub retries: u32,
    /// Sums over all attempts; zero for what the request did not come to.
    pub stages: [Duration; Stage::COUNT],
    /// From the request's last byte to the first one of the answer's body.
    pub first_byte: Option<Duration>,
    /// From the request's last byte to the end.
    pub total: Duration,
    pub ended: Ended,
}

/// Lines on their way to the log's thread: a bounded queue per shard. A line that finds its queue full is lost and counted.
#[derive(Debug)]
pub struct AccessQueues {
    shards: Box<[ArrayQueue<AccessLine>]>,
    lost: IntCounter,
}

impl AccessQueues {
    /// Registers the count of lost lines.
    pub fn new(shards: usize, registry: &Registry) -> Result<Self, prometheus::Error> {
        let lost = IntCounter::new(
            "infera_router_access_log_lines_lost_total",
            "Lines of the access log that found its queue full.",
        )?;
        registry.register(Box::new(lost.clone()))?;
        let queue = || ArrayQueue::new(limits::ACCESS_LINES_WAITING_MAX);
        Ok(Self { shards: (0..shards.max(1)).map(|_| queue()).collect(), lost })
    }

    fn push(&self, shard: usize, line: AccessLine) {
        let is_taken = self.shards.get(shard).is_some_and(|queue| queue.push(line).is_ok());
        if !is_taken {
            self.lost.inc();
        }
    }

    /// What waits, one line of each shard after the other.
    pub fn drain(&self) -> impl Iterator<Item = AccessLine> + '_ {
        self.shards.iter().flat_map(|queue| std::iter::from_fn(|| queue.pop()).take(queue.capacity()))
    }
}

/// A shard's way to the log.
#[derive(Clone)]
pub(super) struct AccessSink {
    pub queues: Arc<AccessQueues>,
    pub shard: usize,
}

impl AccessSink {
    /// A message that the engine refused before it was a request.
    pub fn rejected(&self, rejection: &Rejection) {
        let line = AccessLine {
            status: Some(rejection.status),
            ended: Ended::Refused,
            ..AccessLine::of(rejection.peer, Instant::now(), Method::default(), "-".to_owned())
        };
        self.queues.push(self.shard, line);
    }
}

impl AccessLine {
    fn of(client: SocketAddr, received: Instant, method: Method, path: String) -> Self {
        Self {
            at: SystemTime::now(),
            received,
            client,
            method,
            path,
            request_id: None,
            model: String::new(),
            status: None,
            body_bytes_in: 0,
            body_bytes_out: 0,
            legs: Vec::new(),
            retries: 0,
            stages: [Duration::ZERO; Stage::COUNT],
            first_byte: None,
            total: Duration::ZERO,
            ended: Ended::default(),
        }
    }
}

/// The line of a request under way.
type Open = Rc<RefCell<AccessLine>>;

thread_local! {
    static CURRENT: RefCell<Option<Open>> = const { RefCell::new(None) };
}

/// Notes something of the request at hand; nothing where there is no log, and outside of a request.
pub(super) fn note(what: impl FnOnce(&mut AccessLine)) {
    CURRENT.with_borrow(|current| {
        if let Some(line) = current {
            what(&mut line.borrow_mut());
        }
    });
}

/// Counts an answer's body on its way to the client.
pub(super) struct Tally(Open);

impl Tally {
    /// Of the request at hand; absent without the log.
    pub fn of_current() -> Option<Self> {
        CURRENT.with_borrow(|current| current.clone().map(Tally))
    }

    /// These bytes are on their way.
    pub fn passed_on(&self, bytes: usize) {
        let mut line = self.0.borrow_mut();
        if line.first_byte.is_none() {
            line.first_byte = Some(line.received.elapsed());
        }
        line.body_bytes_out += bytes as u64;
    }
}

/// The line of a request that is being served; handed over when this is dropped.
pub(super) struct Opened {
    sink: AccessSink,
    /// Present until the drop.
    line: Option<Open>,
}

impl Opened {
    pub fn of(sink: &AccessSink, request: &Request) -> Self {
        Self { sink: sink.clone(), line: Some(begun(request)) }
    }

    /// Serves the request.
    pub async fn closed_by(self, serve: impl Future<Output = ()>) {
        let opened = self;
        // Bound last, so that it is dropped first: what it still holds of the line is gone when that is handed over.
        let mut serve = Box::pin(serve);
        poll_fn(|context| {
            let _at_hand = AtHand::set(&opened.line);
            serve.as_mut().poll(context)
        })
        .await;
    }
}

/// While this lives, the thread's notes go to one line. A guard, because what is polled may panic.
struct AtHand;

impl AtHand {
    fn set(line: &Option<Open>) -> Self {
        CURRENT.set(line.clone());
        Self
    }
}

impl Drop for AtHand {
    fn drop(&mut self) {
        CURRENT.set(None);
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        let Some(open) = self.line.take() else { return };
        let mut line = Rc::try_unwrap(open).map_or_else(|shared| shared.borrow().clone(), RefCell::into_inner);
        (line.at, line.total) = (SystemTime::now(), line.received.elapsed());
        self.sink.queues.push(self.sink.shard, line);
    }
}

/// Headers that name a request, in the order in which they are looked for.
const REQUEST_ID_HEADERS: [&str; 2] = ["x-request-id", "x-infera-request-id"];

fn begun(request: &Request) -> Open {
    let path = request.target.split(['?', '#']).next().unwrap_or_default();
    let id = REQUEST_ID_HEADERS.iter().find_map(|name| request.head.get(name));
    Rc::new(RefCell::new(AccessLine {
        request_id: id.map(clipped),
        body_bytes_in: request.body.len() as u64,
        ..AccessLine::of(request.peer, request.received, clipped_method(&request.method), clipped(path.as_bytes()))
    }))
}

/// A client may make a method up, of any length.
fn clipped_method(method: &Method) -> Method {
    match method.as_str().as_bytes().get(..limits::ACCESS_TEXT_BYTES_MAX) {
        // What a method begins with is one.
        Some(beginning) => Method::from_bytes(beginning).unwrap_or_default(),
        None => method.clone(),
    }
}

/// As much of a client's word as a line holds.
pub(super) fn clipped(word: &[u8]) -> String {
    String::from_utf8_lossy(&word[..word.len().min(limits::ACCESS_TEXT_BYTES_MAX)]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_queue_loses_lines_and_says_so() {
        let queues = AccessQueues::new(2, &Registry::new()).unwrap();
        let line = || AccessLine::of(([127, 0, 0, 1], 1).into(), Instant::now(), Method::GET, "/x".to_owned());
        for _ in 0..limits::ACCESS_LINES_WAITING_MAX + 3 {
            queues.push(1, line());
        }
        assert_eq!(queues.lost.get(), 3);
        queues.push(0, line());
        queues.push(7, line());
        assert_eq!(queues.lost.get(), 4, "a shard that nobody knows");
        assert_eq!(queues.drain().count(), limits::ACCESS_LINES_WAITING_MAX + 1);
        assert_eq!(queues.drain().count(), 0);
    }

    #[test]
    fn nothing_is_noted_outside_of_a_request() {
        note(|_| panic!("there is no request"));
        assert!(Tally::of_current().is_none());
    }
}
