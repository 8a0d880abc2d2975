//! What an operator can ask the router to show without traffic: `infera-router inspect …`.

pub mod events;
pub mod prompt;
