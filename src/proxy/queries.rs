//! Index look-ups of one pick: one for each distinct prompt among the candidates, which differ by the engine's rules, its
//! template arguments and its block size. Reused from pick to pick, so that none allocates.

use std::time::{Duration, Instant};

use crate::hash::BlockHash;
use crate::index::{Hits, View};

#[derive(Default)]
pub(super) struct Queries {
    /// The first `used` belong to the pick at hand.
    rows: Vec<Row>,
    used: usize,
    /// Spent in the index for the pick at hand.
    took: Duration,
}

#[derive(Default)]
pub(super) struct Row {
    /// Address of the blocks, which the pick holds: equal blocks of two prompts are asked for twice, never wrongly once.
    blocks: usize,
    pub device: Hits,
    /// Depths in any memory; asked for only where host memory has a weight.
    pub any: Hits,
}

impl Queries {
    /// Forgets the last pick's.
    pub fn begin(&mut self) {
        (self.used, self.took) = (0, Duration::ZERO);
    }

    /// Time spent in the index since [`Queries::begin`].
    pub fn took(&self) -> Duration {
        self.took
    }

    /// What the index knows of these blocks.
    pub fn of(&mut self, view: &View, blocks: &[BlockHash], wants_any: bool) -> &Row {
        let address = blocks.as_ptr().addr();
        // From the end: neighbours mostly want the same.
        let known = self.rows[..self.used].iter().rposition(|row| row.blocks == address);
        let at = known.unwrap_or_else(|| {
            if self.rows.len() == self.used {
                self.rows.push(Row::default());
            }
            let row = &mut self.rows[self.used];
            row.blocks = address;
            let started = Instant::now();
            view.index.query(blocks, &mut row.device);
            if wants_any {
                view.index.query_any(blocks, &mut row.any);
            }
            self.took += started.elapsed();
            self.used += 1;
            self.used - 1
        });
        &self.rows[at]
    }
}
