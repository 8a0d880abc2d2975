//! The command line as tables: what is accepted, what is refused and with which words.

use std::process::Command as Process;

use super::*;
use crate::proxy::{PrefillRelease, RouterMode};
use crate::worker::Role;

pub(super) fn run(arguments: &[&str]) -> Result<Config, Refusal> {
    let all = ["infera-router"].into_iter().chain(arguments.iter().copied());
    match parse(all)? {
        Invocation::Serve(config) => Ok(*config),
        Invocation::Inspect(_) => panic!("{arguments:?} is not serve"),
    }
}

pub(super) fn config(arguments: &[&str]) -> Config {
    run(arguments).unwrap_or_else(|refusal| panic!("{arguments:?}: {}", refusal.text))
}

/// Of picks of mixed, prefill and decode workers.
fn overlap_weights(config: &Config) -> [f64; 3] {
    let (settings, load_term) = (config.live_settings(), config.steering.load_term);
    [Role::Mixed, Role::Prefill, Role::Decode].map(|role| settings.overlap_weight_of(role, load_term.of(role)))
}

#[track_caller]
pub(super) fn check_refused(arguments: &[&str], exit_code: u8, expected: &[&str]) {
    let refusal = run(arguments).map(|_| ()).expect_err("should be refused");
    assert_eq!(refusal.exit_code, exit_code, "{arguments:?}: {}", refusal.text);
    for text in expected {
        assert!(refusal.text.contains(text), "{arguments:?}: `{text}` is not in:\n{}", refusal.text);
    }
}

#[test]
fn defaults_are_those_of_a_bare_metal_host() {
    let config = config(&[]);
    assert_eq!(config.listen, "0.0.0.0:8000".parse().unwrap());
    assert_eq!(config.policy, Policy::KvAware);
    assert_eq!((config.kv_overlap_weight, config.live_settings().host_tier_weight), (None, 0.5));
    assert_eq!(overlap_weights(&config), [12.0, 12.0, 1.0]);
    let plain = run(&["--kv-load", "active"]).unwrap();
    assert_eq!((overlap_weights(&plain), plain.live_settings().host_tier_weight), ([1.0; 3], 0.0));
    assert_eq!(config.request_retries_max, 1);
    assert_eq!(config.max_body_bytes, 64 << 20);
    assert_eq!(config.drain_timeout, Duration::from_secs(30));
    let upstream = UpstreamTimeouts { connect: Duration::from_secs(5), first_byte: None, idle: None };
    assert_eq!(config.upstream, upstream);
    assert_eq!((config.io_driver, config.log_format), (IoDriver::Auto, LogFormat::Text));
    assert!(config.shards >= 1 && config.shard_cpus == ShardCpus::Auto && !config.require_io_uring);
    let etcd = config.discovery.etcd.expect("etcd is the default source");
    assert_eq!((etcd.endpoints, etcd.prefix.as_str()), (vec!["http://127.0.0.1:2379".to_owned()], "/infera/workers/"));
    assert!(config.warnings.iter().any(|warning| warning.contains("--router-tokenizer-path")));
}

#[test]
fn the_launchers_own_command_line_is_accepted() {
    let directory = tempfile::tempdir().unwrap();
    let tokenizer = directory.path().to_str().unwrap();
    let config = config(&[
        "--host",
        "0.0.0.0",
        "--port",
        "8001",
        "--etcd-prefix",
        "/infera/workers",
        "--router-policy",
        "kv-aware",
        "--discovery-backend",
        "etcd",
        "--request-transport",
        "http",
        "--request-max-retries",
        "2",
        "--breaker-failure-threshold",
        "3",
        "--breaker-cooldown-s",
        "5",
        "--breaker-max-cooldown-s",
        "60.0",
        "--etcd-endpoint",
        "etcd-0",
        "--kv-event-transport",
        "zmq",
        "--nats-server",
        "nats://u:p@n:4222",
        "--kv-tokenizer-path",
        tokenizer,
        "--kv-overlap-weight",
        "2.5",
    ]);
    assert_eq!((config.listen.port(), config.request_retries_max, config.kv_overlap_weight), (8001, 2, Some(2.5)));
    assert_eq!(config.tokenizer_path.as_deref(), Some(directory.path()));
    let etcd = config.discovery.etcd.as_ref().unwrap();
    assert_eq!((etcd.endpoints[0].as_str(), etcd.prefix.as_str()), ("http://etcd-0:2379", "/infera/workers/"));
    assert_eq!(config.warnings.len(), 1, "{:?}", config.warnings);
    assert!(config.warnings[0].contains("--nats-server has no effect"), "{:?}", config.warnings);
}

#[test]
fn self_heal_is_off_until_asked_for() {
    assert!(!config(&[]).kv_self_heal);
    for given in [&["--kv-self-heal"][..], &["--kv-self-heal", "true"], &["--kv-self-heal=true"]] {
        assert!(config(given).kv_self_heal, "{given:?}");
    }
    assert!(!config(&["--kv-self-heal", "false"]).kv_self_heal);
    check_refused(&["--kv-self-heal", "--router-policy", "round-robin"], EXIT_INVALID, &["--kv-self-heal requires"]);
}

#[test]
fn the_host_tier_weight_is_a_share() {
    assert_eq!(config(&["--kv-host-tier-weight", "0.25"]).live_settings().host_tier_weight, 0.25);
    for wrong in ["-0.1", "1.5", "NaN"] {
        check_refused(&["--kv-host-tier-weight", wrong], 1, &["--kv-host-tier-weight must be a number from 0 to 1"]);
    }
}

#[test]
fn discovery_backend_follows_the_sources_given() {
    let discovery = |arguments: &[&str]| config(arguments).discovery;
    let file = tempfile::NamedTempFile::new().unwrap();
    let path = file.path().to_str().unwrap();
    assert!(discovery(&["--worker", "http://h:1"]).etcd.is_none());
    assert!(discovery(&["--workers-file", path]).etcd.is_none());
    assert!(discovery(&["--discovery-backend", "static", "--workers-file", path]).etcd.is_none());
    let both = discovery(&["--worker", "http://h:1", "--discovery-backend", "etcd"]);
    assert!(both.etcd.is_some() && both.workers.len() == 1);
    check_refused(&["--discovery-backend", "static"], 1, &["--worker or --workers-file"]);
    check_refused(&["--discovery-backend", "kubernetes"], 1, &["not available", "use etcd or static"]);
    check_refused(&["--discovery-backend", "consul"], 1, &["static|etcd", "got `consul`"]);
    check_refused(&["--workers-file", "/nonexistent/w.json"], 1, &["--workers-file /nonexistent/w.json: no such file"]);
}

#[test]
fn etcd_endpoints() {
    let endpoints = |text: &str| {
        config(&["--discovery-backend", "etcd", "--etcd-endpoint", text]).discovery.etcd.unwrap().endpoints
    };
    for (text, expected) in [
        ("h", &["http://h:2379"][..]),
        ("h:1234", &["http://h:1234"]),
        ("http://h:1234/", &["http://h:1234"]),
        ("http://h", &["http://h:80"]),
        ("https://h:2379/", &["https://h:2379"]),
        ("https://h", &["https://h:443"]),
        ("127.0.0.1:2379", &["http://127.0.0.1:2379"]),
        ("[::1]:2379", &["http://[::1]:2379"]),
        ("a:1, b:2,http://c:3", &["http://a:1", "http://b:2", "http://c:3"]),
    ] {
        assert_eq!(endpoints(text), expected, "{text}");
    }
    for (text, expected) in [
        ("http://u:pw@h:2379", "authentication"),
        ("http://h:2379/v3", "only scheme, host and port"),
        ("ftp://h:1", "write http://host:port"),
        ("h:port", "write http://host:port"),
        (",", "--etcd-endpoint is empty"),
    ] {
        check_refused(&["--etcd-endpoint", text], 1, &[expected]);
    }
    let refusal = run(&["--etcd-endpoint", "http://u:pw@h:2379"]).map(|_| ()).unwrap_err();
    assert!(!refusal.text.contains("pw"), "{}", refusal.text);
}

#[test]
fn worker_arguments() {
    let text = "http://10.0.0.5:30000/,model=glm-5.3,role=prefill,engine=sglang,block-size=64,dp-size=8,\
                kv-events=tcp://10.0.0.5:5557,kv-replay=tcp://10.0.0.5:5657";
    let workers = config(&["--worker", text, "--worker", "http://[::1]:2,id=second"]).discovery.workers;
    let mut first = crate::worker::WorkerRecord::new("10.0.0.5:30000", "http://10.0.0.5:30000");
    first.model_name = "glm-5.3".to_owned();
    first.engine = "sglang".to_owned();
    first.disagg_mode = crate::worker::Role::Prefill;
    (first.kv_block_size, first.dp_size) = (Some(64), Some(8));
    first.kv_events_endpoint = Some("tcp://10.0.0.5:5557".to_owned());
    first.kv_replay_endpoint = Some("tcp://10.0.0.5:5657".to_owned());
    assert_eq!(workers, [first, crate::worker::WorkerRecord::new("second", "http://[::1]:2")]);
    // Two spellings of one worker are one.
    assert_eq!(config(&["--worker", "http://H:1", "--worker", "http://h:1/"]).discovery.workers.len(), 1);

    for (text, expected) in [
        ("h:1", "write http://HOST:PORT"),
        ("http://h:1@2", "user name"),
        ("http://h:1,modell=x", "unknown key `modell`; known: model, role"),
        ("http://h:1,engine=vlm", "unknown engine `vlm`; known: sglang, vllm, atom"),
        ("http://h:1,model", "`model` is not key=value"),
        ("http://h:1,model=", "`model` is empty"),
        ("http://h:1,model=a,model=b", "`model` is given twice"),
        ("http://h:1,role=both", "`both` is not one of mixed, prefill, decode"),
        ("http://h:1,block-size=16k", "`block-size=16k` is not an integer"),
        ("http://h:1,block-size=0", "0 is not within"),
        ("http://h:1,dp-size=5000", "above the cap"),
        ("http://h:1,kv-events=tcp://*:5557", "wildcard"),
    ] {
        check_refused(&["--worker", text], 1, &["--worker", expected]);
    }
    check_refused(&["--worker", "http://h:1", "--worker", "http://h:1,model=m"], 1, &["given twice, differently"]);
}

#[test]
fn ranges_and_enumerations() {
    for (arguments, expected) in [
        (&["--router-policy", "random"][..], "--router-policy round-robin|kv-aware (got `random`)"),
        (&["--request-transport", "nats"], "--request-transport nats is not available in this build; use http"),
        (&["--request-transport", "grpc"], "--request-transport http (got `grpc`)"),
        (&["--kv-event-transport", "nats"], "--kv-event-transport nats is not available in this build; use zmq"),
        (&["--io-driver", "kqueue"], "--io-driver auto|epoll"),
        (&["--io-driver", "epoll", "--require-io-uring"], "contradicts"),
        (&["--log-format", "xml"], "--log-format text|json"),
        (&["--drain-timeout", "-1"], "--drain-timeout must be a number of seconds"),
        (&["--drain-timeout", "NaN"], "--drain-timeout must be a number of seconds"),
        (&["--drain-timeout", "inf"], "--drain-timeout must be a number of seconds"),
        (&["--upstream-connect-timeout-s", "0"], "--upstream-connect-timeout-s must be above 0"),
        (&["--http-req-idle-timeout-s", "-5"], "--http-req-idle-timeout-s must be"),
        (&["--max-body-bytes", "0"], "--max-body-bytes must be at least 1"),
        (&["--shards", "0"], "--shards must be from 1"),
        (&["--encoder-threads", "0"], "--encoder-threads must be from 1"),
        (&["--prompt-cache-bytes", "2000000000000"], "--prompt-cache-bytes must be at most"),
        (&["--request-max-retries", "1000"], "--request-max-retries must be from 0 to 100"),
        (&["--kv-overlap-weight", "-1"], "--kv-overlap-weight must be"),
        (&["--kv-overlap-weight", "NaN"], "--kv-overlap-weight must be"),
        (&["--router-tokenizer-path", "/nonexistent"], "--router-tokenizer-path /nonexistent: no such path"),
        (&["--kv-default-chat-template-kwargs", "[1]"], "must be a JSON object"),
        (&["--kv-default-chat-template-kwargs", "{x"], "is not JSON"),
        (&["--shard-cpus", "3-1"], "runs backwards"),
        (&["--shard-cpus", "1,1"], "CPU 1 is named twice"),
        (&["--shard-cpus", "a"], "`a` is not a CPU"),
        (&["--shard-cpus", ""], "`` is not a CPU"),
        (&["--shards", "1", "--shard-cpus", "2,3"], "names 2 CPUs for 1 shards"),
        (&["--host", "no such host"], "--host `no such host`"),
    ] {
        check_refused(arguments, EXIT_INVALID, &[expected]);
    }
}

#[test]
fn good_values() {
    let config = config(&[
        "--host",
        "::",
        "--port",
        "0",
        "--shard-cpus",
        "2-4, 8",
        "--drain-timeout",
        "0.25",
        "--log-format",
        "json",
        "--upstream-first-byte-timeout-s",
        "1.5",
        "--http-req-idle-timeout-s",
        "2",
        "--router-policy",
        "round-robin",
        "--kv-default-chat-template-kwargs",
        r#"{"enable_thinking":false}"#,
        "--encoder-threads",
        "3",
        "--prompt-cache-bytes",
        "0",
    ]);
    assert_eq!(config.listen, "[::]:0".parse().unwrap());
    assert_eq!((config.shards, config.shard_cpus), (4, ShardCpus::List(vec![2, 3, 4, 8])));
    assert_eq!(config.drain_timeout, Duration::from_millis(250));
    assert_eq!(config.upstream.first_byte, Some(Duration::from_millis(1500)));
    assert_eq!(config.upstream.idle, Some(Duration::from_secs(2)));
    assert_eq!(config.chat_template_kwargs["enable_thinking"], serde_json::Value::Bool(false));
    assert_eq!(config.prompt_cache_bytes, 0);
    assert_eq!(run(&[]).unwrap().prompt_cache_bytes, crate::limits::PROMPT_CACHE_BYTES);
    assert_eq!((config.encoder_threads, config.log_format), (Some(3), LogFormat::Json));
    assert_eq!(config.warnings, Vec::<String>::new());
    assert_eq!(run(&["--host", "[::1]"]).unwrap().listen.to_string(), "[::1]:8000");
    assert!(run(&["--host", "localhost"]).unwrap().listen.ip().is_loopback());
}

#[test]
fn disaggregation_has_weights_of_its_own_and_closed_sets_of_choices() {
    check_refused(&["--kv-load", "x"], EXIT_INVALID, &["--kv-load queue|active"]);
    let settings = config(&["--kv-overlap-weight", "2"]).disaggregation;
    assert_eq!((settings.prefill_overlap_weight, settings.decode_overlap_weight), (Some(2.0), Some(2.0)));
    assert_eq!(settings.prefill_drain_timeout, Some(Duration::from_secs(300)));
    assert_eq!((settings.prefill_release, settings.mode), (PrefillRelease::Decode, RouterMode::Auto));
    let settings = config(&[
        "--kv-prefill-overlap-weight",
        "20",
        "--kv-decode-overlap-weight",
        "0",
        "--pd-prefill-guard-release",
        "completion",
        "--pd-prefill-drain-timeout-s",
        "0",
        "--router-mode",
        "direct",
    ])
    .disaggregation;
    assert_eq!((settings.prefill_overlap_weight, settings.decode_overlap_weight), (Some(20.0), Some(0.0)));
    assert_eq!((settings.prefill_drain_timeout, settings.mode), (None, RouterMode::Direct));
    assert_eq!(settings.prefill_release, PrefillRelease::Completion);
    check_refused(&["--router-mode", "x"], EXIT_INVALID, &["--router-mode auto|direct"]);
    check_refused(&["--pd-prefill-guard-release", "x"], EXIT_INVALID, &["decode|completion"]);
    check_refused(&["--kv-decode-overlap-weight", "-1"], EXIT_INVALID, &["--kv-decode-overlap-weight must be"]);
    check_refused(&["--pd-prefill-drain-timeout-s", "NaN"], EXIT_INVALID, &["--pd-prefill-drain-timeout-s"]);
}

#[test]
fn failing_and_full_workers() {
    use std::time::Duration;
    let defaults = config(&[]).resilience;
    assert_eq!((defaults.breaker.failure_threshold, defaults.breaker.cooldown), (3, Duration::from_secs(5)));
    assert_eq!((defaults.retry_budget_percent, defaults.caps), (20.0, crate::proxy::InflightCaps::default()));
    let given = ["--breaker-failure-threshold", "0", "--max-inflight", "7", "--max-inflight-per-worker", "2"];
    let resilience = config(&given).resilience;
    assert_eq!(resilience.breaker.failure_threshold, 0);
    assert_eq!((resilience.caps.total, resilience.caps.per_target), (Some(7), Some(2)));
    check_refused(&["--breaker-cooldown-s", "90"], EXIT_INVALID, &["must not be shorter than --breaker-cooldown-s"]);
    check_refused(&["--breaker-cooldown-s", "-1"], EXIT_INVALID, &["--breaker-cooldown-s must be"]);
    check_refused(&["--retry-budget-percent", "101"], EXIT_INVALID, &["--retry-budget-percent must be from 0 to 100"]);
}

#[test]
fn silent_streams_are_reported_unless_that_is_switched_off() {
    use std::time::Duration;
    let defaults = config(&[]).silence;
    assert_eq!(defaults.before_first_byte, Some(Duration::from_secs(240)));
    assert_eq!(defaults.in_the_middle, Some(Duration::from_secs(60)));
    let off = config(&["--stream-admission-warn-s", "0", "--stream-stall-warn-s", "0"]).silence;
    assert_eq!(off, crate::proxy::SilenceLimits::default());
    check_refused(&["--stream-stall-warn-s", "-1"], EXIT_INVALID, &["--stream-stall-warn-s must be"]);
}

#[test]
fn a_chat_encoding_by_name() {
    use crate::prompt::ChatEncoding;
    assert_eq!(config(&[]).chat_encoding, None);
    assert_eq!(config(&["--kv-chat-encoding", "dsv4"]).chat_encoding, Some(ChatEncoding::Dsv4));
    assert_eq!(config(&["--kv-chat-encoding", "kimi_k3"]).chat_encoding, Some(ChatEncoding::KimiK3));
}

#[test]
fn decode_demand_needs_kv_aware_and_its_weight_needs_the_mode() {
    let steering = config(&["--decode-input-demand", "on", "--decode-request-weight", "1000000"]).steering;
    assert_eq!((steering.demand, steering.request_weight), (crate::decode_demand::Mode::On, 1e6));
    config(&["--decode-input-demand", "shadow", "--decode-request-weight", "0.5"]);
    config(&["--router-policy", "round-robin", "--decode-input-demand", "off", "--decode-request-weight", "0"]);
    let kv_aware = "--decode-input-demand requires --router-policy kv-aware";
    check_refused(&["--router-policy", "round-robin", "--decode-input-demand", "on"], EXIT_INVALID, &[kv_aware]);
    let mode = "--decode-request-weight requires --decode-input-demand shadow|on";
    check_refused(&["--decode-request-weight", "1"], EXIT_INVALID, &[mode]);
    for weight in ["-1", "inf", "NaN"] {
        let arguments = ["--decode-input-demand", "on", "--decode-request-weight", weight];
        check_refused(&arguments, EXIT_INVALID, &["--decode-request-weight must be"]);
    }
    check_refused(&["--decode-input-demand", "maybe"], EXIT_INVALID, &["off|shadow|on"]);
}

#[test]
fn sessions_are_off_by_default_and_their_bounds_are_checked() {
    let steering = config(&[]).steering;
    assert_eq!(steering, SteeringSettings::default());
    let both =
        config(&["--session-affinity", "both", "--session-affinity-header", "X-A", "--session-affinity-header", "x-b"]);
    assert_eq!(both.steering.session_headers, ["x-a", "x-b"]);
    check_refused(&["--session-affinity", "decode"], EXIT_INVALID, &["off|prefill|both"]);
    check_refused(&["--session-affinity-header", "no name"], EXIT_INVALID, &["not a header name"]);
    check_refused(&["--session-affinity-ttl-s", "0"], EXIT_INVALID, &["from 1 to 86400"]);
    check_refused(&["--session-affinity-ttl-s", "86401"], EXIT_INVALID, &["from 1 to 86400"]);
    check_refused(&["--session-affinity-capacity", "0"], EXIT_INVALID, &["--session-affinity-capacity"]);
    assert_eq!(config(&["--kv-recent-load", "off"]).steering.recent_load, crate::route::RecentLoad::Off);
    check_refused(&["--kv-recent-load", "maybe"], EXIT_INVALID, &["off|idle|on"]);
}

#[test]
fn every_problem_is_reported_at_once() {
    let refusal =
        run(&["--router-policy", "x", "--shards", "0", "--worker", "h", "--stream-stall-warn-s", "-1"]).map(|_| ());
    let text = refusal.unwrap_err().text;
    assert_eq!(text.lines().count(), 4, "{text}");
    assert!(text.lines().all(|line| line.starts_with("error: ")), "{text}");
}

#[test]
fn usage_errors_and_help() {
    check_refused(&["--no-such-flag"], EXIT_USAGE, &["--no-such-flag"]);
    check_refused(&["--port", "70000"], EXIT_USAGE, &["--port"]);
    check_refused(&["--shards", "two"], EXIT_USAGE, &["--shards"]);
    check_refused(&["stray"], EXIT_USAGE, &["stray"]);
    check_refused(&["--port", "1", "--port", "2"], EXIT_USAGE, &["--port"]);
    check_refused(&["--help"], 0, &["--router-policy", "INFERA_HTTP_REQ_IDLE_TIMEOUT", "INFERA_STREAM_STALL_WARN"]);
    check_refused(&["--version"], 0, &[env!("CARGO_PKG_VERSION")]);
}

#[test]
fn inspect_is_a_subcommand_with_its_own_arguments() {
    let inspect = |arguments: &[&str]| match parse(["infera-router", "inspect"].iter().chain(arguments)) {
        Ok(Invocation::Inspect(command)) => command,
        other => panic!("{arguments:?}: {other:?}"),
    };
    let InspectCommand::Prompt(prompt) = inspect(&["prompt", "--router-tokenizer-path", "/models/m"]) else {
        panic!("not prompt")
    };
    assert_eq!((prompt.router_tokenizer_path, prompt.block_size), (PathBuf::from("/models/m"), 16));
    let InspectCommand::Events(events) = inspect(&["events", "--connect", "tcp://h:1", "--hashes"]) else {
        panic!("not events")
    };
    assert_eq!((events.connect.as_deref(), events.hashes), (Some("tcp://h:1"), true));
}

#[test]
fn effective_settings_name_their_source_and_hide_credentials() {
    let config = config(&["--port", "9000", "--nats-server", "nats://user:pa/ss@n:4222,nats://t0ken@m:4222"]);
    let lines: Vec<_> = config.effective().iter().map(ToString::to_string).collect();
    assert!(lines.contains(&"port = 9000 (flag)".to_owned()), "{lines:#?}");
    assert!(lines.contains(&"host = 0.0.0.0 (default)".to_owned()), "{lines:#?}");
    assert!(lines.contains(&"workers-file is not set (default)".to_owned()), "{lines:#?}");
    assert!(lines.contains(&"nats-server = nats://***@n:4222,nats://***@m:4222 (flag)".to_owned()), "{lines:#?}");
    let debug = format!("{config:?}");
    assert!(!debug.contains("pa/ss") && !debug.contains("t0ken"), "{debug}");
}

/// Environment variables belong to a process, so this test runs itself again as a child that has them.
#[test]
fn flag_before_environment_before_default() {
    const CHILD: &str = "INFERA_ROUTER_TEST_CHILD";
    if std::env::var_os(CHILD).is_some() {
        return print_what_a_child_sees();
    }
    let child = |variables: &[(&str, &str)]| {
        let mut process = Process::new(std::env::current_exe().unwrap());
        process.args(["--exact", "config::tests::flag_before_environment_before_default", "--nocapture"]);
        process.env(CHILD, "1").envs(variables.iter().copied());
        let output = process.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let output = child(&[("INFERA_HTTP_REQ_IDLE_TIMEOUT", "7"), ("NATS_SERVER", "nats://u:p@n:1")]);
    assert!(output.contains("without flag: Some(7s)"), "{output}");
    assert!(output.contains("with flag: Some(9s)"), "{output}");
    assert!(output.contains("http-req-idle-timeout-s = 7 (environment)"), "{output}");
    // A host-wide variable for a transport that is not in use is no news.
    assert!(output.contains("warnings: 0"), "{output}");
    let output = child(&[("INFERA_HTTP_REQ_IDLE_TIMEOUT", ""), ("RUST_LOG", ""), ("INFERA_CONFIG", "")]);
    assert!(output.contains("without flag: None") && output.contains("log-level = info (default)"), "{output}");
    let (_file, path) = file("session-affinity = 'prefill'\nhttp-req-idle-timeout-s = 3\nlog-level = 'warn'\n");
    let output = child(&[("INFERA_CONFIG", &path), ("INFERA_HTTP_REQ_IDLE_TIMEOUT", "7"), ("RUST_LOG", "")]);
    assert!(output.contains("without flag: Some(7s)") && output.contains("with flag: Some(9s)"), "{output}");
    assert!(output.contains("session-affinity = prefill (file, line 1)"), "{output}");
    assert!(output.contains("log-level = warn (file, line 3)"), "{output}");
    let output = child(&[("INFERA_SESSION_AFFINITY", "both")]);
    assert!(output.contains("session-affinity = both (environment)"), "{output}");
    let output = child(&[("INFERA_DECODE_INPUT_DEMAND", "shadow")]);
    assert!(output.contains("refused: error: --decode-input-demand requires --router-policy kv-aware"), "{output}");
    let output = child(&[("INFERA_STREAM_STALL_WARN", "7")]);
    assert!(output.contains("stream-stall-warn-s = 7 (environment)"), "{output}");
    let output = child(&[("INFERA_KV_CHAT_ENCODING", "jinja")]);
    assert!(output.contains("--kv-chat-encoding dsv4|kimi_k3 (got `jinja`)"), "{output}");
}

fn print_what_a_child_sees() {
    match run(&["--router-policy", "round-robin"]) {
        Ok(without) => {
            println!("without flag: {:?}", without.upstream.idle);
            println!("warnings: {}", without.warnings.len());
            println!("{}", without.effective().iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"));
            println!("with flag: {:?}", config(&["--http-req-idle-timeout-s", "9"]).upstream.idle);
        }
        Err(refusal) => println!("refused: {}", refusal.text),
    }
}

/// A configuration file, and the flags that name it.
fn file(text: &str) -> (tempfile::NamedTempFile, String) {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), text).unwrap();
    let path = file.path().to_str().unwrap().to_owned();
    (file, path)
}

fn shown(config: &Config, name: &str) -> String {
    config.effective().iter().find(|setting| setting.name == name).unwrap().to_string()
}

#[test]
fn a_file_stands_below_flags_and_above_defaults() {
    let text = "port = 8001\nkv-overlap-weight = 2\nworker = ['http://h:1', 'http://h:2']\nrequire-io-uring = true\n\
                session-affinity-header = []\n";
    let (_file, path) = file(text);
    let read = config(&["--config", &path]);
    assert_eq!((read.listen.port(), read.kv_overlap_weight, read.discovery.workers.len()), (8001, Some(2.0), 2));
    assert!(read.require_io_uring && read.steering.session_headers.is_empty());
    assert_eq!(shown(&read, "port"), "port = 8001 (file, line 1)");
    assert_eq!(shown(&read, "worker"), "worker = http://h:1 http://h:2 (file, line 3)");
    assert_eq!(shown(&read, "drain-timeout"), "drain-timeout = 30 (default)");
    let with_flags = config(&["--config", &path, "--port", "9", "--worker", "http://h:3", "--require-io-uring=false"]);
    assert_eq!((with_flags.listen.port(), with_flags.discovery.workers.len()), (9, 1));
    assert!(!with_flags.require_io_uring);
    assert_eq!(shown(&with_flags, "port"), "port = 9 (flag)");
}

#[test]
fn b60_mistakes_of_a_file_are_told_with_those_of_flags_all_at_once() {
    let (_file, path) = file("prot = 1\nkv-overlap-weight = -1\n\nbreaker-cooldown-s = 90\n");
    check_refused(
        &["--config", &path, "--drain-timeout", "-1"],
        EXIT_INVALID,
        &[
            &format!("error: {path}:1: unknown key `prot`; did you mean `port`?\n"),
            &format!("--kv-overlap-weight must be a number of at least 0 (got -1) [{path}:2]\n"),
            &format!("--breaker-max-cooldown-s must not be shorter than --breaker-cooldown-s [{path}:4]\n"),
            "--drain-timeout must be a number of seconds from 0 to 315360000 (got -1)\n",
        ],
    );
    check_refused(&["--config", "/nonexistent.toml"], EXIT_INVALID, &["--config /nonexistent.toml: No such file"]);
}

#[test]
fn a_check_prints_every_option_with_its_source_and_ends() {
    let (_file, path) = file("router-policy = 'round-robin'\nhost = 'a.name.that.nobody.looks.up'\n");
    let arguments = ["infera-router", "--config", &path, "--check-config", "--etcd-endpoint", "h:1"];
    let report = parse(arguments).unwrap_err();
    assert_eq!(report.exit_code, 0, "{}", report.text);
    for line in
        ["router-policy = round-robin (file, line 1)\n", "etcd-endpoint = h:1 (flag)\n", "port = 8000 (default)\n"]
    {
        assert!(report.text.contains(line), "{line}: {}", report.text);
    }
    let (_workers, workers) = file(r#"[{"worker_id":"a","url":"http://h:1"}, 7]"#);
    let report = parse(["infera-router", "--check-config", "--workers-file", &workers]).unwrap_err();
    assert_eq!(report.exit_code, 0);
    assert!(report.text.contains("warning: record 1 (no worker_id) skipped"), "{}", report.text);
    let (_broken, broken) = file("[");
    check_refused(&["--check-config", "--workers-file", &broken], 2, &["--workers-file", "not a JSON array"]);
    check_refused(&["--check-config", "--router-tokenizer-path", &broken], 2, &["--router-tokenizer-path"]);
    check_refused(&["--check-config", "--shards", "0", "--admin-listen", "h"], 2, &["--shards", "is not HOST:PORT"]);
}
