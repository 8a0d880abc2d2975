//! What routing must know of a request body, found in one pass that builds nothing for the rest.
//!
//! The body's own bytes are kept and forwarded by the caller; this module never changes them and never
//! refuses a member it does not use.

use std::borrow::Cow;
use std::fmt;

use super::json::{JsonError, JsonResult, Reader};

/// The request's `n`: how many samples the engine makes of one prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Samples {
    /// Absent or `null`: the engine's default, one.
    #[default]
    Absent,
    /// A positive integer.
    Count(u32),
    /// Present and of no use: zero, negative, fractional, text, or beyond 32 bits.
    Invalid,
}

impl Samples {
    /// Samples to account for; what is not a valid count counts as one.
    pub fn count(self) -> u32 {
        match self {
            Samples::Count(count) => count,
            Samples::Absent | Samples::Invalid => 1,
        }
    }
}

/// Members of a body that routing reads. A repeated member's last value wins, as in the engines.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RoutingFields<'a> {
    /// `model` where it is a string.
    pub model: Option<Cow<'a, str>>,
    /// Only a JSON `true` streams.
    pub stream: bool,
    pub samples: Samples,
    /// An image part in OpenAI, Responses or Anthropic form, or a non-empty top-level `images`.
    pub has_images: bool,
}

/// Why a body is not JSON, for a 400: the client's fault, no retry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExtractError {
    pub what: &'static str,
    /// From 1.
    pub line: usize,
    /// From 1, in bytes.
    pub column: usize,
}

impl fmt::Display for ExtractError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} at line {} column {}", self.what, self.line, self.column)
    }
}

impl std::error::Error for ExtractError {}

impl<'a> RoutingFields<'a> {
    /// Reads a whole body. Any JSON value is accepted; what is not an object has no fields.
    pub fn parse(body: &'a [u8]) -> Result<Self, ExtractError> {
        Self::read(body).map_err(|error| {
            let (line, column) = error.position(body);
            ExtractError { what: error.what, line, column }
        })
    }

    fn read(body: &'a [u8]) -> JsonResult<Self> {
        let text = std::str::from_utf8(body)
            .map_err(|error| JsonError { offset: error.valid_up_to(), what: "invalid UTF-8" })?;
        let mut reader = Reader::new(text);
        let mut fields = Self::default();
        if reader.peek() == Some(b'{') {
            let mut images = Images::default();
            reader.object(|reader, key| fields.member(reader, &key, &mut images))?;
            fields.has_images = images.messages || images.input || images.top_level;
        } else {
            reader.skip()?;
        }
        reader.end()?;
        Ok(fields)
    }

    fn member(&mut self, reader: &mut Reader<'a>, key: &str, images: &mut Images) -> JsonResult<()> {
        match key {
            "model" => {
                self.model = if reader.peek() == Some(b'"') { Some(reader.string()?) } else { skipped(reader)? };
            }
            "stream" => self.stream = is_true(reader)?,
            "n" => self.samples = samples(reader)?,
            "messages" => images.messages = any_image(reader)?,
            "input" => images.input = any_image(reader)?,
            "images" | "image" => images.top_level = holds_something(reader)?,
            _ => reader.skip()?,
        }
        Ok(())
    }
}

/// Which member showed an image; kept apart because a repeated member replaces its earlier value.
#[derive(Default)]
struct Images {
    messages: bool,
    input: bool,
    top_level: bool,
}

fn skipped<T>(reader: &mut Reader<'_>) -> JsonResult<Option<T>> {
    reader.skip()?;
    Ok(None)
}

fn is_true(reader: &mut Reader<'_>) -> JsonResult<bool> {
    match reader.peek() {
        Some(b't') => reader.word().map(|word| word == Some(true)),
        _ => reader.skip().map(|()| false),
    }
}

fn samples(reader: &mut Reader<'_>) -> JsonResult<Samples> {
    match reader.peek() {
        Some(b'-' | b'0'..=b'9' | b'N' | b'I') => Ok(match reader.number()?.parse::<u32>() {
            Ok(count) if count > 0 => Samples::Count(count),
            _ => Samples::Invalid,
        }),
        Some(b'n') => reader.word().map(|_| Samples::Absent),
        _ => reader.skip().map(|()| Samples::Invalid),
    }
}

fn holds_something(reader: &mut Reader<'_>) -> JsonResult<bool> {
    match reader.peek() {
        Some(b'[') => {
            let mut any = false;
            reader.array(|reader| {
                any = true;
                reader.skip()
            })?;
            Ok(any)
        }
        Some(b'n') => reader.word().map(|_| false),
        Some(b'"') => reader.string().map(|text| !text.is_empty()),
        _ => reader.skip().map(|()| true),
    }
}

/// Consumes a list of messages, parts or items and says whether one of them is an image. Only `content`
/// is looked into, so that an image-like object in a tool's arguments or schema does not count.
fn any_image(reader: &mut Reader<'_>) -> JsonResult<bool> {
    if reader.peek() != Some(b'[') {
        return reader.skip().map(|()| false);
    }
    let mut any = false;
    reader.array(|reader| {
        if reader.peek() != Some(b'{') {
            return reader.skip();
        }
        let (mut image_type, mut image_member, mut image_inside) = (false, false, false);
        reader.object(|reader, key| {
            match &*key {
                "type" if reader.peek() == Some(b'"') => {
                    image_type = matches!(&*reader.string()?, "image_url" | "input_image" | "image" | "image_pil");
                }
                "image_url" | "input_image" => image_member = holds_something(reader)?,
                "content" => image_inside = any_image(reader)?,
                _ => reader.skip()?,
            }
            Ok(())
        })?;
        any |= image_type || image_member || image_inside;
        Ok(())
    })?;
    Ok(any)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(body: &str, model: Option<&str>, stream: bool, samples: Samples, has_images: bool) {
        let fields = RoutingFields::parse(body.as_bytes()).unwrap();
        let expected = RoutingFields { model: model.map(Cow::Borrowed), stream, samples, has_images };
        assert_eq!(fields, expected, "{body}");
    }

    #[test]
    fn reads_the_fields_and_only_the_fields() {
        use Samples::{Absent, Count, Invalid};
        check("{}", None, false, Absent, false);
        check("[1]", None, false, Absent, false);
        check(r#"{"model":"m","stream":true,"n":3}"#, Some("m"), true, Count(3), false);
        check(r#"{"model":7,"stream":"true","n":0}"#, None, false, Invalid, false);
        check(r#"{"model":"a","model":"b\u00e9","n":null,"stream":1}"#, Some("bé"), false, Absent, false);
        check(r#"{"stream":true,"stream":false,"n":1.0}"#, None, false, Invalid, false);
        check(r#"{"x":{"model":"inner","stream":true},"n":-1}"#, None, false, Invalid, false);
        check(r#"{"n":4294967296}"#, None, false, Invalid, false);
    }

    #[test]
    fn finds_images_where_they_are_and_nowhere_else() {
        for (body, expected) in [
            (r#"{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]}"#, true),
            (r#"{"messages":[{"content":[{"type":"text","text":"image_url"}]}]}"#, false),
            (r#"{"messages":[{"content":[{"image_url":"x"}]}]}"#, true),
            (r#"{"messages":[{"content":[{"type":"image","source":{"type":"base64","data":"x"}}]}]}"#, true),
            (r#"{"messages":[{"content":[{"type":"tool_result","content":[{"type":"image","source":{}}]}]}]}"#, true),
            (r#"{"input":[{"role":"user","content":[{"type":"input_image","image_url":"x"}]}]}"#, true),
            (r#"{"input":"a picture","messages":[{"content":"image"}]}"#, false),
            (r#"{"images":[]}"#, false),
            (r#"{"images":["x"]}"#, true),
            (r#"{"tools":[{"type":"image"}],"messages":[{"tool_calls":[{"type":"image"}]}]}"#, false),
            (r#"{"messages":[{"content":[{"type":"image"}]}],"messages":[]}"#, false),
        ] {
            assert_eq!(RoutingFields::parse(body.as_bytes()).unwrap().has_images, expected, "{body}");
        }
    }

    #[test]
    fn bad_bodies_say_where() {
        for (body, line, column) in [
            (&b"{\"a\":1,}"[..], 1, 8),
            (b"{\n\"model\": \"m\",\n\"n\": }", 3, 6),
            (b"\xff{}", 1, 1),
            (b"{\"model\":\"m\"", 1, 13),
            (b"", 1, 1),
        ] {
            let error = RoutingFields::parse(body).unwrap_err();
            assert_eq!((error.line, error.column), (line, column), "{error}");
        }
    }
}
