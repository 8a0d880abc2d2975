//! The HTTP/1.1 codec of both sides: heads, framing, chunked bodies, and the heads we write. Pure code over bytes:
//! it never reads a socket, a clock or a setting.
//!
//! Framing is strict where leniency would let two parties disagree about where a message ends: bare LF, folded
//! lines, NUL, space before a colon, a repeated or odd Content-Length, Content-Length beside Transfer-Encoding,
//! any coding but `chunked` are refused (RFC 9112, sections 2.2, 5 and 6.3).

pub(crate) mod chunked;
pub(crate) mod head;
pub(crate) mod request;
pub(crate) mod response;
pub(crate) mod write;

#[cfg(test)]
mod tests;

use memchr::memchr;

/// Header lines that the parser can hold, whatever the limit says.
pub(crate) const HEADERS_CAP: usize = 128;

/// A message that breaks the rules; the text says which.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Malformed(pub(crate) &'static str);

/// Finds the end of a head that arrives in pieces. Each byte is looked at once, and line ends are checked on the way.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HeadScan {
    /// Bytes looked at.
    scanned: usize,
    /// Start of the current line.
    line_start: usize,
}

impl HeadScan {
    /// Length of the head including its empty line, or `None` while it is incomplete. `bytes` starts at the first
    /// byte of the head and only grows between calls.
    pub(crate) fn end(&mut self, bytes: &[u8]) -> Result<Option<usize>, Malformed> {
        while let Some(offset) = memchr(b'\n', &bytes[self.scanned..]) {
            let newline = self.scanned + offset;
            if newline == 0 || bytes[newline - 1] != b'\r' {
                return Err(Malformed("a line ends without a carriage return"));
            }
            let line_length = newline - 1 - self.line_start;
            self.scanned = newline + 1;
            self.line_start = newline + 1;
            if line_length == 0 {
                return Ok(Some(newline + 1));
            }
        }
        self.scanned = bytes.len();
        Ok(None)
    }
}
