//! Asks a worker how it tokenizes fixed conversations, before it gets traffic, and again when what it says of itself
//! changes. Never holds up a worker: until there is a verdict, and without one, it is routed to as any other.

use std::sync::Arc;
use std::time::Duration;

use reqwest::{Client, StatusCode};
use serde_json::Value;
use tokio::sync::watch;

use super::attendant::Tools;
use super::facts::Facts;
use super::registry::{Message, Visit};
use crate::fleet::Parity;
use crate::limits;
use crate::parity::{Answer, Probe, judge, own_tokens, probes};
use crate::prompt::{EngineRules, Prompter, Variant};
use crate::worker::{WorkerRecord, WorkerUrl};

/// Longest pause between two probes of a worker that has not given a full answer.
const PAUSE_MAX: Duration = Duration::from_secs(300);

/// Probes a worker until there is a verdict, and anew when its facts change; runs until aborted. `facts` holds nothing
/// before the first questions are answered.
pub(super) async fn compare(
    tools: &Tools,
    visit: &Visit,
    record: &WorkerRecord,
    mut facts: watch::Receiver<Option<Facts>>,
) {
    let Some(prompter) = &tools.prompter else { return };
    let mut compared: Option<WorkerRecord> = None;
    loop {
        let Ok(known) = facts.wait_for(Option::is_some).await.map(|known| known.clone().unwrap_or_default()) else {
            return;
        };
        let complete = known.complete(record);
        if compared.as_ref() != Some(&complete) && complete.is_active() {
            probe_until_answered(tools, visit, &complete, prompter, &mut facts).await;
            compared = Some(complete);
        }
        if !facts.has_changed().unwrap_or(false) && facts.changed().await.is_err() {
            return;
        }
    }
}

async fn probe_until_answered(
    tools: &Tools,
    visit: &Visit,
    record: &WorkerRecord,
    prompter: &Arc<Prompter>,
    facts: &mut watch::Receiver<Option<Facts>>,
) {
    facts.mark_unchanged();
    let mut pause = tools.timing.ask_backoff.0;
    loop {
        let outcome = match tools.questions.acquire().await {
            Ok(_permit) => probe(tools, record, prompter).await,
            Err(_) => return,
        };
        let (parity, detail, is_final) = outcome;
        if tools.queue.send(Message::Parity(visit.clone(), parity, detail)).await.is_err() || is_final {
            return;
        }
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            // Nobody is left to tell where nothing was open: then only the pause ends.
            Ok(()) = facts.changed() => { facts.mark_changed(); return }
        }
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

/// Verdict, its reason, and whether asking again could change it.
async fn probe(tools: &Tools, record: &WorkerRecord, prompter: &Arc<Prompter>) -> (Parity, String, bool) {
    let Ok(url) = record.endpoint() else { return (Parity::Unknown, "no address".to_owned(), true) };
    let rules = EngineRules::of_engine(&record.engine);
    let arguments = record.default_chat_template_kwargs.clone().filter(|_| tools.template_arguments);
    let variant = arguments.as_ref().and_then(|arguments| Variant::of(arguments).ok());
    let told = variant.as_ref().unwrap_or(prompter.fleet_variant()).arguments();
    let probes = probes(rules, &record.model_name, Some(&told));
    let mut answers = Vec::new();
    for Probe { body, .. } in &probes {
        match tokenize(&tools.client.load_full(), &url, rules, body).await {
            // The others would wait as long, and the round is repeated anyway.
            Tokenized::Answer(Answer::Silent) => {
                answers.push(Answer::Silent);
                break;
            }
            Tokenized::Answer(answer) => answers.push(answer),
            Tokenized::NotOffered => return (Parity::Unknown, "the worker does not tokenize".to_owned(), true),
        }
    }
    // Rendering is short, but the first text of a thread takes a while, and this one has others to attend to.
    let (prompter, judged) = (prompter.clone(), probes);
    let verdict = tokio::task::spawn_blocking(move || {
        let own = own_tokens(&prompter, rules, variant.as_ref(), &judged);
        judge(&judged, &own, &answers)
    });
    match verdict.await {
        Ok((parity, detail)) => (parity, detail, parity != Parity::Unknown),
        Err(error) => (Parity::Unknown, format!("cannot be compared: {error}"), true),
    }
}

enum Tokenized {
    Answer(Answer),
    NotOffered,
}

async fn tokenize(client: &Client, url: &WorkerUrl, rules: EngineRules, body: &Value) -> Tokenized {
    let paths: &[&str] = match rules {
        EngineRules::Sglang => &["/v1/tokenize", "/tokenize"],
        EngineRules::Vllm => &["/tokenize"],
    };
    for path in paths {
        let request = client.post(url.join(path)).header("content-type", "application/json").body(body.to_string());
        let Ok(response) = request.send().await else { return Tokenized::Answer(Answer::Silent) };
        match response.status() {
            StatusCode::OK => return Tokenized::Answer(read_tokens(response).await),
            StatusCode::BAD_REQUEST | StatusCode::UNPROCESSABLE_ENTITY => return Tokenized::Answer(Answer::Refused),
            StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS => return Tokenized::Answer(Answer::Silent),
            status if status.is_client_error() || status == StatusCode::NOT_IMPLEMENTED => {}
            _ => return Tokenized::Answer(Answer::Silent),
        }
    }
    Tokenized::NotOffered
}

async fn read_tokens(mut response: reqwest::Response) -> Answer {
    let mut body = Vec::new();
    while let Ok(Some(chunk)) = response.chunk().await {
        if body.len() + chunk.len() > limits::ENGINE_ANSWER_BYTES_MAX {
            return Answer::Silent;
        }
        body.extend_from_slice(&chunk);
    }
    let tokens = serde_json::from_slice::<Value>(&body).ok().and_then(|mut answer| {
        let tokens = answer.get_mut("tokens")?.take();
        serde_json::from_value::<Vec<u32>>(tokens).ok()
    });
    tokens.map_or(Answer::Silent, Answer::Tokens)
}
