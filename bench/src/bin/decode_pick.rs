//! The decode demand's critical section: 1,024 candidates, one thread against several that contend.
//!
//! Reports how long the section is held and waited for, and what a pick costs in CPU time of its own thread.
//! CPU time, because more threads than cores take turns, and wall time would then measure the scheduler. What
//! that leaves out, on a machine with fewer cores than threads, is true parallel pressure on the lock; the report
//! names the cores.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use clap::Parser;
use infera_router::decode_demand::{DecodeCandidate, DecodeDemand, DemandMetrics, Input, LockTimes, Mode};
use infera_router::fleet::TargetDemand;
use prometheus::Registry;
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

#[derive(Parser)]
struct Arguments {
    #[arg(long, default_value_t = 1024)]
    candidates: usize,
    #[arg(long, default_value_t = 8)]
    threads: usize,
    /// Picks of each thread.
    #[arg(long, default_value_t = 20_000)]
    picks: usize,
    /// Reservations that a thread holds before it releases the oldest.
    #[arg(long, default_value_t = 256)]
    held: usize,
    #[arg(long, default_value_t = 1000.0)]
    request_weight: f64,
    #[arg(long)]
    json: Option<PathBuf>,
}

#[derive(Serialize)]
struct Measured {
    threads: usize,
    pick_cpu_ns: u64,
    hold_p50_us: f64,
    hold_p99_us: f64,
    wait_p50_us: f64,
    wait_p99_us: f64,
    picks: u64,
}

#[derive(Serialize)]
struct Report {
    cores: usize,
    candidates: usize,
    uncontended: Measured,
    contended: Measured,
    /// CPU cost of a contended pick over that of a free one.
    pick_ratio: f64,
    passed: bool,
}

const HOLD_P99_MAX_US: f64 = 5.0;
const PICK_RATIO_MAX: f64 = 2.0;

fn thread_cpu_ns() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Picks and releases in a loop; gives the CPU time that the picks took.
fn contend(demand: &DecodeDemand, cells: &[Arc<TargetDemand>], arguments: &Arguments, seed: u64) -> u64 {
    let mut rows: Vec<DecodeCandidate<'_>> =
        cells.iter().map(|demand| DecodeCandidate { demand, tokens: 0, load: 0.0 }).collect();
    let (mut held, mut random, mut picking_ns) = (VecDeque::new(), seed, 0);
    for _ in 0..arguments.picks {
        // xorshift: prompt lengths from none to 128 Ki tokens.
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let tokens = random % (128 << 10);
        rows.iter_mut().for_each(|row| row.tokens = tokens);
        let before = thread_cpu_ns();
        held.push_back(demand.select(&rows, 0, Input::Exact, None).1);
        picking_ns += thread_cpu_ns() - before;
        if held.len() > arguments.held {
            held.pop_front();
        }
    }
    picking_ns
}

fn measure(arguments: &Arguments, threads: usize) -> anyhow::Result<Measured> {
    let metrics = DemandMetrics::new(&Registry::new())?;
    let times: LockTimes = metrics.lock_times();
    let demand = DecodeDemand::new(Mode::On, arguments.request_weight, metrics);
    let demand = demand.ok_or_else(|| anyhow::anyhow!("demand is off"))?;
    let cells: Vec<Arc<TargetDemand>> = (0..arguments.candidates).map(|_| Arc::default()).collect();
    let picking_ns: u64 = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|thread| {
                let (demand, cells) = (&demand, &cells);
                scope.spawn(move || contend(demand, cells, arguments, thread as u64 + 1))
            })
            .collect();
        workers.into_iter().map(|worker| worker.join().expect("no thread panics")).sum()
    });
    let rest: u64 = cells.iter().map(|cell| cell.tokens() + cell.requests()).sum();
    anyhow::ensure!(rest == 0, "{rest} left in the ledger at rest");
    let micros = |seconds: f64| seconds * 1e6;
    let picks = (threads * arguments.picks) as u64;
    Ok(Measured {
        threads,
        pick_cpu_ns: picking_ns / picks,
        hold_p50_us: micros(times.hold_quantile(0.5)),
        hold_p99_us: micros(times.hold_quantile(0.99)),
        wait_p50_us: micros(times.wait_quantile(0.5)),
        wait_p99_us: micros(times.wait_quantile(0.99)),
        picks,
    })
}

#[allow(clippy::print_stdout)]
fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let started = Instant::now();
    // Once unmeasured: pages, caches, clock speed.
    measure(&Arguments { picks: arguments.picks / 10 + 1, ..Arguments::parse() }, 1)?;
    let uncontended = measure(&arguments, 1)?;
    let contended = measure(&arguments, arguments.threads)?;
    let pick_ratio = contended.pick_cpu_ns as f64 / uncontended.pick_cpu_ns as f64;
    let report = Report {
        cores: std::thread::available_parallelism().map_or(1, usize::from),
        candidates: arguments.candidates,
        passed: contended.hold_p99_us <= HOLD_P99_MAX_US && pick_ratio <= PICK_RATIO_MAX,
        uncontended,
        contended,
        pick_ratio,
    };
    println!("{} candidates on {} cores, {:.1?}", report.candidates, report.cores, started.elapsed());
    println!("threads  pick CPU ns  hold p50/p99 us  wait p50/p99 us");
    for row in [&report.uncontended, &report.contended] {
        println!(
            "{:>7} {:>12} {:>9.2} {:>6.2} {:>9.2} {:>6.2}",
            row.threads, row.pick_cpu_ns, row.hold_p50_us, row.hold_p99_us, row.wait_p50_us, row.wait_p99_us
        );
    }
    println!(
        "pick under contention: {pick_ratio:.2}x (at most {PICK_RATIO_MAX}); hold p99 at most {HOLD_P99_MAX_US} us: {}",
        if report.passed { "passed" } else { "MISSED" }
    );
    if let Some(path) = &arguments.json {
        std::fs::write(path, serde_json::to_vec_pretty(&report)?)?;
    }
    anyhow::ensure!(report.passed, "the section is too slow");
    Ok(())
}
