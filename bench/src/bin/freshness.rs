//! `freshness`: how long an event takes from its publisher's socket to a reader of the view, and a booking to the ingest
//! core, while events storm. Owns the publishers, the paced storm, the reader and the table; the ingest core is the
//! router's own, and so are its sockets.
//!
//! Each worker stores suffixes of 160 blocks and removes the one that it stored four before, ten events of 16 blocks each.
//! The reader takes one sample at a time: the send of a suffix's last event until the view shows the suffix on its worker.
//! One that it never saw would be counted as late as the suffix's next turn.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use bench::kv_workload::{EVENT_BLOCKS, Payload, SUFFIX_BLOCKS, SYSTEM_PROMPTS, Suffix, WORKERS, Workload};
use bench::report::{ending, write_json};
use bench::statistics::percentile;
use clap::Parser;
use infera_router::fleet::{DiscoveredWorker, Slot, Target, WorkerState};
use infera_router::hash::BlockHash;
use infera_router::index::{Hits, View};
use infera_router::ingest::{Ingest, IngestConfig, IngestHandle};
use infera_router::load::Booking;
use serde::Serialize;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const PATIENCE: Duration = Duration::from_secs(20);
/// Suffixes per worker that come and go in turn; enough that their messages do not stay in a near cache.
const ROUND_SUFFIXES: usize = 8;
/// A suffix stays for so many turns.
const KEPT_SUFFIXES: usize = 4;
const BOOKING_EVERY: Duration = Duration::from_millis(1);

/// Event-to-view latency and booking lag under a storm of KV events on loopback.
#[derive(Parser)]
struct Arguments {
    /// Block events (stored or removed blocks) per second, all workers together.
    #[arg(long, default_value_t = 500_000)]
    rate: u64,
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// Publishers, at most as many as the workload has workers.
    #[arg(long, default_value_t = 16)]
    publishers: usize,
    /// Pause between two looks of the reader, us; adds to what it measures.
    #[arg(long, default_value_t = 50)]
    look_every_us: u64,
    #[arg(long)]
    json: Option<PathBuf>,
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

#[derive(Debug, Serialize)]
struct Report {
    rate_wanted: u64,
    /// What the publishers have sent, and the index has applied meanwhile, blocks/s.
    rate_sent: f64,
    rate_applied: f64,
    batches_lost: u64,
    publications: u64,
    event_to_view_us: Percentiles,
    booking_to_core_us: Percentiles,
}

#[derive(Debug, Serialize)]
struct Percentiles {
    samples: usize,
    p50: u64,
    p99: u64,
    maximum: u64,
    goal_p99: u64,
}

impl Percentiles {
    fn new(mut values: Vec<u64>, goal_p99: u64) -> Self {
        values.sort_unstable();
        let at = |percent| percentile(&values, percent);
        Self { samples: values.len(), p50: at(50.0), p99: at(99.0), maximum: at(100.0), goal_p99 }
    }
}

/// A suffix's messages and the prompt that they make known.
struct Turn {
    store: Vec<Payload>,
    remove: Vec<Payload>,
    prompt: Arc<[BlockHash]>,
}

/// One worker's engine, as far as the router can tell.
struct Publisher {
    socket: zmq::Socket,
    endpoint: String,
    sequence: u64,
    turns: Vec<Turn>,
    /// Messages of the turn at hand: first the removals of an earlier turn, then the stores.
    at: usize,
    turn: usize,
}

/// What the reader is to wait for.
struct Sample {
    sent: Instant,
    worker: usize,
    prompt: Arc<[BlockHash]>,
}

impl Publisher {
    fn new(context: &zmq::Context, workload: &mut Workload, worker: usize) -> Result<Self> {
        let socket = context.socket(zmq::XPUB)?;
        socket.set_sndhwm(0)?;
        socket.set_linger(0)?;
        socket.bind("tcp://127.0.0.1:*")?;
        let endpoint = socket.get_last_endpoint()?.map_err(|_| anyhow::anyhow!("the endpoint is not text"))?;
        let turns = (0..ROUND_SUFFIXES).map(|_| {
            let suffix = Suffix { worker, ..workload.new_suffix() };
            Turn {
                store: workload.store_suffix(suffix),
                remove: workload.remove_suffix(suffix),
                prompt: workload.prompt_of(suffix).into(),
            }
        });
        Ok(Self { socket, endpoint, sequence: 0, turns: turns.collect(), at: 0, turn: 0 })
    }

    fn send(&mut self, payload: &[u8]) -> Result<()> {
        let sequence = self.sequence.to_be_bytes();
        self.socket.send_multipart([b"".as_slice(), &sequence, payload], 0)?;
        self.sequence += 1;
        Ok(())
    }

    /// Sends the next message; true when it completes a suffix.
    fn step(&mut self) -> Result<bool> {
        let (former, current) = ((self.turn + ROUND_SUFFIXES - KEPT_SUFFIXES) % ROUND_SUFFIXES, self.turn);
        let removals = self.turns[former].remove.len();
        let payload = match self.at.checked_sub(removals) {
            None => self.turns[former].remove[self.at].clone(),
            Some(at) => self.turns[current].store[at].clone(),
        };
        self.send(&payload)?;
        self.at += 1;
        let is_complete = self.at == removals + self.turns[current].store.len();
        if is_complete {
            self.at = 0;
            self.turn = (self.turn + 1) % ROUND_SUFFIXES;
        }
        Ok(is_complete)
    }
}

fn main() -> ExitCode {
    ending("freshness", run(&Arguments::parse()))
}

fn run(arguments: &Arguments) -> Result<bool> {
    ensure!((1..=WORKERS).contains(&arguments.publishers), "1 to {WORKERS} publishers");
    let mut workload = Workload::new(arguments.seed);
    let context = zmq::Context::new();
    let mut publishers = (0..arguments.publishers)
        .map(|worker| Publisher::new(&context, &mut workload, worker))
        .collect::<Result<Vec<_>>>()?;
    let ingest = Ingest::start(IngestConfig::default())?;
    let workers = publishers.iter().enumerate().map(|(number, publisher)| worker(number, &publisher.endpoint));
    ingest.fleet_updates.send(workers.collect::<Result<_>>()?);
    for (number, publisher) in publishers.iter_mut().enumerate() {
        publisher.socket.set_rcvtimeo(PATIENCE.as_millis() as i32)?;
        publisher.socket.recv_bytes(0).context("the router did not subscribe")?;
        for system in 0..SYSTEM_PROMPTS {
            workload.store_system(number, system).iter().try_for_each(|payload| publisher.send(payload))?;
        }
    }
    let report = storm(arguments, publishers, &ingest)?;
    ensure!(ingest.stop(), "the ingest core has panicked");
    let is_met = print(&report)?;
    write_json(arguments.json.as_deref(), &report)?;
    Ok(is_met)
}

fn worker(number: usize, endpoint: &str) -> Result<DiscoveredWorker> {
    let id = format!("worker-{number:02}:1");
    let record = serde_json::from_value(serde_json::json!({
        "worker_id": id, "url": format!("http://{id}"), "model_name": "m", "kv_events_endpoint": endpoint,
        "kv_block_size": bench::kv_workload::BLOCK_TOKENS,
    }))?;
    Ok(DiscoveredWorker {
        record,
        address: Some(([127, 0, 0, 1], 9).into()),
        state: WorkerState::Active,
        probed: Default::default(),
    })
}

/// Publishers on one thread, the reader on another, for the time wanted; the first second is not measured.
fn storm(arguments: &Arguments, publishers: Vec<Publisher>, ingest: &IngestHandle) -> Result<Report> {
    let (stop, sample, sent) = (AtomicBool::new(false), Mutex::new(None), AtomicU64::new(0));
    let report = std::thread::scope(|scope| {
        let sender = scope.spawn(|| publish(arguments.rate, publishers, &stop, &sample, &sent));
        let result = read(arguments, ingest, &sample, &sent);
        stop.store(true, Ordering::Relaxed);
        sender.join().map_err(|_| anyhow::anyhow!("the publishers' thread has panicked"))??;
        result
    })?;
    Ok(report)
}

/// Sends at the wanted rate, a millisecond's worth at a time; what was missed is caught up with.
fn publish(
    rate: u64,
    mut publishers: Vec<Publisher>,
    stop: &AtomicBool,
    sample: &Mutex<Option<Sample>>,
    sent: &AtomicU64,
) -> Result<()> {
    let started = Instant::now();
    let mut messages = 0u64;
    let count = publishers.len();
    while !stop.load(Ordering::Relaxed) {
        let due = started.elapsed().as_micros() as u64 * rate / 1_000_000 / EVENT_BLOCKS as u64;
        let end = due.min(messages + 1_000);
        while messages < end {
            let worker = messages as usize % count;
            let publisher = &mut publishers[worker];
            let turn = publisher.turn;
            let before = Instant::now();
            if publisher.step()? {
                let mut wanted = sample.lock().unwrap_or_else(PoisonError::into_inner);
                if wanted.is_none() {
                    *wanted = Some(Sample { sent: before, worker, prompt: publisher.turns[turn].prompt.clone() });
                }
            }
            messages += 1;
        }
        sent.store(messages * EVENT_BLOCKS as u64, Ordering::Relaxed);
        std::thread::sleep(Duration::from_micros(500));
    }
    Ok(())
}

/// Blocks that the index has stored and removed so far.
fn applied(view: &View) -> u64 {
    view.ranks.iter().flatten().map(|rank| rank.blocks_stored.get() + rank.blocks_removed.get()).sum()
}

fn target_of(view: &View, worker: usize) -> Option<&Target> {
    let id = format!("worker-{worker:02}:1");
    view.fleet.targets.iter().find(|target| *target.route_key == *id)
}

fn read(
    arguments: &Arguments,
    ingest: &IngestHandle,
    sample: &Mutex<Option<Sample>>,
    sent: &AtomicU64,
) -> Result<Report> {
    let started = Instant::now();
    while target_of(&ingest.view.load(), arguments.publishers - 1).is_none() {
        ensure!(started.elapsed() < PATIENCE, "the fleet was not published");
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(Duration::from_secs(1));
    *sample.lock().unwrap_or_else(PoisonError::into_inner) = None;
    let view = ingest.view.load_full();
    let slots: Vec<Slot> =
        (0..arguments.publishers).filter_map(|worker| Some(target_of(&view, worker)?.slot)).collect();
    let target = target_of(&view, 0).context("no target")?;
    let booked: Arc<[BlockHash]> = (0..SUFFIX_BLOCKS as u64).map(BlockHash).collect();

    let (started, applied_before, sent_before) = (Instant::now(), applied(&view), sent.load(Ordering::Relaxed));
    let published_before = ingest.stats.publications.get();
    let (mut to_view_us, mut to_core_us) = (Vec::new(), Vec::new());
    let mut hits = Hits::new();
    let (mut booking, mut booked_at, mut messages_wanted) = (None, started, 0);
    while started.elapsed() < Duration::from_secs(arguments.seconds) {
        let mut wanted = sample.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(waiting) = &*wanted {
            let view = ingest.view.load();
            view.index.query(&waiting.prompt, &mut hits);
            if hits.depth(slots[waiting.worker]) as usize == waiting.prompt.len() {
                to_view_us.push(waiting.sent.elapsed().as_micros() as u64);
                *wanted = None;
            }
            ensure!(waiting_is_recent(&wanted), "an event was not seen within {PATIENCE:?}");
        }
        drop(wanted);
        match &booking {
            None if booked_at.elapsed() >= BOOKING_EVERY => {
                // Its end is a message too, and comes before the next start.
                messages_wanted = ingest.stats.ledger_messages.get() + 1;
                booked_at = Instant::now();
                booking = Some(Booking::new(target.id, &target.load, booked.clone(), &ingest.ledger, 1));
                ensure!(target.load.active_blocks() >= booked.len() as u64, "a booking is not visible at once");
            }
            Some(_) if ingest.stats.ledger_messages.get() >= messages_wanted => {
                to_core_us.push(booked_at.elapsed().as_micros() as u64);
                // Its end is the next message; the core may have read it before this thread looks again.
                let released = messages_wanted + 1;
                booking = None;
                let deadline = Instant::now() + PATIENCE;
                while ingest.stats.ledger_messages.get() < released && Instant::now() < deadline {
                    std::thread::sleep(Duration::from_micros(arguments.look_every_us));
                }
                booked_at = Instant::now();
            }
            _ => {}
        }
        std::thread::sleep(Duration::from_micros(arguments.look_every_us));
    }
    let seconds = started.elapsed().as_secs_f64();
    let view = ingest.view.load_full();
    Ok(Report {
        rate_wanted: arguments.rate,
        rate_sent: (sent.load(Ordering::Relaxed) - sent_before) as f64 / seconds,
        rate_applied: (applied(&view) - applied_before) as f64 / seconds,
        batches_lost: view.ranks.iter().flatten().map(|rank| rank.batches_lost.get()).sum(),
        publications: ingest.stats.publications.get() - published_before,
        event_to_view_us: Percentiles::new(to_view_us, 2_000),
        booking_to_core_us: Percentiles::new(to_core_us, 1_000),
    })
}

fn waiting_is_recent(sample: &Option<Sample>) -> bool {
    sample.as_ref().is_none_or(|sample| sample.sent.elapsed() < PATIENCE)
}

fn print(report: &Report) -> Result<bool> {
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "{} block events/s wanted, {:.0} sent, {:.0} applied; {} publications, {} batches lost",
        report.rate_wanted, report.rate_sent, report.rate_applied, report.publications, report.batches_lost
    )?;
    let mut is_met = true;
    for (name, row) in [("event to view", &report.event_to_view_us), ("booking to core", &report.booking_to_core_us)] {
        let verdict = if row.p99 <= row.goal_p99 { "met" } else { "MISSED" };
        is_met &= row.samples > 0 && row.p99 <= row.goal_p99;
        writeln!(
            out,
            "{name:<16} p50 {:>6} us  p99 {:>6} us  max {:>6} us  of {:>6}  goal {} {verdict}",
            row.p50, row.p99, row.maximum, row.samples, row.goal_p99
        )?;
    }
    Ok(is_met)
}
