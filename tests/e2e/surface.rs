//! The endpoints that the router answers by itself, and the shape of its errors.

use std::collections::BTreeMap;

use serde_json::json;

use crate::exposition;
use crate::support::client;
use crate::support::router::router;
use crate::support::wait_until;
use crate::support::worker::{dead_address, json_worker, worker_at};

#[test]
fn lists_health_and_readiness() {
    let first = json_worker("{}");
    let second = json_worker("{}");
    let router = router()
        .round_robin()
        .worker(first.address)
        .args(&["--worker", &format!("http://{},model=other/model,block-size=32", second.address)])
        .ready();

    let models = router.json("/v1/models");
    assert_eq!(models["object"], "list");
    let ids: Vec<_> = models["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["m", "other/model"]);
    assert!(models["data"][0]["created"].as_u64().unwrap() > 1_700_000_000);
    assert_eq!(router.json("/v1/models/other%2Fmodel")["id"], "other/model");
    assert_eq!(router.get("/v1/models/absent").status, 404);

    let workers = router.json("/v1/workers");
    let workers = workers["workers"].as_array().unwrap();
    assert_eq!(workers.len(), 2);
    let listed = workers.iter().find(|worker| worker["model_name"] == "m").unwrap();
    assert_eq!(listed["worker_id"], first.address.to_string());
    assert_eq!(listed["state"], "active");
    assert_eq!(listed["kv_block_size"], 16);

    assert_eq!(router.json("/health"), json!({"status": "ok", "active_workers": 2}));
    assert_eq!(router.get("/ready").status, 200);
    assert_eq!(client::exchange(router.address, "HEAD", "/health", "", b"").body, b"");
}

#[test]
fn without_workers_it_is_alive_but_not_ready_and_asks_to_come_back() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("workers.json");
    std::fs::write(&file, "[]").unwrap();
    let router = router().round_robin().args(&["--workers-file", file.to_str().unwrap()]).start();
    assert_eq!(router.json("/health")["active_workers"], 0);
    assert_eq!(router.get("/ready").status, 503);
    let answer = router.post("/v1/chat/completions", r#"{"model":"m","messages":[]}"#);
    assert_eq!(answer.status, 503);
    assert!(answer.header("retry-after").is_some());
    assert_eq!(answer.json()["error"]["type"], "server_error");

    // The file is read again when it changes, a broken one keeps the set, and a good one heals it.
    let worker = json_worker(r#"{"ok":true}"#);
    let record = json!([{"worker_id": "w", "url": format!("http://{}", worker.address), "model_name": "m",
        "kv_block_size": 16, "someday": {"unknown": 1}}]);
    std::fs::write(&file, record.to_string()).unwrap();
    wait_until("the file's worker is ready", || router.get("/ready").status == 200);
    assert_eq!(router.post("/v1/completions", r#"{"model":"m","prompt":"x"}"#).text(), r#"{"ok":true}"#);
    std::fs::write(&file, "[{").unwrap();
    router.logged(&["workers.json", "line"]);
    assert_eq!(router.get("/ready").status, 200);
    std::fs::write(&file, "[]").unwrap();
    wait_until("the file's worker is gone", || router.get("/ready").status == 503);
}

#[test]
fn errors_have_the_shape_of_openai() {
    let worker = json_worker("{}");
    let router = router().round_robin().worker(worker.address).ready();
    let check = |method: &str, path: &str, body: &str, status: u16, code: &str, said: &str| {
        let answer = client::exchange(router.address, method, path, "", body.as_bytes());
        assert_eq!(answer.status, status, "{method} {path}: {}", answer.text());
        let error = &answer.json()["error"];
        assert_eq!(error["code"], code, "{method} {path}");
        assert!(error["type"].is_string() && error.get("param").is_some());
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(said), "{message:?} does not say {said:?}");
        answer
    };
    check("POST", "/v1/chat/completions", r#"{"model":"nope","messages":[]}"#, 404, "model_not_found", "m");
    check("POST", "/v1/chat/completions", "{\"model\":\"m\",\n oops", 400, "bad_request", "line 2");
    check("POST", "/v1/completions", "", 400, "bad_request", "");
    check("GET", "/nothing", "", 404, "not_found", "/nothing");
    check("GET", "/v1/admin/cache-view/nobody:1", "", 503, "no_worker_available", "kv-aware");
    let answer = check("DELETE", "/v1/chat/completions", "", 405, "method_not_allowed", "POST");
    assert_eq!(answer.header("allow"), Some("POST"));
    assert_eq!(worker.requests(), 0, "nothing of this is for a worker");
}

#[test]
fn the_metrics_page_counts_a_request() {
    let worker = json_worker(r#"{"usage":{"prompt_tokens":12,"completion_tokens":3}}"#);
    let router = router().worker(worker.address).ready();
    assert_eq!(router.post("/v1/completions", r#"{"model":"m","prompt":[1,2,3]}"#).status, 200);
    let samples = exposition::page(&router);
    let sum_of = |name: &str, label: (&str, &str)| -> f64 {
        let is_meant = |labels: &BTreeMap<String, String>| label.0.is_empty() || labels[label.0] == label.1;
        samples.iter().filter(|(found, labels, _)| found == name && is_meant(labels)).map(|sample| sample.2).sum()
    };
    assert_eq!(sum_of("infera_router_active_workers", ("", "")), 1.0);
    assert_eq!(sum_of("infera_requests_total", ("outcome", "ok")), 1.0);
    assert_eq!(sum_of("infera_prompt_tokens_total", ("", "")), 12.0);
    assert_eq!(sum_of("infera_generation_tokens_total", ("", "")), 3.0);
    assert!(sum_of("infera_router_io_driver", ("", "")) >= 1.0);
}

#[test]
fn cache_view_knows_its_workers_and_no_others() {
    let worker = json_worker("{}");
    let router = router().worker(worker.address).ready();
    let id = worker.address.to_string();
    let expected = json!({"worker_id": id, "dp_rank": null, "block_count": 0});
    assert_eq!(router.json(&format!("/v1/admin/cache-view/{id}")), expected);
    assert_eq!(router.get("/v1/admin/cache-view/10.9.9.9:1").status, 404);
    assert_eq!(router.get(&format!("/v1/admin/cache-view/{id}?dp_rank=x")).status, 400);
}

#[test]
fn ipv6_on_both_sides() {
    let worker = worker_at("[::1]:0", |_, conversation| conversation.json(200, r#"{"six":true}"#));
    let router =
        router().host("::1").round_robin().args(&["--worker", &format!("http://{},model=m", worker.address)]).ready();
    assert!(router.address.is_ipv6());
    assert_eq!(router.post("/v1/completions", r#"{"model":"m"}"#).text(), r#"{"six":true}"#);
    assert_eq!(worker.seen()[0].header("host"), Some(worker.address.to_string().as_str()));
}

#[test]
fn command_lines_that_cannot_work_are_refused_with_every_reason() {
    let refused = |arguments: &[&str], said: &[&str]| {
        let output = router().args(arguments).output();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{arguments:?}");
        for part in said {
            assert!(text.contains(part), "{arguments:?}: {text:?} does not say {part:?}");
        }
    };
    let unknown = router().policy("best").output();
    let said = String::from_utf8_lossy(&unknown.stderr).into_owned();
    assert!(!unknown.status.success() && said.contains("best") && said.contains("kv-aware"), "{said}");
    refused(&["--no-such-flag"], &["--no-such-flag"]);
    refused(&["--worker", "http://h:1,modle=m"], &["modle"]);
    refused(&["--discovery-backend", "kubernetes"], &["kubernetes", "etcd"]);
    refused(
        &["--request-transport", "nats", "--kv-event-transport", "nats"],
        &["--request-transport", "--kv-event-transport"],
    );
    let dead = format!("http://{},model=m", dead_address());
    refused(&["--worker", &dead, "--router-tokenizer-path", "/does/not/exist"], &["/does/not/exist"]);
}
