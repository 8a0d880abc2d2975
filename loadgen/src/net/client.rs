//! Owns the client side of HTTP/1.1: requests as bytes, one at a time on connections that are kept for reuse. Never parses
//! JSON and never reads by itself.

use std::cell::{Cell, RefCell};
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::arrivals::{Arrivals, Haste, Link};
pub use super::response::{AnswerHead, ClientError, Sink};

/// Connections kept idle per target.
const IDLE_MAX: usize = 16 * 1024;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

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

/// Connections to one target, for one thread.
#[derive(Clone)]
pub struct Client {
    target: Rc<Target>,
    arrivals: Arrivals,
    idle: Rc<RefCell<Vec<Rc<Link>>>>,
    /// Room for a request that is being written; while one is sent in parts, others have none.
    output: Rc<Cell<Vec<u8>>>,
}

/// One request as it is asked for. Headers are whole lines.
#[derive(Clone, Copy, Debug)]
pub struct Outgoing<'a> {
    pub method: &'a str,
    pub path: &'a str,
    pub headers: &'a str,
    pub payload: &'a [u8],
}

impl Client {
    /// Begins on this thread's runtime; to be ended with [`Client::close`].
    pub fn new(target: Target) -> Result<Client> {
        let arrivals = Arrivals::start()?;
        Ok(Client { target: Rc::new(target), arrivals, idle: Rc::default(), output: Rc::default() })
    }

    pub fn target(&self) -> &Target {
        &self.target
    }

    /// Leaves nothing in flight. No request may be under way, and none can follow.
    pub async fn close(&self) {
        self.arrivals.stop().await;
    }

    /// Sends one request and gives `sink` each piece of the answer's body as it arrives, until it breaks off: then the
    /// connection is closed. A kept connection that turns out to be dead before any byte of an answer is replaced once.
    pub async fn request(
        &self,
        outgoing: Outgoing<'_>,
        sink: Rc<RefCell<dyn Sink>>,
    ) -> Result<AnswerHead, ClientError> {
        if let Some(kept) = self.kept() {
            match self.exchange(&kept, outgoing, sink.clone()).await {
                Err(ClientError::NoAnswer) if !kept.has_answer_begun() => {}
                outcome => return self.keep(kept, outcome),
            }
        }
        let link = self.connect(Haste::AtOnce).await?;
        let outcome = self.exchange(&link, outgoing, sink).await;
        self.keep(link, outcome)
    }

    /// The same by a client that reads slowly, on a connection of its own.
    pub async fn request_slowly(
        &self,
        outgoing: Outgoing<'_>,
        trickle: Trickle,
        sink: Rc<RefCell<dyn Sink>>,
    ) -> Result<AnswerHead, ClientError> {
        let link = self.connect(Haste::Slow { bytes: trickle.bytes }).await?;
        self.send(&link, outgoing, sink).await?;
        loop {
            monoio::time::sleep(trickle.every).await;
            if link.read() {
                return link.answer().await.map(|(head, _)| head);
            }
        }
    }

    async fn exchange(
        &self,
        link: &Link,
        outgoing: Outgoing<'_>,
        sink: Rc<RefCell<dyn Sink>>,
    ) -> Result<(AnswerHead, bool), ClientError> {
        self.send(link, outgoing, sink).await?;
        link.answer().await
    }

    async fn send(&self, link: &Link, outgoing: Outgoing<'_>, sink: Rc<RefCell<dyn Sink>>) -> Result<(), ClientError> {
        let mut output = self.output.take();
        outgoing.write(&self.target, &mut output);
        let outcome = match link.expect_answer(sink) {
            Ok(()) => link.send(&output).await,
            Err(error) => Err(error),
        };
        self.output.set(output);
        outcome.map_err(|_| ClientError::NoAnswer)
    }

    /// A connection that was kept and is not known to be dead.
    fn kept(&self) -> Option<Rc<Link>> {
        let mut idle = self.idle.borrow_mut();
        while let Some(link) = idle.pop() {
            if link.is_alive() {
                return Some(link);
            }
        }
        None
    }

    fn keep(
        &self,
        link: Rc<Link>,
        outcome: Result<(AnswerHead, bool), ClientError>,
    ) -> Result<AnswerHead, ClientError> {
        let (head, is_reusable) = outcome?;
        if is_reusable && self.idle.borrow().len() < IDLE_MAX {
            self.idle.borrow_mut().push(link);
        }
        Ok(head)
    }

    async fn connect(&self, haste: Haste) -> Result<Rc<Link>, ClientError> {
        match monoio::time::timeout(CONNECT_TIMEOUT, self.arrivals.connect(self.target.address, haste)).await {
            Ok(Ok(link)) => Ok(link),
            Ok(Err(error)) => Err(ClientError::Connect(error.kind())),
            Err(_) => Err(ClientError::Connect(io::ErrorKind::TimedOut)),
        }
    }
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
