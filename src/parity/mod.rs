//! Whether workers render prompts as this router does. Every block hash rests on the router's token ids being the
//! engine's, and each worker's own events tell which ids it has used: a few requests of each target are watched all the
//! time, and the blocks that show are compared with those that were expected. Decides nothing about routing; touches no
//! request.

mod check;
mod explain;
mod probe;
mod standing;
mod watches;

pub use check::{Branch, Check, Finding, Stored};
pub use explain::{Divergence, start_if_heard};
pub use probe::{Answer, Probe, judge, own_tokens, probes};
pub use standing::{News, Standing};
pub use watches::{Admission, ParityCounts, Watches};

/// Members that set a request's blocks apart from the plain prompt's on the engine: their hashes are never the router's.
const SETTING_APART: [&[u8]; 4] = [b"\"cache_salt\"", b"\"extra_key\"", b"\"lora_path\"", b"\"mm_processor_kwargs\""];

/// Whether a body may have such a member. A text that only mentions one costs a check, nothing else.
fn is_set_apart(body: &[u8]) -> bool {
    SETTING_APART.iter().any(|name| memchr::memmem::find(body, name).is_some())
}
