//! Owns what a workload is: requests, when each starts, and which session it belongs to. Never makes one.

use super::content::Named;

/// When a request is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// Nanoseconds after the beginning, whatever the server does.
    At(u64),
    /// So many nanoseconds after another request's answer has ended: think time, or a tool's run.
    After { request: usize, pause_ns: u64 },
}

#[derive(Clone, Debug)]
pub struct Request {
    pub start: Start,
    /// Requests of one conversation or agent have one number.
    pub session: u64,
    pub content: Named,
}

/// Requests in the order in which they were made; a request that starts after another stands behind it.
#[derive(Clone, Debug)]
pub struct Workload {
    pub name: String,
    /// Tokens per block of the contents' names.
    pub block_size: usize,
    pub requests: Vec<Request>,
}
