//! Owns the router's binary and process: find or build it, start it on a free port, stop it on every exit path.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use crate::sibling;

const BINARY: &str = "infera-router";
/// From SIGTERM to SIGKILL.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
const LOG_LINES_SHOWN: usize = 15;

/// The router binary beside this program; see [`sibling::find_or_build`].
pub fn find_or_build(say: &mut dyn FnMut(&str)) -> Result<PathBuf> {
    // By its own package alone: most who come here have built it so before.
    sibling::find_or_build(&[], BINARY, BINARY, say).context("another router can be named with --router")
}

/// A running router; killed when dropped.
pub struct RouterProcess {
    child: Child,
    port: u16,
    log: PathBuf,
}

impl RouterProcess {
    /// Starts the binary on a free port of 127.0.0.1. Its output goes to `log`.
    pub fn start(binary: &Path, arguments: &[String], log: &Path) -> Result<RouterProcess> {
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let output = std::fs::File::create(log)?;
        let child = Command::new(binary)
            .args(["--host", "127.0.0.1", "--port", &port.to_string()])
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn()
            .with_context(|| format!("starting {}", binary.display()))?;
        Ok(RouterProcess { child, port, log: log.to_path_buf() })
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// An error with the end of its log if the process has ended.
    pub fn check_alive(&mut self) -> Result<()> {
        match self.child.try_wait()? {
            None => Ok(()),
            Some(status) => bail!("the router ended early ({status}); its last words:\n{}", self.last_words()),
        }
    }

    /// The last lines of the router's log.
    pub fn last_words(&self) -> String {
        let log = std::fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&log);
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(LOG_LINES_SHOWN)..].join("\n")
    }

    /// Asks the router to end; says what is wrong if it does not end well.
    pub fn stop(mut self) -> Option<String> {
        match self.end() {
            Ok(status) if status.success() => None,
            Ok(status) => Some(format!("the router ended with {status}; its last words:\n{}", self.last_words())),
            Err(error) => Some(format!("the router could not be stopped: {error}")),
        }
    }

    fn end(&mut self) -> Result<ExitStatus> {
        if let Some(status) = self.child.try_wait()? {
            return Ok(status);
        }
        let pid = Pid::from_child(&self.child);
        kill_process(pid, Signal::TERM)?;
        let deadline = Instant::now() + STOP_TIMEOUT;
        while Instant::now() < deadline {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        self.child.kill()?;
        Ok(self.child.wait()?)
    }
}

impl Drop for RouterProcess {
    fn drop(&mut self) {
        // After `stop` this finds a process that has been waited for.
        if let Err(error) = self.end() {
            tracing::warn!(%error, "router process left behind");
        }
    }
}
