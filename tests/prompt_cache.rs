//! Cutting, caching and the fast encoder give the same tokens and blocks as the reference encoder on the whole text,
//! on every tokenizer at hand.
//!
//! Needs the tokenizers of `tests/setup/fetch_tokenizers.sh`; says which did not run without them. Rounds are seeded;
//! `INFERA_FUZZ_SEED` and `INFERA_FUZZ_TEXTS` (default 200 for each tokenizer) widen them.

#![allow(clippy::unwrap_used)]

#[path = "support/tokenizers.rs"]
mod tokenizers;

use infera_router::hash::prompt_blocks;
use infera_router::prompt::pool::EncoderPool;
use infera_router::prompt::{Attempt, EncoderChoice, Endpoint, EngineRules, Prompter, PrompterOptions};
use serde_json::{Value, json};
use tokenizers::fetched;

const BLOCK_SIZES: [usize; 3] = [16, 1, 64];

struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % bound
    }

    fn pick<'a>(&mut self, items: &'a [&'a str]) -> &'a str {
        items[self.below(items.len())]
    }
}

const PARTS: [&str; 24] = [
    "the quick brown fox ",
    "Über naïve façade ",
    "你好，世界。",
    "привет мир ",
    "😀👍🏽",
    "\n\n",
    "  ",
    "\t",
    "\r\n",
    "12345 ",
    "3.14",
    "'s ",
    "def f(x):\n    return x\n",
    "{\"a\": 1}",
    "cafe\u{301} ",
    "مرحبا ",
    "สวัสดี",
    "<b>",
    "<|",
    "|>",
    "< ",
    "[",
    "e\u{301}",
    " \u{a0}",
];

/// Prompts of several long turns, one after the other so that all are cold, with and without helping threads.
#[test]
fn helping_threads_change_nothing() {
    let Some(directory) = fetched("qwen3") else { return };
    let alone = Prompter::load(&directory, PrompterOptions::default()).unwrap();
    let helped = Prompter::load(&directory, PrompterOptions::default()).unwrap();
    let pool = std::sync::Arc::new(EncoderPool::start(3).unwrap());
    let asked = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let (weak, counter) = (std::sync::Arc::downgrade(&pool), asked.clone());
    helped.set_volunteers(
        3,
        std::sync::Arc::new(move |job| {
            // Every fifth time as with a full queue.
            let number = counter.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            number % 5 != 4 && weak.upgrade().is_some_and(|pool| pool.submit(job))
        }),
    );
    let seed = number("INFERA_FUZZ_SEED", 5);
    let mut random = Random(seed);
    for round in 0..12 {
        let turn = |random: &mut Random, role: &str| json!({"role": role, "content": text(random, &["<|im_end|>", "<think>"], 2_000)});
        let messages: Vec<Value> =
            (0..8).map(|index| turn(&mut random, if index % 2 == 0 { "user" } else { "assistant" })).collect();
        let body = json!({"messages": messages}).to_string();
        let blocks = |prompter: &Prompter| {
            prompter.blocks_by_size(Endpoint::Chat, EngineRules::Vllm, None, body.as_bytes(), &BLOCK_SIZES).unwrap()
        };
        assert_eq!(blocks(&helped), blocks(&alone), "round {round}, seed {seed}");
    }
    assert!(asked.load(std::sync::atomic::Ordering::Relaxed) > 12, "nobody was asked to help");
    drop(helped);
}

fn text(random: &mut Random, added: &[&str], parts: usize) -> String {
    let mut text = String::new();
    for _ in 0..parts {
        match random.below(12) {
            0 => text.push_str(random.pick(added)),
            1 => text.extend(char::from_u32(random.below(0x2fff) as u32)),
            _ => text.push_str(random.pick(&PARTS)),
        }
    }
    text
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().expect("a number"))
}

fn check(name: &str) {
    let Some(directory) = fetched(name) else { return };
    let seed = number("INFERA_FUZZ_SEED", 1);
    let load = |encoder, cache_bytes| {
        let options = PrompterOptions { encoder, cache_bytes, ..PrompterOptions::default() };
        Prompter::load(&directory, options).unwrap()
    };
    let reference = load(EncoderChoice::Reference, 0);
    let cached = load(EncoderChoice::Checked, 1 << 20);
    assert_eq!((reference.encoder_name(), cached.encoder_name()), ("tokenizers", "fastokens"));
    let file: Value = serde_json::from_slice(&std::fs::read(directory.join("tokenizer.json")).unwrap()).unwrap();
    let added: Vec<&str> = file["added_tokens"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|token| token["content"].as_str())
        .take(40)
        .collect();

    let mut random = Random(seed);
    let mut reused = 0;
    for round in 0..number("INFERA_FUZZ_TEXTS", 200) {
        let mut whole = String::new();
        // Turns of one conversation: each text begins with the one before it.
        for turn in 0..4 {
            let parts = 1 + random.below(120);
            whole.push_str(&text(&mut random, &added, parts));
            let with_ends = random.below(2) == 0;
            let body = json!({"prompt": whole, "add_special_tokens": with_ends}).to_string();
            let tokens = |prompter: &Prompter| {
                prompter.tokens(Endpoint::Completions, EngineRules::Vllm, body.as_bytes()).unwrap().ids
            };
            let ids = tokens(&reference);
            let context = || format!("{name}, seed {seed}, round {round}, turn {turn}, ends {with_ends}: {whole:?}");
            assert_eq!(tokens(&cached), ids, "encoders differ: {}", context());
            let blocks = cached
                .blocks_by_size(Endpoint::Completions, EngineRules::Vllm, None, body.as_bytes(), &BLOCK_SIZES)
                .unwrap();
            for (size, blocks) in BLOCK_SIZES.iter().zip(blocks) {
                assert_eq!(blocks.tokens, ids.len(), "tokens in blocks of {size}: {}", context());
                assert_eq!(*blocks.hashes, prompt_blocks(&ids, *size), "blocks of {size}: {}", context());
            }
            reused = cached.stats().tokens_reused;
        }
    }
    assert!(reused > 0, "no prefix was ever found");
    assert!(cached.stats().cache_bytes <= 1 << 20);
}

#[test]
fn qwen3() {
    check("qwen3");
}

#[test]
fn llama_3_1() {
    check("llama3_1_tools");
}

#[test]
fn deepseek_v3() {
    check("deepseek_v3");
}

#[test]
fn deepseek_v4() {
    check("deepseek_v4");
}

#[test]
fn gpt_oss() {
    check("gptoss");
}

#[test]
fn gemma_3() {
    check("gemma3");
}

/// Four threads ask for the same new long prompt at once: its one long piece is encoded once.
#[test]
fn concurrent_misses_of_one_prefix_encode_it_once() {
    let Some(directory) = fetched("qwen3") else { return };
    let prompter = Prompter::load(&directory, PrompterOptions::default()).unwrap();
    let shared = "A long shared document. ".repeat(4000);
    let body = |question: usize| {
        json!({"messages": [{"role": "system", "content": shared}, {"role": "user", "content": format!("question {question}")}]})
            .to_string()
    };
    let barrier = std::sync::Barrier::new(4);
    std::thread::scope(|scope| {
        for question in 0..4 {
            let (prompter, barrier, body) = (&prompter, &barrier, body(question));
            scope.spawn(move || {
                barrier.wait();
                prompter.blocks(Endpoint::Chat, EngineRules::Vllm, body.as_bytes(), 16).unwrap()
            });
        }
    });
    let length = prompter.tokens(Endpoint::Chat, EngineRules::Vllm, body(0).as_bytes()).unwrap().ids.len() as u64;
    let encoded = prompter.stats().tokens_encoded;
    assert!(encoded < length + 4 * 40, "{encoded} tokens were encoded for one document of {length}");
}

/// The second turn of a conversation leaves only its new messages to be encoded, and says so before doing it.
#[test]
fn an_attempt_stops_at_its_bound_of_new_text() {
    let Some(directory) = fetched("qwen3") else { return };
    let prompter = Prompter::load(&directory, PrompterOptions::default()).unwrap();
    let turn = |count: usize| {
        let message = |index: usize| {
            let role = if index.is_multiple_of(2) { "user" } else { "assistant" };
            json!({"role": role, "content": format!("message {index} {}", "text ".repeat(100))})
        };
        json!({"messages": (0..count).map(message).collect::<Vec<_>>()}).to_string()
    };
    let attempt = |body: &str, bound| {
        prompter.attempt(Endpoint::Chat, EngineRules::Vllm, None, body.as_bytes(), &[16], bound).unwrap()
    };
    let Attempt::Later(pending) = attempt(&turn(21), 2000) else { panic!("21 new messages are above the bound") };
    assert!(pending.new_bytes() > 10_000);
    let first = prompter.finish(pending).unwrap();
    let Attempt::Ready(second) = attempt(&turn(23), 2000) else { panic!("2 new messages are within the bound") };
    assert!(
        second[0].tokens > first[0].tokens
            && second[0].hashes.starts_with(&first[0].hashes[..first[0].hashes.len() - 2])
    );
    let ids = prompter.tokens(Endpoint::Chat, EngineRules::Vllm, turn(23).as_bytes()).unwrap().ids;
    assert_eq!(*second[0].hashes, prompt_blocks(&ids, 16));
}

/// CPU time of this thread, nanoseconds.
fn thread_cpu_ns() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    text.split_whitespace().next().unwrap().parse().unwrap()
}

/// Texts without a place to split cost about in proportion to their length: four times the text takes less than twelve
/// times the time (a quadratic encoder would take sixteen times as long and more).
#[test]
fn texts_without_a_split_point_stay_about_linear() {
    let Some(directory) = fetched("qwen3") else { return };
    let options = PrompterOptions { cache_bytes: 0, ..PrompterOptions::default() };
    let prompter = Prompter::load(&directory, options).unwrap();
    prompter.warm_up();
    let cost_ns = |part: &str, bytes: usize| {
        let body = json!({"prompt": part.repeat(bytes / part.len())}).to_string();
        let run = || {
            let start = thread_cpu_ns();
            prompter.tokens(Endpoint::Completions, EngineRules::Vllm, body.as_bytes()).unwrap();
            thread_cpu_ns() - start
        };
        (0..3).map(|_| run()).min().unwrap()
    };
    for part in ["_", "a", " ", "\n", "😀", "ab", "สวัสดี", "你好", "QUJDREVGR0g0", "1234567890", "=-=-", "A1b2"]
    {
        let (short, long) = (cost_ns(part, 100_000), cost_ns(part, 400_000));
        // Below 2 ms the clock's steps and the caches decide.
        assert!(long < 12 * short.max(2_000_000), "{part:?}: {short} ns for 100 kB, {long} ns for 400 kB");
    }
}
