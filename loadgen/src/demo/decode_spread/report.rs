//! Owns what the spread measurement looks like: the table and the JSON. Never measures.

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::{SpreadConfig, SpreadRun};

/// Mean, least and most over the seeds of one scenario and setting.
struct Over {
    mean: f64,
    least: f64,
    most: f64,
}

fn over(runs: &[&SpreadRun], of: fn(&SpreadRun) -> f64) -> Over {
    let values = runs.iter().map(|run| of(run));
    Over {
        mean: values.clone().sum::<f64>() / runs.len().max(1) as f64,
        least: values.clone().fold(f64::INFINITY, f64::min),
        most: values.fold(0.0, f64::max),
    }
}

/// Results by scenario; each setting against the first.
pub fn table(config: &SpreadConfig, runs: &[SpreadRun]) -> Result<String> {
    runs.first().context("no run")?;
    let mut text = String::new();
    for scenario in &config.scenarios {
        let of_setting = |name: &str| -> Vec<&SpreadRun> {
            runs.iter().filter(|run| run.scenario == scenario.name && run.setting == name).collect()
        };
        text.push_str(&format!("{}: {}\n", scenario.name, scenario.about));
        text.push_str(&format!(
            "  {:<14}{:>12}{:>16}{:>9}{:>19}{:>11}{:>9}{:>8}{:>8}\n",
            "decode demand",
            "KV max/mean",
            "seeds",
            "excess",
            "requests max/mean",
            "in flight",
            "TTFT ms",
            "req/s",
            "errors"
        ));
        let mut first = None;
        let mut verdicts = String::new();
        for setting in &config.settings {
            let of = of_setting(&setting.name);
            if of.is_empty() {
                continue;
            }
            let kv = over(&of, |run| run.kv_spread);
            let requests = over(&of, |run| run.request_spread).mean;
            let errors: u64 = of.iter().map(|run| run.errors).sum();
            text.push_str(&format!(
                "  {:<14}{:>12.3}{:>16}{:>9.3}{:>19.3}{:>11.0}{:>9.0}{:>8.1}{:>8}\n",
                setting.name,
                kv.mean,
                format!("{:.3} to {:.3}", kv.least, kv.most),
                kv.mean - 1.0,
                requests,
                over(&of, |run| run.requests_in_flight).mean,
                over(&of, |run| run.ttft_mean_ms).mean,
                over(&of, |run| run.throughput_rps).mean,
                errors
            ));
            match &first {
                None => first = Some((setting.name.as_str(), kv.mean, requests)),
                Some((name, kv_off, requests_off)) => verdicts.push_str(&format!(
                    "  {} against {name}: KV max/mean {:.0} %, its excess {:.0} %; requests' excess {:.0} %\n",
                    setting.name,
                    kv.mean / kv_off * 100.0,
                    share_of_excess(kv.mean, *kv_off),
                    share_of_excess(requests, *requests_off),
                )),
            }
        }
        text.push_str(&verdicts);
    }
    Ok(text)
}

/// What is above 1 of `spread`, in percent of what is above 1 of `reference`.
fn share_of_excess(spread: f64, reference: f64) -> f64 {
    (spread - 1.0).max(0.0) / (reference - 1.0).max(1e-9) * 100.0
}

/// The file of `--json`.
pub fn json(config: &SpreadConfig, runs: &[SpreadRun]) -> Value {
    json!({"schema": "loadgen.decode-spread/1", "runs": runs,
        "config": {"scenarios": config.scenarios, "prefill_engines": config.prefill_engines,
            "decode_engines": config.decode_engines, "protocol": config.protocol.as_str(), "seconds": config.seconds,
            "settings": config.settings.iter().map(|it| json!({"name": it.name, "arguments": it.arguments}))
                .collect::<Vec<_>>()}})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_is_held_against_the_first() {
        let run = |setting: &str, seed, kv_spread| SpreadRun {
            scenario: "agents".into(),
            setting: setting.into(),
            seed,
            requests: 10,
            errors: 0,
            samples: 5,
            kv_spread,
            request_spread: 1.2,
            requests_in_flight: 9.0,
            ttft_mean_ms: 1.0,
            throughput_rps: 2.0,
        };
        let config = SpreadConfig::new("router".into(), 1000.0);
        let runs = [run("off", 1, 1.8), run("off", 2, 2.2), run("on", 1, 1.1), run("on", 2, 1.3)];
        let text = table(&config, &runs).expect("there are runs");
        assert!(text.contains("1.800 to 2.200"), "{text}");
        assert!(text.contains("on against off: KV max/mean 60 %, its excess 20 %; requests' excess 100 %"), "{text}");
        assert!(table(&config, &[]).is_err());
        assert_eq!(json(&config, &runs)["runs"].as_array().map(Vec::len), Some(4));
    }
}
