//! Owns the command line of `loadgen`: flags to library calls, output, exit codes. Never measures by itself.
#![allow(clippy::print_stdout)]

mod cli;

use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    cli::main()
}
