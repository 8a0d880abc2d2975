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

/// Workers of one source; registrations beyond it are skipped and counted.
pub const WORKERS_MAX: usize = 16_384;

/// The workers file, bytes.
pub const WORKERS_FILE_BYTES_MAX: u64 = 64 << 20;

/// What is read of an engine's answer to discovery's questions, bytes; `/metrics` is the long one.
pub const ENGINE_ANSWER_BYTES_MAX: usize = 8 << 20;

/// Questions that discovery has open at engines at a time.
pub const ENGINE_QUESTIONS_MAX: usize = 256;

/// Threads that wait for the resolver or the workers file.
pub const DISCOVERY_BLOCKING_THREADS: usize = 32;

/// Messages between discovery's tasks; a full queue slows the sender.
pub const DISCOVERY_QUEUE_MESSAGES: usize = 256;

/// One message from etcd, bytes.
pub const ETCD_MESSAGE_BYTES_MAX: usize = 64 << 20;
