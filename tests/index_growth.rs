//! A million conversations under one system prompt come and go: strands, blocks and resident memory are where they were.
//! Alone in its process, because it reads the process's own memory.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use infera_router::events::{CopyKey, EngineHash, Event, Medium, Stored};
use infera_router::hash::prompt_blocks;
use infera_router::index::{Mirror, Tree};

const BLOCK_SIZE: usize = 4;
const SYSTEM_BLOCKS: usize = 32;
const SUFFIX_BLOCKS: usize = 3;
const COPY: CopyKey = CopyKey { medium: Medium::DEVICE, group: CopyKey::NO_GROUP };

fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * rustix::param::page_size()
}

fn store(mirror: &mut Mirror, tree: &mut Tree, names: &[EngineHash], parent: Option<EngineHash>, tokens: &[u32]) {
    let stored = Stored {
        hashes: names,
        parent,
        tokens,
        block_size: BLOCK_SIZE,
        copy: COPY,
        identities: &[],
        may_report_hits: false,
    };
    mirror.begin_batch();
    mirror.apply(tree, &Event::Stored(stored));
}

#[test]
fn b55_a_million_unique_suffixes_leave_nothing_behind() {
    let (mut tree, mut mirrors) = (Tree::default(), [Mirror::new(0), Mirror::new(1)]);
    let system: Vec<u32> = (1..=(SYSTEM_BLOCKS * BLOCK_SIZE) as u32).collect();
    let names: Vec<EngineHash> = prompt_blocks(&system, BLOCK_SIZE).iter().map(|block| EngineHash(!block.0)).collect();
    mirrors.iter_mut().for_each(|mirror| store(mirror, &mut tree, &names, None, &system));
    let (mut snapshot, mut before) = (tree.publish(), None);
    for round in 0..1_000_000u32 {
        let mirror = &mut mirrors[(round % 2) as usize];
        let first = 1_000_000 + round.wrapping_mul(SUFFIX_BLOCKS as u32 * BLOCK_SIZE as u32);
        let tokens: [u32; SUFFIX_BLOCKS * BLOCK_SIZE] = std::array::from_fn(|at| first + at as u32);
        let suffix: [EngineHash; SUFFIX_BLOCKS] = std::array::from_fn(|at| {
            EngineHash((u64::from(round) << 8 | at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15))
        });
        // From any block of the system prompt, and removed from the leaf or from the root.
        let from = round as usize % SYSTEM_BLOCKS;
        store(mirror, &mut tree, &suffix, Some(names[from]), &tokens);
        let mut gone = suffix;
        if round % 3 == 0 {
            gone.reverse();
        }
        mirror.apply(&mut tree, &Event::Removed { hashes: &gone, copy: COPY });
        if round % 256 == 255 {
            snapshot = tree.publish();
        }
        // Rings of recently removed names have filled by then, and the tables have their size.
        if round == 50_000 {
            before = Some((tree.block_count(), tree.run_count(), snapshot.run_count(), resident_bytes()));
        }
    }
    snapshot = tree.publish();
    let (blocks, runs, published, resident) = before.unwrap();
    println!("resident: {resident} bytes after 50,000 rounds, {} after 1,000,000", resident_bytes());
    assert!(tree.block_count().abs_diff(blocks) <= 2 * 256 * SUFFIX_BLOCKS, "{} of {blocks}", tree.block_count());
    assert!(tree.run_count() <= runs + 4 && snapshot.run_count() <= published + 4);
    assert!(resident_bytes() <= resident + (1 << 20), "{resident} bytes became {}", resident_bytes());
    for mirror in &mut mirrors {
        assert_eq!(mirror.orphan_count(), 0);
        mirror.clear(&mut tree);
    }
    assert_eq!((tree.block_count(), tree.run_count(), tree.publish().run_count()), (0, 0, 0));
}
