//! Owns traces in Mooncake's format: JSON lines with `timestamp` (ms), `input_length`, `output_length` (tokens) and
//! `hash_ids`, where equal ids stand for 512 equal tokens after an equal beginning.

use std::collections::{HashMap, HashSet};
use std::io::BufRead;

use anyhow::{Context, Result, ensure};
use rand::Rng;
use serde::Deserialize;

use super::content::Named;
use super::workload::{Request, Start, Workload};
use crate::seed::{self, mixed};

/// Tokens that one id of a trace stands for.
pub const TRACE_BLOCK_TOKENS: usize = 512;

#[derive(Clone, Debug, Deserialize)]
pub struct TraceLine {
    /// Milliseconds.
    pub timestamp: u64,
    pub input_length: usize,
    pub output_length: usize,
    pub hash_ids: Vec<u64>,
}

/// The lines in order of time; at most `requests_max`.
pub fn read_trace(reader: impl BufRead, requests_max: usize) -> Result<Vec<TraceLine>> {
    let mut lines = Vec::new();
    for (number, line) in reader.lines().take(requests_max).enumerate() {
        let line = line.with_context(|| format!("line {}", number + 1))?;
        let parsed: TraceLine = serde_json::from_str(&line).with_context(|| format!("line {}", number + 1))?;
        let wanted = parsed.input_length.div_ceil(TRACE_BLOCK_TOKENS);
        ensure!(parsed.input_length > 0, "line {}: input_length is 0", number + 1);
        ensure!(parsed.hash_ids.len() >= wanted, "line {}: {wanted} hash_ids are needed", number + 1);
        lines.push(parsed);
    }
    ensure!(!lines.is_empty(), "the trace is empty");
    lines.sort_by_key(|line| line.timestamp);
    Ok(lines)
}

/// A trace as a workload, `speed` times faster than recorded. Traces tell times in coarse ticks; within its tick a
/// request starts at a moment drawn from `seed`.
///
/// Traces name no sessions. A request that shares more than its first id with an earlier one continues that one's: the
/// first id of the published conversation trace is a system prompt that all requests share.
pub fn replay(name: &str, lines: &[TraceLine], speed: f64, block_size: usize, seed: u64) -> Result<Workload> {
    ensure!(
        block_size > 0 && TRACE_BLOCK_TOKENS.is_multiple_of(block_size),
        "a trace's block of {TRACE_BLOCK_TOKENS} tokens is not a multiple of {block_size}"
    );
    let tick_ms = tick(lines);
    let mut draw = seed::generator(seed, "trace arrivals");
    let mut session_of: HashMap<u64, u64> = HashMap::new();
    let mut requests = Vec::with_capacity(lines.len());
    for (number, line) in lines.iter().enumerate() {
        let known = line.hash_ids.iter().skip(1).rev().find_map(|id| session_of.get(id).copied());
        let session = known.unwrap_or(number as u64);
        let full = line.input_length / TRACE_BLOCK_TOKENS;
        for id in line.hash_ids[..full].iter().skip(1) {
            session_of.insert(*id, session);
        }
        let at_ms = line.timestamp as f64 + draw.random_range(0.0..1.0) * tick_ms as f64;
        requests.push(Request {
            start: Start::At((at_ms * 1e6 / speed) as u64),
            session,
            content: content(line, number, block_size),
        });
    }
    Ok(Workload { name: name.to_owned(), block_size, requests })
}

/// Shortest time between two different timestamps, milliseconds; rounded up to what most traces have in common.
fn tick(lines: &[TraceLine]) -> u64 {
    let times: HashSet<u64> = lines.iter().map(|line| line.timestamp).collect();
    let mut times: Vec<u64> = times.into_iter().collect();
    times.sort_unstable();
    let mut gaps: Vec<u64> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
    gaps.sort_unstable();
    gaps.get(gaps.len() / 2).copied().unwrap_or(0)
}

fn content(line: &TraceLine, number: usize, block_size: usize) -> Named {
    let (parts, answer_tokens) = (TRACE_BLOCK_TOKENS / block_size, line.output_length.max(1));
    let prompt = line.input_length / block_size;
    let total = (line.input_length + answer_tokens) / block_size;
    let name = |block: usize| match block < prompt {
        true => mixed(line.hash_ids[block / parts], (block % parts) as u64),
        // What a request generates has no ids: nobody can hit it.
        false => mixed(u64::MAX - number as u64, block as u64),
    };
    Named::new((0..total).map(name).collect::<Vec<u64>>(), line.input_length, answer_tokens)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines() -> Vec<TraceLine> {
        let text = r#"{"timestamp":0,"input_length":1300,"output_length":10,"hash_ids":[0,1,2]}
{"timestamp":3000,"input_length":1000,"output_length":0,"hash_ids":[0,9]}
{"timestamp":6000,"input_length":2048,"output_length":600,"hash_ids":[0,1,7,8]}"#;
        read_trace(text.as_bytes(), usize::MAX).unwrap()
    }

    #[test]
    fn ids_become_blocks_that_are_shared_as_they_were() {
        let workload = replay("t", &lines(), 2.0, 64, 1).unwrap();
        let names: Vec<&[u64]> = workload.requests.iter().map(|it| it.content.prompt_names(64)).collect();
        assert_eq!(names.iter().map(|it| it.len()).collect::<Vec<_>>(), [20, 15, 32]);
        let shared = |a: usize, b: usize| names[a].iter().zip(names[b]).take_while(|(a, b)| a == b).count();
        assert_eq!((shared(0, 1), shared(0, 2)), (8, 16));
        assert_eq!(workload.requests[2].content.names().len(), 41);
        let sessions: Vec<u64> = workload.requests.iter().map(|it| it.session).collect();
        assert_eq!(sessions, [0, 1, 0], "the shared first id alone makes no session");
        let Start::At(at) = workload.requests[1].start else { panic!("a trace has times") };
        assert!((1_500_000_000..3_000_000_000).contains(&at), "{at}");
    }

    #[test]
    fn lines_that_cannot_be_replayed_are_named() {
        let read = |text: &str| read_trace(text.as_bytes(), 9).unwrap_err().to_string();
        assert!(read("").contains("empty"));
        assert!(read(r#"{"timestamp":0,"input_length":1025,"output_length":1,"hash_ids":[1,2]}"#).contains("line 1"));
        assert!(read("{}").contains("line 1"));
        assert!(replay("t", &lines(), 1.0, 48, 1).is_err());
    }
}
