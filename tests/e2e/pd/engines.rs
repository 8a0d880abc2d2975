//! Simulated prefill and decode engines that depend on each other: every protocol, and 500 aborts at random moments.

use std::sync::Arc;

use loadgen::engine::disagg::{Disagg, PdProtocol, PdRole};
use loadgen::engine::events::EngineStyle;
use loadgen::engine::scheduler::Speed;
use loadgen::engine::{Engine, EngineConfig, EngineHandle};
use loadgen::prompt::TextModel;

use super::*;

/// One prefill and two decode engines, fast but not instant, and a router over them.
fn fleet(protocol: PdProtocol, ranks: u32) -> (Vec<EngineHandle>, Router) {
    fleet_of(protocol, ranks, (1, 2), &[])
}

/// Prefill engines first.
fn fleet_of(
    protocol: PdProtocol,
    ranks: u32,
    (prefills, decodes): (usize, usize),
    arguments: &[&str],
) -> (Vec<EngineHandle>, Router) {
    let speed = Speed {
        step_base: Duration::from_millis(2),
        prefill_per_token: Duration::from_micros(100),
        ..Speed::default()
    };
    let style = if protocol == PdProtocol::SglangBootstrap { EngineStyle::Sglang } else { EngineStyle::Vllm };
    let config = EngineConfig { speed, style, answer_tokens: 8, ..EngineConfig::default() };
    let half = |role, dp_size| EngineConfig { disagg: Some(Disagg::new(role, protocol)), dp_size, ..config.clone() };
    let mut configs: Vec<_> = (0..prefills).map(|_| half(PdRole::Prefill, ranks)).collect();
    configs.extend((0..decodes).map(|_| half(PdRole::Decode, 1)));
    let engines = Engine::start_group(configs, Arc::new(TextModel::shipped().unwrap())).unwrap();
    let records: Vec<Value> = engines.iter().map(EngineHandle::registration).collect();
    let router = launch(&records, crate::support::router::router().args(arguments));
    (engines, router)
}

fn wait_until_idle(engines: &[EngineHandle]) {
    for engine in engines {
        let idle = engine.wait_until(crate::support::PATIENCE, |state| {
            state.is_idle() && state.transfers.held == 0 && state.transfers.decode_waiting == 0
        });
        assert!(idle, "{:?}", engine.state());
    }
}

#[test]
fn every_protocol_serves_over_engines_that_depend_on_each_other() {
    for protocol in PdProtocol::ALL {
        for ranks in [1, 2] {
            let (engines, router) = fleet(protocol, ranks);
            let mut answers = Vec::new();
            for at in 0..6 {
                let body =
                    json!({"model": "demo", "prompt": [at, 7, 8, 9, 10, 11], "stream": at % 2 == 0, "max_tokens": 4,
                    "stream_options": if at % 2 == 0 { json!({"include_usage": true}) } else { Value::Null }})
                    .to_string();
                let answer = router.post("/v1/completions", &body);
                assert!(answer.status == 200 && answer.complete, "{protocol:?} {ranks}: {}", answer.text());
                answers.push(answer.text());
            }
            if protocol != PdProtocol::AtomMooncake {
                let body =
                    r#"{"model":"demo","messages":[{"role":"user","content":"able"}],"max_tokens":3,"min_tokens":2}"#;
                let answer = router.post("/v1/chat/completions", body);
                assert_eq!(answer.status, 200, "{protocol:?} {ranks}: {}", answer.text());
                assert_eq!(answer.json()["usage"]["completion_tokens"], 3);
            }
            let has_responses = protocol != PdProtocol::AtomMooncake;
            for stream in [false, true].into_iter().filter(|_| has_responses) {
                let body = json!({"model": "demo", "input": "able", "stream": stream, "max_output_tokens": 3});
                let answer = router.post("/v1/responses", &body.to_string());
                assert!(answer.status == 200 && answer.complete, "{protocol:?} {ranks}: {}", answer.text());
                let end = if stream { "event: response.incomplete\n" } else { r#""output_tokens":3"# };
                assert!(answer.text().contains(end), "{protocol:?}: {}", answer.text());
            }
            router.wait_for_rest();
            wait_until_idle(&engines);
            let counts = engines[0].state().transfers;
            let expected = if protocol == PdProtocol::AtomMooncake { 6 } else { 9 };
            assert_eq!((counts.delivered, counts.freed, counts.stranded), (expected, 0, 0), "{protocol:?}");
            assert_eq!((counts.collisions, counts.misdirected), (0, 0), "{protocol:?}");
            // Prefill computed one token per request, decode all others.
            assert_eq!(engines[0].state().totals().generated_tokens, expected, "{protocol:?}");
        }
    }
}

/// Under a model-wide weight that lets the cache decide, prefill's own weight of 0 leaves its picks to load alone: equal
/// ones are used in turn.
#[test]
fn prefill_has_a_cache_weight_of_its_own() {
    for (weight, of_the_holder) in [("20", 5), ("0", 3)] {
        let arguments = ["--kv-overlap-weight", "20", "--kv-recent-load", "off", "--kv-prefill-overlap-weight", weight];
        let (engines, router) = fleet_of(PdProtocol::VllmNixl, 1, (2, 1), &arguments);
        let prompt: Vec<u32> = (0..200).collect();
        let body = json!({"model": "demo", "prompt": prompt, "max_tokens": 2}).to_string();
        for asked in 1..=5 {
            assert_eq!(router.post("/v1/completions", &body).status, 200);
            router.wait_for_rest();
            wait_until_idle(&engines);
            // What the engines hold is what the router knows.
            wait_until("the events are read", || {
                engines.iter().all(|engine| {
                    let view = router.json(&format!("/v1/admin/cache-view/{}", engine.worker_id()));
                    view["block_count"] == engine.state().blocks_resident()
                })
            });
            let computed: u64 = engines[..2].iter().map(|engine| engine.state().totals().finished).sum();
            assert_eq!(computed, asked);
        }
        let most = engines[..2].iter().map(|engine| engine.state().totals().finished).max();
        assert_eq!(most, Some(of_the_holder), "weight {weight}");
    }
}

/// Field report B40: 500 clients that leave at random moments, over each way of pairing: no booking and no KV is left behind.
#[test]
fn b40_after_500_aborts_at_random_moments_nothing_is_left() {
    let seed: u64 = std::env::var("PD_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(rand_seed);
    println!("PD_SEED={seed}");
    for (protocol, aborts) in
        [(PdProtocol::SglangBootstrap, 200), (PdProtocol::VllmNixl, 200), (PdProtocol::VllmMooncake, 100)]
    {
        let (engines, router) = fleet(protocol, 2);
        let threads: Vec<_> = (0..4)
            .map(|thread| {
                let address = router.address;
                std::thread::spawn(move || {
                    let mut state = seed ^ (thread << 32) | 1;
                    let mut next = move |below: u64| {
                        state ^= state << 13;
                        state ^= state >> 7;
                        state ^= state << 17;
                        state % below
                    };
                    for _ in 0..aborts / 4 {
                        let ids: Vec<String> = (0..16 + next(200)).map(|_| next(300).to_string()).collect();
                        let samples = if protocol == PdProtocol::SglangBootstrap { 1 + next(2) } else { 1 };
                        let body = format!(
                            r#"{{"model":"demo","stream":{},"n":{samples},"prompt":[{}]}}"#,
                            next(2) == 0,
                            ids.join(",")
                        );
                        let mut connection = client::Connection::open(address);
                        connection.send(&client::request("POST", "/v1/completions", "", body.as_bytes()));
                        let patience = Duration::from_micros(1 + next(60_000));
                        connection.stream().set_read_timeout(Some(patience)).unwrap();
                        let mut sink = [0; 64];
                        for _ in 0..1 + next(4) {
                            let _ = std::io::Read::read(&mut connection.reader, &mut sink);
                        }
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        router.wait_for_rest();
        wait_until_idle(&engines);
        let counts = engines[0].state().transfers;
        assert_eq!((counts.stranded, counts.collisions, counts.misdirected), (0, 0, 0), "{protocol:?}: {counts:?}");
        assert_eq!(router.metric("infera_router_pd_stranded_transfers_total"), Some(0.0));
        // The fleet still serves.
        let answer = router.post("/v1/completions", r#"{"model":"demo","prompt":[1,2,3]}"#);
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
}

fn rand_seed() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as u64
}
