//! Memory with a large tokenizer: within bounds at rest, not a tokenizer for each shard, and none for the words that pass.
//!
//! Needs the Qwen3 tokenizer of `tests/setup/fetch_tokenizers.sh`; says so when it did not run.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::support::client::{Connection, request};
use crate::support::router::{Router, router};
use crate::support::wait_until;
use crate::support::worker::json_worker;

const LOADING_MAX: Duration = Duration::from_secs(120);
const IDLE_MIB_MAX: u64 = 200;
/// What a shard may add; the loaded tokenizer takes some 60 MiB.
const SHARD_MIB_MAX: u64 = 6;

fn start(tokenizer: &Path, shards: u32) -> Router {
    // Nobody listens there; a router without workers rests all the same.
    let nobody = SocketAddr::from((Ipv4Addr::LOCALHOST, 9));
    let tokenizer = ["--router-tokenizer-path", tokenizer.to_str().unwrap()];
    router().shards(shards).worker(nobody).args(&tokenizer).patience(LOADING_MAX).start()
}

fn resident_mib(router: &Router) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", router.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() >> 10
}

#[test]
fn memory_at_rest_is_bounded_and_does_not_grow_by_a_tokenizer_per_shard() {
    let Some(tokenizer) = crate::tokenizers::fetched("qwen3") else { return };
    let (four, twelve) = (start(&tokenizer, 4), start(&tokenizer, 12));
    // The encoder thread warms up behind the listening line, and what loading took goes back after that.
    wait_until("memory at rest is within its bounds", || {
        let (four, twelve) = (resident_mib(&four), resident_mib(&twelve));
        four < IDLE_MIB_MAX && twelve < four + 8 * SHARD_MIB_MAX
    });
}

/// The encoder's own table of words would take 56 MiB more for as many as these.
#[test]
fn a_shard_does_not_grow_by_the_words_that_it_meets() {
    const WORDS_MIB_MAX: u64 = 36;
    let Some(tokenizer) = crate::tokenizers::fetched("qwen3") else { return };
    let worker = json_worker("{}");
    let arguments = ["--router-tokenizer-path", tokenizer.to_str().unwrap(), "--prompt-cache-bytes", "1048576"];
    let router = router().shards(1).worker(worker.address).args(&arguments).patience(LOADING_MAX).ready();
    let seed = 20_261_130;
    let mut random = SmallRng::seed_from_u64(seed);
    let mut connection = Connection::open(router.address);
    let mut send_words = |requests: usize| {
        for _ in 0..requests {
            let words: String =
                (0..8 * 900).map(|at| if at % 8 == 7 { ' ' } else { random.random_range('a'..='z') }).collect();
            let body = format!(r#"{{"model":"m","messages":[{{"role":"user","content":"{words}"}}]}}"#);
            connection.send(&request("POST", "/v1/chat/completions", "", body.as_bytes()));
            assert_eq!(connection.answer("POST").status, 200);
        }
    };
    send_words(50);
    let before = resident_mib(&router);
    send_words(1800);
    let grown = resident_mib(&router).saturating_sub(before);
    assert!(grown <= WORDS_MIB_MAX, "grown by {grown} MiB (seed {seed})");
}
