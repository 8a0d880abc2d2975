//! The backend behind every proxy: an epoll server on one pinned thread, with prepared answers.
//!
//! Owns what an answer looks like and when its pieces leave. Never measures.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};

use crate::answer::Answer;
use crate::http::{BodyReader, request_head};
use crate::machine::pin_current_thread;

/// Tokens of the listener and of the wake-up descriptor; connections use their slot number.
const LISTENER: u64 = u64::MAX;
const WAKE: u64 = u64::MAX - 1;

/// Paced streams spread their chunks over one interval by connection, so that a proxy cannot serve many streams
/// with one wake-up merely because all began together.
const PHASES: u32 = 64;

/// The peer has ended its side: read to the end even after a short read, no further edge will come.
const ENDED: epoll::EventFlags = epoll::EventFlags::RDHUP.union(epoll::EventFlags::HUP).union(epoll::EventFlags::ERR);

struct Shared {
    answer: RwLock<Arc<Answer>>,
    stop: AtomicBool,
    requests: AtomicU64,
    wake: OwnedFd,
}

/// A running backend; dropping it ends its thread and closes its connections.
pub struct Backend {
    address: SocketAddr,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Backend {
    /// Listens on a free port of 127.0.0.1, served by one thread on `core`.
    pub fn start(core: usize, answer: Answer) -> Result<Backend> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        listener.set_nonblocking(true)?;
        // std's backlog is 128, too short for steps of idle streams; a second listen only changes that number.
        rustix::net::listen(&listener, 4096)?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            answer: RwLock::new(Arc::new(answer)),
            stop: AtomicBool::new(false),
            requests: AtomicU64::new(0),
            wake: eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?,
        });
        let mut server = Server::new(listener, Arc::clone(&shared))?;
        let thread = std::thread::Builder::new().name("backend".to_owned()).spawn(move || {
            if let Err(error) = pin_current_thread(core).and_then(|()| server.run()) {
                eprintln!("backend: {error:#}");
            }
        })?;
        Ok(Backend { address, shared, thread: Some(thread) })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What requests that begin from now on get.
    pub fn set_answer(&self, answer: Answer) {
        *self.shared.answer.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(answer);
    }

    /// POST requests answered or being answered so far.
    pub fn requests(&self) -> u64 {
        self.shared.requests.load(Ordering::Relaxed)
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        let _ = rustix::io::write(&self.shared.wake, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Connection {
    stream: TcpStream,
    /// Bytes of an incomplete request head.
    head: Vec<u8>,
    /// The request body being read, with what its head asked for.
    body: Option<(BodyReader, Request)>,
    /// Bytes that the socket did not take.
    unsent: Vec<u8>,
    paced: Option<Paced>,
    close_after: bool,
    /// Tells a due entry of an earlier connection in the same slot from one of this.
    generation: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Request {
    Post,
    Models,
    Other,
}

struct Paced {
    answer: Arc<Answer>,
    next_chunk: usize,
}

struct Server {
    listener: TcpListener,
    shared: Arc<Shared>,
    epoll: OwnedFd,
    connections: Vec<Option<Connection>>,
    free: Vec<usize>,
    due: BinaryHeap<Reverse<(Instant, usize, u64)>>,
    generations: u64,
    buffer: Vec<u8>,
}

impl Server {
    fn new(listener: TcpListener, shared: Arc<Shared>) -> Result<Server> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &listener, epoll::EventData::new_u64(LISTENER), epoll::EventFlags::IN)?;
        epoll::add(&epoll, &shared.wake, epoll::EventData::new_u64(WAKE), epoll::EventFlags::IN)?;
        Ok(Server {
            listener,
            shared,
            epoll,
            connections: Vec::new(),
            free: Vec::new(),
            due: BinaryHeap::new(),
            generations: 0,
            buffer: vec![0; 64 << 10],
        })
    }

    fn run(&mut self) -> Result<()> {
        let mut events = Vec::with_capacity(512);
        while !self.shared.stop.load(Ordering::Acquire) {
            let timeout =
                self.due.peek().map(|Reverse((due, ..))| timespec(due.saturating_duration_since(Instant::now())));
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), timeout.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error).context("epoll_wait"),
            }
            for event in events.drain(..) {
                let flags = event.flags;
                match event.data.u64() {
                    LISTENER => self.accept(),
                    WAKE => {}
                    slot => self.ready(slot as usize, flags.intersects(ENDED)),
                }
            }
            self.send_due();
        }
        Ok(())
    }

    fn accept(&mut self) {
        // An error means that no connection waits, or that descriptors ran out and the client will see it.
        while let Ok((stream, _)) = self.listener.accept() {
            let slot = self.free.pop().unwrap_or_else(|| {
                self.connections.push(None);
                self.connections.len() - 1
            });
            let flags =
                epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
            let registered = stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true)).is_ok()
                && epoll::add(&self.epoll, &stream, epoll::EventData::new_u64(slot as u64), flags).is_ok();
            if !registered {
                self.free.push(slot);
                continue;
            }
            self.generations += 1;
            self.connections[slot] = Some(Connection {
                stream,
                head: Vec::new(),
                body: None,
                unsent: Vec::new(),
                paced: None,
                close_after: false,
                generation: self.generations,
            });
        }
    }

    /// Reads and answers until the socket is empty; a broken or finished connection gives its slot back.
    fn ready(&mut self, slot: usize, ended: bool) {
        let Some(mut connection) = self.connections[slot].take() else { return };
        match self.serve(slot, &mut connection, ended) {
            Ok(true) => self.connections[slot] = Some(connection),
            Ok(false) | Err(_) => self.free.push(slot),
        }
    }

    /// `false` once the peer or the answer has ended the connection.
    fn serve(&mut self, slot: usize, connection: &mut Connection, ended: bool) -> Result<bool> {
        let mut buffer = std::mem::take(&mut self.buffer);
        let open = loop {
            if !connection.unsent.is_empty() && !flush(connection)? {
                break true;
            }
            match connection.stream.read(&mut buffer) {
                Ok(0) => break false,
                Ok(count) => {
                    if let Err(error) = self.take_input(slot, connection, &buffer[..count]) {
                        self.buffer = buffer;
                        return Err(error);
                    }
                    if connection.close_after && connection.unsent.is_empty() && connection.paced.is_none() {
                        break false;
                    }
                    if count < buffer.len() && !ended {
                        break true;
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break true,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => break false,
            }
        };
        self.buffer = buffer;
        Ok(open)
    }

    fn take_input(&mut self, slot: usize, connection: &mut Connection, received: &[u8]) -> Result<()> {
        let carried;
        let mut input = received;
        if !connection.head.is_empty() {
            connection.head.extend_from_slice(input);
            carried = std::mem::take(&mut connection.head);
            input = &carried;
        }
        loop {
            if let Some((mut body, request)) = connection.body.take() {
                let used = body.push(input, |_| Ok(()))?;
                input = &input[used..];
                if !body.done() {
                    connection.body = Some((body, request));
                    return Ok(());
                }
                self.answer(slot, connection, request)?;
            }
            if input.is_empty() {
                return Ok(());
            }
            let Some(head) = request_head(input)? else {
                connection.head = input.to_vec();
                return Ok(());
            };
            let request = match (head.method, head.path) {
                ("POST", _) => Request::Post,
                (_, "/v1/models") => Request::Models,
                _ => Request::Other,
            };
            connection.close_after |= head.close;
            connection.body = Some((BodyReader::new(head.framing), request));
            input = &input[head.bytes..];
        }
    }

    fn answer(&mut self, slot: usize, connection: &mut Connection, request: Request) -> Result<()> {
        ensure!(connection.paced.is_none(), "a request on top of a running stream");
        if request != Request::Post {
            return send(connection, Answer::control(request == Request::Models));
        }
        self.shared.requests.fetch_add(1, Ordering::Relaxed);
        let answer = Arc::clone(&self.shared.answer.read().unwrap_or_else(PoisonError::into_inner));
        send(connection, &answer.first)?;
        match answer.interval {
            Some(interval) => {
                let phase = interval * (slot as u32 % PHASES) / PHASES;
                self.due.push(Reverse((Instant::now() + interval + phase, slot, connection.generation)));
                connection.paced = Some(Paced { answer, next_chunk: 0 });
            }
            None => {
                for chunk in &answer.later {
                    send(connection, chunk)?;
                }
                if answer.endless {
                    connection.paced = Some(Paced { answer, next_chunk: 0 });
                }
            }
        }
        Ok(())
    }

    fn send_due(&mut self) {
        let now = Instant::now();
        while let Some(Reverse((due, slot, generation))) = self.due.peek().copied() {
            if due > now {
                return;
            }
            self.due.pop();
            let Some(mut connection) = self.connections[slot].take() else { continue };
            if connection.generation != generation {
                self.connections[slot] = Some(connection);
                continue;
            }
            match self.send_chunk(slot, &mut connection, due) {
                Ok(true) => self.connections[slot] = Some(connection),
                Ok(false) | Err(_) => self.free.push(slot),
            }
        }
    }

    /// The next chunk of a paced stream; `false` when the connection is to be closed after the last one.
    fn send_chunk(&mut self, slot: usize, connection: &mut Connection, due: Instant) -> Result<bool> {
        let Some(mut paced) = connection.paced.take() else { return Ok(true) };
        send(connection, &paced.answer.later[paced.next_chunk])?;
        paced.next_chunk += 1;
        if paced.next_chunk < paced.answer.later.len() {
            let interval = paced.answer.interval.unwrap_or_default();
            self.due.push(Reverse((due + interval, slot, connection.generation)));
            connection.paced = Some(paced);
            return Ok(true);
        }
        Ok(!connection.close_after)
    }
}

/// Writes now what the socket takes and keeps the rest for its next readiness.
fn send(connection: &mut Connection, bytes: &[u8]) -> Result<()> {
    if !connection.unsent.is_empty() {
        connection.unsent.extend_from_slice(bytes);
        return Ok(());
    }
    let written = match connection.stream.write(bytes) {
        Ok(written) => written,
        Err(error) if error.kind() == ErrorKind::WouldBlock => 0,
        Err(error) => return Err(error.into()),
    };
    connection.unsent.extend_from_slice(&bytes[written..]);
    if written > 0 && !connection.unsent.is_empty() {
        // The socket may have room again without a new edge.
        flush(connection)?;
    }
    Ok(())
}

/// `true` once nothing is left to send.
fn flush(connection: &mut Connection) -> Result<bool> {
    while !connection.unsent.is_empty() {
        match connection.stream.write(&connection.unsent) {
            Ok(written) => drop(connection.unsent.drain(..written)),
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(true)
}

fn timespec(duration: Duration) -> Timespec {
    Timespec { tv_sec: duration.as_secs() as i64, tv_nsec: i64::from(duration.subsec_nanos()) }
}
