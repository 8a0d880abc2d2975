//! Request heads: from bytes to method, target, framing and connection wishes. It owns which requests are refused
//! before anyone sees them and never looks at a body.

use std::mem::MaybeUninit;

use http::{Method, StatusCode};

use super::head::{Expect, Head};
use super::{HEADERS_CAP, Malformed};

/// A parsed request head.
#[derive(Debug)]
pub(crate) struct RequestHead {
    pub(crate) method: Method,
    /// Path and query as sent; the authority of an absolute form is cut off.
    pub(crate) target: String,
    pub(crate) http10: bool,
    pub(crate) keep_alive: bool,
    pub(crate) expects_continue: bool,
    pub(crate) framing: RequestFraming,
    pub(crate) head: Head,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestFraming {
    Length(u64),
    Chunked,
}

/// Why a request is refused: status and a text for its sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) status: StatusCode,
    pub(crate) reason: &'static str,
}

impl From<Malformed> for Refusal {
    fn from(malformed: Malformed) -> Refusal {
        Refusal { status: StatusCode::BAD_REQUEST, reason: malformed.0 }
    }
}

fn refuse(status: StatusCode, reason: &'static str) -> Refusal {
    Refusal { status, reason }
}

/// Parses a complete head (with its empty line, line ends already checked by [`super::HeadScan`]).
pub(crate) fn parse(bytes: &[u8], headers_max: usize) -> Result<RequestHead, Refusal> {
    let mut lines = [MaybeUninit::uninit(); HEADERS_CAP];
    let mut parsed = httparse::Request::new(&mut []);
    match parsed.parse_with_uninit_headers(bytes, &mut lines) {
        Ok(httparse::Status::Complete(length)) if length == bytes.len() => {}
        Ok(_) => return Err(Malformed("a head that does not end where its lines end").into()),
        Err(error) => return Err(refusal_of(error, bytes)),
    }
    if parsed.headers.len() > headers_max {
        return Err(refuse(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, "too many header lines"));
    }
    let (Some(method), Some(target), Some(version)) = (parsed.method, parsed.path, parsed.version) else {
        return Err(Malformed("an incomplete request line").into());
    };
    let (head, facts) = Head::new(bytes, parsed.headers)?;
    let http10 = version == 0;
    if http10 && facts.chunked {
        return Err(Malformed("Transfer-Encoding in HTTP/1.0").into());
    }
    if facts.hosts > 1 || (facts.hosts == 0 && !http10) {
        return Err(Malformed("not exactly one Host").into());
    }
    if facts.expect == Expect::Unknown {
        return Err(refuse(StatusCode::EXPECTATION_FAILED, "an unknown expectation"));
    }
    Ok(RequestHead {
        method: method_of(method)?,
        target: target_of(target)?,
        http10,
        keep_alive: !facts.close && (!http10 || facts.keep_alive),
        expects_continue: facts.expect == Expect::Continue && !http10,
        framing: match facts.content_length {
            _ if facts.chunked => RequestFraming::Chunked,
            length => RequestFraming::Length(length.unwrap_or(0)),
        },
        head,
    })
}

fn refusal_of(error: httparse::Error, bytes: &[u8]) -> Refusal {
    match error {
        httparse::Error::TooManyHeaders => refuse(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, "too many header lines"),
        httparse::Error::Version if names_a_version(bytes) => {
            refuse(StatusCode::HTTP_VERSION_NOT_SUPPORTED, "an HTTP version other than 1.0 and 1.1")
        }
        httparse::Error::HeaderName => Malformed("an invalid header name").into(),
        httparse::Error::HeaderValue => Malformed("an invalid header value").into(),
        _ => Malformed("an invalid request line").into(),
    }
}

/// The parser calls anything after the target a version; only `HTTP/…` at the line's end is one.
fn names_a_version(bytes: &[u8]) -> bool {
    let line = bytes.split(|&byte| byte == b'\r').next().unwrap_or_default();
    let mut words = line.split(|&byte| byte == b' ').skip(2);
    words.next().is_some_and(|word| word.starts_with(b"HTTP/")) && words.next().is_none()
}

fn method_of(name: &str) -> Result<Method, Refusal> {
    match name {
        "POST" => Ok(Method::POST),
        "GET" => Ok(Method::GET),
        "CONNECT" => Err(refuse(StatusCode::NOT_IMPLEMENTED, "CONNECT is not supported")),
        _ => Method::from_bytes(name.as_bytes()).map_err(|_| Malformed("an invalid method").into()),
    }
}

/// Origin form as it is, absolute form without scheme and authority, `*` for OPTIONS. None of them has a fragment (RFC 9112,
/// section 3.2): one server ends the path there and another takes it for a part of it.
fn target_of(target: &str) -> Result<String, Refusal> {
    if target.contains('#') {
        return Err(Malformed("a fragment in the request target").into());
    }
    if target.starts_with('/') || target == "*" {
        return Ok(target.to_owned());
    }
    let rest = target.split_once("://").map(|(_, rest)| rest).ok_or(Malformed("an invalid request target"))?;
    Ok(match rest.find(['/', '?']) {
        Some(start) if rest[start..].starts_with('/') => rest[start..].to_owned(),
        Some(start) => format!("/{}", &rest[start..]),
        None => String::from("/"),
    })
}
