//! The worker's registration record: what an engine says of itself in etcd, in a workers file or on the
//! command line. Pure data and its parsing; no IO, no clock.
//!
//! Source of the wire form: the registration record of AMD's Infera (`<prefix><worker_id>` in etcd).

use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// What a worker does in a disaggregated fleet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Prefill and decode in one engine.
    #[default]
    Mixed,
    Prefill,
    Decode,
}

impl Role {
    pub const fn as_str(self) -> &'static str {
        match self {
            Role::Mixed => "mixed",
            Role::Prefill => "prefill",
            Role::Decode => "decode",
        }
    }
}

/// One registration record. Unknown members are ignored; an explicit `null` for a member that is not
/// optional is an error, as in the system this one replaces.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkerRecord {
    /// `<advertise_host>:<http_port>`; identity everywhere.
    pub worker_id: String,
    /// Base URL, `http://host:port[/]`.
    pub url: String,
    /// Exact match with the request's `model`; empty while it is not known yet.
    #[serde(default)]
    pub model_name: String,
    /// `sglang`, `vllm`, `atom` or empty.
    #[serde(default)]
    pub engine: String,
    /// Only `active` is routable.
    #[serde(default = "active")]
    pub status: String,
    #[serde(default)]
    pub disagg_mode: Role,
    #[serde(default)]
    pub disagg_meta: Option<serde_json::Value>,
    /// ZMQ address of rank 0's event publisher; rank r publishes on port + r.
    #[serde(default)]
    pub kv_events_endpoint: Option<String>,
    /// Tokens per KV block.
    #[serde(default)]
    pub kv_block_size: Option<u32>,
    /// Set: a worker dedicated to one rank.
    #[serde(default)]
    pub dp_rank: Option<u32>,
    /// Above 1 with `dp_rank` absent: a rank-multiplexed worker, one target per rank.
    #[serde(default)]
    pub dp_size: Option<u32>,
    /// `http` or `nats`.
    #[serde(default = "http")]
    pub request_transport: String,
}

fn active() -> String {
    "active".to_owned()
}

fn http() -> String {
    "http".to_owned()
}

impl WorkerRecord {
    /// Ranks that are separate routing targets: `dp_size` for a rank-multiplexed worker, else 1.
    pub fn rank_count(&self) -> u32 {
        match (self.dp_rank, self.dp_size) {
            (None, Some(size)) if size > 1 => size,
            _ => 1,
        }
    }

    /// Whether requests must name one of the worker's ranks.
    pub fn is_rank_multiplexed(&self) -> bool {
        self.rank_count() > 1
    }

    pub fn is_active(&self) -> bool {
        self.status == "active"
    }
}

/// Identity of one registration of a worker. A worker that leaves and comes back, or that comes back
/// with another event endpoint or block size, is a new generation: nothing of the old one touches it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Generation(pub u64);

/// Shared spelling of a worker id or a route key.
pub type Name = Arc<str>;
