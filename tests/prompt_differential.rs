//! Differential test: random chat requests through the router and through Python's transformers.
//!
//! The reference is `tests/differential/prompt_reference.py`. It needs the Python of `tests/setup/python_clients.sh`
//! (or another with transformers, named by `INFERA_REFERENCE_PYTHON`) and the tokenizers of
//! `tests/setup/fetch_tokenizers.sh`; without them the test says that it did not run, and with
//! `INFERA_REQUIRE_TOKENIZERS=1` it fails. `INFERA_REFERENCE_CASES` (default 100 per tokenizer) and
//! `INFERA_REFERENCE_SEED` (default: the time) widen it; a failure prints the seed.

#![allow(clippy::unwrap_used)]

#[path = "support/tokenizers.rs"]
mod tokenizers;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{SystemTime, UNIX_EPOCH};

use infera_router::prompt::{Endpoint, EngineRules, Prompter, PrompterOptions};

#[derive(serde::Deserialize)]
struct Case {
    id: u64,
    body: String,
    text: Option<String>,
    ids: Option<Vec<u32>>,
    error: Option<String>,
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().expect("a number"))
}

fn difference(prompter: &Prompter, case: &Case) -> Option<String> {
    match (prompter.tokens(Endpoint::Chat, EngineRules::Vllm, case.body.as_bytes()), &case.error) {
        (Err(_), Some(_)) => None,
        (Err(refusal), None) => Some(format!("refused: {refusal}")),
        (Ok(prompt), Some(error)) => Some(format!("rendered {:?} where the reference fails: {error}", prompt.text)),
        (Ok(prompt), None) if prompt.text != case.text => {
            Some(format!("text\n  ours   {:?}\n  theirs {:?}", prompt.text, case.text))
        }
        (Ok(prompt), None) if Some(&prompt.ids) != case.ids.as_ref() => {
            Some(format!("ids of {:?}\n  ours   {:?}\n  theirs {:?}", case.text, prompt.ids, case.ids))
        }
        _ => None,
    }
}

/// Whether a Python is there and has the reference.
fn has_transformers(python: &Path) -> bool {
    let mut probe = Command::new(python);
    probe.args(["-c", "import importlib.util as u; assert u.find_spec('transformers')"]).stderr(Stdio::null());
    probe.status().is_ok_and(|status| status.success())
}

fn check(name: &str) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let directory = tokenizers::store().join(name);
    let installed = root.join("target/python/bin/python");
    let python = std::env::var_os("INFERA_REFERENCE_PYTHON").map_or(installed, PathBuf::from);
    if !has_transformers(&python) || !directory.join("tokenizer.json").is_file() {
        let needs = "needs tests/setup/python_clients.sh and fetch_tokenizers.sh";
        tokenizers::not_run(&format!("NOT RUN: the differential test of {name} {needs}"));
        return;
    }
    let today = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let seed = number("INFERA_REFERENCE_SEED", today);
    let cases = number("INFERA_REFERENCE_CASES", 100);
    let prompter = Prompter::load(&directory, PrompterOptions::default()).unwrap();
    let script = root.join("tests/differential/prompt_reference.py");
    let mut reference = Command::new(python)
        .arg(script)
        .arg(&directory)
        .args([cases.to_string(), seed.to_string()])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut wrong = Vec::new();
    let (mut checked, mut refused) = (0, 0);
    for line in BufReader::new(reference.stdout.take().unwrap()).lines() {
        let case: Case = serde_json::from_str(&line.unwrap()).unwrap();
        checked += 1;
        refused += u64::from(case.error.is_some());
        if let Some(why) = difference(&prompter, &case) {
            wrong.push(format!("case {}: {}\n{why}", case.id, case.body));
        }
    }
    assert!(reference.wait().unwrap().success());
    assert_eq!(checked, cases);
    assert!(refused < cases / 2, "{refused} of {cases} requests were refused by the reference: too weak a test");
    let shown = wrong.iter().take(10).cloned().collect::<Vec<_>>().join("\n\n");
    assert!(wrong.is_empty(), "{name}, seed {seed}: {} of {checked} differ\n{shown}", wrong.len());
}

#[test]
fn qwen3_as_in_python() {
    check("qwen3");
}

#[test]
fn llama_3_1_as_in_python() {
    check("llama3_1_tools");
}

#[test]
fn deepseek_v3_as_in_python() {
    check("deepseek_v3");
}

#[test]
fn gpt_oss_as_in_python() {
    check("gptoss");
}
