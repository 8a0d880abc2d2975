//! `--check-config`: what the start would find wrong, as far as no network is needed, and every option with its source.
//! Never opens a socket and never looks up a name.

use super::{Config, EXIT_USAGE, Refusal, engine};
use crate::discovery;

/// The whole report. The exit code is 0, or 2 with the problems alone.
pub(super) fn report(loaded: Result<Config, Refusal>) -> Refusal {
    let refused = |text: String| Refusal { exit_code: EXIT_USAGE, text };
    let config = match loaded {
        Ok(config) => config,
        Err(refusal) => return refused(refusal.text),
    };
    let mut problems = String::new();
    let mut warnings = config.warnings.clone();
    warnings.extend(engine::unusable_cpus(&config.shard_cpus));
    if let Some(path) = &config.discovery.workers_file {
        match discovery::check_workers_file(path) {
            // The router would run without these records, so they are no reason to refuse.
            Ok(complaints) => warnings.extend(complaints),
            Err(problem) => problems.push_str(&format!("error: --workers-file {}: {problem}\n", path.display())),
        }
    }
    // Its own message names the path.
    if let Err(problem) = config.prompter() {
        problems.push_str(&format!("error: --router-tokenizer-path: {problem:#}\n"));
    }
    if !problems.is_empty() {
        return refused(problems);
    }
    let mut text: String = config.effective().iter().map(|setting| format!("{setting}\n")).collect();
    warnings.iter().for_each(|warning| text.push_str(&format!("warning: {warning}\n")));
    Refusal { exit_code: 0, text }
}
