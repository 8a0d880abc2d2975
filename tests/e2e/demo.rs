//! The demo against the built router, small: it behaves, both policies answer everything, and kv-aware finds more prefixes
//! than round robin. How much time that saves is for the demo itself to show, not for a test to assert.

use loadgen::demo::{self, DemoConfig, report};

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
