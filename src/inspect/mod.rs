//! Read-only looks into what the router sees, without traffic: `infera-router inspect …`.

pub mod prompt;
