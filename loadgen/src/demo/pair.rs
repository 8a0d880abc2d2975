//! Owns the demonstration of prefill/decode disaggregation: the same seeded workload over mixed engines and over as many
//! engines split into prefill and decode ones, both routed kv-aware. Never decides how results look.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::check::Router;
use super::router::RouterProcess;
use super::{DemoConfig, REST_TIMEOUT, START_TIMEOUT, TemporaryDirectory, expected_answers, load, stop};
use crate::engine::disagg::{Disagg, PdProtocol, PdRole, TransferCounts};
use crate::engine::{Engine, EngineConfig, EngineHandle};
use crate::net::runtime::block_on;
use crate::prompt::TextModel;
use crate::run::config::RunResult;
use crate::run::driver;
use crate::run::report::figures;

/// How many engines do what, as in `1p2d`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PairShape {
    pub prefill: usize,
    pub decode: usize,
}

impl std::str::FromStr for PairShape {
    type Err = String;

    fn from_str(text: &str) -> Result<PairShape, String> {
        let number = |text: &str| text.parse().ok().filter(|number| (1..=32).contains(number));
        let parts = text.strip_suffix('d').and_then(|text| text.split_once('p'));
        match parts.map(|(prefill, decode)| (number(prefill), number(decode))) {
            Some((Some(prefill), Some(decode))) => Ok(PairShape { prefill, decode }),
            _ => Err("expected a shape such as 1p2d".into()),
        }
    }
}

impl PairShape {
    pub fn engines(self) -> usize {
        self.prefill + self.decode
    }

    pub fn name(self) -> String {
        format!("{}p{}d", self.prefill, self.decode)
    }
}

/// What one arrangement of engines did.
#[derive(Debug)]
pub struct ShapeRun {
    /// `mixed` or the shape's name.
    pub name: String,
    pub result: RunResult,
    /// Transfers, summed over engines.
    pub transfers: TransferCounts,
    pub problems: Vec<String>,
}

/// Answers long enough that their pace can be seen, and prompts whose computing disturbs it.
pub fn tuned(config: &mut DemoConfig, shape: PairShape) {
    config.engines = shape.engines();
    config.groups = 8;
    config.blocks_total = 4096;
    config.rate = 6.0;
    config.requests = 120;
    config.output_tokens = 128;
}

/// Runs both arrangements, each with a fresh router and fresh engines.
pub fn run(
    config: &DemoConfig,
    shape: PairShape,
    protocol: PdProtocol,
    mut say: impl FnMut(&str),
) -> Result<Vec<ShapeRun>> {
    ensure!(config.requests > 0, "at least one request");
    ensure!(protocol != PdProtocol::AtomMooncake, "the demonstration chats, and atom-mooncake serves completions only");
    let files = TemporaryDirectory::create()?;
    crate::prompt::write_shipped_tokenizer(&files.0.join("tokenizer"))?;
    let text = Arc::new(TextModel::shipped()?);
    let expected = Arc::new(expected_answers(&config.workload(), &text)?);
    let half = |role| Some(Disagg::new(role, protocol));
    let split = (0..shape.engines()).map(|at| half(if at < shape.prefill { PdRole::Prefill } else { PdRole::Decode }));
    let arrangements = [("mixed".to_string(), vec![None; shape.engines()]), (shape.name(), split.collect())];
    let mut runs = Vec::new();
    for (name, roles) in arrangements {
        if config.interrupt.load(Ordering::Relaxed) {
            bail!("interrupted");
        }
        say(&format!("{name}: {} engines, {} requests at {}/s", roles.len(), config.requests, config.rate));
        let engine = |(number, disagg)| EngineConfig { disagg, ..config.engine(number) };
        let engines = Engine::start_group(roles.into_iter().enumerate().map(engine).collect(), text.clone())?;
        runs.push(run_arrangement(config, name, engines, &files, expected.clone())?);
    }
    Ok(runs)
}

fn run_arrangement(
    config: &DemoConfig,
    name: String,
    engines: Vec<EngineHandle>,
    files: &TemporaryDirectory,
    expected: Arc<Vec<String>>,
) -> Result<ShapeRun> {
    let records: Vec<Value> = engines.iter().map(EngineHandle::registration).collect();
    let workers = files.0.join(format!("{name}.json"));
    std::fs::write(&workers, Value::from(records).to_string()).context("writing the workers file")?;
    let mut arguments: Vec<String> = ["--router-policy", "kv-aware", "--shards", "1"].map(str::to_string).into();
    arguments.extend(["--router-tokenizer-path".into(), files.0.join("tokenizer").display().to_string()]);
    arguments.extend(["--workers-file".into(), workers.display().to_string()]);
    arguments.extend(config.router_arguments.iter().cloned());
    let mut process = RouterProcess::start(&config.router, &arguments, &files.0.join(format!("{name}.log")))?;
    let router = Router::new(&process.url())?;
    let mut problems = Vec::new();
    block_on(router.wait_ready(&mut process, engines.len(), START_TIMEOUT))??;
    for engine in engines.iter().filter(|engine| !engine.wait_for_subscriber(START_TIMEOUT)) {
        problems.push(format!("the router never subscribed to the events of {}", engine.worker_id()));
    }
    let result = driver::execute(load(config, &process, expected))?;
    problems.extend(result.record.errors.iter().map(|(failure, count)| format!("{count} x {}", failure.name())));
    if !result.interrupted {
        match block_on(router.check_rest(&engines, true, REST_TIMEOUT))? {
            Ok(found) => problems.extend(found),
            Err(error) => problems.push(format!("{error:#}")),
        }
    }
    let transfers =
        engines.iter().map(|engine| engine.state().transfers).fold(TransferCounts::default(), TransferCounts::plus);
    if transfers.held + transfers.decode_waiting > 0 || transfers.stranded + transfers.misdirected > 0 {
        problems.push(format!("transfers are left over: {transfers:?}"));
    }
    problems.extend(process.stop());
    stop(engines);
    Ok(ShapeRun { name, result, transfers, problems })
}

/// Time to first token and the gaps between tokens, side by side.
pub fn table(runs: &[ShapeRun]) -> String {
    let mut out = format!(
        "{:<9}{:>9}{:>8}{:>10}{:>12}{:>11}{:>11}{:>11}{:>11}{:>11}\n",
        "engines",
        "requests",
        "errors",
        "hit rate",
        "TTFT mean",
        "TTFT p99",
        "gap p50",
        "gap p99",
        "gap max",
        "transfers"
    );
    for run in runs {
        let record = &run.result.record;
        out.push_str(&format!(
            "{:<9}{:>9}{:>8}{:>8.1} %{:>9.1} ms{:>8.1} ms{:>8.1} ms{:>8.1} ms{:>8.1} ms{:>11}\n",
            run.name,
            record.requests,
            record.errors_total(),
            record.hit_rate().unwrap_or(0.0) * 100.0,
            record.ttft.mean_ms(),
            record.ttft.quantile_ms(0.99),
            record.inter_token.quantile_ms(0.5),
            record.inter_token.quantile_ms(0.99),
            record.inter_token.max_ms(),
            run.transfers.delivered,
        ));
    }
    out
}

/// The file of `--json`.
pub fn json(config: &DemoConfig, protocol: PdProtocol, runs: &[ShapeRun]) -> Value {
    let run = |run: &ShapeRun| {
        let mut value = serde_json::json!(figures(&run.result));
        value["engines"] = serde_json::json!(run.name);
        value["transfers"] = serde_json::json!(run.transfers);
        value["problems"] = serde_json::json!(run.problems);
        value
    };
    serde_json::json!({
        "schema": "loadgen.demo.pair/2", "protocol": protocol.as_str(), "runs": runs.iter().map(run).collect::<Vec<_>>(),
        "config": {"requests": config.requests, "rate": config.rate, "groups": config.groups,
            "prefix_tokens": config.prefix_tokens, "suffix_tokens": config.suffix_tokens,
            "output_tokens": config.output_tokens, "blocks_per_engine": config.blocks_total, "seed": config.seed},
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_written_as_operators_write_them() {
        assert_eq!("1p2d".parse(), Ok(PairShape { prefill: 1, decode: 2 }));
        assert_eq!("4p12d".parse::<PairShape>().map(PairShape::engines), Ok(16));
        for wrong in ["", "1p", "2d", "0p1d", "1p0d", "1d2p", "1p2", "p1d", "99p1d"] {
            assert!(wrong.parse::<PairShape>().is_err(), "{wrong}");
        }
    }
}
