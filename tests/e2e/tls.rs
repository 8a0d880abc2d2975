//! TLS end to end: the listener with the clients that people have (curl, openssl), `https` workers from the command line
//! and from an etcd behind TLS, and what is said when something does not fit.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use etcd_client::{Certificate, Client, ConnectOptions, TlsOptions};
use rustls::ServerConfig;

use crate::certificates::{self, Authority, Issued};
use crate::support::router::router;
use crate::support::{PATIENCE, wait_until};

/// Certificate files in a directory of their own.
struct Files(tempfile::TempDir);

impl Files {
    fn new(authority: &Authority, issued: &Issued) -> Files {
        let files = Files(tempfile::tempdir().unwrap());
        for (name, text) in [("ca.pem", authority.pem()), ("cert.pem", issued.pem()), ("key.pem", issued.key_pem())] {
            std::fs::write(files.path(name), text).unwrap();
        }
        files
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }
}

/// An engine behind TLS that says which model it has and answers completions, streamed when they ask for it.
struct SecureWorker {
    address: SocketAddr,
    requests: Arc<AtomicUsize>,
    stopped: Arc<AtomicBool>,
}

impl SecureWorker {
    fn start(config: Arc<ServerConfig>) -> SecureWorker {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (requests, stopped) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let (count, stopping) = (requests.clone(), stopped.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                if stopping.load(Ordering::SeqCst) {
                    return;
                }
                let (config, count) = (config.clone(), count.clone());
                std::thread::spawn(move || answer(certificates::behind(stream, &config), &count));
            }
        });
        SecureWorker { address, requests, stopped }
    }

    fn argument(&self, host: &str) -> String {
        format!("https://{host}:{},engine=vllm", self.address.port())
    }
}

impl Drop for SecureWorker {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.address);
    }
}

fn answer(mut stream: impl Read + Write, requests: &AtomicUsize) {
    let (mut pending, mut piece) = (Vec::new(), [0; 4096]);
    loop {
        match stream.read(&mut piece) {
            Ok(read @ 1..) => pending.extend_from_slice(&piece[..read]),
            _ => return,
        }
        let Some(end) = pending.windows(4).position(|window| window == b"\r\n\r\n") else { continue };
        let head = String::from_utf8_lossy(&pending[..end]).to_lowercase();
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse().ok()).unwrap_or(0);
        if pending.len() < end + 4 + length {
            continue;
        }
        let body = String::from_utf8_lossy(&pending[end + 4..]).into_owned();
        pending.clear();
        let sized =
            |status: &str, body: &str| format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        let text = match head.split(' ').nth(1) {
            Some("/v1/models") => sized("200 OK", r#"{"object":"list","data":[{"id":"secure","object":"model"}]}"#),
            Some("/v1/completions") => {
                requests.fetch_add(1, Ordering::SeqCst);
                let event = "data: {\"choices\":[{\"text\":\"a\"}]}\n\ndata: [DONE]\n\n";
                let head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
                match body.contains("\"stream\":true") {
                    true => format!("{head}{:x}\r\n{event}\r\n0\r\n\r\n", event.len()),
                    false => sized("200 OK", &format!(r#"{{"bytes":{length}}}"#)),
                }
            }
            _ => sized("404 Not Found", "{}"),
        };
        if stream.write_all(text.as_bytes()).is_err() {
            return;
        }
    }
}

/// Output of curl, and its exit code.
fn curl(arguments: &[&str]) -> (String, i32) {
    let limit = PATIENCE.as_secs().to_string();
    let output = Command::new("curl").args(["-sS", "--max-time", &limit]).args(arguments).output().expect("curl");
    (String::from_utf8_lossy(&output.stdout).into_owned(), output.status.code().unwrap_or(-1))
}

#[test]
fn curl_and_openssl_reach_the_listener_and_through_it_a_worker_over_tls() {
    let authority = Authority::new();
    let files = Files::new(&authority, &authority.issue(&["localhost", "127.0.0.1"]));
    let worker = SecureWorker::start(authority.issue(&["localhost"]).server());
    let (ca, certificate, key) = (files.text("ca.pem"), files.text("cert.pem"), files.text("key.pem"));
    let arguments = ["--worker", &worker.argument("localhost"), "--worker-tls-ca-file", &ca];
    let listener = ["--tls-cert-file", &certificate, "--tls-key-file", &key, "--admin-listen", "127.0.0.1:0"];
    let router = router().round_robin().args(&arguments).args(&listener).env("RUST_LOG", "debug").start();
    let base = format!("https://localhost:{}", router.address.port());
    wait_until("the router is ready", || {
        curl(&["--cacert", &ca, "-o", "/dev/null", "-w", "%{http_code}", &format!("{base}/ready")]).0 == "200"
    });

    // The model is known from asking the worker: the probes trust the same authority.
    let body = files.path("body.json");
    std::fs::write(&body, format!(r#"{{"model":"secure","prompt":"{}"}}"#, "x".repeat(400_000))).unwrap();
    let completions = format!("{base}/v1/completions");
    let (answer, code) = curl(&["--cacert", &ca, "--data-binary", &format!("@{}", body.display()), &completions]);
    assert_eq!((answer.as_str(), code), (r#"{"bytes":400030}"#, 0));
    let stream = r#"{"model":"secure","prompt":"x","stream":true}"#;
    let (answer, code) = curl(&["--cacert", &ca, "-N", "-d", stream, &completions]);
    assert!(code == 0 && answer.ends_with("data: [DONE]\n\n"), "{code}: {answer}");
    assert_eq!(worker.requests.load(Ordering::SeqCst), 2);

    // Without the authority curl must not talk to it (60 = the certificate cannot be checked).
    assert_eq!(curl(&[&completions]).1, 60);
    let (answer, _) = curl(&["-i", &format!("http://localhost:{}/ready", router.address.port())]);
    assert!(answer.starts_with("HTTP/1.1 400 Bad Request") && answer.contains("https://"), "{answer}");

    let mut openssl = Command::new("openssl");
    openssl.args(["s_client", "-connect", &router.address.to_string(), "-servername", "localhost"]);
    openssl.args(["-CAfile", &ca, "-alpn", "h2,http/1.1", "-verify_return_error"]).stdin(Stdio::null());
    let output = openssl.output().expect("openssl");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    for expected in ["Verify return code: 0 (ok)", "ALPN protocol: http/1.1", "TLSv1.3"] {
        assert!(said.contains(expected), "{expected} is missing in {said}");
    }

    let log = router.log_lines().join("\n");
    let control = log.lines().find(|line| line.contains("control pages")).expect("a line with its address");
    let control = control.rsplit("address=").next().unwrap().trim();
    let (page, _) = curl(&[&format!("http://{control}/metrics")]);
    assert!(
        page.contains("infera_router_tls_handshake_failures_total{shard=\"0\"} 2"),
        "curl without authority and plain HTTP"
    );
    let key = std::fs::read_to_string(&key).unwrap();
    assert!(!log.contains(key.lines().nth(1).unwrap()) && !log.contains("PRIVATE KEY"), "no key in the log");
}

#[test]
fn drain_over_tls_loses_nothing() {
    let authority = Authority::new();
    let files = Files::new(&authority, &authority.issue(&["localhost"]));
    let worker = SecureWorker::start(authority.issue(&["localhost"]).server());
    let arguments = ["--worker", &worker.argument("localhost"), "--worker-tls-ca-file", &files.text("ca.pem")];
    let listener = ["--tls-cert-file", &files.text("cert.pem"), "--tls-key-file", &files.text("key.pem")];
    let mut router = router().round_robin().args(&arguments).args(&listener).start();
    let stream = TcpStream::connect(router.address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut client = certificates::over(stream, certificates::client(&authority, None), "localhost");
    client.write_all(b"GET /health HTTP/1.1\r\nHost: t\r\n\r\n").unwrap();
    let mut first = [0; 12];
    client.read_exact(&mut first).unwrap();
    assert_eq!(&first, b"HTTP/1.1 200");
    router.signal(rustix::process::Signal::TERM);
    // The idle connection ends with close_notify: anything else is an error here.
    client.read_to_end(&mut Vec::new()).unwrap();
    assert!(router.wait().success());
}

#[test]
fn new_certificates_are_shown_after_a_reload() {
    let (old, new) = (Authority::new(), Authority::new());
    let files = Files::new(&old, &old.issue(&["localhost"]));
    let listener = ["--tls-cert-file", &files.text("cert.pem"), "--tls-key-file", &files.text("key.pem")];
    let router = router().round_robin().args(&["--worker", "http://127.0.0.1:9,model=m"]).args(&listener).start();
    let health = || {
        let url = format!("https://localhost:{}/health", router.address.port());
        curl(&["--cacert", &files.text("ca.pem"), "-o", "/dev/null", &url]).1
    };
    assert_eq!(health(), 0);
    let issued = new.issue(&["localhost"]);
    // A key that does not belong to the certificate changes nothing.
    std::fs::write(files.path("key.pem"), issued.key_pem()).unwrap();
    router.signal(rustix::process::Signal::HUP);
    wait_until("the mistake is said", || router.log_lines().join("\n").contains("the configuration stays as it was"));
    assert_eq!(health(), 0);
    std::fs::write(files.path("cert.pem"), issued.pem()).unwrap();
    std::fs::write(files.path("ca.pem"), new.pem()).unwrap();
    assert_eq!(health(), 60, "the old one is still shown");
    router.signal(rustix::process::Signal::HUP);
    wait_until("the new one is shown", || health() == 0);
}

#[test]
fn a_worker_whose_certificate_does_not_fit_gets_nothing() {
    let (authority, stranger) = (Authority::new(), Authority::new());
    let files = Files::new(&authority, &authority.issue(&["localhost"]));
    let ca = files.text("ca.pem");
    for issued in
        [stranger.issue(&["localhost"]), authority.issue(&["elsewhere"]), authority.issue_expired(&["localhost"])]
    {
        let worker = SecureWorker::start(issued.server());
        // Its model is given, so it is routable before anybody has asked it anything.
        let argument = format!("{},model=secure", worker.argument("localhost"));
        let router = router().round_robin().args(&["--worker", &argument, "--worker-tls-ca-file", &ca]).ready();
        let answer = router.post("/v1/completions", r#"{"model":"secure","prompt":"secret"}"#);
        assert_eq!(answer.status, 502, "{}", answer.text());
        assert!(answer.text().contains("certificate"), "{}", answer.text());
        assert_eq!(worker.requests.load(Ordering::SeqCst), 0);
    }
}

#[test]
fn verification_is_only_skipped_loudly() {
    let stranger = Authority::new();
    let worker = SecureWorker::start(stranger.issue_expired(&["elsewhere"]).server());
    let router = router()
        .round_robin()
        .args(&["--worker", &worker.argument("127.0.0.1"), "--worker-tls-insecure-skip-verify"])
        .ready();
    assert_eq!(router.post("/v1/completions", r#"{"model":"secure","prompt":"x"}"#).status, 200);
    let log = router.log_lines().join("\n");
    let warned = |line: &str| line.contains("WARN") && line.contains("certificates of https workers are NOT checked");
    assert!(log.lines().any(warned), "{log}");
}

#[test]
fn an_etcd_behind_tls_is_listed_and_watched() {
    let authority = Authority::new();
    let files = Files::new(&authority, &authority.issue(&["localhost", "127.0.0.1"]));
    let worker = SecureWorker::start(authority.issue(&["127.0.0.1"]).server());
    let free = || TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).unwrap();
    let (client, peer) = (format!("https://{}", free()), format!("http://{}", free()));
    let data = files.text("etcd");
    let process = Command::new("/usr/bin/etcd")
        .args(["--data-dir", &data, "--listen-client-urls", &client, "--advertise-client-urls", &client])
        .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
        .args(["--initial-cluster", &format!("default={peer}")])
        .args(["--cert-file", &files.text("cert.pem"), "--key-file", &files.text("key.pem")])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let _etcd = SecureEtcd(process.expect("etcd starts; the package is etcd-server"));
    let ca = files.text("ca.pem");
    let arguments = ["--etcd-endpoint", &client, "--etcd-tls-ca-file", &ca, "--worker-tls-ca-file", &ca];
    let router = router().round_robin().args(&arguments).start();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    // Registered after the router has begun to watch, or before: both ways lead there.
    runtime.block_on(register(&client, &authority, worker.address));
    wait_until("the worker is found", || {
        router.post("/v1/completions", r#"{"model":"secure","prompt":"x"}"#).status == 200
    });
}

struct SecureEtcd(Child);

impl Drop for SecureEtcd {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn register(endpoint: &str, authority: &Authority, worker: SocketAddr) {
    let record = serde_json::json!({
        "worker_id": "w", "url": format!("https://{worker}"), "model_name": "secure", "status": "active"
    });
    let deadline = std::time::Instant::now() + PATIENCE;
    loop {
        let options = TlsOptions::new().ca_certificate(Certificate::from_pem(authority.pem()));
        let put = async {
            let mut client = Client::connect([endpoint], Some(ConnectOptions::new().with_tls(options))).await?;
            client.put("/infera/workers/w", record.to_string(), None).await
        };
        match put.await {
            Ok(_) => return,
            Err(error) => assert!(std::time::Instant::now() < deadline, "etcd does not answer: {error}"),
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
}
