//! One check against a model of a worker's pool: evidence, its absence, and what only looks like it.

use super::*;
use crate::hash::{chain, prompt_blocks};

const BLOCK: usize = 4;
const SECOND_NS: u64 = 1_000_000_000;

/// A worker's pool as its events tell of it: blocks by their names, evicted at random.
#[derive(Default)]
struct Pool(std::collections::BTreeSet<BlockHash>);

impl Pool {
    fn depth(&self, blocks: &[BlockHash]) -> usize {
        blocks.iter().take_while(|block| self.0.contains(block)).count()
    }

    /// Stores what is missing of a prompt from block `from` on, `count` blocks at most, and shows it.
    fn store(&mut self, tokens: &[u32], from: usize, count: usize, show: &mut dyn FnMut(&Stored<'_>)) -> usize {
        let blocks = prompt_blocks(tokens, BLOCK);
        let to = blocks.len().min(from + count);
        if from >= to {
            return blocks.len();
        }
        let parent = from.checked_sub(1).map_or(ROOT, |at| blocks[at]);
        show(&Stored {
            parent,
            chain: &blocks[from..to],
            tokens: &tokens[from * BLOCK..to * BLOCK],
            block_size: BLOCK,
        });
        self.0.extend(&blocks[from..to]);
        to
    }
}

fn blocks(tokens: &[u32]) -> Arc<[BlockHash]> {
    prompt_blocks(tokens, BLOCK).into()
}

fn tokens(seed: u32, count: usize) -> Vec<u32> {
    (0..count as u32).map(|at| seed * 1000 + at).collect()
}

fn check(expected: &[u32], held: usize) -> Check {
    Check::new(blocks(expected), BLOCK, held, 0).expect("something is missing")
}

/// Shows a whole prompt as one store from the root.
fn show(check: &mut Check, shown: &[u32]) {
    Pool::default().store(shown, 0, usize::MAX, &mut |stored| check.on_store(stored, |_| false));
}

fn after_the_end(check: &mut Check) -> Option<Finding> {
    check.on_end(true, SECOND_NS);
    assert!(check.finding(SECOND_NS).is_none_or(|finding| finding == Finding::Confirmed));
    check.finding(check.due_ns())
}

#[test]
fn the_expected_blocks_confirm_at_once_and_nothing_is_checked_that_is_there() {
    let prompt = tokens(1, 21);
    let mut seen = check(&prompt, 0);
    show(&mut seen, &prompt);
    assert_eq!(seen.finding(1), Some(Finding::Confirmed));
    assert!(Check::new(blocks(&prompt), BLOCK, 5, 0).is_none());
    assert!(Check::new(blocks(&prompt[..3]), BLOCK, 0, 0).is_none());
}

#[test]
fn a_prefix_token_diverges_from_the_first_block_on_and_the_branch_is_kept() {
    let prompt = tokens(1, 21);
    let shifted: Vec<u32> = std::iter::once(7).chain(prompt.iter().copied()).collect();
    let mut seen = check(&prompt, 0);
    show(&mut seen, &shifted);
    assert_eq!(after_the_end(&mut seen), Some(Finding::Diverged));
    let branches = seen.into_branches();
    assert_eq!((branches.len(), branches[0].at, &branches[0].tokens), (1, 0, &shifted[..20].to_vec()));
}

#[test]
fn a_branch_in_the_middle_diverges_below_the_last_common_block_and_grows_with_later_stores() {
    let prompt = tokens(1, 24);
    let mut other = prompt.clone();
    other[13] += 1;
    let mut seen = check(&prompt, 2);
    let mut pool = Pool::default();
    let mut from = 2;
    while from < 6 {
        from = pool.store(&other, from, 1, &mut |stored| seen.on_store(stored, |_| false));
    }
    assert_eq!(after_the_end(&mut seen), Some(Finding::Diverged));
    let branches = seen.into_branches();
    assert_eq!((branches[0].at, &branches[0].tokens), (3, &other[12..24].to_vec()));
}

#[test]
fn what_is_no_evidence_is_unclear_or_unseen() {
    let (prompt, other) = (tokens(1, 21), tokens(2, 21));
    let branched = || {
        let mut seen = check(&prompt, 0);
        show(&mut seen, &other);
        seen
    };
    // The client left: the engine may never have computed the prompt.
    let mut aborted = branched();
    aborted.on_end(false, 1);
    assert_eq!(aborted.finding(2), Some(Finding::Unclear));
    // A hole in the events.
    let mut holed = branched();
    holed.on_disturbance();
    assert_eq!(holed.finding(1), Some(Finding::Unclear));
    // Still running: no finding, until the target has waited long enough.
    let running = branched();
    assert_eq!(running.finding(SECOND_NS), None);
    assert_eq!(running.finding(running.due_ns()), Some(Finding::Unclear));
    // Another block size: the names cannot be compared.
    let mut sized = check(&prompt, 0);
    sized.on_store(&Stored { parent: ROOT, chain: &blocks(&other), tokens: &other, block_size: 8 }, |_| false);
    assert_eq!(after_the_end(&mut sized), Some(Finding::Unclear));
    // Blocks under a parent that was stored before the router listened; the expected ones confirm all the same.
    let mut unplaced = branched();
    unplaced.on_unplaced();
    assert_eq!(after_the_end(&mut unplaced), Some(Finding::Unclear));
    show(&mut unplaced, &prompt);
    assert_eq!(unplaced.finding(SECOND_NS), Some(Finding::Confirmed));
    // The rank was chosen otherwise by the engine.
    let mut elsewhere = branched();
    elsewhere.on_store_elsewhere(&Stored { parent: ROOT, chain: &blocks(&prompt), tokens: &prompt, block_size: BLOCK });
    assert_eq!(after_the_end(&mut elsewhere), Some(Finding::Unclear));
    // Another request in flight accounts for the branch; the own blocks never show.
    let mut accounted = check(&prompt, 0);
    accounted.on_store(&Stored { parent: ROOT, chain: &blocks(&other), tokens: &other, block_size: BLOCK }, |_| true);
    assert_eq!(after_the_end(&mut accounted), Some(Finding::Unseen));
    // Nothing at all shows.
    assert_eq!(after_the_end(&mut check(&prompt, 0)), Some(Finding::Unseen));
    assert_eq!(after_the_end(&mut check(&prompt, 4)), Some(Finding::Unclear), "only the last block, kept back");
}

#[test]
fn an_answer_of_an_earlier_turn_beside_the_prompt_is_no_divergence_once_the_prompt_shows() {
    let prompt = tokens(1, 24);
    let names = blocks(&prompt);
    let mut seen = check(&prompt, 2);
    let answer = [chain(names[1], &[9; BLOCK])];
    seen.on_store(&Stored { parent: names[1], chain: &answer, tokens: &[9; BLOCK], block_size: BLOCK }, |_| false);
    let rest = Stored { parent: names[1], chain: &names[2..], tokens: &prompt[8..], block_size: BLOCK };
    seen.on_store(&rest, |_| false);
    assert_eq!(seen.finding(1), Some(Finding::Confirmed));
}

/// Requests that share prefixes run at once on one worker that stores in pieces and evicts at random; some are aborted,
/// some are strangers' (the router has no booking for them). A worker that renders alike never diverges, and one that
/// puts a token in front is found out by the first request that says anything.
#[test]
fn interleaved_requests_never_make_an_honest_worker_diverge() {
    for seed in 0..100 {
        for lies in [false, true] {
            let mut random = fastrand::Rng::with_seed(seed);
            let found = run(&mut random, lies);
            let diverged = found.contains(&Finding::Diverged);
            assert!(!diverged || lies, "seed {seed}: {found:?}");
            assert!(!lies || !found.contains(&Finding::Confirmed), "seed {seed}: {found:?}");
            if found.len() > 20 {
                let expected = if lies { Finding::Diverged } else { Finding::Confirmed };
                assert!(found.contains(&expected), "seed {seed}, lies {lies}: {found:?}");
            }
        }
    }
}

struct Running {
    number: usize,
    prompt: Vec<u32>,
    rendered: Vec<u32>,
    stored: usize,
    is_booked: bool,
    is_aborted: bool,
    is_stored: bool,
}

fn run(random: &mut fastrand::Rng, lies: bool) -> Vec<Finding> {
    let mut pool = Pool::default();
    let mut running: Vec<Running> = Vec::new();
    // With the number of its request: two may have the same prompt.
    let mut open: Option<(Check, usize)> = None;
    let mut findings = Vec::new();
    let mut now_ns = 0;
    for number in 0..2_000 {
        now_ns += random.u64(0..SECOND_NS / 10);
        match random.u8(0..10) {
            0..=2 if running.len() < 6 => {
                // Three prefixes, and an own end.
                let mut prompt = tokens(random.u32(0..3), random.usize(4..20));
                prompt.extend((0..random.usize(0..24)).map(|_| random.u32(0..4)));
                let rendered = if lies { [&[77], &prompt[..]].concat() } else { prompt.clone() };
                let stored = pool.depth(&prompt_blocks(&rendered, BLOCK));
                let is_booked = random.u8(0..5) > 0;
                if is_booked && open.is_none() {
                    let names = blocks(&prompt);
                    let held = pool.depth(&names);
                    open = Check::new(names, BLOCK, held, now_ns).map(|check| (check, number));
                }
                running.push(Running {
                    number,
                    prompt,
                    rendered,
                    stored,
                    is_booked,
                    is_aborted: random.u8(0..5) == 0,
                    is_stored: false,
                });
            }
            3..=6 if !running.is_empty() => {
                let at = random.usize(0..running.len());
                let booked: Vec<BlockHash> = running
                    .iter()
                    .filter(|request| request.is_booked)
                    .flat_map(|request| prompt_blocks(&request.prompt, BLOCK))
                    .collect();
                let request = &mut running[at];
                let count = random.usize(1..4);
                request.stored = pool.store(&request.rendered, request.stored, count, &mut |stored| {
                    if let Some((check, _)) = &mut open {
                        check.on_store(stored, |block| booked.contains(&block));
                    }
                });
                request.is_stored = request.stored == prompt_blocks(&request.rendered, BLOCK).len();
            }
            7 if !running.is_empty() => {
                let at = random.usize(0..running.len());
                if running[at].is_aborted || running[at].is_stored {
                    let ended = running.swap_remove(at);
                    if let Some((check, watched)) = &mut open
                        && ended.number == *watched
                    {
                        check.on_end(!ended.is_aborted, now_ns);
                    }
                }
            }
            8 => {
                let victims: Vec<BlockHash> = pool.0.iter().copied().filter(|_| random.u8(0..4) == 0).collect();
                pool.0.retain(|block| !victims.contains(block));
            }
            _ => {}
        }
        if let Some(finding) = open.as_ref().and_then(|(check, _)| check.finding(now_ns)) {
            findings.push(finding);
            open = None;
        }
    }
    findings
}
