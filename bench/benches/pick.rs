//! One whole decision of kv-aware in front of 64 workers: the conversation's blocks asked of the index, candidates, the
//! choice, the booking and its release.

use std::hint::black_box;
use std::sync::Arc;

use bench::kv_workload::{WORKERS, Workload};
use criterion::{Criterion, criterion_group, criterion_main};
use infera_router::events::decode::Decoder;
use infera_router::fleet::{Slot, TargetId, TargetLoad};
use infera_router::hash::BlockHash;
use infera_router::index::{Hits, Mirror, Snapshot, Tree};
use infera_router::load::{Booking, LedgerMessage, LedgerSink};
use infera_router::route::{Candidate, LoadTerm, PickCounter, charge, pick, recent_blocks};

const BLOCK_TOKENS: u32 = 16;

/// The ingest core's side of the queue is not measured here.
struct Unread;

impl LedgerSink for Unread {
    fn send(&self, message: LedgerMessage) {
        black_box(&message);
    }
}

/// A view in which all but the last quarter of the workers hold the conversation.
fn view(workload: &Workload) -> Snapshot {
    let (mut tree, mut decoder) = (Tree::default(), Decoder::default());
    for worker in 0..WORKERS * 3 / 4 {
        let mut mirror = Mirror::new(worker as u16);
        for payload in workload.store_conversation(worker) {
            mirror.begin_batch();
            decoder.decode_into(&payload, &mut mirror, Mirror::announce, |mirror, event| {
                mirror.apply(&mut tree, &event);
            });
        }
    }
    tree.publish()
}

fn picking(criterion: &mut Criterion) {
    let workload = Workload::new(1);
    let snapshot = view(&workload);
    let blocks: Arc<[BlockHash]> = workload.conversation().into();
    let loads: Vec<Arc<TargetLoad>> = (0..WORKERS).map(|_| Arc::default()).collect();
    let ledger: Arc<dyn LedgerSink> = Arc::new(Unread);
    let (term, weights, picks) = (LoadTerm::Queue, LoadTerm::Queue.weights(), PickCounter::default());
    let (mut hits, mut candidates, mut now_ns) = (Hits::new(), Vec::new(), 0);
    let mut group = criterion.benchmark_group("pick");
    group.bench_function("7000 blocks, 64 workers", |bencher| {
        bencher.iter(|| {
            now_ns += 1;
            snapshot.query(black_box(&blocks), &mut hits);
            candidates.clear();
            candidates.extend(loads.iter().enumerate().map(|(target, load)| Candidate {
                target: target as u32,
                request_blocks: blocks.len() as u32,
                cache_hits: hits.depth(Slot(target as u32)),
                active_blocks: load.active_blocks(),
                load_blocks: weights.blocks(load, BLOCK_TOKENS) + 0.1 * recent_blocks(load, picks.current()),
                picked_at_ns: load.picked_at_ns(),
                block_tokens: BLOCK_TOKENS,
            }));
            let choice = pick(term.overlap_weight(), &candidates).expect("there are workers");
            let load = &loads[choice.target as usize];
            charge(load, &picks, choice.request_blocks, choice.cache_hits);
            let missing = u64::from(choice.request_blocks - choice.cache_hits);
            let target = TargetId(u64::from(choice.target));
            drop(Booking::new(target, load, blocks.clone(), &ledger, now_ns).queueing(missing));
            choice.target
        });
    });
    group.finish();
}

criterion_group!(benches, picking);
criterion_main!(benches);
