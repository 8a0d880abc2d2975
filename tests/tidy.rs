//! The rules of the house that a compiler does not check: layering, file headers and lengths, banned words.

#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Layers of `src/`, lowest first. A module imports from its own line and from the lines above it.
const LAYERS: &[&[&str]] = &[
    &["hash", "worker", "fleet", "limits"],
    &["events"],
    &["index"],
    &["prompt"],
    &["route", "decode_demand", "load", "breaker"],
    &["pd", "api"],
    &["proxy"],
    &[
        "ingest",
        "discovery",
        "access_log",
        "admin",
        "config",
        "metrics",
        "inspect",
        "logging",
        "parity",
        "reload",
        "supervise",
    ],
];

/// Lines of a file without its tests.
const FILE_LINES_MAX: usize = 800;

/// The wiring file stays wiring.
const MAIN_LINES_MAX: usize = 150;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn rust_files(directory: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut open = vec![directory.to_owned()];
    while let Some(directory) = open.pop() {
        for entry in std::fs::read_dir(&directory).unwrap_or_else(|error| panic!("{}: {error}", directory.display())) {
            let path = entry.unwrap().path();
            if path.is_dir() {
                if path.file_name().is_some_and(|name| name != "target") {
                    open.push(path);
                }
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                files.push(path);
            }
        }
    }
    files.sort();
    assert!(!files.is_empty(), "no files below {}", directory.display());
    files
}

fn all_sources() -> Vec<PathBuf> {
    ["src", "shards", "loadgen", "bench", "tests"].iter().flat_map(|top| rust_files(&root().join(top))).collect()
}

/// The text before the file's tests.
fn without_tests(text: &str) -> &str {
    text.split("#[cfg(test)]\nmod ")
        .next()
        .unwrap_or(text)
        .split("#[cfg(test)]\npub(crate) mod ")
        .next()
        .unwrap_or(text)
}

fn relative(path: &Path) -> String {
    path.strip_prefix(root()).unwrap_or(path).display().to_string()
}

#[test]
fn modules_import_only_from_the_layers_below_them() {
    let layer_of: BTreeMap<&str, usize> =
        LAYERS.iter().enumerate().flat_map(|(layer, names)| names.iter().map(move |name| (*name, layer))).collect();
    let mut faults = Vec::new();
    for file in rust_files(&root().join("src")) {
        let inside = file.strip_prefix(root().join("src")).unwrap();
        let module = inside.iter().next().unwrap().to_str().unwrap().trim_end_matches(".rs");
        if matches!(module, "lib" | "main") {
            continue;
        }
        let Some(own) = layer_of.get(module) else {
            faults.push(format!("{}: module `{module}` stands in no layer", relative(&file)));
            continue;
        };
        let text = std::fs::read_to_string(&file).unwrap();
        let code: String = without_tests(&text)
            .lines()
            .filter(|line| !line.trim_start().starts_with("//"))
            .map(|line| format!("{line}\n"))
            .collect();
        for (at, _) in code.match_indices("crate::") {
            let name: String = code[at + 7..].chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            if layer_of.get(name.as_str()).is_some_and(|layer| layer > own) {
                faults.push(format!("{}: `{module}` must not know `{name}`", relative(&file)));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn shards_and_loadgen_know_nothing_of_the_router() {
    for (package, banned) in [("shards", vec!["infera_router"]), ("loadgen", vec!["infera_router", "infera_shards"])] {
        for file in rust_files(&root().join(package)) {
            let text = std::fs::read_to_string(&file).unwrap();
            for name in &banned {
                assert!(!text.contains(&format!("{name}::")), "{} imports {name}", relative(&file));
            }
        }
    }
}

#[test]
fn every_file_says_what_it_is_and_stays_short() {
    let mut faults = Vec::new();
    for file in all_sources() {
        let text = std::fs::read_to_string(&file).unwrap();
        if !text.starts_with("//!") {
            faults.push(format!("{}: does not start with `//!`", relative(&file)));
        }
        let lines = without_tests(&text).lines().count();
        let max = if relative(&file) == "src/main.rs" { MAIN_LINES_MAX } else { FILE_LINES_MAX };
        if lines > max {
            faults.push(format!("{}: {lines} lines, at most {max}", relative(&file)));
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn banned_words_have_replacements() {
    // (where, word, what to do instead); the words are split so that this file does not hold them.
    let bans: &[(&str, String, &str)] = &[
        ("src/proxy", ["Mu", "tex"].concat(), "shards share a view, atomics, and (for decode demand) one lock"),
        ("src/route", ["Mu", "tex"].concat(), "shards share a view, atomics, and (for decode demand) one lock"),
        ("src", ["TO", "DO"].concat(), "finish it or open an issue"),
        ("src", ["FIX", "ME"].concat(), "finish it or open an issue"),
        ("shards", ["TO", "DO"].concat(), "finish it or open an issue"),
        ("loadgen", ["TO", "DO"].concat(), "finish it or open an issue"),
        ("tests", ["#[ig", "nore"].concat(), "a test that nobody sees: make it run or delete it"),
        ("src", ["#[ig", "nore"].concat(), "a test that nobody sees: make it run or delete it"),
    ];
    let mut faults = Vec::new();
    for (directory, word, instead) in bans {
        for file in rust_files(&root().join(directory)) {
            let text = std::fs::read_to_string(&file).unwrap();
            if without_tests(&text).contains(word.as_str()) {
                faults.push(format!("{}: `{word}`: {instead}", relative(&file)));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// Whether a name is that of a test for a public field report: `b02_…`, `b02a_…`.
fn is_of_a_report(name: &str) -> bool {
    let Some((report, _)) = name.split_once('_') else { return false };
    let digits = report.strip_prefix('b').map(|rest| rest.trim_end_matches(|letter: char| letter.is_ascii_lowercase()));
    digits.is_some_and(|digits| digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_digit()))
}

#[test]
fn field_reports_have_the_tests_that_the_page_names() {
    let page = std::fs::read_to_string(root().join("tests/README.md")).unwrap();
    let mut tests = BTreeSet::new();
    for file in all_sources() {
        let text = std::fs::read_to_string(&file).unwrap();
        let names = text.match_indices("fn ").map(|(at, _)| &text[at + 3..]);
        tests.extend(names.filter_map(|rest| rest.split('(').next()).map(str::to_owned));
    }
    let mut faults = Vec::new();
    let rows = page.lines().filter(|line| line.starts_with("| ") && line.contains('`'));
    let named: BTreeSet<&str> = rows.clone().flat_map(|row| row.split('`').skip(1).step_by(2)).collect();
    for name in &named {
        let is_there = if name.contains('/') { root().join(name).exists() } else { tests.contains(*name) };
        if !is_there {
            faults.push(format!("tests/README.md: there is no test `{name}`"));
        }
    }
    for name in tests.iter().filter(|name| is_of_a_report(name) && !named.contains(name.as_str())) {
        faults.push(format!("tests/README.md: `{name}` is not in the table of the reports"));
    }
    assert!(rows.filter(|row| row.starts_with("| B")).count() >= 40, "a report without tests");
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn paths_named_in_the_pages_exist() {
    let mut faults = Vec::new();
    for page in
        ["README.md", "src/README.md", "CHANGELOG.md", "tests/README.md", "tuning/README.md", "tuning/RUNBOOK.md"]
    {
        let text = std::fs::read_to_string(root().join(page)).unwrap_or_else(|error| panic!("{page}: {error}"));
        for quoted in text.split('`').skip(1).step_by(2) {
            let is_path = ["src/", "shards/", "tests/", "bench/", "loadgen/", "tuning/"]
                .iter()
                .any(|top| quoted.starts_with(top));
            let plain = !quoted.contains([' ', '{', '*', '<']);
            if is_path && plain && !root().join(quoted.split("::").next().unwrap_or(quoted)).exists() {
                faults.push(format!("{page}: `{quoted}` does not exist"));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}
