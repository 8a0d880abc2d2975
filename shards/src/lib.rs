//! Thread-per-core HTTP/1.1 engine of the router. It owns listeners, TLS, the HTTP/1.1 codec on both sides,
//! the upstream connection pool, the relay, timers, pinning and cross-thread wake-up. It never parses
//! JSON and never knows what a worker, a model or a prompt is.
//!
//! Every shard is one thread with its own runtime, listener, pool and service; shards share nothing but
//! the counters, which one shard writes and anyone reads. `README.md` beside this crate describes the
//! life of a connection.

#![deny(unsafe_code)]

mod buffers;
mod clock;
mod config;
mod connection;
mod engine;
#[cfg(feature = "fuzzing")]
pub mod fuzz;
mod http1;
mod mailbox;
#[cfg(feature = "measuring")]
pub mod measured;
mod net;
#[allow(unsafe_code)]
mod raw;
mod service;
mod shard;
mod stats;
pub mod time;
mod tls;
mod trim;
mod upstream;

pub use config::{DriverChoice, EngineConfig, Limits, UpstreamConfig, UpstreamTimeouts};
pub use connection::{BodyObserver, BodyRewriter, ClientGone, IgnoreBody, Relay, RelayOutcome, Responder};
pub use engine::{Engine, StartError};
pub use http1::head::Head;
pub use mailbox::{Completion, Mailbox, Pending};
pub use net::runtime::DriverReport;
#[cfg(feature = "mimalloc")]
pub use raw::Allocator;
pub use raw::{prefetch, release_free_memory};
pub use service::{Rejection, RejectionKind, Request, Response, Service, ShardContext};
pub use shard::{boxed, spawn_local};
pub use stats::{Counter, ShardStats};
pub use tls::{ClientTls, ServerTls, TlsError, TlsName};
pub use upstream::{SendProgress, Upstream, UpstreamError, UpstreamErrorKind, UpstreamRequest, UpstreamResponse};
