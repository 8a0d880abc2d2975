//! Owns generated workloads: plans as block names. The same seed gives the same requests.

use super::content::Path;
use super::workload::{Request, Start, Workload};
use crate::plan::{Sessions, Shape};

/// At least `requests` requests, whole sessions; sessions begin as a Poisson process of `rate` per second.
pub fn generate(shape: Shape, requests: usize, rate: f64, block_size: usize, seed: u64) -> Workload {
    let mut made = Vec::with_capacity(requests + 64);
    let mut sessions = Sessions::new(shape.recipe(), rate, seed);
    while made.len() < requests
        && let Some(session) = sessions.next()
    {
        let mut path = Path::new(block_size);
        for (number, turn) in session.turns.iter().enumerate() {
            let start = match number {
                0 => Start::At(session.at_ns),
                _ => Start::After { request: made.len() - 1, pause_ns: turn.pause_ns },
            };
            turn.pieces.iter().for_each(|piece| path.append(piece.name, piece.tokens));
            let content = path.ask(turn.answer, turn.answer_tokens);
            made.push(Request { start, session: session.number, content });
        }
    }
    Workload { name: shape.as_str().to_owned(), block_size, requests: made }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::content::Content;

    #[test]
    fn turns_grow_what_was_there() {
        let agents = generate(Shape::Agents, 500, 1.0, 64, 3);
        for request in &agents.requests {
            let Start::After { request: before, .. } = request.start else { continue };
            let before = &agents.requests[before];
            assert_eq!(request.session, before.session);
            assert!(request.content.prompt_tokens() > before.content.prompt_tokens() + before.content.answer_tokens());
            assert!(request.content.names().starts_with(before.content.names()), "a turn repeats all before it");
        }
    }
}
