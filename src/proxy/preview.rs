//! How a pick tells what it weighs, and the notes of one that is only previewed. The choice itself is `pick`'s; nothing
//! here is part of a request.

use super::pick::Costing;
use crate::decode_demand::{DecodeCandidate, DecodeDemand, Input, Selection};
use crate::route::{Candidate, Terms};

/// Who is told how a pick is made. A pick for a request tells nobody, which costs it nothing.
pub(super) trait Witness {
    /// Whether the pick is for a request. Else nothing is booked, counted or changed on the way.
    const BOOKS: bool;

    /// These targets are not among the candidates.
    fn left_out(&mut self, _index: u32, _reason: LeftOut) {}
    /// Every worker that is left has failed too often, so all are asked.
    fn breaker_overruled(&mut self) {}
    /// What weighs how much.
    fn costed_by(&mut self, _costing: &Costing) {}
    /// The candidates of a choice by requests in flight, or in turn.
    fn in_order(&mut self, _indexes: &[u32]) {}
    /// A candidate of a choice by cost, with the leading blocks that its target holds in device and in any memory.
    /// `recent_blocks`: the part of its load that came lately.
    fn looked_up(&mut self, _candidate: &Candidate, _held: Option<(u32, u32)>, _recent_blocks: f64) {}
    /// What its cost is made of; in the order of the candidates.
    fn weighed(&mut self, _terms: &Terms) {}
    /// What the candidates' decode demand is; in their order.
    fn demanded(
        &mut self,
        _rows: &[(DecodeCandidate<'_>, Input)],
        _demand: &DecodeDemand,
        _selection: Option<Selection>,
    ) {
    }
    /// Who has decided.
    fn decided(&mut self, _by: DecidedBy) {}
    /// Picks that were previewed and not counted, before this one.
    fn uncounted_picks(&self) -> u32 {
        0
    }
}

/// Why a target is no candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LeftOut {
    /// It holds as many requests as it may.
    Full,
    /// Its worker is open, being tried, or has asked for time.
    Breaker,
}

/// What a choice was made by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DecidedBy {
    Cost,
    Session,
    /// Decode demand, against the cost.
    Demand,
    Turn,
    RequestsInFlight,
}

/// What a previewed pick has weighed.
#[derive(Default)]
pub(super) struct Notes {
    pub left_out: Vec<(u32, LeftOut)>,
    pub is_breaker_overruled: bool,
    /// Absent for a choice that no cost has a part in.
    pub costing: Option<Costing>,
    /// Indexes of the candidates of a choice that no cost has a part in.
    pub in_order: Vec<u32>,
    pub weighed: Vec<Weighed>,
    pub decided_by: Option<DecidedBy>,
    /// Place of the target that decode demand suggests.
    pub suggested: Option<usize>,
    /// See [`Witness::uncounted_picks`].
    pub uncounted_picks: u32,
}

/// One candidate of a choice by cost.
pub(super) struct Weighed {
    pub candidate: Candidate,
    /// Leading blocks of the prompt held in device and in any memory; absent without a look-up.
    pub held: Option<(u32, u32)>,
    pub recent_blocks: f64,
    pub terms: Option<Terms>,
    pub demand: Option<Demanded>,
}

/// A candidate's decode demand, tokens.
pub(super) struct Demanded {
    pub held: u64,
    pub requests_held: u64,
    pub added: u64,
    pub input: Input,
    pub cost: f64,
}

impl Witness for Notes {
    const BOOKS: bool = false;

    fn left_out(&mut self, index: u32, reason: LeftOut) {
        self.left_out.push((index, reason));
    }

    fn breaker_overruled(&mut self) {
        self.is_breaker_overruled = true;
    }

    fn in_order(&mut self, indexes: &[u32]) {
        self.in_order = indexes.to_vec();
    }

    fn costed_by(&mut self, costing: &Costing) {
        self.costing = Some(*costing);
    }

    fn looked_up(&mut self, candidate: &Candidate, held: Option<(u32, u32)>, recent_blocks: f64) {
        self.weighed.push(Weighed { candidate: *candidate, held, recent_blocks, terms: None, demand: None });
    }

    fn weighed(&mut self, terms: &Terms) {
        if let Some(next) = self.weighed.iter_mut().find(|weighed| weighed.terms.is_none()) {
            next.terms = Some(*terms);
        }
    }

    fn demanded(&mut self, rows: &[(DecodeCandidate<'_>, Input)], demand: &DecodeDemand, selection: Option<Selection>) {
        self.suggested = selection.map(|selection| selection.suggested);
        for (weighed, (row, input)) in self.weighed.iter_mut().zip(rows) {
            weighed.demand = Some(Demanded {
                held: row.demand.tokens(),
                requests_held: row.demand.requests(),
                added: row.tokens,
                input: *input,
                cost: demand.cost(row),
            });
        }
    }

    fn decided(&mut self, by: DecidedBy) {
        self.decided_by = Some(by);
    }

    fn uncounted_picks(&self) -> u32 {
        self.uncounted_picks
    }
}
