//! Owns which pictures and tables of a run are shown and what they show. Never writes markup but through [`chart`].

use serde::Serialize;

use super::chart::{self, Axis, Heat, HeatRow, Series};
use super::document::Named;
use super::model::{Distribution, Figures, Fleet, FleetWorker, GroupPlacement, Placement};

/// What a page shows of many workers and groups: the busiest.
const WORKERS_MAX: usize = 64;
const GROUPS_MAX: usize = 40;
/// Columns of a heat map over time.
const TIME_CELLS_MAX: usize = 60;

#[derive(Serialize)]
pub struct Picture {
    pub title: &'static str,
    pub svg: Option<String>,
    pub legend: Vec<Entry>,
    /// Said in the picture's place.
    pub absent: String,
}

#[derive(Serialize)]
pub struct Entry {
    /// A line as in the picture.
    pub mark: String,
    pub name: String,
}

#[derive(Serialize)]
pub struct Headline {
    name: &'static str,
    value: String,
}

#[derive(Serialize)]
pub struct WorkerLine {
    name: String,
    role: String,
    picks: String,
    share: String,
    hits: String,
    mean: String,
    most: String,
}

/// The line that stands for a run.
pub fn mark(color: usize, is_dashed: bool) -> String {
    let series = Series { name: String::new(), color, is_dashed, points: Vec::new() };
    let class = series.class();
    format!(
        "<svg class=\"mark\" viewBox=\"0 0 20 8\" aria-hidden=\"true\"><path class=\"{class}\" d=\"M0 4h20\"/></svg>"
    )
}

pub fn headline(figures: &Figures) -> Vec<Headline> {
    let milliseconds = |distribution: &Distribution, value: f64| match distribution.count {
        0 => "-".to_owned(),
        _ => format!("{} ms", chart::short(value)),
    };
    let percent = |share: Option<f64>| share.map_or_else(|| "-".to_owned(), |share| format!("{:.1} %", share * 100.0));
    let of = |name, value| Headline { name, value };
    vec![
        of("TTFT p50", milliseconds(&figures.ttft_ms, figures.ttft_ms.p50)),
        of("TTFT p99", milliseconds(&figures.ttft_ms, figures.ttft_ms.p99)),
        of("token gap p50", milliseconds(&figures.inter_token_ms, figures.inter_token_ms.p50)),
        of("requests/s", chart::short(figures.throughput_rps)),
        of("hit rate", percent(figures.hit_rate)),
        of("errors", format!("{} of {}", figures.errors, figures.requests)),
    ]
}

/// What a reader must know before believing a run.
pub fn warnings(figures: &Figures) -> Vec<String> {
    let mut warnings = Vec::new();
    if figures.generator.saturated {
        let (lag, cpu) = (figures.generator.send_lag_ms.p99, figures.generator.cpu_share * 100.0);
        warnings.push(format!(
            "The generator itself was the limit (requests started {lag:.1} ms late at the 99th percentile, {cpu:.0} % of a \
             core): latencies include its own delays."
        ));
    }
    if figures.interrupted {
        warnings.push("The run was interrupted.".to_owned());
    }
    let classes = figures.errors_by_class.iter().map(|(class, count)| format!("{count} {class}"));
    if figures.errors > 0 {
        warnings.push(format!("Errors: {}.", classes.collect::<Vec<_>>().join(", ")));
    }
    warnings
}

/// Pictures in which all runs stand together.
pub fn pictures(runs: &[Named]) -> Vec<Picture> {
    let mut pictures = vec![
        cumulative("Time to first token", runs, |it| &it.ttft_ms),
        cumulative("Time between tokens", runs, |it| &it.inter_token_ms),
        cumulative("Time to the end of the answer", runs, |it| &it.end_to_end_ms),
    ];
    let per_second = |values: &[u64], step: f64| values.iter().map(|it| Some(*it as f64 / step)).collect::<Vec<_>>();
    let wanted = timelines(runs, "wanted", true, |it| per_second(&it.timeline.started, it.timeline.step_seconds));
    let completed =
        timelines(runs, "completed", false, |it| per_second(&it.timeline.completed, it.timeline.step_seconds));
    pictures.push(over_time("Requests per second", Axis::linear("1/s"), [wanted, completed].concat(), runs));
    let p50 = timelines(runs, "p50", false, |it| it.timeline.ttft_p50_ms.clone());
    let p99 = timelines(runs, "p99", true, |it| it.timeline.ttft_p99_ms.clone());
    pictures.push(over_time(
        "Time to first token, by when it was wanted",
        Axis::linear("ms"),
        [p50, p99].concat(),
        runs,
    ));
    let in_flight = timelines(runs, "", false, |it| it.timeline.in_flight.iter().map(|it| Some(*it)).collect());
    pictures.push(over_time("Requests in flight", Axis::linear(""), in_flight, runs));
    let errors = match runs.iter().any(|run| run.figures.errors > 0) {
        true => timelines(runs, "", false, |it| per_second(&it.timeline.errors, it.timeline.step_seconds)),
        false => Vec::new(),
    };
    pictures.push(Picture {
        absent: "None.".to_owned(),
        ..over_time("Errors per second", Axis::linear("1/s"), errors, runs)
    });
    if runs.iter().any(|run| run.fleet.as_ref().is_some_and(|fleet| !fleet.blocks.is_empty())) {
        pictures.push(over_time("Hit rate at the pick", Axis::share(""), hit_rates(runs), runs));
    }
    pictures
}

fn cumulative(title: &'static str, runs: &[Named], of: fn(&Figures) -> &Distribution) -> Picture {
    let line = |(color, run): (usize, &Named)| Series {
        name: run.name.clone(),
        color,
        is_dashed: false,
        points: of(&run.figures).cumulative().map(|(value, share)| (value, Some(share))).collect(),
    };
    let series: Vec<Series> = runs.iter().enumerate().map(line).collect();
    let svg = chart::lines(title, &Axis::logarithmic("ms"), &Axis::share("share"), &series);
    Picture { title, svg, legend: legend(&series), absent: "No values.".to_owned() }
}

/// A line per run over its timeline; `kind` tells the lines of one run apart.
fn timelines(runs: &[Named], kind: &str, is_dashed: bool, of: impl Fn(&Figures) -> Vec<Option<f64>>) -> Vec<Series> {
    let line = |(color, run): (usize, &Named)| {
        let step = run.figures.timeline.step_seconds;
        let points = of(&run.figures).into_iter().enumerate();
        let points = points.map(|(number, value)| ((number as f64 + 0.5) * step, value)).collect();
        Series { name: format!("{} {kind}", run.name).trim().to_owned(), color, is_dashed, points }
    };
    runs.iter().enumerate().map(line).collect()
}

fn over_time(title: &'static str, axis: Axis, series: Vec<Series>, runs: &[Named]) -> Picture {
    let svg = chart::lines(title, &Axis::linear("seconds"), &axis, &series);
    // One run's single line needs no name.
    let legend = if series.len() > 1 || runs.len() > 1 { legend(&series) } else { Vec::new() };
    Picture { title, svg, legend, absent: "No values.".to_owned() }
}

fn legend(series: &[Series]) -> Vec<Entry> {
    let drawn = series.iter().filter(|line| line.points.iter().any(|(_, value)| value.is_some()));
    drawn.map(|line| Entry { mark: mark(line.color, line.is_dashed), name: line.name.clone() }).collect()
}

/// Share of the blocks between two samples that picked workers held.
fn hit_rates(runs: &[Named]) -> Vec<Series> {
    let line = |(color, run): (usize, &Named)| {
        let fleet = run.fleet.as_ref()?;
        let rises = |values: &[f64]| values.windows(2).map(|pair| pair[1] - pair[0]).collect::<Vec<_>>();
        let (blocks, hits) = (rises(&fleet.blocks), rises(&fleet.blocks_hit));
        let rate = |(number, (blocks, hits)): (usize, (&f64, &f64))| {
            (fleet.seconds[number + 1], (*blocks > 0.0).then_some(hits / blocks))
        };
        let points = blocks.iter().zip(&hits).enumerate().filter(|(it, _)| it + 1 < fleet.seconds.len()).map(rate);
        Some(Series { name: run.name.clone(), color, is_dashed: false, points: points.collect() })
    };
    runs.iter().enumerate().filter_map(line).collect()
}

/// Rows of workers, columns of time, dark for many requests.
pub fn load_heat(fleet: Option<&Fleet>) -> Picture {
    let title = "Requests on each worker over time";
    let Some(fleet) = fleet else {
        return absent(title, "The target's metrics were not read during this run.");
    };
    let workers = busiest(fleet);
    let largest = workers.iter().flat_map(|worker| worker.inflight.iter().flatten()).fold(0.0, |a: f64, b| a.max(*b));
    if fleet.seconds.is_empty() || workers.is_empty() {
        let reason = fleet.problem.as_deref().unwrap_or("it names no workers");
        return absent(title, &format!("Nothing from {}: {reason}.", fleet.source));
    }
    let each = fleet.seconds.len().div_ceil(TIME_CELLS_MAX).max(1);
    let starts: Vec<f64> = fleet.seconds.chunks(each).map(|chunk| chunk[0]).collect();
    let cell = |(values, start): (&[Option<f64>], &f64)| {
        let known: Vec<f64> = values.iter().copied().flatten().collect();
        let mean = if known.is_empty() { 0.0 } else { known.iter().sum::<f64>() / known.len() as f64 };
        (if largest > 0.0 { mean / largest } else { 0.0 }, format!("{mean:.1} requests at {start:.1} s"))
    };
    let row = |worker: &&FleetWorker| HeatRow {
        label: worker.name.clone(),
        cells: worker.inflight.chunks(each).zip(&starts).map(cell).collect(),
    };
    let heat = Heat {
        title,
        rows: workers.iter().map(row).collect(),
        columns: starts.iter().map(|start| format!("{start:.0}")).collect(),
        caption: &format!("seconds; darkest: {largest:.0} requests"),
    };
    Picture { title, svg: chart::heat(&heat), legend: Vec::new(), absent: String::new() }
}

/// Rows of prefix groups, columns of workers, dark for many of the group's requests.
pub fn placement_heat(placement: Option<&Placement>) -> Picture {
    let title = "Which worker served which prefix";
    let Some(placement) = placement else {
        return absent(title, "No answer named its worker (the router does with --answer-names-worker).");
    };
    let row = |group: &GroupPlacement| {
        let total = group.requests.iter().sum::<u64>().max(1);
        let cell = |(worker, count): (&String, &u64)| {
            (*count as f64 / total as f64, format!("prefix {}: {count} of {total} on {worker}", group.group))
        };
        HeatRow {
            label: format!("{} ({total})", group.group),
            cells: placement.workers.iter().zip(&group.requests).map(cell).collect(),
        }
    };
    let heat = Heat {
        title,
        rows: placement.groups.iter().take(GROUPS_MAX).map(row).collect(),
        columns: columns(&placement.workers),
        caption: &format!("a column per worker; {:.0} % on the prefix's main one", placement.concentration * 100.0),
    };
    Picture { title, svg: chart::heat(&heat), legend: Vec::new(), absent: "No prefixes.".to_owned() }
}

/// Ends of few names, where addresses differ; of many, numbers in the order of the table.
fn columns(workers: &[String]) -> Vec<String> {
    const NAMED_MAX: usize = 6;
    const LETTERS: usize = 6;
    if workers.len() > NAMED_MAX {
        return (1..=workers.len()).map(|number| number.to_string()).collect();
    }
    let end = |name: &String| name.chars().skip(name.chars().count().saturating_sub(LETTERS)).collect();
    workers.iter().map(end).collect()
}

fn absent(title: &'static str, reason: &str) -> Picture {
    Picture { title, svg: None, legend: Vec::new(), absent: reason.to_owned() }
}

fn busiest(fleet: &Fleet) -> Vec<&FleetWorker> {
    let mut workers: Vec<_> = fleet.workers.iter().collect();
    workers.sort_by(|a, b| b.picks.total_cmp(&a.picks));
    workers.truncate(WORKERS_MAX);
    workers.sort_by(|a, b| a.name.cmp(&b.name));
    workers
}

/// The table of workers, and how many it leaves out.
pub fn workers(fleet: Option<&Fleet>) -> (Vec<WorkerLine>, usize) {
    let Some(fleet) = fleet else { return Default::default() };
    let total: f64 = fleet.workers.iter().map(|worker| worker.picks).sum();
    let line = |worker: &FleetWorker| {
        let known: Vec<f64> = worker.inflight.iter().copied().flatten().collect();
        let share = |part: f64, whole: f64| match whole > 0.0 {
            true => format!("{:.0} %", part / whole * 100.0),
            false => "-".to_owned(),
        };
        WorkerLine {
            name: worker.name.clone(),
            role: if worker.role == "mixed" { String::new() } else { worker.role.clone() },
            picks: format!("{:.0}", worker.picks),
            share: share(worker.picks, total),
            hits: share(worker.blocks_hit, worker.blocks),
            mean: format!("{:.1}", known.iter().sum::<f64>() / known.len().max(1) as f64),
            most: format!("{:.0}", known.iter().copied().fold(0.0, f64::max)),
        }
    };
    let shown = busiest(fleet);
    (shown.iter().map(|worker| line(worker)).collect(), fleet.workers.len() - shown.len())
}
