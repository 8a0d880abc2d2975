//! Owns what is asked: sessions of a recipe, a trace or a recording, and the requests of each in order. Never sends
//! anything and never reads a clock.

use std::sync::Arc;

use serde::Serialize;

use super::endpoint::Endpoint;
use super::recording::Recorded;
use super::render::{Chat, Renderer};
use crate::plan::trace::{TraceLine, replayed};
use crate::plan::{Recipe, Session, Sessions};

/// Where requests come from.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Source {
    Generated(Recipe),
    /// A trace in Mooncake's format: lengths and shared blocks are the trace's, the text is made of its ids.
    Trace {
        file: String,
        #[serde(skip)]
        lines: Arc<Vec<TraceLine>>,
    },
    /// Requests as they were recorded, byte for byte.
    Recording {
        file: String,
        #[serde(skip)]
        requests: Arc<Vec<Recorded>>,
    },
}

/// A reproducible set of requests: equal values give equal bodies (where histories quote the server: given a server that
/// gives equal answers).
#[derive(Clone, Debug, Serialize)]
pub struct Workload {
    pub source: Source,
    /// What generated requests and those of a trace are sent to.
    pub endpoint: Endpoint,
    pub requests: usize,
    pub model: String,
    pub stream: bool,
    pub seed: u64,
    /// Histories quote answers from the seed in place of the server's own.
    pub scripted_answers: bool,
}

/// One request, ready to be sent.
#[derive(Clone, Debug, PartialEq)]
pub struct Prepared {
    /// Place among all requests of the run.
    pub index: usize,
    pub path: Arc<str>,
    pub body: String,
    /// Tokens asked for; 0 where only the body knows.
    pub answer_tokens: usize,
    /// From the end of the answer before, nanoseconds; 0 for a session's first.
    pub pause_ns: u64,
    /// Whether the session goes on and quotes the answer.
    pub wants_text: bool,
}

/// All sessions of a run, with what it takes to write their requests. For one thread.
pub struct Plan {
    sessions: Kept,
    /// Index of each session's first request.
    first: Vec<usize>,
    renderer: Renderer,
    scripted_answers: bool,
    endpoint: Endpoint,
    path: Arc<str>,
    requests: usize,
}

enum Kept {
    Drawn { sessions: Vec<Session>, is_replay: bool },
    Recorded(Arc<Vec<Recorded>>),
}

/// How far a session has come.
#[derive(Clone, Debug)]
pub struct Script {
    pub number: usize,
    turn: usize,
    chat: Chat,
}

impl Workload {
    /// Requests of a recipe, histories with the server's own answers.
    pub fn generated(recipe: Recipe, requests: usize, model: &str, seed: u64) -> Workload {
        let (source, endpoint) = (Source::Generated(recipe), Endpoint::Chat);
        Workload { source, endpoint, requests, model: model.into(), stream: true, seed, scripted_answers: false }
    }

    /// The sessions. Exactly `requests` requests, or as many as a recording has.
    pub fn plan(&self) -> Plan {
        let (has_tools, image_bytes) = match &self.source {
            Source::Generated(recipe) => (recipe.has_tools, recipe.images.as_ref().map_or(0, |it| it.bytes)),
            _ => (false, 0),
        };
        let sessions = match &self.source {
            Source::Generated(recipe) => {
                let sessions = drawn(recipe, self.requests, self.seed);
                Kept::Drawn { sessions, is_replay: false }
            }
            Source::Trace { lines, .. } => {
                let mut sessions = replayed(lines, self.seed);
                sessions.truncate(self.requests);
                Kept::Drawn { sessions, is_replay: true }
            }
            Source::Recording { requests, .. } => Kept::Recorded(requests.clone()),
        };
        let turns: Vec<usize> = match &sessions {
            Kept::Drawn { sessions, .. } => sessions.iter().map(|session| session.turns.len()).collect(),
            Kept::Recorded(recorded) => vec![1; recorded.len().min(self.requests)],
        };
        let mut requests = 0;
        let mut first = Vec::with_capacity(turns.len());
        for turns in turns {
            first.push(requests);
            requests += turns;
        }
        let endpoint = self.endpoint;
        let renderer = Renderer::new(endpoint, &self.model, self.stream, has_tools, image_bytes);
        let (scripted_answers, path) = (self.scripted_answers, endpoint.path().into());
        Plan { sessions, first, renderer, scripted_answers, endpoint, path, requests }
    }
}

/// The last session may be cut short so that there are exactly `requests` requests.
fn drawn(recipe: &Recipe, requests: usize, seed: u64) -> Vec<Session> {
    let (mut left, mut made) = (requests, Vec::new());
    // When sessions begin is a matter of the pace; the rate here decides nothing.
    let mut sessions = Sessions::new(recipe.clone(), 1.0, seed);
    while left > 0
        && let Some(mut session) = sessions.next()
    {
        session.turns.truncate(left);
        left -= session.turns.len();
        made.push(session);
    }
    made
}

impl Plan {
    /// Number of sessions.
    pub fn sessions(&self) -> usize {
        self.first.len()
    }

    /// Number of requests.
    pub fn requests(&self) -> usize {
        self.requests
    }

    /// When each session began, nanoseconds after the recording did; nothing for generated ones.
    pub fn recorded_times(&self) -> Option<Vec<u64>> {
        match &self.sessions {
            Kept::Drawn { is_replay: false, .. } => None,
            Kept::Drawn { sessions, .. } => Some(sessions.iter().map(|session| session.at_ns).collect()),
            Kept::Recorded(recorded) => Some(recorded[..self.requests].iter().map(|it| it.at_ns).collect()),
        }
    }

    /// Whether sessions stand for requests of a recording.
    pub fn is_replay(&self) -> bool {
        !matches!(self.sessions, Kept::Drawn { is_replay: false, .. })
    }

    /// The conversation that a session belongs to, and the number of the shared text that it begins with.
    pub fn groups(&self, number: usize) -> (u64, Option<u64>) {
        match &self.sessions {
            Kept::Drawn { sessions, .. } => (sessions[number].number, sessions[number].group),
            Kept::Recorded(_) => (number as u64, None),
        }
    }

    /// A session before its first request.
    pub fn script(&self, number: usize) -> Script {
        Script { number, turn: 0, chat: Chat::default() }
    }

    /// The session's next request, or `None` at its end. `answer` is the server's answer to the one before, if it gave
    /// a whole one.
    pub fn next(&self, script: &mut Script, answer: Option<&str>) -> Option<Prepared> {
        let turn = script.turn;
        script.turn += 1;
        let index = self.first[script.number] + turn;
        let turns = match &self.sessions {
            Kept::Drawn { sessions, .. } => &sessions[script.number].turns,
            Kept::Recorded(recorded) => {
                let Recorded { path, body, .. } = &recorded[script.number];
                let (path, body) = (path.clone(), body.to_string());
                let prepared = Prepared { index, path, body, answer_tokens: 0, pause_ns: 0, wants_text: false };
                return (turn == 0).then_some(prepared);
            }
        };
        let this = turns.get(turn)?;
        let before = turn.checked_sub(1).map(|before| &turns[before]);
        if let Some(before) = before.filter(|_| self.endpoint.generates()) {
            let server = answer.filter(|_| !self.scripted_answers);
            self.renderer.add_answer(&mut script.chat, before, server, this);
        }
        self.renderer.add_turn(&mut script.chat, this, before);
        Some(Prepared {
            index,
            path: self.path.clone(),
            body: self.renderer.body(&script.chat, this.answer_tokens),
            answer_tokens: if self.endpoint.generates() { this.answer_tokens } else { 0 },
            pause_ns: this.pause_ns,
            wants_text: turn + 1 < turns.len() && !self.scripted_answers && self.endpoint.generates(),
        })
    }
}

#[cfg(test)]
#[path = "workload_tests.rs"]
mod tests;
