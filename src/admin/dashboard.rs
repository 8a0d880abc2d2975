//! `GET /dashboard`: one page with all that it needs in it. Shows what `GET /v1/admin/overview` says, and holds no data.

use std::sync::LazyLock;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use http::{HeaderValue, StatusCode, header};
use infera_shards::Response;
use sha2::{Digest, Sha256};

const PAGE: &str = include_str!("dashboard.html");

/// Nothing runs but the page's own script, by its hash (CSP Level 3), and nothing is fetched but from this router: a
/// worker's id or a model's name that is markup stays text even where the script had a fault.
static POLICY: LazyLock<HeaderValue> = LazyLock::new(|| {
    let policy = format!(
        "default-src 'none'; script-src '{}'; style-src '{}'; connect-src 'self'; img-src data:; base-uri 'none'; \
         form-action 'none'; frame-ancestors 'none'",
        source_of("<script>", "</script>"),
        source_of("<style>", "</style>"),
    );
    HeaderValue::try_from(policy).expect("a hash is visible ASCII")
});

/// The part of the page between two tags, as a policy names it.
fn source_of(opening: &str, closing: &str) -> String {
    let part = PAGE.split_once(opening).and_then(|(_, rest)| rest.split_once(closing)).map_or("", |(part, _)| part);
    format!("sha256-{}", BASE64_STANDARD.encode(Sha256::digest(part)))
}

pub(super) fn page() -> Response {
    let fixed = HeaderValue::from_static;
    let headers = vec![
        (header::CONTENT_TYPE, fixed("text/html; charset=utf-8")),
        (header::CONTENT_SECURITY_POLICY, POLICY.clone()),
        (header::X_CONTENT_TYPE_OPTIONS, fixed("nosniff")),
        (header::REFERRER_POLICY, fixed("no-referrer")),
        (header::CACHE_CONTROL, fixed("no-store")),
    ];
    Response { status: StatusCode::OK, headers, body: Bytes::from_static(PAGE.as_bytes()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_is_whole_and_asks_nobody_else() {
        assert_eq!((PAGE.matches("<script>").count(), PAGE.matches("<style>").count()), (1, 1));
        // The name of SVG's vocabulary is no address.
        let without_names = PAGE.replace("http://www.w3.org/2000/svg", "");
        assert!(!without_names.contains("//www") && !without_names.contains("http"), "no address of anybody's");
        for sink in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("] {
            assert!(!PAGE.contains(sink), "{sink} would take text for markup");
        }
        let policy = POLICY.to_str().unwrap();
        assert!(policy.contains("script-src 'sha256-") && !policy.contains("unsafe"), "{policy}");
    }
}
