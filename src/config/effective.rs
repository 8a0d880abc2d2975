//! The settings in force and where each came from: the one place that whoever shows them asks. Credentials inside URLs are
//! left out, and keys are in files, of which only the path is a setting.

use std::fmt;
use std::sync::Arc;

use arc_swap::ArcSwap;
use clap::parser::ValueSource;
use clap::{ArgMatches, Command};

use super::Config;
use super::file::Entry;

/// One option of the server.
#[derive(Clone, PartialEq, Eq)]
pub struct Setting {
    /// Long name without dashes.
    pub name: String,
    /// As given; values of a repeated option in order. Empty: not set. May hold credentials.
    pub(super) values: Vec<String>,
    pub source: Source,
    /// The variable that sets it, where there is one.
    pub variable: Option<String>,
}

/// The settings in force for whoever shows them while the router runs; follows reloads. Clones see the same.
#[derive(Clone)]
pub struct Effective(Arc<ArcSwap<Vec<Setting>>>);

impl Effective {
    pub fn of(config: &Config) -> Self {
        Self(Arc::new(ArcSwap::from_pointee(config.effective().to_vec())))
    }

    /// In the order of their declaration.
    pub fn settings(&self) -> Arc<Vec<Setting>> {
        self.0.load_full()
    }

    /// For programs: `{"settings":[{"name","values","source"}]}`, credentials left out.
    pub fn json(&self) -> serde_json::Value {
        let settings = self.settings();
        let settings = settings.iter().map(|setting| {
            let (name, source) = (&setting.name, setting.source.to_string());
            serde_json::json!({"name": name, "values": setting.shown().collect::<Vec<_>>(), "source": source})
        });
        serde_json::json!({"settings": settings.collect::<Vec<_>>()})
    }

    pub(crate) fn follow(&self, config: &Config) {
        self.0.store(Arc::new(config.effective().to_vec()));
    }
}

/// Where a value came from, by precedence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    Flag,
    Environment,
    /// The line of the configuration file, from 1.
    File(usize),
    Default,
}

impl Setting {
    /// The values that may be shown.
    pub fn shown(&self) -> impl Iterator<Item = String> + '_ {
        self.values.iter().map(|value| redact(value))
    }

    /// Where to look for a value that is wrong; nothing for a flag, which is at hand, and for a default.
    pub(super) fn place(&self, file: &str) -> Option<String> {
        match self.source {
            Source::Environment => self.variable.clone(),
            Source::File(line) => Some(format!("{file}:{line}")),
            Source::Flag | Source::Default => None,
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Flag => f.write_str("flag"),
            Source::Environment => f.write_str("environment"),
            Source::File(line) => write!(f, "file, line {line}"),
            Source::Default => f.write_str("default"),
        }
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Setting { name, source, .. } = self;
        match self.values.iter().all(String::is_empty) {
            true => write!(f, "{name} is not set ({source})"),
            false => write!(f, "{name} = {} ({source})", self.shown().collect::<Vec<_>>().join(" ")),
        }
    }
}

impl fmt::Debug for Setting {
    /// The redacted form: a derived one would print what `Display` hides.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// Every option of `command` in the order of its declaration. `file`: what the configuration file says; clap sees it as
/// defaults.
pub(super) fn settings(command: &Command, matches: &ArgMatches, file: &[Entry]) -> Vec<Setting> {
    let mut settings = Vec::new();
    for argument in command.get_arguments() {
        let (Some(name), id) = (argument.get_long(), argument.get_id().as_str()) else { continue };
        if matches!(id, "help" | "version" | "check_config") {
            continue;
        }
        let values = match matches.get_raw(id) {
            Some(values) => values.map(|value| value.to_string_lossy().into_owned()).collect(),
            None => Vec::new(),
        };
        let source = match matches.value_source(id) {
            Some(ValueSource::CommandLine) => Source::Flag,
            Some(ValueSource::EnvVariable) => Source::Environment,
            _ => match file.iter().find(|entry| entry.name == name) {
                Some(entry) => Source::File(entry.line),
                None => Source::Default,
            },
        };
        let variable = argument.get_env().map(|variable| variable.to_string_lossy().into_owned());
        settings.push(Setting { name: name.to_owned(), values, source, variable });
    }
    settings
}

/// Replaces what stands between `//` and the last `@` in every URL of a comma-separated value. A password may
/// hold `/` and `?`, so those do not end the search: hiding too much is the better mistake.
pub(super) fn redact(value: &str) -> String {
    let mut out = String::with_capacity(value.len());
    let mut rest = value;
    while let Some(start) = rest.find("//") {
        let (before, authority) = rest.split_at(start + 2);
        let end = authority.find(',').unwrap_or(authority.len());
        out.push_str(before);
        match authority[..end].rfind('@') {
            Some(at) => out.push_str(&format!("***{}", &authority[at..end])),
            None => out.push_str(&authority[..end]),
        }
        rest = &authority[end..];
    }
    out.push_str(rest);
    out
}
