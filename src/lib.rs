//! `infera-router`: routes OpenAI-style requests to the inference worker that already holds the prompt's
//! prefix in KV cache. The map of the house is `src/README.md`; layers are checked by `tests/tidy.rs`.

// Vocabulary.
pub mod fleet;
pub mod hash;
pub mod limits;
pub mod worker;
// Wire.
pub mod events;
// Index.
pub mod index;
// Prompt.
pub mod prompt;
// Decide.
pub mod breaker;
pub mod decode_demand;
pub mod load;
pub mod route;
// Protocols.
pub mod api;
pub mod pd;
// Exchange.
pub mod proxy;
// Slow side.
pub mod access_log;
pub mod admin;
pub mod config;
pub mod discovery;
pub mod ingest;
pub mod inspect;
pub mod logging;
pub mod metrics;
pub mod parity;
pub mod reload;
pub mod supervise;
