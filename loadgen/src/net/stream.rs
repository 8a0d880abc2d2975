//! Owns one TCP connection's bytes: a reader whose reads survive being abandoned, and a writer. Never parses.

use std::future::Future;
use std::io;
use std::pin::Pin;

use monoio::io::{AsyncReadRent, AsyncWriteRentExt, OwnedReadHalf, OwnedWriteHalf, Splitable};
use monoio::net::TcpStream;

/// Size of one read, and of the buffer kept per connection while it is read.
const READ_BYTES: usize = 16 * 1024;

type Half = OwnedReadHalf<TcpStream>;
type Pending = Pin<Box<dyn Future<Output = (io::Result<usize>, Vec<u8>, Half)>>>;

/// Reading side. A read that is under way when [`Reader::more`] is dropped goes on and is collected by the next call,
/// so that one read serves both as the watch for a client that leaves and as the start of its next request.
pub struct Reader {
    pending: Option<Pending>,
    idle: Option<(Vec<u8>, Half)>,
}

/// Splits a connection; small writes are sent at once.
pub fn split(stream: TcpStream) -> io::Result<(Reader, Writer)> {
    stream.set_nodelay(true)?;
    let (read, write) = stream.into_split();
    Ok((Reader { pending: None, idle: Some((Vec::with_capacity(READ_BYTES), read)) }, Writer(write)))
}

impl Reader {
    /// Appends what arrives next to `input`; 0 = the peer closed its side.
    pub async fn more(&mut self, input: &mut Vec<u8>) -> io::Result<usize> {
        if let Some((buffer, mut half)) = self.idle.take() {
            self.pending = Some(Box::pin(async move {
                let (result, buffer) = half.read(buffer).await;
                (result, buffer, half)
            }));
        }
        let Some(pending) = self.pending.as_mut() else { return Err(io::ErrorKind::NotConnected.into()) };
        let (result, mut buffer, half) = pending.await;
        self.pending = None;
        let count = result?;
        input.extend_from_slice(&buffer[..count]);
        buffer.clear();
        self.idle = Some((buffer, half));
        Ok(count)
    }
}

/// Writing side; closes the connection's write direction when dropped.
pub struct Writer(OwnedWriteHalf<TcpStream>);

impl Writer {
    /// Writes all bytes and gives the buffer back, emptied.
    pub async fn write_all(&mut self, bytes: Vec<u8>) -> io::Result<Vec<u8>> {
        let (result, mut bytes) = self.0.write_all(bytes).await;
        result?;
        bytes.clear();
        Ok(bytes)
    }
}
