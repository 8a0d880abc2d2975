//! From parsed arguments to [`Config`]: ranges, enumerations and what options mean together. Collects every
//! problem before it gives up; each names its option and what to write instead.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::time::Duration;

use infera_shards::ClientTls;

use super::cli::{
    DisaggregationArgs, DiscoveryArgs, ListenArgs, MachineArgs, NoEffectArgs, RoutingArgs, ServeArgs, UpstreamArgs,
};
use super::effective::{Setting, Source, redact};
use super::tls::TlsArgs;
use super::{CommandLine, Config, IoDriver, LogFormat, Names, ShardCpus, UpstreamTimeouts, worker_argument};
use crate::discovery::{DiscoveryConfig, EtcdConfig, Timing};
use crate::logging;
use crate::prompt::ChatEncoding;
use crate::proxy::{DisaggregationSettings, PrefillRelease, RouterMode, SilenceLimits};
use crate::route::Policy;
use crate::worker::WorkerRecord;

const SHARDS_MAX: u32 = 1024;
const ENCODER_THREADS_MAX: u32 = 1024;
const RETRIES_MAX: u32 = 100;
/// The cache's table is laid out at start, at a twentieth of this.
const PROMPT_CACHE_BYTES_MAX: u64 = 1 << 40;
/// Longest duration that is accepted, seconds: ten years, far from every clock's overflow.
const SECONDS_MAX: f64 = 315_360_000.0;

/// The problems found so far.
pub(super) struct Problems(Vec<String>);

impl Problems {
    pub(super) fn add(&mut self, problem: impl Into<String>) {
        self.0.push(problem.into());
    }

    /// Picks the meaning of an enumeration; the first choice stands in after a problem.
    pub(super) fn choice<T: Copy>(&mut self, flag: &str, given: &str, choices: &[(&str, T)]) -> T {
        if let Some((_, value)) = choices.iter().find(|(name, _)| *name == given) {
            return *value;
        }
        let names: Vec<_> = choices.iter().map(|(name, _)| *name).filter(|name| !name.is_empty()).collect();
        self.add(format!("this build supports {flag} {} (got `{given}`)", names.join("|")));
        choices[0].1
    }

    pub(super) fn seconds(&mut self, flag: &str, seconds: f64) -> Duration {
        if seconds.is_finite() && (0.0..=SECONDS_MAX).contains(&seconds) {
            return Duration::from_secs_f64(seconds);
        }
        self.add(format!("{flag} must be a number of seconds from 0 to {SECONDS_MAX} (got {seconds})"));
        Duration::ZERO
    }

    /// Zero switches the timeout off.
    fn seconds_or_off(&mut self, flag: &str, seconds: f64) -> Option<Duration> {
        Some(self.seconds(flag, seconds)).filter(|duration| !duration.is_zero())
    }

    fn weight(&mut self, flag: &str, weight: f64) -> f64 {
        if !weight.is_finite() || weight < 0.0 {
            self.add(format!("{flag} must be a number of at least 0 (got {weight})"));
        }
        weight
    }

    pub(super) fn range(&mut self, flag: &str, value: u32, minimum: u32, maximum: u32) -> usize {
        if !(minimum..=maximum).contains(&value) {
            self.add(format!("{flag} must be from {minimum} to {maximum} (got {value})"));
        }
        value.clamp(minimum, maximum) as usize
    }
}

pub(super) fn config(arguments: ServeArgs, effective: Vec<Setting>, names: Names) -> Result<Config, Vec<String>> {
    let mut problems = Problems(Vec::new());
    let listen = listen(&arguments.listen, names, &mut problems);
    let admin_listen =
        arguments.listen.admin_listen.as_deref().and_then(|text| admin_listen(text, listen, names, &mut problems));
    let discovery = discovery(&arguments.discovery, &arguments.tls, &mut problems);
    let routing = routing(&arguments.routing, &mut problems);
    let reads_prompts = routing.policy == Policy::KvAware && routing.tokenizer_path.is_some();
    let template_arguments = reads_prompts && arguments.routing.kv_per_worker_template_kwargs;
    let mut discovery = DiscoveryConfig { template_arguments, ..discovery };
    let steering = super::steering::settings(&arguments.steering, routing.policy, &mut problems);
    let disaggregation = disaggregation(&arguments.disaggregation, routing.overlap_weight, &mut problems);
    let upstream = upstream(&arguments.upstream, &mut problems);
    let silence = silence(&arguments.upstream, &mut problems);
    let access = super::access::settings(&arguments.access, &mut problems);
    discovery.authorization = access.worker_key.clone();
    let tls = super::tls::settings(&arguments.tls, &mut problems);
    discovery.tls = tls.workers.clone();
    discovery.own_listeners = [listen].into_iter().chain(admin_listen).collect();
    let resilience = super::resilience::settings(&arguments.resilience, &mut problems);
    let (shards, shard_cpus) = shards(&arguments.machine, &mut problems);
    let io_driver = problems.choice(
        "--io-driver",
        &arguments.machine.io_driver,
        &[("auto", IoDriver::Auto), ("epoll", IoDriver::Epoll)],
    );
    if arguments.machine.require_io_uring && io_driver == IoDriver::Epoll {
        problems.add("--require-io-uring contradicts --io-driver epoll; drop one of them");
    }
    let log_format = problems.choice(
        "--log-format",
        &arguments.machine.log_format,
        &[("text", LogFormat::Text), ("json", LogFormat::Json)],
    );
    let log_level = log_level(&arguments.machine.log_level, &mut problems);
    let access_log = super::access_log::settings(&arguments.access_log, &mut problems);
    let max_body_bytes = usize::try_from(arguments.listen.max_body_bytes).unwrap_or(usize::MAX);
    if max_body_bytes == 0 {
        problems.add("--max-body-bytes must be at least 1");
    }
    let connections_max = problems.range("--max-connections", arguments.listen.max_connections, 1, u32::MAX);
    let drain_timeout = problems.seconds("--drain-timeout", arguments.listen.drain_timeout);
    if !problems.0.is_empty() {
        return Err(problems.0);
    }
    let mut warnings = no_effect(&arguments.no_effect, &effective);
    let has_secure_worker = discovery.workers.iter().any(|worker| worker.endpoint().is_ok_and(|url| url.is_tls));
    warnings.extend(super::tls::warnings(&arguments.tls, has_secure_worker));
    if routing.policy == Policy::KvAware && routing.tokenizer_path.is_none() {
        warnings.push(
            "no --router-tokenizer-path: only prompts given as token ids are matched, all others are routed by load"
                .to_owned(),
        );
    }
    Ok(Config {
        listen,
        admin_listen,
        connections_max,
        max_body_bytes,
        drain_timeout,
        discovery,
        policy: routing.policy,
        tokenizer_path: routing.tokenizer_path,
        kv_overlap_weight: routing.overlap_weight,
        kv_host_tier_weight: routing.host_tier_weight,
        kv_self_heal: routing.self_heal,
        chat_template_kwargs: routing.chat_template_kwargs,
        allow_request_chat_template: arguments.routing.allow_request_chat_template,
        chat_encoding: routing.chat_encoding,
        encoder_threads: routing.encoder_threads,
        prompt_cache_bytes: routing.prompt_cache_bytes,
        request_retries_max: routing.request_retries_max,
        answer_names_worker: arguments.routing.answer_names_worker,
        disaggregation,
        steering,
        upstream,
        silence,
        resilience,
        access,
        tls,
        shards,
        shard_cpus,
        io_driver,
        require_io_uring: arguments.machine.require_io_uring,
        log_format,
        log_level,
        access_log,
        warnings,
        effective,
        arguments: CommandLine::default(),
    })
}

/// Options set by hand that change nothing. Environment variables are common to whole hosts and stay quiet.
fn no_effect(arguments: &NoEffectArgs, effective: &[Setting]) -> Vec<String> {
    let NoEffectArgs {
        nats_server: _,
        nats_req_idle_timeout_s: _,
        nats_req_max_duration_s: _,
        nats_req_max_pending: _,
        k8s_label_selector: _,
        k8s_namespace: _,
    } = arguments;
    effective
        .iter()
        .filter(|setting| matches!(setting.source, Source::Flag | Source::File(_)))
        .filter(|setting| setting.name.starts_with("nats-") || setting.name.starts_with("k8s-"))
        .map(|setting| format!("--{} has no effect: this build has neither nats nor kubernetes", setting.name))
        .collect()
}

fn log_level(text: &str, problems: &mut Problems) -> String {
    if let Err(problem) = logging::parse(text) {
        problems.add(format!("--log-level {problem}; write it as in info,infera_router::parity=debug"));
    }
    text.to_owned()
}

fn listen(arguments: &ListenArgs, names: Names, problems: &mut Problems) -> SocketAddr {
    let host = arguments.host.trim();
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    if let Ok(ip) = bare.parse::<IpAddr>() {
        return SocketAddr::new(ip, arguments.port);
    }
    if names == Names::Unresolved {
        // Nobody listens on what stands in for it.
        return SocketAddr::from(([0, 0, 0, 0], arguments.port));
    }
    match (host, arguments.port).to_socket_addrs().map(|mut addresses| addresses.next()) {
        Ok(Some(address)) => return address,
        Ok(None) => problems.add(format!("--host `{host}` has no address; give an IP address to listen on")),
        Err(error) => problems.add(format!("--host `{host}`: {error}; give an IP address to listen on")),
    }
    SocketAddr::from(([0, 0, 0, 0], arguments.port))
}

fn admin_listen(text: &str, main: SocketAddr, names: Names, problems: &mut Problems) -> Option<SocketAddr> {
    if names == Names::Unresolved && text.parse::<SocketAddr>().is_err() {
        if text.rsplit_once(':').is_none_or(|(host, port)| host.is_empty() || port.parse::<u16>().is_err()) {
            problems.add(format!("--admin-listen `{text}` is not HOST:PORT"));
        }
        return None;
    }
    match text.to_socket_addrs().map(|mut addresses| addresses.next()) {
        Ok(Some(address)) if address == main && address.port() != 0 => {
            problems.add(format!("--admin-listen {text} is the main address; give another port, or leave it out"));
        }
        Ok(Some(address)) => return Some(address),
        Ok(None) => problems.add(format!("--admin-listen `{text}` has no address; give HOST:PORT")),
        Err(error) => problems.add(format!("--admin-listen `{text}`: {error}; give HOST:PORT")),
    }
    None
}

fn discovery(arguments: &DiscoveryArgs, tls: &TlsArgs, problems: &mut Problems) -> DiscoveryConfig {
    let mut workers: Vec<WorkerRecord> = Vec::new();
    for text in &arguments.worker {
        match worker_argument::parse(text) {
            Ok(record) => match workers.iter().find(|known| known.worker_id == record.worker_id) {
                Some(known) if *known != record => {
                    problems.add(format!(
                        "--worker {}: `{}` is given twice, differently",
                        redact(text),
                        record.worker_id
                    ));
                }
                Some(_) => {}
                None => workers.push(record),
            },
            Err(problem) => problems.add(format!("--worker {}: {problem}", redact(text))),
        }
    }
    if let Some(path) = &arguments.workers_file
        && !path.is_file()
    {
        problems.add(format!("--workers-file {}: no such file", path.display()));
    }
    let event_transports = match arguments.kv_event_transport.as_str() {
        "nats" => {
            problems.add("--kv-event-transport nats is not available in this build; use zmq");
            "zmq"
        }
        other => other,
    };
    problems.choice("--kv-event-transport", event_transports, &[("zmq", ())]);
    let has_static = !arguments.worker.is_empty() || arguments.workers_file.is_some();
    let backend = match arguments.discovery_backend.as_deref() {
        None if has_static => "static",
        None => "etcd",
        Some("kubernetes") => {
            problems.add("--discovery-backend kubernetes is not available in this build; use etcd or static");
            "static"
        }
        Some("static") if !has_static => {
            problems.add("--discovery-backend static needs --worker or --workers-file");
            "static"
        }
        Some(backend) => backend,
    };
    let uses_etcd = problems.choice("--discovery-backend", backend, &[("static", false), ("etcd", true)]);
    DiscoveryConfig {
        workers,
        workers_file: arguments.workers_file.clone(),
        etcd: uses_etcd.then(|| etcd(arguments, tls, problems)),
        template_arguments: false,
        own_listeners: Vec::new(),
        timing: Timing::default(),
        authorization: None,
        tls: ClientTls::default(),
    }
}

fn etcd(arguments: &DiscoveryArgs, tls: &TlsArgs, problems: &mut Problems) -> EtcdConfig {
    let mut endpoints = Vec::new();
    for text in arguments.etcd_endpoint.split(',').map(str::trim).filter(|text| !text.is_empty()) {
        match etcd_endpoint(text) {
            Ok(endpoint) => endpoints.push(endpoint),
            Err(problem) => problems.add(format!("--etcd-endpoint {}: {problem}", redact(text))),
        }
    }
    if arguments.etcd_endpoint.split(',').all(|text| text.trim().is_empty()) {
        problems.add("--etcd-endpoint is empty; give host:port");
    }
    let mut prefix = arguments.etcd_prefix.clone();
    if prefix.is_empty() {
        problems.add("--etcd-prefix is empty; every key would be taken for a worker");
    }
    if !prefix.ends_with('/') {
        prefix.push('/');
    }
    let roots = match endpoints.iter().any(|endpoint| endpoint.starts_with("https:")) {
        true => super::tls::roots("--etcd-tls-ca-file", tls.etcd_tls_ca_file.as_deref(), problems).roots.clone(),
        false => Vec::new(),
    };
    EtcdConfig { endpoints, prefix, roots }
}

/// `http[s]://…` is kept (without its trailing slash), `host:port` gets a scheme, `host` the registry's usual port.
fn etcd_endpoint(text: &str) -> Result<String, String> {
    let with_scheme = if text.contains("://") { text.to_owned() } else { format!("http://{text}") };
    let url = url::Url::parse(&with_scheme).map_err(|error| format!("{error}; write http://host:port"))?;
    match url.scheme() {
        "http" | "https" => {}
        _ => return Err("write http://host:port or host:port".to_owned()),
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err("etcd authentication is not available in this build; leave out the user".to_owned());
    }
    if !matches!(url.path(), "" | "/") || url.query().is_some() || url.fragment().is_some() {
        return Err("only scheme, host and port; write http://host:port".to_owned());
    }
    let Some(host) = url.host_str() else { return Err("no host; write http://host:port".to_owned()) };
    // Without a scheme the registry's port is meant; with one, the scheme's.
    let port = url.port_or_known_default().filter(|_| text.contains("://") || url.port().is_some()).unwrap_or(2379);
    Ok(format!("{}://{host}:{port}", url.scheme()))
}

struct Routing {
    policy: Policy,
    tokenizer_path: Option<PathBuf>,
    overlap_weight: Option<f64>,
    host_tier_weight: Option<f64>,
    self_heal: bool,
    chat_template_kwargs: serde_json::Map<String, serde_json::Value>,
    chat_encoding: Option<ChatEncoding>,
    encoder_threads: Option<usize>,
    prompt_cache_bytes: usize,
    request_retries_max: u32,
}

fn routing(arguments: &RoutingArgs, problems: &mut Problems) -> Routing {
    let chat_encoding = problems.choice(
        "--kv-chat-encoding",
        &arguments.kv_chat_encoding,
        &[("", None), ("dsv4", Some(ChatEncoding::Dsv4)), ("kimi_k3", Some(ChatEncoding::KimiK3))],
    );
    let policy = problems.choice(
        "--router-policy",
        &arguments.router_policy,
        &[("round-robin", Policy::RoundRobin), ("kv-aware", Policy::KvAware)],
    );
    if let Some(path) = &arguments.router_tokenizer_path
        && !path.exists()
    {
        problems.add(format!(
            "--router-tokenizer-path {}: no such path; give a model directory or a tokenizer.json",
            path.display()
        ));
    }
    let overlap_weight = arguments.kv_overlap_weight.map(|given| problems.weight("--kv-overlap-weight", given));
    if arguments.kv_self_heal && policy != Policy::KvAware {
        problems.add("--kv-self-heal requires --router-policy kv-aware");
    }
    let host_tier_weight = arguments.kv_host_tier_weight;
    if let Some(given) = host_tier_weight.filter(|given| !(0.0..=1.0).contains(given)) {
        problems.add(format!("--kv-host-tier-weight must be a number from 0 to 1 (got {given})"));
    }
    let chat_template_kwargs = match arguments.kv_default_chat_template_kwargs.as_deref().map(str::trim) {
        None | Some("") => serde_json::Map::new(),
        Some(text) => match serde_json::from_str(text) {
            Ok(serde_json::Value::Object(members)) => members,
            Ok(_) => {
                problems.add("--kv-default-chat-template-kwargs must be a JSON object");
                serde_json::Map::new()
            }
            Err(error) => {
                problems.add(format!("--kv-default-chat-template-kwargs is not JSON: {error}"));
                serde_json::Map::new()
            }
        },
    };
    let encoder_threads =
        arguments.encoder_threads.map(|threads| problems.range("--encoder-threads", threads, 1, ENCODER_THREADS_MAX));
    let prompt_cache_bytes = arguments.prompt_cache_bytes;
    if prompt_cache_bytes > PROMPT_CACHE_BYTES_MAX {
        problems
            .add(format!("--prompt-cache-bytes must be at most {PROMPT_CACHE_BYTES_MAX} (got {prompt_cache_bytes})"));
    }
    problems.range("--request-max-retries", arguments.request_max_retries, 0, RETRIES_MAX);
    Routing {
        policy,
        tokenizer_path: arguments.router_tokenizer_path.clone(),
        overlap_weight,
        host_tier_weight,
        self_heal: arguments.kv_self_heal,
        chat_encoding,
        chat_template_kwargs,
        encoder_threads,
        prompt_cache_bytes: prompt_cache_bytes as usize,
        request_retries_max: arguments.request_max_retries,
    }
}

fn disaggregation(
    arguments: &DisaggregationArgs,
    overlap_weight: Option<f64>,
    problems: &mut Problems,
) -> DisaggregationSettings {
    let mut weight = |flag, given: Option<f64>| given.map(|given| problems.weight(flag, given)).or(overlap_weight);
    DisaggregationSettings {
        prefill_overlap_weight: weight("--kv-prefill-overlap-weight", arguments.kv_prefill_overlap_weight),
        decode_overlap_weight: weight("--kv-decode-overlap-weight", arguments.kv_decode_overlap_weight),
        prefill_release: problems.choice(
            "--pd-prefill-guard-release",
            &arguments.pd_prefill_guard_release,
            &[("decode", PrefillRelease::Decode), ("completion", PrefillRelease::Completion)],
        ),
        prefill_drain_timeout: problems
            .seconds_or_off("--pd-prefill-drain-timeout-s", arguments.pd_prefill_drain_timeout_s),
        mode: problems.choice(
            "--router-mode",
            &arguments.router_mode,
            &[("auto", RouterMode::Auto), ("direct", RouterMode::Direct)],
        ),
    }
}

fn upstream(arguments: &UpstreamArgs, problems: &mut Problems) -> UpstreamTimeouts {
    let transport = match arguments.request_transport.as_str() {
        "nats" => {
            problems.add("--request-transport nats is not available in this build; use http");
            "http"
        }
        other => other,
    };
    problems.choice("--request-transport", transport, &[("http", ())]);
    let connect = problems.seconds("--upstream-connect-timeout-s", arguments.upstream_connect_timeout_s);
    if arguments.upstream_connect_timeout_s == 0.0 {
        problems.add(
            "--upstream-connect-timeout-s must be above 0: without it a dead host would hold requests for minutes",
        );
    }
    UpstreamTimeouts {
        connect,
        first_byte: problems.seconds_or_off("--upstream-first-byte-timeout-s", arguments.upstream_first_byte_timeout_s),
        idle: problems.seconds_or_off("--http-req-idle-timeout-s", arguments.http_req_idle_timeout_s),
    }
}

fn silence(arguments: &UpstreamArgs, problems: &mut Problems) -> SilenceLimits {
    SilenceLimits {
        before_first_byte: problems.seconds_or_off("--stream-admission-warn-s", arguments.stream_admission_warn_s),
        in_the_middle: problems.seconds_or_off("--stream-stall-warn-s", arguments.stream_stall_warn_s),
    }
}

fn shards(arguments: &MachineArgs, problems: &mut Problems) -> (usize, ShardCpus) {
    let cpus = match arguments.shard_cpus.as_str() {
        "auto" => ShardCpus::Auto,
        "off" => ShardCpus::Off,
        list => match cpu_list(list) {
            Ok(cpus) => ShardCpus::List(cpus),
            Err(problem) => {
                problems.add(format!("--shard-cpus: {problem}; write it as in 2-5,8, or auto, or off"));
                ShardCpus::Off
            }
        },
    };
    let shards = match (arguments.shards, &cpus) {
        (Some(shards), _) => problems.range("--shards", shards, 1, SHARDS_MAX),
        (None, ShardCpus::List(cpus)) => cpus.len(),
        // One core is the ingest core's.
        (None, _) => std::thread::available_parallelism().map_or(1, |cores| cores.get().saturating_sub(1).max(1)),
    };
    if let ShardCpus::List(cpus) = &cpus
        && cpus.len() > shards
    {
        problems.add(format!("--shard-cpus names {} CPUs for {shards} shards; name at most one per shard", cpus.len()));
    }
    (shards, cpus)
}

/// `2-5,8` -> 2, 3, 4, 5, 8.
fn cpu_list(text: &str) -> Result<Vec<usize>, String> {
    let mut cpus = Vec::new();
    for part in text.split(',').map(str::trim) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let number = |text: &str| {
            text.trim().parse::<usize>().ok().filter(|cpu| *cpu < 4096).ok_or_else(|| format!("`{text}` is not a CPU"))
        };
        let (first, last) = (number(first)?, number(last)?);
        if first > last {
            return Err(format!("`{part}` runs backwards"));
        }
        for cpu in first..=last {
            if cpus.contains(&cpu) {
                return Err(format!("CPU {cpu} is named twice"));
            }
            cpus.push(cpu);
        }
    }
    Ok(cpus)
}
