//! Logs: to stderr, through a queue and a thread of their own, so that a shard never waits for a terminal or
//! a pipe. A full queue drops lines rather than hold up a request.

use std::io::Write;

use tracing_appender::non_blocking::{NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::EnvFilter;

use crate::config::LogFormat;

/// Lines waiting to be written.
const QUEUE_LINES: usize = 64 * 1024;

/// Keeps the writing thread; dropping it writes what is queued.
pub struct Log(#[allow(dead_code)] WorkerGuard);

/// Starts logging with the filter of `RUST_LOG` (default `info`). A second call in one process has no effect.
pub fn start(format: LogFormat) -> Log {
    let (writer, guard) =
        NonBlockingBuilder::default().buffered_lines_limit(QUEUE_LINES).lossy(true).finish(std::io::stderr());
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(writer).with_ansi(false);
    // Fails only if a subscriber is there already, and then that one stays.
    let _ = match format {
        LogFormat::Text => builder.try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
    Log(guard)
}

/// The one line that says why the process ends.
pub fn last_words(error: &anyhow::Error) {
    // A closed stderr leaves nobody to tell.
    let _ = writeln!(std::io::stderr().lock(), "error: {error:#}");
}
