//! The dashboard in a real browser, over a fleet whose names are markup.

use std::io::Write;

use serde_json::json;

use crate::support::browser::document;
use crate::support::client;
use crate::support::router::{Router, router};
use crate::support::wait_until;
use crate::support::worker::json_worker;

/// The dashboard as it stands after some seconds of the browser's own clock.
fn dashboard(router: &Router) -> Option<String> {
    document(&format!("http://{}/dashboard", router.address))
}

#[test]
fn the_page_shows_the_fleet_and_takes_no_name_for_markup() {
    let worker = json_worker("{}");
    let hostile = "<img src=x onerror=document.title='owned'>";
    let mut file = tempfile::NamedTempFile::new().unwrap();
    let records = json!([
        {"worker_id": "good", "url": format!("http://{}", worker.address), "model_name": "m", "kv_block_size": 16,
            "dp_size": 1},
        {"worker_id": hostile, "url": "http://127.0.0.1:9", "model_name": "<b>other</b>", "kv_block_size": 16,
            "dp_size": 1, "status": "draining"},
    ]);
    file.write_all(records.to_string().as_bytes()).unwrap();
    let router = router().args(&["--workers-file", file.path().to_str().unwrap()]).ready();
    let body = json!({"model": "m", "prompt": (0..64).collect::<Vec<_>>()}).to_string();
    for _ in 0..3 {
        assert_eq!(router.post("/v1/completions", &body).status, 200);
    }
    let overview = router.json("/v1/admin/overview");
    let target =
        &overview["workers"].as_array().unwrap().iter().find(|it| it["worker_id"] == "good").unwrap()["targets"][0];
    assert_eq!((&target["picks"], &target["blocks"]), (&json!(3), &json!(12)));
    assert_eq!(overview["active_workers"], 1);

    let Some(page) = dashboard(&router) else { return };
    assert!(page.contains(">live</span>"), "{page}");
    assert!(page.contains("&lt;img src=x") && page.contains("&lt;b&gt;other"), "{page}");
    assert!(!page.contains("<img") && !page.contains("<b>other") && !page.contains("<title>owned"), "{page}");
    assert!(page.contains("1 / 2") && page.contains("Targets: 2"), "{page}");
    assert!(page.contains("class=\"name\" data-label=\"worker\">good</td>"), "{page}");
}

/// Without the key the page asks for it and shows nothing; what is fetched later needs the browser no more.
#[test]
fn without_a_key_the_page_asks_for_one() {
    let worker = json_worker("{}");
    let keys = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(keys.path(), "hush\n").unwrap();
    let router = router().worker(worker.address).args(&["--api-key-file", keys.path().to_str().unwrap()]).ready();
    let Some(page) = dashboard(&router) else { return };
    assert!(page.contains("the router answers 401") && !page.contains("id=\"key\" class=\"card\" hidden"), "{page}");
    assert!(!page.contains(&worker.address.to_string()), "{page}");
}

/// The policy of the page is what keeps a fault in its script from becoming somebody's script.
#[test]
fn nothing_but_the_pages_own_script_may_run() {
    let worker = json_worker("{}");
    let router = router().worker(worker.address).ready();
    let answer = client::get(router.address, "/dashboard");
    let policy = answer.header("content-security-policy").unwrap();
    for part in ["default-src 'none'", "script-src 'sha256-", "connect-src 'self'", "frame-ancestors 'none'"] {
        assert!(policy.contains(part), "{policy}");
    }
    assert_eq!(answer.header("x-content-type-options"), Some("nosniff"));
    wait_until("samples of the last minutes are there", || {
        !router.json("/v1/admin/overview")["history"].as_array().unwrap().is_empty()
    });
}
