//! The cost of a target: `overlap_weight × (request_blocks − cache_hits) + load`, lowest wins.
//!
//! The first term is the prefill that the target would have to compute, the second the load that is
//! already on it (`super::LoadTerm`; in the plain formula its active blocks). Raising a target's load never makes it more likely, more cache never less.

/// What is known of one target when a request is picked for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// Index into the fleet's targets.
    pub target: u32,
    /// Full blocks of the prompt, in this target's block size.
    pub request_blocks: u32,
    /// Leading blocks of the prompt that the target holds; at most `request_blocks`.
    pub cache_hits: u32,
    /// Distinct blocks of prompts in flight on the target, for the pick line.
    pub active_blocks: u64,
    /// The load term: what the target has to do, by `LoadTerm`, and what came lately where that has a part in the cost.
    pub load_blocks: f64,
    /// When it was last picked, nanoseconds on a monotonic clock.
    pub picked_at_ns: u64,
    /// Tokens per block; brings the costs of targets with different block sizes to one unit.
    pub block_tokens: u32,
}

/// The picked target and what its pick line says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    pub target: u32,
    pub request_blocks: u32,
    pub cache_hits: u32,
    pub active_blocks: u64,
    pub cost: f64,
}

/// What the cost of one candidate is made of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Terms {
    /// Missing blocks times the overlap weight.
    pub prefill: f64,
    /// The load term, blocks.
    pub load: f64,
    /// Units per block: 1 but for targets with larger blocks than another candidate's.
    pub scale: f64,
}

impl Terms {
    /// A weight of 0 drops the cache term.
    fn of(overlap_weight: f64, candidate: &Candidate, unit_tokens: Option<u32>) -> Self {
        let missing_blocks = candidate.request_blocks.saturating_sub(candidate.cache_hits);
        let scale = match unit_tokens {
            Some(unit) if candidate.block_tokens > unit => f64::from(candidate.block_tokens) / f64::from(unit),
            _ => 1.0,
        };
        Self { prefill: overlap_weight * f64::from(missing_blocks), load: candidate.load_blocks, scale }
    }

    /// What the candidates are compared by.
    pub fn cost(&self) -> f64 {
        (self.prefill + self.load) * self.scale
    }
}

/// Cost in blocks of the target's own size. A weight of 0 drops the cache term.
pub fn cost(overlap_weight: f64, candidate: &Candidate) -> f64 {
    Terms::of(overlap_weight, candidate, None).cost()
}

/// Lowest cost; ties go to less load, then to the least recently picked, then to the order of
/// the candidates. Nothing if there are none.
pub fn pick(overlap_weight: f64, candidates: &[Candidate]) -> Option<Choice> {
    pick_noted(overlap_weight, candidates, |_| ())
}

/// The same; `noted` hears the terms of each candidate, in order.
pub fn pick_noted(overlap_weight: f64, candidates: &[Candidate], mut noted: impl FnMut(&Terms)) -> Option<Choice> {
    let unit_tokens = candidates.iter().map(|candidate| candidate.block_tokens).filter(|tokens| *tokens > 0).min();
    let mut best: Option<(f64, &Candidate)> = None;
    for candidate in candidates {
        let terms = Terms::of(overlap_weight, candidate, unit_tokens);
        noted(&terms);
        let candidate_cost = terms.cost();
        let better = match best {
            None => true,
            Some((best_cost, holder)) => candidate_cost
                .total_cmp(&best_cost)
                .then(candidate.load_blocks.total_cmp(&holder.load_blocks))
                .then(candidate.picked_at_ns.cmp(&holder.picked_at_ns))
                .is_lt(),
        };
        if better {
            best = Some((candidate_cost, candidate));
        }
    }
    best.map(|(cost, candidate)| Choice {
        target: candidate.target,
        request_blocks: candidate.request_blocks,
        cache_hits: candidate.cache_hits,
        active_blocks: candidate.active_blocks,
        cost,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(target: u32, cache_hits: u32, active_blocks: u64) -> Candidate {
        let block_tokens = 16;
        Candidate {
            target,
            request_blocks: 10,
            cache_hits,
            active_blocks,
            load_blocks: active_blocks as f64,
            picked_at_ns: 0,
            block_tokens,
        }
    }

    fn check(weight: f64, candidates: &[Candidate], picked: u32) {
        let choice = pick(weight, candidates).expect("there are candidates");
        assert_eq!(choice.target, picked, "weight {weight}: {candidates:?}");
    }

    #[test]
    fn the_worked_example_of_the_seed_costs_8_against_11() {
        let holder = candidate(0, 8, 6);
        let cold = candidate(1, 0, 1);
        assert_eq!(cost(1.0, &holder), 8.0);
        assert_eq!(cost(1.0, &cold), 11.0);
        check(1.0, &[holder, cold], 0);
        check(1.0, &[cold, holder], 0);
        check(20.0, &[holder, cold], 0);
        check(0.0, &[holder, cold], 1);
    }

    #[test]
    fn ties_go_to_less_load_then_to_the_least_recently_picked_then_to_order() {
        check(1.0, &[candidate(0, 5, 5), candidate(1, 3, 3)], 1);
        let recent = Candidate { picked_at_ns: 9, ..candidate(0, 5, 5) };
        let older = Candidate { picked_at_ns: 3, ..candidate(1, 5, 5) };
        check(1.0, &[recent, older], 1);
        check(1.0, &[candidate(4, 5, 5), candidate(3, 5, 5)], 4);
        assert_eq!(pick(1.0, &[]), None);
    }

    #[test]
    fn a_hot_holder_is_left_for_a_cold_target_once_its_load_outweighs_the_prefix() {
        check(1.0, &[candidate(0, 9, 9), candidate(1, 0, 0)], 1);
        check(1.0, &[candidate(0, 9, 8), candidate(1, 0, 0)], 0);
    }

    #[test]
    fn only_the_load_term_weighs_as_load() {
        let holder = candidate(0, 8, 0);
        check(1.0, &[Candidate { active_blocks: 90, ..holder }, candidate(1, 0, 0)], 0);
        check(1.0, &[Candidate { load_blocks: 8.5, ..holder }, candidate(1, 0, 0)], 1);
        check(1.0, &[Candidate { load_blocks: 5.5, ..candidate(0, 5, 5) }, candidate(1, 5, 5)], 1);
    }

    #[test]
    fn b30_costs_are_monotone_in_load_and_in_cache() {
        for active in 0..40 {
            for hits in 0..10 {
                let here = cost(1.5, &candidate(0, hits, active));
                assert!(cost(1.5, &candidate(0, hits, active + 1)) > here);
                assert!(cost(1.5, &candidate(0, hits + 1, active)) < here);
            }
        }
    }

    #[test]
    fn targets_with_larger_blocks_are_compared_in_tokens() {
        let small = Candidate { request_blocks: 64, block_tokens: 16, cache_hits: 16, ..candidate(0, 0, 0) };
        let large = Candidate { request_blocks: 16, block_tokens: 64, cache_hits: 3, ..candidate(1, 0, 0) };
        check(1.0, &[small, large], 0);
        let larger_prefix = Candidate { cache_hits: 5, ..large };
        check(1.0, &[small, larger_prefix], 1);
    }

    #[test]
    fn prefix_trees_of_small_workers_attract_nothing_on_a_miss() {
        // w0 has never cached anything and is busy; w1 holds thousands of unrelated blocks and idles.
        let busy = candidate(0, 0, 300);
        check(1.0, &[busy, candidate(1, 0, 0)], 1);
    }
}
