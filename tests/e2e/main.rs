//! End-to-end tests against the built `infera-router`: real sockets, real signals, real engines' frames.

#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::print_stderr)]

mod support;

mod failures;
mod forwarding;
mod kv_aware;
mod leaving;
mod lifecycle;
mod official_client;
mod surface;
