//! Owns finding this workspace's other programs, which this one knows by name only. Never starts them, but for cargo.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// The binary of this name beside this program. Started by cargo, it is built or brought up to date first, in the profile
/// of this program; otherwise it must be there. `selected`: packages that are selected besides its own. Which features a
/// shared dependency has is decided by all that are, so a program started by `cargo run -p A` that names A here does not
/// have the dependencies of both compiled twice.
pub fn find_or_build(selected: &[&str], package: &str, binary: &str, say: &mut dyn FnMut(&str)) -> Result<PathBuf> {
    let own = std::env::current_exe()?;
    let directory = own.parent().context("this program is in no directory")?;
    let path = directory.join(binary);
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).parent().filter(|path| path.join("Cargo.toml").exists());
    if let (Some(cargo), Some(workspace)) = (std::env::var_os("CARGO"), workspace) {
        let profile = match directory.file_name().and_then(|name| name.to_str()) {
            Some("debug") | None => "dev",
            Some(name) => name,
        };
        say(&format!("building {binary} ({profile} profile); quick when it is up to date"));
        let mut build = Command::new(cargo);
        build.args(["build", "--profile", profile, "--bin", binary, "-p", package]).current_dir(workspace);
        for package in selected {
            build.args(["-p", package]);
        }
        if !build.status().context("starting cargo")?.success() {
            bail!("building {binary} failed");
        }
    }
    if !path.exists() {
        bail!(
            "no {binary} beside this program ({}); `cargo build --release -p {package} --bin {binary}` makes it",
            directory.display()
        );
    }
    Ok(path)
}
