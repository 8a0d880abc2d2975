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
    /// Arrivals by the clock, the first one so many seconds after the start; absent for a Poisson process.
    pub steady_from_s: Option<f64>,
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
}

/// All of them.
pub fn all() -> Vec<Scenario> {
    vec![
        Scenario {
            name: "one product",
            about: "one popular system prompt and a few unique chats with long answers, decode engines that share nothing: \
                    the router counts the prompt once per target, the target holds it once per request",
            streams: vec![shared(24.0, 1, 0.0, 150), unique(0.7, 3200, 700)],
            has_tokenizer: true,
            decode_shares_prefixes: false,
        },
        Scenario {
            name: "agents",
            about: "eight system prompts of unequal popularity, decode engines that share nothing",
            streams: vec![shared(30.0, 8, 1.5, 96)],
            has_tokenizer: true,
            decode_shares_prefixes: false,
        },
        Scenario {
            name: "in step",
            about: "a job that sends one long document and three short questions in turn, and the router counts requests (no \
                    tokenizer): with four targets the long ones all fall to one",
            streams: in_step(),
            has_tokenizer: false,
            decode_shares_prefixes: true,
        },
        Scenario {
            name: "long tail",
            about: "one request in eleven is 50 to 100 times longer with a long answer, and the router counts requests (no tokenizer)",
            streams: long_tail(),
            has_tokenizer: false,
            decode_shares_prefixes: true,
        },
        Scenario {
            name: "long tail, counted",
            about: "the same with a tokenizer: blocks in flight say as much as tokens do",
            streams: long_tail(),
            has_tokenizer: true,
            decode_shares_prefixes: true,
        },
    ]
}

fn shared(rate: f64, groups: usize, zipf: f64, output_tokens: usize) -> Stream {
    Stream { rate, groups, zipf, prefix_tokens: 3200, suffix_tokens: 60, output_tokens, steady_from_s: None }
}

fn unique(rate: f64, tokens: usize, output_tokens: usize) -> Stream {
    let (prefix_tokens, suffix_tokens) = (tokens / 2, tokens / 2);
    Stream { rate, groups: 1_000_000, zipf: 0.0, prefix_tokens, suffix_tokens, output_tokens, steady_from_s: None }
}

/// One long document and three short questions in turn, twice a second, with answers of one length.
fn in_step() -> Vec<Stream> {
    let at = |number: u8, tokens| Stream { steady_from_s: Some(f64::from(number) / 8.0), ..unique(2.0, tokens, 200) };
    vec![at(0, 6000), at(1, 60), at(2, 60), at(3, 60)]
}

/// Short chats, long ones and very long ones; the long ones have longer answers too.
fn long_tail() -> Vec<Stream> {
    vec![unique(30.0, 60, 96), unique(2.4, 3000, 450), unique(1.2, 6000, 450)]
}
