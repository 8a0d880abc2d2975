//! The engine against real sockets, on both drivers: raw clients on one side, scripted upstreams on the other.

#[path = "../../../tests/support/certificates.rs"]
mod certificates;
mod client;
mod harness;
mod leaving;
mod lifecycle;
mod relay;
mod tls;
mod tls_upstream;
mod upstream;
