//! The codec as tables of raw bytes in and verdicts out, fed whole, byte by byte and at every cut.

use super::chunked::Chunked;
use super::head::Head;
use super::request::{self, RequestFraming};
use super::response::{self, Framing};
use super::{HeadScan, write};
use http::{HeaderName, HeaderValue, Method, StatusCode};

fn parse_request(bytes: &[u8]) -> Result<request::RequestHead, u16> {
    match HeadScan::default().end(bytes) {
        Err(_) => Err(400),
        Ok(None) => Err(0),
        Ok(Some(length)) => request::parse(&bytes[..length], 100).map_err(|refusal| refusal.status.as_u16()),
    }
}

fn parse_response(bytes: &[u8]) -> Result<response::ResponseHead, &'static str> {
    match HeadScan::default().end(bytes) {
        Err(malformed) => Err(malformed.0),
        Ok(None) => Err("partial"),
        Ok(Some(length)) => response::parse(&bytes[..length], false).map_err(|malformed| malformed.0),
    }
}

#[test]
fn requests_that_are_refused() {
    let refused: &[(&str, u16)] = &[
        ("POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 13\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        ("POST / HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n", 400),
        ("POST / HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked, identity\r\n\r\n", 400),
        ("POST / HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: identity, chunked\r\n\r\n", 400),
        ("POST / HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: xchunked\r\n\r\n", 400),
        ("POST / HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: gzip\r\n\r\n", 400),
        ("POST / HTTP/1.1\r\nHost: t\r\nTransfer-Encoding:\r\n\r\n", 400),
        ("POST / HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        ("POST / HTTP/1.1\r\nHost: t\r\nTransfer-Encoding : chunked\r\n\r\n", 400),
        ("POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        ("POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", 400),
        ("POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\n", 400),
        ("POST / HTTP/1.1\r\nHost: t\r\nContent-Length: +5\r\n\r\n", 400),
        ("POST / HTTP/1.1\r\nHost: t\r\nContent-Length: -5\r\n\r\n", 400),
        ("POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 5, 5\r\n\r\n", 400),
        ("POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 0x5\r\n\r\n", 400),
        ("POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 5 5\r\n\r\n", 400),
        ("POST / HTTP/1.1\r\nHost: t\r\nContent-Length:\r\n\r\n", 400),
        ("POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 18446744073709551616\r\n\r\n", 400),
        ("POST / HTTP/1.1\r\nHost: t\r\nTransfer_Encoding: chunked\r\n\r\n", 400),
        ("POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 5\r\ntransfer.encoding: chunked\r\n\r\n", 400),
        ("POST / HTTP/1.1\r\nHost: t\r\nContent_Length: 5\r\n\r\n", 400),
        ("POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 5\r\nCONTENT~LENGTH: 5\r\n\r\n", 400),
        ("GET / HTTP/1.1\nHost: t\n\n", 400),
        ("GET / HTTP/1.1\r\nHost: t\n\r\n", 400),
        ("GET / HTTP/1.1\r\nHost: t\r\nX: a\r\n b\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nHost: t\r\nX: a\r\n\tb\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\n Host: t\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nHost: t\r\nX: a\0b\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nHost: t\r\nX\0: b\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nHost: t\r\nX: a\rb\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nHost: t\r\nX : b\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nHost: t\r\n: b\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nHost: t\r\nno colon\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\n\r\n", 400),
        ("GET /\r\n\r\n", 400),
        ("GET /a b HTTP/1.1\r\nHost: t\r\n\r\n", 400),
        ("GET  / HTTP/1.1\r\nHost: t\r\n\r\n", 400),
        ("G@T / HTTP/1.1\r\nHost: t\r\n\r\n", 400),
        ("GET nowhere HTTP/1.1\r\nHost: t\r\n\r\n", 400),
        ("GET / HTTP/2.0\r\nHost: t\r\n\r\n", 505),
        ("CONNECT a:1 HTTP/1.1\r\nHost: t\r\n\r\n", 501),
        ("POST / HTTP/1.1\r\nHost: t\r\nExpect: 200-ok\r\n\r\n", 417),
    ];
    for (bytes, status) in refused {
        assert_eq!(parse_request(bytes.as_bytes()).map(|_| ()), Err(*status), "{bytes:?}");
    }
    let many = format!("GET / HTTP/1.1\r\nHost: t\r\n{}\r\n", "A: b\r\n".repeat(100));
    assert_eq!(parse_request(many.as_bytes()).map(|_| ()), Err(431));
    let very_many = format!("GET / HTTP/1.1\r\nHost: t\r\n{}\r\n", "A: b\r\n".repeat(300));
    assert_eq!(parse_request(very_many.as_bytes()).map(|_| ()), Err(431));
}

#[test]
fn requests_that_are_taken() {
    // bytes, target, keep-alive, framing
    let taken: &[(&str, &str, bool, RequestFraming)] = &[
        ("GET / HTTP/1.1\r\nHost: t\r\n\r\n", "/", true, RequestFraming::Length(0)),
        ("GET /a?b=c%20 HTTP/1.1\r\nhost:t\r\n\r\n", "/a?b=c%20", true, RequestFraming::Length(0)),
        ("GET / HTTP/1.1\r\nHost: t\r\nConnection: Close\r\n\r\n", "/", false, RequestFraming::Length(0)),
        ("GET / HTTP/1.1\r\nHost: t\r\nConnection: x, close\r\n\r\n", "/", false, RequestFraming::Length(0)),
        ("GET / HTTP/1.0\r\n\r\n", "/", false, RequestFraming::Length(0)),
        ("GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", "/", true, RequestFraming::Length(0)),
        ("POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 007\r\n\r\n", "/", true, RequestFraming::Length(7)),
        ("POST / HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: CHUNKED\r\n\r\n", "/", true, RequestFraming::Chunked),
        ("POST / HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: \tchunked \r\n\r\n", "/", true, RequestFraming::Chunked),
        ("GET http://h:8/p?q HTTP/1.1\r\nHost: t\r\n\r\n", "/p?q", true, RequestFraming::Length(0)),
        ("GET http://h HTTP/1.1\r\nHost: t\r\n\r\n", "/", true, RequestFraming::Length(0)),
        ("GET http://h?q HTTP/1.1\r\nHost: t\r\n\r\n", "/?q", true, RequestFraming::Length(0)),
        ("OPTIONS * HTTP/1.1\r\nHost: t\r\n\r\n", "*", true, RequestFraming::Length(0)),
        ("GET / HTTP/1.1\r\nHost: t\r\nUpgrade: websocket\r\n\r\n", "/", true, RequestFraming::Length(0)),
    ];
    for (bytes, target, keep_alive, framing) in taken {
        let parsed = parse_request(bytes.as_bytes()).unwrap_or_else(|status| panic!("{status} for {bytes:?}"));
        assert_eq!((parsed.target.as_str(), parsed.keep_alive), (*target, *keep_alive), "{bytes:?}");
        assert_eq!(parsed.framing, *framing, "{bytes:?}");
    }
}

/// Each name is looked for among all lines: a list that fills the head must not cost a line's work for each of its names.
#[test]
fn names_without_end_in_connection_are_refused() {
    let parse = |names: usize| {
        let (list, lines) = ("x,".repeat(names), "a: b\r\n".repeat(90));
        parse_request(format!("GET / HTTP/1.1\r\nHost: t\r\nConnection: {list}\r\n{lines}\r\n").as_bytes()).map(|_| ())
    };
    assert_eq!([3, 128, 129, 15_000].map(parse), [Ok(()), Ok(()), Err(400), Err(400)]);
}

#[test]
fn the_head_ends_at_the_same_byte_at_every_cut() {
    let message = b"POST /v1 HTTP/1.1\r\nHost: t\r\nX-Long: abc\r\nContent-Length: 3\r\n\r\nabc\r\n\r\n";
    let end = message.len() - 7;
    for cut in 0..=message.len() {
        let mut scan = HeadScan::default();
        let first = scan.end(&message[..cut]).expect("well-formed");
        assert_eq!(first, (cut >= end).then_some(end), "cut at {cut}");
        if first.is_none() {
            assert_eq!(scan.end(message), Ok(Some(end)), "cut at {cut}");
        }
    }
    let mut scan = HeadScan::default();
    let found = (0..=message.len()).find_map(|length| scan.end(&message[..length]).expect("well-formed"));
    assert_eq!(found, Some(end));
}

#[test]
fn a_bare_line_feed_is_seen_at_every_cut() {
    let message = b"GET / HTTP/1.1\r\nHost: t\nX: y\r\n\r\n";
    for cut in 0..message.len() {
        let mut scan = HeadScan::default();
        let refused = scan.end(&message[..cut]).is_err() || scan.end(message).is_err();
        assert!(refused, "cut at {cut}");
    }
}

#[test]
fn responses_and_how_they_end() {
    let check = |bytes: &str, expected: &str| {
        let found = match parse_response(bytes.as_bytes()) {
            Err(reason) => format!("bad: {reason}"),
            Ok(parsed) => {
                let framing = match parsed.framing {
                    Framing::Nothing => "nothing".to_owned(),
                    Framing::Length(length) => length.to_string(),
                    Framing::Chunked(_) => "chunked".to_owned(),
                    Framing::Close { .. } => "close".to_owned(),
                };
                format!("{} {framing} {}", parsed.status.as_u16(), parsed.keep_alive)
            }
        };
        assert!(found.starts_with(expected), "{bytes:?}: {found}");
    };
    check("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", "200 5 true");
    check("HTTP/1.1 200\r\nContent-Length: 5\r\n\r\n", "200 5 true");
    check("HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n", "200 chunked true");
    check("HTTP/1.1 200 OK\r\n\r\n", "200 close false");
    check("HTTP/1.1 204 No Content\r\n\r\n", "204 nothing true");
    check("HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n", "304 nothing true");
    check("HTTP/1.1 100 Continue\r\n\r\n", "100 nothing true");
    check("HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\n", "200 5 false");
    check("HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\n", "200 5 false");
    check("HTTP/1.0 200 OK\r\nContent-Length: 5\r\nConnection: keep-alive\r\n\r\n", "200 5 true");
    check("HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", "bad: both");
    check("HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\n", "bad: more");
    check("HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n", "bad: a Transfer");
    check("HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "bad: Transfer");
    check("HTTP/1.1 200 OK\r\nHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", "bad: an invalid header name");
    check("HTTP/1.1 200 OK\r\nX : y\r\n\r\n", "bad: an invalid header name");
    check("HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer_Encoding: chunked\r\n\r\n", "bad: a header that others");
    check("HTTP/1.1 200 OK\r\nContent_Length: 5\r\n\r\n", "bad: a header that others");
    check("HTTP/1.1 200 OK\nContent-Length: 5\n\n", "bad: a line ends");
    check("HTTP/1.1 099 X\r\n\r\n", "bad: a status");
    check("HTTP/2 200 OK\r\n\r\n", "bad: an invalid status");
    check("garbage\r\n\r\n", "bad: an invalid status");
    let to_head = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n";
    let parsed = response::parse(to_head, true).expect("well-formed");
    assert!(parsed.framing.is_done() && parsed.content_length == Some(5));
}

/// Payload, consumed bytes, the verbatim output without trailers, and whether the message ended.
type FedCut = (Vec<u8>, usize, Vec<u8>, bool);

fn feed_cut(message: &[u8], cuts: &[usize]) -> Result<FedCut, &'static str> {
    let mut chunked = Chunked::default();
    let (mut payload, mut output, mut consumed) = (Vec::new(), Vec::new(), 0);
    let mut bounds = cuts.to_vec();
    bounds.push(message.len());
    let mut start = 0;
    for end in bounds {
        if chunked.is_done() {
            break;
        }
        let piece = &message[start..end];
        let fed =
            chunked.feed(piece, |range| payload.extend_from_slice(&piece[range])).map_err(|malformed| malformed.0)?;
        consumed += fed.consumed;
        output.extend_from_slice(&piece[..fed.trailer_at.unwrap_or(fed.consumed)]);
        if chunked.is_done() && fed.trailer_at.is_some() {
            output.extend_from_slice(b"\r\n");
        }
        start = end;
    }
    Ok((payload, consumed, output, chunked.is_done()))
}

#[test]
fn chunked_bodies_read_the_same_at_every_cut() {
    let messages: &[(&[u8], &[u8], &[u8])] = &[
        (b"0\r\n\r\n", b"", b"0\r\n\r\n"),
        (b"4\r\nabcd\r\n0\r\n\r\n", b"abcd", b"4\r\nabcd\r\n0\r\n\r\n"),
        (
            b"0000A;x=\"y\"\r\n0123456789\r\n1\r\n\r\r\n0\r\n\r\n",
            b"0123456789\r",
            b"0000A;x=\"y\"\r\n0123456789\r\n1\r\n\r\r\n0\r\n\r\n",
        ),
        (b"2\r\n\r\n\r\n0;e\r\n\r\n", b"\r\n", b"2\r\n\r\n\r\n0;e\r\n\r\n"),
        (b"1\r\na\r\n0\r\nT: x\r\nU: y\r\n\r\n", b"a", b"1\r\na\r\n0\r\n\r\n"),
    ];
    for (message, payload, output) in messages {
        let mut longer = message.to_vec();
        longer.extend_from_slice(b"NEXT");
        let expected = (payload.to_vec(), message.len(), output.to_vec(), true);
        assert_eq!(feed_cut(&longer, &[]), Ok(expected.clone()));
        let every: Vec<usize> = (1..longer.len()).collect();
        assert_eq!(feed_cut(&longer, &every), Ok(expected.clone()), "byte by byte: {message:?}");
        for first in 0..=longer.len() {
            for second in first..=longer.len() {
                assert_eq!(feed_cut(&longer, &[first, second]), Ok(expected.clone()), "{first}, {second}: {message:?}");
            }
        }
    }
}

#[test]
fn malformed_chunks_are_refused_at_every_cut() {
    let long_extension = format!("1;{}\r\na\r\n0\r\n\r\n", "e".repeat(1 << 20));
    let long_trailer = format!("0\r\nT: {}\r\n\r\n", "e".repeat(1 << 14));
    let messages: &[&[u8]] = &[
        b"\r\n",
        b"x\r\n",
        b" 1\r\na\r\n0\r\n\r\n",
        b"1 \r\na\r\n0\r\n\r\n",
        b"-1\r\na\r\n",
        b"0x1\r\na\r\n",
        b"1\na\n0\n\n",
        b"1\r\na0\r\n\r\n",
        b"1\r\nab\r\n0\r\n\r\n",
        b"1\r\na\n0\r\n\r\n",
        b"1\rxa\r\n",
        b";x\r\na\r\n",
        b"1;a\nb\r\na\r\n0\r\n\r\n",
        b"1;a\0b\r\na\r\n0\r\n\r\n",
        b"FFFFFFFFFFFFFFFF\r\n",
        b"10000000000000000\r\n",
        b"0\r\nT: x\n\r\n",
        b"0\r\n\n",
        b"0\r\nT: \0\r\n\r\n",
    ];
    for message in messages {
        assert!(feed_cut(message, &[]).is_err(), "{message:?}");
        for cut in 0..message.len() {
            assert!(feed_cut(message, &[cut]).is_err(), "{message:?} cut at {cut}");
        }
    }
    assert!(feed_cut(long_extension.as_bytes(), &[]).is_err());
    assert!(feed_cut(long_trailer.as_bytes(), &[]).is_err());
}

#[test]
fn a_boundary_is_only_between_chunks() {
    let message = b"3\r\nabc\r\n2\r\nde\r\n";
    let boundaries: Vec<usize> = (0..=message.len())
        .filter(|&cut| {
            let mut chunked = Chunked::default();
            chunked.feed(&message[..cut], |_| {}).expect("well-formed");
            chunked.is_at_boundary()
        })
        .collect();
    assert_eq!(boundaries, [0, 8, 15]);
}

fn head_of(lines: &str) -> Head {
    parse_request(format!("GET / HTTP/1.1\r\nHost: client\r\n{lines}\r\n").as_bytes()).expect("well-formed").head
}

#[test]
fn headers_are_found_without_case_and_kept_in_order() {
    let head = head_of("X-A: 1\r\nx-b:  two \r\nX-a: 3\r\nEmpty:\r\n");
    assert_eq!(head.get("x-A"), Some(&b"1"[..]));
    assert_eq!(head.get("X-B"), Some(&b"two"[..]));
    assert_eq!(head.get("empty"), Some(&b""[..]));
    assert_eq!(head.get("missing"), None);
    assert_eq!(head.get_all("X-A").collect::<Vec<_>>(), [b"1", b"3"]);
    let names: Vec<&str> = head.iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["Host", "X-A", "x-b", "X-a", "Empty"]);
}

#[test]
fn hop_by_hop_headers_end_here_and_the_rest_is_verbatim() {
    let head = head_of(
        "Accept:  a, b\r\nConnection: keep-alive, X-Private, Host, Content-Length\r\nKeep-Alive: 5\r\nX-Private: s\r\n\
         TE: trailers\r\nTrailer: T\r\nUpgrade: w\r\nProxy-Authorization: p\r\nProxy-Connection: c\r\nExpect: \
         100-continue\r\nContent-Length: 3\r\nAuthorization: Bearer x\r\nX-Old: o\r\nX-Set: client\r\naCCept: c\r\n",
    );
    let mut out = Vec::new();
    let set = [(HeaderName::from_static("x-set"), HeaderValue::from_static("ours"))];
    let lines = write::RequestLines {
        method: &Method::POST,
        path_prefix: "/base",
        target: "/v1?x",
        authority: "w:1",
        headers: Some(&head),
        remove: &[HeaderName::from_static("x-old")],
        set: &set,
        body_bytes: 1234567890,
    };
    write::request(&mut out, &lines);
    let expected = "POST /base/v1?x HTTP/1.1\r\nHost: w:1\r\nAccept:  a, b\r\nAuthorization: Bearer x\r\naCCept: \
                    c\r\nx-set: ours\r\nContent-Length: 1234567890\r\n\r\n";
    assert_eq!(String::from_utf8_lossy(&out), expected);
}

/// What a server behind us may take for a header that ends here ends here too, and other names stay as they are.
#[test]
fn names_that_are_alike_behind_us_are_one_name() {
    let head = head_of(
        "Connection: X_Private\r\nX-Private: s\r\nKeep_Alive: 5\r\nProxy.Authorization: p\r\nX_Old: o\r\nx_sEt: \
         client\r\nX_Mine: m\r\nX_Olden: o\r\n",
    );
    let set = [(HeaderName::from_static("x-set"), HeaderValue::from_static("ours"))];
    let mut out = Vec::new();
    let lines = write::RequestLines {
        method: &Method::GET,
        path_prefix: "",
        target: "/",
        authority: "w",
        headers: Some(&head),
        remove: &[HeaderName::from_static("x-old")],
        set: &set,
        body_bytes: 0,
    };
    write::request(&mut out, &lines);
    let expected = "GET / HTTP/1.1\r\nHost: w\r\nX_Mine: m\r\nX_Olden: o\r\nx-set: ours\r\n\r\n";
    assert_eq!(String::from_utf8_lossy(&out), expected);
    // Alike for servers, not for us: what we read is read by its own name.
    assert_eq!((head.get("x-old"), head.get("x_mine")), (None, Some(&b"m"[..])));
}

#[test]
fn own_heads_carry_our_framing_only() {
    let mut out = Vec::new();
    let headers = [
        (HeaderName::from_static("content-length"), HeaderValue::from_static("99")),
        (HeaderName::from_static("transfer-encoding"), HeaderValue::from_static("chunked")),
        (HeaderName::from_static("date"), HeaderValue::from_static("then")),
        (HeaderName::from_static("x-a"), HeaderValue::from_static("b")),
    ];
    write::own_head(&mut out, StatusCode::OK, &headers, 0, write::After::Close);
    let expected = "HTTP/1.1 200 OK\r\ndate: then\r\nx-a: b\r\ncontent-length: 0\r\nConnection: close\r\n\r\n";
    assert_eq!(String::from_utf8_lossy(&out), expected);
    out.clear();
    write::own_head(&mut out, StatusCode::NO_CONTENT, &[], 0, write::After::KeepSaid);
    let text = String::from_utf8_lossy(&out);
    assert!(text.contains("\r\nConnection: keep-alive\r\n") && !text.contains("content-length"), "{text}");
    let date = text.split("date: ").nth(1).and_then(|rest| rest.split("\r\n").next()).expect("a date");
    assert!(httpdate::parse_http_date(date).is_ok(), "{date}");
}

#[test]
fn numbers_are_written_in_their_base() {
    for value in [0, 9, 10, 255, 256, 1 << 20, u64::MAX] {
        let (mut decimal, mut hex) = (Vec::new(), Vec::new());
        write::decimal(&mut decimal, value);
        write::chunk_start(&mut hex, value as usize);
        assert_eq!(decimal, value.to_string().as_bytes());
        assert_eq!(hex, format!("{value:x}\r\n").as_bytes());
    }
}
