//! The engine against real sockets, on both drivers: raw clients on one side, scripted upstreams on the other.

mod client;
mod harness;
mod leaving;
mod lifecycle;
mod relay;
mod upstream;
