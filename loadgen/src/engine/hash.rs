//! Owns the engines' block hashes: SHA-256 chains as vLLM and SGLang make them, salted per engine so that no two
//! engines agree on a name. Never the router's hash.

use sha2::{Digest as _, Sha256};

/// Chained identity of one full block: content and all ancestors.
pub type Digest = [u8; 32];

/// How a digest is spelled on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HashForm {
    /// vLLM default: the low 64 bits, unsigned.
    LowUnsigned,
    /// vLLM with `VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0`: all 32 bytes.
    Bytes,
    /// SGLang: the first 8 bytes as a signed integer.
    HighSigned,
}

/// A digest as it appears in an event.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum WireHash {
    Unsigned(u64),
    Signed(i64),
    Bytes(Vec<u8>),
}

impl HashForm {
    pub fn spell(self, digest: &Digest) -> WireHash {
        let eight = |bytes: &[u8]| <[u8; 8]>::try_from(bytes).expect("eight bytes of a 32-byte digest");
        match self {
            HashForm::LowUnsigned => WireHash::Unsigned(u64::from_be_bytes(eight(&digest[24..]))),
            HashForm::Bytes => WireHash::Bytes(digest.to_vec()),
            HashForm::HighSigned => WireHash::Signed(i64::from_be_bytes(eight(&digest[..8]))),
        }
    }
}

/// Digest of the block holding `tokens`, child of `parent` (`None` = first block). `root` stands in for the parent of
/// a first block; `salt` separates namespaces and applies to the first block, whose descendants inherit it.
pub fn block_digest(root: &Digest, parent: Option<&Digest>, tokens: &[u32], salt: Option<&str>) -> Digest {
    let mut hasher = Sha256::new();
    hasher.update(parent.unwrap_or(root));
    for token in tokens {
        hasher.update(token.to_le_bytes());
    }
    if let (None, Some(salt)) = (parent, salt) {
        hasher.update(salt.as_bytes());
    }
    hasher.finalize().into()
}

/// The root digest of an engine started with `seed`.
pub fn root_digest(seed: u64) -> Digest {
    Sha256::digest(seed.to_le_bytes()).into()
}

/// Digests of all full blocks of `tokens`, continuing after the `known` ones.
pub fn extend_digests(known: &mut Vec<Digest>, root: &Digest, tokens: &[u32], block_size: usize, salt: Option<&str>) {
    for block in tokens.chunks_exact(block_size).skip(known.len()) {
        let digest = block_digest(root, known.last(), block, salt);
        known.push(digest);
    }
}
