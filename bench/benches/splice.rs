//! The bodies of both legs of a pair, made in the client's own bytes: a small chat and one of 400 kB.

use std::hint::black_box;

use bench::conversation::{Writer, body};
use bytes::Bytes;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use infera_router::pd::{AttemptIds, Members, Pair, PdEndpoint, Peer, decode_leg, prefill_leg};
use infera_router::worker::WorkerRecord;
use rand::SeedableRng;
use rand::rngs::SmallRng;
use serde_json::json;

fn peer(role: &str) -> Peer {
    let record = json!({"worker_id": "10.0.0.1:30000", "url": "http://10.0.0.1:30000", "model_name": "m",
        "kv_block_size": 16, "dp_size": 1, "disagg_mode": role,
        "disagg_meta": {"protocol": "sglang-bootstrap", "params": {"bootstrap_addr": "10.0.0.1:9000"}}});
    let parsed = WorkerRecord::from_value(record).expect("a record of ours");
    Peer::of(&parsed.record).expect("a protocol of ours")
}

fn splicing(criterion: &mut Criterion) {
    let (prefill, decode) = (peer("prefill"), peer("decode"));
    let pair = Pair { prefill: &prefill, decode: &decode, prefill_rank: None };
    let mut random = SmallRng::seed_from_u64(1);
    let mut group = criterion.benchmark_group("splice");
    for (name, bytes) in [("small", 100), ("400 kB", 400_000)] {
        let mut writer = Writer::new(1);
        let messages =
            if bytes < 1_000 { vec![json!({"role": "user", "content": "hello"})] } else { writer.conversation(bytes) };
        let body: Bytes = body(&messages).into();
        group.throughput(Throughput::Bytes(body.len() as u64));
        group.bench_with_input(BenchmarkId::new("members", name), &body, |bencher, body| {
            bencher.iter(|| Members::scan(black_box(body)).expect("an object"));
        });
        let members = Members::scan(&body).expect("an object");
        group.bench_with_input(BenchmarkId::new("both legs", name), &members, |bencher, members| {
            bencher.iter(|| {
                let ids = AttemptIds::draw(&mut random, 1, None);
                let first = prefill_leg(&pair, PdEndpoint::Chat, members, &ids);
                (first, decode_leg(&pair, PdEndpoint::Chat, members, &ids, None))
            });
        });
    }
    group.finish();
}

criterion_group!(benches, splicing);
criterion_main!(benches);
