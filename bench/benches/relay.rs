//! One exchange through the engine room over loopback, in one process: client, one shard that passes everything on, and a
//! backend with its answer ready. Wall time of all three; next to it the same without the shard.

use std::net::SocketAddr;

use bench::answer::{self, Answer, JSON_BYTES};
use bench::backend::Backend;
use bench::exchange::Exchange;
use bench::machine::Cores;
use criterion::{Criterion, criterion_group, criterion_main};
use infera_shards::{
    Engine, EngineConfig, IgnoreBody, Rejection, Relay, Request, Responder, Response, Service, ShardContext,
    UpstreamRequest,
};

/// Passes every request on to one address.
struct PassOn {
    context: ShardContext,
    upstream: SocketAddr,
}

impl Service for PassOn {
    async fn call(&self, request: Request, responder: &mut Responder) {
        let upstream = UpstreamRequest {
            address: self.upstream,
            tls: None,
            authority: "backend",
            method: &request.method,
            path_prefix: "",
            target: &request.target,
            headers: Some(&request.head),
            remove: &[],
            set: &[],
            body: std::slice::from_ref(&request.body),
        };
        // Without an answer the engine says 500, and the exchange fails by name.
        if let Ok(answer) = self.context.upstream.send(&upstream).await {
            let relay = Relay { set: &[], remove: &[], observer: &mut IgnoreBody, cut_notice: None };
            responder.relay(answer, relay).await;
        }
    }

    fn reject(&self, rejection: &Rejection) -> Response {
        Response { status: rejection.status, headers: Vec::new(), body: rejection.reason.into() }
    }
}

fn relaying(criterion: &mut Criterion) {
    let cores = Cores::detect().expect("cores");
    let backend = Backend::start(cores.load, Answer::json(JSON_BYTES)).expect("the backend");
    let upstream = backend.address();
    let mut config = EngineConfig::new(SocketAddr::from(([127, 0, 0, 1], 0)));
    config.shards = 1;
    let engine = Engine::start(config, move |context| PassOn { context, upstream }).expect("the engine");
    let mut group = criterion.benchmark_group("relay");
    for (kind, is_stream) in [("small JSON", false), ("64 events", true)] {
        for (way, address) in [("through a shard", engine.local_addr()), ("direct", upstream)] {
            let answer = if is_stream { Answer::stream(None) } else { Answer::json(JSON_BYTES) };
            let payload_bytes = answer.payload.len();
            backend.set_answer(answer);
            let request = answer::request(&address.to_string(), is_stream, 200);
            let mut exchange = Exchange::connect(address).expect("a connection");
            group.bench_function(format!("{kind}, {way}"), |bencher| {
                bencher.iter(|| {
                    let mut received = 0;
                    exchange.run(&request, |data| received += data.len()).expect("an answer");
                    assert_eq!(received, payload_bytes);
                });
            });
        }
    }
    group.finish();
}

criterion_group!(benches, relaying);
criterion_main!(benches);
