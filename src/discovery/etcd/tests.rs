//! What a black-box test cannot provoke reliably, against the real server.

#[path = "../../../tests/support/etcd.rs"]
mod real;

use super::*;
use crate::discovery::DiscoveryConfig;

/// Between list and watch, history up to beyond the list is compacted away: the server cancels the watch and says
/// at which revision. That must end the session (the next one lists again), not leave a dead watch behind.
#[test]
fn a_watch_behind_compaction_ends_the_session() {
    let etcd = real::Etcd::start();
    for _ in 0..5 {
        etcd.put("/p/w", "{}");
    }
    etcd.compact();
    let config = EtcdConfig { endpoints: vec![etcd.endpoint()], prefix: "/p/".to_owned(), roots: Vec::new() };
    let all = DiscoveryConfig { etcd: Some(config.clone()), ..DiscoveryConfig::default() };
    let (queue, _messages) = mpsc::channel(8);
    let mut source = EtcdSource::new(config, Timing::default(), queue, Arc::new(Shared::new(&all)));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let end = runtime.block_on(async {
        let client = Client::connect([etcd.endpoint()], None).await.unwrap();
        timeout(Duration::from_secs(20), source.watch(&client, 2)).await.expect("the cancellation is noticed")
    });
    let End::Failed(problem) = end.unwrap_err() else { panic!("stopped") };
    assert!(problem.starts_with("the watch fell behind compaction at revision "), "{problem}");
}
