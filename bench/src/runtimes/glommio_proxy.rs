//! The glommio candidate: the same exchange as the monoio one, on glommio's readiness-based sockets.
//!
//! Owns its connections. Never reads ahead and never times out: it is a yardstick for a runtime.

use std::cell::RefCell;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;

use anyhow::{Result, anyhow, bail};
use futures_lite::{AsyncReadExt, AsyncWriteExt};
use glommio::net::{TcpListener, TcpStream};
use glommio::{LocalExecutorBuilder, Placement};

use super::BUFFER_BYTES;
use super::codec::{Head, rewrite_request, rewrite_response};
use crate::http::BodyReader;

/// Registered memory of the executor, bytes; the default of 10 MiB is locked three times.
const IO_MEMORY_BYTES: usize = 64 << 10;

pub fn serve(listen: SocketAddr, upstream: SocketAddr) -> Result<()> {
    let executor = LocalExecutorBuilder::new(Placement::Unbound).io_memory(IO_MEMORY_BYTES).ring_depth(1024).make();
    let executor = executor.map_err(|error| anyhow!("glommio does not start: {error}"))?;
    executor.run(accept(listen, upstream))
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
                let stream = TcpStream::connect(self.address).await.map_err(io::Error::from)?;
                stream.set_nodelay(true).map_err(io::Error::from)?;
                Ok(stream)
            }
        }
    }
}

async fn accept(listen: SocketAddr, upstream: SocketAddr) -> Result<()> {
    let listener = TcpListener::bind(listen).map_err(io::Error::from)?;
    let authority = upstream.to_string();
    let upstream = Rc::new(Upstream { address: upstream, authority, idle: RefCell::default() });
    loop {
        let client = listener.accept().await.map_err(io::Error::from)?;
        client.set_nodelay(true).map_err(io::Error::from)?;
        let upstream = Rc::clone(&upstream);
        glommio::spawn_local(async move {
            // A broken exchange ends its connection; the harness sees that.
            let _ = connection(client, &upstream).await;
        })
        .detach();
    }
}

async fn connection(mut client: TcpStream, upstream: &Upstream) -> Result<()> {
    let mut input = Vec::with_capacity(BUFFER_BYTES);
    let mut answer = Vec::with_capacity(BUFFER_BYTES);
    let mut output = Vec::with_capacity(BUFFER_BYTES);
    let mut scratch = vec![0; BUFFER_BYTES];
    loop {
        let head = loop {
            if let Some(head) = rewrite_request(&input, &upstream.authority, &mut output)? {
                break head;
            }
            if read(&mut client, &mut input, &mut scratch).await? == 0 {
                return Ok(());
            }
        };
        let mut server = upstream.take().await?;
        relay(head, &mut client, &mut input, &mut server, &mut output, &mut scratch).await?;
        let head = loop {
            if let Some(head) = rewrite_response(&answer, &mut output)? {
                break head;
            }
            if read(&mut server, &mut answer, &mut scratch).await? == 0 {
                bail!("upstream closed before its answer");
            }
        };
        relay(head, &mut server, &mut answer, &mut client, &mut output, &mut scratch).await?;
        upstream.idle.borrow_mut().push(server);
    }
}

/// Sends the rewritten head in `output` and the body behind `head` in `input`; what `input` then holds belongs to
/// the next message.
async fn relay(
    head: Head,
    from: &mut TcpStream,
    input: &mut Vec<u8>,
    to: &mut TcpStream,
    output: &mut Vec<u8>,
    scratch: &mut [u8],
) -> Result<()> {
    let mut body = BodyReader::new(head.framing);
    let used = body.push(&input[head.bytes..], |_| Ok(()))?;
    output.extend_from_slice(&input[head.bytes..head.bytes + used]);
    input.drain(..head.bytes + used);
    to.write_all(output).await?;
    output.clear();
    while !body.done() {
        if read(from, input, scratch).await? == 0 {
            bail!("closed inside a body");
        }
        let used = body.push(input, |_| Ok(()))?;
        to.write_all(&input[..used]).await?;
        input.drain(..used);
    }
    Ok(())
}

/// Appends what one read gives. By way of `scratch`, because growing a vector in safe Rust zeroes 16 KiB a read.
async fn read(stream: &mut TcpStream, buffer: &mut Vec<u8>, scratch: &mut [u8]) -> Result<usize> {
    let count = stream.read(scratch).await?;
    buffer.extend_from_slice(&scratch[..count]);
    Ok(count)
}
