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
    /// Depths in any memory, where they may differ and somebody wants them.
    other: Hits,
    is_other: bool,
}

impl Row {
    /// Depths in any memory, if they were wanted.
    pub fn any(&self) -> &Hits {
        if self.is_other { &self.other } else { &self.device }
    }
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
            row.is_other = view.index.query(blocks, &mut row.device) && wants_any;
            if row.is_other {
                view.index.query_any(blocks, &mut row.other);
            }
            self.took += started.elapsed();
            self.used += 1;
            self.used - 1
        });
        &self.rows[at]
    }
}
