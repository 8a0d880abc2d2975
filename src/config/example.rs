//! `infera-router config-example`: a configuration file that has every option as a comment, with what it does and what is in
//! force without it. Made from the command line's own definition; states no option a second time.

use clap::{Arg, ArgAction, CommandFactory};

use super::cli::{Cli, only_outside_files};

/// Widest line of a comment, characters.
const WIDTH: usize = 100;

const INTRODUCTION: &str = "\
# Options of infera-router, read at its start and again at `systemctl reload infera-router` (SIGHUP). A line without # in
# front is in force; flags and variables go before this file. Made by `infera-router config-example`: where an option has
# a default, its line shows it. REFERENCE.md beside the README says which of them a reload changes, and
# `infera-router --config FILE --check-config` whether a file is good.
#
# Files of keys should be readable for root and the service's group alone (chown root:infera-router, chmod 640). Under
# systemd the service reads nothing below /home and writes nowhere but into /var/log/infera-router.
";

/// `tuning/router.toml`.
pub(super) fn file() -> String {
    let command = Cli::command();
    let mut page = String::from(INTRODUCTION);
    let mut heading = "";
    for option in command.get_arguments() {
        let Some(name) = option.get_long().filter(|name| !only_outside_files(name)) else { continue };
        let own = option.get_help_heading().unwrap_or_default();
        if own != heading {
            heading = own;
            page.push_str(&format!("\n\n## {heading}\n"));
        }
        let help = option.get_long_help().or_else(|| option.get_help()).map(ToString::to_string).unwrap_or_default();
        page.push('\n');
        wrapped(&help).iter().for_each(|line| page.push_str(&format!("# {line}\n")));
        page.push_str(&format!("#{name} = {}\n", shown(option)));
    }
    page
}

fn wrapped(text: &str) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut().filter(|line| line.chars().count() + 1 + word.chars().count() <= WIDTH) {
            Some(line) => line.extend([" ", word]),
            None => lines.push(word.to_owned()),
        }
    }
    lines
}

/// The default as TOML, or a value of the right form.
fn shown(option: &Arg) -> String {
    let defaults: Vec<_> = option.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    let form = option.get_value_names().and_then(|names| names.first()).map_or("", |name| name.as_str());
    let values: Vec<String> = match defaults.as_slice() {
        [] => vec![sample(option, form).to_owned()],
        some => some.iter().map(|value| literal(value, form)).collect(),
    };
    match option.get_action() {
        ArgAction::Append => format!("[{}]", values.join(", ")),
        _ => values.join(" "),
    }
}

/// Numbers and booleans as they are, all else in quotes.
fn literal(value: &str, form: &str) -> String {
    let is_bare = matches!(form, "BOOL" | "N" | "BYTES" | "SECONDS" | "WEIGHT" | "PERCENT" | "TOKENS" | "PORT");
    if is_bare { value.to_owned() } else { format!("{value:?}") }
}

/// For an option without a default.
fn sample(option: &Arg, form: &str) -> &'static str {
    match (option.get_long().unwrap_or_default(), form) {
        ("worker", _) => r#""http://10.0.0.5:30000,engine=vllm", "http://10.0.0.6:30000,engine=vllm""#,
        ("router-tokenizer-path", _) => r#""/srv/models/Qwen3-0.6B""#,
        ("discovery-backend", _) => r#""static""#,
        ("kv-overlap-weight" | "kv-prefill-overlap-weight", _) => "12",
        ("kv-default-chat-template-kwargs", _) => "{ enable_thinking = false }",
        ("access-log-file", _) => r#""/var/log/infera-router/access.log""#,
        ("nats-server", _) => r#""nats://127.0.0.1:4222""#,
        (_, "PATH") => r#""/etc/infera-router/FILE""#,
        (_, "HOST:PORT") => r#""127.0.0.1:8001""#,
        (_, "N" | "SECONDS" | "WEIGHT") => "1",
        _ => r#""""#,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shipped_file_is_the_codes() {
        let written = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/tuning/router.toml")).unwrap();
        assert!(written == file(), "run: infera-router config-example > tuning/router.toml");
    }

    #[test]
    fn comments_are_wrapped_and_nothing_is_in_force() {
        let page = file();
        assert!(page.lines().all(|line| line.is_empty() || line.starts_with('#')), "{page}");
        assert!(page.lines().filter(|line| line.starts_with("# ")).all(|line| line.chars().count() <= 125), "{page}");
        assert_eq!(wrapped("a b"), ["a b"]);
        assert_eq!(wrapped(&"word ".repeat(40)).iter().map(|line| line.len()).max(), Some(99));
    }
}
