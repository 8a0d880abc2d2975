//! Owns a load run: a workload's requests sent to a target on schedule, what came back, and the report. Never starts
//! engines or routers.

pub mod answer;
pub mod config;
pub mod driver;
pub mod endpoint;
pub mod manners;
pub mod pace;
pub mod reading;
pub mod record;
pub mod recording;
mod render;
pub mod report;
pub mod rows;
pub mod scrape;
pub mod slo;
#[cfg(test)]
mod test_support;
mod typed;
#[cfg(test)]
mod wire_tests;
pub mod workload;

pub use render::image_reference;
