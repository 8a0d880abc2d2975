//! The machine under the measurement: cores, pinning, descriptor limit, the stop signal.
//!
//! Owns process-wide settings. Never starts or measures anything.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::Serialize;

/// Which core a proxy runs on, and which one load and backend share.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Cores {
    pub proxy: usize,
    pub load: usize,
}

impl Cores {
    /// The first two cores this process may use. On a single core both are the same, and CPU figures
    /// stay valid while throughput means nothing.
    pub fn detect() -> Result<Cores> {
        let allowed = sched_getaffinity(None)?;
        let mut cores = (0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core));
        let proxy = cores.next().context("no usable core")?;
        Ok(Cores { proxy, load: cores.next().unwrap_or(proxy) })
    }
}

/// Pins the calling thread; threads and processes that it starts later inherit the core.
pub fn pin_current_thread(core: usize) -> Result<()> {
    pin_thread(None, core)
}

/// Pins any thread by its id.
pub fn pin_thread(thread: Option<rustix::process::Pid>, core: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(core);
    sched_setaffinity(thread, &set).with_context(|| format!("cannot pin to core {core}"))
}

/// CPU time that the calling thread has used.
pub fn thread_cpu() -> std::time::Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    std::time::Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Raises the soft descriptor limit to the hard one (children inherit it) and returns it.
pub fn raise_descriptor_limit() -> Result<u64> {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum })?;
    Ok(limit.maximum.unwrap_or(u64::MAX))
}

/// Set by SIGINT, SIGTERM and SIGHUP. Every loop of the harness asks it, so that an interrupted run unwinds and
/// every started process and temporary directory goes with it.
#[derive(Clone, Debug, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Catches the signals from here on; a second one ends the process at once.
    pub fn install() -> Result<Interrupt> {
        let flag = Arc::new(AtomicBool::new(false));
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP] {
            signal_hook::flag::register_conditional_shutdown(signal, 130, Arc::clone(&flag))?;
            signal_hook::flag::register(signal, Arc::clone(&flag))?;
        }
        Ok(Interrupt(flag))
    }

    pub fn check(&self) -> Result<()> {
        if self.0.load(Ordering::Relaxed) {
            bail!("interrupted");
        }
        Ok(())
    }
}

/// What a reader must know to judge the figures.
#[derive(Clone, Debug, Serialize)]
pub struct Host {
    pub cpu: String,
    pub cores: usize,
    pub kernel: String,
    pub descriptors_max: u64,
    /// Runnable load of the last minute when the run began; above 1 on two cores the figures get noisy.
    pub load_average: String,
}

impl Host {
    pub fn describe(descriptors_max: u64) -> Host {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let cpu = read("/proc/cpuinfo")
            .lines()
            .find_map(|line| line.strip_prefix("model name")?.split_once(':').map(|(_, name)| name.trim().to_owned()));
        Host {
            cpu: cpu.unwrap_or_else(|| "unknown".to_owned()),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            descriptors_max,
            load_average: read("/proc/loadavg").split(' ').next().unwrap_or("").to_owned(),
        }
    }
}
