//! SIGHUP: reads the configuration again and gives what may change to those who use it. A configuration with a mistake
//! changes nothing. Runs on the main thread; never touches a request, which sees new settings through `proxy::LiveCell`.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use infera_shards::ServerTls;
use prometheus::{Gauge, IntCounter, IntCounterVec, Opts};
use tracing::{error, info, warn};

use crate::config::{Changes, Config, Effective};
use crate::discovery::{DiscoveryControl, Replacement};
use crate::ingest::self_heal::SelfHeal;
use crate::logging::LogFilter;
use crate::proxy::Shared;

/// Who is told of new settings.
pub struct Users<'a> {
    pub shared: Arc<Shared>,
    pub discovery: DiscoveryControl,
    pub heal: Option<&'a SelfHeal>,
    /// What the listener shows; absent where it speaks plain HTTP.
    pub tls: Option<ServerTls>,
    pub log: LogFilter,
    pub effective: Effective,
}

/// The configuration in force, and how it came to be.
pub struct Reload<'a> {
    config: Config,
    users: Users<'a>,
    succeeded: IntCounter,
    failed: IntCounter,
    last_success: Gauge,
}

impl<'a> Reload<'a> {
    /// Registers the metrics of reloads beside those of requests.
    pub fn new(config: Config, users: Users<'a>) -> prometheus::Result<Self> {
        let registry = users.shared.metrics.registry();
        let total = Opts::new(
            "infera_router_config_reload_total",
            "Times the configuration was read again: ok, or error when a mistake left everything as it was.",
        );
        let total = IntCounterVec::new(total, &["result"])?;
        let last_success = Gauge::new(
            "infera_router_config_last_success_timestamp_seconds",
            "When the configuration in force was read, Unix time.",
        )?;
        registry.register(Box::new(total.clone()))?;
        registry.register(Box::new(last_success.clone()))?;
        last_success.set(now());
        let [succeeded, failed] = ["ok", "error"].map(|result| total.with_label_values(&[result]));
        Ok(Self { config, users, succeeded, failed, last_success })
    }

    /// The configuration in force.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Once. What is wrong or cannot change is in the log.
    pub fn run(&mut self) {
        let newer = match self.config.read_again() {
            Ok(newer) => newer,
            Err(refusal) => {
                self.failed.inc();
                for problem in refusal.text.lines().filter(|line| !line.is_empty()) {
                    error!("the configuration stays as it was: {problem}");
                }
                return;
            }
        };
        let changes = self.config.take_over(newer);
        self.apply(&changes);
        self.succeeded.inc();
        self.last_success.set(now());
        info!(changed = changes.in_force.join(","), access = ?self.config.access, "the configuration was read again");
        if !changes.waiting.is_empty() {
            warn!(options = changes.waiting.join(","), "these options have changed and wait for a restart");
        }
    }

    fn apply(&self, changes: &Changes) {
        let Users { shared, discovery, heal, tls, log, effective } = &self.users;
        let config = &self.config;
        // Where the file is as it was, a filter that was set at run time stays.
        if changes.in_force.iter().any(|name| name == "log-level")
            && let Err(problem) = log.set(&config.log_level)
        {
            warn!(problem, "the log's filter stays as it was");
        }
        if let (Some(shown), Some(read)) = (tls, &config.tls.listener) {
            shown.replace(read);
        }
        shared.live.replace(config.live_settings());
        discovery.replace(Replacement {
            workers: config.discovery.workers.clone(),
            workers_file: config.discovery.workers_file.clone(),
            authorization: config.access.worker_key.clone(),
        });
        if let Some(Err(error)) = heal.map(|heal| heal.show(config.access.worker_key.as_ref())) {
            warn!(%error, "engines that are asked to forget their cache are shown the former key");
        }
        effective.follow(config);
    }
}

/// Unix time, seconds.
fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}
