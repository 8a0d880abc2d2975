//! `fetch_trace.sh` against a server on loopback that answers as told: what is whole and right is taken, nothing else ever
//! stands where the tools read.

#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::thread::JoinHandle;

use tempfile::TempDir;

const STOP: &str = "/stop";

/// Gives each connection the next of its answers, then closes it.
struct Server {
    address: SocketAddr,
    thread: JoinHandle<Vec<String>>,
}

impl Server {
    fn start(answers: Vec<Vec<u8>>) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let thread = std::thread::spawn(move || {
            let (mut paths, mut answers) = (Vec::new(), answers.into_iter());
            loop {
                let mut connection = listener.accept().unwrap().0;
                let path = requested(&connection);
                if path == STOP {
                    return paths;
                }
                paths.push(path);
                connection.write_all(&answers.next().unwrap_or_else(|| answer("500 None Left", b"", 0))).unwrap();
            }
        });
        Server { address, thread }
    }

    fn url(&self) -> String {
        format!("http://{}/trace", self.address)
    }

    /// Ends it; the paths that it was asked for.
    fn asked(self) -> Vec<String> {
        write!(TcpStream::connect(self.address).unwrap(), "GET {STOP} HTTP/1.1\r\n\r\n").unwrap();
        self.thread.join().unwrap()
    }
}

/// Reads a request's head.
fn requested(connection: &TcpStream) -> String {
    let lines = BufReader::new(connection).lines().map(Result::unwrap);
    let head: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
    head[0].split(' ').nth(1).unwrap().to_owned()
}

fn answer(status: &str, body: &[u8], length: usize) -> Vec<u8> {
    let head = format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n");
    [head.as_bytes(), body].concat()
}

fn whole(body: &[u8]) -> Vec<u8> {
    answer("200 OK", body, body.len())
}

/// What the server says of more than it sends.
fn cut(body: &[u8]) -> Vec<u8> {
    answer("200 OK", &body[..body.len() / 3], body.len())
}

fn trace() -> Vec<u8> {
    (0..20_000).flat_map(|number| format!("{{\"timestamp\":{number}}}\n").into_bytes()).collect()
}

/// The script with another file's checksum, in a directory of its own, and the file that it is to fetch.
struct Fetch {
    directory: TempDir,
    file: PathBuf,
}

impl Fetch {
    fn of(content: &[u8]) -> Fetch {
        let directory = tempfile::tempdir().unwrap();
        let (script, wanted) = (directory.path().join("fetch_trace.sh"), directory.path().join("wanted"));
        std::fs::write(&wanted, content).unwrap();
        let sum = Command::new("sha256sum").arg(&wanted).output().unwrap();
        let sum = String::from_utf8(sum.stdout).unwrap();
        let text = include_str!("../fetch_trace.sh");
        let pinned = text.lines().filter(|line| line.starts_with("sum=")).collect::<Vec<_>>();
        assert!(pinned.len() == 1 && pinned[0].len() == 4 + 64, "{pinned:?}");
        std::fs::write(script, text.replace(pinned[0], &format!("sum={}", &sum[..64]))).unwrap();
        let file = directory.path().join("traces/trace.jsonl");
        Fetch { directory, file }
    }

    fn run(&self, url: &str) -> Output {
        let mut command = Command::new("bash");
        command.arg(self.directory.path().join("fetch_trace.sh")).arg(&self.file);
        command.env("TRACE_URL", url).env("no_proxy", "*").output().unwrap()
    }

    /// Runs it against such a server, and checks what it was asked for and what is there in the end.
    fn check(&self, answers: Vec<Vec<u8>>, asked: &[&str], says: Result<(), &str>, content: Option<&[u8]>) {
        let server = Server::start(answers);
        let output = self.run(&server.url());
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(server.asked(), asked, "{error}");
        match says {
            Ok(()) => assert!(output.status.success(), "{error}"),
            Err(says) => assert!(output.status.code() == Some(1) && error.contains(says), "{error}"),
        }
        assert_eq!(std::fs::read(&self.file).ok().as_deref(), content, "{error}");
        let beside = |path: &Path| std::fs::read_dir(path).unwrap().count();
        assert_eq!(beside(self.file.parent().unwrap()), usize::from(content.is_some()), "a part was left behind");
    }
}

#[test]
fn a_whole_trace_is_fetched_once_wherever_it_has_moved() {
    let (trace, moved) =
        (trace(), b"HTTP/1.1 302 Found\r\nLocation: /moved\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    let fetch = Fetch::of(&trace);
    fetch.check(vec![moved.to_vec(), whole(&trace)], &["/trace", "/moved"], Ok(()), Some(&trace));
    fetch.check(vec![], &[], Ok(()), Some(&trace));
    std::fs::write(&fetch.file, "something else").unwrap();
    fetch.check(vec![whole(&trace)], &["/trace"], Ok(()), Some(&trace));
}

#[test]
fn a_cut_download_is_asked_for_again_and_given_up_in_the_end() {
    let trace = trace();
    Fetch::of(&trace).check(vec![cut(&trace), cut(&trace), whole(&trace)], &["/trace"; 3], Ok(()), Some(&trace));
    let fetch = Fetch::of(&trace);
    let mirror = Err("/trace cannot be fetched; TRACE_URL may name a mirror");
    fetch.check(vec![cut(&trace); 3], &["/trace"; 3], mirror, None);
    // What is chunked has no length that could fall short; the last chunk is missing.
    let chunk = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n".to_vec();
    fetch.check(vec![chunk, whole(&trace)], &["/trace"; 2], Ok(()), Some(&trace));
}

#[test]
fn neither_an_error_nor_another_file_takes_the_traces_place() {
    let trace = trace();
    let fetch = Fetch::of(&trace);
    let mirror = Err("/trace cannot be fetched; TRACE_URL may name a mirror");
    fetch.check(vec![answer("404 Not Found", b"nothing", 7)], &["/trace"], mirror, None);
    std::fs::write(&fetch.file, "an older one").unwrap();
    let other = Err("is not the trace that the figures were made with");
    fetch.check(vec![whole(b"{}")], &["/trace"], other, Some(b"an older one"));
    // A server in trouble is asked again, by curl itself.
    let busy = answer("503 Service Unavailable", b"", 0);
    fetch.check(vec![busy, whole(&trace)], &["/trace"; 2], Ok(()), Some(&trace));
}
