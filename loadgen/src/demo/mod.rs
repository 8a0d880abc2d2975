//! Owns the demonstration: the same seeded workload through a real router under two policies, with checks that the
//! router's view and load agree with the engines'. Never decides how results look (see [`report`], [`plot`]).

pub mod check;
pub mod decode_spread;
pub mod images;
pub mod pair;
pub mod plot;
pub mod report;
pub mod router;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Result, bail, ensure};

use self::check::{Router, SeedCheck};
use self::router::RouterProcess;
use crate::engine::scheduler::Speed;
use crate::engine::{Engine, EngineConfig, EngineHandle};
use crate::net::runtime::block_on;
use crate::plan::Recipe;
use crate::prompt::TextModel;
use crate::run::config::{RunConfig, RunResult};
use crate::run::driver;
use crate::run::pace::Pace;
use crate::run::workload::Workload;

/// Policies compared, in order.
pub const POLICIES: [&str; 2] = ["round-robin", "kv-aware"];

const MODEL: &str = "demo";
const START_TIMEOUT: Duration = Duration::from_secs(30);
const REST_TIMEOUT: Duration = Duration::from_secs(15);

/// One demonstration.
#[derive(Clone, Debug)]
pub struct DemoConfig {
    pub router: PathBuf,
    pub engines: usize,
    pub requests: usize,
    /// Requests per second, Poisson.
    pub rate: f64,
    /// Distinct system prompts, and the tokens of each.
    pub groups: usize,
    pub prefix_tokens: usize,
    /// Exponent of the prompts' popularity.
    pub zipf: f64,
    pub suffix_tokens: usize,
    pub output_tokens: usize,
    /// KV blocks per engine: fewer than all prefixes need, so that locality matters.
    pub blocks_total: usize,
    pub speed: Speed,
    /// Further arguments of the router.
    pub router_arguments: Vec<String>,
    pub seed: u64,
    pub interrupt: Arc<AtomicBool>,
    pub progress: bool,
}

impl DemoConfig {
    /// About 40 seconds per policy. An engine holds six of the sixteen prompts, the fleet all of them with room for
    /// second copies; the load leaves engines idle most of the time, so that TTFT is computing, not queueing.
    pub fn new(router: PathBuf) -> DemoConfig {
        DemoConfig {
            router,
            engines: 4,
            requests: 200,
            rate: 5.0,
            groups: 16,
            prefix_tokens: 3200,
            zipf: 0.5,
            suffix_tokens: 60,
            output_tokens: 8,
            blocks_total: 1320,
            speed: Speed { step_base: Duration::from_millis(4), ..Speed::default() },
            router_arguments: Vec::new(),
            seed: 1,
            interrupt: Arc::default(),
            progress: true,
        }
    }

    fn workload(&self) -> Workload {
        let (output, suffix) = (self.output_tokens, self.suffix_tokens);
        let recipe = Recipe::shared_prefix(self.groups, self.zipf, self.prefix_tokens, suffix, output);
        Workload::generated(recipe, self.requests, MODEL, self.seed)
    }

    fn engine(&self, number: usize) -> EngineConfig {
        EngineConfig {
            model: MODEL.into(),
            blocks_total: self.blocks_total,
            speed: self.speed.clone(),
            seed: self.seed.wrapping_mul(100).wrapping_add(number as u64),
            ..EngineConfig::default()
        }
    }
}

/// What one policy did.
#[derive(Debug)]
pub struct PolicyRun {
    pub policy: &'static str,
    pub result: RunResult,
    /// Requests each engine finished.
    pub requests_per_engine: Vec<u64>,
    /// Under kv-aware: two requests with one long prefix.
    pub seed_check: Option<SeedCheck>,
    /// What the router did wrong; empty when it behaved.
    pub problems: Vec<String>,
}

/// Runs both policies, each with a fresh router and fresh engines. Everything started is stopped when this returns,
/// whichever way it returns.
pub fn run(config: &DemoConfig, mut say: impl FnMut(&str)) -> Result<Vec<PolicyRun>> {
    ensure!(config.engines > 0 && config.requests > 0, "at least one engine and one request");
    let files = TemporaryDirectory::create()?;
    crate::prompt::write_shipped_tokenizer(&files.0.join("tokenizer"))?;
    let text = Arc::new(TextModel::shipped()?);
    let expected = Arc::new(expected_answers(&config.workload(), &text)?);
    let mut runs = Vec::new();
    for policy in POLICIES {
        if config.interrupt.load(Ordering::Relaxed) {
            bail!("interrupted");
        }
        say(&format!("{policy}: {} engines, {} requests at {}/s", config.engines, config.requests, config.rate));
        runs.push(run_policy(config, policy, &files, text.clone(), expected.clone())?);
    }
    Ok(runs)
}

fn expected_answers(workload: &Workload, text: &TextModel) -> Result<Vec<String>> {
    let plan = workload.plan();
    let answer = |number| {
        let request = plan.next(&mut plan.script(number), None).expect("a session has a first request");
        text.expected_chat_answer(&serde_json::from_str(&request.body)?, request.answer_tokens)
    };
    (0..plan.sessions()).map(answer).collect()
}

fn run_policy(
    config: &DemoConfig,
    policy: &'static str,
    files: &TemporaryDirectory,
    text: Arc<TextModel>,
    expected: Arc<Vec<String>>,
) -> Result<PolicyRun> {
    let kv_aware = policy == "kv-aware";
    let engines = Engine::start_group((0..config.engines).map(|number| config.engine(number)).collect(), text.clone())?;
    let mut arguments: Vec<String> = vec!["--router-policy".into(), policy.into(), "--shards".into(), "1".into()];
    arguments.extend(["--router-tokenizer-path".into(), files.0.join("tokenizer").display().to_string()]);
    arguments.extend(engines.iter().flat_map(|engine| ["--worker".into(), engine.worker_flag()]));
    arguments.extend(config.router_arguments.iter().cloned());
    let mut process = RouterProcess::start(&config.router, &arguments, &files.0.join(format!("{policy}.log")))?;
    let router = Router::new(&process.url())?;
    let mut problems = Vec::new();
    block_on(router.wait_ready(&mut process, engines.len(), START_TIMEOUT))??;
    if kv_aware {
        for engine in engines.iter().filter(|engine| !engine.wait_for_subscriber(START_TIMEOUT)) {
            problems.push(format!("the router never subscribed to the events of {}", engine.worker_id()));
        }
    }
    let seed_check = if kv_aware {
        let check = block_on(router.seed_check(config, &engines, &text, REST_TIMEOUT))??;
        problems.extend(check.problem());
        Some(check)
    } else {
        None
    };
    let finished_before: Vec<u64> = engines.iter().map(|engine| engine.state().totals().finished).collect();
    let result = driver::execute(load(config, &process, expected))?;
    problems.extend(result.record.errors.iter().map(|(failure, count)| format!("{count} x {}", failure.name())));
    if !result.interrupted {
        // A router that is gone is a finding like any other: the table is still shown.
        match block_on(router.check_rest(&engines, kv_aware, REST_TIMEOUT))? {
            Ok(found) => problems.extend(found),
            Err(error) => problems.push(format!("{error:#}")),
        }
    }
    let requests_per_engine =
        engines.iter().zip(finished_before).map(|(engine, before)| engine.state().totals().finished - before).collect();
    problems.extend(process.stop());
    stop(engines);
    Ok(PolicyRun { policy, result, requests_per_engine, seed_check, problems })
}

fn stop(engines: Vec<EngineHandle>) {
    engines.into_iter().for_each(EngineHandle::stop);
}

fn load(config: &DemoConfig, process: &RouterProcess, expected: Arc<Vec<String>>) -> RunConfig {
    RunConfig {
        expected: Some(expected),
        interrupt: config.interrupt.clone(),
        progress: config.progress,
        ..RunConfig::new(&process.url(), config.workload(), Pace::Open { rate: config.rate })
    }
}

/// A directory that is removed when dropped.
pub struct TemporaryDirectory(pub PathBuf);

impl TemporaryDirectory {
    pub fn create() -> Result<TemporaryDirectory> {
        let path = std::env::temp_dir().join(format!("loadgen-{}-{:08x}", std::process::id(), rand::random::<u32>()));
        std::fs::create_dir_all(&path)?;
        Ok(TemporaryDirectory(path))
    }
}

impl Drop for TemporaryDirectory {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            tracing::warn!(%error, path = %self.0.display(), "temporary files left behind");
        }
    }
}
