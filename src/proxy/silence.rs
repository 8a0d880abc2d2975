//! Streams that say nothing for long, before their first byte or in their middle. Each shard keeps a table of its streams
//! in flight, which one task looks through now and then; a stream itself pays for its entry and for two stores a piece.
//! Reports only: it never ends a stream, and never takes a client that does not read for a worker that does not send.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::{Duration, Instant};

use infera_shards::{Request, spawn_local, time};
use slab::Slab;
use tracing::warn;

use super::service::Handles;
use super::shared::Shared;
use crate::api::Endpoint;
use crate::limits;

/// After how long a silence is reported; `None` for never. Fixed for the life of the process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SilenceLimits {
    /// `--stream-admission-warn-s`: from the request's last byte to the first byte of the answer's body.
    pub before_first_byte: Option<Duration>,
    /// `--stream-stall-warn-s`: between two pieces of the answer.
    pub in_the_middle: Option<Duration>,
}

impl SilenceLimits {
    /// Between two looks; a silence is reported so much late at most.
    fn period(&self) -> Option<Duration> {
        let shortest = [self.before_first_byte, self.in_the_middle].into_iter().flatten().min()?;
        Some((shortest / 8).clamp(limits::SILENCE_LOOK_MIN, limits::SILENCE_LOOK_MAX))
    }
}

/// When a stream was silent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SilentPhase {
    BeforeFirstByte,
    InTheMiddle,
}

impl SilentPhase {
    pub const ALL: [SilentPhase; 2] = [SilentPhase::BeforeFirstByte, SilentPhase::InTheMiddle];

    pub const fn as_str(self) -> &'static str {
        match self {
            SilentPhase::BeforeFirstByte => "awaiting first byte",
            SilentPhase::InTheMiddle => "mid-stream",
        }
    }
}

/// One stream in flight.
struct Entry {
    received: Instant,
    path: &'static str,
    /// As the client named its request.
    request_id: Option<Box<str>>,
    /// Who is to answer, and for a pair who computes the prompt.
    asked: RefCell<Option<(Handles, Option<Handles>)>>,
    /// The pair's first room, from which its engines' request id is spelled.
    room: Cell<Option<u64>>,
    /// Wraps; only its changes count.
    pieces: Cell<u32>,
    /// A piece is on its way to the client.
    is_passing_on: Cell<bool>,
    /// `pieces` at the last look, and the look that first saw it so.
    seen: Cell<(u32, Instant)>,
    reported: [Cell<bool>; SilentPhase::ALL.len()],
}

impl Entry {
    /// The silence that is to be reported now. Each phase of a stream is reported once.
    fn look(&self, limits: &SilenceLimits, now: Instant) -> Option<(SilentPhase, Duration)> {
        let pieces = self.pieces.get();
        let (phase, since, limit) = if pieces == 0 {
            (SilentPhase::BeforeFirstByte, self.received, limits.before_first_byte)
        } else {
            if self.seen.get().0 != pieces || self.is_passing_on.get() {
                self.seen.set((pieces, now));
            }
            (SilentPhase::InTheMiddle, self.seen.get().1, limits.in_the_middle)
        };
        let silent_for = now.saturating_duration_since(since);
        let is_news = limit.is_some_and(|limit| silent_for >= limit) && !self.reported[phase as usize].replace(true);
        is_news.then_some((phase, silent_for))
    }

    fn report(&self, phase: SilentPhase, silent_for: Duration) {
        let asked = self.asked.borrow();
        let (worker, prefill) = match &*asked {
            Some((worker, prefill)) => (Some(&*worker.route_key), prefill.as_ref().map(|it| &*it.route_key)),
            None => (None, None),
        };
        warn!(
            phase = phase.as_str(),
            silent_for_s = silent_for.as_secs_f64(),
            worker,
            prefill_worker = prefill,
            path = self.path,
            request_id = self.request_id.as_deref(),
            room = self.room.get(),
            "a stream is silent"
        );
    }
}

/// The streams of one shard.
pub(super) struct Streams {
    shared: Arc<Shared>,
    entries: RefCell<Slab<Entry>>,
}

impl Streams {
    /// Starts to watch, if anything is to be reported. To be called on the shard's thread.
    pub fn start(shared: Arc<Shared>) -> Rc<Self> {
        let period = shared.settings.silence.period();
        let streams = Rc::new(Self { shared, entries: RefCell::default() });
        if let Some(period) = period {
            spawn_local(watch(Rc::downgrade(&streams), period));
        }
        streams
    }

    /// A table that was large once is not kept for nobody.
    fn give_back_a_rush(&self) {
        let mut entries = self.entries.borrow_mut();
        if entries.is_empty() && entries.capacity() > limits::STREAM_ENTRIES_KEPT {
            *entries = Slab::new();
        }
    }

    fn look(&self, now: Instant) {
        self.give_back_a_rush();
        for (_, entry) in &*self.entries.borrow() {
            if let Some((phase, silent_for)) = entry.look(&self.shared.settings.silence, now) {
                self.shared.metrics.stream_was_silent(phase);
                entry.report(phase, silent_for);
            }
        }
    }
}

async fn watch(streams: Weak<Streams>, period: Duration) {
    loop {
        time::sleep(period).await;
        let Some(streams) = streams.upgrade() else { return };
        streams.look(Instant::now());
    }
}

/// A request's place among the streams, from when it is known to be one until it ends.
pub(super) struct Watched<'a> {
    streams: &'a Streams,
    key: Cell<Option<usize>>,
}

impl<'a> Watched<'a> {
    pub fn new(streams: &'a Streams) -> Self {
        Self { streams, key: Cell::new(None) }
    }

    /// The request is for a stream. Without limits nothing is kept of it.
    pub fn begin(&self, endpoint: &Endpoint, request: &Request) {
        if self.streams.shared.settings.silence == SilenceLimits::default() {
            return;
        }
        let entry = Entry {
            received: request.received,
            path: endpoint.path(),
            request_id: request.head.get("x-request-id").and_then(shown_id),
            asked: RefCell::default(),
            room: Cell::default(),
            pieces: Cell::default(),
            is_passing_on: Cell::default(),
            seen: Cell::new((0, request.received)),
            reported: Default::default(),
        };
        self.key.set(Some(self.streams.entries.borrow_mut().insert(entry)));
    }

    /// The request goes to this worker.
    pub fn asks(&self, worker: &Handles) {
        self.with(|entry| *entry.asked.borrow_mut() = Some((worker.clone(), None)));
    }

    /// The request goes to a pair. `room` is the attempt's first one.
    pub fn asks_pair(&self, prefill: &Handles, decode: &Handles, room: u64) {
        self.with(|entry| {
            *entry.asked.borrow_mut() = Some((decode.clone(), Some(prefill.clone())));
            entry.room.set(Some(room));
        });
    }

    /// A piece of the answer has come.
    pub fn came(&self) {
        self.with(|entry| {
            // Never 0 again: that stands for a stream that has not begun.
            entry.pieces.set(entry.pieces.get().wrapping_add(1).max(1));
            entry.is_passing_on.set(true);
        });
    }

    /// What has come is with the client.
    pub fn passed_on(&self) {
        self.with(|entry| entry.is_passing_on.set(false));
    }

    fn with(&self, change: impl FnOnce(&Entry)) {
        if let Some(key) = self.key.get()
            && let Some(entry) = self.streams.entries.borrow().get(key)
        {
            change(entry);
        }
    }
}

impl Drop for Watched<'_> {
    fn drop(&mut self) {
        if let Some(key) = self.key.get() {
            drop(self.streams.entries.borrow_mut().try_remove(key));
        }
    }
}

/// A client's name for its request, as far as it can be shown in a log line.
fn shown_id(value: &[u8]) -> Option<Box<str>> {
    let is_shown = value.len() <= limits::REQUEST_ID_BYTES_MAX && value.iter().all(u8::is_ascii_graphic);
    std::str::from_utf8(value).ok().filter(|_| is_shown).map(Box::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: SilenceLimits =
        SilenceLimits { before_first_byte: Some(Duration::from_secs(10)), in_the_middle: Some(Duration::from_secs(4)) };

    fn entry(received: Instant) -> Entry {
        Entry {
            received,
            path: "/v1/completions",
            request_id: None,
            asked: RefCell::default(),
            room: Cell::default(),
            pieces: Cell::default(),
            is_passing_on: Cell::default(),
            seen: Cell::new((0, received)),
            reported: Default::default(),
        }
    }

    #[test]
    fn each_phase_is_reported_once_and_never_early() {
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let entry = entry(start);
        let look = |seconds| entry.look(&LIMITS, at(seconds)).map(|(phase, silent)| (phase, silent.as_secs()));
        assert_eq!(look(9), None);
        assert_eq!(look(11), Some((SilentPhase::BeforeFirstByte, 11)));
        assert_eq!(look(20), None, "once");
        entry.pieces.set(1);
        assert_eq!(look(21), None, "it came at some time before this look");
        assert_eq!(look(24), None);
        entry.pieces.set(2);
        assert_eq!(look(27), None, "another one in between");
        assert_eq!(look(31), Some((SilentPhase::InTheMiddle, 4)));
        assert_eq!(look(60), None, "once");
    }

    #[test]
    fn a_client_that_does_not_read_is_no_silence_of_its_worker() {
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let entry = entry(start);
        entry.pieces.set(1);
        entry.is_passing_on.set(true);
        for seconds in 0..30 {
            assert_eq!(entry.look(&LIMITS, at(seconds)), None, "{seconds}");
        }
        entry.is_passing_on.set(false);
        assert_eq!(entry.look(&LIMITS, at(32)), None, "from the last look on that saw it wait");
        assert_eq!(entry.look(&LIMITS, at(33)), Some((SilentPhase::InTheMiddle, Duration::from_secs(4))));
    }

    #[test]
    fn what_is_off_is_not_looked_for() {
        assert_eq!(SilenceLimits::default().period(), None);
        let only_before = SilenceLimits { in_the_middle: None, ..LIMITS };
        assert_eq!(only_before.period(), Some(Duration::from_millis(1_250)));
        let start = Instant::now();
        let entry = entry(start);
        entry.pieces.set(1);
        assert_eq!(entry.look(&only_before, start), None);
        assert_eq!(entry.look(&only_before, start + Duration::from_secs(1_000)), None);
    }

    #[test]
    fn ids_that_could_forge_a_line_are_not_shown() {
        assert_eq!(shown_id(b"req-7:a/b").as_deref(), Some("req-7:a/b"));
        for odd in [&b"a b"[..], b"a\x1b[2J", "\u{e9}".as_bytes(), &[b'x'; 129]] {
            assert_eq!(shown_id(odd), None);
        }
    }
}
