//! Owns the run: arrivals, steps of each engine, and events that reach the router late, in order of virtual time. Never
//! chooses an engine.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::time::Duration;

use super::content::Named;
use super::workload::{Request, Start, Workload};
use crate::engine::content::Content;
use crate::engine::pool::BlockPool;
use crate::engine::scheduler::{CacheEvent, NewSequence, Output, Scheduler, Speed, Totals};

/// Engines that all serve the same model.
#[derive(Clone, Debug)]
pub struct Fleet {
    /// One entry for each engine.
    pub speeds: Vec<Speed>,
    /// Blocks of KV per engine.
    pub blocks_per_engine: usize,
    /// From the step's end to the moment when the router's view has its events.
    pub event_lag: Duration,
    /// Seeds the jitter of steps.
    pub seed: u64,
}

/// Who decides. All times are nanoseconds of virtual time; requests and engines are numbered from 0.
pub trait Router {
    /// The engine that a request goes to. `engines` tells the truth, which a router that is to be believed leaves alone.
    fn pick(&mut self, now_ns: u64, number: usize, request: &Request, engines: &Engines) -> usize;

    /// What an engine published, after the fleet's lag.
    fn cache_changed(&mut self, engine: usize, events: &[CacheEvent<u64>]);

    /// The first token of a request's answer.
    fn first_token(&mut self, now_ns: u64, number: usize);

    /// The end of a request's answer.
    fn ended(&mut self, now_ns: u64, number: usize);
}

/// The engines as they are.
pub struct Engines {
    schedulers: Vec<Scheduler<Named>>,
    busy: Vec<bool>,
    block_size: usize,
}

impl Engines {
    pub fn count(&self) -> usize {
        self.schedulers.len()
    }

    /// Blocks of a prompt that an engine would not compute if it began now.
    pub fn cached_blocks(&self, engine: usize, content: &Named) -> usize {
        self.schedulers[engine].pool().prefix_length(content.reusable_names(self.block_size))
    }

    /// Requests that run or wait.
    pub fn requests(&self, engine: usize) -> usize {
        self.schedulers[engine].sequences_running() + self.schedulers[engine].sequences_waiting()
    }

    pub fn totals(&self, engine: usize) -> Totals {
        self.schedulers[engine].totals()
    }
}

/// What became of one request. Times in nanoseconds from the beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Served {
    pub engine: usize,
    pub sent_ns: u64,
    pub first_token_ns: u64,
    pub ended_ns: u64,
    /// Prompt tokens found in the cache when the engine first took it up.
    pub cached_tokens: usize,
}

enum What {
    Sent(usize),
    StepEnds(usize),
    /// The oldest batch of events under way arrives.
    EventsArrive,
}

/// Dated, and numbered in the order of making.
struct Event {
    at_ns: u64,
    number: u64,
    what: What,
}

impl Ord for Event {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at_ns, self.number).cmp(&(other.at_ns, other.number))
    }
}

impl PartialOrd for Event {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Event {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Event {}

struct Run<'a> {
    fleet: &'a Fleet,
    requests: &'a [Request],
    engines: Engines,
    heap: BinaryHeap<Reverse<Event>>,
    /// The lag is the same for all, so batches arrive in the order in which they were sent.
    under_way: VecDeque<(usize, Vec<CacheEvent<u64>>)>,
    next_number: u64,
    /// By request, those that wait for its end.
    followers: Vec<Vec<usize>>,
    served: Vec<Served>,
}

/// Serves the whole workload; the result has one entry for each request.
///
/// Panics where a request does not fit into an engine at all.
pub fn run(fleet: &Fleet, workload: &Workload, router: &mut dyn Router) -> Vec<Served> {
    let block_size = workload.block_size;
    let scheduler = |(number, speed): (usize, &Speed)| {
        let pool = BlockPool::new(fleet.blocks_per_engine, true);
        Scheduler::new(speed.clone(), block_size, pool, fleet.seed.wrapping_mul(1021).wrapping_add(number as u64))
    };
    let schedulers: Vec<_> = fleet.speeds.iter().enumerate().map(scheduler).collect();
    assert!(!schedulers.is_empty(), "a fleet has engines");
    let mut run = Run {
        fleet,
        requests: &workload.requests,
        engines: Engines { busy: vec![false; schedulers.len()], schedulers, block_size },
        heap: BinaryHeap::new(),
        under_way: VecDeque::new(),
        next_number: 0,
        followers: vec![Vec::new(); workload.requests.len()],
        served: vec![Served::default(); workload.requests.len()],
    };
    for (number, request) in workload.requests.iter().enumerate() {
        match request.start {
            Start::At(at_ns) => run.plan(at_ns, What::Sent(number)),
            Start::After { request, .. } => run.followers[request].push(number),
        }
    }
    while let Some(Reverse(event)) = run.heap.pop() {
        match event.what {
            What::Sent(number) => run.send(event.at_ns, number, router),
            What::StepEnds(engine) => run.end_step(event.at_ns, engine, router),
            What::EventsArrive => {
                let (engine, events) = run.under_way.pop_front().expect("planned when it was sent");
                router.cache_changed(engine, &events);
            }
        }
    }
    run.served
}

impl Run<'_> {
    fn plan(&mut self, at_ns: u64, what: What) {
        self.heap.push(Reverse(Event { at_ns, number: self.next_number, what }));
        self.next_number += 1;
    }

    fn send(&mut self, now_ns: u64, number: usize, router: &mut dyn Router) {
        let request = &self.requests[number];
        let engine = router.pick(now_ns, number, request, &self.engines);
        self.served[number] = Served { engine, sent_ns: now_ns, ..Served::default() };
        let content = request.content.clone();
        assert!(
            content.prompt_tokens() + content.answer_tokens() <= self.engines.schedulers[engine].tokens_max(),
            "request {number} of {} tokens does not fit into an engine",
            content.prompt_tokens() + content.answer_tokens()
        );
        self.engines.schedulers[engine].submit(NewSequence { id: number as u64, content });
        if !self.engines.busy[engine] {
            self.begin_step(now_ns, engine);
        }
    }

    fn begin_step(&mut self, now_ns: u64, engine: usize) {
        let step = self.engines.schedulers[engine].begin_step();
        self.engines.busy[engine] = step.is_some();
        if let Some(step) = step {
            self.plan(now_ns + step.duration.as_nanos() as u64, What::StepEnds(engine));
        }
    }

    fn end_step(&mut self, now_ns: u64, engine: usize, router: &mut dyn Router) {
        let outputs = self.engines.schedulers[engine].finish_step();
        let events = self.engines.schedulers[engine].drain_events();
        if !events.is_empty() {
            self.under_way.push_back((engine, events));
            self.plan(now_ns + self.fleet.event_lag.as_nanos() as u64, What::EventsArrive);
        }
        for output in outputs {
            self.deliver(now_ns, output, router);
        }
        self.begin_step(now_ns, engine);
    }

    fn deliver(&mut self, now_ns: u64, output: Output, router: &mut dyn Router) {
        let number = output.id as usize;
        if output.position == 0 {
            self.served[number].first_token_ns = now_ns;
            self.served[number].cached_tokens = output.cached_tokens;
            router.first_token(now_ns, number);
        }
        if !output.last {
            return;
        }
        self.served[number].ended_ns = now_ns;
        router.ended(now_ns, number);
        for follower in std::mem::take(&mut self.followers[number]) {
            if let Start::After { pause_ns, .. } = self.requests[follower].start {
                self.plan(now_ns + pause_ns, What::Sent(follower));
            }
        }
    }
}

#[cfg(test)]
#[path = "fleet_tests.rs"]
mod tests;
