//! Owns `loadgen fleet`: a description to running engines, their records to the terminal, an orderly end.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, mpsc};

use anyhow::{Context, Result};
use clap::Args;
use loadgen::engine::register::EtcdTarget;
use loadgen::fleet::{FleetSpec, Registrar, RunningFleet};
use loadgen::prompt::TextModel;

#[derive(Args)]
pub struct FleetArguments {
    /// A TOML file, or a line as in `4 mixed blocks=4096; 2 prefill protocol=vllm-nixl failures=kill@30+10:0`.
    description: String,
    /// Directory with tokenizer.json and tokenizer_config.json; the shipped tokenizer if absent.
    #[arg(long)]
    tokenizer_path: Option<PathBuf>,
    /// Write the registration records here for `--workers-file`; an empty list at the end.
    #[arg(long, conflicts_with = "etcd_endpoint")]
    workers_file: Option<PathBuf>,
    /// Register here (`host:port`), under a lease for each engine.
    #[arg(long)]
    etcd_endpoint: Option<String>,
    #[arg(long, default_value = "/infera/workers/")]
    etcd_prefix: String,
}

pub fn run(arguments: FleetArguments) -> Result<ExitCode> {
    let path = Path::new(&arguments.description);
    let spec = if path.extension().is_some_and(|extension| extension == "toml") {
        let text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
        FleetSpec::from_toml(&text)?
    } else {
        FleetSpec::from_line(&arguments.description)?
    };
    let text = match &arguments.tokenizer_path {
        Some(directory) => TextModel::from_directory(directory)?,
        None => TextModel::shipped()?,
    };
    let registrar = match (arguments.workers_file, arguments.etcd_endpoint) {
        (Some(path), _) => Registrar::File(path),
        (None, Some(endpoint)) => Registrar::Etcd(EtcdTarget { endpoint, prefix: arguments.etcd_prefix }),
        (None, None) => Registrar::None,
    };
    let mut fleet = RunningFleet::start(&spec, Arc::new(text), registrar)?;
    for (record, flag) in fleet.records().iter().zip(fleet.worker_flags()) {
        println!("{record}");
        println!("--worker {flag}");
    }
    let (stop, stopped) = mpsc::channel();
    // Ends with the process: it waits for a signal, and after one the fleet is gone.
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        if let Err(error) = super::wait_for_interrupt() {
            tracing::error!(%error, "signals cannot be waited for");
        }
        let _ = stop.send(());
    })?;
    fleet.run(&stopped, |action| {
        eprintln!("{:.1} s: engine {}: {:?}", action.at.as_secs_f64(), action.engine, action.change)
    })?;
    Ok(ExitCode::SUCCESS)
}
