//! Configuration: the command line, the environment and the configuration file turned into one checked, typed value.
//! Nothing is bound or started here, and nothing below `main` reads a flag or a variable again.

mod access;
mod access_log;
mod check;
pub mod cli;
mod effective;
mod engine;
mod example;
mod file;
mod pages;
mod reload;
mod resilience;
mod steering;
mod tls;
mod validate;
mod worker_argument;

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::Resettable;
use clap::{CommandFactory, FromArgMatches};

use crate::access_log::AccessLogSettings;
use crate::discovery::DiscoveryConfig;
use crate::prompt::ChatEncoding;
use crate::proxy::{DisaggregationSettings, SilenceLimits, SteeringSettings};
use crate::route::Policy;
pub use access::Access;
pub use cli::{Cli, Command, InspectCommand};
pub use effective::{Effective, Setting, Source};
pub use engine::{Placement, raise_descriptor_limit};
pub use infera_shards::UpstreamTimeouts;
pub use reload::Changes;
pub use resilience::Resilience;
pub use tls::Tls;

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

/// Why the process ends before it starts; also help, version, the pages that are printed, and the report of a check.
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
    /// Weight of the cache term of the cost, finite and not negative; absent: as the load term has it.
    pub kv_overlap_weight: Option<f64>,
    /// Worth of a block in host memory that follows the device prefix, 0 to 1 device blocks; absent: as the load term has it.
    pub kv_host_tier_weight: Option<f64>,
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
    /// Whether answers say who made them.
    pub answer_names_worker: bool,
    pub disaggregation: DisaggregationSettings,
    pub steering: SteeringSettings,
    pub upstream: UpstreamTimeouts,
    /// When a stream is reported as silent.
    pub silence: SilenceLimits,
    pub resilience: Resilience,
    pub access: Access,
    pub tls: Tls,
    /// At least 1.
    pub shards: usize,
    /// A list holds distinct numbers, at most one per shard; shard i runs on number `i % len` of it.
    pub shard_cpus: ShardCpus,
    pub io_driver: IoDriver,
    pub require_io_uring: bool,
    pub log_format: LogFormat,
    /// A filter that parses.
    pub log_level: String,
    /// Absent: none.
    pub access_log: Option<AccessLogSettings>,
    /// Things the operator should know; logged once at start.
    pub warnings: Vec<String>,
    effective: Vec<Setting>,
    arguments: CommandLine,
}

/// The command line, to be read once more. `Debug` shows nothing of it: it may hold credentials.
#[derive(Clone, Default)]
struct CommandLine(Vec<OsString>);

impl std::fmt::Debug for CommandLine {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "{} arguments", self.0.len())
    }
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

/// Parses a whole command line, program name first. Environment variables are read by clap, and the configuration file here.
pub fn parse<I, T>(arguments: I) -> Result<Invocation, Refusal>
where
    I: IntoIterator<Item = T>,
    T: Into<OsString> + Clone,
{
    let arguments: Vec<OsString> = arguments.into_iter().map(Into::into).collect();
    let matches = command().try_get_matches_from(&arguments).map_err(usage)?;
    let cli = Cli::from_arg_matches(&matches).map_err(usage)?;
    let page = |text: String| Err(Refusal { exit_code: 0, text });
    match cli.command {
        Some(Command::Inspect(command)) => Ok(Invocation::Inspect(command)),
        Some(Command::Completions { shell }) => page(pages::completions(shell)),
        Some(Command::Man) => page(pages::man()),
        Some(Command::ConfigReference) => page(pages::reference()),
        Some(Command::ConfigExample) => page(example::file()),
        None if cli.serve.source.check_config => Err(check::report(load(&arguments, Names::Unresolved))),
        None => load(&arguments, Names::Resolved).map(|config| Invocation::Serve(Box::new(config))),
    }
}

/// Whether names of this host's own addresses are looked up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Names {
    Resolved,
    Unresolved,
}

fn usage(error: clap::Error) -> Refusal {
    Refusal { exit_code: if error.use_stderr() { EXIT_USAGE } else { 0 }, text: error.render().to_string() }
}

/// The command line's definition. Launchers leave variables empty that they do not set, so those set nothing here.
fn command() -> clap::Command {
    Cli::command().mut_args(|option| {
        let variable = option.get_env().and_then(std::env::var_os);
        if variable.is_some_and(|value| value.is_empty()) { option.env(Resettable::Reset) } else { option }
    })
}

fn load(arguments: &[OsString], names: Names) -> Result<Config, Refusal> {
    let command = command();
    let matches = command.clone().try_get_matches_from(arguments).map_err(usage)?;
    let path = matches.get_one::<PathBuf>("config");
    let file = path.map(|path| file::read(path, &command)).unwrap_or_default();
    let matches = file::with_values(command.clone(), &file.entries).try_get_matches_from(arguments).map_err(usage)?;
    let serve = Cli::from_arg_matches(&matches).map_err(usage)?.serve;
    let effective = effective::settings(&command, &matches, &file.entries);
    let file_name = path.map(|path| path.display().to_string()).unwrap_or_default();
    let place_of = |name: &str| effective.iter().find(|setting| setting.name == name)?.place(&file_name);
    let checked = validate::config(serve, effective.clone(), names);
    let mut problems = file.problems;
    match checked {
        Ok(config) if problems.is_empty() => {
            return Ok(Config { arguments: CommandLine(arguments.to_vec()), ..config });
        }
        Ok(_) => {}
        Err(more) => problems.extend(more.into_iter().map(|problem| with_places(problem, place_of))),
    }
    let text = problems.iter().map(|problem| format!("error: {problem}\n")).collect();
    Err(Refusal { exit_code: EXIT_INVALID, text })
}

/// A problem names its options; where their values came from is said behind it.
fn with_places(problem: String, place_of: impl Fn(&str) -> Option<String>) -> String {
    let is_of_name = |letter: char| letter.is_ascii_lowercase() || letter.is_ascii_digit() || letter == '-';
    let mut places: Vec<String> = Vec::new();
    for (at, _) in problem.match_indices("--") {
        let rest = &problem[at + 2..];
        let name = &rest[..rest.find(|letter| !is_of_name(letter)).unwrap_or(rest.len())];
        places.extend(place_of(name).filter(|place| !places.contains(place)));
    }
    match places.is_empty() {
        true => problem,
        false => format!("{problem} [{}]", places.join(", ")),
    }
}

impl Config {
    /// The settings in force, in the order of their declaration.
    pub fn effective(&self) -> &[Setting] {
        &self.effective
    }
}

#[cfg(test)]
mod tests;
