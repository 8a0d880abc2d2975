//! Options of the access log.

use std::path::PathBuf;

use clap::Args;

use super::LogFormat;
use super::validate::Problems;
use crate::access_log::AccessLogSettings;

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Access log")]
pub struct AccessLogArgs {
    /// off|text|json: one line per request at its end, with its worker, hits, stage times and how it ended; never text of a
    /// prompt, a query or a key.
    #[arg(long, value_name = "FORMAT", env = "INFERA_ACCESS_LOG", default_value = "off")]
    pub access_log: String,
    /// File that the lines are appended to; SIGUSR1 opens it anew after a rotation [default: standard output].
    #[arg(long, value_name = "PATH", env = "INFERA_ACCESS_LOG_FILE")]
    pub access_log_file: Option<PathBuf>,
}

/// Nothing without an access log.
pub(super) fn settings(arguments: &AccessLogArgs, problems: &mut Problems) -> Option<AccessLogSettings> {
    let format = problems.choice(
        "--access-log",
        &arguments.access_log,
        &[("off", None), ("text", Some(LogFormat::Text)), ("json", Some(LogFormat::Json))],
    );
    if format.is_none() && arguments.access_log_file.is_some() {
        problems.add("--access-log-file needs --access-log text|json");
    }
    Some(AccessLogSettings { format: format?, file: arguments.access_log_file.clone() })
}
