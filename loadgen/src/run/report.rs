//! Owns what a run looks like on paper: its report and the text table. Never measures.

use std::time::Duration;

use serde_json::json;

use super::config::{RunConfig, RunResult};
use super::record::Latencies;
use crate::report::model::{Distribution, Figures, Fleet, Generator, RunReport, SCHEMA};

/// The generator kept its schedule when requests started at most this late (99th percentile), with CPU to spare.
const SEND_LAG_MS_MAX: f64 = 10.0;
const CPU_SHARE_MAX: f64 = 0.9;
/// What is over sooner says nothing of a core: starting alone takes milliseconds.
const CPU_JUDGED_FROM: Duration = Duration::from_secs(1);

/// Whether the generator, not the server, limited the run: then the run is invalid.
pub fn is_saturated(result: &RunResult) -> bool {
    let is_busy = result.duration >= CPU_JUDGED_FROM && result.cpu_share > CPU_SHARE_MAX;
    is_busy || result.record.send_lag.quantile_ms(0.99) > SEND_LAG_MS_MAX
}

/// A distribution in milliseconds, three decimals.
pub fn distribution(values: &Latencies) -> Distribution {
    let rounded = |value: f64| (value * 1000.0).round() / 1000.0;
    let quantile = |share: f64| rounded(values.quantile_ms(share));
    Distribution {
        count: values.count(),
        mean: rounded(values.mean_ms()),
        p50: quantile(0.5),
        p90: quantile(0.9),
        p95: quantile(0.95),
        p99: quantile(0.99),
        p999: quantile(0.999),
        max: rounded(values.max_ms()),
        buckets: values.buckets_ms(),
    }
}

/// What every kind of report says of a run.
pub fn figures(result: &RunResult) -> Figures {
    let record = &result.record;
    let errors = record.errors_total();
    Figures {
        requests: record.requests,
        errors,
        error_rate: errors as f64 / record.requests.max(1) as f64,
        errors_by_class: record.errors.iter().map(|(failure, count)| (failure.name(), *count)).collect(),
        aborted: record.aborted,
        slow_readers: record.slow_readers,
        hit_rate: record.hit_rate(),
        ttft_ms: distribution(&record.ttft),
        ttft_from_send_ms: distribution(&record.ttft_from_send),
        inter_token_ms: distribution(&record.inter_token),
        end_to_end_ms: distribution(&record.end_to_end),
        throughput_rps: result.throughput_rps(),
        goodput_rps: result.goodput_rps(),
        output_tokens_per_second: result.per_second(record.output_tokens),
        prompt_tokens: record.prompt_tokens,
        cached_tokens: record.cached_tokens,
        output_tokens: record.output_tokens,
        duration_seconds: result.duration.as_secs_f64(),
        generator: Generator {
            send_lag_ms: distribution(&record.send_lag),
            cpu_share: result.cpu_share,
            cpu_seconds: result.cpu.as_secs_f64(),
            saturated: is_saturated(result),
        },
        interrupted: result.interrupted,
        timeline: record.rows.timeline(),
        placement: record.rows.placement(),
    }
}

/// The report of `loadgen run`.
pub fn run_report(config: &RunConfig, result: &RunResult, name: Option<String>, fleet: Option<Fleet>) -> RunReport {
    RunReport {
        schema: SCHEMA.into(),
        name,
        target: config.target.clone(),
        workload: json!(config.workload),
        pace: json!(config.pace),
        burst: config.burst,
        speedup: config.speedup,
        warmup: json!(config.warmup),
        slo: json!(config.slo),
        manners: json!(config.manners),
        figures: figures(result),
        fleet,
    }
}

/// The report as text.
pub fn table(result: &RunResult) -> String {
    let record = &result.record;
    let mut out = String::new();
    let hit_rate = record.hit_rate().map_or("not reported".into(), |rate| format!("{:.1} %", rate * 100.0));
    out.push_str(&format!(
        "requests {}   errors {}   hit rate {hit_rate}   {:.2} requests/s   {:.1} tokens/s   {:.1} s\n",
        record.requests,
        record.errors_total(),
        result.throughput_rps(),
        result.per_second(record.output_tokens),
        result.duration.as_secs_f64(),
    ));
    out.push_str(&format!("{:<22}{:>9}{:>9}{:>9}{:>9}{:>9}\n", "milliseconds", "mean", "p50", "p90", "p99", "max"));
    for (name, values) in [
        ("time to first token", &record.ttft),
        ("between tokens", &record.inter_token),
        ("end to end", &record.end_to_end),
    ] {
        let shown = [0.5, 0.9, 0.99].map(|share| format!("{:>9.1}", values.quantile_ms(share))).concat();
        out.push_str(&format!("{name:<22}{:>9.1}{shown}{:>9.1}\n", values.mean_ms(), values.max_ms()));
    }
    for (failure, count) in &record.errors {
        out.push_str(&format!("error {:<16}{count:>9}\n", failure.name()));
    }
    if let Some(text) = result.first_error.as_ref().filter(|text| !text.is_empty()) {
        out.push_str(&format!("first error: {text}\n"));
    }
    if let Some(goodput) = result.goodput_rps() {
        out.push_str(&format!("within the limits {:>12}   {goodput:.2} requests/s\n", record.slo_met));
    }
    if record.aborted + record.slow_readers > 0 {
        out.push_str(&format!("left early {:>19}   slow readers {}\n", record.aborted, record.slow_readers));
    }
    if is_saturated(result) {
        out.push_str(&format!(
            "INVALID: the generator itself was the limit (start lag p99 {:.1} ms, {:.0} % of a core): \
             latencies above include its own delays\n",
            record.send_lag.quantile_ms(0.99),
            result.cpu_share * 100.0
        ));
    }
    out
}
