//! The simulation in front of the router's own decision code, small: it repeats itself, no rule beats the bounds, and kv-aware
//! does on agent loops what it is for.

#![allow(clippy::unwrap_used)]

use std::io::Write;
use std::process::Command;
use std::time::Duration;

use bench::simulation::{Plan, Rule, RunResult, Source, run_all};
use loadgen::engine::scheduler::Speed;
use loadgen::plan::trace::TRACE_BLOCK_TOKENS;
use loadgen::sim::{Pairs, Shape, Slo, TraceLine};

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

/// A trace of requests that come at even times: the ids of each, behind one that all share.
fn trace(every_ms: usize, prompts: impl Iterator<Item = Vec<u64>>) -> Source {
    let line = |(number, own): (usize, Vec<u64>)| TraceLine {
        timestamp: (number * every_ms) as u64,
        input_length: (own.len() + 1) * TRACE_BLOCK_TOKENS,
        output_length: 50,
        hash_ids: std::iter::once(0).chain(own).collect(),
    };
    Source::Trace { lines: prompts.enumerate().map(line).collect(), speed: 1.0, is_sequential: false }
}

/// Conversations whose device blocks are gone when they come back, and hosts that hold them all: who counts what a host has
/// sends them there, and their prompts are loaded instead of computed.
#[test]
fn blocks_in_host_memory_are_found_by_the_default_and_not_without_credit() {
    let rules = ["kv-aware,host=0", "kv-aware"];
    let turns =
        (0..3).flat_map(|turn| (0..80).map(move |chat| (0..8 + 2 * turn).map(|at| 1 + chat * 100 + at).collect()));
    let plan = Plan { source: trace(400, turns), pool_tokens: 1 << 15, host_tokens: 1 << 20, ..plan(&rules) };
    let results = run_all(&plan, 2).unwrap();
    for (without, with) in of(&results, rules[0]).zip(of(&results, rules[1])) {
        assert!(with.outcome.host_hit_rate > 0.3, "{with:?}");
        assert!(with.outcome.hit_rate > 1.5 * without.outcome.hit_rate, "{with:?} {without:?}");
        assert!(with.outcome.ttft_mean_s < without.outcome.ttft_mean_s, "{with:?} {without:?}");
    }
}

/// One long prompt and three short ones in turn over four decode engines: taking turns gives all long ones to one of them.
#[test]
fn decode_demand_spreads_what_decode_engines_hold() {
    let rules = ["round-robin", "kv-aware,demand=0"];
    let prompts = (0..240).map(|number| {
        let ids = if number % 4 == 0 { 40 } else { 1 };
        (0..ids).map(|at| 1 + number * 100 + at).collect()
    });
    let pairs = Some(Pairs { prefill: 4, transfer_per_token: Duration::from_micros(5) });
    let plan = Plan { source: trace(250, prompts), engines: 8, pairs, ..plan(&rules) };
    let results = run_all(&plan, 2).unwrap();
    for (turns, demand) in of(&results, rules[0]).zip(of(&results, rules[1])) {
        assert!(turns.outcome.imbalance_decode > 2.0 && demand.outcome.imbalance_decode < 1.3, "{turns:?} {demand:?}");
        assert!(demand.outcome.hit_rate > 0.0, "{demand:?}");
    }
}

#[test]
fn simulate_says_how_fast_it_was_and_refuses_what_cannot_be() {
    let simulate = |arguments: &[&str]| {
        let command = ["--workload", "agents", "--requests", "100", "--engines", "3"];
        Command::new(env!("CARGO_BIN_EXE_simulate")).args(command).args(arguments).output().unwrap()
    };
    let output = simulate(&["--prefill-engines", "1", "--host-tokens", "100000", "--rule", "kv-aware,demand=0"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && text.contains("kv-aware,demand=0") && text.contains("times as fast"), "{text}");
    for wrong in
        [["--step-base-ms", "-1"], ["--prefill-engines", "3"], ["--jitter", "2"], ["--rule", "kv-aware,host=2"]]
    {
        // With an equals sign: a negative number is no flag.
        let wrong = wrong.join("=");
        assert!(!simulate(&[&wrong]).status.success(), "{wrong}");
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
    let cases = report["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 7);
    // Host memory and pairs are compared by the rules that concern them.
    for (case, own) in [(4, "kv-aware,host=0"), (5, "kv-aware,host=1"), (6, "kv-aware,demand=3000")] {
        let rows = cases[case]["rows"].as_array().unwrap();
        for rule in ["round-robin", "session-affinity", "kv-aware", own] {
            let row = rows.iter().find(|row| row["rule"] == rule).unwrap();
            let most = row["imbalance_decode"]["median"].as_f64().unwrap();
            assert!((1.0..=8.0).contains(&most), "{row}");
            assert!(row["host_hit_rate"]["maximum"].as_f64() <= row["hit_rate"]["maximum"].as_f64(), "{row}");
        }
    }
    let is_met = report["goals"].as_array().unwrap().iter().all(|goal| goal["met"] == true);
    assert_eq!(output.status.success(), is_met, "{text}");
    let picture = std::fs::read_to_string(path("picture.svg")).unwrap();
    assert!(picture.starts_with("<svg") && picture.trim_end().ends_with("</svg>"));
    assert_eq!(picture.matches("font-weight=\"bold\"").count(), 7);
}
