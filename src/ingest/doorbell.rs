//! What wakes the ingest core: queues that any thread fills without waiting, and a doorbell that costs a system call only
//! while the core sleeps. Never blocks a sender.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};

use crossbeam::queue::{ArrayQueue, SegQueue};
use rustix::event::{EventfdFlags, eventfd};

use crate::fleet::DiscoveredWorker;
use crate::load::{LedgerMessage, LedgerSink};

/// An event descriptor that is written only when the core has said that it is about to sleep.
#[derive(Debug)]
pub struct Doorbell {
    descriptor: OwnedFd,
    is_asleep: AtomicBool,
}

impl Doorbell {
    pub fn new() -> std::io::Result<Self> {
        let descriptor = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { descriptor, is_asleep: AtomicBool::new(false) })
    }

    pub fn descriptor(&self) -> RawFd {
        self.descriptor.as_raw_fd()
    }

    /// To be called after a message was put into a queue.
    ///
    /// The interleaving feared: the sender looks at the flag before the core sets it, and the core looks at the queue before
    /// the message is in. Each side writes first, then fences, then reads what the other writes, so at least one of them sees
    /// the other.
    pub fn ring(&self) {
        fence(Ordering::SeqCst);
        if self.is_asleep.load(Ordering::Relaxed) && self.is_asleep.swap(false, Ordering::AcqRel) {
            // Full (2^64 - 2 rings unread) is the only way to fail, and then it is readable anyway.
            let _ = rustix::io::write(&self.descriptor, &1u64.to_ne_bytes());
        }
    }

    /// To be called by the core before it looks at the queues for the last time.
    pub fn fall_asleep(&self) {
        self.is_asleep.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Awake again, for whatever reason.
    pub fn wake(&self) {
        if !self.is_asleep.swap(false, Ordering::AcqRel) {
            let _ = rustix::io::read(&self.descriptor, &mut [0u8; 8]);
        }
    }
}

/// Everything that other threads hand to the ingest core.
#[derive(Debug)]
pub struct Inbox {
    pub bell: Doorbell,
    /// Bounded by twice the requests in flight: each sends a start and an end.
    pub ledger: SegQueue<LedgerMessage>,
    /// The whole fleet as discovery last saw it; a newer list replaces one that was not read yet.
    pub fleet: ArrayQueue<Vec<DiscoveredWorker>>,
    pub stop: AtomicBool,
}

impl Inbox {
    pub fn new() -> std::io::Result<Self> {
        Ok(Self {
            bell: Doorbell::new()?,
            ledger: SegQueue::new(),
            fleet: ArrayQueue::new(1),
            stop: AtomicBool::new(false),
        })
    }

    pub fn is_empty(&self) -> bool {
        self.ledger.is_empty() && self.fleet.is_empty() && !self.stop.load(Ordering::Relaxed)
    }
}

impl LedgerSink for Inbox {
    fn send(&self, message: LedgerMessage) {
        self.ledger.push(message);
        self.bell.ring();
    }
}

/// Hands complete fleets to the ingest core.
#[derive(Clone, Debug)]
pub struct FleetUpdates(pub(super) Arc<Inbox>);

impl FleetUpdates {
    /// Every worker that is known now; one that is missing has left.
    pub fn send(&self, workers: Vec<DiscoveredWorker>) {
        self.0.fleet.force_push(workers);
        self.0.bell.ring();
    }
}
