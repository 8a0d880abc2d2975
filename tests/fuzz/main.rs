//! The fuzz targets with every `cargo test`: inputs from recordings are changed at random, and those that reach something new
//! are kept and changed further. Without instrumentation what an input reaches is the digest that its target returns; the
//! same targets run under coverage in `tests/fuzz/coverage`.
//!
//! `INFERA_FUZZ_SECONDS` is the time for each target (default 2), `INFERA_FUZZ_SEED` the random seed (default: the clock),
//! `INFERA_FUZZ_EXPORT` a folder that gets the first inputs of each target, one file each, for the other driver.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod seeds;
mod targets;

use std::collections::HashSet;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

use targets::{TARGETS, Target};

/// Inputs kept for one target, beyond those it began with.
const KEPT_MAX: usize = 4_096;
const INPUT_BYTES_MAX: usize = 1 << 16;

/// Bytes that mean something to one of the readers: of msgpack, then of HTTP, event streams and JSON.
const TELLING: [u8; 32] = [
    0x00, 0x01, 0x7f, 0x80, 0x90, 0x92, 0xc0, 0xc4, 0xc6, 0xcb, 0xcf, 0xd3, 0xdb, 0xdd, 0xdf, 0xff, b'\r', b'\n', b' ',
    b'\t', b':', b';', b',', b'"', b'\\', b'{', b'}', b'[', b']', b'0', b'a', b'F',
];

fn seconds() -> f64 {
    std::env::var("INFERA_FUZZ_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(2.0)
}

fn seed() -> u64 {
    let clock = || SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64);
    std::env::var("INFERA_FUZZ_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or_else(clock)
}

/// One to eight changes, some of which take bytes of another input.
fn change(random: &mut fastrand::Rng, input: &mut Vec<u8>, other: &[u8]) {
    for _ in 0..=random.usize(0..8) {
        if input.is_empty() {
            input.push(random.u8(..));
        }
        let at = random.usize(0..input.len());
        let length = random.usize(1..=16).min(input.len() - at);
        match random.u8(0..10) {
            0 => input[at] ^= 1 << random.u8(0..8),
            1 => input[at] = random.u8(..),
            2 => input[at] = *random.choice(&TELLING).unwrap(),
            3 => input[at] = input[at].wrapping_add(random.u8(0..5)).wrapping_sub(2),
            4 => drop(input.drain(at..at + length)),
            5 => input.insert(at, *random.choice(&TELLING).unwrap()),
            6 => {
                let piece = input[at..at + length].to_vec();
                input.splice(at..at, piece);
            }
            7 => input.truncate(at),
            8 if !other.is_empty() => {
                let from = random.usize(0..other.len());
                let to = (from + random.usize(1..=64)).min(other.len());
                input.splice(at..at + length, other[from..to].iter().copied());
            }
            _ => {
                let to = random.usize(0..input.len());
                input.swap(at, to);
            }
        }
    }
    input.truncate(INPUT_BYTES_MAX);
}

/// Runs one input; a panic leaves the input in a file and says how to run it again.
fn run(target: &Target, input: &[u8], seed: u64) -> u64 {
    std::panic::catch_unwind(|| (target.run)(input)).unwrap_or_else(|panic| {
        let path = std::env::temp_dir().join(format!("fuzz-{}-{}.bin", target.name, std::process::id()));
        std::fs::write(&path, input).unwrap();
        eprintln!("{} fails (seed {seed}) on {} bytes, kept in {}", target.name, input.len(), path.display());
        std::panic::resume_unwind(panic)
    })
}

fn export(target: &Target, inputs: &[Vec<u8>]) {
    let Some(directory) = std::env::var_os("INFERA_FUZZ_EXPORT") else { return };
    let directory = PathBuf::from(directory).join(target.name);
    std::fs::create_dir_all(&directory).unwrap();
    for (at, input) in inputs.iter().enumerate() {
        std::fs::write(directory.join(format!("{at:05}")), input).unwrap();
    }
}

fn fuzz(name: &str) {
    let target = TARGETS.iter().find(|target| target.name == name).unwrap();
    let seed = seed();
    let mut random = fastrand::Rng::with_seed(seed);
    let mut inputs = seeds::of(name);
    export(target, &inputs);
    let begun_with = inputs.len();
    let mut seen: HashSet<u64> = inputs.iter().map(|input| run(target, input, seed)).collect();
    let start = Instant::now();
    let budget = Duration::from_secs_f64(seconds());
    let mut runs = 0u64;
    while start.elapsed() < budget {
        let mut input = random.choice(&inputs).unwrap().clone();
        let other = random.choice(&inputs).unwrap().clone();
        change(&mut random, &mut input, &other);
        runs += 1;
        if seen.insert(run(target, &input, seed)) && inputs.len() < begun_with + KEPT_MAX {
            inputs.push(input);
        }
    }
    println!(
        "{name}: {runs} runs in {:.0} s from {begun_with} inputs, {} outcomes, {} inputs kept (seed {seed})",
        start.elapsed().as_secs_f64(),
        seen.len(),
        inputs.len() - begun_with
    );
    assert!(runs > 0);
    assert!(seen.len() > 3, "the changes reach something else than the inputs themselves");
}

#[test]
fn kv_frames() {
    fuzz("kv_frames");
}

#[test]
fn kv_payload() {
    fuzz("kv_payload");
}

#[test]
fn kv_state() {
    fuzz("kv_state");
}

#[test]
fn request_head() {
    fuzz("request_head");
}

#[test]
fn response_head() {
    fuzz("response_head");
}

#[test]
fn chunked_body() {
    fuzz("chunked_body");
}

#[test]
fn event_stream() {
    fuzz("event_stream");
}

#[test]
fn splice() {
    fuzz("splice");
}

#[test]
fn every_target_has_a_test_and_a_file_for_the_other_driver() {
    let text = include_str!("main.rs");
    let directory = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/coverage/fuzz_targets");
    for target in TARGETS {
        assert!(text.contains(&format!("fn {}() {{", target.name)), "no test for {}", target.name);
        assert!(directory.join(format!("{}.rs", target.name)).exists(), "no coverage target for {}", target.name);
    }
}
