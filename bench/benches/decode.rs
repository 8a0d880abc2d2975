//! Decoding of KV-event payloads: the recordings of real engines, and one large batch as a long prefill sends it.

use std::hint::black_box;
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use infera_router::events::decode::Decoder;

/// One of each form: map and array events, integer and byte-string hashes.
const RECORDINGS: [&str; 4] =
    ["vllm-0.10.2", "vllm-0.32.0", "vllm-0.32.0-byteshash-dp1-notopic", "sglang-0.5.23-p16-default"];

/// Blocks and tokens per block of a prompt of 112,000 tokens.
const BLOCKS: u64 = 7_000;
const BLOCK_TOKENS: u64 = 16;

/// The payload frame of each recorded live message.
fn payloads(recording: &str) -> Vec<Vec<u8>> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/kv-events");
    let text = std::fs::read_to_string(directory.join(format!("{recording}.jsonl"))).expect("a recording of ours");
    let lines = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).expect("JSON lines"));
    let live = lines.filter(|line| line["kind"] == "sub");
    let payload = |line: serde_json::Value| {
        let last = line["frames"].as_array().and_then(|frames| frames.last()).and_then(|frame| frame.as_str());
        STANDARD.decode(last.expect("frames")).expect("base64")
    };
    live.map(payload).collect()
}

/// `[timestamp, [["BlockStored", hashes, nil, tokens, block_size]]]` in MessagePack, integers of eight and four bytes.
fn large_batch() -> Vec<u8> {
    let mut bytes = vec![0x92, 0xcb];
    bytes.extend_from_slice(&1.5f64.to_be_bytes());
    bytes.extend_from_slice(&[0x91, 0x95, 0xab]);
    bytes.extend_from_slice(b"BlockStored");
    array(&mut bytes, BLOCKS);
    for block in 1..=BLOCKS {
        bytes.push(0xcf);
        bytes.extend_from_slice(&block.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes());
    }
    bytes.push(0xc0);
    array(&mut bytes, BLOCKS * BLOCK_TOKENS);
    for token in 0..BLOCKS * BLOCK_TOKENS {
        bytes.push(0xce);
        bytes.extend_from_slice(&(70_000 + token as u32 % 80_000).to_be_bytes());
    }
    bytes.push(BLOCK_TOKENS as u8);
    bytes
}

fn array(bytes: &mut Vec<u8>, length: u64) {
    bytes.push(0xdd);
    bytes.extend_from_slice(&(length as u32).to_be_bytes());
}

/// Decodes all payloads; returns how many events came out.
fn decode(decoder: &mut Decoder, payloads: &[Vec<u8>]) -> u32 {
    let mut events = 0;
    for payload in payloads {
        let summary = decoder.decode(black_box(payload), |event| {
            black_box(&event);
            events += 1;
        });
        assert!(summary.error.is_none(), "{:?}", summary.error);
    }
    events
}

fn decoding(criterion: &mut Criterion) {
    let mut inputs: Vec<(&str, Vec<Vec<u8>>)> = RECORDINGS.iter().map(|name| (*name, payloads(name))).collect();
    inputs.push(("prompt of 7,000 blocks", vec![large_batch()]));
    let mut decoder = Decoder::default();
    let mut group = criterion.benchmark_group("decode");
    for (name, payloads) in &inputs {
        assert!(decode(&mut decoder, payloads) > 0, "{name} has no events");
        group.throughput(Throughput::Bytes(payloads.iter().map(|payload| payload.len() as u64).sum()));
        group.bench_with_input(BenchmarkId::from_parameter(name), payloads, |bencher, payloads| {
            bencher.iter(|| decode(&mut decoder, payloads));
        });
    }
    group.finish();
}

criterion_group!(benches, decoding);
criterion_main!(benches);
