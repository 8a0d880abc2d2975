//! Rules as text: `kv-aware,weight=4,knowledge=truth`. Owns their names; never runs one.

use std::fmt;
use std::str::FromStr;

use anyhow::{Context, bail, ensure};
use infera_router::route::{LoadTerm, RecentLoad};
use loadgen::sim::{Router, Workload};

use super::baselines::{InTurn, MostCached, Sessions};
use super::kv_aware::{Knowledge, KvAware, Options};

/// A way to place requests.
#[derive(Clone, Debug, PartialEq)]
pub enum Rule {
    RoundRobin,
    /// A session's first request goes where least is in flight, later ones follow it.
    SessionAffinity,
    KvAware(Options),
    /// The engine that really holds most of the prompt, ties to the one with least in flight.
    MostCached,
}

impl Rule {
    /// A router of this rule, with nothing known yet.
    pub fn router(&self, workload: &Workload, engines: usize, seed: u64) -> Box<dyn Router> {
        match self {
            Rule::RoundRobin => Box::new(InTurn::new(seed as usize)),
            Rule::SessionAffinity => Box::new(Sessions::new(engines)),
            Rule::KvAware(options) => Box::new(KvAware::new(options.clone(), workload.block_size, engines)),
            Rule::MostCached => Box::new(MostCached::default()),
        }
    }
}

impl FromStr for Rule {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let (name, rest) = text.split_once(',').unwrap_or((text, ""));
        let rule = match name {
            "round-robin" => Rule::RoundRobin,
            "session-affinity" => Rule::SessionAffinity,
            "most-cached" => Rule::MostCached,
            "kv-aware" => return Ok(Rule::KvAware(options(rest)?)),
            _ => bail!("`{name}` is none of round-robin, session-affinity, most-cached, kv-aware"),
        };
        ensure!(rest.is_empty(), "`{name}` has no options");
        Ok(rule)
    }
}

/// `load=` says what the others are unless they are given.
fn options(text: &str) -> anyhow::Result<Options> {
    let mut pairs = Vec::new();
    for pair in text.split(',').filter(|pair| !pair.is_empty()) {
        pairs.push(pair.split_once('=').with_context(|| format!("`{pair}` is not key=value"))?);
    }
    let term = match pairs.iter().find(|(key, _)| *key == "load") {
        None | Some((_, "queue")) => LoadTerm::Queue,
        Some((_, "active")) => LoadTerm::Active,
        Some((_, other)) => bail!("`load={other}`: queue or active"),
    };
    let mut options = Options::with(term);
    for (key, value) in pairs {
        let number = || -> anyhow::Result<f64> {
            let number: f64 = value.parse().with_context(|| format!("`{key}={value}`"))?;
            ensure!(number.is_finite() && number >= 0.0, "`{key}={value}` must be at least 0");
            Ok(number)
        };
        match (key, value) {
            ("load", _) => {}
            ("weight", _) => options.overlap_weight = number()?,
            ("queued", _) => options.load.queued = number()?,
            ("active", _) => options.load.active = number()?,
            ("requests", _) => options.load.request_tokens = number()?,
            ("recent", "off") => options.recent_load = RecentLoad::Off,
            ("recent", "idle") => options.recent_load = RecentLoad::Idle,
            ("recent", "on") => options.recent_load = RecentLoad::On,
            ("host", _) => {
                options.host_credit = number()?;
                ensure!(options.host_credit <= 1.0, "`host={value}` must be at most 1");
            }
            ("demand", "off") => options.demand = None,
            ("demand", _) => options.demand = Some(number()?),
            ("knowledge", "events") => options.knowledge = Knowledge::Events,
            ("knowledge", "promised") => options.knowledge = Knowledge::Promised,
            ("knowledge", "truth") => options.knowledge = Knowledge::Truth,
            _ => bail!(
                "`{key}={value}`: known are load=queue|active, weight, queued, active, requests, recent=off|idle|on, host, \
                 demand=off|W, knowledge=events|promised|truth"
            ),
        }
    }
    Ok(options)
}

impl fmt::Display for Rule {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Rule::RoundRobin => formatter.write_str("round-robin"),
            Rule::SessionAffinity => formatter.write_str("session-affinity"),
            Rule::MostCached => formatter.write_str("most-cached"),
            Rule::KvAware(options) => write!(formatter, "kv-aware{options}"),
        }
    }
}

impl fmt::Display for Options {
    /// What differs from the router's own settings.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_plain = self.load == LoadTerm::Active.weights();
        let usual = Options::with(if is_plain { LoadTerm::Active } else { LoadTerm::Queue });
        if is_plain {
            formatter.write_str(",load=active")?;
        }
        let numbers = [
            ("weight", self.overlap_weight, usual.overlap_weight),
            ("queued", self.load.queued, usual.load.queued),
            ("active", self.load.active, usual.load.active),
            ("requests", self.load.request_tokens, usual.load.request_tokens),
        ];
        for (name, value, usual) in numbers {
            if value != usual {
                write!(formatter, ",{name}={value}")?;
            }
        }
        if self.recent_load != usual.recent_load {
            let recent = match self.recent_load {
                RecentLoad::Off => "off",
                RecentLoad::Idle => "idle",
                RecentLoad::On => "on",
            };
            write!(formatter, ",recent={recent}")?;
        }
        if self.host_credit != usual.host_credit {
            write!(formatter, ",host={}", self.host_credit)?;
        }
        if let Some(request_weight) = self.demand {
            write!(formatter, ",demand={request_weight}")?;
        }
        match self.knowledge {
            Knowledge::Events => Ok(()),
            Knowledge::Promised => formatter.write_str(",knowledge=promised"),
            Knowledge::Truth => formatter.write_str(",knowledge=truth"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_read_as_they_are_written() {
        for text in [
            "round-robin",
            "session-affinity",
            "most-cached",
            "kv-aware",
            "kv-aware,weight=20,queued=0.5,active=1,requests=9,recent=on,host=0.25,demand=3000,knowledge=truth",
            "kv-aware,load=active",
            "kv-aware,load=active,weight=4,recent=off",
            "kv-aware,recent=off,knowledge=promised",
        ] {
            assert_eq!(text.parse::<Rule>().unwrap().to_string(), text);
        }
        for text in [
            "",
            "kv",
            "round-robin,weight=1",
            "kv-aware,weight",
            "kv-aware,weight=-1",
            "kv-aware,recent=no",
            "kv-aware,load=no",
            "kv-aware,host=1.5",
            "kv-aware,demand=on",
        ] {
            assert!(text.parse::<Rule>().is_err(), "{text}");
        }
    }
}
