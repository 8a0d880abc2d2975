//! Idle streams: many open SSE answers that have sent one event and then nothing.
//!
//! Owns the open connections and the judgement of when memory has settled. Never measures CPU per request.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::Serialize;

use crate::http::{BodyReader, response_head};
use crate::machine::Interrupt;
use crate::process::{Memory, Process};

/// Streams opened before the harness waits for all their first events; below any listener's backlog.
const STEP_STREAMS: usize = 100;

/// For one stream's first event.
const EVENT_PATIENCE: Duration = Duration::from_secs(20);

/// Memory counts as settled when it has moved by less than 1 % over so many samples, or after the patience.
const SETTLED_SAMPLES: u32 = 4;
const SAMPLE_INTERVAL: Duration = Duration::from_millis(250);
const SETTLE_PATIENCE: Duration = Duration::from_secs(15);

/// Proxies give buffers back some time after the last byte, and pages some time after that.
const RELEASE_TIME: Duration = Duration::from_secs(4);

/// Memory of a proxy around a set of idle streams, bytes.
#[derive(Clone, Debug, Serialize)]
pub struct Idle {
    pub proxy: String,
    pub streams: usize,
    pub private_bytes_per_stream: f64,
    pub pss_bytes_per_stream: f64,
    /// What is left per stream some seconds after all of them have closed.
    pub private_bytes_per_stream_after_close: f64,
    /// CPU over wall time while all streams are open and silent.
    pub idle_cpu_share: f64,
    pub before: Memory,
    pub open: Memory,
    pub closed: Memory,
}

/// Opens `streams` idle streams through `target`, measures, closes them, measures again.
pub fn run(
    name: &str,
    target: SocketAddr,
    streams: usize,
    request: &[u8],
    event: &[u8],
    process: &Process,
    interrupt: &Interrupt,
) -> Result<Idle> {
    let members = process.members()?;
    let before = settle(&members, Duration::ZERO, interrupt)?;
    let mut open = Vec::with_capacity(streams);
    while open.len() < streams {
        interrupt.check()?;
        let step = STEP_STREAMS.min(streams - open.len());
        let first = open.len();
        for _ in 0..step {
            let mut stream = TcpStream::connect(target).with_context(|| format!("stream {}", open.len()))?;
            stream.write_all(request)?;
            open.push(stream);
        }
        for (offset, stream) in open[first..].iter_mut().enumerate() {
            first_event(stream, event).with_context(|| format!("stream {}", first + offset))?;
        }
    }
    let opened = settle(&members, RELEASE_TIME, interrupt)?;
    let (started, cpu_before) = (Instant::now(), Process::cpu(&members));
    std::thread::sleep(Duration::from_secs(1));
    let idle_cpu_share = (Process::cpu(&members) - cpu_before).as_secs_f64() / started.elapsed().as_secs_f64();
    drop(open);
    let closed = settle(&members, RELEASE_TIME, interrupt)?;
    let each = |bytes: u64, base: u64| (bytes as f64 - base as f64) / streams as f64;
    Ok(Idle {
        proxy: name.to_owned(),
        streams,
        private_bytes_per_stream: each(opened.private_bytes, before.private_bytes),
        pss_bytes_per_stream: each(opened.pss_bytes, before.pss_bytes),
        private_bytes_per_stream_after_close: each(closed.private_bytes, before.private_bytes),
        idle_cpu_share,
        before,
        open: opened,
        closed,
    })
}

/// Reads head and first event, and nothing more: the stream must then be open and silent.
fn first_event(stream: &mut TcpStream, event: &[u8]) -> Result<()> {
    stream.set_read_timeout(Some(EVENT_PATIENCE))?;
    let mut input = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let count = stream.read(&mut buffer).context("waiting for the first event")?;
        ensure!(count > 0, "closed before its first event");
        input.extend_from_slice(&buffer[..count]);
        let Some(head) = response_head(&input)? else { continue };
        ensure!(head.status == 200, "status {}", head.status);
        let mut received = Vec::new();
        let mut body = BodyReader::new(head.framing);
        body.push(&input[head.bytes..], |data| {
            received.extend_from_slice(data);
            Ok(())
        })?;
        ensure!(event.starts_with(&received) && !body.done(), "another answer than the backend's");
        if received.len() == event.len() {
            return Ok(());
        }
    }
}

/// Waits for `at_least`, and then until the memory stands still.
fn settle(members: &[u32], at_least: Duration, interrupt: &Interrupt) -> Result<Memory> {
    let started = Instant::now();
    let deadline = started + SETTLE_PATIENCE;
    let mut last = Process::memory(members);
    let mut still = 0;
    while (still < SETTLED_SAMPLES || started.elapsed() < at_least) && Instant::now() < deadline {
        interrupt.check()?;
        std::thread::sleep(SAMPLE_INTERVAL);
        let now = Process::memory(members);
        let moved = now.private_bytes.abs_diff(last.private_bytes);
        still = if moved * 100 < last.private_bytes { still + 1 } else { 0 };
        last = now;
    }
    ensure!(last.private_bytes > 0, "the proxy is gone or its memory cannot be read");
    Ok(last)
}
