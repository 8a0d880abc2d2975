//! `infera-router inspect prompt` on the real binary, over the golden requests.
//!
//! Needs the tokenizers of `tests/setup/fetch_tokenizers.sh`; says which did not run without them.

#![allow(clippy::unwrap_used)]

#[path = "support/tokenizers.rs"]
mod tokenizers;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use infera_router::hash::prompt_blocks;
use serde_json::Value;
use sha2::{Digest, Sha256};
use tokenizers::fetched;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Lines out for lines in.
fn inspect(directory: &Path, arguments: &[&str], input: &str) -> Vec<Value> {
    let mut child = Command::new(env!("CARGO_BIN_EXE_infera-router"))
        .args(["inspect", "prompt", "--router-tokenizer-path"])
        .arg(directory)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_owned();
    let writer = std::thread::spawn(move || stdin.write_all(input.as_bytes()));
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap().unwrap();
    assert!(output.status.success());
    String::from_utf8(output.stdout).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn check(name: &str) {
    let Some(directory) = fetched(name) else { return };
    let golden = root().join("tests/fixtures/golden");
    let input = std::fs::read_to_string(golden.join("requests.jsonl")).unwrap();
    let expected = std::fs::read_to_string(golden.join(format!("golden_{name}.jsonl"))).unwrap();
    let found = inspect(&directory, &["--now", "2026-01-15T12:00:00Z"], &input);
    assert_eq!(found.len(), input.lines().count());
    let mut checked = 0;
    for expected in expected.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()) {
        let found = found.iter().find(|found| found["id"] == expected["id"]).unwrap();
        if expected.get("error").is_some() {
            assert!(found["error"].is_string(), "{}", expected["id"]);
            continue;
        }
        let ids: Vec<u32> = serde_json::from_value(found["ids"].clone()).unwrap();
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        assert_eq!(sha256(&bytes), expected["ids_sha256"], "{}", expected["id"]);
        assert_eq!(sha256(found["text"].as_str().unwrap().as_bytes()), expected["text_sha256"], "{}", expected["id"]);
        assert_eq!(found["renderer"], "template", "{}", expected["id"]);
        assert_eq!(ids.len(), expected["n"], "{}", expected["id"]);
        if let Some(text) = expected.get("text") {
            assert_eq!(&found["text"], text, "{}", expected["id"]);
        }
        if let Some(expected_ids) = expected.get("ids") {
            assert_eq!(&found["ids"], expected_ids, "{}", expected["id"]);
            checked += 1;
        }
        let blocks: Vec<String> = prompt_blocks(&ids, 16).iter().map(|hash| format!("{:016x}", hash.0)).collect();
        assert_eq!(found["blocks"], serde_json::json!(blocks));
    }
    assert!(checked > 30, "only {checked} of the recordings hold ids");
}

#[test]
fn qwen3() {
    check("qwen3");
}

#[test]
fn llama_3_1_with_tools() {
    check("llama3_1_tools");
}

#[test]
fn deepseek_v3() {
    check("deepseek_v3");
}

#[test]
fn gpt_oss_with_a_fixed_clock() {
    check("gptoss");
}

#[test]
fn bare_bodies_other_sizes_and_errors() {
    let Some(directory) = fetched("qwen3") else { return };
    let input = "{\"prompt\":[1,2,3,4,5]}\n\n{\"id\":\"x\",\"body\":{\"prompt\":\"hi\"}}\nnot json\n{\"id\":7,\"body\":{\"messages\":[]}}\n";
    let found = inspect(&directory, &["--block-size", "4", "--engine", "sglang"], input);
    assert_eq!(found.len(), 4);
    assert_eq!(found[0]["blocks"], serde_json::json!(["341839abbe30be0b"]));
    assert_eq!((&found[1]["id"], &found[1]["text"]), (&Value::from("x"), &Value::from("hi")));
    assert!(found[2]["error"].as_str().unwrap().starts_with("bad_json"));
    assert_eq!((&found[3]["id"], &found[3]["error"]), (&Value::from(7), &Value::from("no_prompt")));
}
