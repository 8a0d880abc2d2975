//! The simulation in front of the router's own decision code, small: it repeats itself, no rule beats the bounds, and kv-aware
//! does on agent loops what it is for.

#![allow(clippy::unwrap_used)]

use std::io::Write;
use std::process::Command;
use std::time::Duration;

use bench::simulation::{Plan, Rule, RunResult, Source, run_all};
use loadgen::engine::scheduler::Speed;
use loadgen::sim::{Shape, Slo};

fn plan(rules: &[&str]) -> Plan {
    Plan {
        source: Source::Generated { shape: Shape::Agents, requests: 500, rate: 0.5 },
        engines: 4,
        pairs: None,
        speed: Speed::default(),
        pool_tokens: 1 << 20,
        host_tokens: 0,
        block_size: 64,
        event_lag: Duration::from_millis(2),
        slo: Slo { ttft_s: 2.0, itl_s: 0.1 },
        rules: rules.iter().map(|rule| rule.parse::<Rule>().unwrap()).collect(),
        seeds: vec![1, 2],
    }
}

fn of<'a>(results: &'a [RunResult], rule: &'a str) -> impl Iterator<Item = &'a RunResult> {
    results.iter().filter(move |result| result.rule == rule)
}

#[test]
fn kv_aware_is_near_the_oracle_ahead_of_round_robin_and_the_same_every_time() {
    let rules = ["round-robin", "session-affinity", "most-cached", "kv-aware,knowledge=promised", "kv-aware"];
    let results = run_all(&plan(&rules), 2).unwrap();
    let again = run_all(&plan(&rules), 1).unwrap();
    assert_eq!(serde_json::to_string(&results).unwrap(), serde_json::to_string(&again).unwrap());
    let order: Vec<(&str, u64)> = results.iter().map(|result| (&*result.rule, result.seed)).collect();
    assert_eq!(order[..3], [("round-robin", 1), ("round-robin", 2), ("session-affinity", 1)]);
    let bounds = of(&results, "round-robin").map(|result| result.bounds.unwrap());
    for (number, bounds) in bounds.enumerate() {
        assert!(bounds.memory <= bounds.infinite, "{bounds:?}");
        for result in results.iter().filter(|result| result.seed == number as u64 + 1) {
            // Agents wait for answers, so that the order of requests, and with it the bound, differs a little by rule.
            assert!(result.outcome.hit_rate <= bounds.memory + 0.005, "{result:?} {bounds:?}");
        }
    }
    for (ours, (turns, oracle)) in
        of(&results, "kv-aware").zip(of(&results, "round-robin").zip(of(&results, "most-cached")))
    {
        assert!(ours.outcome.hit_rate > turns.outcome.hit_rate, "{ours:?} {turns:?}");
        assert!(ours.outcome.ttft_p50_s < turns.outcome.ttft_p50_s, "{ours:?} {turns:?}");
        assert!(ours.outcome.hit_rate >= 0.95 * oracle.outcome.hit_rate, "{ours:?} {oracle:?}");
    }
}

/// Two requests with one long prefix, one after the other on an idle fleet: the router's defaults and its plain formula
/// both send the second where the first was.
#[test]
fn an_idle_fleet_finds_a_prefix_where_it_was_computed() {
    let trace = "{\"timestamp\":0,\"input_length\":5200,\"output_length\":9,\"hash_ids\":[1,2,3,4,5,6,7,8,9,10,11]}\n\
                 {\"timestamp\":9000,\"input_length\":5300,\"output_length\":9,\"hash_ids\":[1,2,3,4,5,6,7,8,9,10,12]}\n";
    let lines = loadgen::sim::read_trace(trace.as_bytes(), 9).unwrap();
    for rule in ["kv-aware", "kv-aware,load=active"] {
        let source = Source::Trace { lines: lines.clone(), speed: 1.0, is_sequential: true };
        for result in run_all(&Plan { source, ..plan(&[rule]) }, 1).unwrap() {
            // 80 blocks of 64 tokens in ten ids.
            assert_eq!(result.outcome.hit_rate, 5120.0 / 10_500.0, "{rule}");
        }
    }
}

#[test]
fn the_tool_writes_its_table_its_report_and_its_picture() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let mut trace = std::fs::File::create(path("trace.jsonl")).unwrap();
    let mut random = fastrand::Rng::with_seed(3);
    for number in 0..400u64 {
        // Conversations of four turns, each four ids longer, behind an id that all share.
        let (conversation, turn) = (number % 100, number / 100);
        let ids: Vec<u64> =
            std::iter::once(0).chain((0..(turn + 1) * 4).map(|at| 1 + conversation * 100 + at)).collect();
        let line = serde_json::json!({
            "timestamp": number * 300, "input_length": ids.len() * 512 - random.usize(1..200),
            "output_length": random.u32(1..300), "hash_ids": ids,
        });
        writeln!(trace, "{line}").unwrap();
    }
    drop(trace);
    let output = Command::new(env!("CARGO_BIN_EXE_quality"))
        .args(["--seeds", "1", "--share", "0.5", "--agents", "150", "--trace"])
        .arg(path("trace.jsonl"))
        .arg("--json")
        .arg(path("report.json"))
        .arg("--svg")
        .arg(path("picture.svg"))
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("| `kv-aware` |") && text.contains("| `round-robin` |"), "{text}");
    let report: serde_json::Value = serde_json::from_slice(&std::fs::read(path("report.json")).unwrap()).unwrap();
    assert_eq!(report["schema"], "infera-quality/1");
    assert_eq!(report["cases"].as_array().unwrap().len(), 4);
    let is_met = report["goals"].as_array().unwrap().iter().all(|goal| goal["met"] == true);
    assert_eq!(output.status.success(), is_met, "{text}");
    let picture = std::fs::read_to_string(path("picture.svg")).unwrap();
    assert!(picture.starts_with("<svg") && picture.trim_end().ends_with("</svg>"));
    assert_eq!(picture.matches("font-weight=\"bold\"").count(), 4);
}
