//! The heads that we write: requests to upstreams, relayed answers, answers of our own, chunk framing. It appends to
//! a caller's buffer and never allocates otherwise.

use http::{HeaderName, HeaderValue, Method, StatusCode};

use super::head::{Head, Role, is_alike};
use super::response::reason_of;
use crate::clock;

/// Appends a decimal number.
pub(crate) fn decimal(out: &mut Vec<u8>, mut value: u64) {
    let mut digits = [0_u8; 20];
    let mut start = digits.len();
    loop {
        start -= 1;
        digits[start] = b'0' + (value % 10) as u8;
        value /= 10;
        if value == 0 {
            break;
        }
    }
    out.extend_from_slice(&digits[start..]);
}

/// Appends the size line of a chunk.
pub(crate) fn chunk_start(out: &mut Vec<u8>, length: usize) {
    const HEX: &[u8; 16] = b"0123456789abcdef";
    let digits = (usize::BITS - length.leading_zeros()).div_ceil(4).max(1);
    for digit in (0..digits).rev() {
        out.push(HEX[(length >> (digit * 4)) & 15]);
    }
    out.extend_from_slice(b"\r\n");
}

fn line(out: &mut Vec<u8>, name: &[u8], value: &[u8]) {
    out.extend_from_slice(name);
    out.extend_from_slice(b": ");
    out.extend_from_slice(value);
    out.extend_from_slice(b"\r\n");
}

/// Appends the end-to-end lines of `head` as they came, but for names that are alike to one in `remove` or `set`.
fn copied_lines(out: &mut Vec<u8>, head: &Head, remove: &[HeaderName], set: &[(HeaderName, HeaderValue)]) {
    for copied in head.lines() {
        if copied.role != Role::EndToEnd {
            continue;
        }
        let replaced = remove.iter().chain(set.iter().map(|(name, _)| name));
        if replaced.into_iter().any(|name| is_alike(name.as_str().as_bytes(), copied.name)) {
            continue;
        }
        out.extend_from_slice(copied.raw);
        out.extend_from_slice(b"\r\n");
    }
}

/// What [`request`] needs; the fields are those of the public request to an upstream.
pub(crate) struct RequestLines<'a> {
    pub(crate) method: &'a Method,
    pub(crate) path_prefix: &'a str,
    pub(crate) target: &'a str,
    pub(crate) authority: &'a str,
    pub(crate) headers: Option<&'a Head>,
    pub(crate) remove: &'a [HeaderName],
    pub(crate) set: &'a [(HeaderName, HeaderValue)],
    pub(crate) body_bytes: u64,
}

/// Appends a request head. The whole body is at hand, so framing is always one Content-Length.
pub(crate) fn request(out: &mut Vec<u8>, lines: &RequestLines<'_>) {
    out.extend_from_slice(lines.method.as_str().as_bytes());
    out.push(b' ');
    out.extend_from_slice(lines.path_prefix.as_bytes());
    out.extend_from_slice(lines.target.as_bytes());
    out.extend_from_slice(b" HTTP/1.1\r\n");
    line(out, b"Host", lines.authority.as_bytes());
    if let Some(head) = lines.headers {
        copied_lines(out, head, lines.remove, lines.set);
    }
    for (name, value) in lines.set {
        line(out, name.as_str().as_bytes(), value.as_bytes());
    }
    if lines.body_bytes > 0 || matches!(*lines.method, Method::POST | Method::PUT | Method::PATCH) {
        out.extend_from_slice(b"Content-Length: ");
        decimal(out, lines.body_bytes);
        out.extend_from_slice(b"\r\n");
    }
    out.extend_from_slice(b"\r\n");
}

/// What the connection to the client becomes after an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum After {
    /// Kept, which is HTTP/1.1's default.
    Keep,
    /// Kept because an HTTP/1.0 client asked for it.
    KeepSaid,
    Close,
}

fn connection_line(out: &mut Vec<u8>, after: After) {
    match after {
        After::Keep => {}
        After::KeepSaid => out.extend_from_slice(b"Connection: keep-alive\r\n"),
        After::Close => out.extend_from_slice(b"Connection: close\r\n"),
    }
}

/// Framing line of a relayed answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FramingLine {
    None,
    ContentLength(u64),
    Chunked,
}

/// Appends the head of a relayed answer: status and reason as they came, end-to-end lines, our own framing.
pub(crate) fn relayed_head(
    out: &mut Vec<u8>,
    status: StatusCode,
    head: &Head,
    (remove, set): (&[HeaderName], &[(HeaderName, HeaderValue)]),
    framing: FramingLine,
    after: After,
) {
    out.extend_from_slice(b"HTTP/1.1 ");
    out.extend_from_slice(status.as_str().as_bytes());
    out.push(b' ');
    out.extend_from_slice(reason_of(head.raw()));
    out.extend_from_slice(b"\r\n");
    copied_lines(out, head, remove, set);
    for (name, value) in set {
        line(out, name.as_str().as_bytes(), value.as_bytes());
    }
    match framing {
        FramingLine::None => {}
        FramingLine::ContentLength(length) => {
            out.extend_from_slice(b"Content-Length: ");
            decimal(out, length);
            out.extend_from_slice(b"\r\n");
        }
        FramingLine::Chunked => out.extend_from_slice(b"Transfer-Encoding: chunked\r\n"),
    }
    connection_line(out, after);
    out.extend_from_slice(b"\r\n");
}

/// Appends the head of an answer of our own. Framing, `Date` and `Connection` are the engine's: such lines among
/// `headers` are left out (a `Date` of the service's is kept instead of ours).
pub(crate) fn own_head(
    out: &mut Vec<u8>,
    status: StatusCode,
    headers: &[(HeaderName, HeaderValue)],
    body_bytes: u64,
    after: After,
) {
    out.extend_from_slice(b"HTTP/1.1 ");
    out.extend_from_slice(status.as_str().as_bytes());
    out.push(b' ');
    out.extend_from_slice(status.canonical_reason().unwrap_or_default().as_bytes());
    out.extend_from_slice(b"\r\n");
    let mut dated = false;
    for (name, value) in headers {
        if matches!(*name, http::header::CONTENT_LENGTH | http::header::TRANSFER_ENCODING | http::header::CONNECTION) {
            continue;
        }
        dated |= name == http::header::DATE;
        line(out, name.as_str().as_bytes(), value.as_bytes());
    }
    if !dated {
        out.extend_from_slice(b"date: ");
        clock::write_date(out);
        out.extend_from_slice(b"\r\n");
    }
    if !status.is_informational() && status != StatusCode::NO_CONTENT {
        out.extend_from_slice(b"content-length: ");
        decimal(out, body_bytes);
        out.extend_from_slice(b"\r\n");
    }
    connection_line(out, after);
    out.extend_from_slice(b"\r\n");
}
