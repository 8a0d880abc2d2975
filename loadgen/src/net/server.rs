//! Owns the server side of HTTP/1.1: request heads and bodies in, response framing out. Never routes.

use std::io;

use super::stream::{Reader, Writer};

/// Largest request head and body accepted.
const HEAD_BYTES_MAX: usize = 64 * 1024;
const BODY_BYTES_MAX: usize = 64 * 1024 * 1024;
const HEADERS_MAX: usize = 100;

/// What a handler must know of a request.
#[derive(Debug, Default, Clone)]
pub struct Request {
    pub method: String,
    /// Path without the query.
    pub path: String,
    pub query: String,
    pub body: Vec<u8>,
    pub keep_alive: bool,
    /// `X-Data-Parallel-Rank`, verbatim.
    pub rank: Option<String>,
    /// `X-Request-Id`, verbatim.
    pub request_id: Option<String>,
    expects_continue: bool,
}

/// Why no request could be read.
#[derive(Debug)]
pub enum RequestError {
    /// The peer left, or the connection broke.
    Gone,
    /// The peer's bytes are not an acceptable request: status to answer before closing.
    Refused(u16, &'static str),
}

impl From<io::Error> for RequestError {
    fn from(_: io::Error) -> RequestError {
        RequestError::Gone
    }
}

enum Framing {
    Length(usize),
    Chunked,
}

/// Reads the next request; `input` holds bytes not yet used and keeps what follows. `None` = closed between requests.
/// A client that asked for `100 Continue` gets it through `writer` before its body is read.
pub async fn read_request(
    reader: &mut Reader,
    writer: &mut Writer,
    input: &mut Vec<u8>,
) -> Result<Option<Request>, RequestError> {
    let (mut request, framing, head_length) = loop {
        if let Some(parsed) = parse_head(input)? {
            break parsed;
        }
        if input.len() > HEAD_BYTES_MAX {
            return Err(RequestError::Refused(431, "request head too large"));
        }
        if reader.more(input).await? == 0 {
            return if input.is_empty() { Ok(None) } else { Err(RequestError::Gone) };
        }
    };
    input.drain(..head_length);
    if request.expects_continue {
        writer.write_all(b"HTTP/1.1 100 Continue\r\n\r\n".to_vec()).await?;
    }
    match framing {
        Framing::Length(length) if length > BODY_BYTES_MAX => {
            return Err(RequestError::Refused(413, "request body too large"));
        }
        Framing::Length(length) => {
            input.reserve(length.saturating_sub(input.len()));
            while input.len() < length {
                if reader.more(input).await? == 0 {
                    return Err(RequestError::Gone);
                }
            }
            request.body = input.drain(..length).collect();
        }
        Framing::Chunked => request.body = read_chunked(reader, input).await?,
    }
    Ok(Some(request))
}

/// `None` while the head is incomplete.
fn parse_head(input: &[u8]) -> Result<Option<(Request, Framing, usize)>, RequestError> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut head = httparse::Request::new(&mut headers);
    let length = match head.parse(input) {
        Ok(httparse::Status::Complete(length)) => length,
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(_) => return Err(RequestError::Refused(400, "malformed request head")),
    };
    let target = head.path.unwrap_or("/");
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let mut request = Request {
        method: head.method.unwrap_or("").to_string(),
        path: path.to_string(),
        query: query.to_string(),
        keep_alive: head.version == Some(1),
        ..Request::default()
    };
    let mut framing = Framing::Length(0);
    for header in head.headers.iter() {
        let text = || std::str::from_utf8(header.value).unwrap_or("").trim();
        if header.name.eq_ignore_ascii_case("content-length") {
            let Ok(length) = text().parse() else { return Err(RequestError::Refused(400, "bad Content-Length")) };
            if !matches!(framing, Framing::Chunked) {
                framing = Framing::Length(length);
            }
        } else if header.name.eq_ignore_ascii_case("transfer-encoding") {
            if !text().eq_ignore_ascii_case("chunked") {
                return Err(RequestError::Refused(501, "unknown transfer coding"));
            }
            framing = Framing::Chunked;
        } else if header.name.eq_ignore_ascii_case("connection") {
            if text().eq_ignore_ascii_case("close") {
                request.keep_alive = false;
            } else if text().eq_ignore_ascii_case("keep-alive") {
                request.keep_alive = true;
            }
        } else if header.name.eq_ignore_ascii_case("expect") {
            request.expects_continue = text().eq_ignore_ascii_case("100-continue");
        } else if header.name.eq_ignore_ascii_case("x-data-parallel-rank") {
            request.rank = Some(text().to_string());
        } else if header.name.eq_ignore_ascii_case("x-request-id") {
            request.request_id = Some(text().to_string());
        }
    }
    Ok(Some((request, framing, length)))
}

async fn read_chunked(reader: &mut Reader, input: &mut Vec<u8>) -> Result<Vec<u8>, RequestError> {
    const BAD: RequestError = RequestError::Refused(400, "malformed chunk");
    let mut body = Vec::new();
    loop {
        let (start, size) = loop {
            match httparse::parse_chunk_size(input) {
                Ok(httparse::Status::Complete((start, size))) => break (start, size),
                Ok(httparse::Status::Partial) if input.len() < HEAD_BYTES_MAX => {}
                _ => return Err(BAD),
            }
            if reader.more(input).await? == 0 {
                return Err(RequestError::Gone);
            }
        };
        if size > BODY_BYTES_MAX as u64 || body.len() + size as usize > BODY_BYTES_MAX {
            return Err(RequestError::Refused(413, "request body too large"));
        }
        input.drain(..start);
        if size == 0 {
            skip_trailers(reader, input).await?;
            return Ok(body);
        }
        let size = size as usize;
        while input.len() < size + 2 {
            if reader.more(input).await? == 0 {
                return Err(RequestError::Gone);
            }
        }
        if &input[size..size + 2] != b"\r\n" {
            return Err(BAD);
        }
        body.extend_from_slice(&input[..size]);
        input.drain(..size + 2);
    }
}

async fn skip_trailers(reader: &mut Reader, input: &mut Vec<u8>) -> Result<(), RequestError> {
    loop {
        if let Some(end) = input.windows(2).position(|pair| pair == b"\r\n") {
            input.drain(..end + 2);
            if end == 0 {
                return Ok(());
            }
            continue;
        }
        if input.len() > HEAD_BYTES_MAX || reader.more(input).await? == 0 {
            return Err(RequestError::Gone);
        }
    }
}

fn reason(status: u16) -> &'static str {
    http::StatusCode::from_u16(status).ok().and_then(|status| status.canonical_reason()).unwrap_or("Unknown")
}

/// A whole response.
pub fn response(status: u16, content_type: &str, extra: &[(&str, &str)], body: &[u8], keep_alive: bool) -> Vec<u8> {
    let mut out = head(status, content_type, extra, keep_alive);
    out.extend_from_slice(format!("content-length: {}\r\n\r\n", body.len()).as_bytes());
    out.extend_from_slice(body);
    out
}

/// The head of a response whose body follows in chunks.
pub fn chunked_head(status: u16, content_type: &str, extra: &[(&str, &str)], keep_alive: bool) -> Vec<u8> {
    let mut out = head(status, content_type, extra, keep_alive);
    out.extend_from_slice(b"transfer-encoding: chunked\r\n\r\n");
    out
}

fn head(status: u16, content_type: &str, extra: &[(&str, &str)], keep_alive: bool) -> Vec<u8> {
    let connection = if keep_alive { "keep-alive" } else { "close" };
    let mut out =
        format!("HTTP/1.1 {status} {}\r\ncontent-type: {content_type}\r\nconnection: {connection}\r\n", reason(status));
    for (name, value) in extra {
        out.push_str(&format!("{name}: {value}\r\n"));
    }
    out.into_bytes()
}

/// Appends one chunk; an empty one would end the body and is left out.
pub fn push_chunk(out: &mut Vec<u8>, data: &[u8]) {
    if !data.is_empty() {
        out.extend_from_slice(format!("{:x}\r\n", data.len()).as_bytes());
        out.extend_from_slice(data);
        out.extend_from_slice(b"\r\n");
    }
}

/// Ends a chunked body.
pub const LAST_CHUNK: &[u8] = b"0\r\n\r\n";
