//! The small network layer of this crate: runtime, in-thread signals, HTTP/1.1 on both sides. Never parses JSON.

pub mod client;
pub mod exposition;
mod input;
pub mod runtime;
pub mod server;
pub mod signal;
pub mod stream;
pub mod watch;
