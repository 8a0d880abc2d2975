//! One workload over a simulated fleet in virtual time, under the rules that the command line names: the router's own
//! decision code, the engine model of loadgen, no sockets. The same arguments give the same figures.

use std::fs::File;
use std::io::{BufReader, Write};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use bench::simulation::{Plan, Rule, Source, run_all};
use bench::statistics::spread;
use clap::Parser;
use loadgen::engine::speed::SpeedArguments;
use loadgen::sim::{Outcome, Pairs, Shape, Slo, read_trace};

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
    /// Tokens of KV in each engine's host memory: computed blocks are copied there, and loaded once the device has evicted
    /// them.
    #[arg(long, default_value_t = 0)]
    host_tokens: usize,
    /// So many of the engines do prefill only, the others decode only.
    #[arg(long)]
    prefill_engines: Option<usize>,
    /// From a prefill engine to a decode engine.
    #[arg(long, default_value_t = 5.0, requires = "prefill_engines")]
    transfer_us_per_token: f64,
    /// Tokens per block.
    #[arg(long, default_value_t = 64)]
    block_size: usize,
    #[command(flatten)]
    engine_speed: SpeedArguments,
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
    /// recent=off|idle|on, host=, demand=off|W, knowledge=events|promised|truth; without options as the router's own.
    /// Repeatable.
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
    let results = run_all(&plan, arguments.threads)?;
    let mut out = std::io::stdout().lock();
    // A reader that has left, as `| head` does, is no reason to stop: the file is still to be written.
    let best = spread(results.iter().filter_map(|result| Some(result.bounds?.memory))).map_or(0.0, |best| best.median);
    let infinite =
        spread(results.iter().filter_map(|result| Some(result.bounds?.infinite))).map_or(0.0, |best| best.median);
    let _ = writeln!(out, "hit rate: best for the fleet's memory {best:.4}, one infinite cache {infinite:.4}");
    let _ = writeln!(
        out,
        "{:<46} hit rate  of best  of host  TTFT mean    p50     p99  ITL p50    p99  goodput  max/mean requests prefill decode",
        "rule"
    );
    for of_rule in results.chunk_by(|left, right| left.rule == right.rule) {
        let median = |of: fn(&Outcome) -> f64| {
            spread(of_rule.iter().map(|result| of(&result.outcome))).map_or(0.0, |spread| spread.median)
        };
        let _ = writeln!(
            out,
            "{:<46} {:>8.4} {:>8.3} {:>8.4} {:>10.3} {:>6.3} {:>7.3} {:>6.1}ms {:>4.0}ms {:>8.4} {:>17.2} {:>7.2} {:>6.2}",
            of_rule[0].rule,
            median(|it| it.hit_rate),
            median(|it| it.hit_rate) / best,
            median(|it| it.host_hit_rate),
            median(|it| it.ttft_mean_s),
            median(|it| it.ttft_p50_s),
            median(|it| it.ttft_p99_s),
            median(|it| it.itl_p50_s) * 1e3,
            median(|it| it.itl_p99_s) * 1e3,
            median(|it| it.goodput),
            median(|it| it.imbalance_requests),
            median(|it| it.imbalance_prefill),
            median(|it| it.imbalance_decode),
        );
    }
    let virtual_s: f64 = results.iter().map(|result| result.outcome.seconds).sum();
    let took_s: f64 = results.iter().map(|result| result.took.as_secs_f64()).sum();
    let times = virtual_s / took_s;
    let _ = writeln!(out, "{virtual_s:.0} s of virtual time in {took_s:.1} s of CPU time: {times:.0} times as fast");
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
    anyhow::ensure!(arguments.block_size > 0, "--block-size must be positive");
    let duration = |name: &str, milliseconds: f64| {
        Duration::try_from_secs_f64(milliseconds / 1e3).with_context(|| format!("--{name}"))
    };
    let transfer_per_token = duration("transfer-us-per-token", arguments.transfer_us_per_token / 1e3)?;
    let pairs = arguments.prefill_engines.map(|prefill| Pairs { prefill, transfer_per_token });
    anyhow::ensure!(
        pairs.as_ref().is_none_or(|pairs| pairs.prefill > 0 && pairs.prefill < arguments.engines),
        "--prefill-engines leaves at least one engine of each kind"
    );
    Ok(Plan {
        source,
        engines: arguments.engines,
        pairs,
        speed: arguments.engine_speed.speed()?,
        pool_tokens: arguments.pool_tokens,
        host_tokens: arguments.host_tokens,
        block_size: arguments.block_size,
        event_lag: duration("event-lag-ms", arguments.event_lag_ms)?,
        slo: Slo { ttft_s: arguments.slo_ttft, itl_s: arguments.slo_itl },
        rules: arguments.rule.clone(),
        seeds: (1..=arguments.seeds).collect(),
    })
}
