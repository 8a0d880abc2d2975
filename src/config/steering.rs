//! Options of what steers picks beyond the overlap cost: decode demand, sessions, recent load.

use clap::Args;

use super::validate::Problems;
use crate::decode_demand::Mode;
use crate::limits;
use crate::proxy::SteeringSettings;
use crate::route::affinity::{DEFAULT_HEADER, SessionAffinity};
use crate::route::{LoadTerm, Policy, RecentLoad};

/// Longest time that an idle session is kept, seconds.
const TTL_SECONDS_MAX: u32 = 86_400;

/// Most sessions per role that can be asked for: about 800 MB of table.
const SESSIONS_MAX: u32 = 1 << 24;

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Sessions, decode demand, recent load")]
pub struct SteeringArgs {
    /// off|shadow|on: decode picks by input tokens in flight; shadow only counts and suggests. Needs kv-aware.
    #[arg(long, value_name = "MODE", env = "INFERA_DECODE_INPUT_DEMAND", default_value = "off")]
    pub decode_input_demand: String,
    /// Tokens that one more request held weighs in decode demand; needs --decode-input-demand shadow|on.
    #[arg(
        long,
        value_name = "TOKENS",
        env = "INFERA_DECODE_REQUEST_WEIGHT",
        default_value_t = 0.0,
        allow_negative_numbers = true
    )]
    pub decode_request_weight: f64,
    /// off|prefill|both: later turns of a session go where earlier ones were served; both: decode and mixed too.
    #[arg(long, value_name = "MODE", env = "INFERA_SESSION_AFFINITY", default_value = "off")]
    pub session_affinity: String,
    /// Header that names a session. Repeatable.
    #[arg(long, value_name = "NAME", default_value = DEFAULT_HEADER)]
    pub session_affinity_header: Vec<String>,
    /// Seconds that a session is remembered after its last turn.
    #[arg(long, value_name = "SECONDS", env = "INFERA_SESSION_AFFINITY_TTL_SECS", default_value_t = 3600)]
    pub session_affinity_ttl_s: u32,
    /// Sessions remembered, per role.
    #[arg(long, value_name = "N", default_value_t = limits::SESSIONS_MAX as u32)]
    pub session_affinity_capacity: u32,
    /// off|idle|on: blocks that a worker missed lately count as load, so that requests that never overlap in time
    /// spread too; idle: each as a tenth of a missing block, and only when no candidate has a request in flight.
    #[arg(long, value_name = "MODE", default_value = "idle")]
    pub kv_recent_load: String,
    /// queue|active: what counts as a worker's load when a mixed or prefill worker is picked; queue: blocks that it has
    /// yet to compute, half of those in flight, and 1,024 tokens for each request; active: all blocks in flight, the plain formula.
    #[arg(long, value_name = "TERM", default_value = "queue")]
    pub kv_load: String,
}

pub(super) fn settings(arguments: &SteeringArgs, policy: Policy, problems: &mut Problems) -> SteeringSettings {
    // The reference's launchers leave variables empty that they do not set.
    let or_off = |text: &str| if text.is_empty() { "off".to_owned() } else { text.to_owned() };
    let demand = problems.choice(
        "--decode-input-demand",
        &or_off(&arguments.decode_input_demand),
        &[("off", Mode::Off), ("shadow", Mode::Shadow), ("on", Mode::On)],
    );
    if demand != Mode::Off && policy != Policy::KvAware {
        problems.add("--decode-input-demand requires --router-policy kv-aware");
    }
    let request_weight = arguments.decode_request_weight;
    if !request_weight.is_finite() || request_weight < 0.0 {
        problems.add(format!("--decode-request-weight must be a number of at least 0 (got {request_weight})"));
    } else if request_weight > 0.0 && demand == Mode::Off {
        problems.add("--decode-request-weight requires --decode-input-demand shadow|on");
    }
    let sessions = problems.choice(
        "--session-affinity",
        &or_off(&arguments.session_affinity),
        &[("off", SessionAffinity::Off), ("prefill", SessionAffinity::Prefill), ("both", SessionAffinity::Both)],
    );
    let mut session_headers = Vec::new();
    for name in &arguments.session_affinity_header {
        match http::HeaderName::try_from(name.as_str()) {
            Ok(name) => session_headers.push(name.as_str().to_owned()),
            Err(_) => problems.add(format!("--session-affinity-header `{name}` is not a header name")),
        }
    }
    let ttl = problems.range("--session-affinity-ttl-s", arguments.session_affinity_ttl_s, 1, TTL_SECONDS_MAX);
    let sessions_max =
        problems.range("--session-affinity-capacity", arguments.session_affinity_capacity, 1, SESSIONS_MAX);
    let recent_load = problems.choice(
        "--kv-recent-load",
        &arguments.kv_recent_load,
        &[("off", RecentLoad::Off), ("idle", RecentLoad::Idle), ("on", RecentLoad::On)],
    );
    let load_term =
        problems.choice("--kv-load", &arguments.kv_load, &[("queue", LoadTerm::Queue), ("active", LoadTerm::Active)]);
    SteeringSettings {
        demand,
        request_weight,
        sessions,
        session_headers,
        session_ttl_s: ttl as u32,
        sessions_max,
        recent_load,
        load_term,
    }
}
