//! Owns how clients misbehave: who leaves early and when, who reads at a trickle. Drawn from the seed by the request's
//! place; never acts.

use std::time::Duration;

use rand::Rng;
use serde::Serialize;

use crate::net::client::Trickle;
use crate::seed;

/// Clients that leave before the first byte do so within this time after sending.
const LEAVE_WITHIN: Duration = Duration::from_millis(50);

/// Shares of misbehaving clients, each 0 to 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Manners {
    /// Leave before the answer is whole: one half before its first byte, the other in its midst.
    pub abort_rate: f64,
    pub slow_readers: f64,
    /// How slow readers read.
    #[serde(skip)]
    pub trickle: Trickle,
}

/// When a client leaves that does not wait for its answer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Leaving {
    /// So long after sending, unless the answer is whole by then.
    After(Duration),
    /// With so many events read, at least 1; after [`LEAVE_WITHIN`] if the answer is no stream.
    AfterEvents(u64),
}

impl Leaving {
    /// When the client is gone at the latest, by time alone.
    pub fn by(self, is_stream: bool) -> Option<Duration> {
        match self {
            Leaving::After(time) => Some(time),
            Leaving::AfterEvents(_) => (!is_stream).then_some(LEAVE_WITHIN),
        }
    }
}

/// What one client does.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Conduct {
    pub leaving: Option<Leaving>,
    pub is_slow: bool,
}

impl Manners {
    /// Of the client of request `index`, whose answer has about `answer_tokens` tokens.
    pub fn conduct(&self, seed: u64, index: usize, answer_tokens: usize) -> Conduct {
        if self.abort_rate <= 0.0 && self.slow_readers <= 0.0 {
            return Conduct::default();
        }
        let mut draw = seed::generator(seed::mixed(seed, index as u64), "manners");
        let is_slow = draw.random_bool(self.slow_readers.clamp(0.0, 1.0));
        let leaves = draw.random_bool(self.abort_rate.clamp(0.0, 1.0));
        let leaving = leaves.then(|| match draw.random_bool(0.5) {
            true => Leaving::After(LEAVE_WITHIN.mul_f64(draw.random())),
            false => Leaving::AfterEvents(draw.random_range(1..=(answer_tokens as u64 / 2).max(1))),
        });
        Conduct { leaving, is_slow }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_kept_and_seeds_decide() {
        let manners = Manners { abort_rate: 0.2, slow_readers: 0.1, ..Manners::default() };
        let all: Vec<Conduct> = (0..5000).map(|index| manners.conduct(7, index, 40)).collect();
        assert_eq!(all, (0..5000).map(|index| manners.conduct(7, index, 40)).collect::<Vec<_>>());
        assert_ne!(all, (0..5000).map(|index| manners.conduct(8, index, 40)).collect::<Vec<_>>());
        let share = |is: fn(&Conduct) -> bool| all.iter().filter(|it| is(it)).count() as f64 / 5000.0;
        let near = |found: f64, wanted: f64| assert!((found / wanted - 1.0).abs() < 0.2, "{found} for {wanted}");
        near(share(|it| matches!(it.leaving, Some(Leaving::After(_)))), 0.1);
        near(share(|it| matches!(it.leaving, Some(Leaving::AfterEvents(1..=20)))), 0.1);
        near(share(|it| it.is_slow), 0.1);
        assert_eq!(Manners::default().conduct(7, 3, 40), Conduct::default());
        assert_eq!((Leaving::AfterEvents(3).by(true), Leaving::AfterEvents(3).by(false)), (None, Some(LEAVE_WITHIN)));
        assert!(manners.conduct(7, 3, 0).leaving.is_none_or(|it| it != Leaving::AfterEvents(0)));
    }
}
