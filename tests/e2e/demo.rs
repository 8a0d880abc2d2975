//! The demo against the built router, small: it behaves, both policies answer everything, and kv-aware finds more prefixes
//! than round robin. How much time that saves is for the demo itself to show, not for a test to assert.

use loadgen::demo::decode_spread::{self, SpreadConfig};
use loadgen::demo::{self, DemoConfig, images, report};
use loadgen::engine::disagg::PdProtocol;

#[test]
fn the_demo_runs_and_shows_the_gain() {
    let config = DemoConfig {
        requests: 60,
        rate: 6.0,
        prefix_tokens: 800,
        blocks_total: 400,
        progress: false,
        ..DemoConfig::new(env!("CARGO_BIN_EXE_infera-router").into())
    };
    let runs = demo::run(&config, |line| println!("{line}")).unwrap();
    let report = report::json(&config, &runs);
    let table = report::table(&runs);
    println!("{table}");
    let policies: Vec<_> = report["runs"].as_array().unwrap().iter().collect();
    assert_eq!(policies.len(), 2);
    for (run, name) in policies.iter().zip(["round-robin", "kv-aware"]) {
        assert_eq!(run["policy"], name);
        assert_eq!((run["requests"].as_u64(), run["errors"].as_u64()), (Some(60), Some(0)), "{run}");
        assert_eq!(run["problems"].as_array().map(Vec::len), Some(0), "{run}");
        for member in ["mean", "p50", "p99"] {
            assert!(run["ttft_ms"][member].as_f64().unwrap() > 0.0);
        }
        assert!(run["throughput_rps"].as_f64().unwrap() > 0.0);
    }
    let hit_rate = |run: usize| policies[run]["hit_rate"].as_f64().unwrap();
    assert!(hit_rate(1) > hit_rate(0) + 0.1, "{table}");
    // The seed's check by hand, in small: nothing new is stored by the second request.
    let check = &report["seed_check"];
    assert!(check["block_count_after_first"].as_u64().unwrap() > 0);
    assert_eq!(check["block_count_after_first"], check["block_count_after_second"]);
}

/// Repeats of an image return to the prefill engine that holds it, different images spread; under round-robin they do not.
#[test]
fn the_image_demo_shows_affinity() {
    let mut config = DemoConfig { progress: false, ..DemoConfig::new(env!("CARGO_BIN_EXE_infera-router").into()) };
    let shape = "3p1d".parse().unwrap();
    images::tuned(&mut config, shape);
    (config.groups, config.requests, config.rate, config.output_tokens) = (6, 24, 8.0, 4);
    let protocol = PdProtocol::VllmNixl;
    let runs = images::run(&config, shape, protocol, |line| println!("{line}")).unwrap();
    println!("{}", images::table(&runs));
    let report = images::json(&config, protocol, &runs);
    for (run, policy) in report["runs"].as_array().unwrap().iter().zip(["round-robin", "kv-aware"]) {
        assert_eq!(
            (run["policy"].as_str(), run["problems"].as_array().map(Vec::len)),
            (Some(policy), Some(0)),
            "{run}"
        );
        let requests: u64 = runs.iter().find(|it| it.policy == policy).unwrap().by_image.iter().flatten().sum();
        assert_eq!(requests, 24);
    }
    let scattered = runs[0].by_image.iter().filter(|counts| counts.iter().filter(|count| **count > 0).count() > 1);
    assert!(scattered.count() > 0, "round-robin knows no images");
}

/// A popular system prompt that decode engines do not share: with demand on, their KV stays even. How uneven it is
/// without is for `loadgen decode-spread` to show.
#[test]
fn demand_keeps_decode_targets_even() {
    let mut config = SpreadConfig::new(env!("CARGO_BIN_EXE_infera-router").into(), 3000.0);
    config.scenarios.retain(|scenario| scenario.name == "one product");
    config.settings.retain(|setting| setting.name == "on");
    (config.seeds, config.seconds) = (vec![1], 6.0);
    let runs = decode_spread::run(&config, &mut |line| println!("{line}")).unwrap();
    println!("{}", decode_spread::report::table(&config, &runs).unwrap());
    assert_eq!((runs.len(), runs[0].errors), (1, 0));
    assert!(runs[0].kv_spread < 1.3, "{runs:?}");
}
