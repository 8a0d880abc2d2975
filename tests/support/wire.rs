//! A TCP line between two parties that a test can cut, or make swallow everything without a word.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Forwards `address` to a target until dropped.
pub struct Wire {
    pub address: SocketAddr,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    /// Bytes are read and thrown away, in both directions.
    swallows: AtomicBool,
    /// New connections are closed at once.
    refuses: AtomicBool,
    ends: AtomicBool,
    accepted: AtomicUsize,
    streams: Mutex<Vec<TcpStream>>,
}

impl Wire {
    pub fn to(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("bound");
        let state = Arc::new(State::default());
        let shared = state.clone();
        std::thread::spawn(move || {
            for inbound in listener.incoming() {
                if shared.ends.load(Ordering::SeqCst) {
                    return;
                }
                shared.accepted.fetch_add(1, Ordering::SeqCst);
                let Ok(inbound) = inbound else { continue };
                if shared.refuses.load(Ordering::SeqCst) {
                    continue;
                }
                let Ok(outbound) = TcpStream::connect(target) else { continue };
                for (from, to) in [(&inbound, &outbound), (&outbound, &inbound)] {
                    let (Ok(from), Ok(to)) = (from.try_clone(), to.try_clone()) else { continue };
                    let shared = shared.clone();
                    std::thread::spawn(move || pump(from, to, &shared));
                }
                shared.streams.lock().expect("no holder panics").extend([inbound, outbound]);
            }
        });
        Wire { address, state }
    }

    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Connections accepted so far, refused ones included.
    pub fn accepted(&self) -> usize {
        self.state.accepted.load(Ordering::SeqCst)
    }

    /// Closes what is open, and every new connection at once, until [`Wire::restore`].
    pub fn cut(&self) {
        self.state.refuses.store(true, Ordering::SeqCst);
        self.close();
    }

    /// Leaves connections open and lets nothing through, until [`Wire::restore`].
    pub fn swallow(&self) {
        self.state.swallows.store(true, Ordering::SeqCst);
    }

    pub fn restore(&self) {
        // What was swallowed is missing from those streams for good.
        self.close();
        self.state.swallows.store(false, Ordering::SeqCst);
        self.state.refuses.store(false, Ordering::SeqCst);
    }

    fn close(&self) {
        for stream in self.state.streams.lock().expect("no holder panics").drain(..) {
            drop(stream.shutdown(Shutdown::Both));
        }
    }
}

fn pump(mut from: TcpStream, mut to: TcpStream, state: &State) {
    let mut buffer = [0; 16 << 10];
    loop {
        match from.read(&mut buffer) {
            Ok(0) | Err(_) => break,
            Ok(_) if state.swallows.load(Ordering::SeqCst) => {}
            Ok(count) => {
                if to.write_all(&buffer[..count]).is_err() {
                    break;
                }
            }
        }
    }
    drop(to.shutdown(Shutdown::Write));
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.state.ends.store(true, Ordering::SeqCst);
        self.close();
        drop(TcpStream::connect(self.address));
    }
}
