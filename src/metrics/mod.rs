//! The metrics page: the request path's registry as it is, and everything else read from live state at the
//! moment of the scrape, so that no series outlives what it describes. Never touches a request.

mod departed;
mod live;
mod parity;
mod steering;

use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

use infera_shards::Engine;
use prometheus::{Encoder, TextEncoder};

use crate::discovery::Status;
use crate::index::SharedView;
use crate::ingest::IngestStats;
use crate::prompt::Prompter;
use crate::proxy::{RequestMetrics, Steering};

pub use departed::DepartedSeries;

/// Reads discovery's state at the moment of the scrape.
pub type StatusReader = Box<dyn Fn() -> Status + Send + Sync>;

/// Renders the page. One per process; one scrape at a time, as the control thread is one.
pub struct MetricsPage {
    pub(crate) requests: Arc<RequestMetrics>,
    pub(crate) steering: Arc<Steering>,
    pub(crate) view: SharedView,
    pub(crate) ingest: Arc<IngestStats>,
    discovery: StatusReader,
    engine: Arc<OnceLock<Weak<Engine>>>,
    prompter: Option<Arc<Prompter>>,
    pub(crate) started: Instant,
}

impl MetricsPage {
    pub fn new(
        requests: Arc<RequestMetrics>,
        steering: Arc<Steering>,
        view: SharedView,
        ingest: Arc<IngestStats>,
        discovery: StatusReader,
        engine: Arc<OnceLock<Weak<Engine>>>,
    ) -> Self {
        Self { requests, steering, view, ingest, discovery, engine, prompter: None, started: Instant::now() }
    }

    /// Shows the prompt side's counters too.
    pub fn with_prompter(mut self, prompter: Option<Arc<Prompter>>) -> Self {
        self.prompter = prompter;
        self
    }

    /// Drops the series of workers that left a while ago. To be called every few seconds.
    pub fn forget_departed(&self, departed: &mut DepartedSeries, now: Instant) {
        departed.look(now, &self.view.load().fleet, &self.requests.targets);
    }

    /// Prometheus text format 0.0.4.
    pub fn render(&self) -> String {
        let mut page = Vec::new();
        let mut families = self.requests.registry().gather();
        match live::families(self) {
            Ok(live) => families.extend(live),
            Err(error) => tracing::error!(%error, "live metrics could not be built"),
        }
        families.sort_by(|a, b| a.name().cmp(b.name()));
        if let Err(error) = TextEncoder::new().encode(&families, &mut page) {
            tracing::error!(%error, "the metrics page could not be written");
        }
        String::from_utf8_lossy(&page).into_owned()
    }
}
