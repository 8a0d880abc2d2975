//! One comparison: backend and proxies up, every scenario in turns and rounds, everything down again.
//!
//! Owns the order of measurements. Never formats results.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::answer::{self, Answer, JSON_BYTES};
use crate::backend::Backend;
use crate::idle::{self, Idle};
use crate::load::{self, Load};
use crate::low_load::{self, LatencySample};
use crate::machine::{Cores, Interrupt};
use crate::process::Process;
use crate::report::Sample;
use crate::rivals::{Rival, Running};
use crate::scenario::{Group, Scenario};

/// How long and how often.
#[derive(Clone, Debug)]
pub struct Plan {
    pub rounds: usize,
    pub window: Duration,
    pub scenarios: Vec<Scenario>,
    /// 0 leaves the idle streams out.
    pub idle_streams: usize,
    /// Names of the proxies whose idle streams are measured.
    pub idle_proxies: Vec<String>,
    /// Requests of one proxy in one round, one at a time with pauses; 0 leaves this out.
    pub low_load_requests: usize,
}

/// All samples of all rounds, and the idle streams of each proxy asked for.
#[derive(Default)]
pub struct Results {
    pub samples: Vec<Sample>,
    pub idle: Vec<Idle>,
    pub latency: Vec<LatencySample>,
    /// Proxies that could not be measured, with the reason.
    pub failures: Vec<String>,
}

/// Proxies of one run with the backend behind them.
pub struct Harness<'a> {
    rivals: &'a [Rival],
    cores: Cores,
    interrupt: &'a Interrupt,
    directory: tempfile::TempDir,
    backend: Backend,
}

impl<'a> Harness<'a> {
    pub fn new(rivals: &'a [Rival], cores: Cores, interrupt: &'a Interrupt) -> Result<Harness<'a>> {
        let directory = tempfile::Builder::new().prefix("bench-").tempdir()?;
        let backend = Backend::start(cores.load, Answer::json(JSON_BYTES))?;
        Ok(Harness { rivals, cores, interrupt, directory, backend })
    }

    /// Runs `plan`; `progress` gets one line per finished measurement.
    pub fn run(&self, plan: &Plan, mut progress: impl FnMut(&str)) -> Result<Results> {
        let mut results = Results::default();
        if !plan.scenarios.is_empty() || plan.low_load_requests > 0 {
            let mut running = Vec::new();
            for rival in self.rivals {
                running.push(self.start(rival)?);
            }
            for scenario in &plan.scenarios {
                self.rounds(plan, scenario, &mut running, &mut results, &mut progress)?;
            }
            for round in 0..plan.rounds * usize::from(plan.low_load_requests > 0) {
                self.low_load(plan.low_load_requests, round, &mut running, &mut results, &mut progress)?;
            }
        }
        if plan.idle_streams > 0 {
            for rival in self.rivals.iter().filter(|rival| plan.idle_proxies.contains(&rival.name)) {
                self.idle(plan.idle_streams, rival, &mut results, &mut progress)?;
            }
        }
        Ok(results)
    }

    fn start(&self, rival: &Rival) -> Result<Running> {
        let answer = Answer::json(JSON_BYTES);
        let payload = Arc::clone(&answer.payload);
        self.backend.set_answer(answer);
        let request = answer::request("bench", false, 200);
        rival.start(self.backend.address(), self.directory.path(), self.cores, (&request, &payload), self.interrupt)
    }

    /// All rounds of one scenario, the proxies in turns within each.
    fn rounds(
        &self,
        plan: &Plan,
        scenario: &Scenario,
        running: &mut [Running],
        results: &mut Results,
        progress: &mut impl FnMut(&str),
    ) -> Result<()> {
        for round in 0..plan.rounds {
            // A fixed order would give one proxy the same neighbour's wake in every round.
            let turn = round % running.len();
            running.rotate_left(turn);
            for proxy in running.iter_mut().filter(|proxy| scenario.is_for(&proxy.name)) {
                let measured = self.measure(plan, scenario, proxy, round);
                self.interrupt.check()?;
                match measured {
                    Ok(sample) => {
                        progress(&format!("{:<16} round {round}: {}", scenario.name, sample.line()));
                        results.samples.push(sample);
                    }
                    Err(error) => {
                        let line = format!("{}, {}, round {round}: {error:#}", proxy.name, scenario.name);
                        progress(&format!("FAILED {line}"));
                        results.failures.push(line);
                    }
                }
            }
            running.rotate_right(turn);
        }
        Ok(())
    }

    fn measure(&self, plan: &Plan, scenario: &Scenario, proxy: &mut Running, round: usize) -> Result<Sample> {
        proxy.process.check_alive()?;
        let answer = scenario.answer();
        let load = Load {
            target: proxy.address,
            connections: scenario.connections,
            request: answer::request(&proxy.address.to_string(), scenario.streams(), scenario.body_bytes).into(),
            payload: Arc::clone(&answer.payload),
            warm_up: scenario.warm_up(),
            window: plan.window,
        };
        self.backend.set_answer(answer);
        let members = proxy.process.members()?;
        let asked_before = self.backend.requests();
        let measured = load::run(&load, || Process::cpu(&members), self.interrupt)?;
        // A proxy that answers out of a cache, or not at all, must not win.
        let asked = self.backend.requests() - asked_before;
        ensure!(asked >= measured.answers, "{} answers, but the backend saw {asked} requests", measured.answers);
        ensure!(!measured.cpu.is_zero(), "no CPU time seen: is {} still the process that serves?", proxy.name);
        Ok(Sample::new(scenario, &proxy.name, round, &measured))
    }

    /// One round of single requests, the backend alone first.
    fn low_load(
        &self,
        requests: usize,
        round: usize,
        running: &mut [Running],
        results: &mut Results,
        progress: &mut impl FnMut(&str),
    ) -> Result<()> {
        let answer = Answer::json(JSON_BYTES);
        let payload = Arc::clone(&answer.payload);
        self.backend.set_answer(answer);
        let turn = round % running.len().max(1);
        running.rotate_left(turn);
        let proxies = running.iter().map(|proxy| (proxy.name.as_str(), proxy.address));
        for (name, address) in std::iter::once((low_load::DIRECT, self.backend.address())).chain(proxies) {
            let request = answer::request(&address.to_string(), false, 200);
            match low_load::run((name, address), round, (&request, &payload), requests, self.interrupt) {
                Ok(sample) => {
                    progress(&format!("{:<16} round {round}: {name:<20} {:>7.1} us", "low load", sample.p50_us));
                    results.latency.push(sample);
                }
                Err(error) => {
                    self.interrupt.check()?;
                    let line = format!("{name}, low load, round {round}: {error:#}");
                    progress(&format!("FAILED {line}"));
                    results.failures.push(line);
                }
            }
        }
        running.rotate_right(turn);
        Ok(())
    }

    /// A fresh process, so that what earlier loads left behind does not hide what streams need.
    fn idle(
        &self,
        streams: usize,
        rival: &Rival,
        results: &mut Results,
        progress: &mut impl FnMut(&str),
    ) -> Result<()> {
        let proxy = self.start(rival)?;
        self.warm(&proxy)?;
        let answer = Answer::idle_stream();
        let event = Arc::clone(&answer.payload);
        self.backend.set_answer(answer);
        let request = answer::request(&proxy.address.to_string(), true, 200);
        match idle::run(&proxy.name, proxy.address, streams, &request, &event, &proxy.process, self.interrupt) {
            Ok(idle) => {
                progress(&format!("idle {streams}: {} {:.0} B per stream", idle.proxy, idle.private_bytes_per_stream));
                results.idle.push(idle);
            }
            Err(error) => {
                self.interrupt.check()?;
                let line = format!("{}, idle: {error:#}", proxy.name);
                progress(&format!("FAILED {line}"));
                results.failures.push(line);
            }
        }
        Ok(())
    }

    /// A short load, so that code pages and first-use allocations do not count as streams.
    fn warm(&self, proxy: &Running) -> Result<()> {
        let answer = Answer::stream(None);
        let load = Load {
            target: proxy.address,
            connections: 8,
            request: answer::request(&proxy.address.to_string(), true, 200).into(),
            payload: Arc::clone(&answer.payload),
            warm_up: Duration::from_millis(200),
            window: Duration::from_millis(200),
        };
        self.backend.set_answer(answer);
        load::run(&load, || Duration::ZERO, self.interrupt).map(drop).with_context(|| proxy.name.clone())
    }
}

/// The scenarios of the groups asked for; none means all.
pub fn scenarios(only: &[Group]) -> Vec<Scenario> {
    let wanted = |group: &Group| only.is_empty() || only.contains(group);
    crate::scenario::ALL.iter().filter(|scenario| wanted(&scenario.group)).copied().collect()
}
