//! What a proxy adds to the latency of a request that meets nobody else: one connection, a pause before each request, the
//! backend alone in the same round as the base. Owns the pauses. Never measures CPU.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde::Serialize;

use crate::exchange::Exchange;
use crate::machine::Interrupt;
use crate::statistics::{Spread, percentile, spread};

/// Name of the backend without a proxy.
pub const DIRECT: &str = "direct";

/// Long enough for a proxy to fall asleep, short enough for hundreds of requests within a few seconds.
const PAUSE: Duration = Duration::from_millis(5);
/// First requests of a turn, which are not counted.
const WARM_UP: usize = 20;

/// One turn of one proxy.
#[derive(Clone, Debug, Serialize)]
pub struct LatencySample {
    pub proxy: String,
    pub round: usize,
    pub p50_us: f64,
    pub p99_us: f64,
}

/// One proxy over all rounds: its percentiles less those of the backend alone in the same round.
#[derive(Clone, Debug, Serialize)]
pub struct Added {
    pub proxy: String,
    pub p50_us: Spread,
    pub p99_us: Spread,
}

/// Sends `requests` of them one by one; every answer must be `payload`.
///
/// Errors: as [`Exchange::run`], and another answer than the backend's.
pub fn run(
    (proxy, target): (&str, SocketAddr),
    round: usize,
    (request, payload): (&[u8], &[u8]),
    requests: usize,
    interrupt: &Interrupt,
) -> Result<LatencySample> {
    let mut exchange = Exchange::connect(target)?;
    let mut latencies_ns = Vec::with_capacity(requests);
    for number in 0..WARM_UP + requests {
        interrupt.check()?;
        std::thread::sleep(PAUSE);
        let (sent, mut received) = (Instant::now(), Vec::with_capacity(payload.len()));
        exchange.run(request, |data| received.extend_from_slice(data))?;
        let latency = sent.elapsed();
        ensure!(received == payload, "another answer than the backend's");
        if number >= WARM_UP {
            latencies_ns.push(latency.as_nanos() as u64);
        }
    }
    latencies_ns.sort_unstable();
    let micros = |share: f64| percentile(&latencies_ns, share) as f64 / 1e3;
    Ok(LatencySample { proxy: proxy.to_owned(), round, p50_us: micros(50.0), p99_us: micros(99.0) })
}

/// By proxy, in the order of their first sample; nothing of rounds in which the backend alone was not measured.
pub fn added(samples: &[LatencySample]) -> Vec<Added> {
    let mut proxies: Vec<&str> = Vec::new();
    for sample in samples.iter().filter(|sample| sample.proxy != DIRECT) {
        if !proxies.contains(&sample.proxy.as_str()) {
            proxies.push(&sample.proxy);
        }
    }
    let base = |round| samples.iter().find(|sample| sample.proxy == DIRECT && sample.round == round);
    let of = |proxy: &str| {
        let own = samples.iter().filter(|sample| sample.proxy == proxy);
        let pairs: Vec<_> = own.filter_map(|sample| Some((sample, base(sample.round)?))).collect();
        let over = |value: fn(&LatencySample) -> f64| spread(pairs.iter().map(|(own, base)| value(own) - value(base)));
        Some(Added { proxy: proxy.to_owned(), p50_us: over(|it| it.p50_us)?, p99_us: over(|it| it.p99_us)? })
    };
    proxies.into_iter().filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_added_is_told_within_a_round() {
        let sample =
            |proxy: &str, round, p50_us| LatencySample { proxy: proxy.into(), round, p50_us, p99_us: 2.0 * p50_us };
        let samples = [
            sample(DIRECT, 0, 100.0),
            sample("a", 0, 140.0),
            // A slow round for both.
            sample(DIRECT, 1, 300.0),
            sample("a", 1, 340.0),
            sample("a", 2, 9_000.0),
        ];
        let added = added(&samples);
        assert_eq!(added.len(), 1);
        assert_eq!((added[0].p50_us.median, added[0].p99_us.median, added[0].p50_us.samples), (40.0, 80.0, 2));
    }
}
