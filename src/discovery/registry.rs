//! The discovery thread's main loop.
use super::{DiscoveryConfig, status::Shared};
use crate::fleet::DiscoveredWorker;
use std::sync::Arc;

pub(super) async fn run(
    _config: DiscoveryConfig,
    _shared: Arc<Shared>,
    _on_update: impl Fn(Vec<DiscoveredWorker>) + Send + 'static,
    stopped: tokio::sync::oneshot::Receiver<()>,
) {
    let _ = stopped.await;
}
