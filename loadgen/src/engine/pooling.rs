//! Owns the endpoints that generate nothing: embeddings, reranking, scores and classes. Their numbers are made of the
//! tokens, so that equal inputs give equal answers. Never schedules.

use std::hash::{DefaultHasher, Hash, Hasher};

use serde_json::{Value, json};

use super::core::Engine;
use super::generate::token_ids;
use super::shapes::{ApiError, parse_body};
use crate::net::server::Request;

/// Numbers in an embedding.
const DIMENSIONS: usize = 8;

/// The answer to a request of one of these endpoints; nothing for any other path.
pub(super) fn answer(engine: &Engine, request: &Request) -> Option<Result<Value, ApiError>> {
    let make: fn(&Engine, &Value) -> Result<Value, ApiError> = match request.path.as_str() {
        "/v1/embeddings" => embeddings,
        "/v1/rerank" | "/rerank" | "/v2/rerank" => rerank,
        "/v1/score" | "/score" => score,
        "/pooling" => pooling,
        "/classify" => classify,
        _ => return None,
    };
    Some(parse_body(&request.body).and_then(|body| {
        check_model(engine, &body)?;
        make(engine, &body)
    }))
}

/// These endpoints take a body without a model.
fn check_model(engine: &Engine, body: &Value) -> Result<(), ApiError> {
    match &body["model"] {
        Value::Null => Ok(()),
        model if model.as_str() == Some(&engine.config.model) => Ok(()),
        model => Err(ApiError::new(404, "NotFoundError", &format!("The model {model} does not exist."))),
    }
}

fn tokens(engine: &Engine, text: &str) -> Result<Vec<u32>, ApiError> {
    engine.text.encode(text).map_err(|error| ApiError::bad_request(&error.to_string()))
}

/// Inputs of `input`: a text, token ids, or a list of either.
fn inputs(engine: &Engine, body: &Value) -> Result<Vec<Vec<u32>>, ApiError> {
    let one = |value: &Value| match value {
        Value::String(text) => tokens(engine, text),
        ids => token_ids(ids).ok_or_else(|| ApiError::bad_request("`input` must be text or token ids")),
    };
    match &body["input"] {
        Value::Array(items) if !items.iter().all(Value::is_number) => items.iter().map(one).collect(),
        input => Ok(vec![one(input)?]),
    }
}

fn number(tokens: &[u32], salt: usize) -> f64 {
    let mut hasher = DefaultHasher::new();
    (tokens, salt).hash(&mut hasher);
    (hasher.finish() >> 40) as f64 / f64::from(1 << 24)
}

fn vector(tokens: &[u32]) -> Vec<f64> {
    (0..DIMENSIONS).map(|place| number(tokens, place)).collect()
}

fn usage(counted: usize) -> Value {
    json!({"prompt_tokens": counted, "total_tokens": counted})
}

fn listed(engine: &Engine, body: &Value, entry: impl Fn(usize, &[u32]) -> Value) -> Result<Value, ApiError> {
    let inputs = inputs(engine, body)?;
    let data: Vec<Value> = inputs.iter().enumerate().map(|(index, tokens)| entry(index, tokens)).collect();
    let counted = inputs.iter().map(Vec::len).sum();
    Ok(json!({"id": "pool-1", "object": "list", "created": 0, "model": engine.config.model, "data": data,
        "usage": usage(counted)}))
}

fn embeddings(engine: &Engine, body: &Value) -> Result<Value, ApiError> {
    listed(engine, body, |index, tokens| json!({"index": index, "object": "embedding", "embedding": vector(tokens)}))
}

fn pooling(engine: &Engine, body: &Value) -> Result<Value, ApiError> {
    listed(engine, body, |index, tokens| json!({"index": index, "object": "pooling", "data": vector(tokens)}))
}

fn classify(engine: &Engine, body: &Value) -> Result<Value, ApiError> {
    listed(engine, body, |index, tokens| {
        let yes = number(tokens, 0);
        json!({"index": index, "label": if yes > 0.5 { "yes" } else { "no" }, "probs": [yes, 1.0 - yes], "num_classes": 2})
    })
}

/// How well two texts go together.
fn relevance(engine: &Engine, first: &str, second: &str) -> Result<(f64, usize), ApiError> {
    let both = [tokens(engine, first)?, tokens(engine, second)?].concat();
    Ok((number(&both, 0), both.len()))
}

fn rerank(engine: &Engine, body: &Value) -> Result<Value, ApiError> {
    let query = body["query"].as_str().ok_or_else(|| ApiError::bad_request("`query` is required"))?;
    let documents = body["documents"].as_array().ok_or_else(|| ApiError::bad_request("`documents` is required"))?;
    let (mut results, mut counted) = (Vec::new(), 0);
    for (index, document) in documents.iter().enumerate() {
        let text = document.as_str().unwrap_or_default();
        let (relevance, tokens) = relevance(engine, query, text)?;
        counted += tokens;
        results.push((relevance, json!({"index": index, "document": {"text": text}, "relevance_score": relevance})));
    }
    results.sort_by(|(one, _), (other, _)| other.total_cmp(one));
    let results: Vec<Value> = results.into_iter().map(|(_, result)| result).collect();
    Ok(json!({"id": "rerank-1", "model": engine.config.model, "usage": usage(counted), "results": results}))
}

fn score(engine: &Engine, body: &Value) -> Result<Value, ApiError> {
    let text = |name: &str| body[name].as_str().ok_or_else(|| ApiError::bad_request(&format!("`{name}` is required")));
    let (relevance, counted) = relevance(engine, text("text_1")?, text("text_2")?)?;
    Ok(json!({"id": "score-1", "object": "list", "created": 0, "model": engine.config.model,
        "data": [{"index": 0, "object": "score", "score": relevance}], "usage": usage(counted)}))
}
