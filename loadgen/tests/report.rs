//! The built `loadgen run` against a simulated engine: what its files hold, and what `loadgen report` makes of them.

#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::{Command, Output};

use loadgen::demo::TemporaryDirectory;
use loadgen::engine::scheduler::Speed;
use loadgen::engine::{Engine, EngineConfig, EngineHandle};
use serde_json::Value;

fn engine() -> EngineHandle {
    let speed = Speed { step_base: std::time::Duration::from_millis(1), ..Speed::default() };
    Engine::start(EngineConfig { speed, ..EngineConfig::default() }).unwrap()
}

fn loadgen(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_loadgen")).args(arguments).output().unwrap()
}

/// A small run; further arguments behind it. In a closed loop: a busy machine may not keep a schedule.
fn run(engine: &EngineHandle, further: &[&str]) -> Output {
    let url = engine.url();
    let fixed =
        ["run", "--target", &url, "--requests", "40", "--concurrency", "2", "--groups", "3", "--prefix-tokens", "64"];
    let sizes = ["--suffix-tokens", "10", "--output-tokens", "4"];
    loadgen(&[&fixed[..], &sizes, further].concat())
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap()
}

fn schema() -> jsonschema::Validator {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("report.schema.json");
    jsonschema::validator_for(&serde_json::from_str(&read(&path)).unwrap()).unwrap()
}

#[test]
fn a_run_leaves_files_that_agree_with_each_other_and_with_the_schema() {
    let (engine, directory) = (engine(), TemporaryDirectory::create().unwrap());
    let file = |name: &str| directory.0.join(name).display().to_string();
    let (json, csv, html) = (file("one.json"), file("one.csv"), file("one.html"));
    let output =
        run(&engine, &["--json", &json, "--csv", &csv, "--html", &html, "--name", "<b>mine</b>", "--warmup", "5"]);
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    assert_eq!(text(&output.stderr), "", "quiet without a terminal");

    let report: Value = serde_json::from_str(&read(json.as_ref())).unwrap();
    let faults: Vec<String> =
        schema().iter_errors(&report).map(|error| format!("{error} at {}", error.instance_path())).collect();
    assert_eq!(faults, Vec::<String>::new());
    for (member, distribution) in report.as_object().unwrap().iter().filter(|(_, value)| value.get("buckets").is_some())
    {
        let buckets = distribution["buckets"].as_array().unwrap();
        let sum: u64 = buckets.iter().map(|bucket| bucket[1].as_u64().unwrap()).sum();
        assert_eq!(Some(sum), distribution["count"].as_u64(), "{member}");
    }
    let sum = |list: &str| -> u64 {
        report["timeline"][list].as_array().unwrap().iter().map(|value| value.as_u64().unwrap()).sum()
    };
    assert_eq!((report["requests"].as_u64(), sum("started"), sum("completed"), sum("errors")), (Some(35), 35, 35, 0));
    // The engine names nobody and shows other figures than a router.
    assert_eq!(report["placement"], Value::Null);
    assert!(report["fleet"]["problem"].as_str().unwrap().contains("none of infera-router's figures"));

    let lines = read(csv.as_ref());
    assert_eq!(lines.lines().count(), 41, "a line per request, warm-up included, under the names");
    assert_eq!(lines.lines().filter(|line| line.contains(",measured,")).count(), 35);

    let page = read(html.as_ref());
    assert!(page.contains("&lt;b&gt;mine&lt;") && !page.contains("<b>mine"), "names are text");
    assert!(page.matches("<svg").count() >= 6, "pictures are drawn without a script");
    for foreign in ["<script", "http-equiv=\"refresh\"", " src=", "href=", "url(", "@import"] {
        assert!(!page.contains(foreign), "{foreign}");
    }
}

/// A member that the schema does not know, or one that is missing, would be seen.
#[test]
fn the_schema_is_strict() {
    let (engine, directory) = (engine(), TemporaryDirectory::create().unwrap());
    let json = directory.0.join("one.json").display().to_string();
    assert!(run(&engine, &["--json", &json]).status.success());
    let report: Value = serde_json::from_str(&read(json.as_ref())).unwrap();
    let schema = schema();
    assert!(schema.is_valid(&report));
    let change = |change: &dyn Fn(&mut Value)| {
        let mut changed = report.clone();
        change(&mut changed);
        assert!(!schema.is_valid(&changed), "{changed}");
    };
    change(&|it| it["unheard_of"] = 1.into());
    change(&|it| it["ttft_ms"]["p42"] = 1.into());
    change(&|it| it["ttft_ms"]["buckets"][0] = 1.into());
    change(&|it| it["schema"] = "loadgen.run/1".into());
    change(&|it| it["errors_by_class"]["bad_luck"] = 1.into());
    change(&|it| drop(it.as_object_mut().unwrap().remove("hit_rate")));
}

#[test]
fn conditions_gate_a_run_and_a_report() {
    let (engine, directory) = (engine(), TemporaryDirectory::create().unwrap());
    let json = directory.0.join("one.json").display().to_string();
    let output = run(&engine, &["--json", &json, "--assert", "ttft.p99<1us", "--assert", "errors=0"]);
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output.stderr);
    assert!(said.starts_with("ASSERTION: ttft.p99<1us: ttft_ms.p99 is ") && said.lines().count() == 1, "{said}");
    let check = |condition: &str, expected: i32| {
        let output = loadgen(&["report", &json, "--assert", condition]);
        assert_eq!(output.status.code(), Some(expected), "{condition}: {}", text(&output.stderr));
        text(&output.stderr)
    };
    check("ttft.p99<1000s", 0);
    check("hit_rate>=0%", 0);
    assert!(check("requests>40", 1).contains("requests is 40, bound 40"));
    assert!(check("ttft.p98<1s", 1).contains("known: ") && check("ttft.p98<1s", 1).contains("ttft.p99"));
    // Known to be wrong before a request is sent.
    let finished = engine.state().totals().finished;
    let output = run(&engine, &["--assert", "ttft.p98<1s"]);
    assert!(!output.status.success() && text(&output.stderr).contains("ttft.p99"), "{}", text(&output.stderr));
    assert_eq!(engine.state().totals().finished, finished);
}

#[test]
fn runs_are_compared_with_the_first() {
    let (engine, directory) = (engine(), TemporaryDirectory::create().unwrap());
    let file = |name: &str| directory.0.join(name).display().to_string();
    let (first, second, html) = (file("first.json"), file("second.json"), file("both.html"));
    assert!(run(&engine, &["--json", &first]).status.success());
    assert!(run(&engine, &["--json", &second, "--seed", "2"]).status.success());
    let output = loadgen(&["report", &first, &second, "--html", &html]);
    let table = text(&output.stdout);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(table.lines().next().unwrap().trim().starts_with("first "), "{table}");
    let requests = table.lines().find(|line| line.starts_with("requests ")).unwrap();
    assert!(requests.ends_with("x1.00"), "{table}");
    let csv = text(&loadgen(&["report", &first, &second, "--csv"]).stdout);
    assert!(csv.starts_with("figure,unit,first,first ratio,second,second ratio\nrequests,,40,1,40,1\n"), "{csv}");
    let page = read(html.as_ref());
    assert!(page.contains("ratios to first") && page.contains("series c1"), "both runs are drawn");
    let twice = loadgen(&["report", &first, &first]);
    assert!(text(&twice.stdout).contains("first (2)"), "{}", text(&twice.stdout));
}
