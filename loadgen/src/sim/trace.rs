//! Owns traces as workloads of block names. Never reads files: see [`crate::plan::trace`].

use anyhow::{Result, ensure};

use super::content::Named;
use super::workload::{Request, Start, Workload};
use crate::plan::trace::{TRACE_BLOCK_TOKENS, TraceLine, arrivals_ms, sessions};
use crate::seed::mixed;

/// A trace as a workload, `speed` times faster than recorded, at moments drawn from `seed` within the trace's ticks.
pub fn replay(name: &str, lines: &[TraceLine], speed: f64, block_size: usize, seed: u64) -> Result<Workload> {
    ensure!(
        block_size > 0 && TRACE_BLOCK_TOKENS.is_multiple_of(block_size),
        "a trace's block of {TRACE_BLOCK_TOKENS} tokens is not a multiple of {block_size}"
    );
    let times = arrivals_ms(lines, seed).into_iter().zip(sessions(lines));
    let request = |(number, (line, (at_ms, session))): (usize, (&TraceLine, (f64, u64)))| Request {
        start: Start::At((at_ms * 1e6 / speed) as u64),
        session,
        content: content(line, number, block_size),
    };
    let requests = lines.iter().zip(times).enumerate().map(request).collect();
    Ok(Workload { name: name.to_owned(), block_size, requests })
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
    use crate::plan::trace::tests::lines;

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
        assert!(replay("t", &lines(), 1.0, 48, 1).is_err(), "blocks that do not fit into a trace's");
    }
}
