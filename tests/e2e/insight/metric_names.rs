//! The Grafana dashboard and the alert rules of `tuning/` against a router that has met all that they are about: every
//! series and every label that they name is there.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use loadgen::engine::events::EngineStyle;
use serde_json::{Value, json};

use super::record;
use crate::exposition::{Sample, page};
use crate::kv_aware::{WithEngine, chat, engine, long_prefix, tokenizer, wait_for_feeds};
use crate::support::router::router;
use crate::support::wait_until;
use crate::support::worker::{dead_address, json_worker};

fn tuning(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tuning").join(file)
}

/// What one expression names.
#[derive(Debug, Default)]
struct Named {
    series: BTreeSet<String>,
    labels: BTreeSet<String>,
}

/// Reads PromQL as far as it is used here; anything else fails, so that nothing goes unchecked.
fn read(expression: &str) -> Named {
    const FUNCTIONS: [&str; 5] = ["sum", "count", "rate", "increase", "histogram_quantile"];
    let mut named = Named::default();
    let mut rest = expression;
    while let Some(first) = rest.chars().next() {
        if first.is_ascii_alphabetic() || first == '_' || first == '$' {
            let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != '$').unwrap_or(rest.len());
            let word = &rest[..end];
            rest = rest[end..].trim_start();
            if word == "by" {
                let (list, after) = rest[1..].split_once(')').unwrap_or_else(|| panic!("{expression}"));
                named.labels.extend(list.split(',').map(|label| label.trim().to_owned()));
                rest = after;
            } else if word.starts_with("infera_") || word == "up" {
                named.series.insert(word.to_owned());
            } else if word == "offset" {
                rest = rest.split_once(|c: char| !c.is_ascii_alphanumeric()).map_or("", |(_, after)| after);
            } else {
                let is_call = rest.starts_with('(') || rest.starts_with("by ");
                assert!(FUNCTIONS.contains(&word) && is_call, "`{word}` in {expression}");
            }
        } else if first == '{' {
            let end = rest.find('}').unwrap_or_else(|| panic!("{expression}"));
            for matcher in rest[1..end].split("\",").filter(|matcher| !matcher.is_empty()) {
                let name = matcher.split(['=', '!']).next().unwrap().trim();
                named.labels.insert(name.to_owned());
            }
            rest = &rest[end + 1..];
        } else if first == '[' {
            rest = &rest[rest.find(']').unwrap_or_else(|| panic!("{expression}")) + 1..];
        } else {
            assert!(first.is_ascii_digit() || " ()/*<>=.,".contains(first), "`{first}` in {expression}");
            rest = &rest[1..];
        }
    }
    named
}

/// Labels that Prometheus puts on a series itself.
const OF_PROMETHEUS: [&str; 2] = ["instance", "job"];

/// Labels between `{{` and `}}`, with what may stand in front of a name.
fn placeholders(text: &str, prefix: &str) -> Vec<String> {
    let inside = text.split("{{").skip(1).filter_map(|part| part.split("}}").next());
    inside.filter_map(|word| word.trim().strip_prefix(prefix)).map(|word| word.trim().to_owned()).collect()
}

fn check(what: &str, expression: &str, more_labels: &[String], samples: &BTreeMap<String, BTreeSet<String>>) {
    let named = read(expression);
    assert!(!named.series.is_empty(), "{what} names no series");
    let mut known: BTreeSet<&str> = OF_PROMETHEUS.into();
    for series in named.series.iter().filter(|series| *series != "up") {
        let labels = samples.get(series).unwrap_or_else(|| panic!("{what}: no such series: {series}"));
        known.extend(labels.iter().map(String::as_str));
    }
    for label in named.labels.iter().chain(more_labels) {
        assert!(known.contains(label.as_str()), "{what}: no such label: {label} ({known:?})");
    }
}

/// Series by name with all their labels, of a router that has met everything.
fn scrape() -> BTreeMap<String, BTreeSet<String>> {
    let (directory, tokenizer) = (tempfile::tempdir().unwrap(), tokenizer());
    let engine = engine(EngineStyle::Vllm, 4096);
    let (prefill, decode) = (json_worker("{}"), json_worker("{}"));
    let dead = [dead_address(), dead_address()].map(|address| {
        json!({"worker_id": address.to_string(), "url": format!("http://{address}"), "model_name": "dead",
            "kv_block_size": 16, "dp_size": 1})
    });
    let log = directory.path().join("access.log");
    let start = router()
        .engine(&engine)
        .args(&["--router-tokenizer-path", tokenizer.path().to_str().unwrap(), "--decode-input-demand", "on"])
        .args(&["--access-log", "text", "--access-log-file", log.to_str().unwrap()])
        .args(&["--breaker-failure-threshold", "1", "--session-affinity", "both"]);
    let [first, second] = dead;
    // The engine is one more worker.
    let records = [record(&prefill, "prefill"), record(&decode, "decode"), first, second];
    let mut file = tempfile::NamedTempFile::new().unwrap();
    std::io::Write::write_all(&mut file, json!(records).to_string().as_bytes()).unwrap();
    let router = start.args(&["--workers-file", file.path().to_str().unwrap()]).ready();
    wait_until("all workers are known", || router.json("/health")["active_workers"] == records.len() + 1);
    wait_for_feeds(&router, 1);
    assert_eq!(router.post("/v1/chat/completions", &chat(&long_prefix("names"))).status, 200);
    router.post("/v1/chat/completions", r#"{"model":"demo","messages":"none"}"#);
    assert_eq!(router.post("/v1/completions", r#"{"model":"m","prompt":[1,2,3]}"#).status, 200);
    assert_eq!(router.post("/v1/completions", r#"{"model":"dead","prompt":[1,2,3]}"#).status, 502);
    wait_until("events have come", || router.metric_sum("infera_router_kv_event_batches_total") > 0.0);
    router.wait_for_rest();
    let mut series: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (name, labels, _) in page(&router) as Vec<Sample> {
        series.entry(name).or_default().extend(labels.into_keys());
    }
    series
}

/// Alert rules as they are written in `tuning/alerts.yml`: one key and one value a line.
fn alerts() -> Vec<BTreeMap<String, String>> {
    let text = std::fs::read_to_string(tuning("alerts.yml")).unwrap();
    let mut rules: Vec<BTreeMap<String, String>> = Vec::new();
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let (key, value) = line.split_once(':').unwrap_or_else(|| panic!("no key: {line}"));
        match key {
            "groups" | "- name" | "rules" | "labels" | "annotations" => {}
            "- alert" => rules.push(BTreeMap::from([("alert".to_owned(), value.trim().to_owned())])),
            "expr" | "for" | "severity" | "summary" | "action" => {
                let rule = rules.last_mut().unwrap_or_else(|| panic!("outside of a rule: {line}"));
                let twice = rule.insert(key.to_owned(), value.trim().to_owned());
                assert!(twice.is_none(), "twice: {line}");
            }
            _ => panic!("what is this: {line}"),
        }
    }
    rules
}

#[test]
fn dashboards_and_alerts_name_only_what_the_router_shows() {
    let series = scrape();
    let rules = alerts();
    assert!(rules.len() >= 10, "{}", rules.len());
    for rule in &rules {
        let name = &rule["alert"];
        assert!(matches!(rule["severity"].as_str(), "page" | "warn") && rule.contains_key("action"), "{name}");
        check(name, &rule["expr"], &placeholders(&rule["summary"], "$labels."), &series);
    }

    let dashboard = std::fs::read_to_string(tuning("grafana.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&dashboard).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let (mut ids, mut checked) = (BTreeSet::new(), 0);
    for panel in panels {
        let title = panel["title"].as_str().unwrap();
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "{title}: an id twice");
        for target in panel["targets"].as_array().into_iter().flatten() {
            let legend = placeholders(target["legendFormat"].as_str().unwrap(), "");
            check(title, target["expr"].as_str().unwrap(), &legend, &series);
            checked += 1;
        }
    }
    assert!(checked >= 30, "{checked}");
    let variable = dashboard["templating"]["list"][1]["query"]["query"].as_str().unwrap();
    assert!(variable.contains("infera_router_uptime_seconds") && series.contains_key("infera_router_uptime_seconds"));
}

/// What Prometheus itself says of the rules, where it is installed.
#[test]
fn promtool_accepts_the_rules() {
    match Command::new("promtool").args(["check", "rules"]).arg(tuning("alerts.yml")).output() {
        Ok(output) => assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr)),
        Err(_) => eprintln!("NOT RUN: promtool is not installed (Debian: prometheus)"),
    }
}

#[test]
fn a_name_that_is_not_there_is_found_out() {
    let series = BTreeMap::from([("infera_x".to_owned(), BTreeSet::from(["role".to_owned()]))]);
    check("fine", "sum by (role) (rate(infera_x{role!=\"a\",instance=~\"$instance\"}[5m])) > 0.5", &[], &series);
    for (expression, legend) in [
        ("infera_y", None),
        ("infera_x{rôle=\"a\"}", None),
        ("sum by (model) (infera_x)", None),
        ("infera_x", Some("x")),
    ] {
        let legend: Vec<String> = legend.into_iter().map(str::to_owned).collect();
        let outcome = std::panic::catch_unwind(|| check("wrong", expression, &legend, &series));
        assert!(outcome.is_err(), "{expression}");
    }
}
