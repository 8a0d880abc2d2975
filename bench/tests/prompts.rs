//! `long_prompt` and `relay_jitter` on short prompts, `generator` with few requests: they run through the built router and
//! report what they saw. Figures are not judged here.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// A program beside this test's own build; `cargo test --workspace` builds it.
fn beside(program: &str) -> Option<PathBuf> {
    let beside = std::env::current_exe().unwrap().parent()?.parent()?.join(program);
    if beside.is_file() {
        return Some(beside);
    }
    eprintln!("NOT RUN: {} is not built", beside.display());
    assert!(std::env::var_os("CI").is_none(), "CI must build {program}");
    None
}

/// Runs a tool with the shipped tokenizer; gives its report.
fn report(program: &str, arguments: &[&str]) -> Option<Value> {
    let router = beside("infera-router")?;
    let directory = tempfile::tempdir().unwrap();
    let json = directory.path().join("report.json");
    let tokenizer = Path::new(env!("CARGO_MANIFEST_DIR")).join("../loadgen/assets");
    let output = Command::new(program)
        .args(arguments)
        .arg("--router")
        .arg(router)
        .arg("--tokenizer")
        .arg(tokenizer)
        .arg("--json")
        .arg(&json)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap())
}

#[test]
fn long_prompt_reports_every_kind_of_request() {
    let arguments = ["--tokens", "3000", "--rounds", "1", "--requests", "4"];
    let Some(report) = report(env!("CARGO_BIN_EXE_long_prompt"), &arguments) else { return };
    assert!(report["tokens"].as_u64().unwrap() >= 3000);
    for row in ["next_turn_ms", "cold_ms", "fast_encoder_ms", "reference_encoder_ms"] {
        assert!(report[row]["median"].as_f64().unwrap() > 0.0, "{row}: {report}");
    }
    assert_eq!(report["goals"], Value::Array(Vec::new()), "short prompts are not judged");
}

#[test]
fn relay_jitter_sees_events_with_and_without_prompts() {
    let arguments = ["--tokens", "3000", "--streams", "4", "--rounds", "1", "--seconds", "1.5"];
    let Some(report) = report(env!("CARGO_BIN_EXE_relay_jitter"), &arguments) else { return };
    for side in ["without", "with"] {
        let turn = &report[side][0];
        assert!(turn["events"].as_u64().unwrap() > 50 && turn["prompts"].as_u64().unwrap() > 0, "{side}: {report}");
    }
    assert!(report["encoded_share"].as_f64().unwrap() > 0.5, "the router encoded the prompts: {report}");
}

#[test]
fn generator_measures_both_sides_of_every_scenario() {
    let Some(loadgen) = beside("loadgen") else { return };
    let few = ["--rounds", "1", "--requests", "60", "--warm-up", "10", "--loadgen", loadgen.to_str().unwrap()];
    let Some(report) = report(env!("CARGO_BIN_EXE_generator"), &few) else { return };
    let rows = report["rows"].as_array().unwrap();
    let names: Vec<&str> = rows.iter().step_by(2).map(|row| row["scenario"].as_str().unwrap()).collect();
    assert_eq!(names, ["json c=32", "sse burst 32", "sse paced 200", "sse paced 2000"]);
    for row in rows {
        for side in ["ratio", "generator_us", "router_us"] {
            assert!(row[side]["median"].as_f64().unwrap() > 0.0, "{side}: {row}");
        }
        assert_eq!(row["met"], Value::Null, "so few are not judged");
    }
}
