//! Owns the reading of a request's transfer members: names of the KV, where to pull it from, and the refusal of what
//! contradicts the engine's half. Never does IO.

use serde_json::Value;

use super::super::core::Engine;
use super::super::generate::Kind;
use super::super::shapes::ApiError;
use super::{Disagg, PdProtocol, PdRole, engine_id};
use crate::net::server::Request;

/// What a request means for this half.
pub(in super::super) enum Plan {
    /// No transfer: the engine computes everything itself.
    Alone,
    Prefill {
        /// One per sequence for SGLang, else one.
        names: Vec<String>,
        rank: u32,
    },
    Decode(Vec<Source>),
}

/// One transfer to pull.
#[derive(Clone, Debug)]
pub(in super::super) struct Source {
    pub host: String,
    pub port: u16,
    pub name: String,
    pub rank: Option<u32>,
    pub engine_id: Option<String>,
}

fn refuse<T>(message: impl AsRef<str>) -> Result<T, ApiError> {
    Err(ApiError::bad_request(message.as_ref()))
}

/// `rank` is the data-parallel rank chosen for the request.
pub(in super::super) fn plan(
    engine: &Engine,
    request: &Request,
    kind: Kind,
    body: &Value,
    sequences: usize,
    rank: usize,
) -> Result<Plan, ApiError> {
    let Some(disagg) = &engine.config.disagg else { return Ok(Plan::Alone) };
    if body.get("stream_options").is_some_and(|options| !options.is_null()) && body["stream"] != true {
        return refuse("Stream options can only be defined when `stream=True`.");
    }
    let limit = body["max_completion_tokens"].as_u64().or(body["max_tokens"].as_u64());
    if let (Some(least), Some(limit)) = (body["min_tokens"].as_u64(), limit)
        && least > limit
    {
        return refuse(format!("min_tokens must be less than or equal to max_tokens={limit}, got {least}."));
    }
    if disagg.protocol.is_sglang() {
        return sglang(engine, disagg, request, body, sequences, rank);
    }
    if disagg.protocol == PdProtocol::AtomMooncake && kind != Kind::Text {
        return refuse("kv_transfer_params is not taken on this path");
    }
    let parameters = &body["kv_transfer_params"];
    match disagg.role {
        PdRole::Prefill => vllm_prefill(engine, disagg, kind, body, sequences, rank),
        PdRole::Decode => vllm_decode(disagg, request, body, parameters),
    }
}

fn sglang(
    engine: &Engine,
    disagg: &Disagg,
    request: &Request,
    body: &Value,
    sequences: usize,
    rank: usize,
) -> Result<Plan, ApiError> {
    let (Some(host), Some(port)) = (body["bootstrap_host"].as_str(), body["bootstrap_port"].as_u64()) else {
        return refuse("Disaggregated request received without bootstrap host and port.");
    };
    let rooms: Option<Vec<u64>> = match &body["bootstrap_room"] {
        Value::Array(rooms) => rooms.iter().map(Value::as_u64).collect(),
        room => room.as_u64().map(|room| (0..sequences as u64).map(|at| room + at).collect()),
    };
    let Some(rooms) = rooms.filter(|rooms| rooms.len() == sequences && rooms.iter().all(|room| *room < 1 << 63)) else {
        return refuse(format!("Disaggregated request received without {sequences} bootstrap room ids below 2^63."));
    };
    let ranks = engine.ranks.len() as u64;
    if disagg.role == PdRole::Prefill {
        if request.rank.is_some() && rooms.iter().any(|room| room % ranks != rank as u64) {
            return refuse(format!("bootstrap rooms {rooms:?} do not follow data-parallel rank {rank} of {ranks}"));
        }
        if rooms.iter().any(|room| room % ranks != rooms[0] % ranks) {
            return refuse(format!("bootstrap rooms {rooms:?} follow different data-parallel ranks"));
        }
        let names = rooms.iter().map(u64::to_string).collect();
        return Ok(Plan::Prefill { names, rank: (rooms[0] % ranks) as u32 });
    }
    let prefill_rank = body["disagg_prefill_dp_rank"].as_u64().map(|rank| rank as u32);
    let source = |room: u64| Source {
        host: host.trim_start_matches('[').trim_end_matches(']').to_string(),
        port: port as u16,
        name: room.to_string(),
        rank: prefill_rank,
        engine_id: None,
    };
    Ok(Plan::Decode(rooms.into_iter().map(source).collect()))
}

fn vllm_prefill(
    engine: &Engine,
    disagg: &Disagg,
    kind: Kind,
    body: &Value,
    sequences: usize,
    rank: usize,
) -> Result<Plan, ApiError> {
    let parameters = &body["kv_transfer_params"];
    if parameters["do_remote_decode"] != true || parameters["do_remote_prefill"] != false {
        return refuse("a prefill request needs kv_transfer_params with do_remote_decode");
    }
    // A real engine would stream or generate to the end, for nobody.
    let limit = if kind == Kind::Responses { "max_output_tokens" } else { "max_tokens" };
    if body["stream"] == true || body[limit] != 1 || sequences != 1 {
        return refuse("a prefill request is for one sequence, one token and no stream");
    }
    let name = match disagg.protocol {
        PdProtocol::VllmMooncake | PdProtocol::VllmMoriRead | PdProtocol::VllmMoriWrite => {
            match parameters["transfer_id"].as_str() {
                Some(name) => name.to_string(),
                None => return refuse("kv_transfer_params lacks transfer_id"),
            }
        }
        _ => format!("req-{:032x}", rand::random::<u128>()),
    };
    debug_assert!(rank < engine.ranks.len());
    Ok(Plan::Prefill { names: vec![name], rank: rank as u32 })
}

fn vllm_decode(disagg: &Disagg, request: &Request, body: &Value, parameters: &Value) -> Result<Plan, ApiError> {
    if parameters.is_null() {
        return Ok(Plan::Alone);
    }
    if parameters["do_remote_prefill"] != true {
        return refuse("a decode request needs kv_transfer_params with do_remote_prefill");
    }
    if body["prompt"].as_array().is_some_and(|prompts| prompts.len() > 1 && !prompts[0].is_number()) {
        return refuse("one transfer cannot serve several prompts");
    }
    let text = |name: &str| parameters[name].as_str().map(str::to_string);
    let number = |name: &str| parameters[name].as_u64().and_then(|number| u16::try_from(number).ok());
    let rank = |name: &str| parameters[name].as_u64().map(|rank| rank as u32);
    let source = match disagg.protocol {
        PdProtocol::VllmMooncake => {
            let address = text("remote_bootstrap_addr").unwrap_or_default();
            let split = address
                .trim_start_matches("http://")
                .rsplit_once(':')
                .map(|(host, port)| (host.to_string(), port.parse()));
            match (split, text("transfer_id"), text("remote_engine_id")) {
                (Some((host, Ok(port))), Some(name), Some(id)) => {
                    Some(Source { host, port, name, rank: None, engine_id: Some(id) })
                }
                _ => None,
            }
        }
        PdProtocol::VllmMoriRead | PdProtocol::VllmMoriWrite => {
            let peer = request.request_id.as_deref().and_then(mori_prefill_address);
            peer.zip(text("transfer_id")).map(|((host, port), name)| Source {
                host,
                port,
                name,
                rank: rank("remote_dp_rank"),
                engine_id: text("remote_engine_id"),
            })
        }
        PdProtocol::VllmNixl => match (text("remote_host"), number("remote_port"), text("remote_request_id")) {
            (Some(host), Some(port), Some(name)) => {
                Some(Source { host, port, name, rank: None, engine_id: text("remote_engine_id") })
            }
            _ => None,
        },
        _ => match (text("remote_host"), number("remote_port"), text("transfer_id")) {
            (Some(host), Some(port), Some(name)) if parameters["remote_tp_size"].is_number() => {
                Some(Source { host, port, name, rank: rank("remote_dp_rank"), engine_id: None })
            }
            _ => None,
        },
    };
    match source {
        Some(source) => Ok(Plan::Decode(vec![source])),
        None => refuse(format!("kv_transfer_params do not say where the KV is: {parameters}")),
    }
}

/// `___prefill_addr_host:<host>,handshake:<port>,notify:<port>___decode_addr_…`
fn mori_prefill_address(request_id: &str) -> Option<(String, u16)> {
    let (address, _) = request_id.strip_prefix("___prefill_addr_host:")?.split_once("___decode_addr_host:")?;
    let (host, ports) = address.split_once(",handshake:")?;
    let (handshake, _) = ports.split_once(",notify:")?;
    Some((host.to_string(), handshake.parse().ok()?))
}

/// What a vLLM or ATOM prefill engine puts into its answer; nothing where the protocol has no handoff.
pub(super) fn handoff(engine: &Engine, disagg: &Disagg, name: &str, rank: u32, blocks: usize) -> Value {
    let (host, port) = (engine.address.ip().to_string(), engine.address.port());
    let blocks: Vec<usize> = (0..blocks).collect();
    match disagg.protocol {
        PdProtocol::VllmNixl => serde_json::json!({"do_remote_prefill": true, "do_remote_decode": false,
            "remote_block_ids": blocks, "remote_engine_id": rank_engine_id(engine, rank), "remote_request_id": name,
            "remote_host": host, "remote_port": port, "tp_size": 1}),
        PdProtocol::VllmMoriRead => serde_json::json!({"do_remote_prefill": true, "do_remote_decode": false,
            "remote_block_ids": blocks, "remote_engine_id": rank_engine_id(engine, rank), "transfer_id": name}),
        PdProtocol::AtomMooncake => serde_json::json!({"do_remote_prefill": true, "do_remote_decode": false,
            "remote_block_ids": blocks, "remote_engine_id": null, "transfer_id": name, "first_token_id": 1,
            "remote_host": host, "remote_port": port, "dp_rank": rank}),
        _ => Value::Null,
    }
}

pub(super) fn rank_engine_id(engine: &Engine, rank: u32) -> String {
    let id = engine_id(engine.address.port());
    if engine.ranks.len() > 1 { format!("{id}_dp{rank}") } else { id }
}
