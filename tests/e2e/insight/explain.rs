//! An explanation is what a request that follows it meets, and leaves nothing behind.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use loadgen::engine::events::EngineStyle;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};

use super::{gated, over, record};
use crate::kv_aware::{WithEngine, chat, engine, long_prefix, tokenizer, wait_for_feeds, wait_for_mirror};
use crate::support::client::{self, Answer, Connection};
use crate::support::router::{Router, router};
use crate::support::wait_until;
use crate::support::worker::{dead_address, json_worker};

fn explain(router: &Router, query: &str, headers: &str, body: &str) -> Answer {
    client::exchange(router.address, "POST", &format!("/v1/admin/explain?{query}"), headers, body.as_bytes())
}

fn explained(router: &Router, query: &str, headers: &str, body: &str) -> Value {
    let answer = explain(router, query, headers, body);
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()
}

/// The targets picked, in the order of the picks.
fn picked(explanation: &Value) -> Vec<String> {
    let legs = explanation["legs"].as_array().unwrap();
    legs.iter().map(|leg| leg["picked"].as_str().unwrap().to_owned()).collect()
}

/// What the router has logged of its picks so far.
fn logged_picks(router: &Router) -> Vec<String> {
    let lines = router.log_lines();
    let picks = lines.iter().filter(|line| line.contains(" pick "));
    let value = |line: &String| Some(line.split_once("picked=\"")?.1.split_once('"')?.0.to_owned());
    picks.filter_map(value).collect()
}

/// Sends the request that was explained, and compares.
fn check(router: &Router, path: &str, headers: &str, body: &str, seed: u64) -> Value {
    let explanation = explained(router, &format!("path={path}"), headers, body);
    let expected = picked(&explanation);
    // The log has a thread of its own: lines of earlier picks may still be on their way.
    let before = router.metric_sum("infera_router_picks_total") as usize;
    wait_until("all picks so far are logged", || logged_picks(router).len() == before);
    let answer = client::exchange(router.address, "POST", path, headers, body.as_bytes());
    assert_eq!(answer.status, 200, "seed {seed}: {}", answer.text());
    wait_until("the picks are logged", || logged_picks(router).len() >= before + expected.len());
    assert_eq!(logged_picks(router)[before..], expected, "seed {seed}: {explanation:#}");
    explanation
}

/// A prompt of token ids; different seeds share no block.
fn ids(seed: usize, tokens: usize) -> Vec<usize> {
    (0..tokens).map(|place| seed * 10_000 + place).collect()
}

/// Requests that hold their workers until the gate opens, and what they are charged with.
#[derive(Default)]
struct Held {
    connections: Vec<Connection>,
    blocks: f64,
}

impl Held {
    fn add(&mut self, router: &Router, seed: usize, tokens: usize, legs: usize) {
        let body = json!({"model": "m", "user": "held", "prompt": ids(seed, tokens)}).to_string();
        let mut connection = Connection::open(router.address);
        connection.send(&client::request("POST", "/v1/completions", "", body.as_bytes()));
        self.connections.push(connection);
        // A prompt without a block is charged as one.
        self.blocks += (legs * (tokens / 16).max(1)) as f64;
    }

    /// Until the ledger has read every booking and release, load is an upper bound that two readers may see differently.
    fn settle(&self, router: &Router) {
        let load = || router.metric_sum("infera_router_active_blocks");
        wait_until("load is exact", || load() == self.blocks);
    }
}

/// Random fleets, loads, sessions and bodies; every policy and both topologies.
#[test]
fn the_pick_that_follows_is_the_one_that_was_explained() {
    let variants: [(&str, &[&str], usize); 5] = [
        ("kv-aware", &["--session-affinity", "both"], 1),
        ("kv-aware", &["--kv-recent-load", "on", "--kv-overlap-weight", "0.5"], 1),
        ("round-robin", &["--session-affinity", "both"], 1),
        ("kv-aware", &["--decode-input-demand", "on", "--decode-request-weight", "100", "--kv-recent-load", "on"], 2),
        ("kv-aware", &["--decode-input-demand", "shadow", "--session-affinity", "both"], 2),
    ];
    for (number, (policy, arguments, legs)) in variants.into_iter().enumerate() {
        let seed = 0x00e_0000 + number as u64;
        let mut random = SmallRng::seed_from_u64(seed);
        let gate = Arc::new(AtomicBool::new(false));
        let workers: Vec<_> = (0..random.random_range(4..8)).map(|_| gated(&gate)).collect();
        let role = |place: usize| if legs == 1 { "mixed" } else { ["prefill", "decode"][place % 2] };
        let records: Vec<Value> = workers.iter().enumerate().map(|(place, it)| record(it, role(place))).collect();
        let (router, _file) = over(&records, router().policy(policy).args(arguments));
        let mut held = Held::default();
        let mut decided = std::collections::BTreeSet::new();
        for round in 0..14 {
            if round % 3 == 1 && policy == "kv-aware" {
                held.add(&router, round, random.random_range(1..400), legs);
            }
            held.settle(&router);
            let tokens = random.random_range(1..600);
            let body = json!({"model": "m", "n": random.random_range(1..3), "prompt": ids(100 + round, tokens)});
            let session = match random.random_range(0..3) {
                0 => String::new(),
                name => format!("X-Dynamo-Session-ID: s{name}\r\n"),
            };
            let explanation = check(&router, "/v1/completions", &session, &body.to_string(), seed);
            let by = explanation["legs"].as_array().unwrap().iter().map(|leg| leg["decided_by"].clone());
            decided.extend(by.map(|by| by.as_str().unwrap().to_owned()));
        }
        let expected = if policy == "kv-aware" { "cost" } else { "turn" };
        assert!(decided.contains(expected), "seed {seed}: {decided:?}");
        assert_eq!(decided.contains("session"), arguments.contains(&"both"), "seed {seed}: {decided:?}");
        gate.store(true, Ordering::SeqCst);
        held.connections.iter_mut().for_each(|it| assert_eq!(it.answer("POST").status, 200));
        router.wait_for_rest();
    }
}

/// Over engines that store and evict: hits are those of the pick, and the cost is the sum of its terms.
#[test]
fn hits_and_terms_are_those_of_the_pick() {
    let tokenizer = tokenizer();
    let engines = [EngineStyle::Vllm, EngineStyle::Sglang, EngineStyle::Vllm].map(|style| engine(style, 256));
    let start = engines.iter().fold(router(), |start, engine| start.engine(engine));
    let router = start.args(&["--router-tokenizer-path", tokenizer.path().to_str().unwrap()]).ready();
    wait_for_feeds(&router, engines.len());
    let seed = 0x5eed;
    let mut random = SmallRng::seed_from_u64(seed);
    let mut hits_seen = 0;
    for _ in 0..12 {
        let body = chat(&long_prefix(&format!("topic {}", random.random_range(0..4))));
        let explanation = check(&router, "/v1/chat/completions", "", &body, seed);
        let leg = &explanation["legs"][0];
        let candidates = leg["candidates"].as_array().unwrap();
        assert_eq!(candidates.len(), engines.len());
        let number = |value: &Value| value.as_f64().unwrap_or_else(|| panic!("{explanation:#}"));
        for candidate in candidates {
            let terms = &candidate["terms"];
            let missing = number(&candidate["request_blocks"]) - number(&candidate["cache_hits"]);
            assert_eq!(number(&terms["prefill"]), number(&leg["overlap_weight"]) * missing);
            let weights = &leg["load_weights"];
            let load = number(&weights["queued"]) * number(&candidate["queued_blocks"])
                + number(&weights["active"]) * number(&candidate["active_blocks"])
                + number(&weights["request_tokens"]) / 16.0 * number(&candidate["requests"])
                + number(&candidate["recent_blocks"]);
            assert_eq!((number(&terms["load"]), number(&terms["cost"])), (load, number(&terms["prefill"]) + load));
            assert!(number(&candidate["any_memory_blocks"]) >= number(&candidate["device_blocks"]));
        }
        let winner = candidates.iter().find(|it| it["target"] == leg["picked"]).unwrap();
        let lowest = candidates.iter().map(|it| number(&it["terms"]["cost"])).fold(f64::INFINITY, f64::min);
        assert_eq!(number(&winner["terms"]["cost"]), lowest);
        let line = router.log_lines().into_iter().rfind(|line| line.contains(" pick ")).unwrap();
        assert!(line.contains(&format!("cache_hits={} ", winner["cache_hits"])), "{line}: {winner}");
        assert!(line.contains(&format!("request_blocks={} ", winner["request_blocks"])), "{line}: {winner}");
        hits_seen += winner["cache_hits"].as_u64().unwrap();
        wait_for_mirror(&router, &engines);
    }
    assert!(hits_seen > 0, "topics come back");

    // Of a prompt that was served, a longer one finds the beginning in the prompt cache.
    let served: Value = serde_json::from_str(&chat(&long_prefix("topic 0"))).unwrap();
    check(&router, "/v1/chat/completions", "", &served.to_string(), seed);
    let mut longer = served;
    let turns = [json!({"role": "assistant", "content": "yes"}), json!({"role": "user", "content": "and now?"})];
    longer["messages"].as_array_mut().unwrap().extend(turns);
    let explanation = explained(&router, "text=1", "", &longer.to_string());
    let rendering = &explanation["prompt"]["renderings"][0];
    let of = |name: &str| rendering[name].as_u64().unwrap_or_else(|| panic!("{name}: {rendering:#}"));
    assert!(0 < of("cached_tokens") && of("cached_tokens") < of("tokens"), "{rendering:#}");
    assert!(0 < of("cached_bytes") && of("cached_bytes") < of("text_bytes"), "{rendering:#}");
    assert_eq!(rendering["text"].as_str().unwrap().len() as u64, of("text_bytes"));
    assert_eq!(rendering["by_block_size"], json!([{"block_size": 16, "blocks": of("tokens") / 16}]));
    let untold = explain(&router, "", "", &longer.to_string()).text();
    assert!(!untold.contains("and now?") && !untold.contains("keeps its prefix"), "{untold}");
}

/// Protocols of pairs know chats: what is weighed is the chat that the pair will get.
#[test]
fn messages_for_a_pair_are_explained_by_the_pair_that_serves_them() {
    let answer = r#"{"choices":[{"message":{"role":"assistant","content":"a"},"finish_reason":"stop"}]}"#;
    let workers: Vec<_> = (0..4).map(|_| json_worker(answer)).collect();
    let roles = ["prefill", "prefill", "decode", "decode"];
    let records: Vec<Value> = workers.iter().zip(roles).map(|(worker, role)| record(worker, role)).collect();
    let tokenizer = tokenizer();
    let start = router().args(&["--router-tokenizer-path", tokenizer.path().to_str().unwrap()]);
    let (router, _file) = over(&records, start);
    for round in 0..4 {
        let text = format!("question {round} about {}", "a long matter ".repeat(40));
        let body = json!({"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": text}]}).to_string();
        let explanation = check(&router, "/v1/messages", "", &body, 0);
        assert_eq!((&explanation["path"], &explanation["topology"]), (&json!("/v1/messages"), &json!("pair")));
        let blocks = &explanation["prompt"]["renderings"][0]["by_block_size"][0]["blocks"];
        assert!(blocks.as_u64().is_some_and(|blocks| blocks > 2), "{explanation:#}");
        let legs = explanation["legs"].as_array().unwrap();
        let roles: Vec<_> =
            legs.iter().map(|leg| (&leg["role"], leg["candidates"].as_array().unwrap().len())).collect();
        assert_eq!(roles, [(&json!("prefill"), 2), (&json!("decode"), 2)]);
        router.wait_for_rest();
    }
    let refused = explain(&router, "path=/v1/messages", "", r#"{"model":"m","max_tokens":4}"#);
    assert_eq!(refused.status, 400, "{}", refused.text());
}

/// Families that move by themselves, or with any question that is asked.
const MOVING: [&str; 9] = [
    "infera_router_uptime_seconds",
    "infera_router_connections",
    "infera_router_http_requests_total",
    "infera_router_requests_active",
    "infera_router_client_bytes_total",
    "infera_router_shard_sweeps_total",
    "infera_router_kv_events_age_seconds",
    "infera_router_discovery_contact_age_seconds",
    "infera_router_index_views_retired",
];

#[test]
fn an_explanation_moves_no_counter_and_reaches_no_worker() {
    let tokenizer = tokenizer();
    let worker = json_worker("{}");
    let router = router()
        .worker(worker.address)
        .args(&["--router-tokenizer-path", tokenizer.path().to_str().unwrap(), "--session-affinity", "both"])
        .ready();
    assert_eq!(router.post("/v1/chat/completions", &chat("warm")).status, 404, "it serves `m`");
    let body = |text: &str| json!({"model": "m", "messages": [{"role": "user", "content": text}]}).to_string();
    assert_eq!(router.post("/v1/chat/completions", &body("warm")).status, 200);
    router.wait_for_rest();
    let page = || {
        let page = router.get("/metrics").text();
        let stays = |line: &&str| !MOVING.iter().any(|name| line.starts_with(name));
        page.lines().filter(stays).map(str::to_owned).collect::<Vec<_>>()
    };
    let (before, requests) = (page(), worker.requests());
    let session = "X-Dynamo-Session-ID: somebody\r\n";
    for headers in ["", session, "X-Dynamo-Session-ID: \r\n"] {
        for text in ["warm", "something that was never seen before, and that is long enough for a block or two of it"] {
            explained(&router, "", headers, &body(text));
        }
        explained(&router, "path=/v1/completions", headers, r#"{"model":"m","prompt":{"no":"prompt"}}"#);
        explained(&router, "path=/v1/embeddings", headers, r#"{"model":"m","input":"x"}"#);
    }
    assert_eq!(before, page());
    assert_eq!(worker.requests(), requests);
    let explanation = explained(&router, "path=/v1/completions", "X-Dynamo-Session-ID: \r\n", r#"{"model":"m"}"#);
    assert_eq!(explanation["session"], json!({"ignored": "empty"}));
    assert!(explanation["prompt"]["no_blocks"]["reason"].is_string(), "{explanation:#}");
}

#[test]
fn a_request_that_would_be_refused_is_explained_by_its_refusal() {
    let worker = json_worker("{}");
    let router = router().worker(worker.address).ready();
    for (query, body, status) in [
        ("", r#"{"model":"absent","messages":[]}"#, 404),
        ("", "no json", 400),
        ("path=/health", "{}", 400),
        ("path=/v1/admin/explain", "{}", 400),
    ] {
        assert_eq!(explain(&router, query, "", body).status, status, "{query} {body}");
    }
    assert_eq!(worker.requests(), 0);
}

#[test]
fn those_that_are_left_out_are_named_with_the_reason() {
    let worker = json_worker("{}");
    let dead = dead_address();
    let router = router()
        .worker(worker.address)
        .worker(dead)
        .args(&["--breaker-failure-threshold", "1", "--breaker-cooldown-s", "60"])
        .ready();
    let body = r#"{"model":"m","prompt":[1,2,3]}"#;
    wait_until("the dead worker was tried", || {
        assert_eq!(router.post("/v1/completions", body).status, 200);
        router.metric_sum("infera_router_worker_breaker_trips_total") == 1.0
    });
    let explanation = explained(&router, "path=/v1/completions", "", body);
    let leg = &explanation["legs"][0];
    let dead = dead.to_string();
    assert_eq!(leg["left_out"], json!([{"target": dead, "reason": "breaker", "breaker": "open", "requests": 0}]));
    assert_eq!(leg["picked"], worker.address.to_string());
    assert_eq!(leg["candidates"].as_array().unwrap().len(), 1);
}
