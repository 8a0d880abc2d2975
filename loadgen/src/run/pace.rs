//! Owns when sessions begin: rates, ramps, bursts and recorded times as seconds after the start. Never waits.

use std::str::FromStr;

use anyhow::{Context, Result, ensure};
use rand::Rng;
use serde::Serialize;

use crate::seed;

/// When sessions begin. Rates are of requests: sessions of several turns begin accordingly less often.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Pace {
    /// A Poisson process, whatever the server does; requests per second.
    Open { rate: f64 },
    /// By the clock, the first one `offset_s` seconds after the start.
    Steady { rate: f64, offset_s: f64 },
    /// A Poisson process whose rate goes evenly from one to the other and then stays.
    Ramp(Ramp),
    /// As recorded.
    Recorded,
    /// So many sessions are always under way.
    Closed { concurrency: usize },
}

/// `A..B/SECONDS`, requests per second.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Ramp {
    pub from: f64,
    pub to: f64,
    pub seconds: f64,
}

impl FromStr for Ramp {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Ramp> {
        let parts = text.split_once('/').and_then(|(rates, seconds)| Some((rates.split_once("..")?, seconds)));
        let ((from, to), seconds) = parts.context("a ramp is A..B/SECONDS, as in 5..50/60")?;
        let number = |text: &str| text.trim().parse::<f64>().with_context(|| format!("{text:?} is no number"));
        let ramp = Ramp { from: number(from)?, to: number(to)?, seconds: number(seconds)? };
        ensure!([ramp.from, ramp.to, ramp.seconds].iter().all(|it| it.is_finite()), "a ramp has finite numbers");
        ensure!(
            ramp.from >= 0.0 && ramp.to > 0.0 && ramp.seconds > 0.0,
            "a ramp ends at a rate above 0, after some time"
        );
        Ok(ramp)
    }
}

impl Ramp {
    /// When so many requests are due on average: the time at which the area under the rate reaches `requests`.
    fn time_of(&self, requests: f64) -> f64 {
        let area = (self.from + self.to) / 2.0 * self.seconds;
        if requests >= area {
            return self.seconds + (requests - area) / self.to;
        }
        let slope = (self.to - self.from) / self.seconds;
        if slope.abs() < 1e-12 {
            return requests / self.from;
        }
        // From the rate and its slope: from t + slope / 2 t^2 = requests.
        (-self.from + (self.from * self.from + 2.0 * slope * requests).max(0.0).sqrt()) / slope
    }
}

/// What arrivals are made of besides the pace.
#[derive(Clone, Copy, Debug)]
pub struct Sessions<'a> {
    pub count: usize,
    /// Requests of all of them together.
    pub requests: usize,
    /// Nanoseconds, for [`Pace::Recorded`].
    pub recorded: Option<&'a [u64]>,
    /// Sessions that begin in one moment; the rate stays what it is.
    pub burst: usize,
    /// Recorded times pass so many times faster.
    pub speedup: f64,
    pub seed: u64,
}

/// When each session begins, seconds after the start, in order; nothing for a closed loop.
pub fn arrivals(pace: Pace, sessions: Sessions<'_>) -> Option<Vec<f64>> {
    let requests_per_session = sessions.requests as f64 / sessions.count.max(1) as f64;
    let burst = sessions.burst.max(1);
    let poisson = |time_of: &dyn Fn(f64) -> f64| {
        let (mut draw, mut due) = (seed::generator(sessions.seed, "arrivals"), 0.0);
        let mut arrival = |number: usize| {
            if number.is_multiple_of(burst) {
                due += -(1.0 - draw.random::<f64>()).ln() * burst as f64 * requests_per_session;
            }
            time_of(due)
        };
        (0..sessions.count).map(&mut arrival).collect()
    };
    match pace {
        Pace::Open { rate } => Some(poisson(&|due| due / rate)),
        Pace::Ramp(ramp) => Some(poisson(&|due| ramp.time_of(due))),
        Pace::Steady { rate, offset_s } => {
            let between = requests_per_session / rate * burst as f64;
            Some((0..sessions.count).map(|number| offset_s + (number / burst) as f64 * between).collect())
        }
        Pace::Recorded => {
            let times = sessions.recorded.unwrap_or_default();
            Some(times.iter().map(|at_ns| *at_ns as f64 / 1e9 / sessions.speedup).collect())
        }
        Pace::Closed { .. } => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sessions(count: usize) -> Sessions<'static> {
        Sessions { count, requests: count, recorded: None, burst: 1, speedup: 1.0, seed: 3 }
    }

    fn within(times: &[f64], from: f64, until: f64) -> usize {
        times.iter().filter(|at| (from..until).contains(*at)).count()
    }

    #[test]
    fn arrivals_keep_the_rate_whatever_comes_at_once() {
        for burst in [1, 7] {
            let sessions = Sessions { burst, ..sessions(20_000) };
            let times = arrivals(Pace::Open { rate: 100.0 }, sessions).unwrap();
            assert_eq!(times, arrivals(Pace::Open { rate: 100.0 }, sessions).unwrap());
            assert!(times.is_sorted());
            let last = times[19_999];
            assert!((last - 200.0).abs() < 10.0, "bursts of {burst}: {last}");
            assert!(times.chunks(burst).all(|it| it.iter().all(|at| *at == it[0])), "a burst is one moment");
        }
        let turns = Sessions { requests: 4000, ..sessions(1000) };
        let last = *arrivals(Pace::Open { rate: 100.0 }, turns).unwrap().last().unwrap();
        assert!((last - 40.0).abs() < 5.0, "four turns each: {last}");
        let steady = arrivals(Pace::Steady { rate: 10.0, offset_s: 0.5 }, Sessions { burst: 2, ..sessions(4) });
        assert_eq!(steady.unwrap(), [0.5, 0.5, 0.7, 0.7]);
    }

    #[test]
    fn a_ramp_goes_from_rate_to_rate_and_stays() {
        let ramp: Ramp = "10..110/20".parse().unwrap();
        let times = arrivals(Pace::Ramp(ramp), sessions(4000)).unwrap();
        assert!(times.is_sorted());
        for (from, until, wanted) in [(0.0, 10.0, 350.0), (10.0, 20.0, 850.0), (20.0, 40.0, 2200.0)] {
            let found = within(&times, from, until) as f64;
            assert!((found / wanted - 1.0).abs() < 0.12, "{from} to {until}: {found} for {wanted}");
        }
        let down = arrivals(Pace::Ramp("100..20/10".parse().unwrap()), sessions(1000)).unwrap();
        assert!(within(&down, 0.0, 5.0) > 2 * within(&down, 10.0, 15.0));
        let flat: Ramp = "50..50/4".parse().unwrap();
        assert!((flat.time_of(100.0) - 2.0).abs() < 1e-9 && (flat.time_of(300.0) - 6.0).abs() < 1e-9);
        for wrong in ["10", "10..20", "10..x/5", "1..0/5", "1..2/0", "-1..2/5", "1..inf/5", "nan..2/5"] {
            assert!(wrong.parse::<Ramp>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn recorded_times_are_kept_or_sped_up() {
        let recorded = Some(&[0, 2_000_000_000, 3_000_000_000][..]);
        let sessions = Sessions { recorded, speedup: 4.0, ..sessions(3) };
        assert_eq!(arrivals(Pace::Recorded, sessions).unwrap(), [0.0, 0.5, 0.75]);
        assert_eq!(arrivals(Pace::Closed { concurrency: 2 }, sessions), None);
    }
}
