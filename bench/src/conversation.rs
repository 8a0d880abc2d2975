//! Synthetic conversations of a wanted length: prose, code, numbers and a little of other scripts, never twice the same
//! text. Owns text only; the same seed gives the same text.

use serde_json::{Value, json};

const WORDS: &str = include_str!("../../loadgen/assets/words.txt");

/// Bytes of text in one message, about.
const MESSAGE_BYTES: usize = 3000;

const SYSTEM: &str = "You are a careful assistant who works on a large code base. Answer briefly, cite files by path, and run the tests before you say that something works.";

/// A source of text.
pub struct Writer {
    random: fastrand::Rng,
    words: Vec<&'static str>,
}

impl Writer {
    pub fn new(seed: u64) -> Writer {
        Writer { random: fastrand::Rng::with_seed(seed), words: WORDS.split_whitespace().collect() }
    }

    fn word(&mut self) -> &'static str {
        self.words[self.random.usize(..self.words.len())]
    }

    /// A name as code has them; a million are possible, so that most are new to an encoder.
    fn name(&mut self) -> String {
        let (first, second) = (self.word(), self.word());
        if self.random.bool() {
            format!("{first}_{second}")
        } else {
            format!("{first}{}{}", second[..1].to_uppercase(), &second[1..])
        }
    }

    fn sentence(&mut self, out: &mut String) {
        for place in 0..self.random.usize(6..18) {
            if place > 0 {
                out.push(' ');
            }
            match self.random.u8(..40) {
                0 => out.push_str(&self.random.u32(..100_000).to_string()),
                1 => out.push_str("naïveté"),
                2 => out.push_str("“quoted”"),
                3 => out.push_str("例えば"),
                4..=8 => out.push_str(&self.name()),
                9 => out.push_str(&format!("{:x}", self.random.u32(..))),
                _ => out.push_str(self.word()),
            }
        }
        out.push_str(". ");
    }

    fn code(&mut self, out: &mut String) {
        out.push_str("\n```rust\n");
        for _ in 0..self.random.usize(4..16) {
            let (name, from, with) = (self.name(), self.word(), self.name());
            let line = match self.random.u8(..4) {
                0 => format!("    let {name} = {from}.get(\"{with}\").unwrap_or(&{});\n", self.random.u16(..)),
                1 => format!("    if {name}_{from} > {} {{ return Err(\"{with}\\n\".into()); }}\n", self.random.u8(..)),
                2 => format!("    // {name} {from} {with}\n"),
                _ => format!("    self.{name}({from}, |{with}| {with} + {});\n", self.random.u8(..)),
            };
            out.push_str(&line);
        }
        out.push_str("```\n");
    }

    /// About `bytes` bytes of text.
    pub fn text(&mut self, bytes: usize) -> String {
        let mut out = String::with_capacity(bytes + 600);
        while out.len() < bytes {
            if self.random.u8(..6) == 0 { self.code(&mut out) } else { self.sentence(&mut out) }
        }
        out
    }

    /// A question and its answer before it, of about `bytes` bytes together.
    pub fn turn(&mut self, bytes: usize) -> [Value; 2] {
        let (answer, question) = (self.text(bytes / 2), self.text(bytes / 2));
        [json!({"role": "assistant", "content": answer}), json!({"role": "user", "content": question})]
    }

    /// System prompt, a question, and turns up to about `bytes` bytes of text in all; the last message is the user's.
    pub fn conversation(&mut self, bytes: usize) -> Vec<Value> {
        let mut messages = vec![
            json!({"role": "system", "content": format!("{SYSTEM} {}", self.text(MESSAGE_BYTES))}),
            json!({"role": "user", "content": self.text(MESSAGE_BYTES)}),
        ];
        let mut written = 2 * MESSAGE_BYTES;
        while written < bytes {
            messages.extend(self.turn(2 * MESSAGE_BYTES));
            written += 2 * MESSAGE_BYTES;
        }
        messages
    }
}

/// A chat body for model `m`.
pub fn body(messages: &[Value]) -> Vec<u8> {
    body_for("m", messages)
}

pub fn body_for(model: &str, messages: &[Value]) -> Vec<u8> {
    json!({"model": model, "stream": false, "max_tokens": 64, "messages": messages}).to_string().into_bytes()
}

/// The body as a request.
pub fn request(host: &str, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_text_and_another_seed_another() {
        let write = |seed| body(&Writer::new(seed).conversation(40_000));
        assert_eq!(write(1), write(1));
        assert_ne!(write(1), write(2));
        let parsed: Value = serde_json::from_slice(&write(3)).unwrap();
        let messages = parsed["messages"].as_array().unwrap();
        assert_eq!(messages.len() % 2, 0);
        assert_eq!(messages.last().unwrap()["role"], "user");
    }
}
