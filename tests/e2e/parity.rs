//! Whether workers render prompts as the router does: by their own events, by asking them, and with template arguments
//! of their own. The engines are real ones with a tokenizer and a template; some have another template than the router.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use loadgen::engine::disagg::{Disagg, PdProtocol, PdRole};
use loadgen::engine::events::EngineStyle;
use loadgen::engine::{Engine, EngineConfig, EngineHandle};
use loadgen::prompt::TextModel;
use serde_json::{Value, json};

use crate::support::PATIENCE;
use crate::support::client::{self, Connection};
use crate::support::router::{Router, router};
use crate::support::{eventually, wait_until};

/// A word that no prompt of these tests has.
const PREFIX: &str = "zephyr ";

/// A model directory with the shipped tokenizer, and `prefix` in front of the shipped template.
fn model(prefix: &str) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    loadgen::prompt::write_shipped_tokenizer(directory.path()).unwrap();
    let path = directory.path().join("tokenizer_config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let template = format!("{prefix}{}", config["chat_template"].as_str().unwrap());
    config["chat_template"] = template.into();
    std::fs::write(&path, config.to_string()).unwrap();
    directory
}

fn engine(directory: &Path, config: EngineConfig) -> EngineHandle {
    let text = Arc::new(TextModel::from_directory(directory).unwrap());
    Engine::start_group(vec![config], text).unwrap().remove(0)
}

fn parity(router: &Router, engine: &EngineHandle) -> Option<f64> {
    router.metric(&format!("infera_router_render_parity{{model=\"demo\",worker_id=\"{}\"}}", engine.worker_id()))
}

/// A prompt of its own, a few blocks long.
fn chat(number: usize) -> String {
    let text = format!("{number} asks about the fleet and its warm prefix blocks. ").repeat(12);
    json!({"model": "demo", "max_tokens": 2, "messages": [{"role": "user", "content": text}]}).to_string()
}

fn write_workers(path: &Path, engines: &[&EngineHandle]) {
    let records: Vec<Value> = engines.iter().map(|engine| engine.registration()).collect();
    let next = path.with_extension("next");
    std::fs::write(&next, serde_json::to_vec(&records).unwrap()).unwrap();
    std::fs::rename(next, path).unwrap();
}

#[test]
fn events_alone_tell_an_honest_worker_from_one_that_renders_otherwise() {
    let (ours, theirs) = (model(""), model(PREFIX));
    for style in [EngineStyle::Vllm, EngineStyle::Sglang] {
        let silent = || EngineConfig { style, tokenizes: false, ..EngineConfig::default() };
        let (honest, other) = (engine(ours.path(), silent()), engine(theirs.path(), silent()));
        let workers = ours.path().join("workers.json");
        write_workers(&workers, &[&honest, &other]);
        let router = router()
            .args(&["--workers-file", workers.to_str().unwrap()])
            .args(&["--router-tokenizer-path", ours.path().to_str().unwrap()])
            .env("RUST_LOG", "info,infera_router::parity=debug")
            .ready();
        wait_until("every event feed is connected", || router.metric_sum("infera_router_kv_events_connected") == 2.0);
        assert_eq!((parity(&router, &honest), parity(&router, &other)), (Some(-1.0), Some(-1.0)));
        let mut number = 0;
        wait_until("the events have told both apart", || {
            assert_eq!(router.post("/v1/chat/completions", &chat(number)).status, 200);
            number += 1;
            (parity(&router, &honest), parity(&router, &other)) == (Some(1.0), Some(0.0))
        });
        assert_eq!(router.metric(r#"infera_router_render_parity_diverged_total{model="demo"}"#), Some(1.0));
        let checks = |result: &str| {
            router.metric(&format!("infera_router_render_parity_checks_total{{result=\"{result}\"}}")).unwrap()
        };
        assert!(checks("confirmed") >= 1.0 && checks("diverged") >= 2.0);
        // Where and what, for people; the metrics know of neither.
        let line = router.logged(&["the worker's tokens differ", other.worker_id().as_str()]);
        assert!(line.contains("token=0 ") && line.contains(PREFIX.trim()), "{line}");
        assert!(!router.get("/metrics").text().contains(PREFIX.trim()));
        write_workers(&workers, &[&honest]);
        wait_until("the verdict leaves with its worker", || parity(&router, &other).is_none());
        assert_eq!(parity(&router, &honest), Some(1.0));
        assert_eq!(router.metric(r#"infera_router_render_parity_diverged_total{model="demo"}"#), Some(1.0));
        router.wait_for_rest();
    }
}

#[test]
fn a_worker_that_tokenizes_is_compared_before_any_traffic() {
    let (ours, theirs) = (model(""), model(PREFIX));
    for style in [EngineStyle::Vllm, EngineStyle::Sglang] {
        let config = || EngineConfig { style, ..EngineConfig::default() };
        let (honest, other) = (engine(ours.path(), config()), engine(theirs.path(), config()));
        let silent = engine(ours.path(), EngineConfig { tokenizes: false, ..config() });
        let start = [&honest, &other, &silent]
            .iter()
            .fold(router(), |start, engine| start.args(&["--worker", &engine.worker_flag()]));
        let router = start.args(&["--router-tokenizer-path", ours.path().to_str().unwrap()]).ready();
        wait_until("both verdicts are there", || {
            (parity(&router, &honest), parity(&router, &other)) == (Some(1.0), Some(0.0))
        });
        assert_eq!(parity(&router, &silent), Some(-1.0));
        let line = router.logged(&["renders prompts otherwise", other.worker_id().as_str()]);
        assert!(line.contains("`plain` diverges at token 0 of"), "{line}");
        // It is told, not left out.
        for number in 0..6 {
            assert_eq!(router.post("/v1/chat/completions", &chat(number)).status, 200);
        }
        assert!(other.state().totals().finished > 0);
    }
}

/// What the router predicts for each worker is what that worker's own rendering has cached.
#[test]
fn each_worker_is_rendered_with_its_own_template_arguments() {
    let directory = model("{% if enable_thinking %}think{% else %}answer{% endif %} ");
    let path = directory.path().to_str().unwrap();
    let thinking = |on: bool| {
        let chat_template_kwargs = json!({"enable_thinking": on}).as_object().cloned().unwrap();
        let style = EngineStyle::Sglang;
        engine(directory.path(), EngineConfig { style, chat_template_kwargs, ..EngineConfig::default() })
    };
    let engines = [thinking(true), thinking(false)];
    let start = |arguments: &[&str]| {
        let flags = engines.iter().fold(router(), |start, engine| start.args(&["--worker", &engine.worker_flag()]));
        flags.args(&["--router-tokenizer-path", path]).args(arguments).ready()
    };
    let router = start(&[]);
    for (engine, on) in engines.iter().zip([true, false]) {
        let series = format!(
            "infera_router_render_variant{{variant=\"enable_thinking={on}\",worker_id=\"{}\"}}",
            engine.worker_id()
        );
        eventually("the engine's arguments are known", || router.metric(&series));
    }
    wait_until("every event feed is connected", || router.metric_sum("infera_router_kv_events_connected") == 2.0);
    for round in 0..2 {
        for number in 0..6 {
            assert_eq!(router.post("/v1/chat/completions", &chat(number)).status, 200);
            for engine in &engines {
                assert!(engine.wait_until(PATIENCE, |state| state.is_idle()));
                let view = format!("/v1/admin/cache-view/{}", engine.worker_id());
                wait_until("the mirror equals the engine's pool", || {
                    router.json(&view)["block_count"] == engine.state().blocks_resident()
                });
            }
        }
        let hits = router.metric_sum("infera_prefix_cache_blocks_hit_total") as u64;
        let cached: u64 = engines.iter().map(|engine| engine.state().totals().cached_tokens).sum();
        // A prompt that ends with a block has its last block computed again, whatever is cached of it.
        assert!((cached..=cached + 6 * 16).contains(&(hits * 16)), "round {round}: {hits} blocks, {cached} tokens");
        assert_eq!(hits > 0, round > 0, "every prompt is new in the first round, and shorter in common than a block");
    }
    assert!(engines.iter().all(|engine| engine.state().totals().finished > 0));
    wait_until("both agree", || engines.iter().all(|engine| parity(&router, engine) == Some(1.0)));
    drop(router);
    // With the fleet's arguments for both, one of them renders otherwise.
    let fleet = r#"{"enable_thinking":true}"#;
    let router = start(&["--kv-per-worker-template-kwargs", "false", "--kv-default-chat-template-kwargs", fleet]);
    wait_until("one agrees and one does not", || {
        (parity(&router, &engines[0]), parity(&router, &engines[1])) == (Some(1.0), Some(0.0))
    });
    assert_eq!(router.metric_sum("infera_router_render_variant"), 0.0);
}

/// Events that say nothing of the requests: here they come from another engine.
#[test]
fn blocks_that_never_show_are_an_alarm_and_no_divergence() {
    let directory = model("");
    let silent = || EngineConfig { tokenizes: false, ..EngineConfig::default() };
    let (served, heard) = (engine(directory.path(), silent()), engine(directory.path(), silent()));
    let worker = format!("{},model=demo,block-size=16,engine=vllm,kv-events={}", served.url(), heard.events_addr);
    let router =
        router().args(&["--worker", &worker, "--router-tokenizer-path", directory.path().to_str().unwrap()]).ready();
    wait_until("the event feed is connected", || router.metric_sum("infera_router_kv_events_connected") == 1.0);
    let mut number = 0;
    wait_until("four checks saw nothing", || {
        assert_eq!(router.post("/v1/chat/completions", &chat(number)).status, 200);
        number += 1;
        router.metric_sum("infera_router_render_parity_unseen") >= 4.0
    });
    router.logged(&["never show", served.worker_id().as_str()]);
    assert_eq!(parity(&router, &served), Some(-1.0));
}

/// A request's own template is the router's business only where that is switched on; the request is served either way.
#[test]
fn a_template_of_a_request_costs_locality_at_most() {
    let directory = model("");
    let engine = engine(directory.path(), EngineConfig::default());
    let body = json!({"model": "demo", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}],
        "chat_template": "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"});
    for (arguments, reason) in [(&[][..], "unsupported"), (&["--allow-request-chat-template"], "too_long")] {
        let flag = engine.worker_flag();
        let router = router()
            .args(&["--worker", &flag, "--router-tokenizer-path", directory.path().to_str().unwrap()])
            .args(arguments)
            .ready();
        assert_eq!(router.post("/v1/chat/completions", &body.to_string()).status, 200);
        let counted = router.metric(&format!("infera_router_prompt_failures_total{{reason=\"{reason}\"}}"));
        assert_eq!(counted, Some(1.0), "{arguments:?}");
        router.wait_for_rest();
    }
}

/// Prompts that share beginnings, many at once over ranks of workers whose pools are far too small, some of them given up
/// by their clients, others sent past the router: none of it looks like a divergence.
#[test]
fn a_crowd_of_requests_aborts_and_evictions_confirms_every_honest_worker() {
    let directory = model("");
    let small = || EngineConfig { tokenizes: false, dp_size: 3, blocks_total: 160, ..EngineConfig::default() };
    let engines = [engine(directory.path(), small()), engine(directory.path(), small())];
    let start = engines.iter().fold(router(), |start, engine| start.args(&["--worker", &engine.worker_flag()]));
    let router = start.args(&["--router-tokenizer-path", directory.path().to_str().unwrap()]).shards(2).ready();
    wait_until("every event feed is connected", || router.metric_sum("infera_router_kv_events_connected") == 6.0);
    let seed = fastrand::u64(..);
    let is_over = Arc::new(AtomicBool::new(false));
    let clients: Vec<_> = (0..6)
        .map(|number| {
            let (is_over, address, direct) = (is_over.clone(), router.address, engines[0].addr);
            let mut random = fastrand::Rng::with_seed(seed.wrapping_add(number));
            std::thread::spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    let text = [
                        "one shared beginning of many prompts. ".repeat(random.usize(2..12)),
                        random.u32(..).to_string(),
                    ];
                    let body = json!({"model": "demo", "max_tokens": random.u32(2..40),
                        "messages": [{"role": "user", "content": text.concat()}]})
                    .to_string();
                    let to = if random.u8(0..8) == 0 { direct } else { address };
                    let mut connection = Connection::open(to);
                    connection.send(&client::request("POST", "/v1/chat/completions", "", body.as_bytes()));
                    if random.u8(0..4) > 0 {
                        assert_eq!(connection.answer("POST").status, 200, "seed {seed}");
                    }
                }
            })
        })
        .collect();
    wait_until("every rank was checked", || {
        assert_eq!(
            router.metric(r#"infera_router_render_parity_checks_total{result="diverged"}"#),
            Some(0.0),
            "seed {seed}"
        );
        router.metric(r#"infera_router_render_parity_checks_total{result="confirmed"}"#) >= Some(6.0)
    });
    is_over.store(true, Ordering::Relaxed);
    clients.into_iter().for_each(|client| client.join().unwrap());
    assert!(engines.iter().all(|engine| parity(&router, engine) == Some(1.0)), "seed {seed}");
    router.wait_for_rest();
}

/// Of a pair, prefill is watched as any worker; decode gets its blocks from there and is only asked. Where one candidate is
/// known to render otherwise, decode demand counts by estimate.
#[test]
fn a_decode_worker_that_renders_otherwise_is_counted_by_estimate() {
    let (ours, theirs) = (model(""), model(PREFIX));
    let half = |role, tokenizes| EngineConfig {
        style: EngineStyle::Sglang,
        disagg: Some(Disagg::new(role, PdProtocol::SglangBootstrap)),
        tokenizes,
        ..EngineConfig::default()
    };
    let prefill = engine(ours.path(), half(PdRole::Prefill, false));
    let same = engine(ours.path(), half(PdRole::Decode, true));
    let workers = ours.path().join("workers.json");
    write_workers(&workers, &[&prefill, &same]);
    let router = router()
        .args(&["--workers-file", workers.to_str().unwrap(), "--decode-input-demand", "shadow"])
        .args(&["--router-tokenizer-path", ours.path().to_str().unwrap()])
        .ready();
    let post = |first: usize| {
        let ids: Vec<usize> = (0..80).map(|at| 100 + first + at).collect();
        let body = json!({"model": "demo", "max_tokens": 2, "prompt": ids}).to_string();
        assert_eq!(router.post("/v1/completions", &body).status, 200);
    };
    let decisions = |input: &str| {
        let page = router.get("/metrics").text();
        let family = "infera_router_decode_demand_decisions_total{";
        let label = format!("input=\"{input}\"");
        let lines = page.lines().filter(|line| line.starts_with(family) && line.contains(&label));
        lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum::<f64>()
    };
    wait_until("prefill's events are heard, and decode has answered", || {
        router.metric_sum("infera_router_kv_events_connected") == 2.0 && parity(&router, &same) == Some(1.0)
    });
    post(0);
    assert_eq!((decisions("exact"), decisions("estimated")), (1.0, 0.0));
    wait_until("prefill's events confirm it", || parity(&router, &prefill) == Some(1.0));
    let other = engine(theirs.path(), half(PdRole::Decode, true));
    write_workers(&workers, &[&prefill, &same, &other]);
    wait_until("the newcomer's verdict is there", || parity(&router, &other) == Some(0.0));
    post(200);
    assert_eq!((decisions("exact"), decisions("estimated")), (1.0, 1.0));
    router.wait_for_rest();
}
