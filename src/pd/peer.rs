//! One worker as the other side of a transfer sees it: protocol and parameters of its registration record,
//! checked once per registration. A worker that does not pass is not paired; the reason says what is wrong.

use serde_json::Value;

use super::protocol::Protocol;
use crate::worker::{Role, WorkerRecord};

/// Why a worker cannot be one half of a pair.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PeerError {
    #[error("registered no disaggregation protocol")]
    NoProtocol,
    #[error("registered the unknown protocol {0:?}")]
    UnknownProtocol(String),
    #[error("protocol {protocol}: disagg_meta.params.{name} {fault}")]
    Parameter { protocol: Protocol, name: &'static str, fault: &'static str },
}

/// What the legs need to know of a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    pub protocol: Protocol,
    /// Data-parallel ranks behind the worker's address, at least 1.
    pub ranks: u32,
    /// Rank of a worker that is dedicated to one.
    pub own_rank: Option<u32>,
    pub(super) details: Details,
}

/// Parameters by protocol and role; what a side does not need is not required of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Details {
    None,
    /// Both as raw JSON: they go into every body as they are.
    SglangPrefill {
        host: String,
        port: String,
    },
    MooncakePrefill {
        engine_id: String,
        bootstrap_addr: String,
    },
    Mori {
        zmq_address: String,
        tp_size: u32,
    },
    Atom {
        host: String,
        http_port: u16,
        handshake_port: u16,
        tp_size: u32,
        dp_size: u32,
    },
}

impl Peer {
    /// Reads `disagg_meta` (`{"protocol","params"}`, reference section 3.1).
    pub fn of(record: &WorkerRecord) -> Result<Self, PeerError> {
        let meta = record.disagg_meta.as_ref();
        let name = meta.and_then(|meta| meta.get("protocol")).and_then(Value::as_str).ok_or(PeerError::NoProtocol)?;
        let protocol = Protocol::from_name(name).ok_or_else(|| PeerError::UnknownProtocol(name.to_owned()))?;
        let parameters = Parameters { protocol, values: meta.and_then(|meta| meta.get("params")) };
        let is_prefill = record.disagg_mode == Role::Prefill;
        let details = match protocol {
            Protocol::SglangBootstrap if is_prefill => parameters.sglang_prefill()?,
            Protocol::VllmMooncake if is_prefill => Details::MooncakePrefill {
                engine_id: parameters.text("engine_id")?.to_owned(),
                bootstrap_addr: parameters.text("bootstrap_addr")?.to_owned(),
            },
            Protocol::SglangBootstrap | Protocol::VllmMooncake | Protocol::VllmNixl => Details::None,
            Protocol::VllmMoriRead | Protocol::VllmMoriWrite => parameters.mori(record)?,
            Protocol::AtomMooncake => Details::Atom {
                host: parameters.text("host")?.to_owned(),
                http_port: parameters.port("http_port")?,
                handshake_port: parameters.port("handshake_port")?,
                tp_size: parameters.size("tp_size")?,
                dp_size: parameters.size("dp_size")?,
            },
        };
        Ok(Self { protocol, ranks: record.dp_size.unwrap_or(1).max(1), own_rank: record.dp_rank, details })
    }
}

struct Parameters<'a> {
    protocol: Protocol,
    values: Option<&'a Value>,
}

impl<'a> Parameters<'a> {
    fn fault(&self, name: &'static str, fault: &'static str) -> PeerError {
        PeerError::Parameter { protocol: self.protocol, name, fault }
    }

    fn value(&self, name: &'static str) -> Result<&'a Value, PeerError> {
        let value = self.values.and_then(|values| values.get(name)).filter(|value| !value.is_null());
        value.ok_or_else(|| self.fault(name, "is missing"))
    }

    fn text(&self, name: &'static str) -> Result<&'a str, PeerError> {
        let text = self.value(name)?.as_str().filter(|text| !text.is_empty());
        text.ok_or_else(|| self.fault(name, "is not a non-empty string"))
    }

    fn port(&self, name: &'static str) -> Result<u16, PeerError> {
        as_port(self.value(name)?).ok_or_else(|| self.fault(name, "is not a port"))
    }

    fn size(&self, name: &'static str) -> Result<u32, PeerError> {
        let size = self.value(name)?.as_u64().and_then(|size| u32::try_from(size).ok()).filter(|size| *size > 0);
        size.ok_or_else(|| self.fault(name, "is not a positive number"))
    }

    /// `bootstrap_addr` is `host:port`; the host of an IPv6 address stays in brackets.
    fn sglang_prefill(&self) -> Result<Details, PeerError> {
        let address = self.text("bootstrap_addr")?;
        let bare = address.strip_prefix("http://").unwrap_or(address).trim_end_matches('/');
        let split = bare.rsplit_once(':').filter(|(host, _)| !host.is_empty());
        let port = split.and_then(|(_, port)| port.parse::<u16>().ok()).filter(|port| *port > 0);
        match (split, port) {
            (Some((host, _)), Some(port)) => {
                Ok(Details::SglangPrefill { host: Value::from(host).to_string(), port: port.to_string() })
            }
            _ => Err(self.fault("bootstrap_addr", "is not host:port")),
        }
    }

    /// The address that MoRIIO engines read out of the request id: host of the worker's URL and two ports of
    /// the connector's configuration (vLLM's `moriio_common`).
    fn mori(&self, record: &WorkerRecord) -> Result<Details, PeerError> {
        let extra = self.value("kv_connector_extra_config")?;
        let port =
            |name: &'static str| extra.get(name).and_then(as_port).ok_or_else(|| self.fault(name, "is not a port"));
        let (handshake, notify) = (port("handshake_port")?, port("notify_port")?);
        let uri: Option<http::Uri> = record.url.parse().ok();
        let Some(host) = uri.as_ref().and_then(http::Uri::host) else {
            return Err(self.fault("url", "of the worker names no host"));
        };
        let host = host.trim_start_matches('[').trim_end_matches(']');
        // Absent in older workers; the engine's own default.
        let tp_size = extra.get("tp_size").and_then(Value::as_u64).and_then(|size| u32::try_from(size).ok());
        Ok(Details::Mori {
            zmq_address: format!("host:{host},handshake:{handshake},notify:{notify}"),
            tp_size: tp_size.unwrap_or(1),
        })
    }
}

/// Ports come as numbers, and in some engines' configuration as strings.
fn as_port(value: &Value) -> Option<u16> {
    let port = match value {
        Value::String(text) => text.parse().ok()?,
        other => u16::try_from(other.as_u64()?).ok()?,
    };
    (port > 0).then_some(port)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn record(role: &str, meta: Value) -> WorkerRecord {
        let json = json!({"worker_id": "w:1", "url": "http://w:1", "disagg_mode": role, "disagg_meta": meta});
        serde_json::from_value(json).expect("a record")
    }

    fn refused(role: &str, meta: Value, reason: &str) {
        assert_eq!(Peer::of(&record(role, meta.clone())).expect_err("refused").to_string(), reason, "{meta}");
    }

    #[test]
    fn a_bad_registration_says_what_is_wrong() {
        refused("prefill", Value::Null, "registered no disaggregation protocol");
        refused("prefill", json!({"protocol": 3}), "registered no disaggregation protocol");
        refused("decode", json!({"protocol": "vllm-p2p"}), "registered the unknown protocol \"vllm-p2p\"");
        let sglang = |address: Value| json!({"protocol": "sglang-bootstrap", "params": {"bootstrap_addr": address}});
        let parameter = "protocol sglang-bootstrap: disagg_meta.params.bootstrap_addr";
        refused("prefill", json!({"protocol": "sglang-bootstrap"}), &format!("{parameter} is missing"));
        refused("prefill", sglang(json!(8998)), &format!("{parameter} is not a non-empty string"));
        for bad in ["host", ":1", "host:", "host:0", "host:70000", "host:x"] {
            refused("prefill", sglang(json!(bad)), &format!("{parameter} is not host:port"));
        }
        let mori =
            json!({"protocol": "vllm-mori-read", "params": {"kv_connector_extra_config": {"handshake_port": 1}}});
        refused("decode", mori, "protocol vllm-mori-read: disagg_meta.params.notify_port is not a port");
        let atom = json!({"protocol": "atom-mooncake", "params": {"host": "h", "http_port": 1, "handshake_port": 2, "tp_size": 0}});
        refused("decode", atom, "protocol atom-mooncake: disagg_meta.params.tp_size is not a positive number");
    }

    #[test]
    fn each_side_needs_only_what_the_other_reads() {
        let decode = Peer::of(&record("decode", json!({"protocol": "sglang-bootstrap", "params": {}}))).expect("fine");
        assert_eq!(decode.details, Details::None);
        assert!(Peer::of(&record("prefill", json!({"protocol": "vllm-nixl"}))).is_ok());
        let v6 = json!({"protocol": "sglang-bootstrap", "params": {"bootstrap_addr": "[fd00::5]:8998"}});
        let details = Peer::of(&record("prefill", v6)).expect("fine").details;
        assert_eq!(details, Details::SglangPrefill { host: "\"[fd00::5]\"".into(), port: "8998".into() });
    }
}
