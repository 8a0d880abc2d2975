//! `runtimes`: one pass-through proxy per runtime and flag set, side by side. Owns the command line.

use std::io::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bench::harness::{Harness, Plan, scenarios};
use bench::machine::{Cores, Host, Interrupt, pin_current_thread, raise_descriptor_limit};
use bench::report::{Report, ending, progress, write_json};
use bench::rivals::{Kind, Rival, YARDSTICK, find_tool};
use bench::runtimes::Candidate;
use bench::scenario::Group;
use clap::{Args, Parser, Subcommand, ValueEnum};

/// CPU per request and per stream chunk of monoio with its flags, its epoll driver and (with the cargo feature
/// `glommio`) glommio, next to nginx and a plain TCP relay.
#[derive(Parser)]
#[command(args_conflicts_with_subcommands = true)]
struct Arguments {
    #[command(subcommand)]
    serve: Option<Serve>,
    #[command(flatten)]
    compare: Compare,
}

#[derive(Args)]
struct Compare {
    /// Where the JSON report goes.
    #[arg(long)]
    json: Option<PathBuf>,
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Length of each window; warm-up comes on top.
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Only these groups. Repeatable or comma-separated.
    #[arg(long, value_delimiter = ',', default_values_t = [OnlyGroup::Json, OnlyGroup::Sse])]
    only: Vec<OnlyGroup>,
}

#[derive(Clone, Copy, ValueEnum)]
enum OnlyGroup {
    Json,
    Sse,
}

impl std::fmt::Display for OnlyGroup {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            OnlyGroup::Json => "json",
            OnlyGroup::Sse => "sse",
        })
    }
}

#[derive(Subcommand)]
enum Serve {
    /// Run one candidate until it is ended (what the comparison starts).
    Serve {
        candidate: Candidate,
        #[arg(long)]
        listen: SocketAddr,
        #[arg(long)]
        upstream: SocketAddr,
    },
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let result = match arguments.serve {
        Some(Serve::Serve { candidate, listen, upstream }) => candidate.serve(listen, upstream).map(|()| true),
        None => compare(&arguments.compare),
    };
    ending("runtimes", result)
}

/// `false` when a candidate failed.
fn compare(arguments: &Compare) -> Result<bool> {
    let window = Duration::try_from_secs_f64(arguments.seconds).context("--seconds")?;
    ensure!(arguments.rounds > 0 && window > Duration::ZERO, "--rounds and --seconds must be above 0");
    let nginx = find_tool("nginx", "nginx-light")?;
    let program = std::env::current_exe()?;
    let program = program.to_str().context("this program's own path is not UTF-8")?.replace('\'', r"'\''");
    let mut rivals = vec![Rival { name: YARDSTICK.to_owned(), kind: Kind::Nginx(nginx) }];
    for candidate in Candidate::value_variants() {
        let name = candidate.name();
        let line = format!("exec '{program}' serve {name} --listen {{listen}} --upstream {{upstream}}");
        rivals.push(Rival { name, kind: Kind::Command(line) });
    }
    let interrupt = Interrupt::install()?;
    let host = Host::describe(raise_descriptor_limit()?);
    let cores = Cores::detect()?;
    pin_current_thread(cores.load)?;
    let groups: Vec<Group> = arguments
        .only
        .iter()
        .map(|group| match group {
            OnlyGroup::Json => Group::Json,
            OnlyGroup::Sse => Group::Sse,
        })
        .collect();
    let plan = Plan {
        rounds: arguments.rounds,
        window,
        scenarios: scenarios(&groups),
        idle_streams: 0,
        idle_proxies: Vec::new(),
        low_load_requests: 0,
    };
    let results = Harness::new(&rivals, cores, &interrupt)?.run(&plan, progress)?;
    let report = Report::new(host, cores, &plan, results);
    std::io::stdout().lock().write_all(report.table().as_bytes())?;
    write_json(arguments.json.as_deref(), &report)?;
    Ok(report.failures.is_empty())
}
