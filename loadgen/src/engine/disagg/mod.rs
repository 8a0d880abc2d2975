//! Owns what makes an engine one half of a prefill/decode pair: role, protocol, registration, and the state of its
//! transfers. Never computes tokens.
//!
//! Two engines of one protocol depend on each other as real ones do. The prefill engine computes the prompt and holds
//! its KV under a name (a bootstrap room, a transfer id or a request id); the decode engine holds its answer until it
//! has pulled that KV from the prefill engine's address as its request names it. What nobody pulls or frees stays held
//! and is reported: a router that loses a leg strands KV here as it would on a GPU.
//!
//! | protocol | prefill answers | KV is freed without a pull by |
//! |---|---|---|
//! | `sglang-bootstrap` | after the pull | `/abort_request`, not by a closed connection |
//! | `vllm-mooncake`, `vllm-mori-write` | at once | a closed prefill connection, a decode request that ends early |
//! | `vllm-nixl`, `vllm-mori-read`, `atom-mooncake` | at once, naming the KV | a decode request that ends early |
//!
//! Transfers run over this crate's own `POST /pd/pull` and `POST /pd/release`; write-mode pushes are pulls too.

mod legs;
mod plan;
mod transfers;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Duration;

use clap::ValueEnum;
use serde_json::{Value, json};

pub(super) use self::legs::{DecodeOutcome, HeldKv, Waiting, answer_prefill, pull, release};
pub(super) use self::plan::{Plan, plan};
pub use self::transfers::TransferCounts;
use self::transfers::Transfers;
use crate::net::signal::Latch;

/// Which half an engine is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PdRole {
    Prefill,
    Decode,
}

/// How the halves find each other; names as in registration records.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PdProtocol {
    SglangBootstrap,
    VllmMooncake,
    VllmNixl,
    VllmMoriRead,
    VllmMoriWrite,
    AtomMooncake,
}

impl PdProtocol {
    pub const ALL: [PdProtocol; 6] = [
        PdProtocol::SglangBootstrap,
        PdProtocol::VllmMooncake,
        PdProtocol::VllmNixl,
        PdProtocol::VllmMoriRead,
        PdProtocol::VllmMoriWrite,
        PdProtocol::AtomMooncake,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            PdProtocol::SglangBootstrap => "sglang-bootstrap",
            PdProtocol::VllmMooncake => "vllm-mooncake",
            PdProtocol::VllmNixl => "vllm-nixl",
            PdProtocol::VllmMoriRead => "vllm-mori-read",
            PdProtocol::VllmMoriWrite => "vllm-mori-write",
            PdProtocol::AtomMooncake => "atom-mooncake",
        }
    }

    /// The `engine` member of a registration record.
    pub fn engine_name(self) -> &'static str {
        match self {
            PdProtocol::SglangBootstrap => "sglang",
            PdProtocol::AtomMooncake => "atom",
            _ => "vllm",
        }
    }

    fn is_sglang(self) -> bool {
        self == PdProtocol::SglangBootstrap
    }

    /// The prefill answer tells decode where the KV is.
    fn hands_over(self) -> bool {
        matches!(self, PdProtocol::VllmNixl | PdProtocol::VllmMoriRead | PdProtocol::AtomMooncake)
    }
}

/// One engine's half.
#[derive(Clone, Debug)]
pub struct Disagg {
    pub role: PdRole,
    pub protocol: PdProtocol,
    /// Held KV is given up after this long, as engines do (theirs is minutes), and counted as stranded.
    pub hold_timeout: Duration,
}

impl Disagg {
    pub fn new(role: PdRole, protocol: PdProtocol) -> Disagg {
        Disagg { role, protocol, hold_timeout: Duration::from_secs(300) }
    }

    pub fn mode(&self) -> &'static str {
        match self.role {
            PdRole::Prefill => "prefill",
            PdRole::Decode => "decode",
        }
    }

    /// `disagg_meta` of the registration record; every port is the engine's own HTTP port.
    pub fn meta(&self, address: SocketAddr, ranks: u32) -> Value {
        let (host, port) = (address.ip().to_string(), address.port());
        let params = match self.protocol {
            PdProtocol::SglangBootstrap if self.role == PdRole::Decode => json!({}),
            PdProtocol::SglangBootstrap => json!({"bootstrap_addr": address.to_string()}),
            PdProtocol::AtomMooncake => {
                json!({"host": host, "http_port": port, "handshake_port": port, "tp_size": 1, "dp_size": ranks})
            }
            _ => json!({"engine_id": engine_id(port), "kv_ip": host, "kv_port": port,
                "bootstrap_addr": format!("http://{address}"),
                "kv_connector_extra_config": {"handshake_port": port, "notify_port": port, "tp_size": 1}}),
        };
        json!({"protocol": self.protocol.as_str(), "params": params})
    }
}

/// Names by which the sequences of a request can be aborted: its own for one, `<rid>_<i>` for several.
pub(super) fn abort_names(rid: Option<&str>, sequences: usize) -> Vec<String> {
    match (rid, sequences) {
        (None, _) => Vec::new(),
        (Some(rid), 1) => vec![rid.to_string()],
        (Some(rid), _) => (0..sequences).map(|at| format!("{rid}_{at}")).collect(),
    }
}

fn engine_id(port: u16) -> String {
    format!("sim-{port}")
}

/// Transfers of one engine, on its thread.
#[derive(Default)]
pub(super) struct DisaggState {
    transfers: RefCell<Transfers>,
    /// Decode requests that wait for KV: the names `/abort_request` may use, and what ends the wait.
    waiting: RefCell<HashMap<u64, (Vec<String>, Latch)>>,
    next: Cell<u64>,
}

impl DisaggState {
    /// Ends held transfers and waits whose abort name `matches`. Returns how many.
    pub fn abort_named(&self, matches: impl Fn(&str) -> bool) -> usize {
        let mut count = self.transfers.borrow_mut().abort_named(&matches);
        for (names, latch) in self.waiting.borrow().values() {
            if names.iter().any(|name| matches(name)) {
                latch.open();
                count += 1;
            }
        }
        count
    }

    /// Gives up KV that was held too long.
    pub fn expire(&self, hold_timeout: Duration) {
        self.transfers.borrow_mut().expire(hold_timeout, std::time::Instant::now());
    }

    pub fn counts(&self) -> TransferCounts {
        TransferCounts { decode_waiting: self.waiting.borrow().len(), ..self.transfers.borrow().counts() }
    }
}

#[cfg(test)]
mod tests;
