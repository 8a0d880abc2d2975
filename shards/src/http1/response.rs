//! Response heads of upstreams and the framing of their bodies. It owns how the end of an answer is known and never
//! decides what to do about a bad one.

use std::mem::MaybeUninit;

use http::StatusCode;

use super::chunked::Chunked;
use super::head::Head;
use super::{HEADERS_CAP, Malformed};

/// A parsed response head.
#[derive(Debug)]
pub(crate) struct ResponseHead {
    pub(crate) status: StatusCode,
    pub(crate) keep_alive: bool,
    pub(crate) framing: Framing,
    /// As declared, also where there is no body (HEAD, 304).
    pub(crate) content_length: Option<u64>,
    pub(crate) head: Head,
}

/// How the end of a body is known.
#[derive(Debug)]
pub(crate) enum Framing {
    /// No body, whatever the headers say (HEAD, 1xx, 204, 304).
    Nothing,
    /// Bytes still to come.
    Length(u64),
    Chunked(Chunked),
    /// Everything until the upstream closes.
    Close {
        closed: bool,
    },
}

impl Framing {
    pub(crate) fn is_done(&self) -> bool {
        match self {
            Framing::Nothing => true,
            Framing::Length(left) => *left == 0,
            Framing::Chunked(chunked) => chunked.is_done(),
            Framing::Close { closed } => *closed,
        }
    }
}

/// Parses a complete head (with its empty line, line ends already checked by [`super::HeadScan`]).
pub(crate) fn parse(bytes: &[u8], to_head_request: bool) -> Result<ResponseHead, Malformed> {
    let mut lines = [MaybeUninit::uninit(); HEADERS_CAP];
    let mut parsed = httparse::Response::new(&mut []);
    match httparse::ParserConfig::default().parse_response_with_uninit_headers(&mut parsed, bytes, &mut lines) {
        Ok(httparse::Status::Complete(length)) if length == bytes.len() => {}
        Ok(_) => return Err(Malformed("a head that does not end where its lines end")),
        Err(httparse::Error::TooManyHeaders) => return Err(Malformed("too many header lines")),
        Err(httparse::Error::HeaderName) => return Err(Malformed("an invalid header name")),
        Err(httparse::Error::HeaderValue) => return Err(Malformed("an invalid header value")),
        Err(_) => return Err(Malformed("an invalid status line")),
    }
    let (Some(version), Some(code)) = (parsed.version, parsed.code) else {
        return Err(Malformed("an incomplete status line"));
    };
    let status = StatusCode::from_u16(code).map_err(|_| Malformed("a status outside 100 to 999"))?;
    let (head, facts) = Head::new(bytes, parsed.headers)?;
    let http10 = version == 0;
    if http10 && facts.chunked {
        return Err(Malformed("Transfer-Encoding in HTTP/1.0"));
    }
    let bodiless = to_head_request || status.is_informational() || code == 204 || code == 304;
    let framing = match facts.content_length {
        _ if bodiless => Framing::Nothing,
        _ if facts.chunked => Framing::Chunked(Chunked::default()),
        Some(length) => Framing::Length(length),
        None => Framing::Close { closed: false },
    };
    let delimited = !matches!(framing, Framing::Close { .. });
    let keep_alive = delimited && !facts.close && (!http10 || facts.keep_alive);
    Ok(ResponseHead { status, keep_alive, framing, content_length: facts.content_length, head })
}

/// The reason phrase of a parsed head, as it came.
pub(crate) fn reason_of(raw_head: &[u8]) -> &[u8] {
    // "HTTP/1.1 200 OK\r\n": the parser has checked the first 12 bytes.
    const AFTER_STATUS: usize = 12;
    let line_end = memchr::memchr(b'\r', raw_head).unwrap_or(raw_head.len());
    let start = (AFTER_STATUS + 1).min(line_end);
    &raw_head[start..line_end]
}
