//! The one pass over a request's body: what routing needs of it, what it says of images and caching, the places of its
//! members, and, for a prompt that may be finished on the shard, the values that a template will see. Never decides.

use infera_shards::Request;

use super::messages::is_by_load;
use super::service::RouterService;
use crate::api::{self, ApiError, Endpoint};
use crate::limits;
use crate::prompt::extract::{ExtractError, RoutingFields};
use crate::prompt::outline::Outline;
use crate::prompt::{Look, PromptBody};
use crate::route::{BodyFacts, FactsScan, Policy};

/// What was found.
pub(super) struct Reading<'a> {
    /// Empty for none.
    pub model: String,
    /// A stream is asked for.
    pub is_stream: bool,
    pub samples: u32,
    pub facts: BodyFacts,
    /// Absent for a body that is not JSON, on paths where that is the worker's to refuse.
    pub outline: Option<Outline>,
    /// Absent where the prompt is not to be looked at here.
    pub prompt: Option<PromptBody<'a>>,
}

impl<'a> Reading<'a> {
    /// Reads the body once; one that only Python could read, or nobody, is looked at again without its prompt.
    pub fn of(service: &RouterService, endpoint: &Endpoint, request: &'a Request) -> Result<Self, ApiError> {
        let body = &request.body;
        if is_by_load(endpoint) {
            let outline = Outline::read(body).ok();
            let model = forwarded_model(request, outline.as_ref());
            let is_stream = outline.as_ref().is_some_and(|outline| RoutingFields::of(outline).stream);
            return Ok(Self { model, is_stream, samples: 1, facts: BodyFacts::default(), outline, prompt: None });
        }
        let is_kv_aware = service.shared.settings.policy == Policy::KvAware;
        let is_short = body.len() <= limits::SHARD_PROMPT_BODY_BYTES;
        if is_kv_aware && is_short && service.shared.prompter.is_some() {
            let (mut scan, mut prompt) = (FactsScan::default(), PromptBody::default());
            let outline = Outline::read_with(body, |reader, key| {
                prompt.member(reader, key, |found| match found {
                    Look::Text(reader) => scan.member(reader, key),
                    Look::Tree(tree) => scan.member(tree, key),
                })
            });
            if let Ok(outline) = outline {
                return Ok(Self::with(endpoint, outline, scan.facts(), Some(prompt)));
            }
        }
        let bad = |error: ExtractError| ApiError::BadRequest(error.to_string());
        if is_kv_aware {
            let mut scan = FactsScan::default();
            let outline = Outline::read_with(body, |reader, key| scan.member(reader, key)).map_err(bad)?;
            return Ok(Self::with(endpoint, outline, scan.facts(), None));
        }
        Ok(Self::with(endpoint, Outline::read(body).map_err(bad)?, BodyFacts::default(), None))
    }

    fn with(endpoint: &Endpoint, outline: Outline, facts: BodyFacts, prompt: Option<PromptBody<'a>>) -> Self {
        let fields = RoutingFields::of(&outline);
        let is_stream = fields.stream;
        let model = fields.model.map(|model| model.into_owned()).unwrap_or_default();
        let samples = match endpoint {
            Endpoint::ChatCompletions | Endpoint::Completions => fields.samples.count(),
            // Others have one sample: `n` means nothing there.
            _ => 1,
        };
        Self { model, is_stream, samples, facts, outline: Some(outline), prompt }
    }
}

/// Paths that the router does not know: the model is where the body's form has it, else in the query. A body
/// that cannot be read is the worker's to refuse.
fn forwarded_model(request: &Request, outline: Option<&Outline>) -> String {
    let content_type = request.head.get("content-type").unwrap_or_default();
    let in_body = if content_type.starts_with(b"multipart/form-data") {
        multipart_model(&request.body)
    } else {
        outline.and_then(|outline| RoutingFields::of(outline).model).map(|model| model.into_owned())
    };
    in_body.or_else(|| api::query_parameter(&request.target, "model")).unwrap_or_default()
}

/// Longest model name looked for in a multipart form, bytes.
const FORM_MODEL_BYTES_MAX: usize = 512;

/// Value of the form field `model`: what stands between the blank line after its part's head and the next
/// line end (RFC 7578).
fn multipart_model(body: &[u8]) -> Option<String> {
    let name = memchr::memmem::find(body, b"name=\"model\"")?;
    let after_name = &body[name..];
    let value = &after_name[memchr::memmem::find(after_name, b"\r\n\r\n")? + 4..];
    let end = memchr::memmem::find(&value[..value.len().min(FORM_MODEL_BYTES_MAX)], b"\r\n")?;
    std::str::from_utf8(&value[..end]).ok().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::multipart_model;

    #[test]
    fn the_model_of_a_multipart_form() {
        let form = |field: &str| {
            format!(
                "--x\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a\"\r\n\r\nRIFF\r\n--x\r\n{field}--x--\r\n"
            )
        };
        let model = form("Content-Disposition: form-data; name=\"model\"\r\n\r\nwhisper-1\r\n");
        assert_eq!(multipart_model(model.as_bytes()).as_deref(), Some("whisper-1"));
        assert_eq!(multipart_model(form("").as_bytes()), None);
        assert_eq!(multipart_model(b"name=\"model\"\r\n\r\nunfinished"), None);
    }
}
