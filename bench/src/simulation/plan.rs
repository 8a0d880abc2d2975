//! Owns what is run: which workload over which fleet under which rule and seed, in parallel over runs. Each run is one
//! thread's, so that threads change nothing but the time it takes.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use loadgen::engine::content::Content;
use loadgen::engine::scheduler::Speed;
use loadgen::sim::{
    Fleet, Outcome, Pairs, Shape, Slo, Start, TraceLine, Workload, best_for_memory, generate, infinite_cache, outcome,
    replay, run,
};
use serde::Serialize;

use super::rule::Rule;
use crate::machine::thread_cpu;

/// Where requests come from.
#[derive(Clone, Debug)]
pub enum Source {
    /// A recorded trace, so many times faster than recorded; or each request when the one before has ended.
    Trace { lines: Vec<TraceLine>, speed: f64, is_sequential: bool },
    /// At least `requests` requests, sessions per second.
    Generated { shape: Shape, requests: usize, rate: f64 },
}

impl Source {
    fn workload(&self, block_size: usize, seed: u64) -> anyhow::Result<Workload> {
        match self {
            Source::Trace { lines, speed, is_sequential } => {
                let mut workload = replay("trace", lines, *speed, block_size, seed)?;
                if *is_sequential {
                    for (number, request) in workload.requests.iter_mut().enumerate().skip(1) {
                        request.start = Start::After { request: number - 1, pause_ns: 0 };
                    }
                }
                Ok(workload)
            }
            Source::Generated { shape, requests, rate } => Ok(generate(*shape, *requests, *rate, block_size, seed)),
        }
    }
}

/// One workload over one fleet, under several rules and seeds.
#[derive(Clone, Debug)]
pub struct Plan {
    pub source: Source,
    pub engines: usize,
    /// Prefill and decode apart, if present.
    pub pairs: Option<Pairs>,
    pub speed: Speed,
    /// Tokens of KV per engine.
    pub pool_tokens: usize,
    /// Tokens of KV in each engine's host memory; 0 for none.
    pub host_tokens: usize,
    pub block_size: usize,
    pub event_lag: Duration,
    pub slo: Slo,
    pub rules: Vec<Rule>,
    pub seeds: Vec<u64>,
}

/// One run.
#[derive(Clone, Debug, Serialize)]
pub struct RunResult {
    pub rule: String,
    pub seed: u64,
    #[serde(flatten)]
    pub outcome: Outcome,
    /// Of the first rule's runs only: they take as long as the run, and hardly differ between rules.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bounds: Option<Bounds>,
    /// CPU time of the run itself, without workload and bounds: the one figure that is not the same every time.
    #[serde(skip)]
    pub took: Duration,
}

/// Hit rates that nobody beats on the requests in the order in which a run sent them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Bounds {
    /// Of one infinite cache.
    pub infinite: f64,
    /// Of the fleet's memory in one cache that knows the future.
    pub memory: f64,
}

impl Plan {
    /// Where a prefix saves computing it: on the engines that compute prompts, and on their hosts.
    fn blocks_that_save_prefill(&self) -> usize {
        let engines = self.pairs.as_ref().map_or(self.engines, |pairs| pairs.prefill);
        (self.pool_tokens + self.host_tokens) / self.block_size * engines
    }

    fn one(&self, rule: &Rule, seed: u64) -> anyhow::Result<RunResult> {
        let workload = self.source.workload(self.block_size, seed)?;
        let blocks = self.pool_tokens / self.block_size;
        let longest = workload.requests.iter().map(|it| it.content.prompt_tokens() + it.content.answer_tokens()).max();
        anyhow::ensure!(
            longest.is_some_and(|tokens| tokens <= blocks * self.block_size),
            "the longest request does not fit into an engine's {} tokens",
            self.pool_tokens
        );
        let fleet = Fleet {
            speeds: vec![self.speed.clone(); self.engines],
            blocks_per_engine: blocks,
            host_blocks_per_engine: self.host_tokens / self.block_size,
            pairs: self.pairs.clone(),
            event_lag: self.event_lag,
            seed,
        };
        let started = thread_cpu();
        let served = run(&fleet, &workload, &mut *rule.router(&workload, self.engines, seed));
        let took = thread_cpu() - started;
        Ok(RunResult {
            took,
            rule: rule.to_string(),
            seed,
            outcome: outcome(&workload, &served, &fleet, self.slo),
            bounds: (self.rules.first() == Some(rule)).then(|| Bounds {
                infinite: infinite_cache(&workload, &served),
                memory: best_for_memory(&workload, &served, self.blocks_that_save_prefill()),
            }),
        })
    }
}

/// Every rule with every seed; in the order of rules, then seeds.
pub fn run_all(plan: &Plan, threads: usize) -> anyhow::Result<Vec<RunResult>> {
    let jobs: Vec<(&Rule, u64)> =
        plan.rules.iter().flat_map(|rule| plan.seeds.iter().map(move |seed| (rule, *seed))).collect();
    let (next, results) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..threads.clamp(1, jobs.len().max(1)) {
            scope.spawn(|| {
                while let Some((rule, seed)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let result = plan.one(rule, *seed);
                    results.lock().unwrap_or_else(PoisonError::into_inner).push(result);
                }
            });
        }
    });
    let results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    let mut results: Vec<RunResult> = results.into_iter().collect::<anyhow::Result<_>>()?;
    let place = |result: &RunResult| {
        jobs.iter().position(|job| (job.0.to_string(), job.1) == (result.rule.clone(), result.seed))
    };
    results.sort_by_cached_key(place);
    Ok(results)
}
