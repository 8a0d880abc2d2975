//! Owns `loadgen decode-spread`: flags, what is printed, the exit code.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use clap::Args;
use loadgen::demo::decode_spread::{self, SpreadConfig, report};
use loadgen::demo::router;

#[derive(Args)]
pub struct SpreadArguments {
    /// Write the results here.
    #[arg(long)]
    json: Option<PathBuf>,
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=16))]
    prefill: u16,
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(2..=32))]
    decode: u16,
    /// Tokens that one more request weighs, in the runs with a request weight.
    #[arg(long, default_value_t = 3000.0)]
    request_weight: f64,
    /// Further argument of the router in all runs, repeatable.
    #[arg(long = "router-arg", allow_hyphen_values = true)]
    router_arguments: Vec<String>,
    /// Only workloads whose name contains this.
    #[arg(long)]
    only: Option<String>,
    /// For how long requests arrive in each run.
    #[arg(long, default_value_t = 24.0)]
    seconds: f64,
    /// Repeats with the seeds from --seed on.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=100))]
    repeats: u64,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Router binary; the one beside this program (built if cargo started it) if absent.
    #[arg(long)]
    router: Option<PathBuf>,
}

pub fn run(arguments: SpreadArguments) -> Result<ExitCode> {
    let mut say = |line: &str| eprintln!("{line}");
    ensure!(arguments.seconds.is_finite() && arguments.seconds > 0.0, "--seconds must be above 0");
    let binary = match arguments.router {
        Some(binary) => binary,
        None => router::find_or_build(&mut say)?,
    };
    let mut config = SpreadConfig::new(binary, arguments.request_weight);
    (config.prefill_engines, config.decode_engines) = (arguments.prefill.into(), arguments.decode.into());
    config.seconds = arguments.seconds;
    config.seeds = (0..arguments.repeats).map(|at| arguments.seed.wrapping_add(at)).collect();
    if let Some(only) = &arguments.only {
        config.scenarios.retain(|scenario| scenario.name.contains(only.as_str()));
        ensure!(!config.scenarios.is_empty(), "no workload's name contains {only:?}");
    }
    for setting in &mut config.settings {
        setting.arguments.extend(arguments.router_arguments.iter().cloned());
    }
    super::interrupt_sets(&config.interrupt)?;
    let runs = decode_spread::run(&config, &mut say)?;
    print!("\n{}", report::table(&config, &runs)?);
    if let Some(path) = &arguments.json {
        let text = serde_json::to_string_pretty(&report::json(&config, &runs))?;
        std::fs::write(path, text + "\n").with_context(|| format!("writing {}", path.display()))?;
    }
    let failed = runs.iter().any(|run| run.errors > 0);
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
