//! Who may serve a request: the pool of its model, without the workers already tried.

use crate::fleet::{Fleet, ModelPool};
use crate::worker::{Name, Role};

/// How a model's requests are served.
#[derive(Debug, PartialEq, Eq)]
pub enum Topology<'a> {
    /// One worker does prefill and decode.
    Mixed(&'a [u32]),
    /// A prefill worker and a decode worker share the request.
    Disaggregated { prefill: &'a [u32], decode: &'a [u32] },
}

/// Why a request has no pool.
#[derive(Debug, PartialEq, Eq)]
pub enum TopologyError {
    /// No worker at all is known that could ever serve it: the fleet is empty.
    NoWorkers,
    /// Other models are served, this one is not known.
    UnknownModel { known: Vec<String> },
    /// The model is known, but no worker of it is routable now.
    NoneRoutable,
    /// Half of a prefill/decode pair and no mixed worker.
    HalfPair { present: Role, count: usize, missing: Role },
}

/// Chooses the topology for `model`: both pools of a pair win over mixed workers, as in the reference.
pub fn topology<'a>(fleet: &'a Fleet, model: &str) -> Result<Topology<'a>, TopologyError> {
    let Some(ModelPool { mixed, prefill, decode }) = fleet.models.get(model) else {
        return Err(absent(fleet, model));
    };
    match (prefill.len(), decode.len(), mixed.len()) {
        (1.., 1.., _) => Ok(Topology::Disaggregated { prefill, decode }),
        (_, _, 1..) => Ok(Topology::Mixed(mixed)),
        (count @ 1.., 0, 0) => Err(TopologyError::HalfPair { present: Role::Prefill, count, missing: Role::Decode }),
        (0, count @ 1.., 0) => Err(TopologyError::HalfPair { present: Role::Decode, count, missing: Role::Prefill }),
        (0, 0, 0) => Err(TopologyError::NoneRoutable),
    }
}

/// A worker whose model is not known yet makes nothing routable by itself: it may be anybody's.
fn absent(fleet: &Fleet, model: &str) -> TopologyError {
    if fleet.workers.iter().any(|worker| worker.record.model_names().any(|name| name == model)) {
        TopologyError::NoneRoutable
    } else if fleet.models.is_empty() {
        TopologyError::NoWorkers
    } else {
        TopologyError::UnknownModel { known: fleet.models.keys().map(|name| name.to_string()).collect() }
    }
}

/// The candidates whose worker has not been tried in this request.
pub fn untried<'a>(fleet: &'a Fleet, pool: &'a [u32], tried: &'a [Name]) -> impl Iterator<Item = u32> + 'a {
    pool.iter().copied().filter(move |index| !tried.contains(&fleet.targets[*index as usize].worker.id))
}

/// The target with the fewest requests in flight; ties go to the least recently picked, then to order.
pub fn by_load(fleet: &Fleet, candidates: impl Iterator<Item = u32>) -> Option<u32> {
    candidates.min_by_key(|index| {
        let load = &fleet.targets[*index as usize].load;
        (load.requests(), load.picked_at_ns())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::fixtures::{fleet, member};

    #[test]
    fn topology_names_what_is_missing() {
        let mixed = fleet(&[member("a:1", "m", Role::Mixed)]);
        assert_eq!(topology(&mixed, "m"), Ok(Topology::Mixed(&[0])));
        let known = vec!["m".to_owned()];
        assert_eq!(topology(&mixed, "other"), Err(TopologyError::UnknownModel { known }));

        let pair = fleet(&[member("a:1", "m", Role::Prefill), member("b:1", "m", Role::Decode)]);
        assert_eq!(topology(&pair, "m"), Ok(Topology::Disaggregated { prefill: &[0], decode: &[1] }));

        let half = fleet(&[member("a:1", "m", Role::Prefill), member("b:1", "m", Role::Prefill)]);
        let expected = TopologyError::HalfPair { present: Role::Prefill, count: 2, missing: Role::Decode };
        assert_eq!(topology(&half, "m"), Err(expected));

        let half_and_mixed = fleet(&[member("a:1", "m", Role::Decode), member("b:1", "m", Role::Mixed)]);
        assert_eq!(topology(&half_and_mixed, "m"), Ok(Topology::Mixed(&[1])));
        assert_eq!(topology(&fleet(&[]), "m"), Err(TopologyError::NoWorkers));
    }

    #[test]
    fn a_tried_worker_is_out_with_all_its_ranks() {
        let ranks = fleet(&[member("a:1", "m", Role::Mixed).ranks(2), member("b:1", "m", Role::Mixed)]);
        let tried: Vec<Name> = vec!["a:1".into()];
        assert_eq!(untried(&ranks, &[0, 1, 2], &tried).collect::<Vec<_>>(), [2]);
    }
}
