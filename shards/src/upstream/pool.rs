//! Unused upstream connections of one shard: newest first, checked before reuse, closed when they get old. It owns
//! them all and never opens one.

use std::cell::RefCell;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

use super::connection::Connection;
use crate::clock;
use crate::config::UpstreamConfig;
use crate::net::Peeked;
use crate::stats::ShardCounters;

struct Idle {
    connection: Box<Connection>,
    since_ms: u64,
}

pub(super) struct Pool {
    /// Per address, oldest first.
    idle: RefCell<HashMap<SocketAddr, Vec<Idle>>>,
    idle_max: usize,
    idle_ms: u64,
    counters: Arc<ShardCounters>,
}

impl Pool {
    pub(super) fn new(config: &UpstreamConfig, counters: Arc<ShardCounters>) -> Pool {
        let idle_ms = u64::try_from(config.pool_idle_timeout.as_millis()).unwrap_or(u64::MAX);
        Pool { idle: RefCell::default(), idle_max: config.pool_idle_max, idle_ms, counters }
    }

    /// The newest connection to `address` that is young enough and that the upstream has not closed.
    pub(super) fn take(&self, address: &SocketAddr) -> Option<Box<Connection>> {
        let mut all = self.idle.borrow_mut();
        let idle = all.get_mut(address)?;
        while let Some(Idle { mut connection, since_ms }) = idle.pop() {
            self.counters.upstream_idle.subtract(1);
            // Bytes without a request are no answer to the next one: such a connection is as dead as a closed one.
            if self.is_young(since_ms) && connection.stream.peek() == Peeked::Nothing {
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
            idle.push(Idle { connection, since_ms: clock::now_ms() });
            self.counters.upstream_idle.add(1);
        }
    }

    /// Closes what is too old, so that descriptors return without traffic.
    pub(super) fn reap(&self) {
        self.idle.borrow_mut().retain(|_, idle| {
            let old = idle.iter().take_while(|entry| !self.is_young(entry.since_ms)).count();
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

    fn is_young(&self, since_ms: u64) -> bool {
        clock::now_ms().saturating_sub(since_ms) < self.idle_ms
    }
}
