//! How good the router's placement is: rules side by side over simulated fleets, on recorded conversations and on agent
//! loops, next to an oracle that knows the caches and to what the fleet's memory could save at best. Judges the defaults.

use std::fs::File;
use std::io::{BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use bench::report::Goal;
use bench::simulation::{Plan, Rule, Source, Summary, run_all, summarise, svg};
use clap::Parser;
use loadgen::engine::scheduler::Speed;
use loadgen::sim::{Pairs, Shape, Slo, TraceLine, read_trace};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// What is compared. `kv-aware` without options is the router as it comes, `load=active` the plain formula.
const RULES: [&str; 6] = [
    "round-robin",
    "session-affinity",
    "kv-aware,load=active",
    "kv-aware,load=active,recent=on",
    "kv-aware,load=active,weight=20",
    "kv-aware",
];

/// The same where engines have host memory: what a block there is worth.
const HOST_RULES: [&str; 6] =
    ["round-robin", "session-affinity", "kv-aware,load=active", "kv-aware,host=0", "kv-aware,host=1", "kv-aware"];

/// The same where prefill and decode are apart: decode demand, and a weight of a request.
const PAIR_RULES: [&str; 6] = [
    "round-robin",
    "session-affinity",
    "kv-aware,load=active",
    "kv-aware,demand=0",
    "kv-aware,demand=3000",
    "kv-aware",
];

/// Full knowledge of the caches at the moment of the pick, with several ideas of what to do with it: the best of them, seed
/// by seed, is the oracle.
const ORACLES: [&str; 2] = ["most-cached", "kv-aware,load=active,weight=50,recent=off,knowledge=truth"];

const JUDGED: &str = "kv-aware";

/// Of KV from a prefill engine to a decode engine, as `simulate` has it unless told otherwise.
const TRANSFER_PER_TOKEN: Duration = Duration::from_micros(5);

/// Share of the oracle's hit rate that the router's defaults are to reach.
const GOAL: f64 = 0.95;

#[derive(Parser)]
struct Arguments {
    /// The conversation trace (`bench/fetch_trace.sh` fetches it); without it only agent loops are run.
    #[arg(long)]
    trace: Option<PathBuf>,
    #[arg(long)]
    json: Option<PathBuf>,
    /// A picture of the table.
    #[arg(long)]
    svg: Option<PathBuf>,
    #[arg(long, default_value_t = 5)]
    seeds: u64,
    /// Share of the trace that is run, from its beginning.
    #[arg(long, default_value_t = 1.0)]
    share: f64,
    /// Requests of agents before eight engines, at least; before sixteen twice as many.
    #[arg(long, default_value_t = 4000)]
    agents: usize,
    #[arg(long, default_value_t = std::thread::available_parallelism().map_or(1, usize::from))]
    threads: usize,
}

struct Case {
    name: String,
    plan: Plan,
}

/// What the cases' fleets differ in.
struct Fleet {
    engines: usize,
    /// So many of the engines do prefill only, the others decode only.
    prefill: Option<usize>,
    /// Tokens of KV per engine, on the device and on its host.
    pool_tokens: usize,
    host_tokens: usize,
    rules: &'static [&'static str],
    seeds: u64,
}

impl Fleet {
    fn case(&self, name: &str, source: Source) -> anyhow::Result<Case> {
        let plan = Plan {
            source,
            engines: self.engines,
            pairs: self.prefill.map(|prefill| Pairs { prefill, transfer_per_token: TRANSFER_PER_TOKEN }),
            speed: Speed::default(),
            pool_tokens: self.pool_tokens,
            host_tokens: self.host_tokens,
            block_size: 64,
            event_lag: Duration::from_millis(2),
            slo: Slo { ttft_s: 2.0, itl_s: 0.1 },
            rules: self.rules.iter().chain(&ORACLES).map(|rule| rule.parse::<Rule>()).collect::<Result<_, _>>()?,
            seeds: (1..=self.seeds).collect(),
        };
        Ok(Case { name: name.to_owned(), plan })
    }
}

fn main() -> anyhow::Result<ExitCode> {
    let arguments = Arguments::parse();
    anyhow::ensure!(arguments.seeds > 0, "--seeds must be at least 1");
    anyhow::ensure!(arguments.share > 0.0 && arguments.share <= 1.0, "--share must be above 0 and at most 1");
    let lines = arguments.trace.as_deref().map(read).transpose()?;
    let mut out = std::io::stdout().lock();
    // A reader that has left, as `| head` does, is no reason to stop: the files are still to be written.
    let mut say = |text: &str| _ = writeln!(out, "{text}");
    let mut summaries = Vec::new();
    for case in cases(lines, &arguments)? {
        let results = run_all(&case.plan, arguments.threads)?;
        let summary = summarise(&case.name, &results, |rule| ORACLES.contains(&rule));
        say(&summary.table());
        summaries.push(summary);
    }
    let goals: Vec<Goal> = summaries.iter().map(goal).collect();
    for goal in &goals {
        say(&format!("{}: {:.3}, at least {GOAL}: {}", goal.name, goal.value, if goal.met { "met" } else { "missed" }));
    }
    if let Some(path) = &arguments.json {
        let report = serde_json::json!({"schema": "infera-quality/1", "cases": summaries, "goals": goals});
        write(path, &serde_json::to_string_pretty(&report)?)?;
    }
    if let Some(path) = &arguments.svg {
        write(path, &svg(&summaries, JUDGED))?;
    }
    Ok(if goals.iter().all(|goal| goal.met) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn goal(summary: &Summary) -> Goal {
    let value = summary.row(JUDGED).map_or(0.0, |row| row.of_oracle.median);
    Goal { name: format!("hit rate to the oracle's, {}", summary.name), value, limit: GOAL, met: value >= GOAL }
}

fn read(path: &Path) -> anyhow::Result<Vec<TraceLine>> {
    let file = File::open(path).with_context(|| format!("opening {}", path.display()))?;
    read_trace(BufReader::new(file), usize::MAX)
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    std::fs::write(path, text).with_context(|| format!("writing {}", path.display()))
}

/// 8 and 16 engines with twice the arrivals, then eight with host memory and eight pairs. Pools are what a 70B model
/// (320 KiB a token) has on 4 and on 8 GPUs of 80 GB: half a million tokens under conversations, a million under agents,
/// whose contexts are longer; where it is host memory that is to remember agents, a quarter of that.
fn cases(lines: Option<Vec<TraceLine>>, arguments: &Arguments) -> anyhow::Result<Vec<Case>> {
    let lines = lines.map(|mut lines| {
        lines.truncate(((lines.len() as f64 * arguments.share) as usize).max(1));
        lines
    });
    let trace = |speed| lines.clone().map(|lines| Source::Trace { lines, speed, is_sequential: false });
    let agents =
        |engines, rate| Source::Generated { shape: Shape::Agents, requests: arguments.agents * engines / 8, rate };
    let fleet = |engines, pool_tokens, rules: &'static [&'static str]| Fleet {
        engines,
        prefill: None,
        pool_tokens,
        host_tokens: 0,
        rules,
        seeds: arguments.seeds,
    };
    let mut cases = Vec::new();
    for (engines, factor, rate) in [(8, 1.0, "at its recorded rate"), (16, 2.0, "at twice its recorded rate")] {
        if let Some(source) = trace(factor) {
            let name = format!("conversation trace {rate}, {engines} engines");
            cases.push(fleet(engines, 1 << 19, &RULES).case(&name, source)?);
        }
        let rate = 0.9 * factor;
        let name = format!("agent loops, {engines} engines, {rate} agents a second");
        cases.push(fleet(engines, 1 << 20, &RULES).case(&name, agents(engines, rate))?);
    }
    let with_host = |pool_tokens| Fleet { host_tokens: 1 << 21, ..fleet(8, pool_tokens, &HOST_RULES) };
    if let Some(source) = trace(1.0) {
        let name = "conversation trace at its recorded rate, 8 engines with host memory";
        cases.push(with_host(1 << 19).case(name, source)?);
    }
    let name = "agent loops, 8 engines with host memory, 0.9 agents a second";
    cases.push(with_host(1 << 18).case(name, agents(8, 0.9))?);
    if let Some(source) = trace(1.0) {
        let name = "conversation trace at its recorded rate, 8 prefill and 8 decode engines";
        let pairs = Fleet { prefill: Some(8), ..fleet(16, 1 << 19, &PAIR_RULES) };
        cases.push(pairs.case(name, source)?);
    }
    Ok(cases)
}
