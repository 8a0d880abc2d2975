//! What an operator can ask the router to show without traffic.

pub mod events;
