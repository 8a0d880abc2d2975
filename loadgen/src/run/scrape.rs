//! Owns the target's own figures during a run: its `/metrics`, read now and then on a thread of its own, so that the
//! generator's thread does nothing for it. Never fails a run.

use std::collections::BTreeMap;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::driver::fetch;
use crate::net::client::Target;
use crate::net::exposition::samples;
use crate::net::runtime::block_on;
use crate::report::model::{Fleet, FleetWorker};

/// Families of `infera-router`; each has a sample per worker or rank.
const INFLIGHT: &str = "infera_router_inflight_requests";
const PICKS: &str = "infera_router_picks_total";
const BLOCKS: &str = "infera_router_target_blocks_total";
const BLOCKS_HIT: &str = "infera_router_target_blocks_hit_total";

/// Samples kept; a run that lasts longer is told without its end.
const SAMPLES_MAX: usize = 100_000;

/// A poll under way. Dropped, it ends without a result.
pub struct Scraper {
    stop: Sender<()>,
    thread: JoinHandle<Fleet>,
}

/// What one page says, by worker.
#[derive(Debug, Default, PartialEq)]
struct Page {
    workers: BTreeMap<String, WorkerPage>,
}

#[derive(Clone, Debug, Default, PartialEq)]
struct WorkerPage {
    inflight: Option<f64>,
    role: String,
    /// Picks, blocks, blocks hit.
    counts: [f64; 3],
}

impl Scraper {
    /// Reads `url` once, and then every so often; without a path it is `/metrics` there. What is counted before this
    /// returns is not the run's.
    ///
    /// # Errors
    /// A URL that is none.
    pub fn start(url: &str, every: Duration) -> Result<Scraper> {
        ensure!(!every.is_zero(), "metrics cannot be read without a pause");
        let target = Target::parse(url).context("--metrics-url")?;
        let path = if target.prefix.is_empty() { "/metrics" } else { "" };
        let source = format!("http://{}{}{path}", target.authority, target.prefix);
        let (stop, stopped) = mpsc::channel();
        let (begun, has_begun) = mpsc::channel::<()>();
        let poll = move || {
            let (start, mut series) = (Instant::now(), Series::new(source));
            let mut begun = Some(begun);
            for number in 1.. {
                let is_useful = series.read(&target, path, start);
                drop(begun.take());
                let next = start + every * number;
                let pause = next.saturating_duration_since(Instant::now());
                if !is_useful || stopped.recv_timeout(pause) != Err(RecvTimeoutError::Timeout) {
                    break;
                }
            }
            // Where the run ends between two samples, its last requests count too.
            series.read(&target, path, start);
            series.finish()
        };
        let thread = std::thread::Builder::new().name("scrape".into()).spawn(poll)?;
        // Nothing is ever sent: the other end goes with the first page.
        let _ = has_begun.recv();
        Ok(Scraper { stop, thread })
    }

    /// Reads once more and gives what was found; a page that is not there, or not the router's, is named in it.
    pub fn finish(self) -> Fleet {
        drop(self.stop);
        let failed = |_| Fleet { problem: Some("the thread that reads it failed".to_owned()), ..Fleet::default() };
        self.thread.join().unwrap_or_else(failed)
    }
}

struct Series {
    fleet: Fleet,
    first: Option<Page>,
    last: Page,
}

impl Series {
    fn new(source: String) -> Series {
        Series { fleet: Fleet { source, ..Fleet::default() }, first: None, last: Page::default() }
    }

    /// Whether another look is worth it: not where the target shows nothing of the kind.
    fn read(&mut self, target: &Target, path: &str, start: Instant) -> bool {
        let at = start.elapsed().as_secs_f64();
        let client_target = target.clone();
        let page = block_on(async move { fetch(client_target, path).await }).and_then(|page| page);
        match page {
            Ok((200, body)) => match Page::of(&String::from_utf8_lossy(&body)) {
                Some(page) => self.add(page, at),
                None if self.first.is_none() => {
                    self.fleet.problem = Some("it has none of infera-router's figures".to_owned());
                    return false;
                }
                None => {}
            },
            Ok((status, _)) => {
                self.fleet.problem = Some(format!("it answered {status}"));
                return self.first.is_some();
            }
            Err(error) => self.fleet.problem = Some(format!("{error:#}")),
        }
        true
    }

    fn add(&mut self, page: Page, at: f64) {
        if self.fleet.seconds.len() == SAMPLES_MAX {
            return;
        }
        let first = self.first.get_or_insert_with(|| Page { workers: page.workers.clone() });
        let rise = |count: usize| -> f64 {
            let before = |name: &String| first.workers.get(name).map_or(0.0, |worker| worker.counts[count]);
            page.workers.iter().map(|(name, worker)| worker.counts[count] - before(name)).sum()
        };
        self.fleet.blocks.push(rise(1));
        self.fleet.blocks_hit.push(rise(2));
        let known = self.fleet.seconds.len();
        for name in page.workers.keys() {
            if !self.fleet.workers.iter().any(|worker| worker.name == *name) {
                let inflight = vec![None; known];
                self.fleet.workers.push(FleetWorker { name: name.clone(), inflight, ..FleetWorker::default() });
            }
        }
        for worker in &mut self.fleet.workers {
            worker.inflight.push(page.workers.get(&worker.name).and_then(|it| it.inflight));
        }
        self.fleet.seconds.push((at * 1000.0).round() / 1000.0);
        self.last.workers.extend(page.workers);
    }

    fn finish(self) -> Fleet {
        let mut fleet = self.fleet;
        let first = self.first.unwrap_or_default();
        for worker in &mut fleet.workers {
            let before = first.workers.get(&worker.name).map_or([0.0; 3], |page| page.counts);
            let Some(last) = self.last.workers.get(&worker.name) else { continue };
            let [picks, blocks, blocks_hit] = [0, 1, 2].map(|count| last.counts[count] - before[count]);
            (worker.picks, worker.blocks, worker.blocks_hit) = (picks, blocks, blocks_hit);
            worker.role.clone_from(&last.role);
        }
        fleet
    }
}

impl Page {
    /// `None` for a page of something else.
    fn of(text: &str) -> Option<Page> {
        let mut page = Page::default();
        for sample in samples(text) {
            let label = if sample.name == INFLIGHT { "target" } else { "worker_id" };
            let place = match sample.name {
                INFLIGHT => None,
                PICKS => Some(0),
                BLOCKS => Some(1),
                BLOCKS_HIT => Some(2),
                _ => continue,
            };
            let Some(name) = sample.label(label) else { continue };
            let worker = page.workers.entry(name.into_owned()).or_default();
            match place {
                None => worker.inflight = Some(sample.value),
                Some(place) => {
                    worker.counts[place] += sample.value;
                    worker.role = sample.label("role").unwrap_or_default().into_owned();
                }
            }
        }
        (!page.workers.is_empty()).then_some(page)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(inflight: &[(&str, f64)], counts: &[(&str, [f64; 3])]) -> Page {
        let mut text = "# HELP x y\nother 3\n".to_owned();
        for (name, value) in inflight {
            text += &format!("{INFLIGHT}{{target=\"{name}\"}} {value}\n");
        }
        for (name, values) in counts {
            for (family, value) in [PICKS, BLOCKS, BLOCKS_HIT].iter().zip(values) {
                text += &format!("{family}{{role=\"mixed\",worker_id=\"{name}\"}} {value}\n");
            }
        }
        Page::of(&text).unwrap()
    }

    #[test]
    fn workers_come_and_go_and_only_the_run_counts() {
        let mut series = Series::new("here".into());
        series.add(page(&[("a", 1.0)], &[("a", [100.0, 1000.0, 500.0])]), 0.0);
        series.add(page(&[("a", 3.0), ("b", 2.0)], &[("a", [110.0, 1100.0, 580.0]), ("b", [5.0, 50.0, 0.0])]), 1.0);
        series.add(page(&[("b", 0.0)], &[("b", [9.0, 90.0, 30.0])]), 2.0);
        let fleet = series.finish();
        assert_eq!(fleet.seconds, [0.0, 1.0, 2.0]);
        let told =
            |worker: &FleetWorker| (worker.name.clone(), worker.inflight.clone(), worker.picks, worker.blocks_hit);
        assert_eq!(told(&fleet.workers[0]), ("a".into(), vec![Some(1.0), Some(3.0), None], 10.0, 80.0));
        assert_eq!(told(&fleet.workers[1]), ("b".into(), vec![None, Some(2.0), Some(0.0)], 9.0, 30.0));
        assert_eq!((fleet.blocks[1], fleet.blocks_hit[1], fleet.problem), (150.0, 80.0, None));
    }

    #[test]
    fn a_page_of_something_else_is_none() {
        assert_eq!(Page::of("vllm:num_requests_running 3\n"), None);
        assert_eq!(Page::of(""), None);
    }

    #[test]
    fn a_target_without_metrics_is_named_and_left_alone() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        drop(listener);
        let scraper = Scraper::start(&url, Duration::from_secs(60)).unwrap();
        let fleet = scraper.finish();
        assert_eq!(fleet.source, format!("{url}/metrics"));
        assert!(fleet.problem.unwrap().contains("cannot connect") && fleet.seconds.is_empty());
        assert!(Scraper::start("ftp://x", Duration::from_secs(1)).is_err());
    }
}
