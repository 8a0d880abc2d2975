//! Owns the client side of HTTP/1.1: connections kept for reuse, one request at a time, bodies delivered as they
//! arrive. Never parses JSON and never times anything.

use std::cell::RefCell;
use std::io;
use std::mem::MaybeUninit;
use std::net::{SocketAddr, ToSocketAddrs};
use std::ops::ControlFlow;
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use monoio::net::TcpStream;
use rustix::net::sockopt;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::input::Input;
use super::stream::{Reader, Writer, split, split_reading};

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
    /// Whoever was given the body broke off.
    Left,
}

/// How a client reads that does not keep up: pieces with pauses, and little room in the kernel for what it has not read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Trickle {
    pub bytes: usize,
    pub every: Duration,
}

impl Default for Trickle {
    /// Some 5 kB a second.
    fn default() -> Trickle {
        Trickle { bytes: 512, every: Duration::from_millis(100) }
    }
}

struct Connection {
    reader: Reader,
    writer: Writer,
    input: Input,
    /// The request that was written last; its room serves the next one.
    output: Vec<u8>,
    used: bool,
    /// A connection that reads slowly serves one request.
    trickle: Option<Trickle>,
}

/// Connections to one target, for one thread.
#[derive(Clone)]
pub struct Client {
    target: Rc<Target>,
    #[expect(clippy::vec_box, reason = "a connection goes through many hands with every request")]
    idle: Rc<RefCell<Vec<Box<Connection>>>>,
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

    /// Sends one request and gives `body` each piece of the answer's body as it arrives, until it breaks off: then the
    /// connection is closed. A kept connection that turns out to be dead before any byte of an answer is replaced once.
    pub async fn request(
        &self,
        method: &str,
        path: &str,
        headers: &str,
        payload: &[u8],
        body: impl FnMut(&AnswerHead, &[u8]) -> ControlFlow<()>,
    ) -> Result<AnswerHead, ClientError> {
        let connection = self.connection(true).await?;
        self.exchange(connection, Outgoing { method, path, headers, payload }, body).await
    }

    /// The same by a client that reads slowly, on a connection of its own.
    pub async fn request_slowly(
        &self,
        path: &str,
        headers: &str,
        payload: &[u8],
        trickle: Trickle,
        body: impl FnMut(&AnswerHead, &[u8]) -> ControlFlow<()>,
    ) -> Result<AnswerHead, ClientError> {
        let stream = connect_narrow(self.target.address, trickle.bytes).await?;
        let connection = Connection::new(stream, Some(trickle))?;
        self.exchange(connection, Outgoing { method: "POST", path, headers, payload }, body).await
    }

    async fn exchange(
        &self,
        mut connection: Box<Connection>,
        outgoing: Outgoing<'_>,
        mut body: impl FnMut(&AnswerHead, &[u8]) -> ControlFlow<()>,
    ) -> Result<AnswerHead, ClientError> {
        outgoing.write(&self.target, &mut connection.output);
        loop {
            let reused = std::mem::replace(&mut connection.used, true);
            let (written, output) = connection.writer.write_kept(std::mem::take(&mut connection.output)).await;
            connection.output = output;
            let outcome = match written {
                Ok(()) => connection.read_head().await,
                Err(_) => Err(ClientError::NoAnswer),
            };
            match outcome {
                Ok(head) => {
                    let reusable = connection.read_body(&head, &mut body).await?;
                    if reusable && connection.trickle.is_none() && self.idle.borrow().len() < IDLE_MAX {
                        self.idle.borrow_mut().push(connection);
                    }
                    return Ok(head);
                }
                Err(ClientError::NoAnswer) if reused && connection.input.is_empty() => {
                    let output = std::mem::take(&mut connection.output);
                    connection = self.connection(false).await?;
                    connection.output = output;
                }
                Err(error) => return Err(error),
            }
        }
    }

    async fn connection(&self, may_reuse: bool) -> Result<Box<Connection>, ClientError> {
        if may_reuse && let Some(connection) = self.idle.borrow_mut().pop() {
            return Ok(connection);
        }
        let connecting = monoio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect_addr(self.target.address));
        match connecting.await {
            Ok(Ok(stream)) => Connection::new(stream, None),
            Ok(Err(error)) => Err(ClientError::Connect(error.kind())),
            Err(_) => Err(ClientError::Connect(io::ErrorKind::TimedOut)),
        }
    }
}

/// Connects with room for so many unread bytes in the kernel (which takes at least some 2 kB): the window must be small
/// before the peer is told of it. A thread waits for the connection, as nothing else offers that.
async fn connect_narrow(address: SocketAddr, receive_bytes: usize) -> Result<TcpStream, ClientError> {
    let (done, connected) = async_channel::bounded(1);
    let connect = move || -> io::Result<std::net::TcpStream> {
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let socket = rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        sockopt::set_socket_recv_buffer_size(&socket, receive_bytes)?;
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(CONNECT_TIMEOUT))?;
        rustix::net::connect(&socket, &address)?;
        Ok(socket.into())
    };
    let refused = |error: io::Error| ClientError::Connect(error.kind());
    // Nobody waits for a connection any more whose receiver is gone.
    let thread = std::thread::Builder::new().name("connect".into());
    thread.spawn(move || drop(done.try_send(connect()))).map_err(refused)?;
    let stream = connected.recv().await.map_err(|_| ClientError::Connect(io::ErrorKind::Other))?.map_err(refused)?;
    // With epoll a blocking socket would stop the thread.
    stream.set_nonblocking(monoio::utils::is_legacy()).map_err(refused)?;
    TcpStream::from_std(stream).map_err(refused)
}

/// One request as it is asked for.
struct Outgoing<'a> {
    method: &'a str,
    path: &'a str,
    headers: &'a str,
    payload: &'a [u8],
}

impl Outgoing<'_> {
    fn write(&self, target: &Target, out: &mut Vec<u8>) {
        out.clear();
        out.reserve(self.payload.len() + self.headers.len() + 256);
        let length = self.payload.len().to_string();
        let parts = [self.method, " ", &target.prefix, self.path, " HTTP/1.1\r\nhost: ", &target.authority, "\r\n"];
        let rest = [self.headers, "content-length: ", &length, "\r\n\r\n"];
        parts.iter().chain(&rest).for_each(|part| out.extend_from_slice(part.as_bytes()));
        out.extend_from_slice(self.payload);
    }
}

impl Connection {
    fn new(stream: TcpStream, trickle: Option<Trickle>) -> Result<Box<Connection>, ClientError> {
        let halves = match trickle {
            Some(trickle) => split_reading(stream, trickle.bytes),
            None => split(stream),
        };
        let (reader, writer) = halves.map_err(|error| ClientError::Connect(error.kind()))?;
        let (input, output) = (Input::default(), Vec::new());
        Ok(Box::new(Connection { reader, writer, input, output, used: false, trickle }))
    }

    /// Reads what there is; 0 = the peer closed its side.
    async fn more(&mut self) -> io::Result<usize> {
        if let Some(trickle) = self.trickle {
            monoio::time::sleep(trickle.every).await;
        }
        self.reader.more(self.input.buffer()).await
    }

    async fn read_head(&mut self) -> Result<AnswerHead, ClientError> {
        loop {
            if let Some((head, length)) = parse_head(self.input.rest())? {
                self.input.take(length);
                if head.status >= 200 {
                    return Ok(head);
                }
                continue;
            }
            if self.input.len() > HEAD_BYTES_MAX {
                return Err(ClientError::Malformed);
            }
            if !matches!(self.more().await, Ok(1..)) {
                return Err(ClientError::NoAnswer);
            }
        }
    }

    /// Whether the connection can serve another request afterwards.
    async fn read_body(
        &mut self,
        head: &AnswerHead,
        body: &mut impl FnMut(&AnswerHead, &[u8]) -> ControlFlow<()>,
    ) -> Result<bool, ClientError> {
        match head.framing {
            Framing::Length(length) => self.read_piece(length, head, body).await?,
            Framing::Chunked => self.read_chunks(head, body).await?,
            Framing::UntilClose => {
                loop {
                    let flow = body(head, self.input.rest());
                    self.input.take(self.input.len());
                    if flow.is_break() {
                        return Err(ClientError::Left);
                    }
                    match self.more().await {
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

    /// Hands on so many bytes as they arrive.
    async fn read_piece(
        &mut self,
        mut left: usize,
        head: &AnswerHead,
        body: &mut impl FnMut(&AnswerHead, &[u8]) -> ControlFlow<()>,
    ) -> Result<(), ClientError> {
        while left > 0 {
            self.fill(1).await?;
            let count = left.min(self.input.len());
            let flow = body(head, &self.input.rest()[..count]);
            self.input.take(count);
            left -= count;
            if flow.is_break() {
                return Err(ClientError::Left);
            }
        }
        Ok(())
    }

    async fn read_chunks(
        &mut self,
        head: &AnswerHead,
        body: &mut impl FnMut(&AnswerHead, &[u8]) -> ControlFlow<()>,
    ) -> Result<(), ClientError> {
        loop {
            let (start, size) = loop {
                match httparse::parse_chunk_size(self.input.rest()) {
                    Ok(httparse::Status::Complete(found)) => break found,
                    Ok(httparse::Status::Partial) => {
                        let have = self.input.len();
                        self.fill(have + 1).await?;
                    }
                    Err(_) => return Err(ClientError::Malformed),
                }
            };
            self.input.take(start);
            let size = usize::try_from(size).map_err(|_| ClientError::Malformed)?;
            if size == 0 {
                return self.skip_trailers().await;
            }
            self.read_piece(size, head, body).await?;
            self.fill(2).await?;
            if &self.input.rest()[..2] != b"\r\n" {
                return Err(ClientError::Malformed);
            }
            self.input.take(2);
        }
    }

    async fn skip_trailers(&mut self) -> Result<(), ClientError> {
        loop {
            match self.input.rest().windows(2).position(|pair| pair == b"\r\n") {
                Some(end) => {
                    self.input.take(end + 2);
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
            if !matches!(self.more().await, Ok(1..)) {
                return Err(ClientError::Truncated);
            }
        }
        Ok(())
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
