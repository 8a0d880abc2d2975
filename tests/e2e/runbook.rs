//! The runbook names numbers that exist: on the page of a running router or, where something has to happen first, in the code.

use std::collections::BTreeSet;
use std::path::Path;

use crate::support::router::router;
use crate::support::worker::json_worker;

/// Every word of `text` that looks like a metric's name; the crate's own name in log targets is none.
fn names(text: &str) -> BTreeSet<String> {
    text.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_')
        .filter(|word| word.starts_with("infera_") && !word.ends_with('_') && *word != "infera_router")
        .map(str::to_owned)
        .collect()
}

/// String literals of the code, tests apart.
fn literals(directory: &Path, found: &mut String) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            literals(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(&path).unwrap();
            let code = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default().to_owned();
            let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
            lines.flat_map(|line| line.split('"').skip(1).step_by(2)).for_each(|literal| {
                found.push_str(literal);
                found.push('\n');
            });
        }
    }
}

#[test]
fn every_number_of_the_runbook_exists() {
    let top = Path::new(env!("CARGO_MANIFEST_DIR"));
    let runbook = names(&std::fs::read_to_string(top.join("tuning/RUNBOOK.md")).unwrap());
    assert!(runbook.len() > 40, "{runbook:?}");
    let worker = json_worker(r#"{"usage":{"prompt_tokens":3,"completion_tokens":2}}"#);
    let router = router().worker(worker.address).args(&["--session-affinity", "both", "--kv-self-heal"]).ready();
    assert_eq!(router.post("/v1/completions", r#"{"model":"m","prompt":[1,2,3]}"#).status, 200);
    let page = names(&router.get("/metrics").text());
    let shown = runbook.intersection(&page).count();
    assert!(2 * shown > runbook.len(), "only {shown} of {} are on the page of a router at work", runbook.len());
    let mut code = String::new();
    literals(&top.join("src"), &mut code);
    let known: BTreeSet<_> = code.lines().map(str::to_owned).chain(page).collect();
    let unknown: Vec<_> = runbook.difference(&known).collect();
    assert!(unknown.is_empty(), "no such metric: {unknown:?}");
}
