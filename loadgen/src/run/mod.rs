//! Owns a load run: a workload's requests sent to a target on schedule, what came back, and the report. Never starts
//! engines or routers.

pub mod answer;
pub mod driver;
pub mod record;
pub mod report;
pub mod rows;
pub mod scrape;
pub mod workload;
