//! What the engine's tests stand on: a service with one route per behaviour, scripted upstreams on std threads, a raw
//! client. Everything binds port 0 on the loopback, waits on conditions with a deadline, and is stopped by drop.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderName, HeaderValue, StatusCode};
use infera_shards::{
    BodyObserver, BodyRewriter, DriverChoice, Engine, EngineConfig, Rejection, Relay, RelayOutcome, Request, Responder,
    Response, SendProgress, Service, ShardContext, ShardStats, TlsName, UpstreamRequest,
};

pub const DRIVERS: [DriverChoice; 2] = [DriverChoice::Auto, DriverChoice::Epoll];
/// Long enough for a loaded machine; no test waits for it to pass.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Waits until `condition` holds.
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "never happened: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// What the test service saw, shared by all shards.
#[derive(Default)]
pub struct Seen {
    pub calls: AtomicU64,
    /// Calls whose future was dropped before its end.
    pub dropped: AtomicU64,
    pub relayed: Mutex<Vec<u8>>,
    pub outcomes: Mutex<Vec<String>>,
}

pub struct TestService {
    context: ShardContext,
    upstream: SocketAddr,
    seen: Arc<Seen>,
}

struct DropWatch(Arc<Seen>, bool);

impl Drop for DropWatch {
    fn drop(&mut self) {
        if !self.1 {
            self.0.dropped.fetch_add(1, Ordering::SeqCst);
        }
    }
}

struct Record<'a> {
    seen: &'a Seen,
    is_whole: bool,
}

impl BodyObserver for Record<'_> {
    fn data(&mut self, payload: &[u8]) {
        self.seen.relayed.lock().expect("not poisoned").extend_from_slice(payload);
    }

    fn is_whole(&self) -> bool {
        self.is_whole
    }
}

/// Notes when it is dropped whether its request had been delivered.
struct Noted<'a>(&'a Seen, SendProgress);

impl Drop for Noted<'_> {
    fn drop(&mut self) {
        let text = format!("delivered: {}", self.1.is_delivered());
        self.0.outcomes.lock().expect("not poisoned").push(text);
    }
}

pub fn plain(status: StatusCode, body: impl Into<Vec<u8>>) -> Response {
    Response { status, headers: Vec::new(), body: Bytes::from(body.into()) }
}

/// Repeats whole lines in capitals; what is left at the end is said with a mark, and only a whole line is a whole body.
#[derive(Default)]
struct Shout(Vec<u8>);

impl BodyRewriter for Shout {
    fn rewrite(&mut self, payload: &[u8], out: &mut Vec<u8>) {
        self.0.extend_from_slice(payload);
        if let Some(end) = self.0.iter().rposition(|byte| *byte == b'\n') {
            out.extend(self.0.drain(..=end).map(|byte| byte.to_ascii_uppercase()));
        }
    }

    fn end(&mut self, out: &mut Vec<u8>) -> bool {
        out.extend_from_slice(&self.0);
        out.push(b'!');
        self.0.is_empty()
    }
}

impl Service for TestService {
    async fn call(&self, request: Request, responder: &mut Responder) {
        self.seen.calls.fetch_add(1, Ordering::SeqCst);
        let mut watch = DropWatch(self.seen.clone(), false);
        match request.target.as_str() {
            "/echo" => drop(responder.send(Response { body: request.body, ..plain(StatusCode::OK, "") }).await),
            "/hello" => drop(responder.send(plain(StatusCode::OK, "hello")).await),
            "/shard" => drop(responder.send(plain(StatusCode::OK, self.context.shard.to_string())).await),
            "/empty" => drop(responder.send(plain(StatusCode::NO_CONTENT, "not sent")).await),
            "/large" => drop(responder.send(plain(StatusCode::OK, vec![b'x'; 2 << 20])).await),
            "/nothing" => {}
            "/panic" => panic!("on purpose"),
            "/panic-after" => {
                let _ = responder.send(plain(StatusCode::OK, "sent")).await;
                panic!("on purpose");
            }
            "/forever" => std::future::pending().await,
            "/sleep" => {
                infera_shards::time::sleep(Duration::from_millis(300)).await;
                let _ = responder.send(plain(StatusCode::OK, "slept")).await;
            }
            "/ticket" => self.ticket(responder, false).await,
            "/ticket-lost" => self.ticket(responder, true).await,
            "/spawn-panic" => {
                infera_shards::spawn_local(async { panic!("on purpose, in a task") });
                let _ = responder.send(plain(StatusCode::OK, "spawned")).await;
            }
            // The shard does nothing else meanwhile.
            "/block" => {
                std::thread::sleep(Duration::from_millis(300));
                let _ = responder.send(plain(StatusCode::OK, "blocked")).await;
            }
            "/collect" => self.collect(&request, responder).await,
            "/progress" => self.progress(&request, responder).await,
            _ => self.proxy(&request, responder).await,
        }
        watch.1 = true;
    }

    fn reject(&self, rejection: &Rejection) -> Response {
        let mut response = plain(rejection.status, rejection.reason);
        response.headers.push((HeaderName::from_static("x-rejected"), HeaderValue::from_static("engine")));
        response
    }
}

/// The upstream is spoken to over TLS when the request says which name it must have.
fn tls_name(request: &Request) -> Option<TlsName> {
    let name = std::str::from_utf8(request.head.get("x-tls-name")?).expect("a textual name");
    Some(TlsName::parse(name).expect("a name that a certificate can be for"))
}

impl TestService {
    /// Fetches a result from another thread.
    async fn ticket(&self, responder: &mut Responder, lost: bool) {
        let (completion, pending) = self.context.mailbox.ticket::<String>();
        let worker = std::thread::spawn(move || {
            if !lost {
                completion.complete(String::from("from afar"))
            }
        });
        let result = pending.await.unwrap_or_else(|| String::from("lost"));
        worker.join().expect("the worker ends");
        let _ = responder.send(plain(StatusCode::OK, result)).await;
    }

    fn outgoing<'a>(
        &'a self,
        request: &'a Request,
        tls: &'a Option<TlsName>,
        body: &'a [Bytes],
    ) -> UpstreamRequest<'a> {
        UpstreamRequest {
            address: self.upstream,
            tls: tls.as_ref(),
            authority: "worker.test:1",
            method: &request.method,
            path_prefix: "",
            target: &request.target,
            headers: Some(&request.head),
            remove: &[],
            set: &[],
            body,
        }
    }

    async fn collect(&self, request: &Request, responder: &mut Responder) {
        let (tls, body) = (tls_name(request), [request.body.clone()]);
        let collected = match self.context.upstream.send(&self.outgoing(request, &tls, &body)).await {
            Ok(answer) => answer.collect(4 << 20).await,
            Err(error) => Err(error),
        };
        let response = match collected {
            Ok(body) => Response { body, ..plain(StatusCode::OK, "") },
            Err(error) => plain(StatusCode::BAD_GATEWAY, format!("{}: {error}", error.phase())),
        };
        let _ = responder.send(response).await;
    }

    async fn progress(&self, request: &Request, responder: &mut Responder) {
        let noted = Noted(&self.seen, SendProgress::default());
        let body = [request.body.clone()];
        let sent = self.context.upstream.send_watched(&self.outgoing(request, &None, &body), Some(&noted.1)).await;
        let status = if sent.is_ok() { StatusCode::OK } else { StatusCode::BAD_GATEWAY };
        let _ = responder.send(plain(status, "")).await;
    }

    async fn proxy(&self, request: &Request, responder: &mut Responder) {
        // Split in two, so that bodies in segments are covered throughout.
        let body = [request.body.slice(..request.body.len() / 2), request.body.slice(request.body.len() / 2..)];
        let tls = tls_name(request);
        let outcome = match self.context.upstream.send(&self.outgoing(request, &tls, &body)).await {
            Ok(answer) => {
                let relay = Relay {
                    set: &[(HeaderName::from_static("x-relayed"), HeaderValue::from_static("yes"))],
                    remove: &[HeaderName::from_static("x-secret")],
                    observer: &mut Record { seen: &self.seen, is_whole: request.target != "/unfinished" },
                    cut_notice: (!request.target.starts_with("/quiet")).then(|| Bytes::from_static(b"data: cut\n\n")),
                };
                let outcome = match request.target.starts_with("/shout") {
                    true => responder.relay_rewritten(answer, relay, &mut Shout::default()).await,
                    false => responder.relay(answer, relay).await,
                };
                match outcome {
                    RelayOutcome::Complete => String::from("complete"),
                    RelayOutcome::ClientGone => String::from("client gone"),
                    RelayOutcome::UpstreamFailed(error) if !responder.started() => {
                        let _ = responder.send(plain(StatusCode::BAD_GATEWAY, error.to_string())).await;
                        format!("{}: {error}", error.phase())
                    }
                    RelayOutcome::UpstreamFailed(error) => format!("{}: {error}", error.phase()),
                }
            }
            Err(error) => {
                let text = format!("{}: {error}", error.phase());
                let _ = responder.send(plain(StatusCode::BAD_GATEWAY, text.clone())).await;
                text
            }
        };
        self.seen.outcomes.lock().expect("not poisoned").push(outcome);
    }
}

/// A running engine with the test service.
pub struct TestEngine {
    engine: Option<Engine>,
    pub seen: Arc<Seen>,
}

impl TestEngine {
    pub fn start(driver: DriverChoice, upstream: SocketAddr) -> TestEngine {
        TestEngine::configured(driver, upstream, |_| {})
    }

    pub fn configured(
        driver: DriverChoice,
        upstream: SocketAddr,
        change: impl FnOnce(&mut EngineConfig),
    ) -> TestEngine {
        let mut config = EngineConfig::new(SocketAddr::from(([127, 0, 0, 1], 0)));
        config.driver = driver;
        change(&mut config);
        let seen = Arc::new(Seen::default());
        let shared = seen.clone();
        let engine = Engine::start(config, move |context| TestService { context, upstream, seen: shared.clone() });
        TestEngine { engine: Some(engine.expect("the engine starts")), seen }
    }

    pub fn engine(&self) -> &Engine {
        self.engine.as_ref().expect("still running")
    }

    pub fn address(&self) -> SocketAddr {
        self.engine().local_addr()
    }

    pub fn connect(&self) -> Client {
        Client::connect(self.address())
    }

    /// Sum over all shards.
    pub fn stats(&self) -> ShardStats {
        self.engine().stats().into_iter().fold(ShardStats::default(), |sum, one| ShardStats {
            connections_accepted: sum.connections_accepted + one.connections_accepted,
            connections_open: sum.connections_open + one.connections_open,
            requests: sum.requests + one.requests,
            requests_active: sum.requests_active + one.requests_active,
            upstream_connects: sum.upstream_connects + one.upstream_connects,
            upstream_reuses: sum.upstream_reuses + one.upstream_reuses,
            upstream_idle: sum.upstream_idle + one.upstream_idle,
            bytes_to_client: sum.bytes_to_client + one.bytes_to_client,
            client_aborts: sum.client_aborts + one.client_aborts,
            rejections: sum.rejections + one.rejections,
            tls_failures: sum.tls_failures + one.tls_failures,
            panics: sum.panics + one.panics,
            sweeps: sum.sweeps + one.sweeps,
        })
    }

    pub fn stop(mut self) {
        self.engine.take().expect("still running").stop();
    }
}

/// An answer as a client sees it.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub head: String,
    /// De-chunked.
    pub body: Vec<u8>,
    /// Body as on the wire.
    pub raw: Vec<u8>,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        let of_name = |line: &&str| line.split_once(':').is_some_and(|(found, _)| found.eq_ignore_ascii_case(name));
        Some(self.head.lines().find(of_name)?.split_once(':')?.1.trim())
    }

    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("text")
    }
}

/// A client that speaks bytes, over TCP or what was put on it.
pub struct Client<S = TcpStream> {
    pub stream: S,
    pending: Vec<u8>,
}

impl Client {
    pub fn connect(address: SocketAddr) -> Client {
        let stream = TcpStream::connect(address).expect("connects");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        stream.set_nodelay(true).expect("no delay");
        Client { stream, pending: Vec::new() }
    }

    /// Puts something on the connection.
    pub fn wrapped<S>(self, wrap: impl FnOnce(TcpStream) -> S) -> Client<S> {
        Client { stream: wrap(self.stream), pending: Vec::new() }
    }

    /// Closes with RST.
    pub fn reset(self) {
        let zero = rustix::net::sockopt::set_socket_linger(&self.stream, Some(Duration::ZERO));
        zero.expect("linger");
    }
}

impl<S: Read + Write> Client<S> {
    pub fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.stream.write_all(bytes.as_ref()).expect("sends");
    }

    /// Sends what the other side takes; it may close in between.
    pub fn send_lossy(&mut self, bytes: &[u8]) {
        let _ = self.stream.write_all(bytes);
    }

    pub fn get(&mut self, target: &str) -> Answer {
        self.send(format!("GET {target} HTTP/1.1\r\nHost: t\r\n\r\n"));
        self.answer()
    }

    pub fn post(&mut self, target: &str, body: &[u8]) -> Answer {
        self.send(format!("POST {target} HTTP/1.1\r\nHost: t\r\nContent-Length: {}\r\n\r\n", body.len()));
        self.send(body);
        self.answer()
    }

    /// Reads more; `false` at the end.
    fn fill(&mut self) -> bool {
        let mut piece = [0_u8; 65536];
        match self.stream.read(&mut piece) {
            Ok(0) => false,
            Ok(read) => {
                self.pending.extend_from_slice(&piece[..read]);
                true
            }
            Err(error) if error.kind() == ErrorKind::ConnectionReset => false,
            Err(error) if error.kind() == ErrorKind::Interrupted => true,
            Err(error) => {
                panic!("no answer within the deadline: {error}; so far {:?}", String::from_utf8_lossy(&self.pending))
            }
        }
    }

    fn take(&mut self, length: usize) -> Vec<u8> {
        while self.pending.len() < length {
            assert!(self.fill(), "cut: {:?}", String::from_utf8_lossy(&self.pending));
        }
        let rest = self.pending.split_off(length);
        std::mem::replace(&mut self.pending, rest)
    }

    pub fn read_until(&mut self, end: &[u8]) -> Vec<u8> {
        loop {
            if let Some(at) = self.pending.windows(end.len()).position(|window| window == end) {
                return self.take(at + end.len());
            }
            assert!(
                self.fill(),
                "cut before {:?}: {:?}",
                String::from_utf8_lossy(end),
                String::from_utf8_lossy(&self.pending)
            );
        }
    }

    pub fn head(&mut self) -> Answer {
        let head = String::from_utf8(self.read_until(b"\r\n\r\n")).expect("a textual head");
        let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("a status");
        Answer { status, head, body: Vec::new(), raw: Vec::new() }
    }

    pub fn answer(&mut self) -> Answer {
        let mut answer = self.head();
        if answer.header("transfer-encoding") == Some("chunked") {
            loop {
                let line = self.read_until(b"\r\n");
                answer.raw.extend_from_slice(&line);
                let text = std::str::from_utf8(&line[..line.len() - 2]).expect("a size line");
                let size = usize::from_str_radix(text.split(';').next().unwrap_or(text), 16).expect("a size");
                let chunk = self.take(size + 2);
                answer.raw.extend_from_slice(&chunk);
                answer.body.extend_from_slice(&chunk[..size]);
                if size == 0 {
                    return answer;
                }
            }
        }
        if let Some(length) = answer.header("content-length") {
            answer.body = self.take(length.parse().expect("a length"));
        }
        answer
    }

    /// Everything until the other side closes.
    pub fn rest(&mut self) -> Vec<u8> {
        while self.fill() {}
        std::mem::take(&mut self.pending)
    }

    /// The same, and whether the end was a FIN or an error.
    pub fn rest_and_end(&mut self) -> (Vec<u8>, std::io::Result<()>) {
        let end = self.stream.read_to_end(&mut self.pending);
        (std::mem::take(&mut self.pending), end.map(|_| ()))
    }
}

/// A request as an upstream saw it.
#[derive(Clone, Debug)]
pub struct Arrived {
    pub head: String,
    pub body: Vec<u8>,
}

/// One connection at a scripted upstream.
pub struct Served<S = TcpStream> {
    pub stream: S,
    /// Number of the connection, from 0.
    pub number: usize,
    pending: Vec<u8>,
    closed: Arc<AtomicUsize>,
}

impl Served {
    /// Puts something on the connection.
    pub fn wrapped<S>(self, wrap: impl FnOnce(TcpStream) -> S) -> Served<S> {
        let Served { stream, number, pending, closed } = self;
        Served { stream: wrap(stream), number, pending, closed }
    }

    pub fn reset(self) {
        let zero = rustix::net::sockopt::set_socket_linger(&self.stream, Some(Duration::ZERO));
        zero.expect("linger");
    }
}

impl<S: Read + Write> Served<S> {
    /// The next request; `None` when the engine has closed.
    pub fn request(&mut self) -> Option<Arrived> {
        let mut piece = [0_u8; 65536];
        loop {
            if let Some(end) = self.pending.windows(4).position(|window| window == b"\r\n\r\n") {
                let head = String::from_utf8_lossy(&self.pending[..end + 4]).into_owned();
                let length =
                    head.lines().find_map(|line| line.strip_prefix("Content-Length: ")?.parse().ok()).unwrap_or(0);
                if self.pending.len() >= end + 4 + length {
                    let rest = self.pending.split_off(end + 4 + length);
                    let message = std::mem::replace(&mut self.pending, rest);
                    return Some(Arrived { head, body: message[end + 4..].to_vec() });
                }
            }
            match self.stream.read(&mut piece) {
                Ok(0) | Err(_) => return None,
                Ok(read) => self.pending.extend_from_slice(&piece[..read]),
            }
        }
    }

    pub fn send(&mut self, bytes: impl AsRef<[u8]>) {
        let _ = self.stream.write_all(bytes.as_ref());
    }

    pub fn send_ok(&mut self, body: &[u8]) {
        let mut message = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", body.len()).into_bytes();
        message.extend_from_slice(body);
        self.send(message);
    }

    /// Waits for the engine to close and counts it.
    pub fn until_closed(mut self) {
        while self.request().is_some() {}
        self.closed.fetch_add(1, Ordering::SeqCst);
    }
}

/// An upstream that runs `script` on a thread per connection. Its drop waits for the scripts, so the engine must be
/// dropped before it: declare it first.
pub struct Upstream {
    pub address: SocketAddr,
    pub connections: Arc<AtomicUsize>,
    /// Connections whose script has seen the engine close.
    pub closed: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
    acceptor: Option<JoinHandle<()>>,
}

impl Upstream {
    pub fn start(script: impl Fn(Served) + Send + Sync + 'static) -> Upstream {
        let listener = TcpListener::bind("127.0.0.1:0").expect("binds");
        let address = listener.local_addr().expect("an address");
        let connections = Arc::new(AtomicUsize::new(0));
        let closed = Arc::new(AtomicUsize::new(0));
        let stop = Arc::new(AtomicBool::new(false));
        let (count, gone, stopping) = (connections.clone(), closed.clone(), stop.clone());
        let acceptor = std::thread::spawn(move || {
            let script = Arc::new(script);
            let mut threads = Vec::new();
            for stream in listener.incoming() {
                if stopping.load(Ordering::SeqCst) {
                    break;
                }
                let stream = stream.expect("accepts");
                stream.set_nodelay(true).expect("no delay");
                stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
                let number = count.fetch_add(1, Ordering::SeqCst);
                let served = Served { stream, number, pending: Vec::new(), closed: gone.clone() };
                let script = script.clone();
                threads.push(std::thread::spawn(move || script(served)));
            }
            for thread in threads {
                let _ = thread.join();
            }
        });
        Upstream { address, connections, closed, stop, acceptor: Some(acceptor) }
    }

    /// Answers every request with 200 and its body.
    pub fn echo() -> Upstream {
        Upstream::start(|mut served| {
            while let Some(request) = served.request() {
                served.send_ok(&request.body);
            }
        })
    }

    pub fn connection_count(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.address);
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
    }
}

/// An address where nobody listens. It stays bound: a port given back could be handed to an engine under test, which
/// would then have itself as its upstream.
pub fn nowhere() -> SocketAddr {
    static BOUND: OnceLock<(OwnedFd, SocketAddr)> = OnceLock::new();
    let bound = BOUND.get_or_init(|| {
        let socket = rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::STREAM, None);
        let socket = socket.expect("a socket");
        rustix::net::bind(&socket, &SocketAddr::from(([127, 0, 0, 1], 0))).expect("binds");
        let address = rustix::net::getsockname(&socket).expect("an address");
        (socket, address.try_into().expect("an IPv4 address"))
    });
    bound.1
}

/// Descriptors of this process that point to sockets, rings or event descriptors.
pub fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("procfs").count()
}

/// CPU time of this process.
pub fn cpu_time() -> Duration {
    let usage = std::fs::read_to_string("/proc/self/stat").expect("procfs");
    let after_name = usage.rsplit(") ").next().expect("a process line");
    let fields: Vec<u64> = after_name.split(' ').filter_map(|field| field.parse().ok()).collect();
    // utime and stime are the 12th and 13th after the name; the state letter is not a number.
    Duration::from_millis((fields[10] + fields[11]) * 10)
}
