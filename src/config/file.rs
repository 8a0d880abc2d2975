//! The configuration file: TOML whose keys are the long names of the server's options. Turns it into arguments that stand
//! below flags and environment variables, so that an option needs no second definition; every mistake is told with its
//! line. Never decides what values mean together: that is `validate`'s.

use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::path::Path;

use clap::error::{ContextKind, ContextValue};
use clap::{Arg, ArgAction, Command};
use toml::de::{DeTable, DeValue};

use super::cli::only_outside_files;
use crate::limits::CONFIG_FILE_BYTES_MAX;

/// Likeness (Jaro-Winkler, 0 to 1) from which a known name is offered for an unknown one.
const LIKE_ENOUGH: f64 = 0.8;

/// One option that a file sets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// Long name, without dashes in front.
    pub name: String,
    /// More than one for a repeatable option only.
    pub values: Vec<String>,
    /// From 1.
    pub line: usize,
}

/// What could be read, and what is wrong, each problem with its place.
#[derive(Debug, Default)]
pub(super) struct FileOptions {
    pub entries: Vec<Entry>,
    pub problems: Vec<String>,
}

/// Reads a file against the options of `command`. A key that is wrong costs itself only, so that all are reported at once.
pub(super) fn read(path: &Path, command: &Command) -> FileOptions {
    match text_of(path) {
        Ok(text) => parse(&path.display().to_string(), &text, command),
        Err(problem) => {
            FileOptions { entries: Vec::new(), problems: vec![format!("--config {}: {problem}", path.display())] }
        }
    }
}

fn text_of(path: &Path) -> Result<String, String> {
    let mut text = String::new();
    let file = File::open(path).map_err(|error| error.to_string())?;
    file.take(CONFIG_FILE_BYTES_MAX + 1).read_to_string(&mut text).map_err(|error| error.to_string())?;
    match text.len() as u64 > CONFIG_FILE_BYTES_MAX {
        true => Err(format!("longer than {CONFIG_FILE_BYTES_MAX} bytes")),
        false => Ok(text),
    }
}

/// `command` with the file's values in place of its defaults.
pub(super) fn with_values(command: Command, entries: &[Entry]) -> Command {
    entries.iter().fold(command, |command, entry| match option_named(&command, &entry.name) {
        Some(option) => {
            let id = option.get_id().clone();
            command.mut_arg(id, |option| option.default_values(entry.values.clone()))
        }
        None => command,
    })
}

fn parse(file: &str, text: &str, command: &Command) -> FileOptions {
    let line_of = |span: Range<usize>| 1 + text.bytes().take(span.start).filter(|byte| *byte == b'\n').count();
    let (table, errors) = DeTable::parse_recoverable(text);
    // Problems in the order of their lines.
    let mut problems: Vec<(usize, String)> = errors
        .iter()
        .map(|error| (error.span().map_or(1, &line_of), error.message().trim().replace('\n', ", ")))
        .map(|(line, problem)| (line, problem + quotes_missing(text, line)))
        .collect();
    let mut entries: Vec<Entry> = Vec::new();
    for (key, value) in table.get_ref() {
        let line = line_of(key.span());
        match entry(key.get_ref(), value.get_ref(), command) {
            Ok((name, values)) => match entries.iter().find(|known| known.name == name) {
                // Two spellings; a key twice is an error of the syntax.
                Some(known) => {
                    problems.push((line, format!("`{}` is the same option as in line {}", key.get_ref(), known.line)))
                }
                None => entries.push(Entry { name, values, line }),
            },
            // What a broken line left behind has been reported with it.
            Err(_) if problems.iter().any(|(at, _)| *at == line) => {}
            Err(problem) => problems.push((line, problem)),
        }
    }
    problems.sort();
    entries.sort_by_key(|entry| entry.line);
    let problems = problems.into_iter().map(|(line, problem)| format!("{file}:{line}: {problem}")).collect();
    FileOptions { entries, problems }
}

/// A hint for the mistake that is made most: text without quotes, which TOML reads as a broken number or date.
fn quotes_missing(text: &str, line: usize) -> &'static str {
    let value = text.lines().nth(line - 1).and_then(|line| line.split_once('=')).map_or("", |(_, value)| value.trim());
    let is_told_otherwise = value.is_empty() || value.contains(['"', '\'', '[', '{']);
    match is_told_otherwise || value.parse::<f64>().is_ok() || value.parse::<bool>().is_ok() {
        true => "",
        false => "; text stands in quotes, as in host = \"0.0.0.0\"",
    }
}

/// The option's own name and its values, in the spelling of the command line.
fn entry(key: &str, value: &DeValue<'_>, command: &Command) -> Result<(String, Vec<String>), String> {
    let Some(option) = option_named(command, key) else { return Err(unknown(key, value, command)) };
    let name = option.get_long().unwrap_or(key).to_owned();
    if only_outside_files(&name) {
        return Err(format!("`{key}` cannot stand in a file"));
    }
    let is_list = matches!(option.get_action(), ArgAction::Append);
    let values = match value {
        DeValue::Array(values) if is_list => {
            values.iter().map(|value| scalar(key, value.get_ref())).collect::<Result<Vec<_>, _>>()?
        }
        DeValue::Array(_) => return Err(format!("`{key}` takes one value, not a list")),
        DeValue::Table(table) if takes_json(option) => vec![json(&DeValue::Table(table.clone()))?.to_string()],
        value => vec![scalar(key, value)?],
    };
    for value in &values {
        check(option, &name, value)?;
    }
    Ok((name, values))
}

/// The option of that name or alias.
fn option_named<'a>(command: &'a Command, key: &str) -> Option<&'a Arg> {
    command.get_arguments().find(|option| {
        option.get_long() == Some(key) || option.get_all_aliases().is_some_and(|aliases| aliases.contains(&key))
    })
}

fn unknown(key: &str, value: &DeValue<'_>, command: &Command) -> String {
    if matches!(value, DeValue::Table(_)) && option_named(command, key).is_none() {
        return format!("`{key}` is a table; options stand at the top level, without any");
    }
    let spelt = key.replace('_', "-").to_lowercase();
    let likeness = |name: &str| strsim::jaro_winkler(&spelt, name);
    let names = command.get_arguments().filter_map(Arg::get_long).filter(|name| !only_outside_files(name));
    match names.max_by(|a, b| likeness(a).total_cmp(&likeness(b))).filter(|name| likeness(name) >= LIKE_ENOUGH) {
        Some(nearest) => format!("unknown key `{key}`; did you mean `{nearest}`?"),
        None => format!("unknown key `{key}`; `infera-router --help` lists the names"),
    }
}

fn takes_json(option: &Arg) -> bool {
    option.get_value_names().is_some_and(|names| names.iter().any(|name| name == "JSON"))
}

fn scalar(key: &str, value: &DeValue<'_>) -> Result<String, String> {
    match value {
        DeValue::String(text) => Ok(text.to_string()),
        DeValue::Boolean(value) => Ok(value.to_string()),
        DeValue::Integer(number) => i128::from_str_radix(number.as_str(), number.radix())
            .map(|number| number.to_string())
            .map_err(|_| format!("`{key} = {number}` is out of range")),
        DeValue::Float(number) => Ok(number.as_str().to_owned()),
        other => Err(format!("`{key}` is a {}; write a string, a number or a boolean", other.type_str())),
    }
}

/// A TOML value as the JSON that an option takes.
fn json(value: &DeValue<'_>) -> Result<serde_json::Value, String> {
    Ok(match value {
        DeValue::Boolean(value) => (*value).into(),
        DeValue::Integer(number) => i64::from_str_radix(number.as_str(), number.radix())
            .map_err(|_| format!("{number} does not fit 64 bits"))?
            .into(),
        DeValue::Float(number) => number.as_str().parse::<f64>().map_err(|error| error.to_string())?.into(),
        DeValue::Array(values) => values.iter().map(|value| json(value.get_ref())).collect::<Result<_, _>>()?,
        DeValue::Table(table) => serde_json::Value::Object(
            table
                .iter()
                .map(|(key, value)| Ok((key.get_ref().to_string(), json(value.get_ref())?)))
                .collect::<Result<_, String>>()?,
        ),
        DeValue::String(text) => text.to_string().into(),
        DeValue::Datetime(time) => time.to_string().into(),
    })
}

/// The same rule as for the flag, by the flag's own definition.
fn check(option: &Arg, name: &str, value: &str) -> Result<(), String> {
    let alone = Command::new("file").no_binary_name(true).arg(option.clone());
    let Err(error) = alone.try_get_matches_from([format!("--{name}={value}")]) else { return Ok(()) };
    if let Some(ContextValue::Strings(known)) = error.get(ContextKind::ValidValue) {
        return Err(format!("`{name} = {value}`: write {}", known.join(" or ")));
    }
    let text = error.to_string();
    let reason = text.lines().next().unwrap_or_default().rsplit("': ").next().unwrap_or_default();
    Err(format!("`{name} = {value}`: {reason}"))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::config::Cli;

    #[track_caller]
    fn check(text: &str, entries: &[(&str, &[&str], usize)], problems: &[&str]) {
        let read = parse("r.toml", text, &Cli::command());
        let found: Vec<_> = read
            .entries
            .iter()
            .map(|it| (it.name.as_str(), it.values.iter().map(String::as_str).collect::<Vec<_>>(), it.line))
            .collect();
        assert_eq!(found, entries.iter().map(|it| (it.0, it.1.to_vec(), it.2)).collect::<Vec<_>>(), "{text}");
        assert_eq!(read.problems.len(), problems.len(), "{:#?}", read.problems);
        for (found, expected) in read.problems.iter().zip(problems) {
            assert!(found.contains(expected), "`{expected}` is not in `{found}`");
        }
    }

    #[test]
    fn every_kind_of_value() {
        check("", &[], &[]);
        check(
            "# ours\nport = 8_001\nhost = \"::1\"\nkv-overlap-weight = 2.5\nkv-self-heal = true\n\
             worker = [\"http://h:1\",\n  \"http://h:2,model=m\"]\nmax-body-bytes = 0x10\n",
            &[
                ("port", &["8001"], 2),
                ("host", &["::1"], 3),
                ("kv-overlap-weight", &["2.5"], 4),
                ("kv-self-heal", &["true"], 5),
                ("worker", &["http://h:1", "http://h:2,model=m"], 6),
                ("max-body-bytes", &["16"], 8),
            ],
            &[],
        );
        check("worker = 'http://h:1'", &[("worker", &["http://h:1"], 1)], &[]);
        check("worker = []", &[("worker", &[], 1)], &[]);
        // An alias counts as the name.
        check("kv-tokenizer-path = '/m'", &[("router-tokenizer-path", &["/m"], 1)], &[]);
        let kwargs = r#"{"enable_thinking":false,"n":[1,2.5,"x"]}"#;
        let entry = [("kv-default-chat-template-kwargs", &[kwargs][..], 1)];
        check("kv-default-chat-template-kwargs = { enable_thinking = false, n = [1, 2.5, 'x'] }", &entry, &[]);
    }

    #[test]
    fn b60_mistakes_have_their_line_and_come_all_at_once() {
        check(
            "port = 70000\n\nkv_overlap_weight = 1\nshards = 'two'\nworkr = []\nhost = 'h'\nzzz = 1\n",
            &[("host", &["h"], 6)],
            &[
                "r.toml:1: `port = 70000`: 70000 is not in 0..=65535",
                "r.toml:3: unknown key `kv_overlap_weight`; did you mean `kv-overlap-weight`?",
                "r.toml:4: `shards = two`: invalid digit",
                "r.toml:5: unknown key `workr`; did you mean `worker`?",
                "r.toml:7: unknown key `zzz`; `infera-router --help`",
            ],
        );
        check("[routing]\nport = 1\n", &[], &["r.toml:1: `routing` is a table"]);
        check("port = [1]\nhost = 1979-05-27\n", &[], &["r.toml:1: `port` takes one value", "r.toml:2: `host` is a "]);
        check("port = 99999999999999999999999999999999999999999\n", &[], &["r.toml:1: `port = "]);
        check("config = 'x'\ncheck-config = true\nhelp = 1\n", &[], &[":1: ", ":2: ", ":3: "]);
        check("kv-self-heal = 'yes'\n", &[], &["r.toml:1: `kv-self-heal = yes`: write true or false"]);
        let twice = "router-tokenizer-path = 'a'\nkv-tokenizer-path = 'b'\n";
        let read = parse("r.toml", twice, &Cli::command());
        assert_eq!((read.entries.len(), read.problems.len()), (1, 1), "{:?}", read.problems);
    }

    #[test]
    fn broken_syntax_is_told_by_line_beside_other_mistakes() {
        let read = parse("r.toml", "port = \nprot = 1\nhost = \"h\nport = 2\n", &Cli::command());
        let at = |line: usize| read.problems.iter().any(|problem| problem.starts_with(&format!("r.toml:{line}: ")));
        assert!(at(1) && at(2) && at(3), "{:#?}", read.problems);
        let read = parse("r.toml", "host = 0.0.0.0\nport = 1\nlog-level = info\n", &Cli::command());
        let hinted = |line: usize| {
            read.problems.iter().any(|problem| {
                problem.starts_with(&format!("r.toml:{line}: "))
                    && problem.ends_with("; text stands in quotes, as in host = \"0.0.0.0\"")
            })
        };
        assert!(read.problems.len() == 2 && hinted(1) && hinted(3), "{:?}", read.problems);
        let read = parse("r.toml", "port = 1\nport = 2\n", &Cli::command());
        assert_eq!(read.problems.len(), 1, "{:?}", read.problems);
        assert!(read.problems[0].starts_with("r.toml:2: duplicate key"), "{:?}", read.problems);
        assert!(!read.problems[0].contains("quotes"), "{:?}", read.problems);
    }

    #[test]
    fn files_that_cannot_be_read() {
        let directory = tempfile::tempdir().unwrap();
        let missing = directory.path().join("none.toml");
        assert!(read(&missing, &Cli::command()).problems[0].contains("none.toml: No such file"));
        let long = directory.path().join("long.toml");
        std::fs::write(&long, vec![b'#'; CONFIG_FILE_BYTES_MAX as usize + 1]).unwrap();
        assert!(read(&long, &Cli::command()).problems[0].contains("longer than"));
        let binary = directory.path().join("binary.toml");
        std::fs::write(&binary, [0xff, 0xfe]).unwrap();
        assert_eq!(read(&binary, &Cli::command()).problems.len(), 1);
    }
}
