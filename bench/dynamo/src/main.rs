//! `bench-dynamo`: the workload of the index bench, message by message in turns, over the router's own index and over two
//! of `dynamo-kv-router`'s: `RadixTree` and `PositionalIndexer`. Each gets the same payloads through its own decoder.
//! All workers name a block alike, as the crate itself would: `RadixTree` refuses a worker's stores onto blocks that another
//! one has named otherwise, and `PositionalIndexer` finds only blocks whose names it can compute.
//! Owns the rows and the cases with one right answer; the memory rows come from a process for each index.
//!
//! `bench-dynamo` prints the table; `bench-dynamo memory NAME` measures one index's memory.

#[allow(dead_code)]
#[path = "../../src/kv_workload.rs"]
mod kv_workload;
mod subjects;

use std::io::Write;
use std::ops::Range;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use dynamo_kv_router::protocols::{BlockHashOptions, compute_block_hash_for_seq, compute_seq_hash_for_block};
use kv_workload::{BLOCK_TOKENS, Payload, SUFFIX_BLOCKS, SYSTEM_PROMPTS, Suffix, WORKERS, Workload};
use rustix::time::{ClockId, clock_gettime};
use subjects::{NAMES, Subject, subject};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const MEMBERSHIPS: usize = 1_000_000;
const CHURN_BLOCKS: usize = 1_000_000;
/// More than any cache holds.
const EVICTION_BYTES: usize = 256 << 20;
/// Blocks of the prompt of the cases with one right answer.
const CASE_BLOCKS: usize = 64;

fn common_names(seed: u64) -> Workload {
    Workload::with_naming(seed, |tokens| {
        let blocks = compute_block_hash_for_seq(tokens, BLOCK_TOKENS as u32, BlockHashOptions::default());
        compute_seq_hash_for_block(&blocks)
    })
}

type Row = (String, Vec<String>);

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, mode, name] = arguments.as_slice()
        && mode == "memory"
    {
        return memory(name);
    }
    let mut rows = speed()?;
    rows.extend(memory_rows()?);
    rows.extend(cases()?);
    let mut out = std::io::stdout().lock();
    writeln!(out, "{:<52}{:>16}{:>16}{:>16}", "", NAMES[0], NAMES[1], NAMES[2])?;
    for (name, values) in rows {
        writeln!(out, "{name:<52}{:>16}{:>16}{:>16}", values[0], values[1], values[2])?;
    }
    Ok(())
}

fn thread_cpu_ns() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}

/// CPU time of one index for messages, and the blocks in them.
#[derive(Clone, Copy, Default)]
struct Cost {
    cpu_ns: f64,
    blocks: usize,
}

fn apply(subject: &mut dyn Subject, worker: usize, payloads: &[Payload], blocks: usize, cost: &mut Cost) -> Result<()> {
    let started_ns = thread_cpu_ns();
    for payload in payloads {
        subject.apply(worker, payload)?;
    }
    cost.cpu_ns += thread_cpu_ns() - started_ns;
    cost.blocks += blocks;
    Ok(())
}

/// What every worker holds first. Returns the memberships.
fn fill_shared(subjects: &mut [Box<dyn Subject>], workload: &Workload) -> Result<usize> {
    for worker in 0..WORKERS {
        let mut payloads = workload.store_conversation(worker);
        payloads.extend((0..SYSTEM_PROMPTS).flat_map(|system| workload.store_system(worker, system)));
        for subject in &mut *subjects {
            apply(&mut **subject, worker, &payloads, 0, &mut Cost::default())?;
        }
    }
    Ok(WORKERS * (kv_workload::CONVERSATION_BLOCKS + SYSTEM_PROMPTS * kv_workload::SYSTEM_BLOCKS))
}

fn fill(subjects: &mut [Box<dyn Subject>], workload: &mut Workload, costs: &mut [Cost]) -> Result<Vec<Suffix>> {
    let missing = MEMBERSHIPS - fill_shared(subjects, workload)?;
    let mut suffixes = Vec::new();
    for _ in 0..missing / SUFFIX_BLOCKS {
        let suffix = workload.new_suffix();
        let payloads = workload.store_suffix(suffix);
        for (subject, cost) in subjects.iter_mut().zip(&mut *costs) {
            apply(&mut **subject, suffix.worker, &payloads, SUFFIX_BLOCKS, cost)?;
        }
        suffixes.push(suffix);
    }
    Ok(suffixes)
}

fn churn(
    subjects: &mut [Box<dyn Subject>],
    workload: &mut Workload,
    suffixes: &mut Vec<Suffix>,
    costs: &mut [[Cost; 2]],
) -> Result<()> {
    for _ in 0..CHURN_BLOCKS / SUFFIX_BLOCKS {
        let (old, new) = (workload.pick(suffixes), workload.new_suffix());
        let (removals, stores) = (workload.remove_suffix(old), workload.store_suffix(new));
        for (subject, [stored, removed]) in subjects.iter_mut().zip(&mut *costs) {
            apply(&mut **subject, old.worker, &removals, SUFFIX_BLOCKS, removed)?;
            apply(&mut **subject, new.worker, &stores, SUFFIX_BLOCKS, stored)?;
        }
        suffixes.push(new);
    }
    Ok(())
}

fn speed() -> Result<Vec<Row>> {
    let mut workload = common_names(1);
    let mut subjects: Vec<Box<dyn Subject>> = NAMES.iter().map(|name| subject(name)).collect();
    let mut filled = vec![Cost::default(); subjects.len()];
    let mut suffixes = fill(&mut subjects, &mut workload, &mut filled)?;
    let tokens = workload.conversation_tokens().to_vec();
    let mut rows = Vec::new();
    let times = |value: &dyn Fn(&mut dyn Subject) -> Result<f64>, subjects: &mut [Box<dyn Subject>]| {
        subjects.iter_mut().map(|subject| Ok(format!("{:.0} ns", value(&mut **subject)?))).collect::<Result<Vec<_>>>()
    };
    rows.push((
        "7,000-block hit on 64 workers, warm, p50".to_owned(),
        times(&|one| warm(one, &tokens), &mut subjects)?,
    ));
    rows.push(("the same, evicted caches, p50".to_owned(), times(&|one| evicted(one, &tokens), &mut subjects)?));
    let mut costs = vec![[Cost::default(); 2]; subjects.len()];
    churn(&mut subjects, &mut workload, &mut suffixes, &mut costs)?;
    let per_block = |cost: &Cost| format!("{:.0} ns", cost.cpu_ns / cost.blocks as f64);
    rows.push(("store, CPU per block, while filling".to_owned(), filled.iter().map(per_block).collect()));
    rows.push(("store, CPU per block, in churn".to_owned(), costs.iter().map(|[cost, _]| per_block(cost)).collect()));
    rows.push(("remove, CPU per block, in churn".to_owned(), costs.iter().map(|[_, cost]| per_block(cost)).collect()));
    Ok(rows)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn timed(work: impl FnOnce()) -> f64 {
    let started = Instant::now();
    work();
    started.elapsed().as_nanos() as f64
}

fn warm(subject: &mut dyn Subject, tokens: &[u32]) -> Result<f64> {
    subject.prepare(tokens);
    let times = (0..1_000).map(|_| timed(|| subject.query())).collect();
    let depths: Vec<u32> = (0..WORKERS).map(|worker| subject.depth(worker)).collect();
    ensure!(depths.iter().all(|depth| *depth as usize == tokens.len() / BLOCK_TOKENS), "a wrong answer: {depths:?}");
    Ok(median(times))
}

fn evicted(subject: &mut dyn Subject, tokens: &[u32]) -> Result<f64> {
    let mut other = vec![0u8; EVICTION_BYTES];
    let times = (0..31u8).map(|round| {
        subject.prepare(tokens);
        other.iter_mut().step_by(64).for_each(|byte| *byte = byte.wrapping_add(round));
        timed(|| subject.query())
    });
    Ok(median(times.collect()))
}

// Memory ---------------------------------------------------------------------------------------------------------

fn resident_bytes() -> Result<f64> {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup")?;
    let line = text.lines().find_map(|line| line.strip_prefix("Rss:")).context("no Rss in smaps_rollup")?;
    Ok(line.trim().trim_end_matches(" kB").trim().parse::<f64>()? * 1024.0)
}

/// Bytes per membership when filled and after the churn, and what is left when all workers have gone, in KiB: what the
/// allocator keeps does not go by the size of what was there.
fn memory(name: &str) -> Result<()> {
    let mut workload = common_names(1);
    // The generator's own memory first: one whole fill of another seed, into an index that is dropped; the same index
    // for all, since what the allocator keeps of it lowers what is left at the end.
    let mut other = vec![subject(NAMES[0])];
    fill_shared(&mut other, &common_names(2))?;
    drop(other);
    infera_shards::release_free_memory();
    let mut subjects = vec![subject(name)];
    let before = resident_bytes()?;
    let mut suffixes = fill(&mut subjects, &mut workload, &mut [Cost::default()])?;
    let filled = resident_bytes()? - before;
    churn(&mut subjects, &mut workload, &mut suffixes, &mut [[Cost::default(); 2]])?;
    let churned = resident_bytes()? - before;
    (0..WORKERS).for_each(|worker| subjects[0].leave(worker));
    // What the allocator still holds of it goes back, as in the router once a second is quiet.
    infera_shards::release_free_memory();
    let left = resident_bytes()? - before;
    let memberships = MEMBERSHIPS as f64;
    writeln!(std::io::stdout(), "{} {} {}", filled / memberships, churned / memberships, left / 1024.0)?;
    Ok(())
}

fn memory_rows() -> Result<Vec<Row>> {
    let mut columns = Vec::new();
    for name in NAMES {
        let output = Command::new(std::env::current_exe()?)
            .args(["memory", name])
            .envs([("MIMALLOC_PURGE_DELAY", "0"), ("MIMALLOC_ALLOW_THP", "0")])
            .output()?;
        ensure!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8(output.stdout)?;
        columns.push(text.split_whitespace().map(str::parse).collect::<Result<Vec<f64>, _>>()?);
    }
    let names = ["memory per membership", "memory per membership after the churn", "left after all workers are gone"];
    let rows = names.iter().enumerate().map(|(at, name)| {
        let unit = if at == 2 { "KiB" } else { "B" };
        ((*name).to_owned(), columns.iter().map(|column| format!("{:.1} {unit}", column[at])).collect())
    });
    Ok(rows.collect())
}

// Cases with one right answer --------------------------------------------------------------------------------------

enum Step {
    Store(Range<usize>),
    Remove(Range<usize>),
}

/// Depth that each index reports for a worker after the steps; the right one is in the row's name.
fn cases() -> Result<Vec<Row>> {
    use Step::{Remove, Store};
    let half = CASE_BLOCKS / 2;
    let cases = [
        ("a block in the middle gone", half, vec![Store(0..CASE_BLOCKS), Remove(half..half + 1)]),
        (
            "the same, stored again",
            CASE_BLOCKS,
            vec![Store(0..CASE_BLOCKS), Remove(half..half + 1), Store(half..half + 1)],
        ),
        ("the head evicted", 0, vec![Store(0..CASE_BLOCKS), Remove(0..half)]),
        ("the tail evicted", half, vec![Store(0..CASE_BLOCKS), Remove(half..CASE_BLOCKS)]),
        ("the second half stored before the first", CASE_BLOCKS, vec![Store(half..CASE_BLOCKS), Store(0..half)]),
        ("stored twice, removed once", half, vec![Store(0..half), Store(0..CASE_BLOCKS), Remove(half..CASE_BLOCKS)]),
    ];
    let workload = common_names(3);
    let prompt = workload.conversation_tokens()[..CASE_BLOCKS * BLOCK_TOKENS].to_vec();
    let mut rows = Vec::new();
    for (name, right, steps) in cases {
        let mut depths = Vec::new();
        for subject_name in NAMES {
            let mut subject = subject(subject_name);
            for step in &steps {
                let payload = match step {
                    Store(blocks) => workload.store_blocks(0, &prompt, blocks.clone()),
                    Remove(blocks) => workload.remove_blocks(0, &prompt, blocks.clone()),
                };
                // An index that refuses an event answers without it.
                let _ = subject.apply(0, &payload);
            }
            subject.prepare(&prompt);
            subject.query();
            depths.push(subject.depth(0).to_string());
        }
        rows.push((format!("{name}: right is {right}"), depths));
    }
    Ok(rows)
}
