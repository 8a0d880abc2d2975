//! What an operator can ask of a running router: explanations, settings, the log's filter, the access log, stage times, the
//! dashboard.

mod access_log;
pub mod browser;
mod dashboard;
mod explain;
mod metric_names;
mod settings;

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};

use crate::support::router::{Router, Start};
use crate::support::wait_until;
use crate::support::worker::{Worker, worker};

/// Answers at once, but for requests of the user `held`, which wait for the gate.
fn gated(gate: &Arc<AtomicBool>) -> Worker {
    let gate = gate.clone();
    worker(move |seen, conversation| {
        if String::from_utf8_lossy(&seen.body).contains(r#""user":"held""#) {
            wait_until("the test opens the gate", || gate.load(Ordering::SeqCst));
        }
        conversation.json(200, r#"{"usage":{"prompt_tokens":3,"completion_tokens":2}}"#)
    })
}

/// A registration of model `m`.
fn record(worker: &Worker, role: &str) -> Value {
    let params = if role == "prefill" { json!({"bootstrap_addr": "127.0.0.1:9"}) } else { json!({}) };
    json!({"worker_id": worker.address.to_string(), "url": format!("http://{}", worker.address), "model_name": "m",
        "engine": "sglang", "kv_block_size": 16, "dp_size": 1, "disagg_mode": role,
        "disagg_meta": {"protocol": "sglang-bootstrap", "params": params}})
}

/// A router over these records, which live as long as the file that comes with it.
fn over(records: &[Value], start: Start) -> (Router, tempfile::NamedTempFile) {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(json!(records).to_string().as_bytes()).unwrap();
    let router = start.args(&["--workers-file", file.path().to_str().unwrap()]).ready();
    wait_until("all workers are known", || router.json("/health")["active_workers"] == records.len());
    (router, file)
}
