//! The protocols by which a prefill engine hands KV to a decode engine: their names on the wire, when each leg
//! starts, and what they can serve. No IO.

use std::fmt;

use super::splice::Members;

/// `disagg_meta.protocol` of a registration record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Protocol {
    /// SGLang: both legs at once, paired by a bootstrap room on the prefill worker's bootstrap server.
    SglangBootstrap,
    /// vLLM MooncakeConnector: both legs at once, paired by a transfer id.
    VllmMooncake,
    /// vLLM NixlConnector: prefill first; its answer tells decode where the KV is.
    VllmNixl,
    /// vLLM MoRIIOConnector in read mode: prefill first, decode pulls.
    VllmMoriRead,
    /// vLLM MoRIIOConnector in write mode: both legs at once, prefill pushes.
    VllmMoriWrite,
    /// ATOM's Mooncake connector: prefill first, text completions only.
    AtomMooncake,
}

/// When the decode leg may start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schedule {
    /// With the prefill leg: decode waits for the KV by itself.
    Concurrent,
    /// After the prefill leg's answer, which it needs.
    Serial,
}

/// The endpoints that can be served by two legs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PdEndpoint {
    Chat,
    Completions,
    Responses,
}

impl PdEndpoint {
    pub const fn path(self) -> &'static str {
        match self {
            PdEndpoint::Chat => "/v1/chat/completions",
            PdEndpoint::Completions => "/v1/completions",
            PdEndpoint::Responses => "/v1/responses",
        }
    }
}

impl Protocol {
    pub const ALL: [Protocol; 6] = [
        Protocol::SglangBootstrap,
        Protocol::VllmMooncake,
        Protocol::VllmNixl,
        Protocol::VllmMoriRead,
        Protocol::VllmMoriWrite,
        Protocol::AtomMooncake,
    ];

    pub const fn as_str(self) -> &'static str {
        match self {
            Protocol::SglangBootstrap => "sglang-bootstrap",
            Protocol::VllmMooncake => "vllm-mooncake",
            Protocol::VllmNixl => "vllm-nixl",
            Protocol::VllmMoriRead => "vllm-mori-read",
            Protocol::VllmMoriWrite => "vllm-mori-write",
            Protocol::AtomMooncake => "atom-mooncake",
        }
    }

    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|protocol| protocol.as_str() == name)
    }

    pub const fn schedule(self) -> Schedule {
        match self {
            Protocol::SglangBootstrap | Protocol::VllmMooncake | Protocol::VllmMoriWrite => Schedule::Concurrent,
            Protocol::VllmNixl | Protocol::VllmMoriRead | Protocol::AtomMooncake => Schedule::Serial,
        }
    }

    /// ATOM takes and returns transfer parameters on its text-completion path only.
    pub const fn serves(self, endpoint: PdEndpoint) -> bool {
        match self {
            Protocol::AtomMooncake => matches!(endpoint, PdEndpoint::Completions),
            _ => true,
        }
    }

    /// Whether a running request can be ended by `POST /abort_request {"rid":…}`. The others notice that their
    /// connection closed.
    pub const fn has_abort_call(self) -> bool {
        matches!(self, Protocol::SglangBootstrap)
    }

    /// Whether the body can name one transfer per prompt of a list. vLLM and ATOM have one transfer id for the
    /// whole body, and two prompts under one id would mix their KV.
    pub const fn names_each_prompt(self) -> bool {
        matches!(self, Protocol::SglangBootstrap)
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.as_str())
    }
}

/// How many sequences a body asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sequences {
    /// Prompts of a completions list, else 1.
    pub prompts: usize,
    /// `n`; 1 where it is absent or not a positive integer (the engine refuses those itself).
    pub samples: usize,
}

impl Sequences {
    pub fn of(endpoint: PdEndpoint, members: &Members) -> Self {
        let samples = match endpoint {
            PdEndpoint::Responses => 1,
            _ => members.raw("n").and_then(|raw| serde_json::from_slice(raw).ok()).filter(|n| *n > 0).unwrap_or(1),
        };
        let prompts = match endpoint {
            PdEndpoint::Completions => members.raw("prompt").map_or(1, prompts_in),
            _ => 1,
        };
        Self { prompts, samples }
    }

    pub fn total(self) -> usize {
        self.prompts.saturating_mul(self.samples)
    }
}

/// A list of numbers is one prompt given as token ids; a list of anything else is a list of prompts.
fn prompts_in(raw: &[u8]) -> usize {
    let Some(items) = raw.strip_prefix(b"[") else { return 1 };
    match items.trim_ascii_start().first() {
        Some(b'"' | b'[') => {
            serde_json::from_slice::<Vec<serde::de::IgnoredAny>>(raw).map_or(1, |prompts| prompts.len().max(1))
        }
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    #[test]
    fn names_are_those_of_the_registration_records() {
        for protocol in Protocol::ALL {
            assert_eq!(Protocol::from_name(protocol.as_str()), Some(protocol));
        }
        assert_eq!(Protocol::from_name("vllm-p2p"), None);
    }

    #[test]
    fn sequences_are_prompts_times_samples() {
        let check = |endpoint, body: &'static str, prompts, samples| {
            let members = Members::scan(&Bytes::from_static(body.as_bytes())).expect("an object");
            assert_eq!(Sequences::of(endpoint, &members), Sequences { prompts, samples }, "{body}");
        };
        check(PdEndpoint::Chat, r#"{"messages":[]}"#, 1, 1);
        check(PdEndpoint::Chat, r#"{"n":3,"prompt":["a","b"]}"#, 1, 3);
        check(PdEndpoint::Completions, r#"{"prompt":["a","b"],"n":2}"#, 2, 2);
        check(PdEndpoint::Completions, r#"{"prompt":[ [1,2], [3] ]}"#, 2, 1);
        check(PdEndpoint::Completions, r#"{"prompt":[1,2,3]}"#, 1, 1);
        check(PdEndpoint::Completions, r#"{"prompt":[]}"#, 1, 1);
        check(PdEndpoint::Completions, r#"{"prompt":"[\"a\"]","n":0}"#, 1, 1);
        check(PdEndpoint::Completions, r#"{"prompt":"a","n":-1}"#, 1, 1);
        check(PdEndpoint::Completions, r#"{"prompt":"a","n":1.5}"#, 1, 1);
        check(PdEndpoint::Responses, r#"{"input":"a","n":4}"#, 1, 1);
    }
}
