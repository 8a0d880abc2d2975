//! placeholder
pub mod socket;
