//! How much more one core of `loadgen` drives than one shard of the router serves: CPU of both per request, on the same
//! requests. Owns the command line and the exit code.
//!
//! The router is a process on one core, as it comes (kv-aware, with a tokenizer) and, for comparison, at its cheapest (round
//! robin, no prompt is read); generator and backend share the other core. The router's CPU is what `/proc` accounts for, the
//! generator's is what it reports of itself.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail, ensure};
use bench::answer::{self, Answer, JSON_BYTES};
use bench::backend::Backend;
use bench::machine::{Cores, Host, Interrupt, pin_current_thread, raise_descriptor_limit};
use bench::process::Process;
use bench::report::{ending, progress, write_json};
use bench::rivals::{Kind, Rival, Running, build, build_router, kv_aware_router};
use bench::scenario::{ALL, Scenario};
use bench::statistics::{Spread, spread};
use clap::Parser;
use serde::Serialize;
use serde_json::Value;

/// CPU per request of the load generator next to the router's.
///
/// Exit code: 0 measured and the goal met, 1 the goal missed, 2 the run could not be done. The goal is judged by the router as
/// it comes.
#[derive(Parser)]
struct Arguments {
    #[arg(long)]
    json: Option<PathBuf>,
    /// The router's binary. Without it the release binary is built first.
    #[arg(long)]
    router: Option<PathBuf>,
    /// The generator's binary; as for the router.
    #[arg(long)]
    loadgen: Option<PathBuf>,
    /// Model directory of the router.
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/../loadgen/assets"))]
    tokenizer: PathBuf,
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// Small JSON requests of a round; a tenth of that for streams. The goal is judged from 2,000 on.
    #[arg(long, default_value_t = 20_000)]
    requests: usize,
    /// Requests of a run before those that are measured: a process that has just begun touches its memory for the first
    /// time.
    #[arg(long, default_value_t = 1000)]
    warm_up: usize,
    /// Only scenarios whose name begins so.
    #[arg(long, default_value = "")]
    only: String,
}

/// Fewer say nothing of the goal.
const REQUESTS_JUDGED: usize = 2000;
/// How many shards one core of the generator must be able to drive.
const RATIO_MIN: f64 = 3.0;
/// Streams as few as in the comparison of proxies: a shard is a tenth busy, and waking up is most of what both do. Shown and
/// not judged, as the goal is about what a shard can serve.
const FEW_STREAMS: &str = "sse paced 200";

/// Whole small answers, streams in bursts, and streams whose events come one by one: few, and enough to keep a shard busy.
fn scenarios() -> impl Iterator<Item = Scenario> {
    let named = |name| ALL.iter().find(move |scenario| scenario.name == name).copied();
    let busy = named(FEW_STREAMS).map(|paced| Scenario { name: "sse paced 2000", connections: 2000, ..paced });
    [named("json c=32"), named("sse burst 32"), named(FEW_STREAMS), busy].into_iter().flatten()
}

/// The router as it comes; judged.
const KV_AWARE: &str = "kv-aware";
const ROUND_ROBIN: &str = "round-robin";

#[derive(Serialize)]
struct Row {
    scenario: &'static str,
    policy: String,
    /// The router's CPU per request over the generator's in the same round.
    ratio: Spread,
    generator_us: Spread,
    router_us: Spread,
    /// Absent where it is not judged.
    met: Option<bool>,
}

#[derive(Serialize)]
struct Report {
    schema: &'static str,
    host: Host,
    rows: Vec<Row>,
}

fn main() -> ExitCode {
    ending("generator", run(Arguments::parse()))
}

fn run(arguments: Arguments) -> Result<bool> {
    ensure!(arguments.rounds > 0 && arguments.requests > 0, "at least one round of one request");
    let interrupt = Interrupt::install()?;
    let host = Host::describe(raise_descriptor_limit()?);
    let program = arguments.router.map_or_else(build_router, Ok)?;
    let loadgen = arguments.loadgen.map_or_else(|| build("loadgen"), Ok)?;
    let cores = Cores::detect()?;
    pin_current_thread(cores.load)?;
    let directory = tempfile::Builder::new().prefix("generator-").tempdir()?;
    let first = Answer::json(JSON_BYTES);
    let payload = first.payload.clone();
    let backend = Backend::start(cores.load, first)?;
    let request = answer::request("bench", false, 200);
    let command = kv_aware_router(&program, &arguments.tokenizer, "");
    let mut routers = Vec::new();
    for (name, kind) in [(KV_AWARE, Kind::Command(command)), (ROUND_ROBIN, Kind::Router(program))] {
        let rival = Rival { name: name.to_owned(), kind };
        routers.push(rival.start(backend.address(), directory.path(), cores, (&request, &payload), &interrupt)?);
    }
    let mut rows = Vec::new();
    let has_enough = arguments.requests >= REQUESTS_JUDGED;
    for scenario in scenarios().filter(|scenario| scenario.name.starts_with(&arguments.only)) {
        backend.set_answer(scenario.answer());
        let requests = if scenario.streams() { arguments.requests.div_ceil(10) } else { arguments.requests };
        let mut count = Requests { measured: requests, warm_up: arguments.warm_up };
        if has_enough {
            // All begin at once: the first wave is no steady load.
            count.warm_up = count.warm_up.max(scenario.connections);
            count.measured = count.measured.max(3 * scenario.connections);
        }
        let is_judged = has_enough && scenario.name != FEW_STREAMS;
        let mut pairs = vec![Vec::new(); routers.len()];
        // The first round warms the routers up.
        for round in 0..=arguments.rounds {
            for (router, pairs) in routers.iter().zip(&mut pairs) {
                interrupt.check()?;
                let pair = measure(&loadgen, router, &scenario, count, directory.path())?;
                let (name, policy) = (scenario.name, &router.name);
                progress(&format!("{name}, {policy}, round {round}: {:.1} and {:.1} us", pair.0, pair.1));
                pairs.extend((round > 0).then_some(pair));
            }
        }
        for (router, pairs) in routers.iter().zip(&pairs) {
            rows.push(row(scenario.name, &router.name, is_judged, pairs)?);
        }
    }
    for row in &rows {
        let Row { scenario, policy, ratio, generator_us, router_us, met } = row;
        progress(&format!(
            "{scenario:<14} {policy:<12} router {:>6.1} us, generator {:>6.1} us a request: {:.2} times ({:.2} to {:.2}){}",
            router_us.median,
            generator_us.median,
            ratio.median,
            ratio.q1,
            ratio.q3,
            met.map_or("", |met| if met { ", met" } else { ", missed" })
        ));
    }
    let report = Report { schema: "infera-generator/1", host, rows };
    write_json(arguments.json.as_deref(), &report)?;
    Ok(report.rows.iter().all(|row| row.met != Some(false)))
}

fn row(scenario: &'static str, policy: &str, is_judged: bool, pairs: &[(f64, f64)]) -> Result<Row> {
    let of = |value: fn(&(f64, f64)) -> f64| spread(pairs.iter().map(value)).context("no rounds");
    let ratio = of(|(generator, router)| router / generator)?;
    let met = (is_judged && policy == KV_AWARE).then_some(ratio.median >= RATIO_MIN);
    Ok(Row { scenario, policy: policy.into(), ratio, generator_us: of(|it| it.0)?, router_us: of(|it| it.1)?, met })
}

/// How many of a run.
#[derive(Clone, Copy)]
struct Requests {
    measured: usize,
    warm_up: usize,
}

/// One run; microseconds of CPU per request of the generator and of the router.
fn measure(
    loadgen: &Path,
    router: &Running,
    scenario: &Scenario,
    requests: Requests,
    directory: &Path,
) -> Result<(f64, f64)> {
    let report = directory.join("report.json");
    let members = router.process.members()?;
    let before = Process::cpu(&members);
    let mut command = Command::new(loadgen);
    command.args(["run", "--target", &format!("http://{}", router.address), "--model", "m"]);
    let all = requests.measured + requests.warm_up;
    command.args(["--concurrency", &scenario.connections.to_string(), "--requests", &all.to_string()]);
    command.args(["--warmup", &requests.warm_up.to_string(), "--metrics-url", "none"]);
    // A body of about 200 bytes, as the comparison of proxies sends it.
    command.args(["--workload", "unique", "--length-spread", "0", "--suffix-tokens", "14", "--output-tokens", "64"]);
    command.args(["--json".as_ref(), report.as_os_str()]);
    if !scenario.streams() {
        command.arg("--unary");
    }
    let output = command.output().with_context(|| format!("cannot run {}", loadgen.display()))?;
    let router_cpu = Process::cpu(&members).saturating_sub(before);
    // 3: the generator was the limit, which is what is looked for here.
    if !matches!(output.status.code(), Some(0 | 3)) {
        bail!(
            "{}: {}{}",
            output.status,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
    }
    let report: Value = serde_json::from_slice(&std::fs::read(&report)?)?;
    let seconds = report["generator"]["cpu_seconds"].as_f64().context("the report tells no CPU time")?;
    let measured = requests.measured;
    ensure!(report["requests"] == measured as u64 && report["errors"] == 0, "not every request was answered: {report}");
    // The router was warm before.
    Ok((seconds * 1e6 / measured as f64, router_cpu.as_secs_f64() * 1e6 / all as f64))
}
