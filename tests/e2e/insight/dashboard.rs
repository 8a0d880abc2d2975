//! The dashboard in a real browser, over a fleet whose names are markup.

use std::io::Write;
use std::process::Command;

use serde_json::json;

use crate::support::client;
use crate::support::router::{Router, router};
use crate::support::wait_until;
use crate::support::worker::json_worker;

/// A headless Chromium; nothing, said loudly, where there is none.
fn browser() -> Option<Command> {
    let names = ["chromium-headless-shell", "chromium", "google-chrome"];
    let search = std::env::var_os("PATH").unwrap_or_default();
    let found = names
        .iter()
        .flat_map(|name| std::env::split_paths(&search).map(move |directory| directory.join(name)))
        .find(|path| path.is_file());
    let Some(path) = found else {
        let message = "NOT RUN: no Chromium (Debian: chromium-headless-shell)";
        assert!(std::env::var_os("INFERA_REQUIRE_BROWSER").is_none_or(|value| value != "1"), "{message}");
        eprintln!("{message}");
        return None;
    };
    let mut command = Command::new(path);
    // Containers have no user namespaces for its sandbox, and little shared memory.
    command.args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]);
    Some(command)
}

/// The page as it stands after some seconds of the browser's own clock.
fn document(router: &Router) -> Option<String> {
    let output = browser()?
        .args(["--virtual-time-budget=5000", "--dump-dom"])
        .arg(format!("http://{}/dashboard", router.address))
        .output()
        .expect("the browser starts");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(text)
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

    let Some(page) = document(&router) else { return };
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
    let Some(page) = document(&router) else { return };
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
