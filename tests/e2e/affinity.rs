//! Sessions, images, cache hints: where later requests go because of earlier ones. Against scripted workers, so that
//! only the router decides.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};

use crate::support::client::{self, Answer, Connection};
use crate::support::router::{Router, Start, router};
use crate::support::wait_until;
use crate::support::worker::{Worker, json_worker, worker};

const PATH: &str = "/v1/completions";

fn three() -> Vec<Worker> {
    (0..3).map(|_| json_worker("{}")).collect()
}

trait WithWorkers {
    fn workers(self, workers: &[Worker]) -> Self;
}

impl WithWorkers for Start {
    fn workers(self, workers: &[Worker]) -> Self {
        workers.iter().fold(self, |start, worker| start.worker(worker.address))
    }
}

fn turn(router: &Router, session: &str, number: usize) -> Answer {
    let body = json!({"model": "m", "prompt": format!("turn {number} of {session}")}).to_string();
    let header = format!("X-Dynamo-Session-ID: {session}\r\n");
    client::exchange(router.address, "POST", PATH, &header, body.as_bytes())
}

/// Index of the worker that has answered since `before`, which is then brought up to date.
fn who(workers: &[Worker], before: &mut Vec<usize>) -> usize {
    let now: Vec<usize> = workers.iter().map(Worker::requests).collect();
    let index = (0..workers.len()).find(|index| now[*index] > before[*index]).expect("one has answered");
    *before = now;
    index
}

#[test]
fn turns_of_a_session_stay_together_and_sessions_spread() {
    for policy in ["kv-aware", "round-robin"] {
        let workers = three();
        let router = router().workers(&workers).args(&["--session-affinity", "both"]).policy(policy).shards(2).ready();
        let mut seen = vec![0; 3];
        let mut homes: BTreeMap<String, usize> = BTreeMap::new();
        for number in 0..8 {
            for session in ["a", "b", "c", "d", "e", "f"] {
                assert_eq!(turn(&router, session, number).status, 200);
                let home = who(&workers, &mut seen);
                assert_eq!(
                    *homes.entry(session.to_owned()).or_insert(home),
                    home,
                    "{policy}: {session}, turn {number}"
                );
            }
        }
        let distinct: std::collections::BTreeSet<_> = homes.values().collect();
        assert_eq!(distinct.len(), 3, "{policy}: {homes:?}");
        assert_eq!(router.metric(r#"infera_router_session_active{role="mixed"}"#), Some(6.0));
        assert_eq!(router.metric(r#"infera_router_session_hits_total{role="mixed"}"#), Some(42.0));
        assert_eq!(router.metric(r#"infera_router_session_selected_total{role="mixed"}"#), Some(6.0));
        router.wait_for_rest();
    }
}

#[test]
fn without_the_mode_the_header_means_nothing() {
    for arguments in [&["--session-affinity", "off"][..], &["--session-affinity", "prefill"]] {
        let workers = three();
        let router = router().workers(&workers).args(arguments).ready();
        for number in 0..6 {
            assert_eq!(turn(&router, "a", number).status, 200);
        }
        let counts: Vec<usize> = workers.iter().map(Worker::requests).collect();
        assert_eq!(counts, [2, 2, 2], "{arguments:?}");
    }
}

#[test]
fn b35_a_session_is_bound_where_it_was_served() {
    let refuses = Arc::new(AtomicBool::new(true));
    let refusing = refuses.clone();
    let first = worker(move |_, conversation| match refusing.load(Ordering::SeqCst) {
        true => conversation.reset(),
        false => conversation.json(200, "{}"),
    });
    let second = json_worker("{}");
    let router = router().worker(first.address).worker(second.address).args(&["--session-affinity", "both"]).ready();
    for session in ["a", "b", "c", "d"] {
        assert_eq!(turn(&router, session, 1).status, 200);
    }
    let refused = first.requests();
    assert!(refused > 0, "some sessions chose the refusing worker first");
    refuses.store(false, Ordering::SeqCst);
    for number in 2..6 {
        for session in ["a", "b", "c", "d"] {
            assert_eq!(turn(&router, session, number).status, 200);
        }
    }
    assert_eq!((first.requests(), second.requests()), (refused, 20));
}

/// A workers file with these workers, replaced as a whole.
fn write_workers(path: &Path, workers: &[&Worker]) {
    let records: Vec<Value> = workers
        .iter()
        .map(|worker| {
            json!({"worker_id": worker.address.to_string(), "url": format!("http://{}", worker.address),
                "model_name": "m", "kv_block_size": 16})
        })
        .collect();
    let next = path.with_extension("next");
    std::fs::write(&next, serde_json::to_vec(&records).unwrap()).unwrap();
    std::fs::rename(next, path).unwrap();
}

fn wait_for_workers(router: &Router, count: usize) {
    wait_until("the workers file is taken over", || {
        router.metric("infera_router_active_workers") == Some(count as f64)
    });
}

#[test]
fn b35_a_leaving_worker_moves_its_sessions_once_and_a_joining_one_moves_none() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("workers.json");
    let workers = three();
    write_workers(&path, &[&workers[0], &workers[1]]);
    let router = router().args(&["--session-affinity", "both", "--workers-file", path.to_str().unwrap()]).ready();
    wait_for_workers(&router, 2);
    let mut seen = vec![0; 3];
    let sessions: Vec<String> = (0..12).map(|number| format!("s{number}")).collect();
    let round = |seen: &mut Vec<usize>, number| -> Vec<usize> {
        sessions
            .iter()
            .map(|session| {
                assert_eq!(turn(&router, session, number).status, 200);
                who(&workers, seen)
            })
            .collect()
    };
    let homes = round(&mut seen, 1);
    assert!(homes.contains(&0) && homes.contains(&1));
    write_workers(&path, &[&workers[0], &workers[1], &workers[2]]);
    wait_for_workers(&router, 3);
    assert_eq!(round(&mut seen, 2), homes, "a joining worker moves no session");

    write_workers(&path, &[&workers[1], &workers[2]]);
    wait_for_workers(&router, 2);
    let moved = round(&mut seen, 3);
    for (was, now) in homes.iter().zip(&moved) {
        assert!(if *was == 0 { *now != 0 } else { now == was }, "{homes:?} -> {moved:?}");
    }
    write_workers(&path, &[&workers[0], &workers[1], &workers[2]]);
    wait_for_workers(&router, 3);
    assert_eq!(round(&mut seen, 4), moved, "the worker is back, and nobody follows it");
}

#[test]
fn b35_two_turns_of_a_new_session_at_once_go_together() {
    let open = Arc::new(AtomicBool::new(false));
    let workers: Vec<Worker> = (0..4)
        .map(|_| {
            let open = open.clone();
            worker(move |_, conversation| {
                wait_until("the test lets workers answer", || open.load(Ordering::SeqCst));
                conversation.json(200, "{}")
            })
        })
        .collect();
    let router = router().workers(&workers).args(&["--session-affinity", "both"]).shards(2).ready();
    let mut connections: Vec<Connection> = (0..8).map(|_| Connection::open(router.address)).collect();
    for (number, connection) in connections.iter_mut().enumerate() {
        let body = format!(r#"{{"model":"m","prompt":"turn {number}"}}"#);
        connection.send(&client::request("POST", PATH, "x-dynamo-session-id: new\r\n", body.as_bytes()));
    }
    let total = || workers.iter().map(Worker::requests).sum::<usize>();
    wait_until("all turns are with workers", || total() == 8);
    let busy: Vec<usize> = workers.iter().map(Worker::requests).filter(|count| *count > 0).collect();
    open.store(true, Ordering::SeqCst);
    for connection in &mut connections {
        assert_eq!(connection.answer("POST").status, 200);
    }
    assert_eq!(busy, [8]);
    router.wait_for_rest();
}

#[test]
fn b35_names_that_cannot_be_used_are_ignored_and_counted() {
    let workers = three();
    let router = router().workers(&workers).args(&["--session-affinity", "both"]).ready();
    let long = "x".repeat(2000);
    let cases: [(&[u8], &str); 4] = [
        (b"", "empty"),
        (long.as_bytes(), "too_long"),
        ("s\u{e9}".as_bytes(), "not_ascii"),
        (b"a\r\nX-Dynamo-Session-ID: b", "ambiguous"),
    ];
    for (value, reason) in cases {
        let header = [b"X-Dynamo-Session-ID: ", value, b"\r\n"].concat();
        for _ in 0..3 {
            let body = br#"{"model":"m","prompt":"x"}"#;
            let mut bytes = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\n".to_vec();
            bytes.extend(&header);
            bytes.extend(format!("Content-Length: {}\r\n\r\n", body.len()).bytes());
            bytes.extend(body);
            let mut connection = Connection::open(router.address);
            connection.send(&bytes);
            assert_eq!(connection.answer("POST").status, 200, "{reason}");
        }
        let sample = format!(r#"infera_router_session_ignored_total{{reason="{reason}"}}"#);
        assert_eq!(router.metric(&sample), Some(3.0), "{reason}");
    }
    let counts: Vec<usize> = workers.iter().map(Worker::requests).collect();
    assert_eq!(counts, [4, 4, 4]);
    assert!(!router.log_lines().iter().any(|line| line.contains(&long)));
}

/// The session of a request that its client gives up is neither bound nor held.
#[test]
fn b32_turns_that_are_given_up_leave_nothing_behind() {
    let workers: Vec<Worker> = (0..2).map(|_| worker(|_, conversation| conversation.wait_for_close())).collect();
    let router = router().workers(&workers).args(&["--session-affinity", "both"]).shards(2).ready();
    for number in 0..100 {
        let mut connection = Connection::open(router.address);
        let header = format!("X-Dynamo-Session-ID: s{}\r\n", number % 10);
        connection.send(&client::request("POST", PATH, &header, br#"{"model":"m","prompt":"x"}"#));
        if number % 2 == 0 {
            wait_until("the request is with a worker", || {
                workers.iter().map(Worker::requests).sum::<usize>() > number / 2
            });
        }
    }
    router.wait_for_rest();
    assert_eq!(router.metric(r#"infera_router_session_active{role="mixed"}"#), Some(0.0));
}

fn image_chat(reference: &str) -> String {
    json!({"model": "m", "messages": [{"role": "user", "content": [
        {"type": "text", "text": "what is in this picture? answer in one word, please"},
        {"type": "image_url", "image_url": {"url": reference}}]}]})
    .to_string()
}

#[test]
fn repeats_of_an_image_return_to_its_worker_and_different_images_spread() {
    let workers = three();
    let router = router().workers(&workers).shards(2).ready();
    let mut seen = vec![0; 3];
    let big = format!("data:image/png;base64,{}", "iVBORw0KGgo".repeat(20_000));
    let images: Vec<String> = (0..6).map(|number| format!("https://images/{number}.png")).chain([big]).collect();
    let mut ask = |image: &str| {
        assert_eq!(router.post("/v1/chat/completions", &image_chat(image)).status, 200);
        who(&workers, &mut seen)
    };
    let homes: Vec<usize> = images.iter().map(|image| ask(image)).collect();
    for home in 0..3 {
        assert!(homes.iter().filter(|known| **known == home).count() >= 2, "{homes:?}");
    }
    for _ in 0..3 {
        let again: Vec<usize> = images.iter().map(|image| ask(image)).collect();
        assert_eq!(again, homes);
    }
    router.logged(&["mm_images=1", "mm_affinity_hits=0", "policy=\"kv-aware\""]);
    router.logged(&["mm_images=1", "mm_affinity_hits=1", "role=\"mixed\""]);
    router.wait_for_rest();
}

#[test]
fn hints_change_the_overlap_weight_and_are_in_the_pick_line() {
    let workers = three();
    let router = router().workers(&workers).args(&["--kv-overlap-weight", "3"]).ready();
    for (members, parts) in [
        (json!({"prompt_cache_retention": "24h"}), ["retention=\"long\"", "w_overlap=6.0"]),
        (json!({"prompt_cache_retention": "5m"}), ["retention=\"short\"", "w_overlap=3.0"]),
        (json!({"prompt_cache_retention": "none"}), ["retention=\"none\"", "w_overlap=0.3"]),
        (json!({}), ["retention=\"none\"", "w_overlap=3.0"]),
    ] {
        let mut body = json!({"model": "m", "prompt": [1, 2, 3]});
        body.as_object_mut().unwrap().extend(members.as_object().unwrap().clone());
        assert_eq!(router.post(PATH, &body.to_string()).status, 200);
        router.logged(&parts);
    }
}
