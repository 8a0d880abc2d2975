//! The floor: a TCP relay on epoll with one upstream connection per client, without any HTTP.
//!
//! Owns its connections. Never looks at a byte.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;

use anyhow::Result;
use rustix::event::epoll::{self, EventData, EventFlags};

use super::BUFFER_BYTES;

const LISTENER: u64 = u64::MAX;

/// Both directions of one client; side 0 is the client, side 1 the upstream.
struct Pair {
    streams: [TcpStream; 2],
    /// Bytes that the socket of this side did not take; while there are any, the other side is not read.
    unsent: [Vec<u8>; 2],
}

pub fn serve(listen: SocketAddr, upstream: SocketAddr) -> Result<()> {
    let listener = TcpListener::bind(listen)?;
    rustix::net::listen(&listener, 4096)?;
    listener.set_nonblocking(true)?;
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    epoll::add(&epoll, &listener, EventData::new_u64(LISTENER), EventFlags::IN)?;
    let mut pairs: Vec<Option<Pair>> = Vec::new();
    let mut free = Vec::new();
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut events = Vec::with_capacity(512);
    loop {
        epoll::wait(&epoll, rustix::buffer::spare_capacity(&mut events), None)?;
        for event in events.drain(..) {
            let token = event.data.u64();
            if token == LISTENER {
                while let Ok((client, _)) = listener.accept() {
                    let slot = free.pop().unwrap_or(pairs.len());
                    let pair = open(&epoll, client, upstream, slot as u64)?;
                    if slot == pairs.len() { pairs.push(Some(pair)) } else { pairs[slot] = Some(pair) }
                }
                continue;
            }
            let (slot, side) = ((token / 2) as usize, (token % 2) as usize);
            let Some(pair) = &mut pairs[slot] else { continue };
            let open = flush(pair, side)
                .and_then(|()| shuttle(pair, side, &mut buffer))
                .and_then(|open| Ok(open && shuttle(pair, 1 - side, &mut buffer)?));
            if !matches!(open, Ok(true)) {
                pairs[slot] = None;
                free.push(slot);
            }
        }
    }
}

fn open(epoll: &OwnedFd, client: TcpStream, upstream: SocketAddr, slot: u64) -> Result<Pair> {
    let streams = [client, TcpStream::connect(upstream)?];
    for (stream, side) in streams.iter().zip(0..) {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        epoll::add(epoll, stream, EventData::new_u64(2 * slot + side), flags)?;
    }
    Ok(Pair { streams, unsent: Default::default() })
}

fn flush(pair: &mut Pair, side: usize) -> std::io::Result<()> {
    while !pair.unsent[side].is_empty() {
        match pair.streams[side].write(&pair.unsent[side]) {
            Ok(count) => drop(pair.unsent[side].drain(..count)),
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Moves what `from` has to the other side; `false` at its end.
fn shuttle(pair: &mut Pair, from: usize, buffer: &mut [u8]) -> std::io::Result<bool> {
    let to = 1 - from;
    while pair.unsent[to].is_empty() {
        let count = match pair.streams[from].read(buffer) {
            Ok(0) => return Ok(false),
            Ok(count) => count,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(true),
            Err(error) => return Err(error),
        };
        let written = match pair.streams[to].write(&buffer[..count]) {
            Ok(written) => written,
            Err(error) if error.kind() == ErrorKind::WouldBlock => 0,
            Err(error) => return Err(error),
        };
        pair.unsent[to].extend_from_slice(&buffer[written..count]);
    }
    Ok(true)
}
