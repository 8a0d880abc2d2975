//! The bodies and ids of both legs, per protocol: what is set, what is taken out, and what of the client's body
//! stays. Every body is a list of segments that share the client's bytes.
//!
//! Prefill computes the prompt and one token: whatever asks it for more, or for a stream, is taken out. Decode
//! keeps the client's values. A client's own transfer members never survive on either leg.

use serde_json::{Value, json};

use super::handoff::Handoff;
use super::ids::AttemptIds;
use super::peer::{Details, Peer};
use super::pins::{DECODE_PINS, PREFILL_PIN};
use super::protocol::{PdEndpoint, Protocol};
use super::splice::{Edits, Members, Segments};

/// The two workers of one attempt; both speak the same protocol.
#[derive(Clone, Copy, Debug)]
pub struct Pair<'a> {
    pub prefill: &'a Peer,
    pub decode: &'a Peer,
    /// Rank that was picked of a rank-multiplexed prefill worker.
    pub prefill_rank: Option<u32>,
}

impl Pair<'_> {
    pub fn protocol(&self) -> Protocol {
        self.prefill.protocol
    }

    /// Rank and number of ranks that a room must agree with: the picked rank, or the one that the prefill
    /// worker is dedicated to.
    pub fn room_rank(&self) -> Option<(u32, u32)> {
        let rank = self.prefill_rank.or(self.prefill.own_rank)?;
        (rank < self.prefill.ranks && self.prefill.ranks > 1).then_some((rank, self.prefill.ranks))
    }
}

/// What one leg sends besides the client's own headers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leg {
    pub body: Segments,
    /// Replaces the client's `X-Request-Id`, for engines that find each other through it.
    pub request_id: Option<String>,
}

/// The prefill leg's body.
pub fn prefill_leg(pair: &Pair<'_>, endpoint: PdEndpoint, members: &Members, ids: &AttemptIds) -> Leg {
    let mut edits = Edits::default();
    for pin in DECODE_PINS {
        edits.remove(pin);
    }
    edits.remove(PREFILL_PIN);
    one_token(&mut edits, endpoint, pair.protocol());
    match pair.protocol() {
        Protocol::SglangBootstrap => bootstrap(&mut edits, pair, endpoint, ids),
        Protocol::VllmMooncake => transfer(
            &mut edits,
            json!({"do_remote_decode": true, "do_remote_prefill": false, "transfer_id": ids.transfer_id("xfer")}),
        ),
        Protocol::VllmNixl => transfer(
            &mut edits,
            json!({"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
                "remote_block_ids": null, "remote_host": null, "remote_port": null}),
        ),
        Protocol::VllmMoriRead | Protocol::VllmMoriWrite => {
            let mut parameters = json!({"do_remote_decode": true, "do_remote_prefill": false,
                "remote_engine_id": null, "remote_block_ids": null, "transfer_id": ids.transfer_id("tx")});
            mori_sizes(&mut parameters, pair.decode);
            transfer(&mut edits, parameters);
        }
        Protocol::AtomMooncake => {
            if let Details::Atom { host, http_port, handshake_port, tp_size, dp_size } = &pair.decode.details {
                transfer(
                    &mut edits,
                    json!({"remote_dp_size": dp_size, "remote_tp_size": tp_size, "do_remote_decode": true,
                        "do_remote_prefill": false, "remote_handshake_port": handshake_port,
                        "remote_engine_id": null, "remote_block_ids": null, "remote_host": host,
                        "remote_port": http_port}),
                );
            }
        }
    }
    Leg { body: members.apply(&edits), request_id: request_id(pair, ids) }
}

/// The decode leg's body. `handoff` is what a serial prefill leg left; without one decode computes the prompt
/// itself.
pub fn decode_leg(
    pair: &Pair<'_>,
    endpoint: PdEndpoint,
    members: &Members,
    ids: &AttemptIds,
    handoff: Option<&Handoff>,
) -> Leg {
    decode_with(&mut Edits::default(), pair, endpoint, members, ids, handoff)
}

/// A decode leg for nobody: it pulls the KV that a prefill worker holds, generates one token and ends.
pub fn release_leg(
    pair: &Pair<'_>,
    endpoint: PdEndpoint,
    members: &Members,
    ids: &AttemptIds,
    handoff: Option<&Handoff>,
) -> Leg {
    let mut edits = Edits::default();
    one_token(&mut edits, endpoint, pair.protocol());
    decode_with(&mut edits, pair, endpoint, members, ids, handoff)
}

fn decode_with<'a>(
    edits: &mut Edits<'a>,
    pair: &Pair<'a>,
    endpoint: PdEndpoint,
    members: &Members,
    ids: &'a AttemptIds,
    handoff: Option<&Handoff>,
) -> Leg {
    edits.remove(PREFILL_PIN);
    match pair.protocol() {
        Protocol::SglangBootstrap => {
            bootstrap(edits, pair, endpoint, ids);
            name_prefill_rank(edits, pair);
        }
        Protocol::VllmMooncake => {
            if let Details::MooncakePrefill { engine_id, bootstrap_addr } = &pair.prefill.details {
                let engine_id = match pair.prefill.ranks {
                    0 | 1 => engine_id.clone(),
                    ranks => format!("{engine_id}_dp{}", ids.room() % u64::from(ranks)),
                };
                transfer(
                    edits,
                    json!({"do_remote_decode": false, "do_remote_prefill": true,
                        "remote_bootstrap_addr": bootstrap_addr, "remote_engine_id": engine_id,
                        "transfer_id": ids.transfer_id("xfer")}),
                );
            }
            name_prefill_rank(edits, pair);
        }
        Protocol::VllmMoriWrite => {
            let mut parameters = json!({"do_remote_decode": false, "do_remote_prefill": true,
                "remote_engine_id": null, "remote_block_ids": null, "transfer_id": ids.transfer_id("tx")});
            mori_prefill(&mut parameters, pair);
            transfer(edits, parameters);
        }
        Protocol::VllmNixl | Protocol::VllmMoriRead | Protocol::AtomMooncake => match handoff {
            None => _ = edits.remove(TRANSFER),
            Some(handoff) => _ = edits.set(TRANSFER, handed_over(pair, handoff)),
        },
    }
    Leg { body: members.apply(edits), request_id: request_id(pair, ids) }
}

const TRANSFER: &str = "kv_transfer_params";

fn transfer(edits: &mut Edits<'_>, parameters: Value) {
    edits.set(TRANSFER, parameters.to_string());
}

/// One token, no stream, whatever the client asked for.
fn one_token(edits: &mut Edits<'_>, endpoint: PdEndpoint, protocol: Protocol) {
    for name in ["stream_options", "min_tokens", "min_completion_tokens", "background"] {
        edits.remove(name);
    }
    if protocol == Protocol::SglangBootstrap {
        // The engine itself stops after one token. `n` stays: there is one room for each sample, and both legs
        // must agree on how many.
        edits.replace("stream", "false");
        for name in ["max_tokens", "max_completion_tokens", "max_output_tokens"] {
            edits.replace(name, "1");
        }
        return;
    }
    edits.set("stream", "false");
    for name in ["n", "best_of", "use_beam_search"] {
        edits.remove(name);
    }
    // Absent limits mean "to the end": the endpoint's own one is always set, others only where they stand.
    match endpoint {
        PdEndpoint::Responses => edits.set("max_output_tokens", "1").replace("max_tokens", "1"),
        PdEndpoint::Chat | PdEndpoint::Completions => edits.set("max_tokens", "1").replace("max_output_tokens", "1"),
    };
    edits.replace("max_completion_tokens", "1");
}

/// SGLang's members, the same on both legs.
fn bootstrap<'a>(edits: &mut Edits<'a>, pair: &Pair<'a>, endpoint: PdEndpoint, ids: &'a AttemptIds) {
    let Details::SglangPrefill { host, port } = &pair.prefill.details else { return };
    edits.set("bootstrap_host", host.as_str());
    edits.set("bootstrap_port", port.as_str());
    match ids.rooms() {
        [_] => edits.set("bootstrap_room", ids.room_json()),
        // A single number for several sequences would be counted up by the engine, and leave the picked rank.
        rooms => edits.set("bootstrap_room", json!(rooms).to_string()),
    };
    if endpoint == PdEndpoint::Responses {
        edits.set("request_id", ids.rid_json());
    }
    edits.set("rid", ids.rid_json());
}

fn name_prefill_rank(edits: &mut Edits<'_>, pair: &Pair<'_>) {
    if let Some(rank) = pair.prefill_rank {
        edits.set(PREFILL_PIN, rank.to_string());
    }
}

/// The connector reads `tp_size`, the reference proxy writes `remote_tp_size`: both are given.
fn mori_sizes(parameters: &mut Value, other: &Peer) {
    let Details::Mori { tp_size, .. } = other.details else { return };
    parameters["remote_dp_size"] = json!(other.ranks);
    parameters["tp_size"] = json!(tp_size);
    parameters["remote_tp_size"] = json!(tp_size);
}

fn mori_prefill(parameters: &mut Value, pair: &Pair<'_>) {
    mori_sizes(parameters, pair.prefill);
    if let Some(rank) = pair.prefill_rank {
        parameters["remote_dp_rank"] = json!(rank);
    }
}

/// The prefill answer's parameters as decode wants them.
fn handed_over(pair: &Pair<'_>, handoff: &Handoff) -> String {
    let verbatim = || String::from_utf8_lossy(&handoff.parameters).into_owned();
    match (pair.protocol(), &pair.prefill.details) {
        (Protocol::VllmMoriRead, Details::Mori { .. }) => {
            let mut parameters = json!({});
            mori_prefill(&mut parameters, pair);
            let taken: String = ["transfer_id", "remote_engine_id", "remote_block_ids"]
                .into_iter()
                .filter_map(|name| Some(format!("\"{name}\":{},", handoff.member(name)?)))
                .collect();
            let rest = parameters.to_string();
            format!("{{\"do_remote_decode\":false,\"do_remote_prefill\":true,{taken}{}", &rest[1..])
        }
        (Protocol::AtomMooncake, Details::Atom { tp_size, dp_size, .. }) => {
            let Ok(members) = Members::scan(&handoff.parameters) else { return verbatim() };
            let mut edits = Edits::default();
            edits.set("remote_dp_size", dp_size.to_string()).set("remote_tp_size", tp_size.to_string());
            if handoff.member("tp_size").is_none() {
                edits.set("tp_size", tp_size.to_string());
            }
            // The rank that stored the KV, as the engine chose it.
            if let Some(rank) = handoff.member("dp_rank").filter(|rank| rank.parse::<u32>().is_ok()) {
                edits.set("remote_dp_rank", rank);
            }
            String::from_utf8_lossy(&members.apply(&edits).concat()).into_owned()
        }
        _ => verbatim(),
    }
}

/// MoRIIO engines read each other's address out of the request id (vLLM's `moriio_common`).
fn request_id(pair: &Pair<'_>, ids: &AttemptIds) -> Option<String> {
    let (Details::Mori { zmq_address: prefill, .. }, Details::Mori { zmq_address: decode, .. }) =
        (&pair.prefill.details, &pair.decode.details)
    else {
        return None;
    };
    Some(format!("___prefill_addr_{prefill}___decode_addr_{decode}_{:032x}", ids.room()))
}

#[cfg(test)]
mod tests;
