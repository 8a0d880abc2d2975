//! Field report B57: who may use the router, and which credentials reach whom.

use std::io::Write;

use crate::support::client::exchange;
use crate::support::router::{Start, router};
use crate::support::worker::{Then, json_worker, worker};

const BODY: &[u8] = br#"{"model":"m","prompt":"x"}"#;
const CLIENT_HEADERS: &str = "Authorization: Bearer tok-user\r\nCookie: s=secret-cookie\r\nX-Api-Key: tok-user-2\r\n\
    Proxy-Authorization: Basic cHJveHk=\r\nX-Forwarded-For: 1.2.3.4\r\nX-Worker-Instance-Id: spoofed\r\n\
    X-Prefill-Instance-Id: spoofed\r\n";

fn file(text: &str) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file
}

#[test]
fn b57_credentials_end_where_the_table_says() {
    let (keys, worker_key) = (file("# team a\ntok-user\n"), file("tok-worker\n"));
    let (keys, worker_key) = (keys.path().to_str().unwrap(), worker_key.path().to_str().unwrap());
    let check = |arguments: &[&str], authorization: Option<&str>, api_key: Option<&str>, cookie: Option<&str>| {
        let worker = worker(|_, conversation| conversation.json(200, "{}"));
        let router = router().round_robin().worker(worker.address).args(arguments).ready();
        let answer = exchange(router.address, "POST", "/v1/completions", CLIENT_HEADERS, BODY);
        assert_eq!(answer.status, 200, "{arguments:?}");
        let seen = &worker.seen()[0];
        assert_eq!(seen.header("authorization"), authorization, "{arguments:?}");
        assert_eq!((seen.header("x-api-key"), seen.header("cookie")), (api_key, cookie), "{arguments:?}");
        for internal in ["proxy-authorization", "x-worker-instance-id", "x-prefill-instance-id"] {
            assert_eq!(seen.header(internal), None, "{arguments:?}");
        }
        let log = router.log_lines().join("\n");
        let page = router.get("/metrics").text();
        for secret in ["tok-user", "tok-worker", "secret-cookie"] {
            assert!(!log.contains(secret) && !page.contains(secret), "{arguments:?} shows {secret}");
        }
    };
    let cookie = Some("s=secret-cookie");
    check(&[], Some("Bearer tok-user"), Some("tok-user-2"), cookie);
    check(&["--forward-authorization", "false"], None, None, cookie);
    check(&["--worker-api-key-file", worker_key], Some("Bearer tok-worker"), None, cookie);
    check(&["--api-key-file", keys], None, None, None);
    let both = ["--api-key-file", keys, "--worker-api-key-file", worker_key];
    check(&both, Some("Bearer tok-worker"), None, None);
}

/// The same names as a WSGI or CGI worker reads them: `X_Api_Key` is `X-Api-Key` there. What nobody owns passes.
#[test]
fn b57_credentials_and_internal_headers_end_here_in_every_spelling() {
    let worker_key = file("tok-worker\n");
    let spoofed = "X_Api_Key: tok-user\r\nProxy_Authorization: p\r\nX_Worker_Instance_Id: spoofed\r\n\
                   X.Data.Parallel.Rank: 7\r\nX_Prefill_Instance_Id: spoofed\r\nX_Trace_Of_Mine: t\r\n";
    let seen_with = |arguments: &[&str], ranks: &str| {
        let worker = json_worker("{}");
        let described = format!("http://{},model=m,block-size=16{ranks}", worker.address);
        let router = router().round_robin().args(&["--worker", &described]).args(arguments).ready();
        assert_eq!(exchange(router.address, "POST", "/v1/completions", spoofed, BODY).status, 200);
        let names = |line: &String| line.split_once(':').map(|(name, _)| name.to_ascii_lowercase()).unwrap();
        worker.seen()[0].headers.iter().map(names).collect::<Vec<_>>()
    };
    let common = ["host", "x_trace_of_mine", "content-type"];
    let keyed = ["--worker-api-key-file", worker_key.path().to_str().unwrap()];
    let own = seen_with(&keyed, ",dp-size=2");
    assert_eq!(own, [&common[..], &["authorization", "x-data-parallel-rank", "content-length"]].concat());
    // Without a key of ours the client's goes on, however it is spelt, and so does a rank that nobody picked.
    let passed = seen_with(&[], "");
    assert_eq!(passed, [&["host", "x_api_key", "x.data.parallel.rank"], &common[1..], &["content-length"]].concat());
}

#[test]
fn b57_without_a_key_nothing_but_probes_is_answered() {
    let keys = file("k-1\nk-2\n");
    let worker = worker(|_, conversation| conversation.json(200, "{}"));
    let started: Start = router().round_robin().worker(worker.address);
    let router = started.args(&["--api-key-file", keys.path().to_str().unwrap()]).ready();
    let ask = |path: &str, headers: &str| exchange(router.address, "POST", path, headers, BODY);
    for headers in [
        "",
        "Authorization: Bearer k-3\r\n",
        "Authorization: k-1\r\n",
        "Authorization: Basic k-1\r\n",
        "X-Api-Key: k\r\n",
    ] {
        for path in ["/v1/completions", "/v1/embeddings", "/v1/anything", "/other"] {
            let answer = ask(path, headers);
            assert_eq!((answer.status, answer.header("www-authenticate")), (401, Some("Bearer")), "{path} {headers}");
            assert_eq!(answer.json()["error"]["code"].as_str(), Some("invalid_api_key"));
        }
    }
    assert_eq!(worker.requests(), 0);
    assert_eq!(router.metric_sum("infera_router_refused_keys_total"), 20.0);
    for headers in ["Authorization: Bearer k-1\r\n", "authorization: bearer k-2\r\n", "X-Api-Key: k-2\r\n"] {
        assert_eq!(ask("/v1/completions", headers).status, 200, "{headers}");
    }
    for path in ["/health", "/ready", "/metrics"] {
        assert_eq!(router.get(path).status, 200);
    }
    for path in ["/v1/models", "/v1/workers", "/v1/admin/cache-view/w"] {
        assert_eq!(router.get(path).status, 401);
    }
}

#[test]
fn b57_a_redirect_of_a_worker_is_the_clients_to_follow() {
    let elsewhere = worker(|_, conversation| conversation.json(200, "{}"));
    let target = format!("http://{}/", elsewhere.address);
    let redirecting = worker(move |_, conversation| {
        let head = format!("HTTP/1.1 307 Elsewhere\r\nLocation: {target}\r\nContent-Length: 0\r\n\r\n");
        conversation.write(head.as_bytes());
        Then::KeepAlive
    });
    let router = router().round_robin().worker(redirecting.address).ready();
    let answer = exchange(router.address, "POST", "/v1/completions", CLIENT_HEADERS, BODY);
    assert_eq!(answer.status, 307);
    assert!(answer.header("location").is_some());
    assert_eq!(elsewhere.requests(), 0);
}

/// A worker that does not take the router's key may quote it: its words go nowhere.
#[test]
fn b57_a_worker_that_quotes_the_routers_key_is_not_relayed() {
    let worker_key = file("tok-worker\n");
    let quoting = worker(|seen, conversation| {
        let key = seen.header("authorization").unwrap_or_default();
        conversation.json(401, &format!("{{\"error\":{{\"message\":\"bad key {key}\"}}}}"))
    });
    let start = || router().round_robin().worker(quoting.address);
    let ask = |router: &crate::support::router::Router| {
        exchange(router.address, "POST", "/v1/completions", "Authorization: Bearer tok-user\r\n", BODY)
    };
    let with_key = start().args(&["--worker-api-key-file", worker_key.path().to_str().unwrap()]).ready();
    let answer = ask(&with_key);
    assert_eq!((answer.status, answer.json()["error"]["code"].as_str()), (502, Some("worker_failed")));
    let log = with_key.logged(&["does not accept this router's key"]);
    for shown in [answer.text(), log, with_key.log_lines().join("\n"), with_key.get("/metrics").text()] {
        assert!(!shown.contains("tok-"), "{shown}");
    }
    assert_eq!(with_key.metric_sum("infera_router_worker_breaker_trips_total"), 0.0);
    // Another worker may take it.
    let fine = worker(|_, conversation| conversation.json(200, "{}"));
    let key = ["--worker-api-key-file", worker_key.path().to_str().unwrap()];
    let two = start().worker(fine.address).args(&key).ready();
    assert!((0..4).all(|_| ask(&two).status == 200));
    // Without a key of the router's the client's own was refused, which is the client's to read.
    let without = start().ready();
    let answer = ask(&without);
    assert_eq!((answer.status, answer.text().contains("bad key Bearer tok-user")), (401, true));
}

#[test]
fn key_files_that_cannot_be_meant_are_refused_at_start() {
    let (empty, odd) = (file("# none yet\n\n"), file("a\nb\n"));
    let refused = |arguments: &[&str]| {
        let output = router().args(arguments).output();
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    assert!(refused(&["--api-key-file", empty.path().to_str().unwrap()]).contains("--api-key-file has no key"));
    assert!(refused(&["--api-key-file", "/nonexistent"]).contains("--api-key-file /nonexistent: "));
    let text = refused(&["--worker-api-key-file", odd.path().to_str().unwrap()]);
    assert!(text.contains("--worker-api-key-file must hold one key"), "{text}");
}
