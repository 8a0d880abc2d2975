//! The built router against a real etcd, with engines that register themselves under a lease.

use std::net::SocketAddr;

use loadgen::engine::register::{EtcdTarget, Registration};
use loadgen::engine::{Engine, EngineConfig};

use crate::etcd::Etcd;
use crate::support::router::router;
use crate::support::wait_until;
use crate::support::worker::{dead_address, json_worker};

/// Field report B45: a worker that serves its model under two names is asked under both.
#[test]
fn b45_a_worker_is_served_under_each_of_its_names() {
    let (two_names, one_name) = (json_worker("{}"), json_worker("{}"));
    let record = |id: &str, address: SocketAddr, further: &[&str]| {
        serde_json::json!({"worker_id": id, "url": format!("http://{address}"), "model_name": "m",
            "further_model_names": further, "kv_block_size": 16})
    };
    let records = [record("a", two_names.address, &["n"]), record("b", one_name.address, &[])];
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), serde_json::to_vec(&records).unwrap()).unwrap();
    let router = router().round_robin().args(&["--workers-file", file.path().to_str().unwrap()]).start();
    wait_until("both are routable", || router.metric_sum("infera_router_active_workers") == 2.0);
    let names: Vec<String> =
        router.json("/v1/models")["data"].as_array().unwrap().iter().map(|it| it["id"].to_string()).collect();
    assert_eq!(names, ["\"m\"", "\"n\""].map(str::to_owned).to_vec());
    for _ in 0..4 {
        assert_eq!(router.post("/v1/completions", r#"{"model":"n","prompt":"x"}"#).status, 200);
    }
    assert_eq!((two_names.requests(), one_name.requests()), (4, 0));
    assert!(two_names.seen().iter().all(|seen| seen.body == br#"{"model":"n","prompt":"x"}"#), "the client's own name");
    for _ in 0..4 {
        assert_eq!(router.post("/v1/completions", r#"{"model":"m","prompt":"x"}"#).status, 200);
    }
    assert_eq!((two_names.requests(), one_name.requests()), (6, 2));
    assert_eq!(router.metric(r#"infera_active_workers{disagg_mode="mixed",model="n"}"#), Some(1.0));
}

/// A worker at the router's own address would be sent its own requests until no descriptor is left.
#[test]
fn the_routers_own_listener_is_no_worker() {
    let own = dead_address();
    let real = json_worker("{}");
    let router = router().round_robin().port(own.port()).worker(own).worker(real.address).ready();
    let workers = router.json("/v1/workers");
    let own_entry =
        workers["workers"].as_array().unwrap().iter().find(|it| it["worker_id"] == own.to_string()).unwrap();
    assert_eq!(own_entry["state"], "pending");
    assert_eq!(own_entry["reason"], format!("{own} is this router's own listener"));
    router.logged(&["this router's own listener", &own.to_string()]);
    for _ in 0..4 {
        assert_eq!(router.post("/v1/completions", r#"{"model":"m","prompt":"x"}"#).status, 200);
    }
    assert_eq!(real.requests(), 4);
    assert_eq!(router.metric_sum("infera_requests_total"), 4.0);
}

#[test]
fn engines_registered_in_etcd_come_and_go_and_outlive_an_etcd_that_is_away() {
    let etcd = Etcd::start();
    let endpoint = etcd.endpoint();
    let router = router().args(&["--discovery-backend", "etcd", "--etcd-endpoint", &endpoint]).start();
    assert_eq!(router.get("/ready").status, 503);
    let target = || EtcdTarget { endpoint: endpoint.clone(), prefix: "/infera/workers/".into() };
    let engines: Vec<_> = (0..2).map(|_| Engine::start(EngineConfig::default()).unwrap()).collect();
    let mut leases: Vec<_> =
        engines.iter().map(|engine| Registration::start(target(), vec![engine.registration()]).unwrap()).collect();
    let active = || router.json("/health")["active_workers"].as_u64().unwrap();
    wait_until("both engines are routable", || active() == 2);
    let body = r#"{"model":"demo","max_tokens":2,"messages":[{"role":"user","content":"hi"}]}"#;
    assert_eq!(router.post("/v1/chat/completions", body).status, 200);

    // A worker that leaves in good order disappears at once.
    drop(leases.pop());
    wait_until("one engine is left", || active() == 1);

    // Without etcd the last set is served.
    etcd.freeze();
    for _ in 0..5 {
        assert_eq!(router.post("/v1/chat/completions", body).status, 200);
    }
    etcd.thaw();
    leases.push(Registration::start(target(), vec![engines[1].registration()]).unwrap());
    wait_until("both engines are back", || active() == 2);
    router.wait_for_rest();
}
