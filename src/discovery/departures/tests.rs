//! The departure rule, step by step, with the clock as an argument.

use super::*;
use crate::discovery::status::SourceKind;
use crate::worker::WorkerRecord;

const GRACE: Duration = Duration::from_secs(60);

struct Fleet {
    departures: Departures,
    start: Instant,
}

impl Fleet {
    fn new(ids: &[&str]) -> Self {
        let mut fleet = Fleet { departures: Departures::default(), start: Instant::now() };
        fleet.apply(0.0, ids, false);
        fleet
    }

    fn at(&self, seconds: f64) -> Instant {
        self.start + Duration::from_secs_f64(seconds)
    }

    fn apply(&mut self, seconds: f64, ids: &[&str], suspect: bool) {
        let set = ids.iter().map(|id| {
            let record = WorkerRecord::new(*id, format!("http://{id}:1"));
            Arc::new(Registration { source: SourceKind::Etcd, record, freshness: 1 })
        });
        let now = self.at(seconds);
        self.departures.apply(set.collect(), suspect, GRACE, now);
    }

    #[track_caller]
    fn check(&self, serving: &[&str], held: usize) {
        let mut ids: Vec<_> =
            self.departures.serving().map(|registration| registration.record.worker_id.as_str()).collect();
        ids.sort_unstable();
        assert_eq!((ids.as_slice(), self.departures.held().len()), (serving, held));
    }
}

#[test]
fn single_departures_act_at_once() {
    let mut fleet = Fleet::new(&["a", "b", "c", "d"]);
    fleet.apply(1.0, &["a", "b", "c"], false);
    fleet.check(&["a", "b", "c"], 0);
    // Beyond the window the next one is again single.
    fleet.apply(5.0, &["a", "b"], false);
    fleet.check(&["a", "b"], 0);
    fleet.apply(9.0, &["a"], false);
    fleet.apply(13.0, &[], false);
    fleet.check(&[], 0);
}

#[test]
fn b46_leases_that_expire_together_empty_nothing() {
    let mut fleet = Fleet::new(&["a", "b", "c", "d"]);
    // The registry revokes one lease after another: the first departure looks single and acts.
    fleet.apply(1.0, &["b", "c", "d"], false);
    fleet.check(&["b", "c", "d"], 0);
    // With the second it is half of the fleet: both are back, as kept ones.
    fleet.apply(1.1, &["c", "d"], false);
    fleet.check(&["a", "b", "c", "d"], 2);
    fleet.apply(1.2, &["d"], false);
    fleet.apply(1.3, &[], false);
    fleet.check(&["a", "b", "c", "d"], 4);
    // Registering again ends the keeping, worker by worker.
    fleet.apply(20.0, &["c"], false);
    fleet.check(&["a", "b", "c", "d"], 3);
    fleet.apply(30.0, &["a", "b", "c", "d"], false);
    fleet.check(&["a", "b", "c", "d"], 0);
}

#[test]
fn kept_workers_leave_when_they_stop_answering_or_time_is_over() {
    let mut fleet = Fleet::new(&["a", "b", "c"]);
    fleet.apply(1.0, &[], false);
    fleet.check(&["a", "b", "c"], 3);
    assert!(!fleet.departures.probed("a", false), "one unanswered question may be a busy engine");
    assert!(!fleet.departures.probed("a", true));
    assert!(!fleet.departures.probed("a", false));
    assert!(fleet.departures.probed("a", false));
    assert!(!fleet.departures.probed("a", false), "already gone");
    fleet.check(&["b", "c"], 2);
    assert_eq!(fleet.departures.next_deadline(), Some(fleet.at(61.0)));
    assert!(!fleet.departures.expire(fleet.at(60.9)));
    assert!(fleet.departures.expire(fleet.at(61.0)));
    fleet.check(&[], 0);
    assert_eq!(fleet.departures.next_deadline(), None);
}

#[test]
fn a_suspect_source_loses_no_one_but_revives_no_one() {
    let mut fleet = Fleet::new(&["a", "b", "c", "d", "e"]);
    fleet.apply(1.0, &["b", "c", "d", "e"], false);
    fleet.apply(2.0, &["c", "d", "e"], true);
    // `a` left on its own account before; `b` is kept although it is alone.
    fleet.check(&["b", "c", "d", "e"], 1);
    // The only worker of a fleet is kept after an outage too.
    let mut single = Fleet::new(&["a"]);
    single.apply(1.0, &[], true);
    single.check(&["a"], 1);
}

#[test]
fn of_two_registrations_with_one_id_the_newer_counts() {
    let mut departures = Departures::default();
    let registration = |url: &str, freshness| {
        Arc::new(Registration { source: SourceKind::Etcd, record: WorkerRecord::new("w", url), freshness })
    };
    let set = vec![registration("http://new:1", 9), registration("http://old:1", 5)];
    departures.apply(set, false, GRACE, Instant::now());
    let serving: Vec<_> = departures.serving().map(|registration| registration.record.url.as_str()).collect();
    assert_eq!(serving, ["http://new:1"]);
}
