//! Owns one connection's answers while they arrive: HTTP/1.1 head and framing, bodies handed on piece by piece as they lie in
//! what was read. Never reads sockets or clocks.

use std::io;
use std::mem::MaybeUninit;
use std::ops::ControlFlow;
use std::time::Instant;

/// Largest head, and largest line of a chunk's size or a trailer.
const HEAD_BYTES_MAX: usize = 64 * 1024;
const HEADERS_MAX: usize = 100;
/// Headers by which a router may say who computed the prompt: of a pair, the prefill worker.
const WORKER_HEADERS: [&str; 2] = ["x-prefill-instance-id", "x-worker-instance-id"];

/// Why a request got no whole answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientError {
    /// No connection.
    Connect(io::ErrorKind),
    /// The connection ended before the answer's head was complete.
    NoAnswer,
    /// The connection ended within the answer's body.
    Truncated,
    /// The answer is not HTTP/1.1 as we know it.
    Malformed,
    /// Whoever was given the body broke off.
    Left,
}

/// The head of an answer.
#[derive(Clone, Debug, Default)]
pub struct AnswerHead {
    pub status: u16,
    pub event_stream: bool,
    /// Value of the first of [`WORKER_HEADERS`] that the answer has.
    pub worker: Option<String>,
    keep_alive: bool,
    framing: Framing,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Framing {
    #[default]
    UntilClose,
    Length(usize),
    Chunked,
}

/// Who is given the body of an answer.
pub trait Sink {
    /// Takes the next piece; `at` is when the read that brought it returned. After a break nothing more comes.
    fn take(&mut self, head: &AnswerHead, bytes: &[u8], at: Instant) -> ControlFlow<()>;
}

impl Sink for Vec<u8> {
    fn take(&mut self, _head: &AnswerHead, bytes: &[u8], _at: Instant) -> ControlFlow<()> {
        self.extend_from_slice(bytes);
        ControlFlow::Continue(())
    }
}

/// Where an answer is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Part {
    #[default]
    Head,
    /// A body of known length, or one of a chunk with its line end.
    Piece {
        left: usize,
        is_chunk: bool,
    },
    ChunkSize,
    ChunkEnd,
    Trailers,
    UntilClose,
    Over(Result<(), ClientError>),
}

/// One answer at a time.
#[derive(Default)]
pub struct Response {
    part: Part,
    head: AnswerHead,
    /// What has arrived of something that must be seen as a whole.
    held: Vec<u8>,
    /// Whether anything has arrived.
    is_begun: bool,
    /// More has arrived than the answer.
    has_surplus: bool,
}

impl Response {
    /// Makes room for the next answer.
    pub fn begin(&mut self) {
        self.held.clear();
        *self = Response { held: std::mem::take(&mut self.held), ..Response::default() };
    }

    pub fn is_begun(&self) -> bool {
        self.is_begun
    }

    pub fn is_over(&self) -> bool {
        matches!(self.part, Part::Over(_))
    }

    /// The answer's head once it is over, and whether its connection can serve another request.
    pub fn outcome(&mut self) -> Option<Result<(AnswerHead, bool), ClientError>> {
        let Part::Over(result) = self.part else { return None };
        let head = std::mem::take(&mut self.head);
        let is_framed = head.framing != Framing::UntilClose;
        Some(result.map(|()| {
            let is_reusable = head.keep_alive && is_framed && !self.has_surplus;
            (head, is_reusable)
        }))
    }

    /// Takes what one read brought.
    pub fn arrived(&mut self, bytes: &[u8], at: Instant, sink: &mut dyn Sink) {
        self.is_begun = true;
        if self.held.is_empty() {
            let used = self.advance(bytes, at, sink);
            self.held.extend_from_slice(&bytes[used..]);
        } else {
            let mut held = std::mem::take(&mut self.held);
            held.extend_from_slice(bytes);
            let used = self.advance(&held, at, sink);
            held.drain(..used);
            self.held = held;
        }
        if self.is_over() {
            self.has_surplus |= !self.held.is_empty();
        } else if self.held.len() > HEAD_BYTES_MAX {
            self.part = Part::Over(Err(ClientError::Malformed));
        }
    }

    /// The connection has ended, with an error or without.
    pub fn ended(&mut self, is_error: bool) {
        let result = match self.part {
            Part::Over(_) => return,
            Part::Head => Err(ClientError::NoAnswer),
            Part::UntilClose if !is_error => Ok(()),
            _ => Err(ClientError::Truncated),
        };
        self.part = Part::Over(result);
    }

    /// Goes as far as the bytes allow; how many are used up.
    fn advance(&mut self, bytes: &[u8], at: Instant, sink: &mut dyn Sink) -> usize {
        let mut used = 0;
        loop {
            match self.step(&bytes[used..], at, sink) {
                Ok(Some(count)) => used += count,
                Ok(None) => return used,
                Err(error) => self.part = Part::Over(Err(error)),
            }
        }
    }

    /// One part; how many bytes it took, nothing when it needs more than there are.
    fn step(&mut self, rest: &[u8], at: Instant, sink: &mut dyn Sink) -> Result<Option<usize>, ClientError> {
        match self.part {
            Part::Head => {
                let Some((head, length)) = parse_head(rest)? else { return Ok(None) };
                if head.status >= 200 {
                    self.part = match head.framing {
                        Framing::Length(0) => Part::Over(Ok(())),
                        Framing::Length(left) => Part::Piece { left, is_chunk: false },
                        Framing::Chunked => Part::ChunkSize,
                        Framing::UntilClose => Part::UntilClose,
                    };
                    self.head = head;
                }
                Ok(Some(length))
            }
            Part::ChunkSize => match httparse::parse_chunk_size(rest) {
                Ok(httparse::Status::Complete((length, size))) => {
                    let left = usize::try_from(size).map_err(|_| ClientError::Malformed)?;
                    self.part = if left == 0 { Part::Trailers } else { Part::Piece { left, is_chunk: true } };
                    Ok(Some(length))
                }
                Ok(httparse::Status::Partial) => Ok(None),
                Err(_) => Err(ClientError::Malformed),
            },
            Part::Piece { left, is_chunk } => {
                let count = left.min(rest.len());
                if count == 0 {
                    return Ok(None);
                }
                self.part = match (left - count, is_chunk) {
                    (0, true) => Part::ChunkEnd,
                    (0, false) => Part::Over(Ok(())),
                    (left, _) => Part::Piece { left, is_chunk },
                };
                self.hand_on(&rest[..count], at, sink)
            }
            Part::ChunkEnd => match rest {
                [b'\r', b'\n', ..] => {
                    self.part = Part::ChunkSize;
                    Ok(Some(2))
                }
                [] | [b'\r'] => Ok(None),
                _ => Err(ClientError::Malformed),
            },
            Part::Trailers => {
                let Some(end) = memchr::memmem::find(rest, b"\r\n") else { return Ok(None) };
                if end == 0 {
                    self.part = Part::Over(Ok(()));
                }
                Ok(Some(end + 2))
            }
            Part::UntilClose if !rest.is_empty() => self.hand_on(rest, at, sink),
            Part::UntilClose | Part::Over(_) => Ok(None),
        }
    }

    fn hand_on(&self, piece: &[u8], at: Instant, sink: &mut dyn Sink) -> Result<Option<usize>, ClientError> {
        match sink.take(&self.head, piece, at) {
            ControlFlow::Continue(()) => Ok(Some(piece.len())),
            ControlFlow::Break(()) => Err(ClientError::Left),
        }
    }
}

fn parse_head(input: &[u8]) -> Result<Option<(AnswerHead, usize)>, ClientError> {
    let mut headers = [const { MaybeUninit::uninit() }; HEADERS_MAX];
    let mut parsed = httparse::Response::new(&mut []);
    let config = httparse::ParserConfig::default();
    let length = match config.parse_response_with_uninit_headers(&mut parsed, input, &mut headers) {
        Ok(httparse::Status::Complete(length)) => length,
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(_) => return Err(ClientError::Malformed),
    };
    let mut head =
        AnswerHead { status: parsed.code.unwrap_or(0), keep_alive: parsed.version == Some(1), ..AnswerHead::default() };
    let mut worker_rank = WORKER_HEADERS.len();
    for header in parsed.headers.iter() {
        let text = std::str::from_utf8(header.value).unwrap_or("").trim();
        if header.name.eq_ignore_ascii_case("content-length") {
            if head.framing != Framing::Chunked {
                head.framing = Framing::Length(text.parse().map_err(|_| ClientError::Malformed)?);
            }
        } else if header.name.eq_ignore_ascii_case("transfer-encoding") {
            if !text.eq_ignore_ascii_case("chunked") {
                return Err(ClientError::Malformed);
            }
            head.framing = Framing::Chunked;
        } else if header.name.eq_ignore_ascii_case("connection") {
            head.keep_alive &= !text.eq_ignore_ascii_case("close");
        } else if header.name.eq_ignore_ascii_case("content-type") {
            head.event_stream = text.starts_with("text/event-stream");
        } else if let Some(rank) = WORKER_HEADERS.iter().position(|name| header.name.eq_ignore_ascii_case(name))
            && rank < worker_rank
        {
            (head.worker, worker_rank) = (Some(text.to_owned()), rank);
        }
    }
    if matches!(head.status, 204 | 304) {
        head.framing = Framing::Length(0);
    }
    Ok(Some((head, length)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Everything that came of the bytes, read in these pieces: body, and the outcome after the connection's end.
    fn read(pieces: &[&[u8]]) -> (Vec<u8>, Result<(u16, bool), ClientError>) {
        let (mut response, mut body) = (Response::default(), Vec::new());
        response.begin();
        for piece in pieces {
            response.arrived(piece, Instant::now(), &mut body);
        }
        response.ended(false);
        let outcome = response.outcome().expect("over at the end of the connection");
        (body, outcome.map(|(head, is_reusable)| (head.status, is_reusable)))
    }

    fn check(text: &str, body: &str, outcome: Result<(u16, bool), ClientError>) {
        let (bytes, expected) = (text.as_bytes(), (body.as_bytes().to_vec(), outcome));
        for cut in 0..=bytes.len() {
            assert_eq!(read(&[&bytes[..cut], &bytes[cut..]]), expected, "cut at {cut}: {text:?}");
        }
        let single: Vec<&[u8]> = bytes.chunks(1).collect();
        assert_eq!(read(&single), expected, "byte by byte: {text:?}");
    }

    #[test]
    fn answers_may_be_cut_anywhere() {
        let chunked = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
        check("HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc", "abc", Ok((200, true)));
        check("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No\r\n\r\n", "", Ok((204, true)));
        check("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 1\r\n\r\na", "a", Ok((200, false)));
        check("HTTP/1.1 502 Bad\r\n\r\nuntil the end", "until the end", Ok((502, false)));
        check(&format!("{chunked}2\r\nab\r\n3;x=y\r\ncde\r\n0\r\n\r\n"), "abcde", Ok((200, true)));
        check(&format!("{chunked}1\r\na\r\n0\r\nx: y\r\nz: \r\n\r\n"), "a", Ok((200, true)));
        check(&format!("{chunked}1\r\na\r\n0\r\n\r\nmore"), "a", Ok((200, false)));
    }

    #[test]
    fn what_is_no_whole_answer_says_why() {
        let chunked = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
        check("", "", Err(ClientError::NoAnswer));
        check("HTTP/1.1 200 OK\r\ncontent-le", "", Err(ClientError::NoAnswer));
        check("HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nab", "ab", Err(ClientError::Truncated));
        check(&format!("{chunked}3\r\nabc\r\n"), "abc", Err(ClientError::Truncated));
        check(&format!("{chunked}3\r\nabcd\r\n"), "abc", Err(ClientError::Malformed));
        check(&format!("{chunked}x\r\n"), "", Err(ClientError::Malformed));
        check("220 mail.example ESMTP\r\n", "", Err(ClientError::Malformed));
        check("HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n", "", Err(ClientError::Malformed));
        let endless = format!("HTTP/1.1 200 OK\r\nx: {}", "y".repeat(HEAD_BYTES_MAX));
        assert_eq!(read(&[endless.as_bytes()]).1, Err(ClientError::Malformed));
        let mut response = Response::default();
        let mut body = Vec::new();
        response.arrived(b"HTTP/1.1 200 OK\r\n\r\nabc", Instant::now(), &mut body);
        response.ended(true);
        assert_eq!(response.outcome().unwrap().err(), Some(ClientError::Truncated), "an error is no end");
    }

    #[test]
    fn whoever_leaves_gets_nothing_more() {
        struct Leaves(usize);
        impl Sink for Leaves {
            fn take(&mut self, _: &AnswerHead, _: &[u8], _: Instant) -> ControlFlow<()> {
                self.0 += 1;
                ControlFlow::Break(())
            }
        }
        let (mut response, mut leaves) = (Response::default(), Leaves(0));
        let text = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n1\r\nb\r\n";
        response.arrived(text, Instant::now(), &mut leaves);
        response.arrived(b"1\r\nc\r\n", Instant::now(), &mut leaves);
        assert_eq!((response.outcome().unwrap().err(), leaves.0), (Some(ClientError::Left), 1));
    }

    #[test]
    fn the_prefill_worker_goes_before_the_other() {
        let text = "HTTP/1.1 200 OK\r\nx-worker-instance-id: d\r\nX-Prefill-Instance-Id: p\r\n\
                    content-type: text/event-stream; charset=utf-8\r\n\r\n";
        let (head, length) = parse_head(text.as_bytes()).unwrap().unwrap();
        assert_eq!((head.worker.as_deref(), head.event_stream, length), (Some("p"), true, text.len()));
    }
}
