//! Wiring: configuration, control threads, shards, wait for a signal, drain, stop.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use infera_router::admin::{Admin, AdminState};
use infera_router::config::{self, Config, InspectCommand, Invocation};
use infera_router::discovery::Discovery;
use infera_router::ingest::self_heal::SelfHeal;
use infera_router::ingest::{Ingest, IngestConfig};
use infera_router::metrics::MetricsPage;
use infera_router::prompt::pool::EncoderPool;
use infera_router::proxy::{Lifecycle, RequestMetrics, RouterService, Settings, Shared, Steering};
use infera_router::route::Policy;
use infera_router::{inspect, logging, parity};
use infera_shards::Engine;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tracing::{info, warn};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

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
    let log = logging::start(config.log_format);
    // Before any thread is started, so that a signal during start is not lost.
    let mut signals = Signals::new([SIGINT, SIGTERM]).context("cannot install signal handlers")?;
    config.effective().for_each(|line| tracing::debug!("{line}"));
    config.warnings.iter().for_each(|warning| warn!("{warning}"));

    config::raise_descriptor_limit();
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
    let metrics = Arc::new(RequestMetrics::new()?);
    let steering = Arc::new(Steering::new(&config.steering, metrics.registry())?);
    let heal = config.kv_self_heal.then(|| SelfHeal::start(ingest.view.clone(), metrics.registry()));
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
    let admin = Admin::start(AdminState { view: ingest.view.clone(), policy: config.policy, page })?;
    let shared = Arc::new(Shared {
        settings: Settings {
            policy: config.policy,
            overlap_weight: config.kv_overlap_weight,
            host_tier_weight: config.kv_host_tier_weight,
            retries_max: config.request_retries_max,
            disaggregation: config.disaggregation.clone(),
        },
        view: ingest.view.clone(),
        ledger: ingest.ledger.clone(),
        prompter,
        encoders,
        metrics,
        steering,
        control: admin.control_plane(),
        lifecycle: lifecycle.clone(),
        epoch: Instant::now(),
        started_unix_seconds: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
    });

    shared.share_encoders();

    let for_shards = shared.clone();
    let engine =
        Arc::new(Engine::start(config.engine(), move |context| RouterService::new(for_shards.clone(), context))?);
    // Set once, here: the page shows the engine from now on.
    let _ = engine_stats.set(Arc::downgrade(&engine));
    let driver = engine.driver();
    info!(
        address = %engine.local_addr(),
        shards = config.shards,
        policy = config.policy.as_str(),
        driver = driver.name,
        flags = driver.flags.join("+"),
        "listening"
    );

    let signal = signals.forever().next();
    let drain_timeout_s = config.drain_timeout.as_secs_f64();
    info!(signal, drain_timeout_s, "draining: no new connections, running requests finish");
    lifecycle.drain();
    engine.drain();
    let left = wait_for_requests(&engine, config.drain_timeout, &mut signals);
    if left > 0 {
        warn!(requests = left, "ending requests that did not finish in time");
    }
    drop(engine);
    discovery.stop();
    drop(heal);
    drop(shared);
    admin.stop();
    ingest.stop();
    info!("stopped");
    drop(log);
    Ok(())
}

/// Waits until no connection is open, the time is over, or a second signal asks for haste.
fn wait_for_requests(engine: &Engine, timeout: Duration, signals: &mut Signals) -> u64 {
    let deadline = Instant::now() + timeout;
    while engine.requests_active() > 0 && Instant::now() < deadline {
        if signals.pending().next().is_some() {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    engine.requests_active()
}
