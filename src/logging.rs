//! Logs: to stderr, through a queue and a thread of their own, so that a shard never waits for a terminal or
//! a pipe. A full queue drops lines rather than hold up a request. The filter can be replaced at run time.

use std::io::Write;
use std::sync::Arc;

use arc_swap::ArcSwap;
use tracing::subscriber::Interest;
use tracing::{Metadata, Subscriber, info};
use tracing_appender::non_blocking::{NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, fmt};

use crate::config::LogFormat;

/// Lines waiting to be written.
const QUEUE_LINES: usize = 64 * 1024;

/// Keeps the writing thread; dropping it writes what is queued.
pub struct Log {
    _writer: WorkerGuard,
    filter: LogFilter,
}

impl Log {
    pub fn filter(&self) -> LogFilter {
        self.filter.clone()
    }
}

/// The filter of all log lines. `tracing_subscriber::reload` would do, but takes a lock for every line that every shard
/// logs; this one is read like the fleet's view.
#[derive(Clone)]
pub struct LogFilter(Arc<ArcSwap<EnvFilter>>);

impl LogFilter {
    fn new(filter: EnvFilter) -> Self {
        Self(Arc::new(ArcSwap::from_pointee(filter)))
    }

    /// As it would be written in `RUST_LOG`.
    pub fn get(&self) -> String {
        self.0.load().to_string()
    }

    /// Replaces the filter; directives about spans have no effect, since the router makes none.
    ///
    /// # Errors
    /// What is wrong with it; the old one stays.
    pub fn set(&self, text: &str) -> Result<(), String> {
        self.0.store(Arc::new(parse(text)?));
        // Call sites remember whether they are heard.
        tracing::callsite::rebuild_interest_cache();
        info!(filter = self.get(), "the log's filter was changed");
        Ok(())
    }
}

impl<S: Subscriber> Layer<S> for LogFilter {
    fn register_callsite(&self, metadata: &'static Metadata<'static>) -> Interest {
        Layer::<S>::register_callsite(&**self.0.load(), metadata)
    }

    fn enabled(&self, metadata: &Metadata<'_>, context: Context<'_, S>) -> bool {
        Layer::<S>::enabled(&**self.0.load(), metadata, context)
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Layer::<S>::max_level_hint(&**self.0.load())
    }
}

/// A level, or levels by target as in `info,infera_router::parity=debug`.
///
/// # Errors
/// What is wrong with it.
pub fn parse(text: &str) -> Result<EnvFilter, String> {
    let text = text.trim();
    if text.is_empty() {
        return Err("the filter is empty; `off` logs nothing".to_owned());
    }
    EnvFilter::builder().parse(text).map_err(|error| format!("`{text}`: {error}"))
}

/// Starts logging. A second call in one process has no effect.
pub fn start(format: LogFormat, filter: EnvFilter) -> Log {
    let (writer, guard) =
        NonBlockingBuilder::default().buffered_lines_limit(QUEUE_LINES).lossy(true).finish(std::io::stderr());
    let filter = LogFilter::new(filter);
    let lines = fmt::layer().with_writer(move || OneLine(writer.clone())).with_ansi(false);
    let registry = tracing_subscriber::registry().with(filter.clone());
    // Fails only if a subscriber is there already, and then that one stays.
    let _ = match format {
        LogFormat::Text => registry.with(lines).try_init(),
        LogFormat::Json => registry.with(lines.json().flatten_event(true)).try_init(),
    };
    Log { _writer: guard, filter }
}

/// Writes each event as one line, whatever stands in it: a name or an answer from outside must not look like a line of ours.
struct OneLine<W>(W);

impl<W: Write> Write for OneLine<W> {
    /// `event` is a whole one, as the formatter hands it over.
    fn write(&mut self, event: &[u8]) -> std::io::Result<usize> {
        let text = event.strip_suffix(b"\n").unwrap_or(event);
        if memchr::memchr2(b'\n', b'\r', text).is_none() {
            return self.0.write(event);
        }
        let mut line = Vec::with_capacity(event.len() + 16);
        for byte in text {
            match byte {
                b'\n' => line.extend_from_slice(b"\\n"),
                b'\r' => line.extend_from_slice(b"\\r"),
                _ => line.push(*byte),
            }
        }
        line.push(b'\n');
        self.0.write_all(&line).map(|()| event.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.0.flush()
    }
}

/// The one line that says why the process ends.
pub fn last_words(error: &anyhow::Error) {
    // A closed stderr leaves nobody to tell.
    let _ = writeln!(std::io::stderr().lock(), "error: {error:#}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_one_line_whatever_stands_in_it() {
        let mut written = OneLine(Vec::new());
        written.write_all(b"plain\n").unwrap();
        written.write_all(b"name a\r\n2026 ERROR forged\n\n").unwrap();
        assert_eq!(written.0, b"plain\nname a\\r\\n2026 ERROR forged\\n\n");
    }

    #[test]
    fn a_filter_that_cannot_be_read_leaves_the_old_one() {
        let filter = LogFilter::new(EnvFilter::new("info"));
        assert!(filter.set("infera_router=debug,warn").is_ok());
        assert_eq!(filter.get(), "infera_router=debug,warn");
        for bad in ["", "  ", "a=b=c", "infera_router=loud"] {
            assert!(filter.set(bad).is_err(), "{bad}");
            assert_eq!(filter.get(), "infera_router=debug,warn");
        }
    }
}
