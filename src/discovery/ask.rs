//! Asking an engine over HTTP for what its record leaves open. One round of questions; when to ask is the
//! attendant's. Answers are bounded, redirects are not followed, no proxy is used.

use std::time::Duration;

use http::{HeaderValue, header};
use infera_shards::ClientTls;
use reqwest::{Client, StatusCode};

use super::facts::Facts;
use super::status::SourceKind;
use crate::limits;
use crate::worker::{EngineKind, WorkerRecord, WorkerUrl};

/// What a record leaves open; by default nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Open {
    /// Without a model the worker cannot be routed to.
    pub model: bool,
    /// Block size, ranks, event and replay endpoints: without them it is routed by load.
    pub cache: bool,
    /// Template arguments of the engine: without them the fleet's are taken.
    pub template: bool,
}

impl Open {
    pub fn of(record: &WorkerRecord, source: SourceKind, template_arguments: bool) -> Open {
        let cache = match source {
            // A registry's record is the launcher's own statement: no endpoint means no events.
            SourceKind::Etcd => record.kv_block_size.is_none() && record.kv_events_endpoint.is_some(),
            SourceKind::CommandLine | SourceKind::File => {
                record.kv_block_size.is_none() || record.kv_events_endpoint.is_none()
            }
        };
        // Only one engine says them.
        let may_say = matches!(record.engine_kind(), EngineKind::Sglang | EngineKind::Unknown);
        let template = template_arguments && may_say && record.default_chat_template_kwargs.is_none();
        Open { model: record.model_name.is_empty(), cache, template }
    }

    pub fn anything(self) -> bool {
        self.model || self.cache || self.template
    }
}

/// The client for all workers. `tls` judges their certificates as it does on the request path.
pub(super) fn client(limit: Duration, authorization: Option<&HeaderValue>, tls: &ClientTls) -> reqwest::Result<Client> {
    let headers = authorization.map(|value| (header::AUTHORIZATION, value.clone())).into_iter().collect();
    Client::builder()
        .default_headers(headers)
        .tls_backend_preconfigured(tls.config())
        .no_proxy()
        .redirect(reqwest::redirect::Policy::none())
        .connect_timeout(limit)
        .timeout(limit)
        // Questions are far apart; an idle connection would only meet the server's own timeout.
        .pool_max_idle_per_host(0)
        .user_agent(concat!("infera-router/", env!("CARGO_PKG_VERSION")))
        .build()
}

enum Answer {
    Body(Vec<u8>),
    /// The engine does not have this endpoint.
    NotOffered,
}

/// Asks everything once. `Err` carries what was learnt all the same, and the reason to ask again soon.
pub(super) async fn ask(client: &Client, record: &WorkerRecord, open: Open) -> Result<Facts, (Facts, String)> {
    let mut facts = Facts::default();
    let url = match record.endpoint() {
        Ok(url) => url,
        Err(error) => return Err((facts, error.to_string())),
    };
    match ask_all(client, record, &url, open, &mut facts).await {
        Ok(()) => Ok(facts),
        Err(problem) => Err((facts, problem)),
    }
}

async fn ask_all(
    client: &Client,
    record: &WorkerRecord,
    url: &WorkerUrl,
    open: Open,
    facts: &mut Facts,
) -> Result<(), String> {
    let models = match get(client, url, "/v1/models").await? {
        Answer::Body(body) => facts.read_models(&body).map_err(|problem| format!("GET /v1/models: {problem}")),
        Answer::NotOffered => Err("GET /v1/models: not offered; name the model by hand".to_owned()),
    };
    // A worker whose model is given needs this answer only as a hint at its engine.
    if open.model {
        models?;
    }
    if !open.cache && !open.template {
        return Ok(());
    }
    let engine = match record.engine_kind() {
        EngineKind::Unknown => EngineKind::from_name(facts.engine.unwrap_or("")),
        known => known,
    };
    if matches!(engine, EngineKind::Sglang | EngineKind::Unknown) {
        // The path was renamed; a middle layer serves it below /v1.
        for path in ["/server_info", "/get_server_info", "/v1/server_info"] {
            if let Answer::Body(body) = get(client, url, path).await? {
                let mut said = if open.cache { facts.clone() } else { Facts::default() };
                said.read_server_info(&body, &url.host).map_err(|problem| format!("GET {path}: {problem}"))?;
                match open.cache {
                    true => *facts = said,
                    // Where the record is the last word on events, only the template is of interest.
                    false => facts.template_arguments = said.template_arguments,
                }
                break;
            }
        }
    }
    if open.cache && facts.kv_block_size.is_none() && matches!(engine, EngineKind::Vllm | EngineKind::Unknown) {
        if let Answer::Body(body) = get(client, url, "/kv_event_sources").await? {
            facts
                .read_event_sources(&body, &url.host)
                .map_err(|problem| format!("GET /kv_event_sources: {problem}"))?;
        }
        if facts.kv_block_size.is_none()
            && let Answer::Body(body) = get(client, url, "/metrics").await?
        {
            facts.read_metrics(&body);
        }
    }
    Ok(())
}

/// Whether the worker still answers at all: any status below 500.
pub(super) async fn is_alive(client: &Client, record: &WorkerRecord) -> bool {
    let Ok(url) = record.endpoint() else { return false };
    match client.get(url.join("/health")).send().await {
        Ok(response) => response.status().as_u16() < 500,
        Err(_) => false,
    }
}

/// What lies under an error: a refused connection, say, or a certificate that is not believed.
fn innermost(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}

/// A 4xx means the engine has no such endpoint (old release, development mode off, access refused); asking again
/// would not change that. Everything else but 200 is a state that passes.
async fn get(client: &Client, url: &WorkerUrl, path: &str) -> Result<Answer, String> {
    let describe = |error: reqwest::Error| {
        let kind = match () {
            () if error.is_timeout() => "no answer in time".to_owned(),
            () if error.is_connect() => format!("cannot connect: {}", innermost(&error)),
            () => "broken answer".to_owned(),
        };
        format!("GET {path}: {kind}")
    };
    let mut response = client.get(url.join(path)).send().await.map_err(describe)?;
    match response.status() {
        StatusCode::OK => {}
        StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS => {
            return Err(format!("GET {path}: status {}", response.status().as_u16()));
        }
        status if status.is_client_error() => return Ok(Answer::NotOffered),
        status => return Err(format!("GET {path}: status {}", status.as_u16())),
    }
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(describe)? {
        if body.len() + chunk.len() > limits::ENGINE_ANSWER_BYTES_MAX {
            return Err(format!("GET {path}: answer longer than {} bytes", limits::ENGINE_ANSWER_BYTES_MAX));
        }
        body.extend_from_slice(&chunk);
    }
    Ok(Answer::Body(body))
}
