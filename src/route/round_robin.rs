//! Round robin over a pool, one rotation per model and role. Each shard keeps its own; shards start one
//! place apart so that together they spread from the first request on.

use hashbrown::HashMap;

use crate::worker::{Name, Role};

const ROLES: usize = Role::Decode as usize + 1;

/// Rotation state of one shard.
pub struct RoundRobin {
    first: usize,
    /// The next place per role.
    next: HashMap<Name, [usize; ROLES]>,
}

impl RoundRobin {
    pub fn new(shard: usize) -> Self {
        Self { first: shard, next: HashMap::new() }
    }

    /// What [`RoundRobin::pick`] would give now.
    pub fn peek(&self, model: &Name, role: Role, candidates: &[u32]) -> Option<u32> {
        let next = self.next.get(model).map_or(self.first, |next| next[role as usize]);
        (!candidates.is_empty()).then(|| candidates[next % candidates.len()])
    }

    /// The next of `candidates` (indexes of targets, stable order); nothing if there are none. A model that is new here lets
    /// those go that are not known any more, so that a fleet with changing names does not grow the table.
    pub fn pick(
        &mut self,
        model: &Name,
        role: Role,
        candidates: &[u32],
        is_known: impl Fn(&Name) -> bool,
    ) -> Option<u32> {
        if candidates.is_empty() {
            return None;
        }
        let places = match self.next.get_mut(model) {
            Some(places) => places,
            None => {
                self.next.retain(|model, _| is_known(model));
                self.next.entry(model.clone()).or_insert([self.first; ROLES])
            }
        };
        let next = &mut places[role as usize];
        let picked = candidates[*next % candidates.len()];
        *next = next.wrapping_add(1);
        Some(picked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rotations_are_per_model_and_role_and_start_at_the_shard() {
        let (a, b): (Name, Name) = ("a".into(), "b".into());
        let mut rotation = RoundRobin::new(1);
        let mut seen_and_picked = || {
            let peeked = rotation.peek(&a, Role::Mixed, &[7, 8, 9]);
            let picked = rotation.pick(&a, Role::Mixed, &[7, 8, 9], |_| true);
            assert_eq!(peeked, picked);
            picked
        };
        let picked: Vec<_> = (0..4).filter_map(|_| seen_and_picked()).collect();
        assert_eq!(picked, [8, 9, 7, 8]);
        assert_eq!(rotation.pick(&b, Role::Mixed, &[7, 8, 9], |_| true), Some(8));
        assert_eq!(rotation.pick(&a, Role::Prefill, &[7, 8, 9], |_| true), Some(8));
        assert_eq!((rotation.peek(&a, Role::Mixed, &[]), rotation.pick(&a, Role::Mixed, &[], |_| true)), (None, None));
    }

    #[test]
    fn models_that_come_and_go_do_not_grow_the_table() {
        let mut rotation = RoundRobin::new(0);
        let stays: Name = "stays".into();
        for round in 0..100 {
            let model: Name = format!("model {round}").into();
            let is_known = |name: &Name| *name == stays || *name == model;
            let picked = [&stays, &model].map(|name| rotation.pick(name, Role::Mixed, &[7, 8, 9], is_known));
            assert_eq!(picked, [Some(7 + round % 3), Some(7)]);
            assert!(rotation.next.len() <= 2);
        }
    }
}
