//! Owns what no router can beat: the hit rate of one cache of unlimited size, and that of one cache as large as the
//! whole fleet's which knows the future. Never simulates time.

use std::collections::BTreeSet;

use hashbrown::{HashMap, HashSet};

use super::fleet::Served;
use super::workload::Workload;
use crate::engine::content::Content;

/// Requests in the order in which a run sent them.
fn order(served: &[Served]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..served.len()).collect();
    order.sort_by_key(|number| (served[*number].sent_ns, *number));
    order
}

fn rate(workload: &Workload, cached_tokens: u64) -> f64 {
    let prompt_tokens: u64 = workload.requests.iter().map(|it| it.content.prompt_tokens() as u64).sum();
    cached_tokens as f64 / prompt_tokens.max(1) as f64
}

/// Share of prompt tokens that one infinite cache saves, where every request is stored as soon as it is sent.
pub fn infinite_cache(workload: &Workload, served: &[Served]) -> f64 {
    let mut seen: HashSet<u64> = HashSet::new();
    let mut cached_tokens = 0;
    for number in order(served) {
        let content = &workload.requests[number].content;
        let reusable = content.reusable_names(workload.block_size);
        let hits = reusable.iter().take_while(|name| seen.contains(*name)).count();
        cached_tokens += (hits * workload.block_size) as u64;
        seen.extend(content.names());
    }
    rate(workload, cached_tokens)
}

/// The same for one cache of `blocks` blocks that keeps what is needed soonest (Bélády's rule), whatever it has to know
/// for that. No placement over engines with so many blocks together can save more.
pub fn best_for_memory(workload: &Workload, served: &[Served], blocks: usize) -> f64 {
    let order = order(served);
    // Places in the order at which a block is used, latest last.
    let mut uses: HashMap<u64, Vec<u32>> = HashMap::new();
    for (place, number) in order.iter().enumerate().rev() {
        for name in workload.requests[*number].content.prompt_names(workload.block_size) {
            uses.entry(*name).or_default().push(place as u32);
        }
    }
    // By next use, then by depth, so that a block never outlives the ones before it.
    let mut kept: BTreeSet<(u32, u32, u64)> = BTreeSet::new();
    let mut next_use: HashMap<u64, u32> = HashMap::new();
    let mut cached_tokens = 0;
    for (place, number) in order.iter().enumerate() {
        let content = &workload.requests[*number].content;
        let reusable = content.reusable_names(workload.block_size);
        let hits = reusable.iter().take_while(|name| next_use.contains_key(*name)).count();
        cached_tokens += (hits * workload.block_size) as u64;
        for (depth, name) in content.names().iter().enumerate() {
            if let Some(before) = next_use.remove(name) {
                kept.remove(&(before, depth as u32, *name));
            }
            let Some(uses) = uses.get_mut(name) else { continue };
            while uses.last().is_some_and(|use_at| *use_at <= place as u32) {
                uses.pop();
            }
            if let Some(next) = uses.last() {
                next_use.insert(*name, *next);
                kept.insert((*next, depth as u32, *name));
            }
        }
        while kept.len() > blocks {
            if let Some((_, _, name)) = kept.pop_last() {
                next_use.remove(&name);
            }
        }
    }
    rate(workload, cached_tokens)
}

#[cfg(test)]
mod tests {
    use super::super::content::Named;
    use super::super::workload::{Request, Start};
    use super::*;

    /// Prompts of one block and one more token; blocks are letters.
    fn workload(letters: &str) -> (Workload, Vec<Served>) {
        let request = |(at, letter): (usize, u8)| Request {
            start: Start::At(at as u64),
            session: 0,
            content: Named::new(vec![u64::from(letter)], 5, 1),
        };
        let requests: Vec<Request> = letters.bytes().enumerate().map(request).collect();
        let served = (0..requests.len()).map(|at| Served { sent_ns: at as u64, ..Served::default() }).collect();
        (Workload { name: "letters".into(), block_size: 4, requests }, served)
    }

    #[test]
    fn foresight_keeps_what_comes_back() {
        let (letters, served) = workload("abcabcadax");
        let hits = |rate: f64| (rate * 50.0 / 4.0).round() as u32;
        assert_eq!(hits(infinite_cache(&letters, &served)), 5);
        assert_eq!(hits(best_for_memory(&letters, &served, 3)), 5);
        // Of two blocks: a always, b or c once.
        assert_eq!(hits(best_for_memory(&letters, &served, 2)), 4);
        assert_eq!(hits(best_for_memory(&letters, &served, 1)), 3);
    }

    #[test]
    fn a_prefix_counts_up_to_its_first_hole() {
        let request =
            |at: u64, names: Vec<u64>| Request { start: Start::At(at), session: 0, content: Named::new(names, 9, 1) };
        let requests = vec![request(0, vec![1, 2]), request(1, vec![1, 3]), request(2, vec![1, 2])];
        let served: Vec<Served> = (0..3).map(|at| Served { sent_ns: at, ..Served::default() }).collect();
        let workload = Workload { name: "prefixes".into(), block_size: 4, requests };
        assert_eq!(infinite_cache(&workload, &served), 12.0 / 27.0);
        assert_eq!(best_for_memory(&workload, &served, 1), 8.0 / 27.0);
    }
}
