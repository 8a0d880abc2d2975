//! Golden prompts: text and token ids that transformers and a live vLLM made of the same bodies.
//!
//! Needs the tokenizers of `tests/setup/fetch_tokenizers.sh`. Without them the tests say which did not run; with
//! `INFERA_REQUIRE_TOKENIZERS=1` that is a failure.

#![allow(clippy::unwrap_used)]

#[path = "support/tokenizers.rs"]
mod tokenizers;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use infera_router::prompt::{Endpoint, EngineRules, Prompter, PrompterOptions};
use serde_json::Value;
use sha2::{Digest, Sha256};
use tokenizers::fetched;

/// 2026-01-15 12:00 UTC, the clock of the recordings.
const RECORDED_AT_S: u64 = 1_768_478_400;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/golden")
}

fn lines(file: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(fixtures().join(file)).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// id -> body, the body in the very bytes of the recording.
fn bodies() -> HashMap<String, String> {
    #[derive(serde::Deserialize)]
    struct Line<'a> {
        id: String,
        #[serde(borrow)]
        body: &'a serde_json::value::RawValue,
    }
    let text = std::fs::read_to_string(fixtures().join("requests.jsonl")).unwrap();
    let parse = |line: &str| {
        let line: Line = serde_json::from_str(line).unwrap();
        (line.id, line.body.get().to_owned())
    };
    text.lines().map(parse).collect()
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Why a prompt is not the recorded one, if it is not.
fn difference(prompter: &Prompter, body: &str, expected: &Value) -> Option<String> {
    let prompt = prompter.tokens(Endpoint::Chat, EngineRules::Vllm, body.as_bytes());
    let prompt = match (prompt, expected.get("error")) {
        (Err(_), Some(_)) => return None,
        (Err(refusal), None) => return Some(refusal.to_string()),
        (Ok(prompt), Some(error)) => return Some(format!("{:?} instead of the error {error}", prompt.text)),
        (Ok(prompt), None) => prompt,
    };
    let text = prompt.text.unwrap();
    if sha256(text.as_bytes()) != expected["text_sha256"] {
        return Some(format!("text\n  ours   {text:?}\n  theirs {:?}", expected["text"].as_str().unwrap_or("(long)")));
    }
    let bytes: Vec<u8> = prompt.ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    if sha256(&bytes) != expected["ids_sha256"] {
        return Some(format!("ids {:?} instead of {}", prompt.ids, expected["ids"]));
    }
    None
}

fn check(name: &str, only: Option<&str>) {
    let Some(directory) = fetched(name) else { return };
    let now = SystemTime::UNIX_EPOCH + Duration::from_secs(RECORDED_AT_S);
    let options = PrompterOptions { now: Some(now), ..PrompterOptions::default() };
    let prompter = Prompter::load(&directory, options).unwrap();
    let bodies = bodies();
    let recorded = lines(&format!("golden_{name}.jsonl"));
    let wanted: Option<Vec<String>> =
        only.map(|file| std::fs::read_to_string(fixtures().join(file)).unwrap().lines().map(str::to_owned).collect());
    let (mut checked, mut wrong) = (0, Vec::new());
    for expected in &recorded {
        let id = expected["id"].as_str().unwrap();
        if wanted.as_ref().is_some_and(|wanted| !wanted.iter().any(|name| name == id)) {
            continue;
        }
        checked += 1;
        if let Some(why) = difference(&prompter, &bodies[id], expected) {
            wrong.push(format!("{id}: {why}"));
        }
    }
    assert_eq!(checked, wanted.map_or(recorded.len(), |wanted| wanted.len()));
    assert!(wrong.is_empty(), "{name}: {} of {checked} differ\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn basic_prompts_of_qwen3() {
    check("qwen3", Some("basic.txt"));
}

#[test]
fn every_prompt_of_qwen3() {
    check("qwen3", None);
}

#[test]
fn every_prompt_of_llama_3_1_with_tools() {
    check("llama3_1_tools", None);
}

#[test]
fn every_prompt_of_deepseek_v3() {
    check("deepseek_v3", None);
}

#[test]
fn every_prompt_of_gpt_oss() {
    check("gptoss", None);
}
