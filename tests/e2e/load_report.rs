//! What the load generator tells of a real router: which worker served which prefix, the router's own figures beside it,
//! and the page that shows both.

use std::time::Duration;

use loadgen::engine::EngineHandle;
use loadgen::engine::events::EngineStyle;
use loadgen::plan::Recipe;
use loadgen::report::document::Named;
use loadgen::report::model::RunReport;
use loadgen::report::{chart, page};
use loadgen::run::config::RunConfig;
use loadgen::run::driver::execute;
use loadgen::run::pace::Pace;
use loadgen::run::report::run_report;
use loadgen::run::scrape::Scraper;
use loadgen::run::workload::Workload;

use crate::kv_aware::{WithEngine, engine, tokenizer};
use crate::support::browser::document;
use crate::support::router::router;

const REQUESTS: usize = 60;

/// A run of three prefixes over three engines, the router's metrics read meanwhile.
fn run(name: &str, engines: &[EngineHandle]) -> RunReport {
    let tokenizer = tokenizer();
    let start = engines.iter().fold(router(), |start, engine| start.engine(engine));
    let path = tokenizer.path().to_str().unwrap();
    let router = start.args(&["--router-tokenizer-path", path, "--answer-names-worker"]).ready();
    let target = format!("http://{}", router.address);
    let recipe = Recipe::shared_prefix(3, 0.0, 200, 10, 4);
    let config =
        RunConfig::new(&target, Workload::generated(recipe, REQUESTS, "demo", 5), Pace::Closed { concurrency: 3 });
    let scraper = Scraper::start(&target, Duration::from_millis(50)).unwrap();
    let result = execute(config.clone()).unwrap();
    assert_eq!(result.record.errors_total(), 0, "{:?}", result.first_error);
    run_report(&config, &result, Some(name.to_owned()), Some(scraper.finish()))
}

#[test]
fn a_report_shows_where_prefixes_went_and_what_the_router_says_of_it() {
    let engines = [(); 3].map(|()| engine(EngineStyle::Vllm, 1024));
    let hostile = "<img src=x onerror=document.title='owned'>";
    let report = run(hostile, &engines);

    let placement = report.figures.placement.as_ref().expect("answers name their workers");
    let served = |engine: &EngineHandle| {
        let column = placement.workers.iter().position(|worker| *worker == engine.worker_id());
        column.map_or(0, |column| placement.groups.iter().map(|group| group.requests[column]).sum())
    };
    assert_eq!(engines.each_ref().map(served), engines.each_ref().map(|engine| engine.state().totals().finished));
    assert_eq!(placement.groups.len(), 3);
    let fleet = report.fleet.as_ref().unwrap();
    assert_eq!((fleet.problem.as_deref(), fleet.workers.len()), (None, 3));
    for worker in &fleet.workers {
        let engine = engines.iter().find(|engine| engine.worker_id() == worker.name).unwrap();
        assert_eq!(worker.picks as u64, engine.state().totals().finished, "{}", worker.name);
    }
    assert!(*fleet.blocks_hit.last().unwrap() > 0.0 && fleet.blocks.last() >= fleet.blocks_hit.last());

    let runs = [Named::of_run(&report, "run").unwrap(), Named::of_run(&run("second", &engines), "run").unwrap()];
    let html = page::html(&runs).unwrap();
    assert!(
        html.contains("Requests on each worker over time") && html.contains("class=\"cell\""),
        "heat maps are drawn"
    );
    // Shown inside of a frame as wide as a phone; the page around it may run a script, the page itself none.
    for width in [390, 1280] {
        let frame = format!(
            "<!DOCTYPE html><iframe id=f style=\"border:0;width:{width}px;height:800px\" srcdoc=\"{}\"></iframe>\
             <script>f.onload=()=>{{const d=f.contentDocument,e=d.documentElement;\
             document.body.insertAdjacentText('beforeend',`width ${{e.scrollWidth}} title ${{d.title}} \
             pictures ${{d.querySelectorAll('svg').length}}`)}}</script>",
            chart::escape(&html)
        );
        let file = tempfile::Builder::new().suffix(".html").tempfile().unwrap();
        std::fs::write(file.path(), frame).unwrap();
        let Some(shown) = document(&format!("file://{}", file.path().display())) else { return };
        assert!(shown.contains(&format!("width {width} title loadgen: &lt;img")), "{}", tail(&shown));
        assert!(!shown.contains("title owned"), "{}", tail(&shown));
    }
}

/// What the script added.
fn tail(document: &str) -> &str {
    document.rfind("</script>").map_or(document, |at| &document[at..])
}
