//! Settings in force, the log's filter at run time, and where these pages are.

use serde_json::{Value, json};

use crate::support::client;
use crate::support::router::{Router, router};
use crate::support::worker::json_worker;

const LEVEL: &str = "/v1/admin/log-level";

#[test]
fn settings_are_shown_with_their_source_and_without_credentials() {
    let worker = json_worker("{}");
    let router = router()
        .worker(worker.address)
        .env("INFERA_BREAKER_COOLDOWN_S", "7")
        .args(&["--nats-server", "nats://user:hush@host:4222"])
        .ready();
    let text = router.get("/v1/admin/config").text();
    assert!(!text.contains("hush"), "{text}");
    let settings: Value = serde_json::from_str(&text).unwrap();
    let of = |name: &str| {
        let all = settings["settings"].as_array().unwrap();
        all.iter().find(|setting| setting["name"] == name).unwrap_or_else(|| panic!("{name}: {text}")).clone()
    };
    assert_eq!(of("router-policy"), json!({"name": "router-policy", "values": ["kv-aware"], "source": "flag"}));
    assert_eq!(of("breaker-cooldown-s")["source"], "environment");
    assert_eq!(of("access-log"), json!({"name": "access-log", "values": ["off"], "source": "default"}));
}

fn put(router: &Router, filter: &str) -> client::Answer {
    client::exchange(router.address, "PUT", LEVEL, "", filter.as_bytes())
}

#[test]
fn the_log_is_turned_up_and_down_while_it_runs() {
    let worker = json_worker("{}");
    let router = router().worker(worker.address).ready();
    let body = r#"{"model":"m","prompt":[1,2,3]}"#;
    let picks = || router.log_lines().iter().filter(|line| line.contains(" pick ")).count();
    assert_eq!(router.json(LEVEL), json!({"filter": "info"}));
    assert_eq!(router.post("/v1/completions", body).status, 200);
    router.logged(&[" pick "]);

    let answer = put(&router, "infera_router=info,infera_router::proxy::pick=off");
    assert_eq!(answer.status, 200, "{}", answer.text());
    for _ in 0..3 {
        assert_eq!(router.post("/v1/completions", body).status, 200);
    }
    for bad in ["", "a=b=c", "infera_router=loud"] {
        assert_eq!(put(&router, bad).status, 400, "{bad}");
    }
    assert_eq!(put(&router, &"x".repeat(5_000)).status, 400);
    assert_eq!(router.json(LEVEL)["filter"], "infera_router::proxy::pick=off,infera_router=info");

    // A line that comes after them is there, and they are not.
    assert_eq!(put(&router, r#"{"filter": "infera_router=debug"}"#).json(), json!({"filter": "infera_router=debug"}));
    router.logged(&["the log's filter was changed", "infera_router=debug"]);
    assert_eq!(picks(), 1);
    assert_eq!(router.post("/v1/completions", body).status, 200);
    crate::support::wait_until("picks are logged again", || picks() == 2);
}

#[test]
fn these_pages_are_the_admin_listeners_alone() {
    let worker = json_worker("{}");
    let router = router().worker(worker.address).args(&["--admin-listen", "127.0.0.1:0"]).ready();
    let line = router.logged(&["control pages", "address="]);
    let address = line.split("address=").nth(1).unwrap().split_whitespace().next().unwrap().parse().unwrap();
    for (method, path) in [
        ("POST", "/v1/admin/explain?path=/v1/completions"),
        ("GET", "/v1/admin/config"),
        ("GET", "/v1/admin/overview"),
        ("GET", LEVEL),
        ("GET", "/dashboard"),
    ] {
        let ask = |address| client::exchange(address, method, path, "", br#"{"model":"m","prompt":[1]}"#).status;
        assert_eq!((ask(router.address), ask(address)), (404, 200), "{path}");
    }
}

#[test]
fn keys_guard_all_of_it_but_the_page_that_holds_nothing() {
    let worker = json_worker("{}");
    let keys = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(keys.path(), "hush\n").unwrap();
    let router = router().worker(worker.address).args(&["--api-key-file", keys.path().to_str().unwrap()]).ready();
    for path in ["/v1/admin/config", "/v1/admin/overview", LEVEL] {
        assert_eq!(router.get(path).status, 401, "{path}");
        let with_key = client::exchange(router.address, "GET", path, "Authorization: Bearer hush\r\n", b"");
        assert_eq!(with_key.status, 200, "{path}");
        assert!(!with_key.text().contains("hush"));
    }
    assert_eq!(client::post(router.address, "/v1/admin/explain", "{}").status, 401);
    assert_eq!(put(&router, "off").status, 401);
    assert_eq!(router.get("/dashboard").status, 200);
}
