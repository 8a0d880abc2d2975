//! Where a rendered text may be cut so that its pieces encode to the same ids as the whole.
//!
//! A tokenizer takes its added tokens out of the text first and encodes what lies between them piece by piece, so a
//! cut in front of an added token changes nothing. That holds only for tokens matched on the raw text that eat no
//! neighbours, and for pre-tokenizers that do not treat the first piece apart; a model with anything else has no cuts.

use std::ops::Range;

use aho_corasick::{AhoCorasick, Anchored, Input, MatchKind, StartKind};
use serde_json::Value;
use xxhash_rust::xxh3::{xxh3_128, xxh3_128_with_seed};

/// Cuts closer than this to the last one are passed over: an entry of the cache costs more than such a piece.
const PIECE_BYTES_MIN: usize = 128;

/// Deep inside a text pieces are at least this fraction of what is before them, so that a text full of added tokens
/// makes thousands of pieces, not millions.
const PIECE_DEPTH_DIVISOR: usize = 1024;

/// Added tokens may begin with at most this many different bytes, or there are no cuts: the search looks for them.
const FIRST_BYTES_MAX: usize = 3;

/// Finds the cuts of one model's texts.
pub struct Splitter {
    first_bytes: Vec<u8>,
    tokens: AhoCorasick,
}

/// One piece of a text: its bytes, and the 128-bit name of all text up to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    pub range: Range<usize>,
    pub key_at_end: u128,
}

impl Splitter {
    /// Reads the rules from a parsed tokenizer.json; `None` where cutting would not be exact.
    pub fn of_tokenizer(tokenizer: &Value) -> Option<Self> {
        if treats_first_piece_apart(tokenizer.get("pre_tokenizer")?) {
            return None;
        }
        let flag = |token: &Value, name: &str| token.get(name).and_then(Value::as_bool).unwrap_or(false);
        let mut contents = Vec::new();
        for token in tokenizer.get("added_tokens")?.as_array()? {
            // Tokens matched on normalised text are looked for later, inside the pieces.
            if flag(token, "normalized") {
                continue;
            }
            if ["lstrip", "rstrip", "single_word"].iter().any(|name| flag(token, name)) {
                return None;
            }
            contents.extend(token.get("content").and_then(Value::as_str).filter(|content| !content.is_empty()));
        }
        let mut first_bytes: Vec<u8> = contents.iter().map(|content| content.as_bytes()[0]).collect();
        first_bytes.sort_unstable();
        first_bytes.dedup();
        if contents.is_empty() || first_bytes.len() > FIRST_BYTES_MAX {
            return None;
        }
        let tokens = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .start_kind(StartKind::Anchored)
            .build(&contents)
            .ok()?;
        Some(Self { first_bytes, tokens })
    }

    /// Next place, at or behind `from`, where an added token may begin.
    fn candidate(&self, bytes: &[u8], from: usize) -> Option<usize> {
        let rest = bytes.get(from..)?;
        let found = match self.first_bytes[..] {
            [one] => memchr::memchr(one, rest),
            [one, two] => memchr::memchr2(one, two, rest),
            [one, two, three] => memchr::memchr3(one, two, three, rest),
            _ => None,
        };
        found.map(|at| from + at)
    }

    /// Next added token at or behind `from`.
    fn next_token(&self, text: &str, mut from: usize) -> Option<Range<usize>> {
        while let Some(at) = self.candidate(text.as_bytes(), from) {
            if let Some(token) = self.tokens.find(Input::new(text).range(at..).anchored(Anchored::Yes)) {
                return Some(token.range());
            }
            from = at + 1;
        }
        None
    }

    /// Whether a text spells an added token.
    pub fn has_token(&self, text: &str) -> bool {
        self.next_token(text, 0).is_some()
    }

    /// What lies between a text's added tokens.
    pub fn stretches<'t>(&'t self, text: &'t str) -> impl Iterator<Item = Range<usize>> + 't {
        let mut from = Some(0);
        std::iter::from_fn(move || {
            let start = from?;
            let token = self.next_token(text, start);
            let end = token.as_ref().map_or(text.len(), |token| token.start);
            from = token.map(|token| token.end);
            Some(start..end)
        })
    }

    /// The pieces of a text, in order, without gaps; the last one ends with the text. `cuts` are byte offsets, in
    /// order, at which two encodings meet: no token lies across one. `seed` names what else the ids depend on.
    pub fn pieces(&self, text: &str, cuts: &[usize], seed: u64) -> Vec<Piece> {
        let bytes = text.as_bytes();
        let mut pieces = Vec::with_capacity(bytes.len() / 1024 + 4);
        let mut key = u128::from(seed);
        let (mut start, mut from) = (0, 0);
        while let Some(at) = self.candidate(bytes, from) {
            let Some(token) = self.tokens.find(Input::new(text).range(at..).anchored(Anchored::Yes)) else {
                from = at + 1;
                continue;
            };
            if cuts.get(cuts.partition_point(|cut| *cut <= at)).is_some_and(|cut| *cut < token.end()) {
                from = at + 1;
                continue;
            }
            if at >= start + PIECE_BYTES_MIN.max(start / PIECE_DEPTH_DIVISOR) {
                key = with_cuts(chained(key, &bytes[start..at]), cuts, start..at);
                pieces.push(Piece { range: start..at, key_at_end: key });
                start = at;
            }
            from = token.end();
        }
        if start < bytes.len() || pieces.is_empty() {
            let key_at_end = with_cuts(chained(key, &bytes[start..]), cuts, start..bytes.len());
            pieces.push(Piece { range: start..bytes.len(), key_at_end });
        }
        pieces
    }
}

/// Name of a text from the name of what is before it and its last piece. Equal names mean equal texts up to the
/// strength of 128-bit XXH3; the seed is drawn at start, so that nobody outside can aim for a collision.
fn chained(before: u128, piece: &[u8]) -> u128 {
    let mut bytes = [0u8; 32];
    bytes[..16].copy_from_slice(&before.to_le_bytes());
    bytes[16..].copy_from_slice(&xxh3_128_with_seed(piece, before as u64).to_le_bytes());
    xxh3_128(&bytes)
}

/// The name of a piece in which encodings meet tells where.
fn with_cuts(key: u128, cuts: &[usize], piece: Range<usize>) -> u128 {
    let inside = cuts[cuts.partition_point(|cut| *cut <= piece.start)..].iter().take_while(|cut| **cut < piece.end);
    inside.fold(key, |key, cut| chained(key, &(cut - piece.start).to_le_bytes()))
}

/// Metaspace with `first` puts its mark only in front of the whole text, so a piece would get one too many.
fn treats_first_piece_apart(pre_tokenizer: &Value) -> bool {
    match pre_tokenizer {
        Value::Object(object) => {
            let is = |name: &str, text: &str| object.get(name).and_then(Value::as_str) == Some(text);
            (is("type", "Metaspace") && !is("prepend_scheme", "never") && !is("prepend_scheme", "always"))
                || object.get("pretokenizers").is_some_and(treats_first_piece_apart)
        }
        Value::Array(parts) => parts.iter().any(treats_first_piece_apart),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn splitter(tokens: &[&str]) -> Option<Splitter> {
        let tokens: Vec<Value> = tokens.iter().map(|content| json!({"content": content, "special": true})).collect();
        Splitter::of_tokenizer(&json!({"added_tokens": tokens, "pre_tokenizer": {"type": "ByteLevel"}}))
    }

    #[test]
    fn cuts_lie_in_front_of_added_tokens_and_not_too_close() {
        let splitter = splitter(&["<|a|>", "<|a|>b", "<x"]).unwrap();
        let long = "t".repeat(200);
        let text = format!("<|a|>{long}<|a|>b<|a|>{long}<y{long}<x");
        let ranges: Vec<_> = splitter.pieces(&text, &[], 0).into_iter().map(|piece| &text[piece.range]).collect();
        assert_eq!(ranges, [format!("<|a|>{long}"), format!("<|a|>b<|a|>{long}<y{long}"), "<x".to_owned()]);
        assert_eq!(ranges.concat(), text);
        assert_eq!(splitter.pieces("", &[], 0).len(), 1);
    }

    #[test]
    fn equal_prefixes_have_equal_names_and_seeds_tell_apart() {
        let splitter = splitter(&["<|a|>"]).unwrap();
        let part = format!("<|a|>{}", "u".repeat(150));
        let (two, three) = (part.repeat(2), part.repeat(3));
        let keys = |text: &str, seed| {
            splitter.pieces(text, &[], seed).iter().map(|piece| piece.key_at_end).collect::<Vec<_>>()
        };
        assert_eq!(keys(&two, 1), keys(&three, 1)[..2]);
        assert_ne!(keys(&two, 1)[0], keys(&two, 2)[0]);
        assert_ne!(keys(&three, 1)[1], keys(&three, 1)[2]);
    }

    #[test]
    fn where_encodings_meet_is_part_of_a_name_and_no_token_lies_across() {
        let splitter = splitter(&["<|a|>"]).unwrap();
        let text = format!("{}<|a|>{}", "t".repeat(200), "u".repeat(200));
        let keys =
            |cuts: &[usize]| splitter.pieces(&text, cuts, 0).iter().map(|piece| piece.key_at_end).collect::<Vec<_>>();
        assert_eq!(keys(&[]).len(), 2);
        assert_eq!(keys(&[]), keys(&[200]), "a cut where pieces meet anyway");
        assert_eq!(keys(&[202]).len(), 1, "a cut inside of a token");
        assert_eq!(keys(&[])[0], keys(&[300])[0]);
        assert_ne!(keys(&[])[1], keys(&[300])[1]);
        assert_ne!(keys(&[301])[1], keys(&[300])[1]);
        assert!(splitter.has_token(&text) && !splitter.has_token("<|a| ><|b|>"));
    }

    #[test]
    fn models_whose_pieces_are_not_independent_have_no_cuts() {
        let with = |token: Value, pre: Value| {
            Splitter::of_tokenizer(&json!({"added_tokens": [token], "pre_tokenizer": pre})).is_some()
        };
        let plain = json!({"content": "<s>"});
        assert!(with(plain.clone(), json!({"type": "ByteLevel"})));
        assert!(with(plain.clone(), json!({"type": "Metaspace", "prepend_scheme": "always"})));
        assert!(!with(plain.clone(), json!({"type": "Metaspace", "prepend_scheme": "first"})));
        assert!(!with(plain, json!({"type": "Sequence", "pretokenizers": [{"type": "Metaspace"}]})));
        assert!(!with(json!({"content": "<s>", "lstrip": true}), json!({"type": "ByteLevel"})));
        assert!(splitter(&["a", "b", "c", "d"]).is_none());
        assert!(splitter(&[]).is_none());
    }
}
