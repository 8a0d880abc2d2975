//! One request's life over a shard's client: read what routing needs, pick and book, send, retry, relay,
//! release. Owns no socket and no thread; everything it holds for a request goes with the request's future,
//! which the engine drops when the client leaves.

mod access;
mod added;
mod budget;
mod cleanup;
mod count;
mod demand;
mod dialect;
mod direct;
mod disaggregated;
mod exchange;
mod explain;
mod explained;
mod held;
mod keys;
mod leg_end;
mod legs;
mod live;
mod messages;
mod metrics;
mod observe;
mod pair;
mod parity;
mod peers;
mod pick;
mod preview;
mod prompts;
mod queries;
mod reading;
mod relay;
mod service;
mod shared;
mod silence;
mod stages;
mod steering;
mod target_metrics;
mod verdict;

pub use access::{AccessLine, AccessQueues, Ended, Leg};
pub use keys::{ClientKeys, OutboundHeaders};
pub use live::{LiveCell, LiveSettings};
pub use metrics::{RequestMetrics, RouterLabel, Totals};
pub use service::{RouterService, Surface, metrics_response};
pub use shared::{
    ControlAsk, ControlPlane, DisaggregationSettings, InflightCaps, Lifecycle, PrefillRelease, RouterMode, Settings,
    Shared,
};
pub use silence::SilenceLimits;
pub use stages::Stage;
pub use steering::{Steering, SteeringSettings};
pub use target_metrics::{Series, TargetFamilies, TargetHandles, TargetTotals};
