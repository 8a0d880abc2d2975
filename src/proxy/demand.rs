//! Decode demand as one pick sees it: the rows of its candidates, and what is decided and reserved on them. The critical
//! section itself is `decode_demand`'s.

use tracing::{Level, debug, enabled};

use super::pick::Wish;
use super::preview::Witness;
use super::service::RouterService;
use crate::decode_demand::{self, DecodeCandidate, DecodeDemand, Input, Reservation, Selection};
use crate::index::View;
use crate::route::Candidate;
use crate::worker::Role;

/// Decode demand as one pick sees it; only for decode picks, and only when it is switched on.
pub(super) struct Demand<'a> {
    demand: &'a DecodeDemand,
    view: &'a View,
    wish: &'a Wish<'a>,
}

impl<'a> Demand<'a> {
    pub fn of(service: &'a RouterService, view: &'a View, wish: &'a Wish<'a>) -> Option<Self> {
        let demand = service.shared.steering.demand.as_ref().filter(|_| wish.role == Role::Decode)?;
        Some(Self { demand, view, wish })
    }

    fn candidate(&self, candidate: &Candidate) -> (DecodeCandidate<'a>, Input) {
        let target = &self.view.fleet.targets[candidate.target as usize];
        let (tokens, input) = self.wish.prompts.tokens_for(target);
        let tokens = decode_demand::request_tokens(tokens, self.wish.samples);
        (DecodeCandidate { demand: &target.demand, tokens, load: candidate.load_blocks }, input)
    }

    /// Reserves on a target that something else has chosen.
    pub fn book<W: Witness>(&self, candidates: &[Candidate], place: usize) -> Option<Reservation> {
        W::BOOKS.then(|| self.demand.book(&self.candidate(&candidates[place]).0))
    }

    fn rows(&self, candidates: &[Candidate]) -> Vec<(DecodeCandidate<'a>, Input)> {
        candidates.iter().map(|candidate| self.candidate(candidate)).collect()
    }

    pub fn show_to<W: Witness>(&self, candidates: &[Candidate], selection: Option<Selection>, witness: &mut W) {
        witness.demanded(&self.rows(candidates), self.demand, selection);
    }

    pub fn select<W: Witness>(
        &self,
        candidates: &[Candidate],
        original: usize,
        witness: &mut W,
    ) -> (Selection, Option<Reservation>) {
        let mut input = Input::Exact;
        let rows: Vec<DecodeCandidate<'_>> = candidates
            .iter()
            .map(|candidate| {
                let (row, counted) = self.candidate(candidate);
                if counted == Input::Estimated {
                    input = counted;
                }
                row
            })
            .collect();
        if !W::BOOKS {
            let selection = self.demand.preview(&rows, original);
            self.show_to(candidates, Some(selection), witness);
            return (selection, None);
        }
        let is_shown = enabled!(target: "infera_router::decode_demand", Level::DEBUG);
        let mut projected = Vec::new();
        let (selection, reservation) = self.demand.select(&rows, original, input, is_shown.then_some(&mut projected));
        if is_shown {
            self.show(candidates, &projected, selection, input);
        }
        (selection, Some(reservation))
    }

    /// The debug event of one decision: targets and numbers, no text of the request.
    fn show(&self, candidates: &[Candidate], projected: &[u64], selection: Selection, input: Input) {
        let key = |place: usize| &*self.view.fleet.targets[candidates[place].target as usize].route_key;
        debug!(
            target: "infera_router::decode_demand",
            mode = self.demand.mode().as_str(),
            input = input.as_str(),
            candidates = ?(0..candidates.len()).map(key).collect::<Vec<_>>(),
            projected_tokens = ?projected,
            original = key(selection.original),
            suggested = key(selection.suggested),
            selected = key(selection.picked),
            "decode input demand"
        );
    }
}
