//! What is fuzzed: functions of bytes that panic when a promise is broken. Each returns a digest of what happened, by which
//! the driver tells inputs that reach something new from those that do not. Shared by the driver that runs with every
//! `cargo test` and by the coverage-guided targets of `tests/fuzz/coverage`; owns no inputs and no clock.

pub mod kv_events;
pub mod wire;

/// One fuzz target.
pub struct Target {
    pub name: &'static str,
    pub run: fn(&[u8]) -> u64,
}

/// All targets. A new one needs a line here, inputs to begin with in `seeds.rs`, and three lines in `coverage/fuzz_targets`.
pub const TARGETS: &[Target] = &[
    Target { name: "kv_frames", run: kv_events::frames },
    Target { name: "kv_payload", run: kv_events::payload },
    Target { name: "kv_state", run: kv_events::state },
    Target { name: "request_head", run: wire::request_head },
    Target { name: "response_head", run: wire::response_head },
    Target { name: "chunked_body", run: wire::chunked_body },
    Target { name: "event_stream", run: wire::event_stream },
    Target { name: "splice", run: wire::splice },
];
