//! Owns the client connections of a thread and the moment at which their bytes are read: one epoll for all of them, which one
//! task of the runtime waits for. What has arrived goes from the read straight to where it is wanted, so that a task wakes
//! when its answer is over, not at every piece. Never knows what a request says.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::rc::{Rc, Weak};
use std::task::{Poll, Waker};
use std::time::Instant;

use anyhow::{Context, Result};
use monoio::net::TcpStream;
use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, sockopt};

use super::response::{AnswerHead, ClientError, Response, Sink};
use super::signal::Latch;

/// Most of one read; one such buffer serves all connections.
const READ_BYTES: usize = 64 * 1024;
/// Reads of one connection in a row, before others have their turn.
const READS_IN_A_ROW: usize = 16;
/// Connections looked at after one wait.
const EVENTS_MAX: usize = 512;
/// Stands for the end of everything; connections have their places.
const STOP: u64 = u64::MAX;
/// The peer has ended its side: a short read is not the last one.
const ENDED: epoll::EventFlags = epoll::EventFlags::RDHUP.union(epoll::EventFlags::HUP).union(epoll::EventFlags::ERR);
/// What is waited for, told once each time that it becomes so: to be connected or to have room for more of a request; and
/// what arrives.
const ROOM: epoll::EventFlags = epoll::EventFlags::OUT.union(epoll::EventFlags::ET);
const BYTES: epoll::EventFlags = epoll::EventFlags::IN.union(epoll::EventFlags::RDHUP).union(epoll::EventFlags::ET);
/// Reads of one connection after which its acknowledgements are delayed anew.
const DELAYED_EVERY: u32 = 8;

/// All connections of a thread. The last one to be dropped ends the reading.
#[derive(Clone)]
pub struct Arrivals(Rc<Shared>);

struct Shared {
    epoll: OwnedFd,
    links: RefCell<Links>,
    /// Also held by the task that reads: an epoll forgets a descriptor that is closed, and that it was ready.
    stop: Rc<OwnedFd>,
    /// Opened by the task that reads, when it is over.
    stopped: Latch,
}

#[derive(Default)]
struct Links {
    places: Vec<Weak<Link>>,
    free: Vec<usize>,
}

/// Which bytes are read as soon as they are there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Haste {
    AtOnce,
    /// By [`Link::read`] only, so many bytes at most; the kernel has little room for what is not read.
    Slow {
        bytes: usize,
    },
}

/// One connection.
pub struct Link {
    socket: OwnedFd,
    haste: Haste,
    place: usize,
    owner: Rc<Shared>,
    /// A request was sent. Before, a read would take away the reason why there is no connection.
    is_read: Cell<bool>,
    /// The socket may take more than it last did.
    has_room: Cell<bool>,
    reads: Cell<u32>,
    /// The peer has closed it, or said something that nobody asked for.
    is_dead: Cell<bool>,
    response: RefCell<Response>,
    sink: RefCell<Option<Rc<RefCell<dyn Sink>>>>,
    waker: Cell<Option<Waker>>,
}

impl Arrivals {
    /// Begins to read on this thread's runtime.
    pub fn start() -> Result<Arrivals> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).context("an epoll for connections")?;
        let stop = Rc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).context("an eventfd")?);
        epoll::add(&epoll, &stop, epoll::EventData::new_u64(STOP), epoll::EventFlags::IN)?;
        // The runtime waits for any descriptor that can be polled, under the name of a stream.
        let readiness = TcpStream::from_std(std::net::TcpStream::from(epoll.try_clone()?))?;
        let shared =
            Rc::new(Shared { epoll, links: RefCell::default(), stop: stop.clone(), stopped: Latch::default() });
        monoio::spawn(read_for(Rc::downgrade(&shared), readiness, stop, shared.stopped.clone()));
        Ok(Arrivals(shared))
    }

    /// Ends the reading and waits until it is over, so that the runtime is left without an operation in flight.
    pub async fn stop(&self) {
        self.0.ring_stop();
        self.0.stopped.wait().await;
    }

    /// Connects; there is no timeout here.
    pub async fn connect(&self, address: SocketAddr, haste: Haste) -> io::Result<Rc<Link>> {
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
        sockopt::set_tcp_nodelay(&socket, true)?;
        if let Haste::Slow { bytes } = haste {
            // The window must be small before the peer is told of it.
            sockopt::set_socket_recv_buffer_size(&socket, bytes)?;
        }
        match rustix::net::connect(&socket, &address) {
            Ok(()) | Err(Errno::INPROGRESS) => {}
            Err(error) => return Err(error.into()),
        }
        let link = self.add(socket, haste)?;
        link.room().await;
        sockopt::socket_error(&link.socket)??;
        Ok(link)
    }

    fn add(&self, socket: OwnedFd, haste: Haste) -> io::Result<Rc<Link>> {
        let mut links = self.0.links.borrow_mut();
        let place = links.free.pop().unwrap_or_else(|| {
            links.places.push(Weak::new());
            links.places.len() - 1
        });
        let link = Rc::new(Link {
            socket,
            haste,
            place,
            owner: self.0.clone(),
            is_read: Cell::new(false),
            has_room: Cell::new(false),
            reads: Cell::new(0),
            is_dead: Cell::new(false),
            response: RefCell::default(),
            sink: RefCell::default(),
            waker: Cell::default(),
        });
        links.places[place] = Rc::downgrade(&link);
        drop(links);
        epoll::add(&self.0.epoll, &link.socket, epoll::EventData::new_u64(place as u64), ROOM)?;
        Ok(link)
    }
}

/// Reads whenever something is there, until nobody has connections any more.
async fn read_for(shared: Weak<Shared>, readiness: TcpStream, _stop: Rc<OwnedFd>, stopped: Latch) {
    let (mut events, mut buffer) = (Vec::with_capacity(EVENTS_MAX), vec![0; READ_BYTES]);
    while readiness.readable(false).await.is_ok() {
        while let Some(shared) = shared.upgrade() {
            match shared.read_all(&mut events, &mut buffer) {
                Found::Stop => return stopped.open(),
                Found::All => break,
                Found::Some => {
                    drop(shared);
                    yield_once().await;
                }
            }
        }
        if shared.strong_count() == 0 {
            break;
        }
    }
    stopped.open();
}

async fn yield_once() {
    let mut is_first = true;
    poll_fn(|context| match std::mem::replace(&mut is_first, false) {
        true => {
            context.waker().wake_by_ref();
            Poll::Pending
        }
        false => Poll::Ready(()),
    })
    .await;
}

/// What a look at the connections has found.
enum Found {
    All,
    /// There may be more.
    Some,
    /// Reading is to end.
    Stop,
}

impl Shared {
    /// Reads the connections that have something.
    fn read_all(&self, events: &mut Vec<epoll::Event>, buffer: &mut [u8]) -> Found {
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(events), Some(&now)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => {
                tracing::error!(%error, "waiting for connections");
                return Found::Stop;
            }
        }
        let mut found = if events.len() == events.capacity() { Found::Some } else { Found::All };
        for event in events.drain(..) {
            let (place, flags) = (event.data.u64(), event.flags);
            if place == STOP {
                found = Found::Stop;
                continue;
            }
            let link = self.links.borrow().places.get(place as usize).and_then(Weak::upgrade);
            if let Some(link) = link {
                link.ready(flags, buffer);
            }
        }
        found
    }

    fn ring_stop(&self) {
        // Fails only when the counter is full, and then it is set.
        let _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.ring_stop();
    }
}

impl Link {
    /// Whether the connection can be used again, as far as is known.
    pub fn is_alive(&self) -> bool {
        !self.is_dead.get()
    }

    /// From now on what arrives is the answer to a request, its body for `sink`.
    pub fn expect_answer(&self, sink: Rc<RefCell<dyn Sink>>) -> io::Result<()> {
        self.response.borrow_mut().begin();
        *self.sink.borrow_mut() = Some(sink);
        if self.haste == Haste::AtOnce && !self.is_read.replace(true) {
            self.watch(BYTES)?;
        }
        Ok(())
    }

    /// Makes the epoll tell of these from now on, and of what is there already, told before or not.
    fn watch(&self, flags: epoll::EventFlags) -> io::Result<()> {
        let place = epoll::EventData::new_u64(self.place as u64);
        Ok(epoll::modify(&self.owner.epoll, &self.socket, place, flags)?)
    }

    /// Whether any byte of the answer has arrived.
    pub fn has_answer_begun(&self) -> bool {
        self.response.borrow().is_begun()
    }

    /// Sends all bytes; an answer that is over before ends the sending too.
    pub async fn send(&self, bytes: &[u8]) -> io::Result<()> {
        let mut sent = 0;
        while sent < bytes.len() && !self.response.borrow().is_over() {
            match rustix::net::send(&self.socket, &bytes[sent..], SendFlags::NOSIGNAL) {
                Ok(count) => sent += count,
                Err(Errno::AGAIN) => {
                    self.has_room.set(false);
                    self.watch(if self.is_read.get() { ROOM | BYTES } else { ROOM })?;
                    self.room().await;
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        // The connection is in the midst of a request that its peer has not read.
        self.is_dead.set(self.is_dead.get() || sent < bytes.len());
        Ok(())
    }

    /// The head of the answer when all of it has gone to the sink, and whether another request may follow.
    pub async fn answer(&self) -> Result<(AnswerHead, bool), ClientError> {
        let outcome = poll_fn(|context| match self.response.borrow_mut().outcome() {
            Some(outcome) => Poll::Ready(outcome),
            None => {
                self.waker.set(Some(context.waker().clone()));
                Poll::Pending
            }
        });
        let (head, is_reusable) = outcome.await?;
        *self.sink.borrow_mut() = None;
        Ok((head, is_reusable && self.is_alive()))
    }

    /// Reads a slow connection once; whether the answer is over.
    pub fn read(&self) -> bool {
        if let Haste::Slow { bytes } = self.haste {
            self.receive(&mut vec![0; bytes]);
        }
        self.response.borrow().is_over()
    }

    /// Waits until the socket may take more, or the answer is over.
    async fn room(&self) {
        poll_fn(|context| {
            if self.has_room.get() || self.response.borrow().is_over() {
                return Poll::Ready(());
            }
            self.waker.set(Some(context.waker().clone()));
            Poll::Pending
        })
        .await;
    }

    fn ready(&self, flags: epoll::EventFlags, buffer: &mut [u8]) {
        if flags.intersects(epoll::EventFlags::OUT | ENDED) && !self.has_room.replace(true) {
            self.wake();
        }
        if !self.is_read.get() || !flags.intersects(epoll::EventFlags::IN | ENDED) {
            return;
        }
        for _ in 0..READS_IN_A_ROW {
            match self.receive(buffer) {
                // What comes behind a short read is told anew.
                Some(count) if count < buffer.len() && !flags.intersects(ENDED) => return,
                Some(_) => {}
                None => return,
            }
        }
        if self.watch(BYTES).is_err() {
            self.end(true);
        }
    }

    /// Reads once and hands on; nothing when there is no more to be had.
    fn receive(&self, buffer: &mut [u8]) -> Option<usize> {
        if self.is_dead.get() {
            return None;
        }
        let reads = self.reads.replace(self.reads.get().wrapping_add(1));
        if reads.is_multiple_of(DELAYED_EVERY) {
            // A socket that only receives acknowledges every piece in the read that takes it, which costs as much as the read.
            // This makes it one for two; the kernel forgets it after a pause.
            let _ = sockopt::set_tcp_quickack(&self.socket, false);
        }
        match rustix::io::retry_on_intr(|| rustix::net::recv(&self.socket, &mut *buffer, RecvFlags::empty())) {
            Ok((0, _)) => self.end(false),
            Ok((count, _)) => {
                self.arrived(&buffer[..count]);
                return Some(count);
            }
            Err(Errno::AGAIN) => {}
            Err(_) => self.end(true),
        }
        None
    }

    fn arrived(&self, bytes: &[u8]) {
        let sink = self.sink.borrow();
        let mut response = self.response.borrow_mut();
        match &*sink {
            Some(sink) if !response.is_over() => {
                response.arrived(bytes, Instant::now(), &mut *sink.borrow_mut());
                if response.is_over() {
                    self.wake();
                }
            }
            _ => self.is_dead.set(true),
        }
    }

    fn end(&self, is_error: bool) {
        self.is_dead.set(true);
        self.response.borrow_mut().ended(is_error);
        self.wake();
    }

    fn wake(&self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        let mut links = self.owner.links.borrow_mut();
        links.places[self.place] = Weak::new();
        links.free.push(self.place);
    }
}
