//! Owns the page of one run or several: one HTML file that needs nothing beside it, no script, light or dark as its reader
//! has it. Never decides what is shown of a run.

use anyhow::{Context, Result};
use serde::Serialize;

use super::document::Named;
use super::sections::{self, Headline, Picture, WorkerLine};
use super::{chart, compare};

/// The name decides that values are escaped.
const TEMPLATE: (&str, &str) = ("page.html", include_str!("page.html"));
const STYLE: &str = include_str!("page.css");

#[derive(Serialize)]
struct Page<'a> {
    title: String,
    chart_style: &'a str,
    page_style: &'a str,
    runs: Vec<Run<'a>>,
    charts: Vec<Picture>,
    lines: Vec<Line>,
}

#[derive(Serialize)]
struct Run<'a> {
    name: &'a str,
    mark: String,
    warnings: Vec<String>,
    headline: Vec<Headline>,
    about: &'a [(String, String)],
    load: Picture,
    placement: Picture,
    workers: Vec<WorkerLine>,
    workers_left_out: usize,
}

#[derive(Serialize)]
struct Line {
    name: &'static str,
    unit: &'static str,
    cells: Vec<Cell>,
}

#[derive(Serialize)]
struct Cell {
    value: String,
    /// Absent for the run that the others are compared with.
    ratio: Option<String>,
}

/// The whole file.
///
/// # Errors
/// A template that does not render, which a test would see.
pub fn html(runs: &[Named]) -> Result<String> {
    let names: Vec<&str> = runs.iter().map(|run| run.name.as_str()).collect();
    let page = Page {
        title: format!("loadgen: {}", names.join(", ")),
        chart_style: chart::STYLE,
        page_style: STYLE,
        runs: runs.iter().enumerate().map(|(number, run)| about(number, run)).collect(),
        charts: sections::pictures(runs),
        lines: compare::lines(runs).iter().map(|line| cells(line, runs.len())).collect(),
    };
    let mut environment = minijinja::Environment::new();
    environment.add_template(TEMPLATE.0, TEMPLATE.1).context("the page's template")?;
    environment.get_template(TEMPLATE.0)?.render(minijinja::value::Serde(page)).context("the page's template")
}

fn about(number: usize, run: &Named) -> Run<'_> {
    let (workers, workers_left_out) = sections::workers(run.fleet.as_ref());
    Run {
        name: &run.name,
        mark: sections::mark(number, false),
        warnings: sections::warnings(&run.figures),
        headline: sections::headline(&run.figures),
        about: &run.about,
        load: sections::load_heat(run.fleet.as_ref()),
        placement: sections::placement_heat(run.figures.placement.as_ref()),
        workers,
        workers_left_out,
    }
}

fn cells(line: &compare::Line, runs: usize) -> Line {
    let cell = |run| {
        let ratio = line.ratio(run).filter(|_| run > 0).map(|ratio| format!("{ratio:.2}"));
        Cell { value: line.shown(run), ratio }
    };
    Line { name: line.name, unit: line.unit, cells: (0..runs).map(cell).collect() }
}
