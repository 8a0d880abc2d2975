//! The codec as benches see it: one step per call, as a connection takes it. Only with the feature `measuring`; nothing of
//! the engine uses it.

use crate::http1::chunked::Chunked;
use crate::http1::{HeadScan, request, response};

const HEADERS_MAX: usize = 100;

/// Finds the end of a request's head and reads it; how many header lines it has, nothing for a head that is not whole or
/// not good.
pub fn request_head(bytes: &[u8]) -> Option<usize> {
    let length = HeadScan::default().end(bytes).ok()??;
    Some(request::parse(&bytes[..length], HEADERS_MAX).ok()?.head.len())
}

/// The same of an answer's head.
pub fn response_head(bytes: &[u8]) -> Option<usize> {
    let length = HeadScan::default().end(bytes).ok()??;
    Some(response::parse(&bytes[..length], false).ok()?.head.len())
}

/// Follows a chunked body that arrives in pieces; its bytes of payload, nothing for one that does not end with the pieces.
pub fn chunked_body(pieces: &[&[u8]]) -> Option<usize> {
    let (mut chunked, mut payload) = (Chunked::default(), 0);
    for piece in pieces {
        chunked.feed(piece, |range| payload += range.len()).ok()?;
    }
    chunked.is_done().then_some(payload)
}
