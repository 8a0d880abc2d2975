//! Owns the subcommands' flags and the choice between them.

mod decode_spread;
mod demo;
mod engine;
mod fleet;
mod output;
mod report;
mod run;
mod simulate;
mod workload;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Load generator and simulated engines for LLM routers.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Show what KV-aware routing saves: real router, simulated engines, one workload under two policies.
    Demo(demo::DemoArguments),
    /// Measure how evenly a router fills decode engines: prefill/decode pairs, mixed prompt lengths, demand off and on.
    DecodeSpread(decode_spread::SpreadArguments),
    /// Run simulated engines until interrupted.
    Engine(engine::EngineArguments),
    /// Run engines of several kinds, with failures by schedule, until interrupted.
    Fleet(fleet::FleetArguments),
    /// Run engines in virtual time before the router's decision code: hands over to `simulate` of the package `bench`.
    Simulate(simulate::SimulateArguments),
    /// Send a workload to a router or an engine and report latencies.
    Run(Box<run::RunArguments>),
    /// Compare finished runs: a table with ratios, a page, conditions that each must keep.
    Report(report::ReportArguments),
}

pub fn main() -> ExitCode {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "warn".into());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    let outcome = match Arguments::parse().command {
        Command::Demo(arguments) => demo::run(arguments),
        Command::DecodeSpread(arguments) => decode_spread::run(arguments),
        Command::Engine(arguments) => engine::run(arguments),
        Command::Fleet(arguments) => fleet::run(arguments),
        Command::Simulate(arguments) => simulate::run(arguments),
        Command::Run(arguments) => run::run(*arguments),
        Command::Report(arguments) => report::run(arguments),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            eprintln!("loadgen: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Blocks until SIGINT or SIGTERM.
pub(crate) fn wait_for_interrupt() -> anyhow::Result<()> {
    use signal_hook::consts::{SIGINT, SIGTERM};
    let mut signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM])?;
    signals.forever().next();
    Ok(())
}

/// Sets `flag` on SIGINT or SIGTERM; a second signal ends the process as if nobody listened.
pub(crate) fn interrupt_sets(flag: &std::sync::Arc<std::sync::atomic::AtomicBool>) -> anyhow::Result<()> {
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register_conditional_default(signal, flag.clone())?;
        signal_hook::flag::register(signal, flag.clone())?;
    }
    Ok(())
}
