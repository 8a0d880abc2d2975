//! Inputs that the fuzz targets begin with: recordings of real engines, and a few short programs of the state target.

use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

/// Inputs of one target; never empty.
pub fn of(target: &str) -> Vec<Vec<u8>> {
    let messages = || recordings().iter().flat_map(|path| messages(path)).collect::<Vec<_>>();
    let seeds = match target {
        "kv_frames" => messages().iter().map(|frames| multipart(frames)).collect(),
        "kv_payload" => messages().into_iter().filter_map(|mut frames| frames.pop()).collect(),
        "kv_state" => programs(),
        other => panic!("no inputs for {other}"),
    };
    assert!(!seeds.is_empty(), "{target}");
    seeds
}

fn recordings() -> Vec<PathBuf> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/kv-events");
    let mut paths: Vec<PathBuf> = std::fs::read_dir(directory)
        .expect("the recordings")
        .map(|entry| entry.expect("a file").path())
        .filter(|path| {
            path.to_string_lossy().ends_with(".jsonl") && !path.to_string_lossy().ends_with(".expected.jsonl")
        })
        .collect();
    paths.sort();
    paths
}

/// Live and replayed messages of one recording.
fn messages(path: &Path) -> Vec<Vec<Vec<u8>>> {
    let text = std::fs::read_to_string(path).expect("a recording");
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    lines
        .filter(|line| line["kind"] == "sub" || line["kind"] == "replay")
        .filter_map(|line| {
            let frames = line["frames"].as_array()?.iter();
            Some(frames.map(|frame| STANDARD.decode(frame.as_str().unwrap_or_default()).expect("base64")).collect())
        })
        .collect()
}

/// The form that the frames target reads. Topics are short, so their length fits a byte.
fn multipart(frames: &[Vec<u8>]) -> Vec<u8> {
    let mut out = vec![frames.len() as u8];
    out.extend(frames.iter().map(|frame| frame.len().min(255) as u8));
    frames.iter().for_each(|frame| out.extend(frame));
    out
}

/// With and without replay: plain growth; a gap with an answer, with half of one, with none; a restart; a straggler.
fn programs() -> Vec<Vec<u8>> {
    let store = |number: u8, place: u8| [0, number << 3, place];
    let mut programs = Vec::new();
    for first in [0u8, 1, 0x31] {
        let grow: Vec<u8> = (0..6).flat_map(|at| store(at % 4, at * 7)).collect();
        let with = |steps: &[[u8; 3]]| {
            let mut program = vec![first];
            program.extend(&grow);
            program.extend(steps.concat());
            program.extend(&grow);
            program
        };
        programs.push(with(&[]));
        programs.push(with(&[[6, 8, 1], store(1, 3), [11, 31, 0]]));
        programs.push(with(&[[70, 8, 1], store(1, 3), [11, 31, 7], [14, 0, 0]]));
        programs.push(with(&[[6, 8, 1], store(1, 3), store(2, 4), [15, 255, 1]]));
        programs.push(with(&[[8, 0, 0], store(1, 3), store(2, 9)]));
        programs.push(with(&[[6, 5, 1], store(1, 3), [7, 1, 0], [9, 2, 2], [10, 1, 4]]));
    }
    programs
}
