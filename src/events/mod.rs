//! The wire side of KV events: frames -> batches -> events, and the sequence rules. Pure: bytes and a clock
//! value go in, events and decisions come out. Never owns a socket, never knows the index.

pub mod decode;
pub mod frame;
pub mod msgpack;
pub mod sequence;

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// An engine's own name for a block. Opaque: compared, never interpreted, and only meaningful within one
/// (worker registration, rank). Integers keep their 64 bits, so a signed and an unsigned spelling of one value are
/// one name. Byte strings become a 64-bit digest under a seed of their own: a digest shared by two of a rank's
/// blocks (about 3e-8 for a million of them) would mislead the view of that rank only, and names of 8 bytes halve the mirror.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct EngineHash(pub u64);

/// Keeps byte-string names apart from integer names of equal bytes.
const BYTES_SEED: u64 = 0x6b76_2d62_7974_6573;

impl EngineHash {
    pub fn from_bytes(bytes: &[u8]) -> Self {
        EngineHash(xxh3_64_with_seed(bytes, BYTES_SEED))
    }
}

/// Where a copy of a block lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Medium(u8);

impl Medium {
    /// The engine's device memory; also what an absent medium means.
    pub const DEVICE: Medium = Medium(0);
    pub const HOST: Medium = Medium(1);
    pub const DISK: Medium = Medium(2);
    pub const EXTERNAL: Medium = Medium(3);

    /// Media that nobody here has heard of stay apart by a 7-bit digest of their name.
    pub fn parse(name: &[u8]) -> Self {
        match name {
            b"GPU" => Self::DEVICE,
            b"CPU" | b"CPU_PINNED" | b"CPU_TIER1" => Self::HOST,
            b"DISK" | b"STORAGE" | b"FS" => Self::DISK,
            b"EXTERNAL" => Self::EXTERNAL,
            _ => Medium(0x80 | (xxh3_64_with_seed(name, 0) & 0x7f) as u8),
        }
    }
}

/// What tells the copies of one block apart: medium and KV-cache group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CopyKey {
    pub medium: Medium,
    /// `group_idx`, or [`CopyKey::NO_GROUP`].
    pub group: u16,
}

impl CopyKey {
    pub const NO_GROUP: u16 = u16::MAX;
}

/// `BlockStored`: consecutive blocks chained onto `parent`.
#[derive(Clone, Copy, Debug)]
pub struct Stored<'a> {
    pub hashes: &'a [EngineHash],
    /// `None`: the first block starts a prompt.
    pub parent: Option<EngineHash>,
    /// Exactly `hashes.len() * block_size` token ids.
    pub tokens: &'a [u32],
    /// Tokens per block, never 0.
    pub block_size: usize,
    pub copy: CopyKey,
    /// Digest of adapter, salt and image keys for each block, 0 for a block without any. Empty when no block has any.
    pub identities: &'a [u64],
    /// The event has the form of an engine that may store again what a request has only hit (vLLM's tagged maps with a
    /// KV-cache group; SGLang's have none).
    pub may_report_hits: bool,
}

/// One event that changes the mirror.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    Stored(Stored<'a>),
    Removed { hashes: &'a [EngineHash], copy: CopyKey },
    Cleared,
}

/// Why an event was skipped. The rest of its batch still counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SkipReason {
    /// A tag this router does not know, or no tag at all.
    UnknownTag,
    /// Not an array or a map, or a field of the wrong type.
    Malformed,
    /// A required field is absent.
    MissingField,
    /// Number of tokens is not hashes times block size, or the block size is out of range.
    TokenCount,
    /// A token id outside `u32`.
    TokenRange,
    /// The event names no block.
    NoBlocks,
    /// One hash twice, or a block that is its own parent.
    HashTwice,
    /// `extra_keys` has fewer entries than there are blocks.
    ExtraKeys,
    /// A KV-cache group that is not dense attention; its blocks say nothing about a reusable prefix.
    SparseGroup,
}

impl SkipReason {
    pub const COUNT: usize = 9;

    /// Label values, in the order of the variants.
    pub const NAMES: [&'static str; Self::COUNT] = [
        "unknown_tag",
        "malformed",
        "missing_field",
        "token_count",
        "token_range",
        "no_blocks",
        "hash_twice",
        "extra_keys",
        "sparse_group",
    ];

    pub const fn as_str(self) -> &'static str {
        Self::NAMES[self as usize]
    }
}

/// Why (the rest of) a message could not be read. Events before the fault stay applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BatchError {
    #[error("message has {0} frames, expected 2 or 3")]
    FrameCount(usize),
    #[error("sequence frame has {0} bytes, expected 8")]
    SequenceFrame(usize),
    #[error("payload ends in the middle of a value")]
    Truncated,
    #[error("payload is not msgpack")]
    NotMsgpack,
    #[error("batch is not an array of a timestamp and a list of events")]
    NotABatch,
}
