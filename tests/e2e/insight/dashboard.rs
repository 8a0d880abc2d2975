//! The dashboard in a real browser, over a fleet whose names are markup.

use std::io::Write;

use serde_json::json;

use super::browser::Page;
use crate::support::client;
use crate::support::router::{Router, router};
use crate::support::wait_until;
use crate::support::worker::json_worker;

/// The page on a desk, once it shows what the router has answered.
fn page_of(router: &Router) -> Option<Page> {
    let mut page = Page::open(&format!("http://{}/dashboard", router.address), 1280, 900)?;
    wait_until("the page has an answer", || {
        let text = page.text();
        !text.is_empty() && !text.contains("loading…")
    });
    Some(page)
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

    let Some(mut page) = page_of(&router) else { return };
    let text = page.text();
    assert!(text.contains("live") && text.contains("1 / 2") && text.contains("Targets: 2"), "{text}");
    assert!(text.contains("good") && text.contains(hostile) && text.contains("<b>other</b>"), "{text}");
    assert_eq!(page.value("document.querySelectorAll('img, td b').length"), 0);
    assert_eq!(page.value("document.title"), "infera-router");
}

#[test]
fn the_page_asks_for_a_key_and_keeps_it_for_its_window() {
    let worker = json_worker("{}");
    let keys = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(keys.path(), "hush\n").unwrap();
    let router = router().worker(worker.address).args(&["--api-key-file", keys.path().to_str().unwrap()]).ready();
    let Some(mut page) = page_of(&router) else { return };
    let address = worker.address.to_string();
    let is_asked = "!document.getElementById('key').hidden";
    assert!(page.value(is_asked) == true && page.text().contains("the router answers 401"), "{}", page.text());
    page.enter("given", "wrong");
    wait_until("the wrong key is refused", || page.text().contains("it does not know this key"));
    assert!(page.value(is_asked) == true && !page.text().contains(&address), "{}", page.text());
    page.enter("given", "hush");
    wait_until("the fleet is there", || page.text().contains(&address));
    let text = page.text();
    assert!(page.value(is_asked) == false && text.contains("live") && !text.contains("hush"), "{text}");
    assert_eq!(page.value("localStorage.length + document.cookie.length"), 0, "kept no longer than the window");
    assert!(!page.value("location.href").as_str().unwrap().contains("hush"));
    assert_eq!(page.value("document.getElementById('given').value"), "");
}

/// Long names, many targets, both roles: on a phone nothing is wider than the screen, and what changes is shown unasked.
#[test]
fn the_page_fits_a_phone_and_follows_the_fleet() {
    let workers: Vec<_> = (0..3).map(|_| json_worker("{}")).collect();
    let mut file = tempfile::NamedTempFile::new().unwrap();
    let records = workers.iter().enumerate().map(|(place, worker)| {
        json!({"worker_id": format!("a-worker-with-a-rather-long-name-{place}.rack-17.example.internal:30000"),
            "url": format!("http://{}", worker.address), "model_name": "organisation/A-Model-With-A-Long-Name-235B-A22B",
            "kv_block_size": 16, "dp_size": 1})
    });
    file.write_all(json!(records.collect::<Vec<_>>()).to_string().as_bytes()).unwrap();
    let router = router().args(&["--workers-file", file.path().to_str().unwrap()]).ready();
    let Some(mut page) = Page::open(&format!("http://{}/dashboard", router.address), 390, 844) else { return };
    wait_until("the fleet is there", || page.text().contains("Targets: 3"));
    assert_eq!(page.value("innerWidth"), 390);
    let widest =
        page.value("Math.max(...[...document.querySelectorAll('body *')].map(it => it.getBoundingClientRect().right))");
    assert!(widest.as_f64().unwrap() <= 390.0, "something reaches to {widest} of 390");
    let picks =
        "[...document.querySelectorAll('td[data-label=picks]')].reduce((sum, it) => sum + Number(it.textContent), 0)";
    assert_eq!(page.value(picks), 0);
    let body = json!({"prompt": (0..64).collect::<Vec<_>>()}).to_string();
    for _ in 0..3 {
        assert_eq!(router.post("/v1/completions", &body).status, 200);
    }
    wait_until("the picks are shown", || page.value(picks) == 3);
    page.enter("filter", "name-1");
    wait_until("the others are hidden", || page.text().contains("Targets: 1"));
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
