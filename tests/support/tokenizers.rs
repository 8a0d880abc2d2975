//! Tokenizers that `tests/setup/fetch_tokenizers.sh` has fetched, and the loud word of a test that cannot run without.

use std::path::{Path, PathBuf};

/// Fetched only when somebody asks for them.
const ON_DEMAND: [&str; 1] = ["gemma3"];

/// `INFERA_TOKENIZERS_DIR`, or where the script puts them.
pub fn store() -> PathBuf {
    std::env::var_os("INFERA_TOKENIZERS_DIR")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("target/tokenizers"), PathBuf::from)
}

/// Says that a test did not run; with `INFERA_REQUIRE_TOKENIZERS=1` that is a failure.
pub fn not_run(message: &str) {
    assert!(std::env::var_os("INFERA_REQUIRE_TOKENIZERS").is_none_or(|value| value != "1"), "{message}");
    eprintln!("{message}");
}

/// Directory of a fetched model that has this file.
#[allow(dead_code)] // Each test binary uses its own part of this.
pub fn with_file(name: &str, file: &str) -> Option<PathBuf> {
    let directory = store().join(name);
    if directory.join(file).is_file() {
        return Some(directory);
    }
    let message =
        format!("NOT RUN: {} is not there; run tests/setup/fetch_tokenizers.sh", directory.join(file).display());
    match ON_DEMAND.contains(&name) {
        true => eprintln!("{message}"),
        false => not_run(&message),
    }
    None
}

/// Directory of a fetched tokenizer.
#[allow(dead_code)]
pub fn fetched(name: &str) -> Option<PathBuf> {
    with_file(name, "tokenizer.json")
}
