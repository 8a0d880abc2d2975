//! What every source hands to the registry: whole sets, never differences, so that a lost message costs nothing
//! but time. And the merging of the sets into one. Pure.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use super::status::SourceKind;
use crate::worker::WorkerRecord;

/// One record as a source holds it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Registration {
    pub source: SourceKind,
    pub record: WorkerRecord,
    /// Larger is newer, within one source (etcd: modification revision).
    pub freshness: i64,
}

/// The whole content of a source.
#[derive(Clone, Debug, Default)]
pub(super) struct Set {
    pub registrations: Vec<Arc<Registration>>,
    /// Departures in this set may be the registry's fault (a fresh cluster, an outage just over) rather than the
    /// workers': they are kept for a grace time while they answer.
    pub departures_suspect: bool,
}

/// One registration per worker, by id. A worker is known twice when two registrations share the id, or the URL and
/// rank: then the command line goes before the file, the file before etcd, and within a source the newer one
/// before the older (a worker that came back under another id, while the old lease still runs).
pub(super) fn merge<'a>(sets: impl Iterator<Item = &'a Arc<Registration>>) -> BTreeMap<String, Arc<Registration>> {
    let mut ordered: Vec<&Arc<Registration>> = sets.collect();
    ordered.sort_by(|a, b| {
        (a.source, -a.freshness, &a.record.worker_id).cmp(&(b.source, -b.freshness, &b.record.worker_id))
    });
    let mut merged = BTreeMap::new();
    let mut places = HashSet::new();
    for registration in ordered {
        let record = &registration.record;
        if merged.contains_key(&record.worker_id) {
            continue;
        }
        let place = record.endpoint().map(|url| (url.is_tls, url.authority, url.base_path, record.dp_rank));
        if let Ok(place) = place
            && !places.insert(place)
        {
            tracing::debug!(
                worker = record.worker_id,
                url = record.url,
                "another registration has the same URL; skipped"
            );
            continue;
        }
        merged.insert(record.worker_id.clone(), registration.clone());
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    fn registration(source: SourceKind, id: &str, url: &str, freshness: i64) -> Arc<Registration> {
        Arc::new(Registration { source, record: WorkerRecord::new(id, url), freshness })
    }

    #[track_caller]
    fn check(registrations: &[Arc<Registration>], expected: &[(&str, &str)]) {
        let merged = merge(registrations.iter());
        let found: Vec<_> =
            merged.values().map(|one| (one.record.worker_id.as_str(), one.record.url.as_str())).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn b41_duplicates_are_merged() {
        use SourceKind::{CommandLine, Etcd, File};
        // Same id: the command line goes before the registry.
        check(
            &[registration(Etcd, "a", "http://x:1", 9), registration(CommandLine, "a", "http://y:1", 0)],
            &[("a", "http://y:1")],
        );
        // Same place in two spellings.
        check(
            &[registration(File, "b", "http://H:1/", 1), registration(Etcd, "a", "http://h:1", 9)],
            &[("b", "http://H:1/")],
        );
        // A worker that came back under another id while the old lease runs: the newer registration.
        check(
            &[registration(Etcd, "a-old", "http://h:1", 5), registration(Etcd, "z-new", "http://h:1", 9)],
            &[("z-new", "http://h:1")],
        );
        // Another path is another worker; so is another rank at the same place.
        let mut ranks = [registration(Etcd, "r0", "http://h:1", 1), registration(Etcd, "r1", "http://h:1", 1)];
        for (rank, one) in ranks.iter_mut().enumerate() {
            Arc::get_mut(one).expect("not shared").record.dp_rank = Some(rank as u32);
        }
        check(&ranks, &[("r0", "http://h:1"), ("r1", "http://h:1")]);
        check(
            &[registration(Etcd, "a", "http://h:1/a", 1), registration(Etcd, "b", "http://h:1/b", 1)],
            &[("a", "http://h:1/a"), ("b", "http://h:1/b")],
        );
    }
}
