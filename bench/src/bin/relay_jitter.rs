//! What long prompts do to the streams beside them: 32 streams at 50 events a second on one shard, with and without five
//! never-seen 100,000-token prompts a second through the same shard. Owns the streams, the prompts and the exit code.
//!
//! Everything of the router is on one core, its encoder thread included, which is the worst placement there is. In the
//! turns without, the same prompts go to the backend directly, so that what sending them costs this side is in both.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use bench::answer::{self, Answer, CHUNK_BYTES, JSON_BYTES};
use bench::backend::Backend;
use bench::conversation::{self, Writer};
use bench::exchange::Exchange;
use bench::http::{BodyReader, response_head};
use bench::machine::{Cores, Host, Interrupt, pin_current_thread, raise_descriptor_limit};
use bench::report::{ending, progress, write_json};
use bench::rivals::{Kind, Rival, build_router, kv_aware_router};
use bench::statistics::{Spread, percentile, spread};
use clap::Parser;
use rustix::event::{Timespec, epoll};
use serde::Serialize;

/// Gaps between the events of streams while long prompts arrive.
///
/// Exit code: 0 measured and the goal met, 1 the goal missed, 2 the run could not be done.
#[derive(Parser)]
struct Arguments {
    #[arg(long)]
    json: Option<PathBuf>,
    /// Model directory; tests/setup/fetch_tokenizers.sh fetches it.
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/tokenizers/qwen3"))]
    tokenizer: PathBuf,
    #[arg(long)]
    router: Option<PathBuf>,
    #[arg(long, default_value_t = 32)]
    streams: usize,
    /// Tokens of a prompt, about; the goal is judged from 100,000 on.
    #[arg(long, default_value_t = 100_000)]
    tokens: usize,
    #[arg(long, default_value_t = 5.0)]
    prompts_per_second: f64,
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Length of one turn; a round has two.
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

const EVENT_INTERVAL: Duration = Duration::from_millis(20);
const BYTES_PER_TOKEN: f64 = 4.2;
const ADDED_P99_MAX_MS: f64 = 2.0;
const JUDGED_TOKENS_MIN: usize = 100_000;

/// One turn's gaps, milliseconds.
#[derive(Clone, Copy, Debug, Serialize)]
struct Turn {
    p50_ms: f64,
    p99_ms: f64,
    longest_ms: f64,
    events: usize,
    prompts: usize,
}

#[derive(Serialize)]
struct Report {
    schema: &'static str,
    host: Host,
    streams: usize,
    prompt_tokens: usize,
    prompts_per_second: f64,
    without: Vec<Turn>,
    with: Vec<Turn>,
    /// Per round: 99th percentile of the gap with prompts less that without.
    added_p99_ms: Spread,
    /// Share of the prompts' tokens that the router encoded; the rest was late and routed by load.
    encoded_share: f64,
    limit_ms: f64,
    met: bool,
}

fn main() -> ExitCode {
    ending("relay_jitter", run(&Arguments::parse()))
}

fn run(arguments: &Arguments) -> Result<bool> {
    let program = arguments.router.clone().map_or_else(build_router, Ok)?;
    let interrupt = Interrupt::install()?;
    let host = Host::describe(raise_descriptor_limit()?);
    let cores = Cores::detect()?;
    pin_current_thread(cores.load)?;
    let directory = tempfile::Builder::new().prefix("bench-").tempdir()?;
    let streaming = Backend::start(cores.load, Answer::json(JSON_BYTES))?;
    let answering = Backend::start(cores.load, Answer::json(JSON_BYTES))?;
    let second = format!(" --worker http://{},model=long", answering.address());
    let line = kv_aware_router(&program, &arguments.tokenizer, &second);
    let rival = Rival { name: "router".to_owned(), kind: Kind::Command(line) };
    let payload = Answer::json(JSON_BYTES).payload;
    let probe = answer::request("bench", false, 200);
    let router = rival.start(streaming.address(), directory.path(), cores, (&probe, &payload), &interrupt)?;
    streaming.set_answer(Answer::stream(Some(EVENT_INTERVAL)));

    let mut writer = Writer::new(arguments.seed);
    let turn_length = Duration::from_secs_f64(arguments.seconds);
    let (mut without, mut with) = (Vec::new(), Vec::new());
    let (mut tokens_sent, encoded_before) = (0.0, encoded_tokens(router.address)?);
    for round in 0..arguments.rounds {
        for through_router in [round % 2 == 0, round % 2 != 0] {
            interrupt.check()?;
            let prompts = prompts(&mut writer, arguments);
            let target = if through_router { router.address } else { answering.address() };
            if through_router {
                tokens_sent += prompts.iter().map(Vec::len).sum::<usize>() as f64 / BYTES_PER_TOKEN;
            }
            let turn = turn(router.address, arguments, turn_length, target, &prompts, cores, &interrupt)?;
            progress(&format!("round {round}, prompts {}: {turn:?}", if through_router { "on" } else { "off" }));
            if through_router { &mut with } else { &mut without }.push(turn);
        }
    }
    let added = with.iter().zip(&without).map(|(with, without): (&Turn, &Turn)| with.p99_ms - without.p99_ms);
    let added_p99_ms = spread(added).context("no round")?;
    let report = Report {
        schema: "infera-relay-jitter/1",
        host,
        streams: arguments.streams,
        prompt_tokens: arguments.tokens,
        prompts_per_second: arguments.prompts_per_second,
        encoded_share: (encoded_tokens(router.address)? - encoded_before) / tokens_sent,
        limit_ms: ADDED_P99_MAX_MS,
        met: arguments.tokens < JUDGED_TOKENS_MIN || added_p99_ms.median < ADDED_P99_MAX_MS,
        without,
        with,
        added_p99_ms,
    };
    print(&report);
    write_json(arguments.json.as_deref(), &report)?;
    Ok(report.met)
}

/// The requests of one turn, no two alike.
fn prompts(writer: &mut Writer, arguments: &Arguments) -> Vec<Vec<u8>> {
    let count = (arguments.seconds * arguments.prompts_per_second).ceil() as usize;
    let bytes = (arguments.tokens as f64 * BYTES_PER_TOKEN) as usize;
    (0..count)
        .map(|_| conversation::request("bench", &conversation::body_for("long", &writer.conversation(bytes))))
        .collect()
}

/// Prompt tokens that the router has encoded so far, by its own page.
fn encoded_tokens(router: SocketAddr) -> Result<f64> {
    let mut page = Vec::new();
    let request = b"GET /metrics HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n";
    Exchange::connect(router)?.run(request, |data| page.extend_from_slice(data))?;
    let page = String::from_utf8_lossy(&page);
    let line = page.lines().find_map(|line| line.strip_prefix("infera_router_prompt_cache_tokens_encoded_total "));
    line.context("no counter of encoded tokens")?.trim().parse().context("the counter of encoded tokens")
}

fn turn(
    router: SocketAddr,
    arguments: &Arguments,
    length: Duration,
    prompts_to: SocketAddr,
    prompts: &[Vec<u8>],
    cores: Cores,
    interrupt: &Interrupt,
) -> Result<Turn> {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| {
            pin_current_thread(cores.load)?;
            send_prompts(prompts_to, prompts, arguments.prompts_per_second, &stop)
        });
        let gaps = watch_streams(router, arguments.streams, length, interrupt);
        stop.store(true, Ordering::Relaxed);
        let sent = sender.join().map_err(|_| anyhow::anyhow!("the prompts' thread panicked"))??;
        let mut gaps = gaps?;
        gaps.sort_unstable();
        ensure!(!gaps.is_empty(), "no event arrived");
        let at = |percent| percentile(&gaps, percent) as f64 / 1e6;
        Ok(Turn { p50_ms: at(50.0), p99_ms: at(99.0), longest_ms: at(100.0), events: gaps.len(), prompts: sent })
    })
}

fn send_prompts(target: SocketAddr, prompts: &[Vec<u8>], per_second: f64, stop: &AtomicBool) -> Result<usize> {
    let mut client = Exchange::connect(target)?;
    let started = Instant::now();
    for (index, request) in prompts.iter().enumerate() {
        let due = started + Duration::from_secs_f64(index as f64 / per_second);
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        if stop.load(Ordering::Relaxed) {
            return Ok(index);
        }
        client.run(request, |_| ())?;
    }
    Ok(prompts.len())
}

/// One stream after another on one connection.
struct Stream {
    socket: TcpStream,
    head: Vec<u8>,
    body: Option<BodyReader>,
    payload: usize,
    last_event: Option<Instant>,
}

impl Stream {
    fn open(router: SocketAddr, request: &[u8]) -> Result<Stream> {
        let mut socket = TcpStream::connect(router)?;
        socket.set_nodelay(true)?;
        socket.write_all(request)?;
        socket.set_nonblocking(true)?;
        Ok(Stream { socket, head: Vec::new(), body: None, payload: 0, last_event: None })
    }

    /// Takes what came at `now` and notes the gap before it; `true` at the end of the answer.
    fn take(&mut self, bytes: &[u8], now: Instant, gaps: &mut Vec<u64>) -> Result<bool> {
        let carried;
        let mut input = bytes;
        if self.body.is_none() {
            self.head.extend_from_slice(bytes);
            let Some(head) = response_head(&self.head)? else { return Ok(false) };
            ensure!(head.status == 200, "status {}", head.status);
            carried = std::mem::take(&mut self.head);
            input = &carried[head.bytes..];
            self.body = Some(BodyReader::new(head.framing));
        }
        let Some(body) = &mut self.body else { return Ok(false) };
        let before = self.payload;
        body.push(input, |data| {
            self.payload += data.len();
            Ok(())
        })?;
        let events = self.payload / CHUNK_BYTES - before / CHUNK_BYTES;
        if events > 0 {
            gaps.extend(self.last_event.map(|last| (now - last).as_nanos() as u64));
            // Events that came together had no gap between them.
            gaps.extend(std::iter::repeat_n(0, events - 1));
            self.last_event = Some(now);
        }
        Ok(body.done())
    }

    fn again(&mut self, request: &[u8]) -> Result<()> {
        (self.body, self.payload, self.last_event) = (None, 0, None);
        // A small request on an empty socket goes at once.
        Ok(self.socket.write_all(request)?)
    }
}

/// Gaps between events, nanoseconds, of all streams in `length`; the first second is not counted.
fn watch_streams(router: SocketAddr, streams: usize, length: Duration, interrupt: &Interrupt) -> Result<Vec<u64>> {
    let request = answer::request("bench", true, 200);
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let mut open = Vec::with_capacity(streams);
    for slot in 0..streams {
        let stream = Stream::open(router, &request)?;
        epoll::add(&epoll, &stream.socket, epoll::EventData::new_u64(slot as u64), epoll::EventFlags::IN)?;
        open.push(stream);
    }
    let (mut gaps, mut buffer) = (Vec::new(), vec![0; 16 << 10]);
    let mut events = Vec::with_capacity(streams);
    let timeout = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
    let started = Instant::now();
    let warm_up = Duration::from_secs(1).min(length / 4);
    let mut is_warm = false;
    while started.elapsed() < length {
        interrupt.check()?;
        match epoll::wait(&epoll, rustix::buffer::spare_capacity(&mut events), Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error).context("epoll_wait"),
        }
        if !is_warm && started.elapsed() > warm_up {
            (is_warm, gaps) = (true, Vec::new());
        }
        for event in events.drain(..) {
            let stream = &mut open[event.data.u64() as usize];
            let now = Instant::now();
            match stream.socket.read(&mut buffer) {
                Ok(0) => anyhow::bail!("a stream was closed"),
                Ok(count) => {
                    if stream.take(&buffer[..count], now, &mut gaps)? {
                        stream.again(&request)?;
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(error).context("reading a stream"),
            }
        }
    }
    Ok(gaps)
}

#[allow(clippy::print_stdout)]
fn print(report: &Report) {
    let middle =
        |turns: &[Turn], of: fn(&Turn) -> f64| spread(turns.iter().map(of)).map_or(0.0, |spread| spread.median);
    println!(
        "{} streams, an event every {EVENT_INTERVAL:?}; {} prompts of {} tokens a second",
        report.streams, report.prompts_per_second, report.prompt_tokens
    );
    println!("gap, ms            p50      p99  longest   (medians over rounds)");
    for (name, turns) in [("without prompts", &report.without), ("with prompts", &report.with)] {
        let row = [|turn: &Turn| turn.p50_ms, |turn: &Turn| turn.p99_ms, |turn: &Turn| turn.longest_ms];
        let [p50, p99, longest] = row.map(|of| middle(turns, of));
        println!("{name:<16} {p50:>6.2} {p99:>8.2} {longest:>8.2}");
    }
    println!("encoded: {:.2} of the prompts' tokens", report.encoded_share);
    println!(
        "added at p99: {:.3} ms (limit {}) {}",
        report.added_p99_ms.median,
        report.limit_ms,
        if report.met { "met" } else { "MISSED" }
    );
}
