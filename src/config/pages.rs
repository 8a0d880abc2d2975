//! Pages that are made from the command line's own definition: man page, completions, reference. Nothing here states a name,
//! a default or a variable a second time.

use clap::builder::{PossibleValuesParser, StyledStr};
use clap::{Arg, ArgAction, CommandFactory, ValueHint};
use clap_complete::Shell;

use super::cli::{Cli, only_outside_files};
use super::reload;

/// What the options take that are names of something; plain strings to the parser, so that all mistakes are told at once.
const CHOICES: [(&str, &[&str]); 16] = [
    ("access-log", &["off", "text", "json"]),
    ("decode-input-demand", &["off", "shadow", "on"]),
    ("discovery-backend", &["static", "etcd"]),
    ("io-driver", &["auto", "epoll"]),
    ("kv-chat-encoding", &["dsv4", "kimi_k3"]),
    ("kv-event-transport", &["zmq"]),
    ("kv-load", &["queue", "active"]),
    ("kv-recent-load", &["off", "idle", "on"]),
    ("log-format", &["text", "json"]),
    ("log-level", &["error", "warn", "info", "debug", "trace"]),
    ("pd-prefill-guard-release", &["decode", "completion"]),
    ("request-transport", &["http"]),
    ("router-mode", &["auto", "direct"]),
    ("router-policy", &["round-robin", "kv-aware"]),
    ("session-affinity", &["off", "prefill", "both"]),
    ("shard-cpus", &["auto", "off"]),
];

pub(super) fn completions(shell: Shell) -> String {
    let mut command = Cli::command().mut_args(|option| {
        let name = option.get_long().unwrap_or_default();
        let choices = CHOICES.iter().find(|(of, _)| *of == name);
        let is_path = option.get_value_names().is_some_and(|names| names.iter().any(|name| name == "PATH"));
        match choices {
            _ if !option.get_action().takes_values() => option,
            Some((_, choices)) => option.value_parser(PossibleValuesParser::new(*choices)),
            // Else a shell would offer files for numbers.
            None => option.value_hint(if is_path { ValueHint::AnyPath } else { ValueHint::Other }),
        }
    });
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, "infera-router", &mut script);
    // For bash the dash in the program's name is spelt in two ways, of which only this one is looked up.
    String::from_utf8_lossy(&script).replace("infera__subcmd__router", "infera__router")
}

/// In section 8: a system's own services.
pub(super) fn man() -> String {
    let mut made = Vec::new();
    // Writing into memory does not fail.
    let _ = clap_mangen::Man::new(Cli::command().disable_help_subcommand(true)).section("8").render(&mut made);
    let mut page = String::new();
    let mut is_synopsis = false;
    // Not every terminal shows Unicode, and groff warns of it.
    for line in String::from_utf8_lossy(&made).replace('…', "...").lines() {
        // Subcommands have no pages of their own that could be referred to.
        match line.strip_prefix(r"infera\-router\-").and_then(|rest| rest.strip_suffix("(8)")) {
            Some(subcommand) => page.push_str(&format!("infera\\-router {subcommand}\n")),
            // Every option would be in it.
            None if is_synopsis => page.push_str(SYNOPSIS),
            None => page.push_str(&format!("{line}\n")),
        }
        is_synopsis = line == ".SH SYNOPSIS";
    }
    page + REST
}

const SYNOPSIS: &str = "\
\\fBinfera\\-router\\fR [\\fIOPTIONS\\fR]
.br
\\fBinfera\\-router\\fR \\fISUBCOMMAND\\fR
";

const REST: &str = ".SH SIGNALS
.TP
SIGTERM, SIGINT
No new connections; running requests finish within the drain timeout. A second one ends them at once.
.TP
SIGHUP
The configuration file and the files of keys and certificates are read again. What is wrong changes nothing and is in the
log.
.TP
SIGUSR1
The file of the access log is opened anew, after a rotation.
.SH FILES
.TP
/etc/infera\\-router/router.toml
Options of the service that the Debian package installs; infera\\-router.env beside it names this file.
.TP
/usr/share/doc/infera\\-router/
Tuning of a host, the runbook, and the reference of all options.
.SH EXIT STATUS
0 after a drain; 1 when the configuration makes no sense or a part does not start; 2 for a command line that cannot be read,
and for a check that found something; 70 when a thread that must not end has ended.
";

/// `src/config/REFERENCE.md`.
pub(super) fn reference() -> String {
    let command = Cli::command();
    let mut page = String::from(INTRODUCTION);
    let mut heading = "";
    for option in command.get_arguments().filter(|option| !matches!(option.get_id().as_str(), "help" | "version")) {
        let Some(name) = option.get_long() else { continue };
        let own = option.get_help_heading().unwrap_or_default();
        if own != heading {
            heading = own;
            page.push_str(&format!(
                "\n## {heading}\n\n| option | default | variable | at SIGHUP | |\n|---|---|---|---|---|\n"
            ));
        }
        page.push_str(&row(option, name));
    }
    page
}

const INTRODUCTION: &str = "# Options of `infera-router`

Made by `infera-router config-reference`; a test keeps it true.

An option is a flag (`--port 8001`), a variable where the table names one, or a line of the TOML file that `--config` names
(`port = 8001`). Flags go before variables, variables before the file, the file before the default. Keys of the file are
the flags' names without the dashes in front, with dashes inside; there are no tables; options marked (list) take a list;
`--kv-default-chat-template-kwargs` also takes a table. A key that is not known, or a value that makes no sense, ends the
start; all mistakes are told at once, with their lines.

`infera-router --check-config` says what a start would say, prints every option with its source, and touches no network.

`SIGHUP` (`systemctl reload`) reads the file and the key files again. Options marked `read again` are in force from the next
request on; of the others a change is named in the log and waits for a restart. After a mistake everything stays as it was.
";

fn row(option: &Arg, name: &str) -> String {
    let values = option.get_value_names().map(|names| names.join(" ")).filter(|_| option.get_action().takes_values());
    let list = if matches!(option.get_action(), ArgAction::Append) { " (list)" } else { "" };
    let default: Vec<_> = option.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    let default = match default.join(" ") {
        text if text.is_empty() => String::new(),
        text => format!("`{text}`"),
    };
    let variable = option.get_env().map(|name| format!("`{}`", name.to_string_lossy())).unwrap_or_default();
    let reload = match name {
        name if only_outside_files(name) => "",
        name if reload::is_read_again(name) => "read again",
        _ => "restart",
    };
    let flag = match values {
        Some(values) => format!("`--{name} {values}`{list}"),
        None => format!("`--{name}`"),
    };
    let help = cell(option.get_long_help().or_else(|| option.get_help()));
    format!("| {} | {} | {variable} | {reload} | {help} |\n", escaped(&flag), escaped(&default))
}

fn cell(help: Option<&StyledStr>) -> String {
    let text = help.map(ToString::to_string).unwrap_or_default();
    escaped(&text.split_whitespace().collect::<Vec<_>>().join(" "))
}

/// A bar would end the cell, inside code too.
fn escaped(text: &str) -> String {
    text.replace('|', "\\|")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::parse;

    /// The completed values are those that the check of the configuration takes, in its own words.
    #[test]
    fn choices_are_the_codes() {
        for option in Cli::command().get_arguments().filter(|option| option.get_action().takes_values()) {
            let Some(name) = option.get_long() else { continue };
            let refusal = parse(["infera-router", &format!("--{name}=?")]).err();
            let text = refusal.map(|refusal| refusal.text).unwrap_or_default();
            let offered = text.split_once(&format!("this build supports --{name} "));
            let offered = offered.and_then(|(_, rest)| Some(rest.split_once(" (got ")?.0));
            let known = CHOICES.iter().find(|(of, _)| *of == name).map(|(_, choices)| choices.join("|"));
            // These two take more than what is offered.
            if !matches!(name, "log-level" | "shard-cpus") {
                assert_eq!(offered, known.as_deref(), "--{name}: {text}");
            }
        }
        for (name, choices) in CHOICES.iter().filter(|(name, _)| matches!(*name, "log-level" | "shard-cpus")) {
            let values = choices.iter().map(|choice| format!("--{name}={choice}"));
            assert!(values.into_iter().all(|value| parse(["infera-router", &value]).is_ok()), "--{name}");
        }
    }

    #[test]
    fn the_reference_is_the_codes() {
        let written = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/src/config/REFERENCE.md")).unwrap();
        assert!(written == reference(), "run: infera-router config-reference > src/config/REFERENCE.md");
    }

    #[test]
    fn every_option_has_a_help_text_and_stands_on_every_page() {
        let (man, reference) = (man(), reference());
        let scripts = [Shell::Bash, Shell::Zsh, Shell::Fish].map(completions);
        for option in Cli::command().get_arguments() {
            let Some(name) = option.get_long() else { continue };
            assert!(option.get_help().is_some(), "--{name} has no help text");
            assert!(man.contains(&format!("\\-\\-{}", name.replace('-', "\\-"))), "--{name} is not in the man page");
            assert!(scripts.iter().all(|script| script.contains(name)), "--{name} is not completed");
            assert!(matches!(name, "help" | "version") || reference.contains(&format!("`--{name}")), "--{name}");
        }
    }
}
