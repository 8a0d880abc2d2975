//! The chained block hash: one block, and a whole long prompt as agent traffic sends it.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use infera_router::hash::{ROOT, chain, prompt_blocks};

/// Tokens of an average agent prompt.
const PROMPT_TOKENS: u32 = 112_000;

fn one_block(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("hash/chain");
    for block_size in [16usize, 64, 256] {
        let tokens: Vec<u32> = (0..block_size as u32).collect();
        group.throughput(Throughput::Elements(block_size as u64));
        group.bench_with_input(BenchmarkId::from_parameter(block_size), &tokens, |bencher, tokens| {
            bencher.iter(|| chain(black_box(ROOT), black_box(tokens)));
        });
    }
    group.finish();
}

fn long_prompt(criterion: &mut Criterion) {
    let tokens: Vec<u32> = (0..PROMPT_TOKENS).map(|index| index.wrapping_mul(2_654_435_761) % 150_000).collect();
    let mut group = criterion.benchmark_group("hash/prompt_blocks");
    group.throughput(Throughput::Elements(u64::from(PROMPT_TOKENS)));
    for block_size in [16usize, 64] {
        group.bench_with_input(BenchmarkId::from_parameter(block_size), &tokens, |bencher, tokens| {
            bencher.iter(|| prompt_blocks(black_box(tokens), block_size));
        });
    }
    group.finish();
}

criterion_group!(benches, one_block, long_prompt);
criterion_main!(benches);
