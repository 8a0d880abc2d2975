//! One workload over a simulated fleet in virtual time, under the rules that the command line names: the router's own
//! decision code, the engine model of loadgen, no sockets. The same arguments give the same figures.

use std::fs::File;
use std::io::{BufReader, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context;
use bench::simulation::{Plan, Rule, Source, run_all};
use bench::statistics::spread;
use clap::Parser;
use loadgen::engine::scheduler::Speed;
use loadgen::sim::{Outcome, Shape, Slo, read_trace};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[derive(Parser)]
struct Arguments {
    /// JSON lines with timestamp (ms), input_length, output_length (tokens) and hash_ids (512-token blocks).
    #[arg(long, required_unless_present = "workload", conflicts_with = "workload")]
    trace: Option<PathBuf>,
    #[arg(long, value_enum)]
    workload: Option<Shape>,
    /// A trace's arrivals are this many times faster than recorded.
    #[arg(long, default_value_t = 1.0)]
    speed: f64,
    /// A trace's requests one at a time, each when the one before has ended.
    #[arg(long, requires = "trace")]
    sequential: bool,
    /// Sessions per second of a generated workload.
    #[arg(long, default_value_t = 1.0)]
    rate: f64,
    /// Requests of a trace at most, of a generated workload at least.
    #[arg(long, default_value_t = 12_000)]
    requests: usize,
    #[arg(long, default_value_t = 8)]
    engines: usize,
    /// Tokens of KV per engine.
    #[arg(long, default_value_t = 1 << 19)]
    pool_tokens: usize,
    /// Tokens per block.
    #[arg(long, default_value_t = 64)]
    block_size: usize,
    #[arg(long, default_value_t = 6.0)]
    step_base_ms: f64,
    #[arg(long, default_value_t = 100.0)]
    prefill_us_per_token: f64,
    #[arg(long, default_value_t = 150.0)]
    decode_us_per_sequence: f64,
    #[arg(long, default_value_t = 40.0)]
    decode_us_per_kilotoken: f64,
    #[arg(long, default_value_t = 2048)]
    max_batched_tokens: usize,
    /// From a step's end to the router's view.
    #[arg(long, default_value_t = 2.0)]
    event_lag_ms: f64,
    /// Longest time to the first token that is still good, seconds.
    #[arg(long, default_value_t = 2.0)]
    slo_ttft: f64,
    /// Longest mean time between tokens that is still good, seconds.
    #[arg(long, default_value_t = 0.1)]
    slo_itl: f64,
    /// round-robin, session-affinity, most-cached, or kv-aware with load=queue|active, weight=, queued=, active=, requests=,
    /// recent=off|idle|on, knowledge=events|promised|truth; without options as the router's own. Repeatable.
    #[arg(long, default_values = ["round-robin", "session-affinity", "kv-aware,load=active", "kv-aware"])]
    rule: Vec<Rule>,
    /// Runs of each rule.
    #[arg(long, default_value_t = 1)]
    seeds: u64,
    #[arg(long, default_value_t = 1)]
    threads: usize,
    #[arg(long)]
    json: Option<PathBuf>,
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let plan = plan(&arguments)?;
    let started = Instant::now();
    let results = run_all(&plan, arguments.threads)?;
    let mut out = std::io::stdout().lock();
    // A reader that has left, as `| head` does, is no reason to stop: the file is still to be written.
    let best = spread(results.iter().filter_map(|result| Some(result.bounds?.memory))).map_or(0.0, |best| best.median);
    let infinite =
        spread(results.iter().filter_map(|result| Some(result.bounds?.infinite))).map_or(0.0, |best| best.median);
    let _ = writeln!(out, "hit rate: best for the fleet's memory {best:.4}, one infinite cache {infinite:.4}");
    let _ = writeln!(
        out,
        "{:<46} hit rate  of best  TTFT mean    p50     p99  ITL p50    p99  goodput  max/mean requests prefill",
        "rule"
    );
    for of_rule in results.chunk_by(|left, right| left.rule == right.rule) {
        let median = |of: fn(&Outcome) -> f64| {
            spread(of_rule.iter().map(|result| of(&result.outcome))).map_or(0.0, |spread| spread.median)
        };
        let _ = writeln!(
            out,
            "{:<46} {:>8.4} {:>9.3} {:>10.3} {:>6.3} {:>7.3} {:>7.1}ms {:>5.0}ms {:>7.4} {:>12.2} {:>12.2}",
            of_rule[0].rule,
            median(|it| it.hit_rate),
            median(|it| it.hit_rate) / best,
            median(|it| it.ttft_mean_s),
            median(|it| it.ttft_p50_s),
            median(|it| it.ttft_p99_s),
            median(|it| it.itl_p50_s) * 1e3,
            median(|it| it.itl_p99_s) * 1e3,
            median(|it| it.goodput),
            median(|it| it.imbalance_requests),
            median(|it| it.imbalance_prefill),
        );
    }
    let virtual_s: f64 = results.iter().map(|result| result.outcome.seconds).sum();
    let took_s = started.elapsed().as_secs_f64();
    let _ = writeln!(out, "{virtual_s:.0} s of virtual time in {took_s:.1} s: {:.0} times as fast", virtual_s / took_s);
    if let Some(path) = &arguments.json {
        std::fs::write(path, serde_json::to_vec_pretty(&results)?)
            .with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}

fn plan(arguments: &Arguments) -> anyhow::Result<Plan> {
    let positive = |name: &str, value: f64| {
        anyhow::ensure!(value.is_finite() && value > 0.0, "--{name} must be a positive number");
        Ok(value)
    };
    let source = match (&arguments.trace, arguments.workload) {
        (Some(path), _) => {
            let file = File::open(path).with_context(|| format!("opening {}", path.display()))?;
            let lines = read_trace(BufReader::new(file), arguments.requests)?;
            Source::Trace { lines, speed: positive("speed", arguments.speed)?, is_sequential: arguments.sequential }
        }
        (None, Some(shape)) => {
            Source::Generated { shape, requests: arguments.requests, rate: positive("rate", arguments.rate)? }
        }
        (None, None) => anyhow::bail!("--trace or --workload is needed"),
    };
    anyhow::ensure!(arguments.engines > 0 && arguments.engines <= 1024, "--engines must be 1 to 1024");
    anyhow::ensure!(arguments.block_size > 0 && arguments.max_batched_tokens > 0, "sizes must be positive");
    let duration = |name: &str, milliseconds: f64| {
        Duration::try_from_secs_f64(milliseconds / 1e3).with_context(|| format!("--{name}"))
    };
    Ok(Plan {
        source,
        engines: arguments.engines,
        speed: Speed {
            step_base: duration("step-base-ms", arguments.step_base_ms)?,
            prefill_per_token: duration("prefill-us-per-token", arguments.prefill_us_per_token / 1e3)?,
            decode_per_sequence: duration("decode-us-per-sequence", arguments.decode_us_per_sequence / 1e3)?,
            decode_per_kilotoken: duration("decode-us-per-kilotoken", arguments.decode_us_per_kilotoken / 1e3)?,
            tokens_per_step_max: arguments.max_batched_tokens,
            ..Speed::default()
        },
        pool_tokens: arguments.pool_tokens,
        block_size: arguments.block_size,
        event_lag: duration("event-lag-ms", arguments.event_lag_ms)?,
        slo: Slo { ttft_s: arguments.slo_ttft, itl_s: arguments.slo_itl },
        rules: arguments.rule.clone(),
        seeds: (1..=arguments.seeds).collect(),
    })
}
