//! Owns an engine's HTTP connections and its small endpoints. Never generates text (see [`super::generate`]).

use std::rc::Rc;

use monoio::net::TcpStream;
use serde_json::{Value, json};

use super::core::Engine;
use super::events::EngineStyle;
use super::{disagg, generate, messages, pooling, shapes};
use crate::net::server::{Request, RequestError, read_request, response};
use crate::net::stream::{Reader, Writer, split};

/// A client that sends this much ahead while it waits for an answer is cut off.
const PIPELINED_BYTES_MAX: usize = 1024 * 1024;

/// One connection as handlers see it.
pub(super) struct Connection {
    reader: Reader,
    writer: Writer,
    input: Vec<u8>,
}

/// The connection must be closed.
pub(super) struct Closed;

impl Connection {
    pub async fn write(&mut self, bytes: Vec<u8>) -> Result<(), Closed> {
        self.writer.write_all(bytes).await.map(drop).map_err(|_| Closed)
    }

    /// Resolves when the client has left; keeps what it sent ahead.
    pub async fn left(&mut self) {
        loop {
            match self.reader.more(&mut self.input).await {
                Ok(count) if count > 0 && self.input.len() <= PIPELINED_BYTES_MAX => {}
                _ => return,
            }
        }
    }

    /// Whether the client has left already, as far as is known without waiting.
    pub async fn has_left(&mut self) -> bool {
        monoio::select! {
            _ = self.left() => true,
            // Two turns of the scheduler: a read that is posted now reports what had arrived.
            _ = monoio::time::sleep(std::time::Duration::from_millis(1)) => false,
        }
    }

    /// A JSON answer.
    pub async fn answer(&mut self, request: &Request, status: u16, body: &Value) -> Result<(), Closed> {
        self.answer_bytes(request, status, "application/json", body.to_string().as_bytes()).await
    }

    pub async fn answer_bytes(
        &mut self,
        request: &Request,
        status: u16,
        content_type: &str,
        body: &[u8],
    ) -> Result<(), Closed> {
        let id = request.request_id.as_deref().map(|id| ("x-request-id", id));
        let body: &[u8] = if request.method == "HEAD" { b"" } else { body };
        self.write(response(status, content_type, id.as_slice(), body, request.keep_alive)).await
    }

    /// An error in OpenAI's shape.
    pub async fn refuse(&mut self, request: &Request, error: &shapes::ApiError) -> Result<(), Closed> {
        self.answer(request, error.status, &error.body()).await
    }
}

/// Serves a connection until the client leaves or the engine stops.
pub(super) async fn serve(engine: Rc<Engine>, stream: TcpStream) {
    let Ok((reader, writer)) = split(stream) else { return };
    engine.shared.update(|state| state.connections_open += 1);
    let mut connection = Connection { reader, writer, input: Vec::new() };
    monoio::select! {
        _ = serve_requests(&engine, &mut connection) => {}
        _ = engine.stop.wait() => {}
    }
    engine.shared.update(|state| state.connections_open -= 1);
}

async fn serve_requests(engine: &Rc<Engine>, connection: &mut Connection) {
    loop {
        let Connection { reader, writer, input } = connection;
        let request = match read_request(reader, writer, input).await {
            Ok(Some(request)) => request,
            Ok(None) | Err(RequestError::Gone) => return,
            Err(RequestError::Refused(status, message)) => {
                let error = shapes::ApiError::new(status, "BadRequestError", message);
                let request = Request::default();
                let _ = connection.refuse(&request, &error).await;
                return;
            }
        };
        let keep_alive = request.keep_alive;
        let open = OpenRequest::count(engine);
        let outcome = handle(engine, connection, &request).await;
        drop(open);
        if outcome.is_err() || !keep_alive {
            return;
        }
    }
}

/// Counts a request as open while it lives.
struct OpenRequest(Rc<Engine>);

impl OpenRequest {
    fn count(engine: &Rc<Engine>) -> OpenRequest {
        engine.shared.update(|state| state.requests_open += 1);
        OpenRequest(engine.clone())
    }
}

impl Drop for OpenRequest {
    fn drop(&mut self) {
        self.0.shared.update(|state| state.requests_open -= 1);
    }
}

async fn handle(engine: &Rc<Engine>, connection: &mut Connection, request: &Request) -> Result<(), Closed> {
    let sglang = engine.config.style == EngineStyle::Sglang;
    match (request.method.as_str(), request.path.as_str()) {
        ("POST", "/v1/chat/completions") => generate::respond(engine, connection, request, generate::Kind::Chat).await,
        ("POST", "/v1/completions") => generate::respond(engine, connection, request, generate::Kind::Text).await,
        ("POST", "/v1/responses") => generate::respond(engine, connection, request, generate::Kind::Responses).await,
        ("POST", "/v1/messages") if engine.config.speaks_messages => {
            generate::respond(engine, connection, request, generate::Kind::Messages).await
        }
        ("POST", "/v1/messages/count_tokens") if engine.config.speaks_messages => {
            count_tokens(engine, connection, request).await
        }
        ("GET" | "HEAD", "/health" | "/health_generate") => {
            let status = if engine.faults.borrow().unhealthy { 503 } else { 200 };
            connection.answer_bytes(request, status, "text/plain", b"").await
        }
        ("GET", "/v1/models") => connection.answer(request, 200, &shapes::models(engine)).await,
        ("GET", "/metrics") => {
            let text = shapes::metrics(engine);
            connection.answer_bytes(request, 200, "text/plain; version=0.0.4; charset=utf-8", text.as_bytes()).await
        }
        ("POST", "/tokenize") if engine.config.tokenizes => tokenize(engine, connection, request).await,
        ("POST", "/detokenize") => detokenize(engine, connection, request).await,
        ("GET", "/kv_event_sources") if !sglang => {
            connection.answer(request, 200, &shapes::kv_event_sources(engine)).await
        }
        ("GET", "/server_info" | "/get_server_info") if sglang => {
            connection.answer(request, 200, &shapes::server_info(engine)).await
        }
        ("POST", "/reset_prefix_cache") if !sglang => {
            // vLLM answers 200 whether or not running requests kept the cache from being emptied.
            engine.clear_cache();
            connection.answer_bytes(request, 200, "text/plain", b"").await
        }
        ("POST" | "GET", "/flush_cache") if sglang => {
            let (status, text) = match engine.clear_cache() {
                true => (200, "Cache flushed.\n"),
                false => (400, "Flush cache failed: requests are running.\n"),
            };
            connection.answer_bytes(request, status, "text/plain", text.as_bytes()).await
        }
        ("POST", "/pd/pull") => disagg::pull(engine, connection, request).await,
        ("POST", "/pd/release") => disagg::release(engine, connection, request).await,
        ("POST", "/abort_request") => abort(engine, connection, request).await,
        ("GET", "/admin/state") => connection.answer(request, 200, &shapes::state(engine)).await,
        ("GET", "/admin/faults") => {
            let body = json!(*engine.faults.borrow());
            connection.answer(request, 200, &body).await
        }
        ("POST", "/admin/faults") => set_faults(engine, connection, request).await,
        ("POST", _) if let Some(answer) = pooling::answer(engine, request) => match answer {
            Ok(body) => connection.answer(request, 200, &body).await,
            Err(error) => connection.refuse(request, &error).await,
        },
        _ => {
            let error = shapes::ApiError::new(404, "NotFoundError", "Not Found");
            connection.refuse(request, &error).await
        }
    }
}

async fn set_faults(engine: &Rc<Engine>, connection: &mut Connection, request: &Request) -> Result<(), Closed> {
    match serde_json::from_slice(&request.body) {
        Ok(faults) => {
            engine.set_faults(faults);
            let body = json!(*engine.faults.borrow());
            connection.answer(request, 200, &body).await
        }
        Err(error) => connection.refuse(request, &shapes::ApiError::bad_request(&error.to_string())).await,
    }
}

async fn tokenize(engine: &Rc<Engine>, connection: &mut Connection, request: &Request) -> Result<(), Closed> {
    let tokens = shapes::parse_body(&request.body).and_then(|body| {
        let encoded = match body.get("messages") {
            Some(_) => engine.chat_ids(&body),
            None => engine.text.encode(body["prompt"].as_str().unwrap_or_default()),
        };
        encoded.map_err(|error| shapes::ApiError::bad_request(&error.to_string()))
    });
    match tokens {
        Ok(tokens) => {
            let body = json!({"count": tokens.len(), "max_model_len": engine.config.context_length,
                "tokens": tokens, "token_strs": null});
            connection.answer(request, 200, &body).await
        }
        Err(error) => connection.refuse(request, &error).await,
    }
}

async fn count_tokens(engine: &Rc<Engine>, connection: &mut Connection, request: &Request) -> Result<(), Closed> {
    let counted = shapes::parse_body(&request.body).and_then(|body| {
        let chat = messages::as_chat(&body).ok_or_else(|| shapes::ApiError::bad_request("`messages` is required"))?;
        engine.chat_ids(&chat).map_err(|error| shapes::ApiError::bad_request(&error.to_string()))
    });
    match counted {
        Ok(tokens) => connection.answer(request, 200, &json!({"input_tokens": tokens.len()})).await,
        Err(error) => connection.answer(request, error.status, &messages::error_body(&error)).await,
    }
}

async fn detokenize(engine: &Rc<Engine>, connection: &mut Connection, request: &Request) -> Result<(), Closed> {
    let text = shapes::parse_body(&request.body).and_then(|body| {
        let tokens = generate::token_ids(&body["tokens"]).unwrap_or_default();
        engine.text.decode(&tokens).map_err(|error| shapes::ApiError::bad_request(&error.to_string()))
    });
    match text {
        Ok(text) => connection.answer(request, 200, &json!({"prompt": text})).await,
        Err(error) => connection.refuse(request, &error).await,
    }
}

/// `{"rid": name}` or `{"abort_all": true}`; with several samples the name of one is `<rid>_<index>`.
async fn abort(engine: &Rc<Engine>, connection: &mut Connection, request: &Request) -> Result<(), Closed> {
    match shapes::parse_body(&request.body) {
        Ok(body) => {
            let all = body["abort_all"] == true;
            let rid = body["rid"].as_str().unwrap_or_default();
            let matches = |name: &str| all || (!rid.is_empty() && name == rid);
            let aborted = engine.abort_named(matches) + engine.disagg.abort_named(matches);
            engine.report_transfers();
            connection.answer(request, 200, &json!({"aborted": aborted})).await
        }
        Err(error) => connection.refuse(request, &error).await,
    }
}
