//! One request's life over a shard's client: read what routing needs, pick and book, send, retry, relay,
//! release. Owns no socket and no thread; everything it holds for a request goes with the request's future,
//! which the engine drops when the client leaves.

mod cleanup;
mod direct;
mod disaggregated;
mod exchange;
mod held;
mod legs;
mod metrics;
mod observe;
mod pair;
mod parity;
mod peers;
mod pick;
mod prompts;
mod queries;
mod reading;
mod relay;
mod service;
mod shared;
mod steering;

pub use metrics::RequestMetrics;
pub use service::{RouterService, metrics_response};
pub use shared::{
    ControlAsk, ControlPlane, DisaggregationSettings, Lifecycle, PrefillRelease, RouterMode, Settings, Shared,
};
pub use steering::{Steering, SteeringSettings};
