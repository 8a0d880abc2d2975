//! `compare`: proxies side by side on one backend and one load. Owns the command line and the exit code.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use bench::harness::{Harness, Plan, scenarios};
use bench::machine::{Cores, Host, Interrupt, pin_current_thread, raise_descriptor_limit};
use bench::report::{Report, ending, progress, write_json};
use bench::rivals::{Kind, ROUTER, ROUTER_PAIR, Rival, YARDSTICK, build_router, find_tool};
use bench::scenario::Group;
use clap::Parser;

/// CPU per request, CPU per stream chunk and memory per idle stream of HTTP proxies, side by side.
///
/// Exit code: 0 all measured and every goal met, 1 a goal missed or a proxy failed, 2 the run could not be done.
#[derive(Parser)]
struct Arguments {
    /// Where the JSON report goes.
    #[arg(long)]
    json: Option<PathBuf>,
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Length of each window; warm-up comes on top.
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Another proxy: 'name=command line with {listen} and {upstream}'. Repeatable.
    #[arg(long = "rival")]
    rivals: Vec<Rival>,
    /// The router's binary. Without it the release binary is built first.
    #[arg(long)]
    router: Option<PathBuf>,
    /// Leave out the router with a prefill and a decode leg per request.
    #[arg(long)]
    without_pair: bool,
    /// Leave the router out.
    #[arg(long, conflicts_with = "router")]
    without_router: bool,
    /// Only these groups. Repeatable or comma-separated.
    #[arg(long, value_delimiter = ',')]
    only: Vec<Group>,
    /// Open idle streams; a proxy needs two descriptors for each [default: 10000, or as many as the limit allows].
    #[arg(long)]
    idle_streams: Option<usize>,
    /// Requests per proxy and round of the latency at low load.
    #[arg(long, default_value_t = 300)]
    low_load_requests: usize,
    /// Measure the idle streams of every proxy, not only of the router and the rivals named here.
    #[arg(long)]
    idle_all: bool,
}

/// Idle streams where nobody asks for another number.
const IDLE_STREAMS: usize = 10_000;

fn main() -> ExitCode {
    ending("compare", run(Arguments::parse()))
}

/// `false` when a goal was missed or a proxy failed.
fn run(arguments: Arguments) -> Result<bool> {
    let window = Duration::try_from_secs_f64(arguments.seconds).context("--seconds")?;
    ensure!(arguments.rounds > 0 && window > Duration::ZERO, "--rounds and --seconds must be above 0");
    let rivals = rivals(&arguments)?;
    let interrupt = Interrupt::install()?;
    let descriptors_max = raise_descriptor_limit()?;
    let idle_streams = idle_streams(&arguments, descriptors_max)?;
    let cores = Cores::detect()?;
    if cores.proxy == cores.load {
        progress("one core only: CPU figures hold, rates and latencies mean nothing");
    }
    let host = Host::describe(descriptors_max);
    pin_current_thread(cores.load)?;
    let idle_proxies =
        rivals.iter().filter(|rival| rival.name != ROUTER_PAIR && (arguments.idle_all || !is_yardstick(rival)));
    let plan = Plan {
        rounds: arguments.rounds,
        window,
        scenarios: scenarios(&arguments.only),
        idle_streams,
        idle_proxies: idle_proxies.map(|rival| rival.name.clone()).collect(),
        low_load_requests: if is_asked_for(&arguments, Group::Latency) { arguments.low_load_requests } else { 0 },
    };
    let results = Harness::new(&rivals, cores, &interrupt)?.run(&plan, progress)?;
    let report = Report::new(host, cores, &plan, results);
    print(&report.table())?;
    write_json(arguments.json.as_deref(), &report)?;
    Ok(report.failures.is_empty() && report.goals.iter().all(|goal| goal.met))
}

fn is_yardstick(rival: &Rival) -> bool {
    matches!(rival.kind, Kind::Nginx(_) | Kind::Haproxy(_))
}

/// nginx and haproxy first, then the router, then what the user names. All missing tools are named at once.
fn rivals(arguments: &Arguments) -> Result<Vec<Rival>> {
    let nginx = find_tool("nginx", "nginx-light");
    let haproxy = find_tool("haproxy", "haproxy");
    let missing: Vec<String> =
        [&nginx, &haproxy].iter().filter_map(|found| found.as_ref().err()).map(ToString::to_string).collect();
    let (Ok(nginx), Ok(haproxy)) = (nginx, haproxy) else { bail!("{}", missing.join("\n")) };
    let mut rivals = vec![
        Rival { name: YARDSTICK.to_owned(), kind: Kind::Nginx(nginx) },
        Rival { name: "haproxy".to_owned(), kind: Kind::Haproxy(haproxy) },
    ];
    if !arguments.without_router {
        let program = match &arguments.router {
            Some(program) => program.clone(),
            None => build_router()?,
        };
        rivals.push(Rival { name: ROUTER.to_owned(), kind: Kind::Router(program.clone()) });
        if !arguments.without_pair {
            rivals.push(Rival { name: ROUTER_PAIR.to_owned(), kind: Kind::RouterPair(program) });
        }
    }
    for rival in &arguments.rivals {
        ensure!(rivals.iter().all(|other| other.name != rival.name), "two proxies are called {}", rival.name);
        rivals.push(rival.clone());
    }
    Ok(rivals)
}

/// The harness holds both ends of each stream, the proxy both of its own.
fn idle_streams(arguments: &Arguments, descriptors_max: u64) -> Result<usize> {
    if !is_asked_for(arguments, Group::Idle) {
        return Ok(0);
    }
    let most = (descriptors_max.saturating_sub(200) / 2) as usize;
    let Some(wanted) = arguments.idle_streams else {
        if most < IDLE_STREAMS {
            progress(&format!("{most} idle streams: the descriptor limit of {descriptors_max} allows no more"));
        }
        return Ok(IDLE_STREAMS.min(most));
    };
    ensure!(wanted <= most, "--idle-streams {wanted}: the descriptor limit of {descriptors_max} allows at most {most}");
    Ok(wanted)
}

fn is_asked_for(arguments: &Arguments, group: Group) -> bool {
    arguments.only.is_empty() || arguments.only.contains(&group)
}

fn print(text: &str) -> Result<()> {
    use std::io::Write;
    Ok(std::io::stdout().lock().write_all(text.as_bytes())?)
}
