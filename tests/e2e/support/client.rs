//! A raw HTTP/1.1 client that hides nothing: bytes out, bytes in.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};

use serde_json::Value;

use super::PATIENCE;

/// One answer.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    /// Names in lower case.
    pub headers: Vec<(String, String)>,
    /// De-chunked.
    pub body: Vec<u8>,
    /// The message ended as its framing says; `false` for a cut one.
    pub complete: bool,
}

impl Answer {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }
}

/// A keep-alive connection.
pub struct Connection {
    pub reader: BufReader<TcpStream>,
}

impl Connection {
    pub fn open(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).expect("connect");
        stream.set_read_timeout(Some(PATIENCE)).expect("timeout");
        stream.set_nodelay(true).expect("nodelay");
        Self { reader: BufReader::new(stream) }
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.reader.get_mut().write_all(bytes).expect("write");
    }

    pub fn stream(&self) -> &TcpStream {
        self.reader.get_ref()
    }

    /// Reads status line and headers.
    pub fn head(&mut self) -> std::io::Result<(u16, Vec<(String, String)>)> {
        let status_line = self.line()?;
        let status = status_line.split(' ').nth(1).and_then(|code| code.parse().ok());
        let Some(status) = status else {
            return Err(std::io::Error::other(format!("not a status line: {status_line:?}")));
        };
        let mut headers = Vec::new();
        loop {
            let line = self.line()?;
            if line.is_empty() {
                return Ok((status, headers));
            }
            let (name, value) = line.split_once(':').expect("a header has a colon");
            headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
    }

    fn line(&mut self) -> std::io::Result<String> {
        let mut line = String::new();
        if self.reader.read_line(&mut line)? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        Ok(line.trim_end_matches(['\r', '\n']).to_owned())
    }

    /// One chunk's payload; nothing at the final chunk.
    pub fn chunk(&mut self) -> std::io::Result<Option<Vec<u8>>> {
        let size_line = self.line()?;
        let size = usize::from_str_radix(size_line.split(';').next().unwrap_or_default().trim(), 16)
            .map_err(|_| std::io::Error::other(format!("not a chunk size: {size_line:?}")))?;
        let mut payload = vec![0; size];
        self.reader.read_exact(&mut payload)?;
        self.line()?;
        Ok((size > 0).then_some(payload))
    }

    /// Reads a whole answer to a request with `method`.
    pub fn answer(&mut self, method: &str) -> Answer {
        let (status, headers) = self.head().expect("an answer's head");
        let mut answer = Answer { status, headers, body: Vec::new(), complete: true };
        if method == "HEAD" || status == 204 || status == 304 {
            return answer;
        }
        if answer.header("transfer-encoding").is_some_and(|coding| coding.eq_ignore_ascii_case("chunked")) {
            loop {
                match self.chunk() {
                    Ok(Some(payload)) => answer.body.extend(payload),
                    Ok(None) => break,
                    Err(_) => {
                        answer.complete = false;
                        break;
                    }
                }
            }
        } else if let Some(length) = answer.header("content-length").and_then(|length| length.parse().ok()) {
            answer.body = vec![0; length];
            let mut filled = 0;
            while filled < length {
                match self.reader.read(&mut answer.body[filled..]) {
                    Ok(0) | Err(_) => break,
                    Ok(count) => filled += count,
                }
            }
            answer.complete = filled == length;
            answer.body.truncate(filled);
        } else {
            answer.complete = self.reader.read_to_end(&mut answer.body).is_ok();
        }
        answer
    }
}

pub fn request(method: &str, path: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let mut bytes = format!("{method} {path} HTTP/1.1\r\nHost: test\r\n{headers}").into_bytes();
    if !body.is_empty() || method == "POST" {
        bytes.extend(format!("Content-Type: application/json\r\nContent-Length: {}\r\n", body.len()).bytes());
    }
    bytes.extend(b"\r\n");
    bytes.extend(body);
    bytes
}

pub fn exchange(address: SocketAddr, method: &str, path: &str, headers: &str, body: &[u8]) -> Answer {
    let mut connection = Connection::open(address);
    connection.send(&request(method, path, headers, body));
    connection.answer(method)
}

pub fn get(address: SocketAddr, path: &str) -> Answer {
    exchange(address, "GET", path, "", b"")
}

pub fn post(address: SocketAddr, path: &str, body: &str) -> Answer {
    exchange(address, "POST", path, "", body.as_bytes())
}
