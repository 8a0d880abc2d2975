//! A minimal pass-through proxy on the engine: `proxy --listen ADDRESS --upstream ADDRESS [--shards N] [--epoll]
//! [--cpus 0,1]`. It owns no policy and never retries; a failed upstream is a 502.

use std::net::SocketAddr;

use bytes::Bytes;
use http::StatusCode;
use infera_shards::{
    DriverChoice, Engine, EngineConfig, IgnoreBody, Rejection, Relay, Request, Responder, Response, Service,
    ShardContext, UpstreamRequest,
};

/// As in the router: glibc keeps the memory of a peak, and frees through a lock.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

struct Proxy {
    context: ShardContext,
    upstream: SocketAddr,
    authority: String,
}

fn text(status: StatusCode, text: impl Into<String>) -> Response {
    Response { status, headers: Vec::new(), body: Bytes::from(text.into()) }
}

impl Service for Proxy {
    async fn call(&self, request: Request, responder: &mut Responder) {
        let body = [request.body];
        let outgoing = UpstreamRequest {
            address: self.upstream,
            tls: None,
            authority: &self.authority,
            method: &request.method,
            path_prefix: "",
            target: &request.target,
            headers: Some(&request.head),
            remove: &[],
            set: &[],
            body: &body,
        };
        match self.context.upstream.send(&outgoing).await {
            Ok(answer) => {
                let relay = Relay { set: &[], remove: &[], observer: &mut IgnoreBody, cut_notice: None };
                responder.relay(answer, relay).await;
            }
            Err(error) => {
                let _ = responder.send(text(StatusCode::BAD_GATEWAY, format!("{error}\n"))).await;
            }
        }
    }

    fn reject(&self, rejection: &Rejection) -> Response {
        text(rejection.status, format!("{}\n", rejection.reason))
    }
}

fn main() {
    let mut config = EngineConfig::new(SocketAddr::from(([127, 0, 0, 1], 0)));
    let mut upstream = None;
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        let mut value = || arguments.next().unwrap_or_else(usage);
        match name.as_str() {
            "--listen" => config.listen = value().parse().unwrap_or_else(|_| usage()),
            "--upstream" => upstream = Some(value().parse().unwrap_or_else(|_| usage())),
            "--shards" => config.shards = value().parse().unwrap_or_else(|_| usage()),
            "--cpus" => config.cpus = value().split(',').map(|cpu| cpu.parse().ok()).collect(),
            "--epoll" => config.driver = DriverChoice::Epoll,
            _ => usage(),
        }
    }
    let upstream: SocketAddr = upstream.unwrap_or_else(usage);
    let authority = upstream.to_string();
    let started = Engine::start(config, move |context| Proxy { context, upstream, authority: authority.clone() });
    match started {
        Ok(engine) => {
            eprintln!("listening on {} with {:?}", engine.local_addr(), engine.driver());
            loop {
                std::thread::park();
            }
        }
        Err(error) => {
            eprintln!("{error}");
            std::process::exit(1);
        }
    }
}

fn usage<T>() -> T {
    eprintln!("usage: proxy --listen ADDRESS --upstream ADDRESS [--shards N] [--epoll] [--cpus 0,1]");
    std::process::exit(2)
}
