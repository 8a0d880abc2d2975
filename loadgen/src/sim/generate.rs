//! Owns generated workloads: the shapes, their parameters and their draws. The same seed gives the same requests.

use rand::Rng;
use rand::rngs::SmallRng;
use rand_distr::{Distribution, Exp, LogNormal, Zipf};

use super::content::{Path, mixed};
use super::workload::{Request, Start, Workload};
use crate::seed;

/// What kind of requests. Lengths are drawn from log-normal distributions around the means told here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Shape {
    /// One of 32 system prompts of 2,000 tokens (Zipf 1.0), a question of 200, an answer of 150.
    SharedPrompts,
    /// A system prompt of 500 tokens, three of 400 documents of 1,500 tokens (Zipf 0.9) in the order of their rank, a
    /// question of 60, an answer of 250.
    Rag,
    /// Conversations of 6 turns: system prompts as above of 1,000 tokens, messages of 150, answers of 300, and 20 s to
    /// read and think.
    Chat,
    /// Agents of 24 calls: one of 8 prompts with tools of 10,000 tokens (Zipf 0.8), a task of 1,500; each call is
    /// answered by 150 tokens, then a tool runs for 3 s and appends 1,200.
    Agents,
    /// One system prompt of 500 tokens for all, a question of 60, an answer of 300.
    OnePrompt,
    /// Prompts of 3,000 tokens that nobody shares, answers of 200.
    Unique,
}

impl Shape {
    pub fn as_str(self) -> &'static str {
        match self {
            Shape::SharedPrompts => "shared-prompts",
            Shape::Rag => "rag",
            Shape::Chat => "chat",
            Shape::Agents => "agents",
            Shape::OnePrompt => "one-prompt",
            Shape::Unique => "unique",
        }
    }
}

/// At least `requests` requests, whole sessions; sessions begin as a Poisson process of `rate` per second.
pub fn generate(shape: Shape, requests: usize, rate: f64, block_size: usize, seed: u64) -> Workload {
    let mut maker = Maker {
        draw: seed::generator(seed, shape.as_str()),
        block_size,
        requests: Vec::with_capacity(requests + 64),
        session: 0,
        segments: 0,
        seed,
    };
    let between = Exp::new(rate).expect("a rate is positive");
    let mut at_seconds = 0.0;
    while maker.requests.len() < requests {
        at_seconds += between.sample(&mut maker.draw);
        maker.session(shape, (at_seconds * 1e9) as u64);
    }
    Workload { name: shape.as_str().to_owned(), block_size, requests: maker.requests }
}

struct Maker {
    draw: SmallRng,
    block_size: usize,
    requests: Vec<Request>,
    session: u64,
    /// Segments that nobody else has.
    segments: u64,
    seed: u64,
}

impl Maker {
    fn session(&mut self, shape: Shape, at_ns: u64) {
        self.session += 1;
        let mut path = Path::new(self.block_size);
        match shape {
            Shape::SharedPrompts => {
                self.append_shared(&mut path, 32, 1.0, 2000);
                self.append_own(&mut path, 200.0);
                self.ask(&mut path, Start::At(at_ns), 150.0);
            }
            Shape::Rag => {
                path.append(mixed(self.seed, 0), 500);
                let mut documents: Vec<u64> = (0..3).map(|_| self.popular(400, 0.9)).collect();
                // Retrievers that sort by a fixed key make prefixes that can be shared; by score they hardly do.
                documents.sort_unstable();
                documents.dedup();
                documents.iter().for_each(|document| path.append(mixed(self.seed, *document), 1500));
                self.append_own(&mut path, 60.0);
                self.ask(&mut path, Start::At(at_ns), 250.0);
            }
            Shape::Chat => {
                self.append_shared(&mut path, 32, 1.0, 1000);
                let turns = self.count(6.0);
                self.turns(&mut path, at_ns, turns, 20.0, [150.0, 300.0]);
            }
            Shape::Agents => {
                self.append_shared(&mut path, 8, 0.8, 10_000);
                self.append_own(&mut path, 300.0);
                let calls = self.count(24.0);
                self.turns(&mut path, at_ns, calls, 3.0, [1200.0, 150.0]);
            }
            Shape::OnePrompt => {
                path.append(mixed(self.seed, 0), 500);
                self.append_own(&mut path, 60.0);
                self.ask(&mut path, Start::At(at_ns), 300.0);
            }
            Shape::Unique => {
                self.append_own(&mut path, 3000.0);
                self.ask(&mut path, Start::At(at_ns), 200.0);
            }
        }
    }

    /// Requests that each begin a pause after the one before has ended.
    fn turns(&mut self, path: &mut Path, at_ns: u64, turns: usize, pause_s: f64, [message, answer]: [f64; 2]) {
        let mut start = Start::At(at_ns);
        for _ in 0..turns {
            self.append_own(path, message);
            let request = self.ask(path, start, answer);
            let pause_ns = (self.length(pause_s * 1000.0) as u64) * 1_000_000;
            start = Start::After { request, pause_ns };
        }
    }

    fn ask(&mut self, path: &mut Path, start: Start, answer: f64) -> usize {
        let answer_tokens = self.length(answer);
        let segment = self.own_segment();
        let content = path.ask(segment, answer_tokens);
        self.requests.push(Request { start, session: self.session, content });
        self.requests.len() - 1
    }

    fn append_shared(&mut self, path: &mut Path, groups: usize, zipf: f64, tokens: usize) {
        let group = self.popular(groups, zipf);
        path.append(mixed(self.seed, group), tokens);
    }

    fn append_own(&mut self, path: &mut Path, tokens: f64) {
        let (segment, tokens) = (self.own_segment(), self.length(tokens));
        path.append(segment, tokens);
    }

    fn own_segment(&mut self) -> u64 {
        self.segments += 1;
        mixed(!self.seed, self.segments)
    }

    /// Rank of one of `count`, from 1.
    fn popular(&mut self, count: usize, exponent: f64) -> u64 {
        Zipf::new(count as f64, exponent).expect("a positive count").sample(&mut self.draw) as u64
    }

    /// A length with this mean: log-normal with a standard deviation of 0.6 of the logarithm, at least 1.
    fn length(&mut self, mean: f64) -> usize {
        const SIGMA: f64 = 0.6;
        let law = LogNormal::new(mean.ln() - SIGMA * SIGMA / 2.0, SIGMA).expect("a finite mean");
        (law.sample(&mut self.draw) as usize).max(1)
    }

    /// Turns of a session: uniform between half the mean and one and a half times it.
    fn count(&mut self, mean: f64) -> usize {
        (mean * self.draw.random_range(0.5..1.5)).round().max(1.0) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::content::Content;

    #[test]
    fn seeds_decide_and_turns_grow_what_was_there() {
        for shape in [Shape::SharedPrompts, Shape::Rag, Shape::Chat, Shape::Agents, Shape::OnePrompt, Shape::Unique] {
            let names = |seed| {
                let workload = generate(shape, 200, 2.0, 64, seed);
                workload.requests.iter().map(|it| (it.start, it.content.names().to_vec())).collect::<Vec<_>>()
            };
            assert_eq!(names(1), names(1));
            assert_ne!(names(1), names(2));
        }
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
