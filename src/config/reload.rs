//! What of the configuration may change while the router runs: reading it once more, and taking over what may. Who uses the
//! values is told by `crate::reload`; nothing here touches a running part.

use super::{Config, Names, Refusal, load};

/// Options that are in force without a restart. Of the key files the content counts too.
const READ_AGAIN: [&str; 28] = [
    "drain-timeout",
    "worker",
    "workers-file",
    "kv-overlap-weight",
    "kv-host-tier-weight",
    "request-max-retries",
    "answer-names-worker",
    "kv-prefill-overlap-weight",
    "kv-decode-overlap-weight",
    "pd-prefill-guard-release",
    "pd-prefill-drain-timeout-s",
    "router-mode",
    "upstream-connect-timeout-s",
    "upstream-first-byte-timeout-s",
    "http-req-idle-timeout-s",
    "api-key-file",
    "worker-api-key-file",
    "forward-authorization",
    "tls-cert-file",
    "tls-key-file",
    "tls-client-ca-file",
    "breaker-failure-threshold",
    "breaker-cooldown-s",
    "breaker-max-cooldown-s",
    "retry-budget-percent",
    "max-inflight",
    "max-inflight-per-worker",
    "log-level",
];

/// Options of where workers come from, without the registry's.
const WORKERS: [&str; 2] = ["worker", "workers-file"];

/// Options of what the listener shows. A listener without TLS stays without, and one with it does not lose it.
const LISTENER_TLS: [&str; 3] = ["tls-cert-file", "tls-key-file", "tls-client-ca-file"];

pub(super) fn is_read_again(name: &str) -> bool {
    READ_AGAIN.contains(&name)
}

/// Names of options whose value differs from the one before.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Changes {
    pub in_force: Vec<String>,
    /// These wait for a restart; the former value stays in force, and is the one that is shown.
    pub waiting: Vec<String>,
}

impl Config {
    /// The same command line, environment and configuration file once more; files are as they are now. Looks up no name.
    ///
    /// # Errors
    /// As at the start, all at once.
    pub fn read_again(&self) -> Result<Config, Refusal> {
        load(&self.arguments.0, Names::Unresolved)
    }

    /// Takes over from `newer` what may change, and says what was asked for.
    pub fn take_over(&mut self, newer: Config) -> Changes {
        // Workers that were the only source cannot give way to a registry that was never connected to, nor come beside it.
        let keeps_sources = self.discovery.etcd.is_some() == newer.discovery.etcd.is_some();
        let keeps_tls = self.tls.listener.is_some() == newer.tls.listener.is_some();
        let may_change = |name: &str| {
            is_read_again(name)
                && (keeps_sources || !WORKERS.contains(&name))
                && (keeps_tls || !LISTENER_TLS.contains(&name))
        };
        let mut changes = Changes::default();
        for (own, new) in self.effective.iter_mut().zip(newer.effective) {
            let differs = own.values != new.values;
            match may_change(&new.name) {
                true if differs => changes.in_force.push(new.name.clone()),
                false if differs => {
                    changes.waiting.push(new.name);
                    continue;
                }
                _ => {}
            }
            // With the same value too: it may come from another place now.
            *own = new;
        }
        if keeps_sources {
            self.discovery.workers = newer.discovery.workers;
            self.discovery.workers_file = newer.discovery.workers_file;
        }
        if keeps_tls {
            self.tls.listener = newer.tls.listener;
        }
        self.discovery.authorization = newer.discovery.authorization;
        self.drain_timeout = newer.drain_timeout;
        self.kv_overlap_weight = newer.kv_overlap_weight;
        self.kv_host_tier_weight = newer.kv_host_tier_weight;
        self.request_retries_max = newer.request_retries_max;
        self.answer_names_worker = newer.answer_names_worker;
        self.disaggregation = newer.disaggregation;
        self.upstream = newer.upstream;
        self.resilience = newer.resilience;
        self.access = newer.access;
        self.log_level = newer.log_level;
        changes
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::io::Write;

    use clap::CommandFactory;

    use super::*;
    use crate::config::cli::only_outside_files;
    use crate::config::{Cli, Invocation, Source, parse};

    fn config(arguments: &[&str]) -> Config {
        match parse(["infera-router"].iter().chain(arguments)) {
            Ok(Invocation::Serve(config)) => *config,
            other => panic!("{arguments:?}: {other:?}"),
        }
    }

    /// What a running router would use of a configuration, without the list of settings that is only shown.
    fn used(config: &Config) -> String {
        let mut config = config.clone();
        (config.effective, config.arguments, config.warnings) = Default::default();
        // Keys are not shown; whether they differ can be seen from their number.
        format!("{config:?}")
    }

    /// Every option of the server with another value than its default. `%` stands for a file that exists.
    const OTHER_VALUES: &[(&str, &[&str])] = &[
        ("host", &["127.0.0.2"]),
        ("port", &["8001"]),
        ("admin-listen", &["127.0.0.1:9"]),
        ("max-connections", &["9"]),
        ("max-body-bytes", &["9"]),
        ("drain-timeout", &["9"]),
        ("worker", &["http://h:9"]),
        ("workers-file", &["%"]),
        ("etcd-endpoint", &["h:9"]),
        ("etcd-prefix", &["/other/"]),
        ("router-policy", &["round-robin"]),
        ("router-tokenizer-path", &["%"]),
        ("kv-overlap-weight", &["9"]),
        ("kv-host-tier-weight", &["0.9"]),
        ("kv-self-heal", &["true"]),
        ("kv-default-chat-template-kwargs", &["{\"a\":1}"]),
        ("prompt-cache-bytes", &["9"]),
        ("kv-per-worker-template-kwargs", &["false"]),
        ("allow-request-chat-template", &["true"]),
        ("kv-chat-encoding", &["dsv4"]),
        ("encoder-threads", &["9"]),
        ("request-max-retries", &["9"]),
        ("answer-names-worker", &["true"]),
        ("kv-prefill-overlap-weight", &["9"]),
        ("kv-decode-overlap-weight", &["9"]),
        ("pd-prefill-guard-release", &["completion"]),
        ("pd-prefill-drain-timeout-s", &["9"]),
        ("router-mode", &["direct"]),
        ("decode-input-demand", &["shadow"]),
        ("session-affinity", &["both"]),
        ("session-affinity-header", &["x-a"]),
        ("session-affinity-ttl-s", &["9"]),
        ("session-affinity-capacity", &["9"]),
        ("kv-recent-load", &["off"]),
        ("kv-load", &["active"]),
        ("stream-admission-warn-s", &["9"]),
        ("stream-stall-warn-s", &["9"]),
        ("upstream-connect-timeout-s", &["9"]),
        ("upstream-first-byte-timeout-s", &["9"]),
        ("http-req-idle-timeout-s", &["9"]),
        ("api-key-file", &["%"]),
        ("worker-api-key-file", &["%"]),
        ("forward-authorization", &["false"]),
        ("worker-tls-insecure-skip-verify", &["true"]),
        ("breaker-failure-threshold", &["9"]),
        ("breaker-cooldown-s", &["9"]),
        ("breaker-max-cooldown-s", &["99"]),
        ("retry-budget-percent", &["9"]),
        ("max-inflight", &["9"]),
        ("max-inflight-per-worker", &["9"]),
        ("shards", &["9"]),
        ("shard-cpus", &["off"]),
        ("io-driver", &["epoll"]),
        ("require-io-uring", &["true"]),
        ("log-format", &["json"]),
        ("log-level", &["debug"]),
        ("access-log", &["json"]),
        ("nats-server", &["nats://h:9"]),
        ("nats-req-idle-timeout-s", &["9"]),
        ("nats-req-max-duration-s", &["9"]),
        ("nats-req-max-pending", &["9"]),
        ("k8s-label-selector", &["a=b"]),
        ("k8s-namespace", &["n"]),
    ];

    /// Options with one accepted value only, with none that means something by itself, or given by the test's base.
    /// Certificates are another test's.
    const WITHOUT_ANOTHER: [&str; 10] = [
        "discovery-backend",
        "kv-event-transport",
        "request-transport",
        "decode-request-weight",
        "access-log-file",
        "tls-cert-file",
        "tls-key-file",
        "tls-client-ca-file",
        "worker-tls-ca-file",
        "etcd-tls-ca-file",
    ];

    #[test]
    fn every_option_is_taken_over_or_waits_as_the_reference_says() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(b"sk-key\n").unwrap();
        let file = file.path().to_str().unwrap();
        // Workers from the registry, so that the options of static ones can be given beside it.
        let base = ["--discovery-backend", "etcd"];
        for (name, values) in OTHER_VALUES {
            let flag = format!("--{name}");
            let values: Vec<_> = values.iter().map(|value| if *value == "%" { file } else { value }).collect();
            let arguments: Vec<&str> = base.iter().copied().chain([flag.as_str()]).chain(values).collect();
            let newer = config(&arguments);
            let mut running = config(&base);
            let (before, wanted) = (used(&running), used(&newer));
            let changes = running.take_over(newer);
            let own = vec![(*name).to_owned()];
            let shown = running.effective().iter().find(|setting| setting.name == *name).unwrap().source;
            if is_read_again(name) {
                assert_ne!(before, wanted, "{name}: another value that changes nothing");
                assert_eq!(used(&running), wanted, "{name} is in force");
                assert_eq!((changes.in_force, changes.waiting.len(), shown), (own, 0, Source::Flag));
            } else {
                assert_eq!(used(&running), before, "{name} waits");
                assert_eq!((changes.in_force.len(), changes.waiting, shown), (0, own, Source::Default));
            }
        }
        let command = Cli::command();
        let names = command.get_arguments().filter_map(|option| option.get_long());
        let known: BTreeSet<_> = names.filter(|name| !only_outside_files(name)).collect();
        let tried: BTreeSet<_> = OTHER_VALUES.iter().map(|(name, _)| *name).chain(WITHOUT_ANOTHER).collect();
        assert_eq!(tried, known, "options without another value in this test, or that are no more");
        assert!(READ_AGAIN.iter().all(|name| known.contains(name)));
    }

    #[test]
    fn static_workers_do_not_give_way_to_a_registry_at_a_reload() {
        let mut running = config(&["--worker", "http://h:1"]);
        let changes = running.take_over(config(&["--kv-overlap-weight", "2"]));
        assert_eq!((changes.in_force, changes.waiting), (vec!["kv-overlap-weight".into()], vec!["worker".into()]));
        assert_eq!((running.discovery.workers.len(), running.discovery.etcd.is_some()), (1, false));
    }
}
