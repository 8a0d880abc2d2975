//! Owns traces in Mooncake's format: JSON lines with `timestamp` (ms), `input_length`, `output_length` (tokens) and
//! `hash_ids`, where equal ids stand for 512 equal tokens after an equal beginning.

use std::collections::{HashMap, HashSet};
use std::io::BufRead;

use anyhow::{Context, Result, ensure};
use rand::Rng;
use serde::Deserialize;

use super::{Kind, Piece, Session, Turn};
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

/// When each request starts, milliseconds. Traces tell times in coarse ticks; within its tick a request starts at a
/// moment drawn from `seed`.
pub fn arrivals_ms(lines: &[TraceLine], seed: u64) -> Vec<f64> {
    let (tick_ms, mut draw) = (tick(lines) as f64, seed::generator(seed, "trace arrivals"));
    lines.iter().map(|line| line.timestamp as f64 + draw.random_range(0.0..1.0) * tick_ms).collect()
}

/// The session of each request. Traces name none. A request that shares more than its first id with an earlier one
/// continues that one's: the first id of the published conversation trace is a system prompt that all requests share.
pub fn sessions(lines: &[TraceLine]) -> Vec<u64> {
    let mut session_of: HashMap<u64, u64> = HashMap::new();
    let session = |(number, line): (usize, &TraceLine)| {
        let known = line.hash_ids.iter().skip(1).rev().find_map(|id| session_of.get(id).copied());
        let session = known.unwrap_or(number as u64);
        let full = line.input_length / TRACE_BLOCK_TOKENS;
        for id in line.hash_ids[..full].iter().skip(1) {
            session_of.insert(*id, session);
        }
        session
    };
    lines.iter().enumerate().map(session).collect()
}

/// A trace as sessions of one request each, in order of beginning. Equal ids become pieces of equal names; the last one
/// is cut so that the lengths add up to the prompt's.
pub fn replayed(lines: &[TraceLine], seed: u64) -> Vec<Session> {
    let (times, sessions) = (arrivals_ms(lines, seed), sessions(lines));
    let piece = |(place, id): (usize, &u64), line: &TraceLine| {
        let tokens = (line.input_length - place * TRACE_BLOCK_TOKENS).min(TRACE_BLOCK_TOKENS);
        Piece { kind: Kind::Message, name: mixed(TRACE_BLOCK_TOKENS as u64, *id), tokens }
    };
    let session = |(number, line): (usize, &TraceLine)| {
        let used = line.input_length.div_ceil(TRACE_BLOCK_TOKENS);
        let pieces = line.hash_ids[..used].iter().enumerate().map(|it| piece(it, line)).collect();
        let answer_tokens = line.output_length.max(1);
        Session {
            number: sessions[number],
            at_ns: (times[number] * 1e6) as u64,
            // What all share tells nothing apart.
            group: line.hash_ids.get(1).or(line.hash_ids.first()).copied(),
            turns: vec![Turn { pause_ns: 0, pieces, answer: mixed(!seed, number as u64), answer_tokens }],
        }
    };
    let mut replayed: Vec<Session> = lines.iter().enumerate().map(session).collect();
    replayed.sort_by_key(|session| session.at_ns);
    replayed
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

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn lines() -> Vec<TraceLine> {
        let text = r#"{"timestamp":0,"input_length":1300,"output_length":10,"hash_ids":[0,1,2]}
{"timestamp":3000,"input_length":1000,"output_length":0,"hash_ids":[0,9]}
{"timestamp":6000,"input_length":2048,"output_length":600,"hash_ids":[0,1,7,8]}"#;
        read_trace(text.as_bytes(), usize::MAX).unwrap()
    }

    #[test]
    fn ids_become_pieces_that_are_shared_as_they_were() {
        let replayed = replayed(&lines(), 1);
        let pieces = |number: usize| &replayed[number].turns[0].pieces;
        let tokens = |number: usize| pieces(number).iter().map(|piece| piece.tokens).collect::<Vec<_>>();
        assert_eq!((tokens(0), tokens(1), tokens(2)), (vec![512, 512, 276], vec![512, 488], vec![512; 4]));
        assert_eq!(pieces(0)[..2], pieces(2)[..2]);
        assert_eq!(pieces(0)[0], pieces(1)[0]);
        assert_ne!(pieces(0)[1].name, pieces(1)[1].name);
        let numbers: Vec<u64> = replayed.iter().map(|it| it.number).collect();
        assert_eq!(numbers, [0, 1, 0], "the shared first id alone makes no session");
        let answers: Vec<usize> = replayed.iter().map(|it| it.turns[0].answer_tokens).collect();
        assert_eq!(answers, [10, 1, 600]);
        for (session, from_ms) in replayed.iter().zip([0, 3000, 6000]) {
            assert!((from_ms..from_ms + 3000).contains(&(session.at_ns / 1_000_000)), "{}", session.at_ns);
        }
    }

    #[test]
    fn lines_that_cannot_be_replayed_are_named() {
        let read = |text: &str| read_trace(text.as_bytes(), 9).unwrap_err().to_string();
        assert!(read("").contains("empty"));
        assert!(read(r#"{"timestamp":0,"input_length":1025,"output_length":1,"hash_ids":[1,2]}"#).contains("line 1"));
        assert!(read("{}").contains("line 1"));
    }
}
