//! Edits of a JSON object's top-level members in the object's own bytes: what is not edited keeps its order,
//! spelling and whitespace. The result is a list of segments that share the body, so a long prompt is never
//! copied. Never re-serializes a value and never looks into one.

use std::borrow::Cow;
use std::ops::Range;

use bytes::Bytes;
use smallvec::{SmallVec, smallvec};

use crate::prompt::outline::{Lengths, Outline};

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
pub struct Edits<'a> {
    changes: SmallVec<[(&'static str, Change<'a>); EDITS_EXPECTED]>,
    key_lengths: Lengths,
    /// Most bytes that the changes can add.
    inserted_bytes: usize,
}

/// An edited body, in order; a short one is a single segment.
pub type Segments = SmallVec<[Bytes; 1]>;

impl<'a> Edits<'a> {
    fn put(&mut self, key: &'static str, change: Change<'a>) -> &mut Self {
        debug_assert!(key.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_'), "{key} needs escapes");
        if let Change::Set(value) | Change::Replace(value) = &change {
            self.inserted_bytes += key.len() + value.len() + r#","":"#.len();
        }
        self.key_lengths.add(key.len());
        self.changes.push((key, change));
        self
    }

    /// Place of the change that counts for a member.
    fn of(&self, name: &[u8]) -> Option<usize> {
        if !self.key_lengths.may_have(name.len()) {
            return None;
        }
        self.changes.iter().rposition(|(key, _)| key.as_bytes() == name)
    }

    /// Whether a later change of the same member takes the place of this one.
    fn is_outdone(&self, at: usize) -> bool {
        let key = self.changes[at].0;
        self.changes[at + 1..].iter().any(|(later, _)| *later == key)
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
        let copied_bytes = edits.inserted_bytes + body.len().min(2 * SHORT_PIECE_BYTES);
        let insert = Vec::with_capacity(copied_bytes);
        let mut output = Output { body, segments: Segments::new(), insert, kept: 0..0 };
        let mut used: SmallVec<[bool; EDITS_EXPECTED]> = smallvec![false; edits.changes.len()];
        let mut is_first = true;
        output.keep(0..self.open);
        let mut previous_end = self.open;
        for member in self.outline.members() {
            // Whitespace and, but for the first member, the comma in front of it.
            let gap = previous_end..member.start;
            previous_end = member.value.end;
            let edit = edits.of(self.outline.name(member));
            let new_value = match edit.map(|at| (at, &edits.changes[at].1)) {
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
                    output.insert([value.as_bytes()]);
                }
            }
        }
        for (at, (key, change)) in edits.changes.iter().enumerate() {
            if let Change::Set(value) = change
                && !used[at]
                && !edits.is_outdone(at)
            {
                let before = if is_first { &b"\""[..] } else { b",\"" };
                output.insert([before, key.as_bytes(), b"\":", value.as_bytes()]);
                is_first = false;
            }
        }
        output.keep(previous_end..body.len());
        output.finish()
    }
}

/// Collects segments: finished ones, then copied bytes, then a run of kept ones that may still grow.
struct Output<'a> {
    body: &'a Bytes,
    segments: Segments,
    insert: Vec<u8>,
    kept: Range<usize>,
}

impl Output<'_> {
    fn keep(&mut self, range: Range<usize>) {
        if range.start != self.kept.end {
            self.close_kept();
            self.kept.start = range.start;
        }
        self.kept.end = range.end;
    }

    fn insert<const N: usize>(&mut self, pieces: [&[u8]; N]) {
        self.close_kept();
        self.insert.reserve(pieces.iter().map(|piece| piece.len()).sum());
        pieces.iter().for_each(|piece| self.insert.extend_from_slice(piece));
    }

    /// The kept run grows no more.
    fn close_kept(&mut self) {
        let kept = std::mem::replace(&mut self.kept, 0..0);
        if kept.len() <= SHORT_PIECE_BYTES {
            self.insert.extend_from_slice(&self.body[kept]);
        } else {
            self.close_insert();
            self.segments.push(self.body.slice(kept));
        }
    }

    fn close_insert(&mut self) {
        if !self.insert.is_empty() {
            self.segments.push(Bytes::from(std::mem::take(&mut self.insert)));
        }
    }

    fn finish(mut self) -> Segments {
        self.close_kept();
        self.close_insert();
        self.segments
    }
}

#[cfg(test)]
mod tests;
