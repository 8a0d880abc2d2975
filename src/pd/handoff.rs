//! What a serial prefill leg hands to the decode leg: the `kv_transfer_params` of its answer, checked for what
//! decode cannot do without. Never keeps the rest of the answer.

use bytes::Bytes;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::protocol::Protocol;

/// Why a prefill answer cannot be used. The prefill worker is at fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandoffError {
    /// Its place alone: the text of the parser quotes the answer, and this goes into the log.
    #[error("the prefill answer is not the expected JSON at line {line} column {column}")]
    Invalid { line: usize, column: usize },
    #[error("kv_transfer_params of the prefill answer is not an object")]
    NotAnObject,
    #[error("kv_transfer_params of the prefill answer lacks {0:?}")]
    Missing(&'static str),
}

/// Transfer parameters as the prefill engine spelled them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Handoff {
    /// Raw JSON object, a slice of the answer.
    pub(super) parameters: Bytes,
}

impl Handoff {
    /// `Ok(None)`: the prefill engine kept no KV. A sequence that ends with its first token has none to hand
    /// over (vLLM connectors hold blocks only for one that was cut by its length); decode then computes the
    /// prompt itself.
    pub fn of(protocol: Protocol, answer: &Bytes) -> Result<Option<Self>, HandoffError> {
        #[derive(Deserialize)]
        struct Answer<'a> {
            #[serde(borrow, default)]
            kv_transfer_params: Option<&'a RawValue>,
        }
        let parsed: Answer<'_> = serde_json::from_slice(answer)
            .map_err(|error| HandoffError::Invalid { line: error.line(), column: error.column() })?;
        let raw = match parsed.kv_transfer_params.map(RawValue::get) {
            None | Some("null" | "{}") => return Ok(None),
            Some(raw) => raw,
        };
        if !raw.starts_with('{') {
            return Err(HandoffError::NotAnObject);
        }
        let handoff = Self { parameters: answer.slice_ref(raw.as_bytes()) };
        let required: &[&'static str] = match protocol {
            Protocol::VllmMoriRead => &["transfer_id", "remote_engine_id", "remote_block_ids"],
            Protocol::AtomMooncake => &["transfer_id"],
            _ => &[],
        };
        match required.iter().find(|name| handoff.member(name).is_none()) {
            Some(missing) => Err(HandoffError::Missing(missing)),
            None => Ok(Some(handoff)),
        }
    }

    /// Raw JSON of one parameter; nothing when it is absent or null.
    pub(super) fn member(&self, name: &str) -> Option<&str> {
        let members = super::splice::Members::scan(&self.parameters).ok()?;
        let range = self.parameters.slice_ref(members.raw(name)?);
        let start = range.as_ptr() as usize - self.parameters.as_ptr() as usize;
        std::str::from_utf8(&self.parameters[start..start + range.len()]).ok().filter(|raw| *raw != "null")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(protocol: Protocol, answer: &'static str, expected: Result<Option<&'static str>, HandoffError>) {
        let handoff = Handoff::of(protocol, &Bytes::from_static(answer.as_bytes()));
        let raw = handoff.map(|found| found.map(|found| String::from_utf8_lossy(&found.parameters).into_owned()));
        assert_eq!(raw, expected.map(|found| found.map(str::to_owned)), "{answer}");
    }

    #[test]
    fn parameters_are_taken_as_they_are_spelled() {
        let nixl = Protocol::VllmNixl;
        check(
            nixl,
            r#"{"id":"x","kv_transfer_params": {"remote_block_ids":[1, 2],"f":1e0}}"#,
            Ok(Some(r#"{"remote_block_ids":[1, 2],"f":1e0}"#)),
        );
        check(nixl, r#"{"kv_transfer_params":null}"#, Ok(None));
        check(nixl, r#"{"choices":[]}"#, Ok(None));
        check(nixl, r#"{"kv_transfer_params":[1]}"#, Err(HandoffError::NotAnObject));
        check(
            Protocol::AtomMooncake,
            r#"{"kv_transfer_params":{"dp_rank":1}}"#,
            Err(HandoffError::Missing("transfer_id")),
        );
        let half = r#"{"kv_transfer_params":{"transfer_id":"tx-1","remote_engine_id":"e","remote_block_ids":null}}"#;
        check(Protocol::VllmMoriRead, half, Err(HandoffError::Missing("remote_block_ids")));
        assert!(matches!(Handoff::of(nixl, &Bytes::from_static(b"data: x")), Err(HandoffError::Invalid { .. })));
    }
}
