//! HTTP/1.1 framing for both ends of a measurement: heads by `httparse`, bodies by a split-safe reader.
//!
//! Owns the knowledge of where a message ends. Never touches a socket.

use anyhow::{Result, bail, ensure};

/// Largest message head that either end accepts, bytes.
pub const HEAD_BYTES_MAX: usize = 32 << 10;

/// Headers of one head.
const HEADERS_MAX: usize = 64;

/// How the end of a body is known (RFC 9112, section 6.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    Length(u64),
    Chunked,
    UntilClose,
}

/// What the harness must know of a response head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResponseHead {
    pub status: u16,
    pub framing: Framing,
    /// The peer ends the connection after this message.
    pub close: bool,
    /// Bytes of the head, its empty line included.
    pub bytes: usize,
}

/// What the backend must know of a request head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHead<'a> {
    pub method: &'a str,
    pub path: &'a str,
    pub framing: Framing,
    pub close: bool,
    pub bytes: usize,
}

/// `None` while the head is incomplete.
pub fn response_head(input: &[u8]) -> Result<Option<ResponseHead>> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut response = httparse::Response::new(&mut headers);
    let httparse::Status::Complete(bytes) = response.parse(input)? else {
        ensure!(input.len() <= HEAD_BYTES_MAX, "response head over {HEAD_BYTES_MAX} bytes");
        return Ok(None);
    };
    let status = response.code.unwrap_or(0);
    let no_body = matches!(status, 100..=199 | 204 | 304);
    let default = if no_body { Framing::Length(0) } else { Framing::UntilClose };
    let (framing, close) = framing(response.headers, default)?;
    Ok(Some(ResponseHead { status, framing, close, bytes }))
}

/// `None` while the head is incomplete.
pub fn request_head(input: &[u8]) -> Result<Option<RequestHead<'_>>> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut request = httparse::Request::new(&mut headers);
    let httparse::Status::Complete(bytes) = request.parse(input)? else {
        ensure!(input.len() <= HEAD_BYTES_MAX, "request head over {HEAD_BYTES_MAX} bytes");
        return Ok(None);
    };
    let (framing, close) = framing(request.headers, Framing::Length(0))?;
    let (method, path) = (request.method.unwrap_or(""), request.path.unwrap_or(""));
    Ok(Some(RequestHead { method, path, framing, close, bytes }))
}

fn framing(headers: &[httparse::Header<'_>], default: Framing) -> Result<(Framing, bool)> {
    let mut framing = default;
    let mut close = false;
    for header in headers {
        if header.name.eq_ignore_ascii_case("content-length") {
            framing = Framing::Length(std::str::from_utf8(header.value)?.trim().parse()?);
        } else if header.name.eq_ignore_ascii_case("transfer-encoding") {
            ensure!(header.value.eq_ignore_ascii_case(b"chunked"), "unknown transfer coding");
            framing = Framing::Chunked;
        } else if header.name.eq_ignore_ascii_case("connection") {
            close = header.value.eq_ignore_ascii_case(b"close");
        }
    }
    Ok((framing, close || framing == Framing::UntilClose))
}

/// Follows one body over any split of its bytes and hands out the payload without its framing.
#[derive(Clone, Debug)]
pub struct BodyReader {
    state: State,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    Length(u64),
    UntilClose,
    Size {
        value: u64,
        digits: u8,
    },
    Extension {
        value: u64,
    },
    Data(u64),
    /// Bytes of the CRLF after a chunk still to come.
    DataEnd(u8),
    /// In the trailer section; the length of the current line without CR.
    Trailer(usize),
    Done,
}

impl BodyReader {
    pub fn new(framing: Framing) -> BodyReader {
        let state = match framing {
            Framing::Length(0) => State::Done,
            Framing::Length(length) => State::Length(length),
            Framing::UntilClose => State::UntilClose,
            Framing::Chunked => State::Size { value: 0, digits: 0 },
        };
        BodyReader { state }
    }

    pub fn done(&self) -> bool {
        self.state == State::Done
    }

    /// Takes what belongs to this body from the front of `input`; returns how many bytes that were. Fewer
    /// than all means that the body is over and the rest belongs to the next message.
    pub fn push(&mut self, input: &[u8], mut payload: impl FnMut(&[u8]) -> Result<()>) -> Result<usize> {
        let mut used = 0;
        while used < input.len() && !self.done() {
            used += self.step(&input[used..], &mut payload)?;
        }
        Ok(used)
    }

    /// One run of payload or one byte of framing.
    fn step(&mut self, rest: &[u8], payload: &mut impl FnMut(&[u8]) -> Result<()>) -> Result<usize> {
        let byte = rest[0];
        match &mut self.state {
            State::Length(left) | State::Data(left) => {
                let run = rest.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
                payload(&rest[..run])?;
                *left -= run as u64;
                if *left == 0 {
                    self.state = if matches!(self.state, State::Data(_)) { State::DataEnd(2) } else { State::Done };
                }
                return Ok(run);
            }
            State::UntilClose => {
                payload(rest)?;
                return Ok(rest.len());
            }
            State::Size { value, digits } => match (byte as char).to_digit(16) {
                Some(digit) => {
                    ensure!(*digits < 15, "chunk size too long");
                    *value = *value * 16 + u64::from(digit);
                    *digits += 1;
                }
                None => {
                    ensure!(*digits > 0 && matches!(byte, b'\r' | b';' | b' '), "malformed chunk size");
                    self.state = State::Extension { value: *value };
                }
            },
            State::Extension { value } => {
                if byte == b'\n' {
                    self.state = if *value == 0 { State::Trailer(0) } else { State::Data(*value) };
                }
            }
            State::DataEnd(left) => {
                ensure!(byte == if *left == 2 { b'\r' } else { b'\n' }, "chunk without its line end");
                *left -= 1;
                if *left == 0 {
                    self.state = State::Size { value: 0, digits: 0 };
                }
            }
            State::Trailer(length) => match byte {
                b'\n' if *length == 0 => self.state = State::Done,
                b'\n' => *length = 0,
                b'\r' => {}
                _ => *length += 1,
            },
            State::Done => bail!("bytes after the end of a body"),
        }
        Ok(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn payload_of(framing: Framing, pieces: &[&[u8]]) -> (Vec<u8>, usize, bool) {
        let mut reader = BodyReader::new(framing);
        let (mut payload, mut used) = (Vec::new(), 0);
        for piece in pieces {
            used += reader
                .push(piece, |data| {
                    payload.extend_from_slice(data);
                    Ok(())
                })
                .unwrap();
        }
        (payload, used, reader.done())
    }

    fn check(framing: Framing, input: &[u8], payload: &[u8], used: usize, done: bool) {
        let expected = (payload.to_vec(), used, done);
        assert_eq!(payload_of(framing, &[input]), expected);
        for cut in 0..=input.len() {
            assert_eq!(payload_of(framing, &[&input[..cut], &input[cut..]]), expected, "cut at {cut}");
        }
        let bytes: Vec<&[u8]> = input.chunks(1).collect();
        assert_eq!(payload_of(framing, &bytes), expected, "byte by byte");
    }

    #[test]
    fn bodies_agree_at_every_cut() {
        check(Framing::Length(5), b"helloHTTP", b"hello", 5, true);
        check(Framing::Length(5), b"hel", b"hel", 3, false);
        check(Framing::Chunked, b"5\r\nhello\r\n1;x=y\r\n!\r\n0\r\n\r\nHTTP", b"hello!", 25, true);
        check(Framing::Chunked, b"A\r\n0123456789\r\n0\r\nT: v\r\n\r\n", b"0123456789", 26, true);
        check(Framing::Chunked, b"5\r\nhello\r\n0\r\n", b"hello", 13, false);
        check(Framing::UntilClose, b"anything", b"anything", 8, false);
    }

    #[test]
    fn broken_chunks_are_refused() {
        for input in [&b"\r\n"[..], b"x\r\n", b"3\r\nabcd\r\n", b"1234567890abcdef0\r\n"] {
            assert!(BodyReader::new(Framing::Chunked).push(input, |_| Ok(())).is_err(), "{input:?}");
        }
    }

    #[test]
    fn heads() {
        let head = response_head(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc").unwrap().unwrap();
        assert_eq!(head, ResponseHead { status: 200, framing: Framing::Length(3), close: false, bytes: 38 });
        assert!(response_head(b"HTTP/1.1 200 OK\r\nContent-Le").unwrap().is_none());
        let head = response_head(b"HTTP/1.1 200 OK\r\n\r\n").unwrap().unwrap();
        assert_eq!((head.framing, head.close), (Framing::UntilClose, true));
        let head = request_head(b"POST /v1 HTTP/1.1\r\ntransfer-encoding: chunked\r\nConnection: close\r\n\r\n");
        let head = head.unwrap().unwrap();
        assert_eq!((head.method, head.path, head.framing, head.close), ("POST", "/v1", Framing::Chunked, true));
    }
}
