//! Tokens of a request that could not be tokenized, and tokens times samples. Reads the body as a stream:
//! never a tree, never a copy of what is inline binary.

use crate::limits;
use crate::prompt::json::{JsonResult, Reader};

/// Bytes of text taken for one token.
const BYTES_PER_TOKEN: u64 = 4;

/// Members whose strings are base64, whatever they hold: audio, documents, images.
const BINARY_MEMBERS: [&str; 3] = ["data", "file_data", "b64_json"];

/// Input tokens that a request adds to a decode target: tokens of its prompt times its samples (an absent or
/// invalid `n` counts as 1).
pub fn request_tokens(prompt_tokens: u64, samples: u32) -> u64 {
    prompt_tokens.saturating_mul(u64::from(samples.max(1))).min(limits::DEMAND_TOKENS_MAX)
}

/// Bytes of all string values of a body divided by 4, without inline binary: `data:` URLs and members that
/// hold base64. Counts what was read before an error; a body that is no text gives 0.
pub fn estimate_tokens(body: &[u8]) -> u64 {
    let text = match std::str::from_utf8(body) {
        Ok(text) => text,
        Err(error) => std::str::from_utf8(&body[..error.valid_up_to()]).unwrap_or_default(),
    };
    let mut bytes = 0;
    // Whatever could be read is the estimate; the engine says what is wrong with the rest.
    let _ = count(&mut Reader::new(text), false, &mut bytes);
    bytes / BYTES_PER_TOKEN
}

fn count(reader: &mut Reader<'_>, is_binary_member: bool, bytes: &mut u64) -> JsonResult<()> {
    match reader.peek() {
        Some(b'{') => reader.object(|reader, key| count(reader, BINARY_MEMBERS.contains(&&*key), bytes)),
        Some(b'[') => reader.array(|reader| count(reader, false, bytes)),
        Some(b'"') if is_binary_member => reader.skip(),
        Some(b'"') => {
            let string = reader.string()?;
            if !is_data_url(&string) {
                *bytes += string.len() as u64;
            }
            Ok(())
        }
        _ => reader.skip(),
    }
}

/// Schemes are case-insensitive (RFC 3986); engines trim what they fetch.
fn is_data_url(text: &str) -> bool {
    text.trim_start().as_bytes().get(..5).is_some_and(|scheme| scheme.eq_ignore_ascii_case(b"data:"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(body: &str, tokens: u64) {
        assert_eq!(estimate_tokens(body.as_bytes()), tokens, "{body}");
    }

    #[test]
    fn string_bytes_are_counted_decoded_and_by_fours() {
        check(r#"{"prompt":"12345678"}"#, 2);
        check(r#"{"prompt":"1234567"}"#, 1);
        check(r#"{"a":["1234",{"b":"5678"}],"n":3,"c":null,"d":true}"#, 2);
        check(r#"{"prompt":"\u00e9\u00e9\n\n12"}"#, 2);
        check(r#"["1234"]"#, 1);
        check("{}", 0);
        check("7", 0);
    }

    #[test]
    fn inline_binary_is_left_out_and_nothing_else_is() {
        let payload = "A".repeat(4000);
        check(&format!(r#"{{"image_url":{{"url":"data:image/png;base64,{payload}"}},"text":"1234"}}"#), 1);
        check(&format!(r#"{{"image_url":" DATA:image/png;base64,{payload}"}}"#), 0);
        check(&format!(r#"{{"input_audio":{{"data":"{payload}","format":"1234"}}}}"#), 1);
        check(&format!(r#"{{"file":{{"file_data":"{payload}"}}}}"#), 0);
        check(&format!(r#"{{"url":"https://host/{payload}"}}"#), 1003);
        check(&format!(r#"{{"text":"metadata: {payload}"}}"#), 1002);
        // Only a string is a payload: a list of that name is read like any other.
        check(r#"{"data":["1234"],"database":"1234"}"#, 2);
    }

    #[test]
    fn broken_bodies_count_up_to_the_fault() {
        check(r#"{"prompt":"12345678","x":}"#, 2);
        check(r#"{"prompt":"12345678"#, 0);
        assert_eq!(estimate_tokens(b"{\"a\":\"1234\",\"b\":\"\xff\"}"), 1);
        assert_eq!(estimate_tokens(b""), 0);
    }

    #[test]
    fn samples_multiply_and_nothing_overflows() {
        assert_eq!(request_tokens(32, 2), 64);
        assert_eq!(request_tokens(32, 0), 32);
        assert_eq!(request_tokens(u64::MAX, u32::MAX), limits::DEMAND_TOKENS_MAX);
    }
}
