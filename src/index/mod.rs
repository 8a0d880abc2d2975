//! The mirror of every worker's KV cache and the radix snapshot that shards read. Knows blocks and slots; never knows a
//! request, a socket or a clock.
//!
//! Chained hashes make every block's place in the tree unique, so the tree needs no edges: runs of consecutive blocks with
//! the same holders lie in one table under the hash of their first block, and a walk finds the next run by the next block of
//! the query. A branch therefore splits nothing; only holders that differ do, and runs that become alike are joined again.

mod copies;
pub mod holders;
pub mod mirror;
mod orphans;
pub mod snapshot;
mod table;
pub mod tree;
pub mod view;

pub use mirror::{Applied, Mirror};
pub use snapshot::{Hits, Snapshot};
pub use tree::Tree;
pub use view::{RankStatus, SharedView, View};

#[cfg(test)]
mod model_tests;
