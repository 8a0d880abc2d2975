//! Owns what is to happen, in order of virtual time. Never makes it happen.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Dated things; those of one moment come in the order in which they were planned.
pub struct Agenda<T> {
    heap: BinaryHeap<Reverse<Dated<T>>>,
    next_number: u64,
}

struct Dated<T> {
    at_ns: u64,
    number: u64,
    what: T,
}

impl<T> Agenda<T> {
    pub fn new() -> Self {
        Agenda { heap: BinaryHeap::new(), next_number: 0 }
    }

    pub fn plan(&mut self, at_ns: u64, what: T) {
        self.heap.push(Reverse(Dated { at_ns, number: self.next_number, what }));
        self.next_number += 1;
    }

    /// The next thing and its time.
    pub fn pop(&mut self) -> Option<(u64, T)> {
        self.heap.pop().map(|Reverse(dated)| (dated.at_ns, dated.what))
    }
}

impl<T> Ord for Dated<T> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at_ns, self.number).cmp(&(other.at_ns, other.number))
    }
}

impl<T> PartialOrd for Dated<T> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> PartialEq for Dated<T> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl<T> Eq for Dated<T> {}
