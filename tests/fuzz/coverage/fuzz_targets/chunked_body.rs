//! `chunked_body` under coverage; the target itself is in `tests/fuzz/targets`.
#![no_main]

#[allow(dead_code)]
#[path = "../../targets/mod.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    targets::wire::chunked_body(data);
});
