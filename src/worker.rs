//! The worker's registration record: what an engine says of itself in etcd, in a workers file or on the
//! command line. Pure data and its parsing; no IO, no clock.
//!
//! Source of the wire form: the registration record of AMD's Infera (`<prefix><worker_id>` in etcd).

mod parse;
mod url;

use std::sync::Arc;

use serde::{Deserialize, Serialize};

pub use parse::{ParsedRecord, RecordError};
pub use url::{UrlError, WorkerUrl, check_events_endpoint};

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
    pub const ALL: [Role; 3] = [Role::Mixed, Role::Prefill, Role::Decode];

    pub const fn as_str(self) -> &'static str {
        match self {
            Role::Mixed => "mixed",
            Role::Prefill => "prefill",
            Role::Decode => "decode",
        }
    }
}

impl std::str::FromStr for Role {
    type Err = ();

    /// The three wire spellings, lowercase only.
    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "mixed" => Ok(Role::Mixed),
            "prefill" => Ok(Role::Prefill),
            "decode" => Ok(Role::Decode),
            _ => Err(()),
        }
    }
}

/// The engines whose side endpoints and protocols differ. Routing itself does not look at this.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum EngineKind {
    Sglang,
    Vllm,
    Atom,
    /// Absent or not one of ours: treated as a plain OpenAI-style server.
    #[default]
    Unknown,
}

impl EngineKind {
    /// From the record's `engine` member; case does not matter.
    pub fn from_name(name: &str) -> Self {
        match name {
            _ if name.eq_ignore_ascii_case("sglang") => EngineKind::Sglang,
            _ if name.eq_ignore_ascii_case("vllm") => EngineKind::Vllm,
            _ if name.eq_ignore_ascii_case("atom") => EngineKind::Atom,
            _ => EngineKind::Unknown,
        }
    }
}

/// One registration record. Unknown members are ignored; an explicit `null` for a member that is not
/// optional is an error, as in the system this one replaces. Values are checked when a record is parsed
/// ([`WorkerRecord::parse`]); a record built by hand is as good as its builder.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "serde_json::Value")]
pub struct WorkerRecord {
    /// `<advertise_host>:<http_port>`; identity everywhere.
    pub worker_id: String,
    /// Base URL, `http://host:port[/]`, as registered; [`WorkerRecord::endpoint`] takes it apart.
    pub url: String,
    /// Exact match with the request's `model`; empty while it is not known yet.
    pub model_name: String,
    /// Further names under which the engine serves the same model (`--served-model-name a b`). Not part of Infera's
    /// record: given by hand or learnt from the engine; never written when there are none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub further_model_names: Vec<String>,
    /// `sglang`, `vllm`, `atom` or empty.
    pub engine: String,
    /// Only `active` is routable.
    pub status: String,
    pub disagg_mode: Role,
    pub disagg_meta: Option<serde_json::Value>,
    /// ZMQ address of rank 0's event publisher; rank r publishes on port + r.
    pub kv_events_endpoint: Option<String>,
    /// ZMQ address of rank 0's replay socket (port + r as above). Not part of Infera's record: given on the
    /// command line or learnt from the engine; never written when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_replay_endpoint: Option<String>,
    /// Template arguments that the engine adds to every chat request (`--default-chat-template-kwargs`). Not part of
    /// Infera's record: given by hand or learnt from the engine; absent means not known, and never written then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default_chat_template_kwargs: Option<serde_json::Map<String, serde_json::Value>>,
    /// Tokens per KV block, at least 1.
    pub kv_block_size: Option<u32>,
    /// Set: a worker dedicated to one rank.
    pub dp_rank: Option<u32>,
    /// Above 1 with `dp_rank` absent: a rank-multiplexed worker, one target per rank. At most
    /// [`crate::limits::DP_RANKS_MAX`].
    pub dp_size: Option<u32>,
    /// `http` or `nats`.
    pub request_transport: String,
}

impl WorkerRecord {
    /// A record with every optional member at its default: active, mixed, over HTTP, nothing known.
    pub fn new(worker_id: impl Into<String>, url: impl Into<String>) -> Self {
        WorkerRecord {
            worker_id: worker_id.into(),
            url: url.into(),
            model_name: String::new(),
            further_model_names: Vec::new(),
            engine: String::new(),
            status: "active".to_owned(),
            disagg_mode: Role::Mixed,
            disagg_meta: None,
            kv_events_endpoint: None,
            kv_replay_endpoint: None,
            default_chat_template_kwargs: None,
            kv_block_size: None,
            dp_rank: None,
            dp_size: None,
            request_transport: "http".to_owned(),
        }
    }

    /// The URL taken apart. Never fails for a record that came from [`WorkerRecord::parse`].
    pub fn endpoint(&self) -> Result<WorkerUrl, UrlError> {
        WorkerUrl::parse(&self.url)
    }

    /// Every name that requests may call the worker's model by; none while that is not known yet.
    pub fn model_names(&self) -> impl Iterator<Item = &str> {
        let first = (!self.model_name.is_empty()).then_some(&self.model_name);
        first.into_iter().chain(&self.further_model_names).map(String::as_str)
    }

    pub fn engine_kind(&self) -> EngineKind {
        EngineKind::from_name(&self.engine)
    }

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

#[cfg(test)]
mod tests;
