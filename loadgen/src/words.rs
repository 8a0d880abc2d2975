//! Owns the fixed English word list shared by workloads and simulated answers. Never touches a tokenizer.

use std::sync::OnceLock;

/// The words of `assets/words.txt`, sorted. With the shipped tokenizer each is exactly one token, with and without a
/// leading space, so word counts and token counts agree.
pub fn words() -> &'static [&'static str] {
    static WORDS: OnceLock<Vec<&'static str>> = OnceLock::new();
    WORDS.get_or_init(|| include_str!("../assets/words.txt").split_whitespace().collect())
}
