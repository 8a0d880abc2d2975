//! What a target's findings add up to. Pure; see [`super::check`] for how one finding comes about.
//!
//! One confirmation is believed at once. One divergence is not: traffic of others (a second router, a client that goes
//! to the worker directly) may look like one. Two in a row are, and are taken back only after several confirmations in a
//! row, so that a worker that renders some conversations otherwise does not flap.

use super::check::Finding;
use crate::fleet::Parity;

const DIVERGENCES_BELIEVED: u32 = 2;
const CONFIRMATIONS_TO_RECOVER: u32 = 8;
/// Checks in a row whose blocks never showed, before that is worth a warning.
const UNSEEN_ALARM: u32 = 4;

/// Something an operator should hear of; each is said once until it has been otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum News {
    Diverged,
    /// The worker agrees again.
    Recovered,
    /// Requests are sent for blocks that the worker's events never show.
    Unseen,
}

#[derive(Debug, Default)]
pub struct Standing {
    verdict: Parity,
    divergences: u32,
    confirmations: u32,
    unseen: u32,
}

impl Standing {
    pub fn verdict(&self) -> Parity {
        self.verdict
    }

    /// Checks in a row whose blocks never showed.
    pub fn unseen(&self) -> u32 {
        self.unseen
    }

    /// Whether the next request is worth watching soon.
    pub fn is_in_doubt(&self) -> bool {
        self.verdict != Parity::Confirmed || self.divergences > 0 || self.unseen > 0
    }

    pub fn take(&mut self, finding: Finding) -> Option<News> {
        match finding {
            Finding::Unclear => None,
            Finding::Confirmed => {
                (self.divergences, self.unseen) = (0, 0);
                self.confirmations += 1;
                let was = self.verdict;
                if was == Parity::Diverged && self.confirmations < CONFIRMATIONS_TO_RECOVER {
                    return None;
                }
                self.verdict = Parity::Confirmed;
                (was == Parity::Diverged).then_some(News::Recovered)
            }
            Finding::Diverged => {
                (self.confirmations, self.unseen) = (0, 0);
                self.divergences = self.divergences.saturating_add(1);
                let is_new = self.divergences >= DIVERGENCES_BELIEVED && self.verdict != Parity::Diverged;
                is_new.then(|| {
                    self.verdict = Parity::Diverged;
                    News::Diverged
                })
            }
            Finding::Unseen => {
                self.unseen = self.unseen.saturating_add(1);
                (self.unseen == UNSEEN_ALARM).then_some(News::Unseen)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_takes_two_divergences_and_eight_confirmations_to_take_back() {
        let mut standing = Standing::default();
        assert_eq!((standing.take(Finding::Diverged), standing.verdict()), (None, Parity::Unknown));
        assert_eq!((standing.take(Finding::Confirmed), standing.verdict()), (None, Parity::Confirmed));
        assert!(!standing.is_in_doubt());
        assert_eq!((standing.take(Finding::Diverged), standing.verdict()), (None, Parity::Confirmed));
        assert!(standing.is_in_doubt());
        assert_eq!(standing.take(Finding::Unclear), None);
        assert_eq!((standing.take(Finding::Diverged), standing.verdict()), (Some(News::Diverged), Parity::Diverged));
        assert_eq!(standing.take(Finding::Diverged), None);
        let news: Vec<_> = (0..CONFIRMATIONS_TO_RECOVER).map(|_| standing.take(Finding::Confirmed)).collect();
        assert!(news[..7].iter().all(Option::is_none));
        assert_eq!((news[7], standing.verdict()), (Some(News::Recovered), Parity::Confirmed));
    }

    #[test]
    fn blocks_that_never_show_alarm_once_and_again_after_they_showed() {
        let mut standing = Standing::default();
        let mut alarms = |findings: &[Finding]| {
            findings.iter().filter(|finding| standing.take(**finding) == Some(News::Unseen)).count()
        };
        assert_eq!(alarms(&[Finding::Unseen; 3]), 0);
        assert_eq!(alarms(&[Finding::Unclear, Finding::Unseen]), 1);
        assert_eq!(alarms(&[Finding::Unseen; 20]), 0);
        assert_eq!(alarms(&[Finding::Confirmed]), 0);
        assert_eq!(alarms(&[Finding::Unseen; 4]), 1);
    }
}
