//! What the discovery thread tells the rest of the process about itself. Written on that thread, read anywhere.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use super::{DiscoveryConfig, State, Status};

/// One source that can go away.
#[derive(Clone, Debug, Default)]
pub(super) struct SourceHealth {
    last_contact: Option<Instant>,
    /// Why the source is not well; absent while it is.
    trouble: Option<String>,
}

/// Which source a report is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum SourceKind {
    CommandLine,
    File,
    Etcd,
}

#[derive(Debug, Default)]
struct Health {
    file: Option<SourceHealth>,
    etcd: Option<SourceHealth>,
    /// Vanished workers that are kept for the time being.
    held: usize,
}

impl Health {
    fn source(&mut self, kind: SourceKind) -> Option<&mut SourceHealth> {
        match kind {
            SourceKind::CommandLine => None,
            SourceKind::File => self.file.as_mut(),
            SourceKind::Etcd => self.etcd.as_mut(),
        }
    }
}

/// The lock is taken by the discovery thread and by scrapes, never by a request.
#[derive(Debug)]
pub(super) struct Shared {
    health: Mutex<Health>,
    records_skipped: AtomicU64,
    workers: AtomicUsize,
    workers_pending: AtomicUsize,
    ended: AtomicBool,
}

impl Shared {
    pub fn new(config: &DiscoveryConfig) -> Self {
        let health = Health {
            file: config.workers_file.as_ref().map(|_| SourceHealth::default()),
            etcd: config.etcd.as_ref().map(|_| SourceHealth::default()),
            held: 0,
        };
        Shared {
            health: Mutex::new(health),
            records_skipped: AtomicU64::new(0),
            workers: AtomicUsize::new(0),
            workers_pending: AtomicUsize::new(0),
            ended: AtomicBool::new(false),
        }
    }

    /// The thread is gone, in whatever way: what was published stays, nothing new will come.
    pub fn ended(&self) {
        self.ended.store(true, Ordering::Relaxed);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Health> {
        self.health.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// The source answered and is whole.
    pub fn contact(&self, kind: SourceKind, now: Instant) {
        if let Some(source) = self.lock().source(kind) {
            source.last_contact = Some(now);
            source.trouble = None;
        }
    }

    pub fn trouble(&self, kind: SourceKind, reason: String) {
        if let Some(source) = self.lock().source(kind) {
            source.trouble = Some(reason);
        }
    }

    /// Whether there is a workers file now.
    pub fn has_file(&self, has_file: bool) {
        let mut health = self.lock();
        if has_file != health.file.is_some() {
            health.file = has_file.then(SourceHealth::default);
        }
    }

    pub fn held(&self, workers: usize) {
        self.lock().held = workers;
    }

    pub fn skipped(&self, records: u64) {
        self.records_skipped.fetch_add(records, Ordering::Relaxed);
    }

    pub fn published(&self, workers: usize, pending: usize) {
        self.workers.store(workers, Ordering::Relaxed);
        self.workers_pending.store(pending, Ordering::Relaxed);
    }

    pub fn snapshot(&self, now: Instant) -> Status {
        let health = self.lock();
        let mut state = State::Ok;
        let mut reasons = Vec::new();
        let mut age = None;
        for (name, source) in [("workers file", &health.file), ("etcd", &health.etcd)] {
            let Some(source) = source else { continue };
            match (source.last_contact, &source.trouble) {
                (None, trouble) => {
                    state = State::Down;
                    reasons.push(format!("{name}: {}", trouble.as_deref().unwrap_or("not read yet")));
                }
                (Some(_), Some(trouble)) => {
                    state = if state == State::Ok { State::Degraded } else { state };
                    reasons.push(format!("{name}: {trouble}"));
                }
                (Some(_), None) => {}
            }
            if let Some(contact) = source.last_contact {
                age = age.max(Some(now.saturating_duration_since(contact)));
            }
        }
        if health.held > 0 {
            state = if state == State::Ok { State::Degraded } else { state };
            reasons.push(format!("{} vanished workers are kept while they still answer", health.held));
        }
        if self.ended.load(Ordering::Relaxed) {
            state = State::Down;
            reasons.push("the discovery thread has ended".to_owned());
        }
        Status {
            state,
            reason: reasons.join("; "),
            last_contact_age: age,
            records_skipped_total: self.records_skipped.load(Ordering::Relaxed),
            workers: self.workers.load(Ordering::Relaxed),
            workers_pending: self.workers_pending.load(Ordering::Relaxed),
        }
    }
}
