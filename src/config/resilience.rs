//! Options of what happens when workers fail or are full: circuit breaker, retry budget, caps.

use clap::Args;

use super::validate::Problems;
use crate::breaker::BreakerSettings;
use crate::proxy::InflightCaps;

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Failing and full workers")]
pub struct ResilienceArgs {
    /// Consecutive faults (no connection, no or a broken answer, 5xx) after which a worker gets no requests for a while;
    /// 0 switches the circuit breaker off.
    #[arg(long, value_name = "N", env = "INFERA_BREAKER_FAILURE_THRESHOLD", default_value_t = 3)]
    pub breaker_failure_threshold: u32,
    /// How long that is, seconds; then one request tries the worker. Each failed try doubles it.
    #[arg(
        long,
        value_name = "SECONDS",
        env = "INFERA_BREAKER_COOLDOWN_S",
        default_value_t = 5.0,
        allow_negative_numbers = true
    )]
    pub breaker_cooldown_s: f64,
    /// Longest such time, seconds; also the longest Retry-After of a worker that is honoured.
    #[arg(
        long,
        value_name = "SECONDS",
        env = "INFERA_BREAKER_MAX_COOLDOWN_S",
        default_value_t = 60.0,
        allow_negative_numbers = true
    )]
    pub breaker_max_cooldown_s: f64,
    /// Retries as a share of the requests, percent; ten a second are always allowed.
    #[arg(long, value_name = "PERCENT", default_value_t = 20.0, allow_negative_numbers = true)]
    pub retry_budget_percent: f64,
    /// Requests in flight, beyond which further ones are answered with 429; 0 for no cap.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub max_inflight: u64,
    /// The same for each worker (for each rank of a rank-multiplexed one).
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub max_inflight_per_worker: u64,
}

/// What the options say, checked.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Resilience {
    pub breaker: BreakerSettings,
    pub retry_budget_percent: f64,
    pub caps: InflightCaps,
}

pub(super) fn settings(arguments: &ResilienceArgs, problems: &mut Problems) -> Resilience {
    let cooldown = problems.seconds("--breaker-cooldown-s", arguments.breaker_cooldown_s);
    let cooldown_max = problems.seconds("--breaker-max-cooldown-s", arguments.breaker_max_cooldown_s);
    if cooldown_max < cooldown {
        problems.add("--breaker-max-cooldown-s must not be shorter than --breaker-cooldown-s");
    }
    let percent = arguments.retry_budget_percent;
    if !(0.0..=100.0).contains(&percent) {
        problems.add(format!("--retry-budget-percent must be from 0 to 100 (got {percent})"));
    }
    let cap = |most: u64| (most > 0).then_some(most);
    Resilience {
        breaker: BreakerSettings { failure_threshold: arguments.breaker_failure_threshold, cooldown, cooldown_max },
        retry_budget_percent: percent,
        caps: InflightCaps { total: cap(arguments.max_inflight), per_target: cap(arguments.max_inflight_per_worker) },
    }
}
