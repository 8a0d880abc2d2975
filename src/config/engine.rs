//! From configuration to parts: the HTTP engine's settings, the prompt side, and which thread runs where.

use std::sync::Arc;

use anyhow::Context;

use infera_shards::{DriverChoice, EngineConfig};

use super::{Config, IoDriver, ShardCpus};
use crate::limits;
use crate::prompt::{Prompter, PrompterOptions};
use crate::proxy::{LiveSettings, Settings};
use crate::route::Policy;

/// CPUs of the threads that matter; absent means: wherever the kernel likes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    pub ingest: Option<usize>,
    pub shards: Option<Vec<usize>>,
}

impl Placement {
    /// A CPU for the ingest core, then one for each shard; nothing where they would have to share.
    fn spread(shards: usize, allowed: &[usize]) -> Self {
        match allowed.split_first() {
            Some((ingest, rest)) if rest.len() >= shards => {
                Self { ingest: Some(*ingest), shards: Some(rest[..shards].to_vec()) }
            }
            _ => Self::default(),
        }
    }
}

/// A proxied stream needs two descriptors and an event feed about five; the soft limit is a leftover from `select`. Says
/// so where that leaves fewer connections than `connections_max`.
pub fn raise_descriptor_limit(connections_max: usize) {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if limit.current != limit.maximum && setrlimit(Resource::Nofile, raised).is_err() {
        tracing::warn!(soft = ?limit.current, hard = ?limit.maximum, "the limit of open files cannot be raised");
    }
    let fitting = connections_that_fit();
    if fitting < connections_max {
        tracing::warn!(
            connections_max = fitting,
            open_files_max = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX),
            "the limit of open files allows fewer connections than --max-connections"
        );
    }
}

/// Client connections for which there are descriptors, each with one to a worker. Where there are none left, those that
/// are served would fail with those that come; so whoever comes is told instead.
fn connections_that_fit() -> usize {
    let Some(limit) = rustix::process::getrlimit(rustix::process::Resource::Nofile).current else { return usize::MAX };
    fitting(usize::try_from(limit).unwrap_or(usize::MAX))
}

fn fitting(descriptors: usize) -> usize {
    let reserve = limits::DESCRIPTORS_RESERVED.min(descriptors / 4);
    ((descriptors - reserve) / 2).max(1)
}

/// Room of one shard for bodies that are still on their way.
fn unfinished_body_bytes(shards: usize, body_bytes_max: usize) -> usize {
    (limits::UNFINISHED_BODY_BYTES_MAX / shards.max(1)).max(body_bytes_max.saturating_mul(2))
}

/// What is wrong with a list of CPUs on this machine: their shards run unpinned.
pub(super) fn unusable_cpus(cpus: &ShardCpus) -> Option<String> {
    let ShardCpus::List(named) = cpus else { return None };
    let allowed = allowed_cpus();
    let unusable: Vec<_> = named.iter().filter(|cpu| !allowed.contains(cpu)).map(usize::to_string).collect();
    let text =
        || format!("--shard-cpus: this process may not run on CPU {}; shards there run unpinned", unusable.join(", "));
    (!unusable.is_empty() && !allowed.is_empty()).then(text)
}

fn allowed_cpus() -> Vec<usize> {
    let Ok(set) = rustix::thread::sched_getaffinity(None) else { return Vec::new() };
    (0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect()
}

impl Config {
    /// `--encoder-threads`, or a quarter of the cores.
    pub fn encoder_thread_count(&self) -> usize {
        let quarter = || std::thread::available_parallelism().map_or(1, |cores| (cores.get() / 4).max(1));
        self.encoder_threads.unwrap_or_else(quarter)
    }

    /// The prompt side; absent for a policy that does not look at prompts, and without a tokenizer (which is said among
    /// the warnings).
    pub fn prompter(&self) -> anyhow::Result<Option<Arc<Prompter>>> {
        let Some(path) = self.tokenizer_path.as_ref().filter(|_| self.policy == Policy::KvAware) else {
            return Ok(None);
        };
        let options = PrompterOptions {
            chat_template_kwargs: self.chat_template_kwargs.clone(),
            cache_bytes: self.prompt_cache_bytes,
            allow_request_chat_template: self.allow_request_chat_template,
            chat_encoding: self.chat_encoding,
            ..PrompterOptions::default()
        };
        let prompter = Prompter::load(path, options).with_context(|| format!("cannot load {}", path.display()))?;
        Ok(Some(Arc::new(prompter)))
    }

    pub fn placement(&self) -> Placement {
        match &self.shard_cpus {
            ShardCpus::Auto => Placement::spread(self.shards, &allowed_cpus()),
            ShardCpus::Off => Placement::default(),
            ShardCpus::List(cpus) => Placement { ingest: None, shards: Some(cpus.clone()) },
        }
    }

    /// What the request path is to know of it all.
    pub fn request_settings(&self) -> Settings {
        Settings { policy: self.policy, shards: self.shards, silence: self.silence }
    }

    /// What of it may change at a reload.
    pub fn live_settings(&self) -> LiveSettings {
        LiveSettings {
            overlap_weight: self.kv_overlap_weight,
            host_tier_weight: self.kv_host_tier_weight.unwrap_or(self.steering.load_term.host_tier_weight()),
            retries_max: self.request_retries_max,
            retry_budget_percent: self.resilience.retry_budget_percent,
            breaker: self.resilience.breaker,
            caps: self.resilience.caps,
            client_keys: self.access.client_keys.clone(),
            outbound: self.access.outbound(),
            disaggregation: self.disaggregation.clone(),
            upstream: self.upstream,
            answer_names_worker: self.answer_names_worker,
        }
    }

    /// A second, small engine for the control pages, where they have an address of their own. It speaks plain HTTP: what
    /// scrapes it sits beside the router.
    pub fn admin_engine(&self) -> Option<EngineConfig> {
        let mut engine = self.engine();
        (engine.listen, engine.shards, engine.cpus, engine.tls) = (self.admin_listen?, 1, None, None);
        engine.limits.connections_max = engine.limits.connections_max.min(limits::ADMIN_CONNECTIONS_MAX);
        engine.limits.half_open_max = engine.limits.connections_max.div_ceil(2);
        Some(engine)
    }

    /// What the engine is started with; everything that has no flag keeps the engine's default.
    pub fn engine(&self) -> EngineConfig {
        let mut engine = EngineConfig::new(self.listen);
        engine.shards = self.shards;
        engine.cpus = self.placement().shards;
        engine.driver = match self.io_driver {
            IoDriver::Auto => DriverChoice::Auto,
            IoDriver::Epoll => DriverChoice::Epoll,
        };
        engine.require_io_uring = self.require_io_uring;
        engine.limits.body_bytes_max = self.max_body_bytes;
        engine.limits.unfinished_body_bytes_max = unfinished_body_bytes(self.shards, self.max_body_bytes);
        engine.limits.connections_max = self.connections_max.min(connections_that_fit()).div_ceil(self.shards);
        engine.limits.half_open_max = engine.limits.connections_max.div_ceil(2);
        engine.upstream.connect_timeout = self.upstream.connect;
        engine.upstream.first_byte_timeout = self.upstream.first_byte;
        engine.upstream.idle_timeout = self.upstream.idle;
        engine.upstream.tls = self.tls.workers.clone();
        engine.tls = self.tls.listener.clone();
        engine
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_leave_descriptors_for_everything_else() {
        assert_eq!([0, 1, 100, 1_024, 20_000, 1 << 20].map(fitting), [1, 1, 37, 384, 9_744, 524_032]);
    }

    #[test]
    fn shards_share_the_room_for_unfinished_bodies_and_the_longest_fits_twice() {
        let mib = |shards, body_mib: usize| unfinished_body_bytes(shards, body_mib << 20) >> 20;
        assert_eq!([mib(1, 64), mib(4, 64), mib(64, 64), mib(1, 1_000)], [1_024, 256, 128, 2_000]);
        assert_eq!(unfinished_body_bytes(1, usize::MAX), usize::MAX);
    }

    #[test]
    fn every_thread_gets_a_cpu_of_its_own_or_none_is_pinned() {
        let pinned = |ingest, shards: &[usize]| Placement { ingest: Some(ingest), shards: Some(shards.to_vec()) };
        assert_eq!(Placement::spread(3, &[4, 5, 6, 7, 9]), pinned(4, &[5, 6, 7]));
        assert_eq!(Placement::spread(1, &[0, 1]), pinned(0, &[1]));
        assert_eq!(Placement::spread(1, &[0]), Placement::default());
        assert_eq!(Placement::spread(4, &[0, 1, 2, 3]), Placement::default());
    }
}
