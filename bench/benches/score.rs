//! The cost of every candidate, as a pick works it out: loads read, hits from the index, one number each.

use std::hint::black_box;
use std::sync::Arc;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use infera_router::fleet::{TargetId, TargetLoad};
use infera_router::hash::BlockHash;
use infera_router::load::{Booking, LedgerMessage, LedgerSink};
use infera_router::route::{Candidate, LoadTerm, cost};

const BLOCK_TOKENS: u32 = 16;
/// Blocks of an agent's prompt.
const REQUEST_BLOCKS: u32 = 7_000;

/// Nobody reads the bookings: they stay pending, which is what a pick sees of the newest ones.
struct Unread;

impl LedgerSink for Unread {
    fn send(&self, _message: LedgerMessage) {}
}

/// Loads of a fleet under traffic, each with some requests in flight.
fn loads(targets: u64, bookings: &mut Vec<Booking>) -> Vec<Arc<TargetLoad>> {
    let ledger: Arc<dyn LedgerSink> = Arc::new(Unread);
    let load = |target: u64| {
        let load: Arc<TargetLoad> = Arc::default();
        for request in 0..target % 7 {
            let blocks: Arc<[BlockHash]> = (0..100 * request + 1).map(BlockHash).collect();
            bookings.push(Booking::new(TargetId(target), &load, blocks, &ledger, request).queueing(10 * request));
        }
        load
    };
    (0..targets).map(load).collect()
}

fn scoring(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("score");
    let (term, weights) = (LoadTerm::Queue, LoadTerm::Queue.weights());
    for targets in [8u32, 64, 1024] {
        let mut bookings = Vec::new();
        let loads = loads(u64::from(targets), &mut bookings);
        let candidate = |(target, load): (usize, &Arc<TargetLoad>)| Candidate {
            target: target as u32,
            request_blocks: REQUEST_BLOCKS,
            cache_hits: target as u32 * 37 % REQUEST_BLOCKS,
            active_blocks: load.active_blocks(),
            load_blocks: weights.blocks(load, BLOCK_TOKENS),
            picked_at_ns: load.picked_at_ns(),
            block_tokens: BLOCK_TOKENS,
        };
        group.throughput(Throughput::Elements(u64::from(targets)));
        group.bench_with_input(BenchmarkId::new("candidates", targets), &loads, |bencher, loads| {
            bencher.iter(|| -> f64 {
                let costs = loads.iter().enumerate().map(|it| cost(term.overlap_weight(), &candidate(black_box(it))));
                costs.sum()
            });
        });
    }
    group.finish();
}

criterion_group!(benches, scoring);
criterion_main!(benches);
