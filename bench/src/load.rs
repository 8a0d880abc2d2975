//! The load: closed-loop keep-alive connections over one epoll, every answer compared byte for byte.
//!
//! Owns its connections and the measuring window. Never knows which proxy it drives.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::event::{Timespec, epoll};

use crate::http::{BodyReader, HEAD_BYTES_MAX, response_head};
use crate::machine::Interrupt;

/// One wait for readiness, so that the clock and the stop signal are looked at while nothing moves.
const WAIT_NS: i64 = 50_000_000;

/// A measurement in which no byte arrives for so long is broken.
const SILENCE_MAX: Duration = Duration::from_secs(10);

/// What to send and what must come back.
#[derive(Clone)]
pub struct Load {
    pub target: SocketAddr,
    pub connections: usize,
    pub request: Arc<[u8]>,
    /// Payload of every answer.
    pub payload: Arc<[u8]>,
    /// Before the window; the connections are open and warm when it begins.
    pub warm_up: Duration,
    pub window: Duration,
}

/// What happened inside the window.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    pub answers: u64,
    pub payload_bytes: u64,
    pub wall: Duration,
    pub cpu: Duration,
    /// From the first byte written to the last byte of the answer, sorted, nanoseconds.
    pub latencies_ns: Vec<u64>,
    /// Connections that the proxy ended between two answers.
    pub reconnects: u64,
}

struct Connection {
    stream: TcpStream,
    /// Bytes of an incomplete response head.
    head: Vec<u8>,
    body: Option<BodyReader>,
    /// The answer in work ends the connection.
    close_after: bool,
    payload_offset: usize,
    request_written: usize,
    sent: Instant,
}

struct Driver<'a> {
    load: &'a Load,
    epoll: OwnedFd,
    connections: Vec<Connection>,
    totals: Measured,
    recording: bool,
}

/// Drives `load` through warm-up and window; `cpu` reads the CPU time the proxy has used so far.
///
/// Errors: any answer with another status or other bytes than expected, a connection cut inside an answer, silence.
pub fn run(load: &Load, cpu: impl Fn() -> Duration, interrupt: &Interrupt) -> Result<Measured> {
    let mut driver = Driver::open(load)?;
    let mut buffer = vec![0; 64 << 10];
    driver.drive(load.warm_up, &mut buffer, interrupt)?;
    let before = std::mem::take(&mut driver.totals);
    ensure!(before.payload_bytes > 0, "nothing answered during the warm-up of {:?}", load.warm_up);
    driver.recording = true;
    let (started, cpu_before) = (Instant::now(), cpu());
    driver.drive(load.window, &mut buffer, interrupt)?;
    let (cpu_after, wall) = (cpu(), started.elapsed());
    let mut measured = std::mem::take(&mut driver.totals);
    measured.wall = wall;
    measured.cpu = cpu_after.saturating_sub(cpu_before);
    measured.latencies_ns.sort_unstable();
    ensure!(measured.payload_bytes > 0, "nothing answered during the window of {:?}", load.window);
    Ok(measured)
}

/// One request on a connection of its own; how readiness and the unmeasured first contact are checked.
pub fn probe(target: SocketAddr, request: &[u8], payload: &[u8], timeout: Duration) -> Result<()> {
    let mut stream = TcpStream::connect_timeout(&target, timeout)?;
    stream.set_read_timeout(Some(timeout))?;
    stream.write_all(request)?;
    let mut input = Vec::new();
    let mut buffer = [0; 16 << 10];
    let deadline = Instant::now() + timeout;
    loop {
        if let Some(head) = response_head(&input)? {
            let mut body = BodyReader::new(head.framing);
            let mut received = Vec::new();
            body.push(&input[head.bytes..], |data| {
                received.extend_from_slice(data);
                Ok(())
            })?;
            let text = || String::from_utf8_lossy(&received[..received.len().min(300)]).into_owned();
            ensure!(head.status == 200, "status {}: {}", head.status, text());
            if body.done() {
                ensure!(received == payload, "another answer than the backend's: {}", text());
                return Ok(());
            }
        }
        let count = stream.read(&mut buffer)?;
        ensure!(count > 0, "connection closed inside the answer");
        ensure!(Instant::now() < deadline, "no whole answer within {timeout:?}");
        input.extend_from_slice(&buffer[..count]);
    }
}

impl<'a> Driver<'a> {
    fn open(load: &'a Load) -> Result<Driver<'a>> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let mut connections = Vec::with_capacity(load.connections);
        for slot in 0..load.connections {
            let mut connection = connect(load, &epoll, slot)?;
            connection.write(load)?;
            connections.push(connection);
        }
        Ok(Driver { load, epoll, connections, totals: Measured::default(), recording: false })
    }

    fn drive(&mut self, duration: Duration, buffer: &mut [u8], interrupt: &Interrupt) -> Result<()> {
        let mut events = Vec::with_capacity(256);
        let timeout = Timespec { tv_sec: 0, tv_nsec: WAIT_NS };
        let started = Instant::now();
        let (mut now, mut last_byte, mut bytes_seen) = (started, started, self.totals.payload_bytes);
        while now.duration_since(started) < duration {
            interrupt.check()?;
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&timeout)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error).context("epoll_wait"),
            }
            for event in events.drain(..) {
                let flags = event.flags;
                let ended = flags.intersects(epoll::EventFlags::RDHUP | epoll::EventFlags::HUP);
                self.ready(event.data.u64() as usize, ended, buffer)?;
            }
            now = Instant::now();
            if self.totals.payload_bytes > bytes_seen {
                (bytes_seen, last_byte) = (self.totals.payload_bytes, now);
            }
            ensure!(now.duration_since(last_byte) < SILENCE_MAX, "no byte of an answer for {SILENCE_MAX:?}");
        }
        Ok(())
    }

    fn ready(&mut self, slot: usize, ended: bool, buffer: &mut [u8]) -> Result<()> {
        let load = self.load;
        loop {
            let connection = &mut self.connections[slot];
            if connection.request_written < load.request.len() {
                connection.write(load)?;
            }
            let count = match connection.stream.read(buffer) {
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                // A reset between two answers is a kind of close.
                Err(error) if error.kind() == ErrorKind::ConnectionReset => 0,
                Err(error) => return Err(error).context("reading an answer"),
            };
            if count == 0 {
                ensure!(connection.between_answers(), "connection closed inside an answer");
                return self.reconnect(slot);
            }
            let reconnect = self.take_input(slot, &buffer[..count])?;
            if reconnect {
                return self.reconnect(slot);
            }
            if count < buffer.len() && !ended {
                return Ok(());
            }
        }
    }

    /// `true` when the answer ended and the proxy will close the connection.
    fn take_input(&mut self, slot: usize, received: &[u8]) -> Result<bool> {
        let load = self.load;
        let connection = &mut self.connections[slot];
        let carried;
        let mut input = received;
        if !connection.head.is_empty() {
            connection.head.extend_from_slice(input);
            carried = std::mem::take(&mut connection.head);
            input = &carried;
        }
        let mut body = match connection.body.take() {
            Some(body) => body,
            None => {
                let Some(head) = response_head(input)? else {
                    ensure!(input.len() <= HEAD_BYTES_MAX, "response head too long");
                    connection.head = input.to_vec();
                    return Ok(false);
                };
                if head.status != 200 {
                    bail!("status {} in: {}", head.status, String::from_utf8_lossy(&input[..input.len().min(600)]));
                }
                connection.close_after = head.close;
                input = &input[head.bytes..];
                BodyReader::new(head.framing)
            }
        };
        let offset = &mut connection.payload_offset;
        let before = *offset;
        let used = body.push(input, |data| {
            let expected = load.payload.get(*offset..*offset + data.len());
            ensure!(expected == Some(data), "the answer differs from the backend's at byte {offset} or after");
            *offset += data.len();
            Ok(())
        })?;
        self.totals.payload_bytes += (*offset - before) as u64;
        if !body.done() {
            connection.body = Some(body);
            return Ok(false);
        }
        ensure!(used == input.len(), "bytes after the end of an answer");
        ensure!(*offset == load.payload.len(), "the answer ended after {offset} of {} bytes", load.payload.len());
        self.totals.answers += 1;
        if self.recording {
            self.totals.latencies_ns.push(connection.sent.elapsed().as_nanos() as u64);
        }
        connection.payload_offset = 0;
        if connection.close_after {
            return Ok(true);
        }
        connection.request_written = 0;
        connection.write(load)?;
        Ok(false)
    }

    fn reconnect(&mut self, slot: usize) -> Result<()> {
        self.totals.reconnects += 1;
        let mut connection = connect(self.load, &self.epoll, slot)?;
        connection.write(self.load)?;
        self.connections[slot] = connection;
        Ok(())
    }
}

impl Connection {
    /// No byte of the next answer has come, so that the request may be sent again elsewhere.
    fn between_answers(&self) -> bool {
        self.head.is_empty() && self.body.is_none() && self.payload_offset == 0
    }

    /// Sends what the socket takes; the rest follows at its next readiness.
    fn write(&mut self, load: &Load) -> Result<()> {
        if self.request_written == 0 {
            self.sent = Instant::now();
        }
        while self.request_written < load.request.len() {
            match self.stream.write(&load.request[self.request_written..]) {
                Ok(count) => self.request_written += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                // The close is seen, and judged, by the read that follows.
                Err(error) if matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => {
                    return Ok(());
                }
                Err(error) => return Err(error).context("sending a request"),
            }
        }
        Ok(())
    }
}

fn connect(load: &Load, epoll: &OwnedFd, slot: usize) -> Result<Connection> {
    let stream = TcpStream::connect(load.target).with_context(|| format!("connecting to {}", load.target))?;
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    let flags = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
    epoll::add(epoll, &stream, epoll::EventData::new_u64(slot as u64), flags)?;
    Ok(Connection {
        stream,
        head: Vec::new(),
        body: None,
        close_after: false,
        payload_offset: 0,
        request_written: 0,
        sent: Instant::now(),
    })
}
