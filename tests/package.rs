//! The Debian package, from the binary of this build: what is in it, that it installs into a scratch root, and that nothing
//! of it is left after it was purged.

#![allow(clippy::unwrap_used, clippy::print_stderr)]

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
        "usr/share/infera-router/check.sh",
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
    assert_eq!(kept, ["etc/infera-router/infera-router.env", "etc/infera-router/router.toml"], "conffiles alone");
    dpkg(&root, &["--purge", "infera-router"]);
    let kept: Vec<_> = of_package(&root).into_iter().filter(|file| file.contains("infera-router")).collect();
    assert!(kept.is_empty() && !root.join("etc/infera-router").exists(), "{kept:?}");

    match Command::new("lintian").arg("--version").output() {
        Ok(_) => drop(run(Command::new("lintian").args(["--fail-on", "error", &package]))),
        Err(_) => eprintln!("NOT RUN: lintian is not installed"),
    }
}

#[test]
fn the_example_configuration_is_good_and_so_is_every_line_that_it_offers() {
    let check = |path: &Path| run(Command::new(BINARY).arg("--check-config").arg("--config").arg(path));
    check(&tuning().join("router.toml"));
    let directory = tempfile::tempdir().unwrap();
    // Files that the example names are not on this host.
    let (keys, tokenizer) = (directory.path().join("keys"), "router-tokenizer-path");
    std::fs::write(&keys, "sk-1\n").unwrap();
    let example = std::fs::read_to_string(tuning().join("router.toml")).unwrap();
    let offered: Vec<_> =
        example.lines().filter_map(|line| line.strip_prefix('#')).filter(|line| !line.starts_with(' ')).collect();
    assert!(offered.len() > 10, "{offered:?}");
    let lines =
        offered.iter().filter(|line| !line.starts_with(tokenizer)).map(|line| match line.split_once("-file = ") {
            Some((name, _)) => format!("{name}-file = \"{}\"\n", keys.display()),
            None => format!("{line}\n"),
        });
    let all = directory.path().join("all.toml");
    std::fs::write(&all, lines.collect::<String>()).unwrap();
    let report = check(&all);
    let from_the_file = report.lines().filter(|line| line.contains("(file, line ")).count();
    assert_eq!(from_the_file, offered.len() - 1, "{report}");
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
    let complete = format!(
        ". {}; COMP_WORDS=(infera-router --kv-overl); COMP_CWORD=1; \
         $(complete -p infera-router | sed 's/.*-F \\([^ ]*\\).*/\\1/') infera-router --kv-overl infera-router; \
         printf '%s\\n' \"${{COMPREPLY[@]}}\"",
        script.display()
    );
    assert_eq!(run(Command::new("bash").args(["-c", &complete])).trim(), "--kv-overlap-weight");
}
