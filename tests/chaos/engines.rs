//! An engine whose answers can be checked, and which breaks in every way that a connection can break in. A request's
//! prompt is `<words> <id>`; its answer is the id and that many numbered words, and what a decode engine would need.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

#[derive(Default)]
struct State {
    is_faulty: AtomicBool,
    is_over: AtomicBool,
    /// Nobody listens, and whoever was connected is no more.
    is_dead: AtomicBool,
    streams: Mutex<HashMap<usize, TcpStream>>,
    connections: AtomicI64,
    served: AtomicU64,
}

pub struct Engine {
    pub address: SocketAddr,
    state: Arc<State>,
}

/// How an answer goes wrong.
#[derive(Clone, Copy, Debug)]
enum Fault {
    ResetBeforeReading,
    CloseSilently,
    ResetInHead,
    Garbage,
    TwoLengths,
    Status(u16),
    Busy,
    FreezeBeforeHead,
    ShortBody,
    CutStream,
    ResetStream,
    FreezeStream,
    EmptyStream,
    ErrorEvent,
}

const FAULTS: [Fault; 16] = [
    Fault::ResetBeforeReading,
    Fault::CloseSilently,
    Fault::ResetInHead,
    Fault::Garbage,
    Fault::TwoLengths,
    Fault::Status(500),
    Fault::Status(503),
    Fault::Status(429),
    Fault::Busy,
    Fault::FreezeBeforeHead,
    Fault::ShortBody,
    Fault::CutStream,
    Fault::ResetStream,
    Fault::FreezeStream,
    Fault::EmptyStream,
    Fault::ErrorEvent,
];

/// Longer than the router's own limits in this test.
const FREEZE: Duration = Duration::from_millis(2_500);

impl Engine {
    pub fn start(seed: u64) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let address = listener.local_addr().expect("an address");
        let state = Arc::new(State::default());
        let accepting = state.clone();
        std::thread::spawn(move || accept(listener, &accepting, seed));
        Self { address, state }
    }

    pub fn set_faulty(&self, faulty: bool) {
        self.state.is_faulty.store(faulty, Ordering::SeqCst);
    }

    /// Dies as a process does, with all its connections, or comes back on the same port.
    pub fn set_dead(&self, dead: bool) {
        if self.state.is_dead.swap(dead, Ordering::SeqCst) != dead && dead {
            // Wakes the accepting thread.
            let _ = TcpStream::connect(self.address);
            for stream in self.state.streams.lock().expect("streams").values() {
                let _ = stream.shutdown(Shutdown::Both);
            }
        }
    }

    pub fn connections(&self) -> i64 {
        self.state.connections.load(Ordering::SeqCst)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.state.is_over.store(true, Ordering::SeqCst);
        // Wakes the accepting thread.
        let _ = TcpStream::connect(self.address);
    }
}

fn accept(mut listener: TcpListener, state: &Arc<State>, seed: u64) {
    let address = listener.local_addr().expect("an address");
    for number in 0_usize.. {
        let accepted = listener.accept();
        if state.is_over.load(Ordering::SeqCst) {
            return;
        }
        if state.is_dead.load(Ordering::SeqCst) {
            drop((accepted, listener));
            listener = loop {
                std::thread::sleep(Duration::from_millis(5));
                if state.is_over.load(Ordering::SeqCst) {
                    return;
                }
                // The port may be somebody's for a moment.
                match TcpListener::bind(address) {
                    Ok(bound) if !state.is_dead.load(Ordering::SeqCst) => break bound,
                    _ => {}
                }
            };
            continue;
        }
        let Ok((stream, _)) = accepted else { return };
        let kept = stream.try_clone().expect("a descriptor");
        state.streams.lock().expect("streams").insert(number, kept);
        let (state, random) = (state.clone(), fastrand::Rng::with_seed(seed ^ (number as u64) << 20));
        state.connections.fetch_add(1, Ordering::SeqCst);
        std::thread::spawn(move || {
            // An error of the connection is the router's leaving, or this engine's own fault.
            let _ = converse(stream, &state, random);
            drop(state.streams.lock().expect("streams").remove(&number));
            state.connections.fetch_sub(1, Ordering::SeqCst);
        });
    }
}

struct Request {
    target: String,
    body: Vec<u8>,
}

fn read_request(reader: &mut BufReader<TcpStream>) -> std::io::Result<Request> {
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        match line.trim_end() {
            "" => break,
            line => lines.push(line.to_owned()),
        }
    }
    let length = lines.iter().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse().ok())?
    });
    let mut body = vec![0; length.unwrap_or(0)];
    reader.read_exact(&mut body)?;
    let target = lines.first().and_then(|line| line.split(' ').nth(1)).unwrap_or_default().to_owned();
    Ok(Request { target, body })
}

fn converse(stream: TcpStream, state: &State, mut random: fastrand::Rng) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    loop {
        let early = state.is_faulty.load(Ordering::SeqCst) && random.u8(..64) == 0;
        if early {
            return break_off(&stream, Fault::ResetBeforeReading);
        }
        let request = read_request(&mut reader)?;
        if !request.target.starts_with("/v1/completions") {
            respond(&stream, "404 Not Found", "application/json", b"{}")?;
            continue;
        }
        let fault = (state.is_faulty.load(Ordering::SeqCst) && random.u8(..4) == 0)
            .then(|| FAULTS[random.usize(..FAULTS.len())]);
        state.served.fetch_add(1, Ordering::Relaxed);
        let asked: serde_json::Value = serde_json::from_slice(&request.body).expect("the router forwards whole bodies");
        let prompt = asked["prompt"].as_str().expect("a prompt");
        let (words, id) = prompt.split_once(' ').expect("<words> <id>");
        let words: usize = words.parse().expect("a number of words");
        let id = id.split(' ').next().unwrap_or_default();
        match asked["stream"].as_bool() {
            Some(true) => stream_answer(&stream, id, words, fault)?,
            _ => whole_answer(&stream, id, words, fault)?,
        }
    }
}

pub fn text(id: &str, words: usize) -> String {
    (0..words).fold(id.to_owned(), |text, number| format!("{text} w{number}"))
}

fn respond(mut stream: &TcpStream, status: &str, kind: &str, body: &[u8]) -> std::io::Result<()> {
    let head = format!("HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n\r\n", body.len());
    stream.write_all(&[head.as_bytes(), body].concat())
}

/// Faults before or instead of an answer. Ends the connection, but for those that are whole answers.
fn break_off(mut stream: &TcpStream, fault: Fault) -> std::io::Result<()> {
    let over = || Err(std::io::ErrorKind::ConnectionAborted.into());
    let socket = stream;
    let reset =
        move || rustix::net::sockopt::set_socket_linger(socket, Some(Duration::ZERO)).map_err(std::io::Error::from);
    match fault {
        Fault::Status(status) => {
            return respond(
                stream,
                &format!("{status} Trouble"),
                "application/json",
                b"{\"error\":{\"message\":\"trouble\"}}",
            );
        }
        Fault::Busy => {
            return respond(
                stream,
                "503 Busy\r\nRetry-After: 1",
                "application/json",
                b"{\"error\":{\"message\":\"busy\"}}",
            );
        }
        Fault::ResetInHead => {
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Le")?;
            reset()?;
        }
        Fault::Garbage => stream.write_all(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n")?,
        Fault::TwoLengths => {
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef")?
        }
        Fault::FreezeBeforeHead => std::thread::sleep(FREEZE),
        Fault::ResetBeforeReading => reset()?,
        _ => {}
    }
    over()
}

fn whole_answer(mut stream: &TcpStream, id: &str, words: usize, fault: Option<Fault>) -> std::io::Result<()> {
    let handed_over = serde_json::json!({"remote_engine_id": "e", "remote_block_ids": [1], "remote_host": "127.0.0.1"});
    let usage = serde_json::json!({"prompt_tokens": 3, "completion_tokens": words});
    let body =
        serde_json::json!({"text": text(id, words), "usage": usage, "kv_transfer_params": handed_over}).to_string();
    match fault {
        None | Some(Fault::EmptyStream | Fault::ErrorEvent) => {
            respond(stream, "200 OK", "application/json", body.as_bytes())
        }
        Some(Fault::ShortBody | Fault::CutStream | Fault::ResetStream | Fault::FreezeStream) => {
            let head =
                format!("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n", body.len());
            stream.write_all(head.as_bytes())?;
            stream.write_all(&body.as_bytes()[..body.len() / 2])?;
            Err(std::io::ErrorKind::ConnectionAborted.into())
        }
        Some(fault) => break_off(stream, fault),
    }
}

fn stream_answer(mut stream: &TcpStream, id: &str, words: usize, fault: Option<Fault>) -> std::io::Result<()> {
    let before_the_head = !matches!(
        fault,
        None | Some(
            Fault::ShortBody
                | Fault::CutStream
                | Fault::ResetStream
                | Fault::FreezeStream
                | Fault::EmptyStream
                | Fault::ErrorEvent
        )
    );
    if let (Some(fault), true) = (fault, before_the_head) {
        return break_off(stream, fault);
    }
    stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")?;
    let mut chunk = |payload: String| stream.write_all(format!("{:x}\r\n{payload}\r\n", payload.len()).as_bytes());
    if !matches!(fault, Some(Fault::EmptyStream)) {
        chunk(format!("data: {id}\n\n"))?;
        for number in 0..words {
            if number == words / 2 {
                match fault {
                    Some(Fault::ErrorEvent) => {
                        chunk("data: {\"error\":{\"message\":\"engine died\",\"code\":500}}\n\n".to_owned())?;
                        break;
                    }
                    Some(Fault::FreezeStream) => std::thread::sleep(FREEZE),
                    Some(Fault::CutStream | Fault::ShortBody) => {
                        return Err(std::io::ErrorKind::ConnectionAborted.into());
                    }
                    Some(Fault::ResetStream) => return break_off(stream, Fault::ResetBeforeReading),
                    _ => {}
                }
            }
            chunk(format!("data: w{number}\n\n"))?;
        }
        if fault.is_none() {
            chunk("data: [DONE]\n\n".to_owned())?;
        }
    }
    stream.write_all(b"0\r\n\r\n")
}
