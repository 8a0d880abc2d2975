//! Metric families of decode demand that count events; what is in flight is read from the targets at each
//! scrape. Names are those of the mission text; the lock's own times are ours. Never touched inside the
//! critical section.

use std::time::Duration;

use prometheus::core::Metric;
use prometheus::{Histogram, HistogramOpts, IntCounter, IntCounterVec, Opts, Registry};

use super::{Input, Mode};

/// 100 ns to 1 ms: a free section is far below the first microsecond, a preempted holder far above it.
const LOCK_BUCKETS_SECONDS: [f64; 12] =
    [1e-7, 2.5e-7, 5e-7, 1e-6, 2.5e-6, 5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 1e-3];

/// How long the critical section was waited for and held; picks and releases alike.
#[derive(Clone)]
pub struct LockTimes {
    wait: Histogram,
    hold: Histogram,
}

impl LockTimes {
    /// Called after the section has been left.
    pub fn observe(&self, wait: Duration, hold: Duration) {
        self.wait.observe(wait.as_secs_f64());
        self.hold.observe(hold.as_secs_f64());
    }

    /// Seconds that a share `q` of all holds stayed below, interpolated inside its bucket.
    pub fn hold_quantile(&self, q: f64) -> f64 {
        quantile(&self.hold, q)
    }

    /// The same for waits.
    pub fn wait_quantile(&self, q: f64) -> f64 {
        quantile(&self.wait, q)
    }
}

fn quantile(histogram: &Histogram, q: f64) -> f64 {
    let metric = histogram.metric();
    let wanted = q * metric.get_histogram().get_sample_count() as f64;
    let (mut below, mut lower) = (0.0, 0.0);
    for bucket in metric.get_histogram().get_bucket() {
        let (count, upper) = (bucket.cumulative_count() as f64, bucket.upper_bound());
        if count >= wanted {
            let share = if count > below { (wanted - below) / (count - below) } else { 1.0 };
            return if upper.is_finite() { lower + share * (upper - lower) } else { f64::INFINITY };
        }
        (below, lower) = (count, upper);
    }
    f64::INFINITY
}

/// All families; one set per process.
#[derive(Clone)]
pub struct DemandMetrics {
    decisions: Vec<IntCounter>,
    times: LockTimes,
}

const MODES: [Mode; 2] = [Mode::Shadow, Mode::On];
const INPUTS: [Input; 2] = [Input::Exact, Input::Estimated];
const AGREES: [bool; 2] = [false, true];

impl DemandMetrics {
    /// Registers every family; fails only if a name is taken.
    pub fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let histogram = |name: &str, help: &str| -> Result<Histogram, prometheus::Error> {
            let histogram =
                Histogram::with_opts(HistogramOpts::new(name, help).buckets(LOCK_BUCKETS_SECONDS.to_vec()))?;
            registry.register(Box::new(histogram.clone()))?;
            Ok(histogram)
        };
        let decisions = IntCounterVec::new(
            Opts::new(
                "infera_router_decode_demand_decisions_total",
                "Decode picks by mode, by how the input was counted, and by whether demand suggests the original pick.",
            ),
            &["mode", "input", "agrees"],
        )?;
        registry.register(Box::new(decisions.clone()))?;
        let mut handles = Vec::with_capacity(8);
        for mode in MODES {
            for input in INPUTS {
                for agrees in AGREES {
                    let agrees = if agrees { "true" } else { "false" };
                    handles.push(decisions.with_label_values(&[mode.as_str(), input.as_str(), agrees]));
                }
            }
        }
        Ok(Self {
            decisions: handles,
            times: LockTimes {
                wait: histogram(
                    "infera_router_decode_demand_lock_wait_seconds",
                    "Seconds waited for the demand's critical section, at picks and releases.",
                )?,
                hold: histogram(
                    "infera_router_decode_demand_lock_hold_seconds",
                    "Seconds the demand's critical section was held, at picks and releases.",
                )?,
            },
        })
    }

    /// One decision.
    pub fn decided(&self, mode: Mode, input: Input, agrees: bool) {
        let place = |condition: bool| usize::from(condition);
        let index = place(mode == Mode::On) * 4 + place(input == Input::Estimated) * 2 + place(agrees);
        self.decisions[index].inc();
    }

    pub fn lock_times(&self) -> LockTimes {
        self.times.clone()
    }
}
