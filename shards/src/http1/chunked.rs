//! The chunked coding, followed byte by byte without changing it. It knows where payload lies and where the message
//! ends, whatever the cuts between reads are; it never copies and never buffers.

use std::ops::Range;

use super::Malformed;

/// Bytes of one chunk extension; a longer one only serves to exhaust somebody.
const EXTENSION_BYTES_MAX: u32 = 256;
/// Bytes of all trailer lines.
const TRAILER_BYTES_MAX: u32 = 8 << 10;
/// Hex digits of a chunk size: 60 bits, so that nothing overflows here or downstream.
const SIZE_DIGITS_MAX: u32 = 15;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// In a size line; how many digits came.
    Size(u32),
    /// In a chunk extension; how many bytes came.
    Extension(u32),
    SizeLineFeed,
    Data,
    DataCarriageReturn,
    DataLineFeed,
    /// At the start of a trailer line, or of the empty line that ends the message.
    TrailerStart,
    TrailerLine,
    TrailerLineFeed,
    EndLineFeed,
    Done,
}

/// Position inside a chunked body.
#[derive(Clone, Debug)]
pub(crate) struct Chunked {
    state: State,
    /// Payload bytes left of the current chunk, or its size so far while the size line is read.
    left: u64,
    trailer_bytes: u32,
}

impl Default for Chunked {
    fn default() -> Chunked {
        Chunked { state: State::Size(0), left: 0, trailer_bytes: 0 }
    }
}

/// What one piece of input was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fed {
    /// Bytes that belong to this message; fewer than given only at its end.
    pub(crate) consumed: usize,
    /// Where in this piece trailer lines begin, if they do; everything from there to `consumed` is trailer and end.
    pub(crate) trailer_at: Option<usize>,
}

impl Chunked {
    pub(crate) fn is_done(&self) -> bool {
        self.state == State::Done
    }

    /// Payload announced by the current chunk and not yet seen.
    pub(crate) fn left_of_chunk(&self) -> u64 {
        if self.state == State::Data { self.left } else { 0 }
    }

    /// Between two chunks: what was sent so far ends with a whole chunk, and one more may follow.
    pub(crate) fn is_at_boundary(&self) -> bool {
        self.state == State::Size(0)
    }

    /// Follows `input`, telling `payload` the ranges that are payload, in order.
    pub(crate) fn feed(&mut self, input: &[u8], mut payload: impl FnMut(Range<usize>)) -> Result<Fed, Malformed> {
        // Lines already begun in an earlier piece are suppressed from the start of this one.
        let mut trailer_at = (self.trailer_bytes > 0 && !self.is_done()).then_some(0);
        let mut at = 0;
        while at < input.len() && self.state != State::Done {
            if self.state == State::Data {
                let length = self.left.min((input.len() - at) as u64) as usize;
                payload(at..at + length);
                at += length;
                self.left -= length as u64;
                if self.left == 0 {
                    self.state = State::DataCarriageReturn;
                }
                continue;
            }
            let was = self.state;
            self.state = self.step(input[at])?;
            if was == State::TrailerStart && self.state == State::TrailerLine && trailer_at.is_none() {
                trailer_at = Some(at);
            }
            at += 1;
        }
        Ok(Fed { consumed: at, trailer_at })
    }

    /// One byte outside of payload.
    fn step(&mut self, byte: u8) -> Result<State, Malformed> {
        Ok(match (self.state, byte) {
            (State::Size(digits), _) if byte.is_ascii_hexdigit() => {
                if digits == SIZE_DIGITS_MAX {
                    return Err(Malformed("a chunk size that is too large"));
                }
                let digit = (byte as char).to_digit(16).unwrap_or_default();
                self.left = if digits == 0 { 0 } else { self.left << 4 } | u64::from(digit);
                State::Size(digits + 1)
            }
            (State::Size(1..), b'\r') => State::SizeLineFeed,
            (State::Size(1..), b';') => State::Extension(0),
            (State::Size(_), _) => return Err(Malformed("an invalid chunk size")),
            (State::Extension(_), b'\r') => State::SizeLineFeed,
            (State::Extension(count), _) => {
                if count == EXTENSION_BYTES_MAX || (byte.is_ascii_control() && byte != b'\t') {
                    return Err(Malformed("an invalid or long chunk extension"));
                }
                State::Extension(count + 1)
            }
            (State::SizeLineFeed, b'\n') if self.left == 0 => State::TrailerStart,
            (State::SizeLineFeed, b'\n') => State::Data,
            (State::DataCarriageReturn, b'\r') => State::DataLineFeed,
            (State::DataLineFeed, b'\n') => State::Size(0),
            (State::TrailerStart, b'\r') => State::EndLineFeed,
            (State::TrailerStart | State::TrailerLine, _) => self.trailer_byte(byte)?,
            (State::TrailerLineFeed, b'\n') => State::TrailerStart,
            (State::EndLineFeed, b'\n') => State::Done,
            _ => return Err(Malformed("a chunk that does not end with CR LF")),
        })
    }

    fn trailer_byte(&mut self, byte: u8) -> Result<State, Malformed> {
        self.trailer_bytes += 1;
        if self.trailer_bytes > TRAILER_BYTES_MAX {
            return Err(Malformed("too many trailer bytes"));
        }
        match byte {
            b'\r' => Ok(State::TrailerLineFeed),
            b'\n' | 0 => Err(Malformed("an invalid trailer line")),
            _ => Ok(State::TrailerLine),
        }
    }
}
