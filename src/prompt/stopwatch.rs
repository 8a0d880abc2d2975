//! How long the stages of a prompt take on this thread. A thread's own sums rather than a return value: encoding happens
//! deep inside, piece by piece, and whoever asks is far above.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// Time since the last [`take`], by stage; zero for a stage that was not come to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PromptTimes {
    /// From the body's members to text.
    pub render: Duration,
    /// From new text to token ids, the wait for helping threads included.
    pub encode: Duration,
    /// Looking for known beginnings, and hashing blocks.
    pub hash: Duration,
}

impl PromptTimes {
    /// Of a prompt that went from one thread to another.
    pub fn and(self, more: PromptTimes) -> PromptTimes {
        let PromptTimes { render, encode, hash } = more;
        PromptTimes { render: self.render + render, encode: self.encode + encode, hash: self.hash + hash }
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Stage {
    Render,
    Encode,
    Hash,
}

thread_local! {
    static TIMES: Cell<PromptTimes> = const {
        Cell::new(PromptTimes { render: Duration::ZERO, encode: Duration::ZERO, hash: Duration::ZERO })
    };
}

/// The thread's sums, which begin anew.
pub fn take() -> PromptTimes {
    TIMES.take()
}

/// Adds the time since `mark` to a stage and sets the mark to now.
pub(super) fn lap(stage: Stage, mark: &mut Instant) {
    let now = Instant::now();
    let took = now - std::mem::replace(mark, now);
    TIMES.with(|cell| {
        let mut times = cell.get();
        match stage {
            Stage::Render => times.render += took,
            Stage::Encode => times.encode += took,
            Stage::Hash => times.hash += took,
        }
        cell.set(times);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn laps_follow_each_other_and_are_taken_once() {
        take();
        let started = Instant::now();
        let mut mark = started;
        lap(Stage::Render, &mut mark);
        lap(Stage::Encode, &mut mark);
        lap(Stage::Hash, &mut mark);
        lap(Stage::Encode, &mut mark);
        let times = take();
        assert_eq!(times.render + times.encode + times.hash, mark - started);
        assert_eq!(take(), PromptTimes::default());
        assert_eq!(times.and(PromptTimes::default()), times);
    }
}
