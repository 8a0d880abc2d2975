//! A request body's top-level members and where they stand: the one pass over a body that routing, body facts and the
//! legs of a pair share. Builds no tree, keeps the body itself, and never judges a value.

use std::ops::Range;

use bytes::Bytes;

use super::extract::ExtractError;
use super::json::{JsonError, JsonResult, Reader};
use crate::limits::BODY_MEMBERS_MAX;

/// Members for which there is room at once; a chat request has about as many.
const MEMBERS_EXPECTED: usize = 8;

/// Where one member stands in the body.
#[derive(Debug)]
pub struct Member {
    /// The decoded key, when it was spelled with escapes.
    escaped_key: Option<Box<str>>,
    /// Offset of the key's opening quote.
    pub start: usize,
    /// Bytes of the key between its quotes, when it was spelled without escapes.
    key_bytes: usize,
    pub value: Range<usize>,
}

/// Which lengths a set of names has: most names that are looked for are absent, and their length alone says so.
#[derive(Clone, Copy, Debug, Default)]
pub struct Lengths(u64);

impl Lengths {
    /// All lengths from here on share a place.
    const LONGEST: usize = 63;

    pub fn add(&mut self, length: usize) {
        self.0 |= 1 << length.min(Self::LONGEST);
    }

    pub fn may_have(self, length: usize) -> bool {
        self.0 >> length.min(Self::LONGEST) & 1 == 1
    }
}

/// The top-level members of one body, in its order; none for a body that is JSON but no object.
#[derive(Debug)]
pub struct Outline {
    body: Bytes,
    members: Vec<Member>,
    name_lengths: Lengths,
    /// Offset behind the opening brace; `None` for what is no object.
    open: Option<usize>,
}

impl Outline {
    /// Checks that `body` is one JSON value and notes its members.
    pub fn read(body: &Bytes) -> Result<Self, ExtractError> {
        Self::read_with(body, |reader, _| reader.skip())
    }

    /// The same; `visit` is called with the reader at each top-level value, and its name, and must consume it.
    pub fn read_with<'a>(
        body: &'a Bytes,
        visit: impl FnMut(&mut Reader<'a>, &str) -> JsonResult<()>,
    ) -> Result<Self, ExtractError> {
        Self::scan(body, visit).map_err(|error| {
            let (line, column) = error.position(body);
            ExtractError { what: error.what, line, column }
        })
    }

    fn scan<'a>(body: &'a Bytes, mut visit: impl FnMut(&mut Reader<'a>, &str) -> JsonResult<()>) -> JsonResult<Self> {
        let mut reader = Reader::new(utf8(body)?);
        let (mut members, mut name_lengths, mut open) = (Vec::new(), Lengths::default(), None);
        if reader.peek() == Some(b'{') {
            open = Some(reader.offset() + 1);
            members.reserve(MEMBERS_EXPECTED);
            let mut previous_end = reader.offset() + 1;
            reader.object(|reader, key| {
                // Between two members there is nothing but whitespace and a comma.
                let gap = body[previous_end..].iter().position(|byte| *byte == b'"');
                let start = previous_end + gap.expect("a key was just read");
                let spelled = body.get(start + 1..start + 1 + key.len()) == Some(key.as_bytes());
                let escaped_key = (!spelled || body.get(start + 1 + key.len()) != Some(&b'"')).then(|| (&*key).into());
                name_lengths.add(key.len());
                reader.peek();
                let value_start = reader.offset();
                visit(reader, &key)?;
                previous_end = reader.offset();
                if members.len() == BODY_MEMBERS_MAX {
                    return Err(JsonError { offset: start, what: "too many members" });
                }
                members.push(Member { escaped_key, start, key_bytes: key.len(), value: value_start..previous_end });
                Ok(())
            })?;
        } else {
            reader.skip()?;
        }
        reader.end()?;
        Ok(Self { body: body.clone(), members, name_lengths, open })
    }

    /// The whole body.
    pub fn body(&self) -> &Bytes {
        &self.body
    }

    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// Offset behind the opening brace; `None` for a body that is no object.
    pub fn open(&self) -> Option<usize> {
        self.open
    }

    /// This member's name, decoded.
    pub fn name<'a>(&'a self, member: &'a Member) -> &'a [u8] {
        match &member.escaped_key {
            Some(decoded) => decoded.as_bytes(),
            None => &self.body[member.start + 1..][..member.key_bytes],
        }
    }

    /// Raw JSON of a member's value. Of several members with one name the last counts, as in the engines.
    pub fn raw(&self, key: &str) -> Option<&[u8]> {
        if !self.name_lengths.may_have(key.len()) {
            return None;
        }
        let key = key.as_bytes();
        self.members.iter().rev().find(|it| self.name(it) == key).map(|member| &self.body[member.value.clone()])
    }

    /// A reader at a member's value.
    pub(super) fn reader(&self, key: &str) -> Option<Reader<'_>> {
        std::str::from_utf8(self.raw(key)?).ok().map(Reader::new)
    }
}

/// The body as text, if it is UTF-8.
pub(super) fn utf8(body: &[u8]) -> JsonResult<&str> {
    simdutf8::basic::from_utf8(body).map_err(|_| {
        let offset = std::str::from_utf8(body).err().map_or(0, |error| error.valid_up_to());
        JsonError { offset, what: "invalid UTF-8" }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outline(body: &str) -> Outline {
        Outline::read(&Bytes::copy_from_slice(body.as_bytes())).unwrap()
    }

    #[test]
    fn members_are_found_with_their_places() {
        let body = " { \"a\" : 1 ,\n\"b\":{\"a\":[2]} , \"\\u0061\": \"x\\\"\" } ";
        let outline = outline(body);
        let found: Vec<(&str, &str)> = outline
            .members()
            .iter()
            .map(|member| (&body[member.start..member.start + 3], &body[member.value.clone()]))
            .collect();
        assert_eq!(found, [("\"a\"", "1"), ("\"b\"", "{\"a\":[2]}"), ("\"\\u", "\"x\\\"\"")]);
        assert_eq!(outline.raw("a"), Some(&b"\"x\\\"\""[..]));
        assert_eq!(outline.raw("c"), None);
        assert_eq!(outline.open(), Some(2));
    }

    #[test]
    fn what_is_no_object_has_no_members() {
        let list = outline(" [{\"a\":1}] ");
        assert!(list.members().is_empty() && list.open().is_none());
        for (body, line, column) in [
            (&b"{\"a\":1,}"[..], 1, 8),
            (b"{\n\"a\": }", 2, 6),
            (b"\xff{}", 1, 1),
            (b"{\"a\":\"\xff\"}", 1, 7),
            (b"", 1, 1),
        ] {
            let error = Outline::read(&Bytes::from_static(body)).unwrap_err();
            assert_eq!((error.line, error.column), (line, column), "{error}");
        }
    }

    #[test]
    fn b58_members_without_end_are_refused_where_the_cap_is_passed() {
        let body = |members: usize| format!("{{{}}}", vec!["\"k\":[{}]"; members].join(","));
        assert_eq!(outline(&body(BODY_MEMBERS_MAX)).members().len(), BODY_MEMBERS_MAX);
        // Found at the first one too many, whatever comes behind it.
        let too_many = format!("{}, this is not JSON", body(BODY_MEMBERS_MAX + 1).trim_end_matches('}'));
        let error = Outline::read(&Bytes::from(too_many)).unwrap_err();
        assert_eq!((error.what, error.line), ("too many members", 1));
    }

    #[test]
    fn the_visitor_sees_each_top_level_value_once() {
        let mut seen = Vec::new();
        let body = Bytes::from_static(br#"{"a":{"b":1},"c":[true],"a":2}"#);
        Outline::read_with(&body, |reader, key| {
            seen.push(key.to_owned());
            reader.skip()
        })
        .unwrap();
        assert_eq!(seen, ["a", "c", "a"]);
    }
}
