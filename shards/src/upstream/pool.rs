//! Unused upstream connections of one shard: newest first, checked before reuse, closed when they get old. It owns
//! them all and never opens one.

use std::cell::RefCell;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::connection::Connection;
use crate::config::UpstreamConfig;
use crate::net::Peeked;
use crate::stats::ShardCounters;
use crate::tls::TlsName;

/// A connection that was given back this recently is not looked at before reuse: under load that look would cost a
/// system call per request, and a close in so short a time can also come right after it.
const TRUSTED: Duration = Duration::from_millis(1);

struct Idle {
    connection: Box<Connection>,
    since: Instant,
}

/// Multiplies words together: addresses come from the operator, so nobody aims at collisions.
#[derive(Default)]
pub(super) struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn write(&mut self, bytes: &[u8]) {
        for piece in bytes.chunks(8) {
            let mut word = [0_u8; 8];
            word[..piece.len()].copy_from_slice(piece);
            self.0 = (self.0.rotate_left(5) ^ u64::from_le_bytes(word)).wrapping_mul(0x517c_c1b7_2722_0a95);
        }
    }

    fn finish(&self) -> u64 {
        // The table takes its tag from the top bits and its slot from the low ones.
        self.0 ^ (self.0 >> 32)
    }
}

pub(super) struct Pool {
    /// Per address, oldest first.
    idle: RefCell<HashMap<SocketAddr, Vec<Idle>, BuildHasherDefault<AddressHasher>>>,
    idle_max: usize,
    idle_timeout: Duration,
    counters: Arc<ShardCounters>,
}

impl Pool {
    pub(super) fn new(config: &UpstreamConfig, counters: Arc<ShardCounters>) -> Pool {
        let (idle_max, idle_timeout) = (config.pool_idle_max, config.pool_idle_timeout);
        Pool { idle: RefCell::default(), idle_max, idle_timeout, counters }
    }

    /// The newest connection to `address`, with TLS for that name or without, that is young enough and that the upstream
    /// has not closed.
    pub(super) fn take(&self, address: &SocketAddr, tls: Option<&TlsName>) -> Option<Box<Connection>> {
        let mut all = self.idle.borrow_mut();
        let idle = all.get_mut(address)?;
        // Nearly always the last one: an address rarely has connections of two kinds.
        while let Some(newest) = idle.iter().rposition(|entry| entry.connection.tls.as_ref() == tls) {
            let Idle { mut connection, since } = idle.remove(newest);
            self.counters.upstream_idle.subtract(1);
            let age = since.elapsed();
            // Bytes without a request are no answer to the next one: such a connection is as dead as a closed one.
            let usable = age < TRUSTED || (age < self.idle_timeout && connection.stream.look() == Peeked::Nothing);
            if usable {
                connection.reused = true;
                return Some(connection);
            }
        }
        None
    }

    pub(super) fn give(&self, mut connection: Box<Connection>) {
        connection.release_if_empty();
        let mut all = self.idle.borrow_mut();
        let idle = all.entry(connection.address).or_default();
        if idle.len() < self.idle_max {
            idle.push(Idle { connection, since: Instant::now() });
            self.counters.upstream_idle.add(1);
        }
    }

    /// Closes what is too old, so that descriptors return without traffic.
    pub(super) fn reap(&self) {
        let now = Instant::now();
        self.idle.borrow_mut().retain(|_, idle| {
            let is_old = |entry: &&Idle| now.duration_since(entry.since) >= self.idle_timeout;
            let old = idle.iter().take_while(is_old).count();
            if old > 0 {
                idle.drain(..old);
                self.counters.upstream_idle.subtract(old as u64);
            }
            !idle.is_empty()
        });
    }

    pub(super) fn clear(&self) {
        let all = std::mem::take(&mut *self.idle.borrow_mut());
        let count: usize = all.values().map(Vec::len).sum();
        self.counters.upstream_idle.subtract(count as u64);
    }
}
