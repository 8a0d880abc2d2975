//! Owns `loadgen demo`: flags, what is printed, the exit code.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::Ordering;

use anyhow::{Context, Result};
use clap::Args;
use loadgen::demo::plot::{self, Curve};
use loadgen::demo::{self, DemoConfig, PolicyRun, images, pair, report, router};
use loadgen::engine::disagg::PdProtocol;
use loadgen::report::document::write_json;

#[derive(Args)]
pub struct DemoArguments {
    /// Write the results here.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Write the picture here.
    #[arg(long)]
    svg: Option<PathBuf>,
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=64))]
    engines: u16,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Requests per policy.
    #[arg(long)]
    requests: Option<usize>,
    /// Requests per second, Poisson.
    #[arg(long)]
    rate: Option<f64>,
    /// Distinct system prompts.
    #[arg(long)]
    groups: Option<usize>,
    /// Tokens of each system prompt.
    #[arg(long)]
    prefix_tokens: Option<usize>,
    /// Exponent of the prompts' popularity, 0 = all alike.
    #[arg(long)]
    zipf: Option<f64>,
    /// Tokens of each question.
    #[arg(long)]
    suffix_tokens: Option<usize>,
    #[arg(long)]
    output_tokens: Option<usize>,
    /// KV blocks per engine.
    #[arg(long)]
    blocks: Option<usize>,
    /// Further argument of the router, repeatable, as in `--router-arg=--kv-overlap-weight=4`.
    #[arg(long = "router-arg", allow_hyphen_values = true)]
    router_arguments: Vec<String>,
    /// Compare mixed engines with as many prefill and decode ones, as in `1p2d`, instead of two policies.
    #[arg(long, value_name = "SHAPE")]
    pd: Option<pair::PairShape>,
    /// How the prefill and decode engines of --pd find each other.
    #[arg(long, value_enum, default_value = "vllm-nixl", requires = "pd")]
    protocol: PdProtocol,
    /// With --pd: rounds over the same images (--groups of them), under both policies; which prefill engine served which.
    #[arg(long, requires = "pd")]
    images: bool,
    /// Router binary; the one beside this program (built if cargo started it) if absent.
    #[arg(long)]
    router: Option<PathBuf>,
}

pub fn run(arguments: DemoArguments) -> Result<ExitCode> {
    let mut say = |line: &str| eprintln!("{line}");
    let binary = match arguments.router {
        Some(binary) => binary,
        None => router::find_or_build(&mut say)?,
    };
    let mut config = DemoConfig::new(binary);
    match arguments.pd {
        Some(shape) if arguments.images => images::tuned(&mut config, shape),
        Some(shape) => pair::tuned(&mut config, shape),
        None => config.engines = arguments.engines.into(),
    }
    config.seed = arguments.seed;
    config.requests = arguments.requests.unwrap_or(config.requests);
    config.rate = arguments.rate.filter(|rate| rate.is_finite() && *rate > 0.0).unwrap_or(config.rate);
    config.groups = arguments.groups.unwrap_or(config.groups);
    config.prefix_tokens = arguments.prefix_tokens.unwrap_or(config.prefix_tokens);
    config.zipf = arguments.zipf.filter(|zipf| zipf.is_finite()).unwrap_or(config.zipf);
    config.suffix_tokens = arguments.suffix_tokens.unwrap_or(config.suffix_tokens);
    config.output_tokens = arguments.output_tokens.unwrap_or(config.output_tokens).max(1);
    config.blocks_total = arguments.blocks.unwrap_or(config.blocks_total);
    config.router_arguments = arguments.router_arguments;
    super::interrupt_sets(&config.interrupt)?;
    if let Some(shape) = arguments.pd.filter(|_| arguments.images) {
        return run_images(&config, shape, arguments.protocol, arguments.json.as_deref());
    }
    if let Some(shape) = arguments.pd {
        return run_pair(&config, shape, arguments.protocol, arguments.json.as_deref());
    }
    let runs = demo::run(&config, &mut say)?;
    print!("\n{}\n{}", report::table(&runs), plot::text(&curves(&runs)));
    if let Some(path) = &arguments.json {
        write_json(path, &report::json(&config, &runs))?;
    }
    if let Some(path) = &arguments.svg {
        std::fs::write(path, plot::svg(&curves(&runs))).with_context(|| format!("writing {}", path.display()))?;
    }
    if config.interrupt.load(Ordering::Relaxed) {
        return Ok(ExitCode::from(130));
    }
    let mut code = ExitCode::SUCCESS;
    for run in &runs {
        for problem in &run.problems {
            eprintln!("PROBLEM under {}: {problem}", run.policy);
            code = ExitCode::FAILURE;
        }
    }
    Ok(code)
}

fn run_images(
    config: &DemoConfig,
    shape: pair::PairShape,
    protocol: PdProtocol,
    json: Option<&std::path::Path>,
) -> Result<ExitCode> {
    let runs = images::run(config, shape, protocol, |line: &str| eprintln!("{line}"))?;
    print!("\n{}", images::table(&runs));
    let problems = runs.iter().flat_map(|run| run.problems.iter().map(|problem| format!("{}: {problem}", run.policy)));
    finish(config, json, images::json(config, protocol, &runs), problems.collect())
}

fn run_pair(
    config: &DemoConfig,
    shape: pair::PairShape,
    protocol: PdProtocol,
    json: Option<&std::path::Path>,
) -> Result<ExitCode> {
    let runs = pair::run(config, shape, protocol, |line: &str| eprintln!("{line}"))?;
    print!("\n{}", pair::table(&runs));
    let problems = runs.iter().flat_map(|run| run.problems.iter().map(|problem| format!("{}: {problem}", run.name)));
    finish(config, json, pair::json(config, protocol, &runs), problems.collect())
}

/// Writes the results and says how it went.
fn finish(
    config: &DemoConfig,
    json: Option<&std::path::Path>,
    results: serde_json::Value,
    problems: Vec<String>,
) -> Result<ExitCode> {
    if let Some(path) = json {
        write_json(path, &results)?;
    }
    if config.interrupt.load(Ordering::Relaxed) {
        return Ok(ExitCode::from(130));
    }
    problems.iter().for_each(|problem| eprintln!("PROBLEM with {problem}"));
    Ok(if problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn curves(runs: &[PolicyRun]) -> Vec<Curve<'_>> {
    let curve = |run: &PolicyRun| run.result.record.rows.ttft_series().map(|(_, ttft_ms)| ttft_ms).collect();
    runs.iter().map(|run| Curve { name: run.policy, samples_ms: curve(run) }).collect()
}
