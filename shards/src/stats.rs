//! Counters of the shards. Each set is written by one shard and read by anyone; it never takes a lock and
//! never shares a cache line with another shard's set.

use std::sync::atomic::{AtomicU64, Ordering};

/// Plain numbers of one shard at one moment. `*_open`, `*_active` and `*_idle` are levels, all others only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShardStats {
    pub connections_accepted: u64,
    pub connections_open: u64,
    pub requests: u64,
    pub requests_active: u64,
    pub upstream_connects: u64,
    pub upstream_reuses: u64,
    pub upstream_idle: u64,
    pub bytes_to_client: u64,
    /// Exchanges that ended because the client left or stopped reading.
    pub client_aborts: u64,
    /// Messages that the engine refused by itself.
    pub rejections: u64,
    /// Client connections that ended in their TLS handshake.
    pub tls_failures: u64,
    pub panics: u64,
    /// Turns of the shard's own clock; one that stands still for seconds is a shard that hangs.
    pub sweeps: u64,
}

/// One number with a single writer: a load and a store, no locked instruction.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// To be called by its one writer only.
    pub fn add(&self, amount: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(amount), Ordering::Relaxed);
    }

    pub(crate) fn subtract(&self, amount: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_sub(amount), Ordering::Relaxed);
    }

    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The counters of one shard, on cache lines of their own (128: adjacent-line prefetch pairs 64-byte lines).
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct ShardCounters {
    pub(crate) connections_accepted: Counter,
    pub(crate) connections_open: Counter,
    pub(crate) requests: Counter,
    pub(crate) requests_active: Counter,
    pub(crate) upstream_connects: Counter,
    pub(crate) upstream_reuses: Counter,
    pub(crate) upstream_idle: Counter,
    pub(crate) bytes_to_client: Counter,
    pub(crate) client_aborts: Counter,
    pub(crate) rejections: Counter,
    pub(crate) tls_failures: Counter,
    pub(crate) panics: Counter,
    pub(crate) sweeps: Counter,
    /// 1 while the shard takes connections.
    pub(crate) accepting: Counter,
}

impl ShardCounters {
    pub(crate) fn read(&self) -> ShardStats {
        ShardStats {
            connections_accepted: self.connections_accepted.get(),
            connections_open: self.connections_open.get(),
            requests: self.requests.get(),
            requests_active: self.requests_active.get(),
            upstream_connects: self.upstream_connects.get(),
            upstream_reuses: self.upstream_reuses.get(),
            upstream_idle: self.upstream_idle.get(),
            bytes_to_client: self.bytes_to_client.get(),
            client_aborts: self.client_aborts.get(),
            rejections: self.rejections.get(),
            tls_failures: self.tls_failures.get(),
            panics: self.panics.get(),
            sweeps: self.sweeps.get(),
        }
    }
}
