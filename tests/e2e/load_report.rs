//! What the load generator tells of a real router: which worker served which prefix, the router's own figures beside it,
//! and the page that shows both.

use std::time::Duration;

use loadgen::engine::EngineHandle;
use loadgen::engine::events::EngineStyle;
use loadgen::plan::Recipe;
use loadgen::report::document::Named;
use loadgen::report::model::RunReport;
use loadgen::report::page;
use loadgen::run::config::RunConfig;
use loadgen::run::driver::execute;
use loadgen::run::pace::Pace;
use loadgen::run::report::run_report;
use loadgen::run::scrape::Scraper;
use loadgen::run::workload::Workload;

use crate::insight::browser::Page;
use crate::kv_aware::{WithEngine, engine, tokenizer};
use crate::support::router::router;
use crate::support::wait_until;

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
        column.map_or(0, |column| placement.groups.iter().map(|group| group.requests[column]).sum::<u64>())
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
    let file = tempfile::Builder::new().suffix(".html").tempfile().unwrap();
    std::fs::write(file.path(), &html).unwrap();
    for width in [390, 1280] {
        let Some(mut shown) = Page::open(&format!("file://{}", file.path().display()), width, 844) else { return };
        wait_until("the page is there", || {
            shown.value("document.readyState") == "complete" && shown.text().contains("Figures")
        });
        let excess = "document.documentElement.scrollWidth - document.documentElement.clientWidth";
        assert_eq!(shown.value(excess), 0, "at {width} something is wider than the screen");
        assert_eq!(shown.value("document.querySelectorAll('img').length"), 0);
        assert_eq!(shown.value("document.title"), format!("loadgen: {hostile}, second"));
        // A text that is cut off at the edge of its picture would not widen the page.
        let outside = "[...document.querySelectorAll('svg text')].filter(text => { const box = text.getBBox(),
            frame = text.ownerSVGElement.viewBox.baseVal; return box.x < -1 || box.x + box.width > frame.width + 1; })
            .map(text => text.textContent).join()";
        assert_eq!(shown.value(outside), "", "at {width}");
    }
}
