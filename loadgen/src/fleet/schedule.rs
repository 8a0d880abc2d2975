//! Owns failures as text and as a plan: `kill@30+10:2` kills engine 2 of its group after 30 s and starts it again 10 s
//! later. Never touches an engine.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

/// What happens to one engine at one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct Action {
    /// After the fleet's start.
    pub at: Duration,
    /// Number in the whole fleet.
    pub engine: usize,
    pub change: Change,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Change {
    /// Connections break, sockets close, nothing is taken back.
    Kill,
    /// The killed engine is back on its ports, with an empty cache.
    Restart,
    /// No step is computed; connections stay open.
    Freeze,
    Thaw,
    /// This share of requests is answered with 500.
    Fail {
        rate: f64,
    },
    Recover,
}

/// `kill|freeze|error @ START [+ DURATION] [: ENGINE] [= RATE]` for a group whose engines are `first..first + count`; times
/// in seconds, without a duration for good, without an engine for all of the group.
pub fn actions(text: &str, first: usize, count: usize) -> Result<Vec<Action>> {
    let told = || format!("failure `{text}`");
    let (what, rest) = text.split_once('@').with_context(|| format!("{}: what@seconds", told()))?;
    let (rest, rate) = match rest.split_once('=') {
        Some((rest, rate)) => (rest, Some(rate.trim().parse::<f64>().with_context(told)?)),
        None => (rest, None),
    };
    let (times, engine) = match rest.split_once(':') {
        Some((times, engine)) => (times, Some(engine.trim().parse::<usize>().with_context(told)?)),
        None => (rest, None),
    };
    let (start, duration) = match times.split_once('+') {
        Some((start, duration)) => (seconds(start).with_context(told)?, Some(seconds(duration).with_context(told)?)),
        None => (seconds(times).with_context(told)?, None),
    };
    ensure!(rate.is_none() || what.trim() == "error", "{}: only error has a rate", told());
    ensure!(rate.is_none_or(|rate| (0.0..=1.0).contains(&rate)), "{}: a rate is from 0 to 1", told());
    let (begin, end) = match what.trim() {
        "kill" => (Change::Kill, Change::Restart),
        "freeze" => (Change::Freeze, Change::Thaw),
        "error" => (Change::Fail { rate: rate.unwrap_or(1.0) }, Change::Recover),
        other => bail!("{}: `{other}` is none of kill, freeze, error", told()),
    };
    let engines = match engine {
        Some(engine) => {
            ensure!(engine < count, "{}: the group has {count} engines, counted from 0", told());
            first + engine..first + engine + 1
        }
        None => first..first + count,
    };
    let action = |at, engine, change| Action { at, engine, change };
    Ok(engines
        .flat_map(|engine| {
            let ended = duration.map(|duration| action(start + duration, engine, end));
            [Some(action(start, engine, begin)), ended].into_iter().flatten()
        })
        .collect())
}

fn seconds(text: &str) -> Result<Duration> {
    Ok(Duration::try_from_secs_f64(text.trim().trim_end_matches('s').parse()?)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_begin_and_end_on_the_engines_named() {
        let at = Duration::from_secs_f64;
        let kill = |seconds, engine, change| Action { at: at(seconds), engine, change };
        assert_eq!(
            actions("kill@30+10:1", 4, 3).unwrap(),
            [kill(30.0, 5, Change::Kill), kill(40.0, 5, Change::Restart)]
        );
        assert_eq!(actions("freeze@0.5s", 0, 2).unwrap().len(), 2);
        assert_eq!(actions("error@1:0=0.25", 0, 1).unwrap()[0].change, Change::Fail { rate: 0.25 });
        for wrong in ["kill", "kill@x", "stop@1", "kill@1:3", "kill@1=0.5", "error@1=2", "kill@-1", "freeze@1+"] {
            assert!(actions(wrong, 0, 3).is_err(), "{wrong}");
        }
    }
}
