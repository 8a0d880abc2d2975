//! The measuring tools: a side-by-side harness for HTTP proxies and the proxies of the runtime comparison.
//!
//! Owns the backend, the load, the rivals' life and the reports. For these the router is what users run, a process of
//! its own; only the benches that measure single functions (index, encoders) and the simulation of its decisions import it.

pub mod answer;
pub mod backend;
pub mod conversation;
pub mod exchange;
pub mod harness;
pub mod http;
pub mod idle;
pub mod kv_workload;
pub mod load;
pub mod low_load;
pub mod machine;
pub mod process;
pub mod report;
pub mod rivals;
pub mod runtimes;
pub mod scenario;
pub mod simulation;
pub mod statistics;
