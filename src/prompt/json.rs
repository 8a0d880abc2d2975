//! A pull reader over JSON text: the one parser under `extract` and the prompt's values.
//!
//! It exists because neither user wants a tree of the whole body: routing skips megabytes of message text,
//! and the prompt side needs Python's reading of numbers (exact integers of any size, `NaN`, `1e999`) and of
//! repeated keys. It never allocates for what is skipped and never recurses deeper than `DEPTH_MAX`.

use std::borrow::Cow;

/// Room taken at once for a string with escapes, at least; else as much as the one before it took, because messages of
/// one conversation are alike and growing step by step costs more than reading.
const OWNED_BYTES_MIN: usize = 256;

/// Containers inside containers; Python's own reader gives up near 1,000.
pub const DEPTH_MAX: usize = 512;

/// The reason given for half a surrogate pair: valid to Python's reader, text to no tokenizer.
pub const LONE_SURROGATE: &str = "lone surrogate";

/// Why a text is not JSON, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JsonError {
    /// Byte offset of the first byte that could not be accepted.
    pub offset: usize,
    pub what: &'static str,
}

impl JsonError {
    /// Line and column, both from 1, column in bytes.
    pub fn position(&self, text: &[u8]) -> (usize, usize) {
        let before = &text[..self.offset.min(text.len())];
        let line_start = before.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        let line = before.iter().filter(|byte| **byte == b'\n').count() + 1;
        (line, before.len() - line_start + 1)
    }
}

pub type JsonResult<T> = Result<T, JsonError>;

/// One JSON value to be looked through once: still text, or a tree of it.
pub trait Values<'a>: Sized {
    /// First byte of the value's text, or one that tells its kind; not consumed.
    fn peek(&mut self) -> Option<u8>;
    fn string(&mut self) -> JsonResult<Cow<'a, str>>;
    /// `member` is called at each member's value and must consume it.
    fn object(&mut self, member: impl FnMut(&mut Self, Cow<'a, str>) -> JsonResult<()>) -> JsonResult<()>;
    /// `item` is called at each item and must consume it.
    fn array(&mut self, item: impl FnMut(&mut Self) -> JsonResult<()>) -> JsonResult<()>;
    /// Consumes the value, whatever it is.
    fn skip(&mut self) -> JsonResult<()>;
}

impl<'a> Values<'a> for Reader<'a> {
    fn peek(&mut self) -> Option<u8> {
        Reader::peek(self)
    }

    fn string(&mut self) -> JsonResult<Cow<'a, str>> {
        Reader::string(self)
    }

    fn object(&mut self, member: impl FnMut(&mut Self, Cow<'a, str>) -> JsonResult<()>) -> JsonResult<()> {
        Reader::object(self, member)
    }

    fn array(&mut self, item: impl FnMut(&mut Self) -> JsonResult<()>) -> JsonResult<()> {
        Reader::array(self, item)
    }

    fn skip(&mut self) -> JsonResult<()> {
        Reader::skip(self)
    }
}

/// A reader at one place of one text. After an error its place is where the error is.
pub struct Reader<'a> {
    text: &'a str,
    at: usize,
    depth: usize,
    /// Bytes of the last string that had escapes.
    owned_bytes: usize,
}

impl<'a> Reader<'a> {
    pub fn new(text: &'a str) -> Self {
        Self { text, at: 0, depth: 0, owned_bytes: 0 }
    }

    pub fn fail<T>(&self, what: &'static str) -> JsonResult<T> {
        Err(JsonError { offset: self.at, what })
    }

    /// Byte offset of the reader in its text.
    pub fn offset(&self) -> usize {
        self.at
    }

    fn bytes(&self) -> &'a [u8] {
        self.text.as_bytes()
    }

    /// First byte of the next value or mark, whitespace skipped; not consumed.
    pub fn peek(&mut self) -> Option<u8> {
        let bytes = self.bytes();
        while let Some(byte) = bytes.get(self.at) {
            if !matches!(byte, b' ' | b'\n' | b'\t' | b'\r') {
                return Some(*byte);
            }
            self.at += 1;
        }
        None
    }

    fn take(&mut self, expected: u8, what: &'static str) -> JsonResult<()> {
        if self.peek() != Some(expected) {
            return self.fail(what);
        }
        self.at += 1;
        Ok(())
    }

    /// The text must be over, whitespace apart.
    pub fn end(&mut self) -> JsonResult<()> {
        match self.peek() {
            None => Ok(()),
            Some(_) => self.fail("trailing characters"),
        }
    }

    /// Reads an object; `member` is called with the reader at each member's value and must consume it.
    pub fn object(&mut self, mut member: impl FnMut(&mut Self, Cow<'a, str>) -> JsonResult<()>) -> JsonResult<()> {
        self.take(b'{', "expected an object")?;
        self.enter()?;
        if self.peek() == Some(b'}') {
            self.at += 1;
        } else {
            loop {
                if self.peek() != Some(b'"') {
                    return self.fail("expected a member name");
                }
                let key = self.string()?;
                self.take(b':', "expected ':'")?;
                member(self, key)?;
                match self.peek() {
                    Some(b',') => self.at += 1,
                    Some(b'}') => break self.at += 1,
                    _ => return self.fail("expected ',' or '}'"),
                }
            }
        }
        self.depth -= 1;
        Ok(())
    }

    /// Reads an array; `item` is called with the reader at each item and must consume it.
    pub fn array(&mut self, mut item: impl FnMut(&mut Self) -> JsonResult<()>) -> JsonResult<()> {
        self.take(b'[', "expected an array")?;
        self.enter()?;
        if self.peek() == Some(b']') {
            self.at += 1;
        } else {
            loop {
                item(self)?;
                match self.peek() {
                    Some(b',') => self.at += 1,
                    Some(b']') => break self.at += 1,
                    _ => return self.fail("expected ',' or ']'"),
                }
            }
        }
        self.depth -= 1;
        Ok(())
    }

    fn enter(&mut self) -> JsonResult<()> {
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return self.fail("nested too deeply");
        }
        Ok(())
    }

    /// Reads a string; borrowed from the text unless it has escapes.
    pub fn string(&mut self) -> JsonResult<Cow<'a, str>> {
        self.take(b'"', "expected a string")?;
        let start = self.at;
        self.at = plain_run_end(self.bytes(), start);
        if self.bytes().get(self.at) == Some(&b'"') {
            self.at += 1;
            return Ok(Cow::Borrowed(&self.text[start..self.at - 1]));
        }
        let room = ((self.at - start) * 2).max(self.owned_bytes + self.owned_bytes / 4) + OWNED_BYTES_MIN;
        let mut owned = String::with_capacity(room.min(self.text.len() - start));
        owned.push_str(&self.text[start..self.at]);
        loop {
            match self.bytes().get(self.at) {
                Some(b'"') => {
                    self.at += 1;
                    self.owned_bytes = owned.len();
                    return Ok(Cow::Owned(owned));
                }
                Some(b'\\') => owned.push(self.escape()?),
                Some(_) => return self.fail("control character in a string"),
                None => return self.fail("unterminated string"),
            }
            let run = self.at;
            self.at = plain_run_end(self.bytes(), run);
            owned.push_str(&self.text[run..self.at]);
        }
    }

    fn escape(&mut self) -> JsonResult<char> {
        let escaped = self.bytes().get(self.at + 1).copied();
        let plain = match escaped {
            Some(b'"') => '"',
            Some(b'\\') => '\\',
            Some(b'/') => '/',
            Some(b'b') => '\u{8}',
            Some(b'f') => '\u{c}',
            Some(b'n') => '\n',
            Some(b'r') => '\r',
            Some(b't') => '\t',
            Some(b'u') => return self.unicode_escape(),
            _ => return self.fail("unknown escape"),
        };
        self.at += 2;
        Ok(plain)
    }

    /// `\uXXXX`, with its second half where the first is a high surrogate. A lone half is refused: Python
    /// reads it, but no tokenizer can encode it, so the engine fails on it too.
    fn unicode_escape(&mut self) -> JsonResult<char> {
        let first = self.hex4(self.at)?;
        if !(0xd800..0xe000).contains(&first) {
            self.at += 6;
            return char::from_u32(first).map_or_else(|| self.fail("unknown escape"), Ok);
        }
        if first >= 0xdc00 || self.bytes().get(self.at + 6) != Some(&b'\\') {
            return self.fail(LONE_SURROGATE);
        }
        let second = self.hex4(self.at + 6)?;
        if !(0xdc00..0xe000).contains(&second) {
            return self.fail(LONE_SURROGATE);
        }
        self.at += 12;
        let code = 0x10000 + ((first - 0xd800) << 10) + (second - 0xdc00);
        char::from_u32(code).map_or_else(|| self.fail(LONE_SURROGATE), Ok)
    }

    /// Value of the four digits of the `\u` escape that starts at `start`.
    fn hex4(&self, start: usize) -> JsonResult<u32> {
        let digits = match self.bytes().get(start + 1..start + 6) {
            Some([b'u', digits @ ..]) => digits,
            _ => return self.fail("unknown escape"),
        };
        let mut value = 0;
        for digit in digits {
            match (*digit as char).to_digit(16) {
                Some(digit) => value = value * 16 + digit,
                None => return self.fail("unknown escape"),
            }
        }
        Ok(value)
    }

    /// Reads a number and gives its spelling. `NaN`, `Infinity` and `-Infinity` are numbers, as in Python.
    pub fn number(&mut self) -> JsonResult<&'a str> {
        self.peek();
        let start = self.at;
        for word in ["NaN", "Infinity", "-Infinity"] {
            if self.text[start..].starts_with(word) {
                self.at += word.len();
                return Ok(word);
            }
        }
        let bytes = self.bytes();
        let digits = |mut at: usize| {
            while bytes.get(at).is_some_and(u8::is_ascii_digit) {
                at += 1;
            }
            at
        };
        if bytes.get(self.at) == Some(&b'-') {
            self.at += 1;
        }
        let whole = digits(self.at);
        let leading_zero = bytes.get(self.at) == Some(&b'0') && whole > self.at + 1;
        if whole == self.at || leading_zero {
            return self.fail("expected a value");
        }
        self.at = whole;
        if bytes.get(self.at) == Some(&b'.') {
            let fraction = digits(self.at + 1);
            if fraction == self.at + 1 {
                return self.fail("expected a digit");
            }
            self.at = fraction;
        }
        if matches!(bytes.get(self.at), Some(b'e' | b'E')) {
            let sign = usize::from(matches!(bytes.get(self.at + 1), Some(b'+' | b'-')));
            let exponent = digits(self.at + 1 + sign);
            if exponent == self.at + 1 + sign {
                return self.fail("expected a digit");
            }
            self.at = exponent;
        }
        Ok(&self.text[start..self.at])
    }

    /// Consumes one of the three literal words and gives it: `Some(bool)`, or `None` for `null`.
    pub fn word(&mut self) -> JsonResult<Option<bool>> {
        self.peek();
        for (word, value) in [("true", Some(true)), ("false", Some(false)), ("null", None)] {
            if self.text[self.at..].starts_with(word) {
                self.at += word.len();
                return Ok(value);
            }
        }
        self.fail("expected a value")
    }

    /// Consumes one value of any kind, checking its form.
    pub fn skip(&mut self) -> JsonResult<()> {
        match self.peek() {
            Some(b'{') => self.object(|reader, _| reader.skip()),
            Some(b'[') => self.array(Self::skip),
            Some(b'"') => self.skip_string(),
            Some(b't' | b'f' | b'n') => self.word().map(drop),
            _ => self.number().map(drop),
        }
    }

    fn skip_string(&mut self) -> JsonResult<()> {
        self.at += 1;
        loop {
            self.at = plain_run_end(self.bytes(), self.at);
            match self.bytes().get(self.at) {
                Some(b'"') => break self.at += 1,
                // Any escape but \u is two bytes long; the digits of \u are checked where they matter.
                Some(b'\\') => match self.bytes().get(self.at + 1) {
                    Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => self.at += 2,
                    Some(b'u') => {
                        self.hex4(self.at)?;
                        self.at += 6;
                    }
                    _ => return self.fail("unknown escape"),
                },
                Some(_) => return self.fail("control character in a string"),
                None => return self.fail("unterminated string"),
            }
        }
        Ok(())
    }
}

/// End of the run of bytes from `at` that need no thought inside a string: no quote, no backslash, no control
/// character. Eight bytes are tested at once, and the place inside the eight is computed, not searched: in source code
/// an escape comes every few dozen bytes. 16-byte vector code was measured and is not faster on such text.
#[inline]
fn plain_run_end(bytes: &[u8], mut at: usize) -> usize {
    const ONES: u64 = 0x0101_0101_0101_0101;
    const TOPS: u64 = 0x8080_8080_8080_8080;
    // The top bit of every byte below `bound` (at most 0x80), exact up to the first such byte.
    let below = |word: u64, bound: u8| word.wrapping_sub(ONES * u64::from(bound)) & !word & TOPS;
    while let Some(eight) = bytes.get(at..at + 8).and_then(|eight| <[u8; 8]>::try_from(eight).ok()) {
        let word = u64::from_le_bytes(eight);
        let quote = below(word ^ (ONES * u64::from(b'"')), 1);
        let backslash = below(word ^ (ONES * u64::from(b'\\')), 1);
        let found = quote | backslash | below(word, 0x20);
        if found != 0 {
            return at + found.trailing_zeros() as usize / 8;
        }
        at += 8;
    }
    while bytes.get(at).is_some_and(|byte| !is_special(*byte)) {
        at += 1;
    }
    at
}

fn is_special(byte: u8) -> bool {
    matches!(byte, b'"' | b'\\' | 0..0x20)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn skip_all(text: &str) -> JsonResult<()> {
        let mut reader = Reader::new(text);
        reader.skip()?;
        reader.end()
    }

    #[test]
    fn accepts_what_python_accepts_and_nothing_more() {
        for good in [
            "{}",
            "[]",
            " [1, 2.5, -0, 1e9, 1E-7, -0.0] ",
            r#"{"a":{"b":[null,true,false,"x\n\u00e9\ud83d\ude00"]}}"#,
            "NaN",
            "[-Infinity,Infinity]",
            "123456789012345678901234567890",
            "\"\u{7f}é😀\"",
        ] {
            assert_eq!(skip_all(good), Ok(()), "{good}");
        }
        for bad in [
            "",
            "{",
            "[1,]",
            "{\"a\":}",
            "{\"a\" 1}",
            "{a:1}",
            "01",
            "-",
            "1.",
            ".5",
            "1e",
            "+1",
            "tru",
            "nul",
            "\"",
            "\"\\x\"",
            "\"\\u12g4\"",
            "\"a\nb\"",
            "[1 2]",
            "{} {}",
            "'a'",
            "[1}",
        ] {
            assert!(skip_all(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn agrees_with_serde_json_at_every_cut() {
        let text =
            r#"{"model":"m","messages":[{"role":"user","content":"h\u00e9 \"q\" \\ 😀"}],"n":-1.5e+3,"x":[true,null]}"#;
        for cut in (0..=text.len()).filter(|cut| text.is_char_boundary(*cut)) {
            let part = &text[..cut];
            assert_eq!(skip_all(part).is_ok(), serde_json::from_str::<serde_json::Value>(part).is_ok(), "{part}");
        }
    }

    #[test]
    fn strings_decode_whatever_the_alignment_of_their_escapes() {
        for pad in 0..70 {
            let inner = format!("{}\\n{}\\ud83d\\ude00", "x".repeat(pad), "é".repeat(pad));
            let text = format!("\"{inner}\"");
            let expected: String = serde_json::from_str(&text).unwrap();
            assert_eq!(Reader::new(&text).string().unwrap(), expected);
        }
    }

    #[test]
    fn runs_end_at_the_first_special_byte_and_nowhere_else() {
        for special in 0..=255u8 {
            for place in 0..24 {
                for filler in [0x80 | (special >> 1), b'!', 0xff] {
                    let mut bytes = vec![filler; 30];
                    bytes[place] = special;
                    let expected = bytes.iter().position(|byte| is_special(*byte)).unwrap_or(30);
                    assert_eq!(plain_run_end(&bytes, 0), expected, "{special} at {place}");
                }
            }
        }
    }

    #[test]
    fn lone_surrogates_and_depth_are_refused() {
        for bad in [r#""\ud83d""#, r#""\ude00\ud83d""#, r#""\ud83dx""#, r#""\ud83d\u0041""#] {
            assert!(Reader::new(bad).string().is_err(), "{bad}");
        }
        assert!(skip_all(&"[".repeat(1_000_000)).is_err());
        assert!(skip_all(&format!("{}{}", "[".repeat(DEPTH_MAX), "]".repeat(DEPTH_MAX))).is_ok());
    }

    /// A picture of 20 MB within a body is read where it lies.
    #[test]
    fn a_string_without_escapes_is_never_copied() {
        let text = format!("\"data:image/png;base64,{}\"", "iVBORw0KGgo+".repeat((20 << 20) / 12));
        let read = Reader::new(&text).string().expect("a string");
        assert!(matches!(read, Cow::Borrowed(_)) && read.len() + 2 == text.len());
        assert_eq!(read.as_ptr(), text[1..].as_ptr());
    }

    #[test]
    fn errors_carry_line_and_column() {
        let text = b"{\n  \"a\": tru\n}";
        let error = skip_all(std::str::from_utf8(text).unwrap()).unwrap_err();
        assert_eq!(error.position(text), (2, 8));
    }
}
