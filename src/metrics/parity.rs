//! Families about whether workers render prompts as this router does, read at the scrape: gone with their workers, but
//! for the totals. Names of the gauge and of the total by model: AMD's Infera.

use std::collections::BTreeMap;

use prometheus::Error;

use super::live::{Scrape, signed};
use crate::fleet::{Fleet, Parity};
use crate::parity::{Finding, ParityCounts};
use crate::prompt::Variant;

pub(super) fn families(scrape: &Scrape, counts: &ParityCounts, fleet: &Fleet) -> Result<(), Error> {
    let help =
        "Whether the worker's token ids are this router's: 1 confirmed, 0 diverged, -1 unknown; over all its ranks.";
    let family = scrape.gauges("infera_router_render_parity", help, &["worker_id", "model"])?;
    let mut workers: BTreeMap<(&str, &str), Parity> = BTreeMap::new();
    for target in &fleet.targets {
        let worker = &target.worker;
        let verdict = workers.entry((&worker.id, &worker.record.model_name)).or_default();
        *verdict = verdict.and(target.parity.verdict());
    }
    for ((worker_id, model), verdict) in workers {
        family.with_label_values(&[worker_id, model]).set(verdict.gauge());
    }
    let help = "1 for the template arguments that the worker's engine is known to add to every chat.";
    let variants = scrape.gauges("infera_router_render_variant", help, &["worker_id", "variant"])?;
    for worker in &fleet.workers {
        let arguments = worker.record.default_chat_template_kwargs.as_ref();
        if let Some(variant) = arguments.and_then(|arguments| Variant::of(arguments).ok()) {
            variants.with_label_values(&[&*worker.id, variant.label()]).set(1);
        }
    }
    let help = "Watched requests in a row whose blocks the target's KV events have never shown.";
    let unseen = scrape.gauges("infera_router_render_parity_unseen", help, &["target"])?;
    for target in &fleet.targets {
        unseen.with_label_values(&[&*target.route_key]).set(signed(target.parity.unseen().into()));
    }
    let help = "Watched requests, by what the worker's KV events have said of them.";
    let checks = scrape.counters("infera_router_render_parity_checks_total", help, &["result"])?;
    for (result, count) in Finding::NAMES.iter().zip(&counts.findings) {
        checks.with_label_values(&[result]).inc_by(count.get());
    }
    let help = "Times that a target was found to render prompts otherwise than this router.";
    let diverged = scrape.counters("infera_router_render_parity_diverged_total", help, &["model"])?;
    for (model, count) in counts.diverged_by_model() {
        diverged.with_label_values(&[&model]).inc_by(count);
    }
    Ok(())
}
