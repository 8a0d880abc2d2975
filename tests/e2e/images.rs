//! Requests with images: affinity in the prefill pool, and large ones.

use serde_json::json;

use crate::support::client;
use crate::support::router::{Router, router};
use crate::support::wait_until;
use crate::support::worker::{Worker, json_worker};

fn image_chat(reference: &str) -> String {
    json!({"model": "m", "messages": [{"role": "user", "content": [
        {"type": "text", "text": "what is in this picture? answer in one word, please"},
        {"type": "image_url", "image_url": {"url": reference}}]}]})
    .to_string()
}

fn pair_router(prefill: &[Worker], decode: &[Worker]) -> (Router, tempfile::TempDir) {
    let record = |worker: &Worker, role: &str| {
        let params = if role == "prefill" { json!({"bootstrap_addr": "127.0.0.1:9"}) } else { json!({}) };
        json!({"worker_id": worker.address.to_string(), "url": format!("http://{}", worker.address), "model_name": "m",
            "kv_block_size": 16, "disagg_mode": role,
            "disagg_meta": {"protocol": "sglang-bootstrap", "params": params}})
    };
    let records: Vec<_> = prefill
        .iter()
        .map(|worker| record(worker, "prefill"))
        .chain(decode.iter().map(|worker| record(worker, "decode")))
        .collect();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("workers.json");
    std::fs::write(&path, serde_json::to_vec(&records).unwrap()).unwrap();
    let router = router().args(&["--workers-file", path.to_str().unwrap()]).ready();
    wait_until("all workers are known", || router.metric("infera_router_active_workers") == Some(records.len() as f64));
    (router, directory)
}

/// The image is encoded at prefill: there it returns to who holds it, and decode goes by load.
#[test]
fn under_disaggregation_images_stick_to_prefill_workers_and_decode_goes_by_load() {
    let three = || (0..3).map(|_| json_worker("{}")).collect::<Vec<Worker>>();
    let (prefill, decode) = (three(), three());
    let (router, _directory) = pair_router(&prefill, &decode);
    let counts = |workers: &[Worker]| workers.iter().map(Worker::requests).collect::<Vec<_>>();
    let ask = |image: usize| {
        let (before, total) = (counts(&prefill), counts(&prefill).iter().sum::<usize>());
        let answer = router.post("/v1/chat/completions", &image_chat(&format!("https://images/{image}.png")));
        assert_eq!(answer.status, 200);
        wait_until("prefill has its leg", || counts(&prefill).iter().sum::<usize>() > total);
        counts(&prefill).iter().zip(&before).position(|(now, before)| now > before).unwrap()
    };
    let homes: Vec<usize> = (0..6).map(ask).collect();
    for _ in 0..3 {
        assert_eq!((0..6).map(ask).collect::<Vec<_>>(), homes);
    }
    let spread: std::collections::BTreeSet<_> = homes.iter().collect();
    assert_eq!(spread.len(), 3, "{homes:?}");
    assert_eq!(counts(&decode), [8, 8, 8], "decode holds no image");
    router.logged(&["role=\"prefill\"", "mm_images=1", "mm_affinity_hits=1"]);
    router.logged(&["role=\"decode\"", "mm_images=1", "mm_affinity_hits=0"]);
    router.wait_for_rest();
}

/// The buffer of a body grows by doubling, which copies each byte about once and leaves the allocator a few sizes of it;
/// nothing on the way to the worker adds to that, and routing reads the image where it lies.
#[test]
fn an_image_of_20_mb_arrives_unchanged_within_a_few_times_its_size() {
    const IMAGE: usize = 20 << 20;
    let workers = [json_worker("{}"), json_worker("{}")];
    let router = workers.iter().fold(router(), |start, worker| start.worker(worker.address)).ready();
    // Whatever the first request of its kind sets up is there.
    assert_eq!(router.post("/v1/chat/completions", &image_chat("https://images/small.png")).status, 200);
    let before = peak_bytes(router.pid());
    let body = image_chat(&format!("data:image/png;base64,{}", "iVBORw0KGgo+".repeat(IMAGE / 12)));
    let mut seen = Vec::new();
    for _ in 0..3 {
        assert_eq!(client::post(router.address, "/v1/chat/completions", &body).status, 200);
        seen.push(workers.each_ref().map(Worker::requests));
    }
    let grown = peak_bytes(router.pid()) - before;
    assert!(grown < 5 * IMAGE, "the router's memory peaked {grown} bytes higher for {IMAGE} bytes of image");
    let large = workers.iter().flat_map(Worker::seen).filter(|seen| seen.body.len() == body.len());
    assert!(large.clone().all(|seen| seen.body == body.as_bytes()) && large.count() == 3);
    let moved = (0..2).filter(|worker| seen[2][*worker] > seen[0][*worker]).count();
    assert_eq!(moved, 1, "repeats return to one worker: {seen:?}");
    router.logged(&["mm_images=1", "mm_affinity_hits=1"]);
}

/// Largest resident size so far.
fn peak_bytes(pid: u32) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().trim().parse::<usize>().unwrap() * 1024
}
