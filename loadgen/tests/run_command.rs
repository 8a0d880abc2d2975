//! `loadgen run` as users start it: exit codes, the JSON report, and errors that say what to do.
#![allow(clippy::unwrap_used)]

use std::process::{Command, Output};

use loadgen::engine::{Engine, EngineConfig, EngineHandle};
use serde_json::Value;

const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures");

fn run(engine: &EngineHandle, arguments: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_loadgen"));
    command.args(["run", "--target", &engine.url()]).args(arguments.split_whitespace());
    command.output().unwrap()
}

fn check(engine: &EngineHandle, arguments: &str, code: i32, says: &str) {
    let output = run(engine, arguments);
    let text = [String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr)].concat();
    assert_eq!(output.status.code(), Some(code), "{arguments}: {text}");
    assert!(text.contains(says), "{arguments}: {text}");
}

#[test]
fn exit_codes_tell_good_runs_from_failed_and_invalid_ones() {
    let engine = Engine::start(EngineConfig::default()).unwrap();
    let small = "--prefix-tokens 40 --suffix-tokens 8 --output-tokens 3 --concurrency 4";
    check(&engine, &format!("{small} --requests 12"), 0, "requests 12   errors 0");
    check(&engine, &format!("{small} --requests 12 --model other"), 1, "error http_404");
    check(&engine, "--rate 1e6 --requests 3000 --model other", 3, "INVALID: the generator itself was the limit");
    check(&engine, &format!("--trace {FIXTURES}/trace.jsonl --concurrency 4 --slo ttft=60s"), 0, "within the limits");
    check(&engine, &format!("--recording {FIXTURES}/recording.jsonl --concurrency 1"), 0, "requests 3   errors 0");
    check(&engine, &format!("{small} --requests 30 --abort-rate 0.5"), 0, "left early");
}

#[test]
fn generated_requests_go_to_the_endpoint_that_was_told() {
    let engine = Engine::start(EngineConfig::default()).unwrap();
    let small =
        "--workload multi-turn --prefix-tokens 200 --suffix-tokens 8 --output-tokens 40 --requests 12 --turns 3";
    for (number, endpoint) in ["completions", "responses", "messages"].into_iter().enumerate() {
        for manner in ["", "--unary"] {
            let arguments = format!("{small} --endpoint {endpoint} --concurrency 2 --seed {number} {manner}");
            check(&engine, &arguments, 0, "requests 12   errors 0");
        }
    }
    let generated = engine.state().totals().generated_tokens;
    assert_eq!(generated, 6 * 12 * 40);
    check(&engine, &format!("{small} --endpoint embeddings --concurrency 2"), 0, "requests 12   errors 0");
    assert_eq!(engine.state().totals().generated_tokens, generated, "embeddings generate nothing");
    let trace = format!("--trace {FIXTURES}/trace.jsonl --concurrency 4 --unary");
    check(&engine, &format!("{trace} --endpoint completions"), 0, "errors 0");
    check(&engine, "--workload images --endpoint completions", 1, "--endpoint chat");
}

#[test]
fn the_report_tells_what_was_run() {
    let engine = Engine::start(EngineConfig::default()).unwrap();
    let file = std::env::temp_dir().join(format!("loadgen-run-{}.json", std::process::id()));
    let output = run(
        &engine,
        &format!(
            "--workload agents --groups 2 --prefix-tokens 1500 --suffix-tokens 40 --output-tokens 4 --turns 4 \
             --requests 20 --concurrency 3 --speedup 1000 --warmup 5 --slo ttft=60s --json {}",
            file.display()
        ),
    );
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    std::fs::remove_file(&file).unwrap();
    assert_eq!((&report["requests"], &report["errors"]), (&15.into(), &0.into()));
    let source = &report["workload"]["source"];
    assert_eq!(
        (&source["kind"], &source["name"], &source["has_tools"]),
        (&"generated".into(), &"agents".into(), &true.into())
    );
    assert_eq!(source["shared"]["tokens"], 1500);
    assert_eq!(report["goodput_rps"], report["throughput_rps"]);
    assert!(report["generator"]["cpu_seconds"].as_f64().unwrap() > 0.0);
    assert!(report["hit_rate"].as_f64().unwrap() > 0.5, "{}", report["hit_rate"]);
}

#[test]
fn wrong_flags_are_refused_with_what_is_allowed() {
    let engine = Engine::start(EngineConfig::default()).unwrap();
    check(&engine, "--rate 5 --ramp 1..5/10", 2, "cannot be used with");
    check(&engine, "--ramp 5", 2, "a ramp is A..B/SECONDS");
    check(&engine, "--slo speed=5ms", 2, "none of ttft, itl, e2e");
    check(&engine, "--abort-rate 2", 1, "a share between 0 and 1");
    check(&engine, "--workload rag --trace x", 2, "cannot be used with");
    check(&engine, "--trace /no/such/file", 1, "opening /no/such/file");
    check(&engine, &format!("--trace {FIXTURES}/recording.jsonl"), 1, "line 1");
    check(&engine, "--workload images --new-images 3", 1, "--new-images must be between 0 and 1");
}
