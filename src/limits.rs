//! Every cap of the routing side in one place. A queue, cache or loop without a number here is a defect.

/// Largest request body that is read, bytes (`--max-body-bytes`).
pub const BODY_BYTES_MAX: usize = 64 << 20;

/// Bodies up to this many bytes are rendered, encoded and hashed on the shard itself: about 1 ms at
/// worst. Longer ones go to the encoder pool, so that relays on the same shard do not notice.
pub const INLINE_PROMPT_BODY_BYTES: usize = 2 << 10;

/// Jobs waiting for an encoder thread, per thread. A full queue routes by load.
pub const ENCODER_QUEUE_JOBS: usize = 256;

/// Bytes of an upstream error body kept in a router error message.
pub const ERROR_EXCERPT_BYTES: usize = 500;

/// Data-parallel ranks of one worker.
pub const DP_RANKS_MAX: u32 = 1024;

/// One ZMQ message (all frames), bytes; a longer one is refused by the socket.
pub const EVENT_MESSAGE_BYTES_MAX: i64 = 64 << 20;

/// Block hashes in one event.
pub const EVENT_BLOCKS_MAX: usize = 1 << 20;

/// Tokens in one block, whatever an event claims.
pub const BLOCK_TOKENS_MAX: usize = 1 << 16;

/// Characters of rendered prompt text.
pub const RENDERED_BYTES_MAX: usize = 64 << 20;

/// Input tokens of one decode reservation, samples included: an absurd `n` must not overflow a sum that has
/// to come back to exactly 0 (2^24 requests in flight still fit 64 bits).
pub const DEMAND_TOKENS_MAX: u64 = 1 << 40;

/// Sessions with a binding, all models and roles together.
pub const SESSIONS_MAX: usize = 1 << 16;

/// Longest session name in a header, bytes.
pub const SESSION_NAME_BYTES_MAX: usize = 1024;

/// Images remembered per target.
pub const IMAGES_PER_TARGET_MAX: usize = 256;

/// Images of one request that are looked up; further ones have no affinity.
pub const IMAGES_PER_REQUEST_MAX: usize = 64;
