//! One line per request, however it ends; and the stage times, which the metrics page has too.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};

use super::{over, record};
use crate::kv_aware::tokenizer;
use crate::support::client::{self, Connection};
use crate::support::router::router;
use crate::support::worker::{Then, dead_address, json_worker, worker};
use crate::support::{eventually, wait_until};

const SECRET: &str = "the prompt's own words";

fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    // A line that is being written has no end yet.
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    whole.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))).collect()
}

/// The one line with this request id.
fn line(path: &Path, id: &str) -> Value {
    let found = eventually(&format!("the line of {id}"), || lines(path).into_iter().find(|it| it["request_id"] == id));
    assert_eq!(lines(path).iter().filter(|line| line["request_id"] == id).count(), 1, "{id}");
    found
}

fn body(stream: bool) -> String {
    json!({"model": "m", "stream": stream, "messages": [{"role": "user", "content": SECRET}]}).to_string()
}

#[test]
fn every_way_to_end_has_its_line() {
    let (directory, tokenizer) = (tempfile::tempdir().unwrap(), tokenizer());
    let path = directory.path().join("access.jsonl");
    let keys = directory.path().join("keys");
    std::fs::write(&keys, "hush\n").unwrap();
    let engine = worker(|seen, conversation| {
        let id = seen.header("x-request-id").unwrap_or_default().to_owned();
        if !id.starts_with("stream") {
            return conversation.json(200, r#"{"ok":true}"#);
        }
        conversation.sse_head();
        conversation.chunk("data: {}\n\n");
        match id.as_str() {
            "stream-cut" => Then::Close,
            "stream-left" => conversation.wait_for_close(),
            _ => {
                conversation.chunk("data: [DONE]\n\n");
                conversation.last_chunk()
            }
        }
    });
    let router = router()
        .worker(engine.address)
        .args(&["--router-tokenizer-path", tokenizer.path().to_str().unwrap()])
        .args(&["--access-log", "json", "--access-log-file", path.to_str().unwrap()])
        .args(&["--api-key-file", keys.to_str().unwrap(), "--request-max-retries", "0"])
        .ready();
    let ask = |id: &str, target: &str, body: &str| {
        let headers = format!("Authorization: Bearer hush\r\nX-Request-Id: {id}\r\n");
        client::exchange(router.address, "POST", target, &headers, body.as_bytes())
    };
    let chat = "/v1/chat/completions";
    assert_eq!(ask("plain", &format!("{chat}?api_key=hush"), &body(false)).status, 200);
    let plain = line(&path, "plain");
    assert_eq!(
        (&plain["status"], &plain["ended"], &plain["method"]),
        (&json!(200), &json!("complete"), &json!("POST"))
    );
    assert_eq!((&plain["path"], &plain["model"], &plain["retries"]), (&json!(chat), &json!("m"), &json!(0)));
    assert_eq!((&plain["body_bytes_in"], &plain["body_bytes_out"]), (&json!(body(false).len()), &json!(11)));
    assert_eq!(plain["workers"][0]["worker"], engine.address.to_string());
    for stage in ["parse", "render", "hash", "pick", "first_byte"] {
        assert!(plain["stages_ms"][stage].as_f64().is_some_and(|took| took >= 0.0), "{stage}: {plain}");
    }
    assert!(plain["first_byte_ms"].as_f64().unwrap() <= plain["total_ms"].as_f64().unwrap(), "{plain}");
    assert!(plain["time"].as_str().unwrap().starts_with("20"), "{plain}");

    assert_eq!(ask("stream-whole", chat, &body(true)).status, 200);
    assert_eq!(line(&path, "stream-whole")["ended"], "complete");
    assert!(!ask("stream-cut", chat, &body(true)).complete);
    let cut = line(&path, "stream-cut");
    assert_eq!((&cut["ended"], &cut["status"], &cut["body_bytes_out"]), (&json!("cut"), &json!(200), &json!(10)));
    {
        let mut leaving = Connection::open(router.address);
        let headers = "Authorization: Bearer hush\r\nX-Request-Id: stream-left\r\n";
        leaving.send(&client::request("POST", chat, headers, body(true).as_bytes()));
        leaving.head().unwrap();
        leaving.chunk().unwrap();
    }
    let left = line(&path, "stream-left");
    assert_eq!(
        (&left["ended"], &left["status"], &left["body_bytes_out"]),
        (&json!("client_left"), &json!(200), &json!(10))
    );
    assert_eq!(ask("nobody", chat, r#"{"model":"absent","messages":[]}"#).status, 404);
    let nobody = line(&path, "nobody");
    assert_eq!((&nobody["ended"], &nobody["status"], &nobody["workers"]), (&json!("refused"), &json!(404), &json!([])));
    client::exchange(router.address, "GET", "/v1/models", "X-Request-Id: keyless\r\n", b"");
    assert_eq!(line(&path, "keyless")["status"], 401);
    let mut odd = Connection::open(router.address);
    odd.send(b"NONSENSE\r\n\r\n");
    odd.answer("GET");
    wait_until("what was no request has a line", || lines(&path).iter().any(|line| line["path"] == "-"));

    let text = std::fs::read_to_string(&path).unwrap();
    assert!(!text.contains(SECRET) && !text.contains("hush"), "{text}");
    assert_eq!(router.metric("infera_router_access_log_lines_lost_total"), Some(0.0));
}

#[test]
fn retries_and_both_legs_of_a_pair_are_in_the_line() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("access.jsonl");
    let log = ["--access-log", "json", "--access-log-file", path.to_str().unwrap()];
    let (prefill, decode) = (json_worker("{}"), json_worker(r#"{"ok":true}"#));
    let (pair, _file) = over(&[record(&prefill, "prefill"), record(&decode, "decode")], router().args(&log));
    let headers = "X-Request-Id: pair\r\ntraceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n";
    let prompt = json!({"model": "m", "prompt": (0..40).collect::<Vec<_>>()}).to_string();
    let answer = client::exchange(pair.address, "POST", "/v1/completions", headers, prompt.as_bytes());
    assert_eq!(answer.status, 200, "{}", answer.text());
    let legs = line(&path, "pair")["workers"].clone();
    let leg = |role: &str, address| json!({"role": role, "worker": format!("{address}"), "cache_hits": 0, "request_blocks": 2});
    assert_eq!(legs, json!([leg("prefill", prefill.address), leg("decode", decode.address)]));
    // A trace goes on with both legs, and none is begun here.
    for worker in [&prefill, &decode] {
        let seen = worker.seen();
        let parent = seen[0].header("traceparent");
        assert_eq!(parent, Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"));
    }
    assert_eq!(client::post(pair.address, "/v1/completions", &prompt).status, 200);
    assert!(decode.seen()[1].header("traceparent").is_none());

    let router = router().args(&log).worker(dead_address()).worker(decode.address).ready();
    wait_until("the dead one is tried first", || {
        let headers = "X-Request-Id: retried\r\n";
        let _ = std::fs::write(&path, "");
        assert_eq!(client::exchange(router.address, "POST", "/v1/completions", headers, prompt.as_bytes()).status, 200);
        line(&path, "retried")["retries"] == 1
    });
    assert_eq!(line(&path, "retried")["workers"].as_array().unwrap().len(), 2);
}

#[test]
fn a_rotated_file_is_let_go_and_hostile_words_stay_in_their_line() {
    let directory = tempfile::tempdir().unwrap();
    let (path, rotated) = (directory.path().join("access.log"), directory.path().join("access.log.1"));
    let worker = json_worker("{}");
    let router = router()
        .worker(worker.address)
        .args(&["--access-log", "text", "--access-log-file", path.to_str().unwrap()])
        .ready();
    let text = |path: &Path| std::fs::read_to_string(path).unwrap_or_default();
    let hostile = json!({"model": "a\" status=200\nfake line", "prompt": "x"}).to_string();
    assert_eq!(router.post("/v1/completions", &hostile).status, 404);
    wait_until("the line is written", || text(&path).contains("/v1/completions"));
    let all = text(&path);
    let written = all.lines().find(|line| line.contains("/v1/completions")).unwrap();
    assert!(written.contains(r#"model="a\" status=200\nfake line" status=404 ended=refused"#), "{written}");
    assert!(!all.lines().any(|line| line.starts_with("fake")), "{all}");
    let mut odd = Connection::open(router.address);
    odd.send(&client::request(&"M".repeat(20_000), "/v1/made-up", "", b""));
    odd.answer("GET");
    wait_until("its line is written", || text(&path).contains("/v1/made-up"));
    let longest = text(&path).lines().map(str::len).max().unwrap();
    assert!(longest < 1_000, "{longest} bytes in a line");

    std::fs::rename(&path, &rotated).unwrap();
    router.signal(rustix::process::Signal::USR1);
    wait_until("a new file is begun", || path.exists());
    assert_eq!(router.get("/v1/models").status, 200);
    wait_until("lines go there", || text(&path).contains("/v1/models"));
    assert!(!text(&rotated).contains("/v1/models"));
}

#[test]
fn without_the_log_a_file_for_it_is_refused() {
    let output = router().args(&["--access-log-file", "/nowhere"]).output();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("--access-log-file needs --access-log"), "{said}");
}

/// As many observations as there were requests that came to the stage.
#[test]
fn stages_are_counted_where_they_happen() {
    let tokenizer = tokenizer();
    let first = Arc::new(AtomicBool::new(true));
    let worker = worker(move |_, conversation| {
        // One connection ends after its first answer, so that a second one is opened.
        conversation.json(200, "{}");
        if first.swap(false, Ordering::SeqCst) { Then::Close } else { Then::KeepAlive }
    });
    let router =
        router().worker(worker.address).args(&["--router-tokenizer-path", tokenizer.path().to_str().unwrap()]).ready();
    let ask = |text: &str| {
        let body = json!({"model": "m", "messages": [{"role": "user", "content": text}]}).to_string();
        assert_eq!(router.post("/v1/chat/completions", &body).status, 200);
    };
    let count =
        |stage: &str| router.metric(&format!("infera_router_stage_seconds_count{{stage=\"{stage}\"}}")).unwrap_or(-1.0);
    let long = "a text that has some blocks of its own and then some more words to come. ".repeat(8);
    for number in 0..4 {
        ask(&format!("{long}{number}"));
    }
    router.wait_for_rest();
    for stage in ["parse", "render", "hash", "encode", "query", "pick", "first_byte"] {
        assert_eq!(count(stage), 4.0, "{stage}");
    }
    assert_eq!(count("connect"), 2.0);
    assert_eq!(router.post("/v1/chat/completions", "no json").status, 400);
    assert_eq!((count("parse"), count("render"), count("pick")), (5.0, 4.0, 4.0));
}
