//! Owns `loadgen simulate`: hands over to the program that has the router's decision code, which loadgen must not know.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};
use clap::Args;
use loadgen::sibling;

#[derive(Args)]
#[command(disable_help_flag = true)]
pub struct SimulateArguments {
    /// As `bench`'s `simulate` has them; `--help` lists them.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

/// Comes back only where there is nothing to hand over to.
pub fn run(arguments: SimulateArguments) -> Result<ExitCode> {
    let program = sibling::find_or_build(&[], "bench", "simulate", &mut |line| eprintln!("{line}"))?;
    let error = Command::new(&program).args(arguments.arguments).exec();
    Err(error).with_context(|| format!("starting {}", program.display()))
}
