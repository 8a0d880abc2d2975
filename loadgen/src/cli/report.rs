//! Owns `loadgen report`: finished runs side by side, as table, CSV or page, and as a gate.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use loadgen::report::compare;
use loadgen::report::condition::{self, Condition};
use loadgen::report::document::{load, with_distinct_names};

#[derive(Args)]
pub struct ReportArguments {
    /// Reports of `loadgen run --json` or `loadgen demo --json`; the first run is what the others are compared with.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Write a page here that needs nothing beside it.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Print the comparison as CSV.
    #[arg(long)]
    csv: bool,
    /// A condition that every run must keep, as in 'ttft.p99<200ms'; exit code 1 where one does not. Repeatable.
    #[arg(long = "assert", value_name = "CONDITION")]
    conditions: Vec<Condition>,
}

pub fn run(arguments: ReportArguments) -> Result<ExitCode> {
    let mut runs = Vec::new();
    for file in &arguments.files {
        runs.extend(load(file)?);
    }
    let runs = with_distinct_names(runs);
    match arguments.csv {
        true => print!("{}", compare::csv(&runs)?),
        false => print!("{}", compare::table(&runs)),
    }
    if let Some(path) = &arguments.html {
        super::output::write_page(path, &runs)?;
    }
    let mut code = ExitCode::SUCCESS;
    for run in &runs {
        for line in condition::broken(&arguments.conditions, &run.value)? {
            eprintln!("ASSERTION of {}: {line}", run.name);
            code = ExitCode::FAILURE;
        }
    }
    Ok(code)
}
