//! Header lines of one message as raw bytes plus spans, and what framing needs to know of them. It owns the rule
//! which headers end at this hop and never builds a map.
//!
//! Servers behind CGI or WSGI know `Transfer-Encoding`, `Transfer_Encoding` and `Transfer.Encoding` by one name, so that a
//! header which is none to us can be one behind us. A name that so becomes a framing header's is refused; where a header
//! ends here or is replaced, all names that become its own do.

use std::cell::RefCell;

use super::{HEADERS_CAP, Malformed};

/// What a header line is to a proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    EndToEnd,
    /// Ends here: the fixed list of RFC 9110 section 7.6.1 and names listed in `Connection`.
    HopByHop,
    Host,
    ContentLength,
    TransferEncoding,
    Connection,
    Expect,
}

#[derive(Clone, Copy, Debug)]
struct Span {
    name_start: u32,
    value_start: u32,
    value_length: u32,
    name_length: u16,
    role: Role,
}

/// The header lines of a message, in order and spelling as they came.
#[derive(Debug, Default)]
pub struct Head {
    raw: Vec<u8>,
    spans: Vec<Span>,
}

/// Buffers of dropped heads, for the next ones.
const SPARE_MAX: usize = 64;
/// Larger ones are freed.
const SPARE_BYTES_MAX: usize = 4 << 10;

thread_local! {
    static SPARE: RefCell<Vec<(Vec<u8>, Vec<Span>)>> = const { RefCell::new(Vec::new()) };
}

/// One line as the writers see it.
pub(crate) struct Line<'a> {
    pub(crate) name: &'a [u8],
    pub(crate) value: &'a [u8],
    pub(crate) role: Role,
    /// Name, colon, spacing and value as they came, without the line end.
    pub(crate) raw: &'a [u8],
}

/// Framing facts of a message.
#[derive(Debug, Default)]
pub(crate) struct Facts {
    pub(crate) hosts: u32,
    pub(crate) content_length: Option<u64>,
    pub(crate) chunked: bool,
    pub(crate) close: bool,
    pub(crate) keep_alive: bool,
    pub(crate) expect: Expect,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Expect {
    #[default]
    Nothing,
    Continue,
    Unknown,
}

impl Head {
    /// `lines` borrow from `raw`, the whole head including its first line.
    pub(crate) fn new(raw: &[u8], lines: &[httparse::Header<'_>]) -> Result<(Head, Facts), Malformed> {
        let base = raw.as_ptr() as usize;
        let (raw_spare, spans) = SPARE.with_borrow_mut(Vec::pop).unwrap_or_default();
        let mut head = Head { raw: raw_spare, spans };
        head.raw.extend_from_slice(raw);
        for line in lines {
            let role = role_of(line.name.as_bytes())?;
            head.spans.push(Span {
                name_start: (line.name.as_ptr() as usize - base) as u32,
                name_length: u16::try_from(line.name.len()).map_err(|_| Malformed("a header name is too long"))?,
                value_start: (line.value.as_ptr() as usize).wrapping_sub(base).min(raw.len()) as u32,
                value_length: line.value.len() as u32,
                role,
            });
        }
        let facts = head.facts()?;
        Ok((head, facts))
    }

    fn facts(&mut self) -> Result<Facts, Malformed> {
        let mut facts = Facts::default();
        let mut named_in_connection = false;
        for line in self.lines() {
            match line.role {
                Role::EndToEnd | Role::HopByHop => {}
                Role::Host => facts.hosts += 1,
                Role::ContentLength => {
                    if facts.content_length.is_some() {
                        return Err(Malformed("more than one Content-Length"));
                    }
                    facts.content_length =
                        Some(decimal(line.value).ok_or(Malformed("Content-Length is not a number"))?);
                }
                Role::TransferEncoding => {
                    if facts.chunked || !line.value.eq_ignore_ascii_case(b"chunked") {
                        return Err(Malformed("a Transfer-Encoding other than one `chunked`"));
                    }
                    facts.chunked = true;
                }
                Role::Connection => {
                    for token in tokens(line.value) {
                        if token.eq_ignore_ascii_case(b"close") {
                            facts.close = true;
                        } else if token.eq_ignore_ascii_case(b"keep-alive") {
                            facts.keep_alive = true;
                        } else {
                            named_in_connection = true;
                        }
                    }
                }
                Role::Expect => {
                    let known = line.value.eq_ignore_ascii_case(b"100-continue");
                    facts.expect = if known { Expect::Continue } else { Expect::Unknown };
                }
            }
        }
        if facts.chunked && facts.content_length.is_some() {
            return Err(Malformed("both Content-Length and Transfer-Encoding"));
        }
        if named_in_connection {
            self.mark_named_in_connection()?;
        }
        Ok(facts)
    }

    /// Headers that `Connection` names end here. Framing headers keep their role: nobody may talk them away.
    #[cold]
    fn mark_named_in_connection(&mut self) -> Result<(), Malformed> {
        let lists = self.lines().filter(|line| line.role == Role::Connection);
        // Read once and bounded: every name is compared with every line.
        let names = lists.flat_map(|line| tokens(line.value)).take(HEADERS_CAP + 1);
        let names: Vec<Vec<u8>> = names.map(<[u8]>::to_vec).collect();
        if names.len() > HEADERS_CAP {
            return Err(Malformed("more names in Connection than a head may have lines"));
        }
        for index in 0..self.spans.len() {
            let line = self.line(&self.spans[index]);
            if line.role == Role::EndToEnd && names.iter().any(|named| is_alike(named, line.name)) {
                self.spans[index].role = Role::HopByHop;
            }
        }
        Ok(())
    }

    fn line(&self, span: &Span) -> Line<'_> {
        let (name_start, value_start) = (span.name_start as usize, span.value_start as usize);
        let value_end = value_start + span.value_length as usize;
        Line {
            name: &self.raw[name_start..name_start + usize::from(span.name_length)],
            value: &self.raw[value_start..value_end],
            role: span.role,
            raw: &self.raw[name_start..value_end],
        }
    }

    /// The whole head as it came, first line included.
    pub(crate) fn raw(&self) -> &[u8] {
        &self.raw
    }

    pub(crate) fn lines(&self) -> impl Iterator<Item = Line<'_>> {
        self.spans.iter().map(|span| self.line(span))
    }

    /// Value of the first line of that name, without case.
    pub fn get(&self, name: &str) -> Option<&[u8]> {
        self.lines().find(|line| line.name.eq_ignore_ascii_case(name.as_bytes())).map(|line| line.value)
    }

    /// Values of all lines of that name, in order.
    pub fn get_all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a [u8]> {
        self.lines().filter(move |line| line.name.eq_ignore_ascii_case(name.as_bytes())).map(|line| line.value)
    }

    /// All lines in order, names as spelled.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.lines().map(|line| (std::str::from_utf8(line.name).unwrap_or_default(), line.value))
    }

    /// Number of header lines.
    pub fn len(&self) -> usize {
        self.spans.len()
    }

    pub fn is_empty(&self) -> bool {
        self.spans.is_empty()
    }
}

impl Drop for Head {
    fn drop(&mut self) {
        if self.raw.capacity() == 0 || self.raw.capacity() > SPARE_BYTES_MAX || self.spans.capacity() > HEADERS_CAP {
            return;
        }
        let (mut raw, mut spans) = (std::mem::take(&mut self.raw), std::mem::take(&mut self.spans));
        raw.clear();
        spans.clear();
        // A head may be dropped on any thread, also while that thread ends: then its buffers are simply freed.
        let _ = SPARE.try_with(|kept| {
            if let Ok(mut kept) = kept.try_borrow_mut()
                && kept.len() < SPARE_MAX
            {
                kept.push((raw, spans));
            }
        });
    }
}

fn role_of(name: &[u8]) -> Result<Role, Malformed> {
    let is = |other: &[u8]| is_alike(name, other);
    let framing = |own_name: &[u8], role| match name.eq_ignore_ascii_case(own_name) {
        true => Ok(role),
        false => Err(Malformed("a header that others may take for Content-Length or Transfer-Encoding")),
    };
    Ok(match name.len() {
        2 if is(b"te") => Role::HopByHop,
        4 if is(b"host") => Role::Host,
        6 if is(b"expect") => Role::Expect,
        7 if is(b"trailer") || is(b"upgrade") => Role::HopByHop,
        10 if is(b"connection") => Role::Connection,
        10 if is(b"keep-alive") => Role::HopByHop,
        14 if is(b"content-length") => framing(b"content-length", Role::ContentLength)?,
        16 if is(b"proxy-connection") => Role::HopByHop,
        17 if is(b"transfer-encoding") => framing(b"transfer-encoding", Role::TransferEncoding)?,
        18 if is(b"proxy-authenticate") => Role::HopByHop,
        19 if is(b"proxy-authorization") => Role::HopByHop,
        _ => Role::EndToEnd,
    })
}

/// Whether a server that keeps only letters and digits apart takes one name for the other.
pub(crate) fn is_alike(name: &[u8], other: &[u8]) -> bool {
    let folded = |byte: &u8| if byte.is_ascii_alphanumeric() { byte.to_ascii_lowercase() } else { b'-' };
    name.len() == other.len() && name.iter().map(folded).eq(other.iter().map(folded))
}

fn tokens(list: &[u8]) -> impl Iterator<Item = &[u8]> {
    list.split(|&byte| byte == b',').map(<[u8]>::trim_ascii).filter(|token| !token.is_empty())
}

/// Digits only, at most 18 of them: no sign, no list, no overflow.
fn decimal(text: &[u8]) -> Option<u64> {
    if text.is_empty() || text.len() > 18 {
        return None;
    }
    text.iter().try_fold(0_u64, |value, digit| digit.is_ascii_digit().then(|| value * 10 + u64::from(digit - b'0')))
}
