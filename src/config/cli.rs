//! The command line as clap sees it: names, environment variables, defaults and help. What the values mean
//! together is `validate`'s; enumerations are plain strings here so that all mistakes are reported in one go.

use clap::{Args, Parser, Subcommand};

/// KV-cache-aware LLM router in front of SGLang, vLLM and ATOM engines.
#[derive(Debug, Parser)]
#[command(name = "infera-router", version, args_conflicts_with_subcommands = true, max_term_width = 110)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Option<Command>,
    #[command(flatten)]
    pub serve: ServeArgs,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Shows what the router would see, without traffic.
    #[command(subcommand)]
    Inspect(InspectCommand),
    /// Prints a completion script for a shell.
    Completions { shell: clap_complete::Shell },
    /// Prints the man page.
    Man,
    /// Prints the reference of all options, as Markdown.
    ConfigReference,
    /// Prints a configuration file with every option as a comment.
    ConfigExample,
}

#[derive(Debug, Subcommand)]
pub enum InspectCommand {
    /// Request bodies as JSON lines on stdin -> text, token ids and block hashes as JSON lines.
    Prompt(crate::inspect::prompt::PromptArgs),
    /// KV-event frames on stdin, or live -> what each frame did to the visible blocks.
    Events(crate::inspect::events::Args),
}

/// Everything the server takes. Precedence: flag, then environment, then configuration file, then default.
#[derive(Debug, Clone, Args)]
pub struct ServeArgs {
    #[command(flatten)]
    pub source: SourceArgs,
    #[command(flatten)]
    pub listen: ListenArgs,
    #[command(flatten)]
    pub discovery: DiscoveryArgs,
    #[command(flatten)]
    pub routing: RoutingArgs,
    #[command(flatten)]
    pub disaggregation: DisaggregationArgs,
    #[command(flatten)]
    pub steering: super::steering::SteeringArgs,
    #[command(flatten)]
    pub upstream: UpstreamArgs,
    #[command(flatten)]
    pub access: super::access::AccessArgs,
    #[command(flatten)]
    pub tls: super::tls::TlsArgs,
    #[command(flatten)]
    pub resilience: super::resilience::ResilienceArgs,
    #[command(flatten)]
    pub machine: MachineArgs,
    #[command(flatten)]
    pub access_log: super::access_log::AccessLogArgs,
    #[command(flatten)]
    pub no_effect: NoEffectArgs,
}

/// Where the other options come from; the only ones that a configuration file cannot hold.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Configuration")]
pub struct SourceArgs {
    /// TOML file of options, by their names here without the dashes in front: `port = 8001`, and lists for repeatable ones.
    /// Flags go before variables, variables before the file. Read again at SIGHUP.
    #[arg(long, value_name = "PATH", env = "INFERA_CONFIG")]
    pub config: Option<std::path::PathBuf>,
    /// Check everything that can be checked without the network, print every option with its source, and end: with 0, or
    /// with 2 where something is wrong.
    #[arg(long)]
    pub check_config: bool,
}

/// Options that a configuration file cannot hold.
pub(super) fn only_outside_files(name: &str) -> bool {
    matches!(name, "config" | "check-config" | "help" | "version")
}

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Listener")]
pub struct ListenArgs {
    /// Address or name to listen on; `::` listens on IPv6 (and IPv4 where the system maps it).
    #[arg(long, default_value = "0.0.0.0")]
    pub host: String,
    /// Port to listen on; 0 takes a free one.
    #[arg(long, default_value_t = 8000)]
    pub port: u16,
    /// Address and port for /metrics, /dashboard, /v1/workers and /v1/admin alone, which the main port then does not answer.
    #[arg(long, value_name = "HOST:PORT")]
    pub admin_listen: Option<String>,
    /// Client connections, all shards together; further ones are answered with 503 and closed.
    #[arg(long, value_name = "N", default_value_t = 65_536)]
    pub max_connections: u32,
    /// Largest request body, bytes; a larger one is answered with 413.
    #[arg(long, value_name = "BYTES", default_value_t = crate::limits::BODY_BYTES_MAX as u64)]
    pub max_body_bytes: u64,
    /// How long running requests may take to finish after SIGTERM or SIGINT, seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0, allow_negative_numbers = true)]
    pub drain_timeout: f64,
}

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Discovery")]
pub struct DiscoveryArgs {
    /// A worker: URL[,key=value…] with the keys model, role (mixed|prefill|decode), engine, id, block-size, dp-size,
    /// dp-rank, kv-events, kv-replay (tcp://host:port), and for a prefill or decode worker protocol and bootstrap
    /// (host:port of a prefill worker's bootstrap server). What is left out is asked of the engine. Repeatable.
    #[arg(long, value_name = "URL[,KEY=VALUE…]")]
    pub worker: Vec<String>,
    /// JSON array of registration records; read again when it changes.
    #[arg(long, value_name = "PATH")]
    pub workers_file: Option<std::path::PathBuf>,
    /// static|etcd [default: static when --worker or --workers-file is given, else etcd].
    #[arg(long, value_name = "BACKEND")]
    pub discovery_backend: Option<String>,
    /// One or more etcd endpoints, separated by commas; https://HOST:PORT for TLS.
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:2379")]
    pub etcd_endpoint: String,
    /// Keys below it are workers.
    #[arg(long, value_name = "PREFIX", default_value = "/infera/workers/")]
    pub etcd_prefix: String,
    /// How KV events arrive: zmq.
    #[arg(long, value_name = "TRANSPORT", default_value = "zmq")]
    pub kv_event_transport: String,
}

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Routing")]
pub struct RoutingArgs {
    /// Who gets a request: kv-aware|round-robin.
    #[arg(long, value_name = "POLICY", default_value = "kv-aware")]
    pub router_policy: String,
    /// Model directory or tokenizer.json; without one, kv-aware routes by load only.
    #[arg(long, alias = "kv-tokenizer-path", value_name = "PATH")]
    pub router_tokenizer_path: Option<std::path::PathBuf>,
    /// Weight of one missing prefix block against one block of load; 0 routes by load only [default: 12; 1 with --kv-load
    /// active, for decode workers and for requests with images].
    #[arg(long, value_name = "WEIGHT", allow_negative_numbers = true)]
    pub kv_overlap_weight: Option<f64>,
    /// Share of a device block's worth that a block in host memory has (0 to 1), where it follows the device prefix
    /// [default: 0.5; 0 with --kv-load active].
    #[arg(long, value_name = "WEIGHT", allow_negative_numbers = true)]
    pub kv_host_tier_weight: Option<f64>,
    /// true|false: ask an engine to forget its cache when its KV events have no beginning and cannot be replayed.
    #[arg(
        long,
        value_name = "BOOL",
        env = "INFERA_KV_SELF_HEAL",
        default_value = "false",
        num_args = 0..=1,
        default_missing_value = "true",
        action = clap::ArgAction::Set
    )]
    pub kv_self_heal: bool,
    /// JSON object given to the chat template when a request does not set its members.
    #[arg(long, value_name = "JSON", env = "INFERA_KV_DEFAULT_CHAT_TEMPLATE_KWARGS")]
    pub kv_default_chat_template_kwargs: Option<String>,
    /// Bytes of memory for prompts that were seen before, so that only what is new is encoded; 0 remembers nothing.
    #[arg(
        long,
        value_name = "BYTES",
        env = "INFERA_PROMPT_CACHE_BYTES",
        default_value_t = crate::limits::PROMPT_CACHE_BYTES as u64
    )]
    pub prompt_cache_bytes: u64,
    /// true|false: take a worker's own template arguments (of its record, or as its engine says when it is asked) in
    /// place of the ones above.
    #[arg(long, value_name = "BOOL", default_value = "true", action = clap::ArgAction::Set)]
    pub kv_per_worker_template_kwargs: bool,
    /// true|false: render a request's own `chat_template`, under limits; without it such a request is routed by load. For
    /// trusted clients: one that compares values which share their parts can hold an encoder thread for ever.
    #[arg(
        long,
        value_name = "BOOL",
        default_value = "false",
        num_args = 0..=1,
        default_missing_value = "true",
        action = clap::ArgAction::Set
    )]
    pub allow_request_chat_template: bool,
    /// dsv4|kimi_k3: chats are rendered by this encoder, whatever the model directory says [default: as it says].
    #[arg(long, value_name = "NAME", env = "INFERA_KV_CHAT_ENCODING", default_value = "", hide_default_value = true)]
    pub kv_chat_encoding: String,
    /// Threads that encode long prompts [default: by the number of cores].
    #[arg(long, value_name = "N")]
    pub encoder_threads: Option<u32>,
    /// Further attempts on other workers, before any byte of the answer has reached the client. Unless it is 0, workers that
    /// refuse the connection do not count (16 at most).
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub request_max_retries: u32,
    /// true|false: an answer names the worker that made it in `x-worker-instance-id`, and of a pair the prefill half in
    /// `x-prefill-instance-id`; with the rank where it has ranks.
    #[arg(
        long,
        value_name = "BOOL",
        default_value = "false",
        num_args = 0..=1,
        default_missing_value = "true",
        action = clap::ArgAction::Set
    )]
    pub answer_names_worker: bool,
}

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Prefill and decode workers")]
pub struct DisaggregationArgs {
    /// Overlap weight for picking a prefill worker [default: --kv-overlap-weight].
    #[arg(long, value_name = "WEIGHT", allow_negative_numbers = true)]
    pub kv_prefill_overlap_weight: Option<f64>,
    /// Overlap weight for picking a decode worker [default: --kv-overlap-weight].
    #[arg(long, value_name = "WEIGHT", allow_negative_numbers = true)]
    pub kv_decode_overlap_weight: Option<f64>,
    /// When a request's load leaves its prefill worker: decode (with the decode answer's end)|completion (with the
    /// prefill answer's end).
    #[arg(long, value_name = "WHEN", env = "INFERA_PD_PREFILL_GUARD_RELEASE", default_value = "decode")]
    pub pd_prefill_guard_release: String,
    /// How long a prefill answer may go on after decode has ended, before the pair is aborted; 0 waits for ever.
    #[arg(
        long,
        value_name = "SECONDS",
        env = "INFERA_PD_PREFILL_DRAIN_TIMEOUT",
        default_value_t = 300.0,
        allow_negative_numbers = true
    )]
    pub pd_prefill_drain_timeout_s: f64,
    /// Who picks workers: auto (this router)|direct (the x-worker-instance-id and x-prefill-instance-id headers).
    #[arg(long, value_name = "MODE", default_value = "auto")]
    pub router_mode: String,
}

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Workers over HTTP")]
pub struct UpstreamArgs {
    /// How requests reach workers: http.
    #[arg(long, value_name = "TRANSPORT", default_value = "http")]
    pub request_transport: String,
    /// Connecting to a worker.
    #[arg(long, value_name = "SECONDS", default_value_t = 5.0, allow_negative_numbers = true)]
    pub upstream_connect_timeout_s: f64,
    /// From the end of the request to the first byte of the answer's body; 0 waits for ever (queueing may be long, and
    /// engines send their head before it).
    #[arg(long, value_name = "SECONDS", default_value_t = 0.0, allow_negative_numbers = true)]
    pub upstream_first_byte_timeout_s: f64,
    /// Longest silence inside an answer; 0 waits for ever.
    #[arg(
        long,
        value_name = "SECONDS",
        env = "INFERA_HTTP_REQ_IDLE_TIMEOUT",
        default_value_t = 0.0,
        allow_negative_numbers = true
    )]
    pub http_req_idle_timeout_s: f64,
    /// A stream whose answer has not begun for this long is reported, once, and goes on; 0 for never.
    #[arg(
        long,
        value_name = "SECONDS",
        env = "INFERA_STREAM_ADMISSION_WARN",
        default_value_t = 240.0,
        allow_negative_numbers = true
    )]
    pub stream_admission_warn_s: f64,
    /// A stream that falls silent in its middle for this long is reported, once, and goes on; 0 for never.
    #[arg(
        long,
        value_name = "SECONDS",
        env = "INFERA_STREAM_STALL_WARN",
        default_value_t = 60.0,
        allow_negative_numbers = true
    )]
    pub stream_stall_warn_s: f64,
}

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Machine")]
pub struct MachineArgs {
    /// Shards, one pinned thread each [default: one per core but one, or one per --shard-cpus].
    #[arg(long, value_name = "N")]
    pub shards: Option<u32>,
    /// CPUs to pin the shards to: a list as in 2-5,8; auto (the first CPU that this process may use is the ingest
    /// core's, the shards take the next ones; nothing is pinned where there are too few); or off.
    #[arg(long, value_name = "LIST", default_value = "auto")]
    pub shard_cpus: String,
    /// auto (io_uring where it works) or epoll.
    #[arg(long, value_name = "DRIVER", default_value = "auto")]
    pub io_driver: String,
    /// true|false: fail when io_uring cannot be used, instead of running on epoll.
    #[arg(
        long,
        value_name = "BOOL",
        default_value = "false",
        num_args = 0..=1,
        default_missing_value = "true",
        action = clap::ArgAction::Set
    )]
    pub require_io_uring: bool,
    /// Log lines as text|json.
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    pub log_format: String,
    /// What is logged: error|warn|info|debug|trace, also by target as in info,infera_router::parity=debug (differences of
    /// rendering are explained only where that was so at the start).
    #[arg(long, value_name = "FILTER", env = "RUST_LOG", default_value = "info")]
    pub log_level: String,
}

/// Options that only tune a transport or backend which cannot be chosen in this build. Launchers pass them along, so
/// they are accepted; a set one is reported at start.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Accepted, without effect in this build")]
pub struct NoEffectArgs {
    /// NATS servers.
    #[arg(long, value_name = "URL", env = "NATS_SERVER", hide_env_values = true)]
    pub nats_server: Option<String>,
    /// Longest silence inside an answer over NATS.
    #[arg(long, value_name = "SECONDS", env = "INFERA_NATS_REQ_IDLE_TIMEOUT")]
    pub nats_req_idle_timeout_s: Option<f64>,
    /// Longest answer over NATS.
    #[arg(long, value_name = "SECONDS", env = "INFERA_NATS_REQ_MAX_DURATION")]
    pub nats_req_max_duration_s: Option<f64>,
    /// Requests pending over NATS.
    #[arg(long, value_name = "N", env = "INFERA_NATS_REQ_MAX_PENDING")]
    pub nats_req_max_pending: Option<u64>,
    /// Label selector of worker pods.
    #[arg(long, value_name = "SELECTOR", env = "INFERA_K8S_LABEL_SELECTOR")]
    pub k8s_label_selector: Option<String>,
    /// Namespace of worker pods.
    #[arg(long, value_name = "NAMESPACE")]
    pub k8s_namespace: Option<String>,
}
