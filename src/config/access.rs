//! Options of who may use the router and what workers are shown: key files. Keys are read at start and at each reload, and never shown.

use std::fmt;
use std::path::{Path, PathBuf};

use clap::Args;
use http::HeaderValue;

use super::validate::Problems;
use crate::proxy::{ClientKeys, OutboundHeaders};

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Keys")]
pub struct AccessArgs {
    /// Keys that clients must carry (Authorization: Bearer KEY, or X-Api-Key), one per line; # begins a comment line.
    /// /health, /ready, /metrics and the page of /dashboard (not its data) stay open. The client's own credentials then never reach a worker.
    #[arg(long, value_name = "PATH", env = "INFERA_API_KEY_FILE")]
    pub api_key_file: Option<PathBuf>,
    /// The key that workers are shown, in place of the client's.
    #[arg(long, value_name = "PATH", env = "INFERA_WORKER_API_KEY_FILE")]
    pub worker_api_key_file: Option<PathBuf>,
    /// true|false: without either file, the client's Authorization and X-Api-Key go to the worker, which may check them.
    #[arg(long, value_name = "BOOL", default_value = "true", action = clap::ArgAction::Set)]
    pub forward_authorization: bool,
}

/// What the options say, with the keys read.
#[derive(Clone, Default)]
pub struct Access {
    pub client_keys: ClientKeys,
    /// The whole value of `Authorization`.
    pub worker_key: Option<HeaderValue>,
    pub forwards_authorization: bool,
}

impl fmt::Debug for Access {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Access { client_keys, worker_key, forwards_authorization } = self;
        let has_worker_key = worker_key.is_some();
        write!(out, "{client_keys:?}, worker key: {has_worker_key}, forwards: {forwards_authorization}")
    }
}

impl Access {
    pub fn outbound(&self) -> OutboundHeaders {
        OutboundHeaders::new(!self.client_keys.is_empty(), self.worker_key.clone(), self.forwards_authorization)
    }
}

pub(super) fn settings(arguments: &AccessArgs, problems: &mut Problems) -> Access {
    let mut read = |flag: &str, path: &Path| match std::fs::read_to_string(path) {
        // Some editors put a byte order mark there, which would become part of the first key.
        Ok(text) => Some(text.trim_start_matches('\u{feff}').to_owned()),
        Err(error) => {
            problems.add(format!("{flag} {}: {error}", path.display()));
            None
        }
    };
    let client_text = arguments.api_key_file.as_deref().and_then(|path| read("--api-key-file", path));
    let worker_text = arguments.worker_api_key_file.as_deref().and_then(|path| read("--worker-api-key-file", path));
    let client_keys = client_text.and_then(|text| match ClientKeys::parse(&text) {
        Ok(keys) => Some(keys),
        Err(problem) => {
            problems.add(format!("--api-key-file {problem}"));
            None
        }
    });
    let worker_key = worker_text.and_then(|text| {
        let key = text.trim();
        let value = HeaderValue::from_str(&format!("Bearer {key}")).ok().filter(|_| !key.is_empty());
        if value.is_none() {
            problems.add("--worker-api-key-file must hold one key of visible characters");
        }
        value.map(|mut value| {
            value.set_sensitive(true);
            value
        })
    });
    let forwards_authorization = arguments.forward_authorization;
    Access { client_keys: client_keys.unwrap_or_default(), worker_key, forwards_authorization }
}
