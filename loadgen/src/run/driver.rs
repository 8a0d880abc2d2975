//! Owns the sending side of a run: when requests start, how many are in flight, how each is timed. Never prints and
//! never decides what is asked.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::answer::Answer;
use super::record::{Exchange, Failure, Phase, Record};
use super::workload::Workload;
use crate::net::client::{AnswerHead, Client, ClientError, Target};
use crate::net::runtime::{block_on, contain_panic};
use crate::net::signal::{Latch, Permits, Queue};

/// How often an interrupt is looked for.
const INTERRUPT_CHECK_EVERY: Duration = Duration::from_millis(50);
/// Most of an error's body that is kept.
const ERROR_BYTES_MAX: usize = 300;

/// When requests start.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pace {
    /// Scripts arrive as a Poisson process, whatever the server does; `rate` is requests per second.
    Open { rate: f64 },
    /// Scripts arrive by the clock, `rate` a second, the first one `offset_s` seconds after the start.
    Steady { rate: f64, offset_s: f64 },
    /// So many scripts are always under way.
    Closed { concurrency: usize },
}

/// One run.
#[derive(Clone)]
pub struct RunConfig {
    /// `http://host:port[/prefix]`.
    pub target: String,
    pub workload: Workload,
    pub pace: Pace,
    /// Whole request, from sending to the last byte.
    pub timeout: Duration,
    /// Open loop: requests beyond it wait, and the wait counts as latency.
    pub in_flight_max: usize,
    pub api_key: Option<String>,
    /// Between the turns of a conversation.
    pub think_time: Duration,
    /// The first so many requests are sent but not counted.
    pub warmup: usize,
    /// Exact answers by request index, if known.
    pub expected: Option<Arc<Vec<String>>>,
    /// Ends the run early when set.
    pub interrupt: Arc<AtomicBool>,
    pub progress: bool,
}

/// What a run yields.
#[derive(Debug)]
pub struct RunResult {
    pub record: Record,
    /// From the first intended send to the last end.
    pub duration: Duration,
    /// Share of one core that the generator's thread used.
    pub cpu_share: f64,
    pub interrupted: bool,
    /// The first error's body, cut.
    pub first_error: Option<String>,
}

struct Run {
    config: RunConfig,
    client: Client,
    headers: String,
    start: Instant,
    record: RefCell<Record>,
    first_error: RefCell<Option<String>>,
    last_end: RefCell<Instant>,
    permits: Permits,
    stop: Latch,
    bar: indicatif::ProgressBar,
    under_way: RefCell<usize>,
    all_done: Queue<()>,
}

/// Sends the whole workload and waits for every answer.
pub fn execute(config: RunConfig) -> Result<RunResult> {
    let cpu_before = thread_cpu_seconds();
    let run = block_on(drive(config))??;
    let duration = run.last_end.borrow().saturating_duration_since(run.start);
    let cpu_seconds = thread_cpu_seconds() - cpu_before;
    Ok(RunResult {
        record: run.record.take(),
        duration,
        cpu_share: cpu_seconds / duration.as_secs_f64().max(1e-9),
        interrupted: run.stop.is_open(),
        first_error: run.first_error.take(),
    })
}

/// CPU time of this thread so far; 0 where the kernel does not tell.
fn thread_cpu_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    text.split(' ').next().and_then(|nanos| nanos.parse::<f64>().ok()).unwrap_or(0.0) / 1e9
}

/// Checks that the target answers, and names a model that it serves.
pub fn probe(target: &str) -> Result<Option<String>> {
    let target = Target::parse(target)?;
    block_on(async move {
        let client = Client::new(target);
        let (status, body) = fetch(&client, "/v1/models").await?;
        if status != 200 {
            return Ok(None);
        }
        let models: Value = serde_json::from_slice(&body).unwrap_or(Value::Null);
        Ok(models["data"][0]["id"].as_str().map(str::to_string))
    })?
}

/// One GET with a clear error for a target that is not there.
pub async fn fetch(client: &Client, path: &str) -> Result<(u16, Vec<u8>)> {
    let mut body = Vec::new();
    let authority = client.target().authority.clone();
    let request = client.request("GET", path, "", b"", |_, bytes| body.extend_from_slice(bytes));
    match monoio::time::timeout(Duration::from_secs(10), request).await {
        Ok(Ok(head)) => Ok((head.status, body)),
        Ok(Err(ClientError::Connect(kind))) => {
            bail!("cannot connect to {authority} ({kind}); is the server running?")
        }
        Ok(Err(ClientError::Malformed)) => bail!("{authority} does not speak HTTP/1.1"),
        Ok(Err(error)) => bail!("{authority} did not answer GET {path}: {error:?}"),
        Err(_) => bail!("{authority} did not answer GET {path} within 10 s"),
    }
}

async fn drive(config: RunConfig) -> Result<Rc<Run>> {
    let client = Client::new(Target::parse(&config.target).context("--target")?);
    let authorization = config.api_key.as_ref().map_or(String::new(), |key| format!("authorization: Bearer {key}\r\n"));
    let in_flight_max = match config.pace {
        Pace::Open { .. } | Pace::Steady { .. } => config.in_flight_max,
        Pace::Closed { concurrency } => concurrency,
    };
    let start = Instant::now();
    let bar = match config.progress {
        true => progress_bar(config.workload.requests as u64),
        false => indicatif::ProgressBar::hidden(),
    };
    let run = Rc::new(Run {
        client,
        headers: format!(
            "content-type: application/json\r\naccept: text/event-stream, application/json\r\n{authorization}"
        ),
        start,
        record: RefCell::default(),
        first_error: RefCell::default(),
        last_end: RefCell::new(start),
        permits: Permits::new(in_flight_max.max(1)),
        stop: Latch::default(),
        bar,
        under_way: RefCell::new(0),
        all_done: Queue::default(),
        config,
    });
    let finished = Latch::default();
    let watch = monoio::spawn(watch_interrupt(run.clone(), finished.clone()));
    match run.config.pace {
        Pace::Open { rate } => run.open_loop(run.config.workload.arrivals(rate)).await,
        Pace::Steady { rate, offset_s } => {
            let arrivals = (0..run.config.workload.scripts()).map(|number| offset_s + number as f64 / rate);
            run.open_loop(arrivals.collect()).await;
        }
        Pace::Closed { concurrency } => run.closed_loop(concurrency).await,
    }
    while *run.under_way.borrow() > 0 {
        run.all_done.next().await;
    }
    finished.open();
    watch.await;
    run.bar.finish_and_clear();
    Ok(run)
}

fn progress_bar(requests: u64) -> indicatif::ProgressBar {
    let template = "{elapsed_precise} [{bar:30}] {pos}/{len} {per_sec} eta {eta} {msg}";
    let style = indicatif::ProgressStyle::with_template(template).expect("the template is valid");
    indicatif::ProgressBar::new(requests).with_style(style)
}

async fn watch_interrupt(run: Rc<Run>, finished: Latch) {
    while !finished.is_open() {
        if run.config.interrupt.load(Ordering::Relaxed) {
            return run.stop.open();
        }
        monoio::select! {
            _ = monoio::time::sleep(INTERRUPT_CHECK_EVERY) => {}
            _ = finished.wait() => {}
        }
    }
}

impl Run {
    /// `arrivals`: seconds after the start.
    async fn open_loop(self: &Rc<Run>, arrivals: Vec<f64>) {
        for (number, arrival) in arrivals.into_iter().enumerate() {
            let intended = self.start + Duration::from_secs_f64(arrival);
            monoio::select! {
                _ = monoio::time::sleep_until(intended.into()) => {}
                _ = self.stop.wait() => return,
            }
            self.record.borrow_mut().send_lag.record(intended.elapsed());
            self.spawn(self.clone().script(number, Some(intended)));
        }
    }

    async fn closed_loop(self: &Rc<Run>, concurrency: usize) {
        let next = Rc::new(RefCell::new(0..self.config.workload.scripts()));
        for _ in 0..concurrency.max(1) {
            let (run, next) = (self.clone(), next.clone());
            self.spawn(async move {
                loop {
                    let Some(number) = next.borrow_mut().next() else { return };
                    if run.stop.is_open() {
                        return;
                    }
                    run.clone().script(number, None).await;
                }
            });
        }
    }

    fn spawn(self: &Rc<Run>, future: impl Future<Output = ()> + 'static) {
        *self.under_way.borrow_mut() += 1;
        let run = self.clone();
        monoio::spawn(async move {
            contain_panic("script", future).await;
            *run.under_way.borrow_mut() -= 1;
            run.all_done.push(());
        });
    }

    /// Sends a script's turns one after the other. `arrival` is when the schedule wants the first one sent.
    async fn script(self: Rc<Run>, number: usize, arrival: Option<Instant>) {
        let workload = &self.config.workload;
        let mut script = workload.script(number);
        let mut index = workload.first_request(number);
        let mut intended = arrival.unwrap_or_else(Instant::now);
        let mut answer: Option<String> = None;
        while let Some(body) = workload.next_body(&mut script, answer.as_deref()) {
            if !self.permit().await {
                return;
            }
            let (exchange, text) = self.exchange(number, index, intended, &body).await;
            self.permits.release();
            answer = exchange.outcome.is_ok().then_some(text);
            self.count(&exchange);
            index += 1;
            intended = Instant::now() + self.config.think_time;
            if !self.config.think_time.is_zero() {
                monoio::select! {
                    _ = monoio::time::sleep_until(intended.into()) => {}
                    _ = self.stop.wait() => return,
                }
            }
        }
    }

    /// False when the run is being stopped.
    async fn permit(&self) -> bool {
        if self.stop.is_open() {
            return false;
        }
        monoio::select! {
            _ = self.permits.acquire() => true,
            _ = self.stop.wait() => false,
        }
    }

    fn count(&self, exchange: &Exchange) {
        self.record.borrow_mut().add(exchange, self.start);
        let mut last = self.last_end.borrow_mut();
        *last = (*last).max(exchange.ended);
        self.bar.inc(1);
        let errors = self.record.borrow().errors_total();
        if errors > 0 {
            self.bar.set_message(format!("errors {errors}"));
        }
    }

    async fn exchange(&self, session: usize, index: usize, intended: Instant, body: &Value) -> (Exchange, String) {
        let payload = body.to_string();
        let headers = format!("{}x-request-id: lg-{}-{index}\r\n", self.headers, self.config.workload.seed);
        let mut reading = Reading::default();
        let sent = Instant::now();
        let path = "/v1/chat/completions";
        let request =
            self.client.request("POST", path, &headers, payload.as_bytes(), |head, bytes| reading.take(head, bytes));
        let outcome = monoio::select! {
            done = monoio::time::timeout(self.config.timeout, request) => match done {
                Ok(answered) => answered.map_err(Failure::from),
                Err(_) => Err(Failure::Timeout),
            },
            _ = self.stop.wait() => Err(Failure::Interrupted),
        };
        let ended = Instant::now();
        let worker = outcome.as_ref().ok().and_then(|head| head.worker.clone());
        let outcome = outcome.and_then(|head| self.judge(&head, &mut reading, index));
        if outcome.is_err() && self.first_error.borrow().is_none() {
            reading.plain.truncate(ERROR_BYTES_MAX);
            *self.first_error.borrow_mut() = Some(String::from_utf8_lossy(&reading.plain).into_owned());
        }
        let exchange = Exchange {
            index,
            replay_index: None,
            session: session as u64,
            prefix_group: self.config.workload.prefix_group(session),
            phase: if index < self.config.warmup { Phase::WarmUp } else { Phase::Measured },
            intended,
            sent,
            first_content: reading.first,
            ended,
            gaps: reading.gaps,
            usage: reading.answer.usage,
            content_events: reading.answer.content_events,
            worker,
            aborted: false,
            slow_reader: false,
            slo_met: None,
            outcome,
        };
        (exchange, reading.answer.text)
    }

    fn judge(&self, head: &AnswerHead, reading: &mut Reading, index: usize) -> Result<(), Failure> {
        if head.status != 200 {
            return Err(Failure::Status(head.status));
        }
        if !head.event_stream {
            reading.answer.set_json(&reading.plain);
        }
        let answer = &reading.answer;
        if answer.failed {
            return Err(Failure::StreamError);
        }
        if answer.malformed {
            return Err(Failure::Malformed);
        }
        if !answer.complete {
            return Err(Failure::Truncated);
        }
        let expected = self.config.expected.as_ref().and_then(|texts| texts.get(index));
        if expected.is_some_and(|expected| *expected != answer.text) {
            return Err(Failure::WrongContent);
        }
        Ok(())
    }
}

/// An answer's body while it arrives.
#[derive(Default)]
struct Reading {
    answer: Answer,
    plain: Vec<u8>,
    first: Option<Instant>,
    last: Option<Instant>,
    gaps: Vec<Duration>,
}

impl Reading {
    fn take(&mut self, head: &AnswerHead, bytes: &[u8]) {
        if !head.event_stream || head.status != 200 {
            self.plain.extend_from_slice(bytes);
            return;
        }
        if self.answer.push_events(bytes) > 0 {
            let now = Instant::now();
            self.first.get_or_insert(now);
            if let Some(last) = self.last.replace(now) {
                self.gaps.push(now - last);
            }
        }
    }
}

#[cfg(test)]
#[path = "driver_tests.rs"]
mod tests;
