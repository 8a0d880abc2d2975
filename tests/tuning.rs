//! The files of `tuning/` as far as a container can tell: units that systemd accepts, scripts that parse, that print what
//! they change and put it back, and a host check that changes nothing.

#![allow(clippy::unwrap_used, clippy::print_stderr)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn tuning() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tuning")
}

fn run(command: &mut Command) -> Output {
    command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"))
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[test]
fn systemd_accepts_the_units_and_finds_them_closed() {
    let directory = tempfile::tempdir().unwrap();
    for (file, instance) in
        [("infera-router.service", "infera-router.service"), ("infera-router@.service", "infera-router@a.service")]
    {
        // The program is where the build has put it, and nothing else differs.
        let unit = std::fs::read_to_string(tuning().join(file)).unwrap();
        let unit = unit.replace("/usr/bin/infera-router", env!("CARGO_BIN_EXE_infera-router"));
        std::fs::write(directory.path().join(file), unit).unwrap();
        let output = run(Command::new("systemd-analyze").arg("verify").arg(directory.path().join(instance)));
        let said = text(&output);
        let about_us: Vec<_> = said.lines().filter(|line| line.contains("infera-router")).collect();
        assert!(output.status.success() && about_us.is_empty(), "{file}: {said}");
        let output = run(Command::new("systemd-analyze")
            .args(["security", "--offline=true", "--threshold=25"])
            .arg(directory.path().join(instance)));
        assert!(output.status.success(), "exposure above 2.5: {}", text(&output));
    }
}

#[test]
fn both_units_agree_but_for_names() {
    let lines = |file: &str| {
        let unit = std::fs::read_to_string(tuning().join(file)).unwrap();
        let differing = ["Description=", "EnvironmentFile=", "# "];
        unit.lines()
            .filter(|line| !line.is_empty() && !differing.iter().any(|start| line.starts_with(start)))
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    assert_eq!(lines("infera-router.service"), lines("infera-router@.service"));
}

#[test]
fn the_host_check_says_something_about_everything_and_changes_nothing() {
    let output = run(Command::new("bash").arg(tuning().join("check.sh")));
    let said = text(&output);
    assert!(matches!(output.status.code(), Some(0..=2)), "{said}");
    assert!(output.stderr.is_empty(), "{said}");
    for line in said.lines() {
        assert!(["ok    ", "slow  ", "bad   "].iter().any(|level| line.starts_with(level)), "{line}");
    }
    for part in ["kernel", "io_uring", "open files", "somaxconn", "tcp_migrate_req", "memory"] {
        assert!(said.contains(part), "nothing about {part}: {said}");
    }
    let script = std::fs::read_to_string(tuning().join("check.sh")).unwrap();
    assert!(!script.contains("sysctl -w") && !script.contains(" tee "));
}

#[test]
fn what_a_script_changes_it_prints_remembers_and_puts_back() {
    let directory = tempfile::tempdir().unwrap();
    let (setting, state) = (directory.path().join("setting"), directory.path().join("run/state"));
    std::fs::write(&setting, "old").unwrap();
    let bash = |dry: &str, script: &str| {
        let script = format!("set -eu; . {}/lib.sh; {script}", tuning().display());
        let mut command = Command::new("bash");
        command.args(["-c", &script]).env("STATE", &state).env("DRY_RUN", dry).env("SETTING", &setting);
        let output = run(&mut command);
        assert!(output.status.success(), "{}", text(&output));
        text(&output)
    };
    let value = || std::fs::read_to_string(&setting).unwrap();
    assert!(bash("1", "change $SETTING new").contains("old -> new"));
    assert_eq!((value().as_str(), state.exists()), ("old", false), "a dry run changes nothing");
    bash("0", "change $SETTING new; change $SETTING newer");
    assert_eq!(value(), "newer");
    assert!(bash("0", "change $SETTING newer").starts_with("keep"));
    assert!(bash("0", "undo").contains("= old"));
    assert_eq!((value().as_str(), state.exists()), ("old", false), "back to the first value");
    assert!(bash("0", "undo").contains("nothing to undo"));
}

#[test]
fn scripts_parse_and_explain_themselves() {
    for entry in std::fs::read_dir(tuning()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "sh") {
            assert!(run(Command::new("bash").arg("-n").arg(&path)).status.success(), "{}", path.display());
        }
    }
    let scripts =
        "shellcheck -x -P tuning -P tuning/engines tuning/*.sh tuning/engines/*.sh tuning/package/p* tests/systemd.sh";
    match Command::new("shellcheck").arg("--version").output() {
        Ok(_) => {
            let output = run(Command::new("sh").args(["-c", scripts]).current_dir(env!("CARGO_MANIFEST_DIR")));
            assert!(output.status.success(), "{}", text(&output));
        }
        Err(_) => eprintln!("NOT RUN: shellcheck is not installed"),
    }
    for script in ["irq.sh", "governor.sh"] {
        let output = run(Command::new("bash").arg(tuning().join(script)));
        assert_eq!(output.status.code(), Some(2));
        assert!(text(&output).contains("undo"), "{}", text(&output));
    }
    let output = run(Command::new("bash").arg(tuning().join("irq.sh")).args(["apply", "no-such-card", "0"]));
    assert!(!output.status.success() && text(&output).contains("no interface no-such-card"), "{}", text(&output));
}

#[test]
fn every_kernel_setting_has_its_reason() {
    let settings = std::fs::read_to_string(tuning().join("90-infera-router.conf")).unwrap();
    let mut is_explained = false;
    for line in settings.lines() {
        match line.strip_prefix('#') {
            Some(reason) => is_explained |= reason.len() > 20,
            None if line.is_empty() => is_explained = false,
            None => {
                assert!(is_explained, "{line}");
                assert!(line.split_once(" = ").is_some_and(|(name, value)| name.contains('.') && !value.is_empty()));
            }
        }
    }
}

/// What a script would start, and the `--worker` that belongs to it.
fn engine(script: &str, variables: &[(&str, &str)]) -> (String, String) {
    let output = run(Command::new("bash")
        .arg(tuning().join("engines").join(script))
        .args(["/models/m", "--own", "two words"])
        .env("PRINT", "1")
        .env("HOST", "10.0.0.5")
        .envs(variables.iter().copied()));
    assert!(output.status.success(), "{script}: {}", text(&output));
    let said = String::from_utf8(output.stdout).unwrap();
    let (command, worker) = said.trim_end().split_once('\n').unwrap();
    (command.to_owned(), worker.strip_prefix("--worker ").unwrap().to_owned())
}

#[test]
fn engines_are_started_with_what_their_pages_say_and_the_router_takes_their_workers() {
    let ranked = [("RANKS", "4"), ("EVENTS_PORT", "7000"), ("REPLAY_PORT", "7004")];
    for script in ["vllm.sh", "sglang.sh", "atom.sh"] {
        let page = std::fs::read_to_string(tuning().join("engines").join(script.replace(".sh", ".md"))).unwrap();
        let (plain, worker) = engine(script, &[]);
        assert!(page.contains(&worker), "{script}: its page does not say {worker}");
        assert!(plain.contains("--own two\\ words"), "the engine's own options come last: {plain}");
        let (command, ranked_worker) = engine(script, &ranked);
        assert!(command.contains("7000") && command.contains("7004"), "{command}");
        if let Some(events) = command.split_once("--kv-events-config ").map(|(_, rest)| rest.replace('\\', "")) {
            let end = events.find('}').unwrap() + 1;
            let events: serde_json::Value = serde_json::from_str(&events[..end]).unwrap();
            assert_eq!(
                (&events["endpoint"], &events["replay_endpoint"]),
                (&"tcp://*:7000".into(), &"tcp://*:7004".into())
            );
        }
        for worker in [worker, ranked_worker] {
            let taken = infera_router::config::parse(["infera-router", "--worker", &worker]);
            assert!(taken.is_ok(), "{script}: the router refuses {worker}");
        }
    }
    let output = run(Command::new("bash")
        .arg(tuning().join("engines/vllm.sh"))
        .arg("m")
        .env("PRINT", "1")
        .envs([("RANKS", "9"), ("REPLAY_PORT", "5560")]));
    assert_eq!(output.status.code(), Some(2), "two ranges of ports that meet");
}
