//! Owns how a demonstration is told: JSON, table, verdict. Never measures.

use serde_json::{Value, json};

use super::{DemoConfig, PolicyRun};
use crate::run::report::figures;

/// Mean TTFT of the first run divided by that of the second; `None` if one has none.
pub fn ttft_ratio(runs: &[PolicyRun]) -> Option<f64> {
    let [before, after] = runs else { return None };
    let (before, after) = (before.result.record.ttft.mean_ms(), after.result.record.ttft.mean_ms());
    (after > 0.0 && before > 0.0).then(|| before / after)
}

/// The file of `--json`.
pub fn json(config: &DemoConfig, runs: &[PolicyRun]) -> Value {
    let run = |run: &PolicyRun| {
        let mut value = json!(figures(&run.result));
        value["policy"] = json!(run.policy);
        value["requests_per_engine"] = json!(run.requests_per_engine);
        value["problems"] = json!(run.problems);
        value
    };
    let seed_check = runs.iter().find_map(|run| run.seed_check).map(|check| {
        json!({"first_ttft_ms": check.first_ttft_ms, "second_ttft_ms": check.second_ttft_ms,
            "block_count_after_first": check.blocks_after_first, "block_count_after_second": check.blocks_after_second})
    });
    json!({
        "schema": "loadgen.demo/2",
        "runs": runs.iter().map(run).collect::<Vec<_>>(),
        "ttft_mean_ratio": ttft_ratio(runs),
        "seed_check": seed_check,
        "config": {"engines": config.engines, "requests": config.requests, "rate": config.rate,
            "groups": config.groups, "prefix_tokens": config.prefix_tokens, "suffix_tokens": config.suffix_tokens,
            "zipf": config.zipf, "router_arguments": config.router_arguments, "output_tokens": config.output_tokens, "blocks_per_engine": config.blocks_total, "seed": config.seed},
    })
}

/// The table and the verdict.
pub fn table(runs: &[PolicyRun]) -> String {
    let mut out = format!(
        "{:<13}{:>9}{:>8}{:>10}{:>12}{:>11}{:>11}{:>12}   requests per engine\n",
        "policy", "requests", "errors", "hit rate", "TTFT mean", "TTFT p50", "TTFT p99", "requests/s"
    );
    for run in runs {
        let record = &run.result.record;
        let good = (record.requests - record.errors_total()) as f64;
        out.push_str(&format!(
            "{:<13}{:>9}{:>8}{:>8.1} %{:>9.1} ms{:>8.1} ms{:>8.1} ms{:>12.2}   {:?}\n",
            run.policy,
            record.requests,
            record.errors_total(),
            record.hit_rate().unwrap_or(0.0) * 100.0,
            record.ttft.mean_ms(),
            record.ttft.quantile_ms(0.5),
            record.ttft.quantile_ms(0.99),
            good / run.result.duration.as_secs_f64().max(1e-9),
            run.requests_per_engine,
        ));
    }
    if let Some(ratio) = ttft_ratio(runs) {
        let saved = (1.0 - 1.0 / ratio) * 100.0;
        out.push_str(&match ratio > 1.0 {
            true => format!("\nKV-aware routing: {ratio:.2}x lower mean TTFT, {saved:.0} % saved.\n"),
            false => format!("\nKV-aware routing saved nothing here: {:.2}x the mean TTFT.\n", 1.0 / ratio),
        });
    }
    if let Some(check) = runs.iter().find_map(|run| run.seed_check) {
        out.push_str(&format!(
            "One long prefix, twice: TTFT {:.1} ms, then {:.1} ms; block_count {} after the first, {} after the second.\n",
            check.first_ttft_ms, check.second_ttft_ms, check.blocks_after_first, check.blocks_after_second
        ));
    }
    out
}
