//! The metrics page by the letter of its format, and label sets that clients cannot make grow.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;

use crate::support::client::{Connection, request};
use crate::support::router::{Router, router};
use crate::support::wait_until;
use crate::support::worker::json_worker;

/// One sample: name, labels in order, value.
pub type Sample = (String, BTreeMap<String, String>, f64);

/// Reads a page by the rules of the text format (version 0.0.4) and those that a careful exporter follows: one HELP and
/// one TYPE per family, in front of its samples, samples of a family together, no series twice, counters named so,
/// buckets in order and cumulative.
fn read_strictly(page: &str) -> Vec<Sample> {
    assert!(page.ends_with('\n'), "the last line has no end");
    let (mut families, mut samples): (BTreeMap<String, String>, Vec<Sample>) = Default::default();
    let (mut helped, mut seen, mut current) = (String::new(), BTreeSet::new(), String::new());
    for line in page.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, text) = rest.split_once(' ').expect("a help text");
            assert!(!text.is_empty() && !families.contains_key(name), "{line}");
            helped = name.to_owned();
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').expect("a type");
            assert!(matches!(kind, "counter" | "gauge" | "histogram"), "{line}");
            assert_eq!(name, helped, "TYPE without its HELP");
            assert_eq!(kind == "counter", name.ends_with("_total"), "{line}");
            assert!(families.insert(name.to_owned(), kind.to_owned()).is_none(), "twice: {line}");
            current = name.to_owned();
        } else {
            let sample = sample(line);
            let is_own = match families[&current].as_str() {
                "histogram" => ["_bucket", "_sum", "_count"].iter().any(|end| sample.0 == format!("{current}{end}")),
                _ => sample.0 == current,
            };
            assert!(is_own, "{line} stands under {current}");
            assert!(seen.insert((sample.0.clone(), sample.1.clone())), "twice: {line}");
            samples.push(sample);
        }
    }
    for (name, kind) in families {
        if kind == "histogram" {
            check_histogram(&name, &samples);
        }
    }
    samples
}

fn sample(line: &str) -> Sample {
    let is_name = |text: &str| {
        let mut letters = text.bytes();
        letters.next().is_some_and(|first| first.is_ascii_alphabetic() || first == b'_')
            && letters.all(|letter| letter.is_ascii_alphanumeric() || letter == b'_')
    };
    let end = line.find(['{', ' ']).expect("a value");
    let name = &line[..end];
    assert!(is_name(name), "{line}");
    let (mut labels, mut rest) = (BTreeMap::new(), &line[end..]);
    if let Some(mut inside) = rest.strip_prefix('{') {
        while !inside.starts_with('}') {
            let (label, value) = inside.split_once("=\"").expect("a label");
            assert!(is_name(label), "{line}");
            let mut text = String::new();
            let mut letters = value.char_indices();
            let closed = loop {
                match letters.next().expect("a closing quote") {
                    (at, '"') => break at,
                    (_, '\\') => match letters.next().expect("an escape").1 {
                        'n' => text.push('\n'),
                        letter @ ('\\' | '"') => text.push(letter),
                        other => panic!("\\{other} is no escape: {line}"),
                    },
                    (_, letter) => text.push(letter),
                }
            };
            assert!(labels.insert(label.to_owned(), text).is_none(), "{line}");
            inside = &value[closed + 1..];
            inside = inside.strip_prefix(',').unwrap_or(inside);
        }
        rest = &inside[1..];
    }
    let value = rest.strip_prefix(' ').expect("one space").parse::<f64>().expect("a number");
    assert!(value.is_finite(), "{line}");
    (name.to_owned(), labels, value)
}

fn check_histogram(name: &str, samples: &[Sample]) {
    let mut series: BTreeMap<BTreeMap<String, String>, Vec<(f64, f64)>> = BTreeMap::new();
    for (_, labels, value) in samples.iter().filter(|sample| sample.0 == format!("{name}_bucket")) {
        let mut labels = labels.clone();
        let bound = labels.remove("le").expect("le");
        let bound = if bound == "+Inf" { f64::INFINITY } else { bound.parse().expect("a bound") };
        series.entry(labels).or_default().push((bound, *value));
    }
    for (labels, buckets) in series {
        assert!(buckets.is_sorted_by(|a, b| a.0 < b.0 && a.1 <= b.1), "{name} {labels:?}: {buckets:?}");
        let last = buckets.last().expect("buckets");
        let count = samples.iter().find(|(found, of, _)| *found == format!("{name}_count") && *of == labels);
        assert_eq!((last.0, Some(last.1)), (f64::INFINITY, count.map(|it| it.2)), "{name} {labels:?}");
    }
}

/// The page of a running router, read by the letter.
pub fn page(router: &Router) -> Vec<Sample> {
    let answer = router.get("/metrics");
    assert_eq!(answer.header("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
    read_strictly(&answer.text())
}

#[test]
fn what_clients_make_up_makes_no_series() {
    let worker = json_worker(r#"{"usage":{"prompt_tokens":3,"completion_tokens":2}}"#);
    let router = router().worker(worker.address).args(&["--session-affinity", "both"]).ready();
    let ask = |number: usize| {
        for model in ["m".to_owned(), format!("unknown-{number}"), format!("\"\\\n{number}")] {
            let body = serde_json::json!({"model": model, "prompt": "x"}).to_string();
            router.post("/v1/completions", &body);
            router.post(&format!("/v1/made-up-{number}"), &body);
            router.get(&format!("/nowhere-{number}?x={number}"));
        }
    };
    ask(0);
    router.wait_for_rest();
    let before = page(&router).len();
    (1..50).for_each(ask);
    router.wait_for_rest();
    assert_eq!(page(&router).len(), before);
}

/// Pages are made beside the shard: a request that comes behind many scrapes is answered before them.
fn scrapes_hold_up_no_shard(router: &Router, path: &str) {
    // All are known to the shard before: it takes requests in the order in which they come then.
    let connection = || {
        let mut connection = Connection::open(router.address);
        connection.send(&request("GET", "/health", "", b""));
        assert_eq!(connection.answer("GET").status, 200);
        connection
    };
    let mut health = connection();
    let mut scrapes: Vec<Connection> = (0..30).map(|_| connection()).collect();
    scrapes.iter_mut().for_each(|scrape| scrape.send(&request("GET", path, "", b"")));
    health.send(&request("GET", "/health", "", b""));
    assert_eq!(health.answer("GET").status, 200);
    let is_answered = |scrape: &&Connection| {
        scrape.stream().set_nonblocking(true).unwrap();
        scrape.stream().peek(&mut [0]).is_ok()
    };
    let answered = scrapes.iter().filter(is_answered).count();
    assert!(answered < scrapes.len(), "the request waited for {answered} times {path}");
    for mut scrape in scrapes {
        scrape.stream().set_nonblocking(false).unwrap();
        assert_eq!(scrape.answer("GET").status, 200);
    }
}

#[test]
fn a_thousand_workers_are_a_page_and_leave_none() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    let records: Vec<_> = (0..1_000)
        .map(|number| {
            serde_json::json!({"worker_id": format!("w\"{number}\\"), "url": format!("http://127.0.0.1:{}", 10_000 + number),
                "model_name": format!("m{}", number % 10), "kv_block_size": 16, "dp_size": 1, "status": "active"})
        })
        .collect();
    file.write_all(serde_json::to_string(&records).unwrap().as_bytes()).unwrap();
    let router = router().args(&["--workers-file", file.path().to_str().unwrap()]).start();
    let active = |expected: f64| {
        wait_until("the workers are known", || router.metric_sum("infera_router_active_workers") == expected);
    };
    active(1_000.0);
    let samples = page(&router);
    let of = |family: &str| samples.iter().filter(|sample| sample.0 == family).count();
    assert_eq!(of("infera_router_inflight_requests"), 1_000);
    assert!(samples.iter().any(|(_, labels, _)| labels.get("target").is_some_and(|target| target == "w\"7\\")));
    // Workers that nobody was sent to, and whose breaker is closed, take no more than their load.
    assert!(samples.len() < 1_000 * 5 + 550, "{} samples", samples.len());
    ["/metrics", "/v1/workers", "/v1/admin/overview"].iter().for_each(|path| scrapes_hold_up_no_shard(&router, path));
    assert_eq!(router.json("/v1/workers")["workers"].as_array().map(Vec::len), Some(1_000));
    std::fs::write(file.path(), serde_json::to_string(&records[..1]).unwrap()).unwrap();
    active(1.0);
    assert!(page(&router).len() < 600);
}
