//! What routing must know of a request body, taken from its outline.
//!
//! The body's own bytes are kept and forwarded by the caller; this module never changes them and never
//! refuses a member it does not use.

use std::borrow::Cow;
use std::fmt;

use super::json::Reader;
use super::outline::Outline;

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
        let Self { what, line, column } = self;
        write!(formatter, "the body is not a JSON object: {what} at line {line} column {column}")
    }
}

impl std::error::Error for ExtractError {}

impl<'a> RoutingFields<'a> {
    /// What an outline's members say.
    pub fn of(outline: &'a Outline) -> Self {
        let model = outline.reader("model").and_then(|mut reader| reader.string().ok());
        let samples = match outline.reader("n") {
            None => Samples::Absent,
            Some(mut reader) => samples(&mut reader),
        };
        Self { model, stream: outline.raw("stream") == Some(b"true"), samples }
    }
}

fn samples(reader: &mut Reader<'_>) -> Samples {
    if reader.peek() == Some(b'n') {
        return Samples::Absent;
    }
    match reader.number().map(str::parse::<u32>) {
        Ok(Ok(count)) if count > 0 => Samples::Count(count),
        _ => Samples::Invalid,
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn check(body: &'static str, model: Option<&str>, stream: bool, samples: Samples) {
        let outline = Outline::read(&Bytes::from_static(body.as_bytes())).unwrap();
        let expected = RoutingFields { model: model.map(Cow::Borrowed), stream, samples };
        assert_eq!(RoutingFields::of(&outline), expected, "{body}");
    }

    #[test]
    fn reads_the_fields_and_only_the_fields() {
        use Samples::{Absent, Count, Invalid};
        check("{}", None, false, Absent);
        check("[1]", None, false, Absent);
        check(r#"{"model":"m","stream":true,"n":3}"#, Some("m"), true, Count(3));
        check(r#"{"model":7,"stream":"true","n":0}"#, None, false, Invalid);
        check(r#"{"model":"a","model":"b\u00e9","n":null,"stream":1}"#, Some("bé"), false, Absent);
        check(r#"{"stream":true,"stream":false,"n":1.0}"#, None, false, Invalid);
        check(r#"{"x":{"model":"inner","stream":true},"n":-1}"#, None, false, Invalid);
        check(r#"{"n":4294967296}"#, None, false, Invalid);
        check(r#"{"n":"2","model":null}"#, None, false, Invalid);
    }
}
