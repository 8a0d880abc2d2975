//! Owns the questions put to a router: is it ready, does its view of each cache equal the engine's, is its load zero
//! at rest, does a repeated prefix get faster without adding blocks. Never prints.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::DemoConfig;
use super::router::RouterProcess;
use crate::engine::{EngineHandle, EngineState};
use crate::net::client::{Client, Outgoing, Target};
use crate::net::exposition::samples;
use crate::prompt::TextModel;
use crate::run::driver::fetch;
use crate::run::reading::Reading;
use crate::seed;

const POLL_EVERY: Duration = Duration::from_millis(20);
/// Prompt length of the two requests of the seed check.
const SEED_CHECK_TOKENS: usize = 4000;

/// A router's HTTP side.
pub struct Router {
    target: Target,
}

/// Two requests with one long prefix, the second after the first.
#[derive(Clone, Copy, Debug)]
pub struct SeedCheck {
    pub first_ttft_ms: f64,
    pub second_ttft_ms: f64,
    /// The router's `block_count` summed over workers, after each request.
    pub blocks_after_first: u64,
    pub blocks_after_second: u64,
}

impl SeedCheck {
    /// What is wrong, if anything: the second request must be faster and add nothing.
    pub fn problem(&self) -> Option<String> {
        if self.blocks_after_first == 0 || self.blocks_after_second != self.blocks_after_first {
            let (first, second) = (self.blocks_after_first, self.blocks_after_second);
            return Some(format!("seed check: block_count {first} after the first request, {second} after the second"));
        }
        (self.second_ttft_ms >= self.first_ttft_ms).then(|| {
            format!(
                "seed check: TTFT {:.0} ms, then {:.0} ms with the prefix cached",
                self.first_ttft_ms, self.second_ttft_ms
            )
        })
    }
}

impl Router {
    pub fn new(url: &str) -> Result<Router> {
        Ok(Router { target: Target::parse(url)? })
    }

    /// Waits for `/ready` and for every worker to be listed.
    pub async fn wait_ready(&self, process: &mut RouterProcess, workers: usize, timeout: Duration) -> Result<()> {
        let deadline = Instant::now() + timeout;
        loop {
            process.check_alive()?;
            if let Ok((200, _)) = fetch(self.target.clone(), "/ready").await
                && let Ok(listed) = self.json("/v1/workers").await
                && listed["workers"].as_array().is_some_and(|list| list.len() == workers)
            {
                return Ok(());
            }
            if Instant::now() > deadline {
                bail!("the router was not ready within {timeout:?}; its last words:\n{}", process.last_words());
            }
            monoio::time::sleep(POLL_EVERY).await;
        }
    }

    async fn json(&self, path: &str) -> Result<Value> {
        let (status, body) = fetch(self.target.clone(), path).await?;
        if status != 200 {
            bail!("GET {path} answered {status}");
        }
        serde_json::from_slice(&body).with_context(|| format!("GET {path}"))
    }

    /// Blocks that the router believes a worker to hold.
    async fn block_count(&self, worker: &str) -> Result<u64> {
        let view = self.json(&format!("/v1/admin/cache-view/{worker}")).await?;
        view["block_count"].as_u64().with_context(|| format!("cache view without block_count: {view}"))
    }

    /// Waits for engines to be idle and for the router to agree with them; says what still differs at the deadline.
    pub async fn check_rest(&self, engines: &[EngineHandle], views: bool, timeout: Duration) -> Result<Vec<String>> {
        let deadline = Instant::now() + timeout;
        loop {
            let problems = self.differences(engines, views).await?;
            if problems.is_empty() || Instant::now() > deadline {
                return Ok(problems);
            }
            monoio::time::sleep(POLL_EVERY).await;
        }
    }

    async fn differences(&self, engines: &[EngineHandle], views: bool) -> Result<Vec<String>> {
        let mut problems = Vec::new();
        for engine in engines {
            let (worker, state) = (engine.worker_id(), engine.state());
            if !EngineState::is_idle(&state) {
                problems.push(format!("{worker} is not idle after the run: {state:?}"));
            } else if views {
                let (seen, held) = (self.block_count(&worker).await?, state.blocks_resident() as u64);
                if seen != held {
                    problems.push(format!("{worker} holds {held} blocks, the router's view has {seen}"));
                }
            }
        }
        let (status, metrics) = fetch(self.target.clone(), "/metrics").await?;
        let metrics = String::from_utf8_lossy(&metrics);
        if status != 200 {
            problems.push(format!("GET /metrics answered {status}"));
        }
        for name in ["infera_router_inflight_requests", "infera_router_active_blocks"] {
            match gauge_sum(&metrics, name) {
                Some(0.0) => {}
                Some(sum) => problems.push(format!("{name} is {sum} at rest")),
                None => problems.push(format!("/metrics has no {name}")),
            }
        }
        Ok(problems)
    }

    /// Sends one long prompt twice.
    pub async fn seed_check(
        &self,
        config: &DemoConfig,
        engines: &[EngineHandle],
        text: &TextModel,
        timeout: Duration,
    ) -> Result<SeedCheck> {
        let body = seed_check_body(config, text)?;
        let first_ttft_ms = self.ttft_ms(&body).await?;
        let blocks_after_first = self.blocks_at_rest(engines, timeout).await?;
        let second_ttft_ms = self.ttft_ms(&body).await?;
        let blocks_after_second = self.blocks_at_rest(engines, timeout).await?;
        Ok(SeedCheck { first_ttft_ms, second_ttft_ms, blocks_after_first, blocks_after_second })
    }

    async fn blocks_at_rest(&self, engines: &[EngineHandle], timeout: Duration) -> Result<u64> {
        let problems = self.check_rest(engines, true, timeout).await?;
        if let Some(problem) = problems.first() {
            bail!("seed check: {problem}");
        }
        let mut sum = 0;
        for engine in engines {
            sum += self.block_count(&engine.worker_id()).await?;
        }
        Ok(sum)
    }

    async fn ttft_ms(&self, body: &Value) -> Result<f64> {
        let (headers, payload) = ("content-type: application/json\r\n", body.to_string());
        let outgoing = Outgoing { method: "POST", path: "/v1/chat/completions", headers, payload: payload.as_bytes() };
        let reading = Rc::new(RefCell::new(Reading::new(true, None)));
        let client = Client::new(self.target.clone())?;
        let start = Instant::now();
        let outcome = client.request(outgoing, reading.clone()).await;
        client.close().await;
        let head = outcome.map_err(|error| anyhow::anyhow!("seed check: {error:?}"))?;
        let reading = reading.take();
        match reading.first {
            Some(first) if reading.answer.complete => Ok((first - start).as_secs_f64() * 1000.0),
            _ => bail!("seed check: status {}, no complete stream", head.status),
        }
    }
}

/// A long prompt that leaves room for the answer in its last, partial block: then nothing that the second request
/// computes is new.
fn seed_check_body(config: &DemoConfig, text: &TextModel) -> Result<Value> {
    const ANSWER_TOKENS: usize = 4;
    let block_size = config.engine(0).block_size;
    let mut draw = seed::generator(config.seed, "seed check");
    let mut prompt = String::new();
    let words = crate::words::words();
    let mut tokens = 0;
    for count in SEED_CHECK_TOKENS.. {
        while tokens < count {
            prompt.push_str(words[rand::Rng::random_range(&mut draw, 0..words.len())]);
            prompt.push(' ');
            tokens += 1;
        }
        let body = json!({"model": super::MODEL, "messages": [{"role": "user", "content": prompt}], "stream": true,
            "max_tokens": ANSWER_TOKENS, "temperature": 0});
        let filled = text.chat(&body)?.1.len() % block_size;
        if filled > 0 && filled + ANSWER_TOKENS < block_size {
            return Ok(body);
        }
    }
    unreachable!("one of any {block_size} lengths in a row fits")
}

/// Sum of a gauge's samples, `None` when there is none.
fn gauge_sum(metrics: &str, name: &str) -> Option<f64> {
    let values = samples(metrics).filter(|sample| sample.name == name).map(|sample| sample.value);
    values.fold(None, |sum, value| Some(sum.unwrap_or(0.0) + value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gauges_are_summed_by_exact_name() {
        let text = "# TYPE a gauge\na{target=\"x y\"} 2\na{target=\"z\"} 1.5\na_b{target=\"x\"} 9\n";
        assert_eq!(gauge_sum(text, "a"), Some(3.5));
        assert_eq!(gauge_sum("a 0\n", "a"), Some(0.0));
        assert_eq!(gauge_sum(text, "b"), None);
    }

    #[test]
    fn the_seed_check_demands_speed_and_a_flat_count() {
        let good =
            SeedCheck { first_ttft_ms: 400.0, second_ttft_ms: 20.0, blocks_after_first: 250, blocks_after_second: 250 };
        assert_eq!(good.problem(), None);
        assert!(SeedCheck { second_ttft_ms: 410.0, ..good }.problem().unwrap().contains("TTFT"));
        assert!(SeedCheck { blocks_after_second: 500, ..good }.problem().unwrap().contains("block_count"));
        let blind = SeedCheck { blocks_after_first: 0, blocks_after_second: 0, ..good };
        assert!(blind.problem().is_some());
    }
}
