//! Owns the comparison of runs: figures side by side, each with its ratio to the first run's, as text and as CSV. Never
//! reads files.

use super::document::Named;
use super::model::{Distribution, Figures};

/// One figure of every run.
#[derive(Clone, Debug)]
pub struct Line {
    pub name: &'static str,
    pub unit: &'static str,
    pub decimals: usize,
    /// `None` where a run has none.
    pub values: Vec<Option<f64>>,
}

impl Line {
    /// To the first run; `None` where either has none or the first is 0.
    pub fn ratio(&self, run: usize) -> Option<f64> {
        let first = self.values.first().copied().flatten().filter(|first| *first != 0.0)?;
        Some(self.values.get(run).copied().flatten()? / first)
    }

    pub fn shown(&self, run: usize) -> String {
        match self.values.get(run).copied().flatten() {
            Some(value) => format!("{value:.0$}", self.decimals),
            None => "-".to_owned(),
        }
    }
}

type Value = fn(&Figures) -> Option<f64>;

fn of(distribution: &Distribution, value: f64) -> Option<f64> {
    (distribution.count > 0).then_some(value)
}

/// Name, unit, decimals, and where it is found.
const LINES: [(&str, &str, usize, Value); 23] = [
    ("requests", "", 0, |it| Some(it.requests as f64)),
    ("errors", "", 0, |it| Some(it.errors as f64)),
    ("left early", "", 0, |it| (it.aborted > 0).then_some(it.aborted as f64)),
    ("slow readers", "", 0, |it| (it.slow_readers > 0).then_some(it.slow_readers as f64)),
    ("hit rate", "%", 1, |it| Some(it.hit_rate? * 100.0)),
    ("requests per second", "", 2, |it| Some(it.throughput_rps)),
    ("within limits per second", "", 2, |it| it.goodput_rps),
    ("output tokens per second", "", 1, |it| Some(it.output_tokens_per_second)),
    ("TTFT mean", "ms", 1, |it| of(&it.ttft_ms, it.ttft_ms.mean)),
    ("TTFT p50", "ms", 1, |it| of(&it.ttft_ms, it.ttft_ms.p50)),
    ("TTFT p90", "ms", 1, |it| of(&it.ttft_ms, it.ttft_ms.p90)),
    ("TTFT p99", "ms", 1, |it| of(&it.ttft_ms, it.ttft_ms.p99)),
    ("TTFT p50 from sending", "ms", 1, |it| of(&it.ttft_from_send_ms, it.ttft_from_send_ms.p50)),
    ("between tokens mean", "ms", 2, |it| of(&it.inter_token_ms, it.inter_token_ms.mean)),
    ("between tokens p50", "ms", 2, |it| of(&it.inter_token_ms, it.inter_token_ms.p50)),
    ("between tokens p99", "ms", 2, |it| of(&it.inter_token_ms, it.inter_token_ms.p99)),
    ("end to end p50", "ms", 1, |it| of(&it.end_to_end_ms, it.end_to_end_ms.p50)),
    ("end to end p99", "ms", 1, |it| of(&it.end_to_end_ms, it.end_to_end_ms.p99)),
    ("prefix concentration", "%", 1, |it| Some(it.placement.as_ref()?.concentration * 100.0)),
    ("start lag p99", "ms", 2, |it| of(&it.generator.send_lag_ms, it.generator.send_lag_ms.p99)),
    ("generator CPU", "%", 0, |it| Some(it.generator.cpu_share * 100.0)),
    ("prompt tokens", "", 0, |it| Some(it.prompt_tokens as f64)),
    ("output tokens", "", 0, |it| Some(it.output_tokens as f64)),
];

/// All figures that any of the runs has.
pub fn lines(runs: &[Named]) -> Vec<Line> {
    let line = |(name, unit, decimals, value): (&'static str, &'static str, usize, Value)| Line {
        name,
        unit,
        decimals,
        values: runs.iter().map(|run| value(&run.figures)).collect(),
    };
    LINES.into_iter().map(line).filter(|line| line.values.iter().any(Option::is_some)).collect()
}

/// For a terminal: a column per run, ratios behind all but the first.
pub fn table(runs: &[Named]) -> String {
    const VALUE: usize = 12;
    const RATIO: usize = 8;
    let widths: Vec<usize> = runs
        .iter()
        .enumerate()
        .map(|(number, run)| run.name.chars().count().max(if number == 0 { VALUE } else { VALUE + RATIO }) + 2)
        .collect();
    let mut out = format!("{:<30}", "");
    for (run, width) in runs.iter().zip(&widths) {
        out.push_str(&format!("{:>width$}", run.name, width = *width));
    }
    out.push('\n');
    for line in lines(runs) {
        let name = if line.unit.is_empty() { line.name.to_owned() } else { format!("{} ({})", line.name, line.unit) };
        out.push_str(&format!("{name:<30}"));
        for (number, width) in widths.iter().enumerate() {
            let ratio = match line.ratio(number) {
                _ if number == 0 => String::new(),
                Some(ratio) => format!("{:>RATIO$}", format!("x{ratio:.2}")),
                None => " ".repeat(RATIO),
            };
            out.push_str(&format!("{:>width$}", format!("{}{ratio}", line.shown(number)), width = *width));
        }
        out.truncate(out.trim_end().len());
        out.push('\n');
    }
    for run in runs.iter().filter(|run| run.figures.generator.saturated || run.figures.interrupted) {
        let what = if run.figures.interrupted { "was interrupted" } else { "was limited by the generator itself" };
        out.push_str(&format!("WARNING: {} {what}\n", run.name));
    }
    out
}

/// The same as CSV: a line per figure, a value and a ratio per run.
///
/// # Errors
/// None in practice: the writer is memory.
pub fn csv(runs: &[Named]) -> anyhow::Result<String> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    let columns = runs.iter().flat_map(|run| [run.name.clone(), format!("{} ratio", run.name)]);
    writer.write_record(["figure".to_owned(), "unit".to_owned()].into_iter().chain(columns))?;
    let number = |value: Option<f64>| value.map_or_else(String::new, |value| value.to_string());
    for line in lines(runs) {
        let cells = (0..runs.len()).flat_map(|run| [number(line.values[run]), number(line.ratio(run))]);
        writer.write_record([line.name.to_owned(), line.unit.to_owned()].into_iter().chain(cells))?;
    }
    Ok(String::from_utf8(writer.into_inner()?)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::model::RunReport;

    fn run(name: &str, ttft: f64, hit_rate: Option<f64>) -> Named {
        let mut report = RunReport::default();
        report.figures.requests = 10;
        report.figures.hit_rate = hit_rate;
        report.figures.ttft_ms = Distribution { count: 10, mean: ttft, p50: ttft, ..Distribution::default() };
        Named::of_run(&report, name).unwrap()
    }

    #[test]
    fn ratios_are_to_the_first_run() {
        let runs = [run("a, first", 200.0, None), run("b", 50.0, Some(0.5))];
        let text = table(&runs);
        let line = |name: &str| text.lines().find(|line| line.starts_with(name)).unwrap().to_owned();
        assert!(line("TTFT p50").ends_with("50.0   x0.25"), "{text}");
        assert!(line("hit rate").contains(" - ") && line("hit rate").trim_end().ends_with("50.0"), "{text}");
        assert!(line("errors").trim_end().ends_with('0'), "no ratio to nothing: {text}");
        assert!(!text.contains("between tokens"), "{text}");
        let csv = csv(&runs).unwrap();
        assert_eq!(csv.lines().next(), Some("figure,unit,\"a, first\",\"a, first ratio\",b,b ratio"));
        assert!(csv.lines().any(|line| line == "TTFT p50,ms,200,1,50,0.25"), "{csv}");
        assert!(csv.lines().any(|line| line == "hit rate,%,,,50,"), "{csv}");
    }
}
