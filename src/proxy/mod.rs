//! One request's life over a shard's client: read what routing needs, pick and book, send, retry, relay,
//! release. Owns no socket and no thread; everything it holds for a request goes with the request's future,
//! which the engine drops when the client leaves.

mod exchange;
mod metrics;
mod observe;
mod pick;
mod prompts;
mod service;
mod shared;

pub use metrics::RequestMetrics;
pub use service::{RouterService, metrics_response};
pub use shared::{ControlAsk, ControlPlane, Lifecycle, Settings, Shared};
