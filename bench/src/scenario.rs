//! The loads of a comparison, and what one unit of work is in each.
//!
//! Owns sizes and connection counts. Never starts anything.

use std::time::Duration;

use clap::ValueEnum;
use serde::Serialize;

use crate::answer::{Answer, CHUNK_BYTES, JSON_BYTES};
use crate::rivals::ROUTER_PAIR;

/// Small chat request, bytes of body.
const SMALL_BODY_BYTES: usize = 200;

/// Groups that `--only` chooses from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Group {
    /// Small JSON answers on 1, 32 and 256 connections.
    Json,
    /// 30 kB and 400 kB request bodies.
    Body,
    /// Paced and burst streams.
    Sse,
    /// Memory of open, silent streams.
    Idle,
    /// What is added to the latency of a request that meets nobody else.
    Latency,
}

/// What the CPU time is divided by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Unit {
    Request,
    /// [`CHUNK_BYTES`] of stream payload, however the proxy cuts or joins them.
    Chunk,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub struct Scenario {
    pub name: &'static str,
    pub group: Group,
    pub connections: usize,
    pub body_bytes: usize,
    pub unit: Unit,
    #[serde(skip)]
    pub answer: Shape,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    Json,
    Paced,
    Burst,
}

/// Time between two chunks of a paced stream: 50 tokens a second.
const PACE: Duration = Duration::from_millis(20);

const fn json(name: &'static str, group: Group, connections: usize, body_bytes: usize) -> Scenario {
    Scenario { name, group, connections, body_bytes, unit: Unit::Request, answer: Shape::Json }
}

const fn stream(name: &'static str, connections: usize, answer: Shape) -> Scenario {
    Scenario { name, group: Group::Sse, connections, body_bytes: SMALL_BODY_BYTES, unit: Unit::Chunk, answer }
}

/// In the order in which they run and are printed.
pub const ALL: [Scenario; 7] = [
    json("json c=1", Group::Json, 1, SMALL_BODY_BYTES),
    json("json c=32", Group::Json, 32, SMALL_BODY_BYTES),
    json("json c=256", Group::Json, 256, SMALL_BODY_BYTES),
    json("body 30 kB c=32", Group::Body, 32, 30_000),
    json("body 400 kB c=8", Group::Body, 8, 400_000),
    stream("sse paced 200", 200, Shape::Paced),
    stream("sse burst 32", 32, Shape::Burst),
];

impl Scenario {
    pub fn answer(&self) -> Answer {
        match self.answer {
            Shape::Json => Answer::json(JSON_BYTES),
            Shape::Paced => Answer::stream(Some(PACE)),
            Shape::Burst => Answer::stream(None),
        }
    }

    /// The pair is measured where a request is the unit: what it adds is per request, not per chunk.
    pub fn is_for(&self, proxy: &str) -> bool {
        proxy != ROUTER_PAIR || self.unit == Unit::Request
    }

    pub fn streams(&self) -> bool {
        self.unit == Unit::Chunk
    }

    /// Units of work in `answers` answers with `payload_bytes` of payload together.
    pub fn units(&self, answers: u64, payload_bytes: u64) -> f64 {
        match self.unit {
            Unit::Request => answers as f64,
            Unit::Chunk => payload_bytes as f64 / CHUNK_BYTES as f64,
        }
    }

    /// All streams of a paced load must run before its window begins.
    pub fn warm_up(&self) -> Duration {
        if self.answer == Shape::Paced { Duration::from_millis(1500) } else { Duration::from_millis(400) }
    }
}
