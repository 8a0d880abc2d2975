//! Every workload, both kinds of replay, and clients that misbehave, against real simulated engines.

use std::collections::HashSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::config::{RunConfig, RunResult, Warmup};
use super::driver::execute;
use super::manners::{Leaving, Manners};
use super::pace::Pace;
use super::record::Failure;
use super::recording::read_recording;
use super::report;
use super::test_support::{config, engine, recipe};
use super::workload::{Source, Workload};
use crate::engine::{EngineHandle, EngineState};
use crate::net::client::Trickle;
use crate::plan::trace::read_trace;
use crate::plan::{Documents, Images, Recipe, Shape, Shared};

const STEP: Duration = Duration::from_micros(500);
const TRACE: &str = include_str!("../../fixtures/trace.jsonl");
const RECORDING: &str = include_str!("../../fixtures/recording.jsonl");

fn closed(engine: &EngineHandle, requests: usize, made: Recipe) -> RunConfig {
    let mut config = config(&engine.url(), requests, Pace::Closed { concurrency: 4 });
    *recipe(&mut config) = made;
    config
}

/// Runs without an error, leaves the engine idle, and tells the share of prompt tokens found in its cache.
fn hit_rate(engine: &EngineHandle, config: RunConfig) -> (RunResult, f64) {
    let requests = config.workload.requests as u64;
    let result = execute(config).unwrap();
    let record = &result.record;
    assert_eq!(
        (record.requests, record.answered()),
        (requests, requests),
        "{:?} {:?}",
        record.errors,
        result.first_error
    );
    assert!(engine.wait_until(Duration::from_secs(5), EngineState::is_idle));
    let rate = record.hit_rate().unwrap();
    (result, rate)
}

#[test]
fn every_workload_is_answered_and_shares_what_it_should() {
    let short = |shape: Shape| Recipe { answer_tokens: 6.0, pause_s: 0.0, ..shape.recipe() };
    let shared = |tokens| Some(Shared { count: 2, zipf: 1.0, tokens });
    let documents = Some(Documents { count: 4, zipf: 1.0, per_session: 2, tokens: 200 });
    for (made, least, most) in [
        (Recipe { shared: shared(300), message_tokens: 30.0, ..short(Shape::SharedPrompts) }, 0.6, 0.95),
        (Recipe { documents, ..short(Shape::Rag) }, 0.6, 0.95),
        (Recipe { shared: shared(200), message_tokens: 40.0, ..short(Shape::Chat) }, 0.5, 0.95),
        (Recipe { shared: shared(1600), message_tokens: 60.0, task_tokens: 20.0, ..short(Shape::Agents) }, 0.7, 0.99),
        (short(Shape::OnePrompt), 0.6, 0.95),
        (Recipe { message_tokens: 200.0, ..short(Shape::Unique) }, 0.0, 0.1),
    ] {
        let (engine, name) = (engine(STEP), made.name.clone());
        let (result, rate) = hit_rate(&engine, closed(&engine, 40, made));
        assert!((least..=most).contains(&rate), "{name}: {rate}");
        let totals = engine.state().totals();
        assert_eq!((totals.generated_tokens, totals.finished), (result.record.output_tokens, 40), "{name}");
    }
}

#[test]
fn pictures_reach_the_engine_again_and_new_ones_once() {
    let engine = engine(STEP);
    let images = Some(Images { count: 3, bytes: 300, new_share: 0.25 });
    let (_, rate) = hit_rate(&engine, closed(&engine, 40, Recipe { images, ..Recipe::plain("images", 8.0, 4.0) }));
    assert!((0.3..0.9).contains(&rate), "{rate}");
    let mut seen: Vec<u64> = engine.state().images.values().copied().collect();
    seen.sort_unstable();
    let again = seen.split_off(seen.len() - 3);
    assert!(seen.iter().all(|count| *count == 1) && (4..=16).contains(&seen.len()), "new ones: {seen:?}");
    assert_eq!(again.iter().sum::<u64>() + seen.len() as u64, 40);
    assert!(again.iter().all(|count| *count > 5), "{again:?}");
}

#[test]
fn pauses_pass_faster_when_told() {
    // Two conversations of four turns with a second between: three seconds, or 0.15 at twenty times the speed.
    let engine = engine(STEP);
    let made = Recipe { turns: 4.0, pause_s: 1.0, ..Recipe::shared_prefix(1, 0.0, 20, 8, 4) };
    let (result, _) = hit_rate(&engine, RunConfig { speedup: 20.0, ..closed(&engine, 8, made) });
    assert!((0.15..1.5).contains(&result.duration.as_secs_f64()), "{:?}", result.duration);
}

#[test]
fn a_trace_finds_in_the_cache_what_its_ids_say() {
    let lines = read_trace(TRACE.as_bytes(), usize::MAX).unwrap();
    let (mut known, mut shared, mut total) = (HashSet::<u64>::new(), 0, 0);
    for line in &lines {
        let full = line.input_length / 512;
        let found = line.hash_ids[..full].iter().take_while(|id| known.contains(*id)).count();
        (shared, total) = (shared + found * 512, total + line.input_length);
        known.extend(line.hash_ids[..full].iter().copied());
    }
    let (wanted, requests) = (shared as f64 / total as f64, lines.len());
    let output_tokens: usize = lines.iter().map(|line| line.output_length).sum();
    let source = Source::Trace { file: "trace.jsonl".into(), lines: Arc::new(lines) };
    let engine = engine(STEP);
    // One at a time, so that every answer is in the cache when the next request comes.
    let mut config = config(&engine.url(), requests, Pace::Closed { concurrency: 1 });
    config.workload = Workload { source, ..config.workload };
    let (result, rate) = hit_rate(&engine, config.clone());
    assert!((wanted - 0.03..wanted + 0.03).contains(&rate), "{rate} for {wanted}");
    assert_eq!(result.record.output_tokens, output_tokens as u64);
    let tokens = result.record.prompt_tokens as f64;
    assert!((1.0..1.02).contains(&(tokens / total as f64)), "{tokens} tokens for {total}");
    // By its own times: 24 s of them, a hundred times faster.
    let (result, _) = hit_rate(&engine, RunConfig { pace: Pace::Recorded, speedup: 100.0, ..config });
    assert!((0.21..5.0).contains(&result.duration.as_secs_f64()), "{:?}", result.duration);
}

#[test]
fn a_recording_is_replayed_byte_for_byte() {
    let requests = Arc::new(read_recording(RECORDING.as_bytes(), usize::MAX).unwrap());
    let mut replay = config("http://unset", 3, Pace::Recorded);
    let source = Source::Recording { file: "recording.jsonl".into(), requests: requests.clone() };
    replay.workload = Workload { source, ..replay.workload };
    let engine = engine(STEP);
    let (result, _) = hit_rate(&engine, RunConfig { target: engine.url(), ..replay.clone() });
    assert_eq!(result.record.output_tokens, 12);
    assert!(result.duration >= Duration::from_millis(200), "{:?}", result.duration);

    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let target = format!("http://{}", listener.local_addr().unwrap());
    let server = std::thread::spawn(move || {
        let take = |_| {
            let mut stream = BufReader::new(listener.accept().unwrap().0);
            let (mut head, mut length) = (Vec::new(), 0);
            while head.last() != Some(&String::from("\r\n")) {
                let mut line = String::new();
                stream.read_line(&mut line).unwrap();
                if let Some(value) = line.strip_prefix("content-length: ") {
                    length = value.trim().parse().unwrap();
                }
                head.push(line);
            }
            let mut body = vec![0; length];
            stream.read_exact(&mut body).unwrap();
            stream.get_mut().write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}").unwrap();
            (head[0].split(' ').nth(1).unwrap().to_owned(), String::from_utf8(body).unwrap())
        };
        (0..3).map(take).collect::<Vec<_>>()
    });
    let result = execute(RunConfig { target, ..replay }).unwrap();
    assert_eq!(result.record.answered(), 3, "{:?}", result.record.errors);
    let sent = server.join().unwrap();
    let recorded: Vec<_> = requests.iter().map(|it| (it.path.to_string(), it.body.to_string())).collect();
    assert_eq!(sent, recorded);
    assert!(RECORDING.contains(&sent[2].1) && sent[2].1.contains("caf\\u00e9"), "{}", sent[2].1);
}

#[test]
fn clients_that_leave_free_what_they_held() {
    // Long answers in slow steps: whoever leaves does so while the engine still computes.
    let engine = engine(Duration::from_millis(4));
    let mut config = config(&engine.url(), 60, Pace::Closed { concurrency: 12 });
    recipe(&mut config).answer_tokens = 40.0;
    config.manners = Manners { abort_rate: 0.4, ..Manners::default() };
    let conduct = |index| config.manners.conduct(config.workload.seed, index, 40).leaving;
    let leaving: Vec<Leaving> = (0..60).filter_map(conduct).collect();
    let in_the_midst = leaving.iter().filter(|it| matches!(it, Leaving::AfterEvents(_))).count();
    assert!(in_the_midst > 5 && leaving.len() > in_the_midst + 5, "{leaving:?}");
    let result = execute(config.clone()).unwrap();
    assert_eq!(result.record.errors_total(), 0, "{:?}", result.record.errors);
    assert_eq!((result.record.requests, result.record.aborted), (60, leaving.len() as u64));
    assert_eq!(result.record.ttft.count(), 60 - leaving.len() as u64, "who leaves is in no latency");
    assert!(engine.wait_until(Duration::from_secs(5), EngineState::is_idle), "{:?}", engine.state());
    let totals = engine.state().totals();
    // Some leave before the engine has begun with them.
    assert!(totals.aborted as usize >= in_the_midst && totals.aborted as usize <= leaving.len(), "{totals:?}");
    assert_eq!(totals.finished, 60 - leaving.len() as u64);
    // Conversations go on after a turn that nobody waited for.
    let made = Recipe { turns: 5.0, ..Recipe::shared_prefix(1, 0.0, 20, 8, 20) };
    *recipe(&mut config) = made;
    assert_eq!(execute(config).unwrap().record.requests, 60);
}

fn slow(target: &str, answer_tokens: f64, bytes: usize, every: Duration) -> RunConfig {
    let mut config = config(target, 3, Pace::Closed { concurrency: 3 });
    recipe(&mut config).answer_tokens = answer_tokens;
    config.manners = Manners { slow_readers: 1.0, trickle: Trickle { bytes, every }, ..Manners::default() };
    config
}

#[test]
fn slow_readers_still_read_when_the_engine_is_done() {
    let engine = engine(Duration::from_micros(100));
    // Some 200 kB each, read at 5 kB a second.
    let held = slow(&engine.url(), 1000.0, 512, Duration::from_millis(100));
    let interrupt = held.interrupt.clone();
    let run = std::thread::spawn(move || execute(held).unwrap());
    let is_done = |state: &EngineState| state.totals().finished == 3 && state.is_idle();
    assert!(engine.wait_until(Duration::from_secs(20), is_done), "{:?}", engine.state());
    interrupt.store(true, Ordering::Relaxed);
    assert_eq!(run.join().unwrap().record.errors, [(Failure::Interrupted, 3)].into());

    let record = execute(slow(&engine.url(), 40.0, 2048, Duration::from_millis(2))).unwrap().record;
    assert_eq!((record.answered(), record.slow_readers, record.output_tokens), (3, 3, 120), "{:?}", record.errors);
    assert_eq!((record.ttft.count(), record.end_to_end.count()), (0, 0), "their times are their own");
}

#[test]
fn a_slow_reader_slows_the_server_down() {
    // A server with little room of its own: what it has written, the client has read but for some 50 kB.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let target = format!("http://{}", listener.local_addr().unwrap());
    let mut config = slow(&target, 4.0, 4096, Duration::from_millis(10));
    config.workload.requests = 1;
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        rustix::net::sockopt::set_socket_send_buffer_size(&stream, 16 << 10).unwrap();
        assert!(stream.read(&mut [0; 65536]).unwrap() > 0);
        let body = format!(": {}\n\ndata: [DONE]\n\n", "x".repeat(300_000));
        let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n";
        let start = Instant::now();
        stream.write_all(format!("{head}{body}").as_bytes()).unwrap();
        start.elapsed()
    });
    let record = execute(config).unwrap().record;
    assert_eq!((record.answered(), record.slow_readers), (1, 1), "{:?}", record.errors);
    let writing = server.join().unwrap();
    assert!(writing > Duration::from_millis(400), "250 kB at 400 kB a second took {writing:?}");
}

#[test]
fn warm_up_is_sent_and_not_counted() {
    let engine = engine(STEP);
    let measured = |config: RunConfig| execute(config).unwrap().record.requests;
    let by_number = config(&engine.url(), 30, Pace::Closed { concurrency: 2 });
    assert_eq!(measured(RunConfig { warmup: Warmup::Requests(12), ..by_number }), 18);
    assert!(engine.wait_until(Duration::from_secs(5), |state| state.totals().finished == 30));
    let by_time = config(&engine.url(), 30, Pace::Steady { rate: 100.0, offset_s: 0.0 });
    let warmup = Warmup::Time(Duration::from_millis(95));
    let result = execute(RunConfig { warmup, ..by_time }).unwrap();
    assert_eq!((result.record.requests, result.record.ttft.count()), (20, 20));
    assert!(result.duration < Duration::from_millis(200) + Duration::from_secs(2), "from the first measured one");
    assert!(result.duration >= Duration::from_millis(190), "{:?}", result.duration);
}

#[test]
fn goodput_is_what_met_every_limit() {
    let engine = engine(Duration::from_millis(2));
    let run = |slo: &str| {
        let base = config(&engine.url(), 24, Pace::Closed { concurrency: 4 });
        execute(RunConfig { slo: Some(slo.parse().unwrap()), ..base }).unwrap()
    };
    let all = run("ttft=10s,itl=10s,e2e=10s");
    assert_eq!(all.record.slo_met, 24);
    assert!((all.goodput_rps().unwrap() - all.throughput_rps()).abs() < 1e-9);
    // Four steps of 2 ms each.
    assert_eq!(run("ttft=10s,e2e=5ms").goodput_rps(), Some(0.0));
    let none = config(&engine.url(), 4, Pace::Closed { concurrency: 4 });
    assert_eq!(execute(none).unwrap().goodput_rps(), None);
}

#[test]
fn a_schedule_that_nobody_can_keep_marks_the_run() {
    let engine = engine(STEP);
    // Three thousand requests within 3 ms, to a model that is not there: writing them alone takes longer than that.
    let mut config = config(&engine.url(), 3000, Pace::Open { rate: 1e6 });
    config.workload.model = "other".into();
    let mut result = execute(config).unwrap();
    assert_eq!(result.record.errors, [(Failure::Status(404), 3000)].into());
    assert!(report::is_saturated(&result), "{:?}", result.record.send_lag.quantile_ms(0.99));
    assert!(report::table(&result).contains("INVALID"));
    result.record.send_lag = Default::default();
    (0..100).for_each(|_| result.record.send_lag.record(Duration::from_millis(2)));
    result.cpu_share = 0.3;
    assert!(!report::is_saturated(&result) && !report::table(&result).contains("INVALID"));
    (result.cpu_share, result.duration) = (0.95, Duration::from_millis(500));
    assert!(!report::is_saturated(&result), "half a second says nothing");
    result.duration = Duration::from_secs(1);
    assert!(report::is_saturated(&result), "a generator without CPU to spare measures itself");
}
