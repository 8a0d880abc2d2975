//! A headless Chromium.

use std::process::Command;

/// Ready for the page that it is to show; nothing, said loudly, where there is none.
pub fn browser() -> Option<Command> {
    let names = ["chromium-headless-shell", "chromium", "google-chrome"];
    let search = std::env::var_os("PATH").unwrap_or_default();
    let found = names
        .iter()
        .flat_map(|name| std::env::split_paths(&search).map(move |directory| directory.join(name)))
        .find(|path| path.is_file());
    let Some(path) = found else {
        let message = "NOT RUN: no Chromium (Debian: chromium-headless-shell)";
        assert!(std::env::var_os("INFERA_REQUIRE_BROWSER").is_none_or(|value| value != "1"), "{message}");
        eprintln!("{message}");
        return None;
    };
    let mut command = Command::new(path);
    // Containers have no user namespaces for its sandbox, and little shared memory.
    command.args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]);
    Some(command)
}

/// The document of `url` as it stands after some seconds of the browser's own clock.
pub fn document(url: &str) -> Option<String> {
    let output =
        browser()?.args(["--virtual-time-budget=5000", "--dump-dom"]).arg(url).output().expect("the browser starts");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(text)
}
