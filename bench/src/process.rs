//! One started proxy: its process group, its CPU time, its memory, its end.
//!
//! Owns the child and everything the child starts. Never knows what the child serves.

use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process_group};
use serde::Serialize;

use crate::machine::{Cores, pin_current_thread, pin_thread};

/// After SIGTERM, before SIGKILL.
const STOP_PATIENCE: Duration = Duration::from_secs(3);

/// Bytes that are a process group's own, and its share of what it maps together with others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Memory {
    pub private_bytes: u64,
    pub pss_bytes: u64,
}

/// A child in a process group of its own, pinned to one core. Dropping it ends the whole group.
pub struct Process {
    child: Child,
    group: Pid,
    log: PathBuf,
}

impl Process {
    /// Starts `command` on `cores.proxy` with its output in `log`.
    pub fn start(mut command: Command, cores: Cores, log: &Path) -> Result<Process> {
        let output = File::create(log).with_context(|| format!("cannot create {}", log.display()))?;
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output).process_group(0);
        // A child inherits the core of the thread that starts it; std offers no other safe way.
        pin_current_thread(cores.proxy)?;
        let child = command.spawn().with_context(|| format!("cannot start {}", command.get_program().display()));
        pin_current_thread(cores.load)?;
        let child = child?;
        let group = Pid::from_child(&child);
        Ok(Process { child, group, log: log.to_owned() })
    }

    /// An error with the end of the child's output once it is gone.
    pub fn check_alive(&mut self) -> Result<()> {
        if let Some(status) = self.child.try_wait()? {
            bail!("ended early ({status}); the end of its output:\n{}", self.log_tail());
        }
        Ok(())
    }

    pub fn log_tail(&self) -> String {
        let text = fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }

    /// Every process of the group, by `/proc/*/stat`, so that masters, workers and shells all count.
    pub fn members(&self) -> Result<Vec<u32>> {
        let mut members = Vec::new();
        for entry in fs::read_dir("/proc")?.flatten() {
            let Some(process) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
            // A process may end between the listing and the read.
            let Ok(stat) = fs::read_to_string(format!("/proc/{process}/stat")) else { continue };
            if group_of(&stat) == Some(self.group.as_raw_nonzero().get()) {
                members.push(process);
            }
        }
        Ok(members)
    }

    /// Moves every thread of the group to one core: some servers pin themselves.
    pub fn pin(&self, core: usize) -> Result<()> {
        for process in self.members()? {
            for thread in threads(process) {
                if let Some(thread) = Pid::from_raw(thread) {
                    // Threads of the kernel's io_uring workers may refuse or be gone.
                    let _ = pin_thread(Some(thread), core);
                }
            }
        }
        Ok(())
    }

    /// CPU time that `members` have used so far, from `/proc/<pid>/task/*/schedstat` (io_uring's kernel workers included).
    pub fn cpu(members: &[u32]) -> Duration {
        let nanoseconds = members
            .iter()
            .flat_map(|process| threads(*process).into_iter().map(move |thread| (process, thread)))
            .filter_map(|(process, thread)| fs::read_to_string(format!("/proc/{process}/task/{thread}/schedstat")).ok())
            .filter_map(|line| line.split(' ').next()?.parse::<u64>().ok())
            .sum();
        Duration::from_nanos(nanoseconds)
    }

    pub fn memory(members: &[u32]) -> Memory {
        let mut memory = Memory { private_bytes: 0, pss_bytes: 0 };
        for process in members {
            let rollup = fs::read_to_string(format!("/proc/{process}/smaps_rollup")).unwrap_or_default();
            let one = memory_of(&rollup);
            memory.private_bytes += one.private_bytes;
            memory.pss_bytes += one.pss_bytes;
        }
        memory
    }

    fn signal(&self, signal: Signal) {
        // The group may be gone already, which is what the signal is for.
        let _ = kill_process_group(self.group, signal);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.signal(Signal::TERM);
        let deadline = Instant::now() + STOP_PATIENCE;
        loop {
            let gone = !matches!(self.child.try_wait(), Ok(None));
            let members = self.members().unwrap_or_default();
            if gone && members.is_empty() {
                return;
            }
            if Instant::now() > deadline {
                self.signal(Signal::KILL);
                let _ = self.child.wait();
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

fn threads(process: u32) -> Vec<i32> {
    let Ok(tasks) = fs::read_dir(format!("/proc/{process}/task")) else { return Vec::new() };
    tasks.flatten().filter_map(|task| task.file_name().to_str()?.parse().ok()).collect()
}

/// The process group in a line of `/proc/<pid>/stat`; the command name may itself hold blanks and brackets.
fn group_of(stat: &str) -> Option<i32> {
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(2)?.parse().ok()
}

/// Sums of one `/proc/<pid>/smaps_rollup`.
fn memory_of(rollup: &str) -> Memory {
    let mut memory = Memory { private_bytes: 0, pss_bytes: 0 };
    for line in rollup.lines() {
        let Some((name, value)) = line.split_once(':') else { continue };
        let bytes = value.trim().trim_end_matches(" kB").parse::<u64>().unwrap_or(0) * 1024;
        match name {
            "Private_Clean" | "Private_Dirty" | "Private_Hugetlb" => memory.private_bytes += bytes,
            "Pss" => memory.pss_bytes += bytes,
            _ => {}
        }
    }
    memory
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_proc() {
        assert_eq!(group_of("12 (a) b (c)) S 1 77 3 0"), Some(77));
        assert_eq!(group_of("rubbish"), None);
        let rollup = "0-1 ---p 0 0 0 [rollup]\nRss: 9 kB\nPss:  5 kB\nPss_Dirty: 2 kB\nPrivate_Clean: 1 kB\nPrivate_Dirty: 3 kB\n";
        assert_eq!(memory_of(rollup), Memory { private_bytes: 4096, pss_bytes: 5120 });
    }

    #[test]
    fn counts_and_ends_the_whole_group() {
        let directory = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "sh -c 'while :; do :; done' & while :; do :; done"]);
        let cores = Cores::detect().unwrap();
        let mut process = Process::start(command, cores, &directory.path().join("log")).unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        let members = loop {
            let members = process.members().unwrap();
            if members.len() == 2 && Process::cpu(&members) > Duration::from_millis(20) {
                break members;
            }
            assert!(Instant::now() < deadline, "two busy shells expected, got {members:?}");
            std::thread::sleep(Duration::from_millis(5));
        };
        assert!(Process::memory(&members).private_bytes > 0);
        process.check_alive().unwrap();
        drop(process);
        for member in members {
            let stat = fs::read_to_string(format!("/proc/{member}/stat")).unwrap_or_default();
            assert!(stat.is_empty() || stat.contains(") Z "), "still there: {stat}");
        }
    }

    #[test]
    fn an_early_end_shows_the_output() {
        let directory = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "echo no such thing; exit 3"]);
        let mut process = Process::start(command, Cores::detect().unwrap(), &directory.path().join("log")).unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        let error = loop {
            match process.check_alive() {
                Err(error) => break format!("{error:#}"),
                Ok(()) => assert!(Instant::now() < deadline),
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        assert!(error.contains("no such thing") && error.contains("3"), "{error}");
    }
}
