//! Owns the JSON and text shapes of an engine's small endpoints and errors. Never does IO.

use serde_json::{Value, json};

use super::core::Engine;
use super::events::EngineStyle;
use super::host::HostPool;

/// An error as OpenAI clients expect it, with vLLM's `type` names and the status as `code`.
#[derive(Debug)]
pub(super) struct ApiError {
    pub status: u16,
    kind: &'static str,
    message: String,
}

impl ApiError {
    pub fn new(status: u16, kind: &'static str, message: &str) -> ApiError {
        ApiError { status, kind, message: message.to_string() }
    }

    pub fn bad_request(message: &str) -> ApiError {
        ApiError::new(400, "BadRequestError", message)
    }

    pub fn body(&self) -> Value {
        json!({"error": {"message": self.message, "type": self.kind, "param": null, "code": self.status}})
    }
}

/// A request body as JSON.
pub(super) fn parse_body(body: &[u8]) -> Result<Value, ApiError> {
    serde_json::from_slice(body).map_err(|error| ApiError::bad_request(&format!("malformed JSON: {error}")))
}

pub(super) fn models(engine: &Engine) -> Value {
    let config = &engine.config;
    json!({"object": "list", "data": [{"id": config.model, "object": "model", "created": 0,
        "owned_by": config.style.engine_name(), "root": config.model, "parent": null,
        "max_model_len": config.context_length}]})
}

/// vLLM: where each rank publishes.
pub(super) fn kv_event_sources(engine: &Engine) -> Value {
    let shifted = |endpoint: &str, rank: usize| match endpoint.rsplit_once(':') {
        Some((host, port)) => match port.parse::<usize>() {
            Ok(port) => format!("{host}:{}", port + rank),
            Err(_) => endpoint.to_string(),
        },
        None => endpoint.to_string(),
    };
    let source = |rank: usize| {
        json!({"endpoint": shifted(&engine.feeds.events, rank),
            "replay_endpoint": engine.feeds.replay.as_ref().map(|endpoint| shifted(endpoint, rank)),
            "topic": engine.config.topic, "buffer_steps": 10_000})
    };
    (0..engine.ranks.len()).map(|rank| (rank.to_string(), source(rank))).collect::<serde_json::Map<_, _>>().into()
}

/// SGLang: what the server was started with.
pub(super) fn server_info(engine: &Engine) -> Value {
    let config = &engine.config;
    let base_port = engine.feeds.events.rsplit(':').next().and_then(|port| port.parse::<u16>().ok());
    json!({"default_chat_template_kwargs": config.chat_template_kwargs, "model_path": config.model, "served_model_name": config.model, "page_size": config.block_size,
        "dp_size": config.dp_size, "context_length": config.context_length,
        "max_total_num_tokens": config.blocks_total * config.block_size,
        "kv_events": {"endpoint": engine.feeds.events, "endpoint_port_base": base_port, "topic": config.topic,
            "block_size": config.block_size, "dp_size": config.dp_size}})
}

/// Everything a test outside this process wants to know.
pub(super) fn state(engine: &Engine) -> Value {
    let rank = |rank: &super::core::Rank| {
        let scheduler = rank.scheduler.borrow();
        let totals = scheduler.totals();
        json!({"dp_rank": rank.number, "blocks_resident": scheduler.pool().blocks_resident(),
            "host_blocks_resident": scheduler.host().map_or(0, HostPool::blocks_resident),
            "blocks_held": scheduler.pool().blocks_held(), "blocks_total": scheduler.pool().blocks_total(),
            "running": scheduler.sequences_running(), "waiting": scheduler.sequences_waiting(),
            "prompt_tokens": totals.prompt_tokens, "cached_tokens": totals.cached_tokens,
            "loaded_tokens": totals.loaded_tokens,
            "generated_tokens": totals.generated_tokens, "finished": totals.finished, "aborted": totals.aborted,
            "preempted": totals.preempted})
    };
    engine.report_transfers();
    json!({"model": engine.config.model, "transfers": engine.disagg.counts(), "ranks": engine.ranks.iter().map(rank).collect::<Vec<_>>()})
}

/// Prometheus text with the names of the imitated engine.
pub(super) fn metrics(engine: &Engine) -> String {
    let model = &engine.config.model;
    let mut out = String::new();
    let mut family = |name: &str, kind: &str, value: &dyn Fn(&super::core::Rank) -> f64| {
        out.push_str(&format!("# HELP {name} Simulated engine.\n# TYPE {name} {kind}\n"));
        for rank in &engine.ranks {
            let number = rank.number;
            out.push_str(&format!("{name}{{model_name=\"{model}\",engine=\"{number}\"}} {}\n", value(rank)));
        }
    };
    let running = |rank: &super::core::Rank| rank.scheduler.borrow().sequences_running() as f64;
    let waiting = |rank: &super::core::Rank| rank.scheduler.borrow().sequences_waiting() as f64;
    let usage = |rank: &super::core::Rank| {
        let scheduler = rank.scheduler.borrow();
        scheduler.pool().blocks_held() as f64 / scheduler.pool().blocks_total() as f64
    };
    let prompt = |rank: &super::core::Rank| rank.scheduler.borrow().totals().prompt_tokens as f64;
    let cached = |rank: &super::core::Rank| rank.scheduler.borrow().totals().cached_tokens as f64;
    let generated = |rank: &super::core::Rank| rank.scheduler.borrow().totals().generated_tokens as f64;
    let hit_rate = |rank: &super::core::Rank| cached(rank) / prompt(rank).max(1.0);
    if engine.config.style == EngineStyle::Sglang {
        family("sglang:num_running_reqs", "gauge", &running);
        family("sglang:num_queue_reqs", "gauge", &waiting);
        family("sglang:token_usage", "gauge", &usage);
        family("sglang:cache_hit_rate", "gauge", &hit_rate);
        family("sglang:prompt_tokens_total", "counter", &prompt);
        family("sglang:generation_tokens_total", "counter", &generated);
    } else {
        family("vllm:num_requests_running", "gauge", &running);
        family("vllm:num_requests_waiting", "gauge", &waiting);
        family("vllm:kv_cache_usage_perc", "gauge", &usage);
        family("vllm:prompt_tokens_total", "counter", &prompt);
        family("vllm:prefix_cache_hits_total", "counter", &cached);
        family("vllm:generation_tokens_total", "counter", &generated);
    }
    out
}
