//! Start, several shards, results from other threads, panics, drain and stop.

use std::net::TcpStream;
use std::sync::atomic::Ordering;
use std::time::Duration;

use http::StatusCode;
use infera_shards::{DriverChoice, Engine, EngineConfig, ShardContext, StartError};

use crate::harness::{DRIVERS, TestEngine, Upstream, eventually, nowhere, open_descriptors};

#[test]
fn the_driver_is_reported() {
    let epoll = TestEngine::start(DriverChoice::Epoll, nowhere());
    assert_eq!(epoll.engine().driver().name, "epoll");
    let auto = TestEngine::start(DriverChoice::Auto, nowhere());
    let report = auto.engine().driver();
    match report.name {
        "io_uring" => assert_eq!(report.fallback_reason, None),
        _ => println!("NOT TESTED on io_uring: {:?}", report.fallback_reason),
    }
}

#[test]
fn io_uring_can_be_required() {
    let mut config = EngineConfig::new("127.0.0.1:0".parse().expect("an address"));
    config.driver = DriverChoice::Epoll;
    config.require_io_uring = true;
    let refused = Engine::start(config, |_| -> NoService { unreachable!("no shard starts") });
    assert!(matches!(refused, Err(StartError::IoUringRequired(_))));
}

struct NoService;

impl infera_shards::Service for NoService {
    async fn call(&self, _: infera_shards::Request, _: &mut infera_shards::Responder) {}

    fn reject(&self, rejection: &infera_shards::Rejection) -> infera_shards::Response {
        crate::harness::plain(rejection.status, rejection.reason)
    }
}

#[test]
fn a_start_that_fails_says_why_and_leaves_nothing_running() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("binds");
    let config = EngineConfig::new(taken.local_addr().expect("an address"));
    let refused = Engine::start(config, |_| NoService);
    assert!(matches!(refused, Err(StartError::Listen { .. })));
    let mut config = EngineConfig::new("127.0.0.1:0".parse().expect("an address"));
    config.shards = 3;
    let refused = Engine::start(config, |context| {
        assert!(context.shard != 1, "on purpose");
        NoService
    });
    assert!(matches!(refused, Err(StartError::Service(_))));
}

#[test]
fn shards_share_one_port_and_the_load() {
    for driver in DRIVERS {
        let engine = TestEngine::configured(driver, nowhere(), |config| {
            config.shards = 4;
            config.cpus = Some(vec![0, 1]);
        });
        for _ in 0..200 {
            engine.connect().get("/shard");
        }
        let stats = engine.engine().stats();
        assert_eq!(stats.iter().map(|shard| shard.requests).sum::<u64>(), 200);
        assert!(stats.iter().all(|shard| shard.requests > 10), "{stats:?}");
    }
}

#[test]
fn results_of_other_threads_arrive() {
    for driver in DRIVERS {
        let engine = TestEngine::configured(driver, nowhere(), |config| config.shards = 2);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let mut client = engine.connect();
                    for _ in 0..25 {
                        assert_eq!(client.get("/ticket").text(), "from afar");
                        assert_eq!(client.get("/ticket-lost").text(), "lost");
                    }
                });
            }
        });
    }
}

#[test]
fn a_panic_costs_one_connection() {
    for driver in DRIVERS {
        let engine = TestEngine::start(driver, nowhere());
        let mut bystander = engine.connect();
        assert_eq!(bystander.get("/hello").text(), "hello");
        let mut client = engine.connect();
        let answer = client.get("/panic");
        assert_eq!((answer.status, answer.header("x-rejected")), (500, Some("engine")));
        assert!(client.rest().is_empty());
        let mut client = engine.connect();
        assert_eq!(client.get("/panic-after").text(), "sent");
        assert!(client.rest().is_empty());
        assert_eq!(bystander.get("/spawn-panic").text(), "spawned");
        eventually("all panics are counted", || engine.stats().panics == 3);
        assert_eq!(bystander.get("/hello").text(), "hello");
        eventually("nothing runs", || engine.stats().requests_active == 0);
    }
}

/// Answers whatever the engine refuses by a panic, and leaves a result behind whose end is one.
struct Explosive(ShardContext);

struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("on purpose, where nothing catches it");
    }
}

impl infera_shards::Service for Explosive {
    async fn call(&self, _: infera_shards::Request, responder: &mut infera_shards::Responder) {
        let (completion, pending) = self.0.mailbox.ticket::<Bomb>();
        // Nobody waits for the result any more, so that the shard's main loop drops it.
        drop(pending);
        completion.complete(Bomb);
        let _ = responder.send(crate::harness::plain(StatusCode::OK, "lit")).await;
    }

    fn reject(&self, _: &infera_shards::Rejection) -> infera_shards::Response {
        panic!("on purpose, while a connection is refused")
    }
}

#[test]
fn a_shard_that_cannot_go_on_is_said_to_have_ended() {
    let start = |connections_max| {
        let mut config = EngineConfig::new("127.0.0.1:0".parse().expect("an address"));
        config.shards = 2;
        config.limits.connections_max = connections_max;
        let engine = Engine::start(config, Explosive).expect("starts");
        assert_eq!(engine.ended_shard(), None);
        engine
    };
    let connect = |engine: &Engine| crate::harness::Client::connect(engine.local_addr());
    // Its thread ends.
    let engine = start(10);
    let mut client = connect(&engine);
    client.send("GET / HTTP/1.1\r\nHost: t\r\n\r\n");
    eventually("its end is seen", || engine.ended_shard().is_some());
    // It lives, and accepts nobody any more.
    let engine = start(0);
    let _client = connect(&engine);
    eventually("its deafness is seen", || engine.ended_shard().is_some());
    // One that drains accepts nobody either, and has not ended.
    let engine = start(10);
    engine.drain();
    eventually("it is drained", || !engine.is_accepting());
    assert_eq!(engine.ended_shard(), None);
}

#[test]
fn a_service_without_an_answer_is_a_500() {
    let engine = TestEngine::start(DRIVERS[0], nowhere());
    let mut client = engine.connect();
    let answer = client.get("/nothing");
    assert_eq!((answer.status, answer.header("connection")), (500, Some("close")));
    assert!(client.rest().is_empty());
}

#[test]
fn drain_finishes_what_runs_and_closes_what_idles() {
    for driver in DRIVERS {
        let upstream = Upstream::start(|mut served| {
            served.request();
            served.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n");
            // The engine is draining by the time the stream ends.
            std::thread::sleep(Duration::from_millis(300));
            served.send("1\r\nb\r\n0\r\n\r\n");
            served.until_closed();
        });
        let engine = TestEngine::configured(driver, upstream.address, |config| config.shards = 2);
        let mut idle = engine.connect();
        assert_eq!(idle.get("/hello").text(), "hello");
        let mut fresh = engine.connect();
        let mut streaming = engine.connect();
        streaming.send("GET /p HTTP/1.1\r\nHost: t\r\n\r\n");
        assert_eq!(streaming.head().status, 200);
        let mut sleeping = engine.connect();
        sleeping.send("GET /sleep HTTP/1.1\r\nHost: t\r\n\r\n");
        eventually("both run", || engine.engine().requests_active() == 2);
        engine.engine().drain();
        assert!(idle.rest().is_empty());
        assert!(fresh.rest().is_empty());
        let slept = sleeping.answer();
        assert_eq!((slept.text(), slept.header("connection")), ("slept", Some("close")));
        assert_eq!(streaming.rest(), b"1\r\na\r\n1\r\nb\r\n0\r\n\r\n");
        assert!(sleeping.rest().is_empty());
        drop((idle, fresh, streaming, sleeping));
        eventually("all is closed", || engine.engine().connections_open() == 0);
        eventually("the upstream's connection too", || upstream.closed.load(Ordering::SeqCst) == 1);
        assert!(TcpStream::connect(engine.address()).is_err(), "nobody listens any more");
        engine.stop();
    }
}

#[test]
fn stop_ends_what_runs() {
    for driver in DRIVERS {
        let engine = TestEngine::configured(driver, nowhere(), |config| config.shards = 2);
        let seen = engine.seen.clone();
        let mut clients: Vec<_> = (0..20).map(|_| engine.connect()).collect();
        for client in &mut clients {
            client.send("GET /forever HTTP/1.1\r\nHost: t\r\n\r\n");
        }
        eventually("all run", || engine.stats().requests_active == 20);
        engine.stop();
        assert_eq!(seen.dropped.load(Ordering::SeqCst), 20);
        for client in &mut clients {
            assert!(client.rest().is_empty());
        }
    }
}

#[test]
fn stopped_engines_give_their_descriptors_back() {
    // Other tests open and close descriptors meanwhile, so only a leak that grows with the rounds counts.
    for driver in DRIVERS {
        let round = || {
            let upstream = Upstream::echo();
            let engine = TestEngine::start(driver, upstream.address);
            let mut clients: Vec<_> = (0..10).map(|_| engine.connect()).collect();
            for client in &mut clients {
                assert_eq!(client.post("/p", b"x").text(), "x");
                client.send("GET /forever HTTP/1.1\r\nHost: t\r\n\r\n");
            }
            eventually("all run", || engine.stats().requests_active == 10);
            engine.stop();
        };
        round();
        let before = open_descriptors();
        for _ in 0..20 {
            round();
        }
        let after = open_descriptors();
        println!("{driver:?}: {before} -> {after}");
        assert!(after < before + 200, "{before} descriptors became {after} on {driver:?}");
    }
}
