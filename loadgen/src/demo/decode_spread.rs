//! Owns the measurement of how evenly a router fills decode targets: a real router in front of prefill and decode
//! engines, long and short prompts mixed, once per setting of the router. Never decides how results look.
//!
//! Two closed loops run at the same time, one of long prompts and one of short ones, none with a shared prefix. While
//! both are under way the decode engines' held blocks and running requests are sampled; each sample gives the largest
//! over the mean of all targets, and a run reports the mean over its samples. 1 is perfectly even.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use serde_json::Value;

use super::TemporaryDirectory;
use super::check::Router;
use super::router::RouterProcess;
use crate::engine::disagg::{Disagg, PdProtocol, PdRole};
use crate::engine::scheduler::Speed;
use crate::engine::{Engine, EngineConfig, EngineHandle};
use crate::net::runtime::block_on;
use crate::prompt::TextModel;
use crate::run::driver::{self, Pace, RunConfig, RunResult};
use crate::run::workload::{Shape, Workload};

const MODEL: &str = "demo";
const START_TIMEOUT: Duration = Duration::from_secs(30);
const REST_TIMEOUT: Duration = Duration::from_secs(15);
const SAMPLE_EVERY: Duration = Duration::from_millis(20);

/// One of the two closed loops.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Loop {
    pub requests: usize,
    pub concurrency: usize,
    pub prompt_tokens: usize,
    pub output_tokens: usize,
}

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
    pub settings: Vec<Setting>,
    pub prefill_engines: usize,
    pub decode_engines: usize,
    pub protocol: PdProtocol,
    /// Whether the router counts tokens and blocks, or estimates.
    pub has_tokenizer: bool,
    pub long: Loop,
    pub short: Loop,
    pub seed: u64,
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
            settings: vec![
                setting("off", &["--decode-input-demand=off"]),
                setting("on", &["--decode-input-demand=on"]),
                setting(&format!("on, W = {request_weight}"), &["--decode-input-demand=on", &weight]),
            ],
            prefill_engines: 2,
            decode_engines: 4,
            protocol: PdProtocol::VllmMooncake,
            has_tokenizer: true,
            long: Loop { requests: 240, concurrency: 16, prompt_tokens: 3000, output_tokens: 120 },
            short: Loop { requests: 480, concurrency: 32, prompt_tokens: 60, output_tokens: 120 },
            seed: 1,
            interrupt: Arc::default(),
        }
    }

    fn engine(&self, number: usize, role: PdRole) -> EngineConfig {
        // Prefill fast enough that decode is never short of work.
        let speed = Speed { prefill_per_token: Duration::from_micros(10), ..Speed::default() };
        EngineConfig {
            model: MODEL.into(),
            speed,
            seed: self.seed.wrapping_mul(100).wrapping_add(number as u64),
            disagg: Some(Disagg::new(role, self.protocol)),
            ..EngineConfig::default()
        }
    }

    fn run_config(&self, side: Loop, stream: u64, target: &str) -> RunConfig {
        RunConfig {
            target: target.into(),
            workload: Workload {
                shape: Shape::SharedPrefix {
                    groups: side.requests,
                    zipf: 0.0,
                    prefix_tokens: side.prompt_tokens / 2,
                    suffix_tokens: side.prompt_tokens / 2,
                },
                requests: side.requests,
                output_tokens: side.output_tokens,
                model: MODEL.into(),
                stream: true,
                seed: self.seed.wrapping_mul(1000).wrapping_add(stream),
            },
            pace: Pace::Closed { concurrency: side.concurrency },
            timeout: Duration::from_secs(120),
            in_flight_max: side.concurrency,
            api_key: None,
            think_time: Duration::ZERO,
            warmup: 0,
            expected: None,
            interrupt: self.interrupt.clone(),
            progress: false,
        }
    }
}

/// One setting's run.
#[derive(Clone, Debug, Serialize)]
pub struct SpreadRun {
    pub setting: String,
    pub requests: u64,
    pub errors: u64,
    pub samples: usize,
    /// Largest over mean of the blocks that decode engines hold, mean over samples.
    pub kv_spread: f64,
    /// The same of the requests that they run or have waiting.
    pub request_spread: f64,
    pub ttft_mean_ms: f64,
    pub throughput_rps: f64,
}

/// Runs every setting on fresh engines and a fresh router.
pub fn run(config: &SpreadConfig, say: &mut dyn FnMut(&str)) -> Result<Vec<SpreadRun>> {
    let text = Arc::new(TextModel::shipped()?);
    let files = TemporaryDirectory::create()?;
    crate::prompt::write_shipped_tokenizer(&files.0.join("tokenizer"))?;
    let mut runs = Vec::new();
    for setting in &config.settings {
        if config.interrupt.load(Ordering::Relaxed) {
            break;
        }
        say(&format!("decode demand {}", setting.name));
        runs.push(one(config, setting, &text, &files.0)?);
    }
    Ok(runs)
}

fn one(config: &SpreadConfig, setting: &Setting, text: &Arc<TextModel>, directory: &Path) -> Result<SpreadRun> {
    let prefill = (0..config.prefill_engines).map(|number| config.engine(number, PdRole::Prefill));
    let decode = (0..config.decode_engines).map(|number| config.engine(100 + number, PdRole::Decode));
    let engines = Engine::start_group(prefill.chain(decode).collect(), text.clone())?;
    let records: Vec<Value> = engines.iter().map(EngineHandle::registration).collect();
    let workers = directory.join("workers.json");
    std::fs::write(&workers, Value::from(records).to_string()).context("writing the workers file")?;
    let mut arguments: Vec<String> = vec!["--workers-file".into(), workers.display().to_string()];
    if config.has_tokenizer {
        arguments.extend(["--router-tokenizer-path".into(), directory.join("tokenizer").display().to_string()]);
    }
    arguments.extend(setting.arguments.iter().cloned());
    let mut process = RouterProcess::start(&config.router, &arguments, &directory.join("router.log"))?;
    let url = process.url();
    let router = Router::new(&url)?;
    block_on(router.wait_ready(&mut process, engines.len(), START_TIMEOUT))??;

    let decode = &engines[config.prefill_engines..];
    let under_way = AtomicBool::new(true);
    let (samples, long, short) = thread::scope(|scope| -> Result<(Samples, RunResult, RunResult)> {
        let sampler = scope.spawn(|| Samples::take(decode, config, &under_way));
        let sides = [(config.long, 1), (config.short, 2)].map(|(side, stream)| {
            let run = config.run_config(side, stream, &url);
            let under_way = &under_way;
            scope.spawn(move || {
                let result = driver::execute(run);
                // From here on only one kind of prompt is left: the mix is over.
                under_way.store(false, Ordering::Relaxed);
                result
            })
        });
        let [long, short] = sides.map(|side| side.join().expect("no panic in a run"));
        Ok((sampler.join().expect("no panic while sampling"), long?, short?))
    })?;
    let mut problems = block_on(router.check_rest(&engines, false, REST_TIMEOUT))??;
    problems.extend(process.stop());
    ensure!(problems.is_empty(), "{}: {}", setting.name, problems.join("; "));
    ensure!(samples.count > 0, "{}: no moment at which both loops were under way", setting.name);
    if let Some(error) = long.first_error.as_ref().or(short.first_error.as_ref()) {
        tracing::warn!(setting = setting.name, error, "requests failed");
    }
    let requests = long.record.ttft.count() + short.record.ttft.count();
    let duration = long.duration.max(short.duration);
    Ok(SpreadRun {
        setting: setting.name.clone(),
        requests,
        errors: long.record.errors_total() + short.record.errors_total(),
        samples: samples.count,
        kv_spread: samples.kv / samples.count as f64,
        request_spread: samples.requests / samples.count as f64,
        ttft_mean_ms: (long.record.ttft.mean_ms() * long.record.ttft.count() as f64
            + short.record.ttft.mean_ms() * short.record.ttft.count() as f64)
            / requests.max(1) as f64,
        throughput_rps: requests as f64 / duration.as_secs_f64(),
    })
}

/// Sums over the moments at which the fleet was busy.
#[derive(Default)]
struct Samples {
    count: usize,
    kv: f64,
    requests: f64,
}

impl Samples {
    fn take(engines: &[EngineHandle], config: &SpreadConfig, under_way: &AtomicBool) -> Samples {
        let mut samples = Samples::default();
        let busy = (config.long.concurrency + config.short.concurrency) / 2;
        while under_way.load(Ordering::Relaxed) {
            let states: Vec<_> = engines.iter().map(EngineHandle::state).collect();
            let held = states.iter().map(|state| state.ranks.iter().map(|rank| rank.blocks_held).sum::<usize>());
            let running = states.iter().map(|state| state.ranks.iter().map(|rank| rank.running + rank.waiting).sum());
            let running: Vec<usize> = running.collect();
            if running.iter().sum::<usize>() >= busy {
                samples.count += 1;
                samples.kv += spread(held);
                samples.requests += spread(running.into_iter());
            }
            thread::sleep(SAMPLE_EVERY);
        }
        samples
    }
}

/// Largest over mean; 1 for nothing at all.
fn spread(numbers: impl Iterator<Item = usize> + Clone) -> f64 {
    let (max, sum, count) = (numbers.clone().max().unwrap_or(0), numbers.clone().sum::<usize>(), numbers.count());
    if sum == 0 { 1.0 } else { max as f64 * count as f64 / sum as f64 }
}

/// Text of the results as a table.
pub fn table(runs: &[SpreadRun]) -> Result<String> {
    let first = runs.first().context("no run")?;
    let mut text = String::from("decode demand         KV max/mean  requests max/mean  TTFT mean ms   req/s  errors\n");
    for run in runs {
        text.push_str(&format!(
            "{:<20} {:>12.3} {:>18.3} {:>13.1} {:>7.1} {:>7}\n",
            run.setting, run.kv_spread, run.request_spread, run.ttft_mean_ms, run.throughput_rps, run.errors
        ));
    }
    let excess = |spread: f64| (spread - 1.0).max(0.0);
    for run in &runs[1..] {
        let share = excess(run.kv_spread) / excess(first.kv_spread).max(1e-9);
        text.push_str(&format!(
            "{}: {:.0} % of the excess over even of {}\n",
            run.setting,
            share * 100.0,
            first.setting
        ));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spread_is_the_largest_over_the_mean() {
        assert_eq!(spread([4, 4, 4, 4].into_iter()), 1.0);
        assert_eq!(spread([8, 0, 0, 0].into_iter()), 4.0);
        assert_eq!(spread([6, 2].into_iter()), 1.5);
        assert_eq!(spread([0, 0].into_iter()), 1.0);
    }
}
