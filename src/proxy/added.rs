//! Headers that the router adds to an answer which it passes on. Never changes what the worker has said otherwise.

use std::borrow::Cow;

use http::{HeaderName, HeaderValue};

use super::live::LiveSettings;
use crate::worker::Name;

type Header = (HeaderName, HeaderValue);

/// Set on streams: a proxy in front of this one must not collect them.
static UNBUFFERED: [Header; 1] = [(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"))];

/// Set in place of the worker's of the same name. By default none.
#[derive(Debug, Default)]
pub(super) struct AddedHeaders(Cow<'static, [Header]>);

impl AddedHeaders {
    /// Of an answer that `workers` made: with `--answer-names-worker` they are named, by the headers that would choose
    /// them in direct mode. Costs nothing without.
    pub fn of<const N: usize>(live: &LiveSettings, is_stream: bool, workers: [(HeaderName, &Name); N]) -> Self {
        let fixed: &[Header] = if is_stream { &UNBUFFERED } else { &[] };
        if !live.answer_names_worker {
            return Self(Cow::Borrowed(fixed));
        }
        // A name that no header can hold stays unsaid.
        let named =
            workers.into_iter().filter_map(|(name, route_key)| Some((name, HeaderValue::from_str(route_key).ok()?)));
        Self(Cow::Owned(fixed.iter().cloned().chain(named).collect()))
    }

    pub fn as_slice(&self) -> &[Header] {
        &self.0
    }
}
