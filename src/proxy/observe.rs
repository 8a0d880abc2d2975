//! What the router looks at while an answer passes: when its first byte came, and the token counts of its
//! `usage` member. It never changes or keeps the answer; a stream between two chunks holds no memory here.

use std::sync::LazyLock;
use std::time::Instant;

use infera_shards::BodyObserver;

/// Token counts as the worker reported them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
}

/// Longest `usage` object that is read, bytes.
const USAGE_BYTES_MAX: usize = 4 << 10;
const KEY: &[u8] = b"\"usage\"";

/// Built once: a finder is larger than all the rest that a stream holds here.
static FINDER: LazyLock<memchr::memmem::Finder<'static>> = LazyLock::new(|| memchr::memmem::Finder::new(KEY));

/// Watches one answer.
pub struct AnswerObserver {
    first_byte: Option<Instant>,
    /// A `usage` object being collected, or the end of a payload that may be the start of its key.
    carry: Vec<u8>,
    collecting: bool,
    usage: Option<Usage>,
}

impl AnswerObserver {
    pub fn new() -> Self {
        Self { first_byte: None, carry: Vec::new(), collecting: false, usage: None }
    }

    /// When the first byte of the body came.
    pub fn first_byte(&self) -> Option<Instant> {
        self.first_byte
    }

    /// The counts last seen in a complete `usage`; absent when the worker sent none.
    pub fn usage(&self) -> Option<Usage> {
        self.usage
    }

    fn scan(&mut self, payload: &[u8]) {
        if self.collecting || !self.carry.is_empty() {
            let room = USAGE_BYTES_MAX.saturating_sub(self.carry.len());
            self.carry.extend_from_slice(&payload[..payload.len().min(room)]);
            let joined = std::mem::take(&mut self.carry);
            self.collecting = false;
            self.scan_piece(&joined);
            if !self.collecting && payload.len() > room {
                self.scan_piece(&payload[room..]);
            }
        } else {
            self.scan_piece(payload);
        }
    }

    fn scan_piece(&mut self, mut piece: &[u8]) {
        while let Some(at) = FINDER.find(piece) {
            let value = &piece[at + KEY.len()..];
            match parse_usage(value) {
                Parsed::Complete(usage) => {
                    // A message's stream tells the one at its start and the other at its end.
                    let before = self.usage.unwrap_or_default();
                    let newer = |count: u64, before: u64| if count > 0 { count } else { before };
                    self.usage = Some(Usage {
                        prompt_tokens: newer(usage.prompt_tokens, before.prompt_tokens),
                        completion_tokens: newer(usage.completion_tokens, before.completion_tokens),
                    });
                }
                Parsed::Unfinished if value.len() < USAGE_BYTES_MAX => {
                    self.carry = piece[at..].to_vec();
                    self.collecting = true;
                    return;
                }
                Parsed::Unfinished | Parsed::NotUsage => {}
            }
            piece = value;
        }
        let tail = &piece[piece.len().saturating_sub(KEY.len() - 1)..];
        if let Some(at) = memchr::memrchr(b'"', tail)
            && KEY.starts_with(&tail[at..])
        {
            self.carry = tail[at..].to_vec();
        }
    }
}

impl BodyObserver for AnswerObserver {
    fn data(&mut self, payload: &[u8]) {
        if payload.is_empty() {
            return;
        }
        if self.first_byte.is_none() {
            self.first_byte = Some(Instant::now());
        }
        self.scan(payload);
    }
}

enum Parsed {
    Complete(Usage),
    Unfinished,
    NotUsage,
}

/// `value` starts right behind the key. Inside a JSON string the quotes of the key would be escaped, so a
/// generated text cannot pose as the member.
fn parse_usage(value: &[u8]) -> Parsed {
    #[derive(serde::Deserialize)]
    struct Counts {
        #[serde(default)]
        prompt_tokens: Option<u64>,
        #[serde(default)]
        completion_tokens: Option<u64>,
        #[serde(default)]
        input_tokens: Option<u64>,
        #[serde(default)]
        output_tokens: Option<u64>,
        // A message's `input_tokens` are those that were not cached.
        #[serde(default)]
        cache_read_input_tokens: Option<u64>,
        #[serde(default)]
        cache_creation_input_tokens: Option<u64>,
    }
    let mut rest = value.trim_ascii_start();
    match rest.split_first() {
        None => return Parsed::Unfinished,
        Some((b':', after)) => rest = after.trim_ascii_start(),
        Some(_) => return Parsed::NotUsage,
    }
    match rest.first() {
        None => return Parsed::Unfinished,
        Some(b'{') => {}
        Some(_) => return Parsed::NotUsage,
    }
    let mut documents = serde_json::Deserializer::from_slice(rest).into_iter::<Counts>();
    match documents.next() {
        Some(Ok(counts)) => Parsed::Complete(Usage {
            prompt_tokens: counts
                .prompt_tokens
                .or(counts.input_tokens)
                .unwrap_or(0)
                .saturating_add(counts.cache_read_input_tokens.unwrap_or(0))
                .saturating_add(counts.cache_creation_input_tokens.unwrap_or(0)),
            completion_tokens: counts.completion_tokens.or(counts.output_tokens).unwrap_or(0),
        }),
        Some(Err(error)) if error.is_eof() => Parsed::Unfinished,
        _ => Parsed::NotUsage,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whole, byte by byte, and cut in two at every place: always the same usage.
    fn check(body: &str, expected: Option<(u64, u64)>) {
        let expected = expected.map(|(prompt_tokens, completion_tokens)| Usage { prompt_tokens, completion_tokens });
        let run = |pieces: &[&[u8]]| {
            let mut observer = AnswerObserver::new();
            pieces.iter().for_each(|piece| observer.data(piece));
            assert_eq!(observer.first_byte().is_some(), !body.is_empty());
            assert_eq!(observer.usage(), expected, "{pieces:?}");
        };
        let bytes = body.as_bytes();
        run(&[bytes]);
        run(&bytes.chunks(1).collect::<Vec<_>>());
        for cut in 0..bytes.len() {
            run(&[&bytes[..cut], &bytes[cut..]]);
        }
    }

    #[test]
    fn usage_is_found_wherever_the_payload_is_cut() {
        check(r#"{"id":"x","usage":{"prompt_tokens":12,"completion_tokens":3,"total_tokens":15}}"#, Some((12, 3)));
        check(
            "data: {\"usage\": null}\n\ndata: {\"choices\":[],\"usage\" : {\"prompt_tokens\":7}}\n\ndata: [DONE]\n\n",
            Some((7, 0)),
        );
        check(
            r#"{"usage":{"input_tokens":5,"output_tokens":6,"prompt_tokens_details":{"cached_tokens":4}}}"#,
            Some((5, 6)),
        );
        check(
            "data: {\"message\":{\"usage\":{\"input_tokens\":4,\"cache_read_input_tokens\":3,\"output_tokens\":0}}}\n\n\
             data: {\"usage\":{\"output_tokens\":9}}\n\n",
            Some((7, 9)),
        );
        check("data: {\"usage\":{\"prompt_tokens\":1}}\n\ndata: {\"usage\":{\"prompt_tokens\":2}}\n\n", Some((2, 0)));
    }

    #[test]
    fn text_that_talks_about_usage_is_not_usage() {
        check(r#"{"content":"say \"usage\":{\"prompt_tokens\":9}"}"#, None);
        check(r#"{"usage":"lots"}"#, None);
        check(r#"{"usage":{"prompt_tokens":"#, None);
        check("", None);
    }

    #[test]
    fn nothing_is_held_between_the_chunks_of_a_stream() {
        let mut observer = AnswerObserver::new();
        observer.data(b"data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n");
        assert_eq!(observer.carry.capacity(), 0);
    }
}
