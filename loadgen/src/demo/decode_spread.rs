//! Owns the measurement of how evenly a router fills decode targets: a real router in front of prefill and decode
//! engines, once per workload, setting of the router and seed. Never decides how results look (see [`report`]).
//!
//! Requests arrive as open loops: several streams of unlike requests, Poisson or by the clock, so that nothing waits for
//! anything. While they arrive, the decode engines' held blocks and running requests are sampled. **Spread** is the
//! largest target's occupancy over the mean of all targets, both weighted by time: 1 is even, the number of targets is
//! everything on one. What lies above 1 is the **excess**.

pub mod report;
pub mod scenarios;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use serde_json::Value;

use self::scenarios::{Scenario, Stream};
use super::TemporaryDirectory;
use super::check::Router;
use super::router::RouterProcess;
use crate::engine::disagg::{Disagg, PdProtocol, PdRole};
use crate::engine::scheduler::Speed;
use crate::engine::{Engine, EngineConfig, EngineHandle};
use crate::net::runtime::block_on;
use crate::plan::Recipe;
use crate::prompt::TextModel;
use crate::run::config::{RunConfig, RunResult};
use crate::run::driver;
use crate::run::pace::Pace;
use crate::run::workload::Workload;

const MODEL: &str = "demo";
const START_TIMEOUT: Duration = Duration::from_secs(30);
const REST_TIMEOUT: Duration = Duration::from_secs(15);
const SAMPLE_EVERY: Duration = Duration::from_millis(20);
/// Share of the arrivals' time before sampling starts: until then the fleet fills.
const WARMUP_SHARE: f64 = 0.25;

/// A setting of the router under a name.
#[derive(Clone, Debug)]
pub struct Setting {
    pub name: String,
    pub arguments: Vec<String>,
}

/// One measurement.
#[derive(Clone, Debug)]
pub struct SpreadConfig {
    pub router: PathBuf,
    pub scenarios: Vec<Scenario>,
    pub settings: Vec<Setting>,
    pub prefill_engines: usize,
    pub decode_engines: usize,
    pub protocol: PdProtocol,
    /// For how long requests arrive.
    pub seconds: f64,
    /// Seeds of the repeats: other prompts, other arrivals.
    pub seeds: Vec<u64>,
    pub interrupt: Arc<AtomicBool>,
}

impl SpreadConfig {
    /// Decode demand off, on, and on with a request weight; two prefill and four decode engines.
    pub fn new(router: PathBuf, request_weight: f64) -> SpreadConfig {
        let setting = |name: &str, arguments: &[&str]| Setting {
            name: name.into(),
            arguments: arguments.iter().map(|argument| argument.to_string()).collect(),
        };
        let weight = format!("--decode-request-weight={request_weight}");
        SpreadConfig {
            router,
            scenarios: scenarios::all(),
            settings: vec![
                setting("off", &["--decode-input-demand=off"]),
                setting("on", &["--decode-input-demand=on"]),
                setting(&format!("on, W = {request_weight}"), &["--decode-input-demand=on", &weight]),
            ],
            prefill_engines: 2,
            decode_engines: 4,
            protocol: PdProtocol::VllmMooncake,
            seconds: 24.0,
            seeds: vec![1, 2, 3],
            interrupt: Arc::default(),
        }
    }

    fn engine(&self, scenario: &Scenario, seed: u64, number: usize, role: PdRole) -> EngineConfig {
        // Prefill fast enough that decode is never short of work.
        let speed = Speed { prefill_per_token: Duration::from_micros(10), ..Speed::default() };
        EngineConfig {
            model: MODEL.into(),
            speed,
            prefix_cache: role == PdRole::Prefill || scenario.decode_shares_prefixes,
            seed: seed.wrapping_mul(100).wrapping_add(number as u64),
            disagg: Some(Disagg::new(role, self.protocol)),
            ..EngineConfig::default()
        }
    }

    fn run_config(&self, stream: &Stream, seed: u64, target: &str) -> RunConfig {
        let Stream { groups, zipf, prefix_tokens, suffix_tokens, output_tokens, .. } = *stream;
        let recipe = Recipe::shared_prefix(groups, zipf, prefix_tokens, suffix_tokens, output_tokens);
        let requests = ((stream.rate * self.seconds).round() as usize).max(1);
        let pace = match stream.steady_from_s {
            Some(offset_s) => Pace::Steady { rate: stream.rate, offset_s },
            None => Pace::Open { rate: stream.rate },
        };
        let workload = Workload::generated(recipe, requests, MODEL, seed);
        RunConfig { interrupt: self.interrupt.clone(), ..RunConfig::new(target, workload, pace) }
    }
}

/// One workload under one setting with one seed.
#[derive(Clone, Debug, Serialize)]
pub struct SpreadRun {
    pub scenario: String,
    pub setting: String,
    pub seed: u64,
    pub requests: u64,
    pub errors: u64,
    pub samples: usize,
    /// Spread of the blocks that decode engines hold.
    pub kv_spread: f64,
    /// Spread of the requests that they run or have waiting.
    pub request_spread: f64,
    /// Mean over time, all decode engines.
    pub requests_in_flight: f64,
    pub ttft_mean_ms: f64,
    pub throughput_rps: f64,
}

/// Runs everything, each on fresh engines and a fresh router.
pub fn run(config: &SpreadConfig, say: &mut dyn FnMut(&str)) -> Result<Vec<SpreadRun>> {
    let text = Arc::new(TextModel::shipped()?);
    let files = TemporaryDirectory::create()?;
    crate::prompt::write_shipped_tokenizer(&files.0.join("tokenizer"))?;
    let mut runs = Vec::new();
    for scenario in &config.scenarios {
        for seed in config.seeds.iter().copied() {
            for setting in &config.settings {
                if config.interrupt.load(Ordering::Relaxed) {
                    return Ok(runs);
                }
                say(&format!("{}, decode demand {}, seed {seed}", scenario.name, setting.name));
                runs.push(one(config, scenario, setting, seed, &text, &files.0)?);
            }
        }
    }
    Ok(runs)
}

fn one(
    config: &SpreadConfig,
    scenario: &Scenario,
    setting: &Setting,
    seed: u64,
    text: &Arc<TextModel>,
    directory: &Path,
) -> Result<SpreadRun> {
    let engine = |number, role| config.engine(scenario, seed, number, role);
    let prefill = (0..config.prefill_engines).map(|number| engine(number, PdRole::Prefill));
    let decode = (0..config.decode_engines).map(|number| engine(50 + number, PdRole::Decode));
    let engines = Engine::start_group(prefill.chain(decode).collect(), text.clone())?;
    let records: Vec<Value> = engines.iter().map(EngineHandle::registration).collect();
    let workers = directory.join("workers.json");
    std::fs::write(&workers, Value::from(records).to_string()).context("writing the workers file")?;
    let mut arguments: Vec<String> = vec!["--workers-file".into(), workers.display().to_string()];
    if scenario.has_tokenizer {
        arguments.extend(["--router-tokenizer-path".into(), directory.join("tokenizer").display().to_string()]);
    }
    arguments.extend(setting.arguments.iter().cloned());
    let mut process = RouterProcess::start(&config.router, &arguments, &directory.join("router.log"))?;
    let url = process.url();
    let router = Router::new(&url)?;
    block_on(router.wait_ready(&mut process, engines.len(), START_TIMEOUT))??;

    let decode = &engines[config.prefill_engines..];
    let (samples, results) = thread::scope(|scope| -> Result<(Samples, Vec<RunResult>)> {
        let sampler = scope.spawn(|| Samples::take(decode, config));
        let streams: Vec<_> = scenario
            .streams
            .iter()
            .enumerate()
            .map(|(number, stream)| config.run_config(stream, seed * 1000 + number as u64, &url))
            .map(|run| scope.spawn(move || driver::execute(run)))
            .collect();
        let results = streams.into_iter().map(|stream| stream.join().expect("no panic in a run")).collect();
        Ok((sampler.join().expect("no panic while sampling"), Result::from_iter::<Vec<Result<_>>>(results)?))
    })?;
    let mut problems = block_on(router.check_rest(&engines, false, REST_TIMEOUT))??;
    problems.extend(process.stop());
    ensure!(problems.is_empty(), "{} {}: {}", scenario.name, setting.name, problems.join("; "));
    if let Some(error) = results.iter().find_map(|result| result.first_error.as_ref()) {
        tracing::warn!(scenario = scenario.name, setting = setting.name, error, "requests failed");
    }
    let answered = |result: &RunResult| result.record.ttft.count() as f64;
    let requests: f64 = results.iter().map(answered).sum();
    let seconds = results.iter().map(|result| result.duration.as_secs_f64()).fold(0.0, f64::max);
    Ok(SpreadRun {
        scenario: scenario.name.into(),
        setting: setting.name.clone(),
        seed,
        requests: requests as u64,
        errors: results.iter().map(|result| result.record.errors_total()).sum(),
        samples: samples.count,
        kv_spread: samples.kv.spread(),
        request_spread: samples.requests.spread(),
        requests_in_flight: samples.requests.mean * config.decode_engines as f64,
        ttft_mean_ms: results.iter().map(|result| result.record.ttft.mean_ms() * answered(result)).sum::<f64>()
            / requests.max(1.0),
        throughput_rps: requests / seconds.max(1e-9),
    })
}

/// The fullest target and the mean target, each averaged over time.
#[derive(Clone, Copy, Debug, Default)]
struct Occupancy {
    largest: f64,
    mean: f64,
}

impl Occupancy {
    fn add(&mut self, numbers: impl Iterator<Item = usize> + Clone, share_of_time: f64) {
        self.largest += numbers.clone().max().unwrap_or(0) as f64 * share_of_time;
        self.mean += numbers.clone().sum::<usize>() as f64 / numbers.count().max(1) as f64 * share_of_time;
    }

    /// 1 for nothing at all.
    fn spread(self) -> f64 {
        if self.mean == 0.0 { 1.0 } else { self.largest / self.mean }
    }
}

/// What was seen of the decode engines while requests arrived.
#[derive(Default)]
struct Samples {
    count: usize,
    kv: Occupancy,
    requests: Occupancy,
}

impl Samples {
    fn take(engines: &[EngineHandle], config: &SpreadConfig) -> Samples {
        let start = Instant::now();
        let (from, until) = (config.seconds * WARMUP_SHARE, config.seconds);
        let mut samples = Samples::default();
        let mut last = from;
        loop {
            thread::sleep(SAMPLE_EVERY);
            let now = start.elapsed().as_secs_f64();
            if now >= until || config.interrupt.load(Ordering::Relaxed) {
                return samples;
            }
            if now > from {
                let states: Vec<_> = engines.iter().map(EngineHandle::state).collect();
                let share_of_time = (now - last) / (until - from);
                let sum = |each: fn(&crate::engine::RankState) -> usize| {
                    states.iter().map(move |state| state.ranks.iter().map(each).sum::<usize>())
                };
                samples.count += 1;
                samples.kv.add(sum(|rank| rank.blocks_held), share_of_time);
                samples.requests.add(sum(|rank| rank.running + rank.waiting), share_of_time);
                last = now;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spread_is_the_largest_over_the_mean_by_time() {
        let check = |samples: &[(&[usize], f64)], expected: f64| {
            let mut occupancy = Occupancy::default();
            samples.iter().for_each(|(numbers, share)| occupancy.add(numbers.iter().copied(), *share));
            assert!((occupancy.spread() - expected).abs() < 1e-9, "{samples:?}: {}", occupancy.spread());
        };
        check(&[(&[4, 4, 4, 4], 1.0)], 1.0);
        check(&[(&[8, 0, 0, 0], 1.0)], 4.0);
        check(&[(&[6, 2], 1.0)], 1.5);
        check(&[(&[0, 0], 1.0)], 1.0);
        // Another target is the fullest in each half, which a mean per target would hide.
        check(&[(&[8, 0], 0.5), (&[0, 8], 0.5)], 2.0);
        check(&[(&[6, 2], 0.75), (&[0, 0], 0.25)], 1.5);
    }
}
