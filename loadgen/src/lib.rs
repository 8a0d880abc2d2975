//! Owns the measuring side of the project: simulated engines, workloads, load generation, the demo. Never imports the
//! router, so that both sides can only agree through the wire.

pub mod demo;
pub mod engine;
pub mod fleet;
pub mod net;
pub mod plan;
pub mod prompt;
pub mod report;
pub mod run;
pub mod seed;
pub mod sibling;
pub mod sim;
pub mod words;
