//! What `--kv-recent-load` is worth: a trace of real conversations replayed in virtual time through the router's
//! own cost function over simulated workers, under each value of the option. Decides its default.
//!
//! Workers prefill one request at a time and decode all they have at a fixed pace; a worker's cache is an LRU of
//! blocks, and the router learns of a block when its prefill is done. `overlapping` keeps the trace's own
//! arrival times (divided by `--speed`); `sequential` sends each request after the one before has ended, which is
//! where in-flight load says nothing.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap};
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;

use anyhow::Context;
use clap::Parser;
use infera_router::fleet::TargetLoad;
use infera_router::route::{self, Candidate, PickCounter, RecentLoad};
use serde::{Deserialize, Serialize};

#[derive(Parser)]
struct Arguments {
    /// JSON lines with timestamp (ms), input_length, output_length (tokens) and hash_ids (512-token blocks).
    #[arg(long)]
    trace: PathBuf,
    #[arg(long, default_value_t = 8)]
    workers: usize,
    /// Blocks of 512 tokens that one worker holds.
    #[arg(long, default_value_t = 1500)]
    cache_blocks: usize,
    /// Tokens per second and worker.
    #[arg(long, default_value_t = 10_000.0)]
    prefill_rate: f64,
    /// Seconds per generated token.
    #[arg(long, default_value_t = 0.02)]
    decode_pace: f64,
    /// Arrivals are this many times faster than recorded.
    #[arg(long, default_value_t = 1.0)]
    speed: f64,
    #[arg(long, default_value_t = 1.0)]
    overlap_weight: f64,
    /// First requests of the trace only.
    #[arg(long, default_value_t = usize::MAX)]
    requests: usize,
    #[arg(long)]
    json: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Request {
    timestamp: f64,
    input_length: u64,
    output_length: u64,
    hash_ids: Vec<u64>,
}

const BLOCK_TOKENS: u64 = 512;

/// Least recently used blocks out; the tail of a prompt before its head.
struct Cache {
    capacity: usize,
    clock: u64,
    used_at: HashMap<u64, u64>,
    by_use: BTreeMap<u64, u64>,
}

impl Cache {
    fn prefix(&self, blocks: &[u64]) -> u32 {
        blocks.iter().take_while(|block| self.used_at.contains_key(block)).count() as u32
    }

    fn store(&mut self, blocks: &[u64]) {
        for block in blocks.iter().rev() {
            self.clock += 1;
            if let Some(before) = self.used_at.insert(*block, self.clock) {
                self.by_use.remove(&before);
            }
            self.by_use.insert(self.clock, *block);
        }
        while self.used_at.len() > self.capacity {
            let Some((_, block)) = self.by_use.pop_first() else { break };
            self.used_at.remove(&block);
        }
    }
}

struct Worker {
    cache: Cache,
    load: TargetLoad,
    active: HashMap<u64, u32>,
    prefill_free_at: f64,
    picked_at: u64,
    requests: u64,
    prefilled_blocks: u64,
}

impl Worker {
    fn new(capacity: usize) -> Self {
        let cache = Cache { capacity, clock: 0, used_at: HashMap::new(), by_use: BTreeMap::new() };
        Self {
            cache,
            load: TargetLoad::default(),
            active: HashMap::new(),
            prefill_free_at: 0.0,
            picked_at: 0,
            requests: 0,
            prefilled_blocks: 0,
        }
    }

    fn start(&mut self, blocks: &[u64]) {
        blocks.iter().for_each(|block| *self.active.entry(*block).or_default() += 1);
    }

    fn finish(&mut self, blocks: &[u64]) {
        for block in blocks {
            if let Some(count) = self.active.get_mut(block) {
                *count -= 1;
                if *count == 0 {
                    self.active.remove(block);
                }
            }
        }
    }
}

#[derive(Clone, Copy, PartialEq)]
enum What {
    Prefilled,
    Ended,
}

struct Event {
    at: f64,
    what: What,
    worker: usize,
    request: usize,
}

impl PartialEq for Event {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Event {}

impl PartialOrd for Event {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Event {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.at.total_cmp(&other.at).then(self.request.cmp(&other.request))
    }
}

#[derive(Serialize)]
struct Outcome {
    arrivals: &'static str,
    recent_load: &'static str,
    requests: usize,
    /// Share of prompt blocks that were cached.
    hit_rate: f64,
    ttft_mean_s: f64,
    ttft_p50_s: f64,
    ttft_p99_s: f64,
    /// Largest over mean per worker.
    spread_requests: f64,
    spread_prefill: f64,
}

fn spread(numbers: impl Iterator<Item = u64> + Clone) -> f64 {
    let (max, sum, count) = (numbers.clone().max().unwrap_or(0), numbers.clone().sum::<u64>(), numbers.count());
    max as f64 * count as f64 / (sum as f64).max(1.0)
}

struct Run<'a> {
    arguments: &'a Arguments,
    workers: Vec<Worker>,
    recent_load: RecentLoad,
    picks: PickCounter,
    pick_number: u64,
    events: BinaryHeap<Reverse<Event>>,
}

impl Run<'_> {
    /// Applies all that happened up to `now`.
    fn advance(&mut self, requests: &[Request], now: f64) {
        while self.events.peek().is_some_and(|Reverse(event)| event.at <= now) {
            let Some(Reverse(event)) = self.events.pop() else { return };
            let blocks = &requests[event.request].hash_ids;
            match event.what {
                What::Prefilled => self.workers[event.worker].cache.store(blocks),
                What::Ended => self.workers[event.worker].finish(blocks),
            }
        }
    }

    /// Routes one request; gives its hits, its time to first token and its end.
    fn request(&mut self, number: usize, request: &Request, now: f64) -> (u32, f64, f64) {
        let blocks = &request.hash_ids;
        let weight = self.recent_load.weight(self.workers.iter().all(|worker| worker.active.is_empty()));
        let pick = self.picks.current();
        let candidates: Vec<Candidate> = self
            .workers
            .iter()
            .enumerate()
            .map(|(place, worker)| Candidate {
                target: place as u32,
                request_blocks: blocks.len() as u32,
                cache_hits: worker.cache.prefix(blocks),
                active_blocks: worker.active.len() as u64,
                recent_blocks: weight * route::recent_blocks(&worker.load, pick),
                picked_at_ns: worker.picked_at,
                block_tokens: BLOCK_TOKENS as u32,
            })
            .collect();
        let choice = route::pick(self.arguments.overlap_weight, &candidates).expect("there are workers");
        let (place, hits) = (choice.target as usize, choice.cache_hits);
        let worker = &mut self.workers[place];
        route::charge(&worker.load, &self.picks, choice.request_blocks, hits);
        self.pick_number += 1;
        worker.picked_at = self.pick_number;
        worker.requests += 1;
        worker.prefilled_blocks += u64::from(choice.request_blocks - hits);
        worker.start(blocks);
        let missing = request.input_length.saturating_sub(u64::from(hits) * BLOCK_TOKENS).max(1);
        let prefilled = worker.prefill_free_at.max(now) + missing as f64 / self.arguments.prefill_rate;
        worker.prefill_free_at = prefilled;
        let ended = prefilled + request.output_length as f64 * self.arguments.decode_pace;
        self.events.push(Reverse(Event { at: prefilled, what: What::Prefilled, worker: place, request: number }));
        self.events.push(Reverse(Event { at: ended, what: What::Ended, worker: place, request: number }));
        (hits, prefilled - now, ended)
    }
}

const MODES: [(&str, RecentLoad); 3] = [("off", RecentLoad::Off), ("idle", RecentLoad::Idle), ("on", RecentLoad::On)];

fn run(arguments: &Arguments, requests: &[Request], sequential: bool, mode: (&'static str, RecentLoad)) -> Outcome {
    let mut run = Run {
        arguments,
        workers: (0..arguments.workers).map(|_| Worker::new(arguments.cache_blocks)).collect(),
        recent_load: mode.1,
        picks: PickCounter::default(),
        pick_number: 0,
        events: BinaryHeap::new(),
    };
    let (mut ttft, mut hits, mut blocks, mut last_end) = (Vec::new(), 0u64, 0u64, 0.0);
    for (number, request) in requests.iter().enumerate() {
        let now = if sequential { last_end } else { request.timestamp / 1000.0 / arguments.speed };
        run.advance(requests, now);
        let (cached, first_token, end) = run.request(number, request, now);
        hits += u64::from(cached);
        blocks += request.hash_ids.len() as u64;
        ttft.push(first_token);
        last_end = end;
    }
    ttft.sort_by(f64::total_cmp);
    let quantile = |q: f64| ttft[((ttft.len() - 1) as f64 * q) as usize];
    Outcome {
        arrivals: if sequential { "sequential" } else { "overlapping" },
        recent_load: mode.0,
        requests: requests.len(),
        hit_rate: hits as f64 / blocks as f64,
        ttft_mean_s: ttft.iter().sum::<f64>() / ttft.len() as f64,
        ttft_p50_s: quantile(0.5),
        ttft_p99_s: quantile(0.99),
        spread_requests: spread(run.workers.iter().map(|worker| worker.requests)),
        spread_prefill: spread(run.workers.iter().map(|worker| worker.prefilled_blocks)),
    }
}

/// A reader that has left, as `| head` does, is no reason to stop: the file is still to be written.
fn say(line: std::fmt::Arguments<'_>) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let file = File::open(&arguments.trace).with_context(|| format!("cannot open {}", arguments.trace.display()))?;
    let mut requests: Vec<Request> = Vec::new();
    for line in BufReader::new(file).lines().take(arguments.requests) {
        requests.push(serde_json::from_str(&line?)?);
    }
    anyhow::ensure!(!requests.is_empty(), "the trace is empty");
    let mut outcomes = Vec::new();
    say(format_args!("arrivals     recent  hit rate  TTFT mean    p50     p99   max/mean requests  prefill"));
    for sequential in [false, true] {
        for mode in MODES {
            let outcome = run(&arguments, &requests, sequential, mode);
            say(format_args!(
                "{:<12} {:<7} {:>7.3} {:>9.3} {:>8.3} {:>8.3} {:>14.2} {:>11.2}",
                outcome.arrivals,
                outcome.recent_load,
                outcome.hit_rate,
                outcome.ttft_mean_s,
                outcome.ttft_p50_s,
                outcome.ttft_p99_s,
                outcome.spread_requests,
                outcome.spread_prefill
            ));
            outcomes.push(outcome);
        }
    }
    if let Some(path) = &arguments.json {
        std::fs::write(path, serde_json::to_vec_pretty(&outcomes)?)?;
    }
    Ok(())
}
