//! Who may use the router, and what the workers are shown instead. Keys are kept as SHA-256 digests and compared in
//! constant time; nothing here is logged or given out.
//!
//! | router keys | worker key | the client's `Authorization` and `X-Api-Key` | what the worker gets |
//! |---|---|---|---|
//! | yes | yes | checked, end here | the worker key |
//! | yes | no | checked, end here | none |
//! | no | yes | not looked at, end here | the worker key |
//! | no | no | not looked at | the client's own, unless `--forward-authorization false` |
//!
//! With router keys the client's `Cookie` ends here too: what proves who somebody is stays on this side.

use std::fmt;

use http::{HeaderName, HeaderValue, header};
use infera_shards::Head;
use sha2::{Digest, Sha256};
use subtle::{Choice, ConstantTimeEq};

use super::cleanup::DATA_PARALLEL_RANK;
use super::direct;
use crate::limits;

const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// Keys that clients may use; none means that anybody may.
#[derive(Clone, Default)]
pub struct ClientKeys(Vec<[u8; 32]>);

impl fmt::Debug for ClientKeys {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} keys", self.0.len())
    }
}

impl ClientKeys {
    /// One key per line; empty lines and lines that begin with `#` are left out.
    ///
    /// # Errors
    /// What is wrong, in words that show no key: there is none, which must not mean that anybody may, there are too many, or
    /// one could never come in a header.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut keys = Vec::new();
        for (index, line) in text.lines().map(str::trim).enumerate() {
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            if !line.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ') {
                return Err(format!("line {}: a key has visible ASCII characters only", index + 1));
            }
            if keys.len() == limits::CLIENT_KEYS_MAX {
                return Err(format!("more than {} keys", limits::CLIENT_KEYS_MAX));
            }
            keys.push(Sha256::digest(line.as_bytes()).into());
        }
        match keys.is_empty() {
            true => Err("has no key; write one per line, or leave the option out".to_owned()),
            false => Ok(Self(keys)),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether the head carries one of the keys, as `Authorization: Bearer` or as `X-Api-Key`. Every key is compared,
    /// whichever fits.
    pub(super) fn admit(&self, head: &Head) -> bool {
        if self.is_empty() {
            return true;
        }
        let bearer = head.get("authorization").and_then(bearer);
        let Some(given) = bearer.or_else(|| head.get("x-api-key")) else { return false };
        let digest: [u8; 32] = Sha256::digest(given).into();
        let found = self.0.iter().fold(Choice::from(0), |found, known| found | known.ct_eq(&digest));
        found.into()
    }
}

/// The token of `Bearer <token>`; the scheme's letters may be of any case (RFC 9110, section 11.1).
fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| token.trim_ascii())
}

/// How the headers of requests to workers differ from the client's, whatever the worker.
#[derive(Clone)]
pub struct OutboundHeaders {
    /// Client headers that end here.
    remove: Vec<HeaderName>,
    /// The same for one leg of a pair. The last one ends here only where the answer is read here.
    remove_of_leg: Vec<HeaderName>,
    set: Vec<(HeaderName, HeaderValue)>,
}

impl fmt::Debug for OutboundHeaders {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "without {:?}, {} set", self.remove, self.set.len())
    }
}

impl Default for OutboundHeaders {
    fn default() -> Self {
        Self::new(false, None, true)
    }
}

impl OutboundHeaders {
    /// `worker_key` is the whole value of `Authorization`.
    pub fn new(is_authenticating: bool, worker_key: Option<HeaderValue>, forwards_authorization: bool) -> Self {
        // Names of workers are not for workers.
        let mut remove = vec![direct::WORKER, direct::PREFILL];
        if is_authenticating || worker_key.is_some() || !forwards_authorization {
            remove.extend([header::AUTHORIZATION, API_KEY]);
        }
        if is_authenticating {
            remove.push(header::COOKIE);
        }
        // A client's rank belongs to one leg and has been read; what is read here must not come compressed.
        let mut remove_of_leg = remove.clone();
        remove_of_leg.extend([DATA_PARALLEL_RANK, header::ACCEPT_ENCODING]);
        Self { remove, remove_of_leg, set: worker_key.map(|key| (header::AUTHORIZATION, key)).into_iter().collect() }
    }

    /// Headers to leave out and to set. A rank-multiplexed worker gets the picked rank; any other what the client asked
    /// for.
    pub(super) fn for_rank(&self, rank: Option<u32>) -> Edits<'_> {
        let Some(rank) = rank else { return Edits { base: self, ranked: None } };
        let mut set = self.set.clone();
        set.push((DATA_PARALLEL_RANK, HeaderValue::from(rank)));
        Edits { base: self, ranked: Some(set) }
    }

    /// Client headers that one leg of a pair leaves out.
    pub(super) fn removed_of_leg(&self, is_read_here: bool) -> &[HeaderName] {
        let kept = usize::from(!is_read_here);
        &self.remove_of_leg[..self.remove_of_leg.len() - kept]
    }

    /// Whether workers are shown a key of this router's own.
    pub(super) fn has_worker_key(&self) -> bool {
        !self.set.is_empty()
    }

    /// What a call of the router's own carries.
    pub(super) fn own(&self) -> &[(HeaderName, HeaderValue)] {
        &self.set
    }
}

/// The edits of one request; borrowed where nothing depends on the request.
pub(super) struct Edits<'a> {
    base: &'a OutboundHeaders,
    ranked: Option<Vec<(HeaderName, HeaderValue)>>,
}

impl Edits<'_> {
    /// What is set replaces the client's line of that name.
    pub fn remove(&self) -> &[HeaderName] {
        &self.base.remove
    }

    pub fn set(&self) -> &[(HeaderName, HeaderValue)] {
        self.ranked.as_deref().unwrap_or(&self.base.set)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_a_file_and_a_header() {
        let keys = ClientKeys::parse("# ours\n  sk-one \n\nsk-two\r\n").unwrap();
        assert_eq!((keys.0.len(), format!("{keys:?}").as_str()), (2, "2 keys"));
        assert_eq!(bearer(b"bEaReR  sk-one "), Some(&b"sk-one"[..]));
        for odd in [&b"Basic abc"[..], b"Bearer", b"", b"Bearersk-one"] {
            assert_eq!(bearer(odd), None);
        }
        for (text, problem) in [
            ("# nothing\n".to_owned(), "has no key"),
            ("sk-one\nsk-\0two\n".to_owned(), "line 2: a key has visible"),
            ("schlüssel".to_owned(), "line 1: a key has visible"),
            ("k\n".repeat(limits::CLIENT_KEYS_MAX + 1), "more than"),
        ] {
            let refused = ClientKeys::parse(&text).unwrap_err();
            assert!(refused.starts_with(problem) && !refused.contains("two"), "{refused}");
        }
    }

    #[test]
    fn what_ends_here() {
        let removed =
            |headers: OutboundHeaders| headers.remove.iter().skip(2).map(|it| it.to_string()).collect::<Vec<_>>();
        assert!(removed(OutboundHeaders::default()).is_empty());
        let both = ["authorization", "x-api-key"];
        assert_eq!(removed(OutboundHeaders::new(false, None, false)), both);
        assert_eq!(removed(OutboundHeaders::new(false, Some(HeaderValue::from_static("Bearer w")), true)), both);
        assert_eq!(removed(OutboundHeaders::new(true, None, true)), ["authorization", "x-api-key", "cookie"]);
        let headers = OutboundHeaders::new(true, Some(HeaderValue::from_static("Bearer w")), true);
        assert!(!format!("{headers:?}").contains("Bearer"));
        let edits = headers.for_rank(Some(3));
        assert_eq!(edits.set().len(), 2);
        assert_eq!(headers.for_rank(None).set().len(), 1);
        let of_leg = |is_read_here| headers.removed_of_leg(is_read_here).iter().skip(5).map(|it| it.as_str());
        assert_eq!(of_leg(false).collect::<Vec<_>>(), ["x-data-parallel-rank"]);
        assert_eq!(of_leg(true).collect::<Vec<_>>(), ["x-data-parallel-rank", "accept-encoding"]);
    }
}
