//! The monoio candidate: keep-alive on both sides, pooled upstreams, bodies relayed with their framing as it is.
//!
//! Owns its connections. Never reads ahead and never times out: it is a yardstick for a runtime.

use std::cell::RefCell;
use std::net::SocketAddr;
use std::rc::Rc;

use anyhow::{Context, Result, bail};
use monoio::buf::{IoBuf, IoBufMut};
use monoio::io::{AsyncReadRent, AsyncWriteRentExt};
use monoio::net::{ListenerOpts, TcpListener, TcpStream};
use monoio::{IoUringDriver, LegacyDriver, RuntimeBuilder};

use super::codec::{Head, rewrite_request, rewrite_response};
use super::{BUFFER_BYTES, Candidate};
use crate::http::BodyReader;

/// Runs the flag set that `candidate` names.
pub fn serve(candidate: Candidate, listen: SocketAddr, upstream: SocketAddr) -> Result<()> {
    let mut ring = io_uring::IoUring::builder();
    match candidate {
        Candidate::MonoioEpoll => {
            let mut runtime = RuntimeBuilder::<LegacyDriver>::new().build()?;
            return runtime.block_on(accept(listen, upstream));
        }
        Candidate::MonoioCoop => drop(ring.setup_coop_taskrun()),
        Candidate::MonoioDefer => drop(ring.setup_single_issuer().setup_defer_taskrun()),
        _ => {}
    }
    let runtime = RuntimeBuilder::<IoUringDriver>::new().uring_builder(ring).build();
    let mut runtime = runtime.context("io_uring with these flags: the kernel is too old or a sandbox forbids it")?;
    runtime.block_on(accept(listen, upstream))
}

struct Upstream {
    address: SocketAddr,
    authority: String,
    /// Last in, first out.
    idle: RefCell<Vec<TcpStream>>,
}

impl Upstream {
    async fn take(&self) -> Result<TcpStream> {
        let pooled = self.idle.borrow_mut().pop();
        match pooled {
            Some(stream) => Ok(stream),
            None => {
                let stream = TcpStream::connect_addr(self.address).await?;
                stream.set_nodelay(true)?;
                Ok(stream)
            }
        }
    }
}

async fn accept(listen: SocketAddr, upstream: SocketAddr) -> Result<()> {
    let listener = TcpListener::bind_with_config(listen, &ListenerOpts::new().backlog(4096))?;
    let authority = upstream.to_string();
    let upstream = Rc::new(Upstream { address: upstream, authority, idle: RefCell::default() });
    loop {
        let (client, _) = listener.accept().await?;
        client.set_nodelay(true)?;
        let upstream = Rc::clone(&upstream);
        monoio::spawn(async move {
            // A broken exchange ends its connection; the harness sees that.
            let _ = connection(client, &upstream).await;
        });
    }
}

async fn connection(mut client: TcpStream, upstream: &Upstream) -> Result<()> {
    let mut input = Vec::with_capacity(BUFFER_BYTES);
    let mut answer = Vec::with_capacity(BUFFER_BYTES);
    let mut output = Vec::with_capacity(BUFFER_BYTES);
    loop {
        let head = loop {
            if let Some(head) = rewrite_request(&input, &upstream.authority, &mut output)? {
                break head;
            }
            input = match read(&mut client, input).await? {
                (_, 0) => return Ok(()),
                (input, _) => input,
            };
        };
        let mut server = upstream.take().await?;
        (input, output) = relay(head, &mut client, input, &mut server, output).await?;
        let head = loop {
            if let Some(head) = rewrite_response(&answer, &mut output)? {
                break head;
            }
            answer = match read(&mut server, answer).await? {
                (_, 0) => bail!("upstream closed before its answer"),
                (answer, _) => answer,
            };
        };
        (answer, output) = relay(head, &mut server, answer, &mut client, output).await?;
        upstream.idle.borrow_mut().push(server);
    }
}

/// Sends the rewritten head in `output` and the body behind `head` in `input`; what `input` then holds belongs to
/// the next message.
async fn relay(
    head: Head,
    from: &mut TcpStream,
    mut input: Vec<u8>,
    to: &mut TcpStream,
    mut output: Vec<u8>,
) -> Result<(Vec<u8>, Vec<u8>)> {
    let mut body = BodyReader::new(head.framing);
    let used = body.push(&input[head.bytes..], |_| Ok(()))?;
    output.extend_from_slice(&input[head.bytes..head.bytes + used]);
    input.drain(..head.bytes + used);
    let (written, buffer) = to.write_all(output).await;
    written?;
    output = buffer;
    output.clear();
    while !body.done() {
        let count;
        (input, count) = read(from, input).await?;
        if count == 0 {
            bail!("closed inside a body");
        }
        let used = body.push(&input, |_| Ok(()))?;
        let (written, buffer) = to.write_all(input.slice(..used)).await;
        written?;
        input = buffer.into_inner();
        input.drain(..used);
    }
    Ok((input, output))
}

/// Appends what one read gives, up to the capacity; heads longer than a buffer are refused by the parser's limit.
async fn read(stream: &mut TcpStream, mut buffer: Vec<u8>) -> Result<(Vec<u8>, usize)> {
    let filled = buffer.len();
    if filled == buffer.capacity() {
        buffer.reserve(BUFFER_BYTES);
    }
    let (count, slice) = stream.read(buffer.slice_mut(filled..)).await;
    Ok((slice.into_inner(), count?))
}
