//! The settings in force and where each came from, for the log. Credentials inside URLs are left out.

use std::fmt;

use clap::parser::ValueSource;
use clap::{ArgMatches, Command};

/// One option of the server.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Setting {
    /// Long name without dashes.
    pub name: String,
    /// As given; values of a repeated option in order. Empty: not set.
    pub values: Vec<String>,
    pub source: Source,
    /// The option's built-in values; compared against by `validate`.
    pub defaults: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    Flag,
    Environment,
    Default,
}

impl Source {
    const fn as_str(self) -> &'static str {
        match self {
            Source::Flag => "flag",
            Source::Environment => "environment",
            Source::Default => "default",
        }
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let source = self.source.as_str();
        if self.values.is_empty() {
            return write!(f, "{} is not set ({source})", self.name);
        }
        let values: Vec<_> = self.values.iter().map(|value| redact(value)).collect();
        write!(f, "{} = {} ({source})", self.name, values.join(" "))
    }
}

impl fmt::Debug for Setting {
    /// The redacted form: a derived one would print what `Display` hides.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// `{"settings":[{"name","values","source"}]}`, credentials left out.
pub(super) fn json(settings: &[Setting]) -> serde_json::Value {
    let settings = settings.iter().map(|Setting { name, values, source, .. }| {
        let values: Vec<_> = values.iter().map(|value| redact(value)).collect();
        serde_json::json!({"name": name, "values": values, "source": source.as_str()})
    });
    serde_json::json!({"settings": settings.collect::<Vec<_>>()})
}

/// Every option of `command` in the order of its declaration.
pub(super) fn settings(command: &Command, matches: &ArgMatches) -> Vec<Setting> {
    let mut settings = Vec::new();
    for argument in command.get_arguments() {
        let (Some(name), id) = (argument.get_long(), argument.get_id().as_str()) else { continue };
        if matches!(id, "help" | "version") {
            continue;
        }
        let values = match matches.get_raw(id) {
            Some(values) => values.map(|value| value.to_string_lossy().into_owned()).collect(),
            None => Vec::new(),
        };
        let source = match matches.value_source(id) {
            Some(ValueSource::CommandLine) => Source::Flag,
            Some(ValueSource::EnvVariable) => Source::Environment,
            _ => Source::Default,
        };
        let defaults = argument.get_default_values().iter().map(|value| value.to_string_lossy().into_owned()).collect();
        settings.push(Setting { name: name.to_owned(), values, source, defaults });
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
