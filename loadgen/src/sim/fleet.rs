//! Owns the run: arrivals, steps of each engine, KV on its way between two, and events that reach the router late, in order
//! of virtual time. Never chooses an engine.

use std::collections::VecDeque;

use super::agenda::Agenda;
use super::engines::{Engines, Fleet, Part};
use super::workload::{Request, Start, Workload};
use crate::engine::content::Content;
use crate::engine::scheduler::{CacheEvent, NewSequence, Output, PrefixHits};

/// Who decides. All times are nanoseconds of virtual time; requests and engines are numbered from 0.
pub trait Router {
    /// The engine that a part of a request goes to, one of `engines.of(part)`. A fleet of pairs asks for prefill, then at
    /// once for decode. `engines` tells the truth, which a router that is to be believed leaves alone.
    fn pick(&mut self, now_ns: u64, number: usize, request: &Request, part: Part, engines: &Engines) -> usize;

    /// What an engine published, after the fleet's lag.
    fn cache_changed(&mut self, engine: usize, events: &[CacheEvent<u64>]);

    /// The request's prompt has been computed.
    fn prefilled(&mut self, now_ns: u64, number: usize);

    /// The end of a request's answer.
    fn ended(&mut self, now_ns: u64, number: usize);
}

/// What became of one request. Times in nanoseconds from the beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Served {
    /// The one that computed the prompt.
    pub engine: usize,
    /// The one that generated the answer; often the same.
    pub decode_engine: usize,
    pub sent_ns: u64,
    pub first_token_ns: u64,
    pub ended_ns: u64,
    /// Of the prompt, when the engine that computed it first took it up.
    pub hits: PrefixHits,
}

enum What {
    Sent(usize),
    StepEnds(usize),
    /// Decode has a request's KV.
    KvArrives(usize),
    /// The oldest batch of events under way arrives.
    EventsArrive,
}

struct Run<'a> {
    fleet: &'a Fleet,
    requests: &'a [Request],
    engines: Engines,
    agenda: Agenda<What>,
    /// The lag is the same for all, so batches arrive in the order in which they were sent.
    under_way: VecDeque<(usize, Vec<CacheEvent<u64>>)>,
    /// By request, those that wait for its end.
    followers: Vec<Vec<usize>>,
    served: Vec<Served>,
}

/// Serves the whole workload; the result has one entry for each request.
///
/// Panics where a request does not fit into an engine at all.
pub fn run(fleet: &Fleet, workload: &Workload, router: &mut dyn Router) -> Vec<Served> {
    let mut run = Run {
        fleet,
        requests: &workload.requests,
        engines: Engines::new(fleet, workload.block_size),
        agenda: Agenda::new(),
        under_way: VecDeque::new(),
        followers: vec![Vec::new(); workload.requests.len()],
        served: vec![Served::default(); workload.requests.len()],
    };
    for (number, request) in workload.requests.iter().enumerate() {
        match request.start {
            Start::At(at_ns) => run.agenda.plan(at_ns, What::Sent(number)),
            Start::After { request, .. } => run.followers[request].push(number),
        }
    }
    while let Some((now_ns, what)) = run.agenda.pop() {
        match what {
            What::Sent(number) => run.send(now_ns, number, router),
            What::StepEnds(engine) => run.end_step(now_ns, engine, router),
            What::KvArrives(number) => run.receive(now_ns, number),
            What::EventsArrive => {
                let (engine, events) = run.under_way.pop_front().expect("planned when it was sent");
                router.cache_changed(engine, &events);
            }
        }
    }
    run.served
}

impl Run<'_> {
    fn send(&mut self, now_ns: u64, number: usize, router: &mut dyn Router) {
        let request = &self.requests[number];
        let (engine, decode_engine) = match &self.fleet.pairs {
            None => {
                let engine = router.pick(now_ns, number, request, Part::Whole, &self.engines);
                (engine, engine)
            }
            Some(_) => (
                router.pick(now_ns, number, request, Part::Prefill, &self.engines),
                router.pick(now_ns, number, request, Part::Decode, &self.engines),
            ),
        };
        self.served[number] = Served { engine, decode_engine, sent_ns: now_ns, ..Served::default() };
        let content = request.content.clone();
        assert!(
            content.prompt_tokens() + content.answer_tokens() <= self.engines.schedulers[engine].tokens_max(),
            "request {number} of {} tokens does not fit into an engine",
            content.prompt_tokens() + content.answer_tokens()
        );
        let content = if engine == decode_engine { content } else { content.for_prefill() };
        self.engines.schedulers[engine].submit(NewSequence { id: number as u64, content });
        self.wake(now_ns, engine);
    }

    /// Decode takes up a request whose KV has come.
    fn receive(&mut self, now_ns: u64, number: usize) {
        let engine = self.served[number].decode_engine;
        let content = self.requests[number].content.clone();
        self.engines.schedulers[engine].submit_received(NewSequence { id: number as u64, content });
        self.wake(now_ns, engine);
    }

    fn wake(&mut self, now_ns: u64, engine: usize) {
        if !self.engines.busy[engine] {
            self.begin_step(now_ns, engine);
        }
    }

    fn begin_step(&mut self, now_ns: u64, engine: usize) {
        let step = self.engines.schedulers[engine].begin_step();
        self.engines.busy[engine] = step.is_some();
        if let Some(step) = step {
            self.agenda.plan(now_ns + step.duration.as_nanos() as u64, What::StepEnds(engine));
        }
    }

    fn end_step(&mut self, now_ns: u64, engine: usize, router: &mut dyn Router) {
        let outputs = self.engines.schedulers[engine].finish_step();
        let events = self.engines.schedulers[engine].drain_events();
        if !events.is_empty() {
            self.under_way.push_back((engine, events));
            self.agenda.plan(now_ns + self.fleet.event_lag.as_nanos() as u64, What::EventsArrive);
        }
        for output in outputs {
            self.deliver(now_ns, engine, output, router);
        }
        self.begin_step(now_ns, engine);
    }

    fn deliver(&mut self, now_ns: u64, engine: usize, output: Output, router: &mut dyn Router) {
        let number = output.id as usize;
        let served = &mut self.served[number];
        if output.position == 0 && engine == served.engine {
            served.hits = output.hits;
            router.prefilled(now_ns, number);
        }
        if engine != served.decode_engine {
            return self.hand_over(now_ns, number);
        }
        if output.position == 0 {
            served.first_token_ns = now_ns;
        }
        if !output.last {
            return;
        }
        self.served[number].ended_ns = now_ns;
        router.ended(now_ns, number);
        for follower in std::mem::take(&mut self.followers[number]) {
            if let Start::After { pause_ns, .. } = self.requests[follower].start {
                self.agenda.plan(now_ns + pause_ns, What::Sent(follower));
            }
        }
    }

    /// Prefill has answered: what decode does not have yet of the prompt is on its way.
    fn hand_over(&mut self, now_ns: u64, number: usize) {
        let Some(pairs) = &self.fleet.pairs else { return };
        let content = &self.requests[number].content;
        let block_size = self.engines.block_size();
        let there = self.engines.cached_blocks(self.served[number].decode_engine, content) * block_size;
        let transfer = pairs.transfer_per_token * (content.prompt_tokens() - there) as u32;
        self.agenda.plan(now_ns + transfer.as_nanos() as u64, What::KvArrives(number));
    }
}

#[cfg(test)]
#[path = "fleet_tests.rs"]
mod tests;
