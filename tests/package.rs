//! The Debian package, from the binary of this build: what is in it, that it installs into a scratch root, and that nothing
//! of it is left after it was purged.

#![allow(clippy::unwrap_used, clippy::print_stderr)]

#[path = "support/certificates.rs"]
mod certificates;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

const BINARY: &str = env!("CARGO_BIN_EXE_infera-router");

fn tuning() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tuning")
}

#[track_caller]
fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{command:?}: {said}{}", String::from_utf8_lossy(&output.stderr));
    said
}

/// Every file below a directory, from its top.
fn files(top: &Path) -> BTreeSet<String> {
    let (mut files, mut open) = (BTreeSet::new(), vec![top.to_owned()]);
    while let Some(directory) = open.pop() {
        for entry in std::fs::read_dir(&directory).unwrap() {
            let entry = entry.unwrap();
            match entry.file_type().unwrap().is_dir() {
                true => open.push(entry.path()),
                false => {
                    files.insert(entry.path().strip_prefix(top).unwrap().display().to_string());
                }
            }
        }
    }
    files
}

/// `dpkg` on a root of its own, scripts included: they find it in `DPKG_ROOT`.
fn dpkg(root: &Path, arguments: &[&str]) -> String {
    let is_root = rustix::process::geteuid().is_root();
    let mut command = Command::new(if is_root { "dpkg" } else { "fakeroot" });
    if !is_root {
        command.args(["dpkg", "--force-not-root"]);
    }
    // Debian's own packages are not in there.
    command.args(["--force-depends", "--force-script-chrootless", "--log=/dev/null"]);
    command.arg(format!("--root={}", root.display())).args(arguments);
    let path = std::env::var("PATH").unwrap_or_default();
    run(command.env("PATH", format!("{path}:/usr/sbin:/sbin")).env("DEBIAN_FRONTEND", "noninteractive"))
}

fn build(directory: &Path) -> String {
    let mut command = Command::new("bash");
    command.arg(tuning().join("package.sh")).arg(BINARY).arg(directory);
    // A debug binary is large, and what is tested is not how small it becomes.
    command.env("DPKG_DEB_COMPRESSOR_TYPE", "gzip").env("DPKG_DEB_COMPRESSOR_LEVEL", "1");
    run(&mut command).trim().to_owned()
}

#[test]
fn the_package_installs_and_leaves_nothing_when_it_is_purged() {
    let directory = tempfile::tempdir().unwrap();
    let package = build(directory.path());
    let information = run(Command::new("dpkg-deb").args(["--info", &package]));
    for text in ["Package: infera-router", concat!("Version: ", env!("CARGO_PKG_VERSION")), "libc6 (>= ", "libstdc++6"]
    {
        assert!(information.contains(text), "no `{text}` in {information}");
    }
    let contents = run(Command::new("dpkg-deb").args(["--contents", &package]));
    assert!(contents.lines().all(|line| line.contains("root/root")), "{contents}");

    let root = directory.path().join("root");
    for made in ["var/lib/dpkg/info", "var/lib/dpkg/updates", "etc"] {
        std::fs::create_dir_all(root.join(made)).unwrap();
    }
    std::fs::write(root.join("var/lib/dpkg/status"), "").unwrap();
    let is_ours = |file: &String| !file.starts_with("var/lib/dpkg/");
    let of_package = |root: &Path| -> BTreeSet<String> { files(root).into_iter().filter(is_ours).collect() };

    let said = dpkg(&root, &["--install", &package]);
    assert!(said.contains("infera-router is not started"), "{said}");
    let installed = of_package(&root);
    for file in [
        "usr/bin/infera-router",
        "usr/lib/systemd/system/infera-router.service",
        "usr/lib/systemd/system/infera-router@.service",
        "usr/lib/sysctl.d/90-infera-router.conf",
        "etc/infera-router/router.toml",
        "etc/infera-router/infera-router.env",
        "usr/share/man/man8/infera-router.8.gz",
        "usr/share/bash-completion/completions/infera-router",
        "usr/share/zsh/vendor-completions/_infera-router",
        "usr/share/fish/vendor_completions.d/infera-router.fish",
        "usr/share/doc/infera-router/copyright",
        "usr/share/doc/infera-router/changelog.gz",
        "usr/share/doc/infera-router/changelog.Debian.gz",
        "usr/share/infera-router/check.sh",
        "etc/logrotate.d/infera-router",
    ] {
        assert!(installed.contains(file), "{file} is not among {installed:#?}");
    }
    let passwd = std::fs::read_to_string(root.join("etc/passwd")).unwrap();
    assert!(passwd.contains("infera-router:") && passwd.contains("/usr/sbin/nologin"), "{passwd}");
    assert!(!installed.iter().any(|file| file.contains(".wants/")), "enabled by itself: {installed:#?}");
    // The units are those that `tests/tuning.rs` puts to systemd.
    for unit in ["infera-router.service", "infera-router@.service"] {
        let own = std::fs::read(root.join("usr/lib/systemd/system").join(unit)).unwrap();
        assert_eq!(own, std::fs::read(tuning().join(unit)).unwrap(), "{unit}");
    }
    let version = run(Command::new(root.join("usr/bin/infera-router")).arg("--version"));
    assert!(version.contains(env!("CARGO_PKG_VERSION")), "{version}");
    let verify =
        run(Command::new("dpkg").arg(format!("--root={}", root.display())).args(["--verify", "infera-router"]));
    assert_eq!(verify, "", "files that differ from the package");

    // What an administrator has done since: the service enabled, a setting changed, a key beside it.
    run(Command::new("systemctl").arg(format!("--root={}", root.display())).args(["enable", "infera-router.service"]));
    std::fs::write(root.join("etc/infera-router/router.toml"), "port = 8001\n").unwrap();
    // The same again is an upgrade: the changed file stays.
    let said = dpkg(&root, &["--install", "--force-confold", &package]);
    assert!(said.contains("keep the former version"), "{said}");
    assert_eq!(std::fs::read_to_string(root.join("etc/infera-router/router.toml")).unwrap(), "port = 8001\n");

    dpkg(&root, &["--remove", "infera-router"]);
    let kept: Vec<_> = of_package(&root).into_iter().filter(|file| file.contains("infera-router")).collect();
    let conffiles =
        ["etc/infera-router/infera-router.env", "etc/infera-router/router.toml", "etc/logrotate.d/infera-router"];
    assert_eq!(kept, conffiles);
    let logs = root.join("var/log/private/infera-router");
    std::fs::create_dir_all(&logs).unwrap();
    std::fs::write(logs.join("access.log"), "").unwrap();
    dpkg(&root, &["--purge", "infera-router"]);
    let kept: Vec<_> = of_package(&root).into_iter().filter(|file| file.contains("infera-router")).collect();
    assert!(kept.is_empty() && !root.join("etc/infera-router").exists(), "{kept:?}");

    match Command::new("lintian").arg("--version").output() {
        Ok(_) => drop(run(Command::new("lintian").args(["--allow-root", "--fail-on", "error,warning", &package]))),
        Err(_) => eprintln!("NOT RUN: lintian is not installed"),
    }
}

#[test]
fn the_example_configuration_is_good_and_so_is_every_line_that_it_offers() {
    let check = |path: &Path| run(Command::new(BINARY).arg("--check-config").arg("--config").arg(path));
    let defaults = check(&tuning().join("router.toml"));
    let directory = tempfile::tempdir().unwrap();
    // Files that the example names are not on this host.
    let made = |name: &str, text: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        format!("{path:?}")
    };
    let authority = certificates::Authority::new();
    let own = authority.issue(&["router.test"]);
    let (keys, authorities) = (made("keys", "sk-1\n"), made("authorities.pem", &authority.pem()));
    let path_for = |name: &str| match name {
        "api-key-file" | "worker-api-key-file" => Some(keys.clone()),
        "access-log-file" => Some(made("access.log", "")),
        "workers-file" => Some(made("workers.json", "[]")),
        "tls-cert-file" => Some(made("own.pem", &own.pem())),
        "tls-key-file" => Some(made("own.key", &own.key_pem())),
        name if name.ends_with("-ca-file") => Some(authorities.clone()),
        "router-tokenizer-path" => {
            loadgen::prompt::write_shipped_tokenizer(directory.path()).unwrap();
            Some(format!("{:?}", directory.path()))
        }
        _ => None,
    };
    let example = std::fs::read_to_string(tuning().join("router.toml")).unwrap();
    let is_option = |line: &&str| !line.starts_with([' ', '#']);
    let offered: Vec<_> = example
        .lines()
        .filter_map(|line| line.strip_prefix('#'))
        .filter(|line| !line.is_empty() && is_option(line))
        .collect();
    let lines = offered.iter().map(|line| {
        let (name, value) = line.split_once(" = ").unwrap();
        match (name, value) {
            // A log that is off has no file.
            ("access-log", _) => "access-log = \"json\"\n".to_owned(),
            _ => format!("{name} = {}\n", path_for(name).unwrap_or_else(|| value.to_owned())),
        }
    });
    let all = directory.path().join("all.toml");
    std::fs::write(&all, lines.collect::<String>()).unwrap();
    let report = check(&all);
    let of_file = |line: &&str| line.contains("(file, line ");
    // Every option but the one that names the file.
    let options = defaults.lines().filter(|line| line.ends_with("(default)")).count();
    assert_eq!(report.lines().filter(of_file).count(), options, "{report}");
    // Where an option has a default, the example shows it.
    for line in report.lines().filter(of_file).filter(|line| !line.contains("/") && !line.starts_with("access-log")) {
        let (setting, _) = line.split_once(" (file").unwrap();
        let name = setting.split_once(" = ").map_or(setting, |(name, _)| name);
        let has_none = defaults.contains(&format!("{name} is not set (default)"));
        assert!(has_none || defaults.contains(&format!("{setting} (default)")), "{line}: {defaults}");
    }
}

#[test]
fn the_man_page_and_the_completions_can_be_read_by_their_programs() {
    let directory = tempfile::tempdir().unwrap();
    let written = |name: &str, arguments: &[&str]| {
        let path = directory.path().join(name);
        std::fs::write(&path, run(Command::new(BINARY).args(arguments))).unwrap();
        path
    };
    let page = written("infera-router.8", &["man"]);
    let output = Command::new("man").arg("--warnings").arg("-l").arg(&page).env("MANWIDTH", "100").output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout);
    for part in
        ["infera-router inspect", "--kv-overlap-weight", "INFERA_CONFIG", "PREFILL AND DECODE WORKERS", "SIGHUP"]
    {
        assert!(text.contains(part), "no `{part}` in the man page: {text}");
    }
    // What bash itself would offer.
    let script = written("completion.bash", &["completions", "bash"]);
    for (typed, offered) in [
        ("--kv-overl", "--kv-overlap-weight"),
        ("--kv-load ''", "queue active"),
        ("--port 80", "80"),
        ("--kv-self-heal ''", "true false"),
        ("ins", "inspect"),
        ("inspect ''", "-h --help prompt events help"),
        ("inspect prompt --eng", "--engine"),
        ("completions b", "bash"),
    ] {
        let words: Vec<_> = ["infera-router"].into_iter().chain(typed.split(' ')).collect();
        let complete = format!(
            ". {}; COMP_WORDS=({}); COMP_CWORD={}; \
             $(complete -p infera-router | sed 's/.*-F \\([^ ]*\\).*/\\1/') infera-router {} {}; echo \"${{COMPREPLY[@]}}\"",
            script.display(),
            words.join(" "),
            words.len() - 1,
            words[words.len() - 1],
            words[words.len() - 2],
        );
        assert_eq!(run(Command::new("bash").args(["-c", &complete])).trim(), offered, "{typed}");
    }
}
