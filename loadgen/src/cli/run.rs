//! Owns `loadgen run`: flags to a run, its report to the terminal and to a file.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use loadgen::run::config::{RunConfig, Warmup};
use loadgen::run::driver;
use loadgen::run::manners::Manners;
use loadgen::run::pace::{Pace, Ramp};
use loadgen::run::report;
use loadgen::run::scrape::Scraper;
use loadgen::run::slo::Slo;

use super::output::OutputArguments;
use super::workload::WorkloadArguments;

/// The generator could not keep its own schedule, so that the figures are not the server's.
const EXIT_INVALID: u8 = 3;
const EXIT_INTERRUPTED: u8 = 130;

#[derive(Args)]
pub struct RunArguments {
    /// Router or engine, `http://host:port`.
    #[arg(long)]
    target: String,
    #[command(flatten)]
    workload: WorkloadArguments,
    /// Open loop: requests per second, Poisson. A replay keeps its own times without this.
    #[arg(long, conflicts_with_all = ["concurrency", "ramp"])]
    rate: Option<f64>,
    /// Closed loop: requests (conversations) under way [default: 8 when no rate is given].
    #[arg(long, conflicts_with = "ramp")]
    concurrency: Option<usize>,
    /// Open loop whose rate goes evenly from A to B requests per second and then stays.
    #[arg(long, value_name = "A..B/SECONDS")]
    ramp: Option<Ramp>,
    /// Open loop: so many arrive at a time; the rate stays what it is.
    #[arg(long, default_value_t = 1, value_name = "NUMBER", conflicts_with = "concurrency")]
    burst: usize,
    /// Recorded times and pauses between turns pass so many times faster.
    #[arg(long, default_value_t = 1.0, value_name = "FACTOR")]
    speedup: f64,
    /// Model name; the first one the target lists if absent.
    #[arg(long)]
    model: Option<String>,
    /// First requests, or those of the first seconds (`30s`), that are sent but not counted.
    #[arg(long, default_value = "0", value_name = "REQUESTS|TIME")]
    warmup: Warmup,
    /// Count as goodput what met all of these: time to the first token, mean time between tokens, whole answer.
    #[arg(long, value_name = "ttft=200ms,itl=30ms,e2e=5s")]
    slo: Option<Slo>,
    /// Share of clients that leave before their answer is whole: half before its first byte, half in its midst.
    #[arg(long, default_value_t = 0.0, value_name = "SHARE")]
    abort_rate: f64,
    /// Share of clients that read at a trickle; their times are not counted.
    #[arg(long, default_value_t = 0.0, value_name = "SHARE")]
    slow_readers: f64,
    #[arg(long, default_value_t = 120.0)]
    timeout_seconds: f64,
    /// Open loop: more requests than this wait, and the wait counts.
    #[arg(long, default_value_t = 8000)]
    max_in_flight: usize,
    /// Sent as a bearer token.
    #[arg(long, env = "LOADGEN_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    #[command(flatten)]
    output: OutputArguments,
}

impl RunArguments {
    fn pace(&self) -> Result<Pace> {
        Ok(match (self.rate, self.ramp, self.concurrency) {
            (Some(rate), _, _) if rate.is_finite() && rate > 0.0 => Pace::Open { rate },
            (Some(rate), _, _) => bail!("--rate must be a positive number, not {rate}"),
            (_, Some(ramp), _) => Pace::Ramp(ramp),
            (_, _, Some(0)) => bail!("--concurrency must be at least 1"),
            (_, _, Some(concurrency)) => Pace::Closed { concurrency },
            _ if self.workload.is_replay() => Pace::Recorded,
            _ => Pace::Closed { concurrency: 8 },
        })
    }

    fn check(&self) -> Result<()> {
        for (name, share) in [("--abort-rate", self.abort_rate), ("--slow-readers", self.slow_readers)] {
            ensure!((0.0..=1.0).contains(&share), "{name} is a share between 0 and 1, not {share}");
        }
        ensure!(self.speedup.is_finite() && self.speedup > 0.0, "--speedup must be a positive number");
        ensure!(self.burst > 0, "--burst must be at least 1");
        Ok(())
    }
}

pub fn run(arguments: RunArguments) -> Result<ExitCode> {
    arguments.check()?;
    arguments.output.check()?;
    let pace = arguments.pace()?;
    let timeout = Duration::try_from_secs_f64(arguments.timeout_seconds)
        .with_context(|| format!("--timeout-seconds must be a number of seconds, not {}", arguments.timeout_seconds))?;
    let listed = driver::probe(&arguments.target)?;
    let model = match arguments.model.clone().or(listed) {
        Some(model) => model,
        None if arguments.workload.names_models() => String::new(),
        None => bail!("{} lists no model at /v1/models; name one with --model", arguments.target),
    };
    let workload = arguments.workload.workload(model)?;
    let config = RunConfig {
        burst: arguments.burst,
        speedup: arguments.speedup,
        timeout,
        in_flight_max: arguments.max_in_flight,
        api_key: arguments.api_key.clone(),
        warmup: arguments.warmup,
        slo: arguments.slo,
        manners: Manners {
            abort_rate: arguments.abort_rate,
            slow_readers: arguments.slow_readers,
            ..Manners::default()
        },
        progress: true,
        ..RunConfig::new(&arguments.target, workload, pace)
    };
    super::interrupt_sets(&config.interrupt)?;
    let scraper = arguments.output.scraper(&config.target)?;
    let result = driver::execute(config.clone())?;
    let fleet = scraper.map(Scraper::finish);
    print!("{}", report::table(&result));
    let broken = arguments.output.write(&config, &result, fleet)?;
    broken.iter().for_each(|line| eprintln!("ASSERTION: {line}"));
    Ok(match result.record.errors_total() {
        _ if result.interrupted => ExitCode::from(EXIT_INTERRUPTED),
        _ if report::is_saturated(&result) => ExitCode::from(EXIT_INVALID),
        0 if broken.is_empty() => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    })
}
