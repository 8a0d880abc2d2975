//! The codec as fuzz targets see it: bytes in, a panic where a promise is broken, a digest of what happened out. Only with
//! the feature `fuzzing`; nothing of the engine uses it.

use std::hash::{DefaultHasher, Hash, Hasher};

use crate::http1::chunked::Chunked;
use crate::http1::{HeadScan, Malformed, request, response};

const HEADERS_MAX: usize = 64;

fn digest(facts: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    facts.hash(&mut hasher);
    hasher.finish()
}

/// The first byte says how large the pieces are in which the rest arrives.
fn in_pieces(data: &[u8]) -> (usize, &[u8]) {
    match data.split_first() {
        Some((size, rest)) => (usize::from(*size).max(1), rest),
        None => (1, data),
    }
}

/// The end of a head is the same place, or the same fault, whatever the cuts.
fn head_end(data: &[u8]) -> Result<Option<usize>, Malformed> {
    let (size, bytes) = in_pieces(data);
    let whole = HeadScan::default().end(bytes);
    let mut scan = HeadScan::default();
    let mut cut = Ok(None);
    for end in (0..=bytes.len()).step_by(size).skip(1).chain([bytes.len()]) {
        cut = scan.end(&bytes[..end]);
        if !matches!(cut, Ok(None)) {
            break;
        }
    }
    assert_eq!(cut, whole, "the cuts changed where the head ends");
    if let Ok(Some(length)) = whole {
        assert!(bytes[..length].ends_with(b"\r\n") && length <= bytes.len());
    }
    whole
}

/// A request head: what is let through has one framing and no line that says otherwise.
pub fn request_head(data: &[u8]) -> u64 {
    let Ok(Some(length)) = head_end(data) else { return digest("no end") };
    let head = &in_pieces(data).1[..length];
    match request::parse(head, HEADERS_MAX) {
        Err(refusal) => {
            assert!(refusal.status.is_client_error() || refusal.status.is_server_error());
            digest((refusal.status.as_u16(), refusal.reason))
        }
        Ok(parsed) => {
            let lengths = parsed.head.get_all("content-length").count();
            let codings = parsed.head.get_all("transfer-encoding").count();
            assert!(lengths + codings <= 1, "two framings were let through");
            assert_eq!(codings == 1, parsed.framing == request::RequestFraming::Chunked);
            assert!(parsed.target.starts_with('/') || parsed.target == "*");
            assert!(!head.contains(&0), "a NUL was let through");
            digest((
                parsed.method.as_str(),
                codings,
                lengths,
                parsed.http10,
                parsed.keep_alive,
                parsed.expects_continue,
            ))
        }
    }
}

/// A response head, to a GET and to a HEAD.
pub fn response_head(data: &[u8]) -> u64 {
    let Ok(Some(length)) = head_end(data) else { return digest("no end") };
    let head = &in_pieces(data).1[..length];
    let (to_get, to_head) = (response::parse(head, false), response::parse(head, true));
    assert_eq!(to_get.is_ok(), to_head.is_ok());
    let (Ok(to_get), Ok(to_head)) = (&to_get, &to_head) else { return digest(to_get.err().map(|fault| fault.0)) };
    assert!(to_head.framing.is_done(), "an answer to HEAD has no body");
    assert!(!to_get.keep_alive || !matches!(to_get.framing, response::Framing::Close { .. }));
    let codings = to_get.head.get_all("transfer-encoding").count();
    assert!(to_get.head.get_all("content-length").count() + codings <= 1, "two framings were let through");
    digest((
        to_get.status.as_u16(),
        codings,
        to_get.content_length.is_some(),
        to_get.keep_alive,
        to_get.framing.is_done(),
    ))
}

/// What following a chunked body gave.
#[derive(Debug, PartialEq, Eq)]
struct Followed {
    payload: Vec<u8>,
    consumed: usize,
    is_done: bool,
    fault: Option<Malformed>,
}

fn follow(bytes: &[u8], size: usize) -> Followed {
    let mut chunked = Chunked::default();
    let mut followed = Followed { payload: Vec::new(), consumed: 0, is_done: false, fault: None };
    for piece in bytes.chunks(size) {
        match chunked.feed(piece, |range| followed.payload.extend_from_slice(&piece[range])) {
            Err(fault) => {
                followed.fault = Some(fault);
                break;
            }
            Ok(fed) => {
                assert!(fed.consumed <= piece.len() && fed.trailer_at.is_none_or(|at| at <= fed.consumed));
                followed.consumed += fed.consumed;
                if chunked.is_done() {
                    break;
                }
                assert_eq!(fed.consumed, piece.len(), "bytes were left before the end");
            }
        }
    }
    followed.is_done = chunked.is_done();
    followed
}

/// A chunked body: payload, end and fault are the same whatever the cuts.
pub fn chunked_body(data: &[u8]) -> u64 {
    let (size, bytes) = in_pieces(data);
    let (mut whole, mut cut) = (follow(bytes, bytes.len().max(1)), follow(bytes, size));
    if whole.fault.is_some() {
        // How far it came before the fault depends on where the piece with the fault began.
        (whole.consumed, cut.consumed) = (0, 0);
    }
    assert_eq!(whole, cut, "the cuts changed the body");
    digest((whole.is_done, whole.fault.map(|fault| fault.0), whole.payload.len().min(64)))
}
