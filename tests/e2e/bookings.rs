//! Field report B32: whatever becomes of requests, at rest nothing is booked on anybody, and nothing was negative on the
//! way (`wait_for_rest` looks at each reading).

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::json;

use crate::support::client::{self, Connection};
use crate::support::router::{Router, router};
use crate::support::wait_until;
use crate::support::worker::{Then, Worker, dead_address, json_worker, worker};

const PATH: &str = "/v1/completions";

fn body(seed: usize, stream: bool) -> String {
    let prompt: Vec<usize> = (0..64 + seed % 64).map(|at| seed % 7 * 1000 + at).collect();
    json!({"model": "m", "prompt": prompt, "stream": stream}).to_string()
}

fn write_workers(path: &Path, workers: &[&Worker]) {
    let record = |worker: &&Worker| {
        json!({"worker_id": worker.address.to_string(), "url": format!("http://{}", worker.address), "model_name": "m",
            "kv_block_size": 16})
    };
    let records: Vec<_> = workers.iter().map(record).collect();
    let next = path.with_extension("next");
    std::fs::write(&next, serde_json::to_vec(&records).unwrap()).unwrap();
    std::fs::rename(next, path).unwrap();
}

fn send(router: &Router, seed: usize, stream: bool) -> Connection {
    let mut connection = Connection::open(router.address);
    connection.send(&client::request("POST", PATH, "", body(seed, stream).as_bytes()));
    connection
}

#[test]
fn b32_workers_that_fail_in_every_way_keep_no_load() {
    let resetting = worker(|_, conversation| conversation.reset());
    let failing = worker(|_, conversation| conversation.json(500, "{}"));
    let cutting = worker(|_, conversation| {
        conversation.sse_head();
        conversation.chunk("data: {\"x\":1}\n\n");
        conversation.reset()
    });
    let good = json_worker(r#"{"usage":{"prompt_tokens":3,"completion_tokens":1}}"#);
    let workers = [dead_address(), resetting.address, failing.address, cutting.address, good.address];
    let router = workers.into_iter().fold(router(), |start, address| start.worker(address)).shards(2).ready();
    let mut statuses = std::collections::BTreeMap::<u16, usize>::new();
    for number in 0..200 {
        let mut connection = send(&router, number, number % 2 == 0);
        // Cut answers end before their time; whatever came is fine.
        let status = connection.head().map_or(0, |(status, _)| status);
        *statuses.entry(status).or_default() += 1;
    }
    assert!(statuses.contains_key(&200) && !statuses.contains_key(&0), "{statuses:?}");
    assert!(router.metric_sum("infera_router_retries_total") > 0.0);
    router.wait_for_rest();
    let bad_prompt = r#"{"model":"m","prompt":{"not":"a prompt"},"messages":7}"#;
    router.post(PATH, bad_prompt);
    router.post("/v1/chat/completions", bad_prompt);
    router.wait_for_rest();
}

#[test]
fn b32_a_worker_that_leaves_with_requests_running_takes_its_load_along() {
    let open = Arc::new(AtomicBool::new(false));
    let gated = || {
        let open = open.clone();
        worker(move |_, conversation| {
            wait_until("the test lets workers answer", || open.load(Ordering::SeqCst));
            conversation.json(200, "{}");
            Then::KeepAlive
        })
    };
    let (leaving, staying) = (gated(), gated());
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("workers.json");
    write_workers(&path, &[&leaving, &staying]);
    let router = router().args(&["--workers-file", path.to_str().unwrap()]).shards(2).ready();
    let known = |count: f64| {
        wait_until("the file is taken over", || router.metric("infera_router_active_workers") == Some(count));
    };
    known(2.0);
    let mut running: Vec<Connection> = (0..50).map(|number| send(&router, number, false)).collect();
    wait_until("all requests are with workers", || leaving.requests() + staying.requests() == 50);
    assert!(leaving.requests() > 10, "{}", leaving.requests());
    write_workers(&path, &[&staying]);
    known(1.0);
    // Half of the clients leave too.
    running.truncate(25);
    open.store(true, Ordering::SeqCst);
    for connection in &mut running {
        assert_eq!(connection.answer("POST").status, 200);
    }
    router.wait_for_rest();
    write_workers(&path, &[&leaving, &staying]);
    known(2.0);
    router.wait_for_rest();
    let before = leaving.requests();
    (0..8).for_each(|number| assert_eq!(router.post(PATH, &body(number, false)).status, 200));
    assert!(leaving.requests() > before, "a worker that is back has no old load to hold against it");
    router.wait_for_rest();
}

/// Field report B34: one worker has joined a moment ago and never said anything of its load.
#[test]
fn b34_a_worker_that_joins_gets_a_fair_share_of_new_requests() {
    let workers: Vec<Worker> = (0..5).map(|_| json_worker("{}")).collect();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("workers.json");
    write_workers(&path, &workers[..4].iter().collect::<Vec<_>>());
    let router = router().args(&["--workers-file", path.to_str().unwrap()]).shards(2).ready();
    let known = |count: f64| {
        wait_until("the file is taken over", || router.metric("infera_router_active_workers") == Some(count));
    };
    known(4.0);
    (0..40).for_each(|number| assert_eq!(router.post(PATH, &body(number * 7, false)).status, 200));
    write_workers(&path, &workers.iter().collect::<Vec<_>>());
    known(5.0);
    let before: Vec<usize> = workers.iter().map(Worker::requests).collect();
    let threads: Vec<_> = (0..5)
        .map(|thread| {
            let address = router.address;
            std::thread::spawn(move || {
                for number in 0..100 {
                    let body = body(thread * 1000 + number, false);
                    assert_eq!(client::post(address, PATH, &body).status, 200);
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    let shares: Vec<usize> = workers.iter().zip(&before).map(|(worker, before)| worker.requests() - before).collect();
    assert_eq!(shares.iter().sum::<usize>(), 500);
    assert!((50..=200).contains(&shares[4]), "{shares:?}");
    router.wait_for_rest();
}
