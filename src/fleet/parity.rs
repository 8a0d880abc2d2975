//! Whether a target renders prompts as the router does: the verdict that picks and metrics read, and the right to start
//! the next check. Judges nothing; the ingest core does.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};

/// How a worker's own token ids compare with the router's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Parity {
    #[default]
    Unknown,
    Confirmed,
    /// The worker has shown other tokens for a prompt than the router has rendered.
    Diverged,
}

impl Parity {
    pub const fn as_str(self) -> &'static str {
        match self {
            Parity::Unknown => "unknown",
            Parity::Confirmed => "confirmed",
            Parity::Diverged => "diverged",
        }
    }

    /// Value of the gauge: 1 confirmed, 0 diverged, -1 unknown. Source: AMD's Infera.
    pub const fn gauge(self) -> i64 {
        match self {
            Parity::Confirmed => 1,
            Parity::Diverged => 0,
            Parity::Unknown => -1,
        }
    }

    /// One verdict of two: what has diverged anywhere has diverged, and one confirmation is worth more than none.
    pub const fn and(self, other: Parity) -> Parity {
        match (self, other) {
            (Parity::Diverged, _) | (_, Parity::Diverged) => Parity::Diverged,
            (Parity::Confirmed, _) | (_, Parity::Confirmed) => Parity::Confirmed,
            (Parity::Unknown, Parity::Unknown) => Parity::Unknown,
        }
    }

    fn of(number: u8) -> Parity {
        match number {
            1 => Parity::Confirmed,
            2 => Parity::Diverged,
            _ => Parity::Unknown,
        }
    }
}

/// The standing of one target. Verdicts are written by the ingest core only.
#[derive(Debug)]
pub struct TargetParity {
    /// By asking the worker before traffic.
    probed: AtomicU8,
    /// By the events that followed requests.
    watched: AtomicU8,
    /// Checks in a row whose blocks never showed.
    unseen: AtomicU32,
    /// The next request may be watched; taken by the shard that sends it, given by the ingest core.
    is_check_wanted: AtomicBool,
}

impl Default for TargetParity {
    fn default() -> Self {
        Self {
            probed: AtomicU8::default(),
            watched: AtomicU8::default(),
            unseen: AtomicU32::default(),
            is_check_wanted: AtomicBool::new(true),
        }
    }
}

impl TargetParity {
    pub fn verdict(&self) -> Parity {
        let read = |cell: &AtomicU8| Parity::of(cell.load(Ordering::Relaxed));
        read(&self.probed).and(read(&self.watched))
    }

    pub fn set_probed(&self, parity: Parity) {
        self.probed.store(parity as u8, Ordering::Relaxed);
    }

    pub fn set_watched(&self, parity: Parity) {
        self.watched.store(parity as u8, Ordering::Relaxed);
    }

    pub fn unseen(&self) -> u32 {
        self.unseen.load(Ordering::Relaxed)
    }

    pub fn set_unseen(&self, checks: u32) {
        self.unseen.store(checks, Ordering::Relaxed);
    }

    /// Whether this request is to be watched. One load while it is not; at most one caller hears yes.
    pub fn take_check(&self) -> bool {
        self.is_check_wanted.load(Ordering::Relaxed) && self.is_check_wanted.swap(false, Ordering::Relaxed)
    }

    pub fn want_check(&self) {
        self.is_check_wanted.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_request_takes_the_check_and_any_divergence_counts() {
        let parity = TargetParity::default();
        assert_eq!((parity.take_check(), parity.take_check()), (true, false));
        parity.want_check();
        assert!(parity.take_check());
        for (probed, watched, expected) in [
            (Parity::Unknown, Parity::Unknown, Parity::Unknown),
            (Parity::Unknown, Parity::Confirmed, Parity::Confirmed),
            (Parity::Diverged, Parity::Confirmed, Parity::Diverged),
            (Parity::Confirmed, Parity::Diverged, Parity::Diverged),
        ] {
            parity.set_probed(probed);
            parity.set_watched(watched);
            assert_eq!(parity.verdict(), expected);
        }
    }
}
