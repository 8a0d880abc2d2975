//! The measuring tools: a side-by-side harness for HTTP proxies and the proxies of the runtime comparison.
//!
//! Owns the backend, the load, the rivals' life and the reports. For these the router is what users run, a process of
//! its own; only the index benches, which measure single functions, import it.

pub mod answer;
pub mod backend;
pub mod harness;
pub mod http;
pub mod idle;
pub mod kv_workload;
pub mod load;
pub mod machine;
pub mod process;
pub mod report;
pub mod rivals;
pub mod runtimes;
pub mod scenario;
pub mod statistics;
