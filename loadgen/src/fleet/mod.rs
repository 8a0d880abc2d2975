//! Owns a fleet of simulated engines in one process: start, registration, failures by schedule, orderly end. Never sends a
//! request.

mod schedule;
mod spec;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::engine::faults::Faults;
use crate::engine::register::{EtcdTarget, Registration};
use crate::engine::{Engine, EngineConfig, EngineHandle};
use crate::prompt::TextModel;
pub use schedule::{Action, Change};
pub use spec::{FleetSpec, Group};

/// Where routers learn of the engines.
#[derive(Clone, Debug)]
pub enum Registrar {
    /// Nowhere.
    None,
    /// A JSON array of records, replaced as a whole.
    File(PathBuf),
    /// A lease for each engine.
    Etcd(EtcdTarget),
}

/// A started fleet. Dropping it takes back the registrations, then stops the engines.
pub struct RunningFleet {
    members: Vec<Member>,
    text: Arc<TextModel>,
    registrar: Registrar,
    plan: Vec<Action>,
    started: Instant,
}

struct Member {
    /// As it was started, ports included, so that it can come back.
    config: EngineConfig,
    record: Value,
    worker_flag: String,
    /// Absent while it is killed.
    handle: Option<EngineHandle>,
    registration: Option<Registration>,
}

impl RunningFleet {
    /// Starts all engines on one thread and registers them.
    pub fn start(spec: &FleetSpec, text: Arc<TextModel>, registrar: Registrar) -> Result<RunningFleet> {
        let (configs, announcing) = spec.configs()?;
        let plan = spec.plan()?;
        ensure!(!configs.is_empty(), "the fleet has no engines");
        let handles = Engine::start_group(configs, text.clone())?;
        let members = handles.into_iter().zip(announcing).map(|(handle, is)| Member::of(handle, is)).collect();
        let started = Instant::now();
        let mut fleet = RunningFleet { members, text, registrar, plan, started };
        fleet.announce_file()?;
        for member in 0..fleet.members.len() {
            fleet.register(member)?;
        }
        Ok(fleet)
    }

    /// Registration records, in the order of the specification.
    pub fn records(&self) -> Vec<Value> {
        self.members.iter().map(|member| member.record.clone()).collect()
    }

    /// The same as `--worker` arguments of a router.
    pub fn worker_flags(&self) -> Vec<String> {
        self.members.iter().map(|member| member.worker_flag.clone()).collect()
    }

    /// The engine of this number while it runs.
    pub fn engine(&self, number: usize) -> Option<&EngineHandle> {
        self.members.get(number)?.handle.as_ref()
    }

    /// Carries out the schedule until `stop` says something or its other end is gone; `said` hears of each change.
    pub fn run(&mut self, stop: &Receiver<()>, mut said: impl FnMut(&Action)) -> Result<()> {
        for action in std::mem::take(&mut self.plan) {
            let left = (self.started + action.at).saturating_duration_since(Instant::now());
            match stop.recv_timeout(left) {
                Err(RecvTimeoutError::Timeout) => {}
                Ok(()) | Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
            said(&action);
            self.apply(&action)?;
        }
        // An error means that nobody is left who could say stop.
        let _ = stop.recv();
        Ok(())
    }

    fn apply(&mut self, action: &Action) -> Result<()> {
        let member = &mut self.members[action.engine];
        match action.change {
            Change::Kill => {
                // Whoever is killed takes nothing back: its record stays until its lease has run out.
                if let Some(registration) = member.registration.take() {
                    registration.abandon();
                }
                member.handle = None;
            }
            Change::Restart => {
                if member.handle.is_none() {
                    let mut handles = Engine::start_group(vec![member.config.clone()], self.text.clone())?;
                    member.handle = handles.pop();
                    self.register(action.engine)?;
                }
            }
            Change::Freeze => member.change_faults(|faults, _| faults.stall = true),
            Change::Thaw => member.change_faults(|faults, usual| faults.stall = usual.stall),
            Change::Fail { rate } => member.change_faults(|faults, _| faults.fail_rate = rate),
            Change::Recover => member.change_faults(|faults, usual| faults.fail_rate = usual.fail_rate),
        }
        Ok(())
    }

    fn register(&mut self, number: usize) -> Result<()> {
        if let Registrar::Etcd(target) = &self.registrar {
            let member = &mut self.members[number];
            member.registration = Some(Registration::start(target.clone(), vec![member.record.clone()])?);
        }
        Ok(())
    }

    fn announce_file(&self) -> Result<()> {
        match &self.registrar {
            Registrar::File(path) => write_records(path, &self.records()),
            Registrar::None | Registrar::Etcd(_) => Ok(()),
        }
    }
}

impl Drop for RunningFleet {
    fn drop(&mut self) {
        // Registrations go first, so that routers stop sending before the engines are gone.
        if let Registrar::File(path) = &self.registrar
            && let Err(error) = write_records(path, &[])
        {
            tracing::warn!(%error, "the workers file still lists the engines");
        }
        self.members.iter_mut().for_each(|member| member.registration = None);
        self.members.clear();
    }
}

impl Member {
    fn of(handle: EngineHandle, is_announcing: bool) -> Member {
        let mut config = handle.config.clone();
        config.port = handle.addr.port();
        config.events_port = handle.events_addr.rsplit(':').next().and_then(|port| port.parse().ok()).unwrap_or(0);
        let mut record = handle.registration();
        if !is_announcing {
            record["kv_events_endpoint"] = Value::Null;
        }
        Member { config, record, worker_flag: handle.worker_flag(), handle: Some(handle), registration: None }
    }

    /// `change` gets the faults to be and the configured ones. Nothing happens to an engine that is killed.
    fn change_faults(&mut self, change: impl FnOnce(&mut Faults, &Faults)) {
        let usual = &self.config.faults;
        if let Some(handle) = &self.handle {
            let mut faults = handle.faults();
            change(&mut faults, usual);
            handle.set_faults(faults);
        }
    }
}

/// Replaces the file as a whole: a reader sees the old list or the new one.
fn write_records(path: &Path, records: &[Value]) -> Result<()> {
    let part = path.with_extension("part");
    std::fs::write(&part, serde_json::to_string_pretty(records)? + "\n")
        .and_then(|()| std::fs::rename(&part, path))
        .with_context(|| format!("writing {}", path.display()))
}

#[cfg(test)]
mod tests;
