//! `infera-router inspect events`: shows, frame by frame, what the router makes of a KV-event stream, without traffic.
//! Feeds the router's own decoder, sequence rules and mirror; owns one worker's view. Never talks to an engine but to listen.

use std::io::{BufRead, Write};

use anyhow::Context;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};

use crate::events::decode::Decoder;
use crate::events::frame;
use crate::events::sequence::{Sequence, Step};
use crate::index::{Mirror, Tree};

/// Arguments of `inspect events`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Print the visible blocks of the plain namespace: router hashes in hex, sorted.
    #[arg(long)]
    pub hashes: bool,
    /// Listen to a publisher (`tcp://host:port`) instead of reading recorded frames from stdin.
    #[arg(long, value_name = "ENDPOINT")]
    pub connect: Option<String>,
}

/// One line of output: the state after one live frame.
#[derive(Debug, Serialize)]
pub struct Line {
    pub seq: Option<u64>,
    /// Events applied and skipped, of this frame.
    pub applied: u32,
    pub skipped: u32,
    pub visible_blocks: u32,
    pub visible_plain_blocks: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hashes: Option<Vec<String>>,
    /// Why (the rest of) the frame could not be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// One worker's view, fed with multipart messages.
pub struct Inspector {
    decoder: Decoder,
    sequence: Sequence,
    tree: Tree,
    mirror: Mirror,
    with_hashes: bool,
}

impl Inspector {
    pub fn new(with_hashes: bool) -> Self {
        Self {
            decoder: Decoder::default(),
            sequence: Sequence::new(false),
            tree: Tree::default(),
            mirror: Mirror::new(0),
            with_hashes,
        }
    }

    /// Applies one live message and describes the view after it.
    pub fn message<F: std::ops::Deref<Target = [u8]>>(&mut self, frames: &[F]) -> Line {
        let (mut applied, mut skipped) = (0, 0);
        let (seq, error) = match frame::live(frames) {
            Err(error) => (None, Some(error)),
            Ok(live) => {
                let step = self.sequence.on_live(live.sequence, live.payload, 0);
                if matches!(step, Step::ResetAndApply { .. }) {
                    self.mirror.clear(&mut self.tree);
                }
                let mut error = None;
                if step != Step::Drop {
                    let (mirror, tree) = (&mut self.mirror, &mut self.tree);
                    mirror.begin_batch();
                    let summary = self.decoder.decode(live.payload, |event| {
                        mirror.apply(tree, &event);
                    });
                    (applied, skipped, error) = (summary.applied, summary.skipped_total(), summary.error);
                }
                (live.sequence, error)
            }
        };
        let plain = self.mirror.plain_blocks(&self.tree);
        Line {
            seq,
            applied,
            skipped,
            visible_blocks: self.tree.held_count(0),
            visible_plain_blocks: plain.len(),
            hashes: self.with_hashes.then(|| plain.iter().map(|block| format!("{:016x}", block.0)).collect()),
            error: error.map(|error| error.to_string()),
        }
    }
}

/// A line of a recording; only `sub` lines carry live frames.
#[derive(Deserialize)]
struct Record {
    kind: String,
    #[serde(default)]
    frames: Vec<String>,
}

pub fn run(args: &Args) -> anyhow::Result<()> {
    let output = std::io::stdout().lock();
    match &args.connect {
        Some(endpoint) => listen(endpoint, args.hashes, output),
        None => replay(std::io::stdin().lock(), args.hashes, output),
    }
}

/// Reads a recording, one JSON line for each message, and writes one line for each live frame.
pub fn replay(input: impl BufRead, with_hashes: bool, mut output: impl Write) -> anyhow::Result<()> {
    let mut inspector = Inspector::new(with_hashes);
    for (number, line) in input.lines().enumerate() {
        let line = line.context("cannot read the recording")?;
        if line.trim().is_empty() {
            continue;
        }
        let record: Record = serde_json::from_str(&line).with_context(|| format!("line {}", number + 1))?;
        if record.kind != "sub" {
            continue;
        }
        let frames: Vec<Vec<u8>> = record
            .frames
            .iter()
            .map(|text| STANDARD.decode(text))
            .collect::<Result<_, _>>()
            .with_context(|| format!("line {}: frames are base64", number + 1))?;
        write_line(&mut output, &inspector.message(&frames))?;
    }
    Ok(())
}

/// Listens to a publisher and writes one line for each frame, until the output is closed.
pub fn listen(endpoint: &str, with_hashes: bool, mut output: impl Write) -> anyhow::Result<()> {
    let socket = crate::ingest::socket::subscribe(&zmq::Context::new(), endpoint)
        .with_context(|| format!("cannot subscribe to {endpoint}"))?;
    let mut inspector = Inspector::new(with_hashes);
    loop {
        let frames = socket.recv_multipart(0).context("cannot receive")?;
        write_line(&mut output, &inspector.message(&frames))?;
    }
}

fn write_line(output: &mut impl Write, line: &Line) -> anyhow::Result<()> {
    serde_json::to_writer(&mut *output, line)?;
    output.write_all(b"\n")?;
    output.flush()?;
    Ok(())
}
