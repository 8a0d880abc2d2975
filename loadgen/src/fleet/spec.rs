//! Owns the description of a fleet: a TOML file, or the same in one line. Never starts anything.

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use serde::Deserialize;

use super::schedule::{Action, actions};
use crate::engine::EngineConfig;
use crate::engine::disagg::{Disagg, PdProtocol, PdRole};
use crate::engine::faults::Faults;
use crate::engine::speed::{Speed, SpeedArguments};

/// Most engines of one fleet.
const ENGINES_MAX: usize = 4096;

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FleetSpec {
    #[serde(default = "default_model")]
    pub model: String,
    #[serde(default = "default_seed")]
    pub seed: u64,
    /// Groups of engines that are alike.
    pub engines: Vec<Group>,
}

fn default_model() -> String {
    EngineConfig::default().model
}

fn default_seed() -> u64 {
    EngineConfig::default().seed
}

/// Engines that are alike. What is absent is as with `loadgen engine`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Group {
    /// 1 if absent.
    pub count: Option<usize>,
    /// `mixed` (if absent), `prefill`, `decode`.
    pub role: Option<String>,
    /// Of prefill and decode engines.
    pub protocol: Option<String>,
    /// `vllm`, `vllm-array`, `sglang`.
    pub style: Option<String>,
    /// First HTTP port, the next engine takes the next; free ones if absent.
    pub port: Option<u16>,
    pub dp_size: Option<u32>,
    pub block_size: Option<usize>,
    pub blocks: Option<usize>,
    /// Blocks of host memory; none if absent.
    pub host_blocks: Option<usize>,
    pub prefix_cache: Option<bool>,
    pub context_length: Option<usize>,
    pub answer_tokens: Option<usize>,
    /// How KV events travel: `zmq` (if absent), or `none`, which routers are told.
    pub events: Option<String>,
    pub byte_hashes: Option<bool>,
    pub step_base_ms: Option<f64>,
    pub prefill_us_per_token: Option<f64>,
    pub decode_us_per_sequence: Option<f64>,
    pub decode_us_per_kilotoken: Option<f64>,
    pub load_us_per_token: Option<f64>,
    pub jitter: Option<f64>,
    pub max_batched_tokens: Option<usize>,
    pub max_sequences: Option<usize>,
    /// Share of requests answered with 500.
    pub fail_rate: Option<f64>,
    /// See [`actions`].
    #[serde(default)]
    pub failures: Vec<String>,
}

impl FleetSpec {
    pub fn from_toml(text: &str) -> Result<FleetSpec> {
        toml::from_str(text).context("the fleet's description")
    }

    /// `4 mixed blocks=4096 style=sglang; 2 prefill protocol=vllm-nixl failures=kill@30+10:0,freeze@5+1`: groups apart by `;`,
    /// each a count, a role, and members of a TOML group.
    pub fn from_line(line: &str) -> Result<FleetSpec> {
        let mut engines = Vec::new();
        for group in line.split(';').map(str::trim).filter(|group| !group.is_empty()) {
            let mut text = String::new();
            for word in group.split_whitespace() {
                let (key, value) = match word.split_once('=') {
                    Some(pair) => pair,
                    None if word.bytes().all(|byte| byte.is_ascii_digit()) => ("count", word),
                    None => ("role", word),
                };
                text += &match key {
                    "failures" => format!("failures = {:?}\n", value.split(',').collect::<Vec<_>>()),
                    // A number or a truth value stands for itself, anything else is text.
                    _ if value.parse::<f64>().is_ok() || matches!(value, "true" | "false") => {
                        format!("{key} = {value}\n")
                    }
                    _ => format!("{key} = {value:?}\n"),
                };
            }
            engines.push(toml::from_str(&text).with_context(|| format!("`{group}`"))?);
        }
        Ok(FleetSpec { model: default_model(), seed: default_seed(), engines })
    }

    /// One configuration for each engine, and whether its event endpoint is to be told.
    pub fn configs(&self) -> Result<(Vec<EngineConfig>, Vec<bool>)> {
        let (mut configs, mut announcing) = (Vec::new(), Vec::new());
        for group in &self.engines {
            for number in 0..group.count() {
                configs.push(group.config(&self.model, number, self.seed.wrapping_add(configs.len() as u64))?);
                announcing.push(group.is_announcing()?);
            }
            ensure!(configs.len() <= ENGINES_MAX, "at most {ENGINES_MAX} engines");
        }
        Ok((configs, announcing))
    }

    /// All failures in order of time.
    pub fn plan(&self) -> Result<Vec<Action>> {
        let (mut plan, mut first) = (Vec::new(), 0);
        for group in &self.engines {
            for failure in &group.failures {
                plan.extend(actions(failure, first, group.count())?);
            }
            first += group.count();
        }
        plan.sort_by_key(|action: &Action| action.at);
        Ok(plan)
    }
}

impl Group {
    fn count(&self) -> usize {
        self.count.unwrap_or(1)
    }

    fn is_announcing(&self) -> Result<bool> {
        match self.events.as_deref() {
            None | Some("zmq") => Ok(true),
            Some("none") => Ok(false),
            Some(other) => anyhow::bail!("events `{other}` is neither zmq nor none"),
        }
    }

    fn config(&self, model: &str, number: usize, seed: u64) -> Result<EngineConfig> {
        let usual = EngineConfig::default();
        let port = match self.port {
            Some(first) => u16::try_from(usize::from(first) + number).context("a port is at most 65535")?,
            None => 0,
        };
        ensure!(
            self.host_blocks.is_none() || self.prefix_cache != Some(false),
            "host_blocks are of no use without prefix_cache"
        );
        let dp_size = self.dp_size.unwrap_or(usual.dp_size);
        ensure!((1..=256).contains(&dp_size), "dp_size is from 1 to 256");
        ensure!(self.block_size != Some(0) && self.blocks != Some(0), "block_size and blocks are at least 1");
        Ok(EngineConfig {
            model: model.to_owned(),
            style: named(self.style.as_deref(), usual.style)?,
            port,
            byte_hashes: self.byte_hashes.unwrap_or(usual.byte_hashes),
            dp_size,
            block_size: self.block_size.unwrap_or(usual.block_size),
            blocks_total: self.blocks.unwrap_or(usual.blocks_total),
            host_blocks: self.host_blocks.unwrap_or(usual.host_blocks),
            prefix_cache: self.prefix_cache.unwrap_or(usual.prefix_cache),
            context_length: self.context_length.unwrap_or(usual.context_length),
            answer_tokens: self.answer_tokens.unwrap_or(usual.answer_tokens),
            speed: self.speed()?,
            seed,
            faults: Faults { fail_rate: self.fail_rate.unwrap_or(0.0), ..Faults::default() },
            disagg: self.disagg()?,
            ..usual
        })
    }

    fn speed(&self) -> Result<Speed> {
        let usual = SpeedArguments::default();
        SpeedArguments {
            step_base_ms: self.step_base_ms.unwrap_or(usual.step_base_ms),
            prefill_us_per_token: self.prefill_us_per_token.unwrap_or(usual.prefill_us_per_token),
            decode_us_per_sequence: self.decode_us_per_sequence.unwrap_or(usual.decode_us_per_sequence),
            decode_us_per_kilotoken: self.decode_us_per_kilotoken.unwrap_or(usual.decode_us_per_kilotoken),
            load_us_per_token: self.load_us_per_token.unwrap_or(usual.load_us_per_token),
            jitter: self.jitter.unwrap_or(usual.jitter),
            max_batched_tokens: self.max_batched_tokens.unwrap_or(usual.max_batched_tokens),
            max_sequences: self.max_sequences.unwrap_or(usual.max_sequences),
        }
        .speed()
    }

    fn disagg(&self) -> Result<Option<Disagg>> {
        let role = self.role.as_deref().unwrap_or("mixed");
        if role == "mixed" {
            ensure!(self.protocol.is_none(), "a mixed engine has no protocol");
            return Ok(None);
        }
        let protocol = self.protocol.as_deref().with_context(|| format!("a {role} engine has a protocol"))?;
        Ok(Some(Disagg::new(parse::<PdRole>(role)?, parse::<PdProtocol>(protocol)?)))
    }
}

fn named<T: ValueEnum>(name: Option<&str>, usual: T) -> Result<T> {
    name.map_or(Ok(usual), parse)
}

fn parse<T: ValueEnum>(name: &str) -> Result<T> {
    T::from_str(name, false).map_err(|_| {
        let known: Vec<String> =
            T::value_variants().iter().filter_map(|it| Some(it.to_possible_value()?.get_name().to_owned())).collect();
        anyhow::anyhow!("`{name}` is none of {}", known.join(", "))
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::engine::events::EngineStyle;

    #[test]
    fn a_file_and_a_line_say_the_same() {
        let file = FleetSpec::from_toml(
            r#"
            [[engines]]
            count = 2
            style = "sglang"
            blocks = 512
            host_blocks = 1024
            prefill_us_per_token = 50.5
            failures = ["kill@30+10:1", "freeze@5+1"]

            [[engines]]
            role = "decode"
            protocol = "vllm-nixl"
            prefix_cache = false
            events = "none"
            "#,
        )
        .unwrap();
        let line = FleetSpec::from_line(
            "2 mixed style=sglang blocks=512 host_blocks=1024 prefill_us_per_token=50.5 failures=kill@30+10:1,freeze@5+1; \
             decode protocol=vllm-nixl prefix_cache=false events=none",
        )
        .unwrap();
        for spec in [&file, &line] {
            let (configs, announcing) = spec.configs().unwrap();
            assert_eq!((configs.len(), announcing.as_slice()), (3, &[true, true, false][..]));
            assert_eq!((configs[1].style, configs[1].blocks_total), (EngineStyle::Sglang, 512));
            assert_eq!((configs[1].host_blocks, configs[2].host_blocks), (1024, 0));
            assert_eq!(configs[0].speed.prefill_per_token, Duration::from_nanos(50_500));
            let decode = configs[2].disagg.as_ref().unwrap();
            assert_eq!((decode.role, decode.protocol), (PdRole::Decode, PdProtocol::VllmNixl));
            assert!(!configs[2].prefix_cache && configs[0].seed != configs[1].seed);
        }
        assert_eq!(file.plan().unwrap(), line.plan().unwrap());
        assert!(file.plan().unwrap().is_sorted_by_key(|action| action.at));
    }

    #[test]
    fn what_cannot_be_is_said() {
        let refused = |line: &str, text: &str| {
            let error = FleetSpec::from_line(line).and_then(|spec| spec.configs().map(drop)).unwrap_err();
            assert!(format!("{error:#}").contains(text), "{line}: {error:#}");
        };
        refused("2 prefill", "has a protocol");
        refused("mixed protocol=vllm-nixl", "no protocol");
        refused("style=tgi", "vllm-array");
        refused("blocks=many", "blocks");
        refused("blokcs=9", "blokcs");
        refused("events=nats", "neither");
        refused("dp_size=0", "dp_size");
        refused("jitter=2", "jitter");
        refused("step_base_ms=-1", "step-base-ms");
        refused("host_blocks=9 prefix_cache=false", "prefix_cache");
    }
}
