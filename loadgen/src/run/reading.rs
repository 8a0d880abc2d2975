//! Owns one answer's body while it arrives: when its parts came, and what became of it in the end. Never reads sockets.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use super::answer::Answer;
use super::record::Failure;
use crate::net::client::{AnswerHead, Sink};

/// An answer under way.
#[derive(Default)]
pub struct Reading {
    pub answer: Answer,
    /// The body of an answer that is no stream.
    pub plain: Vec<u8>,
    pub first: Option<Instant>,
    pub gaps: Vec<Duration>,
    last: Option<Instant>,
    /// The client leaves with so many events read.
    leave_after_events: Option<u64>,
}

impl Reading {
    /// `wants_text`: whether anybody looks at what the answer says.
    pub fn new(wants_text: bool, leave_after_events: Option<u64>) -> Reading {
        let answer = if wants_text { Answer::default() } else { Answer::counting() };
        Reading { answer, leave_after_events, ..Reading::default() }
    }

    /// What the whole answer is worth. `expected`: its exact text, if known.
    pub fn judge(&mut self, head: &AnswerHead, expected: Option<&str>) -> Result<(), Failure> {
        if head.status != 200 {
            return Err(Failure::Status(head.status));
        }
        if !head.event_stream {
            self.answer.set_json(&self.plain);
        }
        let answer = &self.answer;
        if answer.failed {
            return Err(Failure::StreamError);
        }
        if answer.malformed {
            return Err(Failure::Malformed);
        }
        if !answer.complete {
            return Err(Failure::Truncated);
        }
        if expected.is_some_and(|expected| *expected != answer.text) {
            return Err(Failure::WrongContent);
        }
        Ok(())
    }
}

impl Sink for Reading {
    fn take(&mut self, head: &AnswerHead, bytes: &[u8], at: Instant) -> ControlFlow<()> {
        if !head.event_stream || head.status != 200 {
            self.plain.extend_from_slice(bytes);
            return ControlFlow::Continue(());
        }
        if self.answer.push_events(bytes) > 0 {
            self.first.get_or_insert(at);
            if let Some(last) = self.last.replace(at) {
                self.gaps.push(at - last);
            }
        }
        match self.leave_after_events {
            Some(events) if self.answer.content_events >= events => ControlFlow::Break(()),
            _ => ControlFlow::Continue(()),
        }
    }
}
