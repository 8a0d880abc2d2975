//! The measuring tools: a side-by-side harness for HTTP proxies and the proxies of the runtime comparison.
//!
//! Owns the backend, the load, the rivals' life and the reports. Never imports the router or its shards:
//! the router is measured as what users run, a process of its own.

pub mod answer;
pub mod backend;
pub mod harness;
pub mod http;
pub mod idle;
pub mod load;
pub mod machine;
pub mod process;
pub mod report;
pub mod rivals;
pub mod runtimes;
pub mod scenario;
pub mod statistics;
