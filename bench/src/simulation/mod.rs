//! The router's decision code in front of the simulated fleet of [`loadgen::sim`]. It stands here and not in loadgen, which
//! must not know the router.

mod baselines;
mod kv_aware;
mod picture;
mod plan;
mod rule;
mod summary;

pub use kv_aware::{Knowledge, Options};
pub use picture::svg;
pub use plan::{Bounds, Plan, RunResult, Source, run_all};
pub use rule::Rule;
pub use summary::{Row, Summary, summarise};
