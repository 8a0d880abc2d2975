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
use loadgen::sim::{Shape, Slo, TraceLine, read_trace};

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

/// Full knowledge of the caches at the moment of the pick, with several ideas of what to do with it: the best of them, seed
/// by seed, is the oracle.
const ORACLES: [&str; 2] = ["most-cached", "kv-aware,load=active,weight=50,recent=off,knowledge=truth"];

const JUDGED: &str = "kv-aware";

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

/// 8 and 16 engines with twice the arrivals. Pools are what a 70B model (320 KiB a token) has on 4 and on 8 GPUs of 80 GB:
/// half a million tokens under conversations, a million under agents, whose contexts are longer.
fn cases(lines: Option<Vec<TraceLine>>, arguments: &Arguments) -> anyhow::Result<Vec<Case>> {
    let mut cases = Vec::new();
    for (engines, factor, rate) in [(8, 1.0, "at its recorded rate"), (16, 2.0, "at twice its recorded rate")] {
        let plan = |source, pool_tokens| -> anyhow::Result<Plan> {
            Ok(Plan {
                source,
                engines,
                pairs: None,
                speed: Speed::default(),
                pool_tokens,
                host_tokens: 0,
                block_size: 64,
                event_lag: Duration::from_millis(2),
                slo: Slo { ttft_s: 2.0, itl_s: 0.1 },
                rules: RULES.iter().chain(&ORACLES).map(|rule| rule.parse::<Rule>()).collect::<Result<_, _>>()?,
                seeds: (1..=arguments.seeds).collect(),
            })
        };
        if let Some(lines) = &lines {
            let part = (lines.len() as f64 * arguments.share) as usize;
            let lines = lines[..part.max(1)].to_vec();
            let source = Source::Trace { lines, speed: factor, is_sequential: false };
            let name = format!("conversation trace {rate}, {engines} engines");
            cases.push(Case { name, plan: plan(source, 1 << 19)? });
        }
        let source =
            Source::Generated { shape: Shape::Agents, requests: arguments.agents * engines / 8, rate: 0.9 * factor };
        let name = format!("agent loops, {engines} engines, {} agents a second", 0.9 * factor);
        cases.push(Case { name, plan: plan(source, 1 << 20)? });
    }
    Ok(cases)
}
