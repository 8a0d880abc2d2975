//! Families that are built from live state for one scrape: fleet, load, event feeds, discovery, engine.

use std::collections::BTreeMap;

use prometheus::proto::MetricFamily;
use prometheus::{Error, GaugeVec, IntCounterVec, IntGaugeVec, Opts, Registry};

use super::MetricsPage;
use crate::discovery::State;
use crate::events::SkipReason;
use crate::fleet::{HealthState, HealthWord, WorkerState};
use crate::index::View;
use crate::index::view::RankStatus;

/// A registry that lives for one scrape.
#[derive(Default)]
pub(super) struct Scrape(Registry);

impl Scrape {
    pub(super) fn gauges(&self, name: &str, help: &str, labels: &[&str]) -> Result<IntGaugeVec, Error> {
        let family = IntGaugeVec::new(Opts::new(name, help), labels)?;
        self.0.register(Box::new(family.clone()))?;
        Ok(family)
    }

    fn seconds(&self, name: &str, help: &str, labels: &[&str]) -> Result<GaugeVec, Error> {
        let family = GaugeVec::new(Opts::new(name, help), labels)?;
        self.0.register(Box::new(family.clone()))?;
        Ok(family)
    }

    pub(super) fn counters(&self, name: &str, help: &str, labels: &[&str]) -> Result<IntCounterVec, Error> {
        let family = IntCounterVec::new(Opts::new(name, help), labels)?;
        self.0.register(Box::new(family.clone()))?;
        Ok(family)
    }

    fn gauge(&self, name: &str, help: &str, value: u64) -> Result<(), Error> {
        self.gauges(name, help, &[])?.with_label_values::<&str>(&[]).set(signed(value));
        Ok(())
    }

    fn counter(&self, name: &str, help: &str, value: u64) -> Result<(), Error> {
        self.counters(name, help, &[])?.with_label_values::<&str>(&[]).inc_by(value);
        Ok(())
    }
}

pub(super) fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// All live families; fails only if two share a name, which a test would see.
pub(super) fn families(page: &MetricsPage) -> Result<Vec<MetricFamily>, Error> {
    let scrape = Scrape::default();
    let view = page.view.load_full();
    fleet(&scrape, page, &view)?;
    load(&scrape, &view)?;
    breaker(&scrape, &view)?;
    super::steering::families(&scrape, &page.steering, &view.fleet)?;
    super::parity::families(&scrape, &page.ingest.parity, &view.fleet)?;
    feeds(&scrape, page, &view)?;
    index(&scrape, page, &view)?;
    discovery(&scrape, page)?;
    engine(&scrape, page)?;
    prompts(&scrape, page)?;
    Ok(scrape.0.gather())
}

fn prompts(scrape: &Scrape, page: &MetricsPage) -> Result<(), Error> {
    let Some(prompter) = &page.prompter else { return Ok(()) };
    let stats = prompter.stats();
    for (name, help, value) in [
        ("found_total", "Prompts of which a beginning was known.", stats.prefixes_found),
        ("missed_total", "Prompts of which no beginning was known.", stats.prefixes_missed),
        ("tokens_reused_total", "Prompt tokens that were not encoded again.", stats.tokens_reused),
        ("tokens_encoded_total", "Prompt tokens that were encoded.", stats.tokens_encoded),
        ("evictions_total", "Entries that made room.", stats.cache_evictions),
    ] {
        scrape.counter(&format!("infera_router_prompt_cache_{name}"), help, value)?;
    }
    scrape.gauge("infera_router_prompt_cache_bytes", "Bytes held by the prefix cache.", stats.cache_bytes as u64)?;
    scrape.gauge("infera_router_prompt_cache_entries", "Entries of the prefix cache.", stats.cache_entries as u64)
}

fn fleet(scrape: &Scrape, page: &MetricsPage, view: &View) -> Result<(), Error> {
    let uptime = page.started.elapsed().as_secs();
    scrape.gauge("infera_router_uptime_seconds", "Seconds since the start of the process.", uptime)?;
    let active = view.fleet.active_workers() as u64;
    scrape.gauge("infera_router_active_workers", "Workers that requests may go to.", active)?;
    let mut by_kind: BTreeMap<(&str, &str), i64> = BTreeMap::new();
    for worker in view.fleet.workers.iter().filter(|worker| worker.state == WorkerState::Active) {
        for name in worker.record.model_names() {
            *by_kind.entry((worker.record.disagg_mode.as_str(), name)).or_default() += 1;
        }
    }
    let family =
        scrape.gauges("infera_active_workers", "Routable workers by role and model.", &["disagg_mode", "model"])?;
    for ((role, model), count) in by_kind {
        family.with_label_values(&[role, model]).set(count);
    }
    Ok(())
}

fn load(scrape: &Scrape, view: &View) -> Result<(), Error> {
    let requests =
        scrape.gauges("infera_router_inflight_requests", "Requests booked on the target now.", &["target"])?;
    let blocks = scrape.gauges(
        "infera_router_active_blocks",
        "Distinct prompt blocks in flight on the target now; a request without blocks counts as one.",
        &["target"],
    )?;
    let queued = scrape.gauges(
        "infera_router_queued_blocks",
        "Prompt blocks that the target has yet to compute for requests whose answers have not begun.",
        &["target"],
    )?;
    for target in &view.fleet.targets {
        queued.with_label_values(&[&*target.route_key]).set(signed(target.load.queued_blocks()));
        requests.with_label_values(&[&*target.route_key]).set(signed(target.load.requests()));
        blocks.with_label_values(&[&*target.route_key]).set(signed(target.load.active_blocks()));
    }
    Ok(())
}

/// Only workers that have failed: the page does not grow with the fleet.
fn breaker(scrape: &Scrape, view: &View) -> Result<(), Error> {
    let states = scrape.gauges(
        "infera_router_worker_breaker_state",
        "Circuit breaker of a worker that has failed: 0 closed, 1 being tried, 2 open.",
        &["worker_id"],
    )?;
    let trips = scrape.counters(
        "infera_router_worker_breaker_trips_total",
        "Times that a worker was found to fail and got no requests for a while.",
        &["worker_id"],
    )?;
    for worker in &view.fleet.workers {
        let (word, count) = (worker.health.read(), worker.health.trips());
        if word == HealthWord::default() && count == 0 {
            continue;
        }
        let state = match word.state {
            HealthState::Well | HealthState::Resting => 0,
            HealthState::Probing => 1,
            HealthState::Open => 2,
        };
        states.with_label_values(&[&*worker.id]).set(state);
        trips.with_label_values(&[&*worker.id]).inc_by(count);
    }
    Ok(())
}

/// One number of every rank that has an event feed.
type RankNumber = fn(&RankStatus) -> u64;

const RANK_GAUGES: &[(&str, &str, RankNumber)] = &[
    ("infera_router_kv_events_connected", "1 while the event publisher is connected.", |rank| {
        u64::from(rank.is_connected())
    }),
    ("infera_router_kv_blocks_visible", "Distinct blocks mirrored for the rank.", |rank| rank.visible_blocks.get()),
    ("infera_router_kv_orphans_waiting", "Blocks put aside until their parent comes.", |rank| {
        rank.orphans_waiting.get()
    }),
    ("infera_router_kv_block_size_seen", "Tokens per block in the last event; 0 before the first.", |rank| {
        rank.block_size_seen.get()
    }),
    ("infera_router_kv_events_next_sequence", "Sequence number expected next; 0 before the first.", |rank| {
        rank.next_sequence.get()
    }),
];

const RANK_COUNTERS: &[(&str, &str, RankNumber)] = &[
    ("infera_router_kv_event_batches_total", "Event batches applied.", |rank| rank.batches.get()),
    ("infera_router_kv_events_total", "Events applied.", |rank| rank.events.get()),
    ("infera_router_kv_blocks_stored_total", "Blocks stored.", |rank| rank.blocks_stored.get()),
    ("infera_router_kv_blocks_removed_total", "Blocks removed.", |rank| rank.blocks_removed.get()),
    ("infera_router_kv_event_batches_lost_total", "Event batches lost for good.", |rank| rank.batches_lost.get()),
    ("infera_router_kv_event_batches_replayed_total", "Event batches asked for again and received.", |rank| {
        rank.batches_replayed.get()
    }),
    ("infera_router_kv_event_batches_repeated_total", "Event batches dropped as repeats.", |rank| {
        rank.batches_repeated.get()
    }),
    ("infera_router_kv_event_messages_broken_total", "Event messages that could not be read to their end.", |rank| {
        rank.messages_broken.get()
    }),
    (
        "infera_router_kv_resets_total",
        "Times a rank's mirror was forgotten: a gap, or a publisher that began anew.",
        |rank| rank.resets.get(),
    ),
    ("infera_router_kv_orphans_total", "Blocks that came before their parent.", |rank| rank.orphans.get()),
    ("infera_router_kv_orphans_joined_total", "Orphans whose parent came.", |rank| rank.orphans_joined.get()),
    ("infera_router_kv_orphans_dropped_total", "Orphans dropped to keep the pool bounded.", |rank| {
        rank.orphans_dropped.get()
    }),
    (
        "infera_router_kv_block_size_mismatches_total",
        "Events whose block size differs from the registered one.",
        |rank| rank.block_size_mismatches.get(),
    ),
];

fn feeds(scrape: &Scrape, page: &MetricsPage, view: &View) -> Result<(), Error> {
    const LABELS: &[&str] = &["worker_id", "dp_rank"];
    let ranks: Vec<(&RankStatus, String)> = view
        .ranks
        .iter()
        .flatten()
        .filter(|rank| rank.endpoint.is_some())
        .map(|rank| (&**rank, rank.rank.to_string()))
        .collect();
    for (name, help, number) in RANK_GAUGES {
        let family = scrape.gauges(name, help, LABELS)?;
        for (rank, label) in &ranks {
            family.with_label_values(&[&*rank.worker_id, label]).set(signed(number(rank)));
        }
    }
    for (name, help, number) in RANK_COUNTERS {
        let family = scrape.counters(name, help, LABELS)?;
        for (rank, label) in &ranks {
            family.with_label_values(&[&*rank.worker_id, label]).inc_by(number(rank));
        }
    }
    let age = scrape.seconds(
        "infera_router_kv_events_age_seconds",
        "Seconds since the rank's last event message.",
        LABELS,
    )?;
    let skipped = scrape.counters(
        "infera_router_kv_events_skipped_total",
        "Events that were not applied, by reason.",
        &["worker_id", "dp_rank", "reason"],
    )?;
    let now_ns = page.ingest.now_ns();
    for (rank, label) in &ranks {
        if rank.last_message_ns.get() > 0 {
            let seconds = now_ns.saturating_sub(rank.last_message_ns.get()) as f64 / 1e9;
            age.with_label_values(&[&*rank.worker_id, label]).set(seconds);
        }
        for (reason, count) in SkipReason::NAMES.iter().zip(&rank.skipped) {
            skipped.with_label_values(&[&*rank.worker_id, label, reason]).inc_by(count.get());
        }
    }
    Ok(())
}

fn index(scrape: &Scrape, page: &MetricsPage, view: &View) -> Result<(), Error> {
    let stats = &page.ingest;
    scrape.gauge("infera_router_index_blocks", "Distinct blocks in the index.", stats.index_blocks.get())?;
    scrape.gauge("infera_router_index_runs", "Runs that the blocks of the index lie in.", stats.index_runs.get())?;
    scrape.gauge(
        "infera_router_index_views_retired",
        "Former views still held by a reader.",
        stats.views_retired.get(),
    )?;
    scrape.gauge("infera_router_index_version", "Number of the published view.", view.version)?;
    scrape.counter("infera_router_index_publications_total", "Views published.", stats.publications.get())?;
    scrape.counter(
        "infera_router_ledger_messages_total",
        "Bookings and releases counted.",
        stats.ledger_messages.get(),
    )?;
    scrape.counter(
        "infera_router_fleet_updates_total",
        "Sets of workers taken over from discovery.",
        stats.fleet_updates.get(),
    )
}

fn discovery(scrape: &Scrape, page: &MetricsPage) -> Result<(), Error> {
    let status = (page.discovery)();
    let state = scrape.gauges("infera_router_discovery_state", "1 for the state that discovery is in.", &["state"])?;
    for known in [State::Ok, State::Degraded, State::Down] {
        state.with_label_values(&[known.as_str()]).set(i64::from(known == status.state));
    }
    if let Some(age) = status.last_contact_age {
        let help = "Seconds since the slowest source of workers was last heard of.";
        let family = scrape.seconds("infera_router_discovery_contact_age_seconds", help, &[])?;
        family.with_label_values::<&str>(&[]).set(age.as_secs_f64());
    }
    let pending = status.workers_pending as u64;
    scrape.gauge("infera_router_discovery_workers_pending", "Workers known but not routable yet.", pending)?;
    scrape.counter(
        "infera_router_discovery_records_skipped_total",
        "Registration records that could not be used.",
        status.records_skipped_total,
    )
}

fn engine(scrape: &Scrape, page: &MetricsPage) -> Result<(), Error> {
    let Some(engine) = page.engine.get().and_then(|engine| engine.upgrade()) else { return Ok(()) };
    let driver = engine.driver();
    let family =
        scrape.gauges("infera_router_io_driver", "1 for the IO driver in use and its flags.", &["driver", "flags"])?;
    family.with_label_values(&[driver.name, &driver.flags.join("+")]).set(1);

    let shards = engine.stats();
    let open = scrape.gauges("infera_router_connections_open", "Client connections open.", &["shard"])?;
    let active = scrape.gauges("infera_router_requests_active", "Requests being served.", &["shard"])?;
    let idle =
        scrape.gauges("infera_router_upstream_connections_idle", "Upstream connections kept for reuse.", &["shard"])?;
    let counters = [
        ("infera_router_connections_total", "Client connections accepted."),
        ("infera_router_http_requests_total", "Requests read, all endpoints."),
        ("infera_router_upstream_connects_total", "Upstream connections opened."),
        ("infera_router_upstream_reuses_total", "Requests sent on an upstream connection that had served others."),
        ("infera_router_client_bytes_total", "Bytes written to clients."),
        ("infera_router_client_aborts_total", "Exchanges that ended because the client left or stopped reading."),
        ("infera_router_rejections_total", "Messages refused by the HTTP engine (framing, size, time)."),
        ("infera_router_tls_handshake_failures_total", "Client connections that ended in their TLS handshake."),
        ("infera_router_panics_total", "Panics caught in connection tasks."),
        ("infera_router_shard_sweeps_total", "Turns of the shard's clock; it stands still while the shard hangs."),
    ];
    let mut families = Vec::new();
    for (name, help) in counters {
        families.push(scrape.counters(name, help, &["shard"])?);
    }
    for (shard, stats) in shards.iter().enumerate() {
        let label = shard.to_string();
        open.with_label_values(&[&label]).set(signed(stats.connections_open));
        active.with_label_values(&[&label]).set(signed(stats.requests_active));
        idle.with_label_values(&[&label]).set(signed(stats.upstream_idle));
        let values = [
            stats.connections_accepted,
            stats.requests,
            stats.upstream_connects,
            stats.upstream_reuses,
            stats.bytes_to_client,
            stats.client_aborts,
            stats.rejections,
            stats.tls_failures,
            stats.panics,
            stats.sweeps,
        ];
        for (family, value) in families.iter().zip(values) {
            family.with_label_values(&[&label]).inc_by(value);
        }
    }
    Ok(())
}
