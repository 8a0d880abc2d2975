//! Owns the workloads of the spread measurement, each a way in which load counted otherwise than in input tokens
//! misleads. Never sends anything.

use serde::Serialize;

/// One open loop of like requests.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Stream {
    /// Requests per second.
    pub rate: f64,
    /// Distinct system prompts; many for prompts that share nothing.
    pub groups: usize,
    /// Exponent of their popularity.
    pub zipf: f64,
    pub prefix_tokens: usize,
    pub suffix_tokens: usize,
    pub output_tokens: usize,
}

/// A workload and what is special about the fleet that serves it.
#[derive(Clone, Debug, Serialize)]
pub struct Scenario {
    pub name: &'static str,
    /// What the router's own count of load does not see here.
    pub about: &'static str,
    pub streams: Vec<Stream>,
    /// Whether the router counts tokens and blocks, or estimates.
    pub has_tokenizer: bool,
    /// Whether decode engines hold a prefix once for all requests that have it.
    pub decode_shares_prefixes: bool,
    pub router_arguments: Vec<&'static str>,
}

/// All of them.
pub fn all() -> Vec<Scenario> {
    vec![
        Scenario {
            name: "assistant",
            about: "one long system prompt, the weights that the PD guide gives as typical: decode follows the cache",
            streams: vec![shared(32.0, 1, 0.0)],
            has_tokenizer: true,
            decode_shares_prefixes: true,
            router_arguments: vec!["--kv-prefill-overlap-weight=20", "--kv-decode-overlap-weight=2"],
        },
        Scenario {
            name: "agents",
            about: "a few long system prompts, decode engines that share nothing: a prefix counts once, and is held often",
            streams: vec![shared(40.0, 8, 1.5)],
            has_tokenizer: true,
            decode_shares_prefixes: false,
            router_arguments: Vec::new(),
        },
        Scenario {
            name: "long tail",
            about: "one request in eleven is 50 to 100 times longer, and the router counts requests (no tokenizer)",
            streams: long_tail(),
            has_tokenizer: false,
            decode_shares_prefixes: true,
            router_arguments: Vec::new(),
        },
        Scenario {
            name: "long tail, counted",
            about: "the same with a tokenizer: blocks in flight say as much as tokens do",
            streams: long_tail(),
            has_tokenizer: true,
            decode_shares_prefixes: true,
            router_arguments: Vec::new(),
        },
    ]
}

fn shared(rate: f64, groups: usize, zipf: f64) -> Stream {
    Stream { rate, groups, zipf, prefix_tokens: 3200, suffix_tokens: 60, output_tokens: 96 }
}

/// Short chats, long ones and very long ones; the long ones have longer answers too.
fn long_tail() -> Vec<Stream> {
    let unique = |rate, tokens: usize, output_tokens| Stream {
        rate,
        groups: 1_000_000,
        zipf: 0.0,
        prefix_tokens: tokens / 2,
        suffix_tokens: tokens / 2,
        output_tokens,
    };
    vec![unique(36.0, 60, 96), unique(2.4, 3000, 144), unique(1.2, 6000, 144)]
}
