//! Owns the fleet in virtual time: the engine model of [`crate::engine::scheduler`] without sockets or clocks, workloads
//! as lengths and block names, and what a run measured. Never decides where a request goes: that is a [`Router`], which
//! whoever runs the simulation brings along.
//!
//! One thread, one heap of dated events, ties broken by the order in which they were made: equal inputs give equal runs.

mod agenda;
mod bounds;
mod content;
mod engines;
mod fleet;
mod generate;
mod outcome;
mod trace;
mod workload;

pub use bounds::{best_for_memory, infinite_cache};
pub use content::{Named, Path};
pub use engines::{Engines, Fleet, Pairs, Part};
pub use fleet::{Router, Served, run};
pub use generate::generate;
pub use outcome::{Outcome, Slo, outcome};
pub use trace::replay;
pub use workload::{Request, Start, Workload};

pub use crate::plan::Shape;
pub use crate::plan::trace::{TraceLine, read_trace};
