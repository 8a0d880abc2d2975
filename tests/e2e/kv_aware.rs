//! Routing by KV events, with simulated engines that store, evict and announce blocks of their own.

use std::time::{Duration, Instant};

use loadgen::engine::events::EngineStyle;
use loadgen::engine::faults::Faults;
use loadgen::engine::{Engine, EngineConfig, EngineHandle};
use serde_json::{Value, json};

use crate::support::PATIENCE;
use crate::support::client::{self, Connection};
use crate::support::router::{Router, Start, router};
use crate::support::wait_until;

/// Directory with the tokenizer that the simulated engines run.
pub fn tokenizer() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    loadgen::prompt::write_shipped_tokenizer(directory.path()).unwrap();
    directory
}

pub fn engine(style: EngineStyle, blocks_total: usize) -> EngineHandle {
    Engine::start(EngineConfig { style, blocks_total, ..EngineConfig::default() }).unwrap()
}

pub trait WithEngine {
    fn engine(self, engine: &EngineHandle) -> Self;
}

impl WithEngine for Start {
    fn engine(self, engine: &EngineHandle) -> Self {
        self.args(&["--worker", &engine.worker_flag()])
    }
}

pub fn chat(text: &str) -> String {
    json!({"model": "demo", "max_tokens": 4, "messages": [{"role": "user", "content": text}]}).to_string()
}

pub fn long_prefix(topic: &str) -> String {
    format!("{topic}: {}", "the fleet keeps its prefix blocks warm and the router knows where. ".repeat(60))
}

fn cached_tokens(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

fn block_count(router: &Router, engine: &EngineHandle) -> u64 {
    router.json(&format!("/v1/admin/cache-view/{}", engine.worker_id()))["block_count"].as_u64().unwrap()
}

/// The mirror shows what the engines hold.
pub fn wait_for_mirror(router: &Router, engines: &[EngineHandle]) {
    for engine in engines {
        assert!(engine.wait_until(PATIENCE, |state| state.is_idle()), "the engine rests");
        wait_until("the mirror equals the engine's pool", || {
            block_count(router, engine) == engine.state().blocks_resident() as u64
        });
    }
}

/// Waits until the router hears the engines' events: a subscriber that joins late misses what came before.
pub fn wait_for_feeds(router: &Router, engines: usize) {
    wait_until("every event feed is connected", || {
        router.metric_sum("infera_router_kv_events_connected") == engines as f64
    });
}

/// A prompt whose blocks the device has evicted goes where the host still has them, and not to an engine that has nothing.
#[test]
fn a_prompt_that_only_host_memory_holds_goes_where_it_can_be_loaded() {
    let tokenizer = tokenizer();
    for style in [EngineStyle::Vllm, EngineStyle::Sglang] {
        let config = EngineConfig { style, blocks_total: 200, host_blocks: 4096, ..EngineConfig::default() };
        let engines: Vec<_> = (0..2).map(|_| Engine::start(config.clone()).unwrap()).collect();
        let start = engines.iter().fold(router(), |start, engine| start.engine(engine));
        let router = start.args(&["--router-tokenizer-path", tokenizer.path().to_str().unwrap()]).ready();
        wait_for_feeds(&router, engines.len());
        let prompt = chat(&long_prefix("alpha"));
        let prompt_tokens =
            router.post("/v1/chat/completions", &prompt).json()["usage"]["prompt_tokens"].as_u64().unwrap();
        let holder = engines.iter().find(|engine| engine.state().totals().finished > 0).unwrap();
        // Not through the router, which would send them elsewhere.
        for topic in ["beta", "gamma", "delta", "epsilon", "zeta"] {
            let answer = client::post(holder.addr, "/v1/chat/completions", &chat(&long_prefix(topic)));
            assert_eq!(answer.status, 200, "{}", answer.text());
        }
        assert!(holder.wait_until(PATIENCE, |state| state.is_idle()));
        // The host has all that the device has, and more.
        let on_host = holder.state().ranks[0].host_blocks_resident as u64;
        wait_until("the mirror knows the host's blocks", || block_count(&router, holder) == on_host);
        let before = holder.state().totals();
        let again = router.post("/v1/chat/completions", &prompt).json();
        assert!(cached_tokens(&again) + 16 >= prompt_tokens, "{style:?}: {again}");
        let loaded = holder.state().totals().loaded_tokens - before.loaded_tokens;
        assert!(loaded > prompt_tokens / 2, "{style:?}: {loaded} of {prompt_tokens} tokens came from the host");
    }
}

/// The seed's check: send two requests with the same long prefix; the second is a hit and `block_count` stays flat.
#[test]
fn the_second_request_with_a_long_prefix_goes_where_the_prefix_is_and_stores_nothing_new() {
    let tokenizer = tokenizer();
    for style in [EngineStyle::Vllm, EngineStyle::VllmArray, EngineStyle::Sglang] {
        let engines: Vec<_> = (0..3).map(|_| engine(style, 4096)).collect();
        let start = engines.iter().fold(router(), |start, engine| start.engine(engine));
        let router = start.args(&["--router-tokenizer-path", tokenizer.path().to_str().unwrap()]).ready();
        wait_for_feeds(&router, engines.len());
        let prompt = chat(&long_prefix("alpha"));

        let first = router.post("/v1/chat/completions", &prompt);
        assert_eq!(first.status, 200, "{}", first.text());
        assert_eq!(cached_tokens(&first.json()), 0);
        wait_for_mirror(&router, &engines);
        let counts: Vec<u64> = engines.iter().map(|engine| block_count(&router, engine)).collect();
        assert_eq!(counts.iter().filter(|count| **count > 0).count(), 1, "{counts:?}");

        for _ in 0..4 {
            let again = router.post("/v1/chat/completions", &prompt).json();
            let prompt_tokens = again["usage"]["prompt_tokens"].as_u64().unwrap();
            assert!(cached_tokens(&again) + 16 >= prompt_tokens, "{again}");
        }
        wait_for_mirror(&router, &engines);
        let after: Vec<u64> = engines.iter().map(|engine| block_count(&router, engine)).collect();
        assert_eq!(counts, after, "{style:?}: reused, not added again");

        // What the router predicted is what the engines had.
        let hits = router.metric_sum("infera_prefix_cache_blocks_hit_total");
        let cached: u64 = engines.iter().map(|engine| engine.state().totals().cached_tokens).sum();
        assert_eq!(hits as u64, cached.div_ceil(16), "{style:?}");
        router.logged(&[
            "pick",
            "policy=\"kv-aware\"",
            "role=\"mixed\"",
            "cache_hits=",
            "request_blocks=",
            "active_blocks=",
            "w_overlap=",
        ]);
        router.wait_for_rest();
    }
}

/// A prompt is in its worker's queue from the pick to the first byte of the answer, and not until its end.
#[test]
fn a_prompt_leaves_the_queue_when_its_answer_begins() {
    let tokenizer = tokenizer();
    let engine = engine(EngineStyle::Vllm, 4096);
    let router =
        router().engine(&engine).args(&["--router-tokenizer-path", tokenizer.path().to_str().unwrap()]).ready();
    wait_for_feeds(&router, 1);
    engine.set_faults(Faults { stall: true, ..Faults::default() });
    let body = json!({
        "model": "demo", "stream": true, "max_tokens": 2000, "ignore_eos": true,
        "messages": [{"role": "user", "content": long_prefix("queue")}],
    });
    let mut client = Connection::open(router.address);
    client.send(&client::request("POST", "/v1/chat/completions", "", body.to_string().as_bytes()));
    wait_until("the prompt waits", || router.metric_sum("infera_router_queued_blocks") > 10.0);
    let waiting = router.metric_sum("infera_router_queued_blocks");
    assert_eq!(waiting, router.metric_sum("infera_router_active_blocks"), "nothing of it is cached");
    engine.set_faults(Faults::default());
    assert_eq!(client.head().unwrap().0, 200);
    assert!(client.chunk().unwrap().is_some());
    wait_until("the prompt is computed", || router.metric_sum("infera_router_queued_blocks") == 0.0);
    assert_eq!(router.metric_sum("infera_router_inflight_requests"), 1.0, "the answer goes on");
    drop(client);
    router.wait_for_rest();
}

/// One model on workers with blocks of 16 and of 64 tokens: each prompt is hashed in both sizes, and a repeat goes where it was.
#[test]
fn workers_with_different_block_sizes_serve_one_model() {
    let tokenizer = tokenizer();
    let sized = |block_size| {
        let config =
            EngineConfig { style: EngineStyle::Vllm, block_size, blocks_total: 4096, ..EngineConfig::default() };
        Engine::start(config).unwrap()
    };
    let engines = [sized(16), sized(64)];
    let start = engines.iter().fold(router(), |start, engine| start.engine(engine));
    let router = start.args(&["--router-tokenizer-path", tokenizer.path().to_str().unwrap()]).ready();
    wait_for_feeds(&router, engines.len());
    let prompts: Vec<String> = (0..6).map(|number| chat(&long_prefix(&format!("topic {number}")))).collect();
    for prompt in &prompts {
        assert_eq!(router.post("/v1/chat/completions", prompt).status, 200);
    }
    wait_for_mirror(&router, &engines);
    let total = |engine: &EngineHandle| engine.state().totals();
    let before: Vec<u64> = engines.iter().map(|engine| total(engine).cached_tokens).collect();
    for prompt in prompts.iter().rev() {
        let again = router.post("/v1/chat/completions", prompt).json();
        assert!(cached_tokens(&again) + 64 >= again["usage"]["prompt_tokens"].as_u64().unwrap(), "{again}");
    }
    for (engine, before) in engines.iter().zip(before) {
        assert!(total(engine).cached_tokens > before, "both have served repeats");
    }
    router.wait_for_rest();
}

/// A salt keeps a tenant's blocks apart on the engine: what others have left there of the same text is no credit.
#[test]
fn a_salted_request_gets_no_plain_credit() {
    let tokenizer = tokenizer();
    let engines = [engine(EngineStyle::Vllm, 4096)];
    let router =
        router().engine(&engines[0]).args(&["--router-tokenizer-path", tokenizer.path().to_str().unwrap()]).ready();
    wait_for_feeds(&router, engines.len());
    let plain = chat(&long_prefix("alpha"));
    assert_eq!(router.post("/v1/chat/completions", &plain).status, 200);
    wait_for_mirror(&router, &engines);
    let hits = || router.metric_sum("infera_prefix_cache_blocks_hit_total");
    let mut salted: Value = serde_json::from_str(&plain).unwrap();
    salted["cache_salt"] = "tenant".into();
    assert_eq!(router.post("/v1/chat/completions", &salted.to_string()).status, 200);
    assert_eq!(hits(), 0.0);
    assert_eq!(router.post("/v1/chat/completions", &plain).status, 200);
    assert!(hits() > 0.0);
}

/// `/v1/responses` with the same text as a chat before it: the engine makes the same prompt of both.
#[test]
fn a_responses_request_is_routed_by_its_own_prompt() {
    let tokenizer = tokenizer();
    let engines = [engine(EngineStyle::Vllm, 4096), engine(EngineStyle::Vllm, 4096)];
    let start = engines.iter().fold(router(), |start, engine| start.engine(engine));
    let router = start.args(&["--router-tokenizer-path", tokenizer.path().to_str().unwrap()]).ready();
    wait_for_feeds(&router, engines.len());
    let text = long_prefix("responses");
    assert_eq!(router.post("/v1/chat/completions", &chat(&text)).status, 200);
    wait_for_mirror(&router, &engines);
    let hits = || router.metric_sum("infera_prefix_cache_blocks_hit_total");
    let blocks = engines.iter().map(|engine| block_count(&router, engine)).max().unwrap();
    let before = hits();
    // What the simulated engine answers there does not matter: the pick has been counted.
    router.post("/v1/responses", &json!({"model": "demo", "input": text}).to_string());
    assert!(hits() - before + 1.0 >= blocks as f64, "{} of {blocks} blocks", hits() - before);
    let stored = json!({"model": "demo", "input": text, "previous_response_id": "resp_1"}).to_string();
    let refused = || router.metric_sum("infera_router_prompt_failures_total");
    let (before, refused_before) = (hits(), refused());
    router.post("/v1/responses", &stored);
    assert_eq!((hits(), refused()), (before, refused_before + 1.0), "what the engine keeps is not guessed");
    router.wait_for_rest();
}

#[test]
fn evictions_and_clears_take_their_credit_away() {
    let tokenizer = tokenizer();
    let engines = [engine(EngineStyle::Vllm, 128), engine(EngineStyle::Sglang, 128)];
    let start = engines.iter().fold(router(), |start, engine| start.engine(engine));
    let router = start.args(&["--router-tokenizer-path", tokenizer.path().to_str().unwrap()]).ready();
    wait_for_feeds(&router, engines.len());
    // More than both pools hold: old prompts are evicted all the time.
    for round in 0..24 {
        let answer = router.post("/v1/chat/completions", &chat(&long_prefix(&format!("topic {}", round % 8))));
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    wait_for_mirror(&router, &engines);
    for engine in &engines {
        assert!(engine.clear_cache());
        // An engine tells of its clear with the next batch at the latest.
        let body = chat("after the clear");
        assert_eq!(client::post(engine.addr, "/v1/chat/completions", &body).status, 200);
    }
    wait_for_mirror(&router, &engines);
}

#[test]
fn ranks_of_one_worker_are_targets_of_their_own() {
    let tokenizer = tokenizer();
    let engines = [Engine::start(EngineConfig { dp_size: 2, ..EngineConfig::default() }).unwrap()];
    let router =
        router().engine(&engines[0]).args(&["--router-tokenizer-path", tokenizer.path().to_str().unwrap()]).ready();
    wait_for_feeds(&router, 2);
    let (alpha, beta) = (chat(&long_prefix("alpha")), chat(&long_prefix("beta")));
    for prompt in [&alpha, &beta] {
        assert_eq!(router.post("/v1/chat/completions", prompt).status, 200);
        wait_for_mirror(&router, &engines);
    }
    for prompt in [&alpha, &beta, &alpha, &beta] {
        assert!(cached_tokens(&router.post("/v1/chat/completions", prompt).json()) > 0);
    }
    wait_for_mirror(&router, &engines);
    let id = engines[0].worker_id();
    let of_rank =
        |rank: u32| router.json(&format!("/v1/admin/cache-view/{id}?dp_rank={rank}"))["block_count"].as_u64().unwrap();
    assert!(of_rank(0) > 0 && of_rank(1) > 0);
    assert_eq!(of_rank(0) + of_rank(1), block_count(&router, &engines[0]));
    assert_eq!(router.get(&format!("/v1/admin/cache-view/{id}?dp_rank=2")).status, 404);
    assert_eq!(router.metric_sum("infera_router_picks_total"), 6.0);
}

/// Prompts of token ids need no tokenizer; a text prompt without one is routed by load, and says so once.
#[test]
fn without_a_tokenizer_token_ids_still_find_their_prefix() {
    let engines = [engine(EngineStyle::Vllm, 4096), engine(EngineStyle::Vllm, 4096)];
    let router = engines.iter().fold(router(), |start, engine| start.engine(engine)).ready();
    router.logged(&["--router-tokenizer-path"]);
    wait_for_feeds(&router, engines.len());
    let ids: Vec<u32> = (0..640).map(|index| 100 + index % 500).collect();
    let body = json!({"model": "demo", "max_tokens": 2, "prompt": ids}).to_string();
    assert_eq!(router.post("/v1/completions", &body).status, 200);
    wait_for_mirror(&router, &engines);
    for _ in 0..3 {
        assert!(cached_tokens(&router.post("/v1/completions", &body).json()) >= 624);
    }
    assert_eq!(router.post("/v1/chat/completions", &chat("hello")).status, 200);
    assert_eq!(router.metric(r#"infera_router_prompt_failures_total{reason="no_tokenizer"}"#), Some(1.0));
}

/// A prompt that the template or the tokenizer cannot take costs locality, never an error of the router.
#[test]
fn b29_trouble_with_a_prompt_is_never_an_error_of_the_router() {
    let tokenizer = tokenizer();
    let engine = engine(EngineStyle::Vllm, 4096);
    let router =
        router().engine(&engine).args(&["--router-tokenizer-path", tokenizer.path().to_str().unwrap()]).ready();
    for body in [
        r#"{"model":"demo"}"#,
        r#"{"model":"demo","messages":"no list"}"#,
        r#"{"model":"demo","messages":[]}"#,
        r#"{"model":"demo","messages":[{"role":7}]}"#,
        r#"{"model":"demo","messages":[{"role":"user","content":{"a":1}}]}"#,
        r#"{"model":"demo","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"http://x/y.png"}}]}]}"#,
    ] {
        let through = router.post("/v1/chat/completions", body);
        let direct = client::post(engine.addr, "/v1/chat/completions", body);
        assert_eq!(through.status, direct.status, "{body}: {}", through.text());
    }
    router.wait_for_rest();
}

/// A template may quote the conversation that it refuses; the log says only that one was refused.
#[test]
fn b29_what_a_template_says_of_a_prompt_is_not_logged() {
    let tokenizer = tokenizer();
    let engine = engine(EngineStyle::Vllm, 4096);
    let arguments = ["--router-tokenizer-path", tokenizer.path().to_str().unwrap(), "--allow-request-chat-template"];
    let router = router().engine(&engine).args(&arguments).ready();
    let template = "{{ raise_exception('cannot take ' ~ messages[0].content) }}";
    let body = serde_json::json!({"model": "demo", "chat_template": template,
        "messages": [{"role": "user", "content": "my secret words"}]});
    router.post("/v1/chat/completions", &body.to_string());
    router.logged(&["template_refused", "routed by load alone"]);
    router.wait_for_rest();
    assert!(!router.log_lines().join("\n").contains("secret"));
}

/// Long prompts leave the shard: health stays quick while they are encoded, and they still hit.
#[test]
fn b58_long_prompts_do_not_hold_up_the_shard() {
    let tokenizer = tokenizer();
    let engine = engine(EngineStyle::Vllm, 65_536);
    let router =
        router().engine(&engine).args(&["--router-tokenizer-path", tokenizer.path().to_str().unwrap()]).ready();
    wait_for_feeds(&router, 1);
    let encoding = || router.metric(r#"infera_router_stage_seconds_sum{stage="encode"}"#).unwrap_or(0.0);
    let mut health = Connection::open(router.address);
    // The machine's other work may hold up anybody once; a shard that encodes is held up each time.
    let is_undisturbed = (0..5).any(|round| {
        let text: String = (0..150_000).map(|number| format!("{round}word{} ", number * 7919 % 10_007)).collect();
        let (address, before) = (router.address, encoding());
        let posting = std::thread::spawn(move || client::post(address, "/v1/chat/completions", &chat(&text)).status);
        let mut worst = Duration::ZERO;
        while !posting.is_finished() {
            let asked = Instant::now();
            health.send(&client::request("GET", "/health", "", b""));
            assert_eq!(health.answer("GET").status, 200);
            worst = worst.max(asked.elapsed());
        }
        assert_ne!(posting.join().unwrap(), 500);
        let took = encoding() - before;
        println!("encoded in {took} s, the shard was away for {worst:?} at most");
        took > 0.0 && worst.as_secs_f64() < took / 2.0
    });
    assert!(is_undisturbed, "no answer came while a prompt was encoded");
    router.wait_for_rest();
}
