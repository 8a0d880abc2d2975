//! Owns the engines' thread: mailbox, accept loops, the step loop of each rank, publication of events, orderly stop.
//! Never parses requests.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Result;
use monoio::io::Canceller;
use monoio::net::TcpListener;
use monoio::time::{Instant, sleep_until};
use rand::Rng;
use rand::rngs::SmallRng;
use serde_json::Value;

use super::disagg::DisaggState;
use super::events::{Dialect, EngineStyle};
use super::faults::Faults;
use super::hash::WireHash;
use super::host::HostPool;
use super::pool::BlockPool;
use super::publisher::{Feeds, Publisher, ReplayServer};
use super::scheduler::{CacheEvent, NewSequence, Output, Scheduler};
use super::{EngineConfig, RankState, Shared, api, render};
use crate::net::runtime::contain_panic;
use crate::net::signal::{Latch, Queue};
use crate::prompt::TextModel;
use crate::seed;

/// How far behind its own schedule a rank may be and still make up for it.
const CATCH_UP_MAX: Duration = Duration::from_millis(5);

/// What handles ask of an engine.
pub(crate) enum Command {
    ResidentHashes(usize, Sender<Vec<WireHash>>),
    Faults(Sender<Faults>),
    SetFaults(Faults, Sender<()>),
    ClearCache(Sender<bool>),
    Subscribed(Sender<bool>),
    Stop(Sender<()>),
}

/// What a request hears about one of its sequences.
#[derive(Clone, Debug)]
pub(super) enum Progress {
    Token { choice: usize, output: Output },
    Aborted,
}

/// One rank: scheduler, publisher and who listens to which sequence.
pub(super) struct Rank {
    pub number: u32,
    pub scheduler: RefCell<Scheduler>,
    publisher: RefCell<Publisher>,
    listeners: RefCell<HashMap<u64, Listener>>,
    wake: Queue<()>,
    event_batches: Cell<u64>,
}

/// Images whose requests are counted.
const IMAGES_MAX: usize = 4096;

struct Listener {
    queue: Queue<Progress>,
    choice: usize,
    /// Name that `/abort_request` may use.
    abort_name: Option<String>,
}

/// One engine on its thread.
pub(super) struct Engine {
    pub config: EngineConfig,
    pub text: Arc<TextModel>,
    pub ranks: Vec<Rank>,
    pub faults: RefCell<Faults>,
    pub shared: Arc<Shared>,
    pub feeds: FeedNames,
    pub address: SocketAddr,
    pub disagg: DisaggState,
    pub stop: Latch,
    dialect: Dialect,
    draw: RefCell<SmallRng>,
    next_id: Cell<u64>,
    tasks: Cell<usize>,
    finished: Latch,
    replay: RefCell<Option<ReplayServer>>,
}

/// Endpoints to tell clients.
pub(super) struct FeedNames {
    pub events: String,
    pub replay: Option<String>,
}

/// An engine's parts as bound by the starting thread.
pub(crate) type EngineCore = (EngineConfig, StdListener, Feeds, Arc<Shared>);

/// Serves all engines until each was stopped.
pub(crate) async fn run_group(
    parts: Vec<EngineCore>,
    text: Arc<TextModel>,
    mailbox: async_channel::Receiver<(usize, Command)>,
) -> Result<()> {
    let mut engines = Vec::new();
    for (config, listener, feeds, shared) in parts {
        let address = listener.local_addr()?;
        let engine = Rc::new(Engine::new(config, text.clone(), feeds, shared, address));
        let listener = TcpListener::from_std(listener)?;
        engine.clone().spawn("accept loop", accept(engine.clone(), listener));
        for rank in 0..engine.ranks.len() {
            engine.clone().spawn("step loop", run_rank(engine.clone(), rank));
        }
        engines.push(Some(engine));
    }
    while engines.iter().any(Option::is_some) {
        let Ok((index, command)) = mailbox.recv().await else { break };
        let Some(engine) = engines.get(index).and_then(Clone::clone) else { continue };
        if let Some(stopped) = engine.obey(command) {
            engine.shut_down().await;
            engines[index] = None;
            drop(engine);
            let _ = stopped.send(());
        }
    }
    Ok(())
}

impl Engine {
    /// Token ids of a chat body as this engine renders it.
    pub(super) fn chat_ids(&self, body: &Value) -> Result<Vec<u32>> {
        render::chat_ids(&self.text, self.config.style, &self.config.chat_template_kwargs, body)
    }

    fn new(
        config: EngineConfig,
        text: Arc<TextModel>,
        feeds: Feeds,
        shared: Arc<Shared>,
        address: SocketAddr,
    ) -> Engine {
        let dialect = Dialect {
            style: config.style,
            hash_form: config.style.hash_form(config.byte_hashes),
            block_size: config.block_size,
        };
        let keeps_copies = config.style.is_vllm();
        let scheduler = |pool, seed| Scheduler::new(config.speed.clone(), config.block_size, pool, seed);
        let new_rank = |(number, publisher): (usize, Publisher)| {
            let pool = BlockPool::new(config.blocks_total, keeps_copies);
            let rank_seed = config.seed.wrapping_mul(1021).wrapping_add(number as u64);
            Rank {
                number: number as u32,
                scheduler: RefCell::new(match (config.prefix_cache, config.host_blocks) {
                    (true, 0) => scheduler(pool, rank_seed),
                    (true, blocks) => scheduler(pool, rank_seed).with_host(HostPool::new(blocks)),
                    (false, _) => scheduler(pool, rank_seed).without_prefix_cache(),
                }),
                publisher: RefCell::new(publisher),
                listeners: RefCell::default(),
                wake: Queue::default(),
                event_batches: Cell::new(0),
            }
        };
        let ranks = feeds.publishers.into_iter().enumerate().map(new_rank).collect();
        let engine = Engine {
            text,
            ranks,
            faults: RefCell::new(config.faults.clone()),
            shared,
            feeds: FeedNames { events: feeds.events_endpoint, replay: feeds.replay_endpoint },
            address,
            disagg: DisaggState::default(),
            stop: Latch::default(),
            dialect,
            draw: RefCell::new(seed::generator(config.seed, "faults")),
            next_id: Cell::new(0),
            tasks: Cell::new(0),
            finished: Latch::default(),
            replay: RefCell::new(feeds.replay),
            config,
        };
        if engine.config.style == EngineStyle::Sglang {
            engine.ranks.iter().for_each(|rank| engine.publish(rank, &[CacheEvent::Cleared]));
        }
        engine
    }

    /// Runs a task that [`Engine::shut_down`] waits for.
    pub fn spawn(self: Rc<Engine>, what: &'static str, future: impl Future<Output = ()> + 'static) {
        self.tasks.set(self.tasks.get() + 1);
        monoio::spawn(async move {
            contain_panic(what, future).await;
            self.tasks.set(self.tasks.get() - 1);
            if self.tasks.get() == 0 {
                self.finished.open();
            }
        });
    }

    async fn shut_down(&self) {
        self.stop.open();
        self.finished.wait().await;
        *self.replay.borrow_mut() = None;
    }

    /// Carries out a command; a stop is handed back for the caller to finish.
    fn obey(&self, command: Command) -> Option<Sender<()>> {
        match command {
            Command::ResidentHashes(rank, reply) => {
                let scheduler = self.ranks.get(rank).map(|rank| rank.scheduler.borrow());
                let mut hashes: Vec<WireHash> = scheduler
                    .iter()
                    .flat_map(|it| it.pool().resident_digests().map(|digest| self.dialect.hash_form.spell(digest)))
                    .collect();
                hashes.sort();
                let _ = reply.send(hashes);
            }
            Command::Faults(reply) => {
                let _ = reply.send(self.faults.borrow().clone());
            }
            Command::SetFaults(faults, reply) => {
                self.set_faults(faults);
                let _ = reply.send(());
            }
            Command::ClearCache(reply) => {
                let _ = reply.send(self.clear_cache());
            }
            Command::Subscribed(reply) => {
                let all = self.ranks.iter().all(|rank| rank.publisher.borrow_mut().subscriptions() > 0);
                let _ = reply.send(all);
            }
            Command::Stop(reply) => return Some(reply),
        }
        None
    }

    pub fn set_faults(&self, faults: Faults) {
        *self.faults.borrow_mut() = faults;
        self.ranks.iter().for_each(|rank| rank.wake.push(()));
    }

    /// Empties every rank's prefix cache; false if one was busy. vLLM tells subscribers with the next step that has
    /// events, SGLang at once.
    pub fn clear_cache(&self) -> bool {
        let mut all = true;
        for rank in &self.ranks {
            let cleared = rank.scheduler.borrow_mut().clear();
            all &= cleared;
            if cleared && !self.config.style.is_vllm() {
                self.publish_pending(rank);
            }
            self.report(rank);
        }
        all
    }

    /// Notes that these images are served here.
    pub fn count_images(&self, images: &[u64]) {
        if images.is_empty() {
            return;
        }
        self.shared.update(|state| {
            for image in images {
                if state.images.len() < IMAGES_MAX || state.images.contains_key(image) {
                    *state.images.entry(*image).or_default() += 1;
                }
            }
        });
    }

    /// Whether chance says that this request fails.
    pub fn draws_failure(&self) -> bool {
        let rate = self.faults.borrow().fail_rate.clamp(0.0, 1.0);
        rate > 0.0 && self.draw.borrow_mut().random_bool(rate)
    }

    /// Starts a sequence whose progress goes to `queue` as `choice`. `received`: its prompt's KV came by transfer.
    pub fn submit(
        &self,
        rank: &Rank,
        queue: &Queue<Progress>,
        choice: usize,
        abort_name: Option<String>,
        received: bool,
        make: impl FnOnce(u64) -> NewSequence,
    ) -> u64 {
        let id = self.next_id.get();
        self.next_id.set(id + 1);
        rank.listeners.borrow_mut().insert(id, Listener { queue: queue.clone(), choice, abort_name });
        let new = make(id);
        match received {
            true => rank.scheduler.borrow_mut().submit_received(new),
            false => rank.scheduler.borrow_mut().submit(new),
        }
        rank.wake.push(());
        self.report(rank);
        id
    }

    /// Drops a sequence whose request is gone.
    pub fn abandon(&self, rank: &Rank, id: u64) {
        if rank.listeners.borrow_mut().remove(&id).is_some() {
            rank.scheduler.borrow_mut().abort(id);
            rank.wake.push(());
            self.report(rank);
        }
    }

    /// Ends every sequence whose abort name `matches`, telling its request. Returns how many.
    pub fn abort_named(&self, matches: impl Fn(&str) -> bool) -> usize {
        let mut count = 0;
        for rank in &self.ranks {
            let named = |listener: &Listener| listener.abort_name.as_deref().is_some_and(&matches);
            let hit: Vec<u64> = rank.listeners.borrow().iter().filter(|(_, it)| named(it)).map(|(id, _)| *id).collect();
            for id in hit {
                if let Some(listener) = rank.listeners.borrow_mut().remove(&id) {
                    listener.queue.push(Progress::Aborted);
                    count += 1;
                }
                rank.scheduler.borrow_mut().abort(id);
            }
            rank.wake.push(());
            self.report(rank);
        }
        count
    }

    fn publish_pending(&self, rank: &Rank) {
        let events = rank.scheduler.borrow_mut().drain_events();
        if !events.is_empty() {
            self.publish(rank, &events);
        }
    }

    fn publish(&self, rank: &Rank, events: &[CacheEvent]) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
        let payload = self.dialect.encode(now, events, rank.number);
        let mut faults = self.faults.borrow_mut();
        let lost = faults.lose_event_batches > 0;
        faults.lose_event_batches -= u32::from(lost);
        rank.publisher.borrow_mut().publish(payload, lost);
        rank.event_batches.set(rank.event_batches.get() + 1);
    }

    /// Tells handles what became of transfers.
    pub fn report_transfers(&self) {
        if let Some(disagg) = &self.config.disagg {
            self.disagg.expire(disagg.hold_timeout);
            let counts = self.disagg.counts();
            self.shared.update(|shared| shared.transfers = counts);
        }
    }

    /// Tells handles what this rank holds.
    pub fn report(&self, rank: &Rank) {
        let scheduler = rank.scheduler.borrow();
        let state = RankState {
            blocks_resident: scheduler.pool().blocks_resident(),
            host_blocks_resident: scheduler.host().map_or(0, HostPool::blocks_resident),
            blocks_held: scheduler.pool().blocks_held(),
            running: scheduler.sequences_running(),
            waiting: scheduler.sequences_waiting(),
            event_batches: rank.event_batches.get(),
            totals: scheduler.totals(),
        };
        self.shared.update(|shared| shared.ranks[rank.number as usize] = state);
    }
}

async fn accept(engine: Rc<Engine>, listener: TcpListener) {
    let canceller = Canceller::new();
    let handle = canceller.handle();
    let stop = engine.stop.clone();
    // The cancelled accept is awaited to its end below, so that a connection it may still yield is closed.
    monoio::spawn(async move {
        stop.wait().await;
        canceller.cancel();
    });
    while !engine.stop.is_open() {
        match listener.cancelable_accept(handle.clone()).await {
            Ok((stream, _)) if !engine.stop.is_open() => {
                engine.clone().spawn("connection", api::serve(engine.clone(), stream));
            }
            Ok(_) => {}
            Err(_) if engine.stop.is_open() => {}
            Err(error) => {
                // Out of descriptors, most likely: leave the CPU to those who may give some back.
                tracing::warn!(%error, "accept failed");
                monoio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

async fn run_rank(engine: Rc<Engine>, number: usize) {
    let rank = &engine.ranks[number];
    // Steps follow each other without a pause: the next begins when this one was due to end, not when its timer fired.
    let mut busy_until: Option<Instant> = None;
    while !engine.stop.is_open() {
        let stalled = engine.faults.borrow().stall;
        let step = if stalled { None } else { rank.scheduler.borrow_mut().begin_step() };
        engine.report(rank);
        let Some(step) = step else {
            busy_until = None;
            monoio::select! {
                _ = rank.wake.next() => {}
                _ = engine.stop.wait() => {}
            }
            while rank.wake.try_next().is_some() {}
            continue;
        };
        let due = busy_until.unwrap_or_else(Instant::now) + step.duration;
        monoio::select! {
            _ = sleep_until(due) => {}
            _ = engine.stop.wait() => {}
        }
        // A thread that did not get the CPU in time may catch up a little, not make a burst of late steps.
        busy_until = Some(due.max(Instant::now() - CATCH_UP_MAX));
        let outputs = rank.scheduler.borrow_mut().finish_step();
        engine.publish_pending(rank);
        engine.report(rank);
        deliver(rank, outputs);
    }
}

fn deliver(rank: &Rank, outputs: Vec<Output>) {
    let mut listeners = rank.listeners.borrow_mut();
    for output in outputs {
        let (id, last) = (output.id, output.last);
        if let Some(listener) = listeners.get(&id) {
            listener.queue.push(Progress::Token { choice: listener.choice, output });
        }
        if last {
            listeners.remove(&id);
        }
    }
}
