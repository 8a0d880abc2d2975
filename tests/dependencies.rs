//! The dependency tree by the rules of `deny.toml`: licences, sources, one version of what must be one; and unsafe code
//! of our own only where the design allows it.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Packages of the lock file that are built for Linux.
fn packages() -> Vec<Value> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--locked"])
        .args(["--filter-platform", "x86_64-unknown-linux-gnu"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let packages = std::mem::take(metadata["packages"].as_array_mut().unwrap());
    assert!(packages.len() > 50);
    packages
}

fn rules() -> toml::Table {
    std::fs::read_to_string(root().join("deny.toml")).unwrap().parse().unwrap()
}

fn strings<'a>(rules: &'a toml::Table, section: &str, key: &str) -> Vec<&'a str> {
    rules[section][key].as_array().unwrap().iter().map(|value| value.as_str().unwrap()).collect()
}

#[test]
fn licences_are_allowed_ones() {
    let rules = rules();
    let allowed: Vec<spdx::Licensee> =
        strings(&rules, "licenses", "allow").into_iter().map(|name| spdx::Licensee::parse(name).unwrap()).collect();
    let mut faults = Vec::new();
    for package in packages() {
        let name = package["name"].as_str().unwrap();
        let Some(license) = package["license"].as_str() else {
            faults.push(format!("{name} names no licence"));
            continue;
        };
        // Old manifests write `A/B` for `A OR B`.
        let expression = spdx::Expression::parse_mode(license, spdx::ParseMode::LAX).unwrap();
        if !expression.evaluate(|wanted| allowed.iter().any(|licence| licence.satisfies(wanted))) {
            faults.push(format!("{name}: {license}"));
        }
    }
    assert!(faults.is_empty(), "not allowed by deny.toml: {}", faults.join(", "));
}

#[test]
fn everything_comes_from_the_one_registry() {
    let rules = rules();
    let allowed = strings(&rules, "sources", "allow-registry");
    for package in packages() {
        let Some(source) = package["source"].as_str() else { continue };
        let registry =
            source.strip_prefix("registry+").unwrap_or_else(|| panic!("{} is from {source}", package["name"]));
        assert!(allowed.contains(&registry), "{} is from {source}", package["name"]);
    }
}

#[test]
fn what_must_be_one_is_one() {
    let mut versions: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for package in packages() {
        let text = |key: &str| package[key].as_str().unwrap().to_owned();
        versions.entry(text("name")).or_default().push(text("version"));
    }
    for name in
        ["monoio", "tokio", "http", "bytes", "mimalloc", "libmimalloc-sys", "arc-swap", "zmq", "tokenizers", "rustix"]
    {
        assert_eq!(versions[name].len(), 1, "{name}: {:?}", versions[name]);
    }
}

/// The workspaces beside this one have lock files of their own, which no build here would find stale.
#[test]
fn other_lock_files_name_every_dependency() {
    let read = |path: &str| std::fs::read_to_string(root().join(path)).unwrap().parse::<toml::Table>().unwrap();
    for workspace in ["tests/fuzz/coverage", "bench/dynamo"] {
        let lock = read(&format!("{workspace}/Cargo.lock"));
        for (package, manifest) in [("infera-router", "Cargo.toml"), ("infera-shards", "shards/Cargo.toml")] {
            let packages = lock["package"].as_array().unwrap();
            let entry = packages.iter().find(|entry| entry["name"].as_str() == Some(package)).unwrap();
            // A name may be followed by its version.
            let is_locked = |name: &str| {
                let mut listed = entry["dependencies"].as_array().unwrap().iter().filter_map(toml::Value::as_str);
                listed.any(|dependency| dependency.split(' ').next() == Some(name))
            };
            let manifest = read(manifest);
            let dependencies = manifest["dependencies"].as_table().unwrap();
            let is_optional = |value: &toml::Value| value.get("optional").and_then(toml::Value::as_bool) == Some(true);
            let missing: Vec<_> =
                dependencies.iter().filter(|(name, value)| !is_optional(value) && !is_locked(name)).collect();
            assert!(missing.is_empty(), "{workspace}: `cargo update --workspace` adds {missing:?}");
        }
    }
}

/// The lint denies it everywhere; this is where it may be allowed again.
#[test]
fn unsafe_code_stands_in_one_file() {
    let mut open = ["src", "shards", "loadgen", "bench", "tests"].map(|top| root().join(top)).to_vec();
    let mut found = Vec::new();
    while let Some(directory) = open.pop() {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                if path.file_name().is_some_and(|name| name != "target") {
                    open.push(path);
                }
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = std::fs::read_to_string(&path).unwrap();
                if text.contains(concat!("unsafe ", "{")) || text.contains(concat!("unsafe ", "fn")) {
                    found.push(path.strip_prefix(root()).unwrap().display().to_string());
                }
            }
        }
    }
    assert_eq!(found, ["shards/src/raw.rs"]);
}
