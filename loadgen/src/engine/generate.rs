//! Owns one inference request: body to prompts, sequences submitted to a rank, tokens to SSE events or one JSON
//! answer, and their abort when the client leaves. Never schedules.

use std::rc::Rc;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use super::api::{Closed, Connection};
use super::content::Spelled;
use super::core::{Engine, Progress};
use super::disagg::{self, DecodeOutcome, HeldKv, Plan};
use super::messages;
use super::responses;
use super::scheduler::NewSequence;
use super::shapes::{self, ApiError};
use crate::net::server::{LAST_CHUNK, Request, chunked_head, push_chunk};
use crate::net::signal::Queue;
use crate::prompt;

/// Most samples, over all prompts of a body.
const CHOICES_MAX: usize = 128;

/// Which endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Chat,
    Text,
    Responses,
    Messages,
}

impl Kind {
    fn id_prefix(self) -> &'static str {
        match self {
            Kind::Chat => "chatcmpl-",
            Kind::Text => "cmpl-",
            Kind::Responses => "resp_",
            Kind::Messages => "msg_",
        }
    }
}

/// A checked body.
struct Job {
    kind: Kind,
    prompts: Vec<Vec<u32>>,
    samples: usize,
    /// Tokens per answer.
    count: usize,
    finish_reason: &'static str,
    stream: bool,
    include_usage: bool,
    rank: usize,
    salt: Option<String>,
    rid: Option<String>,
    /// Names of the images in the prompt.
    images: Vec<u64>,
}

impl Job {
    fn sequences(&self) -> usize {
        self.prompts.len() * self.samples
    }
}

/// Sequences of a request; dropping it aborts those still running.
struct Running<'a> {
    engine: &'a Engine,
    rank: usize,
    ids: Vec<u64>,
    answers: Vec<Vec<(u32, String)>>,
    queue: Queue<Progress>,
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.ids.iter().for_each(|id| self.engine.abandon(&self.engine.ranks[self.rank], *id));
    }
}

/// Answers one inference request.
pub(super) async fn respond(
    engine: &Rc<Engine>,
    connection: &mut Connection,
    request: &Request,
    kind: Kind,
) -> Result<(), Closed> {
    if let Some(outcome) = injected_failure(engine) {
        let error = outcome?;
        return connection.refuse(request, &error).await;
    }
    let read = shapes::parse_body(&request.body).and_then(|body| {
        let job = read_job(engine, request, kind, &body)?;
        let plan = disagg::plan(engine, request, kind, &body, job.sequences(), job.rank)?;
        Ok((job, plan))
    });
    let (mut job, plan) = match read {
        Ok(read) => read,
        Err(error) if kind == Kind::Messages => {
            return connection.answer(request, error.status, &messages::error_body(&error)).await;
        }
        Err(error) => return connection.refuse(request, &error).await,
    };
    if !matches!(plan, Plan::Decode(_)) {
        engine.count_images(&job.images);
    }
    let reply = Reply {
        id: format!("{}{:016x}", kind.id_prefix(), rand::random::<u64>()),
        created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
        model: engine.config.model.clone(),
        prompt_tokens: job.prompts.iter().map(Vec::len).sum(),
    };
    let received = match plan {
        Plan::Alone => false,
        Plan::Prefill { names, rank } => {
            job.rank = rank as usize;
            return prefill(engine, connection, request, job, &reply, names).await;
        }
        Plan::Decode(sources) => {
            let waiting = disagg::Waiting::begin(engine, sources, job.rid.as_deref(), job.sequences());
            if job.stream {
                connection.write(stream_head(request)).await?;
            }
            match waiting.fetch_kv(connection).await? {
                DecodeOutcome::Arrived => true,
                DecodeOutcome::Failed(message) => return fail_decode(connection, request, &job, &message).await,
                DecodeOutcome::Aborted => return fail_decode(connection, request, &job, "aborted").await,
            }
        }
    };
    let running = start(engine, &job, received);
    let close_after = engine.faults.borrow().close_after_tokens;
    if job.stream {
        if !received {
            connection.write(stream_head(request)).await?;
        }
        stream(connection, &job, running, &reply, close_after).await
    } else {
        whole(connection, request, &job, running, &reply).await
    }
}

/// The prefill half: one token, and the KV held for the decode half.
async fn prefill(
    engine: &Rc<Engine>,
    connection: &mut Connection,
    request: &Request,
    mut job: Job,
    reply: &Reply,
    names: Vec<String>,
) -> Result<(), Closed> {
    // Engines look once before they start: a client that has left already starts nothing.
    if connection.has_left().await {
        return Err(Closed);
    }
    let held = match HeldKv::begin(engine, names, job.rank as u32, job.rid.as_deref()) {
        Ok(held) => held,
        Err(error) => return connection.refuse(request, &error).await,
    };
    if job.count > 1 {
        (job.count, job.finish_reason) = (1, "length");
    }
    let blocks = reply.prompt_tokens.div_ceil(engine.config.block_size);
    let running = start(engine, &job, false);
    let collected = collect(connection, &job, running).await?;
    if collected.reason == "abort" {
        return connection.refuse(request, &ApiError::new(500, "InternalServerError", "aborted")).await;
    }
    let is_cut_by_length = collected.reason == "length";
    let body = collected.into_body(&job, reply);
    disagg::answer_prefill(connection, request, held, body, blocks, is_cut_by_length).await
}

/// A decode request whose KV did not come: inside a stream it is too late for a status.
async fn fail_decode(connection: &mut Connection, request: &Request, job: &Job, message: &str) -> Result<(), Closed> {
    let error = ApiError::new(500, "InternalServerError", message);
    if !job.stream {
        return connection.refuse(request, &error).await;
    }
    let mut out = Vec::new();
    push_chunk(&mut out, format!("data: {}\n\n", error.body()).as_bytes());
    out.extend_from_slice(LAST_CHUNK);
    connection.write(out).await
}

/// The head goes out at once, as both engines do: a proxy sees it long before the first token.
fn stream_head(request: &Request) -> Vec<u8> {
    let id = request.request_id.as_deref().map(|id| ("x-request-id", id));
    chunked_head(200, "text/event-stream; charset=utf-8", id.as_slice(), request.keep_alive)
}

/// `Some(Err)` closes the connection, `Some(Ok)` is an error to answer.
fn injected_failure(engine: &Engine) -> Option<Result<ApiError, Closed>> {
    let drawn = engine.draws_failure();
    let mut faults = engine.faults.borrow_mut();
    if faults.close_next > 0 {
        faults.close_next -= 1;
        return Some(Err(Closed));
    }
    let next = faults.fail_next > 0;
    faults.fail_next -= u32::from(next);
    let status = if faults.fail_status == 0 { 500 } else { faults.fail_status };
    (drawn || next).then(|| Ok(ApiError::new(status, "InternalServerError", "injected failure")))
}

fn read_job(engine: &Engine, request: &Request, kind: Kind, body: &Value) -> Result<Job, ApiError> {
    let model = body["model"].as_str().ok_or_else(|| ApiError::bad_request("`model` is required"))?;
    if model != engine.config.model {
        return Err(ApiError::new(404, "NotFoundError", &format!("The model `{model}` does not exist.")));
    }
    let prompts = match kind {
        Kind::Chat => {
            let ids = engine.chat_ids(body).map_err(|error| ApiError::bad_request(&error.to_string()))?;
            vec![ids]
        }
        Kind::Text => text_prompts(engine, &body["prompt"])?,
        Kind::Responses => {
            let chat = responses::as_chat(body).ok_or_else(|| ApiError::bad_request("`input` is required"))?;
            vec![engine.chat_ids(&chat).map_err(|error| ApiError::bad_request(&error.to_string()))?]
        }
        Kind::Messages => {
            let chat = messages::as_chat(body).ok_or_else(|| ApiError::bad_request("`messages` is required"))?;
            vec![engine.chat_ids(&chat).map_err(|error| ApiError::bad_request(&error.to_string()))?]
        }
    };
    let samples = match &body["n"] {
        _ if matches!(kind, Kind::Responses | Kind::Messages) => 1,
        Value::Null => 1,
        n => n.as_u64().filter(|n| *n >= 1).ok_or_else(|| ApiError::bad_request("`n` must be at least 1"))? as usize,
    };
    if samples.saturating_mul(prompts.len()) > CHOICES_MAX {
        return Err(ApiError::bad_request("too many choices"));
    }
    let limits = match kind {
        Kind::Responses => (&Value::Null, &body["max_output_tokens"]),
        _ => (&body["max_completion_tokens"], &body["max_tokens"]),
    };
    let limit = match limits {
        (Value::Null, Value::Null) => None,
        (Value::Null, limit) | (limit, _) => Some(
            limit
                .as_u64()
                .filter(|limit| *limit >= 1)
                .ok_or_else(|| ApiError::bad_request("`max_tokens` must be >= 1"))? as usize,
        ),
    };
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
    let (count, finish_reason) = answer_length(engine, body, longest, limit)?;
    Ok(Job {
        kind,
        samples,
        count,
        finish_reason,
        stream: body["stream"] == true,
        include_usage: body["stream_options"]["include_usage"] == true,
        rank: choose_rank(engine, request)?,
        salt: body["cache_salt"].as_str().filter(|salt| !salt.is_empty()).map(str::to_string),
        rid: body["rid"].as_str().map(str::to_string),
        images: prompt::image_keys(body),
        prompts,
    })
}

/// The model would stop by itself after `answer_tokens`, earlier when the context is full; `ignore_eos` makes it run
/// on to the limit.
fn answer_length(
    engine: &Engine,
    body: &Value,
    prompt: usize,
    limit: Option<usize>,
) -> Result<(usize, &'static str), ApiError> {
    let room = engine.config.context_length;
    if prompt == 0 {
        return Err(ApiError::bad_request("the prompt has no tokens"));
    }
    if prompt >= room || limit.is_some_and(|limit| prompt.saturating_add(limit) > room) {
        let wanted = prompt.saturating_add(limit.unwrap_or(1));
        return Err(ApiError::bad_request(&format!(
            "This model's maximum context length is {room} tokens. However, you requested {wanted} tokens \
             ({prompt} in the prompt). Please reduce the length of the prompt or the answer."
        )));
    }
    let natural = engine.config.answer_tokens.max(1).min(room - prompt);
    Ok(match limit {
        Some(limit) if limit <= natural || body["ignore_eos"] == true => (limit, "length"),
        _ => (natural, "stop"),
    })
}

fn choose_rank(engine: &Engine, request: &Request) -> Result<usize, ApiError> {
    match &request.rank {
        Some(text) => text
            .parse()
            .ok()
            .filter(|rank| *rank < engine.ranks.len())
            .ok_or_else(|| ApiError::bad_request(&format!("no data-parallel rank {text}"))),
        None => {
            let load = |rank: &usize| {
                let scheduler = engine.ranks[*rank].scheduler.borrow();
                scheduler.sequences_running() + scheduler.sequences_waiting()
            };
            Ok((0..engine.ranks.len()).min_by_key(load).unwrap_or(0))
        }
    }
}

fn text_prompts(engine: &Engine, prompt: &Value) -> Result<Vec<Vec<u32>>, ApiError> {
    let encode = |text: &str| engine.text.encode(text).map_err(|error| ApiError::bad_request(&error.to_string()));
    let invalid = || ApiError::bad_request("`prompt` must be a string, token ids, or an array of either");
    match prompt {
        Value::String(text) => Ok(vec![encode(text)?]),
        Value::Array(items) if items.iter().all(Value::is_number) => Ok(vec![token_ids(prompt).ok_or_else(invalid)?]),
        Value::Array(items) => items
            .iter()
            .map(|item| match item {
                Value::String(text) => encode(text),
                other => token_ids(other).ok_or_else(invalid),
            })
            .collect(),
        _ => Err(invalid()),
    }
}

/// An array of token ids.
pub(super) fn token_ids(value: &Value) -> Option<Vec<u32>> {
    value.as_array()?.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok())).collect()
}

fn start<'a>(engine: &'a Engine, job: &Job, received: bool) -> Running<'a> {
    let queue = Queue::default();
    let mut running = Running { engine, rank: job.rank, ids: Vec::new(), answers: Vec::new(), queue };
    let rank = &engine.ranks[job.rank];
    let abort_names = disagg::abort_names(job.rid.as_deref(), job.sequences());
    for prompt in &job.prompts {
        for sample in 0..job.samples {
            let answer = engine.text.answer(prompt, sample as u32, job.count);
            let choice = running.answers.len();
            let abort_name = abort_names.get(choice).cloned();
            let tokens: Vec<u32> = answer.iter().map(|(token, _)| *token).collect();
            let content = Spelled::new(prompt.clone(), &tokens, job.salt.clone());
            let id =
                engine.submit(rank, &running.queue, choice, abort_name, received, |id| NewSequence { id, content });
            running.ids.push(id);
            running.answers.push(answer.into_iter().map(|(token, text)| (token, text.to_string())).collect());
        }
    }
    running
}

/// What all parts of an answer share.
struct Reply {
    id: String,
    created: u64,
    model: String,
    prompt_tokens: usize,
}

impl Reply {
    fn usage(&self, generated: usize, cached: usize) -> Value {
        json!({"prompt_tokens": self.prompt_tokens, "total_tokens": self.prompt_tokens + generated,
            "completion_tokens": generated, "prompt_tokens_details": {"cached_tokens": cached}})
    }

    /// Appends one event of a Responses stream.
    fn responses_event(&self, out: &mut Vec<u8>, name: &str, mut data: Value) {
        data["type"] = json!(name);
        out.extend_from_slice(format!("event: {name}\ndata: {data}\n\n").as_bytes());
    }

    /// Appends an SSE event with this choice, or with usage alone.
    fn event(&self, out: &mut Vec<u8>, kind: Kind, choices: Value, usage: Option<Value>) {
        let object = if kind == Kind::Chat { "chat.completion.chunk" } else { "text_completion" };
        let mut chunk = json!({"id": self.id, "object": object, "created": self.created, "model": self.model,
            "choices": choices});
        if let Some(usage) = usage {
            chunk["usage"] = usage;
        }
        out.extend_from_slice(format!("data: {chunk}\n\n").as_bytes());
    }
}

fn piece(kind: Kind, index: usize, text: &str, finish_reason: Option<&str>) -> Value {
    match kind {
        Kind::Chat => {
            json!([{"index": index, "delta": {"content": text}, "logprobs": null, "finish_reason": finish_reason}])
        }
        _ => json!([{"index": index, "text": text, "logprobs": null, "finish_reason": finish_reason}]),
    }
}

/// The stream behind its head.
async fn stream(
    connection: &mut Connection,
    job: &Job,
    running: Running<'_>,
    reply: &Reply,
    close_after: Option<u32>,
) -> Result<(), Closed> {
    let mut out = Vec::new();
    let mut events = Vec::new();
    let mut opened = vec![false; running.answers.len()];
    // A Responses stream repeats the whole text at its end.
    let mut whole = String::new();
    let (mut open, mut generated, mut cached) = (running.answers.len(), 0, vec![0; running.answers.len()]);
    while open > 0 {
        let first = monoio::select! {
            progress = running.queue.next() => progress,
            _ = connection.left() => return Err(Closed),
        };
        let mut next = Some(first);
        while let Some(progress) = next {
            let Progress::Token { choice, output } = progress else {
                if job.kind == Kind::Responses {
                    reply.responses_event(&mut events, "response.failed", json!({"response": {"id": reply.id}}));
                    push_chunk(&mut out, &events);
                    out.extend_from_slice(LAST_CHUNK);
                    return connection.write(out).await;
                }
                if job.kind == Kind::Messages {
                    messages::aborted(&mut events);
                    push_chunk(&mut out, &events);
                    out.extend_from_slice(LAST_CHUNK);
                    return connection.write(out).await;
                }
                reply.event(&mut events, job.kind, piece(job.kind, 0, "", Some("abort")), None);
                open = 0;
                break;
            };
            let text = &running.answers[choice][output.position].1;
            if job.kind == Kind::Responses {
                if !std::mem::replace(&mut opened[choice], true) {
                    reply.responses_event(&mut events, "response.created", json!({"response": {"id": reply.id}}));
                }
                whole.push_str(text);
                reply.responses_event(&mut events, "response.output_text.delta", json!({"delta": text}));
            } else if job.kind == Kind::Messages {
                if !std::mem::replace(&mut opened[choice], true) {
                    messages::start(&mut events, &reply.id, &reply.model, reply.prompt_tokens);
                }
                messages::word(&mut events, text);
            } else if job.kind == Kind::Chat && !std::mem::replace(&mut opened[choice], true) {
                let role = json!([{"index": choice, "delta": {"role": "assistant", "content": ""}, "logprobs": null,
                    "finish_reason": null}]);
                reply.event(&mut events, job.kind, role, None);
            }
            let reason = output.last.then_some(job.finish_reason);
            if !matches!(job.kind, Kind::Responses | Kind::Messages) {
                reply.event(&mut events, job.kind, piece(job.kind, choice, text, reason), None);
            }
            generated += 1;
            cached[choice] = output.hits.cached_tokens;
            open -= usize::from(output.last);
            next = running.queue.try_next();
        }
        if close_after.is_some_and(|tokens| generated >= tokens as usize) {
            return Err(Closed);
        }
        if open == 0 && job.kind == Kind::Responses {
            let usage = reply.usage(generated, cached_per_prompt(&cached, job.samples));
            let body = responses::body(&reply.id, reply.created, &reply.model, &whole, job.finish_reason, &usage);
            let name = if job.finish_reason == "length" { "response.incomplete" } else { "response.completed" };
            reply.responses_event(&mut events, name, json!({"response": body}));
        } else if open == 0 && job.kind == Kind::Messages {
            let usage = reply.usage(generated, cached_per_prompt(&cached, job.samples));
            messages::end(&mut events, job.finish_reason, &usage);
        } else if open == 0 {
            if job.include_usage {
                let usage = reply.usage(generated, cached_per_prompt(&cached, job.samples));
                reply.event(&mut events, job.kind, json!([]), Some(usage));
            }
            events.extend_from_slice(b"data: [DONE]\n\n");
        }
        push_chunk(&mut out, &std::mem::take(&mut events));
        if open == 0 {
            out.extend_from_slice(LAST_CHUNK);
        }
        connection.write(std::mem::take(&mut out)).await?;
    }
    Ok(())
}

/// Cached prompt tokens count once per prompt: those of its first sample.
fn cached_per_prompt(cached: &[usize], samples: usize) -> usize {
    cached.iter().step_by(samples).sum()
}

/// An answer's texts and counts, complete.
struct Collected {
    texts: Vec<String>,
    generated: usize,
    cached: Vec<usize>,
    reason: &'static str,
}

async fn whole(
    connection: &mut Connection,
    request: &Request,
    job: &Job,
    running: Running<'_>,
    reply: &Reply,
) -> Result<(), Closed> {
    let body = collect(connection, job, running).await?.into_body(job, reply);
    connection.answer(request, 200, &body).await
}

async fn collect(connection: &mut Connection, job: &Job, running: Running<'_>) -> Result<Collected, Closed> {
    let mut texts = vec![String::new(); running.answers.len()];
    let (mut open, mut generated, mut cached) = (texts.len(), 0, vec![0; texts.len()]);
    let mut reason = job.finish_reason;
    while open > 0 {
        let progress = monoio::select! {
            progress = running.queue.next() => progress,
            _ = connection.left() => return Err(Closed),
        };
        let Progress::Token { choice, output } = progress else {
            reason = "abort";
            break;
        };
        texts[choice].push_str(&running.answers[choice][output.position].1);
        generated += 1;
        cached[choice] = output.hits.cached_tokens;
        open -= usize::from(output.last);
    }
    Ok(Collected { texts, generated, cached, reason })
}

impl Collected {
    fn into_body(self, job: &Job, reply: &Reply) -> Value {
        if job.kind == Kind::Responses {
            let usage = reply.usage(self.generated, cached_per_prompt(&self.cached, job.samples));
            return responses::body(&reply.id, reply.created, &reply.model, &self.texts.concat(), self.reason, &usage);
        }
        if job.kind == Kind::Messages {
            let usage = reply.usage(self.generated, cached_per_prompt(&self.cached, job.samples));
            return messages::body(&reply.id, &reply.model, &self.texts.concat(), self.reason, &usage);
        }
        let reason = self.reason;
        let choice = |(index, text): (usize, String)| match job.kind {
            Kind::Chat => json!({"index": index, "message": {"role": "assistant", "content": text}, "logprobs": null,
                "finish_reason": reason}),
            _ => json!({"index": index, "text": text, "logprobs": null, "finish_reason": reason}),
        };
        let choices: Vec<Value> = self.texts.into_iter().enumerate().map(choice).collect();
        let object = if job.kind == Kind::Chat { "chat.completion" } else { "text_completion" };
        json!({"id": reply.id, "object": object, "created": reply.created, "model": reply.model,
            "choices": choices, "usage": reply.usage(self.generated, cached_per_prompt(&self.cached, job.samples))})
    }
}
