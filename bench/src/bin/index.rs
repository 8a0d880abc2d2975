//! `index`: speed, memory and recovery of the router's index under KV-event messages. Owns the command line, the phases and
//! the table; the workload is described in `kv_workload`.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use bench::kv_workload::{SUFFIX_BLOCKS, SYSTEM_BLOCKS, SYSTEM_PROMPTS, Suffix, WORKERS, Workload};
use bench::report::ending;
use clap::Parser;
use infera_router::events::decode::Decoder;
use infera_router::fleet::Slot;
use infera_router::hash::BlockHash;
use infera_router::index::{Hits, Mirror, Snapshot, Tree};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// What the router runs with.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Messages between two publications: 500 blocks, which is a millisecond at 500,000 blocks/s.
const PUBLISH_MESSAGES: usize = 31;
const CHURN_BLOCKS: usize = 1_000_000;
/// More than any cache holds.
const EVICTION_BYTES: usize = 256 << 20;

/// The index under 64 workers' KV events: queries, CPU per block, bytes per membership, and what is left when all are gone.
#[derive(Parser)]
struct Arguments {
    /// Where the JSON report goes.
    #[arg(long)]
    json: Option<PathBuf>,
    /// (worker, block) memberships of the main run.
    #[arg(long, default_value_t = 1_000_000)]
    memberships: usize,
    /// Memberships of the run that is only queried; 0 leaves it out.
    #[arg(long, default_value_t = 16_000_000)]
    large_memberships: usize,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Measure memory only and print rows as JSON (what the bench starts itself).
    #[arg(long, hide = true)]
    memory_only: bool,
}

#[derive(Debug, Serialize, Deserialize)]
struct Row {
    name: String,
    value: f64,
    unit: String,
    /// The value must not exceed it.
    #[serde(skip_serializing_if = "Option::is_none")]
    goal: Option<f64>,
}

impl Row {
    fn new(name: &str, value: f64, unit: &str, goal: Option<f64>) -> Self {
        Self { name: name.to_owned(), value, unit: unit.to_owned(), goal }
    }

    fn is_met(&self) -> bool {
        self.goal.is_none_or(|goal| self.value <= goal)
    }
}

/// The index and everything that feeds it, on this one thread.
struct Subject {
    tree: Tree,
    mirrors: Vec<Mirror>,
    decoder: Decoder,
    messages: usize,
    /// What a shard would hold.
    snapshot: Snapshot,
    /// What reading the clock twice takes: a system call, which would be a tenth of a short measurement.
    clock_ns: f64,
}

/// CPU time of this thread and the blocks it was spent on.
#[derive(Clone, Copy, Default)]
struct Cost {
    cpu_ns: f64,
    blocks: usize,
}

/// What the suffixes of a fill took, and the memory that was new for them.
struct Filling {
    cost: Cost,
    bytes: usize,
}

impl Cost {
    fn per_block(self) -> f64 {
        self.cpu_ns / self.blocks.max(1) as f64
    }
}

impl Subject {
    fn new() -> Self {
        Self {
            tree: Tree::default(),
            mirrors: (0..WORKERS).map(|worker| Mirror::new(worker as u16)).collect(),
            decoder: Decoder::default(),
            messages: 0,
            snapshot: Snapshot::default(),
            clock_ns: median((0..1_001).map(|_| -(thread_cpu_ns() - thread_cpu_ns())).collect()),
        }
    }

    fn apply(&mut self, worker: usize, payloads: &[Vec<u8>], cost: &mut Cost) -> Result<()> {
        let started_ns = thread_cpu_ns();
        for payload in payloads {
            let (mirror, tree) = (&mut self.mirrors[worker], &mut self.tree);
            mirror.begin_batch();
            let summary = self.decoder.decode_into(payload, mirror, Mirror::announce, |mirror, event| {
                let applied = mirror.apply(tree, &event);
                cost.blocks += (applied.blocks_stored + applied.blocks_removed) as usize;
            });
            ensure!(summary.applied == 1 && summary.error.is_none(), "a message was not applied: {summary:?}");
            self.messages += 1;
            if self.messages.is_multiple_of(PUBLISH_MESSAGES) {
                self.snapshot = self.tree.publish();
            }
        }
        cost.cpu_ns += thread_cpu_ns() - started_ns - self.clock_ns;
        Ok(())
    }

    fn memberships(&self) -> usize {
        (0..WORKERS).map(|worker| self.tree.held_count(worker as u16) as usize).sum()
    }

    /// Memory of the tables of names and of the strands.
    fn bytes(&self) -> usize {
        self.mirrors.iter().map(Mirror::table_bytes).sum::<usize>() + self.tree.strand_bytes()
    }

    /// Conversation and system prompts on every worker, then suffixes up to `memberships`. Returns the suffixes and what
    /// it was to store them.
    fn fill(&mut self, workload: &mut Workload, memberships: usize) -> Result<(Vec<Suffix>, Filling)> {
        for worker in 0..WORKERS {
            self.apply(worker, &workload.store_conversation(worker), &mut Cost::default())?;
            for system in 0..SYSTEM_PROMPTS {
                self.apply(worker, &workload.store_system(worker, system), &mut Cost::default())?;
            }
        }
        let missing = memberships.saturating_sub(self.memberships());
        let bytes_before = self.bytes();
        let (mut suffixes, mut cost) = (Vec::new(), Cost::default());
        for _ in 0..missing / SUFFIX_BLOCKS {
            let suffix = workload.new_suffix();
            self.apply(suffix.worker, &workload.store_suffix(suffix), &mut cost)?;
            suffixes.push(suffix);
        }
        self.snapshot = self.tree.publish();
        Ok((suffixes, Filling { cost, bytes: self.bytes() - bytes_before }))
    }

    /// Removes a random suffix and stores a new one, until `CHURN_BLOCKS` have come. Returns the costs of both.
    fn churn(&mut self, workload: &mut Workload, suffixes: &mut Vec<Suffix>) -> Result<(Cost, Cost)> {
        let (mut stores, mut removals) = (Cost::default(), Cost::default());
        while stores.blocks < CHURN_BLOCKS {
            let old = workload.pick(suffixes);
            self.apply(old.worker, &workload.remove_suffix(old), &mut removals)?;
            let new = workload.new_suffix();
            self.apply(new.worker, &workload.store_suffix(new), &mut stores)?;
            suffixes.push(new);
        }
        self.snapshot = self.tree.publish();
        Ok((stores, removals))
    }

    /// All workers leave.
    fn clear(&mut self) {
        self.mirrors.iter_mut().for_each(|mirror| {
            mirror.clear(&mut self.tree);
        });
        self.snapshot = self.tree.publish();
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    ending("index", run(&arguments))
}

fn run(arguments: &Arguments) -> Result<bool> {
    let mut out = std::io::stdout().lock();
    if arguments.memory_only {
        writeln!(out, "{}", serde_json::to_string(&memory(arguments)?)?)?;
        return Ok(true);
    }
    let mut rows = times(arguments)?;
    if arguments.large_memberships > 0 {
        rows.extend(large(arguments)?);
    }
    rows.extend(memory_in_a_process_of_its_own(arguments)?);
    for row in &rows {
        let verdict = match row.goal {
            Some(goal) => format!("goal {goal} {}", if row.is_met() { "met" } else { "MISSED" }),
            None => String::new(),
        };
        writeln!(out, "{:<58} {:>12.1} {:<10} {verdict}", row.name, row.value, row.unit)?;
    }
    let all_met = rows.iter().all(Row::is_met);
    if let Some(path) = &arguments.json {
        let report = serde_json::json!({"schema": "infera-bench-index/1", "memberships": arguments.memberships,
            "seed": arguments.seed, "all_met": all_met, "rows": rows});
        std::fs::write(path, serde_json::to_vec_pretty(&report)?).with_context(|| path.display().to_string())?;
    }
    Ok(all_met)
}

fn times(arguments: &Arguments) -> Result<Vec<Row>> {
    let mut workload = Workload::new(arguments.seed);
    let mut subject = Subject::new();
    let (mut suffixes, filling) = subject.fill(&mut workload, arguments.memberships)?;
    let first_touch = Cost { cpu_ns: first_touch_ns(filling.bytes), ..filling.cost };
    let query = workload.conversation();
    let mut rows = vec![
        Row::new("7,000-block hit on 64 workers, warm, p50", warm_ns(&subject, &query)?, "ns", Some(1_000.0)),
        Row::new(
            "7,000-block hit on 64 workers, evicted caches, p50",
            evicted_ns(&subject, &query),
            "ns",
            Some(10_000.0),
        ),
        Row::new("miss at block 0", miss_ns(&subject), "ns", Some(50.0)),
        Row::new("store, CPU per block, while filling", filling.cost.per_block(), "ns", Some(100.0)),
        Row::new("of it: first touch of as much memory", first_touch.per_block(), "ns", None),
    ];
    let (stores, removals) = subject.churn(&mut workload, &mut suffixes)?;
    rows.push(Row::new("store, CPU per block, in churn", stores.per_block(), "ns", Some(100.0)));
    rows.push(Row::new("remove, CPU per block, in churn", removals.per_block(), "ns", Some(100.0)));
    rows.push(Row::new("of a store: decoding", decode_ns(&workload)?, "ns", None));
    rows.push(Row::new("7,000-block hit after the churn, warm, p50", warm_ns(&subject, &query)?, "ns", Some(1_000.0)));
    Ok(rows)
}

fn large(arguments: &Arguments) -> Result<Vec<Row>> {
    let mut workload = Workload::new(arguments.seed);
    let mut subject = Subject::new();
    subject.fill(&mut workload, arguments.large_memberships)?;
    let name = format!("7,000-block hit at {} M memberships, warm, p50", subject.memberships() / 1_000_000);
    Ok(vec![Row::new(&name, warm_ns(&subject, &workload.conversation())?, "ns", Some(3_000.0))])
}

/// The allocator keeps freed pages for a while; here it gives them back at once, in a process that measures no times. Nor does
/// it ask for huge pages: one that is in use anywhere counts as 2 MiB, which is a tenth of the whole index.
fn memory_in_a_process_of_its_own(arguments: &Arguments) -> Result<Vec<Row>> {
    let output = Command::new(std::env::current_exe()?)
        .arg("--memory-only")
        .args(["--memberships", &arguments.memberships.to_string(), "--seed", &arguments.seed.to_string()])
        .env("MIMALLOC_PURGE_DELAY", "0")
        .env("MIMALLOC_ALLOW_THP", "0")
        .output()?;
    ensure!(output.status.success(), "the memory run failed: {}", String::from_utf8_lossy(&output.stderr));
    Ok(serde_json::from_slice(&output.stdout)?)
}

fn memory(arguments: &Arguments) -> Result<Vec<Row>> {
    let mut workload = Workload::new(arguments.seed);
    let mut subject = Subject::new();
    // What the generator and the decoder take: the messages of a whole fill are made and decoded, and nothing is applied.
    let mut generator = Workload::new(arguments.seed + 1);
    for worker in 0..WORKERS {
        let mut payloads = generator.store_conversation(worker);
        payloads.extend((0..SYSTEM_PROMPTS).flat_map(|system| generator.store_system(worker, system)));
        for _ in 0..arguments.memberships / SUFFIX_BLOCKS / WORKERS {
            let suffix = generator.new_suffix();
            payloads.extend(generator.store_suffix(suffix));
        }
        payloads.iter().for_each(|payload| {
            subject.decoder.decode(payload, |_| {});
        });
    }
    drop(generator);
    let before = resident_bytes()?;
    let (mut suffixes, _) = subject.fill(&mut workload, arguments.memberships)?;
    let memberships = subject.memberships() as f64;
    let filled = resident_bytes()? - before;
    let tables: usize = subject.mirrors.iter().map(Mirror::table_bytes).sum();
    let strands = subject.tree.strand_bytes();
    subject.churn(&mut workload, &mut suffixes)?;
    let churned = resident_bytes()? - before;
    let churned_tables: usize = subject.mirrors.iter().map(Mirror::table_bytes).sum();
    let churned_strands = subject.tree.strand_bytes();
    drop(suffixes);
    subject.clear();
    // The allocator looks for pages to give back only when it is used.
    loops(&mut workload)?;
    let left = resident_bytes()? - before;
    let at_rest = (subject.tree.block_count(), subject.tree.run_count(), subject.snapshot.run_count());
    ensure!(at_rest == (0, 0, 0), "blocks, strands and published strands are left: {at_rest:?}");
    let mut rows = vec![
        Row::new("memory per membership", filled / memberships, "B", Some(30.0)),
        Row::new("of it: tables of names", tables as f64 / memberships, "B", None),
        Row::new("of it: strands", strands as f64 / memberships, "B", None),
        Row::new("memory per membership after the churn", churned / memberships, "B", Some(33.0)),
        Row::new("of it: tables of names", churned_tables as f64 / memberships, "B", None),
        Row::new("of it: strands", churned_strands as f64 / memberships, "B", None),
        Row::new("memory after the churn, against before", churned / filled * 100.0, "%", Some(110.0)),
        Row::new("left after all workers are gone", left / filled * 100.0, "% of full", Some(10.0)),
    ];
    rows.extend(loops(&mut workload)?);
    Ok(rows)
}

/// A million blocks of unique suffixes come and go under one system prompt.
fn loops(workload: &mut Workload) -> Result<Vec<Row>> {
    let mut subject = Subject::new();
    for system in 0..SYSTEM_PROMPTS {
        subject.apply(0, &workload.store_system(0, system), &mut Cost::default())?;
    }
    let mut cycle = |subject: &mut Subject| -> Result<()> {
        let suffix = Suffix { worker: 0, ..workload.new_suffix() };
        subject.apply(0, &workload.store_suffix(suffix), &mut Cost::default())?;
        subject.apply(0, &workload.remove_suffix(suffix), &mut Cost::default())
    };
    (0..100).try_for_each(|_| cycle(&mut subject))?;
    subject.snapshot = subject.tree.publish();
    let (before, strands) = (resident_bytes()?, subject.tree.run_count());
    for _ in 0..CHURN_BLOCKS / SUFFIX_BLOCKS {
        cycle(&mut subject)?;
    }
    subject.snapshot = subject.tree.publish();
    let grown = subject.tree.run_count() - strands;
    ensure!(subject.memberships() == SYSTEM_PROMPTS * SYSTEM_BLOCKS, "blocks are left of the loops");
    Ok(vec![
        Row::new("memory grown by 1 M store/remove loops", (resident_bytes()? - before) / 1024.0, "KiB", Some(256.0)),
        Row::new("strands grown by 1 M store/remove loops", grown as f64, "", Some(0.0)),
    ])
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn warm_ns(subject: &Subject, query: &[BlockHash]) -> Result<f64> {
    let mut hits = Hits::new();
    let times = (0..20_000).map(|_| timed(|| subject.snapshot.query(query, &mut hits))).collect();
    let depths: Vec<u32> = (0..WORKERS as u32).map(|slot| hits.depth(Slot(slot))).collect();
    ensure!(depths.iter().all(|depth| *depth as usize == query.len()), "a wrong answer: {depths:?}");
    Ok(median(times))
}

fn evicted_ns(subject: &Subject, query: &[BlockHash]) -> f64 {
    let mut hits = Hits::new();
    let mut other = vec![0u8; EVICTION_BYTES];
    let one = |round: u8| {
        other.iter_mut().step_by(64).for_each(|byte| *byte = byte.wrapping_add(round));
        timed(|| subject.snapshot.query(query, &mut hits))
    };
    median((0..31).map(one).collect())
}

fn miss_ns(subject: &Subject) -> f64 {
    const QUERIES: usize = 1_000;
    let mut random = fastrand::Rng::with_seed(7);
    let misses: Vec<[BlockHash; 1]> = (0..QUERIES).map(|_| [BlockHash(random.u64(..))]).collect();
    let mut hits = Hits::new();
    let round = |_| {
        timed(|| misses.iter().for_each(|miss| _ = subject.snapshot.query(std::hint::black_box(miss), &mut hits)))
            / QUERIES as f64
    };
    median((0..200).map(round).collect())
}

fn decode_ns(workload: &Workload) -> Result<f64> {
    let payloads = workload.store_conversation(0);
    let mut decoder = Decoder::default();
    let mut blocks = 0;
    let started_ns = thread_cpu_ns();
    for payload in (0..20).flat_map(|_| &payloads) {
        let summary = decoder.decode(payload, |event| {
            if let infera_router::events::Event::Stored(stored) = event {
                blocks += stored.hashes.len();
            }
        });
        ensure!(summary.applied == 1, "a message does not decode");
    }
    Ok((thread_cpu_ns() - started_ns) / blocks as f64)
}

/// What the kernel (and in a virtual machine its host) takes for memory that this process has never had, by the allocator's
/// way. A part of filling that no index can do without.
fn first_touch_ns(bytes: usize) -> f64 {
    let started_ns = thread_cpu_ns();
    let mut memory = vec![0u8; bytes];
    memory.iter_mut().step_by(4096).for_each(|byte| *byte = 1);
    std::hint::black_box(&memory);
    thread_cpu_ns() - started_ns
}

fn timed<T>(work: impl FnOnce() -> T) -> f64 {
    let started = Instant::now();
    work();
    started.elapsed().as_nanos() as f64
}

/// CPU time, so that a neighbour on the machine counts as little as possible.
fn thread_cpu_ns() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}

fn resident_bytes() -> Result<f64> {
    let path = Path::new("/proc/self/smaps_rollup");
    let text = std::fs::read_to_string(path)?;
    let line = text.lines().find_map(|line| line.strip_prefix("Rss:")).context("no Rss in smaps_rollup")?;
    let kibibytes: f64 = line.trim().trim_end_matches(" kB").trim().parse()?;
    Ok(kibibytes * 1024.0)
}
