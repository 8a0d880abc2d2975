//! What picks consult besides the cost of a target: sessions, images, recent load and decode demand. One per
//! process, shared by all shards; everything in it is atomics, but for the demand's own critical section.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Instant;

use infera_shards::Head;
use prometheus::{IntCounterVec, Opts, Registry};
use xxhash_rust::xxh3::xxh3_128_with_seed;

use crate::decode_demand::{DecodeDemand, DemandMetrics, Mode};
use crate::fleet::RecordId;
use crate::limits;
use crate::route::affinity::{ClockSeconds, Lease, NoSession, SessionAffinity, SessionKey, SessionTable, session_name};
use crate::route::{ImageTable, LoadTerm, PickCounter, RecentLoad};
use crate::worker::Role;

/// Fixed for the life of the process.
#[derive(Clone, Debug, PartialEq)]
pub struct SteeringSettings {
    /// `--decode-input-demand`.
    pub demand: Mode,
    /// `--decode-request-weight`, tokens per request held.
    pub request_weight: f64,
    /// `--session-affinity`.
    pub sessions: SessionAffinity,
    /// `--session-affinity-header`, lower case.
    pub session_headers: Vec<String>,
    /// `--session-affinity-ttl-s`.
    pub session_ttl_s: u32,
    /// `--session-affinity-capacity`, per role.
    pub sessions_max: usize,
    /// `--kv-recent-load`.
    pub recent_load: RecentLoad,
    /// `--kv-load`.
    pub load_term: LoadTerm,
}

pub struct Steering {
    /// Absent when the mode is off: nothing is counted then.
    pub demand: Option<DecodeDemand>,
    /// Absent when the mode is off: no header is read then.
    pub sessions: Option<Sessions>,
    pub images: ImageTable,
    pub recent_load: RecentLoad,
    pub load_term: LoadTerm,
    pub picks: PickCounter,
}

impl Steering {
    /// Registers the metrics of what is switched on.
    pub fn new(settings: &SteeringSettings, registry: &Registry) -> Result<Self, prometheus::Error> {
        let demand = match settings.demand {
            Mode::Off => None,
            mode => DecodeDemand::new(mode, settings.request_weight, DemandMetrics::new(registry)?),
        };
        let sessions = match settings.sessions {
            SessionAffinity::Off => None,
            _ => Some(Sessions::new(settings, registry)?),
        };
        Ok(Self {
            demand,
            sessions,
            images: ImageTable::default(),
            recent_load: settings.recent_load,
            load_term: settings.load_term,
            picks: PickCounter::default(),
        })
    }
}

/// A session's name as a request gave it, hashed: nothing keeps the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionName(u128);

/// Which headers name sessions, and the table of each role that follows them.
pub struct Sessions {
    headers: Vec<String>,
    /// Random per process.
    secret: u64,
    tables: Vec<(Role, Arc<SessionTable>)>,
    ignored: IntCounterVec,
}

impl Sessions {
    fn new(settings: &SteeringSettings, registry: &Registry) -> Result<Self, prometheus::Error> {
        let ignored = IntCounterVec::new(
            Opts::new(
                "infera_router_session_ignored_total",
                "Requests whose session header could not be used, and that were routed as if they had none.",
            ),
            &["reason"],
        )?;
        registry.register(Box::new(ignored.clone()))?;
        let started = Instant::now();
        // From 1 on, so that no turn of the first second looks as old as a place never used.
        let clock_s: ClockSeconds = Arc::new(move || started.elapsed().as_secs() as u32 + 1);
        let tables = [Role::Prefill, Role::Decode, Role::Mixed]
            .into_iter()
            .filter(|role| settings.sessions.covers(*role))
            .map(|role| {
                let table = SessionTable::new(settings.sessions_max, settings.session_ttl_s, clock_s.clone());
                (role, Arc::new(table))
            })
            .collect();
        let secret = RandomState::new().hash_one(std::process::id());
        Ok(Self { headers: settings.session_headers.clone(), secret, tables, ignored })
    }

    /// The session that a request belongs to, or why it has none.
    pub fn read(&self, head: &Head) -> Result<SessionName, NoSession> {
        let values = self.headers.iter().flat_map(|name| head.get_all(name));
        session_name(values).map(|name| SessionName(xxh3_128_with_seed(name, self.secret)))
    }

    /// The same. A header that cannot be used is counted, never refused.
    pub fn name_of(&self, head: &Head) -> Option<SessionName> {
        let reason = match self.read(head) {
            Ok(name) => return Some(name),
            Err(NoSession::Absent) => return None,
            Err(refused) => refused.as_str(),
        };
        self.ignored.with_label_values(&[reason]).inc();
        None
    }

    /// The session's place among those of a model and role; nothing for a role that does not follow sessions.
    pub fn turn(&self, name: SessionName, model: &str, role: Role) -> Option<Turn<'_>> {
        let (_, table) = self.tables.iter().find(|(covered, _)| *covered == role)?;
        Some(Turn { table, key: SessionKey::new(self.secret, model, role, &name.0.to_le_bytes()) })
    }

    /// Tables by role, for the metrics page.
    pub fn tables(&self) -> &[(Role, Arc<SessionTable>)] {
        &self.tables
    }
}

/// One pick of one session.
#[derive(Clone, Copy)]
pub struct Turn<'a> {
    table: &'a Arc<SessionTable>,
    key: SessionKey,
}

impl Turn<'_> {
    /// See [`SessionTable::peek`].
    pub fn peek(&self, may_serve: impl Fn(RecordId) -> bool) -> Option<RecordId> {
        self.table.peek(self.key, may_serve)
    }

    /// See [`SessionTable::follow`].
    pub fn follow(&self, may_serve: impl Fn(RecordId) -> bool) -> Option<Lease> {
        self.table.follow(self.key, may_serve)
    }

    /// See [`SessionTable::claim`].
    pub fn claim(&self, record: RecordId, may_serve: impl Fn(RecordId) -> bool) -> Option<Lease> {
        self.table.claim(self.key, record, may_serve)
    }
}

impl Default for SteeringSettings {
    fn default() -> Self {
        Self {
            demand: Mode::Off,
            request_weight: 0.0,
            sessions: SessionAffinity::Off,
            session_headers: vec![crate::route::affinity::DEFAULT_HEADER.to_owned()],
            session_ttl_s: 3600,
            sessions_max: limits::SESSIONS_MAX,
            recent_load: RecentLoad::default(),
            load_term: LoadTerm::default(),
        }
    }
}
