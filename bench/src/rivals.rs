//! The proxies of a comparison: how each is configured, started, and known to be ready.
//!
//! Owns command lines and generated configuration. Never measures.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use loadgen::sibling;

use crate::load::probe;
use crate::machine::{Cores, Interrupt};
use crate::process::Process;

/// The yardstick: every ratio is taken to its figure of the same round.
pub const YARDSTICK: &str = "nginx";

/// The router with two legs per request; its figure of merit is the ratio to [`ROUTER`].
pub const ROUTER_PAIR: &str = "infera-router-pd";

/// The subject of the project's own goals.
pub const ROUTER: &str = "infera-router";

const READY_PATIENCE: Duration = Duration::from_secs(30);

/// Descriptors that a proxy needs for other things than connections.
const DESCRIPTORS_APART: u64 = 100;
/// Where there is no limit: nginx sets its tables up for as many connections as it is told.
const DESCRIPTORS_MAX: u64 = 200_000;

/// One proxy to compare.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rival {
    pub name: String,
    pub kind: Kind,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    Nginx(PathBuf),
    Haproxy(PathBuf),
    /// The project's router with its address flags, round-robin on one shard.
    Router(PathBuf),
    /// The same with every request shared by a prefill and a decode worker; the backend plays both.
    RouterPair(PathBuf),
    /// A shell command line with `{listen}` and `{upstream}` as `host:port`, `{port}` and `{upstream_port}` as numbers.
    Command(String),
}

impl FromStr for Rival {
    type Err = anyhow::Error;

    /// `name=command line with {listen} (or {port}) and {upstream} (or {upstream_port})`.
    fn from_str(text: &str) -> Result<Rival> {
        let (name, command) = text.split_once('=').context("expected name=command line")?;
        ensure!(!name.is_empty() && !name.contains(char::is_whitespace), "a rival's name is one word");
        ensure!(command.contains("{listen}") || command.contains("{port}"), "the command needs {{listen}} or {{port}}");
        ensure!(command.contains("{upstream"), "the command needs {{upstream}} or {{upstream_port}}");
        Ok(Rival { name: name.to_owned(), kind: Kind::Command(command.to_owned()) })
    }
}

/// A started proxy that has answered a request correctly.
pub struct Running {
    pub name: String,
    pub address: SocketAddr,
    pub process: Process,
}

/// `program` in PATH or where Debian keeps servers, or a line that says which package brings it.
pub fn find_tool(program: &str, package: &str) -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let directories = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/usr/local/sbin".into()]);
    for directory in directories {
        let candidate = directory.join(program);
        if candidate.is_file() {
            return Ok(candidate);
        }
    }
    bail!("{program} not found: apt-get install {package}")
}

/// Command line of a router with one shard, one encoder thread and a tokenizer, in front of `{upstream}` as model `m`.
/// `further` are more arguments, with a space in front.
pub fn kv_aware_router(program: &Path, tokenizer: &Path, further: &str) -> String {
    format!(
        "RUST_LOG=warn exec '{}' --router-policy kv-aware --router-tokenizer-path '{}' --shards 1 --encoder-threads 1 \
         --host 127.0.0.1 --port {{port}} --worker http://{{upstream}},model=m{further}",
        program.display(),
        tokenizer.display()
    )
}

/// The router's release binary of this source tree, brought up to date.
pub fn build_router() -> Result<PathBuf> {
    build("infera-router")
}

/// The release binary that a package of this source tree is named after, brought up to date, so that an old one is never
/// measured.
pub fn build(package: &str) -> Result<PathBuf> {
    ensure!(!cfg!(debug_assertions), "a debug build measures nothing: `cargo run --release`, or name the programs");
    sibling::find_or_build(&[env!("CARGO_PKG_NAME")], package, package, &mut |line| eprintln!("{line}"))
}

impl Rival {
    /// Starts this proxy in front of `upstream` and waits until one `request` through it gives exactly `payload`.
    pub fn start(
        &self,
        upstream: SocketAddr,
        directory: &Path,
        cores: Cores,
        (request, payload): (&[u8], &[u8]),
        interrupt: &Interrupt,
    ) -> Result<Running> {
        let address = free_address()?;
        let directory = directory.join(format!("{}-{}", self.name, address.port()));
        fs::create_dir(&directory)?;
        let command = self.command(address, upstream, &directory)?;
        let mut process =
            Process::start(command, cores, &directory.join("output.log")).with_context(|| self.name.clone())?;
        let deadline = Instant::now() + READY_PATIENCE;
        loop {
            interrupt.check()?;
            process.check_alive().with_context(|| self.name.clone())?;
            match probe(address, request, payload, Duration::from_secs(2)) {
                Ok(()) => break,
                Err(error) if Instant::now() > deadline => {
                    let tail = process.log_tail();
                    return Err(error.context(format!("{} not ready; the end of its output:\n{tail}", self.name)));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(20)),
            }
        }
        process.pin(cores.proxy)?;
        Ok(Running { name: self.name.clone(), address, process })
    }

    fn command(&self, listen: SocketAddr, upstream: SocketAddr, directory: &Path) -> Result<Command> {
        let mut command;
        match &self.kind {
            Kind::Nginx(program) => {
                let file = directory.join("nginx.conf");
                fs::write(&file, nginx_configuration(listen, upstream, directory))?;
                command = Command::new(program);
                command.arg("-p").arg(directory).arg("-c").arg(file).args(["-e", "stderr"]);
            }
            Kind::Haproxy(program) => {
                let file = directory.join("haproxy.cfg");
                fs::write(&file, haproxy_configuration(listen, upstream))?;
                command = Command::new(program);
                command.args(["-db", "-f"]).arg(file);
            }
            Kind::Router(program) | Kind::RouterPair(program) => {
                command = Command::new(program);
                command.env("RUST_LOG", "warn");
                command.args(["--router-policy", "round-robin", "--shards", "1"]);
                command.args(["--host", &listen.ip().to_string(), "--port", &listen.port().to_string()]);
                let worker = format!("http://{upstream},model=m");
                if matches!(self.kind, Kind::Router(_)) {
                    command.arg("--worker").arg(worker);
                } else {
                    let protocol = "protocol=sglang-bootstrap";
                    // Two spellings of the backend: one address would be one worker.
                    let prefill = format!("http://localhost:{},model=m,role=prefill", upstream.port());
                    command.arg("--worker").arg(format!("{prefill},{protocol},bootstrap={upstream}"));
                    command.arg("--worker").arg(format!("{worker},role=decode,{protocol}"));
                }
            }
            Kind::Command(line) => {
                let line = line
                    .replace("{listen}", &listen.to_string())
                    .replace("{port}", &listen.port().to_string())
                    .replace("{upstream}", &upstream.to_string())
                    .replace("{upstream_port}", &upstream.port().to_string());
                command = Command::new("sh");
                command.arg("-c").arg(line);
            }
        }
        Ok(command)
    }
}

/// Connections that a proxy can hold, both sides together: it inherits this process's limit.
fn connections_max() -> u64 {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(DESCRIPTORS_MAX);
    limit.min(DESCRIPTORS_MAX).saturating_sub(DESCRIPTORS_APART).max(1)
}

/// A free port may be taken by another process before the proxy binds it; the start then fails with the proxy's own words.
fn free_address() -> Result<SocketAddr> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?)
}

/// One worker, keep-alive on both sides without a request limit, nothing buffered or logged.
fn nginx_configuration(listen: SocketAddr, upstream: SocketAddr, directory: &Path) -> String {
    // As root the worker would drop to a user that may not enter the temporary directory.
    let user = if rustix::process::geteuid().is_root() { "user root;" } else { "" };
    let temp = |name: &str| format!("{name}_temp_path {}/{name};", directory.display());
    let temps: Vec<String> = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"].map(temp).into();
    format!(
        "daemon off; {user} worker_processes 1; pid {}/nginx.pid; error_log stderr error;\n\
         worker_rlimit_nofile {};\n\
         events {{ worker_connections {}; use epoll; }}\n\
         http {{\n\
         {}\n\
         access_log off; keepalive_requests 1000000000; keepalive_timeout 75s;\n\
         client_max_body_size 64m; client_body_buffer_size 1m; tcp_nodelay on;\n\
         upstream backend {{ server {upstream}; keepalive 512; keepalive_requests 1000000000; }}\n\
         server {{ listen {listen} backlog=4096; location / {{\n\
         proxy_pass http://backend; proxy_http_version 1.1; proxy_set_header Connection \"\";\n\
         proxy_buffering off; proxy_read_timeout 1h; }} }}\n\
         }}\n",
        directory.display(),
        connections_max() + DESCRIPTORS_APART,
        connections_max(),
        temps.join(" "),
    )
}

/// One thread, keep-alive and connection reuse on both sides; without `http-no-delay` it holds SSE chunks back.
fn haproxy_configuration(listen: SocketAddr, upstream: SocketAddr) -> String {
    format!(
        "global\n  nbthread 1\n  maxconn {}\n\
         defaults\n  mode http\n  option http-no-delay\n  http-reuse always\n\
         \x20 timeout connect 5s\n  timeout client 1h\n  timeout server 1h\n  timeout http-keep-alive 75s\n\
         frontend front\n  bind {listen} backlog 4096\n  default_backend back\n\
         backend back\n  server one {upstream}\n",
        connections_max() / 2
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rivals_from_text() {
        let rival: Rival = "mine=/bin/p --listen {listen} --to={upstream}".parse().unwrap();
        assert_eq!(rival.name, "mine");
        assert_eq!(rival.kind, Kind::Command("/bin/p --listen {listen} --to={upstream}".to_owned()));
        for wrong in
            ["mine", "=x {listen} {upstream}", "mine=x {listen}", "mine=x {upstream}", "a b=x {port} {upstream}"]
        {
            assert!(wrong.parse::<Rival>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_missing_tool_names_its_package() {
        let error = find_tool("no-such-tool-at-all", "its-package").unwrap_err().to_string();
        assert!(error.contains("apt-get install its-package"), "{error}");
    }
}
