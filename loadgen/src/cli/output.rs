//! Owns what `loadgen run` leaves behind besides its table: files, the comparison's gate, the target's metrics. Never
//! sends a request.

use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use loadgen::report::condition::{self, Condition};
use loadgen::report::document::{Named, write_json};
use loadgen::report::model::{Fleet, Placement, RunReport};
use loadgen::report::page;
use loadgen::run::config::{RunConfig, RunResult};
use loadgen::run::report;
use loadgen::run::scrape::Scraper;

/// Given as `--metrics-url` where nothing is to be read.
const NO_METRICS: &str = "none";

#[derive(Args)]
#[command(next_help_heading = "Reports")]
pub struct OutputArguments {
    /// What the run is called where it is shown beside others [default: the name of its file].
    #[arg(long)]
    name: Option<String>,
    /// Write the report here.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write a line per request here.
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Write a page here that needs nothing beside it.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// A condition on the report, as in 'ttft.p99<200ms'; exit code 1 where it does not hold. Repeatable.
    #[arg(long = "assert", value_name = "CONDITION")]
    conditions: Vec<Condition>,
    /// Where the target shows its metrics, which are read during the run; `none` for nowhere [default: /metrics at the target].
    #[arg(long, value_name = "URL")]
    metrics_url: Option<String>,
    /// How often they are read.
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0)]
    metrics_seconds: f64,
}

impl OutputArguments {
    /// Refuses before the run what could only fail behind it.
    ///
    /// # Errors
    /// A condition on something that no report has, or a file that cannot be written.
    pub fn check(&self) -> Result<()> {
        let mut template = RunReport { fleet: Some(Fleet::default()), ..RunReport::default() };
        template.figures.placement = Some(Placement::default());
        condition::ensure_known(&self.conditions, &serde_json::to_value(template)?)?;
        for path in [&self.json, &self.csv, &self.html].into_iter().flatten() {
            create(path)?;
        }
        Ok(())
    }

    /// Begins to read the metrics of `target`, unless that was declined.
    ///
    /// # Errors
    /// A URL that is none.
    pub fn scraper(&self, target: &str) -> Result<Option<Scraper>> {
        let every = Duration::try_from_secs_f64(self.metrics_seconds).context("--metrics-seconds")?;
        match self.metrics_url.as_deref() {
            Some(NO_METRICS) => Ok(None),
            Some(url) => Scraper::start(url, every).map(Some),
            None => Scraper::start(&origin(target), every).map(Some),
        }
    }

    /// Writes the files; the lines of conditions that do not hold.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn write(&self, config: &RunConfig, result: &RunResult, fleet: Option<Fleet>) -> Result<Vec<String>> {
        let document = report::run_report(config, result, self.name.clone(), fleet);
        if let Some(path) = &self.json {
            write_json(path, &document)?;
        }
        if let Some(path) = &self.csv {
            let file = BufWriter::new(create(path)?);
            result.record.rows.write_csv(file).with_context(|| format!("writing {}", path.display()))?;
        }
        let run = Named::of_run(&document, "run")?;
        if let Some(path) = &self.html {
            write_page(path, std::slice::from_ref(&run))?;
        }
        condition::broken(&self.conditions, &run.value)
    }
}

/// Writes a page of runs.
pub fn write_page(path: &Path, runs: &[Named]) -> Result<()> {
    std::fs::write(path, page::html(runs)?).with_context(|| format!("writing {}", path.display()))
}

fn create(path: &Path) -> Result<File> {
    File::create(path).with_context(|| format!("writing {}", path.display()))
}

/// A URL without its path.
fn origin(url: &str) -> String {
    let start = url.find("://").map_or(0, |at| at + 3);
    let end = url[start..].find('/').map_or(url.len(), |at| start + at);
    url[..end].to_owned()
}

#[cfg(test)]
mod tests {
    use super::origin;

    #[test]
    fn metrics_are_at_the_root_of_the_target() {
        for url in ["http://h:1", "http://h:1/", "http://h:1/a/b"] {
            assert_eq!(origin(url), "http://h:1");
        }
    }
}
