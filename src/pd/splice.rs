//! Edits of a JSON object's top-level members in the object's own bytes: what is not edited keeps its order,
//! spelling and whitespace. The result is a list of segments that share the body, so a long prompt is never
//! copied. Never re-serializes a value and never looks into one.

use std::borrow::Cow;
use std::ops::Range;

use bytes::Bytes;
use smallvec::{SmallVec, smallvec};

use crate::prompt::outline::Outline;

/// Kept pieces up to this many bytes are copied next to an insert instead of becoming a segment of their own:
/// a segment costs more than copying this much.
const SHORT_PIECE_BYTES: usize = 256;

/// Changes of one leg, with room for those that a protocol adds.
const EDITS_EXPECTED: usize = 24;

/// Why a body cannot be edited.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpliceError {
    #[error("the body is not a JSON object")]
    NotAnObject,
    #[error("the body is not valid JSON: {0}")]
    Invalid(String),
}

/// One change of one member.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Change<'a> {
    /// Raw JSON; takes the place of the member, or is appended when there is none.
    Set(Cow<'a, str>),
    /// Raw JSON; takes the place of the member if there is one.
    Replace(Cow<'a, str>),
    Remove,
}

/// A list of changes. Of several of one member the last one given counts.
#[derive(Clone, Debug, Default)]
pub struct Edits<'a>(SmallVec<[(&'static str, Change<'a>); EDITS_EXPECTED]>);

/// An edited body, in order; a short one is a single segment.
pub type Segments = SmallVec<[Bytes; 1]>;

impl<'a> Edits<'a> {
    fn put(&mut self, key: &'static str, change: Change<'a>) -> &mut Self {
        debug_assert!(key.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_'), "{key} needs escapes");
        self.0.push((key, change));
        self
    }

    /// Whether a later change of the same member takes the place of this one.
    fn is_outdone(&self, at: usize) -> bool {
        let key = self.0[at].0;
        self.0[at + 1..].iter().any(|(later, _)| *later == key)
    }

    fn inserted_bytes(&self) -> usize {
        let bytes = |(key, change): &(&str, Change<'_>)| match change {
            Change::Set(value) | Change::Replace(value) => key.len() + value.len() + r#","":"#.len(),
            Change::Remove => 0,
        };
        self.0.iter().map(bytes).sum()
    }

    /// The member has exactly this value afterwards, where it stood or else at the end. `value` is raw JSON.
    pub fn set(&mut self, key: &'static str, value: impl Into<Cow<'a, str>>) -> &mut Self {
        self.put(key, Change::Set(value.into()))
    }

    /// The same, but a body without the member stays without it.
    pub fn replace(&mut self, key: &'static str, value: impl Into<Cow<'a, str>>) -> &mut Self {
        self.put(key, Change::Replace(value.into()))
    }

    /// No member of this name is left, however often it was given.
    pub fn remove(&mut self, key: &'static str) -> &mut Self {
        self.put(key, Change::Remove)
    }
}

/// The top-level members of one body that is an object.
#[derive(Debug)]
pub struct Members {
    outline: Outline,
    /// Offset behind the opening brace.
    open: usize,
}

impl Members {
    /// Checks that `body` is one valid JSON object and notes where its members are.
    pub fn scan(body: &Bytes) -> Result<Self, SpliceError> {
        Outline::read(body).map_err(|error| SpliceError::Invalid(error.to_string())).and_then(Self::of)
    }

    /// The members of a body that was read already.
    pub fn of(outline: Outline) -> Result<Self, SpliceError> {
        let open = outline.open().ok_or(SpliceError::NotAnObject)?;
        Ok(Self { outline, open })
    }

    /// Raw JSON of a member's value. Of several members with one name the last counts, as for most parsers.
    pub fn raw(&self, key: &str) -> Option<&[u8]> {
        self.outline.raw(key)
    }

    /// The whole body.
    pub fn body(&self) -> &Bytes {
        self.outline.body()
    }

    /// The edited body. Pieces of it are shared, never copied, unless they are short.
    pub fn apply(&self, edits: &Edits<'_>) -> Segments {
        let body = self.body();
        let copied_bytes = edits.inserted_bytes() + body.len().min(2 * SHORT_PIECE_BYTES);
        let insert = Vec::with_capacity(copied_bytes);
        let mut output = Output { body, segments: Segments::new(), kept: 0..0, insert };
        let mut used: SmallVec<[bool; EDITS_EXPECTED]> = smallvec![false; edits.0.len()];
        let mut is_first = true;
        output.keep(0..self.open);
        let mut previous_end = self.open;
        for member in self.outline.members() {
            // Whitespace and, but for the first member, the comma in front of it.
            let gap = previous_end..member.start;
            previous_end = member.value.end;
            let name = self.outline.name(member);
            let edit = edits.0.iter().rposition(|(key, _)| key.as_bytes() == name);
            let new_value = match edit.map(|at| (at, &edits.0[at].1)) {
                None => None,
                Some((_, Change::Remove)) => continue,
                // A later member of the same name would win in some parsers and lose in others: only one stays.
                Some((at, Change::Set(_) | Change::Replace(_))) if used[at] => continue,
                Some((at, Change::Set(value) | Change::Replace(value))) => {
                    used[at] = true;
                    Some(value)
                }
            };
            if !(is_first && body[gap.clone()].contains(&b',')) {
                output.keep(gap);
            }
            is_first = false;
            match new_value {
                None => output.keep(member.start..member.value.end),
                Some(value) => {
                    output.keep(member.start..member.value.start);
                    output.insert(value.as_bytes());
                }
            }
        }
        for (at, (key, change)) in edits.0.iter().enumerate() {
            if let Change::Set(value) = change
                && !used[at]
                && !edits.is_outdone(at)
            {
                output.insert(if is_first { b"\"" } else { b",\"" });
                output.insert(key.as_bytes());
                output.insert(b"\":");
                output.insert(value.as_bytes());
                is_first = false;
            }
        }
        output.keep(previous_end..body.len());
        output.finish()
    }
}

/// Collects segments: a run of kept bytes, then inserted ones, and so on.
struct Output<'a> {
    body: &'a Bytes,
    segments: Segments,
    kept: Range<usize>,
    insert: Vec<u8>,
}

impl Output<'_> {
    fn keep(&mut self, range: Range<usize>) {
        if range.is_empty() {
        } else if self.insert.is_empty() && range.start == self.kept.end {
            self.kept.end = range.end;
        } else if range.len() <= SHORT_PIECE_BYTES {
            self.insert.extend_from_slice(&self.body[range]);
        } else {
            self.flush();
            self.kept = range;
        }
    }

    fn insert(&mut self, bytes: &[u8]) {
        if self.insert.is_empty() && self.kept.len() <= SHORT_PIECE_BYTES {
            let kept = std::mem::take(&mut self.kept);
            self.insert.extend_from_slice(&self.body[kept]);
        }
        self.insert.extend_from_slice(bytes);
    }

    fn flush(&mut self) {
        let kept = std::mem::take(&mut self.kept);
        if !kept.is_empty() {
            self.segments.push(self.body.slice(kept));
        }
        if !self.insert.is_empty() {
            self.segments.push(Bytes::from(std::mem::take(&mut self.insert)));
        }
    }

    fn finish(mut self) -> Segments {
        self.flush();
        self.segments
    }
}

#[cfg(test)]
mod tests;
