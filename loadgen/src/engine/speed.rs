//! Owns how fast an engine is and how much it does at once, and the flags that say so. Never schedules.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

/// Speeds and limits of one rank. All durations are those of the formula in [`super::scheduler`].
#[derive(Clone, Debug, PartialEq)]
pub struct Speed {
    pub step_base: Duration,
    pub prefill_per_token: Duration,
    pub decode_per_sequence: Duration,
    pub decode_per_kilotoken: Duration,
    /// From host memory to the device.
    pub load_per_token: Duration,
    /// Half width of the jitter as a share of the step, 0 to 1.
    pub jitter: f64,
    pub tokens_per_step_max: usize,
    pub sequences_max: usize,
}

impl Default for Speed {
    /// About an 8B model on one mid-range GPU: 10,000 prompt tokens a second, 8 ms per decode step; its 128 KiB of KV per
    /// token come from the host at 13 GB/s.
    fn default() -> Speed {
        Speed {
            step_base: Duration::from_millis(6),
            prefill_per_token: Duration::from_micros(100),
            decode_per_sequence: Duration::from_micros(150),
            decode_per_kilotoken: Duration::from_micros(40),
            load_per_token: Duration::from_micros(10),
            jitter: 0.05,
            tokens_per_step_max: 2048,
            sequences_max: 256,
        }
    }
}

/// A [`Speed`] as command lines spell it.
#[derive(Clone, Debug, clap::Args)]
pub struct SpeedArguments {
    #[arg(long, default_value_t = SpeedArguments::default().step_base_ms)]
    pub step_base_ms: f64,
    #[arg(long, default_value_t = SpeedArguments::default().prefill_us_per_token)]
    pub prefill_us_per_token: f64,
    #[arg(long, default_value_t = SpeedArguments::default().decode_us_per_sequence)]
    pub decode_us_per_sequence: f64,
    #[arg(long, default_value_t = SpeedArguments::default().decode_us_per_kilotoken)]
    pub decode_us_per_kilotoken: f64,
    /// From host memory to the device.
    #[arg(long, default_value_t = SpeedArguments::default().load_us_per_token)]
    pub load_us_per_token: f64,
    /// Half width of the step time's random share, 0 to 1.
    #[arg(long, default_value_t = SpeedArguments::default().jitter)]
    pub jitter: f64,
    /// Tokens per step: the prefill chunk.
    #[arg(long, default_value_t = SpeedArguments::default().max_batched_tokens)]
    pub max_batched_tokens: usize,
    #[arg(long, default_value_t = SpeedArguments::default().max_sequences)]
    pub max_sequences: usize,
}

impl Default for SpeedArguments {
    fn default() -> Self {
        let usual = Speed::default();
        let micros = |duration: Duration| duration.as_nanos() as f64 / 1e3;
        SpeedArguments {
            step_base_ms: micros(usual.step_base) / 1e3,
            prefill_us_per_token: micros(usual.prefill_per_token),
            decode_us_per_sequence: micros(usual.decode_per_sequence),
            decode_us_per_kilotoken: micros(usual.decode_per_kilotoken),
            load_us_per_token: micros(usual.load_per_token),
            jitter: usual.jitter,
            max_batched_tokens: usual.tokens_per_step_max,
            max_sequences: usual.sequences_max,
        }
    }
}

impl SpeedArguments {
    /// Refuses what is no duration, no share, or none at all.
    pub fn speed(&self) -> Result<Speed> {
        let micros = |name: &str, value: f64| {
            Duration::try_from_secs_f64(value / 1e6).with_context(|| format!("{name} is no duration: {value}"))
        };
        ensure!((0.0..=1.0).contains(&self.jitter), "jitter is from 0 to 1, not {}", self.jitter);
        ensure!(self.max_batched_tokens > 0 && self.max_sequences > 0, "a step has at least one token and sequence");
        Ok(Speed {
            step_base: micros("step-base-ms", self.step_base_ms * 1e3)?,
            prefill_per_token: micros("prefill-us-per-token", self.prefill_us_per_token)?,
            decode_per_sequence: micros("decode-us-per-sequence", self.decode_us_per_sequence)?,
            decode_per_kilotoken: micros("decode-us-per-kilotoken", self.decode_us_per_kilotoken)?,
            load_per_token: micros("load-us-per-token", self.load_us_per_token)?,
            jitter: self.jitter,
            tokens_per_step_max: self.max_batched_tokens,
            sequences_max: self.max_sequences,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_say_what_the_defaults_are_and_refuse_what_cannot_be() {
        assert_eq!(SpeedArguments::default().speed().unwrap(), Speed::default());
        let usual = SpeedArguments::default;
        for wrong in [
            SpeedArguments { step_base_ms: -1.0, ..usual() },
            SpeedArguments { prefill_us_per_token: f64::NAN, ..usual() },
            SpeedArguments { jitter: 1.5, ..usual() },
            SpeedArguments { max_batched_tokens: 0, ..usual() },
            SpeedArguments { max_sequences: 0, ..usual() },
        ] {
            assert!(wrong.speed().is_err(), "{wrong:?}");
        }
    }
}
