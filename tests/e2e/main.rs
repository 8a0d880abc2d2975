//! End-to-end tests against the built `infera-router`: real sockets, real signals, real engines' frames.

#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::print_stderr)]

#[path = "../support/certificates.rs"]
mod certificates;
#[path = "../support/etcd.rs"]
mod etcd;
#[path = "../kv_publisher/mod.rs"]
mod kv_publisher;
mod support;
#[path = "../support/tokenizers.rs"]
mod tokenizers;

mod affinity;
mod bookings;
mod breaker;
mod decode_demand;
mod demo;
mod discovery;
mod exposition;
mod failures;
mod forwarding;
mod images;
mod insight;
mod keys;
mod kv_aware;
mod leaving;
mod lifecycle;
mod limits;
mod load_report;
mod memory;
mod messages;
mod official_client;
mod parity;
mod pd;
mod reload;
mod runbook;
mod self_heal;
mod silence;
mod surface;
mod tls;
