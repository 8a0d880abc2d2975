//! Clients that check what they get, and some that misbehave. A wrong answer panics; an honest error is counted.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::engines::text;
use crate::support::client::{Answer, Connection, request};

/// What the clients met.
#[derive(Debug, Default)]
pub struct Tally {
    pub right: u64,
    /// Honest errors by cause: a status of the router or of an engine, an answer that shows that it is cut.
    pub causes: BTreeMap<String, u64>,
    /// Requests given up by their client.
    pub left: u64,
}

impl Tally {
    pub fn plus(mut self, other: Self) -> Self {
        for (cause, count) in other.causes {
            *self.causes.entry(cause).or_default() += count;
        }
        Self { right: self.right + other.right, causes: self.causes, left: self.left + other.left }
    }

    pub fn errors(&self) -> u64 {
        self.causes.values().sum()
    }
}

static NEXT: AtomicU64 = AtomicU64::new(0);

/// One client's life: connections of a few requests each.
pub fn run(address: SocketAddr, mut random: fastrand::Rng, faulty: bool, is_over: &AtomicBool) -> Tally {
    let mut tally = Tally::default();
    while !is_over.load(Ordering::SeqCst) {
        let mut connection = Connection::open(address);
        for _ in 0..random.usize(1..20) {
            let asked = Asked::draw(&mut random);
            let misbehaves = faulty && random.u8(..6) == 0;
            if misbehaves {
                tally.left += 1;
                misbehave(connection, &asked, &mut random);
                break;
            }
            let bytes = asked.bytes();
            let sent = if faulty && random.u8(..16) == 0 {
                dribble(connection.stream(), &bytes)
            } else {
                connection.reader.get_mut().write_all(&bytes)
            };
            // The router closes a connection behind an answer that was cut.
            let Ok(()) = sent else { break };
            let Ok((status, headers)) = connection.head() else { break };
            let answer = body_of(&mut connection, status, headers);
            let closes = answer.header("connection").is_some_and(|value| value.eq_ignore_ascii_case("close"));
            match asked.verdict(&answer) {
                Verdict::Right => tally.right += 1,
                Verdict::Error(cause) => *tally.causes.entry(cause).or_default() += 1,
            }
            if closes || !answer.complete {
                break;
            }
        }
    }
    tally
}

fn body_of(connection: &mut Connection, status: u16, headers: Vec<(String, String)>) -> Answer {
    let mut answer = Answer { status, headers, body: Vec::new(), complete: true };
    if answer.header("transfer-encoding").is_some() {
        loop {
            match connection.chunk() {
                Ok(Some(payload)) => answer.body.extend(payload),
                Ok(None) => break,
                Err(_) => {
                    answer.complete = false;
                    break;
                }
            }
        }
    } else {
        let length: usize = answer.header("content-length").and_then(|it| it.parse().ok()).expect("a length");
        let mut body = Vec::new();
        let read = connection.reader.by_ref().take(length as u64).read_to_end(&mut body);
        answer.complete = read.is_ok() && body.len() == length;
        answer.body = body;
    }
    answer
}

struct Asked {
    id: String,
    words: usize,
    is_stream: bool,
    /// Half of the requests belong to a session.
    headers: String,
    body: String,
}

enum Verdict {
    Right,
    /// An honest one, and its cause.
    Error(String),
}

/// The words of a message without what differs from one to the next.
fn cause_of(status: u16, message: &str) -> String {
    let words =
        message.split([' ', ',', ';', ':']).filter(|word| !word.contains(|letter: char| letter.is_ascii_digit()));
    format!("{status} {}", words.take(12).collect::<Vec<_>>().join(" "))
}

impl Asked {
    fn draw(random: &mut fastrand::Rng) -> Self {
        let id = format!("r{}", NEXT.fetch_add(1, Ordering::Relaxed));
        let words = if random.u8(..20) == 0 { random.usize(200..2_000) } else { random.usize(1..20) };
        let is_stream = random.bool();
        let padding = if random.u8(..20) == 0 { random.usize(1_000..300_000) } else { random.usize(..200) };
        let prompt = format!("{words} {id} {}", "x".repeat(padding));
        let body = serde_json::json!({"model": "m", "prompt": prompt, "stream": is_stream}).to_string();
        let session = random.u8(..128);
        let headers = if session < 64 { format!("X-Dynamo-Session-ID: s{session}\r\n") } else { String::new() };
        Self { id, words, is_stream, headers, body }
    }

    fn bytes(&self) -> Vec<u8> {
        request("POST", "/v1/completions", &self.headers, self.body.as_bytes())
    }

    fn verdict(&self, answer: &Answer) -> Verdict {
        match answer.status {
            200 => self.served(answer),
            429 | 500 | 502 | 503 | 504 => {
                if !answer.complete {
                    return Verdict::Error(cause_of(answer.status, "cut"));
                }
                let message = answer.json()["error"]["message"].as_str().map(str::to_owned);
                let message = message.unwrap_or_else(|| panic!("{} says nothing: {}", answer.status, answer.text()));
                Verdict::Error(cause_of(answer.status, &message))
            }
            other => panic!("{other} is no honest answer: {}", answer.text()),
        }
    }

    fn served(&self, answer: &Answer) -> Verdict {
        let mut text_of_it = answer.text();
        if !self.is_stream {
            if !answer.complete {
                return Verdict::Error(cause_of(200, "cut body"));
            }
            assert_eq!(answer.json()["text"], text(&self.id, self.words), "another request's answer");
            return Verdict::Right;
        }
        // A cut may fall into an event, whose beginning says nothing then.
        let whole = text_of_it.rfind("\n\n").map_or(0, |end| end + 2);
        if !answer.complete {
            text_of_it.truncate(whole);
        }
        let events: Vec<&str> = text_of_it.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect();
        let expected = std::iter::once(self.id.clone()).chain((0..self.words).map(|number| format!("w{number}")));
        let agreeing = events.iter().zip(expected).take_while(|(event, expected)| *event == expected).count();
        let rest = &events[agreeing..];
        if answer.complete && rest == ["[DONE]"] {
            assert_eq!(agreeing, self.words + 1, "a stream with a hole: {text_of_it}");
            return Verdict::Right;
        }
        // One error event at most, of the router or of the engine, and nothing made up behind it.
        let is_honest = match rest {
            [] => !answer.complete,
            // Cut behind its end: nothing is missing but the framing, and nothing is put behind it.
            ["[DONE]"] => !answer.complete && agreeing == self.words + 1,
            [error] => error.starts_with("{\"error\""),
            _ => false,
        };
        assert!(is_honest, "{} of {} agree, then {rest:?}; complete: {}", agreeing, self.words + 1, answer.complete);
        Verdict::Error(cause_of(200, &format!("stream {}", rest.first().unwrap_or(&"cut"))))
    }
}

/// Leaves in some way before the answer is read.
fn misbehave(mut connection: Connection, asked: &Asked, random: &mut fastrand::Rng) {
    let bytes = asked.bytes();
    match random.u8(..5) {
        // In the middle of the request.
        0 => _ = connection.reader.get_mut().write_all(&bytes[..random.usize(..bytes.len())]),
        // With garbage.
        1 => _ = connection.reader.get_mut().write_all(b"POST /v1/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n"),
        // Behind the request, with or without a reset.
        2 => {
            let _ = connection.reader.get_mut().write_all(&bytes);
            if random.bool() {
                let _ = rustix::net::sockopt::set_socket_linger(connection.stream(), Some(Duration::ZERO));
            }
        }
        // Behind the head of the answer.
        3 => {
            let _ = connection.reader.get_mut().write_all(&bytes);
            let _ = connection.head();
        }
        // After a while in which nothing is read.
        _ => {
            let _ = connection.reader.get_mut().write_all(&bytes);
            std::thread::sleep(Duration::from_millis(random.u64(..500)));
        }
    }
}

/// The request in small pieces.
fn dribble(mut stream: &TcpStream, bytes: &[u8]) -> std::io::Result<()> {
    for piece in bytes[..bytes.len().min(400)].chunks(40) {
        stream.write_all(piece)?;
        std::thread::sleep(Duration::from_millis(5));
    }
    stream.write_all(&bytes[bytes.len().min(400)..])
}
