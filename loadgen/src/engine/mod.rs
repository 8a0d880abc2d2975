//! Owns the simulated engine as a library type: configuration, start, a handle that sees what the engine holds, stop.
//! Never talks to a router.
//!
//! An engine has an OpenAI front, one block pool and scheduler per data-parallel rank, and KV events over ZMQ. Its
//! timing model is described in [`scheduler`], its cache rules in [`pool`], its event spelling in [`events`].

mod api;
pub mod content;
mod core;
pub mod disagg;
pub mod events;
pub mod faults;
mod generate;
pub mod hash;
pub mod host;
mod messages;
pub mod pool;
mod pooling;
mod publisher;
pub mod register;
mod render;
mod responses;
pub mod scheduler;
mod shapes;
pub mod speed;

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Map, Value, json};

use self::core::Command;
use self::disagg::{Disagg, TransferCounts};
use self::events::EngineStyle;
use self::faults::Faults;
use self::hash::WireHash;
use self::publisher::{FeedConfig, Feeds};
use self::scheduler::{Speed, Totals};
use crate::net::runtime;
use crate::prompt::TextModel;

/// Everything that defines one engine.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    pub model: String,
    pub style: EngineStyle,
    pub host: IpAddr,
    /// 0 takes a free port.
    pub port: u16,
    /// Port of rank 0's events, rank r at + r; 0 takes free ports.
    pub events_port: u16,
    pub topic: String,
    /// vLLM style only: 32-byte hashes in place of integers.
    pub byte_hashes: bool,
    /// Serve the replay socket (vLLM forms).
    pub replay: bool,
    pub dp_size: u32,
    /// Tokens per block.
    pub block_size: usize,
    /// Blocks per rank.
    pub blocks_total: usize,
    /// Blocks of host memory per rank; 0 for none.
    pub host_blocks: usize,
    /// Whether requests share the blocks of equal prefixes. Decode engines often do not: what came by transfer is theirs.
    pub prefix_cache: bool,
    /// Longest prompt plus answer; cut to the pool's size.
    pub context_length: usize,
    /// Length of an answer that no `max_tokens` cuts.
    pub answer_tokens: usize,
    pub speed: Speed,
    /// Seeds hashes, jitter and random failures.
    pub seed: u64,
    pub faults: Faults,
    /// Template arguments added to every chat that does not set them (`--default-chat-template-kwargs`).
    pub chat_template_kwargs: Map<String, Value>,
    /// Answer `/tokenize`.
    pub tokenizes: bool,
    /// Answer `/v1/messages` and `/v1/messages/count_tokens`.
    pub speaks_messages: bool,
    /// One half of a prefill/decode pair; both halves in one if absent.
    pub disagg: Option<Disagg>,
}

impl Default for EngineConfig {
    fn default() -> EngineConfig {
        EngineConfig {
            model: "demo".into(),
            style: EngineStyle::Vllm,
            host: IpAddr::V4(Ipv4Addr::LOCALHOST),
            port: 0,
            events_port: 0,
            topic: "kv-events".into(),
            byte_hashes: false,
            replay: true,
            dp_size: 1,
            block_size: 16,
            blocks_total: 8192,
            host_blocks: 0,
            prefix_cache: true,
            context_length: 131_072,
            answer_tokens: 256,
            speed: Speed::default(),
            seed: 1,
            faults: Faults::default(),
            chat_template_kwargs: Map::new(),
            tokenizes: true,
            speaks_messages: true,
            disagg: None,
        }
    }
}

/// One rank at the end of its latest step.
#[derive(Clone, Copy, Debug, Default)]
pub struct RankState {
    pub blocks_resident: usize,
    pub host_blocks_resident: usize,
    pub blocks_held: usize,
    pub running: usize,
    pub waiting: usize,
    pub event_batches: u64,
    pub totals: Totals,
}

/// An engine as seen from outside at one moment.
#[derive(Clone, Debug, Default)]
pub struct EngineState {
    pub ranks: Vec<RankState>,
    /// HTTP requests being answered.
    pub requests_open: usize,
    pub connections_open: usize,
    pub transfers: TransferCounts,
    /// Requests per image, by the hash of its reference; a decode engine sees none. Images beyond a cap are not told.
    pub images: BTreeMap<u64, u64>,
}

impl EngineState {
    /// Nothing runs, waits or holds a block.
    pub fn is_idle(&self) -> bool {
        self.requests_open == 0 && self.ranks.iter().all(|rank| rank.running + rank.waiting + rank.blocks_held == 0)
    }

    pub fn blocks_resident(&self) -> usize {
        self.ranks.iter().map(|rank| rank.blocks_resident).sum()
    }

    /// Sum over ranks.
    pub fn totals(&self) -> Totals {
        self.ranks.iter().fold(Totals::default(), |sum, rank| Totals {
            prompt_tokens: sum.prompt_tokens + rank.totals.prompt_tokens,
            cached_tokens: sum.cached_tokens + rank.totals.cached_tokens,
            loaded_tokens: sum.loaded_tokens + rank.totals.loaded_tokens,
            generated_tokens: sum.generated_tokens + rank.totals.generated_tokens,
            finished: sum.finished + rank.totals.finished,
            aborted: sum.aborted + rank.totals.aborted,
            preempted: sum.preempted + rank.totals.preempted,
        })
    }
}

/// State shared with handles: written by the engine's thread after each change.
#[derive(Default)]
pub(crate) struct Shared {
    state: Mutex<EngineState>,
    changed: Condvar,
}

impl Shared {
    pub(crate) fn update(&self, change: impl FnOnce(&mut EngineState)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, EngineState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Starts simulated engines.
pub struct Engine;

impl Engine {
    /// One engine on a thread of its own, with the shipped tokenizer.
    pub fn start(config: EngineConfig) -> Result<EngineHandle> {
        let mut handles = Engine::start_group(vec![config], Arc::new(TextModel::shipped()?))?;
        Ok(handles.remove(0))
    }

    /// Several engines on one thread. All sockets are bound when this returns.
    pub fn start_group(configs: Vec<EngineConfig>, text: Arc<TextModel>) -> Result<Vec<EngineHandle>> {
        let context = zmq::Context::new();
        let (sender, mailbox) = async_channel::unbounded();
        let mut engines = Vec::new();
        let mut handles = Vec::new();
        for mut config in configs {
            ensure!(config.dp_size >= 1 && config.block_size >= 1, "dp-size and block-size are at least 1");
            config.context_length = config.context_length.min(config.blocks_total * config.block_size);
            let listener = TcpListener::bind((config.host, config.port))
                .with_context(|| format!("listening on {}:{}", config.host, config.port))?;
            let feeds = Feeds::open(&context, &feed_config(&config))?;
            let shared = Arc::new(Shared::default());
            shared.update(|state| state.ranks = vec![RankState::default(); config.dp_size as usize]);
            handles.push(EngineHandle {
                addr: listener.local_addr()?,
                events_addr: feeds.events_endpoint.clone(),
                replay_addr: feeds.replay_endpoint.clone(),
                config: config.clone(),
                index: engines.len(),
                shared: shared.clone(),
                sender: sender.clone(),
                thread: None,
            });
            engines.push((config, listener, feeds, shared));
        }
        let thread = std::thread::Builder::new().name("engines".into()).spawn(move || {
            let run = runtime::block_on(core::run_group(engines, text, mailbox));
            if let Err(error) = run.and_then(|inner| inner) {
                tracing::error!(%error, "the engines' thread ended early");
            }
        })?;
        let thread = Arc::new(GroupThread(Mutex::new(Some(thread))));
        handles.iter_mut().for_each(|handle| handle.thread = Some(thread.clone()));
        Ok(handles)
    }
}

fn feed_config(config: &EngineConfig) -> FeedConfig {
    let host = match config.host {
        IpAddr::V4(host) => host.to_string(),
        IpAddr::V6(host) => format!("[{host}]"),
    };
    FeedConfig {
        host,
        events_port: config.events_port,
        replay: config.replay && config.style.is_vllm(),
        topic: config.topic.clone(),
        topic_in_replay: config.style == EngineStyle::Vllm,
        ranks: config.dp_size,
    }
}

/// Joins the engines' thread when the last handle is gone.
struct GroupThread(Mutex<Option<JoinHandle<()>>>);

impl Drop for GroupThread {
    fn drop(&mut self) {
        let thread = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread
            && thread.join().is_err()
        {
            tracing::error!("the engines' thread panicked");
        }
    }
}

/// A running engine. Dropping the handle stops the engine.
pub struct EngineHandle {
    pub addr: SocketAddr,
    /// `tcp://host:port` of rank 0's event socket.
    pub events_addr: String,
    /// `tcp://host:port` of rank 0's replay socket, in vLLM forms.
    pub replay_addr: Option<String>,
    pub config: EngineConfig,
    index: usize,
    shared: Arc<Shared>,
    sender: async_channel::Sender<(usize, Command)>,
    thread: Option<Arc<GroupThread>>,
}

impl EngineHandle {
    /// `http://host:port`.
    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// `host:port`, the worker id of this engine's registration.
    pub fn worker_id(&self) -> String {
        self.addr.to_string()
    }

    pub fn state(&self) -> EngineState {
        self.shared.lock().clone()
    }

    /// Waits until `wanted` holds of the engine's state; false at the deadline.
    pub fn wait_until(&self, timeout: Duration, wanted: impl Fn(&EngineState) -> bool) -> bool {
        let deadline = Instant::now() + timeout;
        let mut state = self.shared.lock();
        while !wanted(&state) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let waited = self.shared.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// The names of all resident blocks of a rank as its events spell them, sorted.
    pub fn resident_hashes(&self, rank: usize) -> Vec<WireHash> {
        let (reply, answer) = std::sync::mpsc::channel();
        self.send(Command::ResidentHashes(rank, reply));
        answer.recv().unwrap_or_default()
    }

    /// The faults in force, as they were set last.
    pub fn faults(&self) -> Faults {
        let (reply, answer) = std::sync::mpsc::channel();
        self.send(Command::Faults(reply));
        answer.recv().unwrap_or_default()
    }

    /// Replaces the engine's faults; takes effect before this returns.
    pub fn set_faults(&self, faults: Faults) {
        let (reply, answer) = std::sync::mpsc::channel();
        self.send(Command::SetFaults(faults, reply));
        let _ = answer.recv();
    }

    /// Empties the prefix cache of all ranks; false if one was busy.
    pub fn clear_cache(&self) -> bool {
        let (reply, answer) = std::sync::mpsc::channel();
        self.send(Command::ClearCache(reply));
        answer.recv().unwrap_or(false)
    }

    /// Waits until every rank's event feed has a subscriber; false at the deadline.
    pub fn wait_for_subscriber(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        loop {
            let (reply, answer) = std::sync::mpsc::channel();
            self.send(Command::Subscribed(reply));
            if answer.recv().unwrap_or(false) {
                return true;
            }
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The etcd registration record.
    pub fn registration(&self) -> Value {
        json!({
            "worker_id": self.worker_id(), "url": self.url(), "model_name": self.config.model,
            "engine": self.engine_name(), "disagg_mode": self.config.disagg.as_ref().map_or("mixed", Disagg::mode),
            "disagg_meta": self.config.disagg.as_ref().map(|disagg| disagg.meta(self.addr, self.config.dp_size)),
            "kv_events_endpoint": self.events_addr, "kv_block_size": self.config.block_size, "dp_rank": null,
            "dp_size": (self.config.dp_size > 1).then_some(self.config.dp_size), "request_transport": "http",
        })
    }

    /// The value of a router's `--worker` flag for this engine.
    pub fn worker_flag(&self) -> String {
        let dp_size = match self.config.dp_size {
            1 => String::new(),
            ranks => format!(",dp-size={ranks}"),
        };
        let replay = self.replay_addr.as_ref().map_or(String::new(), |endpoint| format!(",kv-replay={endpoint}"));
        format!(
            "{},model={},kv-events={},block-size={},engine={}{replay}{dp_size}",
            self.url(),
            self.config.model,
            self.events_addr,
            self.config.block_size,
            self.engine_name(),
        )
    }

    fn engine_name(&self) -> &'static str {
        self.config.disagg.as_ref().map_or(self.config.style.engine_name(), |disagg| disagg.protocol.engine_name())
    }

    /// Stops the engine: open connections are cut, running requests dropped, sockets closed.
    pub fn stop(self) {
        drop(self);
    }

    fn send(&self, command: Command) {
        // A closed mailbox means the thread is gone; its own log line says why.
        let _ = self.sender.try_send((self.index, command));
    }
}

impl Drop for EngineHandle {
    fn drop(&mut self) {
        let (reply, answer) = std::sync::mpsc::channel();
        self.send(Command::Stop(reply));
        let _ = answer.recv_timeout(Duration::from_secs(10));
    }
}

#[cfg(test)]
#[path = "engine_tests.rs"]
mod tests;
