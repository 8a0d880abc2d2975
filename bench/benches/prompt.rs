//! A body to its block hashes: a conversation never seen, its next turn with the rest known, and the same body once more.

use std::hint::black_box;

use bench::conversation::{Writer, body};
use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use infera_router::prompt::{Endpoint, EngineRules, Prompter, PrompterOptions};

/// Text of the conversation, some 20,000 tokens of the tokenizer that comes with loadgen.
const CONVERSATION_BYTES: usize = 80_000;
/// Text of a turn: an answer and a question.
const TURN_BYTES: usize = 1_000;
const BLOCK_SIZES: [usize; 1] = [16];

fn prompter(cache_bytes: usize) -> Prompter {
    let directory = tempfile::tempdir().expect("a temporary directory");
    loadgen::prompt::write_shipped_tokenizer(directory.path()).expect("the shipped tokenizer");
    Prompter::load(directory.path(), PrompterOptions { cache_bytes, ..PrompterOptions::default() })
        .expect("the shipped tokenizer")
}

/// How many blocks a body has.
fn blocks(prompter: &Prompter, body: &[u8]) -> usize {
    let blocks = prompter.blocks_by_size(Endpoint::Chat, EngineRules::Vllm, None, black_box(body), &BLOCK_SIZES);
    blocks.expect("a chat of ours")[0].hashes.len()
}

fn prompts(criterion: &mut Criterion) {
    let mut writer = Writer::new(1);
    let conversation = writer.conversation(CONVERSATION_BYTES);
    let bytes = body(&conversation);
    let (forgetful, remembering) = (prompter(0), prompter(64 << 20));
    assert!(blocks(&forgetful, &bytes) > 500, "a long prompt");
    assert_eq!(blocks(&forgetful, &bytes), blocks(&remembering, &bytes));
    let mut group = criterion.benchmark_group("prompt");
    group.throughput(Throughput::Bytes(bytes.len() as u64));
    group.sample_size(20);
    group.bench_function("never seen", |bencher| bencher.iter(|| blocks(&forgetful, &bytes)));
    group.bench_function("next turn", |bencher| {
        let next = || body(&[&conversation[..], &writer.turn(TURN_BYTES)].concat());
        bencher.iter_batched(next, |body| blocks(&remembering, &body), BatchSize::SmallInput);
    });
    group.bench_function("once more", |bencher| bencher.iter(|| blocks(&remembering, &bytes)));
    group.finish();
}

criterion_group!(benches, prompts);
criterion_main!(benches);
