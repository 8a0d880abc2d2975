//! Texts on which tokenizers have been quadratic stay about linear: eight times the text costs about eight times the work,
//! and nowhere near sixty-four.
//!
//! Compares a thread's own CPU time at two sizes, the least of several runs. The sizes lie far apart so that what a busy
//! machine adds (cold caches, a first touch of memory) cannot be taken for another order of growth. Needs the tokenizers of `tests/setup/fetch_tokenizers.sh`; says which did not run without them.

#![allow(clippy::unwrap_used)]

#[path = "support/tokenizers.rs"]
mod tokenizers;

use infera_router::prompt::{Endpoint, EngineRules, Prompter, PrompterOptions};
use serde_json::json;
use tokenizers::fetched;

/// How much longer the larger text is.
const GROWTH: usize = 8;

/// Eight times the work is linear, sixty-four is quadratic; merging one endless word is a little more than linear.
const RATIO_MAX: f64 = 24.0;

/// Bytes of the larger text.
const BYTES: usize = 500_000;

/// CPU time that this thread has used. The kernel brings the figure up to date when the thread leaves the core, so it
/// leaves it for a moment.
fn thread_cpu_ns() -> u64 {
    std::thread::sleep(std::time::Duration::from_micros(1));
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    text.split(' ').next().unwrap().parse().unwrap()
}

/// About `bytes` bytes of each kind.
fn texts(bytes: usize) -> Vec<(&'static str, String)> {
    let filled = |part: &str| part.repeat(bytes / part.len());
    let mut state = 7u64;
    let base64: String = (0..bytes)
        .map(|_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            char::from(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"[(state >> 58) as usize])
        })
        .collect();
    vec![
        ("underscores", filled("_")),
        ("one letter", filled("a")),
        ("spaces", filled(" ")),
        ("line ends", filled("\n")),
        ("one emoji", filled("😀")),
        ("joined emoji", filled("👩‍👩‍👧‍👦")),
        ("base64", base64),
        ("Thai", filled("สวัสดีชาวโลก")),
        ("Chinese", filled("你是一个有帮助的助手")),
        ("marks on a letter", filled("a\u{300}\u{301}")),
        ("one mark", filled("\u{301}")),
        ("digits", filled("7")),
        ("starts of tokens", filled("<|im_")),
    ]
}

/// The least CPU time of encoding a text, and its number of tokens. Each run leaves out one more character at the
/// start: an encoder that remembers words would answer the same text from memory.
fn encoded(prompter: &Prompter, text: &str, runs: usize) -> (u64, usize) {
    let mut tokens = 0;
    let run = |(start, _)| {
        let body = json!({"prompt": text[start..]}).to_string();
        let before_ns = thread_cpu_ns();
        let prompt = prompter.tokens(Endpoint::Completions, EngineRules::Vllm, body.as_bytes());
        let took_ns = thread_cpu_ns() - before_ns;
        tokens = prompt.map_or(0, |prompt| prompt.ids.len());
        took_ns
    };
    let least = text.char_indices().take(runs).map(run).min().unwrap();
    (least, tokens)
}

fn check(name: &str) {
    let Some(directory) = fetched(name) else { return };
    let prompter = Prompter::load(&directory, PrompterOptions::default()).unwrap();
    prompter.warm_up();
    let mut wrong = Vec::new();
    for ((kind, small), (_, large)) in texts(BYTES / GROWTH).into_iter().zip(texts(BYTES)) {
        let (small_ns, small_tokens) = encoded(&prompter, &small, 8);
        let (large_ns, large_tokens) = encoded(&prompter, &large, 3);
        let ratio = large_ns as f64 / small_ns as f64;
        eprintln!(
            "{name:12} {kind:18} {:8.2} ms of CPU, {large_tokens:7} tokens, ratio {ratio:.2}",
            large_ns as f64 / 1e6
        );
        assert!(small_ns > 0, "no CPU time is counted here");
        assert!(small_tokens > 0 && large_tokens >= small_tokens, "{name}: {kind} was refused");
        if ratio > RATIO_MAX {
            wrong.push(format!("{kind}: {ratio:.2}"));
        }
    }
    assert!(
        wrong.is_empty(),
        "{name}: {GROWTH} times the text costs more than {RATIO_MAX} times: {}",
        wrong.join(", ")
    );
}

#[test]
fn qwen3() {
    check("qwen3");
}

#[test]
fn deepseek_v3() {
    check("deepseek_v3");
}

#[test]
fn llama_3_1() {
    check("llama3_1_tools");
}

#[test]
fn gpt_oss() {
    check("gptoss");
}
