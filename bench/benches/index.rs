//! The index: decoding one message, applying it, removing it again, publishing, and the long query.

use std::hint::black_box;

use bench::kv_workload::{EVENT_BLOCKS, Suffix, WORKERS, Workload};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use infera_router::events::decode::Decoder;
use infera_router::index::{Hits, Mirror, Tree};

fn apply(tree: &mut Tree, mirror: &mut Mirror, decoder: &mut Decoder, payload: &[u8]) {
    mirror.begin_batch();
    decoder.decode_into(payload, mirror, Mirror::announce, |mirror, event| {
        mirror.apply(tree, &event);
    });
}

fn decode(criterion: &mut Criterion) {
    let workload = Workload::new(1);
    let payloads = workload.store_conversation(0);
    let mut decoder = Decoder::default();
    let mut group = criterion.benchmark_group("kv_events/decode");
    group.throughput(Throughput::Elements(EVENT_BLOCKS as u64));
    group.bench_function("stored 16 blocks", |bencher| {
        bencher.iter(|| {
            decoder.decode(black_box(&payloads[1]), |event| {
                black_box(event);
            })
        });
    });
    group.finish();
}

/// One worker stores the blocks of an event and loses them again; published in between, as under a storm.
fn store_and_remove(criterion: &mut Criterion) {
    let mut workload = Workload::new(1);
    let (mut tree, mut mirror, mut decoder) = (Tree::default(), Mirror::new(0), Decoder::default());
    let suffix = Suffix { worker: 0, ..workload.new_suffix() };
    for payload in workload.store_system(0, suffix.system) {
        apply(&mut tree, &mut mirror, &mut decoder, &payload);
    }
    let (stores, removals) = (workload.store_suffix(suffix), workload.remove_suffix(suffix));
    let mut group = criterion.benchmark_group("index/store_and_remove");
    group.throughput(Throughput::Elements((stores.len() * EVENT_BLOCKS) as u64));
    group.bench_function("one worker", |bencher| {
        bencher.iter(|| {
            stores.iter().for_each(|payload| apply(&mut tree, &mut mirror, &mut decoder, payload));
            black_box(tree.publish());
            removals.iter().for_each(|payload| apply(&mut tree, &mut mirror, &mut decoder, payload));
            black_box(tree.publish());
        });
    });
    group.finish();
}

fn query(criterion: &mut Criterion) {
    let workload = Workload::new(1);
    let (mut tree, mut decoder) = (Tree::default(), Decoder::default());
    for worker in 0..WORKERS {
        let mut mirror = Mirror::new(worker as u16);
        for payload in workload.store_conversation(worker) {
            apply(&mut tree, &mut mirror, &mut decoder, &payload);
        }
    }
    let (snapshot, blocks) = (tree.publish(), workload.conversation());
    let mut hits = Hits::new();
    let mut group = criterion.benchmark_group("index/query");
    group.bench_function("7000 blocks on 64 workers", |bencher| {
        bencher.iter(|| snapshot.query(black_box(&blocks), &mut hits));
    });
    group.bench_function("miss at block 0", |bencher| {
        bencher.iter(|| snapshot.query(black_box(&blocks[1..2]), &mut hits));
    });
    group.finish();
}

criterion_group!(benches, decode, store_and_remove, query);
criterion_main!(benches);
