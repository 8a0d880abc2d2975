//! Options of TLS: what belongs together, what a file must hold, and that no text shows a key.

use super::super::Config;
use super::super::tests::{check_refused, config, run};
use certificates::Authority;

#[path = "../../tests/support/certificates.rs"]
mod certificates;

struct Files {
    directory: tempfile::TempDir,
}

impl Files {
    fn new() -> Files {
        let files = Files { directory: tempfile::tempdir().unwrap() };
        let (authority, other) = (Authority::new(), Authority::new());
        let (issued, stranger) = (authority.issue(&["localhost"]), other.issue(&["localhost"]));
        for (name, text) in [
            ("ca", authority.pem()),
            ("cert", issued.pem()),
            ("key", issued.key_pem()),
            ("other-key", stranger.key_pem()),
            ("empty", String::new()),
            ("broken", "-----BEGIN CERTIFICATE-----\n????\n-----END CERTIFICATE-----\n".to_owned()),
            ("no-certificate", "-----BEGIN CERTIFICATE-----\naGVsbG8=\n-----END CERTIFICATE-----\n".to_owned()),
        ] {
            std::fs::write(files.directory.path().join(name), text).unwrap();
        }
        files
    }

    /// The arguments, with `@name` for the path of a file.
    fn arguments(&self, text: &str) -> Vec<String> {
        let path = |name: &str| self.directory.path().join(name).to_str().unwrap().to_owned();
        text.split(' ').map(|word| word.strip_prefix('@').map_or(word.to_owned(), path)).collect()
    }

    fn config(&self, text: &str) -> Config {
        let arguments = self.arguments(text);
        config(&arguments.iter().map(String::as_str).collect::<Vec<_>>())
    }
}

#[test]
fn the_listener_speaks_tls_and_the_control_pages_do_not() {
    let files = Files::new();
    let good =
        files.config("--tls-cert-file @cert --tls-key-file @key --tls-client-ca-file @ca --admin-listen 127.0.0.1:1");
    assert!(good.engine().tls.is_some());
    assert!(good.admin_engine().unwrap().tls.is_none());
    assert!(good.warnings.iter().all(|warning| !warning.contains("NOT checked")));
    let plain = files.config("--worker http://h:1");
    assert!(plain.engine().tls.is_none());
}

#[test]
fn what_does_not_fit_is_said_without_showing_a_key() {
    let files = Files::new();
    let key = std::fs::read_to_string(files.directory.path().join("key")).unwrap();
    let secret = key.lines().nth(1).unwrap();
    for (text, expected) in [
        ("--tls-cert-file @cert", "--tls-cert-file and --tls-key-file belong together"),
        ("--tls-key-file @key", "--tls-cert-file and --tls-key-file belong together"),
        ("--tls-client-ca-file @ca", "--tls-client-ca-file needs --tls-cert-file"),
        (
            "--tls-cert-file @cert --tls-key-file @other-key",
            "--tls-cert-file with --tls-key-file: keys may not be consistent",
        ),
        ("--tls-cert-file @missing --tls-key-file @key", "missing: No such file"),
        ("--tls-cert-file @key --tls-key-file @key", "key: no certificate in it"),
        ("--tls-cert-file @cert --tls-key-file @cert", "cert: nothing of the kind in it"),
        ("--tls-cert-file @broken --tls-key-file @key", "broken: not a PEM file"),
        ("--tls-cert-file @cert --tls-key-file @key --tls-client-ca-file @empty", "empty: no certificate in it"),
        ("--worker-tls-ca-file @no-certificate", "--worker-tls-ca-file"),
        ("--worker-tls-ca-file @ca --worker-tls-insecure-skip-verify", "contradicts"),
        ("--etcd-endpoint https://h:2379 --etcd-tls-ca-file @empty", "--etcd-tls-ca-file"),
    ] {
        let arguments = files.arguments(text);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        check_refused(&arguments, 1, &[expected]);
        let refusal = run(&arguments).map(|_| ()).unwrap_err();
        assert!(!refusal.text.contains(secret), "{text}: {}", refusal.text);
    }
}

#[test]
fn certificates_are_read_again_but_tls_neither_comes_nor_goes() {
    let files = Files::new();
    let secure = "--tls-cert-file @cert --tls-key-file @key";
    let mut running = files.config(secure);
    let changes = running.take_over(files.config(&format!("{secure} --tls-client-ca-file @ca")));
    assert_eq!((changes.in_force, changes.waiting.len()), (vec!["tls-client-ca-file".to_owned()], 0));
    let waiting = ["tls-cert-file", "tls-key-file", "tls-client-ca-file"];
    let mut to_plain = running.take_over(files.config("--worker http://h:1"));
    to_plain.waiting.retain(|name| waiting.contains(&name.as_str()));
    assert_eq!((to_plain.waiting.len(), running.tls.listener.is_some()), (3, true));
    let mut plain = files.config("--admin-listen 127.0.0.1:1");
    assert!(plain.take_over(files.config(secure)).waiting.contains(&"tls-cert-file".to_owned()));
    assert!(plain.tls.listener.is_none());
}

#[test]
fn an_unchecked_worker_is_warned_of() {
    let files = Files::new();
    let loud = files.config("--worker https://h:1 --worker-tls-insecure-skip-verify");
    assert!(loud.warnings.iter().any(|warning| warning.contains("NOT checked")), "{:?}", loud.warnings);
    let off = files.config("--worker https://h:1 --worker-tls-insecure-skip-verify=false --worker-tls-ca-file @ca");
    assert!(off.warnings.iter().all(|warning| !warning.contains("NOT checked")), "{:?}", off.warnings);
    let authorities =
        files.config("--etcd-endpoint https://h:2379 --etcd-tls-ca-file @ca").discovery.etcd.unwrap().roots;
    assert_eq!(authorities.len(), 1);
}
