//! Owns the demonstration of image affinity: rounds over the same images through prefill and decode engines, under
//! round-robin and kv-aware. A repeat of an image is to return to the prefill engine that holds it, and different images
//! are to spread. Never decides what an image costs (see [`crate::prompt::IMAGE_TOKENS`]).

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_64;

use super::check::Router;
use super::pair::PairShape;
use super::router::RouterProcess;
use super::{DemoConfig, MODEL, POLICIES, REST_TIMEOUT, START_TIMEOUT, TemporaryDirectory, stop};
use crate::engine::disagg::{Disagg, PdProtocol, PdRole};
use crate::engine::{Engine, EngineConfig, EngineHandle};
use crate::net::runtime::block_on;
use crate::plan::{Images, Recipe, image_name};
use crate::prompt::TextModel;
use crate::run::config::{RunConfig, RunResult};
use crate::run::pace::Pace;
use crate::run::workload::Workload;
use crate::run::{driver, image_reference};

/// Bytes of an image's reference.
const IMAGE_BYTES: usize = 20_000;
const QUESTION_TOKENS: usize = 24;

/// What one policy did.
#[derive(Debug)]
pub struct ImageRun {
    pub policy: &'static str,
    pub result: RunResult,
    /// Requests of each image per prefill engine.
    pub by_image: Vec<Vec<u64>>,
    /// Mean TTFT of the first round and of all later ones.
    pub first_ttft_ms: f64,
    pub repeat_ttft_ms: f64,
    pub problems: Vec<String>,
}

/// Twelve images, five times each.
pub fn tuned(config: &mut DemoConfig, shape: PairShape) {
    config.engines = shape.engines();
    config.groups = 12;
    config.requests = 60;
    config.rate = 6.0;
    config.output_tokens = 16;
    config.blocks_total = 4096;
}

/// Runs both policies, each with a fresh router and fresh engines.
pub fn run(
    config: &DemoConfig,
    shape: PairShape,
    protocol: PdProtocol,
    mut say: impl FnMut(&str),
) -> Result<Vec<ImageRun>> {
    ensure!(config.groups > 0 && config.requests > config.groups, "more requests than images: else nothing repeats");
    ensure!(protocol != PdProtocol::AtomMooncake, "the demonstration chats, and atom-mooncake serves completions only");
    let files = TemporaryDirectory::create()?;
    crate::prompt::write_shipped_tokenizer(&files.0.join("tokenizer"))?;
    let text = Arc::new(TextModel::shipped()?);
    let mut runs = Vec::new();
    for policy in POLICIES {
        if config.interrupt.load(Ordering::Relaxed) {
            bail!("interrupted");
        }
        say(&format!("{policy}: {} engines, {} images, {} requests", shape.engines(), config.groups, config.requests));
        let engine = |number: usize| {
            let role = if number < shape.prefill { PdRole::Prefill } else { PdRole::Decode };
            EngineConfig { disagg: Some(Disagg::new(role, protocol)), ..config.engine(number) }
        };
        let engines = Engine::start_group((0..shape.engines()).map(engine).collect(), text.clone())?;
        runs.push(one(config, shape, policy, engines, &files)?);
    }
    Ok(runs)
}

fn workload(config: &DemoConfig) -> Workload {
    let images = Images { count: config.groups, bytes: IMAGE_BYTES, new_share: 0.0 };
    let plain = Recipe::plain("images", QUESTION_TOKENS as f64, config.output_tokens as f64);
    Workload::generated(Recipe { images: Some(images), ..plain }, config.requests, MODEL, config.seed)
}

fn one(
    config: &DemoConfig,
    shape: PairShape,
    policy: &'static str,
    engines: Vec<EngineHandle>,
    files: &TemporaryDirectory,
) -> Result<ImageRun> {
    let records: Vec<Value> = engines.iter().map(EngineHandle::registration).collect();
    let workers = files.0.join(format!("{policy}.json"));
    std::fs::write(&workers, Value::from(records).to_string()).context("writing the workers file")?;
    let mut arguments: Vec<String> = ["--router-policy", policy, "--shards", "1"].map(str::to_string).into();
    arguments.extend(["--router-tokenizer-path".into(), files.0.join("tokenizer").display().to_string()]);
    arguments.extend(["--workers-file".into(), workers.display().to_string()]);
    arguments.extend(config.router_arguments.iter().cloned());
    let mut process = RouterProcess::start(&config.router, &arguments, &files.0.join(format!("{policy}.log")))?;
    let router = Router::new(&process.url())?;
    block_on(router.wait_ready(&mut process, engines.len(), START_TIMEOUT))??;
    let workload = workload(config);
    let load = RunConfig {
        interrupt: config.interrupt.clone(),
        progress: config.progress,
        ..RunConfig::new(&process.url(), workload.clone(), Pace::Open { rate: config.rate })
    };
    // When the second round begins, in seconds since the start.
    let arrivals = driver::arrivals(&load, &workload.plan()).unwrap_or_default();
    let second_round = arrivals.get(config.groups).copied().unwrap_or(f64::INFINITY);
    let result = driver::execute(load)?;
    let mut problems: Vec<String> =
        result.record.errors.iter().map(|(failure, count)| format!("{count} x {}", failure.name())).collect();
    if !result.interrupted {
        match block_on(router.check_rest(&engines, false, REST_TIMEOUT))? {
            Ok(found) => problems.extend(found),
            Err(error) => problems.push(format!("{error:#}")),
        }
    }
    let by_image = by_image(&workload, config.groups, &engines[..shape.prefill]);
    if policy == "kv-aware" && !result.interrupted {
        problems.extend(verdict(&by_image));
    }
    problems.extend(process.stop());
    stop(engines);
    let mean = |is_repeat: bool| {
        let series = result.record.rows.ttft_series().filter(|(at, _)| (*at >= second_round) == is_repeat);
        let (sum, count) = series.fold((0.0, 0u32), |(sum, count), (_, ttft_ms)| (sum + ttft_ms, count + 1));
        sum / f64::from(count.max(1))
    };
    let (first_ttft_ms, repeat_ttft_ms) = (mean(false), mean(true));
    Ok(ImageRun { policy, result, by_image, first_ttft_ms, repeat_ttft_ms, problems })
}

fn by_image(workload: &Workload, images: usize, prefill: &[EngineHandle]) -> Vec<Vec<u64>> {
    let counts: Vec<_> = prefill.iter().map(|engine| engine.state().images).collect();
    (0..images)
        .map(|image| image_name(workload.seed, image as u64))
        .map(|name| xxh3_64(image_reference(name, IMAGE_BYTES).as_bytes()))
        .map(|key| counts.iter().map(|counts| counts.get(&key).copied().unwrap_or(0)).collect())
        .collect()
}

/// What image affinity did wrong: an image on two prefill engines, or one engine with more than twice its share of the
/// images.
fn verdict(by_image: &[Vec<u64>]) -> Vec<String> {
    let mut problems = Vec::new();
    let moved = by_image.iter().filter(|counts| counts.iter().filter(|count| **count > 0).count() > 1).count();
    if moved > 0 {
        problems.push(format!("{moved} images did not return to the engine that held them"));
    }
    let homes = homes(by_image);
    let workers = by_image.first().map_or(0, Vec::len);
    let most = homes.values().copied().max().unwrap_or(0);
    if most * workers > 2 * by_image.len().max(workers) {
        problems.push(format!("one prefill engine holds {most} of {} images", by_image.len()));
    }
    problems
}

/// Images per prefill engine, by where most of an image's requests went.
fn homes(by_image: &[Vec<u64>]) -> HashMap<usize, usize> {
    let mut homes = HashMap::new();
    for counts in by_image {
        if let Some((home, _)) = counts.iter().enumerate().max_by_key(|(_, count)| **count) {
            *homes.entry(home).or_default() += 1;
        }
    }
    homes
}

/// Requests of each image per prefill engine, and what that did to the time to first token.
pub fn table(runs: &[ImageRun]) -> String {
    let mut out = String::new();
    for run in runs {
        let workers = run.by_image.first().map_or(0, Vec::len);
        let engines: String = (0..workers).map(|worker| format!("{:>11}", format!("prefill {worker}"))).collect();
        out.push_str(&format!("{}, requests per prefill engine\n{:<8}{engines}\n", run.policy, "image"));
        for (image, counts) in run.by_image.iter().enumerate() {
            let cells: String = counts.iter().map(|count| format!("{count:>11}")).collect();
            out.push_str(&format!("{image:<8}{cells}\n"));
        }
        let alone = run.by_image.iter().filter(|counts| counts.iter().filter(|count| **count > 0).count() <= 1).count();
        let homes = homes(&run.by_image);
        let per_worker: Vec<usize> = (0..workers).map(|worker| homes.get(&worker).copied().unwrap_or(0)).collect();
        out.push_str(&format!(
            "{alone} of {} images stayed on one engine; images per engine {per_worker:?}; TTFT {:.0} ms at first sight, \
             {:.0} ms for repeats\n\n",
            run.by_image.len(),
            run.first_ttft_ms,
            run.repeat_ttft_ms
        ));
    }
    let has_one_engine = runs.iter().all(|run| run.by_image.first().is_some_and(|counts| counts.len() == 1));
    if has_one_engine {
        out.push_str("One prefill engine holds every image: --pd 3p1d shows how images spread.\n");
    }
    if let Some(run) = runs.iter().find(|run| run.policy == "kv-aware") {
        out.push_str(match (run.problems.is_empty(), has_one_engine) {
            (true, false) => {
                "kv-aware: repeats returned to the engine that held their image, different images spread.\n"
            }
            (true, true) => "kv-aware: repeats returned to the engine that held their image.\n",
            (false, _) => "kv-aware: not as it should be, see the problems.\n",
        });
    }
    out
}

/// The file of `--json`.
pub fn json(config: &DemoConfig, protocol: PdProtocol, runs: &[ImageRun]) -> Value {
    let run = |run: &ImageRun| {
        json!({"policy": run.policy, "requests_by_image_and_prefill": run.by_image, "first_ttft_ms": run.first_ttft_ms,
            "repeat_ttft_ms": run.repeat_ttft_ms, "hit_rate": run.result.record.hit_rate(),
            "errors": run.result.record.errors_total(), "problems": run.problems})
    };
    json!({"schema": "loadgen.demo.images/1", "protocol": protocol.as_str(),
        "runs": runs.iter().map(run).collect::<Vec<_>>(),
        "config": {"images": config.groups, "requests": config.requests, "rate": config.rate, "seed": config.seed}})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_on_two_engines_or_all_on_one_is_a_problem() {
        let good = vec![vec![5, 0], vec![0, 5], vec![5, 0]];
        assert_eq!(verdict(&good), Vec::<String>::new());
        assert!(verdict(&[vec![4, 1], vec![0, 5]])[0].contains("1 images did not return"));
        let heaped = vec![vec![5, 0, 0]; 6];
        assert!(verdict(&heaped)[0].contains("holds 6 of 6"));
        assert_eq!(verdict(&[vec![5], vec![5]]), Vec::<String>::new(), "one engine has them all");
    }
}
