//! `loadgen simulate` hands its arguments over to the program beside it, and says what is missing where there is none.

#![allow(clippy::unwrap_used)]

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, MutexGuard};

/// A program that is being written cannot be run, and a process that another test starts meanwhile holds it open.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// A directory with nothing but a copy of `loadgen`; gone with the test.
struct Alone(PathBuf, #[allow(dead_code)] MutexGuard<'static, ()>);

impl Alone {
    fn new(name: &str) -> Alone {
        let turn = ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let directory = std::env::temp_dir().join(format!("loadgen-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        std::fs::copy(env!("CARGO_BIN_EXE_loadgen"), directory.join("loadgen")).unwrap();
        Alone(directory, turn)
    }

    fn run(&self, arguments: &[&str]) -> Output {
        // With cargo in the environment it would build the real one.
        Command::new(self.0.join("loadgen")).args(arguments).env_remove("CARGO").output().unwrap()
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn write_program(path: &Path, text: &str) {
    std::fs::write(path, text).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn arguments_go_to_the_program_beside_and_its_exit_code_comes_back() {
    let alone = Alone::new("beside");
    write_program(&alone.0.join("simulate"), "#!/bin/sh\nprintf '%s\\n' \"$@\"\nexit 7\n");
    let output = alone.run(&["simulate", "--workload", "agents", "--rule", "kv-aware,weight=4", "--help"]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "--workload\nagents\n--rule\nkv-aware,weight=4\n--help\n");
    assert_eq!(output.status.code(), Some(7));
}

#[test]
fn without_that_program_it_says_how_to_make_it() {
    let output = Alone::new("alone").run(&["simulate", "--workload", "agents"]);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && text.contains("cargo build --release -p bench --bin simulate"), "{text}");
}
