//! Scripted workers: a real TCP server whose answers a test writes byte by byte, for the cases that a
//! well-behaved engine never shows.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use rustix::net::{self, AddressFamily, SocketType};

/// A request as it arrived.
#[derive(Clone, Debug)]
pub struct Seen {
    pub method: String,
    pub target: String,
    /// Raw header lines.
    pub headers: Vec<String>,
    pub body: Vec<u8>,
}

impl Seen {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find_map(|line| {
            let (known, value) = line.split_once(':')?;
            known.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }
}

/// One connection of the router to the worker, in the hands of the script.
pub struct Conversation<'a> {
    pub stream: &'a mut TcpStream,
    worker: &'a State,
}

struct State {
    seen: Mutex<Vec<Seen>>,
    closed: Mutex<Vec<Instant>>,
    stopped: AtomicBool,
    /// The next request is left unread.
    deaf: AtomicBool,
}

/// A running scripted worker; stopped when dropped.
pub struct Worker {
    pub address: SocketAddr,
    state: Arc<State>,
}

/// Whether the connection goes on after an answer.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Then {
    KeepAlive,
    Close,
}

/// Starts a worker that answers each request by `script`, on a thread per connection.
pub fn worker(script: impl Fn(&Seen, &mut Conversation<'_>) -> Then + Send + Sync + 'static) -> Worker {
    worker_at("127.0.0.1:0", script)
}

pub fn worker_at(bind: &str, script: impl Fn(&Seen, &mut Conversation<'_>) -> Then + Send + Sync + 'static) -> Worker {
    let listener = TcpListener::bind(bind).expect("bind");
    let address = listener.local_addr().expect("an address");
    let state = Arc::new(State {
        seen: Mutex::default(),
        closed: Mutex::default(),
        stopped: AtomicBool::new(false),
        deaf: AtomicBool::new(false),
    });
    let (accepting, script) = (state.clone(), Arc::new(script));
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            if accepting.stopped.load(Ordering::SeqCst) {
                return;
            }
            let (state, script) = (accepting.clone(), script.clone());
            std::thread::spawn(move || converse(stream, &state, &*script));
        }
    });
    Worker { address, state }
}

/// A worker that gives every request the same JSON answer.
pub fn json_worker(body: &'static str) -> Worker {
    worker(move |_, conversation| conversation.json(200, body))
}

/// An address on which nothing listens: its socket stays bound, so that nobody is given the port while the test runs.
/// Only who asks to share the port, as the router does with its own, can listen there.
pub fn dead_address() -> SocketAddr {
    static BOUND: Mutex<Vec<OwnedFd>> = Mutex::new(Vec::new());
    let bound = || {
        let socket = net::socket(AddressFamily::INET, SocketType::STREAM, None)?;
        net::sockopt::set_socket_reuseport(&socket, true)?;
        net::bind(&socket, &SocketAddr::from(([127, 0, 0, 1], 0)))?;
        let address = SocketAddr::try_from(net::getsockname(&socket)?)?;
        BOUND.lock().expect("the lock").push(socket);
        rustix::io::Result::Ok(address)
    };
    bound().expect("an address")
}

fn converse(mut stream: TcpStream, state: &State, script: &dyn Fn(&Seen, &mut Conversation<'_>) -> Then) {
    let mut reader = BufReader::new(stream.try_clone().expect("clone"));
    let mut first = [0; 4];
    if stream.peek(&mut first).is_ok() && first == *b"POST" && state.deaf.swap(false, Ordering::SeqCst) {
        while !state.stopped.load(Ordering::SeqCst) {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        return;
    }
    while let Some(seen) = read_request(&mut reader) {
        if is_question(&seen) {
            let mut conversation = Conversation { stream: &mut stream, worker: state };
            match seen.target.as_str() {
                "/v1/models" => conversation.json(200, r#"{"object":"list","data":[{"id":"m","object":"model"}]}"#),
                _ => conversation.json(404, "{}"),
            };
            continue;
        }
        state.seen.lock().expect("seen").push(seen.clone());
        if script(&seen, &mut Conversation { stream: &mut stream, worker: state }) == Then::Close {
            return;
        }
    }
}

/// What the router's discovery asks an engine that was registered without all its facts; answered as an engine without
/// KV events does, and not counted among the requests of the test.
fn is_question(seen: &Seen) -> bool {
    let info = ["/v1/models", "/kv_event_sources", "/server_info", "/get_server_info", "/v1/server_info", "/metrics"];
    let tokenize = ["/tokenize", "/v1/tokenize"];
    (seen.method == "GET" && info.contains(&seen.target.as_str()))
        || (seen.method == "POST" && tokenize.contains(&seen.target.as_str()))
}

fn read_request(reader: &mut BufReader<TcpStream>) -> Option<Seen> {
    let line = read_line(reader)?;
    let mut words = line.split(' ');
    let (method, target) = (words.next()?.to_owned(), words.next()?.to_owned());
    let mut headers = Vec::new();
    loop {
        match read_line(reader)? {
            line if line.is_empty() => break,
            line => headers.push(line),
        }
    }
    let mut seen = Seen { method, target, headers, body: Vec::new() };
    let length = seen.header("content-length").map_or(0, |length| length.parse().expect("a length"));
    seen.body = vec![0; length];
    reader.read_exact(&mut seen.body).ok()?;
    Some(seen)
}

fn read_line(reader: &mut BufReader<TcpStream>) -> Option<String> {
    let mut line = String::new();
    match reader.read_line(&mut line) {
        Ok(0) | Err(_) => None,
        Ok(_) => Some(line.trim_end_matches(['\r', '\n']).to_owned()),
    }
}

impl Conversation<'_> {
    /// Writes bytes; a router that has left is not an error of the script.
    pub fn write(&mut self, bytes: &[u8]) -> bool {
        self.stream.write_all(bytes).is_ok()
    }

    pub fn json(&mut self, status: u16, body: &str) -> Then {
        let head = format!(
            "HTTP/1.1 {status} Status\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        self.write(&[head.as_bytes(), body.as_bytes()].concat());
        Then::KeepAlive
    }

    pub fn sse_head(&mut self) -> bool {
        self.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
    }

    pub fn chunk(&mut self, payload: &str) -> bool {
        self.write(format!("{:x}\r\n{payload}\r\n", payload.len()).as_bytes())
    }

    pub fn last_chunk(&mut self) -> Then {
        self.write(b"0\r\n\r\n");
        Then::KeepAlive
    }

    /// Ends the connection with RST instead of FIN.
    pub fn reset(&mut self) -> Then {
        rustix::net::sockopt::set_socket_linger(&*self.stream, Some(std::time::Duration::ZERO)).expect("linger");
        Then::Close
    }

    /// Waits until the router sends no more, which may still read.
    pub fn wait_for_end_of_requests(&mut self) {
        let mut byte = [0];
        while matches!(self.stream.read(&mut byte), Ok(1..)) {}
    }

    /// Waits until the router closes the connection, and notes when.
    pub fn wait_for_close(&mut self) -> Then {
        let mut byte = [0];
        while matches!(self.stream.read(&mut byte), Ok(1..)) {}
        self.worker.closed.lock().expect("closed").push(Instant::now());
        Then::Close
    }
}

impl Worker {
    pub fn seen(&self) -> Vec<Seen> {
        self.state.seen.lock().expect("seen").clone()
    }

    pub fn requests(&self) -> usize {
        self.state.seen.lock().expect("seen").len()
    }

    /// Leaves the next new connection's request in the socket for ever, without reading any of it. One that is larger
    /// than the socket's buffers is then never delivered.
    pub fn be_deaf_once(&self) {
        self.state.deaf.store(true, Ordering::SeqCst);
    }

    pub fn is_deaf(&self) -> bool {
        self.state.deaf.load(Ordering::SeqCst)
    }

    /// When [`Conversation::wait_for_close`] saw the router close, in order.
    pub fn closed(&self) -> Vec<Instant> {
        self.state.closed.lock().expect("closed").clone()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.state.stopped.store(true, Ordering::SeqCst);
        // Wakes the accepting thread so that it sees the flag.
        let _ = TcpStream::connect(self.address);
    }
}
