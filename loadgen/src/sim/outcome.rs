//! Owns the figures of a run. Never runs.

use serde::Serialize;

use super::engines::Fleet;
use super::fleet::Served;
use super::workload::Workload;
use crate::engine::content::Content;

/// What a client still calls good.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Slo {
    /// Longest time to the first token, seconds.
    pub ttft_s: f64,
    /// Longest mean time between an answer's tokens, seconds.
    pub itl_s: f64,
}

/// Figures of one run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Outcome {
    pub requests: usize,
    /// Cached over prompt tokens, as the engines counted them.
    pub hit_rate: f64,
    /// The part of it that host memory alone had.
    pub host_hit_rate: f64,
    pub ttft_mean_s: f64,
    pub ttft_p50_s: f64,
    pub ttft_p99_s: f64,
    /// Percentiles over requests of the mean time between an answer's tokens.
    pub itl_p50_s: f64,
    pub itl_p99_s: f64,
    /// Share of requests that met both limits.
    pub goodput: f64,
    /// Most over mean, by engine that computes prompts: requests, and prompt tokens computed.
    pub imbalance_requests: f64,
    pub imbalance_prefill: f64,
    /// Of the engines that decode: prompt tokens times the time for which they were decoded on.
    pub imbalance_decode: f64,
    /// Virtual seconds from the first request to the last token.
    pub seconds: f64,
}

/// Sums up a run over a fleet.
pub fn outcome(workload: &Workload, served: &[Served], fleet: &Fleet, slo: Slo) -> Outcome {
    let engines = fleet.speeds.len();
    let seconds = |from: u64, to: u64| to.saturating_sub(from) as f64 / 1e9;
    let (mut ttft, mut itl, mut good) = (Vec::new(), Vec::new(), 0);
    let (mut counts, mut computed, mut decoded) = (vec![0u64; engines], vec![0u64; engines], vec![0u64; engines]);
    let (mut prompt_tokens, mut cached_tokens, mut loaded_tokens) = (0, 0, 0);
    for (request, served) in workload.requests.iter().zip(served) {
        let first = seconds(served.sent_ns, served.first_token_ns);
        let gaps = request.content.answer_tokens() - 1;
        let gap = if gaps == 0 { 0.0 } else { seconds(served.first_token_ns, served.ended_ns) / gaps as f64 };
        good += usize::from(first <= slo.ttft_s && gap <= slo.itl_s);
        ttft.push(first);
        if gaps > 0 {
            itl.push(gap);
        }
        let tokens = request.content.prompt_tokens();
        prompt_tokens += tokens;
        cached_tokens += served.hits.cached_tokens;
        loaded_tokens += served.hits.loaded_tokens;
        counts[served.engine] += 1;
        computed[served.engine] += (tokens - served.hits.cached_tokens) as u64;
        let decoded_ms = served.ended_ns.saturating_sub(served.first_token_ns) / 1_000_000;
        decoded[served.decode_engine] += tokens as u64 * decoded_ms;
    }
    let prefill = fleet.pairs.as_ref().map_or(engines, |pairs| pairs.prefill);
    let decode = fleet.pairs.as_ref().map_or(0, |pairs| pairs.prefill);
    ttft.sort_by(f64::total_cmp);
    itl.sort_by(f64::total_cmp);
    let first_sent = served.iter().map(|it| it.sent_ns).min().unwrap_or(0);
    let last_ended = served.iter().map(|it| it.ended_ns).max().unwrap_or(0);
    Outcome {
        requests: served.len(),
        hit_rate: cached_tokens as f64 / prompt_tokens.max(1) as f64,
        host_hit_rate: loaded_tokens as f64 / prompt_tokens.max(1) as f64,
        ttft_mean_s: ttft.iter().sum::<f64>() / ttft.len().max(1) as f64,
        ttft_p50_s: percentile(&ttft, 0.50),
        ttft_p99_s: percentile(&ttft, 0.99),
        itl_p50_s: percentile(&itl, 0.50),
        itl_p99_s: percentile(&itl, 0.99),
        goodput: good as f64 / served.len().max(1) as f64,
        imbalance_requests: imbalance(&counts[..prefill]),
        imbalance_prefill: imbalance(&computed[..prefill]),
        imbalance_decode: imbalance(&decoded[decode..]),
        seconds: seconds(first_sent, last_ended),
    }
}

/// Nearest rank; 0 for none.
fn percentile(sorted: &[f64], share: f64) -> f64 {
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
}

fn imbalance(numbers: &[u64]) -> f64 {
    let (most, sum) = (numbers.iter().max().copied().unwrap_or(0), numbers.iter().sum::<u64>());
    most as f64 * numbers.len() as f64 / (sum as f64).max(1.0)
}
