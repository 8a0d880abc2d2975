//! One blocking client connection: a request out, its whole answer in. Never pipelines, never reconnects.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::http::{BodyReader, response_head};

/// Longest silence inside an answer.
const SILENCE_MAX: Duration = Duration::from_secs(20);

pub struct Exchange {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Exchange {
    pub fn connect(target: SocketAddr) -> Result<Exchange> {
        let stream = TcpStream::connect(target).with_context(|| format!("connecting to {target}"))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(SILENCE_MAX))?;
        Ok(Exchange { stream, buffer: vec![0; 64 << 10] })
    }

    /// Sends `request`; `payload` sees the answer's payload as it comes.
    ///
    /// Errors: another status than 200, a cut, silence.
    pub fn run(&mut self, request: &[u8], mut payload: impl FnMut(&[u8])) -> Result<()> {
        self.stream.write_all(request).context("sending a request")?;
        let mut input = Vec::new();
        let head = loop {
            let count = self.stream.read(&mut self.buffer).context("reading an answer's head")?;
            ensure!(count > 0, "connection closed before the answer");
            input.extend_from_slice(&self.buffer[..count]);
            if let Some(head) = response_head(&input)? {
                break head;
            }
        };
        let mut body = BodyReader::new(head.framing);
        let mut take = |body: &mut BodyReader, bytes: &[u8]| {
            body.push(bytes, |data| {
                payload(data);
                Ok(())
            })
        };
        take(&mut body, &input[head.bytes..])?;
        ensure!(
            head.status == 200,
            "status {}: {}",
            head.status,
            String::from_utf8_lossy(&input[..input.len().min(600)])
        );
        while !body.done() {
            let count = self.stream.read(&mut self.buffer).context("reading an answer")?;
            ensure!(count > 0, "connection closed inside the answer");
            take(&mut body, &self.buffer[..count])?;
        }
        Ok(())
    }
}
