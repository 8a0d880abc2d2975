//! Settings of the engine and their defaults. It owns every cap and timeout of the dataplane and never
//! reads a file, a flag or the environment.

use std::net::SocketAddr;
use std::time::Duration;

use crate::tls::{ClientTls, ServerTls};

/// Which IO driver a shard runs on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DriverChoice {
    /// io_uring with the best flags the kernel takes, else epoll with a warning.
    /// `MONOIO_FORCE_LEGACY_DRIVER=1` in the environment means epoll.
    #[default]
    Auto,
    /// epoll, even where io_uring works.
    Epoll,
}

/// What [`crate::Engine::start`] needs.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Address of the listener; port 0 takes a free port that all shards share.
    pub listen: SocketAddr,
    /// Number of shards (threads), at least 1.
    pub shards: usize,
    /// Pin shard `i` to CPU `cpus[i % len]`; `None` or empty leaves placement to the kernel.
    pub cpus: Option<Vec<usize>>,
    pub driver: DriverChoice,
    /// Fail to start instead of falling back to epoll.
    pub require_io_uring: bool,
    /// The listener speaks TLS, and nothing else.
    pub tls: Option<ServerTls>,
    pub limits: Limits,
    pub upstream: UpstreamConfig,
}

impl EngineConfig {
    /// One unpinned shard with default limits.
    pub fn new(listen: SocketAddr) -> EngineConfig {
        EngineConfig {
            listen,
            shards: 1,
            cpus: None,
            driver: DriverChoice::Auto,
            require_io_uring: false,
            tls: None,
            limits: Limits::default(),
            upstream: UpstreamConfig::default(),
        }
    }
}

/// Caps and timeouts on the client's side. Timeouts are coarse: one fires up to a quarter later than it says,
/// never earlier.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Request line and headers, bytes; more is 431.
    pub head_bytes_max: usize,
    /// Header lines of one message (at most 128 whatever is set here); more is 431.
    pub headers_max: usize,
    /// Request body after de-chunking, bytes; more is 413.
    pub body_bytes_max: usize,
    /// What has come of all bodies of one shard that are still on their way, bytes; the one that goes beyond is answered 503.
    /// Nobody has looked at their senders yet.
    pub unfinished_body_bytes_max: usize,
    /// From the first byte of a head (or from accept) to its end; then 408. A TLS handshake has as long by itself.
    pub head_timeout: Duration,
    /// Longest pause between two pieces of a request body; then 408.
    pub body_timeout: Duration,
    /// Longest idle time of a connection between two requests.
    pub keep_alive_timeout: Duration,
    /// Longest time a write to the client may make no progress.
    pub write_stall_timeout: Duration,
    /// Open client connections of one shard; more are answered 503 and closed.
    pub connections_max: usize,
    /// Connections of one shard that are new or have sent a part of a head. Beyond it, those for which that has lasted two
    /// seconds are closed, as many as are too many: they are a flood's, and would take the place of others.
    pub half_open_max: usize,
    /// Bytes of following requests that are read while one is answered.
    pub pipelined_bytes_max: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            head_bytes_max: 32 << 10,
            headers_max: 100,
            body_bytes_max: 64 << 20,
            unfinished_body_bytes_max: 1 << 30,
            head_timeout: Duration::from_secs(30),
            body_timeout: Duration::from_secs(30),
            keep_alive_timeout: Duration::from_secs(75),
            write_stall_timeout: Duration::from_secs(60),
            connections_max: 65_536,
            half_open_max: 32_768,
            pipelined_bytes_max: 64 << 10,
        }
    }
}

/// Caps and timeouts towards upstreams. There is no limit on the whole of an exchange: a stream may run for hours.
#[derive(Clone, Debug)]
pub struct UpstreamConfig {
    /// For the TCP connection, and a TLS handshake on it.
    pub connect_timeout: Duration,
    /// From the end of the request to the first byte of the answer.
    pub first_byte_timeout: Option<Duration>,
    /// Longest silence inside an answer.
    pub idle_timeout: Option<Duration>,
    /// Longest time a write may make no progress.
    pub write_stall_timeout: Duration,
    /// Age at which an unused connection is closed: below the usual server's five seconds, so that we close first.
    pub pool_idle_timeout: Duration,
    /// Unused connections kept per address and shard.
    pub pool_idle_max: usize,
    /// Status line and headers of an answer, bytes.
    pub response_head_bytes_max: usize,
    /// For requests that name a [`crate::TlsName`].
    pub tls: ClientTls,
}

/// The timeouts that may change while shards run; see [`UpstreamConfig`]. `None` waits for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UpstreamTimeouts {
    pub connect: Duration,
    pub first_byte: Option<Duration>,
    pub idle: Option<Duration>,
}

impl UpstreamConfig {
    pub(crate) fn timeouts(&self) -> UpstreamTimeouts {
        UpstreamTimeouts { connect: self.connect_timeout, first_byte: self.first_byte_timeout, idle: self.idle_timeout }
    }
}

impl Default for UpstreamConfig {
    fn default() -> UpstreamConfig {
        UpstreamConfig {
            connect_timeout: Duration::from_secs(5),
            first_byte_timeout: None,
            idle_timeout: None,
            write_stall_timeout: Duration::from_secs(60),
            pool_idle_timeout: Duration::from_secs(4),
            pool_idle_max: 1024,
            response_head_bytes_max: 64 << 10,
            tls: ClientTls::default(),
        }
    }
}

/// Period of the sweep that enforces all timeouts: an eighth of the shortest one, between 5 ms and 500 ms.
pub(crate) fn sweep_period(limits: &Limits, upstream: &UpstreamConfig) -> Duration {
    let mut shortest = [
        limits.head_timeout,
        limits.body_timeout,
        limits.keep_alive_timeout,
        limits.write_stall_timeout,
        upstream.connect_timeout,
        upstream.write_stall_timeout,
        upstream.pool_idle_timeout,
    ]
    .into_iter()
    .min()
    .unwrap_or_default();
    for optional in [upstream.first_byte_timeout, upstream.idle_timeout].into_iter().flatten() {
        shortest = shortest.min(optional);
    }
    (shortest / 8).clamp(Duration::from_millis(5), Duration::from_millis(500))
}
