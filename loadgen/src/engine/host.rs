//! Owns one rank's host memory for KV (vLLM's CPU offloading, SGLang's hierarchical cache): which contents it holds, and
//! who goes when it is full. Never knows requests, time or the wire, nor what the device holds.
//!
//! Contents are written through: a block goes to the host when it has been computed, not when the device evicts it, so
//! that most contents are in both. The least recently used goes first; a lookup uses a request's blocks last block first.

use std::hash::Hash;

use hashlink::LinkedHashSet;

use super::hash::Digest;

#[derive(Debug)]
pub struct HostPool<N = Digest> {
    blocks_total: usize,
    /// The contents, the least recently used first.
    resident: LinkedHashSet<N>,
}

impl<N: Copy + Eq + Hash> HostPool<N> {
    pub fn new(blocks_total: usize) -> Self {
        HostPool { blocks_total, resident: LinkedHashSet::new() }
    }

    pub fn blocks_resident(&self) -> usize {
        self.resident.len()
    }

    /// The contents.
    pub fn resident_digests(&self) -> impl Iterator<Item = &N> {
        self.resident.iter()
    }

    /// Length of the longest resident prefix of `digests`, blocks.
    pub fn prefix_length(&self, digests: &[N]) -> usize {
        digests.iter().take_while(|digest| self.resident.contains(*digest)).count()
    }

    /// Notes that a request has looked these up; those that are not here do not matter.
    pub fn touch(&mut self, digests: &[N]) {
        for digest in digests.iter().rev() {
            self.resident.to_back(digest);
        }
    }

    /// Stores what of `digests` is not here yet, and tells which those are. `evicted` gets what had to go for it, in
    /// order; nothing of `digests` does. Where that leaves no room for all of them, none is stored.
    pub fn store(&mut self, digests: &[N], evicted: &mut Vec<N>) -> Vec<N> {
        let fresh: Vec<N> = digests.iter().copied().filter(|digest| !self.resident.contains(digest)).collect();
        if fresh.is_empty() || digests.len() > self.blocks_total {
            return Vec::new();
        }
        // What is here already must outlive the evictions for the rest.
        if fresh.len() < digests.len() {
            self.touch(digests);
        }
        while self.resident.len() + fresh.len() > self.blocks_total {
            let Some(oldest) = self.resident.pop_front() else { break };
            evicted.push(oldest);
        }
        self.resident.extend(fresh.iter().copied());
        fresh
    }

    pub fn clear(&mut self) {
        self.resident.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(pool: &mut HostPool<u8>, stored: &[u8], fresh: &[u8], evicted: &[u8]) {
        let mut gone = Vec::new();
        assert_eq!((pool.store(stored, &mut gone), gone), (fresh.to_vec(), evicted.to_vec()), "{stored:?}");
    }

    #[test]
    fn the_least_recently_used_goes_and_nothing_of_what_is_stored() {
        let mut pool = HostPool::new(4);
        check(&mut pool, &[1, 2], &[1, 2], &[]);
        check(&mut pool, &[3, 4], &[3, 4], &[]);
        pool.touch(&[1]);
        check(&mut pool, &[5], &[5], &[2]);
        // 3 is the oldest, but stored again with 6.
        check(&mut pool, &[3, 6], &[6], &[4]);
        check(&mut pool, &[3, 6], &[], &[]);
        check(&mut pool, &[7, 8, 9, 10, 11], &[], &[]);
        assert_eq!((pool.prefix_length(&[1, 3, 9]), pool.blocks_resident()), (2, 4));
        pool.clear();
        check(&mut pool, &[1, 2, 3, 4], &[1, 2, 3, 4], &[]);
    }

    #[test]
    fn a_lookup_leaves_the_beginning_of_a_prompt_for_last() {
        let mut pool = HostPool::new(3);
        check(&mut pool, &[1, 2, 3], &[1, 2, 3], &[]);
        pool.touch(&[1, 2, 3, 4]);
        check(&mut pool, &[5, 6], &[5, 6], &[3, 2]);
    }
}
