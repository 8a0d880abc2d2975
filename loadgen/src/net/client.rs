//! Owns the client side of HTTP/1.1: connections kept for reuse, one request at a time, bodies delivered as they
//! arrive. Never parses JSON and never times anything.

use std::cell::RefCell;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use monoio::net::TcpStream;

use super::stream::{Reader, Writer, split};

const HEAD_BYTES_MAX: usize = 64 * 1024;
const HEADERS_MAX: usize = 100;
/// Connections kept idle per target.
const IDLE_MAX: usize = 16 * 1024;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Headers by which a router may say who computed the prompt: of a pair, the prefill worker.
const WORKER_HEADERS: [&str; 2] = ["x-prefill-instance-id", "x-worker-instance-id"];

/// A parsed `http://host:port[/prefix]`.
#[derive(Clone, Debug)]
pub struct Target {
    /// `host:port` as written, for the Host header.
    pub authority: String,
    /// Prepended to every path; no trailing slash.
    pub prefix: String,
    address: SocketAddr,
}

impl Target {
    /// Resolves the host; names are looked up once.
    pub fn parse(url: &str) -> Result<Target> {
        let Some(rest) = url.strip_prefix("http://") else { bail!("target {url:?} must start with http://") };
        let (authority, prefix) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let has_port = authority.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
        let with_port = if has_port { authority.to_string() } else { format!("{authority}:80") };
        let mut addresses = with_port.to_socket_addrs().with_context(|| format!("resolving {authority:?}"))?;
        let address = addresses.next().with_context(|| format!("{authority:?} has no address"))?;
        Ok(Target { authority: authority.to_string(), prefix: prefix.trim_end_matches('/').to_string(), address })
    }
}

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
}

struct Connection {
    reader: Reader,
    writer: Writer,
    input: Vec<u8>,
    used: bool,
}

/// Connections to one target, for one thread.
#[derive(Clone)]
pub struct Client {
    target: Rc<Target>,
    idle: Rc<RefCell<Vec<Connection>>>,
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

impl Client {
    pub fn new(target: Target) -> Client {
        Client { target: Rc::new(target), idle: Rc::default() }
    }

    pub fn target(&self) -> &Target {
        &self.target
    }

    /// Sends one request and gives `body` each piece of the answer's body as it arrives. A kept connection that turns
    /// out to be dead before any byte of an answer is replaced once.
    pub async fn request(
        &self,
        method: &str,
        path: &str,
        headers: &str,
        payload: &[u8],
        mut body: impl FnMut(&AnswerHead, &[u8]),
    ) -> Result<AnswerHead, ClientError> {
        let mut bytes = format!(
            "{method} {}{path} HTTP/1.1\r\nhost: {}\r\n{headers}content-length: {}\r\n\r\n",
            self.target.prefix,
            self.target.authority,
            payload.len()
        )
        .into_bytes();
        bytes.extend_from_slice(payload);
        let mut connection = self.connection(true).await?;
        loop {
            let reused = connection.used;
            connection.used = true;
            let outcome = match connection.writer.write_all(bytes.clone()).await {
                Ok(_) => connection.read_head().await,
                Err(_) => Err(ClientError::NoAnswer),
            };
            match outcome {
                Ok(head) => {
                    let reusable = connection.read_body(&head, &mut body).await?;
                    if reusable && self.idle.borrow().len() < IDLE_MAX {
                        self.idle.borrow_mut().push(connection);
                    }
                    return Ok(head);
                }
                Err(ClientError::NoAnswer) if reused && connection.input.is_empty() => {
                    connection = self.connection(false).await?;
                }
                Err(error) => return Err(error),
            }
        }
    }

    async fn connection(&self, may_reuse: bool) -> Result<Connection, ClientError> {
        if may_reuse && let Some(connection) = self.idle.borrow_mut().pop() {
            return Ok(connection);
        }
        let connecting = monoio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect_addr(self.target.address));
        let stream = match connecting.await {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) => return Err(ClientError::Connect(error.kind())),
            Err(_) => return Err(ClientError::Connect(io::ErrorKind::TimedOut)),
        };
        let (reader, writer) = split(stream).map_err(|error| ClientError::Connect(error.kind()))?;
        Ok(Connection { reader, writer, input: Vec::new(), used: false })
    }
}

impl Connection {
    async fn read_head(&mut self) -> Result<AnswerHead, ClientError> {
        loop {
            if let Some((head, length)) = parse_head(&self.input)? {
                self.input.drain(..length);
                if head.status >= 200 {
                    return Ok(head);
                }
                continue;
            }
            if self.input.len() > HEAD_BYTES_MAX {
                return Err(ClientError::Malformed);
            }
            if !matches!(self.reader.more(&mut self.input).await, Ok(1..)) {
                return Err(ClientError::NoAnswer);
            }
        }
    }

    /// Whether the connection can serve another request afterwards.
    async fn read_body(
        &mut self,
        head: &AnswerHead,
        body: &mut impl FnMut(&AnswerHead, &[u8]),
    ) -> Result<bool, ClientError> {
        match head.framing {
            Framing::Length(mut left) => {
                while left > 0 {
                    self.fill(1).await?;
                    let count = left.min(self.input.len());
                    body(head, &self.input[..count]);
                    self.input.drain(..count);
                    left -= count;
                }
            }
            Framing::Chunked => self.read_chunks(head, body).await?,
            Framing::UntilClose => {
                loop {
                    body(head, &self.input);
                    self.input.clear();
                    match self.reader.more(&mut self.input).await {
                        Ok(0) => break,
                        Ok(_) => {}
                        Err(_) => return Err(ClientError::Truncated),
                    }
                }
                return Ok(false);
            }
        }
        Ok(head.keep_alive && self.input.is_empty())
    }

    async fn read_chunks(
        &mut self,
        head: &AnswerHead,
        body: &mut impl FnMut(&AnswerHead, &[u8]),
    ) -> Result<(), ClientError> {
        loop {
            let (start, size) = loop {
                match httparse::parse_chunk_size(&self.input) {
                    Ok(httparse::Status::Complete(found)) => break found,
                    Ok(httparse::Status::Partial) => {
                        let have = self.input.len();
                        self.fill(have + 1).await?;
                    }
                    Err(_) => return Err(ClientError::Malformed),
                }
            };
            self.input.drain(..start);
            let mut left = usize::try_from(size).map_err(|_| ClientError::Malformed)?;
            if left == 0 {
                return self.skip_trailers().await;
            }
            while left > 0 {
                self.fill(1).await?;
                let count = left.min(self.input.len());
                body(head, &self.input[..count]);
                self.input.drain(..count);
                left -= count;
            }
            self.fill(2).await?;
            if &self.input[..2] != b"\r\n" {
                return Err(ClientError::Malformed);
            }
            self.input.drain(..2);
        }
    }

    async fn skip_trailers(&mut self) -> Result<(), ClientError> {
        loop {
            match self.input.windows(2).position(|pair| pair == b"\r\n") {
                Some(end) => {
                    self.input.drain(..end + 2);
                    if end == 0 {
                        return Ok(());
                    }
                }
                None if self.input.len() > HEAD_BYTES_MAX => return Err(ClientError::Malformed),
                None => {
                    let have = self.input.len();
                    self.fill(have + 1).await?;
                }
            }
        }
    }

    /// Reads until at least `count` bytes are there.
    async fn fill(&mut self, count: usize) -> Result<(), ClientError> {
        while self.input.len() < count {
            if !matches!(self.reader.more(&mut self.input).await, Ok(1..)) {
                return Err(ClientError::Truncated);
            }
        }
        Ok(())
    }
}

fn parse_head(input: &[u8]) -> Result<Option<(AnswerHead, usize)>, ClientError> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut parsed = httparse::Response::new(&mut headers);
    let length = match parsed.parse(input) {
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
