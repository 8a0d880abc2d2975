//! `--kv-self-heal` over a real router and real sockets: an engine whose cache the router cannot see is asked to drop it.

use crate::kv_publisher::{Event, Publisher};
use crate::support::router::{Router, router};
use crate::support::wait_until;
use crate::support::worker::{Worker, worker};

const METRIC: &str = "infera_router_kv_self_heal_total";

fn start(engine: &Worker, publisher: &Publisher, is_on: &str) -> Router {
    let flag = format!("http://{},model=m,engine=sglang,kv-events={},block-size=4", engine.address, publisher.endpoint);
    router().args(&["--worker", &flag, "--kv-self-heal", is_on]).ready()
}

fn flushes(engine: &Worker) -> usize {
    engine.seen().iter().filter(|seen| (seen.method.as_str(), seen.target.as_str()) == ("POST", "/flush_cache")).count()
}

/// The router comes when the engine holds the beginning of every prompt already, and there is no replay. Without the flag
/// the view stays empty; with it the engine is asked once, drops its cache, and is seen from then on.
#[test]
fn an_engine_without_a_beginning_is_asked_once_to_drop_its_cache() {
    let context = zmq::Context::new();
    let engines = [(); 2].map(|()| worker(|_, conversation| conversation.json(200, "{}")));
    let publishers = [(); 2].map(|()| Publisher::new(&context));
    let routers = [start(&engines[0], &publishers[0], "true"), start(&engines[1], &publishers[1], "false")];
    let mut publishers = publishers.map(Publisher::subscribed);
    let prompt: Vec<u32> = (1..=24).collect();
    for (publisher, router) in publishers.iter_mut().zip(&routers) {
        publisher.send(&[Event::Store { tokens: &prompt, from: 2 }]);
        wait_until("orphans", || router.metric_sum("infera_router_kv_orphans_waiting") == 4.0);
    }
    wait_until("the ask", || flushes(&engines[0]) == 1);
    wait_until("counted", || routers[0].metric_sum(METRIC) == 1.0);
    publishers[0].send(&[Event::Clear, Event::Store { tokens: &prompt, from: 0 }]);
    wait_until("all of it is seen", || routers[0].metric_sum("infera_router_kv_blocks_visible") == 6.0);
    publishers[0].send(&[Event::Store { tokens: &(500..524).collect::<Vec<u32>>(), from: 2 }]);
    wait_until("an orphan among others", || routers[0].metric_sum("infera_router_kv_orphans_waiting") == 4.0);
    // Not a wait for something to happen: the time of two looks, in which nothing may.
    std::thread::sleep(std::time::Duration::from_millis(2_200));
    assert_eq!((flushes(&engines[0]), flushes(&engines[1])), (1, 0));
    assert_eq!(routers[1].metric_sum(METRIC), 0.0);
    assert_eq!(routers[1].metric_sum("infera_router_kv_blocks_visible"), 0.0);
}
