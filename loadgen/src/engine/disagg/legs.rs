//! Owns both halves' part of a request's life: the prefill answer and the KV it holds, the decode engine's wait for KV,
//! and the small HTTP exchange between two engines. Never schedules.

use std::rc::Rc;
use std::time::{Duration, Instant};

use monoio::io::{AsyncReadRent, AsyncWriteRentExt};
use monoio::net::TcpStream;
use serde_json::{Value, json};

use super::super::api::{Closed, Connection};
use super::super::core::Engine;
use super::super::shapes::{self, ApiError};
use super::plan::{Source, handoff, rank_engine_id};
use super::transfers::Pulled;
use super::{Disagg, PdProtocol, abort_names};
use crate::net::server::Request;
use crate::net::signal::Latch;

/// Longest wait for a prefill request that does not come.
const PULL_TIMEOUT: Duration = Duration::from_secs(60);
const PULL_ANSWER_BYTES_MAX: usize = 16 * 1024;

/// The KV of one prefill request; what is still its own when it is dropped is freed as the protocol allows.
pub(in super::super) struct HeldKv {
    engine: Rc<Engine>,
    names: Vec<String>,
    pub rank: u32,
    protocol: PdProtocol,
    /// Freed by nothing but a pull, an abort or the timeout from here on.
    answered: bool,
}

impl HeldKv {
    /// Claims the names.
    pub fn begin(engine: &Rc<Engine>, names: Vec<String>, rank: u32, rid: Option<&str>) -> Result<HeldKv, ApiError> {
        let Some(disagg) = &engine.config.disagg else { return Err(ApiError::bad_request("not a prefill engine")) };
        let now = Instant::now();
        let mut held =
            HeldKv { engine: engine.clone(), names: Vec::new(), rank, protocol: disagg.protocol, answered: false };
        let abort_names = abort_names(rid, names.len());
        for (at, name) in names.iter().enumerate() {
            if !engine.disagg.transfers.borrow_mut().begin(name, rank, abort_names.get(at).cloned(), now) {
                let message = format!("transfer {name} is already in use");
                return Err(ApiError::new(500, "InternalServerError", &message));
            }
            held.names.push(name.clone());
        }
        engine.report_transfers();
        Ok(held)
    }

    /// The sequence's KV is complete.
    fn ready(&self, choice: usize) {
        let name = self.names.get(choice).or(self.names.first()).map_or("", String::as_str);
        self.engine.disagg.transfers.borrow_mut().ready(name, Instant::now());
        self.engine.report_transfers();
    }

    /// Waits until each name was pulled or freed.
    async fn gone(&self) {
        for name in &self.names {
            while let Some(changed) = { self.engine.disagg.transfers.borrow().watch(name) } {
                changed.wait().await;
            }
        }
    }
}

impl Drop for HeldKv {
    fn drop(&mut self) {
        // SGLang's KV outlives its connection: its owner has to abort it.
        if !self.answered && !self.protocol.is_sglang() {
            let mut transfers = self.engine.disagg.transfers.borrow_mut();
            self.names.iter().for_each(|name| _ = transfers.free(name));
        }
        self.engine.report_transfers();
    }
}

/// Answers a prefill request whose sequences are all computed (`finish_reason` is that of the first): `body` is the
/// plain answer.
pub(in super::super) async fn answer_prefill(
    connection: &mut Connection,
    request: &Request,
    mut held: HeldKv,
    mut body: Value,
    blocks: usize,
    is_cut_by_length: bool,
) -> Result<(), Closed> {
    let engine = held.engine.clone();
    let Some(Disagg { protocol, .. }) = engine.config.disagg else { return Err(Closed) };
    if !is_cut_by_length && !protocol.is_sglang() {
        // A sequence that ended by itself hands nothing over: dropping the guard frees it.
        drop(held);
        return connection.answer(request, 200, &body).await;
    }
    (0..held.names.len()).for_each(|choice| held.ready(choice));
    if protocol.is_sglang() {
        monoio::select! {
            _ = held.gone() => {}
            _ = connection.left() => return Err(Closed),
        }
    } else if let Some(disagg) = &engine.config.disagg {
        let parameters = handoff(&engine, disagg, &held.names[0], held.rank, blocks);
        if protocol.hands_over() {
            body["kv_transfer_params"] = parameters;
        }
        held.answered = true;
    }
    connection.answer(request, 200, &body).await
}

/// How the wait for KV ended.
pub(in super::super) enum DecodeOutcome {
    Arrived,
    /// The prefill engine has it no more, or cannot be reached.
    Failed(String),
    Aborted,
}

/// A decode request that waits. One that is dropped before its KV came tells the prefill engine, as vLLM does.
pub(in super::super) struct Waiting<'a> {
    engine: &'a Rc<Engine>,
    id: u64,
    aborted: Latch,
    left: Vec<Source>,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.engine.disagg.waiting.borrow_mut().remove(&self.id);
        self.engine.report_transfers();
        let is_sglang = self.engine.config.disagg.as_ref().is_some_and(|disagg| disagg.protocol.is_sglang());
        if is_sglang {
            return;
        }
        for source in std::mem::take(&mut self.left) {
            // Not a task of the engine's: it must not hold up its stop, and has its own deadline.
            monoio::spawn(async move {
                let told = tell(&source, "/pd/release", json!({"name": source.name}));
                let _ = monoio::time::timeout(Duration::from_secs(5), told).await;
            });
        }
    }
}

impl<'a> Waiting<'a> {
    /// From here on the request owns what `sources` name.
    pub fn begin(engine: &'a Rc<Engine>, sources: Vec<Source>, rid: Option<&str>, sequences: usize) -> Waiting<'a> {
        let id = engine.disagg.next.get();
        engine.disagg.next.set(id + 1);
        let aborted = Latch::default();
        let names = abort_names(rid, sequences);
        engine.disagg.waiting.borrow_mut().insert(id, (names, aborted.clone()));
        engine.report_transfers();
        Waiting { engine, id, aborted, left: sources }
    }

    /// Pulls the KV of all sources, or until the client has left.
    pub async fn fetch_kv(mut self, connection: &mut Connection) -> Result<DecodeOutcome, Closed> {
        while let Some(source) = self.left.first().cloned() {
            let body = json!({"name": source.name, "rank": source.rank, "engine_id": source.engine_id});
            monoio::select! {
                told = tell(&source, "/pd/pull", body) => match told {
                    Ok(200) => _ = self.left.remove(0),
                    Ok(status) => {
                        self.left.remove(0);
                        return Ok(DecodeOutcome::Failed(format!("transfer {} failed ({status})", source.name)));
                    }
                    Err(error) => {
                        return Ok(DecodeOutcome::Failed(format!("transfer {} failed: {error}", source.name)));
                    }
                },
                _ = self.aborted.wait() => return Ok(DecodeOutcome::Aborted),
                _ = connection.left() => return Err(Closed),
                _ = self.engine.stop.wait() => return Err(Closed),
            }
        }
        Ok(DecodeOutcome::Arrived)
    }
}

/// One request to the other engine; gives the answer's status.
async fn tell(source: &Source, path: &str, body: Value) -> std::io::Result<u16> {
    let mut stream = TcpStream::connect((source.host.as_str(), source.port)).await?;
    let body = body.to_string();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: {}\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        source.host,
        body.len()
    );
    stream.write_all(format!("{head}{body}").into_bytes()).await.0?;
    let mut answer = Vec::new();
    loop {
        let (read, buffer) = stream.read(Vec::with_capacity(1024)).await;
        let count = read?;
        answer.extend_from_slice(&buffer[..count]);
        let status = answer.get(9..12).and_then(|digits| std::str::from_utf8(digits).ok()?.parse().ok());
        match status {
            Some(status) if answer.ends_with(b"}") || count == 0 => return Ok(status),
            _ if count == 0 || answer.len() > PULL_ANSWER_BYTES_MAX => {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
            _ => {}
        }
    }
}

/// `POST /pd/pull`: waits for the named KV and takes it.
pub(in super::super) async fn pull(
    engine: &Rc<Engine>,
    connection: &mut Connection,
    request: &Request,
) -> Result<(), Closed> {
    let body = match shapes::parse_body(&request.body) {
        Ok(body) => body,
        Err(error) => return connection.refuse(request, &error).await,
    };
    let (name, rank) = (body["name"].as_str().unwrap_or_default(), body["rank"].as_u64().map(|rank| rank as u32));
    let known = body["engine_id"]
        .as_str()
        .is_none_or(|id| (0..engine.ranks.len() as u32).any(|rank| rank_engine_id(engine, rank) == id));
    // Which rank the engine id means, if it names one.
    let rank = rank.or_else(|| body["engine_id"].as_str()?.rsplit_once("_dp")?.1.parse().ok());
    if !known {
        engine.disagg.transfers.borrow_mut().misdirected();
        return connection.answer(request, 404, &json!({"error": "another engine"})).await;
    }
    let deadline = Instant::now() + PULL_TIMEOUT;
    loop {
        let pulled = engine.disagg.transfers.borrow_mut().pull(name, rank, Instant::now());
        engine.report_transfers();
        let changed = match pulled {
            Pulled::Delivered => return connection.answer(request, 200, &json!({"kv": "delivered"})).await,
            Pulled::Ended => return connection.answer(request, 410, &json!({"error": "gone"})).await,
            Pulled::Misdirected => return connection.answer(request, 404, &json!({"error": "another rank"})).await,
            Pulled::Wait(changed) => changed,
        };
        let left = deadline.saturating_duration_since(Instant::now());
        let given_up = monoio::select! {
            _ = changed.wait() => false,
            _ = monoio::time::sleep(left) => true,
            _ = connection.left() => true,
        };
        if given_up {
            engine.disagg.transfers.borrow_mut().forget_expected(name);
            return connection.answer(request, 408, &json!({"error": "no prefill request came"})).await;
        }
    }
}

/// `POST /pd/release`: the decode request ended before it pulled.
pub(in super::super) async fn release(
    engine: &Rc<Engine>,
    connection: &mut Connection,
    request: &Request,
) -> Result<(), Closed> {
    let name = shapes::parse_body(&request.body).ok().and_then(|body| Some(body["name"].as_str()?.to_string()));
    let freed = name.is_some_and(|name| engine.disagg.transfers.borrow_mut().free(&name));
    engine.report_transfers();
    connection.answer(request, 200, &json!({"freed": freed})).await
}
