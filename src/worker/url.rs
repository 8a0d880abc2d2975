//! A worker's base URL and event endpoint, taken apart once by a real parser. No name resolution.

use std::net::{IpAddr, SocketAddr};

use url::{Host, Url};

/// Why a URL cannot be a worker's. The text says what to write instead.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UrlError {
    #[error("`{0}` is not a URL ({1}); write http://HOST:PORT")]
    Malformed(String, String),
    #[error("`{0}`: scheme `{1}` is not supported; use http:// or https://")]
    Scheme(String, String),
    // Without the part in front of the `@`: it may be a password.
    #[error(
        "something stands in front of `@{0}`, where a URL has a user name; a rank is given by dp_rank, not by the URL"
    )]
    UserInfo(String),
    #[error("`{0}` has a query or fragment; a worker's URL is only scheme, host, port and path prefix")]
    QueryOrFragment(String),
    #[error("`{0}` has no usable host or port; write http://HOST:PORT")]
    NoHost(String),
    #[error("event endpoint `{0}`: {1}; write tcp://HOST:PORT with the worker's own address")]
    Events(String, String),
}

/// A worker's base URL: where to connect, and what to write into the request head.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct WorkerUrl {
    /// `https`: requests go over TLS, and the certificate must be for `host`.
    pub is_tls: bool,
    /// Name or address, IPv6 without brackets; lowercase.
    pub host: String,
    /// 80, or 443 with TLS, when the URL names none.
    pub port: u16,
    /// `host:port`, IPv6 in brackets: the `Host` header, and the default worker id.
    pub authority: String,
    /// Path in front of every request's path, without its trailing slash; mostly empty.
    pub base_path: String,
}

impl WorkerUrl {
    /// Parses `http[s]://host[:port][/prefix]`. Two spellings of one URL (case, trailing slash, default port) are
    /// equal afterwards.
    pub fn parse(text: &str) -> Result<Self, UrlError> {
        let trimmed = text.trim();
        let url = Url::parse(trimmed).map_err(|error| UrlError::Malformed(text.to_owned(), error.to_string()))?;
        let is_tls = match url.scheme() {
            "http" => false,
            "https" => true,
            // `host:port` without a scheme parses as scheme `host`; say what is missing instead.
            _ if !trimmed.contains("://") => {
                return Err(UrlError::Malformed(text.to_owned(), "no scheme".to_owned()));
            }
            other => return Err(UrlError::Scheme(text.to_owned(), other.to_owned())),
        };
        // The parser drops an empty `@`; the field's accident is `host:port@rank`, so look at the text as well.
        let authority_text = trimmed.split("://").nth(1).unwrap_or("").split(['/', '?', '#']).next().unwrap_or("");
        if !url.username().is_empty() || url.password().is_some() || authority_text.contains('@') {
            let host = authority_text.rsplit('@').next().unwrap_or("");
            return Err(UrlError::UserInfo(host.to_owned()));
        }
        if url.query().is_some() || url.fragment().is_some() {
            return Err(UrlError::QueryOrFragment(text.to_owned()));
        }
        let (host, bracketed) = match url.host() {
            Some(Host::Domain(name)) if !name.is_empty() => (name.to_owned(), name.to_owned()),
            Some(Host::Ipv4(address)) => (address.to_string(), address.to_string()),
            Some(Host::Ipv6(address)) => (address.to_string(), format!("[{address}]")),
            _ => return Err(UrlError::NoHost(text.to_owned())),
        };
        let port = url.port_or_known_default().filter(|port| *port != 0);
        let Some(port) = port else { return Err(UrlError::NoHost(text.to_owned())) };
        let base_path = url.path().trim_end_matches('/').to_owned();
        Ok(WorkerUrl { is_tls, host, port, authority: format!("{bracketed}:{port}"), base_path })
    }

    /// The address when the host is a literal one; a name needs the resolver.
    pub fn literal_address(&self) -> Option<SocketAddr> {
        self.host.parse::<IpAddr>().ok().map(|ip| SocketAddr::new(ip, self.port))
    }

    /// Absolute URL of `path` (which starts with `/`) on this worker.
    pub fn join(&self, path: &str) -> String {
        let scheme = if self.is_tls { "https" } else { "http" };
        format!("{scheme}://{}{}{}", self.authority, self.base_path, path)
    }
}

/// Checks a KV-event or replay endpoint: `tcp://host:port` that can be connected to (`ipc://` and `inproc://` are
/// taken as they are). A wildcard host is what a publisher binds, not what a subscriber reaches.
pub fn check_events_endpoint(text: &str) -> Result<(), UrlError> {
    let fail = |why: &str| Err(UrlError::Events(text.to_owned(), why.to_owned()));
    if text.starts_with("ipc://") || text.starts_with("inproc://") {
        return Ok(());
    }
    let Some(rest) = text.strip_prefix("tcp://") else { return fail("not a tcp:// address") };
    let Some((host, port)) = rest.rsplit_once(':') else { return fail("no port") };
    if port.parse::<u16>().map_or(true, |port| port == 0) {
        return fail("the port is not a number from 1 to 65535");
    }
    match host {
        "" => fail("no host"),
        "*" | "0.0.0.0" | "[::]" | "::" => fail("a wildcard host cannot be connected to"),
        _ if host.contains([' ', '/', '@']) => fail("the host has characters that no host has"),
        _ if host.contains(':') && !host.starts_with('[') => fail("an IPv6 host needs brackets"),
        _ => Ok(()),
    }
}
