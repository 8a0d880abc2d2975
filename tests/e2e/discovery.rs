//! The built router against a real etcd, with engines that register themselves under a lease.

use loadgen::engine::register::{EtcdTarget, Registration};
use loadgen::engine::{Engine, EngineConfig};

use crate::etcd::Etcd;
use crate::support::router::router;
use crate::support::wait_until;

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
