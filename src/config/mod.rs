//! Configuration: the command line and the environment turned into one checked, typed value. Nothing is opened,
//! bound or started here, and nothing below `main` reads a flag or a variable again.

mod access;
mod access_log;
pub mod cli;
mod effective;
mod engine;
mod resilience;
mod steering;
mod validate;
mod worker_argument;

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{CommandFactory, FromArgMatches};

use crate::access_log::AccessLogSettings;
use crate::discovery::DiscoveryConfig;
use crate::prompt::ChatEncoding;
use crate::proxy::{DisaggregationSettings, SilenceLimits, SteeringSettings};
use crate::route::Policy;
pub use access::Access;
pub use cli::{Cli, Command, InspectCommand};
pub use engine::{Placement, raise_descriptor_limit};
pub use resilience::Resilience;

/// Process exit code of a command line that clap refuses.
pub const EXIT_USAGE: u8 = 2;
/// Process exit code of a command line whose values do not make sense, alone or together.
pub const EXIT_INVALID: u8 = 1;

/// What the command line asks for.
#[derive(Debug)]
pub enum Invocation {
    Serve(Box<Config>),
    Inspect(InspectCommand),
}

/// Why the process ends before it starts; also `--help` and `--version`.
#[derive(Debug)]
pub struct Refusal {
    pub exit_code: u8,
    pub text: String,
}

impl Refusal {
    /// Writes the text where it belongs (help to stdout, errors to stderr).
    pub fn print(&self) {
        use std::io::Write;
        // A closed stdout or stderr leaves nothing to report to.
        let _ = match self.exit_code {
            0 => std::io::stdout().lock().write_all(self.text.as_bytes()),
            _ => std::io::stderr().lock().write_all(self.text.as_bytes()),
        };
    }
}

/// The server's whole configuration. `Debug` and [`Config::effective`] show no credentials.
#[derive(Clone, Debug)]
pub struct Config {
    pub listen: SocketAddr,
    /// Absent: the main port answers everything.
    pub admin_listen: Option<SocketAddr>,
    /// Client connections of the whole process.
    pub connections_max: usize,
    pub max_body_bytes: usize,
    pub drain_timeout: Duration,
    pub discovery: DiscoveryConfig,
    pub policy: Policy,
    /// Model directory or tokenizer.json; present only if the path existed at start.
    pub tokenizer_path: Option<PathBuf>,
    /// Weight of the cache term of the cost, finite and not negative.
    pub kv_overlap_weight: f64,
    /// Worth of a block in host memory that follows the device prefix, 0 to 1 device blocks.
    pub kv_host_tier_weight: f64,
    /// Whether engines whose events cannot be anchored are asked to forget their cache.
    pub kv_self_heal: bool,
    /// Given to the chat template where a request does not set the member.
    pub chat_template_kwargs: serde_json::Map<String, serde_json::Value>,
    /// `--allow-request-chat-template`.
    pub allow_request_chat_template: bool,
    /// Absent: as the model directory says.
    pub chat_encoding: Option<ChatEncoding>,
    /// Absent: the encoder pool's own default.
    pub encoder_threads: Option<usize>,
    /// Bound of the prefix cache; 0 for none.
    pub prompt_cache_bytes: usize,
    pub request_retries_max: u32,
    pub disaggregation: DisaggregationSettings,
    pub steering: SteeringSettings,
    pub upstream: UpstreamTimeouts,
    /// When a stream is reported as silent.
    pub silence: SilenceLimits,
    pub resilience: Resilience,
    pub access: Access,
    /// At least 1.
    pub shards: usize,
    /// A list holds distinct numbers, at most one per shard; shard i runs on number `i % len` of it.
    pub shard_cpus: ShardCpus,
    pub io_driver: IoDriver,
    pub require_io_uring: bool,
    pub log_format: LogFormat,
    /// Absent: none.
    pub access_log: Option<AccessLogSettings>,
    /// Things the operator should know; logged once at start.
    pub warnings: Vec<String>,
    effective: Vec<effective::Setting>,
}

/// Per upstream exchange; `None` waits for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UpstreamTimeouts {
    pub connect: Duration,
    pub first_byte: Option<Duration>,
    pub idle: Option<Duration>,
}

/// `--shard-cpus`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ShardCpus {
    /// The ingest core and the shards get a CPU each, where there are enough.
    Auto,
    Off,
    List(Vec<usize>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoDriver {
    /// io_uring where it works, else epoll.
    Auto,
    Epoll,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    Text,
    Json,
}

/// Parses a whole command line, program name first. Environment variables are read by clap.
pub fn parse<I, T>(arguments: I) -> Result<Invocation, Refusal>
where
    I: IntoIterator<Item = T>,
    T: Into<OsString> + Clone,
{
    let usage = |error: clap::Error| Refusal {
        exit_code: if error.use_stderr() { EXIT_USAGE } else { 0 },
        text: error.render().to_string(),
    };
    let matches = Cli::command().try_get_matches_from(arguments).map_err(usage)?;
    let cli = Cli::from_arg_matches(&matches).map_err(usage)?;
    if let Some(Command::Inspect(command)) = cli.command {
        return Ok(Invocation::Inspect(command));
    }
    let effective = effective::settings(&Cli::command(), &matches);
    validate::config(cli.serve, effective).map(|config| Invocation::Serve(Box::new(config))).map_err(|problems| {
        let mut text = String::new();
        for problem in problems {
            text.push_str(&format!("error: {problem}\n"));
        }
        Refusal { exit_code: EXIT_INVALID, text }
    })
}

impl Config {
    /// The settings in force, one `name = value (where from)` per line, credentials left out.
    pub fn effective(&self) -> impl Iterator<Item = String> + '_ {
        self.effective.iter().map(ToString::to_string)
    }

    /// The same for programs: by option its values, as they were given, and their source.
    pub fn effective_json(&self) -> serde_json::Value {
        effective::json(&self.effective)
    }
}

#[cfg(test)]
mod tests;
