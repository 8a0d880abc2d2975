//! The access log: one thread takes the shards' lines, formats them and writes them to a file or to standard output.
//! Whoever reads slowly costs lines, which are counted, and never holds up a shard.

use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread::Thread;
use std::time::{Duration, SystemTime};

use anyhow::Context;
use jiff::Timestamp;
use prometheus::Registry;
use serde::{Serialize, Serializer};
use signal_hook::consts::SIGUSR1;
use tracing::{info, warn};

use crate::config::LogFormat;
use crate::proxy::{AccessLine, AccessQueues, Leg, Stage};

/// How long a line may wait for the thread.
const PERIOD: Duration = Duration::from_millis(50);

/// How long the end of the process waits for lines that nobody reads.
const END_PATIENCE: Duration = Duration::from_secs(2);

/// What the options ask for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AccessLogSettings {
    pub format: LogFormat,
    /// Absent for standard output.
    pub file: Option<PathBuf>,
}

/// The log's thread. Dropping it writes what waits.
pub struct AccessLog {
    queues: Arc<AccessQueues>,
    is_ending: Arc<AtomicBool>,
    thread: Thread,
    ended: Receiver<()>,
}

impl AccessLog {
    /// Opens the file and starts the thread; nothing without settings.
    ///
    /// # Errors
    /// A file that cannot be opened, a thread or signal handler that cannot be had.
    pub fn start(
        settings: Option<&AccessLogSettings>,
        shards: usize,
        registry: &Registry,
    ) -> anyhow::Result<Option<Self>> {
        let Some(settings) = settings else { return Ok(None) };
        let reopen = Arc::new(AtomicBool::new(false));
        signal_hook::flag::register(SIGUSR1, reopen.clone()).context("cannot install a signal handler")?;
        let place = Place::open(settings.file.as_deref())?;
        let queues = Arc::new(AccessQueues::new(shards, registry)?);
        let is_ending = Arc::new(AtomicBool::new(false));
        let (sender, ended) = channel::<()>();
        let writer = Writer {
            queues: queues.clone(),
            format: settings.format,
            place,
            reopen,
            text: String::new(),
            is_told: false,
        };
        let stop = is_ending.clone();
        let thread = std::thread::Builder::new().name("access-log".to_owned()).spawn(move || {
            writer.run(&stop);
            drop(sender);
        });
        let thread = thread.context("cannot start a thread")?.thread().clone();
        Ok(Some(Self { queues, is_ending, thread, ended }))
    }

    /// Where the shards put their lines.
    pub fn queues(&self) -> Arc<AccessQueues> {
        self.queues.clone()
    }
}

impl Drop for AccessLog {
    fn drop(&mut self) {
        self.is_ending.store(true, Ordering::Release);
        self.thread.unpark();
        // A pipe that nobody reads must not keep the process from ending.
        let _ = self.ended.recv_timeout(END_PATIENCE);
    }
}

/// Where lines go.
enum Place {
    Output,
    File { path: PathBuf, file: File },
}

impl Place {
    fn open(path: Option<&Path>) -> anyhow::Result<Self> {
        let Some(path) = path else { return Ok(Place::Output) };
        let file = append_to(path).with_context(|| format!("cannot open the access log {}", path.display()))?;
        Ok(Place::File { path: path.to_owned(), file })
    }

    fn reopen(&mut self) {
        let Place::File { path, file } = self else { return };
        match append_to(path) {
            Ok(opened) => {
                *file = opened;
                info!(path = %path.display(), "the access log was opened anew");
            }
            Err(error) => {
                warn!(path = %path.display(), %error, "the access log cannot be opened anew; the old file stays")
            }
        }
    }

    fn write(&mut self, text: &str) -> io::Result<()> {
        match self {
            Place::Output => io::stdout().lock().write_all(text.as_bytes()),
            Place::File { file, .. } => file.write_all(text.as_bytes()),
        }
    }
}

fn append_to(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).open(path)
}

struct Writer {
    queues: Arc<AccessQueues>,
    format: LogFormat,
    place: Place,
    reopen: Arc<AtomicBool>,
    /// Reused from turn to turn.
    text: String,
    /// That writing fails was said.
    is_told: bool,
}

impl Writer {
    fn run(mut self, is_ending: &AtomicBool) {
        loop {
            // Looked at before the queues: what was put in before the end is written.
            let ends = is_ending.load(Ordering::Acquire);
            if self.reopen.swap(false, Ordering::Relaxed) {
                self.place.reopen();
            }
            self.turn();
            if ends {
                return;
            }
            std::thread::park_timeout(PERIOD);
        }
    }

    fn turn(&mut self) {
        self.text.clear();
        for line in self.queues.drain() {
            match self.format {
                // Its keys are strings and its numbers finite or null, so that it can always be written.
                LogFormat::Json => self.text.push_str(&serde_json::to_string(&JsonLine::of(&line)).unwrap_or_default()),
                LogFormat::Text => text_line(&line, &mut self.text),
            }
            self.text.push('\n');
        }
        if self.text.is_empty() {
            return;
        }
        if let Err(error) = self.place.write(&self.text)
            && !std::mem::replace(&mut self.is_told, true)
        {
            warn!(%error, "the access log cannot be written; its lines are lost until it can");
        }
    }
}

fn time(at: SystemTime) -> String {
    Timestamp::try_from(at).map(|at| format!("{at:.6}")).unwrap_or_default()
}

/// Milliseconds with three digits behind the point.
fn ms(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1e6).round() / 1e3
}

fn stages(line: &AccessLine) -> impl Iterator<Item = (&'static str, f64)> + '_ {
    let came_to = Stage::NAMES.iter().zip(&line.stages).filter(|(_, took)| !took.is_zero());
    came_to.map(|(name, took)| (*name, ms(*took)))
}

/// A line as JSON. Written as it stands: a tree of values in between costs three times as many instructions.
#[derive(Serialize)]
struct JsonLine<'a> {
    time: String,
    client: SocketAddr,
    request_id: Option<&'a str>,
    method: &'a str,
    path: &'a str,
    model: &'a str,
    status: Option<u16>,
    ended: &'a str,
    body_bytes_in: u64,
    body_bytes_out: u64,
    #[serde(serialize_with = "workers")]
    workers: &'a [Leg],
    retries: u32,
    first_byte_ms: Option<f64>,
    total_ms: f64,
    #[serde(serialize_with = "stages_ms")]
    stages_ms: &'a AccessLine,
}

#[derive(Serialize)]
struct JsonLeg<'a> {
    role: &'a str,
    worker: &'a str,
    cache_hits: u32,
    request_blocks: u32,
}

impl<'a> JsonLine<'a> {
    fn of(line: &'a AccessLine) -> Self {
        Self {
            time: time(line.at),
            client: line.client,
            request_id: line.request_id.as_deref(),
            method: line.method.as_str(),
            path: &line.path,
            model: &line.model,
            status: line.status.map(|status| status.as_u16()),
            ended: line.ended.as_str(),
            body_bytes_in: line.body_bytes_in,
            body_bytes_out: line.body_bytes_out,
            workers: &line.legs,
            retries: line.retries,
            first_byte_ms: line.first_byte.map(ms),
            total_ms: ms(line.total),
            stages_ms: line,
        }
    }
}

fn workers<S: Serializer>(legs: &[Leg], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(legs.iter().map(|Leg { role, route_key, cache_hits, request_blocks }| JsonLeg {
        role: role.as_str(),
        worker: route_key,
        cache_hits: *cache_hits,
        request_blocks: *request_blocks,
    }))
}

fn stages_ms<S: Serializer>(line: &AccessLine, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(stages(line))
}

/// `key=value` pairs; words that came from outside are quoted as in Rust, so that none can end a line or pose as a pair.
fn text_line(line: &AccessLine, out: &mut String) {
    // Writing to a string never fails.
    let _ = (|| -> std::fmt::Result {
        write!(out, "{} client={} method={} path={:?}", time(line.at), line.client, line.method, line.path)?;
        if let Some(id) = &line.request_id {
            write!(out, " request_id={id:?}")?;
        }
        write!(out, " model={:?} status=", line.model)?;
        match line.status {
            Some(status) => write!(out, "{}", status.as_u16())?,
            None => out.push('-'),
        }
        let (ended, bytes_in, bytes_out) = (line.ended.as_str(), line.body_bytes_in, line.body_bytes_out);
        write!(out, " ended={ended} body_bytes_in={bytes_in} body_bytes_out={bytes_out} retries={}", line.retries)?;
        for leg in &line.legs {
            let (role, hits, blocks) = (leg.role.as_str(), leg.cache_hits, leg.request_blocks);
            write!(out, " {role}={:?} {role}_hits={hits}/{blocks}", leg.route_key)?;
        }
        if let Some(first_byte) = line.first_byte {
            write!(out, " first_byte_ms={}", ms(first_byte))?;
        }
        write!(out, " total_ms={}", ms(line.total))?;
        for (name, took) in stages(line) {
            write!(out, " {name}_stage_ms={took}")?;
        }
        Ok(())
    })();
}
