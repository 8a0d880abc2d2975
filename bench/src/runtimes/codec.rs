//! What the HTTP candidates share: rewriting of heads, so that all do equal work on equal bytes.
//!
//! Never touches a socket.

use std::io::Write;

use anyhow::Result;

use crate::http::{Framing, request_head, response_head};

/// The head in front of a buffer: its length and how its body ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    pub bytes: usize,
    pub framing: Framing,
}

/// Appends the request head at the front of `input` to `output` with `Host: authority` and without
/// hop-by-hop headers. `None` while it is incomplete.
pub fn rewrite_request(input: &[u8], authority: &str, output: &mut Vec<u8>) -> Result<Option<Head>> {
    let Some(head) = request_head(input)? else { return Ok(None) };
    write!(output, "{} {} HTTP/1.1\r\nHost: {authority}\r\n", head.method, head.path)?;
    copy_headers(&input[..head.bytes], &["host", "connection", "keep-alive"], output);
    Ok(Some(Head { bytes: head.bytes, framing: head.framing }))
}

/// As [`rewrite_request`], for the way back.
pub fn rewrite_response(input: &[u8], output: &mut Vec<u8>) -> Result<Option<Head>> {
    let Some(head) = response_head(input)? else { return Ok(None) };
    let line = input.iter().position(|byte| *byte == b'\n').map_or(0, |end| end + 1);
    output.extend_from_slice(&input[..line]);
    copy_headers(&input[..head.bytes], &["connection", "keep-alive"], output);
    Ok(Some(Head { bytes: head.bytes, framing: head.framing }))
}

/// Copies the header lines of a parsed head but for those named, and ends the head.
fn copy_headers(head: &[u8], without: &[&str], output: &mut Vec<u8>) {
    for line in head.split_inclusive(|byte| *byte == b'\n').skip(1) {
        let name = line.split(|byte| *byte == b':').next().unwrap_or_default();
        if !without.iter().any(|skipped| name.eq_ignore_ascii_case(skipped.as_bytes())) {
            output.extend_from_slice(line);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_rewritten() {
        let mut output = Vec::new();
        let input = b"POST /v1 HTTP/1.1\r\nhost: a\r\nConnection: keep-alive\r\nX: y\r\nContent-Length: 2\r\n\r\n{}";
        let head = rewrite_request(input, "b:1", &mut output).unwrap().unwrap();
        assert_eq!(head, Head { bytes: input.len() - 2, framing: Framing::Length(2) });
        assert_eq!(output, b"POST /v1 HTTP/1.1\r\nHost: b:1\r\nX: y\r\nContent-Length: 2\r\n\r\n");
        output.clear();
        let input = b"HTTP/1.1 200 OK\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n";
        assert_eq!(rewrite_response(input, &mut output).unwrap().unwrap().framing, Framing::Chunked);
        assert_eq!(output, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n");
        assert!(rewrite_response(&input[..20], &mut output).unwrap().is_none());
    }
}
