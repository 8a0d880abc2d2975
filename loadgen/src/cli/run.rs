//! Owns `loadgen run`: flags to a run, its report to the terminal and to a file.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use loadgen::run::driver::{self, Pace, RunConfig};
use loadgen::run::report;
use loadgen::run::scrape::Scraper;
use loadgen::run::workload::{Shape, Workload};

use super::output::OutputArguments;

#[derive(Clone, Copy, ValueEnum)]
enum WorkloadKind {
    SharedPrefix,
    MultiTurn,
}

#[derive(Args)]
pub struct RunArguments {
    /// Router or engine, `http://host:port`.
    #[arg(long)]
    target: String,
    #[arg(long, value_enum, default_value = "shared-prefix")]
    workload: WorkloadKind,
    /// Open loop: requests per second, Poisson.
    #[arg(long, conflicts_with = "concurrency")]
    rate: Option<f64>,
    /// Closed loop: requests (conversations) under way [default: 8 when no rate is given].
    #[arg(long)]
    concurrency: Option<usize>,
    #[arg(long, default_value_t = 200)]
    requests: usize,
    /// Model name; the first one the target lists if absent.
    #[arg(long)]
    model: Option<String>,
    /// Distinct system prompts.
    #[arg(long, default_value_t = 16)]
    groups: usize,
    /// Exponent of their popularity, 0 = all alike.
    #[arg(long, default_value_t = 1.0)]
    zipf: f64,
    #[arg(long, default_value_t = 2000)]
    prefix_tokens: usize,
    /// Tokens of the unique part (shared-prefix) or of each message (multi-turn).
    #[arg(long, default_value_t = 100)]
    suffix_tokens: usize,
    #[arg(long, default_value_t = 32)]
    output_tokens: usize,
    /// Turns per conversation.
    #[arg(long, default_value_t = 6)]
    turns: usize,
    #[arg(long, default_value_t = 0.0)]
    think_seconds: f64,
    /// Multi-turn: histories quote answers from the seed instead of the server's own.
    #[arg(long)]
    scripted_answers: bool,
    /// Ask for whole answers instead of streams.
    #[arg(long)]
    unary: bool,
    /// First requests that are sent but not counted.
    #[arg(long, default_value_t = 0)]
    warmup: usize,
    #[arg(long, default_value_t = 120.0)]
    timeout_seconds: f64,
    /// Open loop: more requests than this wait, and the wait counts.
    #[arg(long, default_value_t = 8000)]
    max_in_flight: usize,
    /// Sent as a bearer token.
    #[arg(long, env = "LOADGEN_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    output: OutputArguments,
}

impl RunArguments {
    fn shape(&self) -> Shape {
        match self.workload {
            WorkloadKind::SharedPrefix => Shape::SharedPrefix {
                groups: self.groups,
                zipf: self.zipf,
                prefix_tokens: self.prefix_tokens,
                suffix_tokens: self.suffix_tokens,
            },
            WorkloadKind::MultiTurn => Shape::MultiTurn {
                turns: self.turns,
                groups: self.groups,
                prefix_tokens: self.prefix_tokens,
                message_tokens: self.suffix_tokens,
                scripted_answers: self.scripted_answers,
            },
        }
    }
}

pub fn run(arguments: RunArguments) -> Result<ExitCode> {
    let pace = match (arguments.rate, arguments.concurrency) {
        (Some(rate), _) if rate.is_finite() && rate > 0.0 => Pace::Open { rate },
        (Some(rate), _) => bail!("--rate must be a positive number, not {rate}"),
        (None, Some(0)) => bail!("--concurrency must be at least 1"),
        (None, concurrency) => Pace::Closed { concurrency: concurrency.unwrap_or(8) },
    };
    let seconds = |name: &str, value: f64| {
        Duration::try_from_secs_f64(value).with_context(|| format!("{name} must be a number of seconds, not {value}"))
    };
    if arguments.requests == 0 || arguments.output_tokens == 0 {
        bail!("--requests and --output-tokens must be at least 1");
    }
    arguments.output.check()?;
    let listed = driver::probe(&arguments.target)?;
    let model = match arguments.model.clone().or(listed) {
        Some(model) => model,
        None => bail!("{} lists no model at /v1/models; name one with --model", arguments.target),
    };
    let config = RunConfig {
        target: arguments.target.clone(),
        workload: Workload {
            shape: arguments.shape(),
            requests: arguments.requests,
            output_tokens: arguments.output_tokens,
            model,
            stream: !arguments.unary,
            seed: arguments.seed,
        },
        pace,
        timeout: seconds("--timeout-seconds", arguments.timeout_seconds)?,
        in_flight_max: arguments.max_in_flight,
        api_key: arguments.api_key.clone(),
        think_time: seconds("--think-seconds", arguments.think_seconds)?,
        warmup: arguments.warmup,
        expected: None,
        interrupt: Arc::default(),
        progress: true,
    };
    super::interrupt_sets(&config.interrupt)?;
    let scraper = arguments.output.scraper(&config.target)?;
    let result = driver::execute(config.clone())?;
    let fleet = scraper.map(Scraper::finish);
    print!("{}", report::table(&result));
    let broken = arguments.output.write(&config, &result, fleet)?;
    broken.iter().for_each(|line| eprintln!("ASSERTION: {line}"));
    Ok(match (result.interrupted, result.record.errors_total()) {
        _ if !broken.is_empty() => ExitCode::FAILURE,
        (true, _) => ExitCode::from(130),
        (false, 0) => ExitCode::SUCCESS,
        (false, _) => ExitCode::FAILURE,
    })
}
