//! Owns what sessions are made of before anyone renders them: named pieces of text with lengths, answers, pauses, and the
//! recipes that draw them. Never makes text, blocks or requests: [`crate::sim`] makes blocks of a plan, and
//! [`crate::run::workload`] makes bodies.

mod draw;
mod recipe;
pub mod trace;

pub use draw::{Sessions, image_name};
pub use recipe::{Documents, Images, Recipe, Shape, Shared};

/// What a piece of a prompt is to the chat that it is part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A system prompt, with its tools where the recipe has some.
    System,
    Document,
    Message,
    /// What a tool gave back to the call in the answer before.
    ToolResult,
    /// A picture; its length is what models make of it.
    Image,
}

/// Equal names stand for equal texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    pub kind: Kind,
    pub name: u64,
    pub tokens: usize,
}

/// One request of a session: what it adds to everything before it, and what it is answered.
#[derive(Clone, Debug, PartialEq)]
pub struct Turn {
    /// From the end of the answer before to this request, nanoseconds; 0 for the first.
    pub pause_ns: u64,
    pub pieces: Vec<Piece>,
    /// Name of the answer, where a history quotes one that no server gave.
    pub answer: u64,
    pub answer_tokens: usize,
}

/// A conversation, an agent's run, or a single request.
#[derive(Clone, Debug, PartialEq)]
pub struct Session {
    /// From 1, in order of beginning.
    pub number: u64,
    /// When its first request is due, nanoseconds after the start.
    pub at_ns: u64,
    /// Sessions that begin with the same shared text, beyond what all have in common, have one number.
    pub group: Option<u64>,
    /// At least one.
    pub turns: Vec<Turn>,
}
