//! Method and path to endpoint.

use http::Method;

/// What a request asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// `POST /v1/chat/completions`: routed by its rendered prompt.
    ChatCompletions,
    /// `POST /v1/completions`: routed by its prompt.
    Completions,
    /// `POST /v1/responses`: routed by the prompt that its engine makes of it.
    Responses,
    /// `POST /v1/responses/input_tokens`: counted here.
    InputTokens,
    /// `POST /v1/messages`, Anthropic's: routed by the prompt that its engine makes of it.
    Messages,
    /// `POST /v1/messages/count_tokens`: counted here, or by a worker.
    CountTokens,
    /// `GET /v1/models`.
    Models,
    /// `GET /v1/models/<id>`.
    Model(String),
    /// `GET /v1/workers`.
    Workers,
    /// `GET /health`: the process is alive.
    Health,
    /// `GET /ready`: at least one routable worker, and not draining.
    Ready,
    /// `GET /metrics`.
    Metrics,
    /// `GET /v1/admin/cache-view/<worker_id>`; the worker id is percent-decoded.
    CacheView(String),
    /// `POST /v1/admin/explain`: how a request with this body would be routed now.
    Explain,
    /// `GET /v1/admin/config`: the settings in force.
    Config,
    /// `GET` and `PUT /v1/admin/log-level`.
    LogLevel,
    /// `GET /v1/admin/overview`: what the dashboard shows.
    Overview,
    /// `GET /dashboard`.
    Dashboard,
    /// Any other `/v1/*`, and the engines' own paths that serve a model: forwarded to a worker of the named model, chosen
    /// by load.
    Forward,
    /// A known path with a method it does not take; `Allow` is given.
    WrongMethod(&'static str),
    Unknown,
}

impl Endpoint {
    /// The path where it is a fixed one; a closed set, for logs.
    pub const fn path(&self) -> &'static str {
        match self {
            Endpoint::ChatCompletions => "/v1/chat/completions",
            Endpoint::Completions => "/v1/completions",
            Endpoint::Responses => "/v1/responses",
            _ => "other",
        }
    }
}

impl Endpoint {
    /// Whether a worker answers it.
    pub fn goes_to_a_worker(&self) -> bool {
        matches!(
            self,
            Endpoint::ChatCompletions
                | Endpoint::Completions
                | Endpoint::Responses
                | Endpoint::Messages
                | Endpoint::CountTokens
                | Endpoint::Forward
        )
    }
}

const CACHE_VIEW: &str = "/v1/admin/cache-view/";
const MODELS: &str = "/v1/models/";

/// Paths outside of `/v1` that serve a model, of vLLM 0.32 and SGLang 0.5.23. Not a catch-all: their other paths change an
/// engine (its weights, its cache, whether it sleeps) and are not for a client to reach through a router.
const OF_ENGINES: [&str; 12] = [
    "/classify",
    "/detokenize",
    "/embed",
    "/encode",
    "/generate",
    "/generative_scoring",
    "/pooling",
    "/rerank",
    "/score",
    "/tokenize",
    "/v2/embed",
    "/v2/rerank",
];

/// `target` is the request target as sent; its query is not looked at.
pub fn endpoint(method: &Method, target: &str) -> Endpoint {
    let path = target.split('?').next().unwrap_or_default();
    let get = |endpoint| {
        if matches!(*method, Method::GET | Method::HEAD) { endpoint } else { Endpoint::WrongMethod("GET, HEAD") }
    };
    let post = |endpoint| if *method == Method::POST { endpoint } else { Endpoint::WrongMethod("POST") };
    match path {
        "/v1/chat/completions" => post(Endpoint::ChatCompletions),
        "/v1/completions" => post(Endpoint::Completions),
        "/v1/responses" if *method == Method::POST => Endpoint::Responses,
        "/v1/responses/input_tokens" => post(Endpoint::InputTokens),
        "/v1/messages" => post(Endpoint::Messages),
        "/v1/messages/count_tokens" => post(Endpoint::CountTokens),
        "/v1/models" => get(Endpoint::Models),
        "/v1/workers" => get(Endpoint::Workers),
        "/health" => get(Endpoint::Health),
        "/ready" => get(Endpoint::Ready),
        "/metrics" => get(Endpoint::Metrics),
        "/dashboard" => get(Endpoint::Dashboard),
        "/v1/admin/explain" => post(Endpoint::Explain),
        "/v1/admin/config" => get(Endpoint::Config),
        "/v1/admin/overview" => get(Endpoint::Overview),
        "/v1/admin/log-level" if matches!(*method, Method::GET | Method::HEAD | Method::PUT) => Endpoint::LogLevel,
        "/v1/admin/log-level" => Endpoint::WrongMethod("GET, HEAD, PUT"),
        _ if path.starts_with(CACHE_VIEW) => get(Endpoint::CacheView(percent_decoded(&path[CACHE_VIEW.len()..]))),
        _ if path.starts_with(MODELS) => get(Endpoint::Model(percent_decoded(&path[MODELS.len()..]))),
        _ if is_of_the_router(path) => Endpoint::Unknown,
        _ if OF_ENGINES.contains(&path) => post(Endpoint::Forward),
        _ if !path.starts_with("/v1/") || leaves_its_place(path) => Endpoint::Unknown,
        // It would show the sender what this router adds for workers alone.
        _ if *method == Method::TRACE => Endpoint::WrongMethod("GET, POST, DELETE"),
        _ => Endpoint::Forward,
    }
}

/// Paths that are this router's, whether it knows them or not: a worker that is asked for them could be a router too.
fn is_of_the_router(path: &str) -> bool {
    let below = |top: &str| path.strip_prefix(top).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    below("/v1/admin") || below("/v1/workers")
}

/// Whether the path has a `.` or `..` segment, in any spelling. A worker, or a proxy in front of it, may resolve them: what
/// was forwarded as `/v1/…` would come out at a path that is not for clients.
fn leaves_its_place(path: &str) -> bool {
    percent_decoded(path).split(['/', '\\']).any(|segment| matches!(segment, "." | ".."))
}

/// Value of one query parameter, percent-decoded; the first one wins.
pub fn query_parameter(target: &str, name: &str) -> Option<String> {
    let (_, query) = target.split_once('?')?;
    query.split('&').find_map(|pair| {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        (key == name).then(|| percent_decoded(value))
    })
}

fn percent_decoded(text: &str) -> String {
    percent_encoding::percent_decode_str(text).decode_utf8_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(method: Method, target: &str, expected: Endpoint) {
        assert_eq!(endpoint(&method, target), expected, "{method} {target}");
    }

    #[test]
    fn every_path_has_one_meaning() {
        check(Method::POST, "/v1/chat/completions", Endpoint::ChatCompletions);
        check(Method::POST, "/v1/chat/completions?api-version=1", Endpoint::ChatCompletions);
        check(Method::GET, "/v1/chat/completions", Endpoint::WrongMethod("POST"));
        check(Method::POST, "/v1/completions", Endpoint::Completions);
        check(Method::GET, "/v1/models", Endpoint::Models);
        check(Method::GET, "/v1/models/org/name", Endpoint::Model("org/name".into()));
        check(Method::HEAD, "/health", Endpoint::Health);
        check(Method::POST, "/metrics", Endpoint::WrongMethod("GET, HEAD"));
        check(Method::GET, "/v1/admin/cache-view/10.0.0.5:30000", Endpoint::CacheView("10.0.0.5:30000".into()));
        check(Method::GET, "/v1/admin/cache-view/%5B::1%5D:80%23dp1", Endpoint::CacheView("[::1]:80#dp1".into()));
        check(Method::POST, "/v1/responses", Endpoint::Responses);
        check(Method::GET, "/v1/responses/abc", Endpoint::Forward);
        check(Method::POST, "/v1/embeddings", Endpoint::Forward);
        check(Method::DELETE, "/v1/responses/abc", Endpoint::Forward);
        for unheard_of in ["/v1/admin/unheard-of", "/v1/admin", "/v1/admin?x=1", "/v1/admin/", "/v1/workers/x"] {
            check(Method::POST, unheard_of, Endpoint::Unknown);
        }
        check(Method::POST, "/v1/administration", Endpoint::Forward);
        check(Method::POST, "/v1/admin/explain?text=1", Endpoint::Explain);
        check(Method::GET, "/v1/admin/explain", Endpoint::WrongMethod("POST"));
        check(Method::PUT, "/v1/admin/log-level", Endpoint::LogLevel);
        check(Method::POST, "/v1/admin/log-level", Endpoint::WrongMethod("GET, HEAD, PUT"));
        check(Method::GET, "/dashboard", Endpoint::Dashboard);
        check(Method::GET, "/", Endpoint::Unknown);
        check(Method::GET, "/v2/models", Endpoint::Unknown);
        check(Method::TRACE, "/v1/embeddings", Endpoint::WrongMethod("GET, POST, DELETE"));
        check(Method::GET, "/v1/files/.hidden", Endpoint::Forward);
        for outside in
            ["/v1/../flush_cache", "/v1/%2e%2E/x", "/v1/.%2e/x", "/v1/..%2fx", "/v1/./x", "/v1/x/..", "/v1/..\\x"]
        {
            check(Method::POST, outside, Endpoint::Unknown);
        }
    }

    #[test]
    fn query_parameters_are_decoded_and_the_first_wins() {
        assert_eq!(query_parameter("/x?dp_rank=3&dp_rank=4", "dp_rank").as_deref(), Some("3"));
        assert_eq!(query_parameter("/x?a=1&model=org%2Fm", "model").as_deref(), Some("org/m"));
        assert_eq!(query_parameter("/x", "model"), None);
        assert_eq!(query_parameter("/x?model", "model").as_deref(), Some(""));
    }
}
