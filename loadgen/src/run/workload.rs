//! Owns what is asked: scripts of chat turns drawn from a seed. Never sends anything and never reads a clock.
//!
//! `shared-prefix`: each request is a system prompt of one of G groups, drawn by Zipf's law, and a unique question.
//! `multi-turn`: each script is a conversation; every turn repeats the history and adds a message.
//! `images`: every request shows one of the same images and asks something new. Texts are words of the shipped list, of
//! which the shipped tokenizer makes one token each; other tokenizers make a few more.

use rand::Rng;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand_distr::{Distribution, Zipf};
use serde::Serialize;
use serde_json::{Value, json};

use crate::{seed, words};

/// Shape of the prompts.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Shape {
    SharedPrefix {
        groups: usize,
        /// Exponent of the group popularity; 0 = all alike.
        zipf: f64,
        prefix_tokens: usize,
        suffix_tokens: usize,
    },
    /// Rounds over the same images, each in an order of its own; every request shows one and asks something new.
    Images {
        images: usize,
        /// Bytes of an image's `data:` reference.
        image_bytes: usize,
        question_tokens: usize,
    },
    MultiTurn {
        turns: usize,
        /// System prompts are shared by conversations of one group.
        groups: usize,
        prefix_tokens: usize,
        message_tokens: usize,
        /// Take the history's answers from the seed in place of the server's own.
        scripted_answers: bool,
    },
}

/// A reproducible set of requests: equal values give equal bodies (in `multi-turn` without scripted answers: given a
/// server that gives equal answers).
#[derive(Clone, Debug, Serialize)]
pub struct Workload {
    pub shape: Shape,
    pub requests: usize,
    pub output_tokens: usize,
    pub model: String,
    pub stream: bool,
    pub seed: u64,
}

/// One conversation under way.
#[derive(Clone, Debug)]
pub struct Script {
    pub number: usize,
    messages: Vec<Value>,
    turns_left: usize,
}

impl Workload {
    fn turns(&self) -> usize {
        match &self.shape {
            Shape::SharedPrefix { .. } | Shape::Images { .. } => 1,
            Shape::MultiTurn { turns, .. } => (*turns).max(1),
        }
    }

    /// Number of scripts; the last one may be cut short so that exactly `requests` are sent.
    pub fn scripts(&self) -> usize {
        self.requests.div_ceil(self.turns())
    }

    /// Index of a script's first request among all requests.
    pub fn first_request(&self, script: usize) -> usize {
        script * self.turns()
    }

    /// Script `number`, ready for its first body.
    pub fn script(&self, number: usize) -> Script {
        let mut messages = Vec::new();
        if let Some((group, prefix_tokens)) = self.prefix(number) {
            let prefix = text(&mut seed::generator(self.seed.wrapping_add(group as u64), "prefix"), prefix_tokens);
            messages.push(json!({"role": "system", "content": prefix}));
        }
        let turns_left = self.turns().min(self.requests - self.first_request(number));
        Script { number, messages, turns_left }
    }

    /// Which system prompt a script begins with, and its tokens.
    fn prefix(&self, number: usize) -> Option<(usize, usize)> {
        let (groups, zipf, tokens) = match &self.shape {
            Shape::SharedPrefix { groups, zipf, prefix_tokens, .. } => (*groups, *zipf, *prefix_tokens),
            Shape::MultiTurn { groups, prefix_tokens, .. } => (*groups, 0.0, *prefix_tokens),
            Shape::Images { .. } => return None,
        };
        let mut draw = seed::generator(self.seed ^ (number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15), "script");
        (tokens > 0).then(|| (draw_group(&mut draw, groups.max(1), zipf.max(0.0)), tokens))
    }

    /// Number of the shared text that a script begins with, if it has one.
    pub fn prefix_group(&self, number: usize) -> Option<u64> {
        self.prefix(number).map(|(group, _)| group as u64)
    }

    /// The script's next body, or `None` at its end. `answer` is the server's answer to the turn before.
    pub fn next_body(&self, script: &mut Script, answer: Option<&str>) -> Option<Value> {
        if script.turns_left == 0 {
            return None;
        }
        let turn = self.turns() - script.turns_left;
        script.turns_left -= 1;
        let own_seed = self.seed ^ ((script.number as u64) << 20) ^ turn as u64;
        let mut draw = seed::generator(own_seed, "message");
        let tokens = match &self.shape {
            Shape::SharedPrefix { suffix_tokens, .. } => *suffix_tokens,
            Shape::Images { question_tokens, .. } => *question_tokens,
            Shape::MultiTurn { message_tokens, scripted_answers, .. } => {
                if turn > 0 {
                    let content = match answer {
                        Some(answer) if !scripted_answers => answer.to_string(),
                        _ => text(&mut seed::generator(own_seed, "answer"), self.output_tokens),
                    };
                    script.messages.push(json!({"role": "assistant", "content": content}));
                }
                *message_tokens
            }
        };
        let question = text(&mut draw, tokens.max(1));
        let content = match self.image_of(script.number) {
            Some(image) => json!([{"type": "image_url", "image_url": {"url": self.image_reference(image)}},
                {"type": "text", "text": question}]),
            None => Value::String(question),
        };
        script.messages.push(json!({"role": "user", "content": content}));
        let mut body = json!({"model": self.model, "messages": script.messages, "max_tokens": self.output_tokens,
            "temperature": 0, "ignore_eos": true, "stream": self.stream});
        if self.stream {
            body["stream_options"] = json!({"include_usage": true});
        }
        Some(body)
    }

    /// Which image a script shows, if the workload has images.
    pub fn image_of(&self, script: usize) -> Option<usize> {
        let Shape::Images { images, .. } = self.shape else { return None };
        let images = images.max(1);
        let round = (script / images) as u64;
        let mut order: Vec<usize> = (0..images).collect();
        order.shuffle(&mut seed::generator(self.seed ^ round.wrapping_mul(0x9e37_79b9_7f4a_7c15), "round"));
        Some(order[script % images])
    }

    /// The `data:` reference of an image.
    pub fn image_reference(&self, image: usize) -> String {
        const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let bytes = if let Shape::Images { image_bytes, .. } = self.shape { image_bytes } else { 0 };
        let mut draw = seed::generator(self.seed.wrapping_add(image as u64), "image");
        let payload = (0..bytes.max(16)).map(|_| DIGITS[draw.random_range(0..DIGITS.len())] as char);
        "data:image/png;base64,".chars().chain(payload).collect()
    }

    /// Arrival times of the scripts in seconds: a Poisson process of `rate` requests a second overall.
    pub fn arrivals(&self, rate: f64) -> Vec<f64> {
        let mut draw = seed::generator(self.seed, "arrivals");
        let scripts_per_second = rate / self.turns() as f64;
        let mut now = 0.0;
        let mut next = || {
            now += -(1.0 - draw.random::<f64>()).ln() / scripts_per_second;
            now
        };
        (0..self.scripts()).map(|_| next()).collect()
    }
}

fn draw_group(draw: &mut SmallRng, groups: usize, exponent: f64) -> usize {
    let zipf = Zipf::new(groups as f64, exponent).expect("at least one group and an exponent of at least 0");
    (zipf.sample(draw) as usize).clamp(1, groups) - 1
}

fn text(draw: &mut SmallRng, count: usize) -> String {
    let words = words::words();
    let mut out = String::with_capacity(count * 7);
    for position in 0..count {
        if position > 0 {
            out.push(' ');
        }
        out.push_str(words[draw.random_range(0..words.len())]);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shared(seed: u64) -> Workload {
        let shape = Shape::SharedPrefix { groups: 5, zipf: 1.0, prefix_tokens: 30, suffix_tokens: 10 };
        Workload { shape, requests: 200, output_tokens: 8, model: "m".into(), stream: true, seed }
    }

    fn chats(seed: u64, scripted_answers: bool) -> Workload {
        let shape = Shape::MultiTurn { turns: 4, groups: 2, prefix_tokens: 20, message_tokens: 10, scripted_answers };
        Workload { shape, requests: 10, output_tokens: 8, model: "m".into(), stream: false, seed }
    }

    fn bodies(workload: &Workload, answer: &str) -> Vec<String> {
        let mut all = Vec::new();
        for number in 0..workload.scripts() {
            let mut script = workload.script(number);
            while let Some(body) = workload.next_body(&mut script, Some(answer)) {
                all.push(body.to_string());
            }
        }
        all
    }

    #[test]
    fn equal_seeds_give_equal_bodies_and_arrivals() {
        for make in [shared as fn(u64) -> Workload, |seed| chats(seed, true), |seed| chats(seed, false)] {
            assert_eq!(bodies(&make(3), "a"), bodies(&make(3), "a"));
            assert_ne!(bodies(&make(3), "a"), bodies(&make(4), "a"));
            assert_eq!(bodies(&make(3), "a").len(), make(3).requests);
            assert_eq!(make(3).arrivals(5.0), make(3).arrivals(5.0));
        }
        assert_eq!(bodies(&chats(3, true), "a"), bodies(&chats(3, true), "b"), "scripted answers ignore the server");
        assert_ne!(bodies(&chats(3, false), "a"), bodies(&chats(3, false), "b"));
    }

    #[test]
    fn prefixes_are_shared_and_questions_unique() {
        let all = bodies(&shared(9), "");
        let parsed: Vec<Value> = all.iter().map(|body| serde_json::from_str(body).unwrap()).collect();
        let mut counts = std::collections::HashMap::<String, usize>::new();
        parsed.iter().for_each(|body| *counts.entry(body["messages"][0]["content"].to_string()).or_default() += 1);
        assert_eq!(counts.len(), 5);
        let (most, least) = (counts.values().max().unwrap(), counts.values().min().unwrap());
        assert!(most > &(2 * least), "Zipf: {counts:?}");
        let questions: std::collections::HashSet<String> =
            parsed.iter().map(|body| body["messages"][1]["content"].to_string()).collect();
        assert_eq!(questions.len(), all.len());
    }

    #[test]
    fn turns_grow_the_same_conversation() {
        let workload = chats(5, false);
        let mut script = workload.script(0);
        let first = workload.next_body(&mut script, None).unwrap();
        let second = workload.next_body(&mut script, Some("yes")).unwrap();
        let (first, second) = (first["messages"].as_array().unwrap(), second["messages"].as_array().unwrap());
        assert_eq!(second[..first.len()], first[..]);
        assert_eq!(second[first.len()], json!({"role": "assistant", "content": "yes"}));
        assert_eq!(second.len(), first.len() + 2);
    }

    #[test]
    fn arrivals_keep_the_rate() {
        let mut workload = shared(1);
        workload.requests = 20_000;
        let last = *workload.arrivals(100.0).last().unwrap();
        assert!((last - 200.0).abs() < 10.0, "{last}");
    }
}
