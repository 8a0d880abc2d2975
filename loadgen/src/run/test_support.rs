//! What tests of runs share: an engine as quick as told, and a small run against it.

use std::time::Duration;

use super::config::RunConfig;
use super::pace::Pace;
use super::workload::{Source, Workload};
use crate::engine::scheduler::Speed;
use crate::engine::{Engine, EngineConfig, EngineHandle};
use crate::plan::Recipe;

/// An engine whose steps take `step` whatever they compute, but for prompts.
pub fn engine(step: Duration) -> EngineHandle {
    let speed = Speed {
        step_base: step,
        prefill_per_token: Duration::from_micros(2),
        decode_per_sequence: Duration::ZERO,
        decode_per_kilotoken: Duration::ZERO,
        jitter: 0.0,
        ..Speed::default()
    };
    Engine::start(EngineConfig { speed, ..EngineConfig::default() }).unwrap()
}

/// Requests with one of three system prompts, answered by four tokens.
pub fn config(target: &str, requests: usize, pace: Pace) -> RunConfig {
    let workload = Workload::generated(Recipe::shared_prefix(3, 0.0, 160, 10, 4), requests, "demo", 11);
    RunConfig { timeout: Duration::from_secs(20), ..RunConfig::new(target, workload, pace) }
}

pub fn recipe(config: &mut RunConfig) -> &mut Recipe {
    match &mut config.workload.source {
        Source::Generated(recipe) => recipe,
        other => panic!("a generated workload, not {other:?}"),
    }
}
