//! Owns reports as files: one report of a run, or one of a demonstration with a run per policy. Never judges them.

use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;
use serde_json::Value;
use serde_json::ser::{Formatter, PrettyFormatter};

use super::model::{Figures, Fleet, RunReport, SCHEMA};

/// Reports whose `runs` hold the same figures under another name.
const DEMO_SCHEMA: &str = "loadgen.demo/2";

/// A run with what it is called where several are shown.
#[derive(Clone, Debug)]
pub struct Named {
    pub name: String,
    pub figures: Figures,
    pub fleet: Option<Fleet>,
    /// What the run was: target, workload, pace.
    pub about: Vec<(String, String)>,
    /// The whole document, for conditions.
    pub value: Value,
}

impl Named {
    /// # Errors
    /// A report that does not serialize.
    pub fn of_run(report: &RunReport, name: &str) -> Result<Named> {
        Named::read(serde_json::to_value(report)?, name)
    }

    fn read(value: Value, name: &str) -> Result<Named> {
        let report: RunReport = serde_json::from_value(value.clone())?;
        let name = report.name.unwrap_or_else(|| name.to_owned());
        let about = [("target", Value::String(report.target)), ("workload", report.workload), ("pace", report.pace)];
        let further = [("warm-up", report.warmup), ("limits", report.slo), ("clients", report.manners)];
        let about = about.into_iter().chain(further).filter(|(_, value)| !value.is_null());
        let about = about.map(|(what, value)| (what.to_owned(), plain(&value))).collect();
        Ok(Named { name, figures: report.figures, fleet: report.fleet, about, value })
    }
}

/// A value as one line of text without quotes and braces.
fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Object(members) => {
            let members = members.iter().filter(|(_, value)| !value.is_null());
            members.map(|(name, value)| format!("{name} {}", plain(value))).collect::<Vec<_>>().join(", ")
        }
        Value::Array(values) => values.iter().map(plain).collect::<Vec<_>>().join(" "),
        other => other.to_string(),
    }
}

/// The runs of one file, named by it.
///
/// # Errors
/// A file that cannot be read, is not JSON, or is not a report of this version.
pub fn load(path: &Path) -> Result<Vec<Named>> {
    let context = || format!("{}", path.display());
    let text = std::fs::read_to_string(path).with_context(context)?;
    let value: Value = serde_json::from_str(&text).with_context(context)?;
    let stem = path.file_stem().map_or_else(|| "run".into(), |stem| stem.to_string_lossy().into_owned());
    match value["schema"].as_str() {
        Some(SCHEMA) => Ok(vec![Named::read(value, &stem).with_context(context)?]),
        Some(DEMO_SCHEMA) => of_demo(&value, &stem).with_context(context),
        Some(other) => bail!("{}: schema {other:?}; this program reads {SCHEMA} and {DEMO_SCHEMA}", path.display()),
        None => bail!("{}: no report of loadgen (it has no \"schema\")", path.display()),
    }
}

fn of_demo(demo: &Value, stem: &str) -> Result<Vec<Named>> {
    let runs = demo["runs"].as_array().context("no runs")?;
    ensure!(!runs.is_empty(), "no runs");
    let run = |(number, run): (usize, &Value)| {
        let figures = serde_json::from_value(run.clone())?;
        let policy = run["policy"].as_str().map_or_else(|| number.to_string(), str::to_owned);
        let about = vec![("demonstration".to_owned(), plain(&demo["config"]))];
        Ok(Named { name: format!("{stem} {policy}"), figures, fleet: None, about, value: run.clone() })
    };
    runs.iter().enumerate().map(run).collect()
}

/// Gives runs of one name different ones.
pub fn with_distinct_names(mut runs: Vec<Named>) -> Vec<Named> {
    for index in 1..runs.len() {
        let (before, rest) = runs.split_at_mut(index);
        let is_taken = |name: &str| before.iter().any(|run| run.name == name);
        let name = rest[0].name.clone();
        let found = (2..).map(|number| format!("{name} ({number})")).find(|candidate| !is_taken(candidate));
        if is_taken(&name) {
            rest[0].name = found.unwrap_or(name);
        }
    }
    runs
}

/// Writes a document: an indented line per member, a list on one line however long.
///
/// # Errors
/// A file that cannot be written.
pub fn write_json(path: &Path, document: &impl Serialize) -> Result<()> {
    std::fs::write(path, to_text(document)?).with_context(|| format!("writing {}", path.display()))
}

fn to_text(document: &impl Serialize) -> Result<Vec<u8>> {
    let mut out = Vec::new();
    document.serialize(&mut serde_json::Serializer::with_formatter(&mut out, ListsInline::default()))?;
    out.push(b'\n');
    Ok(out)
}

/// serde_json's indented form, but for what is inside of lists.
#[derive(Default)]
struct ListsInline {
    pretty: PrettyFormatter<'static>,
    /// Lists that are open.
    depth: usize,
}

/// Forwards to the indented form outside of lists, and to the compact one inside.
macro_rules! outside_of_lists {
    ($($method:ident($($argument:ident: $kind:ty),*)),* $(,)?) => {
        $(fn $method<W: ?Sized + Write>(&mut self, writer: &mut W $(, $argument: $kind)*) -> std::io::Result<()> {
            match self.depth {
                0 => self.pretty.$method(writer $(, $argument)*),
                _ => serde_json::ser::CompactFormatter.$method(writer $(, $argument)*),
            }
        })*
    };
}

impl Formatter for ListsInline {
    outside_of_lists! {
        begin_object(), end_object(), begin_object_key(first: bool), begin_object_value(), end_object_value(),
    }

    fn begin_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
        self.depth += 1;
        writer.write_all(b"[")
    }

    fn end_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
        self.depth -= 1;
        writer.write_all(b"]")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn lists_stand_on_one_line() {
        let text =
            String::from_utf8(to_text(&json!({"a": {"b": [[1, 2], {"c": [], "d": 3}]}, "e": {}})).unwrap()).unwrap();
        assert_eq!(text, "{\n  \"a\": {\n    \"b\": [[1,2],{\"c\":[],\"d\":3}]\n  },\n  \"e\": {}\n}\n");
    }

    #[test]
    fn what_is_no_report_is_refused_by_name() {
        let directory = crate::demo::TemporaryDirectory::create().unwrap();
        let check = |text: &str, expected: &str| {
            let path = directory.0.join("x.json");
            std::fs::write(&path, text).unwrap();
            let error = format!("{:#}", load(&path).unwrap_err());
            assert!(error.contains(expected) && error.contains("x.json"), "{error}");
        };
        check("[1", "EOF");
        check("{}", "no report of loadgen");
        check(r#"{"schema": "loadgen.run/1"}"#, "loadgen.run/1");
        check(r#"{"schema": "loadgen.run/2"}"#, "missing field");
        check(r#"{"schema": "loadgen.demo/2", "runs": []}"#, "no runs");
        assert!(format!("{:#}", load(&directory.0.join("absent.json")).unwrap_err()).contains("absent.json"));
    }

    #[test]
    fn a_written_report_reads_back_whole() {
        let directory = crate::demo::TemporaryDirectory::create().unwrap();
        let path = directory.0.join("mine.json");
        let mut report = RunReport { schema: SCHEMA.into(), ..RunReport::default() };
        report.figures.ttft_ms.buckets = vec![(1.5, 3), (2.5, 4)];
        report.figures.timeline.ttft_p50_ms = vec![None, Some(3.0)];
        write_json(&path, &report).unwrap();
        let runs = load(&path).unwrap();
        assert_eq!((runs.len(), runs[0].name.as_str()), (1, "mine"));
        assert_eq!(runs[0].figures.ttft_ms, report.figures.ttft_ms);
        assert_eq!(runs[0].figures.timeline, report.figures.timeline);
        assert_eq!(runs[0].figures.ttft_ms.cumulative().collect::<Vec<_>>(), [(1.5, 3.0 / 7.0), (2.5, 1.0)]);
    }

    #[test]
    fn equal_names_are_told_apart() {
        let report = RunReport { name: Some("a".into()), ..RunReport::default() };
        let run = Named::of_run(&report, "x").unwrap();
        let names = with_distinct_names(vec![run.clone(), run.clone(), run]);
        assert_eq!(names.iter().map(|run| run.name.as_str()).collect::<Vec<_>>(), ["a", "a (2)", "a (3)"]);
    }
}
