//! Runs against real simulated engines, and against servers that misbehave.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::Arc;

use super::*;
use crate::engine::EngineState;
use crate::engine::faults::Faults;
use crate::plan::Recipe;
use crate::prompt::TextModel;
use crate::run::test_support::{config, engine, recipe};
use crate::run::workload::Workload;

fn expected_texts(workload: &Workload) -> Vec<String> {
    let (text, plan) = (TextModel::shipped().unwrap(), workload.plan());
    (0..plan.sessions())
        .map(|number| {
            let request = plan.next(&mut plan.script(number), None).unwrap();
            text.expected_chat_answer(&serde_json::from_str(&request.body).unwrap(), request.answer_tokens).unwrap()
        })
        .collect()
}

#[test]
fn closed_loop_counts_everything_and_checks_content() {
    let engine = engine(Duration::from_micros(500));
    let mut config = config(&engine.url(), 60, Pace::Closed { concurrency: 4 });
    let mut texts = expected_texts(&config.workload);
    config.expected = Some(Arc::new(texts.clone()));
    let result = execute(config.clone()).unwrap();
    assert_eq!(result.record.errors_total(), 0, "{:?} {:?}", result.record.errors, result.first_error);
    assert_eq!((result.record.requests, result.record.ttft.count()), (60, 60));
    assert_eq!(result.record.output_tokens, 240);
    let hit_rate = result.record.hit_rate().unwrap();
    assert!(hit_rate > 0.7, "three prefixes of 10 blocks over 60 requests: {hit_rate}");
    assert!(engine.wait_until(Duration::from_secs(5), EngineState::is_idle));
    assert_eq!(engine.state().totals().finished, 60);
    texts[7].push('x');
    config.expected = Some(Arc::new(texts));
    let result = execute(config).unwrap();
    assert_eq!(result.record.errors, [(Failure::WrongContent, 1)].into());
}

#[test]
fn multi_turn_conversations_hit_their_own_history() {
    let engine = engine(Duration::from_micros(500));
    let mut config = config(&engine.url(), 40, Pace::Closed { concurrency: 2 });
    *recipe(&mut config) = Recipe { turns: 5.0, ..Recipe::shared_prefix(1, 0.0, 64, 40, 32) };
    let result = execute(config).unwrap();
    assert_eq!(result.record.errors_total(), 0, "{:?}", result.first_error);
    assert_eq!(result.record.requests, 40);
    // Every turn but the first finds all of the turn before, generated answer included, except its last block.
    assert!(result.record.hit_rate().unwrap() > 0.6, "{:?}", result.record.hit_rate());
}

#[test]
fn unary_answers_are_read_too() {
    let engine = engine(Duration::from_micros(500));
    let mut config = config(&engine.url(), 10, Pace::Closed { concurrency: 2 });
    config.workload.stream = false;
    let texts = expected_texts(&config.workload);
    config.expected = Some(Arc::new(texts));
    let result = execute(config).unwrap();
    assert_eq!((result.record.errors_total(), result.record.end_to_end.count()), (0, 10), "{:?}", result.first_error);
}

#[test]
fn waiting_for_a_stalled_server_is_in_the_latency() {
    // 20 requests at 100 per second all fall into a stall of 600 ms. Timed from their sending, with one in flight at
    // a time, 19 of them would look fast; timed from when they should have been sent, none does.
    let engine = engine(Duration::from_micros(500));
    engine.set_faults(Faults { stall: true, ..Faults::default() });
    let mut config = config(&engine.url(), 20, Pace::Open { rate: 100.0 });
    config.in_flight_max = 1;
    let stall = Duration::from_millis(600);
    let start = Instant::now();
    let run = std::thread::spawn(move || execute(config).unwrap());
    // The condition waited for is the passing of time itself: the stall's length is the subject.
    std::thread::sleep(stall);
    engine.set_faults(Faults::default());
    let stalled = start.elapsed();
    let record = run.join().unwrap().record;
    assert_eq!((record.requests, record.errors_total()), (20, 0));
    assert!(record.ttft.quantile_ms(0.5) > 250.0, "median {}", record.ttft.quantile_ms(0.5));
    assert!(record.ttft_from_send.quantile_ms(0.5) < 250.0, "median {}", record.ttft_from_send.quantile_ms(0.5));
    assert!(record.ttft.max_ms() < stalled.as_secs_f64() * 1000.0 + 5000.0);
}

#[test]
fn errors_are_told_apart_by_class() {
    let engine = engine(Duration::from_micros(500));
    let run = |faults: Faults| {
        engine.set_faults(faults);
        execute(config(&engine.url(), 6, Pace::Closed { concurrency: 1 })).unwrap()
    };
    let result = run(Faults { fail_next: 2, fail_status: 503, ..Faults::default() });
    assert_eq!(result.record.errors, [(Failure::Status(503), 2)].into());
    assert!(result.first_error.unwrap().contains("injected failure"));
    let result = run(Faults { close_after_tokens: Some(1), ..Faults::default() });
    assert_eq!(result.record.errors, [(Failure::Truncated, 6)].into());
    // A first connection that dies unanswered is an error; a kept one is replaced once, silently.
    let result = run(Faults { close_next: 1, ..Faults::default() });
    assert_eq!(result.record.errors, [(Failure::NoAnswer, 1)].into());
    let mut unknown = config(&engine.url(), 3, Pace::Closed { concurrency: 1 });
    unknown.workload.model = "other".into();
    assert_eq!(execute(unknown).unwrap().record.errors, [(Failure::Status(404), 3)].into());
}

#[test]
fn timeouts_and_interrupts_end_requests() {
    let engine = engine(Duration::from_micros(500));
    engine.set_faults(Faults { stall: true, ..Faults::default() });
    let mut slow = config(&engine.url(), 3, Pace::Closed { concurrency: 3 });
    slow.timeout = Duration::from_millis(100);
    assert_eq!(execute(slow).unwrap().record.errors, [(Failure::Timeout, 3)].into());
    assert!(engine.wait_until(Duration::from_secs(5), EngineState::is_idle));
    let endless = config(&engine.url(), 5, Pace::Closed { concurrency: 2 });
    let interrupt = endless.interrupt.clone();
    let run = std::thread::spawn(move || execute(endless).unwrap());
    assert!(engine.wait_until(Duration::from_secs(10), |state| state.ranks[0].waiting >= 2));
    interrupt.store(true, Ordering::Relaxed);
    let result = run.join().unwrap();
    assert!(result.interrupted);
    assert_eq!(result.record.errors, [(Failure::Interrupted, 2)].into());
    assert!(engine.wait_until(Duration::from_secs(5), EngineState::is_idle));
}

#[test]
fn dead_and_strange_targets_are_named() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let strange = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let _ = stream.read(&mut [0; 1000]);
        stream.write_all(b"220 mail.example ESMTP\r\n").unwrap();
    });
    let error = probe(&format!("http://{address}")).unwrap_err().to_string();
    assert!(error.contains("does not speak HTTP"), "{error}");
    strange.join().unwrap();
    let error = probe(&format!("http://{address}")).unwrap_err().to_string();
    assert!(error.contains("cannot connect to") && error.contains("is the server running"), "{error}");
    assert!(probe("https://x").unwrap_err().to_string().contains("must start with http://"));
}

#[test]
fn answers_without_length_or_in_tiny_pieces_are_read() {
    let event = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"}}]}\n\ndata: [DONE]\n\n";
    let until_close = format!("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n{event}");
    let chunked: String = event.chars().map(|byte| format!("1\r\n{byte}\r\n")).collect();
    let chunked = format!(
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n{chunked}0\r\n\r\n"
    );
    for answer in [until_close, chunked] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let target = format!("http://{}", listener.local_addr().unwrap());
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = vec![0; 65536];
            let mut length = 0;
            while !request[..length].ends_with(b"}") {
                length += stream.read(&mut request[length..]).unwrap();
            }
            for piece in answer.as_bytes().chunks(7) {
                stream.write_all(piece).unwrap();
            }
        });
        let result = execute(config(&target, 1, Pace::Closed { concurrency: 1 })).unwrap();
        assert_eq!(result.record.errors_total(), 0, "{:?}", result.record.errors);
        assert_eq!(result.record.ttft.count(), 1);
        server.join().unwrap();
    }
}
