//! The official `openai` Python client against the router.

use std::path::Path;
use std::process::Command;

use loadgen::engine::{Engine, EngineConfig};

use crate::support::PATIENCE;
use crate::support::router::router;
use crate::support::worker::worker;

#[test]
fn the_official_client_lists_completes_streams_and_is_cut_off_cleanly() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let python = root.join("target/python/bin/python");
    assert!(python.exists(), "{} is not there: tests/setup/python_clients.sh makes it", python.display());
    let engine = Engine::start(EngineConfig::default()).unwrap();
    let cutting = worker(|_, conversation| {
        conversation.sse_head();
        conversation.chunk("data: {\"id\":\"c\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"cut\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"},\"finish_reason\":null}]}\n\n");
        conversation.reset()
    });
    let tokenizer = tempfile::tempdir().unwrap();
    loadgen::prompt::write_shipped_tokenizer(tokenizer.path()).unwrap();
    let router = router()
        .args(&["--worker", &engine.worker_flag()])
        .args(&["--worker", &format!("http://{},model=cut,block-size=16", cutting.address)])
        .args(&["--router-tokenizer-path", tokenizer.path().to_str().unwrap()])
        .ready();
    let output = Command::new(python)
        .arg(root.join("tests/e2e/openai_client.py"))
        .args([format!("http://{}", router.address), "demo".to_owned(), "cut".to_owned()])
        .output()
        .expect("python starts");
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}");
    assert!(said.contains("all good"), "{said}");
    router.wait_for_rest();
    assert!(engine.wait_until(PATIENCE, |state| state.is_idle()), "the client that left was aborted at the engine");
}
