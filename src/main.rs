//! Wiring: configuration, control threads, shards, wait for a signal, drain, stop.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use infera_router::admin::{Admin, AdminState};
use infera_router::config::{self, Config, Effective, InspectCommand, Invocation};
use infera_router::discovery::Discovery;
use infera_router::ingest::self_heal::SelfHeal;
use infera_router::ingest::{Ingest, IngestConfig};
use infera_router::metrics::MetricsPage;
use infera_router::prompt::pool::EncoderPool;
use infera_router::proxy::{Lifecycle, LiveCell, RequestMetrics, RouterService, Shared, Steering, Surface};
use infera_router::reload::{Reload, Users};
use infera_router::route::Policy;
use infera_router::supervise::{self, End, Supervisor};
use infera_router::{access_log::AccessLog, inspect, logging, parity};
use infera_shards::Engine;
use tracing::{info, warn};

#[global_allocator]
static ALLOCATOR: infera_shards::Allocator = infera_shards::Allocator;

fn main() -> ExitCode {
    let result = match config::parse(std::env::args_os()) {
        Ok(Invocation::Serve(config)) => serve(&config),
        Ok(Invocation::Inspect(InspectCommand::Prompt(arguments))) => inspect::prompt::run(arguments),
        Ok(Invocation::Inspect(InspectCommand::Events(arguments))) => inspect::events::run(&arguments),
        Err(refusal) => {
            refusal.print();
            return ExitCode::from(refusal.exit_code);
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            logging::last_words(&error);
            ExitCode::FAILURE
        }
    }
}

fn serve(config: &Config) -> anyhow::Result<()> {
    let filter = logging::parse(&config.log_level).map_err(anyhow::Error::msg)?;
    let log = logging::start(config.log_format, filter);
    let supervisor = Supervisor::start()?;
    config.effective().iter().for_each(|line| tracing::debug!("{line}"));
    config.warnings.iter().for_each(|warning| warn!("{warning}"));

    config::raise_descriptor_limit(config.connections_max);
    let prompter = config.prompter()?;
    // Loading a tokenizer takes several times the memory of the loaded one.
    infera_shards::release_free_memory();
    let ingest = Ingest::start(IngestConfig {
        cpu: config.placement().ingest,
        subscribe: config.policy == Policy::KvAware,
        divergences: parity::start_if_heard(prompter.clone())?,
        ..IngestConfig::default()
    })?;
    let fleet_updates = ingest.fleet_updates.clone();
    let discovery =
        Discovery::start_with(config.discovery.clone(), prompter.clone(), move |workers| fleet_updates.send(workers))?;

    let warm = prompter.clone();
    let warm_up = move || {
        warm.iter().for_each(|prompter| prompter.warm_up());
        infera_shards::release_free_memory();
    };
    let encoders = EncoderPool::start_warm(config.encoder_thread_count(), warm_up)?;

    let lifecycle = Arc::new(Lifecycle::default());
    let metrics = Arc::new(RequestMetrics::new(config.shards)?);
    let access_log = AccessLog::start(config.access_log.as_ref(), config.shards, metrics.registry())?;
    let steering = Arc::new(Steering::new(&config.steering, metrics.registry())?);
    let (key, tls) = (config.access.worker_key.as_ref(), &config.tls.workers);
    let heal = config.kv_self_heal.then(|| SelfHeal::start(ingest.view.clone(), metrics.registry(), key, tls));
    let heal = heal.transpose()?;
    let engine_stats = Arc::new(std::sync::OnceLock::new());
    let page = MetricsPage::new(
        metrics.clone(),
        steering.clone(),
        ingest.view.clone(),
        ingest.stats.clone(),
        Box::new(discovery.status_reader()),
        engine_stats.clone(),
    )
    .with_prompter(prompter.clone());
    let effective = Effective::of(config);
    let state = AdminState { policy: config.policy, page, settings: effective.clone(), log: log.filter() };
    let admin = Admin::start(state)?;
    let shared = Arc::new(Shared {
        settings: config.request_settings(),
        live: LiveCell::new(config.live_settings()),
        view: ingest.view.clone(),
        ledger: ingest.ledger.clone(),
        prompter,
        encoders,
        metrics,
        steering,
        control: admin.control_plane(),
        access: access_log.as_ref().map(AccessLog::queues),
        lifecycle: lifecycle.clone(),
        epoch: Instant::now(),
        started_unix_seconds: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
    });
    shared.share_encoders();
    let users = Users {
        shared: shared.clone(),
        discovery: discovery.control(),
        heal: heal.as_ref(),
        tls: config.tls.listener.clone(),
        log: log.filter(),
        effective,
    };
    let mut reload = Reload::new(config.clone(), users)?;

    let serve = |surface: Surface| {
        let shared = shared.clone();
        move |context| RouterService::new(surface, shared.clone(), context)
    };
    if !supervisor.may_listen(config.listen, || shared.view.load().fleet.active_workers() > 0) {
        return Ok(());
    }
    let surface = if config.admin_listen.is_some() { Surface::Traffic } else { Surface::All };
    let engine = Arc::new(Engine::start(config.engine(), serve(surface))?);
    let control = config.admin_engine().map(|control| Engine::start(control, serve(Surface::Control))).transpose()?;
    control.iter().for_each(|control| info!(address = %control.local_addr(), "control pages"));
    // Set once, here: the page shows the engine from now on.
    let _ = engine_stats.set(Arc::downgrade(&engine));
    supervisor.listening(&engine, config);
    let control_shards = control.iter().map(|control| ("control-shard", control));
    let watched: Vec<_> = std::iter::once(("shard", &*engine)).chain(control_shards).collect();
    let end = supervisor.watch(&watched, || (!ingest.is_running()).then_some("ingest"), || reload.run());
    supervisor.stopping();
    let signal = match end {
        End::Signal(signal) => signal,
        End::Lost(thread) => supervise::die_without(&thread, log),
    };
    lifecycle.drain();
    supervisor.drain(signal, &engine, reload.config().drain_timeout);
    drop((control, engine, reload));
    discovery.stop();
    drop((heal, shared, access_log));
    admin.stop();
    ingest.stop();
    info!("stopped");
    drop(log);
    Ok(())
}
