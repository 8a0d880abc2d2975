//! The small network layer of this crate: runtime, in-thread signals, HTTP/1.1 on both sides. Never parses JSON.

mod arrivals;
pub mod client;
pub mod exposition;
mod response;
pub mod runtime;
pub mod server;
pub mod signal;
pub mod stream;
pub mod watch;
