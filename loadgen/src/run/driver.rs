//! Owns the sending side of a run: when requests start, how many are in flight, how each is timed. Never prints and
//! never decides what is asked.

use std::cell::{Cell, RefCell};
use std::pin::pin;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::config::{RunConfig, RunResult, Warmup};
use super::manners::{Conduct, Leaving};
use super::pace::{self, Pace, Sessions};
use super::reading::Reading;
use super::record::{Exchange, Failure, Phase, Record};
use super::workload::{Plan, Prepared, Script};
use crate::net::client::{AnswerHead, Client, ClientError, Outgoing, Target};
use crate::net::runtime::{block_on, contain_panic};
use crate::net::signal::{Latch, Permits, Queue};
use crate::net::watch::{End, Watch};

/// How often interrupts and deadlines are looked for.
const LOOK_EVERY: Duration = Duration::from_millis(20);
const FETCH_TIMEOUT: Duration = Duration::from_secs(10);
/// Most of an error's body that is kept.
const ERROR_BYTES_MAX: usize = 300;

struct Run {
    config: RunConfig,
    plan: Plan,
    client: Client,
    headers: String,
    start: Instant,
    record: RefCell<Record>,
    first_error: RefCell<Option<String>>,
    /// First intended send and last end of what is measured.
    measured: Cell<Option<(Instant, Instant)>>,
    /// When the first measured request was sent, and this thread's CPU time by then.
    began: Cell<Option<(Instant, Duration)>>,
    permits: Permits,
    watch: Watch,
    stop: Latch,
    bar: indicatif::ProgressBar,
    under_way: Cell<usize>,
    all_done: Queue<()>,
}

/// Sends the whole workload and waits for every answer.
pub fn execute(config: RunConfig) -> Result<RunResult> {
    let run = block_on(drive(config))??;
    let (began, cpu_before) = run.began.get().unwrap_or_else(|| (Instant::now(), thread_cpu()));
    let (wall, cpu) = (began.elapsed(), thread_cpu().saturating_sub(cpu_before));
    let duration = run.measured.get().map_or(Duration::ZERO, |(first, last)| last.saturating_duration_since(first));
    Ok(RunResult {
        has_limits: run.config.slo.is_some(),
        record: run.record.take(),
        duration,
        cpu_share: cpu.as_secs_f64() / wall.as_secs_f64().max(1e-9),
        cpu,
        interrupted: run.stop.is_open(),
        first_error: run.first_error.take(),
    })
}

/// When each session of a run begins, seconds after the start; nothing for a closed loop.
pub fn arrivals(config: &RunConfig, plan: &Plan) -> Option<Vec<f64>> {
    let recorded = plan.recorded_times();
    let sessions = Sessions {
        count: plan.sessions(),
        requests: plan.requests(),
        recorded: recorded.as_deref(),
        burst: config.burst,
        speedup: config.speedup,
        seed: config.workload.seed,
    };
    pace::arrivals(config.pace, sessions)
}

/// CPU time of this thread so far; 0 where the kernel does not tell.
fn thread_cpu() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    Duration::from_nanos(text.split(' ').next().and_then(|nanos| nanos.parse().ok()).unwrap_or(0))
}

/// Checks that the target answers, and names a model that it serves.
pub fn probe(target: &str) -> Result<Option<String>> {
    let target = Target::parse(target)?;
    block_on(async move {
        let (status, body) = fetch(target, "/v1/models").await?;
        if status != 200 {
            return Ok(None);
        }
        let models: Value = serde_json::from_slice(&body).unwrap_or(Value::Null);
        Ok(models["data"][0]["id"].as_str().map(str::to_string))
    })?
}

/// One GET on a connection of its own, with a clear error for a target that is not there.
pub async fn fetch(target: Target, path: &str) -> Result<(u16, Vec<u8>)> {
    let (body, authority) = (Rc::new(RefCell::new(Vec::new())), target.authority.clone());
    let client = Client::new(target)?;
    let request = client.request(Outgoing { method: "GET", path, headers: "", payload: b"" }, body.clone());
    let outcome = monoio::time::timeout(FETCH_TIMEOUT, request).await;
    client.close().await;
    match outcome {
        Ok(Ok(head)) => Ok((head.status, body.take())),
        Ok(Err(ClientError::Connect(kind))) => {
            bail!("cannot connect to {authority} ({kind}); is the server running?")
        }
        Ok(Err(ClientError::Malformed)) => bail!("{authority} does not speak HTTP/1.1"),
        Ok(Err(error)) => bail!("{authority} did not answer GET {path}: {error:?}"),
        Err(_) => bail!("{authority} did not answer GET {path} within {FETCH_TIMEOUT:?}"),
    }
}

async fn drive(config: RunConfig) -> Result<Rc<Run>> {
    let client = Client::new(Target::parse(&config.target).context("--target")?)?;
    let authorization = config.api_key.as_ref().map_or(String::new(), |key| format!("authorization: Bearer {key}\r\n"));
    let in_flight_max = match config.pace {
        Pace::Closed { concurrency } => concurrency,
        _ => config.in_flight_max,
    };
    let plan = config.workload.plan();
    let arrivals = arrivals(&config, &plan);
    let bar = match config.progress {
        true => progress_bar(plan.requests() as u64),
        false => indicatif::ProgressBar::hidden(),
    };
    let run = Rc::new(Run {
        client,
        headers: format!(
            "content-type: application/json\r\naccept: text/event-stream, application/json\r\n\
             {authorization}x-request-id: lg-{}-",
            config.workload.seed
        ),
        start: Instant::now(),
        record: RefCell::default(),
        first_error: RefCell::default(),
        measured: Cell::new(None),
        began: Cell::new(None),
        permits: Permits::new(in_flight_max.max(1)),
        watch: Watch::default(),
        stop: Latch::default(),
        bar,
        under_way: Cell::new(0),
        all_done: Queue::default(),
        plan,
        config,
    });
    let finished = Latch::default();
    let look = monoio::spawn(look(run.clone(), finished.clone()));
    match arrivals {
        Some(arrivals) => run.open_loop(arrivals).await,
        None => run.closed_loop(in_flight_max),
    }
    while run.under_way.get() > 0 {
        run.all_done.next().await;
    }
    finished.open();
    look.await;
    run.client.close().await;
    run.bar.finish_and_clear();
    Ok(run)
}

fn progress_bar(requests: u64) -> indicatif::ProgressBar {
    let template = "{elapsed_precise} [{bar:30}] {pos}/{len}, {per_sec}, {eta} left, {msg}";
    let style = indicatif::ProgressStyle::with_template(template).expect("the template is valid");
    indicatif::ProgressBar::new(requests).with_style(style)
}

/// Ends what is late, and everything at an interrupt.
async fn look(run: Rc<Run>, finished: Latch) {
    while !finished.is_open() {
        if run.config.interrupt.load(Ordering::Relaxed) {
            run.stop.open();
            return run.watch.stop();
        }
        run.watch.look(Instant::now());
        run.show_progress();
        monoio::select! {
            _ = monoio::time::sleep(LOOK_EVERY) => {}
            _ = finished.wait() => {}
        }
    }
}

impl Run {
    /// `arrivals`: seconds after the start.
    async fn open_loop(self: &Rc<Run>, arrivals: Vec<f64>) {
        for (number, arrival) in arrivals.into_iter().enumerate() {
            let intended = self.start + Duration::from_secs_f64(arrival);
            // Written before it is due: a long body takes longer to make than to send.
            let mut script = self.plan.script(number);
            let Some(first) = self.plan.next(&mut script, None) else { continue };
            monoio::select! {
                _ = monoio::time::sleep_until(intended.into()) => {}
                _ = self.stop.wait() => return,
            }
            self.spawn(self.clone().session(script, first, Some(intended)));
        }
    }

    fn closed_loop(self: &Rc<Run>, concurrency: usize) {
        let next = Rc::new(RefCell::new(0..self.plan.sessions()));
        for _ in 0..concurrency.max(1) {
            let (run, next) = (self.clone(), next.clone());
            self.spawn(async move {
                loop {
                    let Some(number) = next.borrow_mut().next() else { return };
                    if run.stop.is_open() {
                        return;
                    }
                    let mut script = run.plan.script(number);
                    if let Some(first) = run.plan.next(&mut script, None) {
                        run.clone().session(script, first, None).await;
                    }
                }
            });
        }
    }

    fn spawn(self: &Rc<Run>, future: impl Future<Output = ()> + 'static) {
        self.under_way.set(self.under_way.get() + 1);
        let run = self.clone();
        monoio::spawn(async move {
            contain_panic("session", future).await;
            run.under_way.set(run.under_way.get() - 1);
            run.all_done.push(());
        });
    }

    /// Sends a session's requests one after the other. `arrival` is when the schedule wants the first one sent.
    async fn session(self: Rc<Run>, mut script: Script, first: Prepared, arrival: Option<Instant>) {
        let (mut request, mut intended) = (first, arrival);
        loop {
            if let Some(intended) = intended {
                self.record.borrow_mut().send_lag.record(intended.elapsed());
            }
            if !self.permit().await {
                return;
            }
            let (exchange, text) = self.exchange(script.number, &request, intended).await;
            self.permits.release();
            self.count(&exchange);
            let answer = text.filter(|_| exchange.outcome.is_ok());
            let Some(next) = self.plan.next(&mut script, answer.as_deref()) else { return };
            request = next;
            intended = None;
            if request.pause_ns > 0 {
                let pause = Duration::from_nanos(request.pause_ns).div_f64(self.config.speedup);
                let due = exchange.ended + pause;
                intended = Some(due);
                monoio::select! {
                    _ = monoio::time::sleep_until(due.into()) => {}
                    _ = self.stop.wait() => return,
                }
            }
        }
    }

    /// Beside what the bar counts itself; not at every request, which would cost more than the request.
    fn show_progress(&self) {
        if !self.bar.is_hidden() {
            let errors = self.record.borrow().errors_total();
            self.bar.set_message(format!("in flight {}, errors {errors}", self.under_way.get()));
        }
    }

    /// False when the run is being stopped.
    async fn permit(&self) -> bool {
        if self.stop.is_open() {
            return false;
        }
        if self.permits.try_acquire() {
            return true;
        }
        monoio::select! {
            _ = self.permits.acquire() => true,
            _ = self.stop.wait() => false,
        }
    }

    fn count(&self, exchange: &Exchange) {
        let mut record = self.record.borrow_mut();
        record.add(exchange, self.start);
        if exchange.phase == Phase::Measured {
            let (first, last) = self.measured.get().unwrap_or((exchange.intended, exchange.ended));
            self.measured.set(Some((first.min(exchange.intended), last.max(exchange.ended))));
        }
        self.bar.inc(1);
    }

    fn phase(&self, index: usize, intended: Instant) -> Phase {
        let is_warm_up = match self.config.warmup {
            Warmup::Requests(count) => index < count,
            Warmup::Time(time) => intended.saturating_duration_since(self.start) < time,
        };
        if is_warm_up { Phase::WarmUp } else { Phase::Measured }
    }

    /// `intended`: when the schedule wants the request sent; when it is sent if there is no schedule.
    async fn exchange(
        &self,
        number: usize,
        request: &Prepared,
        intended: Option<Instant>,
    ) -> (Exchange, Option<String>) {
        let config = &self.config;
        let (index, slo) = (request.index, config.slo);
        let conduct = config.manners.conduct(config.workload.seed, index, request.answer_tokens);
        let expected = config.expected.as_ref().and_then(|texts| texts.get(index));
        let sent = Instant::now();
        let intended = intended.unwrap_or(sent);
        let phase = self.phase(index, intended);
        if phase == Phase::Measured && self.began.get().is_none() {
            self.began.set(Some((sent, thread_cpu())));
        }
        let (mut reading, outcome) = self.send(request, conduct, expected.is_some(), sent).await;
        let ended = Instant::now();
        let worker = outcome.as_ref().ok().and_then(|head| head.worker.clone());
        let (aborted, outcome) = match outcome {
            Ok(head) => (false, reading.judge(&head, expected.map(String::as_str))),
            Err(None) => (true, Ok(())),
            Err(Some(failure)) => (false, Err(failure)),
        };
        if outcome.is_err() && self.first_error.borrow().is_none() {
            reading.plain.truncate(ERROR_BYTES_MAX);
            *self.first_error.borrow_mut() = Some(String::from_utf8_lossy(&reading.plain).into_owned());
        }
        let (session, prefix_group) = self.plan.groups(number);
        let mut exchange = Exchange {
            replay_index: self.plan.is_replay().then_some(index),
            session,
            prefix_group,
            phase,
            sent,
            first_content: reading.first,
            ended,
            gaps: reading.gaps,
            usage: reading.answer.usage,
            content_events: reading.answer.content_events,
            worker,
            aborted,
            slow_reader: conduct.is_slow,
            outcome,
            ..Exchange::new(index, intended)
        };
        exchange.slo_met = slo.map(|slo| outcome.is_ok() && !aborted && slo.is_met(&exchange));
        (exchange, request.wants_text.then_some(reading.answer.text).filter(|_| !aborted))
    }

    /// One request and its answer. Without a failure where there is no answer, the client has left on purpose.
    async fn send(
        &self,
        request: &Prepared,
        conduct: Conduct,
        wants_text: bool,
        sent: Instant,
    ) -> (Reading, Result<AnswerHead, Option<Failure>>) {
        let leave_after_events = match conduct.leaving {
            Some(Leaving::AfterEvents(events)) => Some(events),
            _ => None,
        };
        let leaves_at = conduct.leaving.and_then(|leaving| leaving.by(self.config.workload.stream));
        let deadline = sent + leaves_at.map_or(self.config.timeout, |after| after.min(self.config.timeout));
        let reading = Reading::new(wants_text || request.wants_text, leave_after_events);
        let reading = Rc::new(RefCell::new(reading));
        let headers = format!("{}{}\r\n", self.headers, request.index);
        let (path, payload) = (&*request.path, request.body.as_bytes());
        let outgoing = Outgoing { method: "POST", path, headers: &headers, payload };
        let outcome = if conduct.is_slow {
            // Few are: their future is not to make everybody's larger.
            let trickle = self.config.manners.trickle;
            let mut slow = Box::pin(self.client.request_slowly(outgoing, trickle, reading.clone()));
            self.watch.run(deadline, slow.as_mut()).await
        } else {
            let request = pin!(self.client.request(outgoing, reading.clone()));
            self.watch.run(deadline, request).await
        };
        let outcome = match outcome {
            Ok(Ok(head)) => Ok(head),
            Ok(Err(ClientError::Left)) => Err(None),
            Ok(Err(error)) => Err(Some(Failure::from(error))),
            Err(End::Deadline) if leaves_at.is_some() => Err(None),
            Err(End::Deadline) => Err(Some(Failure::Timeout)),
            Err(End::Stop) => Err(Some(Failure::Interrupted)),
        };
        (reading.take(), outcome)
    }
}

#[cfg(test)]
#[path = "driver_tests.rs"]
mod tests;
