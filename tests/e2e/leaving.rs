//! Clients that leave or stall: the worker is told within a second, nothing stays booked, nothing piles up.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::support::client::{self, Connection};
use crate::support::router::router;
use crate::support::worker::{Then, worker};
use crate::support::{eventually, wait_until};

/// Longest time from a client's leaving to the end of the upstream connection.
const NOTICED_WITHIN: Duration = Duration::from_secs(1);

fn reset(connection: Connection) {
    rustix::net::sockopt::set_socket_linger(connection.stream(), Some(Duration::ZERO)).unwrap();
}

/// Field report B05 (a) to (e): before the head, after the head, mid-stream; FIN, RST and half-close.
#[test]
fn b05_the_worker_is_left_within_a_second_in_every_phase() {
    for phase in ["waiting for the head", "after the head", "mid-stream"] {
        for way in ["close", "reset", "half-close"] {
            let worker = worker(move |_, conversation| {
                if phase != "waiting for the head" {
                    conversation.sse_head();
                }
                if phase == "mid-stream" {
                    conversation.chunk("data: 1\n\n");
                }
                conversation.wait_for_close()
            });
            let router = router().worker(worker.address).ready();
            let mut connection = Connection::open(router.address);
            connection.send(&client::request(
                "POST",
                "/v1/chat/completions",
                "",
                br#"{"model":"m","stream":true,"prompt":[1]}"#,
            ));
            wait_until("the worker has the request", || worker.requests() == 1);
            if phase != "waiting for the head" {
                connection.head().unwrap();
            }
            if phase == "mid-stream" {
                connection.chunk().unwrap();
            }
            let left = Instant::now();
            let kept = match way {
                "close" => {
                    drop(connection);
                    None
                }
                "reset" => {
                    reset(connection);
                    None
                }
                // Documented: a half-closed client counts as gone, as with nginx.
                _ => {
                    connection.stream().shutdown(Shutdown::Write).unwrap();
                    Some(connection)
                }
            };
            let closed = eventually("the upstream connection ends", || worker.closed().first().copied());
            assert!(closed - left < NOTICED_WITHIN, "{phase}, {way}: {:?}", closed - left);
            drop(kept);
            router.wait_for_rest();
            assert_eq!(router.metric(r#"infera_requests_total{outcome="stream_failed",router="mixed"}"#), Some(1.0));
        }
    }
}

/// Field report B32: aborted at random moments, then everything is exactly 0.
#[test]
fn b32_load_is_zero_after_500_requests_aborted_at_random_moments() {
    let seed = std::env::var("INFERA_TEST_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0x5eed_u64);
    println!("INFERA_TEST_SEED={seed}");
    let answered = Arc::new(AtomicUsize::new(0));
    let counting = answered.clone();
    let steady = worker(move |_, conversation| {
        std::thread::sleep(Duration::from_millis(2));
        conversation.sse_head();
        for _ in 0..10 {
            if !conversation.chunk("data: {\"x\":1}\n\n") {
                return Then::Close;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        counting.fetch_add(1, Ordering::Relaxed);
        conversation.last_chunk()
    });
    let failing = worker(|seen, conversation| match seen.body.len() % 3 {
        0 => conversation.reset(),
        1 => conversation.json(500, "{}"),
        _ => Then::Close,
    });
    let router = router().worker(steady.address).worker(failing.address).shards(2).ready();
    let threads: Vec<_> = (0..10)
        .map(|thread| {
            let address = router.address;
            std::thread::spawn(move || {
                let mut random = seed ^ (thread + 1_u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                let mut next = move |bound: u64| {
                    random ^= random << 13;
                    random ^= random >> 7;
                    random ^= random << 17;
                    random % bound
                };
                for _ in 0..50 {
                    let ids: Vec<String> = (0..32 + next(64)).map(|_| next(3).to_string()).collect();
                    let body = format!(r#"{{"model":"m","stream":true,"prompt":[{}]}}"#, ids.join(","));
                    let mut connection = Connection::open(address);
                    let raw = client::request("POST", "/v1/completions", "", body.as_bytes());
                    let cut = if next(5) == 0 { next(raw.len() as u64) as usize } else { raw.len() };
                    connection.send(&raw[..cut]);
                    let patience = Duration::from_micros(next(20_000) + 1);
                    connection.stream().set_read_timeout(Some(patience)).unwrap();
                    // Reads for a random while, then leaves.
                    let mut sink = [0; 64];
                    for _ in 0..next(4) {
                        let _ = connection.reader.read(&mut sink);
                    }
                    if next(2) == 0 {
                        reset(connection);
                    }
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    router.wait_for_rest();
    wait_until("every client connection is gone", || router.metric_sum("infera_router_connections_open") <= 1.0);
    // The router still serves.
    let answer = router.post("/v1/completions", r#"{"model":"m","prompt":[1]}"#);
    assert_eq!(answer.status, 200);
}

/// A client that does not read stops the reading from its worker: what is in flight is bounded by socket
/// buffers and one relay buffer, not by what the worker has to say.
#[test]
fn a_stalled_client_does_not_make_the_router_buffer() {
    const TOTAL: usize = 64 << 20;
    let sent = Arc::new(AtomicUsize::new(0));
    let counting = sent.clone();
    let worker = worker(move |_, conversation| {
        conversation.sse_head();
        let payload = format!("data: {}\n\n", "x".repeat(16 << 10));
        while counting.load(Ordering::Relaxed) < TOTAL {
            if !conversation.chunk(&payload) {
                return Then::Close;
            }
            counting.fetch_add(payload.len(), Ordering::Relaxed);
        }
        conversation.last_chunk()
    });
    let router = router().round_robin().worker(worker.address).ready();
    let memory_before = resident_bytes(router.pid());
    let mut stalled = Connection::open(router.address);
    stalled.send(&client::request("POST", "/v1/completions", "", br#"{"model":"m","stream":true}"#));
    // Settled: nothing more was taken for a while.
    let mut last = (usize::MAX, Instant::now());
    wait_until("the worker is held back", || {
        let now = sent.load(Ordering::Relaxed);
        if now != last.0 {
            last = (now, Instant::now());
        }
        now > 0 && last.1.elapsed() > Duration::from_millis(500)
    });
    let taken = sent.load(Ordering::Relaxed);
    assert!(taken < TOTAL / 2, "{taken} bytes were taken from the worker for a client that reads nothing");
    let grown = resident_bytes(router.pid()).saturating_sub(memory_before);
    assert!(grown < 4 << 20, "the router grew by {grown} bytes");
    // A neighbour is served meanwhile.
    assert_eq!(client::get(router.address, "/health").status, 200);
    // And the stalled client gets everything once it reads.
    let (status, _) = stalled.head().unwrap();
    assert_eq!(status, 200);
    let mut received = 0;
    while let Some(payload) = stalled.chunk().unwrap() {
        received += payload.len();
    }
    assert!(received >= TOTAL);
}

fn resident_bytes(pid: u32) -> usize {
    let statm = std::fs::read_to_string(format!("/proc/{pid}/statm")).unwrap();
    let pages: usize = statm.split(' ').nth(1).unwrap().parse().unwrap();
    pages * rustix::param::page_size()
}

/// Field report B53: half a message and a close, or silence, costs no CPU.
#[test]
fn b53_half_sent_messages_cost_no_cpu() {
    let worker = worker(|_, conversation| conversation.wait_for_close());
    let router = router().round_robin().worker(worker.address).ready();
    let head = "POST /v1/completions HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n";
    let halves = ["POST /v1/comp", "POST /v1/completions HTTP/1.1\r\nHo", head]
        .into_iter()
        .map(str::to_owned)
        .chain(["4", "4\r", "4\r\n", "4\r\nab", "4\r\nabcd", "0\r\n"].iter().map(|rest| format!("{head}{rest}")));
    let mut held = Vec::new();
    for half in halves {
        for leave in [false, true] {
            let mut connection = Connection::open(router.address);
            connection.stream().write_all(half.as_bytes()).unwrap();
            if leave {
                connection.stream().shutdown(Shutdown::Write).unwrap();
                // Closed at once: nothing, or a 400, then the end.
                let mut rest = Vec::new();
                let _ = connection.reader.read_to_end(&mut rest);
            } else {
                held.push(connection);
            }
        }
    }
    let before = cpu_ticks(router.pid());
    let started = Instant::now();
    // A measuring interval, not a wait for something to happen.
    std::thread::sleep(Duration::from_secs(1));
    let used = cpu_ticks(router.pid()) - before;
    let ticks_per_second = rustix::param::clock_ticks_per_second() as f64;
    let share = used as f64 / ticks_per_second / started.elapsed().as_secs_f64();
    assert!(share < 0.1, "{share} of a core is used by connections that say nothing");
    assert_eq!(client::get(router.address, "/health").status, 200);
}

fn cpu_ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let after_name: Vec<&str> = stat[stat.rfind(')').unwrap() + 2..].split(' ').collect();
    after_name[11].parse::<u64>().unwrap() + after_name[12].parse::<u64>().unwrap()
}
