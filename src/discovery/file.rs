//! The workers file as a source: read again when it changes; a bad file or record never removes a worker.

use std::fs;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::{mpsc, watch};

use super::registry::Message;
use super::source::{Registration, Set};
use super::status::{Shared, SourceKind};
use crate::limits;
use crate::worker::WorkerRecord;

/// A file changed within this time may change again without a new modification time (coarse clocks).
const MTIME_SETTLED: Duration = Duration::from_secs(2);

/// What tells two states of a file apart without reading it.
type Stamp = (u64, u64, i64, i64);

/// One look at the file.
enum Look {
    Unchanged,
    Content(Stamp, Vec<u8>),
}

/// Follows the file that `paths` names, while it names one. Every write to `paths` makes it look at once.
pub(super) async fn run(
    mut paths: watch::Receiver<Option<PathBuf>>,
    poll: Duration,
    queue: mpsc::Sender<Message>,
    shared: Arc<Shared>,
) {
    loop {
        let path = paths.borrow_and_update().clone();
        let Some(path) = path else {
            if paths.changed().await.is_err() {
                return;
            }
            continue;
        };
        if follow(path, poll, &mut paths, &queue, &shared).await {
            return;
        }
        // Another file's workers take the place of these ones when it has been read; no file has none.
        let is_left = paths.borrow().is_none();
        if is_left && queue.send(Message::Source(SourceKind::File, Set::default())).await.is_err() {
            return;
        }
    }
}

/// Until another file is named; tells whether everything is over.
async fn follow(
    path: PathBuf,
    poll: Duration,
    paths: &mut watch::Receiver<Option<PathBuf>>,
    queue: &mpsc::Sender<Message>,
    shared: &Shared,
) -> bool {
    let mut stamp: Option<Stamp> = None;
    let mut content: Option<Vec<u8>> = None;
    let mut trouble = String::new();
    loop {
        let look = {
            let path = path.clone();
            tokio::task::spawn_blocking(move || look(&path, stamp)).await
        };
        let result = match look {
            Ok(Ok(Look::Unchanged)) => None,
            Ok(Ok(Look::Content(new_stamp, bytes))) => {
                stamp = Some(new_stamp);
                if content.as_ref() == Some(&bytes) {
                    None
                } else {
                    let parsed = parse(&bytes);
                    content = Some(bytes);
                    Some(parsed)
                }
            }
            // The stamp is forgotten, so that a file which comes back unchanged is read again.
            Ok(Err(error)) => {
                stamp = None;
                content = None;
                Some(Err(error))
            }
            Err(error) => Some(Err(error.to_string())),
        };
        match result {
            // A file that was bad stays bad until its content changes.
            None if trouble.is_empty() => shared.contact(SourceKind::File, Instant::now()),
            None => {}
            Some(Ok(workers)) => {
                trouble.clear();
                shared.contact(SourceKind::File, Instant::now());
                shared.skipped(workers.problems.len() as u64);
                for problem in workers.problems.iter().chain(&workers.notes) {
                    tracing::warn!(file = %path.display(), "workers file: {problem}");
                }
                tracing::info!(file = %path.display(), workers = workers.set.registrations.len(), "workers file read");
                if queue.send(Message::Source(SourceKind::File, workers.set)).await.is_err() {
                    return true;
                }
            }
            Some(Err(problem)) => {
                if problem != trouble {
                    tracing::warn!(file = %path.display(), "workers file: {problem}; the last good content stays in force");
                }
                shared.trouble(SourceKind::File, problem.clone());
                trouble = problem;
            }
        }
        // A wait that is over looks again; so does a write.
        match tokio::time::timeout(poll, paths.changed()).await {
            Err(_) => {}
            Ok(Err(_)) => return true,
            Ok(Ok(())) if paths.borrow_and_update().as_ref() == Some(&path) => stamp = None,
            Ok(Ok(())) => return false,
        }
    }
}

/// The whole file, once.
pub(super) fn read(path: &Path) -> Result<FileWorkers, String> {
    match look(path, None)? {
        Look::Content(_, bytes) => parse(&bytes),
        Look::Unchanged => Err("nothing was read".to_owned()),
    }
}

fn look(path: &Path, known: Option<Stamp>) -> Result<Look, String> {
    let mut file = fs::File::open(path).map_err(|error| error.to_string())?;
    let metadata = file.metadata().map_err(|error| error.to_string())?;
    let stamp = (metadata.ino(), metadata.len(), metadata.mtime(), metadata.mtime_nsec());
    let settled = metadata
        .modified()
        .ok()
        .and_then(|modified| SystemTime::now().duration_since(modified).ok())
        .is_some_and(|age| age > MTIME_SETTLED);
    if known == Some(stamp) && settled {
        return Ok(Look::Unchanged);
    }
    let mut bytes = Vec::new();
    let limit = limits::WORKERS_FILE_BYTES_MAX;
    file.by_ref().take(limit + 1).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    if bytes.len() as u64 > limit {
        return Err(format!("longer than {limit} bytes"));
    }
    Ok(Look::Content(stamp, bytes))
}

/// A readable file: its workers, and what was left out of it.
#[derive(Debug)]
pub(super) struct FileWorkers {
    pub set: Set,
    /// Skipped records.
    pub problems: Vec<String>,
    /// Ignored members.
    pub notes: Vec<String>,
}

/// Parses the whole file. An error means that nothing of it can be used, and names line and column.
pub(super) fn parse(bytes: &[u8]) -> Result<FileWorkers, String> {
    let values: Vec<serde_json::Value> =
        serde_json::from_slice(bytes).map_err(|error| format!("not a JSON array of records: {error}"))?;
    let mut workers = FileWorkers { set: Set::default(), problems: Vec::new(), notes: Vec::new() };
    for (index, value) in values.into_iter().enumerate() {
        let name = value.get("worker_id").and_then(|id| id.as_str()).unwrap_or("no worker_id").to_owned();
        if index >= limits::WORKERS_MAX {
            workers
                .problems
                .push(format!("record {index} ({name}) skipped: more than {} workers", limits::WORKERS_MAX));
            continue;
        }
        match WorkerRecord::from_value(value) {
            Ok(parsed) => {
                workers.notes.extend(parsed.notes.into_iter().map(|note| format!("record {index} ({name}): {note}")));
                // Among records with one id the last one counts, as in any configuration file.
                let freshness = index as i64;
                let registration = Registration { source: SourceKind::File, record: parsed.record, freshness };
                workers.set.registrations.push(Arc::new(registration));
            }
            Err(error) => workers.problems.push(format!("record {index} ({name}) skipped: {error}")),
        }
    }
    Ok(workers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bad_record_costs_itself_and_a_bad_file_nothing() {
        let ids = |workers: &FileWorkers| -> Vec<String> {
            workers.set.registrations.iter().map(|one| one.record.worker_id.clone()).collect()
        };
        let workers = parse(
            br#"[{"worker_id":"a","url":"http://h:1","kv_block_size":0},
            {"worker_id":"b","url":"http://h:2","status":null}, 7, {"worker_id":"c","url":"http://h:3"}]"#,
        )
        .unwrap();
        assert_eq!(ids(&workers), ["a", "c"]);
        assert_eq!(
            workers.problems,
            [
                "record 1 (b) skipped: `status` is null; leave it out instead",
                "record 2 (no worker_id) skipped: not a JSON object"
            ]
        );
        assert_eq!(workers.notes.len(), 1, "{:?}", workers.notes);
        assert_eq!(ids(&parse(b"[]").unwrap()), Vec::<String>::new());

        for (content, place) in [
            (&b""[..], "line 1 column 0"),
            (b"[\n {\"worker_id\":\"a\",}]", "line 2 column 19"),
            (b"{\"workers\":[]}", "line 1 column 0"),
            (b"[]]", "line 1 column 3"),
        ] {
            let error = parse(content).map(|workers| ids(&workers)).unwrap_err();
            assert!(error.contains("not a JSON array of records") && error.contains(place), "{error}");
        }
    }
}
