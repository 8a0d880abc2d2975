//! Every cap of the routing side in one place. A queue, cache or loop without a number here is a defect.

/// Largest request body that is read, bytes (`--max-body-bytes`).
pub const BODY_BYTES_MAX: usize = 64 << 20;

/// Bodies up to this many bytes and messages are rendered, and looked for in the prefix cache, on the shard itself: about
/// 1 ms at worst. Longer ones go to the encoder pool as they are, so that relays on the same shard do not notice.
pub const SHARD_PROMPT_BODY_BYTES: usize = 1 << 20;
pub const SHARD_PROMPT_MESSAGES: usize = 512;

/// New text up to this many bytes is encoded on the shard: some 0.1 ms with the fast encoder, and with the reference,
/// which takes about 50 times as long, 1 ms for its own bound. Below `LONG_PIECE_BYTES`: a thread that encodes a long
/// piece may have to wait for another that does.
pub const SHARD_NEW_TEXT_BYTES: usize = (8 << 10) - 1;
pub const SHARD_NEW_TEXT_BYTES_REFERENCE: usize = 2 << 10;

/// New text after which a thread forgets the words that the fast encoder has learned from it, bytes. A shard's words
/// fit in what it has at its first text (8 MiB for Qwen3), and even text that never repeats a word makes it grow for
/// 5 ms at most; a thread that only encodes may keep four times as much.
pub const SHARD_LEARNS_BYTES_MAX: usize = 4 << 20;
pub const ENCODER_LEARNS_BYTES_MAX: usize = 16 << 20;

/// Pieces of a prompt from this size on are kept as soon as they are encoded, and are encoded by one thread at a time.
pub const LONG_PIECE_BYTES: usize = 8 << 10;
const _: () = assert!(SHARD_NEW_TEXT_BYTES < LONG_PIECE_BYTES && SHARD_NEW_TEXT_BYTES_REFERENCE < LONG_PIECE_BYTES);

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
/// Workers of one source; registrations beyond it are skipped and counted.
pub const WORKERS_MAX: usize = 16_384;

/// Names that one worker's model has besides its first.
pub const FURTHER_MODEL_NAMES_MAX: usize = 32;

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
/// Fuel of one template rendering: one unit pays for an instruction or 64 bytes of text. A conversation of
/// 10,000 messages takes about 2 million.
pub const TEMPLATE_FUEL: u64 = 16_000_000;

/// Nested macro calls, includes and loops of one rendering.
pub const TEMPLATE_RECURSION_MAX: usize = 128;
/// Live batches held back while one publisher's gap is being replayed; beyond either bound the rank is reset.
pub const REPLAY_HELD_BATCHES_MAX: usize = 10_000;
pub const REPLAY_HELD_BYTES_MAX: usize = 64 << 20;

/// Blocks per worker and rank that wait for an unknown parent; the oldest goes first.
pub const ORPHAN_BLOCKS_MAX: usize = 16_384;

/// Names of removed blocks that each worker and rank keeps, so that a late child still finds its parent.
pub const TOMBSTONES_MAX: usize = 256;

/// Blocks in one strand of the radix index, a power of two: a walk takes one step for each, and a strand's offsets have as
/// many bits.
pub const RUN_BLOCKS_MAX: usize = 1_024;

/// Strands in the index; what does not fit is not credited.
pub const STRANDS_MAX: usize = 1 << 22;

/// Slots (worker and rank) in the index at one time.
pub const SLOTS_MAX: usize = 60_000;

/// Longest wait for a prompt on the encoder pool; after it the request is routed by load.
pub const PROMPT_DEADLINE: std::time::Duration = std::time::Duration::from_secs(1);

/// Between two looks for silent streams (`--stream-admission-warn-s`, `--stream-stall-warn-s`).
pub const SILENCE_LOOK_MIN: std::time::Duration = std::time::Duration::from_millis(20);
pub const SILENCE_LOOK_MAX: std::time::Duration = std::time::Duration::from_secs(5);

/// Entries of a shard's table of streams that are kept while there are none.
pub const STREAM_ENTRIES_KEPT: usize = 256;

/// Longest request id of a client that is shown in a log line, bytes.
pub const REQUEST_ID_BYTES_MAX: usize = 128;

/// Descriptors that client connections and those to workers leave for event feeds, files and the control pages.
pub const DESCRIPTORS_RESERVED: usize = 512;

/// Connections of the control pages, where they have an address of their own.
pub const ADMIN_CONNECTIONS_MAX: usize = 128;

/// Questions waiting for the control thread.
pub const CONTROL_QUEUE: usize = 64;
/// Messages read from one publisher before the others, the ledger and a publication have their turn.
pub const EVENT_MESSAGES_PER_TURN: usize = 64;

/// Frames kept of one multipart message; the rest is read and dropped.
pub const EVENT_FRAMES_MAX: usize = 8;

/// Sequences (prompts times samples) of one request that a prefill and a decode worker share: each has a room of
/// its own in the body.
pub const PAIR_SEQUENCES_MAX: usize = 1_024;

/// Answer of a prefill leg, bytes. It is one token, but may carry log probabilities of the whole prompt.
pub const PREFILL_ANSWER_BYTES_MAX: usize = 64 << 20;

/// Workers whose disaggregation parameters each shard keeps parsed.
pub const PEERS_MAX: usize = 16_384;

/// Refused connections of one request that do not count as its retries.
pub const REFUSED_CONNECTIONS_MAX: usize = 16;

/// Longest wait before the second retry of a request, milliseconds; it doubles with each further one.
pub const RETRY_DELAY_MS: u64 = 25;
pub const RETRY_DELAY_DOUBLINGS_MAX: usize = 5;

/// Bytes of an error event in a stream that are read to learn whose mistake it was.
pub const STREAM_ERROR_BYTES_MAX: usize = 4 << 10;

/// Workers named in the message about a pool without a compatible pair.
pub const NAMED_WORKERS_MAX: usize = 4;

/// One abort call.
pub const ABORT_DEADLINE: std::time::Duration = std::time::Duration::from_secs(5);

/// One short decode request that frees KV which nobody wants any more.
pub const RELEASE_DEADLINE: std::time::Duration = std::time::Duration::from_secs(30);

/// An abort call for a leg that was just sent waits until the leg is this old: one that overtakes its request is lost.
pub const ABORT_AGE_MIN: std::time::Duration = std::time::Duration::from_millis(250);
/// Bytes of the prompt side's prefix cache (`--prompt-cache-bytes`): about 1,200 conversations of 110,000 tokens.
pub const PROMPT_CACHE_BYTES: usize = 128 << 20;
/// Ranks that share one ZMQ context. A context takes 1,023 sockets, and a rank needs up to four: subscription, the two
/// ends of its monitor, and a replay now and then.
pub const RANKS_PER_EVENT_CONTEXT: usize = 200;

/// Longest body that is kept to explain a divergence, bytes; requests with a longer one are not watched.
pub const PARITY_BODY_BYTES_MAX: usize = 4 << 20;

/// Between two watched requests of one target: while it is unknown or in doubt, and once it is confirmed.
pub const PARITY_INTERVAL_IN_DOUBT: std::time::Duration = std::time::Duration::from_millis(500);
pub const PARITY_INTERVAL_CONFIRMED: std::time::Duration = std::time::Duration::from_secs(10);

/// How long events may trail the end of the request that caused them.
pub const PARITY_GRACE: std::time::Duration = std::time::Duration::from_secs(1);

/// Longest time that one watched request keeps its target from another.
pub const PARITY_CHECK_MAX: std::time::Duration = std::time::Duration::from_secs(600);

/// Branches beside the expected blocks that one check keeps, and tokens of each.
pub const PARITY_BRANCHES_MAX: usize = 4;
pub const PARITY_BRANCH_TOKENS_MAX: usize = 1 << 16;

/// Divergences waiting to be explained; further ones are only counted.
pub const PARITY_EXPLANATIONS_MAX: usize = 8;

/// A request's own `chat_template`, bytes. The longest of a known model has 30,000; the time of a chain of `~` is quadratic.
pub const REQUEST_TEMPLATE_BYTES_MAX: usize = 32 << 10;

/// Nesting of a value that a template prints; Python's own recursion limit.
pub const TEMPLATE_VALUE_DEPTH_MAX: usize = 1_000;

/// Fuel of one rendering of such a template, which also bounds the text that it may make on the way, to 128 MiB.
pub const REQUEST_TEMPLATE_FUEL: u64 = 2_000_000;
/// Asking one engine to forget its cache (`--kv-self-heal`), and how many are asked at a time.
pub const SELF_HEAL_ASK_DEADLINE: std::time::Duration = std::time::Duration::from_secs(15);
pub const SELF_HEAL_ASKS_MAX: usize = 16;
/// Tokens of a `tiktoken.model`; the largest known has 163,584.
pub const TIKTOKEN_RANKS_MAX: usize = 1 << 20;
/// Bytes of one token of a `tiktoken.model`; each way to cut it in two is looked at when the model is loaded.
pub const TIKTOKEN_TOKEN_BYTES_MAX: usize = 4096;

/// Messages bodies up to this many bytes are made chats on the shard, about 1 ms at worst; longer ones on the encoder pool.
pub const SHARD_TRANSLATED_BODY_BYTES: usize = 256 << 10;

/// One event of a chat's stream that is translated, bytes.
pub const TRANSLATED_EVENT_BYTES_MAX: usize = 1 << 20;

/// A whole answer that is translated, bytes.
pub const TRANSLATED_ANSWER_BYTES_MAX: usize = 64 << 20;

/// An answer that may say that a worker does not know a path, bytes.
pub const UNKNOWN_PATH_ANSWER_BYTES_MAX: usize = 64 << 10;
/// Samples of the last minutes that the dashboard shows: ten minutes of them.
pub const HISTORY_SAMPLES: usize = 120;
/// Longest filter that the log takes at run time, bytes.
pub const LOG_FILTER_BYTES_MAX: usize = 4 << 10;
/// Lines of one shard that wait for the access log's thread; further ones are lost and counted.
pub const ACCESS_LINES_WAITING_MAX: usize = 16_384;
/// Method, path, request id and model in a line of the access log, bytes each.
pub const ACCESS_TEXT_BYTES_MAX: usize = 256;
/// The configuration file (`--config`), bytes.
pub const CONFIG_FILE_BYTES_MAX: u64 = 1 << 20;
/// How long the series of a worker that has left stay on the metrics page, and how many of them at most: a fleet that is
/// replaced as a whole shows its last values to a scraper that comes once a minute.
pub const DEPARTED_SERIES_KEPT: std::time::Duration = std::time::Duration::from_secs(300);
pub const DEPARTED_SERIES_MAX: usize = 4_096;
/// Models whose diverged targets are counted by name; further ones are counted together.
pub const DIVERGED_MODELS_MAX: usize = 1_024;
/// Members of a request body's object; each is remembered with its place, and the engines know about a hundred.
pub const BODY_MEMBERS_MAX: usize = 4_096;
/// Keys of clients (`--api-key-file`); each is compared with every request's, in some 10 ns.
pub const CLIENT_KEYS_MAX: usize = 4_096;
