//! The HTTP/1.1 codec: heads as clients and engines send them, and a chunked stream in the pieces of its events.

use std::hint::black_box;

use bench::answer::{self, Answer};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use infera_shards::measured::{chunked_body, request_head, response_head};

/// A request's head with what gateways and client libraries add.
fn long_request() -> Vec<u8> {
    let mut head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: router.example:8000\r\n".to_vec();
    for number in 0..20 {
        head.extend_from_slice(
            format!("X-Gateway-Header-{number}: a value of ordinary length {number}\r\n").as_bytes(),
        );
    }
    head.extend_from_slice(b"Content-Type: application/json\r\nContent-Length: 400000\r\n\r\n");
    head
}

fn heads(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("codec/head");
    let short = answer::request("router.example:8000", false, 200);
    for (name, bytes) in [("request", &short), ("request with 20 more lines", &long_request())] {
        assert!(request_head(bytes).is_some(), "{name} is not read");
        group.throughput(Throughput::Elements(1));
        group.bench_function(name, |bencher| bencher.iter(|| request_head(black_box(bytes))));
    }
    let answer = Answer::json(answer::JSON_BYTES).first;
    assert!(response_head(&answer).is_some(), "the answer is not read");
    group.bench_function("answer", |bencher| bencher.iter(|| response_head(black_box(&answer))));
    group.finish();
}

fn chunks(criterion: &mut Criterion) {
    let stream = Answer::stream(Some(std::time::Duration::ZERO));
    let head = stream.first.windows(4).position(|bytes| bytes == b"\r\n\r\n").map_or(0, |at| at + 4);
    let pieces: Vec<&[u8]> =
        std::iter::once(&stream.first[head..]).chain(stream.later.iter().map(Vec::as_slice)).collect();
    assert_eq!(chunked_body(&pieces), Some(stream.payload.len()));
    let mut group = criterion.benchmark_group("codec/chunks");
    group.throughput(Throughput::Elements(pieces.len() as u64));
    group.bench_function("64 events, a piece each", |bencher| bencher.iter(|| chunked_body(black_box(&pieces))));
    group.finish();
}

criterion_group!(benches, heads, chunks);
criterion_main!(benches);
