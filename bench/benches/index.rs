//! The index: a query over a fleet's snapshot, and what an event costs until it is published.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use infera_router::hash::{BlockHash, ROOT, prompt_blocks};
use infera_router::index::{Hits, Tree};

const SLOTS: u16 = 64;
/// Conversations per slot, over prefixes that the whole fleet shares.
const CONVERSATIONS: u32 = 20;
/// Blocks: a system prompt held by all, and the rest of each conversation.
const SHARED_BLOCKS: usize = 200;
const OWN_BLOCKS: usize = 300;
/// An average agent prompt at 16 tokens a block.
const LONG_BLOCKS: usize = 7_000;

/// Blocks of the prompt that begins with the shared tokens and goes on as `conversation` alone.
fn prompt(conversation: u32, blocks: usize) -> Vec<BlockHash> {
    let shared = 0..SHARED_BLOCKS as u32;
    let own = (SHARED_BLOCKS as u32..blocks as u32).map(|at| 1_000_000 + conversation * 10_000 + at);
    let tokens: Vec<u32> = shared.chain(own).collect();
    prompt_blocks(&tokens, 1)
}

/// A fleet in which each conversation lies on two slots, one of them a turn behind, and one long prompt on three.
fn fleet() -> (Tree, Vec<BlockHash>) {
    let mut tree = Tree::default();
    let conversation_blocks = SHARED_BLOCKS + OWN_BLOCKS;
    for slot in 0..SLOTS {
        for number in 0..CONVERSATIONS {
            let conversation = u32::from(slot) * CONVERSATIONS + number;
            let blocks = prompt(conversation, conversation_blocks);
            tree.insert(slot, ROOT, &blocks, |_| {});
            let behind = conversation_blocks - OWN_BLOCKS / 3;
            tree.insert((slot + 1) % SLOTS, ROOT, &blocks[..behind], |_| {});
        }
    }
    let long = prompt(u32::from(SLOTS) * CONVERSATIONS, LONG_BLOCKS);
    for (slot, length) in [(3, LONG_BLOCKS), (17, LONG_BLOCKS - 150), (40, LONG_BLOCKS / 2)] {
        tree.insert(slot, ROOT, &long[..length], |_| {});
    }
    (tree, long)
}

fn query(criterion: &mut Criterion) {
    let (mut tree, long) = fleet();
    let snapshot = tree.publish();
    let conversation = prompt(77, SHARED_BLOCKS + OWN_BLOCKS + 40);
    let unknown = prompt_blocks(&(5_000_000..5_000_500).collect::<Vec<u32>>(), 1);
    let mut hits = Hits::new();
    let mut group = criterion.benchmark_group("index/query");
    for (name, blocks, deepest) in [
        ("7,000 blocks, new turn", &long, LONG_BLOCKS),
        ("540 blocks, 500 cached", &conversation, SHARED_BLOCKS + OWN_BLOCKS),
        ("500 blocks, none cached", &unknown, 0),
    ] {
        snapshot.query(blocks, &mut hits);
        assert_eq!(hits.iter().map(|(_, depth)| depth as usize).max().unwrap_or(0), deepest, "{name}");
        group.throughput(Throughput::Elements(blocks.len() as u64));
        group.bench_with_input(BenchmarkId::from_parameter(name), blocks, |bencher, blocks| {
            bencher.iter(|| snapshot.query(black_box(blocks), black_box(&mut hits)));
        });
    }
    group.finish();
}

/// A stored and a removed event of a few blocks on a full index, each published: the cost must follow the change, not
/// the size.
fn store_and_publish(criterion: &mut Criterion) {
    let (mut tree, long) = fleet();
    tree.publish();
    let next_turn = prompt_blocks(&(9_000_000..9_000_008).collect::<Vec<u32>>(), 1);
    let last = long[LONG_BLOCKS - 1];
    let mut group = criterion.benchmark_group("index/store 8 blocks and publish");
    group.throughput(Throughput::Elements(next_turn.len() as u64));
    group.bench_function("64 slots", |bencher| {
        bencher.iter(|| {
            tree.insert(3, last, black_box(&next_turn), |_| {});
            let stored = tree.publish();
            tree.remove(3, black_box(&next_turn));
            (stored, tree.publish())
        });
    });
    group.finish();
}

criterion_group!(benches, query, store_and_publish);
criterion_main!(benches);
